"""Rows of a file for a density that is not one of a table."""

import torch

from unnorm.data import tables
from unnorm.data.rows import Rows

__all__ = ["plain_rows"]


def plain_rows(data: str, *, key: str | None) -> torch.Tensor:
    """Return the rows of a file of numbers, in float64."""
    table = tables.finite(tables.read(tables.find(data), key=key), drop=False)
    return Rows(table.values)[torch.arange(len(table.values))]
