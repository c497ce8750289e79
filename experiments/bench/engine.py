"""What the engine of `jaxremat.remat` costs, and what it saves on the chain of 16 convolutions.

    python -m experiments.bench engine
    python -m experiments.bench engine --no-chain

Three tables: the time to trace and rewrite the gradient of a ResNet-50 under a policy, over the time in which JAX alone traces
it; the time for a function of thousands of equations; and, unless `--no-chain`, the memory and the arithmetic that the
compiler of this machine needs for the gradient of 16 x [convolution 3x3 32 -> 32, batch norm, ReLU] at batch 64, 32x32.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro
from rich.table import Table

import jaxremat
from experiments.bench import output

POLICIES = ("dots", "nothing", "segments:sqrt", "ops:conv=store,batch_norm=recompute,relu=recompute")


@dataclass(frozen=True)
class Options:
    """What to measure."""

    turns: int = 3
    equations: int = 5000
    chain: bool = True


class Bottleneck(nn.Module):
    """The block of He et al., "Deep Residual Learning for Image Recognition", 2016."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height / stride, width / stride, 4 * channels)."""
        y = x
        for i, (channels, size, stride) in enumerate(
            [(self.channels, 1, 1), (self.channels, 3, self.stride), (4 * self.channels, 1, 1)]
        ):
            y = nn.Conv(channels, (size, size), strides=stride, use_bias=False)(nn.relu(y) if i else y)
            y = nn.BatchNorm(use_running_average=False)(y)
        if x.shape != y.shape:
            x = nn.Conv(4 * self.channels, (1, 1), strides=self.stride, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=False)(x)
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """ResNet-50 for images of 32 x 32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns 10 logits for each image."""
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(64, (3, 3), use_bias=False)(x)))
        for stage, depth in enumerate((3, 4, 6, 3)):
            for i in range(depth):
                x = Bottleneck(64 * 2**stage, 2 if stage and not i else 1)(x)
        return nn.Dense(10)(x.mean((1, 2)))


def resnet() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the loss of a ResNet-50 with its new statistics, and the shapes of its arguments."""
    model, images = ResNet50(), jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params: Any, stats: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        logits, updates = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jax.nn.logsumexp(logits, -1).mean(), updates

    return loss, (variables["params"], variables["batch_stats"], images)


def trace_seconds(loss: Callable[..., Any], args: Sequence[Any], has_aux: bool, turns: int) -> float:
    """Returns the median processor seconds of tracing a gradient, with JAX's caches empty."""
    seconds = list[float]()
    for _ in range(turns):
        jax.clear_caches()
        start = time.process_time()
        jax.make_jaxpr(jax.value_and_grad(loss, has_aux=has_aux))(*args)
        seconds.append(time.process_time() - start)
    return median(seconds)


def trace_ratios(turns: int) -> dict[str, float]:
    """Returns for every policy the time to trace and rewrite over JAX's time to trace."""
    loss, args = resnet()
    plain = lambda: trace_seconds(lambda *xs: loss(*xs), args, True, turns)  # noqa: E731
    plain()
    base = plain()
    # A new wrapper each turn: the engine keeps what it has traced.
    return {
        policy: median(trace_seconds(jaxremat.remat(loss, policy), args, True, 1) for _ in range(turns)) / base
        for policy in POLICIES
    }


def long_seconds(equations: int) -> float:
    """Returns the seconds to trace and rewrite the gradient of a function of so many equations."""

    def long(x: jax.Array) -> jax.Array:
        for _ in range(equations // 2):
            x = jnp.sin(x) * 2
        return x.sum()

    return trace_seconds(jaxremat.remat(long, "segments:sqrt"), (jnp.ones(8),), False, 1)


def chain_loss(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    """Returns the mean square of what the chain makes of x of shape (batch, height, width, 32)."""
    for kernel in kernels:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
        x = jax.nn.relu(x)
    return (x**2).mean()


def chain_costs() -> dict[str, dict[str, float]]:
    """Returns for no remat and every policy the temp bytes and GFLOP of the compiled gradient of the chain."""
    kernels = [jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)] * 16
    args = kernels, jax.ShapeDtypeStruct((64, 32, 32, 32), jnp.float32)
    losses = {"no remat": chain_loss} | {
        policy: jaxremat.remat(chain_loss, policy)
        for policy in ("everything", "nothing", "segments:sqrt", "ops:conv=store,*=recompute")
    }
    costs = dict[str, dict[str, float]]()
    for name, loss in losses.items():
        step = jax.jit(jax.value_and_grad(loss), compiler_options=jaxremat.compiler_options())
        compiled = step.lower(*args).compile()
        flops = (compiled.cost_analysis() or {}).get("flops")
        memory = compiled.memory_analysis()
        costs[name] = {"temp_bytes": memory.temp_size_in_bytes, "gflop": flops and flops / 1e9}
    return costs


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit status."""
    options = tyro.cli(Options, prog="python -m experiments.bench engine", args=list(argv))
    ratios, seconds = trace_ratios(options.turns), long_seconds(options.equations)
    table = Table("what", "policy", "figure")
    for policy, ratio in ratios.items():
        table.add_row("ResNet-50, trace and rewrite over JAX's trace", policy, f"{ratio:.2f}")
    table.add_row(f"{options.equations} equations, trace and rewrite", "segments:sqrt", f"{seconds:.1f} s")
    costs = chain_costs() if options.chain else {}
    for policy, cost in costs.items():
        gflop = "" if cost["gflop"] is None else f", {cost['gflop']:.1f} GFLOP"
        table.add_row("chain of 16 blocks, compiled", policy, f"{cost['temp_bytes'] / 2**20:.0f} MiB temp{gflop}")
    output.show(table, {"trace_ratios": ratios, "long_seconds": seconds, "chain": costs})
    return 0
