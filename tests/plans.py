"""What the tests of the planner share: small functions, random ones, and searches over them."""

import itertools

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from jaxremat.plan.loops import make_search
from jaxremat.plan.subject import Subject

SIDE = 16
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
UNIT = SIDE * SIDE * 4  # bytes of a matrix

OPERATIONS = {
    "dot": lambda x, y: x @ y / SIDE,
    "tanh": lambda x, y: jnp.tanh(x),
    "multiply": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "relu": lambda x, y: jax.nn.relu(x),
    "exp": lambda x, y: jnp.exp(-jnp.abs(x)),
    "centre": lambda x, y: x - x.sum(0) / SIDE,
    "widen": lambda x, y: (jnp.sin(jnp.concatenate([x, y])).reshape(2, SIDE, SIDE)).sum(0),
}
# Most operations read what was made last, so that programs are deep enough.
recipes = st.lists(
    st.tuples(
        st.sampled_from(["dot", "dot", *OPERATIONS]),
        st.sampled_from([-1, -1, -1, -2, 0, 1, 3]),
        st.integers(-3, 3),
    ),
    min_size=2,
    max_size=6,
)


def program(recipe):
    """The loss of two matrices that a list of (operation, operand, operand) spells."""

    def loss(a, b):
        values = [a, b]
        for operation, first, second in recipe:
            x, y = (values[i % len(values)] for i in (first, second))
            values.append(OPERATIONS[operation](x, y))
        return (values[-1] ** 2).sum()

    return loss


def search_of(loss, *args, argnums=0, platform="cpu", cost=lambda operation: operation.flops, link=None, by_cost=False):
    """The search for a function, with floating point operations as its objective."""
    return make_search(Subject(loss, args, {}, argnums), cost, platform, link=link, by_cost=by_cost)


def subsets(count):
    """All sets of the numbers below `count`."""
    numbers = range(count)
    return [set(s) for size in range(count + 1) for s in itertools.combinations(numbers, size)]


def again(operations, stored):
    """The positions of the forward operations that run again where these values are stored."""
    found = set()
    todo = [n for n in operations.read_backward if n not in stored]
    while todo:
        position = operations.maker[todo.pop()]
        if position not in found:
            found.add(position)
            todo += [n for n in operations.forward[position].reads if n not in stored]
    return found
