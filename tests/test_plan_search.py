"""The search against brute force: all stored sets of random programs, all mixtures of random stretches."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import MATRIX, SIDE, UNIT, again, program, recipes, search_of, subsets

import jaxremat
from jaxremat.flops import count_flops
from jaxremat.plan.cut import lower_bound, more_stored, stored_sets
from jaxremat.plan.exhaustive import ExhaustiveSearch
from jaxremat.plan.knapsack import Knapsack
from jaxremat.plan.neighbours import but_for_the_last, with_cuts_for_the_last
from jaxremat.plan.search import Search
from jaxremat.plan.segments import Option, Stretch
from jaxremat.plan.task import standard

MOST_VALUES = 8  # the sets of more take too long


def few_values(recipe):
    search = search_of(program(recipe), MATRIX, MATRIX, argnums=(0, 1))
    assume(2 <= search.operations.forward_values <= MOST_VALUES)
    return search


def flops(operation):
    return operation.flops


@given(recipe=recipes)
@settings(max_examples=20)
def test_no_stored_set_is_better_than_what_the_search_finds(recipe):
    search = few_values(recipe)
    candidates = {c.policy: c for c in map(search.of_stored, subsets(search.operations.forward_values))}
    for limit in sorted({c.predicted_bytes for c in candidates.values()}):
        fitting = [c for c in candidates.values() if c.predicted_bytes <= limit]
        best = min(c.order[:2] for c in fitting)
        found = search.best(limit)
        assert found is not None
        assert found.predicted_bytes <= limit
        assert found.order[:2] <= best
        # What no schedule can avoid is avoided by none of them.
        assert search.bound(limit) <= min(c.cost for c in fitting) * (1 + 1e-6)
    assert search.leanest().predicted_bytes <= min(c.predicted_bytes for c in candidates.values())


@given(recipe=st.lists(recipes, min_size=4, max_size=6), by_bytes=st.booleans())
@settings(max_examples=15)
def test_what_the_objective_weighs_decides(recipe, by_bytes):
    """No mixture that fits costs less in the objective than what is found, whatever it recomputes of products."""
    cost = (lambda operation: operation.moved_bytes) if by_bytes else flops
    loss = program([step for part in recipe for step in part])
    search = search_of(loss, MATRIX, MATRIX, argnums=(0, 1), cost=cost, by_cost=by_bytes)
    peak = search.everything.predicted_bytes
    mixtures = [c for limit in range(0, peak + 1, peak // 50) if (c := search._mixture(limit)) is not None]
    for limit in (peak * 6 // 10, peak * 8 // 10, peak * 9 // 10):
        fitting = [c for c in mixtures if c.predicted_bytes <= limit]
        if fitting:
            found = search.best(limit)
            assert found is not None
            assert found.order[:2] <= min(c.order[:2] for c in fitting)
            if by_bytes:
                assert found.cost <= min(c.cost for c in fitting)


def test_waists_and_cuts_alone_would_pass_by_the_best_set():
    """Why few values are searched exhaustively: here the mixture of minimum cuts recomputes more than it must."""
    loss = program([("tanh", -1, 1), ("exp", -1, 2), ("multiply", 3, 2)])
    search = search_of(loss, MATRIX, MATRIX, argnums=(0, 1))
    assert isinstance(search, ExhaustiveSearch)
    peaks = [c.predicted_bytes for c in map(search.of_stored, subsets(search.operations.forward_values))]
    mixtures, best = (
        [find(limit) for limit in sorted(set(peaks))] for find in (super(type(search), search).best, search.best)
    )
    assert all(m is None or b.order[:2] <= m.order[:2] for m, b in zip(mixtures, best))
    assert any(m is None or b.order[:2] < m.order[:2] for m, b in zip(mixtures, best))


def test_many_values_are_not_tried_one_by_one():
    search = search_of(program([("dot", -1, 1), ("tanh", -1, 1)] * 5), MATRIX, MATRIX)
    assert search.operations.forward_values > 12
    assert type(search) is Search


@given(recipe=recipes)
@settings(max_examples=20)
def test_minimum_cuts_solve_the_lagrangian(recipe):
    """At every price of a byte no stored set costs less than the cut's: recomputed operations, and price times bytes."""
    operations = few_values(recipe).operations
    sets = stored_sets(operations, flops)
    total = sum(map(flops, operations.forward))
    choices = [
        (
            sum(operations.sizes[n] for n in stored),
            sum(flops(operations.forward[e]) for e in again(operations, stored)),
        )
        for stored in subsets(operations.forward_values)
    ]
    for found in sets:
        assert found.stored_bytes == sum(operations.sizes[n] for n in found.stored)
        run_again = again(operations, found.stored)
        assert found.recomputed_cost == sum(flops(operations.forward[e]) for e in run_again)
        price, proven = found.bound
        if price:  # the set that stores nothing belongs to a price beyond all
            best = min(cost + price * kept for kept, cost in choices)
            paid = found.recomputed_cost + price * found.stored_bytes
            # Flows are integers: capacities are rounded to parts of 2^-29 of all of them.
            assert best <= paid <= best + 1e-6 * total
            assert best - 1e-6 * total <= proven <= best
    for kept in {size for size, _ in choices}:
        cheapest_there = min(cost for size, cost in choices if size <= kept)
        assert lower_bound(sets, kept) <= cheapest_there * (1 + 1e-9)


