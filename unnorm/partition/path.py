"""The temperatures of a path from the noise to the model, and the transitions found for it by a pilot."""

import bisect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from unnorm.errors import InvalidValue, ShrinkageWarning
from unnorm.names import choose
from unnorm.noise.base import Noise
from unnorm.noise.gaussian import Gaussian
from unnorm.partition.routes import Route, picked, route
from unnorm.samplers import HMC
from unnorm.samplers.adaptation import first_step_size
from unnorm.samplers.base import Located
from unnorm.types import LogDensity

__all__ = ["Schedule", "conditional_ess", "geometric", "plan", "resampled"]

WIDEST = 512  # coordinates up to which trajectories follow the chains' full covariance
PILOT_CHAINS, MOST_PILOT_CHAINS = 256, 1024
MOST_STAGES = 2000
PILOT_ESS = 0.85  # conditional effective share of the pilot's chains from one temperature to the next
TRIALS = 4  # transitions of the pilot at each temperature, while its step size settles
LOG_W_VARIANCE = 0.5  # what the number of temperatures aims at
FEWEST, MOST = 16, 4000  # temperatures chosen by the pilot
# Leapfrog steps of one transition (None: a quarter turn), jitter, and the acceptance wanted.
TRANSITIONS = {"hmc": (None, 0.2, 0.8), "mala": (1, 0.0, 0.574)}


@dataclass(frozen=True)
class Schedule:
    """Inverse temperatures from 0 to 1, and the transition at each but the first; fixed, so that weights are exact.

    Attributes:
        betas: 0 = beta_0 < ... < beta_K = 1.
        samplers: the transitions, one for each of beta_1 ... beta_K.
        lengths: of each step, the integral of the standard deviation of log_w over beta.
        path: the densities on the way (`unnorm.partition.routes`): "geometric" or "bridges".
    """

    betas: tuple[float, ...]
    samplers: tuple[HMC, ...]
    lengths: tuple[float, ...]
    path: str = "geometric"

    def __post_init__(self) -> None:
        check_betas(self.betas)
        if not len(self.samplers) == len(self.lengths) == len(self.betas) - 1:
            raise InvalidValue(f"A schedule of {len(self.betas)} betas has one sampler and one length less.")

    def __len__(self) -> int:
        return len(self.samplers)

    @property
    def length(self) -> float:
        """Of the path: with K temperatures equally far apart and perfect mixing log weights vary by length^2 / K."""
        return sum(self.lengths)

    def spread(self, n: int) -> "Schedule":
        """The same path with `n` temperatures, equally far from each other.

        >>> Schedule((0.0, 0.2, 1.0), (HMC(0.1), HMC(0.2)), (3.0, 1.0)).spread(4).betas
        (0.0, 0.066..., 0.133..., 0.2, 1.0)
        """
        # Where log_w does not vary, every place on the path is as far as any other.
        lengths = self.lengths if self.length > 0 else tuple(high - low for low, high in pairwise(self.betas))
        ends = list(accumulate(lengths))
        betas, samplers = [0.0], []
        for k in range(1, n + 1):
            place = k * ends[-1] / n
            stage = min(bisect.bisect_left(ends, place * (1 - 1e-12)), len(self) - 1)
            share = 1 - (ends[stage] - place) / lengths[stage] if lengths[stage] > 0 else 1.0
            betas.append(self.betas[stage] + share * (self.betas[stage + 1] - self.betas[stage]))
            samplers.append(self.samplers[stage])
        betas[-1] = 1.0
        return Schedule(tuple(betas), tuple(samplers), (self.length / n,) * n, self.path)

    def to_reach(self, variance: float = LOG_W_VARIANCE) -> "Schedule":
        """As many temperatures as should give log weights of this variance, at least 16 and at most 4,000."""
        return self.spread(min(max(math.ceil(self.length**2 / variance), FEWEST), MOST))

    @property
    def evaluations(self) -> int:
        """Evaluations of the model and its score by one chain; over bridges each new temperature costs one."""
        anew = len(self) if self.path == "bridges" else 0
        return sum(sampler.leapfrog_steps for sampler in self.samplers) + anew


