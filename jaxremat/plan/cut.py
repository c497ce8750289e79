"""`stored_sets`: what to store at every price of a byte, by minimum cuts; and the lower bound that they prove.

For a fixed price of a stored byte, the cheapest choice between storing and recomputing is one minimum cut. With P_v "value v
is there in the backward pass" and R_e "operation e runs again", the arcs are

    source -> P_v    infinite, for values that the backward pass reads
    P_v -> R_e       price · bytes of v (infinite where v cannot be stored), e makes v
    R_e -> P_u       infinite, for values u that e reads
    R_e -> sink      cost of e

and the source's side holds what is needed and what runs again: a needed value whose operation does not run again is
stored. PyTorch's partitioner is the special case of costs 0 and infinity (`torch._functorch.partitioners`).

Every price also proves a bound (Lagrange): no schedule that keeps at most M bytes from the forward to the backward pass,
of however many levels, recomputes less than `cut(price) - price · M`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jaxremat.plan.operations import Operation, Operations

# scipy's flows are 32-bit integers. All finite capacities together stay below this; what counts as infinite lies above.
_MOST = 2**29
_MOST_SETS = 12
# Where many values are equally worth storing, those that are made late are taken for smaller by up to this part.
_TIE = 1 / 16
# So often room is filled anew.
_MOST_CUTS = 8


@dataclass(frozen=True)
class StoredSet:
    """The best choice at one price of a byte.

    Attributes:
        stored: the numbers of the stored values.
        stored_bytes: their bytes.
        recomputed_cost: of the operations that run again.
        bound: (price, cut) of the Lagrangian: a schedule that keeps M bytes costs at least `cut - price * M`.
    """

    stored: frozenset[int]
    stored_bytes: int
    recomputed_cost: float
    bound: tuple[float, float]


def stored_sets(
    operations: Operations, cost: Callable[[Operation], float], host_price: float | None = None
) -> list[StoredSet]:
    """Returns the stored sets on the lower hull of bytes against recomputation, the largest first.

    Args:
        operations: the graph.
        cost: what running an operation again costs, never negative.
        host_price: what a byte costs in host memory, if it may be kept there; one of the sets is that for this price.
    """
    network = _Network(operations, cost)
    most, least = network.solve(0.0), network.solve(None)
    found = {most.stored: most, least.stored: least}
    if host_price is not None:
        offloaded = network.solve(host_price)
        found[offloaded.stored] = offloaded
    todo = [(most, least)]
    while todo and len(found) < _MOST_SETS:
        larger, smaller = todo.pop(0)
        saved = larger.stored_bytes - smaller.stored_bytes
        if saved <= 0 or larger.stored == smaller.stored:
            continue
        between = network.solve((smaller.recomputed_cost - larger.recomputed_cost) / saved)
        if between.stored not in found:
            found[between.stored] = between
            todo += [(larger, between), (between, smaller)]
    return sorted(found.values(), key=lambda s: -s.stored_bytes)


def lower_bound(sets: Sequence[StoredSet], kept_bytes: float, host_price: float | None = None) -> float:
    """Returns the recomputation that no schedule can avoid which keeps at most so many bytes between the two passes.

    Where a byte may be kept in host memory, no cut at a higher price proves anything.
    """
    proofs = (s.bound for s in sets if host_price is None or s.bound[0] <= host_price)
    return max([0.0, *(cut - price * kept_bytes for price, cut in proofs)])


def more_stored(
    operations: Operations, cost: Callable[[Operation], float], stored: Collection[int], spare_bytes: int
) -> frozenset[int]:
    """Returns what is well stored beside values that are stored anyway, in at most so many bytes; of equals the last.

    Each cut takes what saves most per byte as long as that fits; what is left is cut once more, without what is too large.

    Args:
        operations: the graph.
        cost: what running an operation again costs, never negative.
        stored: the numbers of the values that are stored.
        spare_bytes: what the others may take together.
    """
    network, sizes = _Network(operations, cost), operations.least_sizes
    places = sorted({operations.place[v] for v in network.values})
    rank = {place: i / len(places) for i, place in enumerate(places)}
    late = np.array([1 - _TIE * rank[operations.place[v]] for v in network.values])
    own_bytes, chosen = network.bytes, frozenset(stored)
    for _ in range(_MOST_CUTS):
        left = spare_bytes - sum(sizes[v] for v in chosen.difference(stored))
        network.bytes = own_bytes * late * [v not in chosen for v in network.values]
        network.barred = np.array([v not in chosen and sizes[v] > left for v in network.values], bool)
        found = _most_within(network, chosen, left)
        if not found:
            break
        chosen |= found
    return chosen.difference(stored)


def _most_within(network: "_Network", stored: frozenset[int], spare_bytes: int) -> frozenset[int]:
    """Returns what the cut stores beside some values at the lowest price at which it fits."""
    size_of = dict(zip(network.values, network.bytes, strict=True))

    def others(found: StoredSet) -> frozenset[int]:
        return found.stored.difference(stored)

    def spent(found: StoredSet) -> float:
        return float(sum(size_of[v] for v in others(found)))

    def fits(found: StoredSet) -> bool:
        return sum(network.operations.least_sizes[v] for v in others(found)) <= spare_bytes

    larger, smaller = network.solve(0.0), network.set_of(stored)
    if fits(larger):
        return others(larger)
    while (saved := spent(larger) - spent(smaller)) > 0:
        between = network.solve((smaller.recomputed_cost - larger.recomputed_cost) / saved)
        if between.stored in (larger.stored, smaller.stored):
            break
        if fits(between):
            smaller = between
        else:
            larger = between
    return others(smaller)


class _Network:
    """The flow network of one graph; capacities are set anew for every price."""

    def __init__(self, operations: Operations, cost: Callable[[Operation], float]) -> None:
        self.operations = operations
        self.values, again = map(sorted, self._reached())
        self.costs = np.array([cost(operations.forward[e]) for e in again], float)
        place_p = {v: 2 + i for i, v in enumerate(self.values)}
        place_r = {e: 2 + len(self.values) + i for i, e in enumerate(again)}
        arcs = [(0, place_p[v]) for v in operations.read_backward]
        self.stores = slice(len(arcs), len(arcs) + len(self.values))
        arcs += [(place_p[v], place_r[operations.maker[v]]) for v in self.values]
        arcs += [(place_r[e], place_p[u]) for e in again for u in operations.forward[e].reads]
        self.runs = slice(len(arcs), len(arcs) + len(again))
        arcs += [(place_r[e], 1) for e in again]
        self.again, self.arcs = again, np.array(arcs, np.int32).reshape(-1, 2)
        self.bytes = np.array([operations.least_sizes[v] for v in self.values], float)
        self.barred = np.zeros(len(self.values), bool)  # what is never stored
        self.nodes = 2 + len(self.values) + len(again)

    def _reached(self, stored: Collection[int] = ()) -> tuple[set[int], set[int]]:
        """Returns the values that the backward pass needs where these are stored, and the operations that run again for them."""
        operations, again = self.operations, set[int]()
        needed = set(operations.read_backward)
        todo = [v for v in needed if v not in stored]
        while todo:
            maker = operations.maker[todo.pop()]
            again.add(maker)
            new = set(operations.forward[maker].reads) - needed
            needed |= new
            todo += [u for u in new if u not in stored]
        return needed, again

    def set_of(self, stored: Collection[int]) -> StoredSet:
        """Returns the choice that stores those of these values that are needed."""
        needed, again = self._reached(stored)
        cost = float(sum(c for c, e in zip(self.costs, self.again, strict=True) if e in again))
        return self._set(frozenset(needed.intersection(stored)), cost, (0.0, 0.0))

    def solve(self, price: float | None) -> StoredSet:
        """Returns the best choice at a price per byte; None stores nothing."""
        if price is None:
            return self._set(frozenset(), self.costs.sum(), (0.0, 0.0))
        if not self.values:
            return self._set(frozenset(), 0.0, (0.0, 0.0))
        total = float(self.costs.sum() + price * self.bytes.sum())
        scale = _MOST / total if total else 1.0
        capacities = np.full(len(self.arcs), 2 * _MOST, np.int32)
        capacities[self.stores] = np.where(self.barred, 2 * _MOST, np.floor(price * self.bytes * scale))
        # What costs nothing to run again is dearer than nothing, so that of equal choices the smaller is made.
        capacities[self.runs] = np.maximum(1, np.floor(self.costs * scale))
        # It loads for as long as all of jaxremat, and not every user plans.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        matrix = csr_array((capacities, (self.arcs[:, 0], self.arcs[:, 1])), shape=(self.nodes, self.nodes))
        flow = maximum_flow(matrix, 0, 1, method="dinic")
        residual = matrix - flow.flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = set(breadth_first_order(residual, 0, return_predecessors=False).tolist())
        first_run = 2 + len(self.values)
        again = {e for i, e in enumerate(self.again) if first_run + i in reached}
        stored = frozenset(
            v for i, v in enumerate(self.values) if 2 + i in reached and self.operations.maker[v] not in again
        )
        cost = float(sum(c for c, e in zip(self.costs, self.again) if e in again))
        # Rounding down loses at most one unit an arc.
        bound = (float(flow.flow_value) - len(self.runs_of())) / scale
        return self._set(stored, cost, (price, bound))

    def runs_of(self) -> Sequence[int]:
        """The arcs of operations, each of which may be one unit too dear."""
        return self.again

    def _set(self, stored: frozenset[int], cost: float, bound: tuple[float, float]) -> StoredSet:
        return StoredSet(stored, sum(self.operations.least_sizes[v] for v in stored), cost, bound)
