"""log Z by importance sampling."""

import math

import torch

from unnorm.diagnostics import effective_sample_size, pareto_khat
from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise
from unnorm.types import LogDensity, LogZ, log_density, log_mean_exp

__all__ = ["importance"]


def importance(
    model: LogDensity,
    noise: Noise,
    n: int = 200_000,
    *,
    generator: torch.Generator | None = None,
    chunk: int = 4096,
) -> LogZ:
    """log Z = log E_q[p~/q] from `n` draws of the noise; the error by the delta method.

    stderr = sqrt((n / ESS - 1) / (n - 1)), trustworthy while `khat` is below 0.7.

    >>> from unnorm import Gaussian, Quadratic
    >>> found = importance(Quadratic(2), Gaussian(2), 1000)
    >>> round(found.value, 4), found.khat
    (1.8379, 0.0)
    """
    if n < 2:
        raise InvalidValue(f"The number of draws 'n' must be at least 2. Got {n}.")
    log_w = log_weights(model, noise, n, generator=generator, chunk=chunk)[1]
    ess = float(effective_sample_size(log_w))
    stderr = math.sqrt(max(n / ess - 1, 0.0) / (n - 1))
    return LogZ(float(log_mean_exp(log_w)), stderr, ess, pareto_khat(log_w), "importance", n)


@torch.no_grad()
def log_weights(
    model: LogDensity,
    noise: Noise,
    n: int,
    *,
    generator: torch.Generator | None = None,
    chunk: int = 4096,
    keep: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`n` draws of the noise (kept on request) and their log p~ - log q, float64, `chunk` at a time."""
    draws, log_w = None, None
    for start in range(0, n, chunk):
        z = noise.sample(min(chunk, n - start), generator=generator)
        if log_w is None:  # all at once: small pieces kept between large temporaries would fragment the memory
            log_w = torch.empty(n, dtype=torch.float64, device=z.device)
            draws = z.new_empty(n, *z.shape[1:]) if keep else None
        log_w[start : start + len(z)] = log_density(model, z) - noise.log_prob(z)
        if draws is not None:
            draws[start : start + len(z)] = z
    assert log_w is not None
    return draws, log_w