def check_betas(betas: Sequence[float]) -> None:
    rising = all(low < high for low, high in pairwise(betas))
    if len(betas) < 2 or betas[0] != 0 or betas[-1] != 1 or not rising:
        raise InvalidValue(f"The 'betas' must rise from 0 to 1. Got {len(betas)} of them: {str(list(betas))[:60]}.")


def geometric(n: int, first: float = 1e-4) -> tuple[float, ...]:
    """0, and `n` inverse temperatures from `first` to 1 with a constant ratio.

    >>> geometric(3, 0.01)
    (0.0, 0.01, 0.1..., 1.0)
    """
    if n < 2 or not 0 < first < 1:
        raise InvalidValue(f"Geometric betas need n >= 2 and first in (0, 1). Got n {n}, first {first}.")
    return (0.0, *(first ** (1 - k / (n - 1)) for k in range(n - 1)), 1.0)


def conditional_ess(log_w: Tensor, increment: Tensor) -> Tensor:
    """The share of weighted chains that is left after weighting them by `increment` (Zhou et al. 2016).

    (sum W v)^2 / sum W v^2 with normalised W = exp(log_w) and v = exp(increment), over the last axis.

    >>> conditional_ess(torch.zeros(2), torch.tensor([0.0, -torch.inf]))
    tensor(0.5000)
    """
    log_w = log_w - torch.logsumexp(log_w, -1, keepdim=True)
    return torch.exp(2 * torch.logsumexp(log_w + increment, -1) - torch.logsumexp(log_w + 2 * increment, -1))


