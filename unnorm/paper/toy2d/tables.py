"""The tables of the synthetic study: MECO's standing, the paper's beside ours, likelihoods, ranks, what diverged."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from unnorm.paper.page import Block, Entry, Grid, Lines, label
from unnorm.paper.toy2d.cells import SEEDS_FOR_A_TEST, Column, agreement, paper_rank
from unnorm.paper.toy2d.completeness import by_rate
from unnorm.paper.toy2d.results import METRICS, SCALES, UNITS, Place, Results, Row, counted, number, title
from unnorm.paper.toy2d.spec import METHODS, STYLES, TABLES, Table
from unnorm.paper.toy2d.standing import standing, verbs

__all__ = ["all_methods", "fallen", "likelihood", "paper_table", "rank_tables", "standings"]


def standings(results: Results) -> Grid:
    """How often MECO is alone best, ties and loses, by style and metric."""
    rows, tested = [], False
    for style in ("sgd", "adam"):
        for metric in METRICS:
            found = standing(results, metric, style)
            tested = tested or found.tested
            counts = [len(found.alone), len(found.tied), len(found.losses), len(found.failed)]
            entries = [Entry(str(count), count) for count in counts]
            if not found.tested:
                entries[1] = Entry("no test")
            beaten = ", ".join(found.beaten_by) or "-"
            rank = float(np.mean(found.ranks)) if found.ranks else None
            mean = Entry("-" if rank is None else f"{rank:.2f}", rank)
            rows.append([label(f"{STYLES[style]}, {METRICS[metric]}"), *entries, mean, label(beaten)])
    head = ["MECO by style and metric", *verbs(tested), "mean rank", "best where it loses"]
    return Grid("On how many data sets MECO, among the paper's methods, ...", head, rows)


def _value(mean: float, sd: float, digits: int = 6) -> str:
    """Mean and deviation with two digits of the deviation.

    >>> _value(1.23456, 0.0123), _value(2.0, float("nan"))
    ('1.235 ± 0.012', '2')
    """
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
    scale = SCALES[metric]
    text = _value(scale * cell.mean, scale * cell.sd) if cell.values else ""
    if cell.failed:
        diverged = sum(run["status"] != "ok" for run in results.chosen[Place(*row, data)])
        lost = f"{cell.failed} of {cell.n} {'diverged' if cell.failed == diverged else 'not finite'}"
        return Entry(f"{text} ({lost})" if text else lost)
    marks = ("≈" if row in where.ties else "") + ("°" if results.at_floor(metric, cell, data) else "")
    n = "" if cell.n == results.seeds else f"(n = {cell.n})"
    return Entry(" ".join(part for part in (text, n, marks) if part), cell.mean, row == where.best)


def _columns(results: Results, metric: str, rows: Sequence[Row]) -> dict[str, Column]:
    return {data: results.column(metric, rows, data) for data in results.data}


def _caption(results: Results, text: str, columns: Iterable[Column]) -> str:
    """Where the whole study has too few seeds for a test, its summary says so, not each table."""
    tested = all(one.tested for one in columns) or results.seeds < SEEDS_FOR_A_TEST
    test = "" if tested else "; some columns have too few common seeds for a test, so no tie is marked there"
    return f"{text} (n = {counted(results.seeds, 'seed')}{test})"


def _mean_rank(results: Results, metric: str, rows: Sequence[Row], row: Row) -> Entry:
    found = results.ranks(metric, rows, row)
    if not found:
        return Entry("-")
    some = "" if len(found) == len(results.data) else f" ({len(found)} of {len(results.data)} sets)"
    return Entry(f"{np.mean(found):.2f}{some}", float(np.mean(found)))


def paper_table(results: Results, table: Table) -> Grid:
    """A table of the paper: our value, the paper's below it, and how far the two orders agree."""
    rows = [(name, table.style) for name in table.paper]
    columns = _columns(results, table.metric, rows)
    theirs = {data: {row: table.paper[row[0]][data][0] for row in rows} for data in results.data}
    lines = [_paper_line(results, table, row, columns) for row in rows]
    orders = [
        agreement({row: results.cell(table.metric, row, data) for row in rows}, theirs[data]) for data in results.data
    ]
    known = [one for one in orders if math.isfinite(one)]
    shown = [*orders, float(np.mean(known)) if known else math.nan]
    foot = [[label("Rank correlation"), *(Entry(_signed(one)) for one in shown)]]
    foot.append([*_truth(results, table.metric), Entry("")])
    head = ["Method", *results.data, "Mean rank"]
    caption = _caption(results, table.title.replace("MMD", f"MMD{UNITS['mmd']}"), columns.values())
    return Grid(caption, head, lines, foot)


