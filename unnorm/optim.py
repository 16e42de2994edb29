"""MECO's `v` update as torch optimizers, NGD, and the sequences eta_t, beta_t, gamma_t of MECO's theorems."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.names import unknown

__all__ = [
    "NGD",
    "OPTIMIZERS",
    "PL",
    "SCHEDULES",
    "Constant",
    "Cosine",
    "Lagged",
    "NormalisedAdam",
    "Power",
    "Rates",
    "Schedule",
    "adam",
    "rates",
    "set_rates",
    "sgd",
]


def _check_beta(beta: float) -> None:
    if not (beta <= 1 and 1 - beta < 1):  # below 1e-16 nothing new would ever count
        raise InvalidValue(f"The 'beta' of MECO must be in (0, 1]. Got {beta}.")


def _check_lr(lr: float) -> None:
    if not 0 < lr < 1e38:  # beyond, float32 cannot hold it
        raise InvalidValue(f"The learning rate 'lr' must be positive and below 1e38. Got {lr}.")


def sgd(parameters: Iterable[nn.Parameter], lr: float, beta: float = 0.9) -> torch.optim.SGD:
    """SGD-style MECO: v_t = (1 - beta) v_{t-1} + beta g_t with v_1 = g_1, theta -= lr v_t.

    This is SGD with momentum and dampening both 1 - beta; torch starts its buffer at the first gradient. A momentum of
    exactly 0 would make torch forget the buffer, so beta = 1 becomes the smallest positive number instead.

    >>> theta = nn.Parameter(torch.tensor(0.0))
    >>> optimizer = sgd([theta], lr=1.0, beta=0.5)
    >>> for gradient in (1.0, 3.0):           # v = 1, then (1 + 3) / 2 = 2
    ...     theta.grad = torch.tensor(gradient); optimizer.step()
    >>> theta.item()
    -3.0
    """
    _check_lr(lr)
    _check_beta(beta)
    memory = max(1 - beta, sys.float_info.min)
    return torch.optim.SGD(parameters, lr, momentum=memory, dampening=memory)


def adam(parameters: Iterable[nn.Parameter], lr: float, beta: float = 0.9, beta2: float = 0.999) -> torch.optim.Adam:
    """Adam-style MECO: v_t divided by the root of a moving average of squared gradients.

    >>> adam([nn.Parameter(torch.zeros(1))], lr=1e-3, beta=0.9).param_groups[0]["betas"]
    (0.09..., 0.999)
    """
    _check_lr(lr)
    _check_beta(beta)
    return torch.optim.Adam(parameters, lr, betas=(1 - beta, beta2), fused=True)


def _evaluated(closure: Callable[[], float] | None) -> float | None:
    """A step's closure, with gradients, as torch's own optimizers call it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class NGD(torch.optim.Optimizer):
    """Normalised gradient descent: theta -= lr g / |g|, with g the gradient of all parameters together.

    A gradient of exactly zero has no direction, and nothing moves. Liu et al. 2022 use it for NCE and eNCE, whose
    landscape is flat where the noise is far from the data.

    Args:
        parameters: what to train.
        lr: the length of every step.
        beta: weight of the new gradient in v_t = (1 - beta) v_{t-1} + beta g_t, which is what is normalised; 1, the
            published method, keeps no memory.

    >>> theta = nn.Parameter(torch.zeros(2))
    >>> optimizer = NGD([theta], lr=1.0)
    >>> theta.grad = torch.tensor([3e30, 4e30]); optimizer.step(); theta.data
    tensor([-0.6000, -0.8000])
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, beta: float = 1.0):
        _check_lr(lr)
        _check_beta(beta)
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _evaluated(closure)
        directions = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    directions.append((parameter, self._direction(parameter, group["beta"]), group["lr"]))
        if not directions:
            return loss
        for (parameter, _, lr), unit in zip(directions, normalised([each for _, each, _ in directions]), strict=True):
            parameter.sub_(lr * unit)
        return loss

    def _direction(self, parameter: nn.Parameter, beta: float) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if beta == 1:
            return gradient
        state = self.state[parameter]
        state["v"] = gradient.clone() if "v" not in state else torch.lerp(state["v"], gradient, beta)
        return state["v"]


def normalised(gradients: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
    """The gradients of all parameters together, of length one; zero stays zero. Those of replicas have a `lead` of 1.

    >>> normalised([torch.tensor([3e30]), torch.tensor([4e30])])
    [tensor([0.6000]), tensor([0.8000])]
    """
    flat = [gradient.reshape(*gradient.shape[:lead], -1) for gradient in gradients]
    # Divided by the largest entry first: the squares of large gradients would overflow.
    largest = torch.stack([gradient.abs().amax(-1) for gradient in flat]).amax(0)
    scaled = [gradient / torch.where(largest > 0, largest, 1).unsqueeze(-1) for gradient in flat]
    norm = torch.stack([gradient.norm(dim=-1) for gradient in scaled]).norm(dim=0)
    units = (gradient / torch.where(norm > 0, norm, 1).unsqueeze(-1) for gradient in scaled)
    return [unit.view(gradient.shape) for unit, gradient in zip(units, gradients, strict=True)]


class NormalisedAdam(torch.optim.Adam):
    """Adam fed with gradients of length one: the Adam-style counterpart of NGD.

    The paper's appendix has rows "NCE (NGD)" and "eNCE (NGD)" with an Adam-style optimizer and does not say more; Adam
    forgets the scale of the gradients slowly, this at once.

    >>> theta = nn.Parameter(torch.zeros(2))
    >>> optimizer = NormalisedAdam([theta], lr=1.0)
    >>> theta.grad = torch.tensor([3e30, 4e30]); optimizer.step(); theta.data
    tensor([-1.0000, -1.0000])
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, beta: float = 0.9, beta2: float = 0.999):
        _check_lr(lr)
        _check_beta(beta)
        super().__init__(parameters, lr, betas=(1 - beta, beta2), fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _evaluated(closure)
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, unit in zip(trained, normalised([p.grad for p in trained]) if trained else (), strict=True):
            parameter.grad = unit
        super().step()
        return loss


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam,
    "sgd": sgd,
    "ngd": NGD,
    "ngd-adam": NormalisedAdam,
}


