"""`Graph`: one function's forward and backward pass as two lists of equations over the same variables.

`trace_gradient` traces a function's forward pass together with what its derivative rules add (masks, `1 - y²`, ...), then
its backward pass. Three kinds of equations come out, and the difference matters to every later step:

- forward equations that the outputs need;
- forward equations that exist for the backward pass alone: they depend on no cotangent, but no output needs them;
- backward equations, which depend on a cotangent. Between them stand a few *late* ones, which JAX emits during the
  backward pass though they depend on no cotangent (a transposed weight, a constant).

A `Value` is one output of a forward equation, with the labels by which a policy can find it.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxremat import compat
from jaxremat.compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxremat.fingerprint import fingerprint
from jaxremat.inline import inline, resolve
from jaxremat.labels import Labels, labels_of

# Equations that move no data in memory: their output is a view of their first input.
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient"})
# Equations that write the same value everywhere, or count: a compiler never stores their output.
CONSTANTS = frozenset({"broadcast_in_dim", "iota"})
# A value below this part of a large one, or of a few bytes, counts as small: statistics, keys, scalars. Large are those that
# so many in a hundred do not exceed: the very largest may be a few logits over a vocabulary, or what a scan stacks.
_SMALL_FRACTION = 128
_SMALL_BYTES = 16
_LARGE_PERCENTILE = 90


@dataclass(frozen=True, eq=False)
class Value:
    """One output of a forward equation.

    Attributes:
        position: its number among all forward values, in program order; what `values:` policies name.
        index: the position of its equation in `Graph.forward`.
        size_bytes: its size; 0 for a broadcast constant.
    """

    position: int
    var: Var
    index: int
    eqn: JaxprEqn
    size_bytes: int


@dataclass(frozen=True, eq=False)
class Graph:
    """A function's forward and backward pass.

    Attributes:
        inputs: the function's inputs, then the variables of `constants`.
        constants: arrays that derivative rules brought along.
        outputs: its outputs, over inputs and forward values.
        forward: the forward equations in program order, calls flattened.
        cotangents: for every output the variable of its cotangent, None where the output has none (integers, keys).
        backward: the backward equations in program order, late ones between them.
        gradients: for every input its cotangent, None where it was not asked for.
        residuals: what JAX's own reverse mode keeps between the two passes.
        rewritten: indices of forward equations whose bodies were decided inside (scans under a policy).
    """

    inputs: Sequence[Var]
    constants: Sequence[Any]
    outputs: Sequence[Atom]
    forward: Sequence[JaxprEqn]
    cotangents: Sequence[Var | None]
    backward: Sequence[JaxprEqn]
    gradients: Sequence[Atom | None]
    residuals: Sequence[Atom]
    rewritten: frozenset[int] = field(default=frozenset())

    @cached_property
    def maker(self) -> dict[Var, int]:
        """For every forward variable the index of its equation."""
        return {var: i for i, eqn in enumerate(self.forward) for var in eqn.outvars}

    @cached_property
    def late(self) -> frozenset[int]:
        """Indices of backward equations that depend on no cotangent."""
        depends = {v for v in self.cotangents if v is not None}
        late = set[int]()
        for i, eqn in enumerate(self.backward):
            if any(isinstance(v, Var) and v in depends for v in eqn.invars):
                depends.update(eqn.outvars)
            else:
                late.add(i)
        return frozenset(late)

    @cached_property
    def primal(self) -> frozenset[int]:
        """Indices of the forward equations that the outputs need."""
        return self.ancestors(v for v in self.outputs if isinstance(v, Var))

    @cached_property
    def read_backward(self) -> tuple[Var, ...]:
        """The forward values and inputs that backward equations read, directly or through late equations."""
        made = {v for eqn in self.backward for v in eqn.outvars} | {v for v in self.cotangents if v is not None}
        read = [v for eqn in self.backward for v in eqn.invars] + [g for g in self.gradients if g is not None]
        return tuple(dict.fromkeys(v for v in read if isinstance(v, Var) and v not in made))

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """All forward values in program order."""
        values = list[Value]()
        for index, eqn in enumerate(self.forward):
            for var in eqn.outvars:
                if not isinstance(var, compat.DropVar):
                    size = size_bytes(var.aval)
                    if eqn.primitive.name in CONSTANTS and size > sum(size_bytes(v.aval) for v in eqn.invars):
                        size = 0
                    values.append(Value(len(values), var, index, eqn, size))
        return tuple(values)

    @cached_property
    def fingerprint(self) -> str:
        """A short digest of the program, forward and backward pass."""
        given = (*self.inputs, *(v for v in self.cotangents if v is not None))
        return fingerprint(given, (*self.forward, *self.backward))

    @cached_property
    def repeated(self) -> frozenset[Var]:
        """The forward values that an equation before computes as well; compilers make one of both."""
        first = dict[Hashable, Sequence[Var]]()
        same = dict[Var, Var]()
        for eqn in self.forward:
            reads = tuple(same.get(v, v) if isinstance(v, Var) else (str(v), v.aval.str_short()) for v in eqn.invars)
            key = (eqn.primitive, reads, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
            try:
                outvars = first.setdefault(key, eqn.outvars)
            except TypeError:  # parameters that cannot be compared
                continue
            if outvars is not eqn.outvars and not eqn.effects:
                same.update(zip(eqn.outvars, outvars))
        return frozenset(same)

    @cached_property
    def labels(self) -> dict[Var, Labels]:
        """For every forward variable the names by which policies find it; made when first asked for."""
        return labels_in(self.forward)

    @cached_property
    def value_of(self) -> dict[Var, Value]:
        """For every forward variable its value."""
        return {value.var: value for value in self.values}

    @cached_property
    def small_bytes(self) -> int:
        """The size up to which a value counts as small: statistics, keys and scalars, which are always worth storing."""
        sizes = sorted(value.size_bytes for value in self.values)
        large = sizes[(len(sizes) * _LARGE_PERCENTILE - 1) // 100] if sizes else 0
        return max(_SMALL_BYTES, large // _SMALL_FRACTION)

    def root(self, atom: Atom) -> Atom:
        """Returns the value that `atom` is a view of; itself where it is none."""
        while isinstance(atom, Var) and atom in self._shown:
            atom = self._shown[atom]
        return atom

    @cached_property
    def _shown(self) -> dict[Var, Atom]:
        """For every view what it is a view of."""
        return {eqn.outvars[0]: eqn.invars[0] for eqn in self.forward if is_view(eqn)}

    def ancestors(self, variables: Iterable[Var]) -> frozenset[int]:
        """Returns the indices of all forward equations that `variables` depend on."""
        found = set[int]()
        todo = [self.maker[v] for v in variables if v in self.maker]
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo += [self.maker[v] for v in self.forward[index].invars if isinstance(v, Var) and v in self.maker]
        return frozenset(found)


def labels_in(eqns: Sequence[JaxprEqn]) -> dict[Var, Labels]:
    """Returns the labels of all values that equations make; a tag labels the value that it is a view of.

    What a scan stacks has the labels of the value in its body.
    """
    labels = dict[Var, Labels]()
    shown = dict[Var, Var]()  # for a view the value that it shows
    for eqn in eqns:
        own = labels_of(eqn)
        inside = _labels_of_outputs(eqn.params["jaxpr"]) if eqn.primitive.name == "scan" else [None] * len(eqn.outvars)
        for var, inner in zip(eqn.outvars, inside):
            labels[var] = inner.under(own) if inner else own
        if is_view(eqn) and isinstance(source := eqn.invars[0], Var):
            root = shown[eqn.outvars[0]] = shown.get(source, source)
            if (tag := compat.tag(eqn)) is not None and root in labels:
                labels[root] = labels[root].tagged([tag])
    return labels


def _labels_of_outputs(body: ClosedJaxpr) -> list[Labels | None]:
    eqns, names = inline(body.jaxpr.eqns, {})
    labels = labels_in(eqns)
    outs = [resolve(atom, names) for atom in body.jaxpr.outvars]
    return [labels.get(out) if isinstance(out, Var) else None for out in outs]


def is_view(eqn: JaxprEqn) -> bool:
    """Says whether an equation's output is its first operand in another shape, or under a name."""
    return eqn.primitive.name in _VIEWS or compat.tag(eqn) is not None


