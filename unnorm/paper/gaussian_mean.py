"""The mean of a 1-D Gaussian, learned in all the ways the paper compares; many learning rates and seeds at once.

Data N(theta*, 1), noise N(0, 1), model log p~(x) = theta x - x^2/2; R = theta* is the distance. Every tensor has the
leading axes (learning rates, seeds); the last axis is the points'. The draws are the same for all learning rates.
"""

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.estimators.langevin import contrast_loss
from unnorm.estimators.meco import meco_surrogate
from unnorm.estimators.nce import ence_loss, nce_loss
from unnorm.estimators.telescope import even_alphas
from unnorm.estimators.trackers import EMA
from unnorm.optim import Cosine
from unnorm.randomness import stream
from unnorm.types import log_mean_exp

__all__ = [
    "COUPLINGS",
    "HEADS",
    "MCMC",
    "Bridges",
    "Contrast",
    "Method",
    "Plain",
    "Problem",
    "Reading",
    "Run",
    "floor",
    "linear_optimum",
    "train",
]

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
HEADS = ("linear", "quadratic", "gaussian")
COUPLINGS = ("own", "shared", "independent")


@dataclass(frozen=True)
class Problem:
    """One data set for each seed: `n` rows of N(distance, 1). Every distance has the same standard normals."""

    distance: float
    seeds: int = 20
    n: int = 10_000
    seed: int = 0

    @property
    def rows(self) -> Tensor:
        """(seeds, n)."""
        return self.distance + torch.randn(self.seeds, self.n, generator=stream(self.seed, "rows"))

    @property
    def mle(self) -> Tensor:
        """The exact maximum-likelihood estimates, (seeds,)."""
        return self.rows.double().mean(-1)


class Reading(NamedTuple):
    """Of one batch, for each replica: what to differentiate, the claimed gap to the noise, and the tracker's lag.

    The lag is log(mean w / u) after the update, at most log(1 / gamma): how far the draws' weights ran ahead of u.
    """

    loss: Tensor
    gap: Tensor
    lag: Tensor


class Method(ABC):
    """A way to learn theta: the loss of a batch, for all replicas at once, and what its parameters say theta is."""

    beta = 1.0  # weight of the new gradient in v
    normalised = False  # whether the step is lr v / |v| (NGD)

    @abstractmethod
    def begin(self, x: Tensor, replicas: tuple[int, int]) -> Tensor:
        """The first parameters, (number of them, *replicas); `x` is the first batch."""

    @abstractmethod
    def loss(self, parameters: Tensor, x: Tensor, done: float, generator: torch.Generator) -> Reading:
        """Read the batch `x`, (seeds, n), when the share `done` of the steps is over."""

    def estimate(self, parameters: Tensor) -> Tensor:
        return parameters[0]


class Run(NamedTuple):
    """theta at the start of each step and after the last, (steps + 1, rates, seeds); gap and lag in each step."""

    theta: Tensor
    gap: Tensor
    lag: Tensor
    seconds: float


def train(method: Method, problem: Problem, rates: tuple[float, ...], *, steps: int, batch: int, seed: int = 0) -> Run:
    """`steps` of v_t = (1 - beta) v_{t-1} + beta g_t, theta -= eta_t v_t, with eta falling to zero along a cosine."""
    generator = stream(seed, "training")
    rows, began = problem.rows, time.perf_counter()
    eta, decay = torch.tensor(rates)[:, None], Cosine(1.0, steps)
    parameters, v = torch.empty(0), torch.empty(0)
    thetas, gaps, lags = [], [], []
    for t in range(1, steps + 1):
        x = rows.gather(1, torch.randint(problem.n, (problem.seeds, batch), generator=generator))
        if t == 1:
            parameters = method.begin(x, (len(rates), problem.seeds))
            thetas.append(method.estimate(parameters))
        parameters = parameters.detach().requires_grad_()
        read = method.loss(parameters, x, (t - 1) / steps, generator)
        (gradient,) = torch.autograd.grad(read.loss.sum(), parameters)
        with torch.no_grad():
            v = gradient if t == 1 else torch.lerp(v, gradient, method.beta)
            parameters = parameters - eta * decay(t) * (_unit(v) if method.normalised else v)
            thetas.append(method.estimate(parameters))
        gaps.append(read.gap.detach())
        lags.append(read.lag)
    seconds = time.perf_counter() - began
    return Run(torch.stack(thetas).detach(), torch.stack(gaps), torch.stack(lags), seconds)