class Schedule(ABC):
    """A sequence of positive numbers: step t = 1, 2, ... to its value."""

    @abstractmethod
    def __call__(self, t: int) -> float: ...


class Constant(Schedule):
    """The same value at every step.

    >>> Constant(0.1)(7)
    0.1
    """

    def __init__(self, value: float):
        self.value = value

    def __call__(self, t: int) -> float:
        return self.value


class Power(Schedule):
    """value / t^exponent. An exponent in (1/2, 1] meets Theorem 2: the sum diverges, the sum of squares does not.

    >>> Power(1.0, 0.5)(4)
    0.5
    """

    def __init__(self, value: float, exponent: float = 0.6):
        if not exponent >= 0:
            raise InvalidValue(f"The 'exponent' of Power must not be negative. Got {exponent}.")
        self.value, self.exponent = value, exponent

    def __call__(self, t: int) -> float:
        return self.value / t**self.exponent


class Cosine(Schedule):
    """From `value` down to nearly zero over `steps`, along half a cosine.

    >>> Cosine(1.0, steps=100)(51)
    0.5
    """

    def __init__(self, value: float, steps: int):
        self.value, self.steps = value, steps

    def __call__(self, t: int) -> float:
        return self.value * 0.5 * (1 + math.cos(math.pi * min(t - 1, self.steps) / self.steps))


