"""Ways from the noise to the model: densities that change little by little, for annealed chains to follow."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.models.tilted import Bridged, log_weight, tilt_of
from unnorm.names import choose
from unnorm.noise.base import Noise, own_generator
from unnorm.partition.recorded import Function, Recorded
from unnorm.samplers.base import Located
from unnorm.types import LogDensity, log_density

__all__ = [
    "ROUTES",
    "Annealed",
    "Geometric",
    "PartlyBridged",
    "Route",
    "Tempered",
    "Waymarks",
    "picked",
    "route",
    "usual_path",
]


class Annealed(NamedTuple):
    """Chains on the geometric way: log density and score at their temperature, log_w = log p~ - log q, its gradient.

    Both ends are known where a chain stands, so that a new temperature costs no evaluation.
    """

    x: Tensor
    log_p: Tensor
    score: Tensor
    log_w: Tensor
    score_w: Tensor

    def hotter(self, change: float) -> "Annealed":
        """The same points where beta is larger by `change`."""
        return self._replace(log_p=self.log_p + change * self.log_w, score=self.score + change * self.score_w)


def picked(state: Any, index: Tensor) -> Any:
    """The chains at these places, each as often as it is named."""
    return type(state)._make(field[index] for field in state)


class Tempered(Located):
    """log q(x) + beta log_w(x): the noise at beta = 0, the model at beta = 1.

    >>> from unnorm import Gaussian, Quadratic
    >>> half = Tempered(Quadratic(1), Gaussian(1), 0.5)
    >>> half.position(torch.ones(1, 1)).score
    tensor([[-1.]])
    """

    def __init__(self, model: LogDensity, noise: Noise, beta: float, ends: Function | None = None):
        self.model, self.noise, self.beta = model, noise, beta
        self.ends = ends or partial(_ends, model, noise)

    def __call__(self, x: Tensor) -> Tensor:
        log_q = self.noise.log_prob(x)
        return log_q + self.beta * log_weight(self.model, self.noise, x) if self.beta else log_q

    def position(self, x: Tensor) -> Annealed:
        at_noise = Annealed(x.detach(), *self.ends(x))
        return at_noise.hotter(self.beta) if self.beta else at_noise  # where p~ is zero, 0 log_w is not a number


def _ends(model: LogDensity, noise: Noise, x: Tensor) -> tuple[Tensor, ...]:
    """log q and its score, log_w and its score."""
    tilt = tilt_of(model, noise)
    log_q, score_q = noise.log_prob_and_score(x)
    log_w, score_w = _value_and_score(model if tilt is None else tilt, x)
    if tilt is None:
        log_w, score_w = log_w - log_q, score_w - score_q
    return log_q, score_q, log_w, score_w


def _value_and_score(function: LogDensity, x: Tensor) -> tuple[Tensor, Tensor]:
    """As `log_density_and_score`, but flat densities are allowed: a uniform noise has the score zero."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = log_density(function, x)
        return value.detach(), _score(value, x)


def _score(value: Tensor, x: Tensor) -> Tensor:
    score = None
    if value.requires_grad:
        (score,) = torch.autograd.grad(value, x, torch.ones_like(value), allow_unused=True)
    return torch.zeros_like(x) if score is None else score


class Crossing(NamedTuple):
    """Chains on the way through the waymarks: log density and score where they are, and what each head says there."""

    x: Tensor
    log_p: Tensor
    score: Tensor
    heads: Tensor


class PartlyBridged(Located):
    """log q(x) + sum_k c_k f_k(x), with shares c_k of the heads of a `Bridged` model.

    >>> from unnorm import MLP, Bridged, Gaussian
    >>> model = Bridged(Gaussian(2), MLP(2, hidden=(4,), outputs=3))
    >>> x = torch.randn(5, 2)
    >>> torch.allclose(PartlyBridged(model, torch.ones(3))(x), model(x))
    True
    """

    def __init__(self, model: Bridged, shares: Tensor, crossing: Function | None = None):
        like = next(model.parameters())
        self.model, self.shares = model, shares.to(like)
        self.crossing = crossing or partial(_crossing, model)

    def __call__(self, x: Tensor) -> Tensor:
        return self.model.noise.log_prob(x) + self.model(x, heads=True) @ self.shares

    def position(self, x: Tensor) -> Crossing:
        return Crossing(x.detach(), *self.crossing(x, self.shares))


