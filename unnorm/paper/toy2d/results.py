"""The synthetic study as numbers: from its JSON lines to chosen settings and to cells."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from unnorm.names import unknown
from unnorm.paper.lines import FILE, Run, by_kind, wall_seconds
from unnorm.paper.toy2d.cells import Cell, Column, column
from unnorm.paper.toy2d.spec import DATA, METHODS, STYLES

__all__ = [
    "FILE",
    "FLOOR_ERRORS",
    "METRICS",
    "OF_SAMPLES",
    "SCALES",
    "UNITS",
    "Place",
    "Results",
    "Row",
    "Run",
    "Setting",
    "choose",
    "counted",
    "number",
    "read",
    "title",
]

FLOOR_ERRORS = 3  # standard errors above the noise floor that still count as at it
METRICS = {"mmd": "MMD", "frechet": "Frechet distance", "test_nll": "test NLL", "kl": "KL"}
SCALES = {"mmd": 1e4, "frechet": 1.0, "test_nll": 1.0, "kl": 1.0}  # what a value is multiplied by where it is shown
UNITS = {name: "" if scale == 1 else f" x {scale:,.0f}" for name, scale in SCALES.items()}
OF_SAMPLES = ("mmd", "frechet")
ALWAYS = ("validation_nll", "test_nll", "kl")  # measured for every run: a null is a NaN or an infinity

NEEDED: Mapping[str, tuple[str, ...]] = {
    "study": ("seeds",),
    "run": ("key", "method", "style", "data", "seed", "status"),
    "timing": ("key", "method", "style"),
    "floor": ("data",),
    "picture": ("method", "data", "cells", "peak", "density"),
    "clock": ("part", "seconds"),
}
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "run": (*ALWAYS, "mmd", "frechet", "seconds", "steps", "lr", "n_steps"),
    "timing": ("n_steps", "replicas", "steps", "step_seconds", "single_seconds"),
    "floor": ("entropy", "mmd", "mmd_sd", "frechet", "frechet_sd", "n", "test_nll", "test_nll_sd"),
    "throughput": ("replicas", "stacked_per_second", "single_per_second", "ratio"),
    "clock": ("seconds",),
}

Row: TypeAlias = tuple[str, str]  # method, style


class Place(NamedTuple):
    """What is tuned by itself."""

    method: str
    style: str
    data: str


class Setting(NamedTuple):
    """What is tuned; `other`, as JSON, where there is no learning rate."""

    lr: float | None
    n_steps: int | None
    other: str | None

    @classmethod
    def of(cls, run: Run) -> "Setting":
        other = run.get("setting")
        return cls(run.get("lr"), run.get("n_steps"), None if other is None else json.dumps(other, sort_keys=True))


@dataclass(frozen=True)
class Results:
    """The records of a study; of repeated ones the last.

    Attributes:
        starts: one for the study, one for each time it was resumed.
        floors: by data set.
        pictures: by method, style and data set, of all settings; of the truth, the style is "".
        throughput: None where it was not measured.
        clock: wall seconds by part of the study, of all its starts together.
    """

    starts: Sequence[Run]
    runs: Sequence[Run]
    timings: Sequence[Run]
    floors: Mapping[str, Run]
    pictures: Mapping[Place, Sequence[Run]]
    throughput: Run | None
    clock: Mapping[str, float]

    @property
    def plan(self) -> Mapping[str, Any]:
        """The settings of the study's size."""
        return self.starts[-1].get("settings") or {}

    @property
    def seeds(self) -> int:
        """How many there are to be."""
        return int(self.starts[-1]["seeds"])

    @cached_property
    def chosen(self) -> Mapping[Place, tuple[Run, ...]]:
        return choose(self.runs)

    @cached_property
    def data(self) -> tuple[str, ...]:
        found = {run["data"] for run in self.runs}
        return tuple(name for name in DATA if name in found)

    def rows(self, *styles: str, origins: Iterable[str] = ()) -> list[Row]:
        """Methods that have runs, in the order of `METHODS`; empty arguments take all."""
        found = {(run["method"], run["style"]) for run in self.runs}
        wanted = set(origins)
        return [
            (name, style)
            for style in styles or tuple(STYLES)
            for name, method in METHODS.items()
            if (name, style) in found and (not wanted or method.origin in wanted)
        ]

    def cell(self, metric: str, row: Row, data: str) -> Cell | None:
        """None where nothing was measured."""
        runs = self.chosen.get(Place(*row, data), ())
        lost = [run for run in runs if run["status"] != "ok" or (metric in ALWAYS and run.get(metric) is None)]
        values = {run["seed"]: float(run[metric]) for run in runs if run not in lost and run.get(metric) is not None}
        return Cell(values, len(lost)) if values or lost else None

    def column(self, metric: str, rows: Iterable[Row], data: str) -> Column:
        key = (metric, tuple(rows), data)
        if key not in self._columns:
            self._columns[key] = column({row: self.cell(metric, row, data) for row in key[1]})
        return self._columns[key]

    @cached_property
    def _columns(self) -> dict[tuple[str, tuple[Row, ...], str], Column]:
        return {}

    def ranks(self, metric: str, rows: Iterable[Row], row: Row) -> list[float]:
        """The rank of `row` among `rows` on each data set where it was measured."""
        columns = [self.column(metric, rows, data) for data in self.data]
        return [one.ranks[row] for one in columns if row in one.ranks]

    def at_floor(self, metric: str, cell: Cell, data: str) -> bool:
        """Whether a metric of samples cannot tell the method from the truth.

        The floor has the deviation of single pairs of samples: a mean of n seeds less a mean of m pairs has that of one
        pair times sqrt(1/n + 1/m). False where the floor is not known.
        """
        floor = self.floors.get(data, {}) if metric in OF_SAMPLES else {}
        mean, sd, pairs = (floor.get(name) for name in (metric, f"{metric}_sd", "n"))
        if cell.failed or mean is None or sd is None or not pairs:
            return False
        return bool(cell.mean <= mean + FLOOR_ERRORS * sd * math.sqrt(1 / cell.n + 1 / pairs))

    def picture(self, place: Place) -> Run | None:
        """Of the chosen setting; the last where the lines do not say whose they are."""
        keys = [run["key"] for run in self.chosen.get(place, ())]
        found = self.pictures.get(place, ())
        fitting = [one for one in found if one.get("run") in keys] or [one for one in found if one.get("run") is None]
        return fitting[-1] if fitting else None


