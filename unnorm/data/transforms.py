"""Invertible maps from the user's units to the model's, each carrying its log|det J|."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.data.rows import RowSource, moments
from unnorm.types import event_shape

__all__ = ["Standardize", "Transform", "Transformed"]


class Transform(nn.Module, ABC):
    """An invertible map z = T(x) with the log of its volume change.

    If p is the density of z, the density of x is `p(T(x)) * exp(log_det)`: nobody can forget the term
    because `forward` hands it over with z.

    >>> class Log(Transform):
    ...     def forward(self, x):
    ...         return x.log(), -x.log().sum(-1)
    ...     def inverse(self, z):
    ...         return z.exp()
    >>> z, log_det = Log()(torch.tensor([[2.0]]))
    >>> bool(log_det == -z)
    True
    """

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x of shape (n, *event) to z of the same shape and log|det dz/dx| of shape (n,)."""

    @abstractmethod
    def inverse(self, z: Tensor) -> Tensor:
        """z back to x."""


class Standardize(Transform):
    """z = (x - loc) / scale for each coordinate, computed in float64.

    >>> x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    >>> transform = Standardize.fit(x)
    >>> z, log_det = transform(x)
    >>> z
    tensor([[-1., -1.],
            [ 1.,  1.]])
    >>> torch.equal(transform.inverse(z), x)
    True
    """

    loc: Tensor
    scale: Tensor

    def __init__(self, event: int | tuple[int, ...]):
        super().__init__()
        self.event = event_shape(event)
        self.register_buffer("loc", torch.zeros(self.event, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(self.event, dtype=torch.float64))

    @classmethod
    def fit(cls, data: RowSource) -> "Standardize":
        """Mean and standard deviation of the data; a constant coordinate keeps scale 1."""
        found = moments(data)
        transform = cls(tuple(found.mean.shape))
        scale = found.variance.sqrt()
        transform.loc.copy_(found.mean)
        transform.scale.copy_(torch.where(found.constant, 1.0, scale))
        return transform

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event)}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = (x.to(self.loc.dtype) - self.loc) / self.scale
        log_det = -self.scale.log().sum()
        return z.to(x.dtype), log_det.to(x.dtype).expand(x.shape[0])

    def inverse(self, z: Tensor) -> Tensor:
        return (z.to(self.loc.dtype) * self.scale + self.loc).to(z.dtype)


class Transformed:
    """The rows of `data` in the model's units and `dtype`, transformed as they are read.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> Transformed(x, Standardize.fit(x))[torch.tensor([0])]
    tensor([[-1.]])
    """

    def __init__(self, data: RowSource, transform: Transform, dtype: torch.dtype = torch.float32):
        self.data, self.transform, self.dtype = data, transform, dtype

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Tensor, /) -> Tensor:
        z, _ = self.transform(self.data[index])
        return z.to(self.dtype)
