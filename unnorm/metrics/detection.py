"""How well a log density tells outliers from inliers.

Scores are log densities: higher means more like the data. Only their order counts, so log p~ serves as well as log p,
and -inf (a density of zero) is the lowest score of all. NaN is refused.
"""

import math
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from unnorm.errors import DataError, InvalidValue
from unnorm.randomness import numpy_stream

__all__ = ["Detection", "detect", "fpr_at_tpr"]


class Detection(NamedTuple):
    """What the scores of inliers and outliers amount to.

    Attributes:
        auroc: the probability that an inlier scores above an outlier, ties counted half.
        stderr: its standard error (DeLong, DeLong, Clarke-Pearson 1988); 0 where the classes separate completely.
        floor: the standard deviation around 0.5 of the AUROC of two draws of the same data, of these sizes (that of the
            Mann-Whitney statistic, sqrt((n + m + 1) / 12 n m); ties make it smaller).
        aupr_in: average precision with inliers as the positive class, found by high scores; by chance their share.
        aupr_out: average precision with outliers as the positive class, found by low scores; by chance their share.
        fpr80: the share of outliers accepted by a threshold that accepts 80% of the inliers.
        fpr95: the same for 95%.
        n_in: how many inliers.
        n_out: how many outliers.

    >>> print(detect([3.0, 2.0, 1.0], [0.0, 2.0, -1.0]).line())
    AUROC 0.833 +- 0.192 (chance 0.5 +- 0.255), AUPR in 0.806 out 0.867, FPR80 0.333 FPR95 0.333 (3 in, 3 out)
    """

    auroc: float
    stderr: float
    floor: float
    aupr_in: float
    aupr_out: float
    fpr80: float
    fpr95: float
    n_in: int
    n_out: int

    @property
    def chance(self) -> dict[str, tuple[float, float]]:
        """Of each number, mean and standard deviation where both classes are draws of the same data, of these sizes.

        By two hundred random orders of scores without ties.

        >>> mean, spread = detect([3.0, 2.0, 1.0, 0.0] * 25, [0.0, 2.0, -1.0]).chance["fpr80"]
        >>> 0.7 < mean < 0.9, 0.1 < spread < 0.3
        (True, True)
        """
        return _by_chance(self.n_in, self.n_out)

    def line(self) -> str:
        """The result in one line, for a person."""
        return (
            f"AUROC {self.auroc:.3f} +- {self.stderr:.3f} (chance 0.5 +- {self.floor:.3f}), "
            f"AUPR in {self.aupr_in:.3f} out {self.aupr_out:.3f}, "
            f"FPR80 {self.fpr80:.3f} FPR95 {self.fpr95:.3f} ({self.n_in} in, {self.n_out} out)"
        )


Scores: TypeAlias = Tensor | np.ndarray | list[float]


def detect(inliers: Scores, outliers: Scores) -> Detection:
    """AUROC, average precision both ways, and false positive rates, by scikit-learn.

    Average precision is the step-wise sum, without the interpolation that flatters. `score_histogram` draws the same
    scores: with `scores = {"inliers": ..., "outliers": ...}`, `detect(**scores)` and `score_histogram(path, scores)`.

    >>> detect([5.0, 4.0], [1.0, -math.inf])[:7]
    (1.0, 0.0, 0.322..., 1.0, 1.0, 0.0, 0.0)
    """
    is_in, rank = _ranked(inliers, outliers)
    high, low = rank[is_in], rank[~is_in]
    n, m = len(high), len(low)
    floor = math.sqrt((n + m + 1) / (12 * n * m))
    return Detection(stderr=_delong(high, low), floor=floor, n_in=n, n_out=m, **_numbers(is_in, rank))


@lru_cache(maxsize=32)
def _by_chance(n: int, m: int, orders: int = 200, most: int = 4000) -> dict[str, tuple[float, float]]:
    """Of large classes, by smaller ones of the same shares: the standard deviation falls with the root of the size."""
    scale = max(1.0, (n + m) / most)
    few_n, few_m = max(2, round(n / scale)), max(2, round(m / scale))
    random, is_in = numpy_stream(0, "scores by chance"), np.repeat([True, False], [few_n, few_m])
    values = dict[str, list[float]]()
    for _ in range(orders):
        for name, value in _numbers(is_in, random.permutation(few_n + few_m).astype(float)).items():
            values.setdefault(name, []).append(value)
    shrink = math.sqrt((1 / n + 1 / m) / (1 / few_n + 1 / few_m))
    return {name: (float(np.mean(own)), float(np.std(own, ddof=1)) * shrink) for name, own in values.items()}


def _numbers(is_in: np.ndarray, rank: np.ndarray) -> dict[str, float]:
    return {
        "auroc": float(roc_auc_score(is_in, rank)),
        "aupr_in": float(average_precision_score(is_in, rank)),
        "aupr_out": float(average_precision_score(~is_in, -rank)),
        "fpr80": _fpr(is_in, rank, 0.80),
        "fpr95": _fpr(is_in, rank, 0.95),
    }


def fpr_at_tpr(inliers: Scores, outliers: Scores, tpr: float) -> float:
    """The smallest share of outliers at or above a threshold that at least the share `tpr` of inliers reaches.

    Equal scores pass or fail together: there is no threshold between them.

    >>> fpr_at_tpr([4.0, 3.0, 2.0, 1.0], [3.0, 0.0], 0.5)
    0.5
    """
    if not 0 < tpr <= 1:
        raise InvalidValue(f"The 'tpr' of fpr_at_tpr must be above 0 and at most 1. Got {tpr}.")
    return _fpr(*_ranked(inliers, outliers), tpr)


def as_numbers(scores: Scores) -> np.ndarray:
    """As an array of float64."""
    return scores.detach().double().cpu().numpy() if isinstance(scores, Tensor) else np.asarray(scores, dtype=float)


def _ranked(inliers: Scores, outliers: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Which scores are inliers', and the dense ranks of all: the same order, ties kept, and finite."""
    scores = []
    for name, values in (("inliers", inliers), ("outliers", outliers)):
        own = as_numbers(values)
        if own.ndim != 1 or len(own) == 0:
            raise DataError(f"The scores of the {name} must have shape (n,), n at least 1. Got {own.shape}.")
        if np.isnan(own).any():
            raise DataError(f"{int(np.isnan(own).sum())} of {len(own)} scores of the {name} are NaN.")
        scores.append(own)
    is_in = np.repeat([True, False], [len(own) for own in scores])
    return is_in, np.unique(np.concatenate(scores), return_inverse=True)[1].astype(float)


def _fpr(is_in: np.ndarray, rank: np.ndarray, tpr: float) -> float:
    false, true, _ = roc_curve(is_in, rank, drop_intermediate=False)
    return float(false[true >= tpr].min())


def _delong(high: np.ndarray, low: np.ndarray) -> float:
    """The AUROC is a mean over both classes; its variance is the sum of those of each class' placements."""
    variance = 0.0
    for own, other in ((high, np.sort(low)), (low, np.sort(high))):
        below = np.searchsorted(other, own, side="left")
        placement = (below + np.searchsorted(other, own, side="right")) / (2 * len(other))
        variance += placement.var(ddof=1) / len(own) if len(own) > 1 else math.nan
    return math.sqrt(variance)
