"""The multivariate Gaussian, fitted to data: the paper's noise."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unnorm.data.affine import Whiten
from unnorm.data.rows import Moments, RowSource, chunks, moments, spread
from unnorm.data.transforms import Standardize, Transform
from unnorm.errors import InvalidValue, ShrinkageWarning
from unnorm.names import choose
from unnorm.noise.base import Noise
from unnorm.randomness import derive_seed
from unnorm.types import event_shape

__all__ = ["Gaussian", "correlation", "scales", "shrunk"]

COVARIANCES = {"full": "full", "diagonal": "diagonal", "low-rank": "low-rank"}
CONDITION = 1e8  # a correlation matrix beyond this condition number is treated as singular
LEAST_UNIQUE = 1e-4  # share of a coordinate's variance that a low-rank factor may not explain
FLOOR = 1e-6  # variance given to a constant coordinate, as a share of the mean variance


class Gaussian(Noise):
    """N(loc, Sigma) with full, diagonal, or low-rank-plus-diagonal covariance.

    Sigma = L L^T, diag(s^2), or F F^T + diag(s^2), with L in `scale_tril`, F in `factor`, s in `scale`.

    Args:
        event: the shape of one example; the distribution is over its flattened coordinates.
        covariance: "full", "diagonal" or "low-rank".
        rank: columns of F for "low-rank"; half the coordinates, at most 10, when None.

    >>> q = Gaussian(2)
    >>> q.log_prob(torch.zeros(1, 2))
    tensor([-1.8379])
    >>> x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0])
    >>> q = Gaussian.fit(x, covariance="diagonal")
    >>> q.sample(4, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3])
    """

    loc: Tensor
    scale: Tensor
    scale_tril: Tensor
    factor: Tensor

    def __init__(self, event: int | tuple[int, ...], covariance: str = "full", rank: int | None = None):
        super().__init__()
        self.event = event_shape(event)
        self.covariance = choose("covariance", covariance, COVARIANCES)
        size = math.prod(self.event)
        if covariance == "low-rank":
            rank = max(1, min(10, size // 2)) if rank is None else rank
            if not 1 <= rank <= size:
                raise InvalidValue(f"The 'rank' of Gaussian must be between 1 and the {size} coordinates. Got {rank}.")
        elif rank is not None:
            raise InvalidValue(
                f"The 'rank' of Gaussian belongs to covariance='low-rank'. Got covariance='{covariance}'."
            )
        self.rank = rank
        self.register_buffer("loc", torch.zeros(size))
        if covariance == "full":
            self.register_buffer("scale_tril", torch.eye(size))
        else:
            self.register_buffer("scale", torch.ones(size))
        if covariance == "low-rank":
            self.register_buffer("factor", torch.zeros(size, rank or 0))

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event), "covariance": self.covariance, "rank": self.rank}

    @classmethod
    def fit(cls, data: RowSource, covariance: str = "full", rank: int | None = None) -> "Gaussian":
        """Mean and covariance of the data, never singular.

        A constant coordinate, or a full covariance of fewer rows than coordinates, is regularised, and a
        ShrinkageWarning says so: the correlation matrix is shrunk toward the identity by the OAS rule
        (Chen, Wiesel, Eldar, Hero 2010).
        """
        found = moments(data)
        noise = cls(tuple(found.mean.shape), covariance, rank)
        noise.loc.copy_(found.mean.flatten())
        scale = scales(found)
        if covariance == "diagonal":
            noise.scale.copy_(scale)
        elif covariance == "full":
            within = shrunk(correlation(data, found, scale), found.n)
            noise.scale_tril.copy_(scale[:, None] * torch.linalg.cholesky(within))
        else:
            loading, uniqueness = _low_rank(data, found, scale, noise.rank or 1)
            noise.factor.copy_(scale[:, None] * loading)
            noise.scale.copy_(scale * uniqueness.sqrt())
        return noise

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        def normal(size: int) -> Tensor:
            return torch.randn(n, size, generator=generator, device=self.loc.device, dtype=self.loc.dtype)

        if self.covariance == "full":
            centred = normal(len(self.loc)) @ self.scale_tril.mT
        else:
            centred = normal(len(self.loc)) * self.scale
        if self.covariance == "low-rank":
            centred = centred + normal(self.factor.shape[1]) @ self.factor.mT
        return (self.loc + centred).view(n, *self.event)

    def log_prob_and_score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.covariance == "low-rank":
            return super().log_prob_and_score(x)
        with torch.no_grad():
            centred = (x.flatten(1) - self.loc).mT
            if self.covariance == "full":
                white = torch.linalg.solve_triangular(self.scale_tril, centred, upper=False)
                score = -torch.linalg.solve_triangular(self.scale_tril.mT, white, upper=True)
                half_log_det = self.scale_tril.diagonal().log().sum()
            else:
                white = centred / self.scale[:, None]
                score, half_log_det = -white / self.scale[:, None], self.scale.log().sum()
            value = -0.5 * (white.square().sum(0) + len(self.loc) * math.log(2 * math.pi)) - half_log_det
            return value, score.mT.reshape(x.shape)

    def coordinates(self) -> tuple[Transform, Noise]:
        transform: Standardize | Whiten
        if self.covariance == "diagonal":
            transform = Standardize(self.event)
            transform.scale.copy_(self.scale.view(self.event))
        else:
            transform = Whiten(self.event)
            tril = self.scale_tril if self.covariance == "full" else torch.linalg.cholesky(self._dense())
            transform.scale_tril.copy_(tril)
        transform.loc.copy_(self.loc.view(transform.loc.shape))
        return transform.to(self.loc.device), Gaussian(self.event, "diagonal").to(self.loc)

    def _dense(self) -> Tensor:
        """F F^T + diag(s^2) in float64."""
        factor, scale = self.factor.double(), self.scale.double()
        return factor @ factor.mT + scale.square().diag()

    def _log_prob(self, x: Tensor) -> Tensor:
        centred = x.flatten(1) - self.loc
        if self.covariance == "full":
            white = torch.linalg.solve_triangular(self.scale_tril, centred.mT, upper=False)
            mahalanobis, half_log_det = white.square().sum(0), self.scale_tril.diagonal().log().sum()
        else:
            white = centred / self.scale
            mahalanobis, half_log_det = white.square().sum(-1), self.scale.log().sum()
        if self.covariance == "low-rank":  # Woodbury's identity and the determinant lemma
            loading = self.factor / self.scale[:, None]
            capacitance = torch.eye(loading.shape[1], dtype=loading.dtype, device=loading.device) + loading.mT @ loading
            tril = torch.linalg.cholesky(capacitance)
            seen = torch.linalg.solve_triangular(tril, (white @ loading).mT, upper=False)
            mahalanobis = mahalanobis - seen.square().sum(0)
            half_log_det = half_log_det + tril.diagonal().log().sum()
        return -0.5 * (mahalanobis + len(self.loc) * math.log(2 * math.pi)) - half_log_det


def scales(found: Moments) -> Tensor:
    """Standard deviation of each coordinate, positive also for constant ones."""
    variance, constant = found.variance.flatten(), found.constant.flatten() | (found.variance.flatten() == 0)
    if constant.any():
        typical = variance[~constant].mean() if not constant.all() else torch.tensor(1.0, dtype=variance.dtype)
        names = ", ".join(str(place) for place in constant.nonzero().flatten().tolist()[:5])
        more = ", ..." if int(constant.sum()) > 5 else ""
        warnings.warn(
            f"{int(constant.sum())} of {len(variance)} coordinates are constant ({names}{more}): "
            f"the noise gives them variance {FLOOR * typical:.2g}.",
            ShrinkageWarning,
            stacklevel=3,
        )
        variance = torch.where(constant, FLOOR * typical, variance)
    return variance.sqrt()


def _standardised(chunk: Tensor, found: Moments, scale: Tensor) -> Tensor:
    return (chunk.double().cpu().flatten(1) - found.mean.flatten()) / scale


def correlation(data: RowSource, found: Moments, scale: Tensor) -> Tensor:
    """The correlation matrix of the data, from its moments and standard deviations."""
    total = torch.zeros(len(scale), len(scale), dtype=torch.float64)
    for chunk in chunks(data):
        z = _standardised(chunk, found, scale)
        total += z.mT @ z
    total /= found.n
    total.diagonal().fill_(1.0)
    return total


def shrunk(matrix: Tensor, n: int) -> Tensor:
    """The correlation itself where it is well conditioned, else shrunk toward the identity by OAS."""
    size = len(matrix)
    if n > size:
        eigenvalues = torch.linalg.eigvalsh(matrix)
        if eigenvalues[0] * CONDITION > eigenvalues[-1]:
            return matrix
    share = max(_oas(matrix, n), 1.0 / CONDITION)
    warnings.warn(
        f"The covariance of {n} rows in {size} coordinates is singular: "
        f"shrunk by {share:.2g} toward uncorrelated coordinates.",
        ShrinkageWarning,
        stacklevel=3,
    )
    return (1 - share) * matrix + share * torch.eye(size, dtype=matrix.dtype)


def _oas(covariance: Tensor, n: int) -> float:
    """The oracle-approximating shrinkage intensity of a sample covariance from n rows."""
    size = len(covariance)
    square, trace = float(covariance.square().sum()), float(covariance.trace())
    numerator = square + trace**2
    denominator = (n + 1) * (square - trace**2 / size)
    return 1.0 if denominator <= 0 else min(1.0, numerator / denominator)


def _low_rank(data: RowSource, found: Moments, scale: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Loading and uniqueness of the standardised data: leading directions, and what they leave of each variance."""
    from sklearn.utils.extmath import randomized_svd  # scikit-learn takes a second to import

    rows = spread(found.n, 20_000)
    z = torch.cat([_standardised(data[part], found, scale) for part in rows.split(1000)])
    # Few rows lie in few directions, whatever they are: a quarter of them, and beyond what all have by chance.
    count = min(rank, z.shape[1], max(1, (len(z) - 1) // 4))
    _, singular, directions = randomized_svd(z.numpy(), n_components=count, random_state=derive_seed(0, "directions"))
    variances = torch.from_numpy(singular.copy()).square() / len(z)
    left = min(z.shape[1], len(z) - 1) - len(variances)
    rest = max(0.0, float(z.square().sum() / len(z) - variances.sum())) / max(1, left)
    loading = torch.from_numpy(directions.copy()).mT * (variances - rest).clamp_min(0).sqrt()
    loading = torch.nn.functional.pad(loading, (0, rank - loading.shape[1]))
    uniqueness = 1 - loading.square().sum(-1)
    if (raised := int((uniqueness < LEAST_UNIQUE).sum())) > 0:
        warnings.warn(
            f"{raised} of {len(scale)} coordinates are all but determined by {rank} directions: "
            f"the noise gives each {LEAST_UNIQUE:g} of its variance of its own.",
            ShrinkageWarning,
            stacklevel=3,
        )
    return loading, uniqueness.clamp_min(LEAST_UNIQUE)
