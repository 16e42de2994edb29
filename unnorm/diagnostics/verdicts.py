"""The verdict on a fitted density: how well log Z is known, whether the fit is good, and what samples are worth.

Each of the three has a level of its own, and the overall word is the worst of them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unnorm.diagnostics.trust import LEAST_ESS, R_HAT_LIMIT, believable, doubt
from unnorm.errors import BrokenFile
from unnorm.trend import Trend
from unnorm.types import LogZ

__all__ = ["LEAST_ROWS_TO_JUDGE", "LEVELS", "Part", "Verdict", "judge_fit", "judge_log_z", "judge_samples"]

LEVELS = ("TRUST", "CARE", "DISTRUST")
MOST_ERROR, WORST_ERROR = 0.05, 0.5  # nats: log Z known to the first is good, to no better than the second is useless
LEAST_ROWS_TO_JUDGE = 30  # held-out rows: fewer say little about a likelihood
ERRORS, ROUNDING = 2.0, 1e-3  # standard errors, and nats, by which a model must be worse than its noise
LEAST_SHARE = 0.1  # of the draws of chains that independent ones must amount to
APART, FAR_APART = 3.0, 0.1  # errors, and nats, between importance sampling and a grid


class Part(NamedTuple):
    """One of the three judgements: its level, and why in whole sentences."""

    level: str
    text: str


class Verdict(NamedTuple):
    """The three judgements; a part that could not be judged is None.

    >>> known = Part("TRUST", "known to 0.003 nats, by a grid")
    >>> worse = Part("DISTRUST", "the model is worse than its noise")
    >>> verdict = Verdict(known, worse, None)
    >>> verdict.level
    'DISTRUST'
    >>> print(verdict.text())
    DISTRUST
      log Z    TRUST     known to 0.003 nats, by a grid.
      Fit      DISTRUST  the model is worse than its noise.
    """

    log_z: Part
    fit: Part | None = None
    samples: Part | None = None

    @property
    def level(self) -> str:
        """The worst level of the three."""
        return max((part.level for part in self.parts().values()), key=LEVELS.index)

    def parts(self) -> dict[str, Part]:
        """Return the parts that were judged, by name."""
        named = {"log Z": self.log_z, "Fit": self.fit, "Samples": self.samples}
        return {name: part for name, part in named.items() if part is not None}

    def lines(self) -> list[str]:
        """Return one line for each part, for a person."""
        return [f"{name:<8} {part.level:<9} {part.text}." for name, part in self.parts().items()]

    def text(self) -> str:
        """Return the overall word, and the parts below it."""
        return "\n  ".join([self.level, *self.lines()])

    def plain(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values."""
        return {"level": self.level, **{name: list(part) for name, part in self.parts().items()}}

    @classmethod
    def from_plain(cls, plain: Any) -> "Verdict":
        """Return the verdict that `plain` describes."""
        try:
            found = [Part(*map(str, plain[name])) if name in plain else None for name in ("log Z", "Fit", "Samples")]
            known = found[0] is not None and all(part is None or part.level in LEVELS for part in found)
        except (KeyError, TypeError) as problem:
            raise BrokenFile(f"This is not a verdict: {problem}") from problem
        if not known:
            raise BrokenFile("This is not a verdict: it has no judgement of log Z, or an unknown level.")
        return cls(*found)  # type: ignore[arg-type]


def judge_log_z(
    log_zs: Mapping[str, LogZ], doubts: Sequence[str] = (), unchecked: str = "", not_ruled_out: float = 0.0
) -> Part:
    """Judge how well log Z is known.

    TRUST where it is known to 0.05 nats, CARE up to 0.5 nats or where no rows of the data were compared, DISTRUST where
    something speaks against the estimate. What is known is half of the 95% interval over 1.96.

    Args:
        log_zs: estimates by method, the one in use last.
        doubts: what the ladder has against them.
        unchecked: why no rows of the data were compared, where that matters.
        not_ruled_out: the share of mass that the rows cannot rule out.

    >>> good = LogZ(0.0, 0.002, 5e4, 0.1, "importance", 100_000)
    >>> judge_log_z({"importance": good}).level, judge_log_z({"importance": good._replace(khat=1.2)}).level
    ('TRUST', 'DISTRUST')
    """
    used = list(log_zs.values())[-1]
    against = [] if (problem := doubt(used)) is None else [problem]
    against += [one for one in doubts if one != problem]
    if used.method == "grid" and not used.stderr < WORST_ERROR:
        against.append("the density does not fall off toward the border of the grid: its integral may be infinite")
    gap = _disagreement(log_zs)
    if gap is not None and gap[0] > FAR_APART:
        against.append(gap[1])
    error = math.hypot(used.stderr, -math.log1p(-not_ruled_out) / 1.96) if not_ruled_out < 1 else used.stderr
    if not against and error > WORST_ERROR:
        against.append(f"known only to {error:.2g} nats, by {_method(used)}")
    if against:
        return Part("DISTRUST", f"cannot be believed: {'; '.join(against)}")
    text = f"known to {error:.2g} nats, by {_method(used)}{_check(log_zs)}"
    if not_ruled_out > 0:
        text += f", of which the rows cannot rule out {not_ruled_out:.2g} of the mass"
    care = [text] if error > MOST_ERROR else []
    care += [gap[1]] if gap is not None else []
    if unchecked:
        care.append(f"not checked ({unchecked}): rows of the data would settle it")
    if care:
        return Part("CARE", "; ".join([text, *(one for one in care if one != text)]))
    return Part("TRUST", text)


