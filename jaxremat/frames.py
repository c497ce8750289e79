"""Which line of a call stack is the user's: the innermost one outside of the libraries that stand between it and the trace."""

import os
import sys
import sysconfig
from functools import cache
from types import FrameType

# A user sees what these do, and did not write it.
_LIBRARIES = ("jaxremat", "jax", "jaxlib", "flax", "optax")
_INSTALLED = ("site-packages", "dist-packages")  # within the standard library's directory, but not of it


def is_library(file_name: str) -> bool:
    """Says whether code of this file is a library's (Python's own included), so that its line tells a user nothing.

    Example:
        >>> import jax, json
        >>> from jaxremat.frames import is_library
        >>> is_library(jax.__file__), is_library(json.__file__), is_library("train.py")
        (True, True, False)
    """
    # Flax and Optax are not imported for this: where they are not, no frame is theirs.
    return _is_below(file_name, tuple(_directory(name) for name in _LIBRARIES if name in sys.modules))


def user_stacklevel() -> int:
    """Returns the `stacklevel` with which the caller's `warnings.warn` points at the user's line, 2 where there is none."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return level
        frame, level = frame.f_back, level + 1
    return 2


def _directory(library: str) -> str:
    file_name = getattr(sys.modules[library], "__file__", None)  # packages without files have none
    return (file_name or "").removesuffix("__init__.py")


@cache
def _is_below(file_name: str, directories: tuple[str, ...]) -> bool:
    if file_name.startswith(("<frozen ", *filter(None, directories))):
        return True
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    return file_name.startswith(standard) and not file_name.removeprefix(standard).startswith(_INSTALLED)
