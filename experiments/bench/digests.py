"""Final parameters of a short run under every policy, beside those of `everything`.

    python -m experiments.bench digests --model net
    python -m experiments.bench digests --model vit --policies 'dots;segments:sqrt'

Networks of ReLUs end with the same bits under every policy on a CPU in float32. Where GELU and softmax are recomputed in
another fusion they may round differently: `vit` stays within 1e-4, in the norm of all
parameters together. The exit status is 1 where that does not hold.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.bench import output
from experiments.cifar import train
from experiments.config import Config
from experiments.errors import ExperimentError
from experiments.models import ModelName
from jaxremat import PolicyError

TOLERANCE: dict[ModelName, float] = {"net": 0.0, "resnet18": 0.0, "wrn16_4": 0.0, "vit": 1e-4}
EVERYWHERE = ("nothing", "dots", "dots_no_batch", "ops:conv=store,dot=store,*=recompute", "segments:2", "segments:sqrt")
RESIDUAL = ("names:conv_out", "names:block_out", "paths:stage1_*", "dots+names:block_out")
PARTICULAR: dict[ModelName, tuple[str, ...]] = {
    "net": ("names:conv_out", "names:pool_out,fc_out", "paths:block1", "dots+names:pool_out"),
    "resnet18": RESIDUAL,
    "wrn16_4": RESIDUAL,
    "vit": ("names:block_out", "names:q,k,v,fc1_out", "paths:*/attention", "dots+names:block_out"),
}


@dataclass(frozen=True)
class Options:
    """What to train, how often."""

    model: ModelName = "net"
    policies: Annotated[str | None, tyro.conf.arg(help="separated by semicolons or blanks; else all kinds")] = None
    steps: int = 20
    batch_size: int = 32
    learning_rate: float = 0.05


def compare(options: Options) -> list[dict[str, str | float | None]]:
    """Returns a row for each policy: digest and relative difference, or the error that it ended with."""
    rows, reference = list[dict[str, str | float | None]](), None
    for policy in policies_of(options):
        config = Config(
            policy=policy,
            model=options.model,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            max_steps=options.steps,
            data="sample",
        )
        try:
            trained = train(config, Console(quiet=True))
        except (ExperimentError, PolicyError) as error:
            if reference is None:
                raise
            rows.append({"policy": policy, "digest": None, "difference": None, "error": str(error).splitlines()[0]})
            continue
        params = jax.device_get(trained.state.params)
        reference = params if reference is None else reference
        assert trained.record is not None
        rows.append(
            {
                "policy": trained.record.policy,
                "regions": trained.record.regions,
                "digest": trained.record.params_sha256,
                "difference": relative_difference(params, reference),
                "step_seconds": trained.record.step_seconds,
                "compiled_temp_bytes": trained.record.compiled_temp_bytes,
            }
        )
        print(f"{policy}: {trained.record.params_sha256[:16]}", file=sys.stderr)
    return rows


def policies_of(options: Options) -> list[str]:
    """Returns the policies to run: `everything` as the reference, then those asked for or all kinds for this model."""
    if options.policies is None:
        return ["everything", *EVERYWHERE, *PARTICULAR[options.model]]
    return ["everything", *filter(None, re.split(r"[;\s]+", options.policies))]


def relative_difference(tree: object, reference: object) -> float:
    """Returns the Euclidean norm of the difference of two trees of arrays over the norm of the reference.

    Not leaf by leaf: some leaves are rounding and nothing else, such as the bias of attention's keys, whose gradient is zero.
    """
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True))
    apart = sum(float(np.sum(np.square(np.asarray(a, np.float64) - b))) for a, b in pairs)
    return (apart / sum(float(np.sum(np.square(np.asarray(b, np.float64)))) for _, b in pairs)) ** 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows; returns 0 where all policies agree, 1 where they do not, 2 for bad input."""
    options = tyro.cli(Options, prog="python -m experiments.bench digests", args=argv)
    try:
        rows = compare(options)
    except (ExperimentError, PolicyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table(title=f"{options.model}, {options.steps} steps: final parameters")
    for column in ("policy", "regions", "SHA-256", "relative difference"):
        table.add_column(column)
    tolerance, agree = TOLERANCE[options.model], True
    for row in rows:
        if row["digest"] is None:
            table.add_row(str(row["policy"]), "", "", str(row["error"]))
            continue
        agree &= float(row["difference"] or 0.0) <= tolerance
        table.add_row(
            str(row["policy"]), str(row["regions"]), str(row["digest"])[:16], f"{float(row['difference'] or 0.0):.1e}"
        )
    output.show(table, {"bench": "digests", "options": vars(options), "agree": agree, "rows": rows})
    return 0 if agree else 1
