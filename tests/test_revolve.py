"""The planner on chains of equal steps, beside the optimum that is known for them.

Revolve (Griewank and Walther 2000, "Algorithm 799") reverses a chain of l steps with s snapshots. Step i makes state i from
state i - 1, and its reversal reads state i - 1 alone. The input, state 0, is one of the snapshots. The forward steps of the
first sweep count, up to state l - 1; what a step evaluates within its own reversal does not. With beta(s, r) = C(s + r, s),
the longest chain of which no step runs more than r times, the least number of forward steps is

    t(l, s) = r l - beta(s + 1, r - 1)    where beta(s, r - 1) < l <= beta(s, r)

The planner counts what runs again, beyond the l - 1 steps of the first sweep: t(l, s) - (l - 1).
"""

from functools import cache
from itertools import product
from math import comb
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from plans import search_of

from jaxremat.plan.nesting import LEVELS, Nesting
from jaxremat.plan.search import Search
from jaxremat.plan.segments import Option, Stretch

# Once in the first sweep, once for each further level, and once in the stretches of the last.
MOST_RUNS = LEVELS + 1


def beta(snapshots, runs):
    return comb(snapshots + runs, snapshots)


def runs_of(length, snapshots):
    """How often a step runs at most in Revolve's schedule."""
    return next(r for r in range(length) if length <= beta(snapshots, r))


def again(length, snapshots):
    """How many steps Revolve runs again, by its closed form."""
    runs = runs_of(length, snapshots)
    steps = runs * length - beta(snapshots + 1, runs - 1) if runs else 0
    return steps - (length - 1)


@cache
def least_steps(length, snapshots):
    """The least number of forward steps, by trying all places of the first snapshot behind the input."""
    if length == 1:
        return 0
    if snapshots == 1:  # from the input anew to states l - 1, l - 2, ..., 1
        return length * (length - 1) // 2
    # j steps to that snapshot; what is behind it, with one snapshot less; and, when it is free again, what is before it.
    return min(j + least_steps(length - j, snapshots - 1) + least_steps(j, snapshots) for j in range(1, length))


def test_the_closed_form_is_the_least_number_of_steps():
    for length, snapshots in product(range(1, 41), range(1, 8)):
        assert least_steps(length, snapshots) == again(length, snapshots) + length - 1
    # By hand: 10 steps and 3 snapshots. beta(3, 1) = 4 < 10 <= beta(3, 2) = 10, so 2 * 10 - beta(4, 1) = 15.
    assert least_steps(10, 3) == 15


def nesting_of(length):
    """The planner's programme over a chain of steps whose states have one byte and which cost 1.

    So its room is counted in states: those that are stored, and the one that the sweep has just made. The input is there
    anyway. With s snapshots, s - 1 beside the input, that is a room of s. A stretch of n steps stores the state at its end and
    makes the n - 1 inside of it again, all at once when the state at the end is used up; behind the last step nothing is stored.
    """
    stretches = list[Stretch]()
    for end in range(1, length + 1):
        border = frozenset([end]) if end < length else frozenset[int]()
        for start in range(end):
            inside = end - start - 1
            option = Option(border, len(border), float(inside), inside)
            stretches.append(Stretch(start, end, 0, [option]))
    operations = SimpleNamespace(forward=[None] * length, graph=SimpleNamespace(primal=range(length)))
    chain = SimpleNamespace(
        waists=range(-1, length), stretches=stretches, operations=operations, in_full=lambda stretch: stretch
    )
    # 1024 bytes in 1024 slots: nothing is rounded.
    return Nesting(chain, lambda operation: 1.0, 1024)  # pyright: ignore[reportArgumentType]


def reverse(levels, length):
    """Runs a schedule: returns the steps that run again, and the most states that are there at once, the input left out."""
    there, steps = set(levels[0]), 0
    most = len(there)
    for state in reversed(range(1, length)):
        while state not in there:
            start = max((s for s in there if s < state), default=0)
            inside = ([s for s in level if start < s <= state] for level in levels[1:])
            kept = next((stops for stops in inside if stops), range(start + 1, state + 1))
            steps += max(kept) - start
            there.update(kept)
            most = max(most, len(there))
        there.discard(state)
    return steps, most


@pytest.mark.parametrize("length", range(2, 22))
def test_several_levels_find_revolves_optimum(length):
    """For every number of snapshots with which Revolve runs no step more often than the levels allow.

    Of more than 21 steps not all 22 waists are weighed.
    """
    nesting = nesting_of(length)
    for snapshots in range(1, 8):
        levels = nesting.best(snapshots)
        if runs_of(length, snapshots) > MOST_RUNS:
            assert levels is None
            continue
        assert levels is not None
        steps, most = reverse(levels, length)
        assert steps == again(length, snapshots)
        assert most <= snapshots


SIDE, ROWS = 4, 2048
STATE = ROWS * SIDE * 4
STEP = 2 * ROWS * SIDE * SIDE


def products(weights, x):
    """A chain whose step reads its input alone in its reversal, and the last state is not read by the loss' derivative."""
    for w in weights:
        x = x @ w
    return x.sum()


def search_of_products(length):
    weights = [jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)] * length
    return search_of(products, weights, jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32))


def limit_of(search, snapshots):
    """The bytes in which Revolve runs with so many snapshots, at least two.

    Inputs and gradients, the first snapshot among them; the other s - 1; and two states. While a cotangent is made, these are
    the cotangents behind and before its step. While a step runs again from a snapshot, these are the state that it makes and
    a cotangent. It never starts from a state that is no snapshot where no step runs more than twice. For seven steps
    and two snapshots, which take three runs, there is a best schedule that does without, as the next test finds.
    """
    return search.lifetimes.fixed_bytes + (snapshots - 1 + 2) * STATE


@pytest.mark.parametrize("length", [5, 6, 7])
def test_no_levels_of_a_real_chain_are_better_than_revolve(length):
    """Of all ways to keep states on three levels within the bytes of s snapshots the best runs as much again as Revolve.

    So the planner's picture of memory and work is Revolve's, and the search alone can be worse.
    """
    search = search_of_products(length)
    lifetimes, window = search.lifetimes, range(len(search.operations.backward))
    found = list[tuple[int, int]]()
    for levels in product(range(LEVELS + 1), repeat=length - 1):  # the last one keeps nothing
        stored = [state for state, level in enumerate(levels) if level == 0]
        deeper = {state: level + 1 for state, level in enumerate(levels) if 0 < level < LEVELS}
        steps = lifetimes.backward(stored, (), window, deeper).recomputed
        found.append((lifetimes.peak_bytes(stored, deeper), len(steps)))
    for snapshots in range(2, length + 1):
        within = [steps for peak, steps in found if peak <= limit_of(search, snapshots)]
        assert min(within) == again(length, snapshots)


@pytest.mark.parametrize("length", [14, 17, 20])
def test_the_search_finds_revolves_optimum_of_a_real_chain(length):
    """Where Revolve runs no step more than twice: l <= beta(s, 2).

    Where it takes three runs, a sweep that runs again passes states that are no snapshots: two of them and a cotangent are in
    use at once, a state more than is allowed here.
    """
    search = search_of_products(length)
    assert type(search) is Search
    reached = [s for s in range(2, length + 2) if length <= beta(s, 2)]
    # beta(4, 2) = 15 and beta(5, 2) = 21.
    assert reached[0] == {14: 4, 17: 5, 20: 5}[length]
    for snapshots in reached:
        found = search.best(limit_of(search, snapshots))
        assert found is not None
        # With more snapshots than steps nothing runs again.
        assert found.contraction_flops / STEP == again(length, snapshots)