class PL(Schedule):
    """The step sizes of Theorem 4 for an objective with PL constant mu.

    1 - mu eta_t = eta_t^2 / eta_{t-1}^2, that is 1/eta_t = mu/2 + sqrt(mu^2/4 + 1/eta_{t-1}^2):
    eta_t is about 2/(mu t).

    Args:
        value: eta_0.
        mu: the PL constant.

    >>> eta = PL(1.0, mu=1.0)
    >>> abs(1 - eta(1) - eta(1) ** 2 / 1.0**2) < 1e-12
    True
    """

    def __init__(self, value: float, mu: float = 1.0):
        if not mu > 0:
            raise InvalidValue(f"The PL constant 'mu' must be positive. Got {mu}.")
        self.mu = mu
        self._etas = [value]

    def __call__(self, t: int) -> float:
        while len(self._etas) <= t:
            self._etas.append(1 / (self.mu / 2 + math.hypot(self.mu / 2, 1 / self._etas[-1])))
        return self._etas[t]


class Lagged(Schedule):
    """min(1, factor * schedule(t - 1)): the gamma and beta of Theorem 4, which follow the step size before.

    At t = 1 nothing follows: Algorithm 1 sets u_1 and v_1 without them.

    >>> Lagged(Constant(0.2), factor=10)(3)
    1.0
    """

    def __init__(self, schedule: Schedule, factor: float):
        self.schedule, self.factor = schedule, factor

    def __call__(self, t: int) -> float:
        return min(1.0, self.factor * self.schedule(max(t - 1, 1)))


class Rates(NamedTuple):
    """The three sequences of Algorithm 1; None leaves what the optimizer or the estimator was given.

    >>> Rates(eta=Power(0.1, 0.6), gamma=Constant(0.1)).eta(1)
    0.1
    """

    eta: Schedule
    beta: Schedule | None = None
    gamma: Schedule | None = None


SCHEDULES = ("constant", "power", "cosine", "pl")


def rates(schedule: str, *, lr: float, steps: int, mu: float = 1.0, factor: float = 1.0) -> Rates:
    """The sequences by name.

    "constant"; "power" (eta_t = lr / t^0.6); "cosine" (eta falls to zero over `steps`);
    "pl" (Theorem 4: eta by its recursion from eta_0 = lr, and gamma_{t+1} = beta_{t+1} = factor max(1, mu) eta_t,
    at most 1).

    >>> pl = rates("pl", lr=1.0, steps=10, factor=0.5)
    >>> pl.gamma(3) == 0.5 * pl.eta(2)
    True
    """
    if schedule == "pl":
        eta = PL(lr, mu)
        follow = Lagged(eta, factor * max(1.0, mu))
        return Rates(eta, beta=follow, gamma=follow)
    etas: Mapping[str, Schedule] = {"constant": Constant(lr), "power": Power(lr), "cosine": Cosine(lr, steps)}
    if schedule not in etas:
        raise InvalidValue(unknown("schedule", schedule, SCHEDULES))
    return Rates(etas[schedule])


def set_rates(optimizer: torch.optim.Optimizer, eta: float, beta: float | None) -> None:
    """Write eta_t and beta_t of the coming step into an optimizer made by `sgd` or `adam`, or an `NGD`.

    Adam corrects the bias of v by 1 - (1 - beta)^t, which is right for a constant beta; for a sequence it is
    1 - prod(1 - beta_i), and the ratio of the two goes into the learning rate. The product lives in the optimizer's
    own state, so that it is saved.

    >>> optimizer = sgd([nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> set_rates(optimizer, eta=0.1, beta=0.75)
    >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
    (0.1, 0.25)
    """
    for group in optimizer.param_groups:
        group["lr"] = eta
        if beta is None:
            continue
        _check_beta(beta)
        if "betas" in group:
            memory, t = 1 - beta, group.get("beta_steps", 0) + 1
            product = group.get("beta_product", 1.0) * memory
            group |= {"betas": (memory, group["betas"][1]), "beta_steps": t, "beta_product": product}
            group["lr"] = eta * (1 - memory**t) / (1 - product)
        elif "beta" in group:
            group["beta"] = beta
        else:
            group["momentum"] = group["dampening"] = max(1 - beta, sys.float_info.min)
