"""Run a sampler, and what a run leaves behind."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unnorm.diagnostics import chain_ess, r_hat
from unnorm.errors import InvalidValue
from unnorm.samplers.adaptation import warm_up
from unnorm.samplers.base import Sampler, frozen
from unnorm.types import LogDensity

__all__ = ["Chain", "run"]


@dataclass(frozen=True)
class Chain:
    """What many chains passed through, and how well they mixed.

    Attributes:
        samples: (n_draws, n_chains, *event).
        log_p: log p~ at each of them, (n_draws, n_chains); of ULA, at the point before.
        acceptance: mean acceptance of each chain, (n_chains,).
        divergences: how many of its steps diverged, (n_chains,).
        sampler: as it was after the warm-up.

    >>> log_p = lambda x: -x.square().sum(-1) / 2
    >>> from unnorm.samplers import HMC
    >>> chain = run(HMC(), log_p, torch.zeros(8, 2), 100, warmup=60, generator=torch.Generator().manual_seed(0))
    >>> chain.samples.shape, chain.r_hat.shape, bool((chain.r_hat < 1.05).all()), int(chain.divergences.sum())
    (torch.Size([100, 8, 2]), torch.Size([2]), True, 0)
    """

    samples: Tensor
    log_p: Tensor
    acceptance: Tensor
    divergences: Tensor
    sampler: Any

    @cached_property
    def ess(self) -> Tensor:
        """Effective number of independent draws of each coordinate, shape `event` (arviz-stats, bulk)."""
        return chain_ess(self.samples)

    @cached_property
    def r_hat(self) -> Tensor:
        """Rank-normalised split R-hat of each coordinate, shape `event` (arviz-stats)."""
        return r_hat(self.samples)

    def __repr__(self) -> str:
        draws, chains = self.samples.shape[:2]
        return (
            f"Chain({draws} draws x {chains} chains, acceptance {self.acceptance.mean():.2f}, "
            f"{int(self.divergences.sum())} divergences, R-hat {self.r_hat.max():.3f}, ESS {self.ess.min():.0f})"
        )


def run(
    sampler: Sampler,
    log_density: LogDensity,
    x: Tensor,
    n_steps: int,
    *,
    warmup: int = 0,
    thin: int = 1,
    generator: torch.Generator | None = None,
) -> Chain:
    """Run one chain from each point of `x` for `n_steps` after the warm-up; keep every `thin`-th.

    Args:
        sampler: ULA, MALA, HMC, or anything with `init` and `step`.
        log_density: log p~.
        x: where the chains start, (n_chains, *event).
        n_steps: steps that count.
        warmup: steps before them; MALA and HMC tune themselves meanwhile.
        thin: steps from one kept draw to the next.
        generator: draws everything random.

    >>> from unnorm.samplers import ULA
    >>> run(ULA(0.1), lambda x: -x.square().sum(-1), torch.zeros(3, 1), 10, thin=2).samples.shape
    torch.Size([5, 3, 1])
    """
    if n_steps < 1 or thin < 1 or warmup < 0 or n_steps < thin:
        raise InvalidValue(
            f"A run needs n_steps >= thin >= 1 and warmup >= 0. Got n_steps {n_steps}, thin {thin}, warmup {warmup}."
        )
    bounds = getattr(sampler, "bounds", None)
    if bounds is not None and bool(((x < bounds[0]) | (x > bounds[1])).any()):
        raise InvalidValue(f"The chains must start within the bounds {bounds}.")
    samples, log_ps = [], []
    with frozen(log_density) as target:
        state = sampler.init(x.detach(), target)
        sampler, state = warm_up(sampler, state, target, warmup, generator=generator)
        acceptance = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        divergences = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for t in range(1, n_steps + 1):
            state, info = sampler.step(state, target, generator=generator)
            acceptance += info.acceptance
            divergences += info.divergent
            if t % thin == 0:
                samples.append(state.x)
                log_ps.append(info.log_p)
    return Chain(torch.stack(samples), torch.stack(log_ps), acceptance / n_steps, divergences, sampler)
