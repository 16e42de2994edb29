"""What is resolvable: a metric between samples and data next to the same metric between two draws of the data."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from unnorm.errors import DataError, InvalidValue

__all__ = ["Discrepancy", "Floor", "Metric", "noise_floor"]

Metric: TypeAlias = Callable[[Tensor, Tensor], float]
"""`(n, *event), (m, *event) -> number`: near zero where both are draws of one distribution."""


class Discrepancy(NamedTuple):
    """A metric between samples and data, and its noise floor.

    Attributes:
        metric: its name.
        value: between the samples and the data.
        floor: root mean square of the same metric between two disjoint draws of the data.
        n: how many samples, and how many data.
        floor_n: how many points the two draws behind the floor had; never more than `n`, so the floor is not too low.
        chance: mean and standard deviation of the metric between such draws, over the divisions.

    >>> found = Discrepancy("mmd", 0.3, 0.01, (100, 100), (50, 50), (0.0, 0.01))
    >>> found.resolved
    True
    >>> print(found.line())
    mmd 0.3, floor 0.01 (100 samples, 100 data; floor from 50 and 50 data): a difference is resolved
    """

    metric: str
    value: float
    floor: float
    n: tuple[int, int]
    floor_n: tuple[int, int]
    chance: tuple[float, float]

    @property
    def resolved(self) -> bool:
        """Whether the value is more than three standard deviations above the mean of two draws of the data.

        It is no test with a level: samples of the data's own distribution are there less than once in ten times, and
        hardly ever where the data had to be divided; but up to one in four times for the Frechet and Wasserstein
        distances of data without a variance, whose divisions share the outliers that decide.
        """
        mean, spread = self.chance
        return self.value > mean + 3 * spread

    def line(self) -> str:
        """The result in one line, for a person."""
        meaning = "a difference is resolved" if self.resolved else "these points show no difference"
        (n, m), (first, second) = self.n, self.floor_n
        return (
            f"{self.metric} {self.value:.3g}, floor {self.floor:.3g} "
            f"({n} samples, {m} data; floor from {first} and {second} data): {meaning}"
        )


class Floor(NamedTuple):
    """Of a metric between two disjoint random parts of the data: root mean square, the sizes of the parts, and mean and
    standard deviation over the divisions."""

    rms: float
    n: tuple[int, int]
    chance: tuple[float, float]


def noise_floor(
    metric: Metric, data: Tensor, n: tuple[int, int], *, splits: int = 10, generator: torch.Generator | None = None
) -> Floor:
    """Divide the data at random, again and again.

    The sizes are those of `n`, or, where the data do not suffice for both, as close as they can be.

    >>> noise_floor(lambda x, y: len(x) - len(y), torch.zeros(9, 1), (3, 9))
    Floor(rms=3.0, n=(3, 6), chance=(-3.0, 0.0))
    """
    if splits < 2:
        raise InvalidValue(f"The 'splits' of a noise floor must be at least 2. Got {splits}.")
    if len(data) < 4:
        raise DataError(f"A noise floor needs at least 4 data. Got {len(data)}.")
    first = min(n[0], len(data) // 2)
    second = min(n[1], len(data) - first)
    values = []
    for _ in range(splits):
        order = torch.randperm(len(data), generator=generator).to(data.device)
        values.append(metric(data[order[:first]], data[order[first : first + second]]))
    rms = math.sqrt(sum(value**2 for value in values) / splits)
    return Floor(rms, (first, second), (statistics.fmean(values), statistics.stdev(values)))
