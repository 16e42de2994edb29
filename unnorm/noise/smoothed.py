"""A data point plus Gaussian noise: the paper's x' + z', a kernel density estimate."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unnorm.data.rows import RowSource, chunks, spread
from unnorm.errors import InvalidValue
from unnorm.names import choose
from unnorm.noise.base import Noise
from unnorm.noise.gaussian import Gaussian
from unnorm.types import event_shape

__all__ = ["Smoothed"]

DENSITIES = {"exact": "exact", "batch": "batch"}
BANDWIDTHS = {"scott": "scott", "loo": "loo"}
POINTS, ROWS = 4096, 1024  # whose distances are held at once
PAIRS = 5_000_000  # distances that choose a bandwidth


class Smoothed(Noise):
    """x' + z' with x' one of the n stored rows and z' ~ N(0, h^2 Sigma), Sigma the covariance of the data.

    Its density is q(x) = 1/n sum_i N(x; x_i, h^2 Sigma) (section 4.3 of the paper), evaluated as
    - density="exact": over all rows, a block at a time: n kernels for each point.
    - density="batch": over the rows that the last `sample` drew, as the paper suggests; before the first draw over all.
      That is a density, but another one after each draw, and the draws' own rows are always in it: log q is too high
      at the draws, in many dimensions by nearly log(n / batch), because a draw is closest to its own row.
      Meant for training with much data; set `noise.density = "exact"` before log Z is found.

    The rows are stored as the kernel sees them: `white` is L^-1 (x_i - loc) with L = `scale_tril`, L L^T = h^2 Sigma.

    Args:
        event: the shape of one example.
        rows: how many are stored.
        density: "exact" or "batch".

    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> q = Smoothed.fit(x)
    >>> round(q.bandwidth(), 4)
    0.4135
    >>> q.sample(3, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([3, 2])
    """

    loc: Tensor
    scale_tril: Tensor
    white: Tensor
    h: Tensor

    def __init__(self, event: int | tuple[int, ...], rows: int, density: str = "exact"):
        super().__init__()
        self.event = event_shape(event)
        self.density = choose("density of Smoothed", density, DENSITIES)
        if not isinstance(rows, int) or rows < 1:
            raise InvalidValue(f"The 'rows' of Smoothed must be at least 1. Got {rows}.")
        size = math.prod(self.event)
        self.register_buffer("loc", torch.zeros(size))
        self.register_buffer("scale_tril", torch.eye(size))
        self.register_buffer("white", torch.zeros(rows, size))
        self.register_buffer("h", torch.ones(()))
        self._last: Tensor | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event), "rows": len(self.white), "density": self.density}

    @classmethod
    def fit(cls, data: RowSource, bandwidth: float | str = "scott", *, density: str = "exact") -> "Smoothed":
        """Keep the rows; Sigma is the covariance by `Gaussian.fit`, regularised as there.

        Args:
            data: rows, all of which are stored.
            bandwidth: h; or "scott", n^(-1 / (d + 4)); or "loo", that of the greatest leave-one-out likelihood (of at
                most 5 million pairs of rows; copies of a row are left out with it, or they would make h zero).
            density: see the class.
        """
        whole = Gaussian.fit(data).double()
        parts = [
            torch.linalg.solve_triangular(
                whole.scale_tril, (chunk.double().cpu().flatten(1) - whole.loc).mT, upper=False
            ).mT
            for chunk in chunks(data)
        ]
        white = torch.cat(parts)
        if isinstance(bandwidth, str):
            name = choose("bandwidth", bandwidth, BANDWIDTHS)
            h = _scott(white) if name == "scott" else _leave_one_out(white)
        elif not 0 < bandwidth < math.inf:
            raise InvalidValue(f"The 'bandwidth' of Smoothed must be positive. Got {bandwidth}.")
        else:
            h = float(bandwidth)
        noise = cls(whole.event, len(white), density)
        noise.loc.copy_(whole.loc)
        noise.scale_tril.copy_(h * whole.scale_tril)
        noise.white.copy_(white / h)
        noise.h.fill_(h)
        return noise

    def bandwidth(self) -> float:
        """h."""
        return float(self.h)

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        device, dtype = self.white.device, self.white.dtype
        self._last = torch.randint(len(self.white), (n,), generator=generator, device=device)
        z = torch.randn(n, self.white.shape[1], generator=generator, device=device, dtype=dtype)
        return ((self.white[self._last] + z) @ self.scale_tril.mT + self.loc).view(n, *self.event)

    def _log_prob(self, x: Tensor) -> Tensor:
        tril, white = self.scale_tril.double(), self.white
        if self.density == "batch" and self._last is not None:
            white = white[self._last.to(white.device)]
        z = torch.linalg.solve_triangular(tril, (x.flatten(1) - self.loc).double().mT, upper=False).mT
        value = torch.cat([_log_sum(part, white) for part in z.split(POINTS)])
        constant = math.log(len(white)) + 0.5 * white.shape[1] * math.log(2 * math.pi) + tril.diagonal().log().sum()
        return (value - constant).to(x.dtype)


def _log_sum(z: Tensor, white: Tensor) -> Tensor:
    """log sum_i exp(-|z - w_i|^2 / 2), a block of rows after another."""
    total = None
    for rows in white.split(ROWS):
        part = torch.logsumexp(-0.5 * _squares(z, rows.double()), -1)
        total = part if total is None else torch.logaddexp(total, part)
    assert total is not None
    return total


def _squares(z: Tensor, rows: Tensor) -> Tensor:
    """|z - w|^2 of all pairs. White rows are a few bandwidths from 0, so that float64 has digits to spare."""
    return z.square().sum(-1, keepdim=True) + rows.square().sum(-1) - 2 * z @ rows.mT


def _scott(white: Tensor) -> float:
    return float(len(white) ** (-1 / (white.shape[1] + 4)))


def _leave_one_out(white: Tensor) -> float:
    """The bandwidth of the greatest mean log density of rows under all the others."""
    from scipy.optimize import minimize_scalar  # scoring needs none of it

    n, width = white.shape
    some = white[spread(n, max(1, PAIRS // n))]
    squares = _squares(some, white).numpy()
    size = some.square().sum(-1, keepdim=True) + white.square().sum(-1)
    squares[squares <= 1e-13 * size.numpy()] = np.inf  # the row itself, and its copies
    squares = squares[np.isfinite(squares).any(1)]
    scott = _scott(white)
    if not len(squares):
        return scott

    def loss(log_h: float) -> float:
        each = torch.logsumexp(torch.from_numpy(squares * (-0.5 * math.exp(-2 * log_h))), -1)
        return width * log_h - float(each.mean())

    found = minimize_scalar(loss, bounds=(math.log(scott / 30), math.log(3 * scott)), method="bounded")
    return math.exp(found.x)
