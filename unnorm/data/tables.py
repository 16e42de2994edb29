"""Tables from files: `.csv`, `.npy` (memory-mapped), `.npz`, `.parquet`; what is wrong with one is said by name."""

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unnorm.errors import DataError, InvalidValue
from unnorm.names import unknown

__all__ = ["READERS", "Table", "find", "read", "select"]

CHUNK_ROWS = 8192
MISSING = {"", "na", "n/a", "nan", "null", "none"}


class Table(NamedTuple):
    """Numbers with named columns; `named` says whether the names came with the file; `kept`, where set, picks rows.

    >>> Table(np.zeros((3, 2)), ("a", "b"), True).rows
    3
    """

    values: np.ndarray
    columns: tuple[str, ...]
    named: bool
    kept: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.values) if self.kept is None else len(self.kept)


def find(name: str) -> Path:
    """The file `name`, looked for here and then under the folder that UNNORM_DATA names."""
    places = [Path(name)]
    if root := os.environ.get("UNNORM_DATA"):
        places.append(Path(root) / name)
    for place in places:
        if place.is_file():
            return place
    if places[0].is_dir():
        raise DataError(f"'{name}' is a folder, not a table. Tables are {', '.join(READERS)} files.")
    raise DataError(f"There is no file '{name}'.")


def read(path: Path, *, key: str | None = None) -> Table:
    """Read a table, refuse what is not a table of numbers.

    `key` names the array inside an `.npz` file.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"Cannot read '{path.name}': tables are {', '.join(READERS)} files.")
    if path.stat().st_size == 0:
        raise DataError(f"'{path.name}' is empty.")
    try:
        table = reader(path, key)
    except OSError as problem:
        raise DataError(f"Cannot read '{path.name}': {problem}.") from problem
    if table.rows == 0 or table.values.shape[1] == 0:
        raise DataError(f"'{path.name}' has no rows.")
    return table


def select(table: Table, columns: Sequence[str]) -> Table:
    """The named columns, in the order given; a number is a position counted from 0."""
    places = []
    for name in columns:
        if name in table.columns:
            places.append(table.columns.index(name))
        elif name.isdigit() and int(name) < len(table.columns):
            places.append(int(name))
        else:
            raise InvalidValue(unknown("column", name, table.columns))
    return table._replace(values=table.values[:, places], columns=tuple(table.columns[place] for place in places))


def finite(table: Table, *, drop: bool) -> Table:
    """Refuse NaN and infinity (or, with `drop`, leave such rows out), a chunk at a time."""
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
    return Table(values, columns or tuple(str(place) for place in range(values.shape[1])), columns is not None)


def _read_npy(path: Path, key: str | None) -> Table:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as problem:
        raise DataError(f"'{path.name}' is not a complete .npy file of numbers ({problem}).") from problem
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
        raise DataError(f"'{path.name}' is not a complete .npz file of numbers ({problem}).") from problem


def _read_parquet(path: Path, key: str | None) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError("Reading .parquet files needs pyarrow: pip install 'unnorm[parquet]'.") from None
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as problem:
        raise DataError(f"'{path.name}' is not a complete .parquet file ({problem}).") from problem
    columns = []
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
            raise DataError(
                f"Column '{name}' of '{path.name}' is not numeric (it is {kind}). Choose others with --columns."
            )
        columns.append(table.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False))
    values = np.stack(columns, -1) if columns else np.empty((0, 0))
    return _array(values, path.name, tuple(table.column_names))


def _number(cell: str) -> float:
    text = cell.strip()
    return float("nan") if text.lower() in MISSING else float(text)


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _read_csv(path: Path, key: str | None) -> Table:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"'{path.name}' is not a text file in UTF-8 ({problem.reason}).") from problem
    lines = text.splitlines()
    if not (first := next((line for line in lines if line.strip()), "")):
        raise DataError(f"'{path.name}' is empty.")
    delimiter = max(",;\t", key=first.count)
    head = next(csv.reader([first], delimiter=delimiter))
    header = None if all(_is_number(cell) for cell in head) else tuple(cell.strip() for cell in head)
    if header and sum(1 for line in lines if line.strip()) == 1:
        raise DataError(f"'{path.name}' has a header but no rows.")
    try:  # the fast way; it fails on missing cells, quotes and words, which the slow way then names
        values = np.loadtxt(io.StringIO(text), delimiter=delimiter, skiprows=1 if header else 0, ndmin=2, comments=None)
        ragged = values.size > 0 and values.shape[1] != len(head)
    except ValueError:
        ragged = True
    if ragged:
        values = _parse_csv(text, delimiter, header, len(head), path.name)
    return _array(values, path.name, header)


def _parse_csv(text: str, delimiter: str, header: tuple[str, ...] | None, width: int, name: str) -> np.ndarray:
    reader = csv.reader(io.StringIO(text), delimiter=delimiter)
    rows: list[list[float]] = []
    for cells in reader:
        if not cells or (header and reader.line_num == 1):
            continue
        if len(cells) != width:
            raise DataError(f"Line {reader.line_num} of '{name}' has {len(cells)} cells; the first line has {width}.")
        for place, cell in enumerate(cells):
            if not _is_number(cell):
                column = header[place] if header else str(place)
                raise DataError(
                    f"Column '{column}' of '{name}' is not numeric: line {reader.line_num} has '{cell.strip()}'. "
                    "Choose others with --columns."
                )
        rows.append([_number(cell) for cell in cells])
    return np.array(rows, dtype=np.float64).reshape(len(rows), width)


READERS: dict[str, Callable[[Path, str | None], Table]] = {
    ".csv": _read_csv,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
}
