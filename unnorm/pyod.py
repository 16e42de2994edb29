"""`EnergyOutlierDetector` by PyOD's contract; needs PyOD, which nothing else here does."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from unnorm.sklearn import EnergyOutlierDetector

try:
    from pyod.models.base import BaseDetector
except ImportError as problem:
    raise ImportError("PyOD's contract needs PyOD: pip install 'unnorm[pyod]'.") from problem

__all__ = ["EnergyOD"]


class EnergyOD(BaseDetector):
    """The detector among PyOD's: `decision_scores_`, `labels_`, `threshold_`, `predict_proba`; high scores are unusual.

    Args:
        contamination, experts, hidden, steps, max_time, device, random_state, n_jobs, verbose: as of
            `EnergyOutlierDetector`; so is `contamination` the share of the training rows, and exceeded by new ones.

    >>> x = np.random.RandomState(0).standard_normal((200, 2))
    >>> detector = EnergyOD(contamination=0.05, steps=20, random_state=0).fit(x)
    >>> int(detector.labels_.sum()), detector.predict_proba(np.array([[9.0, 9.0]])).round(1).tolist()
    (10, [[0.0, 1.0]])
    """

    def __init__(
        self,
        contamination: float = 0.1,
        experts: int = 4,
        hidden: Sequence[int] = (64, 64),
        steps: int = 300,
        max_time: float | None = None,
        device: str = "cpu",
        random_state: Any = None,
        n_jobs: int | None = None,
        verbose: bool | int = False,
    ):
        super().__init__(contamination=contamination)
        self.experts, self.hidden, self.steps, self.max_time = experts, hidden, steps, max_time
        self.device, self.random_state, self.n_jobs, self.verbose = device, random_state, n_jobs, verbose

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit to rows; labels are never looked at."""
        self._set_n_classes(y)
        self.detector_ = EnergyOutlierDetector(**self.get_params(deep=False)).fit(X)
        self.decision_scores_ = self.decision_function(X)
        self._process_decision_scores()
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """The surprise of each row: high is unusual."""
        check_is_fitted(self, ["detector_"])
        return -self.detector_.score_samples(X)
