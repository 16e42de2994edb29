"""Is this noise close enough, and can so many draws know it?"""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from unnorm.diagnostics.verdicts import KHAT_LIMIT, LEAST_ESS, pareto_khat
from unnorm.errors import InvalidValue
from unnorm.types import LogDensity, effective_sample_size, log_density, log_mean_exp

__all__ = ["NoiseReport", "certified_limit", "noise_report"]

MOST_ROWS = 20_000
LEAST_DRAWS = 10  # that carry the weight


class Drawn(Protocol):
    """A noise, as far as it is needed here."""

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor: ...

    def log_prob(self, x: Tensor) -> Tensor: ...


class NoiseReport(NamedTuple):
    """How a noise stands to data or to a model.

    Attributes:
        kl: an estimate, from below, of KL(data, noise) or KL(model, noise), in nats.
        kl_stderr: its standard error.
        limit: the certified limit: the KL that so many draws can certify, log(n_noise / gamma).
        ess: effective share of the draws, in (0, 1].
        khat: Pareto shape of their weights.
        n: draws.
        n_noise: draws that the limit speaks of, with gamma.
        how: what the weights are.
        saturated: whether the KL is that of the model's own weights, and fewer than ten draws carry these: such an
            estimate is at most log n, however far the model is.
    """

    kl: float
    kl_stderr: float
    limit: float
    ess: float
    khat: float
    n: int
    n_noise: float
    how: str
    saturated: bool = False

    @property
    def certified(self) -> bool:
        """Whether so many draws can certify such a distance."""
        return self.kl <= self.limit and not self.saturated

    @property
    def good(self) -> bool:
        return self.certified and self.khat < KHAT_LIMIT and self.ess * self.n >= LEAST_ESS

    def lines(self) -> list[str]:
        """For a person."""
        certify = f"{self.n_noise:,.0f} draws certify up to log n = {self.limit:.1f}"
        far = f"noise: KL at least {max(self.kl, 0.0):.2f} ± {self.kl_stderr:.2f} nats by {self.how}; {certify}"
        if not self.certified:
            far = f"noise: KL perhaps {self.kl:.1f} nats by {self.how}, which nobody can know: {certify}"
        lines = [
            far,
            f"noise: effective share of {self.n:,} draws {self.ess:.2g}, Pareto k {self.khat:.2f}",
        ]
        if not self.certified:
            lines.append(
                "noise: too far for so many draws: a log u they track is an artefact. "
                "Use more draws, a closer noise, or bridges."
            )
        elif not self.good:
            lines.append(
                "noise: its weights rest on few draws: log Z needs annealed chains, training profits of bridges."
            )
        return lines


def certified_limit(n_noise: float, gamma: float = 1.0) -> float:
    """log(n_noise / gamma): what so many draws, remembered over 1/gamma steps, can certify of a KL.

    No estimate from n draws is above about log n with confidence (McAllester and Stratos 2020): whatever claims more is
    an artefact.

    >>> round(certified_limit(500, 0.1), 2)
    8.52
    """
    if not n_noise >= 1 or not 0 < gamma <= 1:
        raise InvalidValue(f"The limit needs n_noise of at least 1 and gamma in (0, 1]. Got {n_noise} and {gamma}.")
    return math.log(n_noise / gamma)


@torch.no_grad()
def noise_report(
    noise: Drawn,
    against: LogDensity | Any,
    *,
    data: Tensor | None = None,
    n: int = 10_000,
    n_noise: float | None = None,
    gamma: float = 1.0,
    generator: torch.Generator | None = None,
) -> NoiseReport:
    """Weights, KL and certified limit of a noise against a model, or against data alone.

    Against a model log p~ the weights are p~/q; the KL is that of `data` under the model, where given, else of the
    model itself. Against data alone a boosted-tree classifier learns log p/q on half of the rows, and is held to the
    other half: the Donsker-Varadhan bound, a KL from below.

    Args:
        noise: q.
        against: a model, or rows (n, *event).
        data: held-out rows for a model.
        n: draws to look at.
        n_noise: draws that the limit is for; those of a training step, or `n` when None.
        gamma: the tracker's rate, with a step's draws.
        generator: draws everything random.

    >>> from unnorm import Gaussian
    >>> x = 3 + torch.randn(4000, 1, generator=torch.Generator().manual_seed(0))
    >>> report = noise_report(Gaussian(1), x, generator=torch.Generator().manual_seed(1))     # the KL is 4.5
    >>> 3 < report.kl < 5, report.certified
    (True, True)
    """
    if n < 100:
        raise InvalidValue(f"A report on a noise needs at least 100 draws. Got {n}.")
    n_noise = n if n_noise is None else n_noise
    limit = certified_limit(n_noise, gamma)
    z = noise.sample(n, generator=generator)
    if callable(against) and not isinstance(against, Tensor):
        log_w = (log_density(against, z) - noise.log_prob(z)).double()
        how = "the model"
        if data is not None:
            own = (log_density(against, data) - noise.log_prob(data)).double()
            how = f"the model at {len(data):,} rows"
        else:
            own = None
    else:
        log_w, own = _by_trees(noise, against, n, generator)
        how = f"a classifier at {len(own):,} rows"
    log_z = log_mean_exp(log_w)
    weights = torch.softmax(log_w, 0)
    ess = float(effective_sample_size(log_w)) / len(log_w)
    if own is None:
        kl = float((weights * (log_w - log_z)).nan_to_num().sum())
        stderr = math.sqrt(float((weights * (log_w - log_z - kl).square()).nan_to_num().sum()) / max(ess * n, 1.0))
    else:
        kl = float(own.mean() - log_z)
        stderr = math.hypot(
            float(own.std()) / math.sqrt(len(own)),
            math.sqrt(max(1 / ess - 1, 0.0) / len(log_w)) if ess > 0 else math.inf,
        )
    saturated = own is None and ess * n < LEAST_DRAWS
    return NoiseReport(kl, stderr, limit, ess, pareto_khat(log_w), len(log_w), n_noise / gamma, how, saturated)


def _by_trees(noise: Drawn, rows: Any, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """log p/q as a classifier learned it on half of the rows: at noise draws, and at the other half."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # takes a second to import

    if len(rows) < 20:
        raise InvalidValue(f"A report on a noise against data needs at least 20 rows. Got {len(rows)}.")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: 2 * MOST_ROWS]
    picked = torch.as_tensor(rows[order]).double()
    half = len(picked) // 2
    train, test = picked[:half], picked[half:]
    z = noise.sample(half, generator=generator).double()
    points = torch.cat([train.cpu(), z.cpu()]).flatten(1).numpy()
    labels = [1] * len(train) + [0] * len(z)
    trees = HistGradientBoostingClassifier(max_iter=100, early_stopping=len(train) > 200, random_state=0)
    trees.fit(points, labels)

    def log_ratio(x: Tensor) -> Tensor:
        return torch.from_numpy(trees.decision_function(x.double().cpu().flatten(1).numpy()))

    return log_ratio(noise.sample(n, generator=generator)), log_ratio(test)
