"""The optimizers of `unnorm.optim` for replicas: each has a learning rate and a beta of its own, a number per replica.

The same recursions as those, elementwise over stacked parameters (R, ...); a test holds them against each other.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unnorm.optim import OPTIMIZERS, normalised, set_rates

__all__ = ["NGD", "SGD", "UPDATES", "Adam", "NormalisedAdam", "OneByOne", "Update", "make_update"]

BETA2, EPS = 0.999, 1e-8  # torch's, which `optim.adam` keeps


def per_replica(values: Tensor, like: Tensor) -> Tensor:
    """Numbers (R,) shaped to multiply a stacked parameter (R, ...)."""
    return values.view(-1, *[1] * (like.ndim - 1))


class Update(ABC):
    """One optimizer for all replicas. Its state lives in tensors, and `step` reads nothing back: a graph can hold it.

    Args:
        parameters: stacked, (R, ...).
        beta: weight of the new gradient, (R,).
    """

    default_beta = 0.9

    def __init__(self, parameters: Sequence[Tensor], beta: Tensor):
        self.parameters, self.beta = list(parameters), beta
        self.t = torch.zeros((), dtype=torch.float64, device=beta.device)
        self.v = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: Tensor, alive: Tensor) -> None:
        """Move the replicas that are `alive`, (R,), by their `lr`, (R,)."""
        self.t += 1
        changes = self._changes(list(gradients), lr)
        for parameter, change in zip(self.parameters, changes, strict=True):
            parameter.sub_(torch.where(per_replica(alive, change), change, 0))

    @abstractmethod
    def _changes(self, gradients: list[Tensor], lr: Tensor) -> list[Tensor]:
        """What to subtract from each parameter."""

    def _averaged(self, gradients: Sequence[Tensor], zero_start: bool) -> list[Tensor]:
        """v_t = (1 - beta) v_{t-1} + beta g_t, from v_1 = g_1, or from v_0 = 0."""
        weight = self.beta if zero_start else torch.where(self.t == 1, 1.0, self.beta)
        for v, gradient in zip(self.v, gradients, strict=True):
            v.lerp_(gradient, per_replica(weight.to(v.dtype), v))
        return self.v


class SGD(Update):
    """`optim.sgd`: theta -= lr v_t."""

    def _changes(self, gradients: list[Tensor], lr: Tensor) -> list[Tensor]:
        return [v * per_replica(lr.to(v.dtype), v) for v in self._averaged(gradients, zero_start=False)]


class NGD(Update):
    """`optim.NGD`: theta -= lr v / |v|, with |v| over all parameters of one replica."""

    default_beta = 1.0

    def _changes(self, gradients: list[Tensor], lr: Tensor) -> list[Tensor]:
        units = normalised(self._averaged(gradients, zero_start=False), lead=1)
        return [unit * per_replica(lr.to(unit.dtype), unit) for unit in units]


class Adam(Update):
    """`optim.adam`."""

    def __init__(self, parameters: Sequence[Tensor], beta: Tensor):
        super().__init__(parameters, beta)
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]

    def _changes(self, gradients: list[Tensor], lr: Tensor) -> list[Tensor]:
        first = lr / (1 - (1 - self.beta).pow(self.t))
        second = (1 - torch.pow(torch.full_like(self.t, BETA2), self.t)).sqrt()
        changes = []
        for v, square, gradient in zip(self._averaged(gradients, True), self.squares, gradients, strict=True):
            square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
            factor = per_replica(first.to(v.dtype), v)  # v factor / (root / second + eps), in the fewest passes
            changes.append(v / square.sqrt().div_(factor * second.to(v.dtype)).add_(EPS / factor))
        return changes


class NormalisedAdam(Adam):
    """`optim.NormalisedAdam`: Adam, fed with gradients of length one."""

    def _changes(self, gradients: list[Tensor], lr: Tensor) -> list[Tensor]:
        return super()._changes(normalised(gradients, lead=1), lr)


class OneByOne:
    """The optimizers themselves, one for each replica, on its slices: on a CPU torch's own loops are the fastest.

    Args:
        name: in `optim.OPTIMIZERS`.
        parameters, beta: as for `Update`.
    """

    def __init__(self, name: str, parameters: Sequence[Tensor], beta: Tensor):
        self.parameters = list(parameters)
        self.slices = [[parameter.detach()[k] for parameter in parameters] for k in range(len(beta))]
        self.optimizers = [
            OPTIMIZERS[name](own, 1.0, weight) for own, weight in zip(self.slices, beta.tolist(), strict=True)
        ]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: Tensor, alive: Tensor) -> None:
        """As `Update.step`."""
        for k in alive.nonzero().flatten().tolist():
            for own, gradient in zip(self.slices[k], gradients, strict=True):
                own.grad = gradient[k].contiguous()  # torch's fused loops read memory in its order
            set_rates(self.optimizers[k], float(lr[k]), None)
            self.optimizers[k].step()


def make_update(name: str, parameters: Sequence[Tensor], beta: Tensor) -> Update | OneByOne:
    """What moves replicas fastest where they live."""
    return OneByOne(name, parameters, beta) if beta.device.type == "cpu" else UPDATES[name](parameters, beta)


UPDATES: Mapping[str, type[Update]] = {"adam": Adam, "sgd": SGD, "ngd": NGD, "ngd-adam": NormalisedAdam}
