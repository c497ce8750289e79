"""Where the planner cuts a function, and what the backward pass' own values need there."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from plans import MATRIX, program, recipes, search_of
from plans import UNIT as SQUARE

import jaxremat
from jaxremat.plan import segments
from jaxremat.plan.knapsack import Knapsack
from jaxremat.plan.segments import Segments

ROWS, SIDE = 256, 32
UNIT = ROWS * SIDE * 4


def bottlenecks(blocks, x):
    """Residual blocks whose branch is a quarter as wide inside."""
    for narrow, wide in blocks:
        x = x + jnp.tanh(jnp.tanh(x @ narrow) @ wide)
    return (x**2).sum()


def arguments(depth):
    block = (jax.ShapeDtypeStruct((SIDE, SIDE // 4), jnp.float32), jax.ShapeDtypeStruct((SIDE // 4, SIDE), jnp.float32))
    return [block] * depth, jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32)


def test_ends_of_residual_blocks_stay_waists(monkeypatch):
    """Inside of a block its input crosses too: two values, where at its end it is one."""
    depth = 8
    search = search_of(bottlenecks, *arguments(depth), argnums=(0, 1), platform="gpu")
    crossing = search.operations.crossing
    all_waists = search.segments.waists
    monkeypatch.setattr(segments, "_MOST_WAISTS", depth + 2)
    few = Segments(search.lifetimes, search.sets, lambda operation: operation.flops).waists
    ends = [w for w in all_waists[1:-1] if len(crossing[w]) == 1]
    assert len(few) < len(all_waists)
    assert len(ends) >= depth - 1
    assert {len(crossing[w]) for w in few[1:-1]} == {1}


@pytest.mark.parametrize("depth", [4, 8])
def test_the_cotangents_of_residual_blocks_do_not_add_up(depth):
    """Each sum is written, so that at most the sum, a product for the next and what is added to it are there."""
    lifetimes = search_of(bottlenecks, *arguments(depth), argnums=0, platform="gpu").lifetimes
    gradients = depth * 2 * SIDE * SIDE // 4 * 4
    assert lifetimes.own_bytes.max() <= gradients + 3 * UNIT + UNIT // 4


def test_an_equation_of_two_outputs_of_which_a_level_keeps_one():
    """A sort gives two arrays. One is kept when it was recomputed, the other one is asked for later: it is sorted once more."""

    def loss(a, b):
        y = jnp.sin(a)
        first, second = jax.lax.sort((y, b * y), num_keys=1)
        return jnp.sin(jnp.sin(second) * jnp.tanh(first)).sum()

    a = jax.random.normal(jax.random.key(0), (64, 64))
    ours, theirs = (jax.jit(jax.grad(f, (0, 1)))(a, 2 * a) for f in (jaxremat.remat(loss, "values:0/4"), loss))
    for mine, expected in zip(ours, theirs, strict=True):
        assert jnp.allclose(mine, expected, rtol=2e-5, atol=1e-6)


@given(recipe=recipes)
@settings(max_examples=40)
def test_what_two_shorter_stretches_come_to_is_not_missed(recipe):
    """The best mixtures cost as much whether or not that is among the ways of the longer one.

    But for one border: of two stretches the first keeps that at its end until its own turn, while in a longer one it goes
    with its last use, which may be earlier.
    """
    search = search_of(program(recipe * 2), MATRIX, MATRIX, argnums=(0, 1), platform="gpu")
    few = search.segments
    full = [few.in_full(stretch) for stretch in few.stretches]
    most = search.lifetimes.without_remat()
    size, crossing = search.operations.sizes, search.operations.crossing
    border = max(sum(size[n] for n in crossing[waist]) for waist in few.waists)
    best, expected = (Knapsack(stretches, len(few.waists), most) for stretches in (few.stretches, full))
    assert sum(len(s.options) for s in few.stretches) <= sum(len(s.options) for s in full)
    for limit in range(0, most + 1, SQUARE // 2):
        assert cost_of(best, limit + border) <= cost_of(expected, limit)


def cost_of(knapsack, limit):
    """What the best mixture under a limit costs; infinite where there is none."""
    room = min(limit // knapsack._slot, knapsack._slots - 1)
    return float(knapsack._best[0, room])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_stored_before_a_stretch_does_not_count_twice(platform):
    """Where every border is stored, what stretches need beside those before them is what the whole forward pass needs."""
    search = search_of(bottlenecks, *arguments(4), argnums=(0, 1), platform=platform)
    found, lifetimes = search.segments, search.lifetimes
    by_end = sorted((s for s in found.stretches if s.end == s.start + 1), key=lambda s: s.end)
    stored, needed = frozenset(), list[int]()
    for stretch in by_end:
        before = sum(search.operations.sizes[n] for n in stored)
        border = min(stretch.options, key=lambda option: option.stored_bytes)
        needed.append(before + max(stretch.forward_bytes, border.forward_bytes))
        stored |= border.stored
    assert max(needed) == lifetimes._forward_peak(stored, frozenset())
