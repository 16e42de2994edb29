"""Everything `unnorm fit` can be asked, checked before any data are read."""

from dataclasses import dataclass, field

import torch
from torch import nn

from unnorm.errors import InvalidValue
from unnorm.estimators import MECO, Estimator
from unnorm.models import MLP, Quadratic, Tilted
from unnorm.names import choose, unknown
from unnorm.noise import Gaussian, Noise
from unnorm.training import Training

__all__ = ["LEAST_ROWS", "NOISES", "Job"]

ESTIMATORS = {"meco": MECO}
MODELS = ("tilted", "mlp", "quadratic")
NOISES = {"gaussian": "full", "gaussian-diagonal": "diagonal", "gaussian-low-rank": "low-rank"}
LEAST_ROWS = 10


@dataclass(frozen=True)
class Job:
    """Everything `unnorm fit` was asked; plain values, saved as `config.json`."""

    data: str
    key: str | None = None
    columns: tuple[str, ...] | None = None
    drop_nonfinite: bool = False
    drop_constant: bool = False
    n: int = 50_000
    test: float = 0.1
    model: str = "tilted"
    hidden: tuple[int, ...] = (300, 300, 300)
    activation: str = "silu"
    noise: str = "gaussian"
    estimator: str = "meco"
    gamma: float | None = None
    tracker: str = "ema"
    n_noise: int | None = None
    n_importance: int = 200_000
    device: str = "auto"
    precision: str = "32"
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        if self.n < LEAST_ROWS:
            raise InvalidValue(f"The number of points 'n' must be at least {LEAST_ROWS}. Got {self.n}.")
        if not 0 < self.test < 1:
            raise InvalidValue(f"The 'test' share must be between 0 and 1. Got {self.test}.")
        if self.n_importance < 100:
            raise InvalidValue(f"The 'n-importance' draws for log Z must be at least 100. Got {self.n_importance}.")
        if self.model not in MODELS:
            raise InvalidValue(unknown("model", self.model, MODELS))
        choose("noise", self.noise, NOISES)
        choose("estimator", self.estimator, ESTIMATORS)
        if self.training.schedule == "pl":
            if self.gamma is not None:
                raise InvalidValue("The schedule 'pl' sets gamma and beta itself (Theorem 4): give neither.")
            if self.tracker != "ema":
                raise InvalidValue(f"The schedule 'pl' sets the gamma of the tracker 'ema'. Got '{self.tracker}'.")
        # What the parts refuse, they refuse before any data are read.
        self.build_model(2, Gaussian(2)), self.build_estimator(Gaussian(2))

    def build_model(self, width: int, noise: Noise) -> nn.Module:
        generator = torch.Generator().manual_seed(self.training.seed)
        if self.model == "quadratic":
            return Quadratic(width)
        net = MLP(width, self.hidden, self.activation, generator=generator)
        return net if self.model == "mlp" else Tilted(noise, net)

    def build_estimator(self, noise: Noise) -> Estimator:
        return ESTIMATORS[self.estimator](noise, n_noise=self.n_noise, gamma=self.gamma, tracker=self.tracker)
