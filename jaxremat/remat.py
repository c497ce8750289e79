"""`remat`: the same values and gradients as `f`, and other residuals.

The function is traced once per shapes. Under differentiation its gradient graph is cut as the policy says: a `custom_vjp`
whose forward pass returns the stored values, and whose backward pass recomputes the rest just in time.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, update_wrapper
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxremat import compat
from jaxremat import policy as p
from jaxremat.choice import Choice, check_matches, choose
from jaxremat.compat import ClosedJaxpr, JaxprEqn
from jaxremat.errors import PolicyError, RematWarning
from jaxremat.graph import run, trace_gradient
from jaxremat.inline import called, inline
from jaxremat.lint import waste
from jaxremat.rewrite import Backward, backward_program, forward_program

_CACHED_PROGRAMS = 64


def remat(
    f: Callable[..., Any],
    policy: str | p.Policy,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Returns a function with the values and gradients of `f` that keeps for its backward pass what `policy` says.

    Values equal those of `f` bit for bit where the compiler rounds both alike: it does on CPU in float32 for networks of
    matrix products, convolutions, normalisations and ReLUs. What is recomputed may be fused otherwise than it was in the
    forward pass, and then GELU, SiLU, softmax and the like can differ in the last places (2e-5 relative was never passed).

    Args:
        f: any JAX function: pytrees in, pytrees out; arrays of any dtype, random keys, closed-over arrays and tracers. It
            is traced once per shapes and static arguments, as by `jax.jit`, and may not have side effects.
        policy: a policy or its spelling, such as ``"dots"``; see `jaxremat.policy`.
        static_argnums: positions of arguments that are not arrays, such as flags; they must be hashable.
        static_argnames: keyword arguments that are not arrays.

    Returns:
        The function. It works under `jit`, `grad`, `vmap`, control flow and `shard_map`, and inside of itself. Forward-mode
        differentiation (`jvp`) of it is an error, as of every `custom_vjp`; `jvp` of its gradient is none.

    Raises:
        PolicyError: `policy` cannot be read; when the function is differentiated: a name, path or operation of the policy
            fits no value, or `f` has side effects.
        TypeError: `f` cannot be called, `policy` is no policy, or an argument is no array and not static.

    References:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174.

    Example:
        >>> import jax, jax.numpy as jnp, jaxremat
        >>> def loss(w, x):
        ...     for _ in range(3):
        ...         x = jnp.tanh(x @ w)
        ...     return (x**2).sum()
        >>> w, x = jnp.eye(4), jnp.ones((2, 4))
        >>> g = jaxremat.remat(loss, "dots")
        >>> bool((jax.grad(g)(w, x) == jax.grad(loss)(w, x)).all())
        True
    """
    if not callable(f):
        raise TypeError(f"remat: needs a function; got {type(f).__name__}. Call it as jaxremat.remat(f, 'dots').")
    policy = p.parse(policy)
    if isinstance(policy, p.Budget):
        raise PolicyError(
            f"{policy} is not supported yet by jaxremat.remat: a budget needs a planner that chooses the stored values. "
            "Spell the choice, for example 'dots' or 'segments:sqrt'."
        )
    static_nums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    static_names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    return update_wrapper(Rematerialized(f, policy, static_nums, static_names), f, updated=())


