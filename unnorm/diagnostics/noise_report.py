"""Is this noise close enough, and can so many draws know it?"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from unnorm.diagnostics.trust import KHAT_LIMIT, LEAST_ESS, pareto_khat
from unnorm.errors import InvalidValue
from unnorm.randomness import derive_seed, stream
from unnorm.types import LogDensity, LogZ, effective_sample_size, log_density, log_mean_exp

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
        kl: an estimate of KL(data, noise) or KL(model, noise), in nats; of data alone, a bound from below.
        kl_stderr: its standard error.
        limit: the certified limit: the KL that so many draws can certify, log(n_noise / gamma).
        ess: effective share of the draws, in (0, 1].
        khat: Pareto shape of their weights.
        n: draws.
        n_noise: draws that the limit speaks of, with gamma.
        how: what the weights are.
        saturated: whether fewer than ten draws carry the weights of a model: such an estimate knows little, and without
            data or a log Z at most log n, however far the model is.
        bound: whether there was no model, and a critic that may be blind stands for it.
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
    bound: bool = False

    @property
    def certified(self) -> bool:
        """Whether so many draws can certify such a distance."""
        return self.kl <= self.limit and not self.saturated

    @property
    def good(self) -> bool:
        """Whether these draws can normalise the model; data alone cannot say so."""
        return not self.bound and self.certified and self.khat < KHAT_LIMIT and self.ess * self.n >= LEAST_ESS

    def lines(self) -> list[str]:
        """For a person."""
        certify = f"{self.n_noise:,.0f} draws certify up to log n = {self.limit:.1f}"
        if self.kl == math.inf:
            return ["noise: KL infinite: some rows lie where the noise has no density"]
        about = "at least" if self.bound else "about"
        far = f"noise: KL {about} {max(self.kl, 0.0):.2f} ± {self.kl_stderr:.2f} nats by {self.how}; {certify}"
        if self.bound and not self.certified:
            far = f"noise: KL at least {self.kl:.1f} ± {self.kl_stderr:.2g} nats by {self.how}, too much: {certify}"
        elif not self.certified:
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
        elif self.bound:
            lines.append(
                "noise: that is a bound from below, and the weights are a critic's: they show a noise that is far, "
                "and not that one is near."
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
    log_z: LogZ | None = None,
    n: int = 10_000,
    n_noise: float | None = None,
    gamma: float = 1.0,
    generator: torch.Generator | None = None,
) -> NoiseReport:
    """Weights, KL and certified limit of a noise against a model, or against data alone.

    Against a model log p~ the weights are p~/q; the KL is that of `data` under the model, where given, else of the
    model itself. Against data alone critics learn log p/q on half of the rows, and are held to the other half, where
    each gives a KL from below: boosted trees that tell rows from draws (by the bound of Donsker and Varadhan), and
    mixtures of 1 and 8 Gaussians (E log p^/q, which falls short of the KL by that of p^). The largest counts. All of
    them may be blind, in many dimensions above all.

    Args:
        noise: q.
        against: a model, or rows (n, *event).
        data: held-out rows for a model.
        log_z: of the model, where it is known better than by these draws.
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
    known = None if log_z is None else (log_z.value, log_z.stderr)
    if callable(against) and not isinstance(against, Tensor):
        log_w = (log_density(against, z) - noise.log_prob(z)).double()
        how, bound = "the model", False
        if data is not None:
            own = (log_density(against, data) - noise.log_prob(data)).double()
            how = f"the model at {len(data):,} rows"
        else:
            own = None
    else:
        critic = _best_critic(noise, against, z, generator)
        log_w, own, known = critic.at_draws, critic.at_rows, (critic.log_z, critic.log_z_stderr)
        how, bound = f"{critic.name} at {len(own):,} rows", True
    value, of_z = known or (float(log_mean_exp(log_w)), _relative_error(log_w))
    weights = torch.softmax(log_w, 0)
    ess = float(effective_sample_size(log_w)) / len(log_w)
    if own is None:
        kl = float((weights * (log_w - value)).nan_to_num().sum())
        stderr = math.sqrt(float((weights * (log_w - value - kl).square()).nan_to_num().sum()) / max(ess * n, 1.0))
    else:
        kl = float(own.mean()) - value
        stderr = math.hypot(float(own.std()) / math.sqrt(len(own)), of_z)
    saturated = known is None and ess * n < LEAST_DRAWS
    return NoiseReport(kl, stderr, limit, ess, pareto_khat(log_w), len(log_w), n_noise / gamma, how, saturated, bound)


