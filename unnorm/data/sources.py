"""Where the rows of a fit come from, by name: a toy set or a file. Looking for them takes no torch."""

from pathlib import Path

from unnorm.data.tables import find
from unnorm.errors import DataError
from unnorm.names import unknown

__all__ = ["TOY_NAMES", "locate"]

TOY_NAMES = ("2spirals", "8gaussians", "checkerboard", "circles", "moons", "swissroll")  # those of `unnorm.data.TOYS`


def locate(name: str) -> Path | None:
    """Return the file called `name`; None where this is a toy set.

    >>> locate("moons")
    >>> locate("moon")
    Traceback (most recent call last):
    unnorm.errors.DataError: Unknown data set 'moon'. Did you mean 'moons'? Known: 2spirals, ... Or give a file.
    """
    if name in TOY_NAMES:
        return None
    try:
        return find(name)
    except DataError as problem:
        if Path(name).suffix or "/" in name or Path(name).exists():
            raise
        raise DataError(unknown("data set", name, TOY_NAMES) + " Or give a file.") from problem
