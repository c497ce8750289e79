"""`fingerprint`: a short digest of a program, the same whenever it is traced."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxremat.compat import JaxprEqn, Var


def fingerprint(inputs: Iterable[Var], eqns: Sequence[JaxprEqn]) -> str:
    """Returns a digest of a program: its equations, their types, who reads whom, and the same of the bodies inside of them.

    The names of variables and the values of literals do not count: they change nothing that is stored.

    Args:
        inputs: what is there from the start.
        eqns: the equations, in order.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxremat.fingerprint import fingerprint
        >>> one, same, other = (jax.make_jaxpr(f)(1.0).jaxpr for f in (lambda x: x + 1, lambda y: y + 2, jnp.sin))
        >>> digests = [fingerprint(jaxpr.invars, jaxpr.eqns) for jaxpr in (one, same, other)]
        >>> digests[0] == digests[1] != digests[2], len(digests[0])
        (True, 16)
    """
    digest = hashlib.sha256()
    for line in _lines(inputs, eqns):
        digest.update(line.encode())
    return digest.hexdigest()[:16]


def _lines(inputs: Iterable[Var], eqns: Sequence[JaxprEqn]) -> Iterator[str]:
    number = dict[Var, int]()
    for var in inputs:
        number[var] = len(number)
        yield var.aval.str_short()
    for eqn in eqns:
        reads = [number.get(v, -1) if isinstance(v, Var) else -2 for v in eqn.invars]
        for var in eqn.outvars:
            number[var] = len(number)
        yield f"{eqn.primitive.name} {reads} {[var.aval.str_short() for var in eqn.outvars]}\n"
        for name, value in sorted(eqn.params.items()):
            for body in value if isinstance(value, tuple | list) else (value,):
                jaxpr: Any = getattr(body, "jaxpr", body)
                if hasattr(jaxpr, "eqns"):
                    yield f"{name} (\n"
                    yield from _lines((*jaxpr.constvars, *jaxpr.invars), jaxpr.eqns)
                    yield ")\n"