class Rematerialized:
    """What `remat` returns: callable like `f`. `policy` and `__wrapped__` say what it was made from.

    Attributes:
        policy: what to store.
        static_argnums: positions of arguments that are not arrays.
        static_argnames: keyword arguments that are not arrays.
    """

    def __init__(
        self, f: Callable[..., Any], policy: p.Policy, static_argnums: tuple[int, ...], static_argnames: tuple[str, ...]
    ) -> None:
        self._f, self.policy = f, policy
        self.static_argnums, self.static_argnames = static_argnums, static_argnames
        self._programs = dict[Any, tuple[Program, Any]]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        if isinstance(self.policy, p.Everything):
            return self._f(*args, **kwargs)
        program, out_tree, leaves = self.program(*args, **kwargs)
        return jax.tree.unflatten(out_tree, program(leaves))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else partial(self, instance)

    def program(self, *args: Any, **kwargs: Any) -> tuple["Program", Any, list[Any]]:
        """Returns the traced program for these arguments, the structure of its result, and the array arguments."""
        nums = {n % len(args) if args and n < 0 else n for n in self.static_argnums}
        static = tuple((i, args[i]) for i in sorted(nums) if i < len(args))
        static_kw = tuple((k, kwargs[k]) for k in sorted(self.static_argnames) if k in kwargs)
        dynamic = tuple(x for i, x in enumerate(args) if i not in nums)
        dynamic_kw = {k: v for k, v in kwargs.items() if k not in self.static_argnames}
        leaves, in_tree = jax.tree.flatten((dynamic, dynamic_kw))
        avals = tuple(_aval(leaf, self._f) for leaf in leaves)
        types = tuple(type(value) for _, value in (*static, *static_kw))  # 1 == True, but they are two arguments
        key = (in_tree, avals, static, static_kw, types, compat.trace_key())
        try:
            found = self._programs.get(key)
        except TypeError as error:
            raise TypeError(
                f"remat: static arguments must be hashable; {error}. Pass arrays as ordinary arguments."
            ) from None
        if found is None:
            found, closes_over_arrays = self._trace(leaves, in_tree, static, static_kw)
            if not closes_over_arrays:  # what is closed over may be another array at the next call
                while len(self._programs) >= _CACHED_PROGRAMS:
                    self._programs.pop(next(iter(self._programs)))
                self._programs[key] = found
        return *found, leaves

    def _trace(
        self, leaves: list[Any], in_tree: Any, static: Any, static_kw: Any
    ) -> tuple[tuple["Program", Any], bool]:
        out_tree: Any = None

        def flat(*leaves: Any) -> list[Any]:
            nonlocal out_tree
            dynamic, kwargs = jax.tree.unflatten(in_tree, leaves)
            args = list(dynamic)
            for position, value in static:
                args.insert(position, value)
            outs, out_tree = jax.tree.flatten(self._f(*args, **kwargs, **dict(static_kw)))
            return outs

        closed = jax.make_jaxpr(flat)(*leaves)
        check_effects(closed, self._f)
        function, closed_over = compat.hoisted(closed)
        return (Program(function, closed_over, self.policy), out_tree), bool(closed_over)


def _aval(leaf: Any, f: Callable[..., Any]) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jax.typeof(leaf)
    except TypeError:
        name = getattr(f, "__name__", "f")
        raise TypeError(
            f"remat: arguments of {name} must be arrays, numbers or pytrees of them; got {type(leaf).__name__} ({leaf!r:.60}). "
            "Name it in static_argnums or static_argnames, or close over it."
        ) from None


def check_effects(closed: ClosedJaxpr, f: Callable[..., Any]) -> None:
    """Raises a PolicyError where an equation has an effect that recomputation would repeat or lose.

    Names of mesh axes (collectives) are no effects in this sense, and debugging callbacks run in the forward pass alone.
    """
    for eqn in inline(closed.jaxpr.eqns, {})[0]:
        effects = [e for e in eqn.effects if type(e).__name__ not in ("NamedAxisEffect", "DebugEffect")]
        if effects:
            where = compat.source_line(eqn)
            raise PolicyError(
                f"remat: {getattr(f, '__name__', 'f')} must be free of side effects, as recomputation would run them twice; "
                f"{eqn.primitive.name}{f' at {where}' if where else ''} has the effect {effects[0]}. Move it out of the function."
            )


