"""The anomalies of a table: its rows ranked, the columns that make the first ones unusual, curves where labels are."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unnorm.checkpoint import write_atomically
from unnorm.data.tables import Table, finite, read, select
from unnorm.errors import DataError, InvalidValue
from unnorm.folders import read_json, sealed
from unnorm.metrics import Detection, detect, score_histogram
from unnorm.sklearn import EnergyOutlierDetector
from unnorm.tabular.columns import Columns

__all__ = ["FILES", "Found", "claim", "labelled", "search", "write"]

FILES = ("anomalies.csv", "anomalies.md", "anomalies.json", "scores.png", "curves.png")
NAMED = 3  # columns for each of the first rows
LEAST_WORTH = 0.005  # of surprise: less would be printed as nothing
MOST_AT_ONCE = 2**20  # numbers of rows that stand in for the first ones, a column changed in each


@dataclass(frozen=True)
class Found:
    """The rows of a table by how unusual they are.

    Attributes:
        columns: the names of those that vary.
        values: of these, (rows, columns).
        places: of the rows in the file, from 1.
        surprise: of each row; high is unusual (`EnergyOutlierDetector.score_samples` with its sign changed).
        log_density: of each row.
        threshold: the surprise above which a row is called an anomaly.
        labels: whether each row is one, where that is known.
        because: of the first rows, the columns that make them unusual and how much of the surprise each is worth.
    """

    columns: tuple[str, ...]
    values: np.ndarray
    places: np.ndarray
    surprise: np.ndarray
    log_density: np.ndarray
    threshold: float
    labels: np.ndarray | None
    because: list[list[tuple[str, float]]]

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


def labelled(
    path: Path,
    key: str | None,
    columns: Sequence[str] | None,
    labels: str | None,
    *,
    exclude: Sequence[str] = (),
    drop: bool = False,
) -> tuple[Table, np.ndarray]:
    """The table without its labels, and these: a column, or an array of an .npz file; none where not asked for.

    With `drop` a row may have no label: it is NaN there.
    """
    table = read(path, key=key)
    truth = np.empty(0)
    if labels is not None:
        if path.suffix.lower() == ".npz" and labels not in table.columns:
            truth = read(path, key=labels).values[:, 0]
            if len(truth) != table.rows:
                raise DataError(f"'{labels}' has {len(truth)} labels for {table.rows} rows.")
        else:
            own = select(table, [labels])
            if own.columns[0] in own.words:
                raise DataError(f"{own.words[own.columns[0]]} Labels are 0 (usual) and 1 (an anomaly).")
            truth = np.asarray(finite(own, drop=drop).values[:, 0])
            table = _without(table, [own.columns[0]], f"'{path.name}' has no column but its labels.")
        known = truth[~np.isnan(truth)] if drop else truth
        if not np.isin(known, (0, 1)).all() or len(np.unique(known)) < 2:
            raise DataError(f"The labels '{labels}' must be 0 (usual) and 1 (an anomaly), and both must occur.")
    if exclude:
        table = _without(table, select(table, exclude).columns, "All columns are excluded.")
    return (select(table, columns) if columns else table), truth


def _without(table: Table, names: Sequence[str], empty: str) -> Table:
    rest = [name for name in table.columns if name not in names]
    if not rest:
        raise DataError(empty)
    return select(table, rest)


def search(
    table: Table,
    truth: np.ndarray,
    *,
    contamination: float | None = None,
    drop: bool = False,
    top: int = 20,
    seed: int = 0,
    device: str = "cpu",
) -> Found:
    """Fit a detector to all rows and rank them; labels have no part in it but to set the default contamination."""
    table = finite(table, drop=drop)
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
    found = Columns.of(rows) if len(rows) > 1 else None
    names = np.array(table.columns)
    if found is not None and found.kept.any():
        found.warn(names)
        rows, names = found.varying(rows), names[found.kept]
    try:
        detector.fit(rows)
    except ValueError as problem:
        raise DataError(str(problem)) from problem
    surprise = -detector.score_samples(rows)
    first = np.argsort(-surprise, kind="stable")[:top]
    because = _because(detector, rows, first, names)
    log_density = detector.log_density(rows)
    return Found(tuple(names), rows, kept + 1, surprise, log_density, -detector.offset_, labels, because)


def _because(
    detector: EnergyOutlierDetector, rows: np.ndarray, first: np.ndarray, columns: np.ndarray
) -> list[list[tuple[str, float]]]:
    """What is left of a row's surprise with one column at its median: the columns where it falls most.

    The gradient of a log density says what an infinitely small change does, and a far row often lies where that is
    flat or points past the rows. Setting a column to a usual value asks what a person asks.
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
        found.append([(str(columns[column]), float(worth[column])) for column in best if worth[column] > LEAST_WORTH])
    return found


