"""Noise-contrastive estimation: tell data from noise, and the classifier is the density."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unnorm.estimators.base import Contrast, Contrastive, LearnedLogZ, check_at_least
from unnorm.noise.base import Noise
from unnorm.types import Objective

__all__ = ["ENCE", "NCE", "ence_loss", "nce_loss"]

LOG_LIMIT = 10.0  # of log L, which is 0 where nothing tells data from noise; Adam remembers squares of what passes


def nce_loss(g_data: Tensor, g_noise: Tensor, nu: float) -> Tensor:
    """-E_data log h(x) - nu E_noise log(1 - h(x)), with h = sigmoid(g - log nu) and g = log p~ - log q - log Z.

    Reduces over the last axis.

    >>> nce_loss(torch.zeros(3, 5), torch.zeros(3, 5), nu=1.0)     # nothing to tell apart: 2 log 2
    tensor([1.3863, 1.3863, 1.3863])
    """
    log_nu = math.log(nu)
    return -logsigmoid(g_data - log_nu).mean(-1) - nu * logsigmoid(log_nu - g_noise).mean(-1)


def ence_loss(g_data: Tensor, g_noise: Tensor) -> tuple[Tensor, Tensor]:
    """L = (E_data exp(-g/2) + E_noise exp(g/2)) / 2 as a surrogate with the gradient of L, and log L.

    L is summed in the log domain. Where log L exceeds 10 the surrogate's gradient is that of L times e^(10 - log L):
    the same direction, a length that floats can hold. Normalised gradients (NGD) do not see the difference.

    >>> surrogate, log_loss = ence_loss(torch.zeros(5), torch.zeros(5))
    >>> surrogate, log_loss                                          # L = 1 where nothing tells them apart
    (tensor(1.), tensor(0.))
    >>> [torch.isfinite(number).item() for number in ence_loss(torch.full((5,), -1e6), torch.zeros(5))]
    [True, True]
    """
    terms = [-g_data / 2 - math.log(2 * g_data.shape[-1]), g_noise / 2 - math.log(2 * g_noise.shape[-1])]
    log_loss = torch.logsumexp(torch.cat(terms, -1), -1)
    excess = (log_loss.detach() - LOG_LIMIT).clamp(min=0)
    return torch.exp(log_loss - excess), log_loss.detach()


class _Classifier(Contrastive):
    """What NCE and eNCE share: the ratios g at data and noise, with a learned log Z."""

    def __init__(self, noise: Noise, nu: float, shape: tuple[int, ...]):
        super().__init__(noise, shape)
        check_at_least(type(self).__name__, "nu", nu, 1)
        self.nu = nu
        self.log_z = LearnedLogZ(shape)

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {**super().settings, "nu": self.nu}

    def draws(self, batch: int) -> int:
        return round(self.nu * batch)

    def _ratios(self, seen: Contrast) -> tuple[Tensor, Tensor]:
        log_z = self.log_z(seen.log_w).unsqueeze(-1)
        return seen.log_p_data - seen.log_q_data - log_z, seen.log_w - log_z

    def _info(self, seen: Contrast, loss: Tensor) -> dict[str, Tensor]:
        log_z = self.log_z.value.detach().clone()
        value = seen.nll(log_z if self.training else None)
        return {"value": value, "log_z": log_z, "gap": seen.gap(value), "ess": seen.ess(), "loss": loss.detach()}


class NCE(_Classifier):
    """Noise-contrastive estimation (Gutmann and Hyvarinen 2010, 2012), with log Z learned.

    Minimises -E_data log h - nu E_noise log(1 - h), where h = p~ / (p~ + nu Z q) is the probability that a point is
    data. One forward pass over data and noise.

    Args:
        noise: q.
        nu: noise draws per data point, at least 1.
        shape: of independent problems solved side by side, see `Contrastive`.

    `info` has `value` (the negative log-likelihood under the learned log Z; in eval mode under the draws' own mean
    weight), `log_z`, `gap`, `ess`, and `loss`, the number that is minimised.

    >>> from unnorm import Gaussian, Quadratic
    >>> estimator = NCE(Gaussian(2), nu=2)
    >>> objective = estimator(Quadratic(2), torch.zeros(8, 2), generator=torch.Generator().manual_seed(0))
    >>> sorted(objective.info), [name for name, _ in estimator.named_parameters()]
    (['ess', 'gap', 'log_z', 'loss', 'value'], ['log_z.value'])
    """

    def __init__(self, noise: Noise, *, nu: float = 1.0, shape: tuple[int, ...] = ()):
        super().__init__(noise, nu, shape)

    def compare(self, seen: Contrast) -> Objective:
        g_data, g_noise = self._ratios(seen)
        loss = nce_loss(g_data, g_noise, self.nu)
        return Objective(loss, self._info(seen, loss))


class ENCE(_Classifier):
    """Noise-contrastive estimation with the exponential loss (Liu et al. 2022), made for `optim.NGD`.

    Minimises (E_data exp(-g/2) + E_noise exp(g/2)) / 2 with g = log p~ - log q - log Z; log Z is learned. The loss
    is better conditioned than NCE's where the noise is far from the data, and is summed so that it cannot overflow.

    Args:
        noise: q.
        nu: noise draws per data point, at least 1.
        shape: of independent problems solved side by side, see `Contrastive`.

    `info` as NCE's, with `loss` the logarithm of the loss.

    >>> from unnorm import Gaussian, Quadratic
    >>> estimator = ENCE(Gaussian(2))
    >>> objective = estimator(Quadratic(2), torch.zeros(8, 2), generator=torch.Generator().manual_seed(0))
    >>> sorted(objective.info)
    ['ess', 'gap', 'log_z', 'loss', 'value']
    """

    def __init__(self, noise: Noise, *, nu: float = 1.0, shape: tuple[int, ...] = ()):
        super().__init__(noise, nu, shape)

    def compare(self, seen: Contrast) -> Objective:
        g_data, g_noise = self._ratios(seen)
        surrogate, log_loss = ence_loss(g_data, g_noise)
        return Objective(surrogate, self._info(seen, log_loss))
