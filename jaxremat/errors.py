"""What jaxremat raises and warns: every message says what was required, what arrived and what to do."""

import difflib
from collections.abc import Iterable


class PolicyError(ValueError):
    """A policy that cannot be read, or that cannot be applied to the function it was given."""


class RematWarning(UserWarning):
    """A policy that works but wastes: memory that it does not save, or recomputation that buys nothing."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `` Did you mean ...?`` for the known words nearest to `word`, or an empty string."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
