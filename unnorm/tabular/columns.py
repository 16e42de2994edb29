"""The columns of a table and its weighted rows, as training wants them."""

import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch.quasirandom import SobolEngine

from unnorm.errors import ConstantColumnWarning
from unnorm.randomness import derive_seed, numpy_stream

__all__ = ["Columns", "copies", "weighted"]

MOST_REPEATED = 20  # times as many rows as there are, at most, to stand for weights
FINER = 4  # times as many, where weights are no multiples of one of them
WHOLE = 1e-9
CELL_POINTS = 256, 512, 1024  # in one discrete column, in up to four, in more; powers of two, as Sobol asks for
FEW = 4
LARGEST_INTEGER = 2.0**40
SAME = 1e-9  # of a column's range: values closer than this differ by rounding
OFF_LATTICE = 0.01  # of a step
MOST_STEPS = 10**6
LEAST_ATOM, ATOM_SHARE = 10, 0.02  # rows, and share of rows, with one value: more are no chance
ATOM_WIDTH = 1e-3  # of the range of a column that repeats values which lie on no lattice


class Columns(NamedTuple):
    """Which columns vary, and the cells over which the values of these are spread.

    Attributes:
        kept: of all columns, those that vary.
        cells: of each of these, the step of its values; 0 for a continuous one.
        lattice: whether all values lie a whole number of steps from each other.
        origin: one of its values.

    >>> found = Columns.of(np.array([[1.0, 5.0, 0.2], [2.0, 5.0, 0.4], [4.0, 5.0, 0.35]]))
    >>> found.kept.tolist(), found.cells.tolist()
    ([True, False, True], [1.0, 0.0])
    """

    kept: np.ndarray
    cells: np.ndarray
    lattice: np.ndarray
    origin: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> "Columns":
        kept = (rows != rows[0]).any(0)
        varying = rows[:, kept]
        distinct = np.unique(varying, axis=0) if varying.shape[1] > 1 else varying  # a copied row repeats no value
        found = [_cell(column) for column in distinct.T]
        cells, lattice = np.array([width for width, _ in found]), np.array([even for _, even in found], dtype=bool)
        return cls(kept, cells, lattice, varying[0])

    def warn(self, names: np.ndarray) -> None:
        """Say which columns are left out."""
        places = np.flatnonzero(~self.kept)
        if len(places):
            called = ", ".join(str(names[place]) for place in places[:5])
            more = ", ..." if len(places) > 5 else ""
            warnings.warn(
                f"{len(places)} of {len(self.kept)} columns are constant and are left out: {called}{more}.",
                ConstantColumnWarning,
                stacklevel=4,
            )

    @property
    def discrete(self) -> np.ndarray:
        return np.asarray(self.cells > 0)

    def varying(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, self.kept]

    def dequantised(self, rows: np.ndarray, seed: int) -> np.ndarray:
        """The columns that vary, values spread evenly over their cells: a density of integers is a probability."""
        places = numpy_stream(seed, "places in cells").uniform(-0.5, 0.5, (len(rows), int(self.discrete.sum())))
        varying = self.varying(rows).copy()
        varying[:, self.discrete] += places * self.cells[self.discrete]
        return varying

    def quantised(self, varying: np.ndarray) -> np.ndarray:
        """Values of a column on a lattice in the middle of their cells."""
        step = np.where(self.lattice, self.cells, 1.0)
        return np.where(self.lattice, self.origin + step * np.round((varying - self.origin) / step), varying)

    def shifts(self) -> np.ndarray:
        """Places within the cells, of the columns that vary: the same at each call.

        In one discrete column they are the middles of equal parts. In several they are scrambled Sobol points:
        the first of the unscrambled ones lie on the diagonal, where dependent columns have the peaks of their density.
        """
        count = int(self.discrete.sum())
        places = np.zeros((_points(count), len(self.cells)))
        if count == 1:
            even = (np.arange(len(places))[:, None] + 0.5) / len(places)
        else:
            even = (
                SobolEngine(count, scramble=True, seed=derive_seed(0, "points in cells"))
                .draw(len(places), dtype=torch.float64)
                .numpy()
            )
        places[:, self.discrete] = (even - 0.5) * self.cells[self.discrete]
        return places


