"""Which arguments of a module's call are arrays, and which are flags."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Arguments:
    """The arguments of a method, `self` first: flags are Python booleans, strings, None, and the names in `static`."""

    signature: inspect.Signature
    static: frozenset[str]

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], inspect.BoundArguments]]:
        """Returns the arrays of a call by name, and the function that puts a call together again from new ones."""
        bound = self.signature.bind(None, *args, **kwargs)
        flags = {name: x for name, x in bound.arguments.items() if name in self.static or _is_flag(x)}
        arrays = {name: x for name, x in bound.arguments.items() if name not in flags}

        def join(arrays: Mapping[str, Any]) -> inspect.BoundArguments:
            return inspect.BoundArguments(self.signature, {**bound.arguments, **arrays, **flags})

        return arrays, join


def arguments_of(method: Callable[..., Any], static: str | Sequence[str], shown: str) -> Arguments:
    """Returns the arguments of an unbound method.

    Raises:
        TypeError: `static` names no argument of the method, which is called `shown`.
    """
    signature = inspect.signature(method)
    names = (static,) if isinstance(static, str) else tuple(static)
    if unknown := [name for name in names if name not in signature.parameters]:
        raise TypeError(
            f"jaxremat.flax.remat: static names arguments of {shown}, which has "
            f"{', '.join(list(signature.parameters)[1:])}; got {', '.join(unknown)}."
        )
    return Arguments(signature, frozenset(names))


def _is_flag(argument: Any) -> bool:
    return isinstance(argument, bool | str) or not jax.tree.leaves(argument)
