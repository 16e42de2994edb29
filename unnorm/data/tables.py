"""Tables from files: `.csv`, `.npy` (memory-mapped), `.npz`, `.parquet`; messages name what is wrong with one."""

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from unnorm.errors import DataError, InvalidValue
from unnorm.names import unknown

__all__ = ["READERS", "Cells", "Table", "cells", "find", "finite", "read", "select"]

CHUNK_ROWS = 8192
MISSING = {"", "na", "n/a", "nan", "null", "none"}
TRUTHS = {"true", "false"}
DATE = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?)?(Z|[+-]\d{2}:?\d{2})?"
    r"|\d{1,2}[./]\d{1,2}[./]\d{2,4}( \d{1,2}:\d{2}(:\d{2})?)?|\d{4}/\d{1,2}/\d{1,2}"
)
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+(e[+-]?\d+)?\s*", flags=re.IGNORECASE)


class Table(NamedTuple):
    """Numbers with named columns.

    Attributes:
        values: (n, columns); NaN in columns that are not numeric.
        columns: the names of the columns.
        named: whether the names came with the file.
        kept: the places of the rows that count; all when None.
        words: why each column that is not numeric is not.
        unnamed: columns whose name in the file is empty; they are called by their place, as in column0.
        texts: the cells of each column of words, and of truth values, which are numbers too; None where one is missing.
        dates: columns of dates or times, which are not numeric.
        whole: columns that hold integers by their type.

    >>> Table(np.zeros((3, 2)), ("a", "b"), True).rows
    3
    """

    values: np.ndarray
    columns: tuple[str, ...]
    named: bool
    kept: np.ndarray | None = None
    words: Mapping[str, str] = MappingProxyType({})
    unnamed: tuple[str, ...] = ()
    texts: Mapping[str, np.ndarray] = MappingProxyType({})
    dates: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.values) if self.kept is None else len(self.kept)


class Cells(NamedTuple):
    """What stands in a file, row by row, words and all; `lines` says where each row ends in a .csv file, from 1.

    >>> Cells(("id", "a"), [["x-1", "0.5"], ["x-2", None]]).texts(1)
    ['x-2', '']
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]] | np.ndarray
    lines: Sequence[int] | None = None

    def texts(self, place: int) -> list[str]:
        """The cells of a row, counted from 0."""
        return ["" if cell is None else str(cell) for cell in self.rows[place]]


def find(name: str) -> Path:
    """The file `name`, looked for here and then under the folder that UNNORM_DATA names."""
    places = [Path(name)]
    if root := os.environ.get("UNNORM_DATA"):
        places.append(Path(root) / name)
    try:
        for place in places:
            if place.is_file():
                return place
        if places[0].is_dir():
            raise DataError(f"'{name}' is a folder, not a table. Tables are {', '.join(READERS)} files.")
    except OSError as problem:
        raise DataError(f"Cannot read '{name[:80]}': {problem.strerror}.") from problem
    raise DataError(f"There is no file '{name}'.")


def read(path: Path, *, key: str | None = None) -> Table:
    """Read a table, refuse what is not a table of numbers.

    `key` names the array inside an `.npz` file.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"Cannot read '{path.name}': tables are {', '.join(READERS)} files.")
    if key is not None and path.suffix.lower() != ".npz":
        raise InvalidValue(f"A key chooses an array of an .npz file. Got '{path.name}'.")
    if path.stat().st_size == 0:
        raise DataError(f"'{path.name}' is empty.")
    try:
        table = reader(path, key)
    except OSError as problem:
        raise DataError(f"Cannot read '{path.name}': {problem}.") from problem
    if table.rows == 0 or table.values.shape[1] == 0:
        raise DataError(f"'{path.name}' has no {'rows' if table.rows == 0 else 'columns'}.")
    return table


def select(table: Table, columns: Sequence[str]) -> Table:
    """The named columns, in the order given; a number is a position counted from 0."""
    places = []
    for name in columns:
        if name in table.columns:
            places.append(table.columns.index(name))
        elif name.isascii() and name.isdigit() and int(name) < len(table.columns):
            places.append(int(name))
        else:
            raise InvalidValue(unknown("column", name, table.columns))
    if len(set(places)) < len(places):
        raise InvalidValue(f"Each column can be chosen once. Got {', '.join(columns)}.")
    return table._replace(values=table.values[:, places], columns=tuple(table.columns[place] for place in places))


def cells(path: Path, *, key: str | None = None) -> Cells:
    """All that stands in the file of a table, as it stands there: what `read` cannot make a number of, and its digits.

    The rows are those of `read`, in its order.
    """
    suffix = path.suffix.lower()
    if suffix == ".csv":
        text = _csv_text(path)
        start, delimiter, head, header = _csv_head(text, path.name)
        found = list(_records(text, delimiter, header is not None, start))
        columns = header or tuple(f"column{place}" for place in range(len(head)))
        return Cells(columns, [row for _, row in found], [line for line, _ in found])
    if suffix == ".parquet":
        import pyarrow.parquet as pq  # it was there for `read`

        table = pq.read_table(path)
        columns, _ = _called(table.column_names)
        return Cells(columns, list(zip(*(column.to_pylist() for column in table.columns), strict=True)))
    table = read(path, key=key)
    return Cells(table.columns, table.values)


