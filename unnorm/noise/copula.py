"""A noise seen through a transform; and with each coordinate's own distribution function, the Gaussian copula."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unnorm.data.quantiles import Gaussianize
from unnorm.data.rows import RowSource, moments
from unnorm.data.transforms import Compose, Transform, Transformed
from unnorm.errors import InvalidValue, ShrinkageWarning
from unnorm.names import choose
from unnorm.noise.base import Noise, event_of
from unnorm.noise.gaussian import Gaussian, correlation, shrunk

__all__ = ["Copula", "Pushed"]

COVARIANCES = {"full": "full", "diagonal": "diagonal"}


class Pushed(Noise):
    """x = T^-1(z) with z from another noise: log q(x) = log q_z(T(x)) + log|det dT/dx|. T is frozen.

    >>> from unnorm.data import Standardize
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> q = Pushed(Gaussian(1), Standardize.fit(10 * x))
    >>> q.log_prob(torch.tensor([[20.0]]))
    tensor([-3.2215])
    """

    base: Noise
    transform: Transform

    def __init__(self, base: Noise, transform: Transform):
        super().__init__()
        if not isinstance(base, Noise):
            raise InvalidValue(f"The 'base' of Pushed must be a noise. Got {type(base).__name__}.")
        if not isinstance(transform, Transform):
            raise InvalidValue(f"The 'transform' of Pushed must be a transform. Got {type(transform).__name__}.")
        self.base, self.transform = base, transform.requires_grad_(False)  # a noise is not trained with a model

    @property
    def event(self) -> tuple[int, ...]:
        """The shape of one draw, which no transform changes."""
        return event_of(self.base)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"base": self.base, "transform": self.transform}

    def coordinates(self) -> tuple[Transform, Noise]:
        further, noise = self.base.coordinates()
        return Compose([self.transform, further]), noise

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return self.transform.inverse(self.base.sample(n, generator=generator))

    def _log_prob(self, x: Tensor) -> Tensor:
        z, log_det = self.transform(x)
        return self.base.log_prob(z) + log_det


class Copula(Pushed):
    """A Gaussian copula: each coordinate has the data's distribution function, and they depend as a Gaussian's do.

    Each marginal is that of `Gaussianize` exactly: a smooth monotone spline, or, for integers and coordinates of few
    values, linear pieces in which each value has its frequency.

    Args:
        event: the shape of one example.
        pieces: of each coordinate.
        smooth: whether coordinates may be splines.
        covariance: "full", or "diagonal" for independent coordinates.

    >>> x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)).exp()
    >>> q = Copula.fit(x)
    >>> bool(q.log_prob(x).mean() > Gaussian.fit(x).log_prob(x).mean() + 0.5)
    True
    """

    base: Gaussian
    transform: Gaussianize

    def __init__(
        self,
        event: int | tuple[int, ...],
        pieces: int = 64,
        smooth: bool = True,
        covariance: str = "full",
    ):
        covariance = choose("covariance of a copula", covariance, COVARIANCES)
        super().__init__(Gaussian(event, covariance), Gaussianize(event, pieces, smooth))

    @property
    def config(self) -> Mapping[str, Any]:
        return {**self.transform.config, "covariance": self.base.covariance}

    @classmethod
    def fit(
        cls, data: RowSource, pieces: int | Tensor = 64, *, smooth: bool = True, covariance: str = "full"
    ) -> "Copula":
        """Distribution functions by `Gaussianize.fit`, then the correlation of the normal scores.

        A correlation matrix that the data leave singular is shrunk, and a ShrinkageWarning says so; likewise where a
        constant coordinate is spread over a piece of some width.
        """
        transform = Gaussianize.fit(data, pieces, smooth=smooth)
        noise = cls(transform.event, transform.pieces, smooth, covariance)
        noise.transform.load_state_dict(transform.state_dict())
        device = data[torch.zeros(1, dtype=torch.int64)].device
        scores = Transformed(data, transform.to(device), torch.float64)
        found = moments(scores)
        if (constant := found.constant.flatten()).any():
            at = int(constant.nonzero()[0])
            warnings.warn(
                f"{int(constant.sum())} of {len(constant)} coordinates are constant ({at}, ...): the noise spreads "
                f"them over a piece, {transform.knots[at, -1] - transform.knots[at, 0]:.2g} wide for the first.",
                ShrinkageWarning,
                stacklevel=2,
            )
        if covariance == "full":
            spread = torch.where(constant, 1.0, found.variance.flatten().sqrt())
            within = shrunk(correlation(scores, found, spread), found.n)
            noise.base.scale_tril.copy_(torch.linalg.cholesky(within))
        return noise
