"""The estimator contract."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.types import LogDensity, Objective

__all__ = ["Estimator"]


class Estimator(nn.Module, ABC):
    """Turns a model and a batch into something to differentiate.

    Learned extras are Parameters, running state is in buffers, so that `state_dict()` holds all of it; `forward`
    changes buffers only while `self.training`. An estimator has no optimizer.

    >>> class MaximumLikelihood(Estimator):      # for models that are normalised already
    ...     def forward(self, model, x, *, generator=None):
    ...         nll = -model(x).mean()
    ...         return Objective(nll, {"value": nll.detach()})
    >>> estimator = MaximumLikelihood()
    >>> estimator(lambda x: x.sum(-1), torch.ones(4, 2)).info
    {'value': tensor(-2.)}
    """

    @abstractmethod
    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        """The objective of `model` on the batch `x` of shape (n, *event)."""

    def set_gamma(self, gamma: float | None) -> None:
        """Set the tracker's rate for the coming steps, or with None go back to the one it was made with."""
        if gamma is not None:
            raise InvalidValue(f"{type(self).__name__} has no rate 'gamma' to follow a sequence.")

    @property
    def settings(self) -> dict[str, str | int | None]:
        """What it was made with, as plain values: a run resumes only with the same."""
        return {"estimator": type(self).__name__}
