"""What the experiments raise when the input is at fault; a command line prints the message and exits with status 2."""


class ExperimentError(Exception):
    """Bad input to an experiment: the message says what was required, what arrived and what to do."""


class DataError(ExperimentError):
    """A data set that cannot be read, or that is not what it claims to be."""


class DataUnavailableError(DataError):
    """A data set that is not on this machine and cannot be had from here, through no fault of what was asked."""
