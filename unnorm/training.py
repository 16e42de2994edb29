"""How to train, as plain values that are saved with the run."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from unnorm.errors import InvalidValue
from unnorm.iterates import ITERATES
from unnorm.names import choose, unknown
from unnorm.optim import OPTIMIZERS, SCHEDULES, Rates, rates

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """How to train; plain values only, so that it is saved with the run.

    Args:
        steps: optimization steps.
        batch: data points per step, drawn uniformly with replacement (Algorithm 1).
        lr: the learning rate eta (eta_0 of a schedule).
        optimizer: "adam" or "sgd", MECO's two styles; "ngd", normalised gradients, or "ngd-adam", Adam of these.
        beta: weight of the new gradient in v, in (0, 1]; when None the paper's 0.9, and for "ngd" 1.
        schedule: "constant", "power", "cosine" or "pl" (Theorem 4); see `unnorm.optim.rates`.
        mu: the PL constant for "pl".
        iterate: "last", "random" (Algorithm 1), "averaged" (polynomial weights), "ema" (a moving average, as large
            networks like it), "best" on validation data, or "best-ema", the best of these averages there.
        log_every: steps between two records of the history.
        checkpoint_every: steps between two checkpoints, where there is a folder to write to.
        validate_every: steps between two looks at the validation data, where there are any.
        patience: looks at the validation data without a new best after which training ends; None for never.
        seconds: of training steps after which training ends; None for no limit.
        seed: of batches and noise, where no generator is given.

    >>> Training(steps=0)
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: The 'steps' of Training must be a positive integer. Got 0.
    """

    steps: int = 2500
    batch: int = 500
    lr: float = 1e-3
    optimizer: str = "adam"
    beta: float | None = None
    schedule: str = "constant"
    mu: float = 1.0
    iterate: str = "last"
    log_every: int = 10
    checkpoint_every: int = 500
    validate_every: int = 25
    patience: int | None = None
    seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "log_every", "checkpoint_every", "validate_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidValue(f"The '{name}' of Training must be a positive integer. Got {value}.")
        if self.patience is not None and (not isinstance(self.patience, int) or self.patience < 1):
            raise InvalidValue(f"The 'patience' of Training must be a positive integer. Got {self.patience}.")
        if self.seconds is not None and not self.seconds > 0:
            raise InvalidValue(f"The 'seconds' of Training must be positive. Got {self.seconds}.")
        self.make_optimizer([nn.Parameter(torch.zeros(1))])
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**62:
            raise InvalidValue(f"The 'seed' of Training must be an integer from 0 to 2^62 - 1. Got {self.seed}.")
        for what, value, known in (("schedule", self.schedule, SCHEDULES), ("iterate", self.iterate, ITERATES)):
            if value not in known:
                raise InvalidValue(unknown(what, value, known))
        self.rates()

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer by its name, with beta where one is given."""
        make = choose("optimizer", self.optimizer, OPTIMIZERS)
        return make(parameters, self.lr) if self.beta is None else make(parameters, self.lr, self.beta)

    def rates(self) -> Rates:
        return rates(self.schedule, lr=self.lr, steps=self.steps, mu=self.mu)
