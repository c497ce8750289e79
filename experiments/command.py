"""How a command line ends: with its own status, or with one message on standard error and no traceback."""

import sys
from collections.abc import Callable

from experiments.errors import ExperimentError
from jaxremat import CompileError, PolicyError, TargetError


def exit_status(body: Callable[[], int], *, interrupted: str) -> int:
    """Runs a command's body and returns the exit status.

    Args:
        body: the command; it returns a status of its own.
        interrupted: what to say when somebody interrupts it: how to go on.

    Returns:
        What `body` returns; 2 where something asked for cannot be done, after its message; 130 when interrupted.

    Example:
        >>> from experiments.command import exit_status
        >>> exit_status(lambda: 0, interrupted="nothing is lost.")
        0
    """
    try:
        return body()
    except (ExperimentError, PolicyError, TargetError, CompileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted. {interrupted}".rstrip(), file=sys.stderr)
        return 130


def resuming(checkpoint_dir: str | None) -> str:
    """Returns what to say to somebody who interrupted a training run: whether the same command goes on."""
    return "" if checkpoint_dir is None else "The same command resumes from the last checkpoint."