def write(found: Found, folder: Path, title: str, force: bool) -> list[str]:
    """Write the ranked rows, a page, a histogram and, with labels, curves; return the names of the files."""
    claim(folder, force)
    files = {"anomalies.csv": _csv(found).encode(), "anomalies.md": _page(found, title).encode()}
    detection = found.detection
    facts = {"unnorm": "anomalies", "rows": len(found.surprise), "anomalies": int(found.flagged.sum())}
    facts |= {"threshold": found.threshold, "metrics": None if detection is None else detection._asdict()}
    files["anomalies.json"] = sealed(facts)
    for name, content in files.items():
        write_atomically(folder / name, content)
    named = {"called usual": ~found.flagged, "called anomalies": found.flagged}
    if found.labels is not None:
        named = {"usual": ~found.labels, "anomalies": found.labels}
    scores = {name: found.surprise[which] for name, which in named.items()}
    score_histogram(folder / "scores.png", scores, title, of="surprise")
    if found.labels is not None:
        _curves(found, folder / "curves.png")
    return [name for name in FILES if (folder / name).exists()]


def claim(folder: Path, force: bool, *, look: bool = False) -> None:
    """Only files of an earlier search are ever replaced; with `look` nothing is, and only the refusal is made."""
    try:
        there = [name for name in FILES if (folder / name).exists()]
        if there and not force:
            raise InvalidValue(f"'{folder / there[0]}' exists. Use --force to replace it, or another --out.")
        if there and "unnorm" not in read_json(folder / "anomalies.json", set()):
            raise InvalidValue(f"'{folder / there[0]}' was not written by unnorm: it is not replaced.")
        if look:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in there:
            (folder / name).unlink()
    except OSError as problem:
        raise InvalidValue(f"The output folder '{folder}' cannot be written: {problem.strerror}.") from problem


def _csv(found: Found) -> str:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    head = ["rank", "row", "surprise", "log_density", "anomaly"]
    lines.writerow([*head, *(["label"] if found.labels is not None else []), "because", *found.columns])
    for rank, place in enumerate(found.order, 1):
        cells = [rank, found.places[place], f"{found.surprise[place]:.6g}", f"{found.log_density[place]:.6g}"]
        cells.append(int(found.flagged[place]))
        if found.labels is not None:
            cells.append(int(found.labels[place]))
        lines.writerow([*cells, _words(found, rank), *(f"{value:.12g}" for value in found.values[place])])
    return text.getvalue()


def _words(found: Found, rank: int) -> str:
    named = found.because[rank - 1] if rank <= len(found.because) else []
    return "; ".join(f"{name} ({worth:.2f})" for name, worth in named)


def _page(found: Found, title: str) -> str:
    lines = [f"# Anomalies of {title}", ""]
    lines.append(
        f"{len(found.surprise):,} rows of {len(found.columns)} columns; {int(found.flagged.sum()):,} are called "
        f"anomalies: their surprise is above {found.threshold:.3f}. The surprise is the mean, over three energies, of "
        "-log of the share of rows that are as unusual, with a little more for how far out a row is; of a usual row it "
        "is about 1."
    )
    detection = found.detection
    if detection is not None:
        lines += ["", "| metric | value | by chance |", "| --- | --- | --- |"]
        chance = detection.chance
        named = {"auroc": "AUROC", "aupr_out": "AUPRC"}
        named |= {
            f"fpr{share}": f"anomalies missed where {share}% of the usual rows are called usual" for share in (80, 95)
        }
        for name, words in named.items():
            mean, spread = chance.get(name, (0.5, detection.floor))
            lines.append(f"| {words} | {getattr(detection, name):.3f} | {mean:.3f} ± {spread:.3f} |")
        lines += ["", f"{detection.n_out:,} rows are labelled anomalies, {detection.n_in:,} are not.", ""]
        lines.append("![ROC and precision-recall curves](curves.png)")
    lines += ["", "![Histogram of scores](scores.png)", "", "## The most unusual rows", ""]
    lines += ["| rank | row | surprise | log density | because |", "| --- | --- | --- | --- | --- |"]
    for rank, place in enumerate(found.order[: len(found.because)], 1):
        cells = (rank, found.places[place], f"{found.surprise[place]:.3f}", f"{found.log_density[place]:.3f}")
        words = _words(found, rank).replace("|", "\\|")
        lines.append("| " + " | ".join(map(str, (*cells, words))) + " |")
    lines += ["", "Because: what is left of the surprise when that column alone is set to its median is so much less."]
    lines.append(
        "Log density: of one of the three energies, the learned one, in the columns' units; rows are not ranked by it."
    )
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
