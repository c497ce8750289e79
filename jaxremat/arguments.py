"""Which arguments of a function are arrays and which are static, and what to say where a call mixes the two up."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxremat.errors import did_you_mean

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Split:
    """The arguments of one call: static ones with their position or name, and the others, which are traced."""

    static: tuple[tuple[int, Any], ...]
    static_by_name: tuple[tuple[str, Any], ...]
    traced: tuple[Any, ...]
    traced_by_name: dict[str, Any]


def split(args: Sequence[Any], kwargs: Mapping[str, Any], positions: set[int], names: set[str]) -> Split:
    """Splits the arguments of a call by the positions and names that are static; those not given are no matter."""
    return Split(
        tuple((i, x) for i, x in enumerate(args) if i in positions),
        tuple((k, kwargs[k]) for k in sorted(kwargs) if k in names),
        tuple(x for i, x in enumerate(args) if i not in positions),
        {k: x for k, x in kwargs.items() if k not in names},
    )


def static_arguments(
    f: Callable[..., Any], argnums: Sequence[int], argnames: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the positions and names of the static arguments of `f`: each position with its name, and the other way round.

    Positions count from 0, or from the end where `f` takes no `*args`: of a function that does they stay as they are.

    Raises:
        TypeError: there is no such argument, or what was given is no position or name.

    Example:
        >>> from jaxremat.arguments import static_arguments
        >>> static_arguments(lambda x, size, train: x, [-1], ["size"])
        ((1, 2), ('size', 'train'))
    """
    for given, kind, option in ((argnums, int, "static_argnums"), (argnames, str, "static_argnames")):
        if wrong := [x for x in given if not isinstance(x, kind) or isinstance(x, bool)]:
            raise TypeError(f"remat: {option} takes {kind.__name__} values; got {', '.join(map(repr, wrong))}.")
    found = _parameters(f)
    if found is None or not (argnums or argnames):
        return tuple(argnums), tuple(argnames)
    shown = getattr(f, "__name__", "the function")
    kinds = [parameter.kind for parameter in found]
    ordered = [parameter.name for parameter in found if parameter.kind in _BY_POSITION]
    named = [parameter.name for parameter in found if parameter.kind in _BY_NAME]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        if beyond := [i for i in argnums if not -len(ordered) <= i < len(ordered)]:
            raise TypeError(
                f"remat: static_argnums counts the positional arguments of {shown} from 0, and it has {_listed(ordered)}; got "
                f"{', '.join(map(str, beyond))}."
            )
        argnums = [i % len(ordered) for i in argnums]
    if inspect.Parameter.VAR_KEYWORD not in kinds and (unknown := [name for name in argnames if name not in named]):
        raise TypeError(
            f"remat: static_argnames names arguments of {shown}, and it has {_listed(named)}; got "
            f"{', '.join(map(repr, unknown))}.{did_you_mean(unknown[0], named)}"
        )
    positions = {*argnums, *(ordered.index(name) for name in argnames if name in ordered)}
    names = {*argnames, *(ordered[i] for i in argnums if 0 <= i < len(ordered) and ordered[i] in named)}
    return tuple(sorted(positions)), tuple(sorted(names))


def static_positions(argnums: Sequence[int], count: int) -> set[int]:
    """Returns the static ones among the positions of a call with `count` positional arguments.

    Raises:
        TypeError: one is counted from the end, and lies before the first.
    """
    if too_low := [i for i in argnums if i < -count]:
        raise TypeError(
            f"remat: static_argnums={too_low[0]} counts from the end of the positional arguments, and the call has {count}."
        )
    return {i + count if i < 0 else i for i in argnums}


def argument_of(f: Callable[..., Any], key: int | str) -> tuple[str, str]:
    """Returns what the argument at a position, or of a name, is called, and how it is made static.

    Example:
        >>> from jaxremat.arguments import argument_of
        >>> argument_of(lambda x, train: x, 1), argument_of(max, 1)
        (("'train'", "static_argnames='train'"), ('number 1', 'static_argnums=1'))
    """
    if isinstance(key, int):
        found = [parameter for parameter in _parameters(f) or () if parameter.kind in _BY_POSITION]
        if key >= len(found) or found[key].kind not in _BY_NAME:
            return f"number {key}", f"static_argnums={key}"
        key = found[key].name
    return repr(key), f"static_argnames={key!r}"


def _parameters(f: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some functions of C have none
        return None


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "none"
