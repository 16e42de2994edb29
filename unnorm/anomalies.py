"""The anomalies of a table: its rows ranked, the columns that make the first ones unusual, curves where labels are."""

import csv
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from unnorm.checkpoint import write_atomically
from unnorm.data.tables import Cells, Table, cells, finite, read, select
from unnorm.errors import DataError, InvalidValue
from unnorm.folders import read_json, sealed
from unnorm.metrics import Detection, detect, score_histogram
from unnorm.names import choose
from unnorm.sklearn import EnergyOutlierDetector, warn_of_constants

__all__ = ["FILES", "Found", "Input", "Measured", "claim", "hints", "labelled", "measured", "search", "words", "write"]

FILES = ("anomalies.csv", "anomalies.md", "anomalies.json", "scores.png", "curves.png")
SEAL = "anomalies.json"
OWN = ("rank", "row", "surprise", "log_density", "anomaly", "label", "because")  # columns of anomalies.csv
NAMED = 3  # columns for each of the first rows
LEAST_WORTH = 0.005  # of surprise: less would be printed as nothing
LEAST_OF_ROW = 0.02  # of the row's surprise: less explains nothing
LEAST_OF_FIRST = 0.1  # of what the first column is worth: less does not matter beside it
NO_COLUMN = "no single column"
MOST_AT_ONCE = 2**20  # numbers of rows that stand in for the first ones, a column changed in each
DEVICES = ("auto", "cpu", "cuda")
LARGEST_SEED = 2**32 - 1
LEAST_COUNTED = 10  # rows: fewer integers may follow each other by chance
INDEX_NAMES = ("Unnamed: 0", "__index_level_0__")  # that pandas gives to an index without a name


class Input(NamedTuple):
    """A table as it is searched.

    Attributes:
        table: the columns to fit.
        truth: the labels of all rows, NaN where there is none; empty where they are not asked for.
        cells: what stands in the file.
        advice: what to do about columns that are not numeric.
    """

    table: Table
    truth: np.ndarray
    cells: Cells
    advice: Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Found:
    """The rows of a table by how unusual they are.

    Attributes:
        columns: the names of those that vary.
        places: of the rows in the file, from 1, its header not counted.
        surprise: of each row; high is unusual (`EnergyOutlierDetector.score_samples` with its sign changed).
        log_density: of each row.
        threshold: the surprise above which a row is called an anomaly.
        labels: whether each row is one, where that is known.
        because: of the first rows, the columns that make them unusual and how much of the surprise each is worth.
        cells: what stands in the file.
        contamination: the share of rows that is called anomalies.
        dropped: how many rows were left out.
        seed: of everything random.
    """

    columns: tuple[str, ...]
    places: np.ndarray
    surprise: np.ndarray
    log_density: np.ndarray
    threshold: float
    labels: np.ndarray | None
    because: list[list[tuple[str, float]]]
    cells: Cells
    contamination: float
    dropped: int
    seed: int

    @property
    def order(self) -> np.ndarray:
        """The rows, the most unusual first."""
        return np.argsort(-self.surprise, kind="stable")

    @property
    def flagged(self) -> np.ndarray:
        return self.surprise > self.threshold

    @property
    def detection(self) -> Detection | None:
        if self.labels is None:
            return None
        return detect(-self.surprise[~self.labels], -self.surprise[self.labels])

    def where(self, place: int) -> str:
        """A row in words, with its line in a .csv file where that is another number."""
        row = self.places[place]
        line = row if self.cells.lines is None else self.cells.lines[row - 1]
        return f"row {row}" if line == row else f"row {row} (line {line})"

    @property
    def left_out(self) -> str:
        """How many rows were, in words; nothing where none was."""
        what = "NaN, infinity or no label" if self.labels is not None else "NaN or infinity"
        count = "1 row" if self.dropped == 1 else f"{self.dropped:,} rows"
        return f"{count} with {what} {'was' if self.dropped == 1 else 'were'} left out." if self.dropped else ""


