"""Load what a folder holds."""

from pathlib import Path

from unnorm.density import Density
from unnorm.tables.density import TABLE, TableDensity

__all__ = ["load"]


def load(folder: Path | str) -> TableDensity | Density:
    """Return the density that was saved in a folder: of a table, or the tensor-level one. Nothing in it is executed.

    >>> load("no such folder")
    Traceback (most recent call last):
    unnorm.errors.BrokenFile: There is no saved density at 'no such folder' ('model.json' is missing).
    """
    return TableDensity.load(folder) if (Path(folder) / TABLE).exists() else Density.load(folder)
