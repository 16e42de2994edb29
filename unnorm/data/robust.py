"""Scaling that a few wild values do not spoil: medians and quartiles, and tails drawn in."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from unnorm.data.transforms import Standardize, Transform, floating
from unnorm.errors import InvalidValue

__all__ = ["LogTails", "robust_scale"]

SHARES = (0.25, 0.1, 0.05, 0.01)  # below and above a range of a column that tells its scale, the first that has a width

SEEN = 0.05  # a part of the rows that is no few wild values
NARROW = 0.1  # a range of less than this part of the next wider one, both as deviations, is that of a spike


def robust_scale(rows: np.ndarray) -> Standardize:
    """Median and quartile range of each column, the latter as a normal's standard deviation.

    Where the quartiles nearly coincide, as in a column that is mostly zero, a wider range is taken, at last the
    standard deviation; a constant column keeps scale 1.

    >>> transform = robust_scale(np.array([[1.0], [2.0], [3.0], [1e6]]))
    >>> transform.loc.tolist()
    [2.5]
    """
    size = np.abs(rows).max(0)
    size = np.where(size > 0, size, 1.0)  # so that squares of 1e300 do not overflow
    within = rows / size
    scale = np.zeros(rows.shape[1])
    for share in SHARES:
        low, high = np.quantile(within, [share, 1 - share], axis=0)
        wider = (high - low) / (2 * ndtri(1 - share))
        spike = scale <= (NARROW * wider if share >= SEEN else 0.0)
        scale = np.where(spike, wider, scale)
    scale = np.where(scale > 0, scale, within.std(0))
    middle = np.median(within, axis=0)
    transform = Standardize(rows.shape[1])
    transform.loc.copy_(torch.from_numpy(middle * size))
    transform.scale.copy_(torch.from_numpy(np.where(scale > 0, scale * size, 1.0)))
    return transform


class LogTails(Transform):
    """z = x up to `edge`, and beyond grows as a logarithm: z = edge + log(1 + x - edge), with the other sign alike.

    Monotone and once differentiable: a column with a few values a thousand deviations off keeps its middle and its
    order, and its tail is one that a network and a Gaussian noise can follow.

    >>> z, log_det = LogTails(3.0)(torch.tensor([[0.5, -3.0, 1000.0]]))
    >>> z
    tensor([[ 0.5000, -3.0000,  9.9058]])
    >>> bool((LogTails(3.0).inverse(z) - torch.tensor([[0.5, -3.0, 1000.0]])).abs().max() < 1e-2)
    True
    """

    def __init__(self, edge: float = 3.0):
        super().__init__()
        if not edge > 0:
            raise InvalidValue(f"The 'edge' of LogTails must be positive. Got {edge}.")
        self.edge = float(edge)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"edge": self.edge}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        x = x.to(floating(x))
        more = torch.log1p((x.abs() - self.edge).clamp(min=0.0))
        z = torch.where(more > 0, x.sign() * (self.edge + more), x)
        return z, -more.flatten(1).sum(-1)

    def inverse(self, z: Tensor) -> Tensor:
        more = torch.expm1((z.abs() - self.edge).clamp(min=0.0))
        return torch.where(more > 0, z.sign() * (self.edge + more), z)
