"""Can the numbers be trusted? Effective sample size, Pareto k, R-hat, and the verdict in words."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from arviz_stats.base import array_stats  # type: ignore[attr-defined]
from torch import Tensor

from unnorm.types import LogZ, effective_sample_size

__all__ = [
    "KHAT_LIMIT",
    "LEAST_ESS",
    "R_HAT_LIMIT",
    "Verdict",
    "believable",
    "chain_ess",
    "doubt",
    "effective_sample_size",
    "pareto_khat",
    "r_hat",
    "smooth_tail",
    "tail_length",
    "verdict",
]

LEAST_TEST_ROWS = 30
LEAST_FOR_A_TAIL = 25
LEAST_ESS = 100  # fewer effective draws cannot tell their own error
MOST_ERROR = 0.05  # nats: an error of log Z up to here is good
R_HAT_LIMIT = 1.05  # Vehtari et al. 2021 ask for 1.01 of long chains; short ones scatter up to here
KHAT_LIMIT = 0.7  # Vehtari et al. 2024: below, the stderr of an importance estimate can be believed


def pareto_khat(log_w: Tensor) -> float:
    """Shape of the generalized Pareto distribution fitted to the largest weights (arviz-stats).

    Weights that do not vary have no tail and read as 0; a fit that fails reads as infinity, never as a good value.

    >>> import torch
    >>> pareto_khat(torch.zeros(100))
    0.0
    >>> bool(pareto_khat(torch.randn(10_000, generator=torch.Generator().manual_seed(0))) < 0.7)
    True
    """
    log_w = log_w.detach().flatten().double()
    log_w = log_w[log_w != -torch.inf]  # a weight of zero has no part in the tail
    top = log_w.topk(min(len(log_w), tail_length(len(log_w)) + 1)).values
    return smooth_tail(top, len(log_w))[1]


def tail_length(n: int) -> int:
    """How many of `n` weights make the tail: 3 sqrt(n), of few a fifth (Vehtari et al. 2024), of too few all but one.

    >>> tail_length(10_000), tail_length(100), tail_length(10)
    (300, 20, 9)
    """
    if n < LEAST_FOR_A_TAIL:
        return max(n - 1, 0)
    return int(3 * n**0.5) if n > 225 else n // 5


def smooth_tail(top: Tensor, n: int) -> tuple[Tensor, float]:
    """The largest log-weights as a generalized Pareto distribution fitted to them has them, and its shape k.

    Args:
        top: the largest `tail_length(n) + 1` log-weights, falling; the last of them is where the tail begins.
        n: how many positive weights there are.

    Returns:
        As many values as `top` (the last one as it was), falling, none above the largest; and k. Where no fit is
        possible `top` itself, and infinity, or 0 where the largest weights do not vary.
    """
    values = top.detach().cpu().double().numpy()
    if len(values) == 0 or not np.isfinite(values).all():
        return top, math.inf
    if values[0] - values[-1] < 1e-4:
        return top, 0.0
    if n < LEAST_FOR_A_TAIL:
        return top, math.inf
    # psislw takes log-likelihoods, the negative of log-weights, and as its tail the largest fifth of a few: the last
    # of ours, repeated, stands for all the others, which have no part in the fit.
    length = len(values) - 1
    padded = np.concatenate([np.full(4 * length + 1, values[-1]), values[-2::-1]])
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        smoothed, khat = array_stats.psislw(-padded, r_eff=200 / len(padded))
    smoothed = smoothed + (values[-1] - smoothed[0])  # psislw normalises
    if not (np.isfinite(khat) and np.isfinite(smoothed).all()):
        return top, math.inf
    return torch.from_numpy(smoothed[: -length - 2 : -1].copy()).to(top), float(khat)


def r_hat(samples: Tensor) -> Tensor:
    """Rank-normalised split R-hat of each coordinate (Vehtari et al. 2021, by arviz-stats); near 1 is good.

    NaN where it cannot be known: fewer than four draws, one chain, or a coordinate that does not vary.

    Args:
        samples: (n_draws, n_chains, *event).

    >>> together = torch.randn(100, 4, 2, generator=torch.Generator().manual_seed(0))
    >>> bool((r_hat(together) < 1.05).all()), bool((r_hat(together + 3 * torch.arange(4.0)[:, None]) > 1.5).all())
    (True, True)
    """
    return _by_coordinate(array_stats.rhat, samples)


def chain_ess(samples: Tensor, method: str = "bulk") -> Tensor:
    """Effective number of independent draws of each coordinate (arviz-stats).

    Args:
        samples: (n_draws, n_chains, *event).
        method: "bulk", "tail", or "mean" for the standard error of a mean.

    >>> bool(800 < chain_ess(torch.randn(250, 4, generator=torch.Generator().manual_seed(1))) < 1200)
    True
    """
    return _by_coordinate(array_stats.ess, samples, method=method)


def _by_coordinate(statistic: Callable[..., Any], samples: Tensor, **options: str) -> Tensor:
    values = samples.detach().cpu().double().numpy()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return torch.as_tensor(statistic(values, chain_axis=1, draw_axis=0, **options))


class Verdict(NamedTuple):
    """TRUST, CARE or DISTRUST, and why.

    >>> Verdict("CARE", ("the model is no better than its noise",)).line()
    'CARE: the model is no better than its noise.'
    """

    level: str
    reasons: tuple[str, ...]

    def line(self) -> str:
        return f"{self.level}: {'; '.join(self.reasons)}."


def doubt(found: LogZ) -> str | None:
    """Why an estimate cannot tell its own error; None where it can.

    Weighted draws need Pareto k below 0.7 and a hundred effective ones; a bracket, whose weights are bounded, the
    latter; a grid and a quadrature neither.

    >>> doubt(LogZ(0.0, 0.01, 900, 0.2, "importance", 1000))
    >>> doubt(LogZ(0.0, 0.5, 3, 1.5, "importance", 9))
    'Pareto k is 1.50, not below 0.7'
    """
    if not math.isfinite(found.value + found.stderr):
        return f"log Z is {found.value} ± {found.stderr}"
    if found.method in ("grid", "quadrature"):
        return None
    if found.method != "bracket" and not found.khat < KHAT_LIMIT:  # NaN is not good either
        return f"Pareto k is {found.khat:.2f}, not below {KHAT_LIMIT}"
    if not found.ess >= LEAST_ESS:
        return f"only {found.ess:.0f} effective draws of {found.n} stand behind it"
    return None


def believable(found: LogZ) -> bool:
    """Whether an estimate can tell its own error.

    >>> believable(LogZ(0.0, 0.01, 900, 0.2, "importance", 1000)), believable(LogZ(0.0, 0.5, 3, 1.5, "importance", 9))
    (True, False)
    """
    return doubt(found) is None


def verdict(
    log_z: Mapping[str, LogZ],
    numbers: Mapping[str, float] | None = None,
    warned: Sequence[str] = (),
    doubts: Sequence[str] = (),
    *,
    checked: bool = True,
) -> Verdict:
    """Judge a fitted density by its normaliser and, where known, its likelihoods.

    Args:
        log_z: estimates by method, the one in use last.
        numbers: `test_nll`, `test_stderr`, `train_nll`, `noise_nll`, in nats; `gain_stderr`, the error of the last
            one's distance from the first; `test_rows`; `discrete`, the number of columns that repeat values;
            `singular`, whether some column depends linearly on others; `best_kept`, whether the iterate is the one
            that validated best.
        warned: what the health monitor said during training.
        doubts: what the ladder has against its log Z.
        checked: whether rows that were not trained on had a say.

    >>> good = LogZ(0.0, 0.002, 5e4, 0.1, "importance", 100_000)
    >>> verdict({"importance": good}).level
    'TRUST'
    >>> print(verdict({"importance": good._replace(khat=1.2)}).line())
    DISTRUST: log Z cannot be believed: Pareto k is 1.20, not below 0.7.
    >>> print(verdict({"quadrature": LogZ(0.0, 0.01, math.nan, math.nan, "quadrature", 64)}, checked=False).line())
    TRUST: log Z is known to 0.01 nats by quadrature, one coordinate after the other.
    """
    numbers = numbers or {}
    bad, doubtful = list[str](), list[str]()
    used = list(log_z.values())[-1]
    if (problem := doubt(used)) is not None:
        bad.append(f"log Z cannot be believed: {problem}")
    bad += [f"log Z cannot be believed: {problem}" for problem in doubts if problem != doubt(used)]
    if not math.isfinite(numbers.get("test_nll", 0.0)):
        bad.append(f"the test NLL is {numbers['test_nll']}: some test row has no finite log density")
    if used.method == "grid" and not used.stderr < 0.5:
        bad.append("the density does not fall off toward the border of the grid: its integral may be infinite")
    elif used.stderr > MOST_ERROR and not bad:
        (bad if used.stderr > 0.5 else doubtful).append(f"log Z is known only to {used.stderr:.2g} nats")
    if (gap := _disagreement(log_z)) is not None:
        (bad if gap[0] > 0.1 else doubtful).append(gap[1])
    exact = used.method == "quadrature"  # there are no draws that could miss
    doubtful += [] if checked or exact else ["no rows were at hand: only these show mass that the noise misses"]
    doubtful += _likelihood_doubts(numbers, used)
    doubtful += [f"the health monitor warned in training ({line.split(':')[0].lower()})" for line in warned]
    if bad:
        return Verdict("DISTRUST", tuple(bad + doubtful))
    if doubtful:
        return Verdict("CARE", tuple(doubtful))
    return Verdict("TRUST", (_praise(used, log_z),))


def _disagreement(log_z: Mapping[str, LogZ]) -> tuple[float, str] | None:
    """Importance sampling and a grid that both can be believed, and are more than three errors apart."""
    importance, grid = log_z.get("importance"), log_z.get("grid")
    if importance is None or grid is None or not believable(importance) or grid.stderr > MOST_ERROR:
        return None
    gap, error = abs(importance.value - grid.value), math.hypot(importance.stderr, grid.stderr)
    if gap <= 3 * error or gap <= 1e-3:
        return None
    return gap, f"importance sampling and grid differ by {gap:.3f}, {gap / error:.1f} of their error"


def _praise(used: LogZ, log_z: Mapping[str, LogZ]) -> str:
    known = f"log Z is known to {used.stderr:.2g} nats"
    if used.method == "grid":
        importance = log_z.get("importance")
        if importance is None or not believable(importance):
            return f"{known} by a grid; importance sampling cannot check it"
        apart = abs(importance.value - used.value)
        return f"{known} by a grid; importance sampling agrees within {apart:.4f} ± {importance.stderr:.4f}"
    if used.method == "quadrature":
        return f"{known} by quadrature, one coordinate after the other"
    if used.method == "bracket":
        return f"{known} by annealed chains from both ends, {used.ess:.0f} of {used.n} where they meet"
    chains = "annealed importance sampling" if used.method == "ais" else f"{used.method} sampling"
    return f"{known} by {chains}, Pareto k is {used.khat:.2f}, the effective sample size {used.ess:.0f} of {used.n}"


def _likelihood_doubts(numbers: Mapping[str, float], used: LogZ) -> list[str]:
    doubts: list[str] = []
    test, stderr = numbers.get("test_nll"), numbers.get("test_stderr", 0.0)
    if test is None:
        return doubts
    noise, train = numbers.get("noise_nll"), numbers.get("train_nll")
    if (rows := numbers.get("test_rows", math.inf)) < LEAST_TEST_ROWS:
        doubts.append(f"{rows:.0f} test rows say little about the likelihood")
    error = numbers.get("gain_stderr", 0.0)
    if noise is not None and test > noise + 2 * error:
        doubts.append(f"the model's test NLL {test:.3f} is worse than its noise's {noise:.3f} (± {error:.3f})")
    if numbers.get("singular"):
        doubts.append("some column is a linear function of the others: such rows have no density")
    if (discrete := numbers.get("discrete", 0)) > 0:
        doubts.append(f"{discrete:.0f} columns repeat values: a density of them has no natural scale")
    if train is not None and test - train > max(0.1, 3 * stderr):
        cure = "fewer steps, a smaller model, or more rows"
        if not numbers.get("best_kept"):
            cure = f"--iterate best, {cure}"
        doubts.append(f"test NLL {test:.3f} is far above train NLL {train:.3f}: it overfits ({cure})")
    if noise is not None and used.method == "importance" and noise - test > math.log(used.n):
        doubts.append(
            f"the data are {noise - test:.1f} nats from the noise, more than log n = {math.log(used.n):.1f}: "
            "no such sample can certify that"
        )
    return doubts
