"""log Z between two bounds: chains from the noise to the model, chains from the model to the noise."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise
from unnorm.partition.annealed import Annealing, ais, reverse_ais
from unnorm.partition.path import Schedule, resampled
from unnorm.types import LogDensity, LogZ

__all__ = ["Bracket", "bennett", "bracket", "unseen"]

CROSSED = 4.0  # errors


class Bracket(NamedTuple):
    """log Z from below and from above.

    Attributes:
        lower: by chains from the noise: log Z or less, on average.
        upper: by chains from samples of the model: log Z or more, on average; less, if these are not the model's.
        log_z: by both together (`bennett`); between the two, and more exact than either. Where the mean log weight from
            the samples is below that from the noise, which cannot be, its error is at least half of that.
        unseen: the share of the backward weights above every forward one: mass that no chain from the noise found.
        from_data: whether the samples were given; else they are the forward chains' own, and cannot show what all of
            those missed.

    >>> low, high = LogZ(1.0, 0.1, 90.0, 0.2, "ais", 100), LogZ(1.2, 0.1, 90.0, 0.2, "reverse-ais", 100)
    >>> Bracket(low, high, low._replace(value=1.1, method="bracket"), 0.0, True).interval()
    (0.80..., 1.39...)
    """

    lower: LogZ
    upper: LogZ
    log_z: LogZ
    unseen: float
    from_data: bool

    def interval(self) -> tuple[float, float]:
        """From the lower end of the lower estimate's 95% interval to the upper end of the upper one's."""
        return min(self.lower.interval()[0], self.upper.interval()[0]), max(
            self.lower.interval()[1], self.upper.interval()[1]
        )

    @property
    def gap(self) -> float:
        """How far the upper estimate lies above the lower one."""
        return self.upper.value - self.lower.value


def bracket(
    model: LogDensity,
    noise: Noise,
    x: Tensor | None = None,
    *,
    n_chains: int = 512,
    betas: str | Sequence[float] = "adaptive",
    n_betas: int | None = None,
    transition: str = "hmc",
    path: str = "geometric",
    schedule: Schedule | None = None,
    forward: Annealing | None = None,
    settle: int = 0,
    generator: torch.Generator | None = None,
    progress: bool | None = False,
) -> Bracket:
    """Run `ais` and `reverse_ais` on one schedule, and join them.

    Args:
        model: log p~.
        noise: q.
        x: samples of the model, or held-out data, in the model's units; the first `n_chains` are used. When None the
            forward chains, chosen by their weights, stand for them.
        n_chains: in each direction.
        forward: a run of `ais`, without resampling, to use again; its schedule is used too.
        settle: transitions of the model that the samples make first, where they are not quite the model's.
        betas, n_betas, transition, path, schedule, generator, progress: as for `ais`.

    >>> from unnorm import Gaussian, Quadratic
    >>> x = torch.randn(128, 2, generator=torch.Generator().manual_seed(1))
    >>> found = bracket(Quadratic(2), Gaussian(2), x, n_chains=128, generator=torch.Generator().manual_seed(0))
    >>> round(found.lower.value, 4), round(found.log_z.value, 4), round(found.upper.value, 4)
    (1.8379, 1.8379, 1.8379)
    """
    if forward is None:
        forward = ais(
            model,
            noise,
            n_chains=n_chains,
            betas=betas,
            n_betas=n_betas,
            transition=transition,
            path=path,
            schedule=schedule,
            generator=generator,
            progress=progress,
        )
    if len(forward.log_w) != len(forward.x):
        raise InvalidValue("A bracket needs the weight of every chain: give a 'forward' run without 'resample'.")
    if x is None:
        begin = forward.x[resampled(forward.log_w, generator=generator)][:n_chains]
    else:
        begin = torch.as_tensor(x)[:n_chains].to(forward.x)
    backward = reverse_ais(
        model, noise, begin, schedule=forward.schedule, settle=settle, generator=generator, progress=progress
    )
    joined = bennett(forward.log_w, backward.log_w)
    if x is None:  # the chains' own ends are no news of what the chains know
        joined = joined._replace(stderr=max(joined.stderr, forward.log_z.stderr))
    joined = joined._replace(stderr=max(joined.stderr, _crossed(forward.log_w, backward.log_w) / 2))
    missed = unseen(backward.log_w, float(forward.log_w.max()))
    return Bracket(forward.log_z, backward.log_z, joined, missed, x is not None)


def _crossed(forward: Tensor, backward: Tensor) -> float:
    """By how much the mean log weight from the model is below that from the noise; 0 where chance explains it.

    Where the samples are the model's, the first is log Z or more and the second log Z or less (Jensen).
    """
    apart = float(forward.mean() - backward.mean())
    error = math.hypot(*(float(log_w.std()) / math.sqrt(len(log_w)) for log_w in (forward, backward)))
    return apart if apart > CROSSED * error else 0.0


def unseen(log_w: Tensor, largest: float) -> float:
    """The share of the model's own log-weights that lie above the largest one of those drawn from the noise.

    About so much of the model's mass no draw has found, and log Z from these draws is too small by it.

    >>> unseen(torch.tensor([0.0, 1.0, 5.0, 6.0]), largest=2.0)
    0.5
    """
    return float((log_w > largest).double().mean())


def bennett(forward: Tensor, backward: Tensor) -> LogZ:
    """log Z by the acceptance ratio method (Bennett 1976; Shirts and Chodera 2008), from weights of both directions.

    The forward and the backward chains are told apart by logistic regression on log_w with slope 1; log Z is its
    intercept. Every chain counts with a number between 0 and 1, so no weight can dominate (`khat` is NaN); `ess` is
    the number of chains where both directions meet.

    Args:
        forward: log-weights of chains from the noise, (n,).
        backward: log-weights of chains from the model, (m,), along the same path.

    >>> both = torch.full((100,), 2.0)
    >>> round(bennett(both, both).value, 6), bennett(both, both).ess
    (2.0, 200.0)
    """
    if len(forward) < 2 or len(backward) < 2:
        raise InvalidValue(f"Both directions need two weights. Got {len(forward)} and {len(backward)}.")
    forward, backward = forward.double(), backward.double()
    odds = math.log(len(backward) / len(forward))
    finite = torch.cat([forward, backward])
    finite = finite[torch.isfinite(finite)]
    if len(finite) == 0:
        return LogZ(math.nan, math.inf, 0.0, math.nan, "bracket", len(forward) + len(backward))
    low, high = float(finite.min()) - abs(odds) - 40, float(finite.max()) + abs(odds) + 40
    for _ in range(100):  # the excess of forward chains taken for backward ones falls with log Z
        middle = (low + high) / 2
        excess = torch.sigmoid(forward - middle + odds).sum() - torch.sigmoid(middle - backward - odds).sum()
        low, high = (middle, high) if excess > 0 else (low, middle)
    value = (low + high) / 2
    chance = torch.sigmoid(torch.cat([forward, backward]) - value + odds)
    overlap = float((chance * (1 - chance)).sum())
    if overlap <= 0:
        return LogZ(value, math.inf, 0.0, math.nan, "bracket", len(chance))
    variance = 1 / overlap - 1 / len(forward) - 1 / len(backward)
    return LogZ(value, math.sqrt(max(variance, 0.0)), 4 * overlap, math.nan, "bracket", len(chance))
