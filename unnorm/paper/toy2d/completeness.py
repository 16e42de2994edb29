"""Whether the synthetic study is whole: what diverged or ran away, and what its plan has and its lines do not."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unnorm.paper.toy2d.results import METRICS, Results, Row, Run, counted, title
from unnorm.paper.toy2d.spec import DATA, METHODS

__all__ = ["RUNAWAY_KL", "Fallen", "by_rate", "diverged", "left_out", "ran_away"]

RUNAWAY_KL = 10.0  # nats above which a model is of no use, though its numbers are finite


def ran_away(run: Run) -> bool:
    """Whether a run ended far from the truth without a NaN or an infinity.

    >>> [ran_away({"status": "ok", "kl": kl}) for kl in (0.1, 10.0, 1e9)]
    [False, False, True]
    """
    return run["status"] == "ok" and run.get("kl") is not None and run["kl"] > RUNAWAY_KL


def _fell(run: Run) -> bool:
    return bool(run["status"] != "ok")


class Fallen(NamedTuple):
    """Of some runs, how many diverged and how many more ran away.

    >>> Fallen(30, 30, 0).words, Fallen(30, 2, 1).words, Fallen(30, 0, 28).words
    ('all 30 diverge', '2 of 30 diverge, 1 of 30 run away', '28 of 30 run away')
    """

    runs: int
    fell: int
    away: int

    @property
    def words(self) -> str:
        counts = (("diverge", self.fell), ("run away", self.away))
        parts = [
            f"{'all' if count == self.runs else f'{count} of'} {self.runs} {verb}" for verb, count in counts if count
        ]
        return ", ".join(parts) or f"none of {self.runs} diverges"


def by_rate(results: Results) -> dict[Row, dict[float, Fallen]]:
    """Of each method with a learning rate, and each rate from the largest: over all data sets, seeds and settings."""
    groups: dict[Row, dict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in results.runs:
        if run.get("lr") is not None:
            groups[run["method"], run["style"]][run["lr"]].append(run)
    return {
        row: {
            lr: Fallen(len(runs), sum(map(_fell, runs)), sum(map(ran_away, runs)))
            for lr, runs in sorted(groups[row].items(), reverse=True)
        }
        for row in results.rows()
        if row in groups
    }


def diverged(results: Results) -> str:
    """How many runs diverged and how many more ran away, in all and at the chosen settings; there, where."""
    chosen = [run for runs in results.chosen.values() for run in runs]
    fell, away, fell_chosen, away_chosen = (
        sum(map(which, runs)) for runs in (results.runs, chosen) for which in (_fell, ran_away)
    )
    line = (
        f"{counted(len(results.runs), 'run')}, {fell:,} diverged and {away:,} more ran away (a finite KL above "
        f"{RUNAWAY_KL:g} nats)."
    )
    if fell or away:
        line += f" Of the {len(chosen):,} at the chosen settings {fell_chosen:,} diverged and {away_chosen:,} ran away."
    if fell_chosen:
        line += f" No setting without a diverged seed: {_where(results, _fell)}."
    if away_chosen:
        line += f" Ran away at the chosen settings: {_where(results, ran_away)}."
    return line


def _where(results: Results, which: Callable[[Run], bool]) -> str:
    """The cells of the chosen settings with such runs."""
    rows: dict[Row, list[str]] = defaultdict(list)
    for place, runs in results.chosen.items():
        if found := sum(map(which, runs)):
            rows[place.method, place.style].append(f"{place.data} ({found} of {len(runs)})")
    return "; ".join(f"{title(row)}: {', '.join(where)}" for row, where in rows.items())


def left_out(results: Results) -> list[str]:
    """What the study's plan has and its lines do not: whole methods, data sets, single runs."""
    lines = []
    present = set(results.rows())
    every = [(name, style) for name, one in METHODS.items() for style in one.styles]
    if gone := [title(row) for row in every if row not in present]:
        lines.append(f"Not run: {'; '.join(gone)}.")
    if gone := [name for name in DATA if name not in results.data]:
        lines.append(f"Data sets not run: {', '.join(gone)}.")
    count: dict[Row, int] = defaultdict(int)
    for run in results.runs:
        count[run["method"], run["style"]] += 1
    cells = len(results.data) * results.seeds
    planned = {row: _settings_planned(row, results.plan) * cells for row in count}
    if absent := {row: planned[row] - count[row] for row in planned if planned[row] > count[row]}:
        named = "; ".join(f"{title(row)} ({missing:,})" for row, missing in absent.items())
        lines.append(f"{sum(absent.values()):,} of {sum(planned.values()):,} planned runs are absent: {named}.")
    for metric in METRICS:
        if places := [place for place in results.chosen if results.cell(metric, place[:2], place.data) is None]:
            named = "; ".join(dict.fromkeys(title(place[:2]) for place in places))
            where = counted(len(places), "cell")
            lines.append(f"{METRICS[metric]} was not measured at the chosen setting in {where}: {named}.")
    return lines or ["Nothing was left out: every method, data set, setting and seed of the plan has its run."]


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
