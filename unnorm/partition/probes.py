"""What a model does where no draw and no chain goes: far out, and beyond a noise that ends."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.data.rows import spread as spread_out
from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise, own_generator
from unnorm.types import LogDensity, log_density, log_mean_exp

__all__ = ["beyond_support", "far_out", "tails"]

RAYS = 64
MOST_AXES = 256
STEEP = 100  # an index beyond is no power
FAR = (4.0**10, 4.0**12)  # times the spread of the draws: a Gaussian a thousand times as wide has ended before
LEAST_INDEX, LEAST_INDEX_ALONE = 2.5, 3.5  # with samples and without; below, a light noise's chains miss the tails
LEAST_INDEX_ALONG = 4.5  # without samples, where the tails are along an axis
STEP_OUT = 1.25
NEGLIGIBLE = -12.0  # nats below the model's mean density on the draws


def _rays(noise: Noise) -> tuple[Tensor, Tensor]:
    """A point in the middle of the noise, and from there draws of it, (n, *event); the same at each call."""
    x = noise.sample(4 * RAYS, generator=own_generator(noise))
    centre = x.mean(0)
    return centre, x[:RAYS] - centre


class Tails(NamedTuple):
    """alpha, where the mass of p~ beyond a radius r falls like r^-alpha; infinity for anything faster than a power.

    Attributes:
        around: as seen along rays in all directions.
        along: the least of those along single axes.
        axes: how many coordinates have a power for a tail.
    """

    around: float
    along: float
    axes: int

    @property
    def least(self) -> float:
        return min(self.around, self.along)


@torch.no_grad()
def tails(log_p: LogDensity, noise: Noise) -> Tails:
    """Look along rays through draws of the noise, along the coordinates, and along rays among the heavy ones of these:
    a single heavy direction is on no random ray.

    One that is oblique to all of these is not seen. A value of zero or less means that p~ has no finite integral.

    >>> from unnorm import Gaussian
    >>> found = tails(lambda x: -2 * torch.log1p(x.square().sum(-1)), Gaussian(3))      # r^-4 in 3 dimensions
    >>> round(found.around, 3), round(found.along, 3), found.axes
    (1.0, 3.0, 3)
    >>> tails(Gaussian(3), Gaussian(3)).least
    inf
    """
    centre, rays = _rays(noise)
    flat = rays.flatten(1)
    size, spread = flat.shape[1], float(flat.norm(dim=1).median())

    def slopes(directions: Tensor) -> Tensor:
        """How fast log p~ falls with log r along each of the unit vectors; infinity for faster than any power."""
        points = ((centre.flatten() + far * spread * directions).view(-1, *centre.shape) for far in FAR)
        near, end = (_values(log_p, x) for x in points)
        slope = (near - end) / math.log(FAR[1] / FAR[0])
        return torch.where((end == -math.inf) | (slope > size + STEEP), math.inf, slope)

    def index(slope: Tensor, dimensions: int) -> float:
        """In as many dimensions, by the heaviest of the rays."""
        least = float(slope.min()) - dimensions
        return math.inf if least > STEEP else least

    coordinates = torch.eye(size, device=flat.device, dtype=flat.dtype)[spread_out(size, MOST_AXES)]
    own = slopes(torch.cat([coordinates, -coordinates])).view(2, -1).amin(0)
    heavy = coordinates[own - 1 <= STEEP]
    around, along = index(slopes(_unit(flat)), size), index(own, 1)
    if 1 < len(heavy) < size:
        mixed = torch.randn(RAYS, len(heavy), generator=own_generator(noise), device=flat.device, dtype=flat.dtype)
        around = min(around, index(slopes(_unit(mixed @ heavy)), len(heavy)))
    return Tails(around, along, len(heavy))


def _values(log_p: LogDensity, x: Tensor) -> Tensor:
    try:
        values = log_density(log_p, x).double()
    except InvalidValue:
        raise
    except ValueError:  # a model that refuses to look so far out has nothing there
        return torch.full((len(x),), -math.inf, dtype=torch.float64, device=x.device)
    return torch.where(values.isnan(), -math.inf, values)


def _unit(directions: Tensor) -> Tensor:
    return directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-30)


def far_out(log_p: LogDensity, noise: Noise, *, alone: bool) -> tuple[bool, str | None]:
    """Whether p~ has an integral, as far as its tails tell, and what they have against an estimate from this noise,
    alone or with samples of the model."""
    found = tails(log_p, noise)
    if found.least < 0.05:
        return False, (
            f"far out p~ does not fall faster than space grows (its tail index is {found.least:.2g}): its integral is "
            "infinite, or all but. Use a Tilted model, or one that falls off"
        )
    least = LEAST_INDEX_ALONE if alone else LEAST_INDEX
    # What several axes have in their tails adds up.
    least_along = LEAST_INDEX_ALONG + math.log10(max(found.axes, 1)) if alone and found.along < found.around else least
    if found.around >= least and found.along >= least_along:
        return True, None
    if tails(noise, noise).least <= found.least + 0.5:
        return True, None
    return True, (
        f"the mass beyond a radius r falls only like r^-{found.least:.2g}, and the noise has no such tails: what lies "
        "there no draw sees. Use a noise with tails as heavy"
    )


@torch.no_grad()
def beyond_support(log_p: LogDensity, noise: Noise) -> str | None:
    """Whether the noise ends where the model goes on."""
    centre, rays = _rays(noise)
    outside = noise.log_prob(centre + STEP_OUT * rays) == -math.inf
    if outside.double().mean() < 0.05:
        return None
    inside = log_mean_exp(log_density(log_p, centre + rays).double())
    there = log_mean_exp(log_density(log_p, centre + STEP_OUT * rays).double()[outside])
    if not float(there - inside) > NEGLIGIBLE:
        return None
    return "the noise is zero where the model is not: what lies there no draw of it can see"
