"""The columns of a table and its weighted rows, as training wants them."""

import warnings
from typing import NamedTuple

import numpy as np
from scipy.stats.qmc import Sobol

from unnorm.errors import ConstantColumnWarning

__all__ = ["Columns", "weighted"]

MOST_REPEATED = 20  # times as many rows as there are, at most, to stand for weights
CELL_POINTS = 16  # a power of two, as Sobol asks for
LARGEST_INTEGER = 2.0**40


class Columns(NamedTuple):
    """Which columns vary, and which of these hold integers.

    >>> found = Columns.of(np.array([[1.0, 5.0, 0.2], [2.0, 5.0, 0.4]]))
    >>> found.kept.tolist(), found.integer.tolist()
    ([True, False, True], [True, False])
    """

    kept: np.ndarray
    integer: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> "Columns":
        kept = (rows != rows[0]).any(0)
        varying = rows[:, kept]
        whole = (varying == np.round(varying)).all(0) & (np.abs(varying).max(0, initial=0.0) < LARGEST_INTEGER)
        return cls(kept, whole)

    def warn(self, names: np.ndarray | None) -> None:
        """Say which columns are left out."""
        places = np.flatnonzero(~self.kept)
        if len(places):
            called = ", ".join(str(place if names is None else names[place]) for place in places[:5])
            more = ", ..." if len(places) > 5 else ""
            warnings.warn(
                f"{len(places)} of {len(self.kept)} columns are constant and are left out: {called}{more}.",
                ConstantColumnWarning,
                stacklevel=4,
            )

    def varying(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, self.kept]

    def dequantised(self, rows: np.ndarray, seed: int) -> np.ndarray:
        """The columns that vary, integers spread evenly over their cells: a density of them is then a probability."""
        varying = self.varying(rows).copy()
        varying[:, self.integer] += np.random.default_rng(seed).uniform(-0.5, 0.5, (len(rows), int(self.integer.sum())))
        return varying

    def shifts(self) -> np.ndarray:
        """Places within the cells of the integer columns, evenly spread; of a table without such, one, its middle."""
        count = int(self.integer.sum())
        if not count:
            return np.zeros((1, len(self.kept)))
        places = np.zeros((CELL_POINTS, len(self.kept)))
        columns = np.flatnonzero(self.kept)[self.integer]
        places[:, columns] = Sobol(count, seed=0).random(CELL_POINTS) - 0.5
        return places


def weighted(rows: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Rows in an order of their own, each as often as its weight says: a weight of two is the row twice.

    Whole numbers are taken as they are; other weights are rounded to shares of at most twenty times as many rows.

    >>> weighted(np.array([[2.0], [1.0], [3.0]]), np.array([2.0, 1.0, 0.0])).ravel().tolist()
    [1.0, 2.0, 2.0]
    """
    counts = np.ones(len(rows), dtype=int) if weights is None else _counts(weights)
    found = np.repeat(rows, counts, axis=0)
    return found[np.lexsort(found.T[::-1])]


def _counts(weights: np.ndarray) -> np.ndarray:
    """How often each row stands for its weight."""
    if (weights == np.round(weights)).all() and weights.sum() <= MOST_REPEATED * len(weights):
        return weights.astype(int)
    positive = weights[weights > 0]
    most = MOST_REPEATED * len(weights)
    unit = max(positive.min(), positive.sum() / most)
    return np.round(weights / unit).astype(int)
