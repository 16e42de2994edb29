"""Estimators: each turns a model and a batch into an Objective."""

from unnorm.estimators.base import Estimator
from unnorm.estimators.meco import MECO, meco_surrogate
from unnorm.estimators.trackers import EMA, SCENT, TRACKERS, Minibatch, Tracker, UMax

__all__ = ["EMA", "MECO", "SCENT", "TRACKERS", "Estimator", "Minibatch", "Tracker", "UMax", "meco_surrogate"]
