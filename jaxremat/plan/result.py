"""`Plan`: what the planner found: a policy, with what it predicts, what the compiler says, and how good it can be at best."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxremat.errors import PolicyError
from jaxremat.policy import Policy
from jaxremat.spelling import parse
from jaxremat.text import human_bytes, table

_FORMAT = 1


@dataclass(frozen=True)
class Share:
    """What a plan does with the values of one operation in one module.

    Attributes:
        path: the module path, repeated modules merged (`stage*_block*/conv1`).
        op: the operation.
        stored: how many values are stored.
        stored_bytes: their bytes in device memory.
        recomputed: how many are computed again.
        recomputed_flops: what that costs.
        host_bytes: the bytes of the stored ones in host memory.
    """

    path: str
    op: str
    stored: int
    stored_bytes: int
    recomputed: int
    recomputed_flops: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Attempt:
    """One policy that was weighed.

    Attributes:
        policy: its spelling, shortened where it is a long list of positions.
        predicted_bytes: what the planner expected.
        peak_bytes: what the compiler allotted; None where it was not asked, or did not say.
        recomputed_flops: of contractions and all else.
    """

    policy: str
    predicted_bytes: int
    peak_bytes: int | None
    recomputed_flops: int


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Policy):
    """A policy that keeps a program's peak within a budget at the least recomputation that was found.

    It can be given to `jaxremat.remat` like any policy. `str(plan.policy)` is its spelling; `print(plan)` shows it.

    Attributes:
        policy: what it stores: a standard policy where that is best, else `values:`.
        budget_bytes: what the peak had to stay within.
        target: for which chip.
        objective: what recomputation was measured in: `flops`, `bytes` or `time`.
        predicted_bytes: the peak as the planner pictures it; level: model.
        peak_bytes: the peak as the target's compiler allots it; None where no compiler was asked.
        without_remat_bytes: that of no rematerialization, from the compiler where one was asked, else from the model.
        recomputed_contraction_flops: of convolutions and matrix products that run again.
        recomputed_flops: of all that runs again.
        forward_flops: of one forward pass.
        bound: no schedule within the budget recomputes less than this, in the objective.
        cost: what this plan recomputes, in the objective; with what it costs to use the host's memory.
        shares: what is stored and recomputed, by module and operation.
        attempts: all that was weighed against the compiler, or with the model.
        seconds: how long planning took, compilations included.
        search_seconds: how long the search alone took.
        versions: of the packages that the compiled figures depend on.
        note: what the user should know about this plan, in a sentence; often empty.
        host_bytes: what is kept in host memory; by the trace.
        program: the fingerprint of the function that was planned: another one refuses the plan.
    """

    policy: Policy
    budget_bytes: int
    target: str
    objective: str
    predicted_bytes: int
    peak_bytes: int | None
    without_remat_bytes: int
    recomputed_contraction_flops: int
    recomputed_flops: int
    forward_flops: int
    bound: float
    cost: float
    shares: Sequence[Share]
    attempts: Sequence[Attempt]
    seconds: float
    search_seconds: float
    versions: Mapping[str, str]
    note: str = field(default="")
    host_bytes: int = 0
    program: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.policy, self.budget_bytes, self.target))

    def __repr__(self) -> str:
        return f"<Plan {short(self.policy)} for {human_bytes(self.budget_bytes)} on {self.target}>"

    def resolved(self) -> Policy:
        """Returns the policy that `remat` applies."""
        return self.policy

    def planned_for(self) -> str:
        """Returns the fingerprint of the function that was planned."""
        return self.program

    @property
    def gap(self) -> float:
        """The distance to the lower bound, as a part of the forward pass' operations; 0 where the plan is proven optimal.

        Under another objective than `flops` it is the distance as a part of the plan's own cost.
        """
        distance = max(0.0, self.cost - self.bound)
        if self.objective == "flops":
            return distance / self.forward_flops if self.forward_flops else 0.0
        return distance / self.cost if self.cost else 0.0

    def to_json(self) -> str:
        """Returns the plan as one JSON document; `load_plan` reads it."""
        document = {**asdict(self), "policy": str(self.policy), "format": _FORMAT}
        document["versions"] = dict(self.versions)
        return json.dumps(document, indent=1)

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file, whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "Plan.save: there is no such directory", str(path.parent))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Plan.save: needs the path of a file; this is a directory", str(path))
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")  # no other writer's
        try:
            part.write_text(self.to_json() + "\n", encoding="utf-8")
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _host_line(self) -> str:
        line = f"  host memory      {human_bytes(self.host_bytes)}, sent there and fetched"
        if self.objective != "flops":
            return line
        return f"{line}, which counts as {(self.cost - self.recomputed_flops) / 1e9:,.2f} GFLOP"

    def __str__(self) -> str:
        fraction = self.recomputed_flops / self.forward_flops if self.forward_flops else 0.0
        peak = "not compiled" if self.peak_bytes is None else human_bytes(self.peak_bytes)
        lines = [
            f"Plan for {human_bytes(self.budget_bytes)} on {self.target}: {short(self.policy)}",
            f"  compiled peak    {peak} (without rematerialization {human_bytes(self.without_remat_bytes)}, "
            f"predicted {human_bytes(self.predicted_bytes)})",
            f"  recomputed       {self.recomputed_flops / 1e9:,.2f} GFLOP, {fraction:.1%} of the forward pass; "
            f"convolutions and matrix products {self.recomputed_contraction_flops / 1e9:,.2f} GFLOP",
            f"  lower bound      {self.bound / 1e9:,.2f} GFLOP; distance {self.gap:.2%} of the forward pass"
            if self.objective == "flops"
            else f"  lower bound      {self.bound:.3g} of {self.cost:.3g} ({self.objective}); distance {self.gap:.2%}",
            *([self._host_line()] if self.host_bytes else []),
            f"  planned in       {self.seconds:.1f} s, {self.search_seconds:.2f} s of it searching",
        ]
        if self.note:
            lines.append(f"  note             {self.note}")
        rows = [
            (s.path, s.op, str(s.stored or ""), human_bytes(s.stored_bytes) if s.stored_bytes else "", str(s.recomputed or ""),
             f"{s.recomputed_flops / 1e9:,.2f}" if s.recomputed else "", human_bytes(s.host_bytes) if s.host_bytes else "")
            for s in self.shares
        ]  # fmt: skip
        if rows:
            header = ("module", "op", "stored", "bytes", "recomputed", "GFLOP", "on the host")
            shown = len(header) if self.host_bytes else len(header) - 1
            lines += ["", table(header[:shown], [row[:shown] for row in rows], right=tuple(range(2, shown)))]
        return "\n".join(lines)


def short(policy: Policy) -> str:
    """Returns a policy's spelling, of lists of positions only how many there are."""

    def counted(values: re.Match[str]) -> str:
        levels = values[1].split("/")
        count = sum(level.count(",") + 1 for level in levels)
        return f"{count} stored values" + (f" on {len(levels)} levels" if len(levels) > 1 else "")

    return re.sub(r"values:([\d,/^]+)(@[0-9a-f]+)?", counted, str(policy))


def load_plan(path: str | Path) -> Plan:
    """Returns a plan that `Plan.save` wrote.

    Whether it fits the program is checked when it is applied: a plan of another program is refused there.

    Args:
        path: the file.

    Raises:
        PolicyError: the file holds no plan.
        OSError: it cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        text = content.decode()
        document: dict[str, Any] = json.loads(text)
        if document.pop("format") != _FORMAT:
            raise ValueError("it has another format")
        document["policy"] = parse(document["policy"])
        document["shares"] = tuple(Share(**share) for share in document["shares"])
        document["attempts"] = tuple(Attempt(**attempt) for attempt in document["attempts"])
        return Plan(**document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(
            f"load_plan: {path} holds no plan that Plan.save of this version wrote ({error}). Make it anew with jaxremat.plan."
        ) from None