def _paper_line(results: Results, table: Table, row: Row, columns: Mapping[str, Column]) -> list[Entry]:
    line = [label(METHODS[row[0]].title)]
    for data, where in columns.items():
        mean, sd = table.paper[row[0]][data]
        least = min(cells[data][0] for cells in table.paper.values())
        entry = _entry(results, table.metric, row, data, where)
        line.append(entry._replace(note=f"paper {mean:.3f} ± {sd:.3f}", note_best=mean == least))
    rows = [(name, table.style) for name in table.paper]
    rank = _mean_rank(results, table.metric, rows, row)
    return [*line, rank._replace(note=f"paper {paper_rank(table, row[0], results.data):.2f}")]


def _signed(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "-"


def _truth(results: Results, metric: str) -> list[Entry]:
    """What the truth itself would get."""
    if metric == "kl":
        return [label("The truth"), *(Entry("0") for _ in results.data)]
    found = [results.floors.get(data, {}) for data in results.data]
    scale = SCALES[metric]
    values = [_known(one.get(metric), one.get(f"{metric}_sd"), scale) for one in found]
    return [label("The truth, on the same rows" if metric == "test_nll" else "Noise floor"), *map(Entry, values)]


def _known(mean: float | None, sd: float | None, scale: float) -> str:
    return "-" if mean is None else _value(scale * mean, math.nan if sd is None else scale * sd)


def likelihood(results: Results, metric: str, style: str) -> Grid:
    """Test NLL or KL of all methods in one style, with those that have a way of their own."""
    rows = [*results.rows(style), *results.rows("own")]
    columns = _columns(results, metric, rows)
    lines = [
        [
            label(METHODS[row[0]].title),
            *(_entry(results, metric, row, data, where) for data, where in columns.items()),
            _mean_rank(results, metric, rows, row),
        ]
        for row in rows
    ]
    name = "Test NLL" if metric == "test_nll" else "KL(truth, model)"
    caption = _caption(results, f"{name} in nats, {STYLES[style]}, all methods", columns.values())
    return Grid(caption, ["Method", *results.data, "Mean rank"], lines, [[*_truth(results, metric), Entry("")]])


def all_methods(results: Results, data: str) -> Grid:
    """Every metric of every method in every style on one data set."""
    rows = results.rows()
    columns = {metric: results.column(metric, rows, data) for metric in METRICS}
    lines = [
        [label(title(row)), *(_entry(results, metric, row, data, where) for metric, where in columns.items())]
        for row in rows
    ]
    place = 1 + results.data.index(data)
    foot = [label("The truth"), *(_truth(results, metric)[place] for metric in METRICS)]
    head = ["Method", *(f"{name}{UNITS[metric]}" for metric, name in METRICS.items())]
    return Grid(_caption(results, data, columns.values()), head, lines, [foot])


def rank_tables(results: Results) -> list[Block]:
    """Mean ranks among the paper's methods within a style, and among all."""
    rows = results.rows()
    wide = [[label(title(row)), *(_mean_rank(results, metric, rows, row) for metric in METRICS)] for row in rows]
    return [
        Lines(["1 is best. Ranks are averaged over the data sets; overall is the mean over the styles."]),
        _paper_ranks(results),
        Grid("Among all methods and styles", ["Method", *METRICS.values()], wide),
    ]


def _paper_ranks(results: Results) -> Grid:
    styles = [style for style in ("sgd", "adam") if results.rows(style, origins=["paper"])]
    lines = {row[0]: [label(METHODS[row[0]].title)] for row in results.rows(*styles, origins=["paper"])}
    for metric in METRICS:
        for name, line in lines.items():
            found = []
            for style in styles:
                rows = results.rows(style, origins=["paper"])
                table = TABLES.get(f"{metric}-{style}")
                note = "" if table is None else f"paper {paper_rank(table, name, results.data):.2f}"
                found.append(_mean_rank(results, metric, rows, (name, style))._replace(note=note))
            keys = [float(one.key) for one in found if one.key is not None]
            overall = Entry(f"{np.mean(keys):.2f}", float(np.mean(keys))) if keys else Entry("-")
            line.extend([*found, overall])
    short = {"sgd": "SGD", "adam": "Adam"}
    words = [*(short[one] for one in styles), "overall"]
    names = [f"{metric}, {word}" for metric in METRICS.values() for word in words]
    return Grid("Among the paper's methods, within a style", ["Method", *names], list(lines.values()))


def fallen(results: Results) -> Grid:
    """How many runs diverged, and how many more ran away, by method and learning rate."""
    found = by_rate(results)
    rates = sorted({lr for counts in found.values() for lr in counts}, reverse=True)
    lines = []
    for row, counts in found.items():
        line = [label(title(row))]
        for lr in rates:
            one = counts.get(lr)
            if one is None:
                line.append(Entry("-"))
                continue
            more = f" + {one.away}" if one.away else ""
            text = f"{one.fell}{more} of {one.runs}" if one.fell or one.away else f"0 of {one.runs}"
            line.append(Entry(text, one.fell + one.away, best=2 * (one.fell + one.away) > one.runs))
        lines.append(line)
    caption = "Diverged runs + those that ran away, by learning rate; bold: more than half"
    return Grid(caption, ["Method", *(f"{lr:g}" for lr in rates)], lines)
