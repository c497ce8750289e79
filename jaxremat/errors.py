"""What jaxremat raises and warns: every message says what was required, what arrived and what to do."""

import difflib
from collections.abc import Iterable


class PolicyError(ValueError):
    """A policy that cannot be read, or that cannot be applied to the function it was given."""


class TargetError(ValueError):
    """A target that does not exist, that nothing here can compile for, or that does not fit the program's mesh."""


class CompileError(RuntimeError):
    """A program that the compiler of a target refused, in one line.

    Attributes:
        wanted_bytes: what the program needs, where it was refused for not fitting in the target's memory, else None.
    """

    def __init__(self, message: str, wanted_bytes: int | None = None):
        super().__init__(message)
        self.wanted_bytes = wanted_bytes


class RematWarning(UserWarning):
    """A policy that works but wastes: memory that it does not save, or recomputation that buys nothing."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `` Did you mean ...?`` for the known words nearest to `word`, or an empty string."""
    others = [other for other in dict.fromkeys(known) if other != word]
    close = difflib.get_close_matches(word, others, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
