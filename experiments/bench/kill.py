"""A run that is killed again and again and restarted with the same command, beside an undisturbed one: the same bits.

    python -m experiments.bench kill

Every third kill comes at a random moment of the start, the others at a random moment of the training, while checkpoints are
being written. The moments follow from the seed, as far as a machine's speed lets them. The exit status is 1 where the final
parameters differ.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from experiments.bench import output
from experiments.bench.processes import command, environment

TRAINING_SECONDS = 1.0  # a kill during training comes at most so long after the first epoch's end
STARTING_SECONDS = 4.0


@dataclass(frozen=True)
class Options:
    """How often to kill what."""

    kills: int = 10
    epochs: int = 40
    batch_size: int = 100
    policy: str = "dots"
    seed: int = 0


def disturbed(options: Options, directory: Path) -> dict[str, Any]:
    """Trains with kills and returns the record of the run that came through, with `kills`: what each one left behind.

    Raises:
        RuntimeError: a restarted run failed, or the run ended before all kills were done.
    """
    moments = random.Random(options.seed)
    kills = list[dict[str, Any]]()
    for number in range(options.kills):
        child = subprocess.Popen(
            command(_arguments(options, directory)),
            env=environment(1),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr is not None
        line = ""
        if number % 3:
            line = child.stderr.readline()
            while line and not line.startswith("epoch"):
                line = child.stderr.readline()
            delay = moments.uniform(0, TRAINING_SECONDS)
        else:
            delay = moments.uniform(0, STARTING_SECONDS)
        time.sleep(delay)
        if child.poll() is not None:
            raise RuntimeError(
                f"the run ended with status {child.returncode} before kill {number + 1}: {line}{child.stderr.read()}"
            )
        child.kill()
        child.communicate()
        steps = [int(path.name) for path in directory.iterdir() if path.name.isdecimal()] if directory.exists() else []
        kills.append(
            {
                "during": "training" if number % 3 else "start",
                "delay_seconds": delay,
                "newest_checkpoint": max(steps, default=None),
            }
        )
    return _train(options, directory) | {"kills": kills}


def _train(options: Options, directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        command(_arguments(options, directory)), env=environment(1), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the run ended with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _arguments(options: Options, directory: Path) -> list[str]:
    return [
        "--data=sample", f"--epochs={options.epochs}", f"--batch-size={options.batch_size}", f"--policy={options.policy}",
        f"--checkpoint-dir={directory}",
    ]  # fmt: skip


def compare(options: Options) -> dict[str, Any]:
    """Returns both runs' digests, and the kills."""
    with tempfile.TemporaryDirectory() as folder:
        calm = _train(options, Path(folder) / "calm")
        killed = disturbed(options, Path(folder) / "killed")
    return {
        "kills": killed["kills"],
        "resumed_from": killed["first_step"],
        "undisturbed_sha256": calm["params_sha256"],
        "killed_sha256": killed["params_sha256"],
        "agree": calm["params_sha256"] == killed["params_sha256"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what each kill left and both digests; returns 0 where they agree, 1 where not, 2 where a run failed."""
    options = tyro.cli(Options, prog="python -m experiments.bench kill", args=argv)
    try:
        result = compare(options)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table(title=f"{options.kills} kills, {options.epochs} epochs of the sample")
    for column in ("kill", "during", "after", "newest checkpoint"):
        table.add_column(column)
    for number, kill in enumerate(result["kills"], start=1):
        newest = "none" if kill["newest_checkpoint"] is None else f"step {kill['newest_checkpoint']}"
        table.add_row(str(number), kill["during"], f"{kill['delay_seconds']:.2f} s", newest)
    table.add_row("", "killed run", "", result["killed_sha256"][:16])
    table.add_row("", "undisturbed run", "", result["undisturbed_sha256"][:16])
    output.show(table, {"bench": "kill", "options": vars(options), **result})
    return 0 if result["agree"] else 1
