"""Data frames, arrays and files as tables of numbers, and drawn numbers as what was given."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unnorm.data.tables import MISSING, TRUTHS, Table, find, read, select
from unnorm.errors import DataError
from unnorm.tables.columns import Columns

__all__ = [
    "Source",
    "cells_of",
    "exclude",
    "kind_of_frame",
    "matched",
    "numbered",
    "restored",
    "source_of",
    "table_of",
]

CHUNK_NUMBERS = 2**18
MOSTLY_NUMBERS = 0.5  # of a column's words: then a word among numbers is a mistake


class Source(NamedTuple):
    """A table as a fit reads it: numbers, with the number of its level for each word.

    Attributes:
        values: (n, columns); NaN where a cell is missing.
        names: of the columns.
        words: the levels of each column of words, in their order.
        whole: columns that hold integers by their type.
        kept: the places of the rows without a missing cell; None where that is all of them.
        named: whether the names came with the table, or tell which of its columns were chosen.
    """

    values: np.ndarray
    names: tuple[str, ...]
    words: Mapping[str, tuple[Any, ...]]
    whole: tuple[str, ...]
    kept: np.ndarray | None
    named: bool

    @property
    def rows(self) -> int:
        return len(self.values) if self.kept is None else len(self.kept)

    @property
    def dropped(self) -> int:
        """How many rows are left out because a cell is missing."""
        return len(self.values) - self.rows

    def left_out(self) -> str:
        """Return how many rows are left out, in words."""
        count = (
            "1 row with a missing cell is" if self.dropped == 1 else f"{self.dropped:,} rows with a missing cell are"
        )
        return f"{count} left out of {len(self.values):,}."


def table_of(table: Any) -> Table:
    """Return a data frame, an array, or the file of this name as a table.

    >>> table_of(np.array([[1.0, 2.0]])).columns
    ('column0', 'column1')
    """
    if isinstance(table, (str, Path)):
        return read(find(str(table)))
    if hasattr(table, "collect") and not hasattr(table, "__array__"):
        raise DataError(
            f"The table is a {type(table).__name__}, whose rows are not computed yet. Pass table.collect()."
        )
    if hasattr(table, "columns") and hasattr(table, "dtypes"):
        return _frame(table)
    values = np.asarray(table)
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2:
        raise DataError(f"A table has rows and columns. Got an array of shape {values.shape}.")
    names = tuple(f"column{place}" for place in range(values.shape[1]))
    if values.dtype.kind in "mM":
        raise DataError("The array holds dates or times. Turn them into numbers first, such as days since the first.")
    if values.dtype.kind in "OUS":
        return _of_columns(names, [values[:, place] for place in range(values.shape[1])], named=False)
    if values.dtype.kind not in "fiub":
        raise DataError(f"The array holds values of type {values.dtype}, not numbers.")
    return Table(values, names, False)


def _frame(frame: Any) -> Table:
    names = tuple(str(name) for name in frame.columns)
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise DataError(f"The data frame has several columns called '{repeated}': each needs a name of its own.")
    return _of_columns(names, [_cells(frame[name]) for name in frame.columns], named=True)


def _cells(column: Any) -> np.ndarray:
    """Return a column of a data frame as an array; categories as objects."""
    if str(getattr(column, "dtype", "")).lower().split("(")[0] in ("category", "categorical", "enum"):
        return np.asarray(column.to_list() if hasattr(column, "to_list") else list(column), dtype=object)
    if hasattr(column, "to_numpy"):
        return np.asarray(column.to_numpy())
    return np.asarray(column)


def _of_columns(names: tuple[str, ...], columns: Sequence[np.ndarray], named: bool) -> Table:
    n = len(columns[0]) if columns else 0
    values = np.full((n, len(names)), np.nan)
    texts: dict[str, np.ndarray] = {}
    words: dict[str, str] = {}
    dates: list[str] = []
    whole: list[str] = []
    for place, (name, cells) in enumerate(zip(names, columns, strict=True)):
        if cells.dtype.kind in "mM":
            dates.append(name)
            words[name] = f"Column '{name}' holds dates or times ({cells.dtype})."
        elif cells.dtype.kind in "fiu":
            values[:, place] = cells
            whole += [name] if cells.dtype.kind in "iu" else []
        else:
            _objects_into(name, place, cells, values, texts, words, dates)
    return Table(values, names, named, words=words, texts=texts, dates=tuple(dates), whole=tuple(whole))


def _objects_into(
    name: str,
    place: int,
    cells: np.ndarray,
    values: np.ndarray,
    texts: dict[str, np.ndarray],
    words: dict[str, str],
    dates: list[str],
) -> None:
    """Read a column of objects: numbers where all are, words or truth values elsewhere."""
    found = np.empty(len(cells), dtype=object)
    for row, cell in enumerate(cells):
        missing = cell is None or cell != cell or type(cell).__name__ in ("NAType", "NaTType")
        missing |= isinstance(cell, str) and cell.strip().lower() in MISSING
        found[row] = None if missing else cell.item() if isinstance(cell, np.generic) else cell
    there = [cell for cell in found if cell is not None]
    if there and all(isinstance(cell, (int, float)) and not isinstance(cell, bool) for cell in there):
        values[:, place] = [np.nan if cell is None else float(cell) for cell in found]
        return
    if there and hasattr(there[0], "isoformat"):
        dates.append(name)
        words[name] = f"Column '{name}' holds dates or times ({type(there[0]).__name__})."
        return
    if all(isinstance(cell, bool) for cell in there):
        values[:, place] = [np.nan if cell is None else float(cell) for cell in found]
    else:
        found[:] = [None if cell is None else str(cell) for cell in found]
        first = next((cell for cell in found if cell is not None), "")
        words[name] = f"Column '{name}' is not numeric: it has '{first[:40]}'."
    texts[name] = found


def exclude(table: Table, names: Sequence[str]) -> Table:
    """Return the table without these columns; a number is a position counted from 0."""
    if not names:
        return table
    hidden = set(select(table, names).columns)
    rest = [name for name in table.columns if name not in hidden]
    if not rest:
        raise DataError("All columns are excluded.")
    return select(table, rest)


def source_of(table: Table, *, drop_infinite: bool = False) -> Source:
    """Number the words of a table, and find the rows without a missing cell; infinity may count as missing.

    Raises:
        DataError: a column holds dates, or numbers with a few words among them, or nothing, or infinity.
    """
    values, words = table.values, {}
    for name in table.columns:
        if name in table.dates:
            raise DataError(f"Column '{name}' holds dates or times, which are not modelled yet. {_leave_out(name)}")
        if name in table.texts:
            _check_words(name, table)
    if texts := [name for name in table.columns if name in table.texts]:
        values = np.array(values, dtype=np.float64)
        for name in texts:
            there = {cell for cell in table.texts[name] if cell is not None}
            words[name] = tuple(sorted(there))
            numbers = {word: float(place) for place, word in enumerate(words[name])}
            values[:, table.columns.index(name)] = numbered(table.texts[name], numbers)
    kept = _complete(values, table, drop_infinite)
    whole = tuple(name for name in table.whole if name in table.columns)
    return Source(values, table.columns, words, whole, kept, table.named)


def _leave_out(name: str) -> str:
    return f"Leave it out with --exclude {name}, or exclude=['{name}']."


def _check_words(name: str, table: Table) -> None:
    """Refuse a column of numbers in which a few cells are words, and one of decimal commas."""
    there = [cell for cell in table.texts[name] if cell is not None]
    if name not in table.words or not there:
        return
    if "Decimal commas" in table.words[name]:
        raise DataError(f"{table.words[name]} {_leave_out(name)}")
    numbers = sum(_is_number(str(cell)) for cell in there)
    if numbers > MOSTLY_NUMBERS * len(there):
        raise DataError(f"{table.words[name]} Most of its other cells are numbers. {_leave_out(name)}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def numbered(cells: np.ndarray, numbers: Mapping[Any, float]) -> np.ndarray:
    """Return the number of each cell's word: -1 for a word that has none, NaN for a missing cell.

    >>> numbered(np.array(["b", None, "c"], dtype=object), {"a": 0.0, "b": 1.0}).tolist()
    [1.0, nan, -1.0]
    """
    known = {_word(word): number for word, number in numbers.items()}
    return np.array([np.nan if cell is None else known.get(_word(cell), -1.0) for cell in cells], dtype=np.float64)


def _word(cell: Any) -> str:
    """Return a cell as a word; truth values are the same whether they are written out or not."""
    text = str(cell)
    return text.lower() if text.lower() in TRUTHS else text


def _complete(values: np.ndarray, table: Table, drop_infinite: bool) -> np.ndarray | None:
    """Return the places of the rows without NaN, a chunk at a time; None where that is all."""
    given = np.arange(len(values)) if table.kept is None else table.kept
    missing, size = [], max(1, CHUNK_NUMBERS // max(1, values.shape[1]))
    empty = np.ones(values.shape[1], dtype=bool)
    for begin in range(0, len(given), size):
        part = given[begin : begin + size]
        rows = values[begin : begin + len(part)] if table.kept is None else values[part]
        if rows.dtype.kind == "f":
            nan = np.isnan(rows)
            empty &= nan.all(0)
            infinite = np.isinf(rows)
            nan |= infinite
            if infinite.any() and not drop_infinite:
                row, column = (int(found[0]) for found in np.nonzero(infinite))
                raise DataError(
                    f"Row {part[row] + 1} has an infinite value in column '{table.columns[column]}'. "
                    "Leave such rows out with --drop-nonfinite, or out of the table."
                )
            missing.append(part[nan.any(1)])
        else:
            empty[:] = False
    if empty.any() and len(given):
        name = table.columns[int(np.flatnonzero(empty)[0])]
        raise DataError(f"Column '{name}' has no value at all. {_leave_out(name)}")
    gone = np.concatenate(missing) if missing else np.empty(0, dtype=np.int64)
    if not len(gone):
        return table.kept
    if len(gone) == len(given):
        raise DataError("Every row has a missing cell: nothing is left to fit.")
    return np.setdiff1d(given, gone, assume_unique=True)


def matched(table: Table, columns: Columns, named: bool, what: str) -> tuple[np.ndarray, list[str]]:
    """Return new rows as numbers in the order of the fitted columns, and the columns that are not needed.

    Columns are found by name where both tables name theirs, or one does and the other has all of its names; else by
    their place. A word that was not fitted is -1.

    Args:
        table: new rows.
        columns: that were fitted.
        named: whether the fitted table named its columns, or some were chosen.
        what: the table, in words.
    """
    words = {column.name: column for column in columns.modelled if column.kind == "category"}
    needed = [name for name in columns.names if name not in columns.left_out]
    names = {name for name in needed if name not in columns.constants}
    if (table.named and named) or ((table.named or named) and names <= set(table.columns)):
        missing = [name for name in needed if name not in table.columns and name not in columns.constants]
        if missing:
            listed = ", ".join(f"'{name}'" for name in missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise DataError(f"{what} lacks columns that the model was fitted on: {listed}.")
        extra = [name for name in table.columns if name not in columns.names]
    else:
        if len(table.columns) != len(columns.names):
            raise DataError(
                f"{what} has {len(table.columns)} columns; the model was fitted on {len(columns.names)} "
                f"({', '.join(columns.names[:8])}{', ...' if len(columns.names) > 8 else ''})."
            )
        texts, said = _renamed(table, table.texts, columns.names), _renamed(table, table.words, columns.names)
        table, extra = table._replace(columns=columns.names, texts=texts, words=said), []
    n = len(table.values)
    rows = np.zeros((n, len(columns.names)))
    for place, name in enumerate(columns.names):
        if name not in table.columns:  # a constant column that is not there has its value, and one left out none
            continue
        at = table.columns.index(name)
        if name in words:
            cells = table.texts.get(name)
            if cells is None:
                cells = np.array([None if cell != cell else str(cell) for cell in table.values[:, at]], dtype=object)
            own = words[name]
            rows[:, place] = numbered(cells, dict(zip(own.words, own.numbers.values, strict=True)))
        elif name in table.words and name not in columns.left_out:
            raise DataError(f"{table.words[name]} The model was fitted on numbers there.")
        else:
            rows[:, place] = table.values[:, at]
    return rows, extra


def _renamed(table: Table, by_name: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {new: by_name[old] for old, new in zip(table.columns, names, strict=True) if old in by_name}


def restored(rows: np.ndarray, columns: Columns, frame: str) -> Any:
    """Return drawn rows as what was given: a data frame of pandas or polars, or an array.

    Args:
        rows: numbers, of all columns in their order.
        columns: that were fitted.
        frame: "pandas", "polars", or "" for an array.
    """
    if not frame:
        return rows
    module: Any = importlib.import_module(frame)
    return module.DataFrame(dict(cells_of(rows, columns)))


def cells_of(rows: np.ndarray, columns: Columns) -> list[tuple[str, np.ndarray]]:
    """Return the columns of drawn rows, words as words and integers as integers, without those that were left out."""
    words = {column.name: column for column in columns.modelled if column.kind == "category"}
    whole = {column.name for column in columns.modelled if column.whole}
    found = []
    for place, name in enumerate(columns.names):
        own = rows[:, place]
        if name in columns.left_out:
            continue
        if name in columns.constants:
            value = columns.constants[name]
            cells = np.full(len(rows), value, dtype=object if isinstance(value, str) else None)
        elif name in words:
            column = words[name]
            kind: Any = bool if all(isinstance(word, bool) for word in column.words) else object
            of_number = dict(zip(column.numbers.values.tolist(), column.words, strict=True))
            cells = np.array([of_number[number] for number in own.tolist()], dtype=kind)
        elif name in whole:
            cells = np.round(own).astype(np.int64)
        else:
            cells = own
        found.append((name, cells))
    return found


def kind_of_frame(table: Any) -> str:
    """Return "pandas", "polars", or "" for what is no data frame of these."""
    module, kind = type(table).__module__.split(".")[0], type(table).__name__
    return module if module in ("pandas", "polars") and kind == "DataFrame" else ""
