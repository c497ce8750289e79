"""Adapters for Flax: `remat` for its modules, and modules that keep less, for linen (here) and nnx (`jaxremat.flax.nnx`).

The core of jaxremat never imports Flax; this package does.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar, overload

import flax.linen
import flax.nnx

from jaxremat import policy as p
from jaxremat.flax import nnx
from jaxremat.flax.lifting import remat_class
from jaxremat.flax.linen import BatchNorm, Dropout, GroupNorm, LayerNorm, RMSNorm, norm_relu_conv
from jaxremat.spelling import parse

__all__ = ["BatchNorm", "Dropout", "GroupNorm", "LayerNorm", "RMSNorm", "nnx", "norm_relu_conv", "remat"]

Class = TypeVar("Class", bound=type[flax.linen.Module] | type[flax.nnx.Module])


@overload
def remat(target: Class, policy: str | p.Policy, *, static: str | Sequence[str] = ()) -> Class: ...


@overload
def remat(
    target: flax.nnx.Module | MethodType, policy: str | p.Policy, *, static: str | Sequence[str] = ()
) -> Callable[..., Any]: ...


def remat(target: Any, policy: str | p.Policy, *, static: str | Sequence[str] = ()) -> Any:
    """Returns a module whose calls keep for the backward pass what `policy` says.

    Parameters, their names and their initial values, mutable state (updated once) and random streams are those of
    `target`. Flags need no care: arguments that are Python booleans, strings or None are static by themselves, by keyword
    or by position.

    Args:
        target: a class of linen or nnx modules; or an nnx module or a bound method of one, of which a function is made.
        policy: a policy or its spelling; it sees the values of one call.
        static: names of further arguments that are no arrays, such as a Python integer.

    Returns:
        A class of the same name, to be used in place of `target`; or a function that is called like `target` and updates
        the module's state.

    Raises:
        PolicyError: `policy` cannot be read, or does not fit the module.
        TypeError: `target` is none of these, or `static` names no argument of its call.
        ValueError: a call of an nnx module adds or removes variables; do that before.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxremat.flax
        >>> class Block(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x, train):
        ...         return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        >>> class Net(nn.Module):
        ...     block: type[nn.Module] = Block
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         return self.block()(self.block()(x, train=True), train=True)
        >>> key, x = jax.random.key(0), jnp.ones((2, 4))
        >>> plain, wrapped = Net(), Net(jaxremat.flax.remat(Block, "nothing"))
        >>> same = jax.tree.map(lambda a, b: bool((a == b).all()), plain.init(key, x), wrapped.init(key, x))
        >>> all(jax.tree.leaves(same))
        True
    """
    if isinstance(target, type) and issubclass(target, flax.linen.Module):
        return remat_class(target, parse(policy), static)
    if isinstance(target, type) and issubclass(target, flax.nnx.Module):
        return nnx.remat_class(target, parse(policy), static)
    if isinstance(target, flax.nnx.Module) and callable(target):
        target = MethodType(type(target).__call__, target)
    if isinstance(target, MethodType) and isinstance(target.__self__, flax.nnx.Module):
        return nnx.remat_method(target, parse(policy), static)
    raise TypeError(
        "jaxremat.flax.remat: needs a class of modules (flax.linen.Module class or flax.nnx.Module class), an nnx module "
        f"or a bound method of one; got {target!r:.80}. For functions: jaxremat.remat."
    )
