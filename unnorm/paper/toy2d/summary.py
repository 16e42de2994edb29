"""The synthetic study in words: where MECO wins, ties and loses, and what is better."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from unnorm.paper.toy2d.cells import SEEDS_FOR_A_TEST, column, paper_rank
from unnorm.paper.toy2d.completeness import diverged, left_out
from unnorm.paper.toy2d.results import FLOOR_ERRORS, METRICS, Results, Row, counted, number, title
from unnorm.paper.toy2d.spec import METHODS, STYLES, TABLES

__all__ = ["Standing", "details", "headlines", "standing", "summarise"]

OF_SAMPLES = ("mmd", "frechet")
OPTIMIZED = ("sgd", "adam")


class Standing(NamedTuple):
    """Where MECO stands by one metric among the paper's methods: data sets by outcome.

    Attributes:
        best: its mean is the least; `alone`, those of them where no other method ties.
        ties: another has the least mean, and the test cannot tell the two apart.
        losses: data set and who is best there.
        failed: a seed of its own diverged.
        tested: False where a column has too few seeds for a test.
        ranks: of its mean, on each data set.
    """

    best: list[str]
    alone: list[str]
    ties: list[str]
    losses: list[tuple[str, Row]]
    failed: list[str]
    tested: bool
    ranks: list[float]

    @property
    def measured(self) -> int:
        return len(self.best) + len(self.ties) + len(self.losses) + len(self.failed)


def standing(results: Results, metric: str, style: str) -> Standing:
    """Of MECO in one style, over the data sets where it was measured."""
    rows, meco = results.rows(style, origins=["paper"]), ("meco", style)
    tested = all(results.column(metric, rows, data).tested for data in results.data)
    found = Standing([], [], [], [], [], tested, results.ranks(metric, rows, meco))
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


def summarise(results: Results) -> list[str]:
    """The study in plain words: first what a newcomer reads, then the details."""
    return [*headlines(results), *details(results)]


def headlines(results: Results) -> list[str]:
    """What was compared, how MECO does in all, and for each style what samples say and what the exact KL says."""
    styles = _styles(results)
    if not styles:
        return ["MECO was not run."]
    lines = [_compared(results, styles), _in_all(results, styles), _untested(results, styles)]
    for style in styles:
        lines += [_by_samples(results, style), _by_kl(results, style)]
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
    seconds = results.plan.get("seconds")
    time = "" if seconds is None else f" Every network is trained for {seconds} s."
    optimizers = " and ".join(STYLES[style] for style in styles)
    return (
        f"MECO, the paper's method, is compared with {counted(len(others), 'other method')} of its tables on "
        f"{counted(len(results.data), 'data set')} in the plane, {optimizers}, with {counted(results.seeds, 'seed')} "
        f"each.{time}"
    )


def _in_all(results: Results, styles: Sequence[str]) -> str:
    found = [standing(results, metric, style) for style in styles for metric in METRICS]
    best, ties, losses, failed = (
        sum(len(getattr(one, name)) for one in found) for name in ("best", "ties", "losses", "failed")
    )
    return (
        f"Of {sum(one.measured for one in found)} comparisons with the paper's methods (style, metric, data set) MECO "
        f"is best in {best}, cannot be told from the best in {ties}, loses in {losses} and diverged in {failed}."
    )


def _untested(results: Results, styles: Sequence[str]) -> str:
    """Said once, for all tables."""
    found = {(style, metric): standing(results, metric, style) for style in styles for metric in METRICS}
    without = [f"{STYLES[style]}, {METRICS[metric]}" for (style, metric), one in found.items() if not one.tested]
    if not without:
        return ""
    where = "" if len(without) == len(found) else f" in some columns ({'; '.join(without)})"
    return (
        f"With fewer than {SEEDS_FOR_A_TEST} common seeds{where} no test is possible: there no tie is marked, and the "
        "least mean counts as best."
    )


def _by_samples(results: Results, style: str) -> str:
    found = {metric: standing(results, metric, style) for metric in OF_SAMPLES}
    found = {metric: one for metric, one in found.items() if one.measured}
    if not found:
        return ""
    names = " and ".join(METRICS[metric] for metric in found)
    return (
        f"{STYLES[style]}, judged by samples ({names}): MECO {_outcome(list(found.values()), 'in', 'comparison')}. "
        f"{_rank_words(results, found, style)}{_floor_words(results, list(found), style)}"
    )


def _by_kl(results: Results, style: str) -> str:
    found = {metric: standing(results, metric, style) for metric in ("kl", "test_nll")}
    found = {metric: one for metric, one in found.items() if one.measured}
    if "kl" not in found:
        return ""
    return (
        f"{STYLES[style]}, judged by the exact KL from the truth: MECO {_outcome([found['kl']], 'on', 'data set')}. "
        f"{_rank_words(results, found, style)}"
    )


def _outcome(found: Sequence[Standing], at: str, what: str) -> str:
    """Won is best alone; a share of the lead is best with ties, or a tie with the best."""
    won = sum(len(one.alone) for one in found)
    shared = sum(len(one.best) + len(one.ties) for one in found) - won
    lost, failed = (sum(len(getattr(one, name)) for one in found) for name in ("losses", "failed"))
    total = sum(one.measured for one in found)
    best = list(dict.fromkeys(METHODS[row[0]].title for one in found for _, row in one.losses))
    parts = [f"wins {at} {won} of {counted(total, what)}", f"shares the lead {at} {shared}"]
    parts += [f"loses {at} {lost}" + (f" (to {', '.join(best)})" if best else "")]
    parts += [f"diverges {at} {failed}"] if failed else []
    return ", ".join(parts[:-1]) + f" and {parts[-1]}"


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
    parts = []
    if found.best:
        alone = f", {len(found.alone)} of them without a tie" if found.tested else ""
        parts.append(f"is best on {len(found.best)} ({', '.join(found.best)}){alone}")
    if found.ties:
        parts.append(f"cannot be told from the best on {len(found.ties)} ({', '.join(found.ties)})")
    if found.losses:
        lost = "; ".join(_lost(results, metric, style, *one) for one in found.losses)
        parts.append(f"loses on {len(found.losses)} ({lost})")
    if found.failed:
        parts.append(f"diverged on {len(found.failed)} ({', '.join(found.failed)})")
    sets = counted(found.measured, "data set")
    return f"{STYLES[style]}, by {METRICS[metric]}: of {sets}, MECO {', '.join(parts)}."


def _lost(results: Results, metric: str, style: str, data: str, best: Row) -> str:
    cells = [results.cell(metric, row, data) for row in (("meco", style), best)]
    return f"{data}, to {METHODS[best[0]].title}: {_against(*(cell.mean for cell in cells if cell is not None))}"


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
