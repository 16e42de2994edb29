"""What log Z needs to know of a stream of weights, in constant memory."""

import math

import torch
from torch import Tensor

from unnorm.diagnostics import smooth_tail, tail_length
from unnorm.types import LogZ

__all__ = ["RAREST", "Weights"]

RAREST = 32


class Weights:
    """Sums of weights and of their squares, and the largest weights, for at most `n` of them.

    Args:
        n: how many weights will be added at most; the memory grows with its square root.

    >>> weights = Weights(4)
    >>> weights.add(torch.tensor([1.0, 2.0]).log()); weights.add(torch.tensor([3.0, 4.0]).log())
    >>> found = weights.log_z("importance")
    >>> round(math.exp(found.value), 4), round(found.ess, 4)      # the mean; 10^2 / 30
    (2.5, 3.3333)
    """

    def __init__(self, n: int):
        self.n = self.positive = 0
        self._most = tail_length(n) + 1
        self._log_sum = self._log_squares = torch.tensor(-math.inf, dtype=torch.float64)
        self._top = torch.empty(0, dtype=torch.float64)
        self._rare = torch.empty(2, 0, dtype=torch.float64)

    def add(self, log_w: Tensor, log_q: Tensor | None = None) -> None:
        """Take in a batch of log-weights, (n,), and the log density of the draws under the noise where it is known."""
        log_w = log_w.detach().double()
        if log_q is not None:
            rare = torch.cat([self._rare.to(log_w), torch.stack([log_q.detach().to(log_w), log_w])], -1)
            self._rare = rare[:, rare[0].topk(min(RAREST, rare.shape[1]), largest=False).indices]
        self._log_sum = torch.logaddexp(self._log_sum.to(log_w), torch.logsumexp(log_w, 0))
        self._log_squares = torch.logaddexp(self._log_squares.to(log_w), torch.logsumexp(2 * log_w, 0))
        joined = torch.cat([self._top.to(log_w), log_w])
        self._top = joined.topk(min(len(joined), self._most)).values
        self.n += len(log_w)
        self.positive += int((log_w != -math.inf).sum())

    @property
    def largest(self) -> float:
        """The logarithm of the largest weight."""
        return float(self._top[0]) if len(self._top) else -math.inf

    def mass_above(self, log_w: float, log_z: float) -> float:
        """The share of a mass e^log_z that draws with larger weights than e^log_w stand for; of the largest at least.

        >>> weights = Weights(4)
        >>> weights.add(torch.tensor([1.0, 2.0, 3.0, 4.0]).log())
        >>> round(weights.mass_above(math.log(3.5), math.log(2.5)), 4)      # 4 of 10
        0.4
        """
        above = self._top[self._top > log_w]
        return math.exp(min(float(torch.logsumexp(above, 0)) - math.log(self.n) - log_z, 50.0)) if len(above) else 0.0

    def share_of_rarest(self) -> float:
        """The share of all weight that stands on the 32 draws with the least density under the noise.

        Where the model's tails are heavier than the noise's this is large, and about as much lies beyond all draws;
        the largest weights may look harmless still.
        """
        return math.exp(float(torch.logsumexp(self._rare[1].to(self._log_sum), 0) - self._log_sum))

    def log_z(self, method: str, *, smooth: bool = False, sign: int = 1) -> LogZ:
        """log of the weights' mean, its error by the delta method, stderr = sqrt((n / ESS - 1) / (n - 1)).

        Args:
            method: the name it is to have.
            smooth: put the quantiles of the fitted Pareto distribution in the place of the largest weights.
            sign: -1 where the weights estimate 1/Z.
        """
        top = self._top[: min(self.positive, tail_length(self.positive) + 1)]
        smoothed, khat = smooth_tail(top, self.positive)
        log_sum, log_squares = self._log_sum, self._log_squares
        if smooth and math.isfinite(khat):
            log_sum = _exchange(log_sum, top, smoothed)
            log_squares = _exchange(log_squares, 2 * top, 2 * smoothed)
        ess = math.exp(float(2 * log_sum - log_squares)) if math.isfinite(float(log_sum)) else 0.0
        stderr = math.sqrt(max(self.n / ess - 1, 0.0) / max(self.n - 1, 1)) if ess > 0 else math.inf
        return LogZ(sign * (float(log_sum) - math.log(self.n)), stderr, ess, khat, method, self.n)


def _exchange(log_total: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """log(total - sum exp(old) + sum exp(new)), where `old` is part of the total."""
    share = torch.exp(torch.logsumexp(old.to(log_total), 0) - log_total).clamp(max=1)
    rest = log_total + torch.log1p(-share)
    return torch.logaddexp(rest, torch.logsumexp(new.to(log_total), 0))
