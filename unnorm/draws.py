"""Samples of a density that say how they were made, and the chains that make them where no exact way exists."""

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.diagnostics import KHAT_LIMIT, LEAST_ESS, chain_ess, pareto_khat
from unnorm.errors import ShrinkageWarning
from unnorm.noise.base import Noise, event_of
from unnorm.noise.gaussian import Gaussian
from unnorm.partition.annealed import ais, settled
from unnorm.partition.importance import log_weights
from unnorm.partition.path import Schedule, plan
from unnorm.partition.routes import usual_path
from unnorm.samplers import HMC, run
from unnorm.samplers.base import frozen
from unnorm.types import LogDensity, effective_sample_size, log_mean_exp

__all__ = ["STARTS", "Draws", "by_annealing", "by_hmc", "by_weights"]

STARTS = 2000  # points from which by_hmc learns the target's shape
LEAST_CHAINS, MOST_CHAINS = 32, 1024
DRAWS, WARM_UP = 100, 100  # of each chain; R-hat of much shorter ones scatters
WIDEST = 512  # coordinates up to which the target's full covariance is used
TOGETHER, SETTLE = 512, 20  # annealed chains at once, and their transitions at the end
MOST_NUMBERS = 2**21  # numbers of noise draws held at once
PILOT, LONGEST_PILOT = 10_000, 500_000  # noise draws that show what the weights are like
PILOT_ESS = 2.0 * LEAST_ESS  # effective draws that a pilot should have
SPARE = 10  # effective draws for each that is chosen, so that choosing hardly favours the heavy ones
MOST_FOR_EACH = 500  # draws of the noise for one that is kept: chains are cheaper beyond


EXACT = {
    "resampled": "draws of the noise chosen by their weights",
    "rejection": "draws of the noise kept by rejection",
    "grid": "from a grid",
    "stepwise": "coordinate by coordinate",
}


class Draws(NamedTuple):
    """Samples of a density, and how they were made.

    Attributes:
        x: (n, *event).
        method: "grid" (exact up to the grid's cells), "stepwise" (likewise, one coordinate after the other),
            "rejection" (draws of the noise, each kept with a probability), "resampled" (draws of the noise, chosen by
            weight), "hmc", or "annealed" (chains from the noise, each for itself).
        r_hat: the worst R-hat of the chains' coordinates; NaN where there are no chains.
        ess: how many independent draws they are worth, in the worst coordinate; of a grid, n. Of annealed ones, by
            the weights that the chains would have to be chosen by, and are not.
        acceptance: the chains' mean acceptance; NaN where there are none.

    >>> Draws(torch.zeros(5, 2), "hmc", 1.01, 4.0, 0.8).line()
    '5 draws by Hamiltonian Monte Carlo: R-hat 1.010, worth 4 independent ones, acceptance 0.80'
    """

    x: Tensor
    method: str
    r_hat: float
    ess: float
    acceptance: float

    @classmethod
    def exact(cls, x: Tensor, method: str = "grid") -> "Draws":
        """Independent draws from a grid, or from one for each step."""
        return cls(x, method, math.nan, float(len(x)), math.nan)

    def how(self) -> str:
        """Return how they were made, without numbers."""
        if self.method in EXACT:
            return EXACT[self.method]
        return "annealed chains" if self.method == "annealed" else "Hamiltonian Monte Carlo"

    def line(self) -> str:
        """Return how they were made, for a person."""
        if self.method in EXACT:
            return f"{len(self.x)} independent draws, {EXACT[self.method]}"
        if self.method == "annealed":
            return (
                f"{len(self.x)} draws by chains annealed from the noise, not chosen by weight: by their weights worth "
                f"{self.ess:.0f}, acceptance {self.acceptance:.2f}"
            )
        return (
            f"{len(self.x)} draws by Hamiltonian Monte Carlo: R-hat {self.r_hat:.3f}, worth {self.ess:.0f} independent "
            f"ones, acceptance {self.acceptance:.2f}"
        )


