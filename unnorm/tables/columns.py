"""The columns of a table: data frames and arrays to numbers for a model, and back.

A model sees one float64 column for each column of the table that varies. A word, and a value of a discrete column, is
the number of its level, 0, 1, 2, ...; neighbouring columns of zeros and ones of which exactly one is 1 in every row are
one column of levels. Each number that stands for a cell is spread evenly over it: a density of cells is a probability.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.quasirandom import SobolEngine

from unnorm.data.columns import Column, column_of
from unnorm.errors import ConstantColumnWarning
from unnorm.randomness import derive_seed
from unnorm.tables.hashing import uniform

__all__ = ["Columns", "TableColumn", "groups_of_flags"]

CELL_POINTS = 256, 512, 1024  # in one discrete column, in up to four, in more; powers of two, as Sobol asks for
FEW = 4
MOST_WORDS = 0.8  # of the rows: a column with more different words names its rows
SAME = 1e-9  # relative: two numbers that only rounding tells apart


@dataclass(frozen=True)
class TableColumn:
    """One column that a model sees.

    Attributes:
        names: of the column; of a group of flags, of all of them.
        numbers: what its values are like. The values of a category are the numbers of its levels.
        words: the levels of a category, as they stand in the table, one for each of the numbers' values; of a group of
            flags, the names of its columns.
        whole: whether the table keeps it as integers.
    """

    names: tuple[str, ...]
    numbers: Column
    words: tuple[Any, ...] = ()
    whole: bool = False

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    @property
    def kind(self) -> str:
        """The kind of the column: "category", "flags", or as of `unnorm.data.columns.Column`."""
        if len(self.names) > 1:
            return "flags"
        return "category" if self.words else self.numbers.kind

    @property
    def discrete(self) -> bool:
        return self.numbers.kind == "discrete"

    @property
    def levels(self) -> int:
        """How many values occur, of a discrete column."""
        return len(self.numbers.values)

    @property
    def spread(self) -> float:
        """The width of the cell of one value, as the model sees it."""
        return 1.0 if self.discrete else self.numbers.spread

    @property
    def range(self) -> tuple[float, float]:
        """The ends of the observed values' cells, as the model sees them."""
        if self.discrete:
            return -0.5, self.levels - 0.5
        return self.numbers.low - self.spread / 2, self.numbers.high + self.spread / 2

    @property
    def log_step(self) -> float:
        """The logarithm of the width of a cell, in the units of the table: a probability over it is a density."""
        return 0.0 if self.words or not self.discrete else math.log(self.numbers.step)

    @property
    def unseen(self) -> float:
        """The probability that a new row has a value that does not occur: Good and Turing's, at least one row in n + 2.

        It is the share of values that occur once among the n rows (Good 1953).
        """
        counts = self.numbers.counts
        return float(((counts == 1).sum() + 1) / (counts.sum() + 2))

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Return values of the table as the model sees them, before they are spread; -1 for a value that is unseen."""
        if not self.discrete:
            return values
        known = self.numbers.values
        place = np.clip(np.searchsorted((known[1:] + known[:-1]) / 2, values), 0, len(known) - 1)
        near = np.abs(known[place] - values) <= SAME * np.maximum(1.0, np.abs(known[place]))
        return np.where(np.isnan(values), np.nan, np.where(near, place, -1))

    def values(self, seen: np.ndarray) -> np.ndarray:
        """Return what the model drew as values of the table."""
        if not self.discrete:
            return self.numbers.rounded(seen)
        return np.asarray(self.numbers.values[np.clip(np.round(seen), 0, self.levels - 1).astype(int)])

    def log_unseen(self, values: np.ndarray) -> np.ndarray:
        """Return the log probability of values that do not occur, given that one of these came.

        All words that do not occur share one event. Of numbers half of the probability is spread evenly over the gaps
        of the lattice between the values, and the rest, or all where there is no gap, falls off on both sides with the
        distance d, in steps, as s / ((d + s - 1) (d + s)), s the number of cells between the ends.
        """
        if self.words:
            return np.zeros(len(values))
        own = self.numbers
        steps, cells = (values - own.low) / own.step, max(own.cells, 1)
        gaps = cells - self.levels if own.lattice else 0
        beyond = np.where(steps < 0, -steps, steps - (cells - 1))
        outside = beyond > 0.5
        share = 0.5 if gaps > 0 else 1.0
        distance = np.maximum(np.ceil(beyond - 0.5), 1.0)
        tail = np.log(share / 2) + np.log(cells) - np.log(distance + cells - 1) - np.log(distance + cells)
        inside = math.log(0.5 / gaps) if gaps > 0 else -np.inf
        on_lattice = np.abs(steps - np.round(steps)) < 0.01 if own.lattice else np.zeros(len(values), dtype=bool)
        return np.where(on_lattice | (not own.lattice and outside), np.where(outside, tail, inside), -np.inf)

    def plain(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        numbers = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in asdict(self.numbers).items()
        }
        return {"names": list(self.names), "numbers": numbers, "words": list(self.words), "whole": self.whole}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "TableColumn":
        """Return the column that `plain` describes."""
        arrays = {key: np.asarray(plain["numbers"][key]) for key in ("values", "counts", "spikes")}
        numbers = Column(**{**plain["numbers"], **arrays})
        return cls(tuple(plain["names"]), numbers, tuple(plain["words"]), bool(plain["whole"]))


@dataclass(frozen=True)
class Columns:
    """All columns of a table, those that a model sees among them.

    Attributes:
        names: of all columns that were read, in order.
        modelled: the columns that a model sees.
        constants: the value of each constant column.
        left_out: what was left out besides, and why.

    >>> rows = np.array([[1.0, 5.0, 0.25], [2.0, 5.0, 0.4], [2.0, 5.0, 0.35]])
    >>> found = Columns.of(rows, ("a", "b", "c"))
    >>> [column.kind for column in found.modelled], found.constants
    (['discrete', 'continuous'], {'b': 5.0})
    >>> found.codes(rows).tolist()
    [[0.0, 0.25], [1.0, 0.4], [1.0, 0.35]]
    """

    names: tuple[str, ...]
    modelled: tuple[TableColumn, ...]
    constants: Mapping[str, Any]
    left_out: Mapping[str, str]

    @classmethod
    def of(
        cls,
        rows: np.ndarray,
        names: Sequence[str],
        words: Mapping[str, Sequence[Any]] | None = None,
        whole: Sequence[str] = (),
        distinct: np.ndarray | None = None,
        flags: bool = True,
    ) -> "Columns":
        """Decide the kind of every column.

        Args:
            rows: finite numbers (n, columns); of a column of words the numbers of its levels.
            names: of the columns.
            words: the levels of each column of words, those included that do not occur in these rows.
            whole: columns that the table keeps as integers.
            distinct: as of `columns_of`.
            flags: whether neighbouring columns of zeros and ones may be one category.
        """
        words, modelled = words or {}, list[TableColumn]()
        constants, left_out = dict[str, Any](), dict[str, str]()
        groups = groups_of_flags(rows, [name not in words for name in names]) if flags else []
        place = 0
        while place < rows.shape[1]:
            if groups and groups[0][0] == place:
                first, last = groups.pop(0)
                own = rows[:, first : last + 1].argmax(1).astype(float)
                levels = tuple(names[first : last + 1])
                modelled.append(TableColumn(levels, _category(own), levels))
                place = last + 1
                continue
            name, values = names[place], np.asarray(rows[:, place], dtype=np.float64)
            place += 1
            if name in words:
                numbers = _category(values)
                levels = tuple(words[name][int(level)] for level in numbers.values)
                if len(levels) == 1:
                    constants[name] = levels[0]
                elif len(levels) > MOST_WORDS * len(values) and len(levels) > 2:
                    left_out[name] = f"it has {len(levels):,} different words in {len(values):,} rows"
                else:
                    modelled.append(TableColumn((name,), numbers, levels))
                continue
            found = column_of(values, distinct if rows.shape[1] > 1 else None)
            if found.kind == "constant":
                constants[name] = found.low
            else:
                modelled.append(TableColumn((name,), found, whole=name in whole))
        return cls(tuple(names), tuple(modelled), constants, left_out)

    def messages(self) -> list[str]:
        """Return which columns are left out, in words."""
        found = []
        if self.constants:
            called = ", ".join(list(self.constants)[:5]) + (", ..." if len(self.constants) > 5 else "")
            count = len(self.constants)
            verb = "is" if count == 1 else "are"
            found.append(f"{count} of {len(self.names)} columns {verb} constant and left out: {called}.")
        for name, why in self.left_out.items():
            found.append(f"Column '{name}' is left out: {why}, so that it only names the rows.")
        return found

    def warn(self) -> None:
        """Warn of the columns that are left out."""
        for message in self.messages():
            warnings.warn(message, ConstantColumnWarning, stacklevel=4)

    @property
    def discrete(self) -> np.ndarray:
        """Which of the modelled columns are discrete."""
        return np.array([column.discrete for column in self.modelled], dtype=bool)

    @property
    def spreads(self) -> np.ndarray:
        """The width of the cell of each modelled column."""
        return np.array([column.spread for column in self.modelled])

    @property
    def averaged(self) -> np.ndarray:
        """Which of the modelled columns have cells within which the density changes."""
        return np.array([column.numbers.coarse for column in self.modelled], dtype=bool)

    def places(self, column: TableColumn) -> list[int]:
        """Return where the column stands in the table."""
        return [self.names.index(name) for name in column.names]

    def codes(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of numbers, of all columns, as the model sees them, before they are spread over cells."""
        found = np.empty((len(rows), len(self.modelled)))
        for place, column in enumerate(self.modelled):
            at = self.places(column)
            if len(at) == 1:
                found[:, place] = column.codes(np.asarray(rows[:, at[0]], dtype=np.float64))
                continue
            own = np.asarray(rows[:, at[0] : at[-1] + 1], dtype=np.float64)
            one = ((own == 1).sum(1) == 1) & ((own == 0) | (own == 1)).all(1)
            found[:, place] = np.where(np.isnan(own).any(1), np.nan, np.where(one, own.argmax(1), -1.0))
        return found

    def spread(self, codes: np.ndarray, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return codes with each number somewhere in its cell.

        The place in the cell depends on the row's position in the order of the fit, on the column and on the seed.
        """
        found, widths = codes.copy(), self.spreads
        for place in np.flatnonzero(widths > 0):
            found[:, place] += widths[place] * (uniform(positions, int(place), seed) - 0.5)
        return found

    def values(self, seen: np.ndarray) -> np.ndarray:
        """Return what a model drew as numbers of the table's columns: constants and groups of flags too."""
        rows = np.zeros((len(seen), len(self.names)))
        for name, value in self.constants.items():
            rows[:, self.names.index(name)] = value if isinstance(value, (int, float)) else 0.0
        for place, column in enumerate(self.modelled):
            at, own = self.places(column), column.values(seen[:, place])
            if len(at) == 1:
                rows[:, at[0]] = own
            else:
                rows[:, at] = np.eye(column.levels)[own.astype(int)]
        for name in self.left_out:
            rows[:, self.names.index(name)] = np.nan
        return rows

    def shifts(self) -> np.ndarray:
        """Return places within cells of width 1, of the columns that are to be averaged: the same at each call.

        In one column they are the middles of equal parts. In several they are scrambled Sobol points: the first of the
        unscrambled ones lie on the diagonal, where dependent columns have the peaks of their density.
        """
        wide = np.flatnonzero(self.averaged)
        count = len(wide)
        one, few, many = CELL_POINTS
        n = one if count == 1 else few if count <= FEW else many
        places = np.zeros((n, len(self.modelled)))
        if count == 1:
            even = (np.arange(n)[:, None] + 0.5) / n
        else:
            engine = SobolEngine(count, scramble=True, seed=derive_seed(0, "points in cells"))
            even = engine.draw(n, dtype=torch.float64).numpy()
        places[:, wide] = even - 0.5
        return places

    def kinds(self) -> list[tuple[str, str]]:
        """Return every column with its kind, for a person."""
        found = []
        for column in self.modelled:
            levels = f", {column.levels} levels" if column.discrete else ""
            step = f", in steps of {column.numbers.step:.6g}" if column.kind == "rounded" else ""
            spikes = f", {len(column.numbers.spikes)} repeated values" if len(column.numbers.spikes) else ""
            found.append((column.name, f"{column.kind}{levels}{step}{spikes}"))
        found += [(name, "constant, left out") for name in self.constants]
        return found + [(name, f"left out: {why}") for name, why in self.left_out.items()]

    def plain(self) -> dict[str, Any]:
        """Return them as plain JSON values."""
        modelled = [column.plain() for column in self.modelled]
        facts = {"constants": dict(self.constants), "left_out": dict(self.left_out)}
        return {"names": list(self.names), "modelled": modelled, **facts}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Columns":
        """Return the columns that `plain` describes."""
        modelled = tuple(TableColumn.from_plain(own) for own in plain["modelled"])
        return cls(tuple(plain["names"]), modelled, dict(plain["constants"]), dict(plain["left_out"]))


def _category(codes: np.ndarray) -> Column:
    values, counts = np.unique(codes, return_counts=True)
    return Column("discrete", 1.0, float(values[0]), float(values[-1]), values, counts, lattice=True, coarse=True)


def groups_of_flags(rows: np.ndarray, numeric: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the first and last place of each group of neighbouring columns of which exactly one is 1 in every row.

    A `OneHotEncoder` writes such groups. A density of them would have to be zero almost everywhere; a density of the
    number of the category is simple, and as high: the probability.

    >>> groups_of_flags(np.array([[7.0, 1.0, 0.0, 0.0], [8.0, 0.0, 0.0, 1.0], [9.0, 0.0, 1.0, 0.0]]), [True] * 4)
    [(1, 3)]
    """
    flags = [
        is_number and bool(((rows[:, place] == 0) | (rows[:, place] == 1)).all()) and bool((rows[:, place] == 1).any())
        for place, is_number in enumerate(numeric)
    ]
    groups, first = [], 0
    while first < rows.shape[1]:
        last = _end(rows, flags, first)
        if last is not None:
            groups.append((first, last))
        first = first + 1 if last is None else last + 1
    return groups


def _end(rows: np.ndarray, flags: Sequence[bool], first: int) -> int | None:
    """Return the last column of the group that begins here, if one does."""
    taken = np.zeros(len(rows), dtype=bool)
    for place in range(first, rows.shape[1]):
        own = rows[:, place] == 1
        if not flags[place] or (taken & own).any():
            return None
        taken |= own
        if taken.all():
            return place if place > first else None
    return None
