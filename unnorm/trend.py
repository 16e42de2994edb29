"""Validation row by row: was training still improving when it stopped, and did it overfit after the step it kept?"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Looks", "Trend"]

LATE = 0.1  # share of the summed learning rate: what is gained in this last part tells whether more would follow
ERRORS = 2.0  # standard errors that count as a difference
LEAST_GAIN, NOTHING = 0.01, 0.002  # nats in the last part that are worth more steps; and that are not, however few
SMALL_SHARE, LARGE_SHARE = 0.03, 0.1  # of the whole gain: less is not worth more steps; and more is, if it is small


class Trend(NamedTuple):
    """How the negative log-likelihood of the validation rows moved, in nats a row.

    Attributes:
        gained: from the model before training to the kept step.
        improved, improved_error: in the last tenth of the training, measured by the summed learning rate.
        rose, rose_error: from the kept step to the last.
        ended: whether validation had brought nothing better for as long as `patience` lasts.

    >>> Trend(1.0, 0.2, 0.01, 0.0, 0.01, False).still_improving
    True
    """

    gained: float
    improved: float
    improved_error: float
    rose: float
    rose_error: float
    ended: bool

    @property
    def still_improving(self) -> bool:
        """Whether more steps would have helped."""
        little = min(LEAST_GAIN, max(NOTHING, LARGE_SHARE * self.gained))
        least = max(ERRORS * self.improved_error, little, SMALL_SHARE * self.gained)
        return not self.ended and self.improved > least

    @property
    def overfitted(self) -> bool:
        """Whether the last step was worse than the kept one by more than the error of their difference."""
        return self.rose > max(ERRORS * self.rose_error, LEAST_GAIN)


class Looks:
    """The negative log-likelihood of each validation row at each look.

    >>> looks = Looks()
    >>> looks.add(0, 0.0, torch.tensor([2.0, 3.0])), looks.add(25, 1.0, torch.tensor([1.0, 2.0]))
    (None, None)
    >>> looks.trend(25, False).gained
    1.0
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.learned: list[float] = []  # the summed learning rate
        self.rows: list[Tensor] = []

    def add(self, step: int, learned: float, rows: Tensor) -> None:
        """Record a look after `step` steps with the negative log-likelihood of each row, (n,)."""
        self.steps.append(step)
        self.learned.append(learned)
        self.rows.append(rows.detach().float().cpu())

    def trend(self, kept: int, ended: bool) -> Trend | None:
        """Compare the looks with that at the `kept` step; None where there are too few."""
        if len(self.steps) < 2 or kept not in self.steps:
            return None
        best = self.rows[self.steps.index(kept)]
        late = (1 - LATE) * self.learned[-1]
        before = max(place for place, learned in enumerate(self.learned[:-1]) if learned <= late or place == 0)
        improved, improved_error = _difference(self.rows[before], best) if self.steps[before] < kept else (0.0, 0.0)
        rose, rose_error = _difference(self.rows[-1], best)
        gained, _ = _difference(self.rows[0], best)
        return Trend(gained, improved, improved_error, rose, rose_error, ended)

    def tensors(self) -> dict[str, Tensor]:
        """Return them for a checkpoint."""
        if not self.steps:
            return {}
        learned = torch.tensor(self.learned, dtype=torch.float64)
        return {"steps": torch.tensor(self.steps), "learned": learned, "rows": torch.stack(self.rows)}

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> "Looks":
        """Return the looks of a checkpoint."""
        looks = cls()
        if tensors:
            for step, learned, rows in zip(tensors["steps"], tensors["learned"], tensors["rows"], strict=True):
                looks.add(int(step), float(learned), rows.clone())
        return looks


def _difference(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the mean difference of two looks at the same rows, and its standard error."""
    gap = (first - second).double()
    if not bool(torch.isfinite(gap).all()):
        return float(first.double().mean() - second.double().mean()), math.inf
    return float(gap.mean()), float(gap.std(correction=1) / math.sqrt(len(gap))) if len(gap) > 1 else math.inf
