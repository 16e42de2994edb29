"""The six two-dimensional sets of the paper, as distributions with a known density.

They are the sets of the FFJORD line of papers (Grathwohl et al. 2019), drawn independently point by point:
a slice of a sample is a sample. Each is a mixture along a curve, so each has a density: in closed form for
`8gaussians`, `checkerboard` and `circles`, by one-dimensional quadrature for `moons`, `2spirals` and `swissroll`.
"""

import math
from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.names import choose

__all__ = ["TOYS", "Toy", "toy"]

LOG_2PI = math.log(2 * math.pi)


class Toy(ABC):
    """A distribution in the plane: `sample`, `log_prob`, `entropy`.

    >>> eight = toy("8gaussians")
    >>> x = eight.sample(1000, generator=torch.Generator().manual_seed(0))
    >>> x.shape, eight.log_prob(x).shape
    (torch.Size([1000, 2]), torch.Size([1000]))
    >>> round(toy("checkerboard").entropy, 4) == round(math.log(32), 4)
    True
    """

    name: str
    extent: float  # all but a negligible mass lies in [-extent, extent]^2

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """`n` independent points, shape (n, 2)."""
        if n < 1:
            raise InvalidValue(f"The number of points must be at least 1. Got {n}.")
        return self._sample(n, generator)

    def log_prob(self, x: Tensor) -> Tensor:
        """The exact log density, shape (n,)."""
        if x.ndim != 2 or x.shape[1] != 2:
            raise InvalidValue(f"Points of '{self.name}' have shape (n, 2). Got {tuple(x.shape)}.")
        return torch.cat([self._log_prob(part) for part in x.split(4096)]) if len(x) else x.new_zeros(0)

    @cached_property
    def entropy(self) -> float:
        """-E log p in nats, the least negative log-likelihood any model can reach.

        A midpoint rule over the plane; for such smooth densities it converges faster than any power of the cell.
        """
        cells = 250
        edge = 2 * self.extent / cells
        axis = -self.extent + edge * (torch.arange(cells, dtype=torch.float64) + 0.5)
        log_p = self.log_prob(torch.cartesian_prod(axis, axis))
        return float(-(log_p.exp() * torch.where(log_p > -700, log_p, 0.0)).sum()) * edge**2

    @abstractmethod
    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor: ...

    @abstractmethod
    def _log_prob(self, x: Tensor) -> Tensor: ...


def _isotropic(x: Tensor, centres: Tensor, log_weights: Tensor, sigma: float) -> Tensor:
    """Log density of the mixture of N(centre, sigma^2 I)."""
    distance = torch.cdist(x.double(), centres, compute_mode="donot_use_mm_for_euclid_dist")
    log_kernel = -0.5 * (distance / sigma).square() - LOG_2PI - 2 * math.log(sigma)
    return torch.logsumexp(log_kernel + log_weights, -1).to(x.dtype)


def _quadrature(nodes: int, lower: float = 0.0, upper: float = 1.0) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre points and weights on an interval."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    half = (upper - lower) / 2
    return torch.from_numpy(lower + half * (points + 1)), torch.from_numpy(half * weights)


class EightGaussians(Toy):
    """Eight Gaussians of deviation 0.5 on a circle of radius 4, all divided by sqrt(2)."""

    name, extent = "8gaussians", 6.0
    sigma = 0.5 / math.sqrt(2)

    @property
    def centres(self) -> Tensor:
        angle = torch.arange(8, dtype=torch.float64) * math.pi / 4
        return torch.stack([angle.cos(), angle.sin()], -1) * 4 / math.sqrt(2)

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        which = torch.randint(8, (n,), generator=generator)
        return self.centres.float()[which] + self.sigma * torch.randn(n, 2, generator=generator)

    def _log_prob(self, x: Tensor) -> Tensor:
        return _isotropic(x, self.centres, torch.full((8,), -math.log(8), dtype=torch.float64), self.sigma)


class Checkerboard(Toy):
    """Uniform on eight squares of side 2 in [-4, 4]^2."""

    name, extent = "checkerboard", 4.0
    entropy = math.log(32)

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        column = torch.randint(4, (n,), generator=generator)
        row = 2 * torch.randint(2, (n,), generator=generator) + column % 2
        corner = torch.stack([column, row], -1) - 2
        return 2 * (corner + torch.rand(n, 2, generator=generator))

    def _log_prob(self, x: Tensor) -> Tensor:
        cell = (x / 2 + 2).floor()
        inside = ((cell >= 0) & (cell < 4)).all(-1) & ((cell.sum(-1) % 2) == 0)
        return torch.where(inside, -math.log(32), -torch.inf).to(x.dtype)


