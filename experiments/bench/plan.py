"""The planner beside every common use of `jax.checkpoint`: at the compiled peak of each, which recomputes less?

    python -m experiments.bench plan --out plan.jsonl
    python -m experiments.bench plan --nets chain16 resnet18:32 --targets local --competitors "per block: nothing" "segments of 2"
    python -m experiments.bench plan --readme README.md --picture plan.svg

For each network and target, no remat and the competitors are compiled, and the planner is asked for a plan within the
peak of each, within 75 % and 50 % of that of no remat, and within the budgets of its named claims; one `jaxremat.Planner` is
asked for all of them, the smallest first, so that what was compiled for one serves the next. Recomputation is that of
convolutions and matrix products in the jaxpr; every plan's peak and count are taken again from its own program. For chips that
are not here that is compiled until its memory is known, and of every network the plan for 50 % to its end. On `local`
the gradient of every plan that fits is run beside that without rematerialization: networks of ReLUs have the same bits, the
others differ by at most 2e-5 of a leaf's largest entry. Every cell is a line of `--out`; cells that are there are not run
again. The exit status is 1 where the planner is beaten. `--readme` and `--picture` show the results of `--out`, or those that
are committed.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import jax
import tyro

import jaxremat
from experiments import records
from experiments.bench import gradients, plan_cells, plan_tables
from experiments.bench.competitors import Competitor, competitors
from experiments.bench.nets import NETS, Net
from experiments.bench.plan_cells import NO_REMAT, Cell, Kind, Result
from experiments.bench.plan_claims import CLAIMS, budgets
from experiments.bench.plan_plots import picture
from experiments.bench.plan_verdicts import Suite, disagreements, wrong_gradients
from experiments.devices import forbid_fused_multiply_add
from experiments.errors import ExperimentError
from experiments.marked import update_block
from jaxremat.errors import did_you_mean

RESULTS = Path(__file__).parent.parent / "results"


@dataclass(frozen=True)
class Options:
    """What to compile, and what to plan for."""

    nets: Annotated[tuple[str, ...], tyro.conf.arg(help="networks, with another batch as in resnet18:32")] = tuple(NETS)
    targets: Annotated[tuple[str, ...], tyro.conf.arg(help="chips, attached or not")] = ("local", "h100", "v5e")
    competitors: Annotated[tuple[str, ...], tyro.conf.arg(help="by their names in the table; none for all")] = ()
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE", help="JSON lines, to go on with")] = None
    again: Annotated[tuple[Kind, ...], tyro.conf.arg(help="kinds of cells to run though the file has them")] = ()
    seconds: Annotated[float | None, tyro.conf.arg(help="begin no cell after so many")] = None
    readme: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help="run nothing: write the table into its block there")
    ] = None
    picture: Annotated[str | None, tyro.conf.arg(metavar="FILE", help="run nothing: draw the curves")] = None


@dataclass(frozen=True)
class Contest:
    """One network on one target, with the competitors that are asked for."""

    name: str
    target: str
    net: Net
    against: tuple[Competitor, ...]

    def cells(self, results: dict[Cell, Result]) -> Iterator[tuple[Cell, Callable[[], Result]]]:
        """Yields cells with what runs them; those of plans once the competitors' `results` are there to say the budgets."""
        for competitor in self.against:
            cell = Cell("competitor", self.name, self.target, competitor.name)
            yield cell, partial(plan_cells.compete, cell, self.net, competitor.loss)
        names = [competitor.name for competitor in self.against]
        planner = cache(lambda: jaxremat.Planner(self.net.loss, *self.net.args, target=self.target))
        suite = Suite(results)
        for size in budgets(suite, self.name, self.target, names):
            cell = Cell("plan", self.name, self.target, size)
            early = plan_cells.is_early(cell) and not suite.is_least_fraction(cell)
            yield cell, partial(plan_cells.plan, cell, self.net, planner, early)


def contests(options: Options) -> list[Contest]:
    """Returns what is asked for, checked.

    Raises:
        ExperimentError: an unknown name, or a target that nothing here compiles for.
    """
    for flag, names in (("--nets", options.nets), ("--targets", options.targets)):
        if not names:
            raise ExperimentError(f"{flag} needs at least one name; got none.")
    if options.seconds is not None and not 0 <= options.seconds < math.inf:
        raise ExperimentError(f"--seconds must be a number of at least 0; got {options.seconds:g}.")
    available = jaxremat.targets()
    for target in options.targets:
        if target not in available:
            hint = did_you_mean(target, available)
            raise ExperimentError(f"--targets takes {', '.join(available)}; got {target!r}.{hint}")
        if available[target].chips > 1:
            raise ExperimentError(f"--targets: these networks run on one chip, as in v5e; got {target!r}.")
        if not available[target].available:
            raise ExperimentError(f"Nothing here compiles for {target}. Needed: {available[target].remedy}.")
    nets = {name: net_of(name) for name in options.nets}
    against = {name: competitors(net) for name, net in nets.items()}
    # The lengths of segments depend on the network, and one that has no such competitor does without it.
    known = list(dict.fromkeys(competitor.name for found in against.values() for competitor in found))
    for wanted in options.competitors:
        if wanted not in known:
            hint = did_you_mean(wanted, known)
            raise ExperimentError(f"--competitors takes {', '.join(known)}; got {wanted!r}.{hint}")
    wanted = {*(options.competitors or known), NO_REMAT}
    return [
        Contest(name, target, net, tuple(c for c in against[name] if c.name in wanted))
        for name, net in nets.items()
        for target in dict.fromkeys(options.targets)
    ]


