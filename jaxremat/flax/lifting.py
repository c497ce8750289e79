"""`jaxremat.remat` for linen module classes, without renaming anything.

`flax.linen.remat` gives a wrapped module another class name, and so its auto-named submodules other parameter names *and
other initial weights for the same seed*: two policies then train two different networks. Here the wrapped class keeps its
name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
from flax.core import lift
from flax.linen import transforms

from jaxremat import policy as p
from jaxremat.flax.arguments import Arguments, arguments_of
from jaxremat.remat import remat


def remat_class(target: type[nn.Module], policy: p.Policy, static: str | Sequence[str]) -> type[nn.Module]:
    """Returns the class with its calls under `policy`; see `jaxremat.flax.remat`."""
    arguments = arguments_of(target.__call__, static, f"{target.__name__}.__call__")

    def lifted(fn: Callable[..., Any]) -> Callable[..., Any]:
        return _lifted(fn, policy, arguments)

    wrapped: Any = transforms.lift_transform(lifted, target)
    wrapped.__name__, wrapped.__qualname__, wrapped.__module__ = target.__name__, target.__qualname__, target.__module__
    return wrapped


def _lifted(fn: Callable[..., Any], policy: p.Policy, arguments: Arguments) -> Callable[..., Any]:
    """A scope function whose variables, random streams and array arguments go through `jaxremat.remat`."""

    def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        arrays, join = arguments.split(args, kwargs)

        def call(variables: Any, rngs: Any, arrays: dict[str, Any]) -> tuple[Any, Any]:
            again = join(arrays)
            scope = scope_fn(variables, rngs)
            return fn(scope, *again.args[1:], **again.kwargs), repack(scope)

        return remat(call, policy)(variables, rngs, arrays)

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)
