"""Two networks from either set of operations, and what a policy keeps and a compiler allots for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jaxremat
from experiments import chain
from experiments.models import build
from experiments.operations import OpsName
from jaxremat import ops

POLICIES = ("everything", "dots")


@dataclass(frozen=True)
class Row:
    """One network under one policy. `activations` is the kept bytes in activations a layer, for the chain alone."""

    program: str
    ops: OpsName
    policy: str
    residual_bytes: int
    activations: float | None
    recomputed_convolutions: int
    temp_bytes: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Returns all fields."""
        return asdict(self)


def lean_chain(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    """Returns the same as `experiments.chain.loss`: a convolution, then normalization, ReLU and convolution as one."""
    numbers = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    first, *others = kernels
    x = ops.conv_general_dilated(x, first, **numbers)
    for kernel in others:
        x = ops.batch_norm_relu_conv(x, kernel, use_fast_variance=False, **numbers)[0]
    return jnp.mean(ops.batch_norm_relu(x, use_fast_variance=False)[0] ** 2)


def transformer(name: OpsName, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a loss of `vit`, six transformer blocks, in training mode, and the shapes of its arguments."""
    model = build("vit", ops=name)
    images = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False))["params"]

    def loss(params: Any, images: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, images, True, rngs={"dropout": jax.random.key(0)})
        return jnp.mean(jnp.asarray(logits) ** 2)

    return loss, (params, images)


def measure(depth: int, batch: int, targets: Sequence[str]) -> Iterator[Row]:
    """Yields a row for each network, set of operations and policy, as it is compiled."""
    chains: dict[OpsName, Callable[..., Any]] = {"standard": chain.loss, "lean": lean_chain}
    for name, chain_loss in chains.items():
        programs = {"chain": (chain_loss, chain.arguments(depth, batch)), "transformer": transformer(name, batch)}
        for program, (loss, args) in programs.items():
            for policy in POLICIES:
                wrapped = jaxremat.remat(loss, policy)
                report = jaxremat.residuals(wrapped, *args)
                step = jax.jit(jax.value_and_grad(wrapped))
                one = batch * chain.SIZE**2 * chain.CHANNELS * 4 * depth
                yield Row(
                    program,
                    name,
                    policy,
                    report.total_bytes,
                    report.total_bytes / one if program == "chain" else None,
                    report.recomputed.get("conv", 0),
                    {target: jaxremat.cost(step, *args, target=target).temp_bytes for target in targets},
                )
