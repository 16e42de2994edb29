"""Which iterate training hands back: the last, a random one (the paper's Algorithm 1), averages, or the best."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from unnorm.errors import InvalidValue
from unnorm.names import unknown

__all__ = ["ITERATES", "VALIDATED", "Iterates", "exponential_weight", "polynomial_weight"]

ITERATES = ("last", "random", "averaged", "ema", "best", "best-ema")
VALIDATED = ("best", "best-ema")  # those that are chosen on validation data


def polynomial_weight(count: int, decay: float = 3.0) -> float:
    """Of a new iterate in polynomial-decay averaging (Shamir and Zhang 2013): later ones weigh more, without a horizon.

    With decay 0 the average is the plain mean. `count` iterates are in it already.

    >>> polynomial_weight(1, decay=0.0), polynomial_weight(4)
    (0.5, 0.5)
    """
    return (decay + 1) / (count + decay + 1)


def exponential_weight(count: int, decay: float = 0.999) -> float:
    """Of a new iterate in a moving average with a memory of a thousand, of fewer while there are not so many.

    `count` iterates are in it already: what these weigh is at most (1 + count) / (10 + count).

    >>> round(exponential_weight(10**6), 6), exponential_weight(8)
    (0.001, 0.5)
    """
    return 1 - min(decay, (1 + count) / (10 + count))


class Iterates(nn.Module):
    """Watches theta_1 ... theta_T go by and keeps what the rule asks for; its state is in `state_dict()`.

    "last" keeps nothing. "random", "averaged" and "ema" observe every iterate; "best" looks at validated ones, and
    "best-ema" at validated averages.

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
        self.kept = None if rule == "last" else AveragedModel(model).eval()
        self.chosen = AveragedModel(model).eval() if rule == "best-ema" else None
        self.register_buffer("least", torch.tensor(torch.inf, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def _see(self, model: nn.Module) -> None:
        """All parameters at once: one by one, a step of a large network would wait for a small average."""
        assert self.kept is not None
        count = int(self.kept.n_averaged)
        moving = exponential_weight if self.rule in ("ema", "best-ema") else None
        weigh = polynomial_weight if self.rule == "averaged" else moving
        _mix(self.kept, model, 1.0 if count == 0 or weigh is None else weigh(count))

    def observe(self, model: nn.Module, *, generator: torch.Generator) -> None:
        """See one more iterate, before it is updated; "random" keeps the t-th with probability 1/t."""
        if self.kept is None or self.rule == "best":
            return
        self.seen += 1
        if self.rule == "random":
            draw = torch.rand((), generator=generator, device=generator.device)
            if draw * self.seen.to(draw.device) >= 1:
                return
        self._see(model)

    def candidate(self, model: nn.Module) -> nn.Module:
        """What validation is to look at: the model, or its average."""
        averaged = self.rule == "best-ema" and self.kept is not None and int(self.kept.n_averaged) > 0
        return self.kept.module if averaged and self.kept is not None else model

    @torch.no_grad()
    def consider(self, model: nn.Module, value: float) -> None:
        """See a candidate with its value on validation data; "best" and "best-ema" keep the one with the least."""
        if self.rule not in VALIDATED or not value < self.least:
            return
        self.least.fill_(value)
        into = self.kept if self.chosen is None else self.chosen
        assert into is not None
        _mix(into, model, 1.0)

    def restore(self, model: nn.Module) -> None:
        """Put the chosen iterate into `model`."""
        found = self.chosen if self.chosen is not None and int(self.chosen.n_averaged) > 0 else self.kept
        if found is not None and int(found.n_averaged) > 0:
            model.load_state_dict(found.module.state_dict())


def _mix(kept: AveragedModel, new: nn.Module, weight: float) -> None:
    """Move what is kept toward new parameters; buffers are the new ones."""
    ours, theirs = (list[Tensor](one.parameters()) for one in (kept.module, new))
    if weight == 1:
        torch._foreach_copy_(ours, theirs)
    else:
        torch._foreach_lerp_(ours, theirs, weight)
    for own, other in zip(kept.module.buffers(), new.buffers(), strict=True):
        own.copy_(other)
    kept.n_averaged += 1