def _method(used: LogZ) -> str:
    if used.method == "grid":
        return "a grid"
    if used.method == "quadrature":
        return "quadrature, one coordinate after the other"
    if used.method == "bracket":
        return f"annealed chains from both ends ({used.ess:.0f} of {used.n} where they meet)"
    chains = "annealed importance sampling" if used.method == "ais" else f"{used.method} sampling"
    return f"{chains} (Pareto k {used.khat:.2f}, effective draws {used.ess:.0f} of {used.n})"


def _check(log_zs: Mapping[str, LogZ]) -> str:
    """Say how a grid and importance sampling agree."""
    importance, grid = log_zs.get("importance"), log_zs.get("grid")
    if grid is None or list(log_zs)[-1] != "grid" or importance is None:
        return ""
    if not believable(importance):
        return "; importance sampling cannot check it"
    apart = abs(importance.value - grid.value)
    return f"; importance sampling agrees within {apart:.4f} ± {importance.stderr:.4f}"


def _disagreement(log_zs: Mapping[str, LogZ]) -> tuple[float, str] | None:
    """Return by how much importance sampling and a grid differ, where both can be believed and do."""
    importance, grid = log_zs.get("importance"), log_zs.get("grid")
    if importance is None or grid is None or not believable(importance) or grid.stderr > MOST_ERROR:
        return None
    gap, error = abs(importance.value - grid.value), math.hypot(importance.stderr, grid.stderr)
    if gap <= APART * error or gap <= 1e-3:
        return None
    return gap, f"importance sampling and grid differ by {gap:.3f} nats, {gap / error:.1f} of their errors"


def judge_fit(
    gain: float | None,
    error: float,
    rows: int,
    trend: Trend | None,
    *,
    wholly_finite: bool = True,
    steps: int = 0,
    warned: Sequence[str] = (),
    problems: Sequence[str] = (),
    failed: str = "",
) -> Part:
    """Judge the fit by what the model gains over its noise on rows that were held out.

    TRUST where training had stopped improving and the gain is not negative beyond its error. CARE where it was still
    improving, overfitted after the kept step by more than its error, or too few rows were held out. DISTRUST where the
    model is worse than its noise by more than two errors, or not finite.

    Args:
        gain: nats a row that the model's log density exceeds its noise's by; None where no rows were held out.
        error: the standard error of the gain.
        rows: how many rows were held out.
        trend: how the validation rows fared in training; None where that is not known.
        wholly_finite: whether every held-out row has a finite log density.
        steps: of training; with 0 the noise alone is the density.
        warned: what the health monitor said up to the kept step.
        problems: what else speaks for care.
        failed: why training was given up, where it was.

    >>> judge_fit(1.5, 0.1, 500, Trend(1.5, 0.0, 0.01, 0.0, 0.01, True), steps=400).level
    'TRUST'
    """
    if failed:
        return Part("DISTRUST", f"training was given up, and the noise alone is the density: {failed.rstrip('.')}")
    told = [f"the health monitor warned ({line.split(':')[0].lower()})" for line in warned]
    if not wholly_finite or (gain is not None and not math.isfinite(gain)):
        return Part("DISTRUST", "; ".join(["some held-out row has no finite log density", *told]))
    said = "no rows were held out, so the gain over the noise is not known"
    if gain is not None:
        noun = "row" if rows == 1 else "rows"
        known = f" ± {error:.3f}" if math.isfinite(error) else ""
        said = f"{gain:+.3f}{known} nats a row over its noise, on {rows:,} held-out {noun}"
        if gain < -max(ERRORS * error, ROUNDING):
            return Part("DISTRUST", "; ".join([f"the model is worse than its noise: {said}", *told]))
    care = [f"{rows} held-out rows say little"] if gain is not None and rows < LEAST_ROWS_TO_JUDGE else []
    care += ["that is too few rows to hold any out"] if gain is None else []
    state = "training had stopped improving"
    if trend is None:
        state = "whether training was still improving is not known" if steps else "the noise alone is the density"
        care += [state]
    elif trend.still_improving:
        state = f"training was still improving when it stopped (by {trend.improved:.3f} nats in its last tenth)"
        care += [state]
    elif trend.overfitted:
        state = f"training overfitted after the step that was kept (by {trend.rose:.3f} ± {trend.rose_error:.3f} nats)"
        care += [state]
    elif gain is not None and abs(gain) <= max(error, ROUNDING):
        state += ", and the noise fits as well"
    care += [*told, *problems]
    reasons = [one for one in care if one != state]
    return Part("CARE" if care else "TRUST", "; ".join([said, state, *reasons]))


def judge_samples(method: str, n: int, worth: float, r_hat: float = math.nan) -> Part:
    """Judge samples by what they are worth.

    TRUST where draws are independent, or come from chains that mixed and are worth at least a tenth of the draws; CARE
    below that; DISTRUST where they are worth fewer than a hundred.

    Args:
        method: how they are made, in words.
        n: how many were drawn.
        worth: how many independent ones they amount to.
        r_hat: of chains; NaN where there are none.

    >>> judge_samples("Hamiltonian Monte Carlo", 1000, 50.0, 1.3).level
    'DISTRUST'
    """
    chains = math.isfinite(r_hat)
    text = f"{method}; {n:,} draws are worth {worth:,.0f} independent ones"
    text += f", R-hat {r_hat:.2f}" if chains else ""
    if worth < min(LEAST_ESS, n):
        return Part("DISTRUST", text)
    if worth < LEAST_SHARE * n or (chains and r_hat > R_HAT_LIMIT):
        return Part("CARE", text)
    return Part("TRUST", text)