def _unit(v: Tensor) -> Tensor:
    """v / |v| over the parameters, as `optim.NGD`: the largest entry first, so that no square overflows."""
    largest = v.abs().amax(0)
    v = v / torch.where(largest > 0, largest, 1)
    norm = v.norm(dim=0)
    return v / torch.where(norm > 0, norm, 1)


class Plain(Method):
    """MECO as published, with the noise N(mean, scale^2) of each seed; theta begins at 0, or `from_noise` at its mean.

    The gap that it claims, mean log p~/q at the data - log u, cannot be certified above log(n_noise / gamma): as
    u >= gamma max(w) / n_noise after an update, the gap is at most log(n_noise / gamma) + mean log w at the data -
    max log w at the draws. A larger one means that the data lie where no draw was (McAllester and Stratos 2020).
    """

    beta = 0.9

    def __init__(self, mean: Tensor, scale: Tensor, n_noise: int, gamma: float = 0.1, *, from_noise: bool = False):
        self.mean, self.scale, self.n_noise = mean[:, None], scale[:, None], n_noise
        self.from_noise = from_noise
        self.track, self.log_u = EMA(gamma), torch.empty(0)
        self.limit = math.log(n_noise / gamma)

    def begin(self, x: Tensor, replicas: tuple[int, int]) -> Tensor:
        start = self.mean[:, 0] if self.from_noise else torch.zeros(())
        return start.expand(1, *replicas).clone()

    def loss(self, parameters: Tensor, x: Tensor, done: float, generator: torch.Generator) -> Reading:
        theta = parameters[0]
        z = self.mean + self.scale * torch.randn(len(x), self.n_noise, generator=generator)
        log_w = theta[..., None] * z - (z.square() / 2 + self._log_q(z))
        log_p_data = theta * x.mean(-1) - x.square().mean(-1) / 2
        log_mean_w = log_mean_exp(log_w.detach())
        self.log_u = log_mean_w if done == 0 else self.track(self.log_u, log_mean_w)
        gap = log_p_data - self.log_u - self._log_q(x).mean(-1)
        return Reading(meco_surrogate(log_p_data[..., None], log_w, self.log_u), gap, log_mean_w - self.log_u)

    def _log_q(self, x: Tensor) -> Tensor:
        return -((x - self.mean) / self.scale).square() / 2 - self.scale.log() - HALF_LOG_TAU


class Contrast(Method):
    """NCE or eNCE with one noise draw per data point; tau = (theta, log Z), which begins at its true value."""

    def __init__(self, exponential: bool, normalised: bool):
        self.exponential, self.normalised = exponential, normalised

    def begin(self, x: Tensor, replicas: tuple[int, int]) -> Tensor:
        return torch.stack([torch.zeros(replicas), torch.full(replicas, HALF_LOG_TAU)])

    def loss(self, parameters: Tensor, x: Tensor, done: float, generator: torch.Generator) -> Reading:
        theta, log_z = parameters[..., None]
        z = torch.randn(x.shape, generator=generator)
        g_data, g_noise = theta * x - (log_z - HALF_LOG_TAU), theta * z - (log_z - HALF_LOG_TAU)
        loss = ence_loss(g_data, g_noise)[0] if self.exponential else nce_loss(g_data, g_noise, 1.0)
        return Reading(loss, g_data.mean(-1), torch.zeros(theta.shape[:2]))


