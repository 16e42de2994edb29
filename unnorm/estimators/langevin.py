"""Maximum likelihood with samples of the model: -grad log p = E_model[grad log p~] - grad log p~(data).

The three methods differ in where their Langevin chains start: at the data (contrastive divergence), where they ended
(persistent), or in a replay buffer with restarts from the noise (Du and Mordatch). None has a normaliser: `value` is
the contrast E_model[log p~] - E_data[log p~], whose fall is no evidence of learning. Watch `unnorm.health`.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.estimators.base import Estimator, check_at_least, contrast
from unnorm.noise.base import Noise, event_of
from unnorm.samplers.base import Bounds, distance, frozen, per_event, relative_score, spread
from unnorm.samplers.buffer import ReplayBuffer
from unnorm.samplers.langevin import MALA, ULA
from unnorm.types import LogDensity, Objective, apart, log_density, log_mean_exp, together

__all__ = ["ContrastiveDivergence", "MCMCLikelihood", "PersistentCD", "contrast_loss"]

RATE = 0.3  # of the step-size rule, in log step size per unit of acceptance and training step


def contrast_loss(log_p_data: Tensor, log_p_model: Tensor) -> Tensor:
    """mean log p~ at the model's samples - mean log p~ at the data: its gradient is that of -log-likelihood.

    Reduces over the last axis.

    >>> contrast_loss(torch.zeros(3, 5), torch.ones(3, 7))
    tensor([1., 1., 1.])
    """
    return log_p_model.mean(-1) - log_p_data.mean(-1)


class _Langevin(Estimator):
    """What the three share: `n_steps` of Langevin dynamics from somewhere, the contrast, and the step-size rule.

    The rule (`step_size=None`): the chains are Metropolis-adjusted, and after each training step
    log step size += 0.3 (acceptance - 0.574), MALA's optimal acceptance. It needs no pilot run and follows the model
    as it sharpens. Unadjusted chains cannot be tuned so: what they overshoot steepens the model, and a step that
    shrinks with it leaves them standing.
    """

    log_step_size: Tensor
    started: Tensor

    def __init__(
        self,
        noise: Noise | None,
        n_steps: int,
        step_size: float | None,
        noise_scale: float | None,
        bounds: Bounds | None,
        regulariser: float,
        shape: tuple[int, ...],
    ):
        super().__init__()
        self.shape = shape
        name = type(self).__name__
        check_at_least(name, "n_steps", n_steps, 1)
        check_at_least(name, "regulariser", regulariser, 0)
        if step_size is not None and not step_size > 0:
            raise InvalidValue(f"The 'step_size' of {name} must be positive. Got {step_size}.")
        if step_size is None and noise_scale is not None:
            raise InvalidValue(f"The 'noise_scale' of {name} belongs to a fixed 'step_size': give both.")
        ULA(step_size or 1.0, noise_scale, bounds)  # refuses what it cannot use
        self.noise, self.n_steps, self.step_size = noise, n_steps, step_size
        self.noise_scale, self.bounds, self.regulariser = noise_scale, bounds, regulariser
        self.register_buffer("log_step_size", torch.full(shape, math.log(step_size or 1.0)))
        self.register_buffer("started", torch.zeros(shape, dtype=torch.bool))

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {
            **super().settings,
            "n_steps": self.n_steps,
            "step_size": self.step_size,
            "noise_scale": self.noise_scale,
            "bounds": None if self.bounds is None else str(tuple(self.bounds)),
            "regulariser": self.regulariser,
        }

    @property
    def comparable(self) -> bool:
        return self.noise is not None

    @property
    def one_process(self) -> bool:
        return True

    @abstractmethod
    def _start(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Any]:
        """Where the chains begin, and what `_keep` must know of it."""

    def _keep(self, place: Any, samples: Tensor, usable: Tensor) -> None:
        """Store where the chains ended, unless the batch was not usable."""

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        if not self.training and self.noise is not None:
            n = len(x) // math.prod(self.shape)
            seen = contrast(model, self.noise, x, n, shape=self.shape, generator=generator)
            surrogate = log_mean_exp(seen.log_w) - seen.log_p_data.mean(-1)
            return Objective(surrogate, {"value": seen.nll(), "ess": seen.ess()})
        start, place = self._start(x, generator)
        if start.shape[1:] != x.shape[1:]:
            raise InvalidValue(
                f"The data have events of shape {tuple(x.shape[1:])}, the chains {tuple(start.shape[1:])}."
            )
        log_step_size = torch.where(self.started, self.log_step_size, self._first_log_step_size(x))
        samples, score, acceptance = self._walk(model, start.to(x.dtype), log_step_size, generator)

        log_p = apart(log_density(model, together([x, samples], self.shape)), self.shape)
        log_p_data, log_p_model = log_p.tensor_split([len(x) // math.prod(self.shape)], -1)
        surrogate = contrast_loss(log_p_data, log_p_model)
        value = surrogate.detach()
        if self.regulariser:
            surrogate = surrogate + self.regulariser * (log_p_data.square().mean(-1) + log_p_model.square().mean(-1))
        with torch.no_grad():
            scale = spread(x, self.shape)
            if self.training:  # a non-finite batch raises in `step`; it must not spoil the chains
                usable = torch.isfinite(value)
                self._keep(place, samples, usable)
                if self.step_size is None:
                    log_step_size = log_step_size + RATE * (acceptance - MALA.target)
                self.log_step_size.copy_(torch.where(usable, log_step_size, self.log_step_size))
                self.started.logical_or_(usable)
            info = {
                "value": value,
                "acceptance": acceptance,
                "step_size": log_step_size.exp(),
                "score": relative_score(score, scale, self.shape),
                "distance": distance(samples, x, self.shape) / scale,
            }
        return Objective(surrogate, info)

    def _first_log_step_size(self, x: Tensor) -> Tensor:
        """A few hundredths of the data's variance, less in many dimensions, as MALA's optimal scaling has it."""
        if self.step_size is not None:
            return self.log_step_size
        return 2 * spread(x, self.shape).log() + math.log(0.03) - math.log(x[0].numel()) / 3

    def _walk(
        self, model: LogDensity, start: Tensor, log_step_size: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The chains' ends, the last score seen, and the acceptance: of all adjusted steps, of the last plain one."""
        if self.bounds is not None:
            start = start.clamp(*self.bounds)
        with frozen(model) as target:
            if self.step_size is None:
                step_size = self._of_each(log_step_size.exp(), start)
                return self._adjusted(MALA(step_size, self.bounds), start, target, generator)
            return self._plain(ULA(self.step_size, self.noise_scale, self.bounds), start, target, generator)

    def _adjusted(
        self, sampler: MALA, start: Tensor, target: LogDensity, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        state, acceptance = sampler.init(start, target), torch.zeros_like(self.log_step_size)
        for _ in range(self.n_steps):
            state, info = sampler.step(state, target, generator=generator)
            acceptance = acceptance + apart(info.acceptance, self.shape).mean(-1) / self.n_steps
        return state.x, state.score, acceptance

    def _plain(
        self, sampler: ULA, start: Tensor, target: LogDensity, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        watched = min(2, self.n_steps)  # the second of two tells the acceptance of the first
        state = sampler.init(sampler.walk(start, target, self.n_steps - watched, generator=generator), target)
        for _ in range(watched):
            state, info = sampler.step(state, target, generator=generator)
        assert state.behind is not None
        return state.x, state.behind.score, apart(info.acceptance, self.shape).mean(-1)

    def _of_each(self, values: Tensor, x: Tensor) -> Tensor:
        """A number for each problem as one for each of its chains; of one problem, the number."""
        if not self.shape:
            return values
        chains = values.unsqueeze(-1).expand(*self.shape, len(x) // math.prod(self.shape))
        return per_event(chains.flatten(), x)


class ContrastiveDivergence(_Langevin):
    """Contrastive divergence (Hinton 2002): `n_steps` of Langevin dynamics from the data.

    grad = E[grad log p~(x_k)] - E[grad log p~(x_0)], with x_0 the data and x_k where k steps led; the dependence of
    x_k on the parameters is left out, as published. Cheap, and blind to what lies farther from the data than the
    chains walk.

    Args:
        noise: only judges: in eval mode `value` is the negative log-likelihood by importance sampling from it.
        n_steps: k of CD-k.
        step_size: e of unadjusted Langevin steps, as published. When None, the chains are Metropolis-adjusted and the
            step size follows their acceptance.
        noise_scale: sigma of unadjusted steps, see `samplers.ULA`.
        bounds: a box for the chains.
        regulariser: weight of E[(log p~)^2] at data and samples; 0, none, as published.
        shape: of independent problems solved side by side, see `Estimator`.

    `info` has `value` (the contrast), `acceptance`, `step_size`, `score` and `distance` (of the samples from the
    data's mean), both in units of the data's spread.

    >>> from unnorm import Quadratic
    >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    >>> sorted(ContrastiveDivergence()(Quadratic(2), x).info)
    ['acceptance', 'distance', 'score', 'step_size', 'value']
    """

    def __init__(
        self,
        noise: Noise | None = None,
        *,
        n_steps: int = 10,
        step_size: float | None = None,
        noise_scale: float | None = None,
        bounds: Bounds | None = None,
        regulariser: float = 0.0,
        shape: tuple[int, ...] = (),
    ):
        super().__init__(noise, n_steps, step_size, noise_scale, bounds, regulariser, shape)

    def _start(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Any]:
        return x, None


class PersistentCD(_Langevin):
    """Persistent contrastive divergence (Tieleman 2008): the chains go on where they ended.

    grad = E[grad log p~(x_t)] - E_data[grad log p~], where x_t is k Langevin steps from x_{t-1} of the step before.

    Args:
        noise: where the chains begin, once.
        n_chains: how many there are.
        n_steps: Langevin steps of each per training step.
        step_size, noise_scale, bounds, regulariser, shape: as for ContrastiveDivergence.

    >>> from unnorm import Gaussian, Quadratic
    >>> estimator = PersistentCD(Gaussian(2), n_chains=64)
    >>> _ = estimator(Quadratic(2), torch.randn(64, 2))
    >>> estimator.state_dict()["chains"].shape
    torch.Size([64, 2])
    """

    chains: Tensor

    def __init__(
        self,
        noise: Noise,
        *,
        n_chains: int = 500,
        n_steps: int = 10,
        step_size: float | None = None,
        noise_scale: float | None = None,
        bounds: Bounds | None = None,
        regulariser: float = 0.0,
        shape: tuple[int, ...] = (),
    ):
        super().__init__(noise, n_steps, step_size, noise_scale, bounds, regulariser, shape)
        check_at_least("PersistentCD", "n_chains", n_chains, 1)
        self.n_chains = n_chains
        self.register_buffer("chains", torch.zeros(math.prod(shape) * n_chains, *event_of(noise)))

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {**super().settings, "n_chains": self.n_chains}

    def _start(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Any]:
        assert self.noise is not None
        fresh = self.noise.sample(len(self.chains), generator=generator).to(self.chains)
        return torch.where(self._of_each(self.started, fresh), self.chains, fresh), None

    def _keep(self, place: Any, samples: Tensor, usable: Tensor) -> None:
        self.chains.copy_(torch.where(self._of_each(usable, samples), samples, self.chains))


class MCMCLikelihood(_Langevin):
    """Langevin maximum likelihood (Du and Mordatch 2019): chains from a replay buffer, some restarted from the noise.

    grad = E[grad log p~(x_K)] - E_data[grad log p~], where x_K is K Langevin steps from a point of the buffer, or,
    for a share of the chains, from the noise.

    Args:
        noise: where new chains begin.
        n_steps: K Langevin steps per training step; the paper tries 20, 50 and 100.
        buffer_size: points in the replay buffer.
        restart: the share of chains that begin anew at each training step.
        step_size, noise_scale, bounds, regulariser, shape: as for ContrastiveDivergence. Du and Mordatch
            regularise; here it is an option.

    >>> from unnorm import Gaussian, Quadratic
    >>> estimator = MCMCLikelihood(Gaussian(2), buffer_size=100)
    >>> _ = estimator(Quadratic(2), torch.randn(64, 2))
    >>> estimator.state_dict()["buffer.points"].shape
    torch.Size([100, 2])
    """

    def __init__(
        self,
        noise: Noise,
        *,
        n_steps: int = 20,
        buffer_size: int = 10_000,
        restart: float = 0.05,
        step_size: float | None = None,
        noise_scale: float | None = None,
        bounds: Bounds | None = None,
        regulariser: float = 0.0,
        shape: tuple[int, ...] = (),
    ):
        super().__init__(noise, n_steps, step_size, noise_scale, bounds, regulariser, shape)
        self.buffer = ReplayBuffer(event_of(noise), buffer_size, restart, math.prod(shape))

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {**super().settings, "buffer_size": self.buffer.size, "restart": self.buffer.restart}

    def _start(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Any]:
        assert self.noise is not None
        return self.buffer.draw(len(x), self.noise, generator=generator)

    def _keep(self, place: Any, samples: Tensor, usable: Tensor) -> None:
        self.buffer.put(place, torch.where(self._of_each(usable, samples), samples, torch.nan))
