"""The chain of `experiments.chain`, under the name by which the tests of this directory import it."""

from experiments.chain import ACTIVATION_BYTES, BATCH, CHANNELS, SIZE, arguments, block, init, loss

__all__ = ["ACTIVATION_BYTES", "BATCH", "CHANNELS", "SIZE", "arguments", "block", "init", "loss"]
