"""`lean`: a derivative rule that names what it keeps, in forward mode, reverse mode and any order.

Plain reverse mode keeps every factor of every linear step of a tangent rule. Here the tangent of an operation is one
rematerialized step: partial evaluation then keeps its arguments, that is what the rule asked for, and the factors are
made again in the backward pass. Since the rule is a `custom_jvp`, forward mode, `vmap`, `scan`, `shard_map` and higher
orders need nothing more.

What it does not do: the experimental flag `jax_remat3` has no transpose for a rematerialized step inside a derivative
rule (seen in JAX 0.10.2 and 0.12.0.1), so reverse mode through these operations raises there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def lean(
    name: str,
    value: Callable[..., Any],
    keep: Callable[..., Any],
    tangent: Callable[..., Any],
    *,
    late: bool = False,
) -> Callable[..., Any]:
    """Returns an operation `op(options, *args)` whose derivative keeps what `keep` returns and nothing else.

    Args:
        name: what jaxprs show.
        value: `value(options, *args)`, the operation itself. `options` is hashable; `args` are arrays or `None`.
        keep: `keep(options, out, *args)`, the pytree of arrays that the derivative needs. To keep an argument or the
            output, return that very array: it is then shared with whoever keeps it too.
        tangent: `tangent(options, kept, *tangents)`, linear in `tangents`, one for each of `args`: `None` where the
            argument is `None` or holds integers, booleans or a key.
        late: whether a barrier holds back what `tangent` makes of the kept arrays until the cotangent is there. Without
            it a compiler may make that early and keep it; with it nothing fuses across. It is for convolutions, whose
            cotangent is an array in memory anyway, and which policies must see: under differentiation such an
            operation is the equations of `value`, not one call, and what a second derivative keeps is up to JAX.

    Returns:
        The operation, differentiable in both modes.
    """

    def call(options: Any, *args: Any) -> Any:
        return value(options, *args)

    call.__name__ = call.__qualname__ = name
    op = jax.custom_jvp(call, nondiff_argnums=(0,))

    def rule(options: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out = (call if late else op)(options, *primals)
        kept = keep(options, out, *primals)
        linear = [
            t if p is not None and jnp.issubdtype(p.dtype, jnp.inexact) else None for p, t in zip(primals, tangents)
        ]
        return out, jax.checkpoint(partial(tangent, options), prevent_cse=late)(kept, *linear)

    op.defjvp(rule)
    return op


def named(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f(options, *args)` compiled under `name`, so that jaxprs and profiles show the operation as `jit(name)`."""

    def call(options: Any, *args: Any) -> Any:
        return f(options, *args)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, static_argnums=0)


def as_kept(small: Any) -> Any:
    """Returns a kept value that is smaller than what it was made from, so that a compiler cannot undo that.

    Free to fuse, it would make packed bits again from the mask, or a drawn mask from the forward pass's random bits, and
    keep those. For a kept input or output a barrier changes nothing on a GPU or TPU, and on a CPU costs time.
    """
    return jax.lax.optimization_barrier(small)
