"""Langevin dynamics, plain (ULA) and corrected by Metropolis' rule (MALA)."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
    log_density_and_score,
    metropolis,
    sum_event,
)
from unnorm.streams import normal
from unnorm.types import LogDensity

__all__ = ["MALA", "ULA", "langevin_log_ratio"]


def langevin_log_ratio(old: Position, new: Position, step_size: float | Tensor) -> Tensor:
    """log of p~(x') k(x|x') / (p~(x) k(x'|x)) for Langevin's kernel k(x'|x) = N(x + e s(x), 2 e).

    The quadratic terms are written with d = x' - x as (e (|s|^2 - |s'|^2) - 2 d.(s + s')) / 4, which has no 1/e.

    >>> old = Position(torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1))
    >>> new = Position(torch.ones(1, 1), torch.tensor([-0.5]), torch.tensor([[-1.0]]))     # N(0, 1)
    >>> langevin_log_ratio(old, new, 0.1)                             # -0.5 + (0.1 (0 - 1) + 2) / 4
    tensor([-0.0250])
    """
    moved = new.x - old.x
    quadratic = step_size * (old.score.square() - new.score.square()) - 2 * moved * (old.score + new.score)
    return new.log_p - old.log_p + sum_event(quadratic) / 4


class Walk(NamedTuple):
    """Where ULA's chains are, and the evaluation behind them (None before the first step)."""

    x: Tensor
    behind: Position | None


@dataclass(frozen=True)
class ULA:
    """Unadjusted Langevin: x' = x + e s(x) + sigma xi, with xi standard normal and s the score.

    One evaluation of the model per step. Its stationary distribution is off by O(e); the acceptance that MALA would
    have had for the step before comes free with the next evaluation and tells how far.

    Args:
        step_size: e.
        noise_scale: sigma; sqrt(2 e), which targets p~, when None. The papers on image models use a smaller one.
        bounds: a box that points are clamped to, as those papers do; the chain then has atoms at the border.

    Roberts and Tweedie 1996; Du and Mordatch 2019.

    >>> sampler, log_p = ULA(0.1), lambda x: -x.square().sum(-1) / 2
    >>> state, info = sampler.step(sampler.init(torch.zeros(4, 2), log_p), log_p)
    >>> state.x.shape
    torch.Size([4, 2])
    """

    step_size: float | Tensor
    noise_scale: float | None = None
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        check_step_size("ULA", self.step_size)
        check_bounds(self.bounds)
        if self.noise_scale is not None and not self.noise_scale >= 0:
            raise InvalidValue(f"The 'noise_scale' of ULA must not be negative. Got {self.noise_scale}.")

    def init(self, x: Tensor, log_density: LogDensity) -> Walk:
        return Walk(x, None)

    def step(
        self, state: Walk, log_density: LogDensity, *, generator: torch.Generator | None = None
    ) -> tuple[Walk, Info]:
        here = Position(state.x, *log_density_and_score(log_density, state.x))
        with torch.no_grad():
            acceptance = self._acceptance(state.behind, here)
            return Walk(self._moved(here, generator), here), Info(here.log_p, acceptance, ~torch.isfinite(here.log_p))

    def walk(
        self, x: Tensor, log_density: LogDensity, n_steps: int, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Where `n_steps` steps from x lead, and nothing else: the same points as `step` gives, at less cost."""
        for _ in range(n_steps):
            here = Position(x, *log_density_and_score(log_density, x))
            with torch.no_grad():
                x = self._moved(here, generator)
        return x

    def _moved(self, here: Position, generator: torch.Generator | None) -> Tensor:
        x = here.x
        noise = normal(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        moved = noise.mul_((2 * self.step_size) ** 0.5 if self.noise_scale is None else self.noise_scale)
        moved.add_(x.detach())
        if isinstance(self.step_size, Tensor):
            moved.addcmul_(here.score, self.step_size)
        else:
            moved.add_(here.score, alpha=self.step_size)
        return moved if self.bounds is None else moved.clamp_(*self.bounds)

    def _acceptance(self, behind: Position | None, here: Position) -> Tensor:
        """MALA's acceptance of the step just made; a noise scale of one's own targets p~^(2 e / sigma^2)."""
        if behind is None or self.noise_scale == 0:
            return torch.ones_like(here.log_p)
        log_ratio = langevin_log_ratio(behind, here, self.step_size)
        if self.noise_scale is not None:
            log_ratio = log_ratio * (2 * self.step_size / self.noise_scale**2)
        return log_ratio.clamp(max=0).exp().nan_to_num(0)


@dataclass(frozen=True)
class MALA:
    """Metropolis-adjusted Langevin: ULA's proposal, accepted so that p~ is exactly invariant.

    Args:
        step_size: e; an acceptance near 0.57 mixes fastest in many dimensions. Where the tails are lighter than a
            Gaussian's, chains that start far out overshoot at any fixed step size and stand still: look at R-hat.
        bounds: a box outside of which p~ counts as zero: proposals there are refused.

    Roberts and Tweedie 1996.

    >>> sampler, log_p = MALA(0.5), lambda x: -x.square().sum(-1) / 2
    >>> state, info = sampler.step(sampler.init(torch.zeros(4, 2), log_p), log_p)
    >>> bool((info.acceptance <= 1).all())
    True
    """

    step_size: float | Tensor
    bounds: Bounds | None = None
    target: ClassVar[float] = 0.574

    def __post_init__(self) -> None:
        check_step_size("MALA", self.step_size)
        check_bounds(self.bounds)

    def init(self, x: Tensor, log_density: LogDensity) -> Position:
        return locate(log_density, x.detach())

    def step(
        self, state: Position, log_density: LogDensity, *, generator: torch.Generator | None = None
    ) -> tuple[Position, Info]:
        x = state.x
        noise = normal(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        proposal = x + self.step_size * state.score + (2 * self.step_size) ** 0.5 * noise
        new = locate(log_density, proposal)
        log_ratio = langevin_log_ratio(state, new, self.step_size)
        if self.bounds is not None:
            low, high = self.bounds
            outside = ((proposal < low) | (proposal > high)).flatten(1).any(-1)
            log_ratio = torch.where(outside, -math.inf, log_ratio)
        return metropolis(state, new, log_ratio, generator)
