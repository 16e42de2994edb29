"""Three energies that judge whether a row is an anomaly: tails of single columns, a mixture, and a learned one.

Here they score rows; `unnorm.tables.committee` fits them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from sklearn.mixture import GaussianMixture

from unnorm.data.transforms import Transform
from unnorm.density import Density
from unnorm.types import History

__all__ = ["Calibration", "Committee", "Learned", "Tails", "through"]

MOST_KEPT = 10_000
FAR = 0.3  # what a surprise has more for each e-fold of an energy's distance from the mean, in deviations


class Tails(NamedTuple):
    """How far out a row's values are in their columns: the sum over columns of -log of the nearer tail's share of rows.

    >>> tails = Tails.fit(np.arange(10.0)[:, None])
    >>> tails.energy(np.array([[4.5], [0.0], [99.0]])).round(2).tolist()
    [0.69, 2.3, 3.0]
    """

    sorted: np.ndarray
    rows: int

    @classmethod
    def fit(cls, rows: np.ndarray) -> "Tails":
        places = np.linspace(0, len(rows) - 1, min(len(rows), MOST_KEPT)).round().astype(int)
        return cls(np.sort(rows, axis=0)[places], len(rows))

    def energy(self, x: np.ndarray) -> np.ndarray:
        n, total = len(self.sorted), np.zeros(len(x))
        for column, values in zip(self.sorted.T, x.T, strict=True):
            below = np.searchsorted(column, values, side="right") / n
            above = 1 - np.searchsorted(column, values, side="left") / n
            total -= np.log(np.minimum(below, above).clip(0.5 / self.rows, 1.0))
        return total


class Calibration(NamedTuple):
    """From an energy to a surprise: -log of the share of training rows whose energy is at least as high.

    Between the energies of two rows it is linear, and beyond all of them the share is the least there is. How far an
    energy is from the mean adds to it, slowly: of rows that are all rare the wildest comes first.

    >>> Calibration.fit(np.arange(9.0)).surprise(np.array([-1.0, 4.0, 8.0, 100.0])).round(2).tolist()
    [0.0, 0.51, 1.98, 2.9]
    """

    energies: np.ndarray
    surprises: np.ndarray
    mean: float
    deviation: float

    @classmethod
    def fit(cls, energies: np.ndarray) -> "Calibration":
        bounded = _bounded(energies)
        values, counts = np.unique(bounded, return_counts=True)
        at_least = counts[::-1].cumsum()[::-1]
        surprises = -np.log((1 + at_least) / (1 + len(bounded)))
        return cls(values, surprises, float(bounded.mean()), float(bounded.std()) or 1.0)

    def surprise(self, energies: np.ndarray) -> np.ndarray:
        bounded = _bounded(energies)
        far = np.maximum(bounded - self.mean, 0) / self.deviation
        return np.interp(bounded, self.energies, self.surprises) + FAR * np.arcsinh(far)


class Learned(NamedTuple):
    """A learned energy.

    Attributes:
        density: normalised, in the units of the table's columns.
        history: of training, the mean over the networks.
        alive: networks that did not diverge, of which it is the mean.
    """

    density: Density
    history: History
    alive: int


@dataclass(frozen=True)
class Committee:
    """The three energies, each as a surprise; their mean is Fisher's way to combine three tests.

    Attributes:
        tails: of single columns.
        scale: to robust units with tails drawn in, in which the mixture lives.
        mixture: of few Gaussians, widened.
        learned: experts trained by MECO against a Gaussian wider than the rows.
        calibrations: of the three, in this order.
    """

    tails: Tails
    scale: Transform
    mixture: GaussianMixture
    learned: Learned
    calibrations: tuple[Calibration, ...] = ()

    def energies(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the three energies of each row.

        The last two are of the scaled columns: in the units of x, tails drawn in would count twice.
        """
        density = self.learned.density
        with torch.no_grad():
            parts = torch.from_numpy(np.ascontiguousarray(x)).split(2**14)
            learned = torch.cat([density.model(density.transform(part)[0]) for part in parts])
        return [self.tails.energy(x), -self.mixture.score_samples(through(self.scale, x)), -learned.numpy()]

    def surprise(self, x: np.ndarray) -> np.ndarray:
        """Return the mean surprise of each row: about 1 for a usual one, and the higher the less usual."""
        parts = zip(self.calibrations, self.energies(x), strict=True)
        return np.mean([calibration.surprise(own) for calibration, own in parts], axis=0)


def through(transform: Transform, rows: np.ndarray) -> np.ndarray:
    """Return the rows in the transform's units."""
    with torch.no_grad():
        return np.asarray(transform(torch.from_numpy(np.ascontiguousarray(rows)))[0])


def _bounded(energy: np.ndarray) -> np.ndarray:
    return np.nan_to_num(energy, nan=1e30, posinf=1e30, neginf=-1e30).clip(-1e30, 1e30)
