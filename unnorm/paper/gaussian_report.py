"""What the case study leaves for a reader: `table.md`, `results.jsonl`, and the paper's two figures."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unnorm.checkpoint import write_atomically
from unnorm.errors import InvalidValue
from unnorm.folders import without_nan
from unnorm.paper.gaussian_study import METHODS, PAPER_RATES, PAPER_SECONDS, Study
from unnorm.progress import Progress

__all__ = ["FILES", "Landscape", "landscape", "reproduce", "table", "wrote"]

FILES = ("results.jsonl", "table.md", "landscapes.png", "errors.png")
LINES = {  # colour, line style
    "nce-sgd": ("#8d99ae", "-"),
    "nce-ngd": ("#8d99ae", "--"),
    "ence-ngd": ("#b08968", "--"),
    "mcmc": ("#edae49", "-"),
    "meco": ("#d1495b", "-"),
    "meco-small": ("#d1495b", ":"),
    "meco-fitted": ("#9b5de5", "-"),
    "meco-fitted-start": ("#9b5de5", ":"),
    "bridges-linear": ("#1b6ca8", "--"),
    "bridges-quadratic": ("#1b6ca8", ":"),
    "bridges-gaussian": ("#1b6ca8", "-"),
    "mle": ("black", "-"),
}


class Landscape(NamedTuple):
    """The three losses along tau(theta) = (theta, its true log Z), and theirs at theta*."""

    nce: np.ndarray
    ence: np.ndarray
    mle: np.ndarray


def landscape(theta: np.ndarray, distance: float, log_z_error: float = 0.0) -> Landscape:
    """Exact expected losses (Figure 1) by the trapezoid rule, which for Gaussian integrands is exact to rounding.

    With g = theta x - theta^2/2 - log_z_error, the log-ratio of model and noise:
    NCE  E_data log(1 + e^-g) + E_noise log(1 + e^g);  eNCE  (E_data e^(-g/2) + E_noise e^(g/2)) / 2;
    MLE  -E_data log p~ + log Z, from p~ itself. All terms of the first two are positive: nothing cancels.

    Args:
        theta: any, within 0 and twice the distance, which the grid of x covers.
        log_z_error: added to the log Z of NCE and eNCE.

    >>> landscape(np.array([0.0]), 16.0).nce.round(4)               # nothing tells them apart: 2 log 2
    array([1.3863])
    """
    theta = np.asarray(theta, dtype=float)
    if not ((theta >= 0) & (theta <= 2 * distance)).all():
        raise InvalidValue(f"The theta of a landscape must be within 0 and 2 R = {2 * distance}.")
    x = np.linspace(-12, 2 * distance + 12, round(100 * (2 * distance + 24)) + 1)
    log_dx = math.log(x[1] - x[0])
    log_q = -(x**2) / 2 - 0.5 * math.log(2 * math.pi) + log_dx
    log_p = log_q + distance * x - distance**2 / 2
    g = theta[:, None] * x - theta[:, None] ** 2 / 2 - log_z_error
    nce = (np.exp(log_p) * np.logaddexp(0, -g) + np.exp(log_q) * np.logaddexp(0, g)).sum(-1)
    ence = (np.exp(log_p - g / 2) + np.exp(log_q + g / 2)).sum(-1) / 2
    log_model = theta[:, None] * x - x**2 / 2
    log_z = np.logaddexp.reduce(log_model + log_dx, axis=-1)
    return Landscape(nce, ence, log_z - (np.exp(log_p) * log_model).sum(-1))


def reproduce(out: Path, study: Study, *, force: bool = False, progress: bool | None = None) -> list[dict[str, Any]]:
    """Run the study and write its files into the folder `out`."""
    if out.exists() and not out.is_dir():
        raise InvalidValue(f"The output '{out}' is a file, not a folder.")
    if not force and (found := [name for name in FILES if (out / name).exists()]):
        raise InvalidValue(f"'{out / found[0]}' exists. Use --force to replace it, or another --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        records = []
        with Progress(study.size, enabled=progress, label="reproduce") as bar:
            for record in study.records():
                records.append(record)
                bar.show(len(records), {})
        lines = "".join(json.dumps(without_nan(record), allow_nan=False) + "\n" for record in records)
        write_atomically(out / "results.jsonl", lines.encode())
        write_atomically(out / "table.md", table(study, records).encode())
        _landscapes(out / "landscapes.png", max(study.distances))
        _errors(out / "errors.png", study, records)
    except OSError as problem:
        raise InvalidValue(f"The output folder '{out}' cannot be written: {problem.strerror}.") from problem
    return records


def wrote(folder: Path) -> bool:
    """Whether a folder holds this study."""
    return all((folder / name).exists() for name in FILES)


def table(study: Study, records: Sequence[Mapping[str, Any]]) -> str:
    """All numbers as Markdown."""
    errors = [record for record in records if record["kind"] == "error"]
    cells = {(record["method"], record["R"]): record for record in errors}
    head = ["method", *(f"R = {distance:g}" for distance in study.distances)]

    def by_method(value: str, rate: str) -> list[list[str]]:
        return [
            [title, *(_ratio(cells[name, distance], value, rate) for distance in study.distances)]
            for name, (title, _) in METHODS.items()
        ]

    mle, expected = cells["mle", study.distances[0]]["rmse"], 1 / math.sqrt(study.rows)
    bridges = ", ".join(f"{study.bridges(distance)}" for distance in study.distances)
    (bound,) = (record for record in records if record["kind"] == "floor")
    (clock,) = (record for record in records if record["kind"] == "time")
    exact = ", ".join(f"{ratio:.2f} with {k} bridges" for k, ratio in bound["exact"].items())
    return f"""# The mean of a 1-D Gaussian: the paper's case study

