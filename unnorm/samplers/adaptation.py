"""Finding a step size, and the variances of the target, before the draws that count."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unnorm.types import LogDensity

__all__ = ["Averaged", "dual_average", "first_step_size", "warm_up"]


class Averaged(NamedTuple):
    """The state of dual averaging: the step size to try next, the one to keep, and the error so far."""

    log_step: Tensor
    log_step_mean: Tensor
    error: Tensor
    centre: Tensor
    t: int

    @classmethod
    def start(cls, step_size: float | Tensor) -> "Averaged":
        log_step = torch.as_tensor(step_size).log()
        return cls(log_step, torch.zeros_like(log_step), torch.zeros_like(log_step), log_step + math.log(10), 0)


def dual_average(state: Averaged, acceptance: Tensor, target: float) -> Averaged:
    """One update of Nesterov's dual averaging toward a wanted acceptance (Hoffman and Gelman 2014, eq. 6).

    With their constants: shrinkage 0.05, t0 = 10, exponent 0.75.

    >>> state = Averaged.start(1.0)
    >>> for _ in range(2000):              # an acceptance of exp(-step size): 0.8 at log 1.25 = 0.223
    ...     state = dual_average(state, torch.exp(-state.log_step.exp()), target=0.8)
    >>> round(state.log_step_mean.exp().item(), 1)
    0.2
    """
    t = state.t + 1
    weight = 1 / (t + 10)
    error = (1 - weight) * state.error + weight * (target - acceptance)
    log_step = state.centre - t**0.5 / 0.05 * error
    share = t**-0.75
    return Averaged(log_step, share * log_step + (1 - share) * state.log_step_mean, error, state.centre, t)


def first_step_size(
    sampler: Any, state: Any, log_density: LogDensity, *, generator: torch.Generator | None = None
) -> float:
    """Double or halve the step size until the mean acceptance crosses one half."""
    step_size, direction = float(sampler.step_size), 0
    for _ in range(50):
        _, info = replace(sampler, step_size=step_size).step(state, log_density, generator=generator)
        toward = 1 if info.acceptance.mean() > 0.5 else -1
        if direction == -toward:
            break
        direction = toward
        step_size *= 2.0**direction
    return step_size


def warm_up(
    sampler: Any, state: Any, log_density: LogDensity, n_steps: int, *, generator: torch.Generator | None = None
) -> tuple[Any, Any]:
    """Run `n_steps`, tuning as they go; returns the tuned sampler and the state.

    The step size follows dual averaging over all chains together, toward the sampler's `target`. HMC learns the
    variances too, after the first and again after the second of three thirds, and then finds its step size anew. A
    sampler without a target acceptance (ULA) is only run.

    >>> from unnorm.samplers import MALA
    >>> log_p = lambda x: -x.square().sum(-1) / 2
    >>> start = MALA(1e-3).init(torch.zeros(100, 2), log_p)
    >>> tuned, state = warm_up(MALA(1e-3), start, log_p, 100, generator=torch.Generator().manual_seed(0))
    >>> bool(0.3 < tuned.step_size < 3)
    True
    """
    if not hasattr(sampler, "target"):
        for _ in range(n_steps):
            state, _ = sampler.step(state, log_density, generator=generator)
        return sampler, state
    if not hasattr(sampler, "variance"):
        return _tune_step_size(sampler, state, log_density, n_steps, generator)[:2]
    third = n_steps // 3
    for _ in range(2):
        sampler, state, variance = _tune_step_size(sampler, state, log_density, third, generator)
        if variance is not None:
            sampler = replace(sampler, variance=variance, step_size=1.0)
    return _tune_step_size(sampler, state, log_density, n_steps - 2 * third, generator)[:2]


def _tune_step_size(
    sampler: Any, state: Any, log_density: LogDensity, n_steps: int, generator: torch.Generator | None
) -> tuple[Any, Any, Tensor | None]:
    """Also returns the variance of the points passed; None where they say nothing."""
    if n_steps < 1:
        return sampler, state, None
    averaged = Averaged.start(first_step_size(sampler, state, log_density, generator=generator))
    passed = []
    for _ in range(n_steps):
        trial = replace(sampler, step_size=averaged.log_step.exp().to(state.x))
        state, info = trial.step(state, log_density, generator=generator)
        averaged = dual_average(averaged, info.acceptance.mean().to(averaged.log_step), sampler.target)
        passed.append(state.x.double().mean(0))
        passed.append(state.x.double().square().mean(0))
    mean, square = torch.stack(passed[0::2]).mean(0), torch.stack(passed[1::2]).mean(0)
    variance = square - mean.square()
    # A coordinate that did not move gets a millionth of the largest variance, not none.
    variance = torch.maximum(variance, 1e-6 * variance.max())
    usable = bool(torch.isfinite(variance).all() and (variance > 0).all())
    tuned = replace(sampler, step_size=averaged.log_step_mean.exp().item())
    return tuned, state, variance.to(state.x) if usable else None