@given(recipe=recipes, kept=st.sets(st.integers(0, MOST_VALUES - 1)), spare=st.integers(0, 10))
@settings(max_examples=40)
def test_room_is_filled_with_what_saves(recipe, kept, spare):
    """What is added fits and is not there already, more of it saves more; and with room for all nothing runs again."""
    operations = few_values(recipe).operations
    stored = {n for n in kept if n < operations.forward_values}
    room = spare * UNIT

    def paid(numbers):
        return sum(flops(operations.forward[e]) for e in again(operations, numbers))

    more = more_stored(operations, flops, stored, room)
    assert stored.isdisjoint(more)
    assert sum(operations.sizes[n] for n in more) <= room
    assert paid(stored | more) <= paid(stored)
    assert paid(stored | more_stored(operations, flops, stored, 2 * room)) <= paid(stored | more)
    assert more_stored(operations, flops, stored | more, 0) == set()
    all_of_it = more_stored(operations, flops, stored, sum(operations.sizes))
    assert paid(stored | all_of_it) == paid(set(range(operations.forward_values)))


def test_of_what_saves_as_much_the_last_is_stored():
    """Ten equal layers, each of which reads its product and nothing else from the forward pass; three have room."""
    layers, rows = 10, 256

    def loss(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return x.sum()

    x = jax.ShapeDtypeStruct((rows, SIDE), jnp.float32)
    operations = search_of(loss, [MATRIX] * layers, x, platform="gpu").operations
    products = [
        n for n in range(operations.forward_values) if operations.forward[operations.maker[n]].contraction_flops
    ]
    assert len(products) == layers
    size = rows * SIDE * 4
    for room, count in ((3 * size, 3), (4 * size - 1, 3), (0, 0)):
        more = more_stored(operations, lambda operation: operation.contraction_flops, {products[0]}, room)
        assert len(more) == count
        run_again = again(operations, {products[0], *more})
        assert [n for n in products if operations.maker[n] in run_again] == products[1 : layers - count]


def test_the_bound_of_everything_and_of_nothing():
    operations = search_of(program([("dot", -1, 1), ("tanh", -1, 1), ("dot", -1, 1)]), MATRIX, MATRIX).operations
    sets = stored_sets(operations, flops)
    assert sets[0].recomputed_cost == lower_bound(sets, sets[0].stored_bytes) == 0
    assert sets[-1].stored == frozenset()
    # Nothing is kept: all that is read is made again. The bound knows it but for the rounding of flows.
    all_again = sum(flops(operations.forward[e]) for e in again(operations, set()))
    assert sets[-1].recomputed_cost == all_again
    assert lower_bound(sets, 0) <= all_again


sizes = st.integers(0, 12)


@st.composite
def tables(draw):
    """Stretches between all pairs of up to five waists, every option with a number of its own as what it stores."""
    waists = draw(st.integers(2, 5))
    number = itertools.count()
    stretches = list[Stretch]()
    for start, end in itertools.combinations(range(waists), 2):
        drawn = draw(st.lists(st.tuples(sizes, sizes, st.integers(0, 25)), max_size=2))
        options = [Option(frozenset([next(number)]), size, float(cost), most) for size, cost, most in drawn]
        # It never fits, and keeps sizes from having a common divisor: bytes are told apart one by one.
        options.append(Option(frozenset(), 1, 0.0, 10**6))
        stretches.append(Stretch(start, end, draw(st.integers(0, 15)), options))
    return stretches, waists


def mixtures(stretches, waists, limit):
    """All mixtures that stay within a limit, one by one: the costs by what is stored."""
    between = {(s.start, s.end): s for s in stretches}
    found = {}
    for count in range(waists - 1):
        for inner in itertools.combinations(range(1, waists - 1), count):
            path = [between[pair] for pair in itertools.pairwise([0, *inner, waists - 1])]
            for chosen in itertools.product(*(s.options for s in path)):
                before, fits = 0, True
                for stretch, option in zip(path, chosen):
                    fits = fits and before + max(option.most_bytes, stretch.forward_bytes) <= limit
                    before += option.stored_bytes
                if fits and before <= limit:
                    found[frozenset().union(*(o.stored for o in chosen))] = sum(o.cost for o in chosen)
    return found


@given(table=tables(), limits=st.lists(st.integers(0, 45), min_size=1, max_size=4))
@settings(max_examples=150)
def test_the_knapsack_finds_the_cheapest_mixture(table, limits):
    knapsack = Knapsack(*table, max(limits))
    for limit in limits:
        expected = mixtures(*table, limit)
        found = knapsack.best(limit)
        if not expected:
            assert found is None
        else:
            stored, host = found
            assert expected[stored] == min(expected.values())
            assert not host


def test_the_knapsack_without_room():
    knapsack = Knapsack([Stretch(0, 1, 0, [Option(frozenset([3]), 2, 1.0, 4)])], 2, 10)
    assert [knapsack.best(limit) for limit in (-5, 0, 3)] == [None] * 3
    assert knapsack.best(4) == knapsack.best(10) == knapsack.best(10**6) == ({3}, set())


def test_what_was_made_last_need_not_be_recomputed():
    """Of four layers with tagged outputs, `names:*` recomputes all four products; but for the last, three."""

    def loss(ws, x):
        for w in ws:
            x = jaxremat.name(jnp.sin(x @ w), "out")
        return (x**2).sum()

    rows = 256
    ws, x = [MATRIX] * 4, jax.ShapeDtypeStruct((rows, SIDE), jnp.float32)
    search = search_of(loss, ws, x, platform="gpu")
    product = 2 * rows * SIDE * SIDE
    found = but_for_the_last(search, jaxremat.parse("names:*"))
    assert search.of_policy(jaxremat.parse("names:*")).contraction_flops == 4 * product
    assert found.contraction_flops == 3 * product
    known = [c.policy for c in standard(search)]
    assert found.policy in known
    # Every second of the outputs 1, 2 and 3, from the end: 2 is left out, and computed again with 3, for both.
    paired = but_for_the_last(search, jaxremat.parse("names:*"), every=2)
    assert paired.contraction_flops == 3 * product
    (choice,), (other,) = ([choice for _, choice in c.choices] for c in (found, paired))
    assert choice.stored_bytes - other.stored_bytes == rows * SIDE * 4
    assert paired.policy in known
    # Behind the last output itself nothing is large: all four products run again, as under `names:*`.
    head = but_for_the_last(search, jaxremat.parse("names:*"), parts=0)
    assert head.contraction_flops == 4 * product
    # The cuts store in the last layer all that is read, its product alone, or nothing.
    cuts = with_cuts_for_the_last(search, jaxremat.parse("names:*"))
    assert {c.contraction_flops for c in cuts} == {3 * product, 4 * product}
    assert cuts == sorted(cuts, key=lambda c: c.order)


def test_what_is_kept_counts_once_in_the_forward_pass():
    """The logits are read through `exp`, which is fused into its sum: kept or not, they are all that is in use at once."""

    def loss(w, x):
        logits = jnp.sin(x @ w)
        return jax.nn.logsumexp(logits, axis=-1).sum() + jnp.sin(logits[:1]).sum()

    x, w = jax.ShapeDtypeStruct((64, SIDE), jnp.float32), jax.ShapeDtypeStruct((SIDE, 1024), jnp.float32)
    search = search_of(loss, w, x, platform="gpu")
    operations, end = search.operations, len(search.operations.forward) - 1
    (product,) = [
        n for n in range(operations.forward_values) if operations.forward[operations.maker[n]].contraction_flops
    ]
    kept, nothing = (search.segments._forward_bytes(numbers, -1, end) for numbers in ({product}, ()))
    assert operations.sizes[product] == 64 * 1024 * 4
    assert kept == nothing


@pytest.mark.parametrize("policy", ["dots", "dots_no_batch", "nothing", "names:kept", "segments:2", "everything"])
def test_what_is_decided_inside_of_branches_counts(policy):
    """A policy that keeps products keeps those of the branches, too: what runs again is what the program runs more often."""

    def branching(ws, x, flag):
        x = jnp.tanh(x @ ws[0])
        thrice = lambda x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(ws[1:4]))[0]  # noqa: E731
        twice = lambda x: jnp.tanh(jaxremat.name(jnp.tanh(x @ ws[1]), "kept") @ ws[2])  # noqa: E731
        x = jax.lax.cond(flag, thrice, twice, x)
        return (jnp.tanh(x @ ws[4]) ** 2).sum()

    args = [MATRIX] * 5, MATRIX, jax.ShapeDtypeStruct((), jnp.bool_)
    found = search_of(branching, *args)
    plain, remat = (
        count_flops(jax.make_jaxpr(jax.value_and_grad(f))(*args)).dot_flops
        for f in (branching, jaxremat.remat(branching, policy))
    )
    candidate = found.of_policy(jaxremat.parse(policy))
    assert candidate.contraction_flops == remat - plain
    bare, small = found.without_small(candidate)
    assert small == 0 or bare.contraction_flops >= candidate.contraction_flops
    assert jaxremat.plan(branching, *args, budget="90%", compile=False).predicted_bytes > 0
