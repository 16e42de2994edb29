"""The synthetic study as numbers: from its JSON lines to chosen settings, cells, ties and ranks."""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from scipy import stats

from unnorm.errors import BrokenFile, InvalidValue
from unnorm.ledger import read_lines
from unnorm.names import unknown
from unnorm.paper.toy2d import DATA, METHODS, STYLES

__all__ = [
    "FILE",
    "METRICS",
    "Cell",
    "Column",
    "Place",
    "Results",
    "Row",
    "Setting",
    "Standing",
    "agreement",
    "choose",
    "column",
    "left_out",
    "number",
    "p_value",
    "ranks",
    "read",
    "standing",
    "summarise",
    "title",
]

FILE = "results.jsonl"
METRICS = {"mmd": "MMD", "frechet": "Frechet distance", "test_nll": "test NLL", "kl": "KL"}
ALWAYS = ("validation_nll", "test_nll", "kl")  # measured for every run: a null is a NaN or an infinity
NUMBERS = (*ALWAYS, "mmd", "frechet", "seconds", "steps", "lr", "n_steps")
TIE = 0.05
SEEDS_FOR_A_TEST = 3

Run: TypeAlias = Mapping[str, Any]
Row: TypeAlias = tuple[str, str]  # method, style
K = TypeVar("K", bound=Hashable)


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


@dataclass(frozen=True)
class Results:
    """The records of a study; of repeated ones the last.

    Attributes:
        starts: one for the study, one for each time it was resumed.
        floors: by data set.
        pictures: by method, style and data set; of the truth, the style is "".
    """

    starts: Sequence[Run]
    runs: Sequence[Run]
    timings: Sequence[Run]
    floors: Mapping[str, Run]
    pictures: Mapping[Place, Run]
    throughput: Sequence[Run]

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

    def at_floor(self, metric: str, cell: Cell, data: str) -> bool:
        """Whether the metric cannot tell the method from the truth: mean <= floor + 3 deviations of the floor."""
        floor = self.floors.get(data, {})
        mean, sd = floor.get(metric), floor.get(f"{metric}_sd")
        return not cell.failed and mean is not None and sd is not None and cell.mean <= mean + 3 * sd


