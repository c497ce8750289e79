"""Do the two frameworks compute the same? Losses and gradients of every strategy, and fifty steps of training.

    python -m experiments.agreement
    python -m experiments.agreement --models net --policies everything nothing --steps 0

One batch of noise, the same weights, float32, dropout off (masks differ between frameworks). JAX computes each model once,
without a policy: that policies change no bit there is what the tests of `jaxremat` show. PyTorch computes it under every
policy. Standard output gets a line a figure and, last, one JSON object. The exit status is 0; 1 if a figure is beyond its
tolerance; 2 with one message for bad input.

The tolerances are relative: 1e-5 for losses, 1e-4 for the norm of each gradient's difference (with an absolute floor for
gradients that are zero in exact arithmetic, such as those of attention's key biases), and for losses while training 1e-9 in
float64 (1e-6 for `resnet18`, whose fifty steps amplify rounding 1e8 times) and 1e-3 in float32. Where a value before a ReLU is
so near to zero that rounding decides its sign, a gradient jumps by far more than rounding; such a batch says nothing about
either framework (PyTorch's own float32 and float64 differ by 1e-3 there), so the batches here are ones where none is. Training
meets such values at every step: `experiments.agreement_training` says what follows from it, and why ResNet-18's rate is low
here. At another rate, say

    python -m experiments.agreement --models resnet18 --policies everything --learning-rate 0.05

the float32 figure is beyond its tolerance, and the float64 one is not.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args

import jax
import numpy as np
import tyro

import jaxremat
from experiments.agreement_training import Training, largest_difference, train_jax, train_torch, without_dropout
from experiments.cifar_torch import require_torch
from experiments.command import exit_status
from experiments.errors import ExperimentError
from experiments.models import ModelName
from experiments.training import make_init, make_loss, make_optimizer

LOSS_TOLERANCE, GRADIENT_TOLERANCE, FLOAT32_TOLERANCE = 1e-5, 1e-4, 1e-3
FLOAT64_TOLERANCES: dict[ModelName, float] = {"net": 1e-9, "resnet18": 1e-6}  # the models that are trained
GRADIENT_FLOOR = 1e-7
FLOAT64_RATE = 0.05  # the peak of the schedule: that of `experiments.cifar`
FLOAT32_RATES: dict[ModelName, float] = {"net": 0.05, "resnet18": 1e-5}  # see above
POLICIES = (
    "everything", "nothing", "dots", "dots_no_batch", "names:*_out", "ops:conv=store,*=recompute", "segments:sqrt",
)  # fmt: skip
# Images and seed of the noise: see above.
NOISE: dict[str, tuple[int, int]] = {"net": (8, 0), "resnet18": (2, 4), "wrn16_4": (4, 2), "vit": (4, 0)}


@dataclass(frozen=True)
class Reference:
    """What JAX computes for a model without a policy: weights, batch, loss, gradients and new statistics, as numpy arrays."""

    model: Any
    params: Any
    batch_stats: Any
    images: np.ndarray
    labels: np.ndarray
    loss: float
    gradients: Any
    new_batch_stats: Any


@dataclass(frozen=True)
class Figure:
    """One difference and what it may be."""

    model: str
    what: str
    difference: float
    tolerance: float

    @property
    def good(self) -> bool:
        """Whether the difference is tolerable; NaN is not."""
        return self.difference <= self.tolerance


def reference(model: ModelName) -> Reference:
    """Returns JAX's loss and gradients of a model for a batch of noise."""
    network = without_dropout(model)
    batch, seed = NOISE[model]
    random = np.random.default_rng(seed)
    images = random.normal(size=(batch, 32, 32, 3)).astype(np.float32)
    labels = random.integers(0, 10, batch).astype(np.int32)
    # Each program runs once: optimizing it would take longer than running it.
    quickly = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    state = jax.jit(make_init(network, make_optimizer(1.0, 2), 0), compiler_options=quickly)()
    gradient = jax.jit(jax.value_and_grad(make_loss(network), has_aux=True), compiler_options=quickly)
    (loss, stats), gradients = gradient(state.params, state.batch_stats, images, labels, jax.random.key(0))
    params, batch_stats, stats, gradients = jax.device_get((state.params, state.batch_stats, stats, gradients))
    return Reference(model, params, batch_stats, images, labels, float(loss), gradients, stats)


