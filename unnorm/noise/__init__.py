"""Noise distributions q: easy to sample, easy to evaluate, close to the data."""

from unnorm.noise.base import Noise
from unnorm.noise.distribution import DistributionNoise, from_distribution
from unnorm.noise.gaussian import Gaussian

__all__ = ["DistributionNoise", "Gaussian", "Noise", "from_distribution"]
