"""How much of a network is computed twice: the matrix products and convolutions of its gradient beyond those without remat.

Counted in the jaxpr, regions of `jax.checkpoint` and bodies of loops included, so the same for every target. Cheap operations
are left out: every compiler repeats these as it likes, and what dominates a step's arithmetic is exact.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from experiments.errors import ExperimentError
from jaxremat.flops import count_flops


def contraction_flops(loss: Callable[..., Any], args: Sequence[Any]) -> int:
    """Returns the operations of matrix products and convolutions in one gradient with respect to the first argument.

    Args:
        loss: a scalar function of `args`.
        args: arrays, or shapes and types: nothing is computed.

    Returns:
        Floating point operations, two for a multiply-add, as `jaxremat.flops` counts.

    Raises:
        ExperimentError: a loop's length, or the work of a primitive, is not known from the jaxpr.
    """
    count = count_flops(jax.make_jaxpr(jax.value_and_grad(loss))(*args))
    if count.unknown_loops or count.uncounted:
        loops, others = count.unknown_loops, ", ".join(count.uncounted) or "none"
        raise ExperimentError(
            "The contractions of a jaxpr count only where every loop is a scan and every primitive is known; "
            f"got {loops} loops of unknown length, and of unknown work: {others}."
        )
    return count.dot_flops + count.conv_flops


def recomputed_flops(loss: Callable[..., Any], plain: Callable[..., Any], args: Sequence[Any]) -> int:
    """Returns the contractions that the gradient of `loss` repeats: those beyond the ones of `plain`.

    Args:
        loss: a scalar function of `args` under rematerialization of any kind.
        plain: the same function without.
        args: arrays, or shapes and types.

    Returns:
        Floating point operations; 0 where no contraction is repeated.

    Raises:
        ExperimentError: as `contraction_flops`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        >>> loss = lambda w: jnp.tanh(w @ w).sum()
        >>> recomputed_flops(jax.checkpoint(loss), loss, (w,)) == 2 * 4**3
        True
    """
    return contraction_flops(loss, args) - contraction_flops(plain, args)