def compare(expected: Reference, policy: str) -> list[Figure]:
    """Returns how far PyTorch under a policy is from JAX: loss, worst gradient, BatchNorm's statistics after one step.

    Raises:
        PolicyError: PyTorch cannot express the policy, or it does not fit the model.
    """
    import torch

    from experiments import torch_layers, torch_models, torch_policies, torch_weights

    network = torch_models.build(expected.model, dropout=0.0)
    torch_weights.load_flax(network, expected.params, expected.batch_stats)
    images = torch.from_numpy(expected.images.transpose(0, 3, 1, 2).copy())
    labels = torch.from_numpy(expected.labels.astype(np.int64))
    applied = torch_policies.apply(network, jaxremat.parse(policy))
    loss = torch.nn.functional.cross_entropy(applied.forward(images), labels)
    loss.backward()
    torch_layers.commit_statistics(network)
    gradients = torch_weights.gradients_to_flax(network, expected.params)
    _, stats = torch_weights.to_flax(network, expected.params)
    figure = partial(Figure, expected.model)
    return [
        figure(f"{policy}: loss", abs(loss.item() - expected.loss) / abs(expected.loss), LOSS_TOLERANCE),
        figure(f"{policy}: worst gradient", _worst(expected.gradients, gradients), GRADIENT_TOLERANCE),
        figure(f"{policy}: batch statistics", _worst(expected.new_batch_stats, stats), LOSS_TOLERANCE),
    ]


def _worst(expected: Any, got: Any) -> float:
    def relative(a: np.ndarray, b: np.ndarray) -> float:
        return float(max(0.0, np.linalg.norm(a - b) - GRADIENT_FLOOR) / max(np.linalg.norm(a), GRADIENT_FLOOR))

    return max(jax.tree.leaves(jax.tree.map(relative, expected, got)), default=0.0)


def training_figures(model: ModelName, steps: int, batch_size: int, learning_rate: float | None) -> list[Figure]:
    """Returns the largest relative differences of the losses while training: in float64, and in float32.

    Args:
        model: the network.
        steps: of training, at least 1.
        batch_size: images of each step.
        learning_rate: the schedule's peak; None for `FLOAT64_RATE` and the model's own of `FLOAT32_RATES`.
    """
    rates = (FLOAT64_RATE, FLOAT32_RATES[model]) if learning_rate is None else (learning_rate, learning_rate)
    double = Training(model, steps, batch_size, rates[0], bits=64)
    single = Training(model, steps, batch_size, rates[1], bits=32)
    return [_trained(double, FLOAT64_TOLERANCES[model]), _trained(single, FLOAT32_TOLERANCE)]


def _trained(training: Training, tolerance: float) -> Figure:
    ours, theirs = train_jax(training), train_torch(training)
    what = (
        f"float{training.bits}, {training.steps} steps of {training.batch_size} images at a rate of {training.learning_rate:g} "
        f"(the first batch's loss went from {ours.of_steps[0]:.4f} to {ours.of_first_batch:.4f}): worst loss"
    )
    return Figure(training.model, what, largest_difference(ours, theirs), tolerance)


@dataclass(frozen=True)
class Config:
    """Compare losses and gradients of JAX and PyTorch."""

    models: str = "net,resnet18,wrn16_4,vit"
    """Models, separated by commas."""
    policies: tuple[str, ...] = (*POLICIES, "budget:50%")
    """PyTorch's policies, separated by spaces."""
    steps: int = 50
    """Steps of training of `net` and `resnet18`; 0 for none."""
    batch_size: int = 16
    """Images of each of these steps."""
    learning_rate: float | None = None
    """The peak of these steps' schedule; by default 0.05, and 1e-5 for `resnet18` in float32."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.agreement", args=argv)
    return exit_status(partial(_run, config), interrupted="Nothing is kept.")


def _run(config: Config) -> int:
    require_torch()
    models: list[Any] = [model.strip() for model in config.models.split(",")]
    for model in models:
        if model not in get_args(ModelName):
            raise ExperimentError(
                f"--models takes {', '.join(get_args(ModelName))}, separated by commas; got {model!r}."
            )
    if not config.policies:
        raise ExperimentError("--policies needs at least one policy, such as everything; got none.")
    if config.steps < 0 or config.batch_size < 2:
        raise ExperimentError(
            f"--steps must be at least 0 and --batch-size at least 2; got {config.steps} and {config.batch_size}."
        )
    if config.learning_rate is not None and not 0 < config.learning_rate < float("inf"):
        raise ExperimentError(f"--learning-rate must be a number above 0; got {config.learning_rate}.")
    figures = list[Figure]()
    for model in models:
        expected = reference(model)
        for policy in config.policies:
            figures += _shown(compare(expected, policy))
        if config.steps and model in FLOAT32_RATES:
            figures += _shown(training_figures(model, config.steps, config.batch_size, config.learning_rate))
    bad = [asdict(figure) for figure in figures if not figure.good]
    print(json.dumps({"figures": len(figures), "beyond_tolerance": bad}))
    return 1 if bad else 0


def _shown(figures: list[Figure]) -> list[Figure]:
    for figure in figures:
        sign = "<=" if figure.good else "NOT <="
        print(f"{figure.model}  {figure.what}  {figure.difference:.2e} {sign} {figure.tolerance:g}", flush=True)
    return figures


if __name__ == "__main__":
    sys.exit(main())
