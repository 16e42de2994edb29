"""Many runs as one computation: seeds, learning rates and data sets of equal shape, side by side."""

from unnorm.noise.stacked import StackedNoise
from unnorm.replicas.stacked import Stacked
from unnorm.replicas.training import Replicas, fit

__all__ = ["Replicas", "Stacked", "StackedNoise", "fit"]
