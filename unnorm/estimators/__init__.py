"""Estimators: each turns a model and a batch into an Objective."""

from unnorm.estimators.base import Contrastive, Estimator
from unnorm.estimators.conditional import ConditionalNCE, cnce_loss
from unnorm.estimators.langevin import ContrastiveDivergence, MCMCLikelihood, PersistentCD, contrast_loss
from unnorm.estimators.likelihood import MaximumLikelihood
from unnorm.estimators.meco import MECO, meco_surrogate
from unnorm.estimators.nce import ENCE, NCE, ence_loss, nce_loss
from unnorm.estimators.score_matching import (
    DenoisingScoreMatching,
    ScoreMatching,
    SlicedScoreMatching,
    denoising_loss,
    score_matching_loss,
)
from unnorm.estimators.snl import SNL, snl_loss
from unnorm.estimators.stepwise import StepwiseTelescope
from unnorm.estimators.telescope import Telescope, even_alphas, waymarks
from unnorm.estimators.trackers import EMA, SCENT, TRACKERS, Minibatch, Tracker, UMax

__all__ = [
    "EMA",
    "ENCE",
    "MECO",
    "NCE",
    "SCENT",
    "SNL",
    "TRACKERS",
    "ConditionalNCE",
    "Contrastive",
    "ContrastiveDivergence",
    "DenoisingScoreMatching",
    "Estimator",
    "MCMCLikelihood",
    "MaximumLikelihood",
    "Minibatch",
    "PersistentCD",
    "ScoreMatching",
    "SlicedScoreMatching",
    "StepwiseTelescope",
    "Telescope",
    "Tracker",
    "UMax",
    "cnce_loss",
    "contrast_loss",
    "denoising_loss",
    "ence_loss",
    "even_alphas",
    "meco_surrogate",
    "nce_loss",
    "score_matching_loss",
    "snl_loss",
    "waymarks",
]
