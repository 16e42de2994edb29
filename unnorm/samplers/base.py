"""The sampler contract, and the score of a model at many points."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.streams import uniform
from unnorm.types import LogDensity, apart, log_density

__all__ = [
    "Bounds",
    "Info",
    "Located",
    "Position",
    "Sampler",
    "State",
    "check_bounds",
    "frozen",
    "locate",
    "log_density_and_score",
]

Bounds = tuple[float, float]
"""A box: every coordinate stays between the two."""


class State(Protocol):
    """What the next step needs: the points, one per chain, and whatever a sampler keeps beside them."""

    @property
    def x(self) -> Tensor: ...


class Position(NamedTuple):
    """Points, with log p~ and its score there, so that a step evaluates the model only where it goes."""

    x: Tensor
    log_p: Tensor
    score: Tensor


class Info(NamedTuple):
    """What only a person needs to know of one step, a number per chain.

    Attributes:
        log_p: log p~ where the step ended (ULA: where it began).
        acceptance: probability of accepting the proposal; of ULA, what MALA's would have been for the step before.
        divergent: whether the step left the region of finite numbers, or its integrator lost the energy.
    """

    log_p: Tensor
    acceptance: Tensor
    divergent: Tensor


S = TypeVar("S", bound=State)


class Sampler(Protocol[S]):
    """One transition of many Markov chains at once: State feeds the next step, Info a person.

    A random walk, accepted by Metropolis' rule:

    >>> class Place(NamedTuple):
    ...     x: Tensor
    >>> class RandomWalk:
    ...     def init(self, x, log_density):
    ...         return Place(x)
    ...     def step(self, state, log_density, *, generator=None):
    ...         proposal = state.x + torch.randn(state.x.shape, generator=generator)
    ...         gain = log_density(proposal) - log_density(state.x)
    ...         accept = torch.rand(len(gain), generator=generator).log() < gain
    ...         x = torch.where(accept[:, None], proposal, state.x)
    ...         return Place(x), Info(log_density(x), gain.exp().clamp(max=1), gain.isnan())
    >>> sampler: Sampler = RandomWalk()
    >>> log_p = lambda x: -x.square().sum(-1)
    >>> state, info = sampler.step(sampler.init(torch.zeros(3, 1), log_p), log_p, generator=torch.Generator())
    >>> state.x.shape, info.acceptance.shape
    (torch.Size([3, 1]), torch.Size([3]))
    """

    def init(self, x: Tensor, log_density: LogDensity) -> S:
        """The state of chains that stand at `x`, (n, *event)."""
        ...

    def step(
        self, state: S, log_density: LogDensity, *, generator: torch.Generator | None = None
    ) -> tuple[S, Info]: ...


def log_density_and_score(model: LogDensity, x: Tensor) -> tuple[Tensor, Tensor]:
    """log p~ and its gradient in x, detached: one forward pass, one backward pass to x alone.

    >>> log_density_and_score(lambda x: -x.square().sum(-1) / 2, torch.ones(1, 2))
    (tensor([-1.]), tensor([[-1., -1.]]))
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        log_p = log_density(model, x)
        score = None
        if log_p.requires_grad:
            (score,) = torch.autograd.grad(log_p, x, torch.ones_like(log_p), allow_unused=True)
        if score is None:
            raise InvalidValue("The model's log density does not depend on x: it has no score.")
    return log_p.detach(), score


