"""Cells of a table over seeds, and a column of them: the best, who ties with it, ranks, ours beside the paper's."""

import math
import warnings
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy import stats

from unnorm.paper.toy2d.spec import METHODS, Table

__all__ = ["SEEDS_FOR_A_TEST", "Cell", "Column", "agreement", "column", "p_value", "paper_rank", "ranks"]

TIE = 0.05
SEEDS_FOR_A_TEST = 3

K = TypeVar("K", bound=Hashable)


class Cell(NamedTuple):
    """One metric of one method on one data set, over the seeds of the chosen setting.

    Attributes:
        values: by seed, of the runs that have one.
        failed: how many runs diverged or have no finite value.
    """

    values: Mapping[int, float]
    failed: int = 0

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.values.values()))) if self.values else math.inf

    @property
    def sd(self) -> float:
        return float(np.std(list(self.values.values()), ddof=1)) if len(self.values) > 1 else math.nan

    @property
    def n(self) -> int:
        return len(self.values) + self.failed

    @property
    def loss(self) -> float:
        """What it is ranked by: a method with a failed run is behind all others.

        >>> Cell({0: 1.0, 1: 3.0}).loss, Cell({0: 1.0}, failed=1).loss
        (2.0, inf)
        """
        return math.inf if self.failed else self.mean


class Column(NamedTuple):
    """The least mean of a column, and who cannot be told from it; `tested` is False with too few common seeds."""

    best: Any
    ties: frozenset[Any]
    tested: bool
    ranks: Mapping[Any, float]


def column(cells: Mapping[K, Cell | None]) -> Column:
    """The best of a column, the others that a paired t-test over seeds cannot tell from it (p > 0.05), and the ranks.

    >>> near = {"a": Cell({0: 1.0, 1: 2.0, 2: 3.0}), "b": Cell({0: 1.1, 1: 1.9, 2: 3.2}), "c": Cell({0: 9.0}, 2)}
    >>> found = column(near)
    >>> found.best, sorted(found.ties), found.ranks
    ('a', ['b'], {'a': 1.0, 'b': 2.0, 'c': 3.0})
    """
    whole = {key: cell for key, cell in cells.items() if cell is not None and not cell.failed}
    if not whole:
        return Column(None, frozenset(), False, ranks(cells))
    best = min(whole, key=lambda key: whole[key].mean)
    tests = {key: p_value(cell, whole[best]) for key, cell in whole.items() if key != best}
    ties = frozenset(key for key, p in tests.items() if p is not None and p > TIE)
    return Column(best, ties, all(p is not None for p in tests.values()), ranks(cells))


def p_value(cell: Cell, other: Cell) -> float | None:
    """Of the two-sided paired t-test over the seeds both have; None with fewer than three.

    >>> p_value(Cell({0: 1.0, 1: 2.0}), Cell({0: 1.0, 1: 2.0})) is None
    True
    """
    seeds = sorted(cell.values.keys() & other.values.keys())
    if len(seeds) < SEEDS_FOR_A_TEST:
        return None
    a, b = ([one.values[seed] for seed in seeds] for one in (cell, other))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of scipy, where all differences are equal
        p = float(stats.ttest_rel(a, b).pvalue)
    return float(np.mean(a) == np.mean(b)) if math.isnan(p) else p


def ranks(cells: Mapping[K, Cell | None]) -> dict[K, float]:
    """1 is the least mean; equal ones, and all that diverged, share the mean of their ranks. No cell, no rank."""
    known = {key: cell.loss for key, cell in cells.items() if cell is not None}
    return dict(zip(known, (float(rank) for rank in stats.rankdata(list(known.values()))), strict=True))


def paper_rank(table: Table, method: str, sets: Iterable[str], among: Iterable[str] = METHODS) -> float:
    """The mean rank over data sets of a method's numbers in a table of the paper.

    >>> from unnorm.paper.toy2d.spec import TABLES
    >>> paper_rank(TABLES["mmd-sgd"], "meco", ["moons", "circles"])
    1.0
    """
    names = [name for name in table.paper if name in set(among)]
    found = [ranks({name: Cell({0: table.paper[name][data][0]}) for name in names})[method] for data in sets]
    return float(np.mean(found))


def agreement(cells: Mapping[K, Cell | None], paper: Mapping[K, float]) -> float:
    """Spearman's rank correlation of our order with the paper's; NaN with fewer than three methods, or one rank.

    >>> ours = {name: Cell({0: value}) for name, value in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    >>> round(agreement(ours, {"a": 5.0, "b": 7.0, "c": 6.0}), 3)
    0.5
    """
    ours = ranks({key: cell for key, cell in cells.items() if key in paper})
    theirs = stats.rankdata([paper[key] for key in ours])
    values = list(ours.values())
    if len(values) < 3 or np.ptp(values) == 0 or np.ptp(theirs) == 0:
        return math.nan
    return float(np.corrcoef(values, theirs)[0, 1])
