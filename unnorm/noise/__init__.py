"""Noise distributions q: easy to sample, easy to evaluate, close to the data."""

from unnorm.noise.autoregression import Autoregression
from unnorm.noise.base import Noise
from unnorm.noise.choice import Choice
from unnorm.noise.copula import Copula, Pushed
from unnorm.noise.couplings import Couplings
from unnorm.noise.distribution import DistributionNoise, from_distribution
from unnorm.noise.fitting import fit
from unnorm.noise.flow import Flow, FlowTransform, SplineFlow
from unnorm.noise.gaussian import Gaussian
from unnorm.noise.image_flow import ImageFlow
from unnorm.noise.mixture import GaussianMixture, Mixture
from unnorm.noise.smoothed import Smoothed
from unnorm.noise.uniform import Uniform

__all__ = [
    "Autoregression",
    "Choice",
    "Copula",
    "Couplings",
    "DistributionNoise",
    "Flow",
    "FlowTransform",
    "Gaussian",
    "GaussianMixture",
    "ImageFlow",
    "Mixture",
    "Noise",
    "Pushed",
    "Smoothed",
    "SplineFlow",
    "Uniform",
    "fit",
    "from_distribution",
]
