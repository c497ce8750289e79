"""The gradient of max pooling, with zeros of its own where it is compiled for a GPU.

XLA's GPU compiler adds the gradient to an array of zeros (OpenXLA's SelectAndScatterExpander). Those are a constant, the same
as the zeros of every ReLU of that shape: made once, in the forward pass, and kept. Behind a barrier they are nobody else's.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.core.primitives import select_and_scatter_add_p
from jax.interpreters import ad, batching, mlir

from jaxremat import compat
from jaxremat.compat import JaxprEqn

NAME = select_and_scatter_add_p.name


def with_own_zeros(eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation of JAX's `select_and_scatter_add` as one of the primitive below."""
    return eqn.replace(primitive=_primitive())


@cache
def _primitive() -> Primitive:
    """JAX's primitive but for what it becomes on GPUs: its derivatives and batches are JAX's own."""
    theirs = select_and_scatter_add_p
    ours = Primitive(NAME)
    ours.abstract_eval = theirs.abstract_eval
    ours.def_impl(theirs.bind)
    ad.primitive_jvps[ours] = ad.primitive_jvps[theirs]
    ad.primitive_transposes[ours] = ad.primitive_transposes[theirs]

    def batched(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple[Any, int]:
        return jax.vmap(lambda *xs: theirs.bind(*xs, **params), tuple(dims))(*args), 0

    batching.primitive_batchers[ours] = batched
    mlir.register_lowering(ours, mlir.lower_fun(theirs.bind, multiple_results=False))
    mlir.register_lowering(ours, mlir.lower_fun(scattered, multiple_results=False), platform="gpu")
    return ours


def scattered(
    source: Any,
    operand: Any,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Any:
    """What it becomes on GPUs: as JAX has it there, where the operand is padded first, but with a zero that is no constant.

    Args:
        source: the cotangent of the pooled array.
        operand: what was pooled.
        select_prim: says which of two values a window keeps: greater or equal, or less or equal.
        window_dimensions, window_strides, padding: of the windows.
    """
    zero, source = jax.lax.optimization_barrier((np.zeros((), source.dtype), source))
    dtype = operand.dtype
    is_float = jax.numpy.issubdtype(dtype, np.inexact)
    least, most = (-np.inf, np.inf) if is_float else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    never = np.asarray(least if select_prim.name == "ge" else most, dtype)
    padded = jax.lax.pad(operand, never, [(low, high, 0) for low, high in padding])
    out = compat.select_and_scatter(
        padded, source, zero, select=select_prim, window=window_dimensions, strides=window_strides
    )
    starts = [low for low, _ in padding]
    return jax.lax.slice(out, starts, [low + size for low, size in zip(starts, operand.shape)])
