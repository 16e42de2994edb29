"""Plain maximum likelihood, for models that are normalised already."""

import torch
from torch import Tensor

from unnorm.estimators.base import Estimator
from unnorm.types import LogDensity, Objective, apart, log_density

__all__ = ["MaximumLikelihood"]


class MaximumLikelihood(Estimator):
    """-E_data log p, for a model whose integral is one, such as a flow: what unnormalized models are compared with.

    A model that is not normalised grows without end under it.

    Args:
        shape: of independent problems solved side by side, see `Estimator`.

    `info` has `value`, the negative log-likelihood.

    >>> from unnorm import Gaussian
    >>> MaximumLikelihood()(Gaussian(2).log_prob, torch.zeros(4, 2)).info
    {'value': tensor(1.8379)}
    """

    def __init__(self, *, shape: tuple[int, ...] = ()):
        super().__init__()
        self.shape = shape

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        loss = -apart(log_density(model, x), self.shape).mean(-1)
        return Objective(loss, {"value": loss.detach()})