def size_bytes(aval: Any) -> int:
    """Returns the bytes of an array of this type; of a random key, the bytes of its words.

    A symbolic dimension, such as the batch of a function that `jax.export` exports for all of them, counts as one of 1,024.
    """
    dtype, size = aval.dtype, math.prod(map(compat.dimension, aval.shape))
    if not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return size * math.prod(dtype._impl.key_shape) * 4
    return size * dtype.itemsize


class Evaluator(Protocol):
    """Binds one equation to values; the place where bodies of scans are decided."""

    def __call__(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of an equation."""
        ...

    def rewrites(self, eqn: JaxprEqn) -> bool:
        """Says whether calling this decides inside of an equation."""
        ...


def run(function: ClosedJaxpr, inputs: Sequence[Any], evaluate: Evaluator) -> list[Any]:
    """Runs a program without constants, each equation by `evaluate`."""
    jaxpr = function.jaxpr
    env = dict(zip(jaxpr.invars, inputs))
    for eqn in jaxpr.eqns:
        args = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, evaluate(eqn, args)))
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def trace_gradient(function: ClosedJaxpr, perturbed: Sequence[bool], evaluate: Evaluator) -> Graph:
    """Traces the forward and the backward pass of a function.

    Args:
        function: the function, without constants.
        perturbed: for every input whether its gradient is asked for.
        evaluate: binds one of the function's equations to values.

    Returns:
        The graph. Its equations are new, calls flattened: scopes and source lines are those of the function's equations.
    """
    differentiable = [jnp.issubdtype(a.dtype, jnp.inexact) for a in function.out_avals]
    state: dict[str, Any] = {}

    def forward(*inputs: Any) -> Any:
        asked = [x for x, p in zip(inputs, perturbed) if p]

        def of_asked(*asked: Any) -> tuple[list[Any], list[Any]]:
            rest = iter(asked)
            outs = run(function, [next(rest) if p else x for x, p in zip(inputs, perturbed)], evaluate)
            return [o for o, d in zip(outs, differentiable) if d], [o for o, d in zip(outs, differentiable) if not d]

        inexact, vjp, exact = jax.vjp(of_asked, *asked, has_aux=True)
        residuals, state["vjp"] = jax.tree.flatten(vjp)
        state["counts"] = len(inexact), len(exact)
        return inexact, exact, residuals

    def backward(residuals: Any, cotangents: Any) -> Any:
        return jax.tree.unflatten(state["vjp"], residuals)(cotangents)

    traced = jax.make_jaxpr(forward)(*function.in_avals)
    inexact, exact = state["counts"]
    cotangent_avals = [v.to_ct_aval() for v in traced.out_avals[:inexact]]
    traced_back = jax.make_jaxpr(backward)(list(traced.out_avals[inexact + exact :]), cotangent_avals)

    const_vars, consts = compat.constants(traced)
    const_vars_back, consts_back = compat.constants(traced_back)
    eqns, names = inline(traced.jaxpr.eqns, {})
    outs = [resolve(atom, names) for atom in traced.jaxpr.outvars]
    residuals = outs[inexact + exact :]
    ins_back = traced_back.jaxpr.invars
    renaming = dict(zip(ins_back[: len(residuals)], residuals))
    eqns_back, names_back = inline(traced_back.jaxpr.eqns, renaming)
    gradients_asked = iter([resolve(atom, names_back) for atom in traced_back.jaxpr.outvars])
    from_inexact, from_exact = iter(outs[:inexact]), iter(outs[inexact : inexact + exact])
    cotangents = iter(ins_back[len(residuals) :])
    gradients = [next(gradients_asked) if p else None for p in perturbed]
    return Graph(
        inputs=(*traced.jaxpr.invars, *const_vars, *const_vars_back),
        constants=(*consts, *consts_back),
        outputs=tuple(next(from_inexact) if d else next(from_exact) for d in differentiable),
        forward=tuple(eqns),
        cotangents=tuple(next(cotangents) if d else None for d in differentiable),
        backward=tuple(live(eqns_back, [g for g in gradients if isinstance(g, Var)])),
        gradients=tuple(gradients),
        residuals=tuple(dict.fromkeys(r for r in residuals if isinstance(r, Var))),
        rewritten=frozenset(i for i, eqn in enumerate(eqns) if evaluate.rewrites(eqn)),
    )


def live(eqns: Sequence[JaxprEqn], wanted: Iterable[Var]) -> list[JaxprEqn]:
    """Returns the equations that `wanted` needs, and those with effects, in order."""
    needed = set(wanted)
    kept = list[JaxprEqn]()
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    return kept[::-1]
