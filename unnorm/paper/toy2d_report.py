"""What the synthetic study leaves for a reader, from its JSON lines alone: `report.md`, `report.html`, figures."""

import base64
import html
import io
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unnorm.checkpoint import write_atomically
from unnorm.errors import BrokenFile
from unnorm.paper.toy2d import METHODS, STYLES, TABLES, Table
from unnorm.paper.toy2d_results import (
    METRICS,
    Cell,
    Column,
    Place,
    Results,
    Row,
    Setting,
    agreement,
    number,
    ranks,
    read,
    standing,
    summarise,
    title,
)

__all__ = ["write"]

INK = "#7a808a"  # readable on white and on near black: figures have no background of their own
STYLE: dict[Any, Any] = {
    **{f"{name}color": INK for name in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.")},
    "legend.frameon": False,
}
COLOURS = {"sgd": "#1b8ac4", "adam": "#d1495b", "own": "#3a9d5d"}
DEFAULT_GAMMA, DEFAULT_BETA = 0.1, 0.9
LEGEND = (
    "Mean ± standard deviation over seeds. Bold: the least mean of its column. ≈: a paired t-test over the seeds "
    "cannot tell it from the best (p > 0.05). °: at the noise floor, within 3 deviations of what two samples of the "
    "truth give; methods there cannot be told apart by this metric. A method with a diverged seed ranks last."
)


class Entry(NamedTuple):
    """A cell of a table as it is shown; `key` is what it sorts by, None comes last."""

    text: str
    key: float | str | None = None
    best: bool = False
    note: str = ""
    note_best: bool = False
    words: bool = False


class Heading(NamedTuple):
    level: int
    text: str


class Lines(NamedTuple):
    """Sentences; more than one is a list."""

    lines: Sequence[str]


class Grid(NamedTuple):
    """A table; its first column names the rows, its foot stays below when it is sorted."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    foot: Sequence[Sequence[Entry]] = ()


class Picture(NamedTuple):
    """A figure: the file it is for Markdown, and its content."""

    file: str
    alt: str
    content: bytes


Block: TypeAlias = Heading | Lines | Grid | Picture


def write(folder: Path) -> list[Path]:
    """Write the report of the study in `folder` beside its `results.jsonl`; return the files written.

    Raises:
        InvalidValue: there is no `results.jsonl`.
        BrokenFile: it is not the record of a study, or a line of it is broken.
    """
    folder = Path(folder)
    blocks = [block for block in _blocks(read(folder)) if not isinstance(block, Grid) or block.rows]
    files = {one.file: one.content for one in blocks if isinstance(one, Picture)}
    files |= {"report.md": _markdown(blocks).encode(), "report.html": _page(blocks).encode()}
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def _blocks(results: Results) -> list[Block]:
    study = results.starts[-1]
    return [
        Heading(1, f"The synthetic study, size {study.get('size', 'unknown')}"),
        Heading(2, "Summary"),
        Lines(summarise(results)),
        _standings(results),
        Heading(2, "The tables of the paper"),
        Lines([LEGEND]),
        Lines(
            [
                "Below our value stands the paper's. The paper names no kernel and no unit of its MMD. Ours is the "
                "unbiased MMD squared with a Gaussian kernel and the median bandwidth; it can be negative. So absolute "
                "values cannot be matched, orders can: 'Rank correlation' is Spearman's, of our order with the "
                "paper's; its mean over the sets stands at the end."
            ]
        ),
        *(_paper_table(results, table) for table in TABLES.values()),
        Heading(2, "Likelihood, which the paper could not give"),
        Lines(
            [
                "The truth of each set has a known density, so each model has a known KL(truth, model), in nats. "
                "The test NLL of a perfect model is the entropy of the truth."
            ]
        ),
        *(_likelihood(results, metric, style) for style in ("sgd", "adam") for metric in ("test_nll", "kl")),
        Heading(2, "Beyond the paper: all methods"),
        Lines(["Every method in every style, compared with all others. " + LEGEND]),
        *(_all_methods(results, data) for data in results.data),
        Heading(2, "Average ranks"),
        *_rank_tables(results),
        Heading(2, "Figures"),
        *_figures(results),
        Heading(2, "Chosen settings and training time"),
        *_settings(results),
        Heading(2, "How it was done"),
        *_provenance(results),
    ]


def _standings(results: Results) -> Grid:
    rows = []
    for style in ("sgd", "adam"):
        for metric in METRICS:
            found = standing(results, metric, style)
            counts = [len(found.best), len(found.alone), len(found.ties), len(found.losses), len(found.failed)]
            entries = [Entry(str(count), count) for count in counts]
            if not found.tested:
                entries[1:3] = [Entry("no test"), Entry("no test")]
            beaten = ", ".join(dict.fromkeys(METHODS[row[0]].title for _, row in found.losses)) or "-"
            rows.append([_label(f"{STYLES[style]}, {METRICS[metric]}"), *entries, _label(beaten)])
    head = ["MECO by style and metric", "best", "of these without a tie", "ties", "loses", "diverged", "loses to"]
    return Grid("Data sets by how MECO does among the paper's methods", head, rows)


def _label(text: str) -> Entry:
    return Entry(text, text, words=True)


def _value(mean: float, sd: float, digits: int = 6) -> str:
    """Mean and deviation with two digits of the deviation."""
    if not math.isfinite(sd):
        return number(mean, 4)
    if max(abs(mean), sd) >= 1e5:
        return f"{mean:.3g} ± {sd:.2g}"
    places = 4 if sd == 0 else min(digits, max(0, 1 - math.floor(math.log10(sd))))
    return f"{mean:.{places}f} ± {sd:.{places}f}"


def _entry(results: Results, metric: str, row: Row, data: str, where: Column) -> Entry:
    """A cell with its marks in the column `where` it stands."""
    cell = results.cell(metric, row, data)
    if cell is None:
        return Entry("-")
    text = _value(cell.mean, cell.sd) if cell.values else ""
    if cell.failed:
        diverged = sum(run["status"] != "ok" for run in results.chosen[Place(*row, data)])
        lost = f"{cell.failed} of {cell.n} {'diverged' if cell.failed == diverged else 'not finite'}"
        return Entry(f"{text} ({lost})" if text else lost)
    marks = ("≈" if row in where.ties else "") + ("°" if results.at_floor(metric, cell, data) else "")
    n = "" if cell.n == results.starts[-1]["seeds"] else f"(n = {cell.n})"
    return Entry(" ".join(part for part in (text, n, marks) if part), cell.mean, row == where.best)


def _columns(results: Results, metric: str, rows: Sequence[Row]) -> dict[str, Column]:
    return {data: results.column(metric, rows, data) for data in results.data}


def _caption(results: Results, text: str, columns: Iterable[Column]) -> str:
    tested = all(one.tested for one in columns)
    test = "" if tested else "; too few common seeds for a test, so no tie is marked"
    return f"{text} (n = {results.starts[-1]['seeds']} seeds{test})"


def _mean_rank(row: Row, columns: Mapping[str, Column]) -> Entry:
    found = [one.ranks[row] for one in columns.values() if row in one.ranks]
    if not found:
        return Entry("-")
    some = "" if len(found) == len(columns) else f" ({len(found)} of {len(columns)} sets)"
    return Entry(f"{np.mean(found):.2f}{some}", float(np.mean(found)))


def _paper_table(results: Results, table: Table) -> Grid:
    rows = [(name, table.style) for name in table.paper]
    columns = _columns(results, table.metric, rows)
    theirs = {data: {row: table.paper[row[0]][data][0] for row in rows} for data in results.data}
    lines = []
    for row in rows:
        line = [_label(METHODS[row[0]].title)]
        for data, where in columns.items():
            mean, sd = table.paper[row[0]][data]
            note = Entry("", note=f"paper {mean:.3f} ± {sd:.3f}", note_best=mean == min(theirs[data].values()))
            line.append(
                _entry(results, table.metric, row, data, where)._replace(note=note.note, note_best=note.note_best)
            )
        paper = np.mean([_paper_ranks(theirs[data])[row] for data in results.data])
        lines.append([*line, _mean_rank(row, columns)._replace(note=f"paper {paper:.2f}")])
    orders = [
        agreement({row: results.cell(table.metric, row, data) for row in rows}, theirs[data]) for data in results.data
    ]
    known = [one for one in orders if math.isfinite(one)]
    shown = [*orders, float(np.mean(known)) if known else math.nan]
    foot = [[_label("Rank correlation"), *(Entry(_signed(one)) for one in shown)]]
    foot.append([*_floor(results, table.metric), Entry("")])
    head = ["Method", *results.data, "Mean rank"]
    return Grid(_caption(results, table.title, columns.values()), head, lines, foot)


def _paper_ranks(means: Mapping[Row, float]) -> dict[Row, float]:
    return ranks({row: Cell({0: mean}) for row, mean in means.items()})


def _signed(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "-"


def _floor(results: Results, metric: str) -> list[Entry]:
    """What the truth itself would get."""
    if metric in ("mmd", "frechet"):
        found = [results.floors.get(data, {}) for data in results.data]
        values = [_known(one.get(metric), one.get(f"{metric}_sd")) for one in found]
        return [_label("Noise floor"), *map(Entry, values)]
    values = ["0" if metric == "kl" else _known(results.floors.get(data, {}).get("entropy")) for data in results.data]
    return [_label("The truth"), *map(Entry, values)]


def _known(mean: float | None, sd: float | None = None) -> str:
    return "-" if mean is None else _value(mean, math.nan if sd is None else sd)


def _likelihood(results: Results, metric: str, style: str) -> Grid:
    rows = [*results.rows(style), *results.rows("own")]
    columns = _columns(results, metric, rows)
    lines = [
        [
            _label(METHODS[row[0]].title),
            *(_entry(results, metric, row, data, where) for data, where in columns.items()),
            _mean_rank(row, columns),
        ]
        for row in rows
    ]
    name = "Test NLL" if metric == "test_nll" else "KL(truth, model)"
    caption = _caption(results, f"{name} in nats, {STYLES[style]}, all methods", columns.values())
    return Grid(caption, ["Method", *results.data, "Mean rank"], lines, [[*_floor(results, metric), Entry("")]])


def _all_methods(results: Results, data: str) -> Grid:
    rows = results.rows()
    columns = {metric: results.column(metric, rows, data) for metric in METRICS}
    lines = [
        [_label(title(row)), *(_entry(results, metric, row, data, where) for metric, where in columns.items())]
        for row in rows
    ]
    place = 1 + results.data.index(data)
    foot = [_label("The truth"), *(_floor(results, metric)[place] for metric in METRICS)]
    return Grid(_caption(results, data, columns.values()), ["Method", *METRICS.values()], lines, [foot])


def _rank_tables(results: Results) -> list[Block]:
    styles = [style for style in ("sgd", "adam") if results.rows(style, origins=["paper"])]
    lines = {row[0]: [_label(METHODS[row[0]].title)] for row in results.rows(*styles, origins=["paper"])}
    theirs = {(table.metric, table.style): table for name, table in TABLES.items() if "-" in name}
    for metric in METRICS:
        own = {style: _columns(results, metric, results.rows(style, origins=["paper"])) for style in styles}
        for name, line in lines.items():
            found = [_mean_rank((name, style), own[style]) for style in styles]
            for style, entry in zip(styles, found, strict=True):
                note = (
                    f"paper {_paper_mean_rank(results, theirs[metric, style], name):.2f}"
                    if (metric, style) in theirs
                    else ""
                )
                line.append(entry._replace(note=note))
            keys = [float(one.key) for one in found if one.key is not None]
            line.append(Entry(f"{np.mean(keys):.2f}", float(np.mean(keys))) if keys else Entry("-"))
    short = {"sgd": "SGD", "adam": "Adam"}
    names = [
        f"{metric}, {word}" for metric in METRICS.values() for word in [*(short[one] for one in styles), "overall"]
    ]
    rows = results.rows()
    everyone = {metric: _columns(results, metric, rows) for metric in METRICS}
    wide = [[_label(title(row)), *(_mean_rank(row, columns) for columns in everyone.values())] for row in rows]
    return [
        Lines(["1 is best. Ranks are averaged over the data sets; overall is the mean over the styles."]),
        Grid("Among the paper's methods, within a style", ["Method", *names], list(lines.values())),
        Grid("Among all methods and styles", ["Method", *METRICS.values()], wide),
    ]


def _paper_mean_rank(results: Results, table: Table, name: str) -> float:
    found = [
        _paper_ranks({(one, table.style): cells[data][0] for one, cells in table.paper.items()})
        for data in results.data
    ]
    return float(np.mean([one[name, table.style] for one in found]))


def _settings(results: Results) -> list[Block]:
    tried: dict[Place, set[float]] = {}
    for run in results.runs:
        if run.get("lr") is not None:
            tried.setdefault(Place(run["method"], run["style"], run["data"]), set()).add(run["lr"])
    lines, edges, total = [], 0, 0
    for row in results.rows():
        line = [_label(title(row))]
        for data in results.data:
            runs = results.chosen.get(Place(*row, data))
            if runs is None:
                line.append(Entry("-"))
                continue
            rates = tried.get(Place(*row, data), set())
            edge = len(rates) > 1 and runs[0].get("lr") in (min(rates), max(rates))
            total, edges = total + (len(rates) > 1), edges + edge
            line.append(_setting(runs, edge))
        lines.append(line)
    budget = results.starts[-1].get("settings", {}).get("seconds")
    time = f" of {budget} s" if budget is not None else ""
    return [
        Lines(
            [
                f"Methods with an optimizer have an equal training time{time}: a slower step means fewer. "
                "The setting is the one with the least mean validation NLL over the seeds; the test set has no say.",
                f"^: the rate is the least or the largest that was tried: {edges} of {total}.",
            ]
        ),
        Grid(
            "Chosen learning rate (Langevin steps) or other setting; below it, steps and seconds of a run",
            ["Method", *results.data],
            lines,
        ),
        *_timings(results),
    ]


def _setting(runs: Sequence[Mapping[str, Any]], edge: bool) -> Entry:
    lr, n_steps, _ = Setting.of(runs[0])
    words = [f"{lr:g}{' ^' if edge else ''}"] if lr is not None else []
    words += [f"({n_steps} Langevin)"] if n_steps is not None else []
    words += [f"{name} {value}" for name, value in (runs[0].get("setting") or {}).items()]
    notes = []
    for name, unit in (("steps", "steps"), ("seconds", "s")):
        values = [run[name] for run in runs if run.get(name) is not None]
        notes += [f"{np.mean(values):{',.0f' if name == 'steps' else '.3g'}} {unit}"] if values else []
    text = " ".join(words) or "-"
    return Entry(text, text if lr is None else lr, note=", ".join(notes))


def _timings(results: Results) -> list[Block]:
    lines = []
    for one in results.timings:
        alone, stacked = one.get("single_seconds"), one.get("step_seconds")
        ratio = alone / stacked if alone and stacked else None
        values = (one.get("n_steps"), one.get("replicas"), one.get("steps"))
        times = (stacked and 1e6 * stacked, alone and 1e6 * alone, ratio)
        entries = [Entry("-" if value is None else f"{value:,}", value) for value in values]
        entries += [
            Entry("-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", value)
            for value in times
        ]
        lines.append([_label(title((one["method"], one["style"]))), *entries])
    head = [
        "Method",
        "Langevin steps",
        "replicas",
        "steps in the time",
        "µs a step, stacked",
        "µs a step, alone",
        "ratio",
    ]
    return [Grid("Step times", head, lines)] if lines else []


def _provenance(results: Results) -> list[Block]:
    study, settings = results.starts[-1], results.starts[-1].get("settings", {})
    names = ("command", "size", "seed", "seeds", "version", "commit", "hardware", "python", "torch")
    facts = {name: study.get(name) for name in names}
    facts["started"] = ", then resumed ".join(str(one.get("started")) for one in results.starts)
    facts["runs"] = f"{len(results.runs):,}"
    facts["seconds of all runs"] = f"{sum(run.get('seconds') or 0 for run in results.runs):,.1f}"
    for one in results.throughput:
        facts[f"throughput, {one.get('replicas')} replicas on {one.get('device')}"] = (
            f"{one.get('stacked_per_second')} steps a second stacked, {one.get('single_per_second')} one by one, "
            f"ratio {one.get('ratio')}"
        )
    facts |= {f"setting: {name}": value for name, value in settings.items()}
    points = f"{settings['points']:,} points" if isinstance(settings.get("points"), int) else "samples"
    return [
        Grid("The study", ["What", "Value"], [[_label(name), _label(_plain(value))] for name, value in facts.items()]),
        Lines(
            [
                f"MMD: unbiased, squared, Gaussian kernel, median bandwidth, between {points} of the model and of the "
                "truth.",
                "Frechet distance: squared, of the Gaussians with the means and covariances of the two samples.",
                "Test NLL: mean of -log p over the test points, in nats, with log Z by a grid over the plane.",
                "KL(truth, model): by the same grid, in nats.",
                "Noise floor: the same metric between independent samples of the truth, mean and deviation over pairs.",
                "Diverged: a run whose numbers became NaN or infinite. It counts as a loss.",
            ]
        ),
    ]


def _plain(value: Any) -> str:
    return "unknown" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _figures(results: Results) -> list[Block]:
    with rc_context(STYLE):
        found = [_densities(results, style) for style in ("sgd", "adam")]
        return [one for one in (*found, _kl_figure(results), _sensitivity(results)) if one is not None]


def _save(figure: Figure, file: str, alt: str, dpi: int = 125) -> Picture:
    FigureCanvasAgg(figure)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi, transparent=True)
    return Picture(file, alt, content.getvalue())


def _densities(results: Results, style: str) -> Picture | None:
    """Figure 3: a row for each method, a column for each data set, on the scale of the truth of its column."""
    rows = [*results.rows(style), *results.rows("own")]
    shown = [
        ("truth", ""),
        *(row for row in rows if any(Place(*row, data) in results.pictures for data in results.data)),
    ]
    if len(shown) == 1:
        return None
    size, gap = 96, 6
    canvas = np.zeros((len(shown) * (size + gap), len(results.data) * (size + gap), 4), dtype=np.uint8)
    absent = []
    for column, data in enumerate(results.data):
        truth = results.pictures.get(Place("truth", "", data))
        for line, row in enumerate(shown):
            if (record := results.pictures.get(Place(*row, data))) is None:
                absent.append((column, line))
                continue
            image = _density(record, size)
            image = np.clip(image / ((truth or record)["peak"] or 1), 0, 1)
            top, left = line * (size + gap), column * (size + gap)
            canvas[top : top + size, left : left + size] = colormaps["viridis"](image.T[::-1], bytes=True)
    width, height = canvas.shape[1] / 100, canvas.shape[0] / 100
    figure = Figure(figsize=(width + 2.3, height + 0.4))
    axis = figure.add_axes((2.3 / (width + 2.3), 0, width / (width + 2.3), height / (height + 0.4)))
    axis.imshow(canvas, interpolation="nearest", aspect="auto")
    names = ["Truth", *(METHODS[row[0]].title for row in shown[1:])]
    axis.set_xticks(np.arange(len(results.data)) * (size + gap) + size / 2, results.data)
    axis.set_yticks(np.arange(len(shown)) * (size + gap) + size / 2, names)
    axis.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    for column, line in absent:
        axis.text((size + gap) * column + size / 2, (size + gap) * line + size / 2, "none", ha="center", va="center")
    for spine in axis.spines.values():
        spine.set_visible(False)
    alt = (
        f"Densities, {STYLES[style]}, first seed: the truth above, below it a row for each method, a column for each "
        f"data set ({', '.join(results.data)}). Each column has the colour scale of its truth."
    )
    return _save(figure, f"densities-{style}.png", alt)


def _density(record: Mapping[str, Any], size: int) -> np.ndarray:
    """The density on size x size cells, axis 0 along x."""
    try:
        cells = int(record["cells"])
        packed = base64.b64decode(record["density"], validate=True)
        values = np.frombuffer(zlib.decompressobj().decompress(packed, cells**2 + 1), dtype=np.uint8)
        nearest = np.arange(size) * cells // size
        return values.reshape(cells, cells)[np.ix_(nearest, nearest)] * (float(record["peak"]) / 255)
    except (TypeError, ValueError, zlib.error) as problem:
        raise BrokenFile(f"The picture of '{record['method']}' on '{record['data']}' is broken: {problem}") from problem


def _kl_figure(results: Results) -> Picture | None:
    names = list(dict.fromkeys(row[0] for row in results.rows()))
    columns = min(3, len(results.data))
    lines = math.ceil(len(results.data) / columns)
    figure = Figure(figsize=(2.2 + 3.0 * columns, 0.6 + lines * (0.7 + 0.24 * len(names))), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for axis in panels[len(results.data) :]:
        axis.axis("off")
    for axis, data in zip(panels, results.data, strict=False):
        for row in results.rows():
            place = names.index(row[0]) + {"sgd": -0.15, "adam": 0.15, "own": 0}[row[1]]
            cell = results.cell("kl", row, data)
            if cell is None:
                continue
            if cell.failed or not cell.mean > 0:
                axis.plot(0.97, place, "x", color=COLOURS[row[1]], ms=6, transform=axis.get_yaxis_transform())
                continue
            values = [value for value in cell.values.values() if value > 0]
            axis.plot(values, [place] * len(values), ".", color=COLOURS[row[1]], ms=3, alpha=0.6)
            axis.plot(cell.mean, place, "o", color=COLOURS[row[1]], ms=5)
        axis.set(title=data, xscale="log")
        axis.grid(axis="x", color=INK, alpha=0.25)
    panels[0].set_yticks(range(len(names)), [METHODS[name].title for name in names])
    panels[0].invert_yaxis()
    for style in dict.fromkeys(row[1] for row in results.rows()):
        panels[0].plot([], [], "o", color=COLOURS[style], label=STYLES[style])
    figure.legend(loc="outside upper center", ncols=3)
    alt = (
        "KL(truth, model) in nats on a logarithmic axis, a panel for each data set, a line for each method. Large dots "
        "are means, small dots seeds, a cross at the right edge is a method that diverged."
    )
    return _save(figure, "kl.png", alt)


def _sensitivity(results: Results) -> Picture | None:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    drawn = False
    for axis, rate, default in zip(panels, ("gamma", "beta"), (DEFAULT_GAMMA, DEFAULT_BETA), strict=True):
        found = {getattr(METHODS[name], rate) or default: (name, "sgd") for name in TABLES[rate].paper}
        for place, data in enumerate(results.data):
            cells = {value: results.cell("kl", row, data) for value, row in sorted(found.items())}
            points = {value: cell.mean for value, cell in cells.items() if cell and not cell.failed and cell.mean > 0}
            axis.plot(list(points), list(points.values()), "o-", color=colormaps["tab10"](place), label=data)
            drawn = drawn or len(points) > 1
        axis.set(title=f"by {rate}", xlabel=rate, yscale="log", xticks=sorted(found))
        axis.grid(color=INK, alpha=0.25)
    panels[0].set_ylabel("KL(truth, MECO), nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    alt = "Sensitivity of MECO, SGD-style: KL(truth, model) by gamma (beta 0.9) and by beta (gamma 0.1), a line a set."
    return _save(figure, "sensitivity.png", alt) if drawn else None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _markdown(blocks: Iterable[Block]) -> str:
    parts = []
    for block in blocks:
        match block:
            case Heading(level, text):
                parts.append(f"{'#' * level} {_md(text)}")
            case Lines(lines):
                parts.append(_md(lines[0]) if len(lines) == 1 else "\n".join(f"- {_md(line)}" for line in lines))
            case Grid(caption, head, rows, foot):
                table = [[_md(one) for one in head], ["---"] * len(head)]
                table += [[_md_entry(entry) for entry in row] for row in (*rows, *foot)]
                parts += [f"**{_md(caption)}**", "\n".join(f"| {' | '.join(row)} |" for row in table)]
            case Picture(file, alt, _):
                parts.append(f"![{_md(alt)}]({file})")
    return "\n\n".join(parts) + "\n"


def _md(text: str) -> str:
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", text)


def _md_entry(entry: Entry) -> str:
    text, note = (f"**{_md(part)}**" if strong and part else _md(part) for part, strong in _parts(entry))
    return f"{text}<br>{note}" if note else text


def _parts(entry: Entry) -> tuple[tuple[str, bool], tuple[str, bool]]:
    return (entry.text, entry.best), (entry.note, entry.note_best)


def _page(blocks: Sequence[Block]) -> str:
    headings = [block for block in blocks if isinstance(block, Heading)]
    contents = "".join(
        f'<li><a href="#{_slug(text)}">{html.escape(text)}</a></li>' for level, text in headings if level == 2
    )
    template = Template(resources.files("unnorm.paper").joinpath("report.html").read_text(encoding="utf-8"))
    body = "\n".join(_html(block, place) for place, block in enumerate(blocks[1:]))
    return template.substitute(title=html.escape(headings[0].text), contents=contents, body=body)


def _html(block: Block, place: int) -> str:
    match block:
        case Heading(level, text):
            return f'<h{level} id="{_slug(text)}">{html.escape(text)}</h{level}>'
        case Lines(lines):
            if len(lines) == 1:
                return f"<p>{html.escape(lines[0])}</p>"
            return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"
        case Picture(_, alt, content):
            source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
            return _figure(f'<img src="{source}" alt="{html.escape(alt)}">', alt, place)
        case Grid(caption, head, rows, foot):
            words = [entry.words for entry in rows[0]]
            top = "".join(
                f'<th scope="col"{" class=words" if left else ""}>{html.escape(one)}</th>'
                for one, left in zip(head, words, strict=True)
            )
            body = "".join(map(_tr, rows))
            bottom = f"<tfoot>{''.join(map(_tr, foot))}</tfoot>" if foot else ""
            table = (
                f'<table aria-labelledby="c{place}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody>{bottom}</table>'
            )
            return _figure(table, caption, place)


def _figure(content: str, caption: str, place: int) -> str:
    return (
        f'<figure><figcaption id="c{place}">{html.escape(caption)}</figcaption>'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="c{place}">{content}</div></figure>'
    )


def _tr(row: Sequence[Entry]) -> str:
    cells = []
    for place, entry in enumerate(row):
        key = "" if entry.key is None else f' data-key="{html.escape(str(entry.key))}"'
        text, note = (
            f"<strong>{html.escape(part)}</strong>" if strong else html.escape(part) for part, strong in _parts(entry)
        )
        small = f"<small>{note}</small>" if entry.note else ""
        kind = ' class="words"' if entry.words else ""
        cells.append(f'<th scope="row"{key}>{text}</th>' if place == 0 else f"<td{kind}{key}>{text}{small}</td>")
    return f"<tr>{''.join(cells)}</tr>"
