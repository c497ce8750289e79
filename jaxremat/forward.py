"""The forward program of a choice: the function itself, and what it stores.

Two things are held in their order by barriers. A stored mask is made beside the value that takes the place of what it is made
of. And what goes to the host has gone when the next such value is made: compilers would copy it as late as they can, which is
in the backward pass.
"""

from typing import Any

import jax

from jaxremat import compat
from jaxremat.choice import Choice
from jaxremat.compat import Atom, ClosedJaxpr, JaxprEqn, Var
from jaxremat.graph import live
from jaxremat.inline import resolve, traced
from jaxremat.masks import made_beside


def forward_program(choice: Choice, is_body: bool = False) -> ClosedJaxpr:
    """Returns the program inputs -> (outputs, stored values).

    Args:
        choice: what is stored.
        is_body: whether it runs inside of a loop, which ends each step with copying to the host what goes there.
    """
    graph = choice.graph
    outvars = [*graph.outputs, *choice.kept]
    eqns = live(graph.forward, (v for v in outvars if isinstance(v, Var)))
    beside = made_beside(choice)
    on_host = {var for var, mark in choice.kept.items() if mark.host}
    if not beside and not on_host:
        return compat.program(graph.inputs, outvars, eqns)
    names = dict[Var, Atom]()
    written = list[JaxprEqn]()

    def wait(var: Var, other: Var, like: JaxprEqn) -> Var:
        """Has what follows one value wait for another; returns the other as it is from then on."""
        now = resolve(var, names)
        if not isinstance(now, Var) or compat.varying_axes(now.aval) != compat.varying_axes(other.aval):
            return other
        gate = compat.barrier([other, now], like)
        written.append(gate)
        other, names[var] = gate.outvars
        return other

    made = set[Var]()
    waiting = dict(beside)
    copies = dict[Var, Var]()
    last: Var | None = None  # what was last copied to the host
    for eqn in eqns:
        written.append(eqn.replace(invars=[resolve(atom, names) for atom in eqn.invars]))
        made.update(eqn.outvars)
        for mask in [m for m, v in waiting.items() if m in made and v in made]:
            operand = waiting.pop(mask)
            names[mask] = wait(operand, mask, eqn)
        for var in [v for v in eqn.outvars if v in on_host]:
            if last is not None and not is_body:
                copies[last] = wait(var, copies[last], eqn)
            copying, copies[var] = traced(_to_host, names.get(var, var))
            written += copying
            last = var
    stored = (copies[v] if v in copies else resolve(v, names) for v in choice.kept)
    return compat.program(graph.inputs, [*(resolve(v, names) for v in graph.outputs), *stored], written)


def _to_host(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Host, src=jax.memory.Space.Device)
