"""Categories that came as one column of zeros and ones each, told apart as one column again."""

from typing import NamedTuple

import numpy as np

__all__ = ["Categories"]

UNKNOWN = -1.0


class Categories(NamedTuple):
    """Groups of neighbouring columns of which exactly one is 1 in every row, as a `OneHotEncoder` writes them.

    A density of such columns would have to be zero almost everywhere; of the number of the category it is simple, and
    as high: the probability. A row that is in none of the categories, or in two, is of a category by itself, -1.

    Attributes:
        groups: first and last column of each.
        width: columns in all.

    >>> rows = np.array([[7.0, 1.0, 0.0, 0.0], [8.0, 0.0, 0.0, 1.0], [9.0, 0.0, 1.0, 0.0]])
    >>> found = Categories.of(rows)
    >>> found.groups, found.encoded(rows).tolist()
    (((1, 3),), [[7.0, 0.0], [8.0, 2.0], [9.0, 1.0]])
    >>> found.decoded(np.array([[7.0, 2.0]])).tolist()
    [[7.0, 0.0, 0.0, 1.0]]
    """

    groups: tuple[tuple[int, int], ...]
    width: int

    @classmethod
    def of(cls, rows: np.ndarray) -> "Categories":
        flags = ((rows == 0) | (rows == 1)).all(0) & (rows == 1).any(0)
        groups, first = [], 0
        while first < rows.shape[1]:
            last = _end(rows, flags, first)
            if last is not None:
                groups.append((first, last))
            first = first + 1 if last is None else last + 1
        return cls(tuple(groups), rows.shape[1])

    @property
    def kept(self) -> np.ndarray:
        """Of all columns, those that stand for themselves or, the first of a group, for its number."""
        kept = np.ones(self.width, dtype=bool)
        for first, last in self.groups:
            kept[first + 1 : last + 1] = False
        return kept

    def encoded(self, rows: np.ndarray) -> np.ndarray:
        """Each group as the number of its category."""
        if not self.groups:
            return rows
        found = rows.copy()
        for first, last in self.groups:
            own = rows[:, first : last + 1]
            one = ((own == 1).sum(1) == 1) & ((own == 0) | (own == 1)).all(1)
            found[:, first] = np.where(one, own.argmax(1), UNKNOWN)
        return found[:, self.kept]

    def decoded(self, encoded: np.ndarray) -> np.ndarray:
        """The columns as they were; a number beyond the categories is the nearest."""
        rows = np.zeros((len(encoded), self.width))
        rows[:, self.kept] = encoded
        for first, last in self.groups:
            number = rows[:, first].round().clip(0, last - first).astype(int)
            rows[:, first : last + 1] = np.eye(last - first + 1)[number]
        return rows


def _end(rows: np.ndarray, flags: np.ndarray, first: int) -> int | None:
    """The last column of the group that begins here, if one does."""
    taken = np.zeros(len(rows), dtype=bool)
    for place in range(first, rows.shape[1]):
        own = rows[:, place] == 1
        if not flags[place] or (taken & own).any():
            return None
        taken |= own
        if taken.all():
            return place if place > first else None
    return None
