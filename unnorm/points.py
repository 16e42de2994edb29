"""The rows of a job: read, checked and split for fitting; matched to a model's columns for scoring."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unnorm.data import tables
from unnorm.data.rows import Rows, RowSource
from unnorm.data.toy import TOYS, Toy, toy
from unnorm.errors import DataError
from unnorm.folders import CONFIG, read_json
from unnorm.iterates import VALIDATED
from unnorm.names import unknown
from unnorm.randomness import numpy_stream, stream
from unnorm.settings import LEAST_ROWS, Job

__all__ = ["Points", "points_for_scoring", "prepare"]

MOST_VALIDATION = 2000


class Points(NamedTuple):
    """Rows to train on and to test on, in the user's units, with the names of their columns."""

    train: RowSource
    test: RowSource
    validation: RowSource | None  # rows of neither, where the best iterate is asked for
    columns: tuple[str, ...]
    named: bool  # whether the names came with the data
    width: int  # columns of the file, before any were left out
    places: tuple[int, ...]  # where the columns stand in the file
    truth: Toy | None
    dropped: int = 0  # rows left out because they were not finite


def prepare(job: Job) -> Points:
    """Read and check the data, and split them by the seed."""
    return _toy_points(job) if job.data in TOYS else _table_points(job)


def _toy_points(job: Job) -> Points:
    truth = toy(job.data)
    generator = stream(job.training.seed, "points of a toy set")
    train = truth.sample(job.n, generator=generator)
    test = truth.sample(max(1000, round(job.n * job.test / (1 - job.test))), generator=generator)
    validation = truth.sample(MOST_VALIDATION, generator=generator) if job.training.iterate in VALIDATED else None
    return Points(train, test, validation, ("x", "y"), False, 2, (0, 1), truth)


def _table_points(job: Job) -> Points:
    table, places, width = _read(job)
    dropped = len(table.values) - table.rows
    order = np.arange(table.rows, dtype=np.int32 if table.rows < 2**31 else np.int64)
    numpy_stream(job.training.seed, "test rows").shuffle(order)
    if table.kept is not None:
        order = table.kept[order]
    tested = min(max(1, round(job.test * len(order))), len(order) - 4)
    validated = 0
    if job.training.iterate in VALIDATED:
        validated = min(max(2, round(0.2 * (len(order) - tested))), MOST_VALIDATION)
    test, validation, train = (
        Rows(table.values, np.sort(part)) for part in np.split(order, [tested, tested + validated])
    )
    kept_out = validation if validated else None
    return Points(train, test, kept_out, table.columns, table.named, width, places, None, dropped)


def _read(job: Job) -> tuple[tables.Table, tuple[int, ...], int]:
    try:
        path = tables.find(job.data)
    except DataError as problem:
        if Path(job.data).suffix or os.sep in job.data or Path(job.data).exists():
            raise
        raise DataError(unknown("data set", job.data, TOYS) + " Or give a file.") from problem
    table = tables.read(path, key=job.key)
    width, names = len(table.columns), table.columns
    if job.columns is not None:
        table = tables.select(table, job.columns)
    table = tables.finite(table, drop=job.drop_nonfinite)
    if table.rows < LEAST_ROWS:
        rows = "1 row" if table.rows == 1 else f"{table.rows} rows"
        raise DataError(f"'{job.data}' has {rows}; fitting and testing a density takes at least {LEAST_ROWS}.")
    constant = _constant_columns(table)
    if constant and not job.drop_constant:
        listed = ", ".join(f"'{name}'" for name in constant)
        raise DataError(f"Constant columns have no density: {listed}. Leave them out with --drop-constant.")
    if constant:
        kept = [name for name in table.columns if name not in constant]
        if not kept:
            raise DataError(f"Every column of '{job.data}' is constant: there is no density to fit.")
        table = tables.select(table, kept)
    return table, tuple(names.index(name) for name in table.columns), width


def _constant_columns(table: tables.Table) -> list[str]:
    first = table.values[0 if table.kept is None else table.kept[0]]
    varies = np.zeros(len(table.columns), dtype=bool)
    for start in range(0, table.rows, tables.CHUNK_ROWS):
        place = slice(start, start + tables.CHUNK_ROWS)
        varies |= (table.values[place if table.kept is None else table.kept[place]] != first).any(0)
        if varies.all():
            break
    return [name for name, moves in zip(table.columns, varies, strict=True) if not moves]


def points_for_scoring(
    folder: Path, data: str, *, key: str | None, drop_nonfinite: bool
) -> tuple[Rows, np.ndarray | None]:
    """The rows of another file, with the columns the model in `folder` was fitted on; and which rows were kept.

    Columns are found by name where both files name theirs, else by their place.
    """
    table = tables.read(tables.find(data), key=key)
    if (folder / CONFIG).exists():
        table = _matching(table, data, read_json(folder / CONFIG, {"columns", "named", "places", "width"}))
    table = tables.finite(table, drop=drop_nonfinite)
    return Rows(table.values, table.kept), table.kept


def _matching(table: tables.Table, data: str, config: Mapping[str, Any]) -> tables.Table:
    names, places, width = config["columns"], config["places"], config["width"]
    if table.named and set(names) <= set(table.columns):
        return tables.select(table, names)
    if table.named and config["named"]:
        missing = [name for name in names if name not in table.columns]
        raise DataError(f"'{data}' lacks columns the model was fitted on: {_some(missing)}.")
    if len(table.columns) == width:
        return table._replace(values=table.values[:, places], columns=tuple(names))
    if len(table.columns) == len(names):
        return table
    raise DataError(
        f"'{data}' has {len(table.columns)} columns; the model was fitted on {len(names)} ({_some(names)})."
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