def read(folder: Path) -> Results:
    """The study in `folder`.

    Raises:
        InvalidValue: no such file.
        BrokenFile: with the number of the line; a last line cut short, as a kill leaves it, is passed over.
    """
    path = Path(folder) / FILE
    if not path.exists():
        raise InvalidValue(f"The folder '{folder}' holds no study: there is no '{path}'.")
    found: dict[str, list[Run]] = defaultdict(list)
    for number, record in read_lines(path):
        if wrong := _wrong(record):
            raise BrokenFile(f"Line {number} of '{path}' is not of this study: {wrong}")
        found[record["kind"]].append(record)
    for kind in ("study", "run"):
        if not found[kind]:
            raise BrokenFile(f"'{path}' holds no line of kind '{kind}': there is nothing to report.")
    return Results(
        found["study"],
        _last(_last(found["run"], lambda run: run["key"]), lambda run: (_place(run), run["seed"], Setting.of(run))),
        _last(found["timing"], lambda one: one["key"]),
        {one["data"]: one for one in found["floor"]},
        {_place(one): one for one in found["picture"]},
        found["throughput"],
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
    """What is wrong with a line, in words."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "it has no 'kind'."
    kind = record["kind"]
    needed = {
        "study": ("seeds",),
        "run": ("key", "method", "style", "data", "seed", "status"),
        "timing": ("key", "method", "style"),
        "floor": ("data",),
        "picture": ("method", "data", "cells", "peak", "density"),
    }.get(kind, ())
    if absent := [name for name in needed if record.get(name) is None]:
        return f"a {kind} needs '{absent[0]}'."
    extra = ("truth",) if kind == "picture" else ()
    for name, known in (("method", (*METHODS, *extra)), ("style", tuple(STYLES)), ("data", DATA)):
        if name in needed and record[name] not in known:
            return unknown(name, str(record[name]), known)
    if kind == "picture" and record["method"] != "truth" and record.get("style") not in STYLES:
        return unknown("style", str(record.get("style")), STYLES)
    for name in ("seed", "seeds"):
        if name in needed and not isinstance(record[name], int):
            return f"its '{name}' is not a whole number."
    for name in NUMBERS if kind == "run" else ():
        value = record.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            return f"its '{name}' is not a number."
        if isinstance(value, float) and not math.isfinite(value):
            record[name] = None
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


class Standing(NamedTuple):
    """Where MECO stands by one metric among the paper's methods: data sets by outcome.

    Attributes:
        best: its mean is the least; `alone`, those of them where no other method ties.
        ties: another has the least mean, and the test cannot tell the two apart.
        losses: data set and who is best there.
        failed: a seed of its own diverged.
    """

    best: list[str]
    alone: list[str]
    ties: list[str]
    losses: list[tuple[str, Row]]
    failed: list[str]
    tested: bool

    @property
    def measured(self) -> int:
        return len(self.best) + len(self.ties) + len(self.losses) + len(self.failed)


def standing(results: Results, metric: str, style: str) -> Standing:
    """Of MECO in one style, over the data sets where it was measured."""
    rows, meco = results.rows(style, origins=["paper"]), ("meco", style)
    found = Standing([], [], [], [], [], all(results.column(metric, rows, data).tested for data in results.data))
    for data in results.data:
        cell, where = results.cell(metric, meco, data), results.column(metric, rows, data)
        if cell is None:
            continue
        if cell.failed:
            found.failed.append(data)
        elif where.best == meco:
            found.best.append(data)
            found.alone.extend([data] if not where.ties else [])
        elif meco in where.ties:
            found.ties.append(data)
        else:
            found.losses.append((data, where.best))
    return found


def title(row: Row) -> str:
    """
    >>> title(("meco", "sgd")), title(("kde", "own"))
    ('MECO, SGD-style', 'Kernel density (scikit-learn)')
    """
    return METHODS[row[0]].title + ("" if row[1] == "own" else f", {STYLES[row[1]]}")


def number(value: float, digits: int = 3) -> str:
    """
    >>> number(0.012345), number(1234567.0), number(12.0), number(float("nan"))
    ('0.0123', '1.23e+06', '12', '-')
    """
    return f"{value:.{digits}g}" if math.isfinite(value) else "-"


def summarise(results: Results) -> list[str]:
    """The study in plain words: how MECO stands, what is better, what diverged, what was left out."""
    styles = [style for style in ("sgd", "adam") if ("meco", style) in results.rows()]
    lines = [_headline(results, styles)]
    lines += [_stands(results, metric, style) for style in styles for metric in METRICS]
    lines += [_instead(results, style) for style in styles]
    lines += [_winner(results), *_diverged(results), *left_out(results)]
    return [line for line in lines if line]


def _headline(results: Results, styles: Sequence[str]) -> str:
    found = [standing(results, metric, style) for style in styles for metric in METRICS]
    if not found:
        return "MECO was not run."
    best, ties, losses, failed = (
        sum(len(getattr(one, name)) for one in found) for name in ("best", "ties", "losses", "failed")
    )
    return (
        f"Of {sum(one.measured for one in found)} comparisons with the paper's methods (style, metric, data set) MECO "
        f"is best in {best}, cannot be told from the best in {ties}, loses in {losses} and diverged in {failed}."
    )


def _stands(results: Results, metric: str, style: str) -> str:
    found = standing(results, metric, style)
    if not found.measured:
        return ""
    parts = []
    if found.best:
        alone = f", {len(found.alone)} of them without a tie" if found.tested else ""
        parts.append(f"is best on {len(found.best)} ({', '.join(found.best)}){alone}")
    if found.ties:
        parts.append(f"cannot be told from the best on {len(found.ties)} ({', '.join(found.ties)})")
    if found.losses:
        parts.append(
            f"loses on {len(found.losses)} ({'; '.join(_lost(results, metric, style, *one) for one in found.losses)})"
        )
    if found.failed:
        parts.append(f"diverged on {len(found.failed)} ({', '.join(found.failed)})")
    untested = "" if found.tested else " Fewer than 3 common seeds: no test is possible, so no tie is marked."
    return f"{STYLES[style]}, by {METRICS[metric]}: of {found.measured} data sets, MECO {', '.join(parts)}.{untested}"


def _lost(results: Results, metric: str, style: str, data: str, best: Row) -> str:
    cells = [results.cell(metric, row, data) for row in (("meco", style), best)]
    values = " against ".join(number(cell.mean) for cell in cells if cell is not None)
    return f"{data}, to {METHODS[best[0]].title}: {values}"


def _instead(results: Results, style: str) -> str:
    """By KL, as it is exact: MECO against each method a user would pick in its place."""
    parts = []
    for other in results.rows(origins=["instead"]):
        counts = {"better": 0, "tied": 0, "worse": 0}
        for data in results.data:
            pair = {row: results.cell("kl", row, data) for row in (("meco", style), other)}
            if None in pair.values():
                continue
            found = column(pair)
            if found.best is not None:
                counts["tied" if found.ties else "better" if found.best[0] == "meco" else "worse"] += 1
        if any(counts.values()):
            parts.append(f"{title(other)}: " + ", ".join(f"{word} on {count}" for word, count in counts.items()))
    if not parts:
        return ""
    return f"Against what a user would pick instead, by KL, MECO, {STYLES[style]}, is: {'; '.join(parts)}."


def _winner(results: Results) -> str:
    first: dict[Row, int] = defaultdict(int)
    for data in results.data:
        if (best := results.column("kl", results.rows(), data).best) is not None:
            first[best] += 1
    named = ", ".join(f"{title(row)} ({count})" for row, count in sorted(first.items(), key=lambda one: -one[1]))
    return f"Of all methods and styles the least KL has: {named}." if named else ""


def _diverged(results: Results) -> list[str]:
    lost = [run for run in results.runs if run["status"] != "ok"]
    lines = [f"{len(results.runs):,} runs, {len(lost):,} diverged."]
    rows: dict[Row, list[str]] = defaultdict(list)
    for place, runs in results.chosen.items():
        if count := sum(run["status"] != "ok" for run in runs):
            rows[place.method, place.style].append(f"{place.data} ({count} of {len(runs)})")
    if rows:
        named = "; ".join(f"{title(row)}: {', '.join(where)}" for row, where in rows.items())
        lines.append(f"No setting without a diverged seed: {named}.")
    elif lost:
        lines.append("At the chosen settings none did.")
    return lines


def _settings_planned(row: Row, plan: Mapping[str, Any]) -> int:
    """How many settings of a method the plan has.

    >>> _settings_planned(("mcmc", "sgd"), {"rates": {"sgd": [0.1, 0.01]}, "n_steps": [20, 50]})
    4
    """
    method, style = METHODS[row[0]], row[1]
    if method.tuned != "lr":
        return len(plan.get({"bandwidth": "bandwidths", "n_components": "components"}[method.tuned], ()))
    langevin = len(set(method.n_steps) & set(plan.get("n_steps", ()))) if method.n_steps else 1
    return len(plan.get("rates", {}).get(style, ())) * langevin


def left_out(results: Results) -> list[str]:
    """What the study's plan has and its lines do not: whole methods, data sets, single runs."""
    lines = []
    present = set(results.rows())
    if gone := [
        title((name, style)) for name, one in METHODS.items() for style in one.styles if (name, style) not in present
    ]:
        lines.append(f"Not run: {'; '.join(gone)}.")
    if gone := [name for name in DATA if name not in results.data]:
        lines.append(f"Data sets not run: {', '.join(gone)}.")
    count: dict[Row, int] = defaultdict(int)
    for run in results.runs:
        count[run["method"], run["style"]] += 1
    cells = len(results.data) * results.starts[-1]["seeds"]
    planned = {row: _settings_planned(row, results.starts[-1].get("settings") or {}) * cells for row in count}
    if absent := {row: planned[row] - count[row] for row in planned if planned[row] > count[row]}:
        named = "; ".join(f"{title(row)} ({missing:,})" for row, missing in absent.items())
        lines.append(f"{sum(absent.values()):,} of {sum(planned.values()):,} planned runs are absent: {named}.")
    for metric in METRICS:
        if places := [place for place in results.chosen if results.cell(metric, place[:2], place.data) is None]:
            named = "; ".join(dict.fromkeys(title(place[:2]) for place in places))
            lines.append(f"{METRICS[metric]} was not measured at the chosen setting in {len(places)} cells: {named}.")
    return lines or ["Nothing was left out: every method, data set, setting and seed of the plan has its run."]
