"""Which arguments of a function are arrays and which are static, and what to say where a call mixes the two up."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxremat import compat
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
    shown = name_of(f)
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


def name_of(f: Callable[..., Any]) -> str:
    """Returns what a message calls a function: its name, that of a `partial`'s function, or its class."""
    named = getattr(f, "func", f)
    return getattr(named, "__name__", type(named).__name__)


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


def aval_of(leaf: Any) -> Any:
    """Returns the type of an array or of a `ShapeDtypeStruct`.

    Raises:
        TypeError: it is neither.
    """
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def no_array_error(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], static: set[int | str]
) -> TypeError:
    """Returns the error for a call in which one of the arguments that are not static holds what is no array."""
    for key, argument in (*enumerate(args), *kwargs.items()):
        for leaf in jax.tree.leaves(argument) if key not in static else ():
            try:
                aval_of(leaf)
            except TypeError:
                what, remedy = argument_of(f, key)
                return TypeError(
                    f"remat: arguments of {name_of(f)} must be arrays, numbers or pytrees of them; got "
                    f"{type(leaf).__name__} ({leaf!r:.60}) in argument {what}. Make it static ({remedy}; see static_argnums), "
                    "or close over it."
                )
    raise AssertionError("all arguments are arrays")


def flag_error(
    f: Callable[..., Any],
    trace: Callable[[Split], Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    positions: set[int],
    names: set[str],
) -> TypeError | None:
    """Returns the error for a call of `f` that cannot be traced, where it can with numbers as static arguments; else None.

    Args:
        f: the function that was called.
        trace: traces a call of it.
        args: the call's arguments.
        kwargs: the call's arguments by name.
        positions: those that are static.
        names: those that are static.
    """
    numbers = dict[int | str, Any]()
    for key, x in (*enumerate(args), *kwargs.items()):
        if key not in positions | names and (number := _number(x)) is not None:
            numbers[key] = number

    def is_traced(keys: set[int | str]) -> bool:
        by_position = [numbers[i] if i in keys else x for i, x in enumerate(args)]
        by_name = {k: numbers[k] if k in keys else x for k, x in kwargs.items()}
        static_here = positions.union(key for key in keys if isinstance(key, int))
        names_here = names.union(key for key in keys if isinstance(key, str))
        try:
            trace(split(by_position, by_name, static_here, names_here))
        except Exception:  # whatever it is, it is not for want of these
            return False
        return True

    needed = set(numbers)
    if not needed or not is_traced(needed):
        return None
    for key in numbers:
        if is_traced(needed - {key}):
            needed.remove(key)
    found = {key: argument_of(f, key) for key in numbers if key in needed}
    given = dict[int | str, Any](enumerate(args)) | kwargs
    outer = any(compat.is_traced(given[key]) for key in found)
    shown = ("traced already" if compat.is_traced(given[key]) else repr(given[key]) for key in found)
    which = " and ".join(f"{what} ({value})" for (what, _), value in zip(found.values(), shown))
    remedies = " and ".join(remedy for _, remedy in found.values())
    return TypeError(
        f"remat: {name_of(f)} asks in Python for the value of its argument {which}, and every argument that is not static is "
        f"traced as an array, without a value. Make it static: {remedies} of jaxremat.remat (or static_argnums)"
        f"{', and likewise of the jax.jit or remat round it' if outer else ''}."
    )


def _number(x: Any) -> bool | int | float | None:
    """The number that `x` would be as a flag: itself, what a scalar array holds, 1 or True for one that is traced; else None."""
    if isinstance(x, bool | int | float):
        return x
    if not isinstance(x, jax.Array | np.generic) or x.shape or not str(x.dtype).startswith(("bool", "int", "uint")):
        return None
    unknown = compat.is_traced(x) or not getattr(x, "is_fully_addressable", True)
    return (np.ones((), x.dtype) if unknown else x).item()


def _parameters(f: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some functions of C have none
        return None


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "none"
