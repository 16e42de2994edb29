"""Monotone bends of single numbers: a shift, a scale, and a spline that a network's output describes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softmax, softplus

from unnorm.data.splines import Piece, inverse_spline, spline

__all__ = ["Bend"]

BOUND = 6.0  # beyond it the splines are the identity
LEAST = 1e-3  # share of the range that a piece has at least, and its slope
WIDEST = 6.0  # log of the scale, at most


class Bend(NamedTuple):
    """z = s((x + shift) e^log_scale), s a rational-quadratic spline (Durkan et al. 2019) through the knots.

    Of values (..., n, P), several for each bend.

    Attributes:
        shift, log_scale: (...).
        x, z, slopes: at the knots, (..., bins + 1), from -6 to 6.

    >>> bend = Bend.of(torch.zeros(3, Bend.numbers(4)), 4)               # zeros describe the identity
    >>> torch.allclose(bend(torch.tensor([-1.0, 0.0, 7.0]))[0], torch.tensor([-1.0, 0.0, 7.0]), atol=1e-5)
    True
    """

    shift: Tensor
    log_scale: Tensor
    x: Tensor
    z: Tensor
    slopes: Tensor

    @staticmethod
    def numbers(bins: int) -> int:
        """That describe one bend."""
        return 3 * bins + 1

    @classmethod
    def of(cls, raw: Tensor, bins: int) -> "Bend":
        """Of any numbers (..., 3 bins + 1)."""
        wide, high, slope = raw[..., 2 : 2 + bins], raw[..., 2 + bins : 2 + 2 * bins], raw[..., 2 + 2 * bins :]
        x, z = (
            pad(2 * BOUND * (LEAST + (1 - LEAST * bins) * softmax(part, -1)).cumsum(-1), (1, 0)) - BOUND
            for part in (wide, high)
        )
        inner = LEAST + (1 - LEAST) * softplus(slope + math.log(math.e - 1))
        return cls(raw[..., 0], WIDEST * torch.tanh(raw[..., 1] / WIDEST), x, z, pad(inner, (1, 1), value=1.0))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z and log dz/dx."""
        moved = (x + self.shift) * self.log_scale.exp()
        inside = moved.clamp(-BOUND, BOUND)
        z, log_slope = spline(self._piece(self.x, inside), inside)
        beyond = moved.abs() >= BOUND
        return torch.where(beyond, moved, z), self.log_scale + torch.where(beyond, 0.0, log_slope)

    def inverse(self, z: Tensor) -> Tensor:
        inside = z.clamp(-BOUND, BOUND)
        moved = torch.where(z.abs() >= BOUND, z, inverse_spline(self._piece(self.z, inside), inside))
        return moved * (-self.log_scale).exp() - self.shift

    def _piece(self, knots: Tensor, value: Tensor) -> Piece:
        place = (value[..., None] >= knots[..., 1:-1]).sum(-1, keepdim=True)
        parts = (part.expand(*value.shape, -1) for part in (self.x, self.z, self.slopes))
        ends = [part.gather(-1, at)[..., 0] for part in parts for at in (place, place + 1)]
        return Piece(*ends)
