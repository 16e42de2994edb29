"""log Z by importance sampling."""

from numbers import Integral

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.models.tilted import log_weight
from unnorm.noise.base import Noise
from unnorm.partition.weights import Weights
from unnorm.types import LogDensity, LogZ

__all__ = ["importance", "log_weights"]

CHUNK = 1024


def importance(
    model: LogDensity,
    noise: Noise,
    n: int = 200_000,
    *,
    smooth: bool = False,
    generator: torch.Generator | None = None,
    chunk: int = CHUNK,
) -> LogZ:
    """log Z = log E_q[p~/q] from `n` draws of the noise, in constant memory; the error by the delta method.

    stderr = sqrt((n / ESS - 1) / (n - 1)), trustworthy while `khat` is below 0.7.

    Args:
        model: log p~.
        noise: q.
        n: how many draws.
        smooth: Pareto-smooth the largest weights (Vehtari et al. 2024): less variance for a little bias.
        generator: draws the noise.
        chunk: draws held at once.

    >>> from unnorm import Gaussian, Quadratic
    >>> found = importance(Quadratic(2), Gaussian(2), 1000)
    >>> round(found.value, 4), found.khat
    (1.8379, 0.0)
    """
    at_least(2, "number of draws 'n'", n)
    at_least(1, "'chunk' of importance", chunk)
    weights = Weights(n)
    draw_into(weights, model, noise, n, generator=generator, chunk=chunk)
    return weights.log_z("importance", smooth=smooth)


def at_least(least: int, what: str, number: int) -> None:
    """Insist on a whole number from `least`.

    >>> at_least(2, "number of draws 'n'", 1e4)
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: The number of draws 'n' must be a whole number. Got 10000.0: give an int.
    """
    if not isinstance(number, Integral):
        raise InvalidValue(f"The {what} must be a whole number. Got {number!r}: give an int.")
    if number < least:
        raise InvalidValue(f"The {what} must be at least {least}. Got {number}.")


@torch.no_grad()
def draw_into(
    weights: Weights,
    model: LogDensity,
    noise: Noise,
    n: int,
    *,
    generator: torch.Generator | None = None,
    chunk: int = CHUNK,
) -> None:
    """Add the weights of `n` more draws."""
    for start in range(0, n, chunk):
        z = noise.sample(min(chunk, n - start), generator=generator)
        weights.add(log_weight(model, noise, z), noise.log_prob(z))


@torch.no_grad()
def log_weights(
    model: LogDensity, noise: Noise, n: int, *, generator: torch.Generator | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """`n` draws of the noise, all kept, and their log p~ - log q in float64; `chunk` at a time.

    >>> from unnorm import Gaussian, Quadratic
    >>> x, log_w = log_weights(Quadratic(2), Gaussian(2), 10)
    >>> x.shape, log_w.shape
    (torch.Size([10, 2]), torch.Size([10]))
    """
    at_least(1, "number of draws 'n'", n)
    at_least(1, "'chunk' of log_weights", chunk)
    # All at once: small pieces kept between large temporaries would fragment the memory.
    z = noise.sample(min(chunk, n), generator=generator)
    draws, log_w = z.new_empty(n, *z.shape[1:]), torch.empty(n, dtype=torch.float64, device=z.device)
    for start in range(0, n, chunk):
        if start:
            z = noise.sample(min(chunk, n - start), generator=generator)
        draws[start : start + len(z)] = z
        log_w[start : start + len(z)] = log_weight(model, noise, z)
    return draws, log_w
