"""Samples of a density that say how they were made, and the chains that make them where no exact way exists."""

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.diagnostics import chain_ess
from unnorm.errors import ShrinkageWarning
from unnorm.noise.base import Noise
from unnorm.noise.gaussian import Gaussian
from unnorm.partition.annealed import ais, settled
from unnorm.partition.path import Schedule, plan
from unnorm.partition.routes import usual_path
from unnorm.samplers import HMC, run
from unnorm.samplers.base import frozen
from unnorm.types import LogDensity, effective_sample_size

__all__ = ["STARTS", "Draws", "by_annealing", "by_hmc"]

STARTS = 2000  # points from which by_hmc learns the target's shape
LEAST_CHAINS, MOST_CHAINS = 32, 1024
DRAWS, WARM_UP = 100, 100  # of each chain; R-hat of much shorter ones scatters
WIDEST = 512  # coordinates up to which the target's full covariance is used
TOGETHER, SETTLE = 512, 20  # annealed chains at once, and their transitions at the end


class Draws(NamedTuple):
    """Samples of a density, and how they were made.

    Attributes:
        x: (n, *event).
        method: "grid" (exact up to the grid's cells), "stepwise" (likewise, one coordinate after the other),
            "resampled" (draws of the noise, chosen by weight), "hmc", or "annealed" (chains from the noise, each for
            itself).
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

    @classmethod
    def resampled(cls, x: Tensor) -> "Draws":
        """Independent draws of the noise, chosen by weights that are light enough."""
        return cls(x, "resampled", math.nan, float(len(x)), math.nan)

    def line(self) -> str:
        """How they were made, for a person."""
        if self.method == "resampled":
            return f"{len(self.x)} independent draws of the noise, chosen by their weights"
        if self.method == "grid":
            return f"{len(self.x)} independent draws from a grid"
        if self.method == "stepwise":
            return f"{len(self.x)} independent draws, coordinate by coordinate"
        if self.method == "annealed":
            return (
                f"{len(self.x)} draws by chains annealed from the noise, not chosen by weight: by their weights worth "
                f"{self.ess:.0f}, acceptance {self.acceptance:.2f}"
            )
        return (
            f"{len(self.x)} draws by Hamiltonian Monte Carlo: R-hat {self.r_hat:.3f}, worth {self.ess:.0f} independent "
            f"ones, acceptance {self.acceptance:.2f}"
        )


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
