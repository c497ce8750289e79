"""What the engine of `jaxremat.remat` costs, and what it saves on the chain of 16 convolutions.

    python -m experiments.bench engine
    python -m experiments.bench engine --no-chain

Three tables: the time to trace and rewrite the gradient of a ResNet-50 under a policy, over the time in which JAX alone traces
it; the time for a function of thousands of equations; and, unless `--no-chain`, the memory and the arithmetic that the
compiler of this machine needs for the gradient of 16 x [convolution 3x3 32 -> 32, batch norm, ReLU] at batch 64, 32x32,
with the step time of `everything` over that of no remat.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro
from rich.table import Table

import jaxremat
from experiments import chain
from experiments.bench import output
from jaxremat.hlo import conv_and_dot_counts

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


def chain_programs() -> dict[str, Any]:
    """Returns the compiled gradient of the chain for no remat, and for every policy over the whole and per block."""

    def compiled(loss: Callable[..., Any]) -> Any:
        step = jax.jit(jax.value_and_grad(loss), compiler_options=jaxremat.compiler_options())
        return step.lower(*chain.arguments()).compile()

    whole = ("everything", "ops:conv=store,*=recompute", f"values:{_every(2)}", f"values:{_every(3)}", "segments:sqrt")
    losses = {"no remat": chain.loss} | {policy: jaxremat.remat(chain.loss, policy) for policy in whole}
    losses["nothing per block"] = partial(chain.loss, remat_block=lambda f: jaxremat.remat(f, "nothing"))
    losses["jax.checkpoint per block"] = partial(chain.loss, remat_block=jax.checkpoint)
    return {name: compiled(loss) for name, loss in losses.items()}


def _every(step: int) -> str:
    """Returns the positions of every `step`-th convolution's output among the forward values of the chain."""
    rows = jaxremat.residuals(chain.loss, *chain.arguments()).rows
    return ",".join(str(row.position) for row in [r for r in rows if r.op == "conv"][step - 1 :: step])


def chain_costs(programs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns temp bytes, GFLOP and convolutions of each program, by the compiler."""
    return {
        name: {
            "temp_bytes": program.memory_analysis().temp_size_in_bytes,
            "gflop": program.cost_analysis()["flops"] / 1e9,
            "convolutions": conv_and_dot_counts(program.as_text()).convolutions,
        }
        for name, program in programs.items()
    }


def step_ratio(plain: Any, other: Any, turns: int) -> float:
    """Returns the median over interleaved turns of the time of one program over that of another."""
    kernels = chain.init()
    x = jax.random.normal(jax.random.key(1), (chain.BATCH, chain.SIZE, chain.SIZE, chain.CHANNELS))

    def seconds(program: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(kernels, x))
        return time.perf_counter() - start

    for program in (plain, other):  # the first run allocates
        seconds(program)
    return median(seconds(other) / seconds(plain) for _ in range(turns))


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit status."""
    options = tyro.cli(Options, prog="python -m experiments.bench engine", args=list(argv))
    ratios, seconds = trace_ratios(options.turns), long_seconds(options.equations)
    table = Table("what", "policy", "figure")
    for policy, ratio in ratios.items():
        table.add_row("ResNet-50, trace and rewrite over JAX's trace", policy, f"{ratio:.2f}")
    table.add_row(f"{options.equations} equations, trace and rewrite", "segments:sqrt", f"{seconds:.1f} s")
    figures: dict[str, Any] = {"trace_ratios": ratios, "long_seconds": seconds}
    if options.chain:
        programs = chain_programs()
        figures["chain"] = chain_costs(programs)
        for policy, cost in figures["chain"].items():
            mebibytes, counts = (
                cost["temp_bytes"] / 2**20,
                f"{cost['convolutions']} convolutions, {cost['gflop']:.1f} GFLOP",
            )
            table.add_row("chain of 16 blocks, compiled", policy, f"{mebibytes:.0f} MiB temp, {counts}")
        figures["step_ratio"] = step_ratio(programs["no remat"], programs["everything"], 5 * options.turns)
        table.add_row("chain of 16 blocks, step time over no remat", "everything", f"{figures['step_ratio']:.3f}")
    output.show(table, figures)
    return 0
