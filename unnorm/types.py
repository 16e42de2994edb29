"""The vocabulary: the few types that every part of the house passes to the next.

One sign everywhere: a model gives `log p~` (never an energy), and whatever is exponentiated
stays in the log domain (`log_w = log p~ - log q`, `log_u`, `log_z`).

>>> standard_normal: LogDensity = lambda x: -x.square().sum(-1) / 2      # any callable (n, *event) -> (n,)
>>> log_density(standard_normal, torch.zeros(3, 2)).shape
torch.Size([3])
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unnorm.errors import InvalidValue

if TYPE_CHECKING:
    from unnorm.trend import Trend

__all__ = [
    "History",
    "LogDensity",
    "LogZ",
    "Objective",
    "apart",
    "effective_sample_size",
    "event_shape",
    "log_density",
    "log_mean_exp",
    "together",
]

LogDensity: TypeAlias = Callable[[Tensor], Tensor]
"""`(n, *event) -> (n,)`: the log of a density, normalised or not."""


class Objective(NamedTuple):
    """What an estimator hands to the training loop.

    Differentiate `surrogate`; read and plot `info["value"]` (for MECO the tracked negative log-likelihood).
    The surrogate has the right gradient and a meaningless value.

    >>> theta = torch.tensor(1.0, requires_grad=True)
    >>> objective = Objective(surrogate=theta**2, info={"value": theta.detach() ** 2})
    >>> objective.surrogate.backward(); theta.grad
    tensor(2.)
    """

    surrogate: Tensor
    info: dict[str, Tensor]


class LogZ(NamedTuple):
    """An estimate of log Z = log of the integral of p~, never without its error.

    Attributes:
        value: the estimate.
        stderr: its standard error (of a grid: its error estimate).
        ess: effective sample size of the weights, in draws; NaN where there are no weights.
        khat: Pareto shape of the weights' tail; below 0.7 the stderr can be believed; NaN without weights.
        method: how it was found.
        n: how many points were evaluated.

    >>> LogZ(1.0, 0.01, 900.0, 0.2, "importance", 1000).interval()
    (0.98..., 1.01...)
    """

    value: float
    stderr: float
    ess: float
    khat: float
    method: str
    n: int

    def interval(self) -> tuple[float, float]:
        """The 95% interval, value -+ 1.96 stderr."""
        return self.value - 1.96 * self.stderr, self.value + 1.96 * self.stderr


@dataclass(frozen=True)
class History:
    """One record for each logged training step: `step`, `seconds`, and the estimator's `info`.

    `history[name]` has that number of every record that holds it. `warnings` are the health monitor's, and `warned_at`
    has the step of each. `kept_step` is the step whose iterate was kept, where validation chose it; `trend` says how
    the validation rows fared around it, where `train` was asked to watch them.

    >>> history = History([{"step": 1, "value": 3.0}, {"step": 2, "value": 2.5, "validation": 2.6}])
    >>> history["value"], history["validation"]
    ([3.0, 2.5], [2.6])
    """

    records: list[dict[str, float]]
    warnings: tuple[str, ...] = ()
    warned_at: tuple[int, ...] = ()
    kept_step: int | None = None
    trend: "Trend | None" = None

    def __getitem__(self, name: str) -> list[float]:
        return [record[name] for record in self.records if name in record]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def certified(self) -> bool:
        """Whether the tracked or learned log Z is one that the noise draws could certify, as far as anybody saw."""
        return not any(", certified: " in line for line in self.warnings)


def log_density(model: LogDensity, x: Tensor) -> Tensor:
    """Evaluate `model` at `x` and insist on the contract `(n, *event) -> (n,)`.

    >>> log_density(lambda x: x, torch.zeros(4, 1))
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: A model must map (n, *event) to (n,). Got (4, 1) -> (4, 1).
    """
    value = model(x)
    if not isinstance(value, Tensor) or value.shape != x.shape[:1]:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InvalidValue(f"A model must map (n, *event) to (n,). Got {tuple(x.shape)} -> {got}.")
    return value


def check_whole(owner: str, least: int, **given: object) -> None:
    """Insist on whole numbers.

    >>> check_whole("Stepwise", 1, nodes=0)
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: The 'nodes' of Stepwise must be an integer of 1 at least. Got 0.
    """
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidValue(f"The '{name}' of {owner} must be an integer of {least} at least. Got {value}.")


def apart(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Points of problems side by side, one problem's after the other's, with axes of their own: (*shape, n, ...).

    >>> apart(torch.arange(6.0), (2,))
    tensor([[0., 1., 2.],
            [3., 4., 5.]])
    """
    return x.view(*shape, -1, *x.shape[1:]) if shape else x


def together(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The points of several sets in one, each problem's together: what `apart` takes apart.

    >>> together([torch.zeros(2, 1), torch.ones(4, 1)], (2,)).flatten()
    tensor([0., 1., 1., 0., 1., 1.])
    """
    return torch.cat([apart(part, shape) for part in parts], len(shape)).flatten(0, len(shape))


def log_mean_exp(log_w: Tensor) -> Tensor:
    """`log(mean(exp(log_w)))` over the last axis, without overflow.

    >>> log_mean_exp(torch.tensor([1e4, 1e4]))
    tensor(10000.)
    """
    return torch.logsumexp(log_w, -1) - math.log(log_w.shape[-1])


def effective_sample_size(log_w: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 over the last axis, in draws.

    >>> effective_sample_size(torch.zeros(5))
    tensor(5.)
    """
    return torch.exp(2 * torch.logsumexp(log_w, -1) - torch.logsumexp(2 * log_w, -1))


def event_shape(event: int | tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """The shape of one example: `3` and `(3,)` mean the same.

    >>> event_shape(3), event_shape([1, 28, 28])
    ((3,), (1, 28, 28))
    """
    shape = (event,) if isinstance(event, int) else tuple(event)
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise InvalidValue(f"The 'event' must be a positive size or a shape of positive sizes. Got {event}.")
    return shape
