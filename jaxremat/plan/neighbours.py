"""What stores nearly what a candidate stores: with one value more, with all that finds room; or all but for the last part."""

from collections.abc import Iterable, Iterator, Sequence

from jaxremat import policy as p
from jaxremat.choice import choose
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.search import Search


def but_for_the_last(search: Search, policy: p.Policy, every: int = 1, parts: int = 1) -> Candidate:
    """Returns what a policy stores, and with it all that is made behind the last but one of its large values, or the last.

    The backward pass begins there: what would be recomputed has only just been made.

    Args:
        search: of the function.
        policy: the policy.
        every: one in so many of its large values is stored, counted from the end: where it stores what blocks give, this
            makes segments of so many blocks.
        parts: behind which of its large values all is stored, counted from the end: 0 for the last, 1 for the last but one.
    """
    stored, border = _with_border(search, policy, every, parts)
    return search.of_stored(stored.union(_behind(search, border, search.operations.read_backward)))


def with_cuts_for_the_last(search: Search, policy: p.Policy, every: int = 1) -> list[Candidate]:
    """Returns the same with what the minimum cuts store in that part instead of all; the least recomputation first."""
    stored, border = _with_border(search, policy, every, parts=1)
    found = {search.of_stored(stored.union(_behind(search, border, chosen.stored))) for chosen in search.sets}
    return sorted(found, key=lambda c: c.order)


def with_small_of_the_last(search: Search, candidate: Candidate, policy: p.Policy) -> Candidate | None:
    """Returns what a candidate stores, of small values only those behind the last but one of a policy's large ones.

    `jax.checkpoint` round each block but the last keeps these. None where the candidate decides inside of scans or branches.
    """
    if _parts(search, candidate) is None:
        return None
    choice, (_, border) = candidate.choices[0][1], _with_border(search, policy, every=1, parts=1)
    kept = [v for v in choice.kept if v in choice.large or search.graph.value_of[v].index > border]
    return search.with_kept(candidate, kept)


def _with_border(search: Search, policy: p.Policy, every: int, parts: int) -> tuple[frozenset[int], int]:
    """Returns what is stored of a policy's large values, and behind which place all is."""
    place = search.operations.place
    stored = search.picture.stored(choose(search.graph, policy))
    places = sorted({place[n] for n in stored})
    kept = {*places[-1:], *places[-2::-every]}
    border = places[-1 - parts] if len(places) > parts else len(search.operations.forward)
    return frozenset(n for n in stored if place[n] in kept), border


def _behind(search: Search, border: int, numbers: Iterable[int]) -> Iterator[int]:
    """Yields those of some values that are made behind a place."""
    return (n for n in numbers if search.operations.place[n] > border)


def with_one_more(search: Search, candidate: Candidate, most: int) -> list[Candidate]:
    """Returns what a candidate stores with one value more, for at most so many of those that are recomputed.

    They are spread over the function; the least recomputation first. Of a function with scans there are none.
    """
    parts = _parts(search, candidate)
    if parts is None:
        return []
    stored, levels, host = parts
    again = set(search.operations.read_backward).difference(stored, *levels)
    ordered = sorted(again, key=search.operations.place.__getitem__)
    found = [search.of_stored({*stored, n}, levels, host) for n in ordered[:: max(1, -(-len(ordered) // most))]]
    return sorted(found, key=lambda c: c.order)


def filled(search: Search, candidate: Candidate, spare_bytes: int) -> Candidate | None:
    """Returns what a candidate stores with what saves most beside it in so many bytes on a chip; None where nothing does.

    It stores the small values that are worth it if that one does. Of a function with scans there is none.
    """
    parts = _parts(search, candidate)
    if parts is None:
        return None
    stored, levels, host = parts
    more = search.more_stored(stored, spare_bytes)
    if not more:
        return None
    found = search.of_stored(stored | more, [level - more for level in levels], host)
    is_bare = search.without_small(candidate)[0].policy == candidate.policy
    return search.without_small(found)[0] if is_bare else found


def _parts(
    search: Search, candidate: Candidate
) -> tuple[frozenset[int], Sequence[frozenset[int]], frozenset[int]] | None:
    """Returns the large values that a candidate stores, that it keeps once recomputed, and of the stored those on the host."""
    if search.subject.scans or isinstance(candidate.policy, p.Everything):
        return None
    choice = candidate.choices[0][1]
    if choice.graph is not search.graph:  # decided inside of branches
        return None
    levels = list[frozenset[int]]()
    for level in candidate.policy.again if isinstance(candidate.policy, p.Values) else ():
        numbers = (search.operations.number(search.graph.values[position].var) for position in level)
        levels.append(frozenset(n for n in numbers if n is not None))
    return search.picture.stored(choice), levels, search.picture.host(choice)
