"""The kinds of a table's columns, decided in one place: constant, discrete, rounded, or continuous."""

import math
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Column", "column_of", "columns_of"]

SAME = 1e-9  # of a column's range: values closer than this differ by rounding
OFF_LATTICE = 0.01  # of a step
MOST_STEPS = 10**6
LARGEST_INTEGER = 2.0**40
LEAST_REPEATED, REPEATED_SHARE = 10, 0.02  # rows, and share of rows, with one value: more are no chance
SPIKE_WIDTH = 1e-3  # of the range of a column that repeats values which lie on no lattice
SNAPPED = 1.5  # of these widths: a draw so near a spike is one of its value
COARSE = 0.1  # of the quartiles' distance: a step of more is one within which a density changes
MOST_SINGLES, SINGLE_SHARE = 3, 0.01  # values that occur once, in a discrete column: at most three, or 1% of the rows


@dataclass(frozen=True)
class Column:
    """The kind of a numeric column, and the numbers that go with it.

    Attributes:
        kind: "constant"; "discrete", where the values lie on a lattice or are few, and nearly all occur again and
            again; "rounded", where they lie on a lattice but many occur only once; or "continuous".
        step: the distance of neighbouring values on the lattice; 0 without one. A continuous column that repeats some
            values, as where many are zero, has the width of such a spike.
        low, high: the range of the values.
        values, counts: of a discrete or constant column, the values that occur, and how often.
        spikes: of a continuous column, the values that are repeated too often to be chance.
        lattice: whether all values lie a whole number of steps from each other.
        coarse: whether a cell is so wide that a density changes within it.

    >>> column_of(np.array([3.0, 1.0, 2.0, 2.0])).kind, column_of(np.array([0.25, 0.1, 0.37])).kind
    ('discrete', 'continuous')
    """

    kind: str
    step: float
    low: float
    high: float
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    counts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    spikes: np.ndarray = field(default_factory=lambda: np.empty(0))
    lattice: bool = False
    coarse: bool = False

    @property
    def spread(self) -> float:
        """The width of the cell over which one value is spread, in the units of the column."""
        return 0.0 if self.kind == "constant" else self.step

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Return the nearest values that the column can have."""
        if self.kind in ("constant", "discrete"):
            middles = (self.values[1:] + self.values[:-1]) / 2
            return np.asarray(self.values[np.searchsorted(middles, x)])
        if self.kind == "rounded":
            return self.low + self.step * np.clip(np.round((x - self.low) / self.step), 0, self.cells - 1)
        if not len(self.spikes):
            return x
        near = self.spikes[np.searchsorted((self.spikes[1:] + self.spikes[:-1]) / 2, x)]
        return np.where(np.abs(x - near) <= SNAPPED * self.step, near, x)

    @property
    def cells(self) -> int:
        """The number of points of the lattice from the least value to the greatest."""
        return round((self.high - self.low) / self.step) + 1 if self.step > 0 else 0

    def edges(self, most: int) -> np.ndarray | None:
        """Return the borders of the cells of a column with a value in each, if these are no more than `most`.

        A lattice has cells of one step each, also where no value occurs; other values have theirs up to the middle
        between neighbours. A column without repeated values has none.

        >>> column_of(np.array([1.0, 2.0, 2.0, 4.0])).edges(8)
        array([0.5, 1.5, 2.5, 3.5, 4.5])
        """
        if self.lattice and self.cells < most:
            return np.asarray(self.low + self.step * (np.arange(self.cells + 1) - 0.5))
        if self.kind in ("discrete", "constant") and len(self.values) <= most:
            return midpoints(self.values)
        return None


def midpoints(values: np.ndarray) -> np.ndarray:
    """Return the middles between neighbouring values, and one more on each side, as far out again.

    >>> midpoints(np.array([1.0, 2.0, 4.0]))
    array([0.5, 1.5, 3. , 5. ])
    """
    middle = (values[1:] + values[:-1]) / 2 if len(values) > 1 else values
    return np.concatenate([[2 * values[0] - middle[0]], middle, [2 * values[-1] - middle[-1]]])


def columns_of(rows: np.ndarray, distinct: np.ndarray | None = None) -> tuple[Column, ...]:
    """Return the kind of each column of rows (n, columns).

    Args:
        rows: finite numbers.
        distinct: the places of rows that are no copies of another row: a copied row repeats no value. All when None.

    >>> [column.kind for column in columns_of(np.array([[1.0, 5.0, 0.2], [2.0, 5.0, 0.4], [2.0, 5.0, 0.35]]))]
    ['discrete', 'constant', 'continuous']
    """
    alone = rows.shape[1] == 1 or distinct is None
    return tuple(
        column_of(np.asarray(rows[:, place], np.float64), None if alone else distinct) for place in range(rows.shape[1])
    )


def column_of(column: np.ndarray, distinct: np.ndarray | None = None) -> Column:
    """Return the kind of one column; `distinct` is as for `columns_of`."""
    values, counts = np.unique(column, return_counts=True)
    low, high = float(values[0]), float(values[-1])
    if len(values) == 1:
        return Column("constant", 0.0, low, high, values, counts)
    own = column if distinct is None else column[distinct]
    step, lattice = _step(*np.unique(own, return_counts=True), len(own))
    singles = int((counts == 1).sum())
    again_and_again = singles <= max(MOST_SINGLES, SINGLE_SHARE * len(column)) or len(values) == 2
    if step > 0 and again_and_again:
        return Column("discrete", step, low, high, values, counts, lattice=lattice, coarse=True)
    if lattice:
        quarter, three = np.quantile(column, [0.25, 0.75])
        return Column("rounded", step, low, high, lattice=True, coarse=bool(step > COARSE * (three - quarter)))
    often = _often(own) if step > 0 else np.empty(0)
    return Column("continuous", step if len(often) else 0.0, low, high, spikes=often, coarse=len(often) > 0)


def _often(column: np.ndarray) -> np.ndarray:
    """Return the values that are repeated too often to be chance."""
    values, counts = np.unique(column, return_counts=True)
    if 2 * len(values) <= len(column):
        return values[counts > 1]
    return values[counts > max(LEAST_REPEATED, REPEATED_SHARE * len(column))]


def _step(values: np.ndarray, counts: np.ndarray, n: int) -> tuple[float, bool]:
    """Return the distance of neighbouring values, and whether all lie a whole number of steps from each other.

    It is the step of integers (mostly 1), that of other values that are evenly spaced and repeated, and 0 for others.
    Values that are repeated and lie on no lattice, as where many are zero and the rest continuous, have a thousandth
    of their range, or their least distance where that is more.

    >>> [_step(*np.unique(given, return_counts=True), len(given))
    ...  for given in ([3.0, 1.0, 2.0], [0.25, 0.25, 0.5, 0.5, 1.5, 1.5], [0.1, 0.2], [1000.0, 3000.0, 1500.0])]
    [(1.0, True), (0.25, True), (0.0, False), (500.0, True)]
    """
    if len(values) < 2:
        return 0.0, False
    if (values == np.round(values)).all() and np.abs(values[[0, -1]]).max() < LARGEST_INTEGER:
        return float(np.gcd.reduce(np.diff(values).astype(np.int64))), True
    gaps, reach = np.diff(values), values[-1] / 2 - values[0] / 2
    gaps = gaps[gaps > SAME * reach]
    repeated = 2 * len(values) <= n or counts.max() > max(LEAST_REPEATED, REPEATED_SHARE * n)
    if not repeated or not len(gaps) or not math.isfinite(reach):
        return 0.0, False
    steps = np.round((values[-1] - values[0]) / gaps.min())
    places = (values - values[0]) / (values[-1] - values[0]) * steps
    if steps <= MOST_STEPS and np.abs(places - np.round(places)).max() < OFF_LATTICE:
        return float((values[-1] - values[0]) / steps), True
    return float(max(gaps.min(), SPIKE_WIDTH * 2 * reach)), False
