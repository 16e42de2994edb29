"""Maps to standard coordinates: none at all, through a covariance, and from a box."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unnorm.data.transforms import Transform, floating
from unnorm.types import event_shape

__all__ = ["Identity", "Probit", "Whiten"]

LEAST = 2.0**-53  # of a box's width: so near a border a point counts as so far from it


class Identity(Transform):
    """z = x.

    >>> Identity()(torch.ones(2, 3))[1]
    tensor([0., 0.])
    """

    @property
    def config(self) -> Mapping[str, Any]:
        return {}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        z = x.to(floating(x))
        return z, z.new_zeros(len(x))

    def inverse(self, z: Tensor) -> Tensor:
        return z


class Whiten(Transform):
    """z = L^-1 (x - loc) over the flattened event, L lower triangular in `scale_tril`; computed in float64.

    >>> transform = Whiten(2)
    >>> _ = transform.scale_tril.copy_(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    >>> transform(torch.tensor([[2.0, 3.0]]))
    (tensor([[1., 2.]]), tensor([-0.6931]))
    """

    loc: Tensor
    scale_tril: Tensor

    def __init__(self, event: int | tuple[int, ...]):
        super().__init__()
        self.event = event_shape(event)
        size = math.prod(self.event)
        self.register_buffer("loc", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("scale_tril", torch.eye(size, dtype=torch.float64))

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event)}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        centred = x.to(self.loc.dtype).flatten(1) - self.loc
        z = torch.linalg.solve_triangular(self.scale_tril, centred.mT, upper=False).mT
        log_det = -self.scale_tril.diagonal().log().sum()
        return z.reshape(x.shape).to(floating(x)), log_det.to(floating(x)).expand(len(x))

    def inverse(self, z: Tensor) -> Tensor:
        x = z.to(self.loc.dtype).flatten(1) @ self.scale_tril.mT + self.loc
        return x.view(z.shape).to(z.dtype)


class Probit(Transform):
    """z = Phi^-1((x - low) / (high - low)): a uniform on the box to a standard normal; in float64.

    A point outside the box goes to infinity, where a normal density is zero.

    >>> z, log_det = Probit(1)(torch.tensor([[0.5], [2.0]]))
    >>> z
    tensor([[0.],
            [inf]])
    >>> torch.distributions.Normal(0.0, 1.0).log_prob(z[:, 0]) + log_det
    tensor([0., -inf])
    """

    low: Tensor
    high: Tensor

    def __init__(self, event: int | tuple[int, ...]):
        super().__init__()
        self.event = event_shape(event)
        self.register_buffer("low", torch.zeros(self.event, dtype=torch.float64))
        self.register_buffer("high", torch.ones(self.event, dtype=torch.float64))

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event)}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        share = (x.to(self.low.dtype) - self.low) / (self.high - self.low)
        z = torch.special.ndtri(share.clamp(LEAST, 1 - LEAST))
        log_slope = z.square() / 2 + 0.5 * math.log(2 * math.pi) - (self.high - self.low).log()
        z = torch.where(share < 0, -torch.inf, torch.where(share > 1, torch.inf, z))
        return z.to(floating(x)), log_slope.flatten(1).sum(-1).to(floating(x))

    def inverse(self, z: Tensor) -> Tensor:
        share = torch.special.ndtr(z.to(self.low.dtype))
        return (self.low + (self.high - self.low) * share).to(z.dtype)