class Circles(Toy):
    """Two circles of radius 3 and 1.5, blurred by a Gaussian of deviation 0.24.

    A blurred circle of radius r has density exp(-(|x|^2 + r^2) / 2s^2) I_0(|x| r / s^2) / (2 pi s^2).
    """

    name, extent = "circles", 5.0
    sigma, radii = 0.24, (3.0, 1.5)

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        radius = torch.tensor(self.radii)[torch.randint(2, (n,), generator=generator)]
        angle = 2 * math.pi * torch.rand(n, generator=generator)
        circle = radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1)
        return circle + self.sigma * torch.randn(n, 2, generator=generator)

    def _log_prob(self, x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        radius = torch.tensor(self.radii, dtype=x.dtype)
        bessel = torch.special.i0e(norm * radius / self.sigma**2).log()
        log_ring = bessel - 0.5 * ((norm - radius) / self.sigma).square() - LOG_2PI - 2 * math.log(self.sigma)
        return torch.logsumexp(log_ring, -1) - math.log(2)


class Curve(Toy):
    """A random point of a curve plus Gaussian noise; `_curve` maps u, uniform in (0, 1), to a point."""

    sigma: float

    @abstractmethod
    def _curve(self, u: Tensor) -> Tensor: ...

    def _nodes(self) -> tuple[Tensor, Tensor]:
        """Quadrature points u and weights along the curve."""
        return _quadrature(400)

    @cached_property
    def _mixture(self) -> tuple[Tensor, Tensor]:
        u, weights = self._nodes()
        return self._curve(u), weights.log()

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        u = torch.rand(n, generator=generator, dtype=torch.float64)
        return self._curve(u).float() + self.sigma * torch.randn(n, 2, generator=generator)

    def _log_prob(self, x: Tensor) -> Tensor:
        return _isotropic(x, *self._mixture, self.sigma)


class Moons(Curve):
    """Two interleaving half circles, (2 x - 1, 2 y - 0.2) of the usual ones, blurred by 0.2."""

    name, extent, sigma = "moons", 5.0, 0.2

    def _curve(self, u: Tensor) -> Tensor:
        upper, angle = u < 0.5, 2 * math.pi * (u % 0.5)
        x = torch.where(upper, angle.cos(), 1 - angle.cos())
        y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
        return torch.stack([2 * x - 1, 2 * y - 0.2], -1)

    def _nodes(self) -> tuple[Tensor, Tensor]:
        upper, lower = _quadrature(100, 0.0, 0.5), _quadrature(100, 0.5, 1.0)
        return torch.cat([upper[0], lower[0]]), torch.cat([upper[1], lower[1]])


class SwissRoll(Curve):
    """The spiral t (cos t, sin t) / 5 for t uniform in (1.5 pi, 4.5 pi), blurred by 0.2."""

    name, extent, sigma = "swissroll", 4.5, 0.2

    def _curve(self, u: Tensor) -> Tensor:
        t = 1.5 * math.pi * (1 + 2 * u)
        return torch.stack([t * t.cos(), t * t.sin()], -1) / 5


class TwoSpirals(Curve):
    """Two arms +-t (-cos t, sin t) / 3, t = 3 pi sqrt(u), each point moved outward by a uniform square and blurred.

    The square has side 1/6 and lies to the upper right of the first arm (the lower left of the second), the blur
    is a Gaussian of deviation 0.1: along each axis the kernel is a difference of two normal distribution functions.
    """

    name, extent, sigma, side = "2spirals", 4.5, 0.1, 1 / 6

    def _curve(self, u: Tensor) -> Tensor:
        t = 3 * math.pi * u.sqrt()
        return torch.stack([-t * t.cos(), t * t.sin()], -1) / 3

    def _nodes(self) -> tuple[Tensor, Tensor]:
        root, weights = _quadrature(400)  # in sqrt(u), where the curve is smooth
        return root.square(), 2 * root * weights

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        arm = 2.0 * torch.randint(2, (n, 1), generator=generator) - 1
        u = torch.rand(n, generator=generator, dtype=torch.float64)
        square = self.side * torch.rand(n, 2, generator=generator)
        return arm * (self._curve(u).float() + square) + self.sigma * torch.randn(n, 2, generator=generator)

    def _log_prob(self, x: Tensor) -> Tensor:
        arms = torch.stack([self._arm(x.double()), self._arm(-x.double())])
        return (torch.logsumexp(arms, 0) - math.log(2)).to(x.dtype)

    def _arm(self, x: Tensor) -> Tensor:
        centres, log_weights = self._mixture
        left = (x[:, None, :] - centres) / self.sigma
        right = left - self.side / self.sigma
        # A difference of two values near one cancels: by symmetry, take it in the other tail.
        flip = (left + right) > 0
        high, low = torch.where(flip, -right, left), torch.where(flip, -left, right)
        log_box = (torch.special.ndtr(high) - torch.special.ndtr(low)).log()
        far = high < -30  # there the nearer edge is all that counts, and the difference underflows
        log_box[far] = torch.special.log_ndtr(high[far])
        return torch.logsumexp(log_box.sum(-1) - 2 * math.log(self.side) + log_weights, -1)


TOYS: dict[str, type[Toy]] = {
    cls.name: cls for cls in (TwoSpirals, EightGaussians, Checkerboard, Circles, Moons, SwissRoll)
}


def toy(name: str) -> Toy:
    """One of the six sets by its name in the paper.

    >>> toy("moon")
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: Unknown data set 'moon'. Did you mean 'moons'? Known: 2spirals, 8gaussians, ...
    """
    return choose("data set", name, TOYS)()