Data N(R, 1), noise N(0, 1). {study.seeds} seeds, each with {study.rows:,} rows of its own; {study.steps} steps with
batches of {study.batch:,} rows drawn with replacement (small: {study.small}) and as many noise draws; gamma 0.1,
beta 0.9; the learning rate falls along a cosine. Every theta begins at 0, the noise's mean, unless a line says else.

## Error: final RMSE of theta / standard error of the MLE, (learning rate)

{_grid(head, by_method("ratio", "lr"))}

The learning rate is tuned on the outcome, by method and R, as in the paper; where a method does not converge, the best
one is that which happens to stop nearest. The MLE's standard error is 1 / sqrt({study.rows:,}) = {expected:.4f}. On
these rows its error is {mle:.4f}. Such an RMSE is random: over {study.seeds} seeds that of normal errors scatters by
{1 / math.sqrt(2 * study.seeds):.0%}. All methods have the same rows.
Bridges: {bridges}; each has noise draws of its own: Telescope(noise, bridges, coupling="own"), and equal to it.
The noise fitted to the data has the MLE as its mean: a theta that begins there only shows that it stays.

The same with the paper's four learning rates ({", ".join(f"{rate:g}" for rate in PAPER_RATES)}) only:

{_grid(head, by_method("paper_ratio", "paper_lr"))}

## The warning of plain MECO: a claimed gap above log(n_noise / gamma)

{_grid(*_warnings(study, cells))}

How many of {study.seeds} seeds, and the median of the steps where it first happened (for the gap, also of theta then).
"gap > limit": it claims more than its draws can certify. "u behind": the batch's mean weight is e times the tracked u,
or more. "ran away": |theta - R| > 2 R, twice what it began with. "warned before": by the gap, by u, of those that ran.

{_summary(study, cells)}

There are two failures. A noise that is too far away makes the gap lie, at any learning rate; a tuned one hides this, as
it stops a theta that is on its way past R. A log Z that moves faster than u with gamma = 0.1 can follow makes large
steps diverge even where the noise is near; there the gap stays honest and silent, and the lag of u is the sign.

## Bridges at R = {bound["R"]:g}: heads and couplings, 16 bridges, in the MLE's standard error (learning rate)

{_grid(*_couplings(records))}

Linear heads have a floor at R = {bound["R"]:g}, whatever the steps: sqrt(1 + 2 R^2 / 9) = {bound["formula"]:.2f} in
expectation; the exact optimum on these rows is at {exact}.

## Running time of {study.steps} steps, one replica, the library's classes, as a ratio to NCE