class Located(ABC):
    """A log density that says more of a point than its value and score: what else travels with a chain.

    Its `position` returns a Position with further fields, one row per chain; MALA and HMC carry them along.
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def position(self, x: Tensor) -> Any: ...


def locate(log_density: LogDensity, x: Tensor) -> Any:
    """The position of chains at `x`: one evaluation of the density and its score.

    >>> locate(lambda x: -x.square().sum(-1) / 2, torch.ones(1, 2)).score
    tensor([[-1., -1.]])
    """
    if isinstance(log_density, Located):
        return log_density.position(x)
    return Position(x.detach(), *log_density_and_score(log_density, x))


def unwrapped(model: LogDensity) -> LogDensity:
    """The module inside Fabric's wrapper, which expects one backward pass after each forward; else the model itself.

    Without the wrapper a model runs in full precision, whatever the precision of training.
    """
    if not type(model).__module__.startswith("lightning_fabric"):
        return model
    inside: Any = getattr(model, "_forward_module", model)
    return inside.module if isinstance(inside, nn.parallel.DistributedDataParallel) else inside


@contextmanager
def frozen(model: LogDensity) -> Iterator[LogDensity]:
    """The model for sampling: its parameters need no gradient meanwhile, and Fabric's wrapper is taken off.

    >>> net = nn.Linear(2, 1)
    >>> with frozen(net) as inside:
    ...     any(p.requires_grad for p in inside.parameters())
    False
    >>> all(p.requires_grad for p in net.parameters())
    True
    """
    if not isinstance(model, nn.Module):
        yield model
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield unwrapped(model)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@torch.no_grad()
def spread(x: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
    """The root mean square distance of points from their mean, per coordinate: one scale for all of them.

    With `shape`, one for each of the problems side by side (`apart`).

    >>> spread(torch.tensor([[-1.0], [1.0]]))
    tensor(1.)
    """
    return distance(x, x, shape).clamp(min=torch.finfo(x.dtype).tiny)


@torch.no_grad()
def distance(points: Tensor, x: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
    """The root mean square distance of points from the mean of `x`, per coordinate."""
    centred = apart(points, shape) - apart(x, shape).mean(len(shape), keepdim=True)
    return centred.square().flatten(len(shape)).mean(-1).sqrt()


@torch.no_grad()
def relative_score(score: Tensor, scale: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
    """The root mean square of a score's entries times the data's spread: free of units, 1 for a Gaussian that fits.

    With `shape`, one for each of the problems side by side (`apart`).

    >>> relative_score(torch.ones(4, 1), spread(torch.tensor([[-2.0], [2.0]])))
    tensor(2.)
    """
    return apart(score, shape).square().flatten(len(shape)).mean(-1).sqrt() * scale


def check_bounds(bounds: Bounds | None) -> None:
    if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
        raise InvalidValue(f"The 'bounds' must be (low, high) with low < high. Got {bounds}.")


def check_step_size(name: str, step_size: float | Tensor) -> None:
    if not isinstance(step_size, Tensor) and not step_size > 0:
        raise InvalidValue(f"The 'step_size' of {name} must be positive. Got {step_size}.")


def per_event(values: Tensor, x: Tensor) -> Tensor:
    """Numbers per chain, (n,), shaped to multiply points, (n, *event)."""
    return values.reshape(-1, *[1] * (x.dim() - 1))


def sum_event(x: Tensor) -> Tensor:
    """The sum over everything but the chains: (n, *event) -> (n,)."""
    return x.flatten(1).sum(-1)


def metropolis(old: Any, new: Any, log_ratio: Tensor, generator: torch.Generator | None) -> tuple[Any, Info]:
    """Accept with probability min(1, exp(log_ratio)); what is not a number is refused and called divergent.

    The two are Positions, with further fields or none (`Located`). A chain that stands where p~ is zero accepts the
    first point where it is not.
    """
    divergent = torch.isnan(log_ratio) | (new.log_p == torch.inf)
    log_ratio = torch.where(divergent, -torch.inf, log_ratio)
    draws = uniform((len(log_ratio),), generator=generator, device=old.x.device, dtype=old.x.dtype)
    accept = draws.log() < log_ratio
    chosen = type(old)._make(
        torch.where(per_event(accept, ours), theirs, ours) for ours, theirs in zip(old, new, strict=True)
    )
    return chosen, Info(chosen.log_p, log_ratio.clamp(max=0).exp(), divergent)
