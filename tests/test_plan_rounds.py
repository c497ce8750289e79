"""How the planner's model and a compiler come together; the compiler is one that gives every small value a tile."""

import jax
import jax.numpy as jnp
from plans import search_of

from jaxremat.plan.judge import Verdict
from jaxremat.plan.rounds import within

ROWS, SIDE, DEPTH = 4096, 64, 6
TILE = 4096


def normalised(ws, x):
    for w in ws:
        h = x @ w
        x = jnp.tanh((h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1.0))
    return (x**2).sum()


class Tiled:
    """A judge whose peaks are the model's, and a tile for every small value that is stored."""

    compiles = True

    def __init__(self):
        self.verdicts = {}

    def ask(self, candidate):
        choice = candidate.choices[0][1]
        small = sum(choice.graph.value_of[v].size_bytes <= choice.graph.small_bytes for v in choice.kept)
        return self.verdicts.setdefault(
            candidate.policy, Verdict(candidate, candidate.predicted_bytes + TILE * small, None)
        )


def search():
    shape = jax.ShapeDtypeStruct
    return search_of(normalised, [shape((SIDE, SIDE), jnp.float32)] * DEPTH, shape((ROWS, SIDE), jnp.float32))


def stored(candidate):
    choice = candidate.choices[0][1]
    return [choice.graph.value_of[v].size_bytes for v in choice.kept]


def test_without_small_values():
    """Of each layer its mean and its deviation are small: 64 numbers. They are computed again, and what they are made of."""
    found = search()
    everything_large = found.best(found.everything.predicted_bytes - 1)
    bare, small = found.without_small(everything_large)
    assert small == sum(size <= SIDE * 4 for size in stored(everything_large)) > 0
    assert stored(bare) == [size for size in stored(everything_large) if size > SIDE * 4]
    assert bare.order > everything_large.order
    assert bare.predicted_bytes <= everything_large.predicted_bytes


def test_what_fails_by_its_small_values_alone_is_tried_without_them():
    found, judge = search(), Tiled()
    baseline = judge.ask(found.everything)
    least, _ = within(found, judge, 1, baseline)
    small = sum(size <= SIDE * 4 for size in stored(least.candidate))
    assert small > 0
    judge = Tiled()
    limit = least.peak_bytes - 1
    within_it, _ = within(found, judge, limit, judge.ask(found.everything))
    assert within_it.peak_bytes <= limit
    assert all(size > SIDE * 4 for size in stored(within_it.candidate))
