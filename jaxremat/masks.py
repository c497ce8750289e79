"""Stored values that serve derivatives alone, such as masks: where the forward pass makes them."""

from collections.abc import Collection

from jaxremat import policy as p
from jaxremat.choice import Choice
from jaxremat.compat import Var
from jaxremat.fusion import CONTRACTIONS, FUSED
from jaxremat.graph import Graph


def made_beside(choice: Choice) -> dict[Var, Var]:
    """For stored values that serve derivatives alone, such as masks, the value beside which each is to be made.

    The forward pass does not need them, so a compiler would make them in the backward pass, and keep what they are made of
    in their place. Where that is large and not stored anyway, they are made no later than the operand of the next convolution
    or product that is made of the same. That is for those who ask for each value, plans above all: where a policy stores all
    that autodiff would keep, as segments do with the last one, the compiler chooses better.
    """
    graph, policy = choice.graph, choice.policy
    if not isinstance(policy.outer if isinstance(policy, p.Loops) else policy, p.Values):
        return {}
    masks = [v for v in choice.large if graph.maker[v] not in graph.primal]
    found = dict[Var, Var]()
    for mask in masks:
        written = _written_sources(choice, mask)
        if written and (operand := _next_operand(graph, written)) is not None:
            found[mask] = operand
    return found


def _written_sources(choice: Choice, var: Var) -> set[Var]:
    """The large values in memory that a compiler could make a value of element by element, but those that are stored."""
    graph = choice.graph
    found = set[Var]()
    seen = {var}
    todo = [var]
    while todo:
        for source in graph.forward[graph.maker[todo.pop()]].invars:
            if not isinstance(source, Var) or source not in graph.maker or source in choice.kept or source in seen:
                continue
            seen.add(source)
            if graph.forward[graph.maker[source]].primitive.name in FUSED:
                todo.append(source)
            elif graph.value_of[source].size_bytes > graph.small_bytes:
                found.add(source)
    return found


def _next_operand(graph: Graph, sources: Collection[Var]) -> Var | None:
    """The first operand of a convolution or product that element-by-element operations make of some of these values."""
    made = set(sources)
    for index, eqn in enumerate(graph.forward):
        if index not in graph.primal:
            continue
        read = [v for v in eqn.invars if isinstance(v, Var) and v in made]
        if eqn.primitive.name in CONTRACTIONS:
            if read:
                return read[0]
        elif read:
            made.update(eqn.outvars)
    return None