def _choose_others(names: Sequence[str]) -> str:
    return "Choose others with --columns."


def finite(table: Table, *, drop: bool, advice: Callable[[Sequence[str]], str] = _choose_others) -> Table:
    """Refuse columns of words, and NaN and infinity (or, with `drop`, leave such rows out), a chunk at a time.

    `advice` says what to do about columns without numbers.
    """
    if words := [name for name in table.columns if name in table.words]:
        raise DataError(f"{table.words[words[0]]} {advice(words)}")
    bad_rows, count, first = [], 0, ""
    for start in range(0, len(table.values), CHUNK_ROWS):
        bad = ~np.isfinite(table.values[start : start + CHUNK_ROWS])
        if not bad.any():
            continue
        rows, columns = np.nonzero(bad)
        first = first or f"row {start + rows[0] + 1}, column '{table.columns[columns[0]]}'"
        count += len(rows)
        bad_rows.append(start + np.unique(rows))
    if not count:
        return table
    dropped = np.concatenate(bad_rows)
    if not drop:
        empty = [
            name for name, column in zip(table.columns, table.values.T, strict=True) if not np.isfinite(column).any()
        ]
        if empty:
            raise DataError(f"Column '{empty[0]}' has no finite value at all. {advice(empty)}")
        raise DataError(
            f"{count} values in {len(dropped)} rows are NaN or infinite, the first in {first}. "
            "Leave such rows out with --drop-nonfinite."
        )
    if len(dropped) == len(table.values):
        raise DataError("Every row has a NaN or infinite value: nothing is left to fit.")
    return table._replace(kept=np.delete(np.arange(len(table.values)), dropped))


def _array(values: np.ndarray, name: str, columns: tuple[str, ...] | None = None) -> Table:
    if values.dtype.kind not in "fiub":
        raise DataError(f"'{name}' holds values of type {values.dtype}, not numbers.")
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2:
        raise DataError(f"'{name}' has shape {values.shape}; a table is rows by columns.")
    if columns is None:
        return Table(values, tuple(f"column{place}" for place in range(values.shape[1])), False)
    _unique(columns, name)
    return Table(values, columns, True)


