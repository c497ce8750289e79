"""Flattening of jaxprs: calls of jitted functions are replaced by their bodies, so that a policy sees every value.

Calls that carry a meaning of their own stay whole: control flow, `custom_jvp` and `custom_vjp` (inlining them would lose
their derivative rules), `jax.checkpoint`, and jitted functions with shardings of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxremat import compat
from jaxremat.compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxremat.labels import called_names, python_names


def inline(eqns: Sequence[JaxprEqn], renaming: Mapping[Var, Atom]) -> tuple[list[JaxprEqn], dict[Var, Atom]]:
    """Returns `eqns` with calls replaced by their bodies, and the renaming of variables that results.

    Args:
        eqns: equations in order.
        renaming: what stands for a variable from the start, for example for the inputs of a body.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxremat.inline import inline
        >>> closed = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1.0)(1.0)
        >>> [eqn.primitive.name for eqn in inline(closed.jaxpr.eqns, {})[0]]
        ['sin', 'add']
    """
    flat = list[JaxprEqn]()
    names = dict(renaming)

    for eqn in eqns:
        invars = [resolve(atom, names) for atom in eqn.invars]
        body = called(eqn)
        if body is None:
            flat.append(eqn.replace(invars=invars) if invars != eqn.invars else eqn)
            continue
        # The functions that led to the call are labels of what is inside; their frames would be lost with the call.
        scopes = [f"called({name})" for name in reversed(called_names(eqn))]
        scopes.append(f"jit({eqn.params['name']})" if "name" in eqn.params else eqn.primitive.name)
        fresh: dict[Var, Atom] = dict(zip(body.jaxpr.invars, invars))
        inside = list[JaxprEqn]()
        for inner in body.jaxpr.eqns:
            outvars: list[Var] = [v if isinstance(v, compat.DropVar) else compat.new_var(v.aval) for v in inner.outvars]
            fresh.update(zip(inner.outvars, outvars))
            # Those that led from the call to an equation of a library's are lost, too: it gets the line of the call.
            inner_scopes = (
                [] if compat.is_made_by_user(inner) else [f"called({n})" for n in reversed(python_names(inner))]
            )
            inside.append(compat.moved(inner, eqn, [*scopes, *inner_scopes]).replace(outvars=outvars))
        inner_eqns, inner_names = inline(inside, fresh)
        flat += inner_eqns
        for outer, inner in zip(eqn.outvars, body.jaxpr.outvars):
            names[outer] = resolve(inner, inner_names)
    return flat, names


def resolve(atom: Atom, names: Mapping[Var, Atom]) -> Atom:
    """Returns what stands for `atom` after all renamings."""
    while not isinstance(atom, Literal) and atom in names:
        atom = names[atom]
    return atom


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the body of a call that means no more than its body, else None."""
    if eqn.primitive.name in ("jit", "pjit"):
        body = eqn.params["jaxpr"]
        plain = all(
            type(s).__name__ == "UnspecifiedValue" for s in (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        )
        return body if plain and not compat.constants(body)[0] else None
    if eqn.primitive.name == "closed_call":
        body = eqn.params["call_jaxpr"]
        return body if not compat.constants(body)[0] else None
    return None


def traced(function: Callable[[Any], Any], operand: Atom) -> tuple[Sequence[JaxprEqn], Var]:
    """Returns the equations of a function of one value, and its result."""
    # A function of its own: JAX keeps what it traced, and the same variables would be written twice.
    traced = jax.make_jaxpr(lambda x: function(x))(operand.aval).jaxpr
    eqns, names = inline(traced.eqns, {traced.invars[0]: operand})
    out = resolve(traced.outvars[0], names)
    assert isinstance(out, Var)
    return eqns, out
