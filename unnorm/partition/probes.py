"""What a model does where no draw and no chain goes: far out, and beyond a noise that ends."""

import math

import torch
from torch import Tensor

from unnorm.noise.base import Noise, own_generator
from unnorm.types import LogDensity, log_density, log_mean_exp

__all__ = ["beyond_support", "far_out", "tail_index"]

RAYS = 64
FAR = (4.0**10, 4.0**12)  # times the spread of the draws: a Gaussian a thousand times as wide has ended before
LEAST_INDEX, LEAST_INDEX_ALONE = 2.5, 3.5  # with samples and without; below, a light noise's chains miss the tails
STEP_OUT = 1.25
NEGLIGIBLE = -12.0  # nats below the model's mean density on the draws


def _rays(noise: Noise) -> tuple[Tensor, Tensor]:
    """A point in the middle of the noise, and from there draws of it, (n, *event); the same at each call."""
    x = noise.sample(4 * RAYS, generator=own_generator(noise))
    centre = x.mean(0)
    return centre, x[:RAYS] - centre


@torch.no_grad()
def tail_index(log_p: LogDensity, noise: Noise) -> float:
    """alpha, where the mass of p~ beyond a radius r falls like r^-alpha; infinity for anything faster than a power.

    Seen along rays through draws of the noise. Zero or less means that p~ has no finite integral.

    >>> from unnorm import Gaussian
    >>> round(tail_index(lambda x: -2 * torch.log1p(x.square().sum(-1)), Gaussian(3)), 3)      # r^-4 in 3 dimensions
    1.0
    >>> tail_index(Gaussian(3), Gaussian(3))
    inf
    """
    centre, rays = _rays(noise)
    lengths = rays.flatten(1).norm(dim=1)
    spread = float(lengths.median())
    rays = rays / lengths.clamp_min(1e-30).view(-1, *[1] * (rays.ndim - 1))
    levels = []
    for far in FAR:
        values = log_density(log_p, centre + far * spread * rays).double()
        levels.append(float(log_mean_exp(torch.where(values.isnan(), -math.inf, values))))
    near, end = levels
    if -math.inf in (near, end):
        return math.inf
    slope = (near - end) / math.log(FAR[1] / FAR[0])
    index = slope - math.prod(rays.shape[1:])
    return math.inf if index > 100 else index


def far_out(log_p: LogDensity, noise: Noise, *, alone: bool) -> tuple[bool, str | None]:
    """Whether p~ has an integral, as far as its tails tell, and what they have against an estimate from this noise,
    alone or with samples of the model."""
    index = tail_index(log_p, noise)
    if index < 0.05:
        return False, (
            f"far out p~ does not fall faster than space grows (its tail index is {index:.2g}): its integral is "
            "infinite, or all but. Use a Tilted model, or one that falls off"
        )
    if index < (LEAST_INDEX_ALONE if alone else LEAST_INDEX) and tail_index(noise, noise) > index + 0.5:
        return True, (
            f"the mass beyond a radius r falls only like r^-{index:.2g}, and the noise has no such tails: what lies "
            "there no draw sees. Use a noise with tails as heavy"
        )
    return True, None


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
