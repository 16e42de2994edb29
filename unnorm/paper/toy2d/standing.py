"""Where MECO stands among the paper's methods by one metric: alone best, tied for best, beaten, or diverged."""

from collections.abc import Sequence
from typing import NamedTuple

from unnorm.paper.toy2d.results import Results, Row, counted
from unnorm.paper.toy2d.spec import METHODS

__all__ = ["Standing", "outcome", "standing", "verbs"]

KINDS = ("alone", "tied", "losses", "failed")


class Standing(NamedTuple):
    """The data sets by outcome; each is in one list alone.

    Attributes:
        alone: its mean is the least, and no other method ties; without a test, its mean is the least.
        tied: its mean is the least and another ties, or another's is the least and the test cannot tell the two apart.
        losses: data set and who is best there.
        failed: a seed of its own diverged.
        tested: False where a column has too few seeds for a test.
        ranks: of its mean, on each data set.
    """

    alone: list[str]
    tied: list[str]
    losses: list[tuple[str, Row]]
    failed: list[str]
    tested: bool
    ranks: list[float]

    @property
    def measured(self) -> int:
        return sum(len(getattr(self, kind)) for kind in KINDS)

    @property
    def beaten_by(self) -> list[str]:
        return list(dict.fromkeys(METHODS[row[0]].title for _, row in self.losses))


def standing(results: Results, metric: str, style: str) -> Standing:
    """Of MECO in one style, over the data sets where it was measured."""
    rows, meco = results.rows(style, origins=["paper"]), ("meco", style)
    tested = all(results.column(metric, rows, data).tested for data in results.data)
    found = Standing([], [], [], [], tested, results.ranks(metric, rows, meco))
    for data in results.data:
        cell, where = results.cell(metric, meco, data), results.column(metric, rows, data)
        if cell is None:
            continue
        if cell.failed:
            found.failed.append(data)
        elif meco in where.ties or (where.best == meco and where.ties):
            found.tied.append(data)
        elif where.best == meco:
            found.alone.append(data)
        else:
            found.losses.append((data, where.best))
    return found


def verbs(tested: bool) -> tuple[str, str, str, str]:
    """For alone, tied, losses and failed: without a test nobody wins or loses.

    >>> verbs(False)[2]
    'has a larger mean than the best (untested)'
    """
    if tested:
        return "is alone best", "is tied for best", "loses", "diverges"
    return "has the least mean (untested)", "is tied for best", "has a larger mean than the best (untested)", "diverges"


def outcome(found: Sequence[Standing], at: str, what: str, *, named: bool = True) -> str:
    """In words: how often of all comparisons; `named` says to whom MECO loses."""
    counts = {name: sum(len(getattr(one, name)) for one in found) for name in KINDS}
    tested = any(one.tested for one in found)
    parts = {name: f"{verb} {at} {count}" for verb, (name, count) in zip(verbs(tested), counts.items(), strict=True)}
    parts["alone"] += f" of {counted(sum(counts.values()), what)}"
    if named and tested and counts["losses"]:
        best = dict.fromkeys(name for one in found for name in one.beaten_by)
        parts["losses"] += f" (best there: {', '.join(best)})"
    if not tested:
        del parts["tied"]
    if not counts["failed"]:
        del parts["failed"]
    *first, last = parts.values()
    return f"{', '.join(first)} and {last}"