@dataclass(frozen=True, eq=False)
class Cut:
    """A choice made true: the two programs, for one set of inputs whose gradients are asked for."""

    choice: Choice
    inner: Sequence["Program"]
    _backward: dict[tuple[bool, ...], tuple[Backward, Callable[..., Any]]] = field(default_factory=dict)

    @cached_property
    def forward(self) -> Callable[..., list[Any]]:
        """Runs inputs -> [outputs, stored values]."""
        return runner(forward_program(self.choice), "remat_forward")

    def backward(self, zero: tuple[bool, ...]) -> tuple[Backward, Callable[..., list[Any]]]:
        """Returns the backward program for these zero cotangents, and what runs it."""
        if zero not in self._backward:
            program = backward_program(self.choice, zero)
            self._backward[zero] = program, runner(program.program, "remat_backward")
        return self._backward[zero]

    @property
    def matches(self) -> dict[str, int]:
        """For every selector of the policy its matches, those inside of scan bodies included."""
        total = dict(self.choice.matches)
        for program in self.inner:
            # JAX differentiates a body anew as it learns what its carry depends on: the last time counts.
            for cut in list(program.cuts.values())[-1:]:
                for selector, count in cut.matches.items():
                    total[selector] = total.get(selector, 0) + count
        return total


class Program:
    """A traced function with a policy: calls of it are differentiated through its cut.

    Args:
        function: the function as a program; its first inputs are the arrays that it closes over.
        closed_over: those arrays.
        policy: what to store.
        is_inside: whether it is a body inside of another program, which then checks the policy's selectors.
    """

    def __init__(
        self, function: ClosedJaxpr, closed_over: Sequence[Any], policy: p.Policy, is_inside: bool = False
    ) -> None:
        self.function, self.closed_over, self.policy, self.is_inside = function, tuple(closed_over), policy, is_inside
        self.cuts = dict[tuple[bool, ...], Cut]()
        self._primal = runner(function, "remat_primal")
        self._call = jax.custom_vjp(lambda *inputs: self._primal(*inputs))
        self._call.defvjp(self._forward, self._backward, symbolic_zeros=True)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Runs the program on its array arguments."""
        return self._call(*self.closed_over, *leaves)

    def cut(self, perturbed: tuple[bool, ...]) -> Cut:
        """Returns the cut for the inputs whose gradients are asked for; traced once."""
        if perturbed not in self.cuts:
            evaluate = _Evaluator(body_policy(self.policy))
            graph = trace_gradient(self.function, perturbed, evaluate)
            cut = Cut(choose(graph, self.policy), evaluate.inner)
            if not self.is_inside:
                check_matches(cut.matches, graph, self.policy)
                for message in waste(cut.choice):
                    warnings.warn(message, RematWarning, stacklevel=2)
            self.cuts[perturbed] = cut
        return self.cuts[perturbed]

    def _forward(self, *inputs: Any) -> tuple[list[Any], "_Residuals"]:
        cut = self.cut(tuple(bool(i.perturbed) for i in inputs))
        graph = cut.choice.graph
        values = [i.value for i in inputs]
        outs = cut.forward(*values, *graph.constants)
        outs, stored = outs[: len(graph.outputs)], outs[len(graph.outputs) :]
        stored = [
            jax.device_put(x, jax.memory.Space.Host, src=jax.memory.Space.Device) if mark.host else x
            for x, mark in zip(stored, cut.choice.kept.values())
        ]
        # Only inputs that some backward pass can read are kept; JAX hands them on without a copy.
        read = set(cut.backward((False,) * len(graph.outputs))[0].reads)
        return outs, _Residuals([*stored, *(x if v in read else None for v, x in zip(graph.inputs, values))], cut)

    def _backward(self, residuals: "_Residuals", cotangents: Sequence[Any]) -> tuple[Any, ...]:
        graph = residuals.cut.choice.graph
        zero = tuple(isinstance(ct, SymbolicZero) or v is None for ct, v in zip(cotangents, graph.cotangents))
        backward, run = residuals.cut.backward(zero)
        names = (*residuals.cut.choice.kept, *graph.inputs)
        values = dict(zip(names, [*residuals.values, *graph.constants]))
        given = [
            compat.zeros(ct) if isinstance(ct := cotangents[i], SymbolicZero) else ct for i in backward.cotangents
        ]  # fmt: skip
        found = dict(zip(backward.gradients, run(*(values[v] for v in backward.reads), *given)))
        return tuple(found.get(i) for i in range(len(self.function.in_avals)))


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class _Residuals:
    """What the forward pass hands to the backward pass: arrays, and the cut that they belong to."""

    values: list[Any]
    cut: Cut

    def tree_flatten(self) -> tuple[list[Any], Cut]:
        return self.values, self.cut

    @classmethod
    def tree_unflatten(cls, cut: Cut, values: Any) -> "_Residuals":
        return cls(list(values), cut)


def runner(program: ClosedJaxpr, name: str) -> Callable[..., list[Any]]:
    """Returns a function that runs a program: one call equation where it is traced, equation by equation where it is not.

    Without `jit` round it, a program then rounds as the function itself would.
    """
    run = compat.as_function(program)

    def traced(*args: Any) -> list[Any]:
        return run(*args)

    traced.__name__ = traced.__qualname__ = name
    jitted = jax.jit(traced)
    return lambda *args: list(jitted(*args) if compat.is_traced(*args) else run(*args))


def body_policy(policy: p.Policy) -> p.Policy | None:
    """Returns what a policy means inside of a scan's body; None where it says nothing about it.

    Positions count the values of the wrapped function itself. The border of segments inside of a scan is the carry.
    """
    match policy:
        case p.Values():
            return None
        case p.Segments() | p.Offload(p.Segments()):
            return p.Nothing()
        case p.Union(parts):
            inside = [q for part in parts if (q := body_policy(part)) is not None]
            return p.union(*inside) if inside else None
        case p.Offload(p.Values()):
            return None
    return policy


class _Evaluator:
    """Binds a function's equations to values, deciding inside of scans and branches, and marking custom derivatives.

    Calls of jitted functions stay calls, so that JAX's derivative adds up cotangents in the order that it always does.
    """

    def __init__(self, policy: p.Policy | None) -> None:
        self.policy = policy
        self.inner = list[Program]()
        self._calls = dict[int, tuple[ClosedJaxpr, Callable[..., Any]]]()

    def rewrites(self, eqn: JaxprEqn) -> bool:
        """Says whether this decides inside of an equation's body."""
        if self.policy is None:
            return False
        return eqn.primitive.name == "scan" or (eqn.primitive.name == "cond" and not isinstance(self.policy, p.Nothing))

    def __call__(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        if self.rewrites(eqn):
            return list(compat.scoped(eqn, self._scan if eqn.primitive.name == "scan" else self._cond, eqn, args))
        if eqn.primitive.name == "custom_jvp_call":
            return compat.bind(eqn, args, f"custom_jvp({eqn.params['call_jaxpr'].jaxpr.debug_info.func_name})")
        body = called(eqn)
        if body is not None and self._is_special(body):
            return list(compat.scoped(eqn, self._call_of(eqn, body), *args))
        return compat.bind(eqn, args)

    def _is_special(self, body: ClosedJaxpr) -> bool:
        for eqn in body.jaxpr.eqns:
            inside = called(eqn)
            if self.rewrites(eqn) or eqn.primitive.name == "custom_jvp_call" or (inside and self._is_special(inside)):
                return True
        return False

    def _call_of(self, eqn: JaxprEqn, body: ClosedJaxpr) -> Callable[..., Any]:
        if id(body) not in self._calls:

            def call(*args: Any) -> list[Any]:
                return run(body, args, self)

            call.__name__ = call.__qualname__ = eqn.params.get("name", eqn.primitive.name)
            self._calls[id(body)] = body, jax.jit(call)
        return self._calls[id(body)][1]

    def _body(self, closed: ClosedJaxpr) -> "Program":
        assert self.policy is not None
        program = Program(*compat.hoisted(closed), self.policy, is_inside=True)
        self.inner.append(program)
        return program

    def _scan(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        params = eqn.params
        consts, init, scanned = compat.scan_parts(eqn, args)
        program = self._body(params["jaxpr"])

        def body(state: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outs = program([*consts, *state, *xs])
            return outs[: len(init)], outs[len(init) :]

        final, stacked = jax.lax.scan(
            body,
            init,
            scanned,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*final, *stacked]

    def _cond(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        index, *operands = args
        branches = [self._body(branch) for branch in eqn.params["branches"]]
        return jax.lax.switch(index, [lambda *xs, branch=branch: branch(xs) for branch in branches], *operands)
