"""What the quality benchmarks share: many independent fits in processes, none of whose failures is hidden."""

import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

from unnorm.errors import HealthWarning, UnnormError
from unnorm.settings import ESTIMATORS
from unnorm.types import History

METHODS = tuple(ESTIMATORS)

Cell = TypeVar("Cell")
Result = TypeVar("Result")


def chosen(names: str | None) -> tuple[str, ...]:
    """Methods by their command-line names, separated by commas; all of them when None."""
    methods = METHODS if names is None else tuple(names.split(","))
    if unknown := set(methods) - set(METHODS):
        sys.exit(f"Unknown methods: {', '.join(sorted(unknown))}. Known: {', '.join(METHODS)}.")
    return methods


def run(
    function: Callable[[Cell], Result], cells: Sequence[Cell], *, jobs: int, threads: int = 1
) -> Iterator[tuple[Cell, Result | str]]:
    """Each cell with its result as it comes, or with "diverged: ..." where the library refused to go on."""
    context, began = multiprocessing.get_context("spawn"), time.perf_counter()
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        futures = {pool.submit(_attempt, function, cell): cell for cell in cells}
        for done, future in enumerate(as_completed(futures), 1):
            print(f"{done}/{len(cells)} after {time.perf_counter() - began:.0f} s", file=sys.stderr)
            yield futures[future], future.result()


def _attempt(function: Callable[[Cell], Result], cell: Cell) -> Result | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)  # the history has them
        try:
            return function(cell)
        except UnnormError as problem:
            return f"diverged: {problem}"


def warned(history: History) -> tuple[str, ...]:
    """The names of the health rules that a run broke."""
    return tuple(line.split(", ", 1)[1].split(":", 1)[0] for line in history.warnings)
