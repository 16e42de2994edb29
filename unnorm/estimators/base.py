"""The estimator contract, and the one forward pass that the noise-based ones share."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise
from unnorm.types import LogDensity, Objective, apart, effective_sample_size, log_density, log_mean_exp, together

__all__ = [
    "Contrast",
    "Contrastive",
    "Estimator",
    "LearnedLogZ",
    "across_processes",
    "check_at_least",
    "contrast",
    "distributed",
]


class Estimator(nn.Module, ABC):
    """Turns a model and a batch into something to differentiate.

    Learned extras are Parameters, running state is in buffers, so that `state_dict()` holds all of it; `forward`
    changes buffers only while `self.training`. An estimator has no optimizer.

    One with a `shape`, such as (R,), solves that many independent problems side by side: `x` holds the batch of one
    after that of the other, the model (`replicas.Stacked`) knows whose is whose, and the surrogate and each of `info`
    have the shape `shape`.

    >>> class MaximumLikelihood(Estimator):      # for models that are normalised already
    ...     def forward(self, model, x, *, generator=None):
    ...         nll = -model(x).mean()
    ...         return Objective(nll, {"value": nll.detach()})
    >>> estimator = MaximumLikelihood()
    >>> estimator(lambda x: x.sum(-1), torch.ones(4, 2)).info
    {'value': tensor(-2.)}
    """

    shape: tuple[int, ...] = ()

    @abstractmethod
    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        """The objective of `model` on the batch `x` of shape (n, *event)."""

    def set_gamma(self, gamma: float | Tensor | None) -> None:
        """Set the tracker's rate for the coming steps, or with None go back to the one it was made with."""
        if gamma is not None:
            raise InvalidValue(f"{type(self).__name__} has no rate 'gamma' to follow a sequence.")

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        """What it was made with, as plain values: a run resumes only with the same."""
        return {"estimator": type(self).__name__}

    def draws(self, batch: int) -> int:
        """Noise draws in a step on `batch` data points."""
        return batch

    @property
    def effective_draws(self) -> float:
        """By what factor its memory multiplies a step's noise draws, in what it knows of log Z."""
        return 1.0

    @property
    def parts(self) -> int:
        """Of how many problems' log Z the reported one is the sum."""
        return 1

    @property
    def one_process(self) -> bool:
        """Whether its running state belongs to one process, so that several cannot train together."""
        return False

    @property
    def comparable(self) -> bool:
        """Whether `value` in eval mode says which of two models is better."""
        return True


class Contrast(NamedTuple):
    """log p~ and log q at the data, and log p~ - log q at noise draws; the last axis is the points'."""

    log_p_data: Tensor
    log_q_data: Tensor
    log_w: Tensor

    @torch.no_grad()
    def nll(self, log_z: Tensor | None = None) -> Tensor:
        """The data's negative log-likelihood under a claimed log Z, by default the draws' own mean weight."""
        return (log_mean_exp(self.log_w) if log_z is None else log_z) - self.log_p_data.mean(-1)

    @torch.no_grad()
    def gap(self, nll: Tensor) -> Tensor:
        """How far that likelihood puts the data from the noise: an estimate of KL(data, noise), from below."""
        return -nll - self.log_q_data.mean(-1)

    @torch.no_grad()
    def ess(self) -> Tensor:
        """The effective share of the noise draws, in (0, 1]."""
        return effective_sample_size(self.log_w) / self.log_w.shape[-1]


def contrast(
    model: LogDensity,
    noise: Noise,
    x: Tensor,
    n_noise: int,
    *,
    shape: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
) -> Contrast:
    """Evaluate the model at the batch and at `n_noise` draws of the noise, in one forward pass.

    With `shape`, for each of the problems side by side: then `x` holds one batch after the other (`types.apart`).

    >>> from unnorm import Gaussian, Quadratic
    >>> contrast(Quadratic(2), Gaussian(2), torch.zeros(5, 2), 7).log_w.shape
    torch.Size([7])
    """
    n = len(x) // math.prod(shape)
    z = noise.sample(n_noise * math.prod(shape), generator=generator)
    if x.shape[1:] != z.shape[1:]:
        raise InvalidValue(f"The data have events of shape {tuple(x.shape[1:])}, the noise {tuple(z.shape[1:])}.")
    points = together([x, z.to(x.dtype)], shape)
    with torch.no_grad():
        log_q_data, log_q = apart(noise.log_prob(points), shape).split([n, n_noise], -1)
    log_p_data, log_p_noise = apart(log_density(model, points), shape).split([n, n_noise], -1)
    return Contrast(log_p_data, log_q_data, log_p_noise - log_q)


class Contrastive(Estimator):
    """An estimator that knows the model only by its ratios to the noise, at data and at noise draws.

    `compare` is all it does, and does it for any number of independent problems side by side: with `shape` (K,) it
    takes ratios of shape (K, n) and returns K numbers. A Telescope's bridges are such problems.

    Args:
        noise: q.
        shape: of the problems solved side by side; () for one.
    """

    def __init__(self, noise: Noise, shape: tuple[int, ...] = ()):
        super().__init__()
        self.noise, self.shape = noise, shape

    @abstractmethod
    def compare(self, seen: Contrast) -> Objective:
        """The objective of ratios (*shape, n): the surrogate and each of `info` have the shape `shape`."""

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        n_noise = self.draws(len(x) // math.prod(self.shape))
        return self.compare(contrast(model, self.noise, x, n_noise, shape=self.shape, generator=generator))


def distributed() -> bool:
    """Whether several processes train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def across_processes(log_mean_w: Tensor) -> Tensor:
    """The log-mean-weight over the batches of all processes, so that every process has the same."""
    if not distributed():
        return log_mean_w
    everyone = [torch.empty_like(log_mean_w) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, log_mean_w)
    return log_mean_exp(torch.stack(everyone, -1))


class LearnedLogZ(nn.Module):
    """log Z as a Parameter, which begins at the first training batch's log-mean-weight, as MECO's u does.

    From zero, a gradient method would spend its first steps on shrinking the model instead.

    >>> log_z = LearnedLogZ()
    >>> log_z(torch.full((5,), 3.0))
    Parameter containing:
    tensor(3., requires_grad=True)
    """

    started: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(shape))
        self.register_buffer("started", torch.zeros(shape, dtype=torch.bool))

    def forward(self, log_w: Tensor) -> Tensor:
        """The parameter; `log_w` are this batch's log-weights, (*shape, n)."""
        if self.training:
            with torch.no_grad():
                first = across_processes(log_mean_exp(log_w.detach()))
                usable = torch.isfinite(first)
                self.value.copy_(torch.where(self.started | ~usable, self.value, first))
                self.started.logical_or_(usable)
        return self.value


def check_at_least(owner: str, name: str, value: float | None, least: float) -> None:
    """Refuse a value below `least`; None is no value.

    >>> check_at_least("NCE", "nu", 0, 1)
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: The 'nu' of NCE must be at least 1. Got 0.
    """
    if value is not None and not value >= least:
        raise InvalidValue(f"The '{name}' of {owner} must be at least {least}. Got {value}.")