def read(folder: Path) -> Results:
    """The study in `folder`.

    Raises:
        InvalidValue: no such file.
        BrokenFile: with the number of the line; a last line cut short, as a kill leaves it, is passed over.
    """
    found = by_kind(folder, _wrong)
    pictures = defaultdict[Place, list[Run]](list)
    for one in found["picture"]:
        pictures[_place(one)].append(one)
    return Results(
        found["study"],
        _last(_last(found["run"], lambda run: run["key"]), lambda run: (_place(run), run["seed"], Setting.of(run))),
        _last(found["timing"], lambda one: one["key"]),
        {one["data"]: one for one in found["floor"]},
        dict(pictures),
        found["throughput"][-1] if found["throughput"] else None,
        wall_seconds(found["clock"]),
    )


def _place(record: Run) -> Place:
    style = "" if record["method"] == "truth" else record["style"]
    return Place(record["method"], style, record["data"])


def _last(records: Iterable[Run], key: Any) -> list[Run]:
    found: dict[Any, Run] = {}
    for record in records:
        found.pop(key(record), None)
        found[key(record)] = record
    return list(found.values())


def _wrong(record: Any) -> str | None:
    """What is wrong with a line, in words; numbers that are not finite become None."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "it has no 'kind'."
    kind = record["kind"]
    for name in NUMBERS.get(kind, ()):
        value = record.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            return f"its '{name}' is not a number."
        if isinstance(value, float) and not math.isfinite(value):
            record[name] = None
    needed = NEEDED.get(kind, ())
    if absent := [name for name in needed if record.get(name) is None]:
        return f"a {kind} needs '{absent[0]}'."
    for name in ("seed", "seeds"):
        if name in needed and not isinstance(record[name], int):
            return f"its '{name}' is not a whole number."
    return _wrong_plan(record) if kind == "study" else _wrong_name(record, needed)


def _wrong_plan(record: Run) -> str | None:
    plan = record.get("settings") or {}
    if not isinstance(plan, dict) or not isinstance(plan.get("rates", {}), dict):
        return "its 'settings', or the 'rates' of these, are no mapping of names."
    return None


def _wrong_name(record: Run, needed: Sequence[str]) -> str | None:
    picture = record["kind"] == "picture"
    truth = picture and record["method"] == "truth"
    checked = (*needed, "style") if picture and not truth else needed
    known = {"method": (*METHODS, "truth") if picture else tuple(METHODS), "style": tuple(STYLES), "data": DATA}
    for name, names in known.items():
        if name in checked and record.get(name) not in names:
            return unknown(name, str(record.get(name)), names)
    return None


def choose(runs: Iterable[Run]) -> dict[Place, tuple[Run, ...]]:
    """The runs, in order of their seeds, of the setting with the least mean validation NLL; never by the test set.

    A setting with a failed seed is behind all without; among those, fewest failed, then the least mean of the rest.
    """
    groups: dict[Place, dict[Setting, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[_place(run)][Setting.of(run)].append(run)
    best = {place: min(settings.values(), key=_merit) for place, settings in groups.items()}
    return {place: tuple(sorted(found, key=lambda run: run["seed"])) for place, found in best.items()}


def _merit(runs: Sequence[Run]) -> tuple[int, float]:
    values = [run["validation_nll"] for run in runs if run["status"] == "ok" and run.get("validation_nll") is not None]
    return len(runs) - len(values), float(np.mean(values)) if values else math.inf


def title(row: Row) -> str:
    """
    >>> title(("meco", "sgd")), title(("kde", "own"))
    ('MECO, SGD-style', 'Kernel density (scikit-learn)')
    """
    return METHODS[row[0]].title + ("" if row[1] == "own" else f", {STYLES[row[1]]}")


def counted(n: int, what: str) -> str:
    """
    >>> counted(1, "data set"), counted(6, "data set")
    ('1 data set', '6 data sets')
    """
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def number(value: float, digits: int = 3) -> str:
    """
    >>> number(0.012345), number(1234567.0), number(12.0), number(float("nan"))
    ('0.0123', '1.23e+06', '12', '-')
    """
    return f"{value:.{digits}g}" if math.isfinite(value) else "-"
