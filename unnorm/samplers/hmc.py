"""Hamiltonian Monte Carlo."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.samplers.base import (
    Bounds,
    Info,
    Position,
    check_bounds,
    check_step_size,
    locate,
    metropolis,
    per_event,
    sum_event,
)
from unnorm.streams import normal, uniform
from unnorm.types import LogDensity

__all__ = ["HMC", "Phase", "leapfrog"]

MOST_LEAPFROG = 64
ENERGY_LIMIT = 1000.0  # nats of energy error beyond which a trajectory counts as divergent, as Stan has it


class Phase(NamedTuple):
    """A point of phase space: where, and with which momentum."""

    position: Position
    momentum: Tensor


def leapfrog(
    phase: Phase,
    log_density: LogDensity,
    step_size: float | Tensor,
    n_steps: int,
    *,
    variance: float | Tensor = 1.0,
    factor: Tensor | None = None,
    bounds: Bounds | None = None,
) -> Phase:
    """`n_steps` leapfrog steps of H(x, r) = -log p~(x) + sum(variance r^2) / 2: reversible, volume-preserving, order 2.

    `variance` is the inverse of the diagonal mass matrix. With a `factor` F the momentum belongs to coordinates y,
    x = F y. At a bound a coordinate is reflected and its momentum turned; a trajectory that met a wall has an energy
    error of order 1.

    >>> log_p = lambda x: -x.square().sum(-1) / 2
    >>> start = locate(log_p, torch.ones(1, 1))
    >>> end = leapfrog(Phase(start, torch.zeros(1, 1)), log_p, torch.pi / 100, 100)       # half a turn
    >>> round(end.position.x.item(), 3)
    -1.0
    """
    position, momentum = phase
    for _ in range(n_steps):
        momentum = momentum + 0.5 * step_size * _times(position.score, factor)
        x = position.x + step_size * _times(variance * momentum, None if factor is None else factor.mT)
        if bounds is not None:
            x, momentum = _reflect(x, momentum, bounds)
        finite = torch.isfinite(x)
        if x.device.type != "cpu" or not bool(finite.all()):  # elsewhere the question costs more than the answer
            # What left all numbers stays where it was, and its infinite energy has it refused: no model is asked there.
            lost = per_event(~finite.flatten(1).all(-1), x)
            x, momentum = torch.where(lost, position.x, x), torch.where(lost, torch.inf, momentum)
        position = locate(log_density, x)
        momentum = momentum + 0.5 * step_size * _times(position.score, factor)
    return Phase(position, momentum)


def _times(rows: Tensor, matrix: Tensor | None) -> Tensor:
    return rows if matrix is None else (rows.flatten(1) @ matrix).view_as(rows)


def _reflect(x: Tensor, momentum: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Fold the line into the box like a strip of paper; an odd number of folds turns the momentum."""
    low, high = bounds
    place = torch.remainder(x - low, 2 * (high - low))
    turned = place > high - low
    folded = torch.where(turned, 2 * (high - low) - place, place) + low
    return folded.clamp(low, high), torch.where(turned, -momentum, momentum)


@dataclass(frozen=True)
class HMC:
    """Hamiltonian Monte Carlo with leapfrog steps and a diagonal mass matrix (Neal 2011).

    Args:
        step_size: of the leapfrog integrator; `run(..., warmup=)` finds one, and the variances.
        n_leapfrog: leapfrog steps in one transition; when None as many as make a quarter turn of a Gaussian with these
            variances, at most 64.
        variance: the target's variances, the inverse mass; broadcast against the event.
        factor: F with F F^T near the target's covariance, over the flattened event: the trajectories then live in
            coordinates where the target is round, and `variance` is of these.
        jitter: each chain's step size is drawn anew, uniform within this share of it, so that no orbit closes.
        bounds: a box at whose walls the trajectories are reflected.

    >>> sampler, log_p = HMC(0.3), lambda x: -x.square().sum(-1) / 2
    >>> state, info = sampler.step(sampler.init(torch.zeros(4, 2), log_p), log_p)
    >>> bool((info.acceptance > 0.8).all())
    True
    """

    step_size: float | Tensor = 0.1
    n_leapfrog: int | None = None
    variance: float | Tensor = 1.0
    jitter: float = 0.2
    bounds: Bounds | None = None
    factor: Tensor | None = None
    target: ClassVar[float] = 0.8

    def __post_init__(self) -> None:
        check_step_size("HMC", self.step_size)
        check_bounds(self.bounds)
        if self.n_leapfrog is not None and self.n_leapfrog < 1:
            raise InvalidValue(f"The 'n_leapfrog' of HMC must be at least 1. Got {self.n_leapfrog}.")
        if not 0 <= self.jitter < 1:
            raise InvalidValue(f"The 'jitter' of HMC must be in [0, 1). Got {self.jitter}.")
        if not isinstance(self.variance, Tensor) and not self.variance > 0:
            raise InvalidValue(f"The 'variance' of HMC must be positive. Got {self.variance}.")
        if self.factor is not None and self.bounds is not None:
            raise InvalidValue("HMC reflects at 'bounds' in the event's own coordinates: give no 'factor' with them.")

    @property
    def leapfrog_steps(self) -> int:
        """How many a transition takes."""
        if self.n_leapfrog is not None:
            return self.n_leapfrog
        return min(max(1, round(math.pi / 2 / float(self.step_size))), MOST_LEAPFROG)

    def init(self, x: Tensor, log_density: LogDensity) -> Any:
        return locate(log_density, x.detach())

    def step(
        self, state: Any, log_density: LogDensity, *, generator: torch.Generator | None = None
    ) -> tuple[Any, Info]:
        x = state.x
        momentum = normal(x.shape, generator=generator, device=x.device, dtype=x.dtype) / self.variance**0.5
        step_size: float | Tensor = self.step_size
        if self.jitter:
            draws = uniform((len(x),), generator=generator, device=x.device, dtype=x.dtype)
            step_size = step_size * per_event(1 + self.jitter * (2 * draws - 1), x)
        end = leapfrog(
            Phase(state, momentum),
            log_density,
            step_size,
            self.leapfrog_steps,
            variance=self.variance,
            factor=self.factor,
            bounds=self.bounds,
        )
        before = state.log_p - sum_event(self.variance * momentum.square()) / 2
        after = end.position.log_p - sum_event(self.variance * end.momentum.square()) / 2
        chosen, info = metropolis(state, end.position, after - before, generator)
        return chosen, info._replace(divergent=info.divergent | (after - before < -ENERGY_LIMIT))