def _crossing(model: Bridged, x: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
    """log density, score and heads, where these shares of the heads are turned on."""
    log_q, score_q = model.noise.log_prob_and_score(x)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        heads = model(x, heads=True)
        tilt = heads @ shares
        score = _score(tilt, x)
    return log_q + tilt.detach(), score_q + score, heads.detach()


class Route(ABC):
    """A family of unnormalized densities from the noise (beta = 0) to the model (beta = 1).

    Args:
        model: log p~.
        noise: q.
    """

    def __init__(self, model: LogDensity, noise: Noise):
        self.model, self.noise = model, noise

    @abstractmethod
    def at(self, beta: float) -> Located:
        """The density there."""

    @abstractmethod
    def gain(self, state: Any, low: float, high: float) -> Tensor:
        """By how much log p~ at `high` is above that at `low` where the chains stand, (n,), in float64."""

    @abstractmethod
    def move(self, state: Any, low: float, high: float) -> Any:
        """Chains that stood at `low` as they stand at `high`: the same points."""

    def stop(self, beta: float) -> float:
        """The next beta that no step may pass."""
        return 1.0


class Geometric(Route):
    """q^(1 - beta) p~^beta."""

    def __init__(self, model: LogDensity, noise: Noise):
        super().__init__(model, noise)
        self._ends = Recorded(partial(_ends, model, noise))

    def at(self, beta: float) -> Tempered:
        return Tempered(self.model, self.noise, beta, self._ends)

    def gain(self, state: Annealed, low: float, high: float) -> Tensor:
        return (high - low) * state.log_w.double()

    def move(self, state: Annealed, low: float, high: float) -> Annealed:
        return state.hotter(high - low)


class Waymarks(Route):
    """From the noise over the bridges of a `Bridged` model: one head after the other is turned on, the data's last.

    At beta = k / K the k heads next to the noise are all there, and the density is the model's own of a waymark: data
    mixed with noise, less and less of it. Between two waymarks it is the geometric way from one to the other. Digits
    take shape as they do in a diffusion model, where on the geometric way all of their modes freeze out at once.
    """

    def __init__(self, model: LogDensity, noise: Noise):
        if not isinstance(model, Bridged) or model.noise is not noise:
            raise InvalidValue("The path 'bridges' is for a Bridged model and the noise that it tilts.")
        super().__init__(model, noise)
        self.bridged, self._bridges = model, 0
        self._crossing = Recorded(partial(_crossing, model))

    def shares(self, beta: float) -> Tensor:
        """How much of each head is turned on."""
        places = torch.arange(self.bridges - 1, -1, -1, dtype=torch.float64)
        return (beta * self.bridges - places).clamp(0, 1)

    @property
    def bridges(self) -> int:
        if not self._bridges:
            like = self.noise.sample(1, generator=own_generator(self.noise))
            with torch.no_grad():
                self._bridges = self.bridged(like, heads=True).shape[1]
        return self._bridges

    def at(self, beta: float) -> PartlyBridged:
        return PartlyBridged(self.bridged, self.shares(beta), self._crossing)

    def gain(self, state: Crossing, low: float, high: float) -> Tensor:
        change = self.shares(high) - self.shares(low)
        return state.heads.double() @ change.to(state.heads.device)

    def move(self, state: Crossing, low: float, high: float) -> Crossing:
        return self.at(high).position(state.x)

    def stop(self, beta: float) -> float:
        k = int(beta * self.bridges + 1e-9) + 1
        return min(1.0, k / self.bridges)


ROUTES = {"geometric": Geometric, "bridges": Waymarks}


def route(name: str, model: LogDensity, noise: Noise) -> Route:
    """By its name."""
    found: Route = choose("path", name, ROUTES)(model, noise)
    return found


def usual_path(model: LogDensity, noise: Noise) -> str:
    """Over the bridges where there are some from this noise; else geometric."""
    return "bridges" if isinstance(model, Bridged) and model.noise is noise else "geometric"
