"""The ways in which a run can end early. Each message names the wrong value and the remedy."""


class InputError(ValueError):
    """A setting, a file or a folder of the user is wrong. The command line exits with code 2."""


class Stopped(RuntimeError):
    """A run cannot go on. The command line exits with code 1; the last checkpoint is good."""


class DivergedError(Stopped):
    """Training produced numbers that are not finite. A comparison goes on without the run."""


class FailedRoundError(Stopped):
    """A round has no result: too few answers came, or answers that do not fit their clients."""


class WorkersError(Stopped):
    """No process is left that could train."""


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has no message."""
    return (str(error) or type(error).__name__).splitlines()[0]
