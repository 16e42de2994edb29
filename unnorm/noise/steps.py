"""A noise as one step after the other: each coordinate a monotone function of a standard normal number."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from unnorm.data.affine import Identity, Whiten
from unnorm.data.transforms import Compose, Standardize, Transform
from unnorm.errors import InvalidValue
from unnorm.noise.autoregression import Autoregression
from unnorm.noise.base import Noise
from unnorm.noise.copula import Pushed
from unnorm.noise.gaussian import Gaussian

__all__ = ["Line", "Step", "Steps"]


class Step(Protocol):
    """Of some coordinates, given those before them: z = s(y), standard normal if y is the noise's. A `Bend` is one."""

    def __call__(self, y: Tensor, /) -> tuple[Tensor, Tensor]:
        """z and log dz/dy at y (..., n, P)."""
        ...

    def inverse(self, z: Tensor, /) -> Tensor: ...


class Line(NamedTuple):
    """y = mean + slope z.

    >>> Line(torch.tensor([1.0]), torch.tensor([2.0]))(torch.tensor([5.0]))
    (tensor([2.]), tensor([-0.6931]))
    """

    mean: Tensor
    slope: Tensor

    def __call__(self, y: Tensor, /) -> tuple[Tensor, Tensor]:
        return (y - self.mean) / self.slope, -self.slope.log().expand_as(y)

    def inverse(self, z: Tensor, /) -> Tensor:
        return self.mean + self.slope * z


class Steps:
    """How a noise goes from coordinate to coordinate.

    Args:
        noise: a `Gaussian`, one pushed through triangular affine maps, or a standard normal pushed through an
            `Autoregression`: no coordinate depends on a later one.

    >>> from unnorm.noise import Gaussian
    >>> q = Gaussian((1, 1, 2))
    >>> _ = q.scale_tril.copy_(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
    >>> step = Steps(q).all(torch.tensor([5.0, 0.0]).view(1, 1, 1, 2))
    >>> step.inverse(torch.zeros(1, 2)), step.inverse(torch.ones(1, 2))    # the second is 3 times the first, plus 2 z
    (tensor([[ 0., 15.]]), tensor([[ 1., 17.]]))
    """

    def __init__(self, noise: Noise):
        self.parts = tuple(_parts(noise))
        first, *rest = self.parts
        bent = isinstance(first, Autoregression)
        good = all(isinstance(part, Standardize | Whiten | Gaussian) for part in (rest if bent else self.parts))
        if not good or (bent and not (len(rest) == 1 and _is_standard(rest[0]))):
            raise InvalidValue(
                "A noise that goes one coordinate after the other is a Gaussian, one pushed through a triangular "
                "affine map, or a standard normal pushed through an Autoregression. Got "
                f"{' over '.join(type(part).__name__ for part in self.parts)}."
            )

    def all(self, y: Tensor) -> Step:
        """The steps of all coordinates at y (n, *event)."""
        first = self.parts[0]
        with torch.autocast(y.device.type, enabled=False):  # the same noise, whatever the precision of a network is
            return first.bends(y) if isinstance(first, Autoregression) else self._lines(y)

    def at(self, y: Tensor, place: int) -> Step:
        """The step of one coordinate: those from there on do not matter."""
        first = self.parts[0]
        with torch.autocast(y.device.type, enabled=False):
            if isinstance(first, Autoregression):
                return first.bend_at(y, place)
            line = self._lines(y)
            return Line(line.mean[:, place : place + 1], line.slope[place : place + 1])

    def _lines(self, y: Tensor) -> Line:
        z, slope = y, torch.ones(y[0].numel(), dtype=torch.float64, device=y.device)
        for part in self.parts:
            z, more = _whitened(part, z)
            slope = slope * more
        slope = slope.to(y.dtype)
        return Line(y.flatten(1) - slope * z.flatten(1), slope)


def _parts(whole: Noise | Transform) -> Iterator[Noise | Transform]:
    """The maps from y to z, and the noise there: the modules themselves, which may be filled or moved later."""
    if isinstance(whole, Pushed):
        yield from _parts(whole.transform)
        yield from _parts(whole.base)
    elif isinstance(whole, Compose):
        for part in whole.transforms:
            yield from _parts(part)  # type: ignore[arg-type]
    elif not isinstance(whole, Identity):
        yield whole


def _whitened(part: Noise | Transform, y: Tensor) -> tuple[Tensor, Tensor]:
    """y in a part's own coordinates, and how much each moves by its own."""
    if isinstance(part, Gaussian) and part.covariance == "diagonal":
        return ((y.flatten(1) - part.loc) / part.scale).view_as(y), part.scale
    affine = part.coordinates()[0] if isinstance(part, Gaussian) else part
    assert isinstance(affine, Standardize | Whiten)
    slope = affine.scale_tril.diagonal() if isinstance(affine, Whiten) else affine.scale.flatten()
    return affine(y)[0], slope


def _is_standard(noise: Noise | Transform) -> bool:
    """A noise of shapes only is filled later."""
    if not isinstance(noise, Gaussian) or noise.covariance == "low-rank":
        return False
    if noise.loc.is_meta:
        return True
    spread, unit = noise.scale if noise.covariance == "diagonal" else noise.scale_tril, torch.ones_like(noise.loc)
    return not bool(noise.loc.any()) and torch.equal(spread, unit if spread.ndim == 1 else unit.diag())
