"""A data set of the synthetic study with its rows, the plane it lies in, and what is measured of a model of it."""

import base64
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unnorm.data.toys import Toy, toy
from unnorm.metrics import frechet, median_bandwidth, mmd
from unnorm.noise import Gaussian
from unnorm.paper.toy2d.spec import Size
from unnorm.randomness import derive_seed, stream

__all__ = ["Measured", "Plane", "Problem", "entropy", "picture", "plane", "sampled"]

WIDER = 1.5  # the plane's half side, in extents of the data set
PICTURE = 96  # cells on each side
ROWS, FRESH, START, STREAM, DRAWS = "rows", "fresh points", "weights", "training", "draws"


class Plane(NamedTuple):
    """A square around a data set in equal cells: where models without an integral are normalised.

    Attributes:
        centres: of the cells, (cells^2, 2); the first axis of the square runs slowest.
        log_truth: the true log density there, normalised on these cells.
        near: whether a cell lies within the data set's extent.
        edge: the side of a cell.
    """

    centres: Tensor
    log_truth: Tensor
    near: Tensor
    edge: float


@lru_cache(maxsize=16)
def plane(data: str, cells: int) -> Plane:
    """The square of half side 1.5 extents.

    >>> found = plane("checkerboard", 48)
    >>> found.centres.shape, round(float(found.log_truth.exp().sum()) * found.edge**2, 6)
    (torch.Size([2304, 2]), 1.0)
    """
    truth = toy(data)
    half = WIDER * truth.extent
    edge = 2 * half / cells
    axis = -half + edge * (torch.arange(cells, dtype=torch.float64) + 0.5)
    centres = torch.cartesian_prod(axis, axis)
    log_p = truth.log_prob(centres)
    log_p = log_p - torch.logsumexp(log_p, 0) - 2 * math.log(edge)
    return Plane(centres.float(), log_p, (centres.abs() < truth.extent).all(-1), edge)


@dataclass(frozen=True)
class Problem:
    """The rows of one seed: for training, for choosing settings, for the test, and fresh ones of the truth."""

    data: str
    seed: int
    size: Size

    @property
    def truth(self) -> Toy:
        return toy(self.data)

    def generator(self, kind: str) -> torch.Generator:
        return stream(self.seed, self.data, kind)

    def number(self, kind: str) -> int:
        """A seed of its own for each kind of randomness, data set and seed of the study."""
        return derive_seed(self.seed, self.data, kind)

    @cached_property
    def _rows(self) -> tuple[Tensor, ...]:
        size = self.size
        counts = [size.train, size.validation, size.test]
        return self.truth.sample(sum(counts), generator=self.generator(ROWS)).split(counts)

    @property
    def train(self) -> Tensor:
        return self._rows[0]

    @property
    def validation(self) -> Tensor:
        return self._rows[1]

    @property
    def test(self) -> Tensor:
        return self._rows[2]

    @cached_property
    def fresh(self) -> Tensor:
        """Points of the truth that samples of models are compared with."""
        return self.truth.sample(self.size.points, generator=self.generator(FRESH))

    @cached_property
    def bandwidth(self) -> float:
        """Of the MMD's kernel, from the truth alone: the same for all methods."""
        return median_bandwidth(self.fresh, self.test)

    @cached_property
    def noise(self) -> Gaussian:
        return Gaussian.fit(self.train)

    def discrepancy(self, samples: Tensor, fresh: Tensor | None = None) -> dict[str, float]:
        """MMD and Frechet distance of samples and fresh points of the truth."""
        truth = (self.fresh if fresh is None else fresh).to(samples.device)
        return {"mmd": mmd(samples, truth, bandwidths=self.bandwidth), "frechet": frechet(samples, truth)}

    def floor(self, device: str = "cpu") -> dict[str, float]:
        """The same of fresh points and as many others of the truth."""
        others = self.truth.sample(self.size.points, generator=self.generator(DRAWS))
        return self.discrepancy(others.to(device))


def entropy(where: Plane) -> float:
    """Of the truth on the plane's cells, in nats: a model's cross entropy is this and its KL."""
    some = where.log_truth > -math.inf
    return float(-(where.log_truth.exp() * where.log_truth)[some].sum()) * where.edge**2


class Measured(NamedTuple):
    """What is known of one model; NaN where it is not finite."""

    log_z: float
    validation_nll: float
    test_nll: float
    kl: float
    outside: float

    @classmethod
    def of(
        cls, on_plane: Tensor, validation: Tensor, test: Tensor, where: Plane, normalised: bool = False
    ) -> "Measured":
        """From log p~ at the cells' centres and at rows; a model that is normalised already has log Z = 0."""
        on_plane = on_plane.double().cpu()
        log_z = 0.0 if normalised else float(torch.logsumexp(on_plane, 0)) + 2 * math.log(where.edge)
        shares = torch.softmax(on_plane, 0)
        some = where.log_truth > -math.inf
        gap = where.log_truth - (on_plane - log_z)
        kl = float((where.log_truth.exp() * gap)[some].sum()) * where.edge**2
        return cls(
            log_z,
            log_z - float(validation.double().mean()),
            log_z - float(test.double().mean()),
            kl,
            float(shares[~where.near].sum()),
        )

    @property
    def finite(self) -> bool:
        return all(math.isfinite(number) for number in self)


def sampled(log_p: Tensor, where: Plane, n: int, generator: torch.Generator) -> Tensor:
    """`n` draws of the density with log p~ at the cells' centres, (cells^2,), each uniform within its cell."""
    index = torch.multinomial(torch.softmax(log_p.double().cpu(), -1), n, replacement=True, generator=generator)
    return where.centres[index] + where.edge * (torch.rand(n, 2, generator=generator) - 0.5)


def picture(log_prob: Callable[[Tensor], Tensor], data: str) -> dict[str, Any]:
    """A density on the data set's own square, small enough for a line of a file."""
    extent = toy(data).extent
    axis = torch.linspace(-extent, extent, 2 * PICTURE + 1)[1::2]
    log_p = log_prob(torch.cartesian_prod(axis, axis)).double().cpu().numpy()
    highest = max(float(log_p.max()), -700.0)
    levels = np.round(255 * np.exp(log_p - highest)).astype(np.uint8)
    peak = math.exp(min(highest, 700.0))  # a model that ran away can be higher than a number can say
    packed = base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode()
    return {"cells": PICTURE, "extent": extent, "peak": peak, "density": packed}