def _called(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of columns, and those of them that stand for none.

    >>> _called(["", "a", "column0"])
    (('column0_', 'a', 'column0'), ('column0_',))
    """
    called, unnamed = list(names), []
    for place, name in enumerate(names):
        if not name:
            called[place] = f"column{place}"
            while called[place] in names:
                called[place] += "_"
            unnamed.append(called[place])
    return tuple(called), tuple(unnamed)


def _unique(columns: Sequence[str], name: str) -> None:
    if repeated := sorted({column for column in columns if columns.count(column) > 1}):
        raise DataError(f"'{name}' has several columns called '{repeated[0]}': each needs a name of its own.")


def _read_npy(path: Path, key: str | None) -> Table:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as problem:
        raise DataError(f"'{path.name}' is not a complete .npy file of numbers.") from problem
    return _array(values, path.name)


def _read_npz(path: Path, key: str | None) -> Table:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            usual = [name for name in ("X", "x", "data") if name in names]
            chosen = key or (names[0] if len(names) == 1 else usual[0] if usual else None)
            if chosen is None:
                raise DataError(f"'{path.name}' holds several arrays ({', '.join(names)}): choose one with --key.")
            if chosen not in names:
                raise DataError(unknown(f"array in '{path.name}'", chosen, names))
            return _array(archive[chosen], f"{path.name}:{chosen}")
    except DataError:
        raise
    except Exception as problem:  # numpy raises whatever zipfile, zlib or its own parser raised
        raise DataError(f"'{path.name}' is not a complete .npz file of numbers.") from problem


def _read_parquet(path: Path, key: str | None) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError("Reading .parquet files needs pyarrow: pip install 'unnorm[parquet]'.") from None
    try:
        names, unnamed = _called(pq.read_schema(path).names)
        _unique(names, path.name)
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as problem:
        raise DataError(f"'{path.name}' is not a complete .parquet file ({problem}).") from problem
    columns, words, texts, dates, whole = [], {}, {}, [], []
    for name, column in zip(names, table.columns, strict=True):
        kind = column.type
        if pa.types.is_boolean(kind) or not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
            texts[name] = _objects(column.to_pylist())
        if pa.types.is_temporal(kind):
            dates.append(name)
        if pa.types.is_integer(kind):
            whole.append(name)
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
            words[name] = f"Column '{name}' of '{path.name}' is not numeric (it is {kind})."
            columns.append(np.full(table.num_rows, np.nan))
            continue
        columns.append(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    values = np.stack(columns, -1) if columns else np.empty((0, 0))
    found = _array(values, path.name, names)
    return found._replace(words=words, unnamed=unnamed, texts=texts, dates=tuple(dates), whole=tuple(whole))


def _objects(cells: Sequence[Any]) -> np.ndarray:
    """Return cells as an array of objects, whatever they are."""
    found = np.empty(len(cells), dtype=object)
    found[:] = cells
    return found


def _number(cell: str) -> float:
    text = cell.strip().lower()
    if text in ("true", "false"):
        return float(text == "true")
    return float("nan") if text in MISSING else float(text)


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _decimal_comma(cell: str) -> bool:
    """Whether a cell is a number as half of the world's spreadsheets write it.

    >>> [_decimal_comma(cell) for cell in ("1,5", "-,25", "1.5", "a,5")]
    [True, True, False, False]
    """
    return DECIMAL_COMMA.fullmatch(cell) is not None


def _csv_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"'{path.name}' is not a text file in UTF-8 ({problem.reason}).") from problem


def _csv_head(text: str, name: str) -> tuple[int, str, list[str], tuple[str, ...] | None]:
    """The place of the first line that is not empty, what divides its cells, these, and whether they are names."""
    lines = text.split("\n")
    start = next((place for place, line in enumerate(lines) if line.strip()), None)
    if start is None:
        raise DataError(f"'{name}' is empty.")
    first = lines[start]
    delimiter = max(",;\t", key=first.count)
    for other in ";\t":  # 1,5;2,5 has as many commas
        if other in first and all(_is_number(cell) or _decimal_comma(cell) for cell in first.split(other)):
            delimiter = other
    head = next(csv.reader([first], delimiter=delimiter))
    header = None if all(_is_number(cell) for cell in head) else tuple(cell.strip() for cell in head)
    if header and sum(1 for line in lines if line.strip()) == 1:
        raise DataError(f"'{name}' has a header but no rows.")
    return start, delimiter, head, header if header is None else _called(header)[0]


def _read_csv(path: Path, key: str | None) -> Table:
    text = _csv_text(path)
    start, delimiter, head, header = _csv_head(text, path.name)
    try:  # the fast way; it fails on missing cells, quotes and words, which the slow way then names
        values = np.loadtxt(
            io.StringIO(text), delimiter=delimiter, skiprows=start + (header is not None), ndmin=2, comments=None
        )
        ragged = values.size > 0 and values.shape[1] != len(head)
    except ValueError:
        ragged = True
    words: dict[str, str] = {}
    texts: dict[str, np.ndarray] = {}
    if ragged:
        try:
            values = _parse_csv(text, delimiter, header, len(head), start, path.name, words, texts)
        except csv.Error as problem:
            raise DataError(f"'{path.name}' is not a well-formed .csv file ({problem}).") from problem
    unnamed = _called([cell.strip() for cell in head])[1] if header else ()
    dates = tuple(name for name in words if all(cell is None or DATE.fullmatch(cell) for cell in texts[name]))
    return _array(values, path.name, header)._replace(words=words, unnamed=unnamed, texts=texts, dates=dates)


def _records(text: str, delimiter: str, header: bool, start: int) -> Iterator[tuple[int, list[str]]]:
    """The rows below the header, each with the number of its (last) line; empty lines are none."""
    reader = csv.reader(io.StringIO(text), delimiter=delimiter)
    for row in reader:
        blank = not row or (len(row) == 1 and not row[0].strip())
        if not (blank or reader.line_num <= start or (header and reader.line_num == start + 1)):
            yield reader.line_num, row


def _parse_csv(
    text: str,
    delimiter: str,
    header: tuple[str, ...] | None,
    width: int,
    start: int,
    name: str,
    words: dict[str, str],
    texts: dict[str, np.ndarray],
) -> np.ndarray:
    """Return the numbers of a table, cell by cell.

    The cells of a column that is not numeric, or that holds truth values, are put into `texts`; in `words` is a message
    that names the first cell of a column that is no number.
    """
    rows: list[list[str]] = []
    lines: list[int] = []
    for line, found in _records(text, delimiter, header is not None, start):
        if len(found) != width:
            raise DataError(f"Line {line} of '{name}' has {len(found)} cells; the first line has {width}.")
        rows.append(found)
        lines.append(line)
    values = np.full((len(rows), width), np.nan)
    for place in range(width):
        column = header[place] if header else f"column{place}"
        cells_here = [row[place] for row in rows]
        words_here = [line for line, cell in zip(lines, cells_here, strict=True) if not _is_number(cell)]
        if not words_here:
            values[:, place] = [_number(cell) for cell in cells_here]
        if words_here or any(cell.strip().lower() in TRUTHS for cell in cells_here):
            stripped = [cell.strip() for cell in cells_here]
            texts[column] = _objects([None if cell.lower() in MISSING else cell for cell in stripped])
        if words_here:
            first = cells_here[lines.index(words_here[0])]
            message = f"Column '{column}' of '{name}' is not numeric: line {words_here[0]} has '{first.strip()[:40]}'."
            if _decimal_comma(first):
                message += " Decimal commas are not read: write 1.5 for 1,5."
            words[column] = message
    return values


READERS: dict[str, Callable[[Path, str | None], Table]] = {
    ".csv": _read_csv,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
}
