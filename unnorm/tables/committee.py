"""The fit of the three energies that judge whether a row is an anomaly (`unnorm.tables.surprise`)."""

import copy
import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import nn

from unnorm import replicas
from unnorm.data.affine import Whiten
from unnorm.data.robust import LogTails, robust_scale
from unnorm.data.transforms import Compose, Transform
from unnorm.density import Density
from unnorm.device import Machine
from unnorm.errors import WeightsWarning
from unnorm.estimators import MECO
from unnorm.models import MLP, Averaged, Seen, Tilted
from unnorm.noise import Gaussian, Noise
from unnorm.randomness import derive_seed, stream
from unnorm.tables.surprise import Calibration, Committee, Learned, Tails, through
from unnorm.training import Training
from unnorm.types import History

__all__ = ["Calibration", "Committee", "Experts", "Tails", "fit_committee"]

BATCH, LR, LOG_EVERY = 128, 3e-3, 25
WIDER = 1.5  # the noise's deviations, in those of the rows: it reaches around them
SHRUNK = 0.1  # of each covariance is taken away
RIDGE = 1e-4
COMPONENTS, ROWS_FOR_EACH = 8, 10  # of the mixture at most; rows for each component and column at least
WIDENED = 1e-2  # what the mixture's variances have more, in those of the scaled columns
DRAWS = 20_000  # for log Z
EVALUATIONS, NARROW = 150_000, 64  # of the model by chains, for tables of so many columns; fewer for wider ones
TRIM, TRIM_ROUNDS = 0.05, 3  # of the rows: the farthest out are not learned from


def fit_committee(rows: np.ndarray, experts: "Experts", fabric: Machine) -> Committee:
    """Fit the three energies to rows (n, columns) of which no column is constant, and calibrate them."""
    scale = Compose([robust_scale(rows), LogTails()])
    scaled = through(scale, rows)
    usual = _trimmed(scaled)
    components = int(np.clip(len(rows) // (ROWS_FOR_EACH * rows.shape[1]), 1, COMPONENTS))
    seed = derive_seed(experts.seed, "mixture")
    mixture = GaussianMixture(components, reg_covar=WIDENED, max_iter=50, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fifty rounds are enough for a part of a committee
        mixture.fit(usual)
    found = Committee(Tails.fit(rows), scale, mixture, experts.density(usual, scale, fabric))
    calibrations = tuple(Calibration.fit(own) for own in found.energies(rows))
    return replace(found, calibrations=calibrations)


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

    def density(self, scaled: np.ndarray, scale: Transform, fabric: Machine) -> Learned:
        """Trained, averaged and normalised, in the noise's own coordinates, where it is a standard normal.

        The networks see the scaled columns: in the noise's coordinates the narrow directions of columns that depend on
        each other, which hold rounding and noise, would count as much as the wide ones.
        """
        whiten, noise = _wider(scaled), Gaussian(scaled.shape[1], "diagonal")
        rows = torch.from_numpy(through(whiten, scaled)).float()
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
        self, rows: torch.Tensor, noise: Noise, whiten: Whiten, fabric: Machine
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
        distance = np.square(through(_wider(scaled[kept]), scaled)).sum(1)
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