def by_weights(
    model: LogDensity, noise: Noise, n: int, *, expected: float, generator: torch.Generator | None = None
) -> "Draws | Tensor | None":
    """Return `n` independent draws of the model, made of draws of the noise a chunk at a time.

    Each draw of the noise is kept with the probability of its weight over the largest weight. That is not known. It is
    taken to be the largest so far, and where a larger one comes, those kept before are thinned out (empirical supremum
    rejection sampling, Caffo, Booth and Davis 2002). Where a few heavy weights would make this wasteful, draws are
    chosen without replacement in proportion to their weights, one of ten effective ones.

    Args:
        model: log p~.
        noise: q.
        n: how many draws.
        expected: the share of the noise's draws that are effective, as far as is known.
        generator: draws everything random.

    Returns:
        The draws; or, where the weights do not allow that, points near the model to start chains from, chosen by their
        weights; None where the weights do not even allow that.
    """
    size = max(1, MOST_NUMBERS // math.prod(event_of(noise)))
    pilot = int(min(max(PILOT, PILOT_ESS / max(expected, 1e-12)), LONGEST_PILOT))
    parts = [log_weights(model, noise, min(size, pilot - at), generator=generator) for at in range(0, pilot, size)]
    z, log_w = (torch.cat(own) for own in zip(*parts, strict=True))
    ess, top = float(effective_sample_size(log_w)), float(log_w.max())
    if not ess >= LEAST_ESS:
        return None
    by_choice = SPARE * len(log_w) / ess
    by_rejection = math.exp(top - float(log_mean_exp(log_w.double())))
    if pareto_khat(log_w) >= KHAT_LIMIT or min(by_choice, by_rejection) > MOST_FOR_EACH:
        return z[torch.multinomial(torch.softmax(log_w, 0), STARTS, replacement=True, generator=generator)]
    if by_rejection <= by_choice:
        return Draws.exact(_rejected(model, noise, n, z, log_w, by_rejection, size, generator), "rejection")
    return Draws.exact(_chosen(model, noise, n, z, log_w, size, generator), "resampled")


def _rejected(
    model: LogDensity,
    noise: Noise,
    n: int,
    z: Tensor,
    log_w: Tensor,
    each: float,
    size: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Keep draws with the probability of their weight over the largest so far, until there are `n`."""
    top, kept = float(log_w.max()), z[:0]
    while True:
        highest = max(top, float(log_w.max()))
        if highest > top:
            kept = kept[_chance(len(kept), kept, generator) < math.exp(top - highest)]
            top = highest
        kept = torch.cat([kept, z[_chance(len(z), log_w, generator) < (log_w - top).exp()]])
        if len(kept) >= n:
            return kept[:n]
        more = int(min(size, max(PILOT / 10, 1.1 * each * (n - len(kept)))))
        z, log_w = log_weights(model, noise, more, generator=generator)


def _chosen(
    model: LogDensity,
    noise: Noise,
    n: int,
    z: Tensor,
    log_w: Tensor,
    size: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose draws by their weights, one of ten effective ones of each chunk, until there are `n`."""
    kept = z[:0]
    while True:
        count = min(max(1, int(effective_sample_size(log_w)) // SPARE), n - len(kept))
        picked = torch.multinomial(torch.softmax(log_w, 0), count, generator=generator)
        kept = torch.cat([kept, z[picked]])
        if len(kept) >= n:
            return kept
        z, log_w = log_weights(model, noise, min(size, max(len(log_w), PILOT)), generator=generator)


def _chance(n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(n, generator=generator, device=like.device, dtype=like.dtype)


def by_hmc(log_density: LogDensity, near: Tensor, n: int, *, generator: torch.Generator | None = None) -> Draws:
    """`n` draws by many chains of HMC, tuned together, in coordinates where the target is nearly round.

    Args:
        log_density: log p~.
        near: points roughly distributed like the target: the chains start at the first of them, and their
            covariance makes the coordinates.
        n: how many draws.
        generator: draws everything random.

    >>> wide = torch.tensor([100.0, 1.0, 0.01])
    >>> near = wide * torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> found = by_hmc(lambda x: -(x / wide).square().sum(-1) / 2, near, 300, generator=torch.Generator())
    >>> found.x.shape, found.r_hat < 1.05
    (torch.Size([300, 3]), True)
    """
    n_chains = min(max(LEAST_CHAINS, math.ceil(n / DRAWS)), MOST_CHAINS, len(near))
    n_draws = max(DRAWS, math.ceil(n / n_chains))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkageWarning)  # only the coordinates' shape is at stake
        flat = near.flatten(1)
        shape = Gaussian.fit(flat, "full" if flat.shape[1] <= WIDEST else "diagonal").to(flat)
    factor = shape.scale_tril if shape.covariance == "full" else shape.scale.diag()

    def unrolled(y: Tensor) -> Tensor:
        return (y @ factor.mT + shape.loc).reshape(len(y), *near.shape[1:])

    start = torch.linalg.solve_triangular(factor, (flat[:n_chains] - shape.loc).mT, upper=False).mT
    with frozen(log_density) as target:
        chain = run(HMC(), lambda y: target(unrolled(y)), start, n_draws, warmup=WARM_UP, generator=generator)
    points = chain.samples.flatten(0, 1)[-n:]  # the last ones, all chains in turn: R-hat may need more than are wanted
    # Chains that turn over each step know the mean too well: the squares must be known as well.
    squares = (chain.samples - chain.samples.mean((0, 1))).square()
    ess = min(float(chain.ess.min()), float(chain_ess(squares, "mean").min()))
    ess = min(ess * len(points) / chain.log_p.numel(), float(n))
    return Draws(unrolled(points), "hmc", float(chain.r_hat.max()), ess, float(chain.acceptance.mean()))


def by_annealing(
    model: LogDensity,
    noise: Noise,
    n: int,
    *,
    schedule: Schedule | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = False,
) -> Draws:
    """`n` draws by as many chains, each on its own from the noise to the model, then a few transitions there.

    A bridged model is reached over its waymarks. The draws are independent; those of a chain that arrived too fast are
    not quite the model's, which the spread of the weights tells.

    Args:
        model: log p~.
        noise: q.
        n: how many draws.
        schedule: from `plan`; a pilot finds one when None.
        generator: draws everything random.
        progress: a bar; None shows it on a terminal.

    >>> from unnorm import Quadratic
    >>> found = by_annealing(Quadratic(2), Gaussian(2), 50, generator=torch.Generator().manual_seed(0))
    >>> found.x.shape, found.method
    (torch.Size([50, 2]), 'annealed')
    """
    points, log_ws, accepted = list[Tensor](), list[Tensor](), list[Tensor]()
    with frozen(model) as target, torch.no_grad():
        if schedule is None:
            schedule = plan(target, noise, path=usual_path(target, noise), generator=generator)
        for begin in range(0, n, TOGETHER):
            some = max(2, min(TOGETHER, n - begin))
            found = ais(target, noise, n_chains=some, schedule=schedule, generator=generator, progress=progress)
            ends = settled(found, target, noise, SETTLE, generator=generator)
            for kept, new in ((points, ends.x), (log_ws, found.log_w), (accepted, ends.acceptance)):
                kept.append(new)
    log_w, acceptance = torch.cat(log_ws)[:n], float(torch.cat(accepted)[:n].mean())
    return Draws(torch.cat(points)[:n], "annealed", math.nan, float(effective_sample_size(log_w)), acceptance)
