"""`borders`: where to cut a function into segments, for `segments:n`.

Checkpointing in segments (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174) keeps what
crosses from one segment to the next and recomputes a segment when the backward pass reaches it: memory is the sum of the
borders plus the largest segment, O(sqrt n) for a chain of n equal layers cut into sqrt(n) segments.

The cuts here work for any function: between every two forward equations some bytes cross; where few do is a *waist*, and
the cuts are put at those waists that make borders plus largest segment smallest; behind a matrix product or a convolution
where there are enough such waists, since what is stored there need not be multiplied again. The last segment is not
recomputed: its values are used at once. What is not done here: several levels of segments, and segments of unequal cost chosen under a byte limit.
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxremat.compat import Var
from jaxremat.errors import PolicyError
from jaxremat.graph import Graph

# Among more places than this, or than two for each segment, only evenly spaced ones are weighed: the search is quadratic.
_PLACES = 128
LAYERS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def borders(graph: Graph, count: int | None) -> dict[Var, str]:
    """Returns the values that `segments:count` stores, each with the reason.

    Args:
        graph: a function's forward and backward pass.
        count: the number of segments; None for the square root of the number of layers: of matrix products and
            convolutions, or of waists where there are none.

    Raises:
        PolicyError: the function has fewer waists than the segments need.
    """
    crossing, kept_bytes = _crossings(graph)
    cuts = _waists(crossing)
    layers = [index for index in graph.primal if graph.forward[index].primitive.name in LAYERS]
    wanted = min(max(1, math.ceil(math.sqrt(len(layers) or len(cuts)))), len(cuts) + 1) if count is None else count
    if wanted > len(cuts) + 1:
        raise PolicyError(
            f"segments:{wanted}: this function can be cut at {len(cuts)} narrow places, into at most {len(cuts) + 1} "
            "segments; ask for fewer, or for segments:sqrt."
        )
    behind_layers = [c for c in cuts if all(graph.maker[v] in layers for v in crossing[c])]
    cuts = behind_layers if len(behind_layers) >= wanted - 1 else cuts
    limit = max(_PLACES, 2 * wanted)
    if len(cuts) > limit:
        cuts = [cuts[i] for i in np.linspace(0, len(cuts) - 1, limit).astype(int)]
    chosen = _place(cuts, kept_bytes, [sum(_size(graph, v) for v in crossing[c]) for c in cuts], wanted)
    spelling = f"segments:{'sqrt' if count is None else count}"
    stored = {
        var: f"{spelling} (border {number})" for number, cut in enumerate(chosen, 1) for var in crossing[cut]
    }  # fmt: skip
    last = chosen[-1] if chosen else -1
    for var in graph.residuals:
        root = graph.root(var)
        if isinstance(root, Var) and root in graph.maker and graph.maker[root] > last and _size(graph, root):
            stored.setdefault(root, f"{spelling} (the last segment is used at once)")
    return stored


def _size(graph: Graph, var: Var) -> int:
    return graph.value_of[var].size_bytes


def _crossings(graph: Graph) -> tuple[list[list[Var]], np.ndarray]:
    """What crosses each place between two equations, and the bytes that reverse mode would keep up to there.

    A value crosses while an equation that the outputs need still reads it. Small values are stored anyway and constants
    cost nothing: they do not count.
    """
    last_read = dict[Var, int]()
    for index in sorted(graph.primal):
        for atom in graph.forward[index].invars:
            if isinstance(root := graph.root(atom), Var):
                last_read[root] = index
    alive = list[Var]()
    crossing = list[list[Var]]()
    kept = np.zeros(len(graph.forward) + 1, np.int64)
    residuals = {root for v in graph.residuals if isinstance(root := graph.root(v), Var)}
    for index, eqn in enumerate(graph.forward):
        kept[index + 1] = kept[index]
        for var in eqn.outvars:
            if var not in graph.value_of or graph.root(var) is not var:
                continue
            size = _size(graph, var)
            kept[index + 1] += size if var in residuals else 0
            if size > graph.small_bytes and index in graph.primal:
                alive.append(var)
        alive = [v for v in alive if last_read.get(v, -1) > index]
        crossing.append(list(alive))
    return crossing, kept


def _waists(crossing: Sequence[Sequence[Var]]) -> list[int]:
    """The places to cut: those crossed by one value, or where there are none, by the fewest; each set of values once.

    A value is cut where it is first alone: all that was needed to make it lies before the cut.
    """
    alone = dict[frozenset[Var], int]()
    fewest = min((len(vs) for vs in crossing if vs), default=0)
    for place, values in enumerate(crossing):
        if values and len(values) == fewest:
            alone.setdefault(frozenset(values), place)
    return list(alone.values())


def _place(cuts: Sequence[int], kept: np.ndarray, border_bytes: Sequence[int], count: int) -> list[int]:
    """Chooses count - 1 of the cuts so that the borders' bytes plus the largest segment are least."""
    if count == 1:
        return []
    ends = [*cuts, len(kept) - 2]
    inside = lambda first, last: int(kept[ends[last] + 1] - (kept[ends[first] + 1] if first >= 0 else 0))  # noqa: E731
    n = len(cuts)
    # best[k][j]: least (largest segment, borders) of k segments that end at cut j; the last segment ends at the end.
    best: list[dict[int, tuple[int, int, int]]] = [{j: (inside(-1, j), border_bytes[j], -1) for j in range(n)}]
    for _ in range(count - 2):
        row = dict[int, tuple[int, int, int]]()
        for j in range(n):
            options = [
                (max(best[-1][i][0], inside(i, j)), best[-1][i][1] + border_bytes[j], i)
                for i in range(j)
                if i in best[-1]
            ]
            if options:
                row[j] = min(options, key=lambda o: (o[0] + o[1], o[1]))
        best.append(row)
    end = min(best[-1], key=lambda j: (max(best[-1][j][0], inside(j, n)) + best[-1][j][1], best[-1][j][1]))
    chosen = [end]
    for row in reversed(best[1:]):
        chosen.append(row[chosen[-1]][2])
    return [cuts[j] for j in reversed(chosen)]
