"""What plain reverse mode keeps for one function, from its trace, told apart by where it comes from."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal


class Kept(NamedTuple):
    """Bytes of the distinct arrays that the backward pass reads: arguments, results, and values made on the way."""

    inputs: int
    outputs: int
    made: int


def kept(f: Callable[..., Any], *args: Any) -> Kept:
    """Returns what `jax.vjp(f, *args)` keeps; `args` may be shapes. A broadcast scalar is no array of its size."""

    def forward(*args: Any) -> Any:
        out, vjp = jax.vjp(f, *args)
        return out, jax.tree.leaves(vjp)

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*args)
    jaxpr, count = closed.jaxpr, len(jax.tree.leaves(shapes[0]))
    outputs, residuals = jaxpr.outvars[:count], jaxpr.outvars[count:]
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    totals = {"inputs": 0, "outputs": 0, "made": 0}
    for v in dict.fromkeys(v for v in residuals if not isinstance(v, Literal)):
        eqn = made_by.get(v)
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1:
            continue
        where = "inputs" if v in jaxpr.invars else "outputs" if v in outputs else "made"
        totals[where] += math.prod(v.aval.shape) * v.aval.dtype.itemsize
    return Kept(**totals)
