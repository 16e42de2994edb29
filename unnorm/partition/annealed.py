"""log Z by annealed importance sampling, from the noise to the model and back."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise, event_of, own_generator
from unnorm.partition.importance import at_least
from unnorm.partition.path import Schedule, plan, resampled
from unnorm.partition.routes import picked, route
from unnorm.partition.weights import Weights
from unnorm.progress import Progress
from unnorm.samplers import HMC
from unnorm.samplers.base import Located, frozen
from unnorm.types import LogDensity, LogZ, effective_sample_size, log_mean_exp

__all__ = ["Annealing", "Settled", "ais", "estimate", "reverse_ais", "settled", "stuck"]

GROUPS = 32  # populations that resample each for itself: their spread tells the error
LEAST_SHARE = 0.5  # of a population that is left when it resamples
STUCK_CHAINS, STUCK_STEPS, STUCK_ACCEPTANCE = 512, 20, 0.3


class Annealing(NamedTuple):
    """What an annealed run leaves.

    Attributes:
        log_z: the estimate.
        log_w: the chains' accumulated log-weights; of a run with resampling, those of its populations.
        x: where the chains ended, (n_chains, *event): near the model, or, of a reverse run, near the noise. Chosen by
            their weights they are nearly samples.
        acceptance: mean acceptance at each temperature beta_1 ... beta_K.
        schedule: the temperatures and transitions it ran on; runs on the same schedule can be joined.
    """

    log_z: LogZ
    log_w: Tensor
    x: Tensor
    acceptance: tuple[float, ...]
    schedule: Schedule


def ais(
    model: LogDensity,
    noise: Noise,
    *,
    n_chains: int = 512,
    betas: str | Sequence[float] = "adaptive",
    n_betas: int | None = None,
    transition: str = "hmc",
    path: str = "geometric",
    schedule: Schedule | None = None,
    resample: bool = False,
    generator: torch.Generator | None = None,
    progress: bool | None = False,
) -> Annealing:
    """Annealed importance sampling (Neal 2001) along q^(1 - beta) p~^beta, or over the waymarks of a bridged model.

    The estimate of Z is unbiased, so that of log Z tends to lie below. A pilot finds temperatures and transitions
    (`plan`), which then are fixed: the weights are exact, and those of different chains independent.

    Args:
        model: log p~.
        noise: q, where the chains begin.
        n_chains: chains, all in one batch.
        betas: "adaptive" (constant conditional effective sample size), "geometric", or a list from 0 to 1.
        n_betas: how many temperatures; when None the pilot chooses (geometric: 100).
        transition: "hmc", or "mala".
        path: "geometric", or "bridges" for a `Bridged` model: its heads one after the other, those next to the noise
            first.
        schedule: from `plan` or an earlier run, in the place of a pilot and the four options before.
        resample: sequential Monte Carlo: 32 populations, each resampled when half of it is left; the error is from
            the spread of the populations (Del Moral, Doucet, Jasra 2006), and so is khat: it is fitted to the weights
            of these 32. `n_chains` must be a multiple of 32.
        generator: draws everything random.
        progress: a progress bar on standard error; None shows it on a terminal.

    >>> from unnorm import Gaussian, Quadratic
    >>> narrow = Quadratic(2); _ = narrow.log_diagonal.data.fill_(2.0)
    >>> run = ais(narrow, Gaussian(2), n_chains=256, generator=torch.Generator().manual_seed(0))
    >>> abs(run.log_z.value - narrow.log_z.item()) < 3 * run.log_z.stderr
    True
    """
    at_least(2, "number of chains 'n_chains'", n_chains)
    if resample and n_chains % GROUPS:
        raise InvalidValue(
            f"With 'resample' the chains are {GROUPS} equal populations. Got n_chains {n_chains}: it must be a "
            f"multiple of {GROUPS}, such as {GROUPS * -(-n_chains // GROUPS)}."
        )
    with frozen(model) as target, torch.no_grad():
        if schedule is None:
            schedule = plan(
                target, noise, betas=betas, n_betas=n_betas, transition=transition, path=path, generator=generator
            )
        way = route(schedule.path, target, noise)
        state = way.at(0.0).position(noise.sample(n_chains, generator=generator))
        log_w = torch.zeros(n_chains, dtype=torch.float64, device=state.x.device)
        gained = torch.zeros(GROUPS, dtype=torch.float64, device=state.x.device)
        acceptance = []
        with _bar(len(schedule), progress) as show:
            for k, sampler in enumerate(schedule.samplers, 1):
                low, high = schedule.betas[k - 1], schedule.betas[k]
                log_w = log_w + way.gain(state, low, high)
                state = way.move(state, low, high)
                if resample:
                    state, log_w, gained = _resample(state, log_w, gained, generator)
                state, info = sampler.step(state, way.at(high), generator=generator)
                acceptance.append(info.acceptance.mean())
                show(k, log_w)
    accepted = tuple(torch.stack(acceptance).tolist())
    if not resample:
        return Annealing(estimate(log_w, "ais"), log_w, state.x, accepted, schedule)
    own = gained + log_mean_exp(log_w.view(GROUPS, -1))
    found = estimate(own, "smc")
    found = found._replace(ess=found.ess * n_chains / GROUPS, n=n_chains)
    rest = resampled(log_w + gained.repeat_interleave(n_chains // GROUPS), generator=generator)
    return Annealing(found, own, state.x[rest], accepted, schedule)


def reverse_ais(
    model: LogDensity,
    noise: Noise,
    x: Tensor,
    *,
    betas: str | Sequence[float] = "adaptive",
    n_betas: int | None = None,
    transition: str = "hmc",
    path: str = "geometric",
    schedule: Schedule | None = None,
    settle: int = 0,
    generator: torch.Generator | None = None,
    progress: bool | None = False,
) -> Annealing:
    """The same path backwards, from samples `x` of the model: an unbiased estimate of 1/Z, so that log Z tends to lie
    above (Grosse, Ghahramani, Adams 2015).

    It bounds log Z as far as `x` are samples of the model. Held-out data stand for them where the model fits; a few
    transitions before the journey (`settle`) make them more like it, but leave each in its mode.

    Args:
        model: log p~.
        noise: q, where the chains end.
        x: where they begin, (n_chains, *event).
        settle: transitions of the model before the first weight.
        betas, n_betas, transition, path, schedule, generator, progress: as for `ais`; use one schedule for both
            directions.

    >>> from unnorm import Gaussian, Quadratic
    >>> x = torch.randn(256, 2, generator=torch.Generator().manual_seed(1))
    >>> run = reverse_ais(Quadratic(2), Gaussian(2), x, generator=torch.Generator().manual_seed(0))
    >>> round(run.log_z.value, 4)
    1.8379
    """
    if settle < 0:
        raise InvalidValue(f"The transitions to 'settle' must not be negative. Got {settle}.")
    x = torch.as_tensor(x).to(noise.sample(1, generator=own_generator(noise)))
    if x.shape[1:] != event_of(noise) or len(x) < 2:
        raise InvalidValue(f"The samples must have shape (n, {event_of(noise)}), n >= 2. Got {tuple(x.shape)}.")
    with frozen(model) as target, torch.no_grad():
        if schedule is None:
            schedule = plan(
                target, noise, betas=betas, n_betas=n_betas, transition=transition, path=path, generator=generator
            )
        way = route(schedule.path, target, noise)
        state = way.at(1.0).position(x)
        if not bool(torch.isfinite(state.log_p).all()):
            raise InvalidValue("The model's log density is not finite at some of the samples.")
        for _ in range(settle):
            state, _ = schedule.samplers[-1].step(state, way.at(1.0), generator=generator)
        log_w = torch.zeros(len(x), dtype=torch.float64, device=state.x.device)
        acceptance = []
        with _bar(len(schedule), progress) as show:
            for k in range(len(schedule), 0, -1):
                beta, below = schedule.betas[k], schedule.betas[k - 1]
                state, info = schedule.samplers[k - 1].step(state, way.at(beta), generator=generator)
                log_w = log_w + way.gain(state, below, beta)
                state = way.move(state, beta, below)
                acceptance.append(info.acceptance.mean())
                show(len(schedule) - k + 1, log_w)
    accepted = tuple(reversed(torch.stack(acceptance).tolist()))
    return Annealing(estimate(log_w, "reverse-ais", sign=-1), log_w, state.x, accepted, schedule)


def estimate(log_w: Tensor, method: str, sign: int = 1) -> LogZ:
    """log Z from the weights of independent chains; sign -1 where these went backwards.

    Log weights of annealed chains are sums of many parts and nearly normal. A few hundred of them seldom hold the
    largest weights that count, and then look more even than they are: the error is at least that of normal log weights
    as wide as these are to the right of their median.
    """
    weights = Weights(len(log_w))
    weights.add(sign * log_w)
    found = weights.log_z(method, sign=sign)
    middle, high = torch.quantile(sign * log_w, torch.tensor([0.5, 0.975], dtype=log_w.dtype, device=log_w.device))
    width = float(high - middle) / 1.96
    if not math.isfinite(width):
        return found
    normal = math.sqrt(math.expm1(min(width**2, 700.0)) / (len(log_w) - 1))
    return found._replace(stderr=max(found.stderr, normal))


class Settled(NamedTuple):
    """Chains after some transitions of the model: where they are, and the mean acceptance of each."""

    x: Tensor
    acceptance: Tensor


def settled(
    run: Annealing, model: LogDensity, noise: Noise, n_steps: int, *, generator: torch.Generator | None = None
) -> Settled:
    """The ends of a forward run after more transitions of the model, by its last sampler."""
    with frozen(model) as target, torch.no_grad():
        end = route(run.schedule.path, target, noise).at(1.0)
        return _transitions(end.position(run.x), end, run.schedule.samplers[-1], n_steps, generator)


def _transitions(
    state: Any, density: Located, sampler: HMC, n_steps: int, generator: torch.Generator | None
) -> Settled:
    acceptance = torch.zeros_like(state.log_p)
    for _ in range(n_steps):
        state, info = sampler.step(state, density, generator=generator)
        acceptance += info.acceptance / n_steps
    return Settled(state.x, acceptance)


def stuck(run: Annealing, model: LogDensity, noise: Noise, *, generator: torch.Generator | None = None) -> float:
    """The share of the model's mass, as a forward run has found it, where its last transition all but stands still.

    Where trajectories that suit most places are too long for some, as in a funnel's neck, regions like these may have
    been missed altogether.
    """
    with frozen(model) as target, torch.no_grad():
        density = route("geometric", target, noise).at(1.0)
        state = density.position(run.x[resampled(run.log_w, generator=generator)][:STUCK_CHAINS])
        found = _transitions(state, density, run.schedule.samplers[-1], STUCK_STEPS, generator)
    return float((found.acceptance < STUCK_ACCEPTANCE).double().mean())


def _resample(
    state: Any, log_w: Tensor, gained: Tensor, generator: torch.Generator | None
) -> tuple[Any, Tensor, Tensor]:
    """Each population whose weights have worn down is resampled; what they amounted to goes into `gained`."""
    grouped = log_w.view(GROUPS, -1)
    size = grouped.shape[1]
    worn = effective_sample_size(grouped) < LEAST_SHARE * size
    own = torch.arange(size, device=log_w.device).expand_as(grouped)
    index = torch.where(worn[:, None], resampled(grouped, generator=generator), own)
    index = (index + size * torch.arange(GROUPS, device=log_w.device)[:, None]).flatten()
    gained = torch.where(worn, gained + log_mean_exp(grouped), gained)
    log_w = torch.where(worn[:, None], 0.0, grouped).flatten()
    return picked(state, index), log_w, gained


@contextmanager
def _bar(total: int, progress: bool | None) -> Iterator[Callable[[int, Tensor], None]]:
    with Progress(total, enabled=progress, label="anneal") as bar:

        def show(done: int, log_w: Tensor) -> None:
            if bar.due() or done == total:
                bar.show(done, {"ess": float(effective_sample_size(log_w)) / len(log_w)})

        yield show
