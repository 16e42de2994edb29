"""unnorm learns unnormalized statistical models and hands back a normalised density with an error bar.

>>> import torch, unnorm
>>> x = unnorm.data.toy("8gaussians").sample(1000, generator=torch.Generator().manual_seed(0))
>>> q = unnorm.Gaussian.fit(x)
>>> model = unnorm.Tilted(q, unnorm.MLP(2, hidden=(32,)))
>>> history = unnorm.train(model, unnorm.MECO(q), x, unnorm.Training(steps=20))
>>> density = unnorm.Density.normalise(model, q, n=1000)
>>> density.log_prob(x).shape
torch.Size([1000])
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unnorm import (
        bridges,
        data,
        diagnostics,
        estimators,
        health,
        metrics,
        models,
        noise,
        optim,
        partition,
        replicas,
        samplers,
    )
    from unnorm.density import Density
    from unnorm.draws import Draws
    from unnorm.estimators import (
        ENCE,
        MECO,
        NCE,
        SNL,
        ConditionalNCE,
        ContrastiveDivergence,
        DenoisingScoreMatching,
        Estimator,
        MCMCLikelihood,
        PersistentCD,
        ScoreMatching,
        SlicedScoreMatching,
        Telescope,
    )
    from unnorm.loop import step, train
    from unnorm.models import MLP, Bridged, Quadratic, ResNet, Seen, Tilted, WideResNet
    from unnorm.noise import Gaussian, Noise, from_distribution
    from unnorm.samplers import HMC, MALA, ULA, Chain, ReplayBuffer, Sampler
    from unnorm.training import Training
    from unnorm.types import History, LogDensity, LogZ, Objective

__all__ = [
    "ENCE",
    "HMC",
    "MALA",
    "MECO",
    "MLP",
    "NCE",
    "SNL",
    "ULA",
    "Bridged",
    "Chain",
    "ConditionalNCE",
    "ContrastiveDivergence",
    "DenoisingScoreMatching",
    "Density",
    "Draws",
    "Estimator",
    "Gaussian",
    "History",
    "LogDensity",
    "LogZ",
    "MCMCLikelihood",
    "Noise",
    "Objective",
    "PersistentCD",
    "Quadratic",
    "ReplayBuffer",
    "ResNet",
    "Sampler",
    "ScoreMatching",
    "Seen",
    "SlicedScoreMatching",
    "Telescope",
    "Tilted",
    "Training",
    "WideResNet",
    "bridges",
    "data",
    "diagnostics",
    "estimators",
    "fit",
    "from_distribution",
    "health",
    "metrics",
    "models",
    "noise",
    "optim",
    "partition",
    "replicas",
    "samplers",
    "step",
    "train",
]

_HOME = {
    "ResNet": "models",
    "Seen": "models",
    "WideResNet": "models",
    "Bridged": "models",
    "Telescope": "estimators",
    "MECO": "estimators",
    "MLP": "models",
    "Density": "density",
    "Estimator": "estimators",
    "Gaussian": "noise",
    "History": "types",
    "LogDensity": "types",
    "LogZ": "types",
    "Noise": "noise",
    "Objective": "types",
    "Quadratic": "models",
    "Sampler": "samplers",
    "Tilted": "models",
    "Training": "training",
    "fit": "tables.fit",
    "TableDensity": "tables.density",
    "EnergyDensity": "sklearn",
    "EnergyOutlierDetector": "sklearn",
    "load": "tables.folder",
    "train": "loop",
    "from_distribution": "noise",
    "step": "loop",
    "ENCE": "estimators",
    "NCE": "estimators",
    "SNL": "estimators",
    "ConditionalNCE": "estimators",
    "ContrastiveDivergence": "estimators",
    "DenoisingScoreMatching": "estimators",
    "MCMCLikelihood": "estimators",
    "PersistentCD": "estimators",
    "ScoreMatching": "estimators",
    "SlicedScoreMatching": "estimators",
    "HMC": "samplers",
    "MALA": "samplers",
    "ULA": "samplers",
    "Chain": "samplers",
    "ReplayBuffer": "samplers",
    "Draws": "draws",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Torch takes seconds to import: `unnorm --help` must not wait for it, so names are found when first used.
    if name in _HOME:
        return getattr(importlib.import_module(f"unnorm.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"unnorm.{name}")
    raise AttributeError(f"module 'unnorm' has no attribute '{name}'")
