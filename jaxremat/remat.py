"""`remat`: the same values and gradients as `f`, and other residuals.

The function is traced once per shapes. Under differentiation its gradient graph is cut as the policy says: a `custom_vjp`
whose forward pass returns the stored values, and whose backward pass recomputes the rest just in time.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, update_wrapper
from typing import Any

import jax

from jaxremat import compat
from jaxremat import policy as p
from jaxremat.arguments import (
    Split,
    aval_of,
    flag_error,
    no_array_error,
    split,
    static_arguments,
    static_positions,
)
from jaxremat.compat import ClosedJaxpr
from jaxremat.errors import PolicyError
from jaxremat.fingerprint import fingerprint
from jaxremat.inline import inline
from jaxremat.program import Program
from jaxremat.spelling import parse

_CACHED_PROGRAMS = 64


def remat(
    f: Callable[..., Any],
    policy: str | p.Policy,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Returns a function with the values and gradients of `f` that keeps for its backward pass what `policy` says.

    Values and gradients equal those of `f` bit for bit where the compiler rounds both alike. What is recomputed may be fused
    otherwise than in the forward pass; then GELU, SiLU and softmax can differ in the last places, and so can a product with
    a sum after it, which XLA:CPU rounds once, by a fused multiply-add, where both are in one fusion. On x86 CPUs
    ``XLA_FLAGS=--xla_cpu_max_isa=AVX`` in the environment, before JAX starts, forbids that; networks of convolutions, batch
    norms and ReLUs then have the same bits under every policy. As an option of one `jax.jit` it is accepted and does nothing.

    Args:
        f: any JAX function: pytrees in, pytrees out; arrays of any dtype, random keys, closed-over arrays and tracers. It
            is traced once per shapes and static arguments, as by `jax.jit`, and may not have side effects.
        policy: a policy or its spelling, such as ``"dots"``; see `jaxremat.policy`.
        static_argnums: positions of arguments that are not arrays, such as flags; they must be hashable.
        static_argnames: names of arguments that are not arrays. A parameter given by its position or by its name is static
            however a call passes it.

    Returns:
        The function. It works under `jit`, `grad`, `vmap`, control flow and `shard_map`, and inside of itself. Forward-mode
        differentiation (`jvp`) of it is an error, as of every `custom_vjp`; `jvp` of its gradient is none.

    Raises:
        PolicyError: `policy` cannot be read; when the function is differentiated: a name, path or operation of the policy
            fits no value, or `f` has side effects.
        TypeError: `f` cannot be called, or has no such static argument; `policy` is no policy; in a call, an argument is no
            array, or `f` needs its value in Python, and it is not static.

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
    given = parse(policy)
    policy = given.resolved()
    if isinstance(policy, p.Budget):
        raise PolicyError(
            f"remat: needs a policy that says what is stored; got {policy}, which only says how much. "
            f"Plan first: jaxremat.remat(f, jaxremat.plan(f, *args, budget={str(policy).partition(':')[2]!r}))."
        )
    static_nums = tuple(static_argnums) if isinstance(static_argnums, Iterable) else (static_argnums,)
    static_names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    return update_wrapper(Rematerialized(f, policy, static_nums, static_names, given.planned_for()), f, updated=())


class Rematerialized:
    """What `remat` returns: callable like `f`. `policy` and `__wrapped__` say what it was made from.

    Attributes:
        policy: what to store.
        static_argnums: positions of arguments that are not arrays.
        static_argnames: names of arguments that are not arrays.
        planned: the fingerprint of the program that the policy was planned for; empty where it is for any.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        policy: p.Policy,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        planned: str = "",
    ) -> None:
        self._f, self.policy, self.planned = f, policy, planned
        self.static_argnums, self.static_argnames = static_arguments(f, static_argnums, static_argnames)
        self._programs = dict[Any, tuple[Program, Any]]()
        self._warned = set[str]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        if isinstance(self.policy, p.Everything):
            if self.planned:
                self.program(*args, **kwargs)  # refuses what it was not planned for
            return self._f(*args, **kwargs)
        program, out_tree, leaves = self.program(*args, **kwargs)
        return jax.tree.unflatten(out_tree, program(leaves))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else partial(self, instance)

    def program(self, *args: Any, **kwargs: Any) -> tuple["Program", Any, list[Any]]:
        """Returns the traced program for these arguments, the structure of its result, and the array arguments."""
        positions, names = static_positions(self.static_argnums, len(args)), set(self.static_argnames)
        given = split(args, kwargs, positions, names)
        leaves, in_tree = jax.tree.flatten((given.traced, given.traced_by_name))
        try:
            avals = tuple(map(aval_of, leaves))
        except TypeError:
            raise no_array_error(self._f, args, kwargs, positions | names) from None
        static = (given.static, given.static_by_name)
        types = tuple(type(value) for part in static for _, value in part)  # 1 == True, but they are two arguments
        key = (in_tree, avals, *static, types, compat.trace_key())
        try:
            found = self._programs.get(key)
        except TypeError as error:
            raise TypeError(
                f"remat: static arguments must be hashable; {error}. Pass arrays as ordinary arguments."
            ) from None
        if found is None:
            try:
                found, closes_over_arrays = self._trace(given)
            except (TypeError, IndexError) as error:
                if (flags := flag_error(self._f, self._trace, args, kwargs, positions, names)) is None:
                    raise
                raise flags from error
            if not closes_over_arrays:  # what is closed over may be another array at the next call
                while len(self._programs) >= _CACHED_PROGRAMS:
                    self._programs.pop(next(iter(self._programs)))
                self._programs[key] = found
        return *found, leaves

    def _trace(self, given: Split) -> tuple[tuple["Program", Any], bool]:
        out_tree: Any = None
        leaves, in_tree = jax.tree.flatten((given.traced, given.traced_by_name))

        def flat(*leaves: Any) -> list[Any]:
            nonlocal out_tree
            dynamic, kwargs = jax.tree.unflatten(in_tree, leaves)
            args = list(dynamic)
            for position, value in given.static:
                args.insert(position, value)
            outs, out_tree = jax.tree.flatten(self._f(*args, **kwargs, **dict(given.static_by_name)))
            return outs

        closed = jax.make_jaxpr(flat)(*leaves)
        check_effects(closed, self._f)
        function, closed_over = compat.hoisted(closed)
        found = fingerprint(function.jaxpr.invars, function.jaxpr.eqns) if self.planned else ""
        if found != self.planned:
            raise PolicyError(
                f"remat: this plan was made for the program {self.planned}; the wrapped function is {found}: its code, its "
                "arguments' shapes or the version of JAX differ. Plan again, or give the policy that the plan chose: plan.policy."
            )
        return (Program(function, closed_over, self.policy, warned=self._warned), out_tree), bool(closed_over)


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
