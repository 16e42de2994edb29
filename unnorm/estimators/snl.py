"""SNL: the self-normalised likelihood, MECO's closest relative."""

import torch
from torch import Tensor

from unnorm.estimators.base import Contrast, Contrastive, LearnedLogZ, check_at_least
from unnorm.noise.base import Noise
from unnorm.types import Objective

__all__ = ["SNL", "snl_loss"]


def snl_loss(log_p_data: Tensor, log_w: Tensor, b: Tensor) -> Tensor:
    """-E_data log p~ + b + exp(-b) E_noise[p~/q] - 1; minimal over b at b = log Z, where it is the likelihood.

    Reduces over the last axis; `b` has the shape of the rest.

    >>> snl_loss(torch.zeros(3, 5), torch.ones(3, 7), torch.ones(3))
    tensor([1., 1., 1.])
    """
    return b + torch.exp(log_w - b.unsqueeze(-1)).mean(-1) - 1 - log_p_data.mean(-1)


class SNL(Contrastive):
    """Self-normalised likelihood (Senetaire et al. 2025): a lower bound of the likelihood, tight at b = log Z.

    Uses log Z <= b + Z exp(-b) - 1. Where MECO tracks log Z by a moving average, here b is a Parameter that gradient
    steps bring to it, so that each mini-batch's gradient is unbiased. A weight far above exp(b) can overflow; then
    `step` raises.

    Args:
        noise: q.
        n_noise: noise draws per step; as many as there are data when None.
        shape: of independent problems solved side by side, see `Contrastive`.

    `info` has `value` (the negative log-likelihood under b; in eval mode under the draws' own mean weight), `log_z`
    (that is b), `gap`, `ess`, and `loss`.

    >>> from unnorm import Gaussian, Quadratic
    >>> estimator = SNL(Gaussian(2))
    >>> objective = estimator(Quadratic(2), torch.zeros(8, 2), generator=torch.Generator().manual_seed(0))
    >>> round(objective.surrogate.item(), 4)                          # q = p, so that b = log Z = log 2 pi at once
    1.8379
    """

    def __init__(self, noise: Noise, *, n_noise: int | None = None, shape: tuple[int, ...] = ()):
        super().__init__(noise, shape)
        check_at_least("SNL", "n_noise", n_noise, 1)
        self.n_noise = n_noise
        self.log_z = LearnedLogZ(shape)

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {**super().settings, "n_noise": self.n_noise}

    def draws(self, batch: int) -> int:
        return self.n_noise or batch

    def compare(self, seen: Contrast) -> Objective:
        loss = snl_loss(seen.log_p_data, seen.log_w, self.log_z(seen.log_w))
        b = self.log_z.value.detach().clone()
        value = seen.nll(b if self.training else None)
        info = {"value": value, "log_z": b, "gap": seen.gap(value), "ess": seen.ess(), "loss": loss.detach()}
        return Objective(loss, info)
