"""Statistics that say whether an estimate can be trusted: effective sample size, Pareto k, R-hat."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unnorm.types import LogZ, effective_sample_size

__all__ = [
    "KHAT_LIMIT",
    "LEAST_ESS",
    "R_HAT_LIMIT",
    "believable",
    "chain_ess",
    "doubt",
    "effective_sample_size",
    "pareto_khat",
    "r_hat",
    "smooth_tail",
    "tail_length",
]

LEAST_FOR_A_TAIL = 25
LEAST_ESS = 100  # fewer effective draws cannot tell their own error
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
    """Return how many of `n` weights make the tail: 3 sqrt(n), of few a fifth (Vehtari et al. 2024), or all but one.

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
        smoothed, khat = _arviz().psislw(-padded, r_eff=200 / len(padded))
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
    return _by_coordinate(_arviz().rhat, samples)


def chain_ess(samples: Tensor, method: str = "bulk") -> Tensor:
    """Effective number of independent draws of each coordinate (arviz-stats).

    Args:
        samples: (n_draws, n_chains, *event).
        method: "bulk", "tail", or "mean" for the standard error of a mean.

    >>> bool(800 < chain_ess(torch.randn(250, 4, generator=torch.Generator().manual_seed(1))) < 1200)
    True
    """
    return _by_coordinate(_arviz().ess, samples, method=method)


def _arviz() -> Any:
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]  # it takes a while to import

    return array_stats


def _by_coordinate(statistic: Callable[..., Any], samples: Tensor, **options: str) -> Tensor:
    values = samples.detach().cpu().double().numpy()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return torch.as_tensor(statistic(values, chain_axis=1, draw_axis=0, **options))


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
    """Return whether an estimate can tell its own error.

    >>> believable(LogZ(0.0, 0.01, 900, 0.2, "importance", 1000)), believable(LogZ(0.0, 0.5, 3, 1.5, "importance", 9))
    (True, False)
    """
    return doubt(found) is None