def labelled(
    path: Path,
    key: str | None,
    columns: Sequence[str] | None,
    labels: str | None,
    *,
    exclude: Sequence[str] = (),
    drop: bool = False,
) -> Input:
    """The table without its labels, and these: a column, or an array of an .npz file; none where not asked for.

    With `drop` a row may have no label: it is NaN there.
    """
    table = read(path, key=key)
    apart = path.suffix.lower() == ".npz" and labels is not None and labels not in table.columns
    # All names are looked up in the whole table: a position is that in the file.
    own = select(table, [labels]) if labels is not None and not apart else None
    left_out = list(select(table, exclude).columns) if exclude else []
    chosen = list(select(table, columns).columns) if columns else []
    truth = np.empty(0)
    if labels is not None:
        if own is None:
            truth = read(path, key=labels).values[:, 0]
            if len(truth) != table.rows:
                raise DataError(f"'{labels}' has {len(truth)} labels for {table.rows} rows.")
        else:
            if own.columns[0] in chosen:
                raise InvalidValue(
                    f"Column '{own.columns[0]}' holds the labels, which are not fitted to: leave it out of --columns."
                )
            wanted = "Labels are 0 (usual) and 1 (an anomaly)."
            truth = np.asarray(finite(own, drop=drop, advice=lambda _: wanted).values[:, 0])
        _check_labels(labels, truth, drop)
    if both := [name for name in chosen if name in left_out]:
        raise InvalidValue(f"Column '{both[0]}' is in --columns and in --exclude: leave it out of one of them.")
    hidden = {*left_out, *(own.columns if own is not None else ())}
    rest = chosen or [name for name in table.columns if name not in hidden]
    if not rest:
        said = f"'{path.name}' has no column but its labels." if not exclude else "All columns are excluded."
        raise DataError(said)
    found = cells(path, key=key)
    if len(found.rows) != len(table.values):
        raise DataError(f"'{path.name}' changed while it was read.")
    return Input(select(table, rest), truth, found, _advice(table, rest, bool(chosen), left_out))


def _check_labels(name: str, truth: np.ndarray, drop: bool) -> None:
    wrong = np.flatnonzero(~(np.isin(truth, (0, 1)) | (np.isnan(truth) & drop)))
    if len(wrong):
        more = f", and {len(wrong) - 1:,} more are neither" if len(wrong) > 1 else ""
        first = f"Row {wrong[0] + 1} has {truth[wrong[0]]:g}"
        raise DataError(f"The labels '{name}' must be 0 (usual) and 1 (an anomaly). {first}{more}.")
    known = np.unique(truth[~np.isnan(truth)])
    if len(known) < 2:
        only = f"All are {known[0]:g}" if len(known) else "There is none"
        raise DataError(f"Of the labels '{name}' both 0 (usual) and 1 (an anomaly) must occur. {only}.")


def _given(name: str, table: Table) -> str:
    """A column as an option takes it; one whose name has a comma, by its place."""
    return str(table.columns.index(name)) if "," in name else name


def _advice(table: Table, used: Sequence[str], chosen: bool, left_out: Sequence[str]) -> Callable[[Sequence[str]], str]:
    def said(names: Sequence[str]) -> str:
        if len(names) == len(used):
            return "No numeric column is left."
        if chosen:
            return f"Leave {'it' if len(names) == 1 else ', '.join(names)} out of --columns."
        given = ",".join(_given(name, table) for name in (*left_out, *names))
        return f"Leave {'it' if len(names) == 1 else 'such columns'} out with --exclude {shlex.quote(given)}."

    return said