class MCMC(Method):
    """Langevin maximum likelihood with a replay buffer, as `MCMCLikelihood` with plain steps.

    The score of this model is linear, so that the bias of unadjusted steps does not touch the mean.
    """

    def __init__(self, n_steps: int = 20, step_size: float = 0.1, buffer_size: int = 10_000, restart: float = 0.05):
        self.n_steps, self.step_size, self.restart = n_steps, step_size, restart
        self.filled = torch.zeros(buffer_size, dtype=torch.bool)
        self.points = torch.empty(0)

    def begin(self, x: Tensor, replicas: tuple[int, int]) -> Tensor:
        self.points = torch.zeros(*replicas, len(self.filled))
        return torch.zeros(1, *replicas)

    def loss(self, parameters: Tensor, x: Tensor, done: float, generator: torch.Generator) -> Reading:
        theta = parameters[0][..., None]
        places = torch.randperm(len(self.filled), generator=generator)[: x.shape[-1]]
        anew = (torch.rand(len(places), generator=generator) < self.restart) | ~self.filled[places]
        chains = torch.where(anew, torch.randn(x.shape, generator=generator), self.points[..., places])
        with torch.no_grad():
            for _ in range(self.n_steps):
                chains += self.step_size * (theta - chains)
                chains += (2 * self.step_size) ** 0.5 * torch.randn(x.shape, generator=generator)
        self.points[..., places], self.filled[places] = chains, True
        log_p_data, log_p_model = (theta * point - point.square() / 2 for point in (x, chains))
        none = torch.full(theta.shape[:2], math.nan)
        return Reading(contrast_loss(log_p_data, log_p_model), none, none)


def floor(distance: float) -> float:
    """Root mean squared error of many bridges with linear heads, however many steps: in units of the MLE's.

    On rows with mean m and variance s^2, waymark z_k = c_k x + a_k z has mean c_k m and variance
    v_k = 1 + c_k^2 (s^2 - 1). Head w_k z, at its optimum, tilts waymark k+1 to the mean of waymark k:
    w_k = (c_k - c_{k+1}) m / v_{k+1}. The fitted density is N(sum w_k, 1), and for many bridges
    sum w_k -> m integral_0^1 dc / (1 + c^2 (s^2 - 1)) ~ m (1 + (1 - s^2) / 3), so that

    theta - R ~ (m - R) + (R/3) (1 - s^2), and var(m) = 1/N, var(s^2) = 2/N: the ratio is sqrt(1 + 2 R^2 / 9).

    The model's variance is 1 and the sample's is not: linear heads cannot say so, and the mean pays for it.

    >>> round(floor(16.0), 2)
    7.61
    """
    return math.sqrt(1 + 2 * distance**2 / 9)


def linear_optimum(rows: Tensor, k: int) -> Tensor:
    """Where `k` bridges with linear heads end with endless steps and draws, on rows (seeds, n): (seeds,).

    Head w_k z solves d/dw log E exp(w z_{k+1}) = E z_k, where log E exp(w z) = log mean exp(w c x) + w^2 a^2 / 2 has
    no draws left; by Newton's method. Unlike `floor` it knows the rows' higher moments, which few bridges feel.
    """
    rows = rows.double()
    mean, theta = rows.mean(-1), torch.zeros(len(rows), dtype=torch.float64)
    alphas = torch.tensor(even_alphas(k), dtype=torch.float64)
    c = (1 - alphas.square()).sqrt()
    for j in range(k):
        after, w = c[j + 1] * rows, (c[j] - c[j + 1]) * mean
        for _ in range(4):
            tilt = torch.softmax(w[:, None] * after, -1)
            tilted = (tilt * after).sum(-1)
            variance = (tilt * (after - tilted[:, None]).square()).sum(-1) + alphas[j + 1].square()
            w = w - (tilted + w * alphas[j + 1].square() - c[j] * mean) / variance
        theta += w
    return theta


