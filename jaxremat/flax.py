"""Adapters for Flax: `jaxremat.remat` for linen modules, without renaming anything.

`flax.linen.remat` gives a wrapped module another class name, and so its auto-named submodules other parameter names *and
other initial weights for the same seed*: two policies then train two different networks. Here the wrapped class keeps its
name. The core of jaxremat never imports Flax; this module does.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen import transforms

from jaxremat import policy as p
from jaxremat.remat import remat as remat_function

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


def remat(target: ModuleClass, policy: str | p.Policy, *, static: str | Sequence[str] = ()) -> ModuleClass:
    """Returns a linen module class whose calls keep for the backward pass what `policy` says.

    Parameters, their names and their initial values, mutable collections (updated once) and random streams are those of
    `target`. Flags need no care: arguments that are Python booleans, strings or None are static by themselves, by keyword
    or by position.

    Args:
        target: a `flax.linen.Module` class.
        policy: a policy or its spelling; it sees the values of one call of the module.
        static: names of further arguments of `__call__` that are no arrays, such as a Python integer.

    Raises:
        PolicyError: `policy` cannot be read, or does not fit the module.
        TypeError: `target` is no linen module class, or `static` names no argument of its `__call__`.

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
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        raise TypeError(
            f"jaxremat.flax.remat: needs a flax.linen.Module class; got {target!r:.80}. For functions: jaxremat.remat."
        )
    policy = p.parse(policy)
    signature = inspect.signature(target.__call__)
    names = (static,) if isinstance(static, str) else tuple(static)
    if unknown := [name for name in names if name not in signature.parameters]:
        raise TypeError(
            f"jaxremat.flax.remat: static names arguments of {target.__name__}.__call__, which has "
            f"{', '.join(list(signature.parameters)[1:])}; got {', '.join(unknown)}."
        )

    def lifted(fn: Callable[..., Any]) -> Callable[..., Any]:
        return _lifted(fn, policy, signature, frozenset(names))

    wrapped: Any = transforms.lift_transform(lifted, target)
    wrapped.__name__, wrapped.__qualname__, wrapped.__module__ = target.__name__, target.__qualname__, target.__module__
    return wrapped


def _lifted(
    fn: Callable[..., Any], policy: p.Policy, signature: inspect.Signature, static: frozenset[str]
) -> Callable[..., Any]:
    """A scope function whose variables, random streams and array arguments go through `jaxremat.remat`."""

    def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(None, *args, **kwargs)
        flags = {name: x for name, x in bound.arguments.items() if name in static or _is_flag(x)}
        arrays = {name: x for name, x in bound.arguments.items() if name not in flags}

        def call(variables: Any, rngs: Any, arrays: dict[str, Any]) -> tuple[Any, Any]:
            again = inspect.BoundArguments(signature, bound.arguments | arrays | flags)
            scope = scope_fn(variables, rngs)
            return fn(scope, *again.args[1:], **again.kwargs), repack(scope)

        return remat_function(call, policy)(variables, rngs, arrays)

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)


def _is_flag(argument: Any) -> bool:
    leaves = jax.tree.leaves(argument)
    return isinstance(argument, bool | str) or not leaves
