"""Gaussian mixtures of awkward data: EM that begins away from outliers and cannot become singular."""

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from sklearn import mixture
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from unnorm.data.rows import RowSource, spread
from unnorm.errors import ShrinkageWarning
from unnorm.noise.gaussian import Gaussian
from unnorm.randomness import derive_seed

__all__ = ["Components", "fit_mixture"]

MOST_ROWS = 20_000
MOST_NUMBERS = 500_000
WIDEST = 64  # coordinates, for full covariances of two or more components
ROWS_EACH = 10  # rows for each row of each full covariance matrix
REACH = 10.0  # robust standard deviations from the median: what lies farther does not choose where EM begins
TOLERANCE = 5e-4  # gain of a step of EM, in nats per number, that is not worth another
LEAST = 1e-3  # variance added to every component in every direction, as a share of the whole data's


class Components(NamedTuple):
    """Weights (k), means (k, d) and Cholesky factors (k, d, d), or standard deviations (k, d); in float64."""

    weight: Tensor
    loc: Tensor
    tril: Tensor


def fit_mixture(
    data: RowSource, components: int | None, covariance: str | None, most: int
) -> tuple[tuple[int, ...], Components]:
    """The event's shape and the components: as many as given, or 1, 2, 4 and on by doubling while BIC falls."""
    width = math.prod(data[torch.zeros(1, dtype=torch.int64)].shape[1:])
    rows = (
        data[spread(len(data), min(MOST_ROWS, max(100, 2 * (components or 0), MOST_NUMBERS // width)))].double().cpu()
    )
    event, x = tuple(rows.shape[1:]), rows.flatten(1)

    def shape(count: int) -> str:
        if covariance is not None:
            return covariance
        if count == 1:
            return "full" if width <= 1000 else "diagonal"
        return "full" if len(x) >= ROWS_EACH * count * width and width <= WIDEST else "diagonal"

    if components is not None:
        return event, _one(data, shape(1)) if components == 1 else _several(x, components, shape(components))
    best, count = _one(data, shape(1)), 2
    least = _bic(best, x)
    while count <= min(most, len(x) // 5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkageWarning)  # the single Gaussian has said it
            candidate = _several(x, count, shape(count))
        if (bic := _bic(candidate, x)) < least:
            best, least = candidate, bic
        elif count > 2:
            break
        count *= 2
    return event, best


def _one(data: RowSource, covariance: str) -> Components:
    found = Gaussian.fit(data, covariance).double()
    scale = found.scale_tril if covariance == "full" else found.scale
    return Components(torch.ones(1, dtype=torch.float64), found.loc[None], scale[None])


def _several(x: Tensor, count: int, covariance: str) -> Components:
    """EM in coordinates in which the bulk of the data is white, so that `LEAST` means the same in all directions."""
    median = x.median(0).values
    spread = 1.4826 * (x - median).abs().median(0).values
    spread = torch.where(spread > 0, spread, x.std(0, correction=0))
    bulk = torch.clamp(x, median - REACH * spread, median + REACH * spread)
    start = Gaussian.fit(bulk, covariance).double()
    if covariance == "full":
        tril = start.scale_tril
        white, inner = (
            torch.linalg.solve_triangular(tril, (rows - start.loc).mT, upper=False).mT.numpy() for rows in (x, bulk)
        )
    else:
        white, inner = (((rows - start.loc) / start.scale).numpy() for rows in (x, bulk))
    even = ((bulk - start.loc) / bulk.std(0, correction=0).clamp_min(1e-300)).numpy()  # white rows hide long clusters
    far = (x != bulk).any(1).numpy()
    members = _clusters(even, count - 1 if far.any() else count) & ~far
    em = _maximised(white, inner, np.vstack([members, far]) if far.any() else members, covariance)
    weight, loc, within = (torch.from_numpy(found) for found in (em.weights_, em.means_, em.covariances_))
    constant = torch.from_numpy((white == white[0]).all(0)).double()  # keeps the variance that Gaussian.fit gives it
    if covariance == "full":
        own = torch.linalg.cholesky(within + constant.diag())
        return Components(weight, loc @ tril.mT + start.loc, tril @ own)
    return Components(weight, loc * start.scale + start.loc, (within + constant).sqrt() * start.scale)


def _clusters(rows: np.ndarray, count: int) -> np.ndarray:
    """(count, n): which rows are in which, by k-means; where there are too few distinct rows some are empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        label = KMeans(count, n_init=1, max_iter=50, random_state=derive_seed(0, "mixture")).fit_predict(rows)
    return label == np.arange(count)[:, None]


def _maximised(white: np.ndarray, inner: np.ndarray, members: np.ndarray, covariance: str) -> mixture.GaussianMixture:
    """EM from these clusters; one of outliers, which differ in `white` and `inner`, begins wide and in the middle."""
    count, width = len(members), white.shape[1]
    weight = (members.sum(1) + 1.0) / (members.shape[1] + count)
    loc, precision = np.zeros((count, width)), np.ones((count, width))
    for place, own in enumerate(members):
        if (white[own] != inner[own]).any():
            precision[place] = 1 / (np.square(white[own]).mean(0) + LEAST)
        elif own.any():
            loc[place], precision[place] = inner[own].mean(0), 1 / (inner[own].var(0) + LEAST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a hundred steps are enough for a noise
        return mixture.GaussianMixture(
            count,
            covariance_type="full" if covariance == "full" else "diag",
            reg_covar=LEAST,
            tol=TOLERANCE * width,
            max_iter=100,
            weights_init=weight,
            means_init=loc,
            precisions_init=np.stack([np.diag(row) for row in precision]) if covariance == "full" else precision,
            random_state=derive_seed(0, "mixture"),
        ).fit(white)


def _bic(found: Components, x: Tensor) -> float:
    """-2 log likelihood + log(n) times the number of free parameters."""
    count, width = found.loc.shape
    centred = x - found.loc[:, None]
    if found.tril.ndim == 3:
        white = torch.linalg.solve_triangular(found.tril, centred.mT, upper=False).mT
        log_scale, free = found.tril.diagonal(dim1=1, dim2=2).log().sum(-1), width * (width + 1) // 2
    else:
        white, log_scale, free = centred / found.tril[:, None], found.tril.log().sum(-1), width
    each = (found.weight.log() - log_scale)[:, None] - 0.5 * white.square().sum(-1) - width / 2 * math.log(2 * math.pi)
    return float(-2 * torch.logsumexp(each, 0).sum() + (count * (1 + width + free) - 1) * math.log(len(x)))
