"""Three energies that judge whether a row is an anomaly: tails of single columns, a mixture, and a learned one."""

import copy
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from lightning_fabric import Fabric
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import nn

from unnorm import replicas
from unnorm.data.affine import Whiten
from unnorm.data.robust import LogTails, robust_scale
from unnorm.data.transforms import Compose, Transform
from unnorm.density import Density
from unnorm.errors import WeightsWarning
from unnorm.estimators import MECO
from unnorm.models import MLP, Averaged, Seen, Tilted
from unnorm.noise import Gaussian, Noise
from unnorm.randomness import derive_seed, stream
from unnorm.training import Training
from unnorm.types import History

__all__ = ["Calibration", "Committee", "Experts", "Tails"]

MOST_KEPT = 10_000
BATCH, LR, LOG_EVERY = 128, 3e-3, 25
WIDER = 1.5  # the noise's deviations, in those of the rows: it reaches around them
SHRUNK = 0.1  # of each covariance is taken away
RIDGE = 1e-4
COMPONENTS, ROWS_FOR_EACH = 8, 10  # of the mixture at most; rows for each component and column at least
WIDENED = 1e-2  # what the mixture's variances have more, in those of the scaled columns
FAR = 0.3  # what a surprise has more for each e-fold of an energy's distance from the mean, in deviations
DRAWS = 20_000  # for log Z
EVALUATIONS, NARROW = 150_000, 64  # of the model by chains, for tables of so many columns; fewer for wider ones
TRIM, TRIM_ROUNDS = 0.05, 3  # of the rows: the farthest out are not learned from


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
    learned: "Learned"
    calibrations: tuple[Calibration, ...] = ()

    @classmethod
    def fit(cls, rows: np.ndarray, experts: "Experts", fabric: Fabric) -> "Committee":
        """Of rows (n, columns) of which no column is constant."""
        scale = Compose([robust_scale(rows), LogTails()])
        scaled = _through(scale, rows)
        usual = _trimmed(scaled)
        components = int(np.clip(len(rows) // (ROWS_FOR_EACH * rows.shape[1]), 1, COMPONENTS))
        mixture = GaussianMixture(
            components, reg_covar=WIDENED, max_iter=50, random_state=derive_seed(experts.seed, "mixture")
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # fifty rounds are enough for a part of a committee
            mixture.fit(usual)
        found = cls(Tails.fit(rows), scale, mixture, experts.density(usual, scale, fabric))
        calibrations = tuple(Calibration.fit(own) for own in found.energies(rows))
        return replace(found, calibrations=calibrations)

    def energies(self, x: np.ndarray) -> list[np.ndarray]:
        """The last two by densities of the scaled columns: in the units of x, tails drawn in would count twice."""
        density = self.learned.density
        with torch.no_grad():
            parts = torch.from_numpy(np.ascontiguousarray(x)).split(2**14)
            learned = torch.cat([density.model(density.transform(part)[0]) for part in parts])
        return [self.tails.energy(x), -self.mixture.score_samples(_through(self.scale, x)), -learned.numpy()]

    def surprise(self, x: np.ndarray) -> np.ndarray:
        """The higher, the less usual; of a usual row about 1."""
        parts = zip(self.calibrations, self.energies(x), strict=True)
        return np.mean([calibration.surprise(own) for calibration, own in parts], axis=0)


def _through(transform: Transform, rows: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(transform(torch.from_numpy(np.ascontiguousarray(rows)))[0])


@dataclass(frozen=True)
class Experts:
    """How the learned energy is learned.

    Attributes:
        count: of the networks whose mean it is.
        hidden: their widths.
        steps: of training.
        seconds: of training after which it ends.
        seed: of everything random.
        progress: a bar while they train.
    """

    count: int = 4
    hidden: tuple[int, ...] = (64, 64)
    steps: int = 300
    seconds: float | None = None
    seed: int = 0
    progress: bool = False

    def density(self, scaled: np.ndarray, scale: Transform, fabric: Fabric) -> "Learned":
        """Trained, averaged and normalised, in the noise's own coordinates, where it is a standard normal.

        The networks see the scaled columns: in the noise's coordinates the narrow directions of columns that depend on
        each other, which hold rounding and noise, would count as much as the wide ones.
        """
        whiten, noise = _wider(scaled), Gaussian(scaled.shape[1], "diagonal")
        rows = torch.from_numpy(_through(whiten, scaled)).float()
        nets, history = self._trained(rows, noise, whiten, fabric)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeightsWarning)  # its `doubts` say it
            density = Density.normalise(
                Tilted(noise, Averaged(nets or [_flat(MLP(scaled.shape[1], self.hidden))])),
                noise,
                Compose([scale, whiten]),
                n=DRAWS,
                evaluations=int(np.clip(EVALUATIONS * NARROW // scaled.shape[1], DRAWS, EVALUATIONS)),
                generator=stream(self.seed, "log Z"),
            )
        # double, so that a row's energy does not depend on its neighbours' in a batch
        return Learned(density.double().eval(), history, len(nets))

    def _trained(
        self, rows: torch.Tensor, noise: Noise, whiten: Whiten, fabric: Fabric
    ) -> tuple[list[nn.Module], History]:
        """Side by side; those that diverge have no say, and where all do the energy is the noise's."""
        nets = [MLP(rows.shape[1], self.hidden, generator=stream(self.seed, "weights", k)) for k in range(self.count)]
        training = Training(
            steps=self.steps,
            batch=min(BATCH, len(rows)),
            lr=LR,
            schedule="cosine",
            log_every=LOG_EVERY,
            seconds=self.seconds,
            seed=self.seed,
        )
        estimator = MECO(replicas.StackedNoise([noise] * self.count), shape=(self.count,))
        done = replicas.fit(
            [Tilted(noise, Seen(whiten, net)) for net in nets],
            estimator,
            rows,
            training,
            device=fabric.device,
            progress=self.progress,
        )
        alive = [done.model.one(k).cpu() for k in range(self.count) if bool(done.alive[k])]
        history = History(
            [{key: float(value.double().mean()) for key, value in record.items()} for record in done.records]
        )
        seen = [one.net for one in alive if isinstance(one, Tilted)]
        return [_folded(one.net, whiten) for one in seen if isinstance(one, Seen)], history


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


def _wider(scaled: np.ndarray) -> Whiten:
    """To where a Gaussian of the rows' shape, and wider, is a standard one."""
    width = scaled.shape[1]
    covariance = np.cov(scaled.T).reshape(width, width)
    covariance = (1 - SHRUNK) * covariance + np.diag(SHRUNK * np.diag(covariance) + RIDGE)
    whiten = Whiten(width)
    whiten.loc.copy_(torch.from_numpy(scaled.mean(0)))
    whiten.scale_tril.copy_(torch.from_numpy(WIDER * np.linalg.cholesky(covariance)))
    return whiten


def _trimmed(scaled: np.ndarray) -> np.ndarray:
    """Without the twentieth of the rows that is farthest out by a Gaussian of the others, found in a few rounds."""
    kept = np.ones(len(scaled), dtype=bool)
    for _ in range(TRIM_ROUNDS):
        distance = np.square(_through(_wider(scaled[kept]), scaled)).sum(1)
        kept = distance <= np.quantile(distance, 1 - TRIM)
    return scaled[kept]


@torch.no_grad()
def _folded(net: nn.Module, whiten: Whiten) -> nn.Module:
    """The same function of the whitened columns: net(whiten^-1(z)), by another first layer."""
    folded = copy.deepcopy(net).double()
    first = next(layer for layer in folded.modules() if isinstance(layer, nn.Linear))
    tril, loc = whiten.scale_tril.to(first.weight), whiten.loc.to(first.weight)
    first.bias.add_(first.weight @ loc)
    first.weight.copy_(first.weight @ tril)
    return folded.float()


def _flat(net: MLP) -> MLP:
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


def _bounded(energy: np.ndarray) -> np.ndarray:
    return np.nan_to_num(energy, nan=1e30, posinf=1e30, neginf=-1e30).clip(-1e30, 1e30)
