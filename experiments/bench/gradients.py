"""Whether a loss under rematerialization has the gradient of the loss without: both run here, on the same random arguments."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

import jaxremat
from experiments.bench.nets import Net

# The runtime needs memory beside what the compiler plans for, and the arguments and both gradients are there as well.
_PART_OF_MEMORY = 0.5


def fits(net: Net) -> bool:
    """Returns whether the gradient without rematerialization runs here: its peak is at most half of the memory."""
    memory_bytes = jaxremat.targets()["local"].memory_bytes
    if memory_bytes is None:
        return False
    return jaxremat.cost(jax.value_and_grad(net.loss), *net.args).peak_bytes <= _PART_OF_MEMORY * memory_bytes


def difference(net: Net, loss: Callable[..., Any]) -> float:
    """Runs the gradients of `loss`, which is the loss of `net` under some rematerialization, and of `net.loss`.

    Returns:
        As `largest_difference`. It is 0 for a network of ReLUs on a CPU without fused multiply-add
        (`experiments.devices.forbid_fused_multiply_add`); whatever else is rounded differs in its last bits.
    """
    args, expected = reference(net)
    return largest_difference(_gradient(loss, args), expected)


@lru_cache(maxsize=1)
def reference(net: Net) -> tuple[tuple[Any, ...], Any]:
    """Returns random arguments of a network, and its gradient without rematerialization; kept for the plans that follow."""
    args = net.arguments()
    return args, _gradient(net.loss, args)


def largest_difference(found: Any, expected: Any) -> float:
    """Returns how far two gradients of equal structure are apart, in the leaf where that is most.

    Returns:
        The largest difference as a part of the leaf's largest expected entry without sign; 0 where all bits are the same, and
        there alone. Where that part is no finite number, as for NaN on one side, it is 1.

    Example:
        >>> largest_difference({"w": np.array([1.0, 4.5])}, {"w": np.array([1.0, 4.0])})
        0.125
        >>> largest_difference(np.array([0.0]), np.array([-0.0])) > 0
        True
    """
    return max(jax.tree.leaves(jax.tree.map(_apart, found, expected)), default=0.0)


def _apart(found: Any, expected: Any) -> float:
    a, b = np.asarray(found), np.asarray(expected)
    if a.tobytes() == b.tobytes():
        return 0.0
    wide = np.promote_types(a.dtype, np.float32)
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(all="ignore"):
        most = np.abs(a - b).max()
        part = float(most / np.abs(b).max()) if most else 0.0
    # Zeros of two signs are no distance apart, and not the same bits.
    return max(part, float(np.finfo(wide).tiny)) if np.isfinite(part) else 1.0


def _gradient(loss: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return jax.jit(jax.value_and_grad(loss), compiler_options=jaxremat.compiler_options())(*args)[1]
