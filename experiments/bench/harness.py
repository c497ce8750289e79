"""Step time of the harness beside a bare jitted loop of the same step, from one interleaved run.

    python -m experiments.bench harness
    python -m experiments.bench harness --model resnet18 --steps 5

The harness is the loop of `experiments.cifar` as it runs on a terminal, bar included; the bare loop is `jax.jit` of the same
step, called again and again. They take turns, and the ratio is that of the medians over the turns.
"""

import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments import data, devices, loop, policies, progress, records
from experiments.augment import epoch_order
from experiments.bench import output
from experiments.checkpoints import NoCheckpoints
from experiments.config import Config
from experiments.errors import ExperimentError
from experiments.models import ModelName, build
from experiments.program import apply_policy, build_program
from experiments.training import AUGMENTED, make_loss, make_optimizer, make_step
from jaxremat import PolicyError, compiler_options, parse


@dataclass(frozen=True)
class Options:
    """What to time."""

    model: ModelName = "net"
    policy: str = "everything"
    batch_size: int = 128
    steps: Annotated[int, tyro.conf.arg(help="steps in each turn")] = 40
    turns: Annotated[int, tyro.conf.arg(help="turns of each loop")] = 12


def measure(options: Options) -> dict[str, float]:
    """Returns the median seconds of a step in both loops and their ratio."""
    config = Config(policy=options.policy, model=options.model, batch_size=options.batch_size, data="sample")
    over, dataset = devices.all_devices(), data.load("sample")
    devices.check_batch(config.batch_size, over, len(dataset.train_labels))
    applied = apply_policy(config, len(dataset.classes))
    program = build_program(config, applied, dataset, over)
    per_epoch = program.steps_per_epoch
    order = epoch_order(0, 0, len(dataset.train_labels))[: per_epoch * config.batch_size]
    order = order.reshape(per_epoch, config.batch_size)
    order_of_harness, state = over.replicate(order), program.init()

    model = build(
        config.model,
        classes=len(dataset.classes),
        wrap_block=policies.block_wrapper(parse(config.policy), applied.regions),
    )
    bare_step = jax.jit(
        make_step(
            policies.wrap_loss(make_loss(model), parse(config.policy), applied.regions),
            make_optimizer(config.learning_rate, config.epochs * per_epoch),
            seed=config.seed,
            augmented=AUGMENTED[config.model],
            dtype=jnp.float32,
            split=over.split,
        ),
        donate_argnums=0,
        compiler_options=compiler_options(),
    )
    bare_state, bare_order = program.copy(state), over.replicate(order)

    console = Console(file=io.StringIO(), force_terminal=True)
    extent = progress.Extent(1, options.steps * (options.turns + 1), 0, config.batch_size)
    harness_seconds, bare_seconds = list[float](), list[float]()
    with progress.choose_display(console, extent) as display:
        for turn in range(options.turns + 1):
            steps = range(turn * options.steps, (turn + 1) * options.steps)
            begun = time.perf_counter()
            history = loop.History(steps.start)
            state, losses = loop.run_steps(
                config, program, state, order_of_harness, steps, NoCheckpoints(), display, history
            )
            jax.block_until_ready((state, losses))
            harness_seconds.append((time.perf_counter() - begun) / options.steps)

            begun = time.perf_counter()
            for _ in steps:
                bare_state, _ = bare_step(bare_state, program.training, bare_order)
            jax.block_until_ready(bare_state)
            bare_seconds.append((time.perf_counter() - begun) / options.steps)
    # The first turn compiles and warms up.
    harness, bare = float(np.median(harness_seconds[1:])), float(np.median(bare_seconds[1:]))
    return {"harness_step_seconds": harness, "bare_step_seconds": bare, "ratio": harness / bare}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the ratio as a table and a line of JSON; returns the exit status."""
    options = tyro.cli(Options, prog="python -m experiments.bench harness", args=argv)
    try:
        result = measure(options)
    except (ExperimentError, PolicyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table(title=f"{options.model}, {options.policy}, batch {options.batch_size}")
    for column in ("loop", "median step"):
        table.add_column(column)
    table.add_row("harness", f"{result['harness_step_seconds'] * 1000:.2f} ms")
    table.add_row("bare jit", f"{result['bare_step_seconds'] * 1000:.2f} ms")
    table.add_row("ratio", f"{result['ratio']:.3f}")
    output.show(table, {"bench": "harness", "options": vars(options), **result, "versions": records.versions()})
    return 0
