"""`Frontier` and its `Point`s: the curve of peak against recomputation, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxremat import policy as p
from jaxremat.plan.plot import draw
from jaxremat.plan.result import short
from jaxremat.policy import Policy
from jaxremat.text import human_bytes, table

_HEADER = ("policy", "peak", "predicted", "recomputed GFLOP", "of forward", "lower bound", "")
_RIGHT = (1, 2, 3, 4, 5)


@dataclass(frozen=True, repr=False)
class Point(Policy):
    """A policy with what it needs and what it recomputes. `jaxremat.remat` takes it like any policy.

    Attributes:
        policy: what it stores.
        predicted_bytes: the peak as the planner pictures it; level: model.
        peak_bytes: the peak as the target's compiler allots it; None where no compiler was asked.
        recomputed_contraction_flops: of convolutions and matrix products that run again.
        recomputed_flops: of all that runs again.
        cost: that in the objective.
        bound: no schedule within this peak recomputes less, in the objective.
    """

    policy: Policy
    predicted_bytes: int
    peak_bytes: int | None
    recomputed_contraction_flops: int
    recomputed_flops: int
    cost: float
    bound: float

    def resolved(self) -> Policy:
        """Returns the policy that `remat` applies."""
        return self.policy

    def __str__(self) -> str:
        return str(self.policy)

    def __repr__(self) -> str:
        where = f"predicted {human_bytes(self.predicted_bytes)}"
        return f"<Point {short(self.policy)}: {human_bytes(self.peak_bytes) if self.peak_bytes is not None else where}>"

    @property
    def height_bytes(self) -> int:
        """The compiled peak; where no compiler was asked the predicted one."""
        return self.predicted_bytes if self.peak_bytes is None else self.peak_bytes


@dataclass(frozen=True, repr=False)
class Frontier:
    """What a budget buys: the policies that no other one beats in both peak and recomputation. Prints as a table.

    Attributes:
        points: by rising peak, and so by falling recomputation.
        beaten: what was weighed beside and needs more than a point that recomputes no more: most standard policies.
        target: for which chip.
        objective: what recomputation was measured in: `flops`, `bytes` or `time`.
        without_remat_bytes: the peak of no rematerialization.
        forward_flops: of one forward pass.
        is_compiled: whether peaks are the compiler's. If not, they are the planner's model's.
        seconds: how long it took, compilations included.
        versions: of the packages that the compiled figures depend on.
    """

    points: tuple[Point, ...]
    beaten: tuple[Point, ...]
    target: str
    objective: str
    without_remat_bytes: int
    forward_flops: int
    is_compiled: bool
    seconds: float
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """Returns all figures as one JSON document; policies as their spellings, which `jaxremat.parse` reads."""
        document = {**asdict(self), "versions": dict(self.versions)}
        for part in ("points", "beaten"):
            document[part] = [{**asdict(point), "policy": str(point)} for point in getattr(self, part)]
        return json.dumps(document, indent=1)

    def plot(self, path: str | Path) -> Path:
        """Writes a picture of the curve, whole or not at all, and returns its path.

        Args:
            path: ends in `.svg` or `.png`.

        Raises:
            ValueError: it ends otherwise.
            ImportError: matplotlib is not installed; the message says how.
            OSError: the file cannot be written.
        """
        unit = self.forward_flops or 1

        def marks(points: Sequence[Point]) -> list[tuple[float, int, str]]:
            found = [p.Values, p.Loops]  # which have no name that says anything
            return [
                (q.recomputed_flops / unit, q.height_bytes, "" if type(q.policy) in found else str(q)) for q in points
            ]

        source = "compiled" if self.is_compiled else "predicted"
        return draw(
            path, marks(self.points), marks(self.beaten), f"{source} peak on {self.target}", self.without_remat_bytes
        )

    def __str__(self) -> str:
        source = "compiled" if self.is_compiled else "no compiler was asked: the planner's model decided"
        head = (
            f"Frontier on {self.target} ({source}); without rematerialization {human_bytes(self.without_remat_bytes)}; "
            f"one forward pass {self.forward_flops / 1e9:,.2f} GFLOP; found in {self.seconds:.1f} s"
        )
        rows = [self._cells(point, "") for point in self.points] + [
            self._cells(point, "beaten") for point in self.beaten
        ]
        return f"{head}\n\n{table(_HEADER, rows, _RIGHT)}"

    def __repr__(self) -> str:
        return f"<Frontier of {len(self.points)} points on {self.target}>"

    def _cells(self, point: Point, note: str) -> tuple[str, ...]:
        fraction = point.recomputed_flops / self.forward_flops if self.forward_flops else 0.0
        flops = self.objective == "flops"
        return (
            short(point),
            "" if point.peak_bytes is None else human_bytes(point.peak_bytes),
            human_bytes(point.predicted_bytes),
            f"{point.recomputed_flops / 1e9:,.2f}",
            f"{fraction:.1%}",
            f"{point.bound / 1e9:,.2f}" if flops else f"{point.bound:.3g} {self.objective}",
            note,
        )
