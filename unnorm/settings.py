"""Everything that a fit can be asked, checked before any data are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from unnorm.errors import InvalidValue
from unnorm.estimators import (
    ENCE,
    MECO,
    NCE,
    SNL,
    ConditionalNCE,
    Contrastive,
    ContrastiveDivergence,
    DenoisingScoreMatching,
    Estimator,
    MCMCLikelihood,
    PersistentCD,
    ScoreMatching,
    SlicedScoreMatching,
    Telescope,
)
from unnorm.estimators.score_matching import PIECEWISE_LINEAR
from unnorm.models import MLP, Bridged, Quadratic, Tilted
from unnorm.models.mlp import ACTIVATIONS
from unnorm.names import choose, unknown
from unnorm.noise import Gaussian, Noise
from unnorm.noise.fitting import KINDS
from unnorm.randomness import stream
from unnorm.training import Training

__all__ = ["ESTIMATORS", "LEAST_ROWS", "NOISES", "Job"]

LANGEVIN = ("n_steps", "step_size", "noise_scale")
# Each estimator, whether it takes the noise, and those of the options below that are its own.
ESTIMATORS: Mapping[str, tuple[Callable[..., Estimator], bool, tuple[str, ...]]] = {
    "meco": (MECO, True, ("gamma", "tracker", "n_noise")),
    "nce": (NCE, True, ("nu",)),
    "ence": (ENCE, True, ("nu",)),
    "snl": (SNL, True, ("n_noise",)),
    "mcmc": (MCMCLikelihood, True, (*LANGEVIN, "buffer_size", "restart")),
    "cd": (ContrastiveDivergence, True, LANGEVIN),
    "pcd": (PersistentCD, True, (*LANGEVIN, "n_chains")),
    "sm": (ScoreMatching, False, ()),
    "ssm": (SlicedScoreMatching, False, ("n_slices",)),
    "dsm": (DenoisingScoreMatching, False, ("sigma",)),
    "cnce": (ConditionalNCE, False, ("sigma", "kappa")),
}
OPTIONS = tuple(dict.fromkeys(name for _, _, names in ESTIMATORS.values() for name in names))
MODELS = ("tilted", "mlp", "quadratic")
NOISES = {"auto": "auto"} | {name: name for name in KINDS}
LEAST_ROWS = 10
AUTOMATIC = ("steps", "batch", "schedule", "iterate", "patience")  # of Training
UNCOMPARABLE = ("sm", "ssm", "dsm", "cnce")  # their values cannot choose the best iterate
SMALL, MIDDLE, LARGE = (64, 64), (128, 128), (300, 300, 300)  # widths of the network
FEW, MANY = 1000, 5000  # rows from which it is larger
WIDE = 100  # columns from which it is wider
DRAWS, MANY_DRAWS = 50_000, 200_000  # of the noise for log Z, for few and many rows


@dataclass(frozen=True)
class Job:
    """Everything a fit was asked; plain values, saved as `config.json`.

    What is None, and what of `training` is named in `automatic`, follows from the shape of the table (`for_table`).
    """

    data: str
    key: str | None = None
    columns: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    drop_nonfinite: bool = False
    n: int = 50_000
    test: float = 0.1
    model: str = "tilted"
    hidden: tuple[int, ...] | None = None
    activation: str = "silu"
    noise: str = "auto"
    bridges: str = "auto"
    estimator: str = "meco"
    gamma: float | None = None
    tracker: str | None = None
    n_noise: int | None = None
    nu: float | None = None
    n_steps: int | None = None
    step_size: float | None = None
    noise_scale: float | None = None
    n_chains: int | None = None
    buffer_size: int | None = None
    restart: float | None = None
    n_slices: int | None = None
    sigma: float | None = None
    kappa: int | None = None
    n_importance: int | None = None
    device: str = "auto"
    precision: str = "32"
    strict: bool = False
    training: Training = field(default_factory=Training)
    automatic: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.n < LEAST_ROWS:
            raise InvalidValue(f"The number of points 'n' must be at least {LEAST_ROWS}. Got {self.n}.")
        if not 0 <= self.test < 1:
            raise InvalidValue(f"The 'test' share must be at least 0 and below 1. Got {self.test}.")
        if self.n_importance is not None and self.n_importance < 100:
            raise InvalidValue(f"The 'n-importance' draws for log Z must be at least 100. Got {self.n_importance}.")
        if not set(self.automatic) <= set(AUTOMATIC):
            raise InvalidValue(f"Only {', '.join(AUTOMATIC)} can be automatic. Got {', '.join(self.automatic)}.")
        if self.model not in MODELS:
            raise InvalidValue(unknown("model", self.model, MODELS))
        choose("noise", self.noise, NOISES)
        _, _, own = choose("estimator", self.estimator, ESTIMATORS)
        for name in OPTIONS:
            if getattr(self, name) is not None and name not in own:
                has = ", ".join(map(_flag, own)) or "none"
                raise InvalidValue(f"The estimator '{self.estimator}' has no option {_flag(name)}. Its options: {has}.")
        if self.buffer_size is not None and self.buffer_size < self.training.batch:
            raise InvalidValue(
                f"The --buffer-size must be at least the --batch, {self.training.batch}. Got {self.buffer_size}."
            )
        if self.noise_scale is not None and self.step_size is None:
            raise InvalidValue("The --noise-scale belongs to plain Langevin steps: give a --step-size too.")
        kind = choose("activation", self.activation, ACTIVATIONS)
        smooth = self.model == "quadratic" or not issubclass(kind, PIECEWISE_LINEAR)
        if self.estimator in ("sm", "ssm") and not smooth:
            raise InvalidValue(
                f"The estimator '{self.estimator}' needs second derivatives, which the activation "
                f"'{self.activation}' has not. Use silu."
            )
        if self.training.schedule == "pl":
            if self.estimator != "meco":
                raise InvalidValue(f"The schedule 'pl' belongs to 'meco' (Theorem 4). Got '{self.estimator}'.")
            if self.gamma is not None:
                raise InvalidValue("The schedule 'pl' sets gamma and beta itself (Theorem 4): give neither.")
            if self.tracker not in (None, "ema"):
                raise InvalidValue(f"The schedule 'pl' sets the gamma of the tracker 'ema'. Got '{self.tracker}'.")
        self._check_bridges()
        # What the parts refuse, they refuse before any data are read; layers draw from torch's own generator.
        with torch.random.fork_rng(devices=[]):
            self.build_model(2, Gaussian(2)), self.build_estimator(Gaussian(2))

    def _check_bridges(self) -> None:
        if self.bridges not in ("auto", "none") and not (self.bridges.isdecimal() and int(self.bridges) >= 1):
            raise InvalidValue(f"The --bridges are auto, none, or how many. Got {self.bridges}.")
        if self.bridges in ("auto", "none", "1"):
            return
        if not self._may_have_bridges:
            able = ", ".join(name for name, (make, _, _) in ESTIMATORS.items() if _contrastive(make))
            raise InvalidValue(
                f"Bridges belong to --model tilted and the estimators {able}. "
                f"Got '{self.model}' and '{self.estimator}'."
            )

    @property
    def _may_have_bridges(self) -> bool:
        return self.model == "tilted" and _contrastive(ESTIMATORS[self.estimator][0])

    @property
    def count_of_bridges(self) -> int | None:
        """How many there are to be; None where a pilot is to choose."""
        if self.bridges == "auto":
            return None if self._may_have_bridges and self.training.schedule != "pl" else 1
        return 1 if self.bridges == "none" else int(self.bridges)

    @property
    def base(self) -> type[Contrastive]:
        """What learns each bridge's ratio."""
        make = ESTIMATORS[self.estimator][0]
        if not (isinstance(make, type) and issubclass(make, Contrastive)):
            raise InvalidValue(f"The estimator '{self.estimator}' learns no ratio of data to noise.")
        return make

    @property
    def given(self) -> dict[str, Any]:
        """The estimator's own options, as far as they were given."""
        return {name: value for name in ESTIMATORS[self.estimator][2] if (value := getattr(self, name)) is not None}

    def for_table(self, n: int, width: int) -> "Job":
        """Return the job with everything decided, for a table with `n` rows to train on and `width` columns.

        >>> Job("t.csv").for_table(100, 3).hidden, Job("t.csv").for_table(100_000, 3).hidden
        ((64, 64), (300, 300, 300))
        """
        layers = SMALL if n < FEW else MIDDLE if n < MANY else LARGE
        wide = (max(256, layers[0]),) * len(layers) if width > WIDE else layers
        decided: dict[str, Any] = {
            "steps": int(np.clip(n // 4, 500, 3000)),
            "batch": min(256 if n < MANY else 500, n),
            "schedule": "cosine",
            "iterate": "last" if self.estimator in UNCOMPARABLE else "best",
            "patience": None if self.estimator in UNCOMPARABLE else 20,
        }
        chosen = {name: decided[name] for name in self.automatic}
        if self.buffer_size is not None and "batch" in chosen:
            chosen["batch"] = min(chosen["batch"], self.buffer_size)
        hidden = wide if self.hidden is None else self.hidden
        draws = (DRAWS if n < MANY else MANY_DRAWS) if self.n_importance is None else self.n_importance
        training = replace(self.training, **chosen)
        return replace(self, hidden=hidden, n_importance=draws, training=training, automatic=())

    def build_net(self, width: int, outputs: int | None = None) -> MLP:
        generator = stream(self.training.seed, "weights")
        return MLP(width, self.hidden or LARGE, self.activation, outputs, generator=generator)

    def build_model(self, width: int, noise: Noise, alphas: tuple[float, ...] = ()) -> nn.Module:
        if self.model == "quadratic":
            return Quadratic(width)
        if alphas:
            return Bridged(noise, self.build_net(width, len(alphas) - 1))
        return self.build_net(width) if self.model == "mlp" else Tilted(noise, self.build_net(width))

    def build_estimator(self, noise: Noise, alphas: tuple[float, ...] = ()) -> Estimator:
        make, takes_noise, _ = ESTIMATORS[self.estimator]
        given = self.given
        if alphas:
            return Telescope(noise, alphas, self.base, **given)
        if self.estimator == "pcd":  # as many chains as data points, unless told otherwise
            given.setdefault("n_chains", self.training.batch)
        return make(noise, **given) if takes_noise else make(**given)


def _contrastive(make: Any) -> bool:
    return isinstance(make, type) and issubclass(make, Contrastive)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
