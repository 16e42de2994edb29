"""Conditional noise-contrastive estimation: the noise is drawn around each observation."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from unnorm.errors import InvalidValue
from unnorm.estimators.base import Estimator, check_at_least
from unnorm.streams import normal
from unnorm.types import LogDensity, Objective, log_density, together

__all__ = ["ConditionalNCE", "cnce_loss"]


def cnce_loss(log_p_data: Tensor, log_p_near: Tensor) -> Tensor:
    """2 E log(1 + exp(-G)) with G = log p~(x) - log p~(y), for y drawn symmetrically around x.

    Args:
        log_p_data: log p~ at the data, (..., n).
        log_p_near: log p~ at the noise of each datum, (..., kappa, n).

    >>> cnce_loss(torch.zeros(5), torch.zeros(3, 5))                 # nothing to tell apart: 2 log 2
    tensor(1.3863)
    """
    return 2 * softplus(log_p_near - log_p_data.unsqueeze(-2)).mean((-2, -1))


class ConditionalNCE(Estimator):
    """Conditional noise-contrastive estimation (Ceylan and Gutmann 2018) with Gaussian noise around each datum.

    Minimises 2 E log(1 + exp(-G)) with G = log p~(x) - log p~(y), y = x + sigma xi: which of the two is the datum?
    The noise is symmetric and so drops out, and so does Z: no noise model, no normaliser. Nothing ties together
    regions that are farther apart than a few sigma.

    Args:
        sigma: the standard deviation of the noise, in the units of the model.
        kappa: noise points per datum.
        shape: of independent problems solved side by side, see `Estimator`.

    `info` has `value`, the loss.

    >>> from unnorm import Quadratic
    >>> estimator = ConditionalNCE(sigma=0.5)
    >>> estimator(Quadratic(2), torch.zeros(8, 2), generator=torch.Generator().manual_seed(0)).info["value"] < 1.3863
    tensor(True)
    """

    def __init__(self, *, sigma: float = 0.5, kappa: int = 1, shape: tuple[int, ...] = ()):
        super().__init__()
        self.shape = shape
        if not sigma > 0:
            raise InvalidValue(f"The 'sigma' of ConditionalNCE must be positive. Got {sigma}.")
        check_at_least("ConditionalNCE", "kappa", kappa, 1)
        self.sigma, self.kappa = sigma, kappa

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {**super().settings, "sigma": self.sigma, "kappa": self.kappa}

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        problems = math.prod(self.shape)
        n = len(x) // problems
        shape = (problems * self.kappa, n, *x.shape[1:])
        noise = normal(shape, generator=generator, device=x.device, dtype=x.dtype).view(problems, self.kappa, -1)
        near = x.view(problems, 1, -1) + self.sigma * noise
        log_p = log_density(model, together([x, near.view(-1, *x.shape[1:])], self.shape))
        log_p = log_p.view(*self.shape, self.kappa + 1, n)
        loss = cnce_loss(log_p[..., 0, :], log_p[..., 1:, :])
        return Objective(loss, {"value": loss.detach()})
