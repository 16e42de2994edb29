"""Which iterate training hands back: the last, a random one (the paper's Algorithm 1), averages, or the best."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from unnorm.errors import InvalidValue
from unnorm.names import unknown

__all__ = ["ITERATES", "Iterates", "exponential_average", "polynomial_average"]

ITERATES = ("last", "random", "averaged", "ema", "best")


def polynomial_average(average: Tensor, new: Tensor, count: Tensor | int, decay: float = 3.0) -> Tensor:
    """Polynomial-decay averaging (Shamir and Zhang 2013): later iterates weigh more, no horizon is needed.

    With decay 0 this is the plain mean. `count` iterates are in `average` already.

    >>> polynomial_average(torch.tensor(1.0), torch.tensor(3.0), 1, decay=0.0)
    tensor(2.)
    """
    total = torch.as_tensor(count, dtype=torch.float64, device=average.device) + decay + 1
    return average + (new - average) * ((decay + 1) / total).to(average.dtype)


def exponential_average(average: Tensor, new: Tensor, count: Tensor | int, decay: float = 0.999) -> Tensor:
    """A moving average with a memory of a thousand iterates, of fewer while there are not so many.

    `count` iterates are in `average` already: what these weigh is at most (1 + count) / (10 + count).

    >>> exponential_average(torch.tensor(1.0), torch.tensor(2.0), 10**6)
    tensor(1.0010)
    """
    seen = torch.as_tensor(count, dtype=torch.float64, device=average.device)
    past = ((1 + seen) / (10 + seen)).clamp(max=decay)
    return average + (new - average) * (1 - past).to(average.dtype)


class Iterates(nn.Module):
    """Watches theta_1 ... theta_T go by and keeps what the rule asks for; its state is in `state_dict()`.

    "last" keeps nothing. "random", "averaged" and "ema" observe every iterate; "best" looks at validated ones.

    >>> model = nn.Linear(1, 1)
    >>> kept = Iterates("random", model)
    >>> kept.observe(model, generator=torch.Generator())
    >>> kept.restore(model)
    """

    least: Tensor
    seen: Tensor

    def __init__(self, rule: str, model: nn.Module):
        super().__init__()
        if rule not in ITERATES:
            raise InvalidValue(unknown("iterate", rule, ITERATES))
        self.rule = rule
        self.kept = None if rule == "last" else AveragedModel(model, avg_fn=self._combine)
        self.register_buffer("least", torch.tensor(torch.inf, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def _combine(self, kept: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
        if self.rule == "averaged":
            return polynomial_average(kept, new, count)
        if self.rule == "ema":
            return exponential_average(kept, new, count)
        return new

    def observe(self, model: nn.Module, *, generator: torch.Generator) -> None:
        """See one more iterate, before it is updated; "random" keeps the t-th with probability 1/t."""
        if self.kept is None or self.rule == "best":
            return
        self.seen += 1
        if self.rule == "random":
            draw = torch.rand((), generator=generator, device=generator.device)
            if draw * self.seen.to(draw.device) >= 1:
                return
        self.kept.update_parameters(model)

    def consider(self, model: nn.Module, value: float) -> None:
        """See an iterate with its value on validation data; "best" keeps the one with the least."""
        if self.kept is None or self.rule != "best":
            return
        if value < self.least:
            self.least.fill_(value)
            self.kept.update_parameters(model)

    def restore(self, model: nn.Module) -> None:
        """Put the chosen iterate into `model`."""
        if self.kept is not None and int(self.kept.n_averaged) > 0:
            model.load_state_dict(self.kept.module.state_dict())