def resampled(log_w: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Systematic resampling over the last axis: places of the chains that go on, each as often as its weight asks.

    >>> resampled(torch.tensor([0.5, 0.0, 0.5, 0.0]).log())
    tensor([0, 0, 2, 2])
    """
    n = log_w.shape[-1]
    edges = torch.softmax(log_w.double(), -1).cumsum(-1)
    edges = edges / edges[..., -1:]
    start = torch.rand(*log_w.shape[:-1], 1, generator=generator, device=log_w.device, dtype=torch.float64)
    teeth = (torch.arange(n, device=log_w.device, dtype=torch.float64) + start) / n
    return torch.searchsorted(edges, teeth.expand_as(edges).contiguous(), right=True).clamp(max=n - 1)


def plan(
    model: LogDensity,
    noise: Noise,
    *,
    betas: str | Sequence[float] = "adaptive",
    n_betas: int | None = None,
    transition: str = "hmc",
    path: str = "geometric",
    n_chains: int | None = None,
    most: int = MOST_STAGES,
    generator: torch.Generator | None = None,
) -> Schedule:
    """A pilot run: it finds the temperatures, and at each the step size and the shape of the target.

    The pilot is a sequential Monte Carlo sampler of its own chains, which are thrown away: what later runs on the
    schedule was not adapted to itself, and its weights are exact.

    Args:
        model: log p~, with parameters that need no gradient (`unnorm.samplers.base.frozen`).
        noise: q.
        betas: "adaptive" (each step keeps the same conditional effective sample size), "geometric", or a list.
        n_betas: how many; when None the pilot chooses so that log weights should have a variance of 0.5
            (geometric: 100).
        transition: "hmc", or "mala", which is HMC with a single leapfrog step.
        path: "geometric", q^(1 - beta) p~^beta, or "bridges", over the waymarks of a `Bridged` model.
        n_chains: of the pilot; at least four for each coordinate, 256 to 1,024, when None.
        most: temperatures of the pilot, beyond which it gives up.
        generator: draws everything random.

    >>> from unnorm import Gaussian, Quadratic
    >>> schedule = plan(Quadratic(2), Gaussian(2), n_betas=5, generator=torch.Generator().manual_seed(0))
    >>> len(schedule), schedule.betas[-1]
    (5, 1.0)
    """
    if n_betas is not None and n_betas < 1:
        raise InvalidValue(f"The number of temperatures 'n_betas' must be at least 1. Got {n_betas}.")
    given: Sequence[float] | None = None
    if betas == "geometric":
        given = geometric(100 if n_betas is None else n_betas)
    elif isinstance(betas, str):
        choose("choice of betas", betas, {"adaptive": None, "geometric": None})
    else:
        given = tuple(float(beta) for beta in betas)
        check_betas(given)
        if n_betas is not None:
            raise InvalidValue("Give either a list of 'betas' or 'n_betas', not both.")
    found = _pilot(route(path, model, noise), given, transition, n_chains, most, generator)
    found = replace(found, path=path)
    if given is not None:
        return found
    return found.to_reach() if n_betas is None else found.spread(n_betas)


@torch.no_grad()
def _pilot(
    way: Route,
    given: Sequence[float] | None,
    transition: str,
    n_chains: int | None,
    most: int,
    generator: torch.Generator | None,
) -> Schedule:
    n_leapfrog, jitter, target = choose("transition", transition, TRANSITIONS)
    x = way.noise.sample(n_chains or PILOT_CHAINS, generator=generator)
    if n_chains is None and 4 * x[0].numel() > len(x):
        x = way.noise.sample(min(4 * x[0].numel(), MOST_PILOT_CHAINS), generator=generator)
    sampler = HMC(1.0, n_leapfrog, jitter=jitter)
    state = way.at(0.0).position(x)
    betas, samplers, lengths = [0.0], list[HMC](), list[float]()
    while betas[-1] < 1:
        last = betas[-1]
        beta = _next_beta(way, state, last) if given is None else given[len(betas)]
        gain = way.gain(state, last, beta)
        state = way.move(picked(state, resampled(gain, generator=generator)), last, beta)
        sampler, state = _settle(_shaped(sampler, state.x), state, way.at(beta), target, not samplers, generator)
        betas.append(beta)
        samplers.append(sampler)
        lengths.append((_deviation(gain) + _deviation(way.gain(state, last, beta))) / 2)
        if len(betas) > most:
            raise InvalidValue(f"The path needs more than {most} temperatures: the noise is too far away.")
    return Schedule(tuple(betas), tuple(samplers), tuple(lengths))


def _deviation(gain: Tensor) -> float:
    alive = gain[gain != -math.inf]
    return float(alive.std()) if len(alive) > 1 else 0.0


def _next_beta(way: Route, state: Any, beta: float) -> float:
    """The beta at which a share of `PILOT_ESS` of the chains is left, by bisection; at most the next stop."""
    stop = way.stop(beta)
    gain = way.gain(state, beta, stop)
    alive = gain != -math.inf  # where p~ is zero no temperature helps
    if not torch.isfinite(gain[alive]).all() or not alive.any():
        raise InvalidValue("The model is not finite at draws of the noise: there is no path to it.")
    # Up to the next stop the way is geometric: a share of the step has that share of the gain.
    even, gain = torch.zeros_like(gain[alive]), gain[alive] / (stop - beta)
    low, high = 0.0, stop - beta
    if conditional_ess(even, high * gain) >= PILOT_ESS:
        return stop
    for _ in range(40):
        middle = (low + high) / 2
        enough = bool(conditional_ess(even, middle * gain) >= PILOT_ESS)
        low, high = (middle, high) if enough else (low, middle)
    return beta + max(low, 1e-12)


def _shaped(sampler: HMC, x: Tensor) -> HMC:
    """Trajectories that follow the covariance of the chains; with many coordinates their variances alone."""
    flat = x.flatten(1)
    full = flat.shape[1] <= WIDEST
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkageWarning)  # only the trajectories' shape is at stake
        shape = Gaussian.fit(flat, "full" if full else "diagonal").to(flat)
    if full:
        return replace(sampler, factor=shape.scale_tril)
    return replace(sampler, variance=shape.scale.square().view(x.shape[1:]))


def _settle(
    sampler: HMC, state: Any, target: Located, acceptance: float, anew: bool, generator: torch.Generator | None
) -> tuple[HMC, Any]:
    """A few transitions, while the step size moves toward the wanted acceptance."""
    step_size = float(sampler.step_size)
    if anew:
        step_size = first_step_size(sampler, state, target, generator=generator)
    for trial in range(TRIALS):
        sampler = replace(sampler, step_size=step_size)
        state, info = sampler.step(state, target, generator=generator)
        step_size *= math.exp((float(info.acceptance.mean()) - acceptance) / (1 + trial / 2))
    return replace(sampler, step_size=step_size), state