def hints(given: Input) -> list[str]:
    """What is probably a mistake: an index, or another column that counts the rows, among those to be fitted."""
    table, found = given.table, list[str]()
    if any(name in table.words for name in table.columns):
        return found  # `search` will refuse it, in one line
    for name, column in zip(table.columns, table.values.T, strict=True):
        if name in table.unnamed:
            why = "has no name in the file"
        elif name in INDEX_NAMES:
            why = "looks like the index of a data frame"
        elif len(column) >= LEAST_COUNTED and (np.diff(column.astype(np.float64)) == 1).all():
            why = "counts the rows"
        else:
            continue
        if len(table.columns) > 1:
            advice = given.advice([name])
            found.append(f"Column '{name}' {why}. If it only names the rows, {advice[0].lower()}{advice[1:]}")
    return found


def search(
    given: Input,
    *,
    contamination: float | None = None,
    drop: bool = False,
    top: int = 20,
    seed: int = 0,
    device: str = "cpu",
) -> Found:
    """Fit a detector to all rows and rank them; labels have no part in it but to set the default contamination."""
    choose("device", device, dict.fromkeys(DEVICES))
    if not 0 <= seed <= LARGEST_SEED:
        raise InvalidValue(f"The --seed must be an integer from 0 to 2^32 - 1. Got {seed}.")
    truth, table = given.truth, finite(given.table, drop=drop, advice=given.advice)
    kept = np.arange(len(table.values)) if table.kept is None else table.kept
    if len(truth):
        kept = kept[~np.isnan(truth[kept])]
        if len(np.unique(truth[kept])) < 2:
            raise DataError("Of the rows that are left none, or all, are labelled anomalies.")
    rows = np.asarray(table.values[kept], dtype=np.float64)
    labels = truth[kept].astype(bool) if len(truth) else None
    if contamination is None:
        contamination = 0.1 if labels is None else float(np.clip(labels.mean(), 1 / len(rows), 0.5))
    if not 0 < contamination <= 0.5:
        raise InvalidValue(f"The --contamination must be above 0 and at most 0.5. Got {contamination}.")
    detector = EnergyOutlierDetector(contamination=contamination, random_state=seed, device=device)
    names = np.array(table.columns)
    varying = (rows != rows[0]).any(0) if len(rows) else np.zeros(len(names), dtype=bool)
    if varying.any():
        warn_of_constants(varying, names)
        rows, names = rows[:, varying], names[varying]
    try:
        detector.fit(rows)
    except ValueError as problem:
        raise DataError(str(problem)) from problem
    surprise = -detector.score_samples(rows)
    first = np.argsort(-surprise, kind="stable")[:top]
    because = _because(detector, rows, first, names)
    log_density = detector.log_density(rows)
    return Found(
        columns=tuple(str(name) for name in names),
        places=kept + 1,
        surprise=surprise,
        log_density=log_density,
        threshold=float(-detector.offset_),
        labels=labels,
        because=because,
        cells=given.cells,
        contamination=contamination,
        dropped=len(table.values) - len(kept),
        seed=seed,
    )


