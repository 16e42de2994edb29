"""MECO: maximum likelihood by compositional optimization (Jiang et al., ICML 2023)."""

from dataclasses import replace

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.estimators.base import Contrast, Contrastive, across_processes, check_at_least
from unnorm.estimators.trackers import EMA, TRACKERS, Tracker
from unnorm.names import choose
from unnorm.noise.base import Noise
from unnorm.types import Objective, log_mean_exp

__all__ = ["MECO", "meco_surrogate"]


def meco_surrogate(log_p_data: Tensor, log_w: Tensor, log_u: Tensor) -> Tensor:
    """A scalar (per replica) whose gradient is the bracket of the paper's equation (v).

    grad = - mean_z grad log p~(z) + (1/u) mean_z' (p~(z')/q(z')) grad log p~(z'),

    with z from the data and z' from the noise. `log_u` is a constant here. After an update with rate gamma,
    exp(log_w - log_u) is at most n_noise / gamma: it cannot overflow.

    Args:
        log_p_data: log p~ at the data, (..., n).
        log_w: log p~ - log q at the noise, (..., n_noise).
        log_u: the tracked log u after this batch's update, (...).

    >>> meco_surrogate(torch.zeros(3, 5), torch.zeros(3, 7), torch.zeros(3))     # three replicas at once
    tensor([1., 1., 1.])
    """
    weights = torch.exp(log_w - log_u.detach().unsqueeze(-1))
    return weights.mean(-1) - log_p_data.mean(-1)


class MECO(Contrastive):
    """Algorithm 1 of the paper, less the optimizer: `unnorm.optim` has the `v` recursion.

    Minimises L = -E_data log p~ + log E_q[p~/q], whose inner expectation u is tracked across batches:
    u_t = (1 - gamma) u_{t-1} + gamma mean(p~/q), u_1 = the first batch's mean. One forward pass over data and noise.

    Args:
        noise: q.
        n_noise: noise draws per step; as many as there are data when None.
        gamma: the rate of the moving average, in (0, 1]; the paper's 0.1 when None; a tensor has one
            for each of the problems side by side.
        tracker: "ema" (the paper), "minibatch", "scent", "umax", or a Tracker.
        centred: subtract the batch's mean of log p~ - log q at the data from log p~, before u is tracked. Then u
            follows the gap between data and noise, and a constant that drifts in log p~ cannot outrun it; the paper's
            form (False) needs steps so small that log Z moves slowly. `log_u` has the constant added back.
        shape: of independent problems solved side by side, see `Contrastive`.

    In eval mode nothing is tracked: the batch's own mean weight normalises it, so that models can be compared on the
    same draws.

    `info` has `value` (the tracked negative log-likelihood), `log_u`, `gap` (how far this claims the data are from the
    noise: the mean of log p/q at the data), `lag` (log of the batch's mean weight over u, at most log 1/gamma), and
    `ess`, the effective share of the noise draws, in (0, 1].

    >>> from unnorm import Gaussian, Quadratic
    >>> q, model = Gaussian(2), Quadratic(2)
    >>> estimator = MECO(q)
    >>> objective = estimator(model, torch.zeros(8, 2), generator=torch.Generator().manual_seed(0))
    >>> round(objective.info["log_u"].item(), 4), round(model.log_z.item(), 4)   # q = p: no variance (Lemma 1)
    (1.8379, 1.8379)
    """

    log_u: Tensor
    started: Tensor

    def __init__(
        self,
        noise: Noise,
        *,
        n_noise: int | None = None,
        gamma: float | Tensor | None = None,
        tracker: str | Tracker = "ema",
        centred: bool = False,
        shape: tuple[int, ...] = (),
    ):
        super().__init__(noise, shape)
        check_at_least("MECO", "n_noise", n_noise, 1)
        self.n_noise, self.centred = n_noise, centred
        self.tracker = choose("tracker", tracker, TRACKERS)() if isinstance(tracker, str) else tracker
        self._now = self.tracker
        if gamma is not None:
            self.set_gamma(gamma)
            self.tracker = self._now
        self.register_buffer("log_u", torch.zeros(shape))
        self.register_buffer("started", torch.zeros(shape, dtype=torch.bool))

    def set_gamma(self, gamma: float | Tensor | None) -> None:
        if gamma is None:
            self._now = self.tracker
            return
        if not isinstance(self.tracker, EMA):
            raise InvalidValue(f"The 'gamma' of MECO belongs to the tracker 'ema'. Got {self.tracker}.")
        if isinstance(gamma, Tensor) and gamma.shape not in ((), self.shape):
            raise InvalidValue(f"The 'gamma' of MECO must have the shape {self.shape}. Got {tuple(gamma.shape)}.")
        self._now = replace(self.tracker, gamma=gamma)

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {**super().settings, "tracker": repr(self.tracker), "n_noise": self.n_noise, "centred": self.centred}

    def draws(self, batch: int) -> int:
        return self.n_noise or batch

    @property
    def effective_draws(self) -> float:
        if not isinstance(self._now, EMA):
            return 1.0
        gamma = self._now.gamma
        return 1 / (float(gamma.max()) if isinstance(gamma, Tensor) else gamma)

    def compare(self, seen: Contrast) -> Objective:
        constant = None
        if self.centred:
            constant = (seen.log_p_data - seen.log_q_data).mean(-1, keepdim=True)
            seen = Contrast(seen.log_p_data - constant, seen.log_q_data, seen.log_w - constant)
        log_mean_w = across_processes(log_mean_exp(seen.log_w.detach()))
        log_u = log_mean_w
        if self.training:
            log_u = torch.where(self.started, self._now(self.log_u, log_mean_w), log_mean_w)
        with torch.no_grad():
            value = seen.nll(log_u)
            if self.training:  # a non-finite batch raises in `step`; it must not spoil what was tracked before
                usable = torch.isfinite(value)
                self.log_u.copy_(torch.where(usable, log_u, self.log_u))
                self.started.logical_or_(usable)
        surrogate = meco_surrogate(seen.log_p_data, seen.log_w, log_u)
        lag = log_mean_w - log_u
        if constant is not None:
            log_u = log_u + constant.detach().squeeze(-1)
        return Objective(
            surrogate,
            {"value": value, "log_u": log_u.clone(), "gap": seen.gap(value), "lag": lag, "ess": seen.ess()},
        )