def _points(count: int) -> int:
    """How many in the cell of so many discrete columns."""
    one, few, many = CELL_POINTS
    return one if count == 1 else few if count <= FEW else many


def _cell(column: np.ndarray) -> tuple[float, bool]:
    """The width of the cells of a column's values, and whether they lie on a lattice of such steps.

    It is the step of integers (mostly 1), that of other values that are evenly spaced and repeated, and 0 for others.
    Values that are repeated and lie on no lattice, as where many are zero and the rest continuous, have a thousandth
    of their range, or their least distance where that is more.

    >>> [_cell(np.array(values)) for values in ([3.0, 1.0, 2.0], [0.25, 0.25, 0.5, 0.5, 1.5, 1.5], [0.1, 0.2])]
    [(1.0, True), (0.25, True), (0.0, False)]
    >>> _cell(np.array([1000.0, 3000.0, 1500.0]))
    (500.0, True)
    """
    values, counts = np.unique(column, return_counts=True)
    if (values == np.round(values)).all() and np.abs(values[[0, -1]]).max() < LARGEST_INTEGER:
        return float(np.gcd.reduce(np.diff(values).astype(np.int64))), True
    gaps, reach = np.diff(values), values[-1] / 2 - values[0] / 2
    gaps = gaps[gaps > SAME * reach]
    repeated = 2 * len(values) <= len(column) or counts.max() > max(LEAST_ATOM, ATOM_SHARE * len(column))
    if not repeated or not len(gaps) or not np.isfinite(reach):
        return 0.0, False
    steps = np.round((values[-1] - values[0]) / gaps.min())
    places = (values - values[0]) / (values[-1] - values[0]) * steps
    if steps <= MOST_STEPS and np.abs(places - np.round(places)).max() < OFF_LATTICE:
        return float((values[-1] - values[0]) / steps), True
    return float(max(gaps.min(), ATOM_WIDTH * 2 * reach)), False


def weighted(rows: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Rows in an order of their own, each as often as its weight says: a weight of two is the row twice.

    Whole numbers are taken as they are, and so are multiples of the least weight. Others are rounded so that their sum
    over the first rows, in that order, is right to half a row of four times as many.

    >>> weighted(np.array([[2.0], [1.0], [3.0]]), np.array([2.0, 1.0, 0.0])).ravel().tolist()
    [1.0, 2.0, 2.0]
    """
    order = np.lexsort(rows.T[::-1])
    return rows[order] if weights is None else np.repeat(rows[order], _counts(weights[order]), axis=0)


def _counts(weights: np.ndarray) -> np.ndarray:
    """How often each row stands for its weight.

    >>> _counts(np.array([0.5, 1.5, 0.0])).tolist(), _counts(np.array([0.7, 1.0, 1.3])).tolist()
    ([1, 3, 0], [3, 4, 5])
    """
    positive = weights > 0
    for multiples in (weights, weights / weights[positive].min()):
        whole = np.round(multiples)
        near = np.abs(multiples - whole).max() < WHOLE and multiples[positive].min() > 0.5
        if near and whole.sum() <= MOST_REPEATED * len(weights):
            return whole.astype(int)
    ends = np.round(weights.cumsum() * (FINER * len(weights) / weights.sum()))
    return np.diff(ends, prepend=0.0).astype(int)


def copies(rows: np.ndarray) -> np.ndarray:
    """Numbers that identical rows share; such rows stand beside each other, as `weighted` leaves them.

    >>> copies(np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0]])).tolist()
    [0, 0, 1]
    """
    return np.concatenate([[0], (rows[1:] != rows[:-1]).any(1).cumsum()])
