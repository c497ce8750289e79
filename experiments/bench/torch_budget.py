"""`torch.compile`'s memory budget at ten settings, and this planner at the same parts of the peak, on one network.

    python -m experiments.bench torch_budget --model wrn16_4

PyTorch's budget is a part of what is kept for the backward pass, the planner's a part of the peak of a step; on a CPU, forward
and backward pass together. *kept* is counted from the storages, *peak* from the allocator's events of one step. *again* are
operations of PyTorch's backward graph beyond those of its graph at a budget of 1: convolutions and matrix products, and all
others. For the planner *peak* is XLA:CPU's allotment, parameters and batch included, and *again* what its plan reports.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import jax
import tyro
from rich.table import Table

import jaxremat
from experiments import records
from experiments.bench import output
from experiments.cifar_torch import require_torch
from experiments.command import exit_status
from experiments.compare_records import hardware
from experiments.config import Config
from experiments.errors import ExperimentError
from experiments.models import ModelName
from experiments.program import apply_policy
from jaxremat import PolicyError
from jaxremat.policy import Budget

CLASSES = 10
SETTINGS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
_CONTRACTIONS = ("convolution", "mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Options:
    """What to compile."""

    model: ModelName = "wrn16_4"
    batch_size: int = 16
    settings: Annotated[tuple[float, ...], tyro.conf.arg(help="budgets, each from 0 to 1")] = SETTINGS


@dataclass(frozen=True)
class Row:
    """One budget; sizes in bytes. The planner's figures are None where no plan fits or none was asked for."""

    budget: float
    kept_bytes: int
    peak_bytes: int
    contractions_again: int
    others_again: int
    plan_peak_bytes: int | None = None
    plan_contraction_flops: int | None = None
    plan_flops: int | None = None


class Torch:
    """The network in PyTorch under any budget, on one batch of noise."""

    def __init__(self, model: ModelName, batch_size: int) -> None:
        import torch

        from experiments import torch_models, torch_training

        torch.manual_seed(0)
        self._network = torch_models.build(model).train()
        self._images, self._labels = torch.randn(batch_size, 3, 32, 32), torch.randint(CLASSES, (batch_size,))
        self._loss = torch_training.make_loss(self._labels)
        self._at_one = self.backward_operations(1.0)

    def row(self, budget: float) -> Row:
        """Returns what a budget makes of a step."""
        import torch

        from experiments import torch_measure, torch_policies

        torch._dynamo.reset()
        applied = torch_policies.apply(self._network, Budget(max(budget, 1e-9)))  # 0 is no budget here

        def step() -> None:
            self._network.zero_grad(set_to_none=True)
            self._loss(applied.forward(self._images)).backward()

        step()  # compiles
        rows = torch_measure.kept(self._network, applied, self._loss, self._images, [self._labels])
        self._network.zero_grad(set_to_none=True)
        peak_bytes = torch_measure.peak_bytes(step, torch.device("cpu"))
        again = self.backward_operations(budget) - self._at_one
        contractions = sum(count for name, count in again.items() if name in _CONTRACTIONS)
        return Row(budget, sum(r.size_bytes for r in rows), peak_bytes, contractions, again.total() - contractions)

    def backward_operations(self, budget: float) -> Counter[str]:
        """How often each operation stands in the backward graph that the partitioner makes; nothing is generated."""
        import torch
        from functorch.compile import min_cut_rematerialization_partition, nop
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch import config

        counts = Counter[str]()

        def count(graph: Any, examples: Any) -> Any:
            names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            counts.update(name.split(".")[1] if name.startswith("aten.") else name for name in names)
            return nop(graph, examples)

        backend: Any = aot_autograd(
            fw_compiler=nop, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
        )
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=budget):
            self._loss(torch.compile(self._network, dynamic=False, backend=backend)(self._images)).backward()
        return counts


def planned(model: ModelName, batch_size: int, budget: float) -> dict[str, int]:
    """Returns the planner's fields of a row; none where no plan fits."""
    applied = apply_policy(Config(policy="everything", model=model, batch_size=batch_size), CLASSES)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), applied.arguments(batch_size))
    try:
        found = jaxremat.plan(lambda *args: applied.loss(*args)[0], *args, budget=budget)
    except PolicyError:
        return {}
    assert found.peak_bytes is not None
    return {
        "plan_peak_bytes": found.peak_bytes,
        "plan_contraction_flops": found.recomputed_contraction_flops,
        "plan_flops": found.recomputed_flops,
    }


def _table(options: Options, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{options.model}, batch {options.batch_size}, on a CPU; MiB")
    columns = (
        "budget",
        "PyTorch kept",
        "peak",
        "again: conv+dot",
        "others",
        "planner: peak",
        "again: GFLOP",
        "all GFLOP",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        plan = ("no plan", "", "")
        if row.plan_peak_bytes is not None and row.plan_contraction_flops is not None and row.plan_flops is not None:
            flops = (f"{row.plan_contraction_flops / 1e9:.3f}", f"{row.plan_flops / 1e9:.3f}")
            plan = (f"{row.plan_peak_bytes / 2**20:.1f}", *flops)
        torch_figures = (f"{row.kept_bytes / 2**20:.1f}", f"{row.peak_bytes / 2**20:.1f}")
        again = (str(row.contractions_again), str(row.others_again))
        table.add_row(f"{row.budget:g}", *torch_figures, *again, *plan)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and a line of JSON; returns the exit status."""
    options = tyro.cli(Options, prog="python -m experiments.bench torch_budget", args=argv)
    return exit_status(partial(_run, options), interrupted="Nothing is kept.")


def _run(options: Options) -> int:
    require_torch()
    if options.batch_size < 2:
        raise ExperimentError(f"--batch-size must be at least 2; got {options.batch_size}.")
    if not options.settings or not all(0 <= budget <= 1 for budget in options.settings):
        raise ExperimentError(f"--settings takes budgets from 0 to 1; got {options.settings}.")
    ours, rows = Torch(options.model, options.batch_size), list[Row]()
    for budget in options.settings:
        row = ours.row(budget)
        # The planner's budget is above nothing: there is no plan for 0.
        more = planned(options.model, options.batch_size, budget) if budget else {}
        rows.append(Row(**{**asdict(row), **more}))
        print(f"done: {budget:g}", file=sys.stderr, flush=True)
    import torch

    result = {
        "bench": "torch_budget",
        "date": records.now(),
        "hardware": hardware(),
        "versions": records.versions() | {"torch": torch.__version__, "jax": jax.__version__},
        "options": asdict(options),
        "rows": [asdict(row) for row in rows],
    }
    output.show(_table(options, rows), result)
    return 0
