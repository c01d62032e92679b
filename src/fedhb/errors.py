"""The ways a run can end early. Each message names the value at fault and the remedy."""


class InputError(ValueError):
    """Something the user gave is wrong: a setting, a file, a folder. The command line exits with code 2."""


class Stopped(RuntimeError):
    """A run cannot go on. The command line exits with code 1; the last checkpoint is good."""


class DivergedError(Stopped):
    """Training produced numbers that are not finite."""


class WorkersError(Stopped):
    """No process is left that could train."""


def reason(error: BaseException) -> str:
    """What went wrong, in a line: some errors come without a word."""
    return (str(error) or type(error).__name__).splitlines()[0]
