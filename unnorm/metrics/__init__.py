"""How good is it? Likelihoods with their error, discrepancies with their noise floor, detection of outliers."""

from unnorm.metrics.detection import Detection, detect, fpr_at_tpr
from unnorm.metrics.discrepancy import compare, frechet, median_bandwidth, mmd, sliced_wasserstein
from unnorm.metrics.floor import Discrepancy, Metric, noise_floor
from unnorm.metrics.histogram import score_histogram
from unnorm.metrics.images import InceptionScore, fid, inception_score
from unnorm.metrics.likelihood import NLL, BitsPerDim, bits_per_dim, log_probs, nll

__all__ = [
    "NLL",
    "BitsPerDim",
    "Detection",
    "Discrepancy",
    "InceptionScore",
    "Metric",
    "bits_per_dim",
    "compare",
    "detect",
    "fid",
    "fpr_at_tpr",
    "frechet",
    "inception_score",
    "log_probs",
    "median_bandwidth",
    "mmd",
    "nll",
    "noise_floor",
    "score_histogram",
    "sliced_wasserstein",
]