class _Critic(NamedTuple):
    """log p/q as it was learned on half of the rows: at noise draws, at the other half, and its log normaliser."""

    name: str
    at_draws: Tensor
    at_rows: Tensor
    log_z: float
    log_z_stderr: float

    @property
    def bound(self) -> float:
        """The KL from below."""
        return float(self.at_rows.mean()) - self.log_z


def _best_critic(noise: Drawn, rows: Any, draws: Tensor, generator: torch.Generator | None) -> _Critic:
    """The one with the highest bound."""
    if len(rows) < 20:
        raise InvalidValue(f"A report on a noise against data needs at least 20 rows. Got {len(rows)}.")
    order = torch.randperm(len(rows), generator=stream(0, "order of the rows"))[: 2 * MOST_ROWS]
    picked = torch.as_tensor(rows[order]).double().cpu()
    if picked.shape[1:] != draws.shape[1:]:
        raise InvalidValue(
            f"The rows have events of shape {tuple(picked.shape[1:])}, the noise {tuple(draws.shape[1:])}."
        )
    if not bool(torch.isfinite(picked).all()):
        raise InvalidValue("The rows contain NaN or infinity.")
    train, test = picked[: len(picked) // 2], picked[len(picked) // 2 :]
    trees = _trees(train, noise.sample(len(train), generator=generator))
    at_draws, at_rows = trees(draws), trees(test)
    # Where no draw was near the rows their normaliser is anything: the bound is log n at most.
    log_z = max(float(log_mean_exp(at_draws)), float(at_rows.mean()) - math.log(len(draws)))
    critics = [_Critic("boosted trees", at_draws, at_rows, log_z, _relative_error(at_draws))]
    for count, name in ((1, "a Gaussian"), (8, "a mixture of 8 Gaussians")):
        if len(train) >= 20 * count:
            log_ratio = _mixture(train, count, noise, draws)
            critics.append(_Critic(name, log_ratio(draws), log_ratio(test), 0.0, 0.0))
    return max(critics, key=lambda critic: critic.bound)


def _relative_error(log_w: Tensor) -> float:
    """Of the mean weight."""
    ess = float(effective_sample_size(log_w))
    return math.sqrt(max(1 / ess - 1 / len(log_w), 0.0)) if ess > 0 else math.inf


def _trees(train: Tensor, z: Tensor) -> Callable[[Tensor], Tensor]:
    from sklearn.ensemble import HistGradientBoostingClassifier  # takes a second to import

    points = torch.cat([train, z.double().cpu()]).flatten(1).numpy()
    trees = HistGradientBoostingClassifier(
        max_iter=100, early_stopping=len(train) > 200, random_state=derive_seed(0, "noise report")
    )
    trees.fit(points, [1] * len(train) + [0] * len(z))
    return lambda x: torch.from_numpy(trees.decision_function(x.double().cpu().flatten(1).numpy()))


def _mixture(train: Tensor, count: int, noise: Drawn, like: Tensor) -> Callable[[Tensor], Tensor]:
    """log p^ - log q of a mixture of Gaussians, with full covariances where there are rows enough for them."""
    from sklearn.mixture import GaussianMixture

    flat = train.flatten(1)
    loc, scale = flat.mean(0), flat.std(0)
    scale = torch.where(scale > 0, scale, 1.0)
    size = flat.shape[1]
    full = size <= 100 and len(train) >= 10 * count * size
    mixture = GaussianMixture(
        count, covariance_type="full" if full else "diag", reg_covar=1e-3, random_state=derive_seed(0, "noise report")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one that has not converged bounds from below too
        mixture.fit(((flat - loc) / scale).numpy())

    def log_ratio(x: Tensor) -> Tensor:
        z = (x.double().cpu().flatten(1) - loc) / scale
        log_p = torch.from_numpy(mixture.score_samples(z.numpy())) - scale.log().sum()
        return log_p - noise.log_prob(x.to(like)).double().cpu()

    return log_ratio