class Bridges(Method):
    """MECO, centred, on each pair of neighbouring waymarks z_k = c_k x + a_k z between data and the noise N(0, 1).

    Args:
        k: how many bridges, at the library's even angles.
        heads: what the ratio of two neighbours is.
            "linear": w_k x. The fitted density is N(sum w_k, 1), which has a floor, see `floor`.
            "quadratic": w_k (x - mu_k) + s_k ((x - mu_k)^2 - 1) / sqrt 2, all free, with mu_k the mean of waymark k in
            the first batch, so that the Hessian at the optimum is the identity. Gaussian with a variance of its own:
            no floor; but an error of s_k weighs 2 (R - mu_k) in the mean.
            "gaussian": the ratio of the waymarks of one N(theta, V): two parameters, no floor. In the first third of
            the steps V = 1: a wide Gaussian in the middle explains far data better than a narrow one.
        coupling: of the noise draws, as in `Telescope`: each bridge's "own", of which both of its waymarks are made;
            "shared" by all waymarks; or "independent" for every waymark.
    """

    beta = 0.9

    def __init__(self, k: int, heads: str = "linear", coupling: str = "own", gamma: float = 0.1):
        for name, value, known in (("heads", heads, HEADS), ("coupling", coupling, COUPLINGS)):
            if value not in known:
                raise InvalidValue(f"The '{name}' of Bridges must be one of {', '.join(known)}. Got '{value}'.")
        self.k, self.heads, self.coupling = k, heads, coupling
        self.track, self.log_u = EMA(gamma), torch.empty(0)
        self.alpha = torch.tensor(even_alphas(k))[:, None, None]
        self.c = (1 - self.alpha.square()).sqrt()
        self.mu = torch.zeros(k, 1)
        self.weight = 1.0 if heads != "gaussian" else 1 / float(self.c.diff(dim=0).square().sum())

    def begin(self, x: Tensor, replicas: tuple[int, int]) -> Tensor:
        if self.heads == "quadratic":
            self.mu = self.c[:-1, 0] * x.mean(-1)
        return torch.zeros({"linear": self.k, "quadratic": 2 * self.k, "gaussian": 2}[self.heads], *replicas)

    def waymarks(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Waymark k and the one after it, for each of the k bridges: (k, seeds, n) each."""
        draws = {"own": self.k, "shared": 1, "independent": self.k + 1}[self.coupling]
        z = torch.randn(draws, *x.shape, generator=generator)
        before, after = (z[:-1], z[1:]) if self.coupling == "independent" else (z, z)
        return self.c[:-1] * x + self.alpha[:-1] * before, self.c[1:] * x + self.alpha[1:] * after

    def coefficients(self, parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of y and y^2 in each head, (k, *replicas) each, where y = x - mu_k."""
        if self.heads == "linear":
            return parameters, None
        if self.heads == "quadratic":
            return parameters[: self.k], parameters[self.k :] / 2**0.5
        theta, variance = self._gaussian(parameters)
        v = 1 + self.c.square() * (variance - 1)
        slope, precision = self.c * theta / v, 1 / v
        return slope[:-1] - slope[1:], (precision[1:] - precision[:-1]) / 2

    def loss(self, parameters: Tensor, x: Tensor, done: float, generator: torch.Generator) -> Reading:
        if self.heads == "gaussian" and done < 1 / 3:
            parameters = torch.stack([parameters[0], parameters[1].detach()])
        before, after = (point - self.mu[..., None] for point in self.waymarks(x, generator))
        w, s = self.coefficients(parameters)
        log_w = w[..., None] * (after - before.mean(-1, keepdim=True))[:, None]
        if s is not None:
            squares = after.square() - before.square().mean(-1, keepdim=True)
            log_w = log_w + s[..., None] * squares[:, None]
        log_mean_w = log_mean_exp(log_w.detach())
        self.log_u = log_mean_w if done == 0 else self.track(self.log_u, log_mean_w)
        at_data = torch.zeros_like(self.log_u)[..., None]  # centred: the head's mean over waymark k is subtracted
        surrogate = meco_surrogate(at_data, log_w, self.log_u).sum(0) * self.weight
        return Reading(surrogate, -self.log_u.amin(0), (log_mean_w - self.log_u).amax(0))

    def estimate(self, parameters: Tensor) -> Tensor:
        """The mean of the fitted density; NaN where it cannot be normalised."""
        if self.heads == "gaussian":
            return self._gaussian(parameters)[0]
        w, s = self.coefficients(parameters)
        if s is None:
            return w.sum(0)
        precision = 1 - 2 * s.sum(0)
        return torch.where(precision > 0, (w - 2 * s * self.mu[:, None]).sum(0) / precision, math.nan)

    def _gaussian(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """theta and V of N(theta, V), in coordinates (a, b) in which the sum over the bridges is nearly round.

        Near V = 1, and in the middle of waymark k, the slope of head k is theta (d_k - (V - 1) e_k), where
        d_k = c_k - c_{k+1} and e_k = c_{k+1}^2 d_k (see `floor`). A step on b turns only what is orthogonal to d, and
        in units of b that is as steep as theta is along d. Otherwise V follows too slowly.
        """
        a, b = parameters
        d = -self.c.diff(dim=0).flatten()
        e = self.c[1:].flatten().square() * d
        along = float(d @ e / (d @ d))
        steep = float(e @ e / (d @ d) - along**2) ** 0.5
        size = (1 + a.square()).sqrt()
        return a + along / steep * b * a / size, torch.exp(b / (steep * size))
