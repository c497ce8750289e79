"""`python -m experiments.cifar --dry-run`: what each policy would cost on each chip, compiled and not run.

    python -m experiments.cifar --model resnet18 --batch-size 512 --policy nothing,dots,segments:sqrt \\
        --target h100,v5e --dry-run --plot cost.png

The step is the one that training runs: parameters, optimizer state, statistics and the whole training set on the device,
the state donated. No data set is read, and no accelerator is opened unless `local` is among the targets.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jaxremat
from experiments import budgets, devices, policies, program, records
from experiments.cifar_files import CLASSES
from experiments.config import Config, check
from experiments.data import TRAINING_IMAGES
from experiments.errors import ExperimentError
from experiments.largest_batch import Probe, find_largest_batch
from experiments.plots import FORMATS
from jaxremat.flops import count_flops
from jaxremat.plan.result import short
from jaxremat.policy import Budget, Everything

# What has no meaning where nothing is trained: refused, not ignored.
_TRAINING_ONLY = ("data_dir", "checkpoint_dir", "out", "max_steps", "coordinator", "num_processes", "process_id")

Say = Callable[[str], None]


@dataclass(frozen=True)
class DryRun:
    """Compiling instead of training."""

    dry_run: bool = False
    """Train nothing: print what each of several policies (--policy dots,nothing,segments:sqrt) costs on each target."""
    target: str | None = None
    """Chips to compile for, attached or not, such as h100,v5e or h100:4 (default: local). With --dry-run; and one of
    them with a budget, which is then planned for it."""
    largest_batch: bool = False
    """Find the largest batch that fits, per policy and target. With --dry-run."""
    plot: str | None = None
    """Draw peak against recomputation to this file, .svg or .png. With --dry-run."""


@dataclass(frozen=True)
class Row:
    """What one policy costs on one target, or why that is not known.

    Attributes:
        target: the chip, or chips.
        policy: its spelling; None in the one row of a target that nothing here compiles for.
        resolved: the spelling of what was planned for a budget; None for other policies, and where no plan was found.
        plan: the figures of that plan.
        regions: where the policy is applied: round the whole loss (net) or to each block.
        residual_bytes: kept for the backward pass of the whole batch, from the trace.
        peak_bytes: of the whole step on one chip, from the compiler; where it ran out of memory, what it wanted.
        temp_bytes: the part of it that is neither arguments nor results, as the compiler allots it; on TPUs, which
            leave gaps, it can be more than the peak has room for.
        fits: the peak is within the chip's memory.
        memory_bytes: of one chip.
        flops: of the whole step and batch, counted from the trace; None with loops of unknown length.
        recomputed_flops: how many more than without rematerialization.
        compile_seconds: that the compiler took, today or when the figures were kept; None where it failed.
        largest_batch: that fits, where asked for and found; 0 where none does.
        largest_batch_is_limit: it is as large as the training set allows.
        problem: why figures are missing, and what to do.
    """

    target: str
    policy: str | None
    resolved: str | None = None
    plan: dict[str, Any] | None = None
    regions: policies.Regions | None = None
    residual_bytes: int | None = None
    peak_bytes: int | None = None
    temp_bytes: int | None = None
    fits: bool | None = None
    memory_bytes: int | None = None
    flops: int | None = None
    recomputed_flops: int | None = None
    compile_seconds: float | None = None
    largest_batch: int | None = None
    largest_batch_is_limit: bool = False
    problem: str | None = None


def check_options(options: DryRun, config: Config) -> None:
    """Refuses options that only a dry run heeds where none is asked for, and a picture that cannot be written.

    Raises:
        ExperimentError: naming the option.
        PolicyError: a target to train for, and a policy that is none.
    """
    if not options.dry_run:
        values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        given = [name for name, value in values.items() if value not in (None, False)]
        if "target" in given and any(isinstance(policy, Budget) for policy in policies.split_policies(config.policy)):
            given.remove("target")
            if len(names := _names(options.target)) > 1:
                raise ExperimentError(
                    f"--target takes one target to plan a training for, and several only with --dry-run; got {len(names)}: "
                    f"{' and '.join(names)}."
                )
        if given:
            instead = ", or a budget to plan for it (--policy budget:4GiB)" if given[0] == "target" else ""
            raise ExperimentError(
                f"--{given[0].replace('_', '-')} needs --dry-run{instead}: training compiles for its own devices."
            )
    if options.plot is not None:
        if not options.plot.endswith(FORMATS):
            raise ExperimentError(f"--plot must name a file that ends in {' or '.join(FORMATS)}; got {options.plot!r}.")
        records.require_appendable(options.plot, "--plot")


def run(config: Config, options: DryRun, say: Say) -> list[Row]:
    """Compiles the training step for every policy and target; the first row of each target is without rematerialization.

    Args:
        config: the run; `policy` may name several.
        options: the targets, and what to find out.
        say: gets a line of progress for each compilation.

    Returns:
        The rows, targets in the order asked for. What a compiler refuses, or a compiler that is not installed, is a
        row with its `problem`.

    Raises:
        ExperimentError: an option or number that no run can have.
        PolicyError: a policy that is none, or that cannot be applied to the model.
        TargetError: a target that does not exist.
    """
    check_options(options, config)
    for name in _TRAINING_ONLY:
        if getattr(config, name) is not None:
            raise ExperimentError(f"--{name.replace('_', '-')} belongs to training and has no meaning with --dry-run.")
    chosen = dict.fromkeys([Everything(), *policies.split_policies(config.policy)])
    configs = [dataclasses.replace(config, policy=str(policy)) for policy in chosen]
    for each in configs:
        check(each)
    targets = list(dict.fromkeys(jaxremat.targets()[name] for name in _names(options.target)))
    images = TRAINING_IMAGES[config.data]
    for target in targets:
        if target.available:
            devices.check_batch_on(target, config.batch_size, images)
    compiler = _Compiler(images, say)
    # What a budget means is planned for each target.
    plain = [
        Row("", each.policy, regions="net") if budgets.is_budget(each) else compiler.traced_row(each)
        for each in configs
    ]
    rows = list[list[Row]]()
    work = dict[str, list[Callable[[], None]]]()
    for target in targets:
        if not target.available:
            rows.append([Row(target.name, None, memory_bytes=target.memory_bytes, problem=devices.why_missing(target))])
            continue
        mine = [
            dataclasses.replace(
                row,
                target=target.name,
                memory_bytes=target.memory_bytes,
                recomputed_flops=_difference(row.flops, plain[0].flops),
            )
            for row in plain
        ]
        rows.append(mine)
        for i, each in enumerate(configs):

            def complete(mine: list[Row] = mine, i: int = i, each: Config = each, target: jaxremat.Target = target):
                if budgets.is_budget(each):
                    mine[i] = compiler.planned(mine[i], each, target, plain[0].flops, options.largest_batch)
                else:
                    mine[i] = compiler.complete(mine[i], each, target, options.largest_batch)

            work.setdefault(target.kind, []).append(complete)
    # Each kind has a compiler process of its own, and some take a minute where others take seconds.
    run_queues(list(work.values()))
    return [row for of_target in rows for row in of_target]


def _names(targets: str | None) -> list[str]:
    return ["local"] if targets is None else [name.strip() for name in targets.split(",")]


def _difference(flops: int | None, plain_flops: int | None) -> int | None:
    return None if flops is None or plain_flops is None else flops - plain_flops


class _RefusedError(Exception):
    """A batch that the compiler refused for another reason than memory."""


class _Compiler:
    """Compiles the steps of configurations; each is built once for so many devices, whatever their kind."""

    def __init__(self, images: int, say: Say):
        self._images = images
        self._say = say
        self._applied = dict[Config, program.Applied]()
        self._built = dict[tuple[Config, devices.Devices, bool], tuple[program.Parts, Any]]()

    def _under_policy(self, config: Config) -> program.Applied:
        key = dataclasses.replace(config, batch_size=1)  # it is the same for every batch
        if key not in self._applied:
            self._applied[key] = program.apply_policy(config, len(CLASSES))
        return self._applied[key]

    def _build(self, config: Config, over: devices.Devices, here: bool) -> tuple[program.Parts, Any]:
        key = (config, over, here)
        if key not in self._built:
            parts = program.describe(config, self._under_policy(config), self._images, over)
            self._built[key] = parts, parts.jit_step(jaxremat.compiler_options() if here else None)
        return self._built[key]

    def traced_row(self, config: Config) -> Row:
        """Returns the part of a row that is the same on all targets."""
        parts, step = self._build(config, devices.absent_devices(1), here=False)
        applied = self._under_policy(config)
        kept = applied.residual_bytes(config.batch_size)
        flops = count_flops(step.trace(parts.state, parts.training, parts.order).jaxpr).flops
        return Row("", config.policy, regions=applied.regions, residual_bytes=kept, flops=flops)

    def complete(self, row: Row, config: Config, target: jaxremat.Target, with_largest_batch: bool) -> Row:
        """Returns the row with what the compiler of its target says."""
        row = dataclasses.replace(row, **self._figures(config, target))
        return dataclasses.replace(row, **self._largest_batch(row, config, target)) if with_largest_batch else row

    def planned(
        self, row: Row, config: Config, target: jaxremat.Target, plain_flops: int | None, with_largest_batch: bool
    ) -> Row:
        """Returns the row of a budget: the figures of the step under its plan for the target, or why there is none."""
        try:
            applied, plan = budgets.plan_run(config, target, self._images, self._say)
        except (jaxremat.PolicyError, jaxremat.CompileError) as error:
            return dataclasses.replace(row, problem=str(error))
        under = budgets.resolved(config, plan)
        self._applied[dataclasses.replace(under, batch_size=1)] = applied
        traced = self.traced_row(under)
        row = dataclasses.replace(
            row,
            resolved=under.policy,
            plan=budgets.as_json(plan),
            residual_bytes=traced.residual_bytes,
            flops=traced.flops,
            recomputed_flops=_difference(traced.flops, plain_flops),
        )
        row = self.complete(row, under, target, with_largest_batch=False)
        if with_largest_batch and row.problem is None:
            problem = (
                f"largest batch: a plan is for one batch; give --batch-size with {config.policy}, one after another"
            )
            return dataclasses.replace(row, problem=problem)
        return row

    def _figures(self, config: Config, target: jaxremat.Target) -> dict[str, Any]:
        parts, step = self._build(config, devices.devices_of(target), target.kind == "local")
        where = f"{target.name}  {short(jaxremat.parse(config.policy))}  batch {config.batch_size}"
        try:
            cost = jaxremat.cost(step, parts.state, parts.training, parts.order, target=target.name)
        except jaxremat.CompileError as error:
            self._say(f"{where}: {error}")
            fits = None if error.wanted_bytes is None else False
            return {"peak_bytes": error.wanted_bytes, "fits": fits, "problem": str(error)}
        self._say(f"{where}: {cost.peak_bytes / 2**20:,.1f} MiB, compiled in {cost.compile_seconds:.1f} s")
        return {
            "peak_bytes": cost.peak_bytes,
            "temp_bytes": cost.temp_bytes,
            "fits": cost.fits,
            "compile_seconds": cost.compile_seconds,
        }

    def _largest_batch(self, row: Row, config: Config, target: jaxremat.Target) -> dict[str, Any]:
        if row.fits is None or row.memory_bytes is None:
            return {"problem": row.problem or f"the memory of {target.name} is unknown, so no batch is known to fit"}

        def probe(batch: int) -> Probe:
            if batch == config.batch_size:
                return Probe(bool(row.fits), row.peak_bytes)
            figures = self._figures(dataclasses.replace(config, batch_size=batch), target)
            if figures["fits"] is None:
                raise _RefusedError(f"largest batch: with {batch}, {figures['problem']}")
            return Probe(figures["fits"], figures["peak_bytes"])

        try:
            found = find_largest_batch(
                probe,
                start=config.batch_size,
                unit=devices.devices_of(target).count,
                limit=self._images,
                memory_bytes=row.memory_bytes,
            )
        except _RefusedError as error:
            return {"problem": str(error)}
        return {"largest_batch": found.batch_size, "largest_batch_is_limit": found.is_limit}


def run_queues(queues: Sequence[Sequence[Callable[[], None]]]) -> None:
    """Runs every queue of calls in a thread of its own, and raises the first exception of any.

    The threads are daemons: an interrupt ends the process at once, and no compilation is waited for.
    """
    done = queue.SimpleQueue[BaseException | None]()

    def work(calls: Sequence[Callable[[], None]]) -> None:
        try:
            for call in calls:
                call()
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)

    for calls in queues:
        threading.Thread(target=work, args=(calls,), daemon=True).start()
    for _ in queues:
        error = done.get()
        if error is not None:
            raise error
