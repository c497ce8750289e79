"""The two things that the sizes of a network must be; each check names the network and the size."""

from experiments.errors import ExperimentError


def positive(network: str, **sizes: int) -> None:
    """Checks that every size is a whole number of at least 1.

    Raises:
        ExperimentError: one is not.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ExperimentError(f"{network}: {name} is a whole number of at least 1; got {size!r}.")


def multiple(network: str, of: int, why: str, **sizes: int) -> None:
    """Checks that every size is a positive multiple of `of`, which `why` explains.

    Raises:
        ExperimentError: one is not.
    """
    positive(network, **sizes)
    for name, size in sizes.items():
        if size % of:
            raise ExperimentError(f"{network}: {why}, so {name} is a multiple of {of}; got {size}.")
