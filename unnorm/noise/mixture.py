"""Mixtures: of Gaussians, fitted by EM; and of any noises."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.data.rows import RowSource
from unnorm.errors import InvalidValue
from unnorm.names import choose
from unnorm.noise.base import Noise
from unnorm.types import event_shape

__all__ = ["GaussianMixture", "Mixture"]

COVARIANCES = {"full": "full", "diagonal": "diagonal"}


class GaussianMixture(Noise):
    """sum_k w_k N(loc_k, Sigma_k) with full covariances L_k L_k^T in `scale_tril`, or diagonal ones with `scale`.

    Args:
        event: the shape of one example; the distribution is over its flattened coordinates.
        components: how many Gaussians.
        covariance: "full" or "diagonal".

    >>> g = torch.Generator().manual_seed(0)
    >>> x = torch.randn(1000, 2, generator=g) + 8 * torch.randint(2, (1000, 1), generator=g)
    >>> q = GaussianMixture.fit(x)
    >>> q.components
    2
    >>> q.sample(3, generator=g).shape
    torch.Size([3, 2])
    """

    log_weight: Tensor
    loc: Tensor
    scale: Tensor
    scale_tril: Tensor

    def __init__(self, event: int | tuple[int, ...], components: int, covariance: str = "full"):
        super().__init__()
        self.event = event_shape(event)
        self.covariance = choose("covariance of a mixture", covariance, COVARIANCES)
        if not isinstance(components, int) or components < 1:
            raise InvalidValue(f"The 'components' of GaussianMixture must be at least 1. Got {components}.")
        self.components = components
        size = math.prod(self.event)
        self.register_buffer("log_weight", torch.full((components,), -math.log(components)))
        self.register_buffer("loc", torch.zeros(components, size))
        if covariance == "full":
            self.register_buffer("scale_tril", torch.eye(size).repeat(components, 1, 1))
        else:
            self.register_buffer("scale", torch.ones(components, size))

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event), "components": self.components, "covariance": self.covariance}

    @classmethod
    def fit(
        cls, data: RowSource, components: int | None = None, covariance: str | None = None, *, most: int = 64
    ) -> "GaussianMixture":
        """By EM (scikit-learn's) from k-means; one component is `Gaussian.fit`, with its regularisation and warnings.

        Of two or more each is wider than EM's by a thousandth of the variance of the bulk of the data, in every
        direction, so that none collapses onto a few rows. Where rows lie farther than ten robust standard deviations
        from the median, one component begins as wide as they are.

        Args:
            data: rows; at most 20,000 of them, and half a million numbers, are used for EM.
            components: how many; by default that of the least BIC of 1, 2, 4, and then 8, 16, ... as long as it falls.
            covariance: by default "full" where there are ten rows for each row of each covariance matrix, and at most
                64 coordinates; otherwise "diagonal".
            most: components at most, when these are chosen by BIC.
        """
        if covariance is not None:
            choose("covariance of a mixture", covariance, COVARIANCES)
        if components is not None and (not isinstance(components, int) or not 1 <= components <= len(data)):
            rule = f"between 1 and the {len(data)} rows"
            raise InvalidValue(f"The 'components' of GaussianMixture must be {rule}. Got {components}.")
        from unnorm.noise.em import fit_mixture  # by scikit-learn, which takes a second to import

        event, found = fit_mixture(data, components, covariance, most)
        noise = cls(event, len(found.weight), "full" if found.tril.ndim == 3 else "diagonal")
        noise.log_weight.copy_(found.weight.log())
        noise.loc.copy_(found.loc)
        (noise.scale_tril if found.tril.ndim == 3 else noise.scale).copy_(found.tril)
        return noise

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        which = torch.multinomial(self.log_weight.exp(), n, replacement=True, generator=generator)
        z = torch.randn(n, self.loc.shape[1], generator=generator, device=self.loc.device, dtype=self.loc.dtype)
        if self.covariance == "diagonal":
            x = self.loc[which] + self.scale[which] * z
        else:
            x = self.loc[which]
            for place, tril in enumerate(self.scale_tril):
                own = which == place
                x[own] += z[own] @ tril.mT
        return x.view(n, *self.event)

    def _log_prob(self, x: Tensor) -> Tensor:
        centred = x.flatten(1)[None] - self.loc[:, None]  # (components, n, coordinates)
        if self.covariance == "full":
            white = torch.linalg.solve_triangular(self.scale_tril, centred.mT, upper=False)
            square, log_scale = white.square().sum(1), self.scale_tril.diagonal(dim1=1, dim2=2).log().sum(-1)
        else:
            square, log_scale = (centred / self.scale[:, None]).square().sum(-1), self.scale.log().sum(-1)
        constant = self.log_weight - log_scale - 0.5 * self.loc.shape[1] * math.log(2 * math.pi)
        return torch.logsumexp(constant[:, None] - 0.5 * square, 0)


class Mixture(Noise):
    """sum_k w_k q_k of any noises: such as the paper's data points plus noise, and a Gaussian.

    Args:
        parts: noises over the same events.
        weights: positive, of any sum; equal when None.

    >>> from unnorm.noise import Gaussian, Smoothed
    >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    >>> q = Mixture([Smoothed.fit(x), Gaussian.fit(x)], [3, 1])
    >>> q.log_prob(x).shape
    torch.Size([100])
    """

    log_weight: Tensor

    def __init__(self, parts: Sequence[Noise], weights: Sequence[float] | None = None):
        super().__init__()
        if not parts:
            raise InvalidValue("The 'parts' of Mixture must be at least one noise. Got none.")
        for part in parts:
            if not isinstance(part, Noise):
                raise InvalidValue(f"The 'parts' of Mixture must be noises. Got {type(part).__name__}.")
        if weights is not None and len(weights) != len(parts):
            raise InvalidValue(f"The 'weights' of Mixture must be {len(parts)}, one for each part. Got {len(weights)}.")
        if weights is not None and not all(0 < weight < math.inf for weight in weights):
            raise InvalidValue(f"The 'weights' of Mixture must be positive. Got {list(weights)}.")
        if weights is None:
            log_weight = torch.full((len(parts),), -math.log(len(parts)))
        else:
            own = torch.tensor(list(weights), dtype=torch.float64)
            log_weight = (own.log() - own.sum().log()).to(torch.get_default_dtype())
        self.parts = nn.ModuleList(parts)
        self.register_buffer("log_weight", log_weight)
        device = next((buffer.device for buffer in parts[0].buffers()), self.log_weight.device)
        self.log_weight = self.log_weight.to(device)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"parts": list(self.parts)}

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        which = torch.multinomial(self.log_weight.exp(), n, replacement=True, generator=generator)
        drawn = []
        for place, part in enumerate(self.parts):
            if (count := int((which == place).sum())) > 0:
                drawn.append(part.sample(count, generator=generator))  # type: ignore[operator]
        return torch.cat(drawn)[which.argsort(stable=True).argsort(stable=True)]

    def _log_prob(self, x: Tensor) -> Tensor:
        each = torch.stack([part.log_prob(x) for part in self.parts])  # type: ignore[operator]
        return torch.logsumexp(self.log_weight[:, None].to(each.dtype) + each, 0)
