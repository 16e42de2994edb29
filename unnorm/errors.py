"""What can go wrong, by name: one line for a person, one class for a program."""

__all__ = [
    "BrokenFile",
    "ConstantColumnWarning",
    "DataError",
    "HealthWarning",
    "Interrupted",
    "InvalidValue",
    "MixingWarning",
    "NonFiniteObjective",
    "ShrinkageWarning",
    "Unhealthy",
    "UnnormError",
    "WeightsWarning",
]


class UnnormError(Exception):
    """A problem the user can mend; the command line prints its one line and exits with `exit_code`."""

    exit_code = 2


class InvalidValue(UnnormError, ValueError):
    """An argument outside its rule: the message names the parameter, the rule and the value."""


class DataError(UnnormError, ValueError):
    """Data that cannot be used as they are."""


class BrokenFile(UnnormError, ValueError):
    """A file that is truncated, edited, or not ours."""


class NonFiniteObjective(UnnormError, FloatingPointError):
    """Training produced NaN or infinity; nothing was updated with it."""

    exit_code = 1


class Unhealthy(UnnormError):
    """Training left the region of sense, and was told to stop for that (`strict`)."""

    exit_code = 1


class Interrupted(UnnormError):
    """Training was stopped by Ctrl-C after saving a checkpoint."""

    exit_code = 130


class ConstantColumnWarning(UserWarning):
    """Columns with one value only were left out of a density."""


class HealthWarning(UserWarning):
    """Training left the region of sense: its numbers may look converged while the model diverges."""


class MixingWarning(UserWarning):
    """Markov chains did not mix: their draws depend on where they started."""


class ShrinkageWarning(UserWarning):
    """A covariance was regularised because the data alone leave it (nearly) singular."""


class WeightsWarning(UserWarning):
    """Importance weights are carried by too few draws to be trusted."""
