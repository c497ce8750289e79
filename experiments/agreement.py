"""Do the two frameworks compute the same? Losses and gradients of every strategy, and fifty steps of training.

    python -m experiments.agreement
    python -m experiments.agreement --models net --policies everything nothing --steps 0

One batch of noise, the same weights, float32, dropout off (masks differ between frameworks). JAX computes each model once,
without a policy: that policies change no bit there is what the tests of `jaxremat` show. PyTorch computes it under every
policy. Standard output gets a line a figure and, last, one JSON object. The exit status is 0; 1 if a figure is beyond its
tolerance; 2 with one message for bad input.

The tolerances are relative: 1e-5 for losses, 1e-4 for the norm of each gradient's difference (with an absolute floor for
gradients that are zero in exact arithmetic, such as those of attention's key biases), 1e-3 for losses while training. Where
a value before a ReLU is so near to zero that rounding decides its sign, a gradient jumps by far more than rounding; such a
batch says nothing about either framework (PyTorch's own float32 and float64 differ by 1e-3 there), so the batches here are
ones where none is. Training meets such values at every step, and networks with BatchNorm multiply what comes of it: at a rate of
0.05 PyTorch's float32 and float64 losses of `wrn16_4` are 5e-3 apart after four updates, as far as the two frameworks'; those of
`resnet18` are 1e-3 apart after five even at a rate of 1e-4. Where rounding alone does more than the tolerance, the frameworks
may be three times as far apart as PyTorch's float32 is from its float64 in the same training; that figure is shown.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxremat
from experiments.batches import Batches
from experiments.cifar_torch import require_torch
from experiments.data import load
from experiments.errors import ExperimentError
from experiments.models import ModelName, build
from experiments.training import TrainState, make_init, make_loss, make_optimizer
from jaxremat import PolicyError

LOSS_TOLERANCE, GRADIENT_TOLERANCE, TRAINING_TOLERANCE = 1e-5, 1e-4, 1e-3
GRADIENT_FLOOR = 1e-7
TRAINED: dict[str, float] = {"net": 0.05, "resnet18": 1e-4}  # by model, the peak of the schedule: see above
POLICIES = (
    "everything", "nothing", "dots", "dots_no_batch", "names:*_out", "ops:conv=store,*=recompute", "segments:sqrt",
)  # fmt: skip
# Images and seed of the noise: see above.
NOISE: dict[str, tuple[int, int]] = {"net": (8, 0), "resnet18": (2, 4), "wrn16_4": (4, 0), "vit": (4, 0)}


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
    network = _without_dropout(model)
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


def train_both(model: ModelName, steps: int, batch_size: int, learning_rate: float) -> tuple[list[float], list[float]]:
    """Returns the losses of `steps` steps on the sample, in order and without augmentation, in JAX and in PyTorch."""
    from experiments import torch_models, torch_training, torch_weights

    network, optimizer = _without_dropout(model), make_optimizer(learning_rate, steps)
    loss = make_loss(network)
    state = jax.jit(make_init(network, optimizer, 0))()
    mirror = torch_models.build(model, dropout=0.0).train()
    torch_weights.load_flax(mirror, jax.device_get(state.params), jax.device_get(state.batch_stats))
    sgd, rates = torch_training.make_sgd(mirror), torch_training.learning_rates(learning_rate, steps)

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(
            state.params, state.batch_stats, images, labels, jax.random.key(0)
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return replace(state, step=state.step + 1, params=params, batch_stats=stats, opt_state=opt_state), value

    ours, theirs = list[float](), list[float]()
    for rate, batch in zip(rates, Batches(load("sample"), 0, augmented=False).of_run(batch_size)):
        state, value = step(state, jnp.asarray(batch.images), jnp.asarray(batch.labels))
        ours.append(float(value))
        images, labels = torch_training.to_device(batch, next(mirror.parameters()).device)
        theirs.append(torch_training.train_step(mirror, mirror, sgd, rate, images, labels).item())
    return ours, theirs


def drift(model: ModelName, steps: int, batch_size: int, learning_rate: float) -> float:
    """Returns how far PyTorch's float32 and float64 are apart in the same training: what rounding alone does to it."""
    import torch

    from experiments import torch_training

    losses = list[list[float]]()
    for dtype in (torch.float32, torch.float64):
        network = torch_training.initial_network(model, dropout=0.0).train().to(dtype)
        sgd, rates = torch_training.make_sgd(network), torch_training.learning_rates(learning_rate, steps)
        forward = partial(_compose, [part.call for part in network.parts()])
        losses.append([])
        for rate, batch in zip(rates, Batches(load("sample"), 0, augmented=False).of_run(batch_size)):
            images, labels = torch_training.to_device(batch, torch.device("cpu"))
            losses[-1].append(torch_training.train_step(network, forward, sgd, rate, images.to(dtype), labels).item())
    return max(abs(a - b) / abs(b) for a, b in zip(*losses))


def _compose(calls: Sequence[Any], x: Any) -> Any:
    """A network without the cast of its logits to float32."""
    for call in calls:
        x = call(x)
    return x


def training_figure(model: ModelName, steps: int, batch_size: int) -> Figure:
    """Returns the largest relative difference of the losses while training.

    Its tolerance is `TRAINING_TOLERANCE`, or three times what rounding alone does to this training, where that is more.
    """
    ours, theirs = train_both(model, steps, batch_size, TRAINED[model])
    worst = max(abs(a - b) / abs(a) for a, b in zip(ours, theirs))
    rounding = drift(model, steps, batch_size, TRAINED[model])
    what = f"{steps} steps of {batch_size} images: worst loss (PyTorch's float32 against its float64: {rounding:.1e})"
    return Figure(model, what, worst, max(TRAINING_TOLERANCE, 3 * rounding))


def _without_dropout(model: ModelName) -> Any:
    network: Any = build(model)
    return network.clone(dropout=0.0) if model == "vit" else network


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.agreement", args=argv)
    try:
        require_torch()
        models: list[Any] = [model.strip() for model in config.models.split(",")]
        for model in models:
            if model not in get_args(ModelName):
                raise ExperimentError(
                    f"--models takes {', '.join(get_args(ModelName))}, separated by commas; got {model!r}."
                )
        if config.steps < 0 or config.batch_size < 2:
            raise ExperimentError(
                f"--steps must be at least 0 and --batch-size at least 2; got {config.steps} and {config.batch_size}."
            )
        figures = list[Figure]()
        for model in models:
            expected = reference(model)
            for policy in config.policies:
                figures += _shown(compare(expected, policy))
            if config.steps and model in TRAINED:
                figures += _shown([training_figure(model, config.steps, config.batch_size)])
    except (ExperimentError, PolicyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
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
