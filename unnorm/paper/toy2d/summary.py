"""The synthetic study in words: where MECO wins, ties and loses, and what is better."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from unnorm.paper.toy2d.cells import SEEDS_FOR_A_TEST, column, paper_rank
from unnorm.paper.toy2d.completeness import RUNAWAY_KL, by_rate, diverged, left_out
from unnorm.paper.toy2d.results import (
    FLOOR_ERRORS,
    METRICS,
    OF_SAMPLES,
    SCALES,
    UNITS,
    Results,
    Row,
    counted,
    number,
    title,
)
from unnorm.paper.toy2d.spec import METHODS, STYLES, TABLES
from unnorm.paper.toy2d.standing import Standing, outcome, standing, verbs

__all__ = ["details", "headlines", "summarise"]

CAUTIONS = {
    "smoke": "Size smoke shows that everything runs. Its networks are trained for a moment: its numbers mean nothing.",
    "laptop": (
        "Size laptop is a preview: fewer seeds, learning rates, rows and training steps than the paper's protocol. "
        "Conclusions belong to size full."
    ),
}

OPTIMIZED = ("sgd", "adam")


def summarise(results: Results) -> list[str]:
    """The study in plain words: first what a newcomer reads, then the details."""
    return [*headlines(results), *details(results)]


def headlines(results: Results) -> list[str]:
    """What was compared, how MECO does in all, and for each style what samples, the exact KL and its rates say."""
    styles = _styles(results)
    caution = CAUTIONS.get(str(results.starts[-1].get("size")), "")
    if not styles:
        return [line for line in (caution, "MECO was not run.") if line]
    lines = [caution, _compared(results, styles), _in_all(results, styles), _untested(results, styles)]
    for style in styles:
        lines += [_by_samples(results, style), _by_kl(results, style), _by_rate(results, style)]
    return [line for line in lines if line]


def details(results: Results) -> list[str]:
    """Metric by metric, against what a user would pick instead, what diverged, what was left out."""
    styles = _styles(results)
    lines = [_stands(results, metric, style) for style in styles for metric in METRICS]
    lines += [_instead(results, style) for style in styles]
    lines += [_winner(results), diverged(results), *left_out(results)]
    return [line for line in lines if line]


def _styles(results: Results) -> list[str]:
    return [style for style in OPTIMIZED if ("meco", style) in results.rows()]


def _compared(results: Results, styles: Sequence[str]) -> str:
    others = {name for name, _ in results.rows(*styles, origins=["paper"])} - {"meco"}
    optimizers = " and ".join(STYLES[style] for style in styles)
    return (
        f"MECO, the paper's method, is compared with {counted(len(others), 'other method')} of its tables on "
        f"{counted(len(results.data), 'data set')} in the plane, {optimizers}, with {counted(results.seeds, 'seed')} "
        f"each.{_time(results)}"
    )


def _time(results: Results) -> str:
    """Equal for all networks, and what it is a time of."""
    seconds, steps = results.plan.get("seconds"), [one["steps"] for one in results.timings if one.get("steps")]
    if seconds is None:
        return ""
    gpu = results.starts[-1].get("device") == "cuda"
    share = "its share of the GPU's time for all that are trained side by side" if gpu else "on one CPU core"
    taken = f"; that is {min(steps):,} to {max(steps):,} steps, by method" if steps else ""
    return (
        f" Every network is given the same training time of {seconds} s, {share}, by a trial of its steps"
        f"{_took(results)}{taken}; the paper's had about 10 minutes of a laptop."
    )


def _took(results: Results) -> str:
    """What the training took in the end: the least and the largest mean over the runs of a method."""
    seconds: dict[Row, list[float]] = defaultdict(list)
    for run in results.runs:
        if METHODS[run["method"]].tuned == "lr" and run.get("seconds") is not None:
            seconds[run["method"], run["style"]].append(run["seconds"])
    means = [float(np.mean(own)) for own in seconds.values()]
    return f" (it took {number(min(means), 2)} to {number(max(means), 2)} s, by method)" if means else ""


def _in_all(results: Results, styles: Sequence[str]) -> str:
    found = [standing(results, metric, style) for style in styles for metric in METRICS]
    return f"Over all styles, metrics and data sets MECO {outcome(found, 'in', 'comparison', named=False)}."


def _untested(results: Results, styles: Sequence[str]) -> str:
    """Said once, for all tables."""
    found = {(style, metric): standing(results, metric, style) for style in styles for metric in METRICS}
    without = [f"{STYLES[style]}, {METRICS[metric]}" for (style, metric), one in found.items() if not one.tested]
    if not without:
        return ""
    where = "" if len(without) == len(found) else f" in some columns ({'; '.join(without)})"
    return (
        f"With fewer than {SEEDS_FOR_A_TEST} common seeds{where} no test is possible: there no tie is marked, and the "
        "least mean stands in bold."
    )


def _by_samples(results: Results, style: str) -> str:
    found = {metric: standing(results, metric, style) for metric in OF_SAMPLES}
    found = {metric: one for metric, one in found.items() if one.measured}
    if not found:
        return ""
    names = " and ".join(METRICS[metric] for metric in found)
    return (
        f"{STYLES[style]}, judged by samples ({names}): MECO {outcome(list(found.values()), 'in', 'comparison')}. "
        f"{_pairs(results, list(found), style)}{_rank_words(results, found, style)}"
        f"{_floor_words(results, list(found), style)}"
    )


def _pairs(results: Results, metrics: Sequence[str], style: str) -> str:
    """Against each other method by itself: how often MECO is ahead, and how often behind, by the paired test."""
    ahead = behind = total = 0
    for metric in metrics:
        for data in results.data:
            own = results.cell(metric, ("meco", style), data)
            for row in results.rows(style, origins=["paper"]):
                other = results.cell(metric, row, data)
                if own is None or other is None or row[0] == "meco":
                    continue
                found = column({"own": own, "other": other})
                total += 1
                if found.tested and not found.ties:
                    ahead, behind = ahead + (found.best == "own"), behind + (found.best == "other")
    if not (ahead or behind):
        return ""
    return (
        f"Against one method at a time it is ahead in {ahead} of {total} comparisons and behind in {behind} (p < 0.05 "
        "each, not corrected for their number). "
    )


def _by_kl(results: Results, style: str) -> str:
    found = {metric: standing(results, metric, style) for metric in ("kl", "test_nll")}
    found = {metric: one for metric, one in found.items() if one.measured}
    if "kl" not in found:
        return ""
    return (
        f"{STYLES[style]}, judged by the exact KL from the truth: MECO {outcome([found['kl']], 'on', 'data set')}. "
        f"{_rank_words(results, found, style)}"
    )


def _by_rate(results: Results, style: str) -> str:
    """Where MECO diverges or runs away: what its tuning has to avoid."""
    rates = by_rate(results).get(("meco", style), {})
    bad = [f"at {lr:g}, {one.words}" for lr, one in rates.items() if one.fell or one.away]
    if not bad:
        return ""
    fine = [f"{lr:g}" for lr, one in rates.items() if not (one.fell or one.away)]
    rest = f"; at {', '.join(fine)}, none" if fine else ""
    if any(one.away for one in rates.values()):
        rest += f" (away: a finite KL above {RUNAWAY_KL:g} nats)"
    return f"{STYLES[style]}, MECO's runs by learning rate: {'; '.join(bad)}{rest}."


def _rank_words(results: Results, found: Mapping[str, Standing], style: str) -> str:
    rows = results.rows(style, origins=["paper"])
    parts = []
    for metric, one in found.items():
        table = TABLES.get(f"{metric}-{style}")
        theirs = table and paper_rank(table, "meco", results.data, [name for name, _ in rows])
        paper = "" if theirs is None else f" (paper: {theirs:.2f})"
        parts.append(f"{np.mean(one.ranks):.2f} by {METRICS[metric]}{paper}")
    return f"Its mean rank among {counted(len(rows), 'method')} is {' and '.join(parts)}."


def _floor_words(results: Results, metrics: Sequence[str], style: str) -> str:
    rows = results.rows(style, origins=["paper"])
    at = total = 0
    for metric in metrics:
        for data in results.data:
            if results.floors.get(data, {}).get(metric) is None:
                continue
            cells = [cell for row in rows if (cell := results.cell(metric, row, data)) is not None]
            total, at = total + len(cells), at + sum(results.at_floor(metric, cell, data) for cell in cells)
    if not at:
        return ""
    most = ", most of them," if 2 * at > total else ""
    return (
        f" {at} of the {total} cells of these methods{most} lie at the noise floor: within {FLOOR_ERRORS} standard "
        "errors of what samples of the truth give; there the metric cannot tell the method from the truth."
    )


def _stands(results: Results, metric: str, style: str) -> str:
    found = standing(results, metric, style)
    if not found.measured:
        return ""
    lost = [_lost(results, metric, style, *one) for one in found.losses]
    parts = [
        f"{verb} on {len(sets)} ({'; '.join(sets)})"
        for verb, sets in zip(verbs(found.tested), (found.alone, found.tied, lost, found.failed), strict=True)
        if sets
    ]
    sets = counted(found.measured, "data set")
    return f"{STYLES[style]}, by {METRICS[metric]}{UNITS[metric]}: of {sets}, MECO {', '.join(parts)}."


def _lost(results: Results, metric: str, style: str, data: str, best: Row) -> str:
    cells = [results.cell(metric, row, data) for row in (("meco", style), best)]
    means = (SCALES[metric] * cell.mean for cell in cells if cell is not None)
    return f"{data}, to {METHODS[best[0]].title}: {_against(*means)}"


def _against(a: float, b: float) -> str:
    """With as many digits as tell them apart, from three to six.

    >>> _against(0.5, 0.25), _against(3.2713, 3.2684)
    ('0.5 against 0.25', '3.271 against 3.268')
    """
    digits = next((k for k in range(3, 6) if number(a, k) != number(b, k)), 6)
    return f"{number(a, digits)} against {number(b, digits)}"


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
    first: dict[Row, list[str]] = defaultdict(list)
    for data in results.data:
        if (best := results.column("kl", results.rows(), data).best) is not None:
            first[best].append(data)
    order = sorted(first.items(), key=lambda one: -len(one[1]))
    named = "; ".join(f"{title(row)} on {', '.join(sets)}" for row, sets in order)
    return f"Of all methods and styles the least KL has: {named}." if named else ""