{_grid(*_clock(clock["seconds"]))}
"""


def _ratio(record: Mapping[str, Any], value: str, rate: str) -> str:
    if "lr" not in record:
        return f"{record['ratio']:.3g}"
    return f"{record[value]:.3g} ({record[rate]:g})" if value in record else "-"


def _warnings(study: Study, cells: Mapping[tuple[str, float], Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name in ("meco", "meco-small"):
        for place, kind in enumerate(("tuned, ", "", "")):
            for distance in study.distances:
                record = cells[name, distance]
                found = record["warnings"][place]
                over = _when(found["over"], found["over_at"])
                if found["over"]:
                    over += f" at {found['over_theta']:.3g}"
                first = f"{found['over_first']}, {found['behind_first']} of {found['ran']}" if found["ran"] else "-"
                rows.append(
                    [
                        f"{record['batch']:,}",
                        f"{kind}{found['lr']:g}",
                        f"{distance:g}",
                        f"{distance**2 / 2:g}",
                        f"{record['limit']:.1f}",
                        f"{found['ratio']:.3g}",
                        over,
                        _when(found["behind"], found["behind_at"]),
                        _when(found["ran"], found["ran_at"]),
                        first,
                    ]
                )
    head = "batch; learning rate; R; true KL; limit; error / MLE's; gap > limit; u behind; ran away; warned before"
    return head.split("; "), rows


def _summary(study: Study, cells: Mapping[tuple[str, float], Mapping[str, Any]]) -> str:
    """In one line for near and one for far noise: of the runs that ran away, how many were warned before."""
    parts = []
    for words, far in (("R < 4", False), ("R >= 4", True)):
        found = [
            one
            for name in ("meco", "meco-small")
            for distance in study.distances
            if (distance >= 4) == far
            for one in cells[name, distance]["warnings"][1:]
        ]
        ran, over, behind, none = (
            sum(one[key] for one in found) for key in ("ran", "over_first", "behind_first", "unwarned")
        )
        parts.append(
            f"Of {ran} runs at {words} and a fixed rate that ran away, the gap warned {over} before, u {behind}, "
            f"neither {none}."
        )
    return "\n".join(parts)


def _when(count: int, step: float | None) -> str:
    return "-" if step is None else f"{count}, step {step:g}"


def _couplings(records: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    found = {(one["coupling"], one["heads"]): one for one in records if one["kind"] == "coupling"}
    meaning = {
        "own": "own: noise draws of each bridge",
        "shared": "shared by all waymarks (Telescope's default)",
        "independent": "independent for each waymark",
    }
    heads = list(dict.fromkeys(head for _, head in found))
    rows = [[text, *(_ratio(found[name, head], "ratio", "lr") for head in heads)] for name, text in meaning.items()]
    return ["coupling", *heads], rows


def _clock(seconds: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, spent in seconds.items():
        paper = PAPER_SECONDS.get(name)
        theirs = "-" if paper is None else f"{paper / PAPER_SECONDS['nce-sgd']:.2f} ({paper} s)"
        title = METHODS[name][0] + (" (16)" if name == "bridges-linear" else "")
        rows.append([title, f"{spent / seconds['nce-sgd']:.2f} ({1000 * spent:.0f} ms)", theirs])
    return ["method", "here", "paper, Table 1"], rows


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def _landscapes(path: Path, distance: float) -> None:
    """Figure 1: the losses as the paper shows them, and below, on a logarithmic axis, how far above the minimum."""
    theta = np.linspace(0, 2 * distance, 401)
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True)
    values, least = landscape(theta, distance), landscape(np.array([distance]), distance)
    names = (("NCE", "#8d99ae"), ("eNCE", "#b08968"), ("MLE, which MECO minimises", "#1b6ca8"))
    for column, ((name, colour), value, low) in enumerate(zip(names, values, least, strict=True)):
        excess = value - low[0]
        top, bottom = panels[:, column]
        top.plot(theta, excess, color=colour, lw=2)
        top.set(title=name, ylim=(-0.03, 1.0) if column < 2 else None)
        shown = (excess > 0) & (theta != distance)
        bottom.semilogy(theta[shown], excess[shown], color=colour, lw=2)
        bottom.set(xlabel="theta", ylim=(1e-16, 1e3))
        for axis in (top, bottom):
            axis.axvline(distance, color="black", lw=0.8, ls=":")
    panels[0, 0].set_ylabel("loss - its minimum")
    panels[1, 0].set_ylabel("the same, logarithmic")
    figure.suptitle(f"Expected losses along (theta, its log Z); data N({distance:g}, 1), noise N(0, 1); exact")
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def _errors(path: Path, study: Study, records: Iterable[Mapping[str, Any]]) -> None:
    """Figure 2: mean squared error by step, a panel for each distance."""
    columns = min(3, len(study.distances))
    lines = math.ceil(len(study.distances) / columns)
    figure = Figure(figsize=(4.3 * columns, 3.3 * lines + 1.1), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in panels[len(study.distances) :]:
        axis.axis("off")
    for axis, distance in zip(panels, study.distances, strict=False):
        floor = math.inf
        for record in records:
            if record["kind"] != "error" or record["R"] != distance:
                continue
            colour, style = LINES[record["method"]]
            width = 2.2 if record["method"] in ("bridges-gaussian", "meco") else 1.4
            axis.semilogy(record["mse"], color=colour, ls=style, lw=width, label=record["title"])
            floor = min(floor, np.nanmin(record["mse"]))
        axis.set(title=f"R = {distance:g}", xlabel="step", ylim=(floor / 3, 30 * distance**2))
    for axis in panels[::columns]:
        axis.set_ylabel("mean of (theta - theta*)^2")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4 if columns > 2 else 3, fontsize=8.5)
    figure.suptitle(f"Squared error over {study.seeds} seeds, each method at its best learning rate")
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)