def _because(
    detector: EnergyOutlierDetector, rows: np.ndarray, first: np.ndarray, columns: np.ndarray
) -> list[list[tuple[str, float]]]:
    """What is left of a row's surprise with one column at its median: the columns where it falls most.

    The gradient of a log density says what an infinitely small change does, and a far row often lies where that is
    flat or points past the rows. Setting a column to a usual value asks what a person asks. A row whose values are each
    usual, and only together are not, has no such column.
    """
    middle, width = np.median(rows, axis=0), rows.shape[1]
    found = []
    for place in first:
        falls = []
        for start in range(0, width, step := max(1, MOST_AT_ONCE // width)):
            changed = np.arange(start, min(start + step, width))
            others = np.repeat(rows[place][None], len(changed), axis=0)
            others[np.arange(len(changed)), changed] = middle[changed]
            falls.append(-detector.score_samples(others))
        before = -detector.score_samples(rows[place][None])
        worth = before - np.concatenate(falls)
        best = np.argsort(-worth)[:NAMED]
        least = max(LEAST_WORTH, LEAST_OF_ROW * float(before[0]), LEAST_OF_FIRST * float(worth[best[0]]))
        found.append([(str(columns[column]), float(worth[column])) for column in best if worth[column] >= least])
    return found


def write(
    found: Found, folder: Path, title: str, force: bool, asked: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Write the ranked rows, a page, a histogram and, with labels, curves; return the names of the files.

    `asked` is what the caller wants to find in anomalies.json again: the input's name, for one.
    """
    claim(folder, force)
    detection = found.detection
    facts = {"unnorm": "anomalies", **asked, "columns": list(found.columns), "seed": found.seed}
    facts |= {"contamination": found.contamination, "rows": len(found.surprise), "dropped": found.dropped}
    facts |= {"anomalies": int(found.flagged.sum()), "threshold": found.threshold}
    facts |= {"metrics": None if detection is None else detection._asdict()}
    # First the file by which a later search knows the others as ours.
    files = {SEAL: sealed(facts), "anomalies.csv": _csv(found).encode(), "anomalies.md": _page(found, title).encode()}
    for name, content in files.items():
        write_atomically(folder / name, content)
    named = {"called usual": ~found.flagged, "called anomalies": found.flagged}
    if found.labels is not None:
        named = {"labelled usual": ~found.labels, "labelled anomalies": found.labels}
    scores = {name: found.surprise[which] for name, which in named.items()}
    marks = {"called anomalies above": found.threshold}
    score_histogram(folder / "scores.png", scores, title, of="surprise", cut=0.0, counts=True, marks=marks)
    if found.labels is not None:
        _curves(found, folder / "curves.png")
    return [name for name in FILES if (folder / name).exists()]


def claim(folder: Path, force: bool, *, look: bool = False) -> None:
    """Only files of an earlier search are ever replaced; with `look` nothing is, and only the refusal is made."""
    try:
        there = [name for name in FILES if (folder / name).exists()]
        if there and not force:
            raise InvalidValue(f"'{folder / there[0]}' exists. Use --force to replace it, or another --out.")
        if there and (SEAL not in there or read_json(folder / SEAL, set()).get("unnorm") != "anomalies"):
            raise InvalidValue(
                f"'{folder / there[0]}' was not written by unnorm: it is not replaced. Use another --out."
            )
        if look:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in sorted(there, key=lambda name: name == SEAL):  # the seal last: what is left is still ours
            (folder / name).unlink()
    except OSError as problem:
        raise InvalidValue(f"The output folder '{folder}' cannot be written: {problem.strerror}.") from problem


def _csv(found: Found) -> str:
    """Our columns, then all of the file's, as they stand there; of two with one name the file's is input_NAME."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    own = [name for name in OWN if name != "label" or found.labels is not None]
    taken = {*own, *found.cells.columns}
    theirs = []
    for name in found.cells.columns:
        called = name
        while called in own or (called != name and called in taken):
            called = f"input_{called}"
        theirs.append(called)
    lines.writerow([*own, *theirs])
    for rank, place in enumerate(found.order, 1):
        row = [rank, found.places[place], f"{found.surprise[place]:.6g}", f"{found.log_density[place]:.6g}"]
        row.append(int(found.flagged[place]))
        if found.labels is not None:
            row.append(int(found.labels[place]))
        lines.writerow([*row, words(found, rank), *found.cells.texts(found.places[place] - 1)])
    return text.getvalue()


def words(found: Found, rank: int) -> str:
    """The columns that make the row of a rank unusual, each with its worth; nothing where no one looked."""
    if rank > len(found.because):
        return ""
    return "; ".join(f"{name} ({worth:.2f})" for name, worth in found.because[rank - 1]) or NO_COLUMN


class Measured(NamedTuple):
    """A number of a detection, in words, and what it would be by chance."""

    name: str
    meaning: str
    value: float
    error: float | None
    chance: float
    spread: float

    @property
    def text(self) -> str:
        return f"{self.value:.3f}" if self.error is None else f"{self.value:.3f} ± {self.error:.3f}"


def measured(detection: Detection) -> list[Measured]:
    """How well the ranks agree with the labels. The AUROC's chance is known, the others' is of 200 random orders."""
    named = {
        "auroc": ("AUROC", "how often an anomaly is ranked above a usual row"),
        "aupr_out": ("AUPRC", "the mean precision over the anomalies, read from the top of the ranks"),
    }
    for share in (80, 95):
        meaning = f"the share of anomalies missed by a threshold that lets {share}% of the usual rows pass"
        named[f"fpr{share}"] = (f"FPR{share}", meaning)
    chance = detection.chance | {"auroc": (0.5, detection.floor)}
    errors = {"auroc": detection.stderr}
    return [Measured(*named[name], getattr(detection, name), errors.get(name), *chance[name]) for name in named]


def _page(found: Found, title: str) -> str:
    lines = [f"# Anomalies of {title}", ""]
    first = int(found.order[0])
    said = found.where(first)
    counted = f": {said} is the most unusual" if "line" in said else ""
    lines.append(
        f"{len(found.surprise):,} rows of {len(found.columns)} columns; {int(found.flagged.sum()):,} are called "
        f"anomalies: their surprise is above {found.threshold:.3f}. The surprise is the mean, over three energies, of "
        "-log of the share of rows that are as unusual, with a little more for how far out a row is; half of these "
        f"rows have less than {np.median(found.surprise):.2f}. Rows are counted from 1, without "
        f"header and empty lines{counted}."
    )
    if found.left_out:
        lines += ["", found.left_out]
    detection = found.detection
    if detection is not None:
        lines += ["", "| metric | value | by chance |", "| --- | --- | --- |"]
        for number in measured(detection):
            lines.append(
                f"| {number.name}: {number.meaning} | {number.text} | {number.chance:.3f} ± {number.spread:.3f} |"
            )
        lines += ["", f"{detection.n_out:,} rows are labelled anomalies, {detection.n_in:,} are not.", ""]
        lines.append("![ROC and precision-recall curves](curves.png)")
    lines += ["", "![Histogram of scores](scores.png)", "", "## The most unusual rows", ""]
    lines += ["| rank | row | surprise | log density | because |", "| --- | --- | --- | --- | --- |"]
    for rank, place in enumerate(found.order[: len(found.because)], 1):
        row = (rank, found.places[place], f"{found.surprise[place]:.3f}", f"{found.log_density[place]:.3f}")
        lines.append("| " + " | ".join(map(str, (*row, words(found, rank).replace("|", "\\|")))) + " |")
    lines += [
        "",
        "Because: with that column alone set to its median, the row's surprise is so much less. Named are up to "
        f"{NAMED} columns, each worth at least {LEAST_OF_ROW:.0%} of the row's surprise and a tenth of the first one. "
        f'Where it says "{NO_COLUMN}", none is: the values are usual one by one, as between two clusters, or several '
        "are unusual and each is enough. The worths need not add up to the surprise.",
        "",
        "Log density: of one of the three energies, the learned one, in the columns' units; rows are not ranked by it.",
    ]
    return "\n".join(lines) + "\n"


def _curves(found: Found, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from sklearn.metrics import precision_recall_curve, roc_curve

    labels, detection = found.labels, found.detection
    assert labels is not None
    assert detection is not None
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    false, true, _ = roc_curve(labels, found.surprise)
    left.plot(false, true, color="#1b8ac4")
    left.plot([0, 1], [0, 1], ":", color="#7a808a")
    left.set(title=f"ROC: AUROC {detection.auroc:.3f}", xlabel="false positive rate", ylabel="true positive rate")
    precision, recall, _ = precision_recall_curve(labels, found.surprise)
    right.plot(recall, precision, color="#d1495b", drawstyle="steps-post")
    right.axhline(labels.mean(), ls=":", color="#7a808a")
    right.set(title=f"Precision and recall: AUPRC {detection.aupr_out:.3f}", xlabel="recall", ylabel="precision")
    right.set_ylim(0, 1.02)
    FigureCanvasAgg(figure).print_png(path)
