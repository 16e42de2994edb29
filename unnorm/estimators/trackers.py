"""How MECO's `u`, the running estimate of E_q[p~/q], follows the mini-batches; all in the log domain.

Each tracker is a pure function of (nu, l): nu = log u so far, l = log-mean-exp of this batch's log-weights.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unnorm.errors import InvalidValue

__all__ = ["EMA", "SCENT", "TRACKERS", "Minibatch", "Tracker", "UMax"]


class Tracker(ABC):
    """Maps the tracked log u and the batch's log-mean-weight to the next log u, elementwise.

    >>> class Greatest(Tracker):
    ...     def __call__(self, log_u, log_mean_w):
    ...         return torch.maximum(log_u, log_mean_w)
    >>> Greatest()(torch.tensor(0.0), torch.tensor(2.0))
    tensor(2.)
    """

    @abstractmethod
    def __call__(self, log_u: Tensor, log_mean_w: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class EMA(Tracker):
    """The paper's equation (u): u_t = (1 - gamma) u_{t-1} + gamma w_t. Problems side by side may have a gamma each.

    >>> EMA(0.5)(torch.tensor(0.0), torch.tensor(3.0).log()).exp()
    tensor(2.)
    """

    gamma: float | Tensor = 0.1

    def __post_init__(self) -> None:
        each = self.gamma if isinstance(self.gamma, Tensor) else torch.tensor(self.gamma)
        if not bool(((each > 0) & (each <= 1)).all()):
            raise InvalidValue(f"The 'gamma' of MECO must be in (0, 1]. Got {self.gamma}.")

    def __call__(self, log_u: Tensor, log_mean_w: Tensor) -> Tensor:
        if isinstance(self.gamma, Tensor):
            gamma = self.gamma.to(log_u)
            return torch.logaddexp(log_u + torch.log1p(-gamma), log_mean_w + gamma.log())
        if self.gamma == 1:
            return log_mean_w
        return torch.logaddexp(log_u + math.log1p(-self.gamma), log_mean_w + math.log(self.gamma))


@dataclass(frozen=True)
class Minibatch(Tracker):
    """No memory: u_t = w_t, the self-normalised gradient of the mini-batch.

    >>> Minibatch()(torch.tensor(0.0), torch.tensor(3.0))
    tensor(3.)
    """

    def __call__(self, log_u: Tensor, log_mean_w: Tensor) -> Tensor:
        return log_mean_w


@dataclass(frozen=True)
class SCENT(Tracker):
    """A moving average whose rate grows with u itself: gamma_t = sigmoid(log alpha + nu).

    Wei et al. 2026, arXiv 2602.02877.

    >>> SCENT(alpha=1.0)(torch.tensor(0.0), torch.tensor(3.0).log()).exp()
    tensor(2.)
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise InvalidValue(f"The 'alpha' of SCENT must be positive. Got {self.alpha}.")

    def __call__(self, log_u: Tensor, log_mean_w: Tensor) -> Tensor:
        rate = math.log(self.alpha) + log_u
        log_gamma = torch.nn.functional.logsigmoid(rate)
        log_rest = torch.nn.functional.logsigmoid(-rate)
        return torch.logaddexp(log_u + log_rest, log_mean_w + log_gamma)


@dataclass(frozen=True)
class UMax(Tracker):
    """A gradient step on nu, restarted at l when it falls more than delta behind.

    Wei et al. 2026, arXiv 2602.02877.

    If nu <= l - delta then nu = l; then nu += eta (exp(l - nu) - 1), whose exponent is below delta.

    >>> UMax(delta=1.0, eta=0.5)(torch.tensor([0.0, 0.0]), torch.tensor([5.0, 0.0]))
    tensor([5., 0.])
    """

    delta: float = 1.0
    eta: float = 0.1

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise InvalidValue(f"The 'delta' of UMax must be positive. Got {self.delta}.")
        if not 0 < self.eta <= 1:
            raise InvalidValue(f"The 'eta' of UMax must be in (0, 1]. Got {self.eta}.")

    def __call__(self, log_u: Tensor, log_mean_w: Tensor) -> Tensor:
        log_u = torch.where(log_u <= log_mean_w - self.delta, log_mean_w, log_u)
        return log_u + self.eta * torch.expm1(log_mean_w - log_u)


TRACKERS: Mapping[str, type[Tracker]] = {"ema": EMA, "minibatch": Minibatch, "scent": SCENT, "umax": UMax}