def net_of(spelling: str) -> Net:
    """Returns a network of the benchmark, `resnet18`, at its own or another batch, `resnet18:32`.

    Raises:
        ExperimentError: there is none of that name, or the batch is no whole number of at least 1.
    """
    name, colon, batch = spelling.partition(":")
    if name not in NETS:
        raise ExperimentError(f"--nets takes {', '.join(NETS)}; got {spelling!r}.{did_you_mean(name, NETS)}")
    if not colon:
        return NETS[name]()
    if not batch.isdecimal() or int(batch) < 1:
        raise ExperimentError(f"--nets: a batch is a whole number of at least 1, as in {name}:32; got {spelling!r}.")
    sized: Callable[..., Net] = NETS[name]
    return sized(batch_size=int(batch))


def run(options: Options, say: Callable[[str], None]) -> tuple[Suite, int]:
    """Runs the cells that are asked for and returns their results, and how many were left for want of time.

    Args:
        options: what to run.
        say: gets a line for each cell.

    Raises:
        ExperimentError: as `contests`; or the file is none of results, or cannot be written.
    """
    path = None if options.out is None else Path(options.out).expanduser()
    todo = contests(options)
    if path is not None:
        records.require_appendable(str(path))
    results = plan_cells.read([path]) if path is not None and path.exists() else {}
    began, asked, left = time.perf_counter(), list[Cell](), 0
    for contest in todo:
        for cell, work in contest.cells(results):
            if cell in results and cell.kind not in options.again:
                asked.append(cell)
                continue
            if options.seconds is not None and time.perf_counter() - began > options.seconds:
                left += 1
                continue
            result = work()
            asked.append(cell)
            results[cell] = result
            if path is not None:
                plan_cells.append(path, result)
            say(progress(result, Suite(results)))
        gradients.reference.cache_clear()
        jax.clear_caches()
    return Suite({cell: results[cell] for cell in asked}), left


def progress(result: Result, suite: Suite) -> str:
    """Returns a line about a result; of a plan with what it means for the competitors of its budget."""
    cell = result.cell
    head = f"{result.date[11:19]} {cell.net} {cell.target}"
    tail = f"{result.seconds:.0f} s"
    if result.figures is not None:
        figures = f"{plan_tables.mib(result.figures.peak_bytes)} MiB, again {plan_tables.giga(result.figures.recomputed_flops)} GFLOP"
    else:
        figures = f"{result.status}: {result.why}"
    if cell.kind == "competitor":
        return f"{head}, {cell.asked}: {figures}; {tail}"
    rows = [row for row in suite.rows(cell.net, cell.target) if row.plan is result]
    lines = [f"{head}, plan for {plan_tables.mib(int(cell.asked))} MiB: {figures}; {tail}"]
    lines += [f"  {row.competitor.cell.asked}: {row.outcome}" for row in rows if not row.is_miss]
    lines += [f"  MISS {plan_tables.miss(row)}" for row in rows if row.is_miss]
    lines += [f"  MISS {plan_tables.wrong(plan, apart)}" for plan, apart in wrong_gradients(suite) if plan is result]
    return "\n".join(lines)


def is_beaten(suite: Suite) -> bool:
    """Returns whether a row misses, a claim that is no aim does, a gradient is wrong, or a plan reports what is not so."""
    claims = any(c.is_asked(suite) and not c.holds(suite) for c in CLAIMS if not c.is_aim)
    return claims or bool(plan_tables.faults(suite)) or bool(disagreements(suite))


def written(options: Options) -> Suite:
    """Returns the results of `--out`, or else those beside this package.

    Raises:
        ExperimentError: there are none, a file is damaged, or options for a run are given.
    """
    others = replace(options, readme=None, picture=None, out=None)
    if others != Options():
        raise ExperimentError("--readme and --picture run nothing, so that beside them --out alone has a meaning.")
    files = sorted(RESULTS.glob("plan*.jsonl")) if options.out is None else [Path(options.out).expanduser()]
    if not files:
        raise ExperimentError(f"experiments/{RESULTS.name} must hold results, plan*.jsonl; it holds none.")
    return Suite(plan_cells.read(files))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and a line of JSON; returns 0, 1 where the planner is beaten, 2 for bad input."""
    options = tyro.cli(Options, prog="python -m experiments.bench plan", args=argv)
    try:
        if options.readme is not None or options.picture is not None:
            return _write(options)
        forbid_fused_multiply_add()
        suite, left = run(options, lambda line: print(line, file=sys.stderr, flush=True))
    except (ExperimentError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted. With --out, the same command goes on with the cells that the file lacks.", file=sys.stderr)
        return 130
    print(plan_tables.plain(suite))
    beaten = is_beaten(suite)
    misses = plan_tables.faults(suite)
    result = {"bench": "plan", "options": asdict(options), "cells": len(suite.results), "left": left}
    print(json.dumps(result | {"misses": misses, "beaten": beaten, "versions": records.versions()}), flush=True)
    return 1 if beaten else 0


def _write(options: Options) -> int:
    suite, answer = written(options), dict[str, bool]()
    if options.readme is not None:
        path = Path(options.readme).expanduser()
        answer["changed"] = not update_block(path, "plan", plan_tables.markdown(suite), write=True)
    if options.picture is not None:
        picture(suite, options.picture)
    print(json.dumps({"readme": options.readme, "picture": options.picture, **answer}))
    return 0
