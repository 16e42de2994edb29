"""The uniform distribution on a box."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unnorm.data.affine import Probit
from unnorm.data.rows import RowSource, chunks, moments
from unnorm.data.transforms import Transform
from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise
from unnorm.noise.gaussian import Gaussian, scales
from unnorm.types import event_shape

__all__ = ["Uniform"]


class Uniform(Noise):
    """Every point of the box from `low` to `high` alike; -inf outside, so use it only where the model ends there too.

    >>> q = Uniform.fit(torch.tensor([[0.0], [10.0]]), margin=0.0)
    >>> q.log_prob(torch.tensor([[5.0], [11.0]]))
    tensor([-2.3026,    -inf])
    """

    low: Tensor
    high: Tensor

    def __init__(self, event: int | tuple[int, ...]):
        super().__init__()
        self.event = event_shape(event)
        self.register_buffer("low", torch.zeros(self.event))
        self.register_buffer("high", torch.ones(self.event))

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event)}

    @classmethod
    def fit(cls, data: RowSource, margin: float = 0.05) -> "Uniform":
        """The data's range in each coordinate, wider by `margin` of it at either end.

        A constant coordinate is given some width, and a ShrinkageWarning says so.
        """
        if not (margin >= 0 and math.isfinite(margin)):
            raise InvalidValue(f"The 'margin' of Uniform must not be negative. Got {margin}.")
        found = moments(data)
        scale = scales(found).view(found.mean.shape)
        low = high = found.mean
        for chunk in chunks(data):
            rows = chunk.double().cpu()
            low, high = torch.minimum(low, rows.amin(0)), torch.maximum(high, rows.amax(0))
        wider = torch.where(high > low, margin * (high - low), math.sqrt(3) * scale)
        noise = cls(tuple(found.mean.shape))
        noise.low.copy_(low - wider)
        noise.high.copy_(high + wider)
        if not (noise.high > noise.low).all():
            raise InvalidValue("A coordinate is too narrow for its size in float32: standardise the data first.")
        return noise

    def coordinates(self) -> tuple[Transform, Noise]:
        transform = Probit(self.event)
        transform.low.copy_(self.low)
        transform.high.copy_(self.high)
        return transform.to(self.low.device), Gaussian(self.event, "diagonal").to(self.low)

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        share = torch.rand(n, *self.event, generator=generator, device=self.low.device, dtype=self.low.dtype)
        return torch.lerp(self.low, self.high, share)

    def _log_prob(self, x: Tensor) -> Tensor:
        inside = ((x >= self.low) & (x <= self.high)).flatten(1).all(-1)
        return torch.where(inside, -(self.high - self.low).log().sum(), -torch.inf).to(x.dtype)
