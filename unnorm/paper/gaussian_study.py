"""The case study of the paper as a run: every method at every distance, the warnings, the couplings, the times."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unnorm import optim
from unnorm.errors import InvalidValue
from unnorm.estimators import ENCE, MECO, NCE, MCMCLikelihood, Telescope
from unnorm.loop import step
from unnorm.models import Bridged
from unnorm.noise import Gaussian
from unnorm.paper.gaussian_mean import (
    COUPLINGS,
    HEADS,
    MCMC,
    Bridges,
    Contrast,
    Method,
    Plain,
    Problem,
    Run,
    floor,
    linear_optimum,
    train,
)
from unnorm.randomness import stream

__all__ = ["METHODS", "PAPER_RATES", "PAPER_SECONDS", "Study", "quick"]

PAPER_RATES = (1e-4, 1e-3, 1e-2, 1e-1)
RATES = (*PAPER_RATES, 0.3, 1.0, 3.0, 10.0, 30.0)  # the paper's cannot bring NGD, lr long, to 16 in 100 steps
FIXED = (0.3, 1.0)  # rates at which the warnings are shown, besides the tuned one
LAG = 1.0  # nats: u is a third of the batch's mean weight
GAMMA = 0.1
PAPER_SECONDS = {"nce-sgd": 176, "nce-ngd": 181, "ence-ngd": 169, "mcmc": 1757, "meco": 168}  # its Table 1
FEW_BRIDGES = 16


@dataclass(frozen=True)
class Study:
    """What is run. The exact MLE of a seed is the mean of all of its rows.

    Errors are given as multiples of the MLE's standard error, 1 / sqrt(rows). The error that the MLE happens to have on
    the seeds' rows would be a random unit, 16% off by chance with 20 seeds; it has a row of its own.

    >>> Study(seeds=0)
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: The 'seeds' of a Study must be at least 2. Got 0.
    """

    distances: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    rows: int = 10_000
    batch: int = 1_000
    small: int = 100
    steps: int = 100
    seeds: int = 20
    bridge_rates: tuple[float, ...] = (0.1, 0.15, 0.3)
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 2), ("batch", 1), ("small", 1), ("steps", 1), ("seeds", 2), ("repeats", 1)):
            if not getattr(self, name) >= least:
                raise InvalidValue(f"The '{name}' of a Study must be at least {least}. Got {getattr(self, name)}.")
        if not 0 <= self.seed < 2**62:
            raise InvalidValue(f"The seed must be an integer from 0 to 2^62 - 1. Got {self.seed}.")

    def problem(self, distance: float) -> Problem:
        return Problem(distance, self.seeds, self.rows, self.seed)

    def bridges(self, distance: float) -> int:
        """Four for each unit of distance, 4 to 64."""
        return round(min(64, max(4, 4 * distance)))

    @property
    def size(self) -> int:
        """How many records there will be."""
        return len(METHODS) * len(self.distances) + len(HEADS) * len(COUPLINGS) + 2

    def records(self) -> Iterator[dict[str, Any]]:
        """All results: `kind` is "error", one for each method and distance; "coupling"; "floor"; or "time"."""
        for distance in self.distances:
            problem = self.problem(distance)
            for name in METHODS:
                yield self._errors(name, problem)
        far = self.problem(max(self.distances))
        for heads in HEADS:
            for coupling in COUPLINGS:
                yield self._coupling(heads, coupling, far)
        yield self._floor(far)
        yield {"kind": "time", "seconds": times(self.steps, self.batch, self.repeats)}

    def _errors(self, name: str, problem: Problem) -> dict[str, Any]:
        title, make = METHODS[name]
        facts: dict[str, Any] = {
            "kind": "error",
            "method": name,
            "title": title,
            "R": problem.distance,
            "seeds": self.seeds,
        }
        if make is None:
            rmse = _rmse(problem.mle, problem.distance)
            return {**facts, "mse": [rmse**2] * (self.steps + 1), "rmse": rmse, "ratio": _ratio(problem.mle, problem)}
        method = make(self, problem)
        rates = self.bridge_rates if isinstance(method, Bridges) else RATES
        batch = self.small if name == "meco-small" else self.batch
        run = train(method, problem, rates, steps=self.steps, batch=batch, seed=self.seed)
        best = tuned(run, problem.distance)
        error = run.theta[-1, best].double() - problem.distance
        rmse = _rmse(run.theta[-1, best], problem.distance)
        spread = float(error.square().std() / self.seeds**0.5 / (2 * rmse))
        facts |= {
            "batch": batch,
            "lr": rates[best],
            "mse": (run.theta[:, best].double() - problem.distance).square().mean(-1).tolist(),
            "rmse": rmse,
            "rmse_stderr": spread,
            "ratio": _ratio(run.theta[-1, best], problem),
            "seconds": run.seconds,
        }
        if isinstance(method, Bridges):
            facts["bridges"] = method.k
        if paper := [place for place, rate in enumerate(rates) if rate in PAPER_RATES]:
            own = paper[tuned(run._replace(theta=run.theta[:, paper]), problem.distance)]
            facts |= {"paper_lr": rates[own], "paper_ratio": _ratio(run.theta[-1, own], problem)}
        if name in ("meco", "meco-small"):
            assert isinstance(method, Plain)
            facts |= {"limit": method.limit, "warnings": []}
            for place in (best, *(rates.index(rate) for rate in FIXED)):
                ratio = _ratio(run.theta[-1, place], problem)
                here = run.theta[:, place], run.gap[:, place], run.lag[:, place]
                found = warnings_of(*here, distance=problem.distance, limit=method.limit)
                facts["warnings"].append({"lr": rates[place], "ratio": ratio, **found._asdict()})
        return facts

    def _coupling(self, heads: str, coupling: str, problem: Problem) -> dict[str, Any]:
        method = Bridges(FEW_BRIDGES, heads, coupling, GAMMA)
        run = train(method, problem, self.bridge_rates, steps=self.steps, batch=self.batch, seed=self.seed)
        best = tuned(run, problem.distance)
        ratio = _ratio(run.theta[-1, best], problem)
        facts = {"kind": "coupling", "heads": heads, "coupling": coupling, "bridges": FEW_BRIDGES}
        return {**facts, "R": problem.distance, "lr": self.bridge_rates[best], "ratio": ratio}

    def _floor(self, problem: Problem) -> dict[str, Any]:
        exact = {
            k: _ratio(linear_optimum(problem.rows, k), problem)
            for k in sorted({FEW_BRIDGES, self.bridges(problem.distance)})
        }
        return {"kind": "floor", "R": problem.distance, "formula": floor(problem.distance), "exact": exact}


def quick(seed: int = 0) -> Study:
    """A small study: the same shape, looser numbers."""
    return Study((1.0, 4.0, 16.0), rows=2_000, batch=300, small=50, seeds=6, bridge_rates=(0.15,), repeats=1, seed=seed)


Maker = Callable[[Study, Problem], Method]
METHODS: Mapping[str, tuple[str, Maker | None]] = {
    "nce-sgd": ("NCE (SGD)", lambda study, problem: Contrast(exponential=False, normalised=False)),
    "nce-ngd": ("NCE (NGD)", lambda study, problem: Contrast(exponential=False, normalised=True)),
    "ence-ngd": ("eNCE (NGD)", lambda study, problem: Contrast(exponential=True, normalised=True)),
    "mcmc": ("MCMC (20 Langevin steps)", lambda study, problem: MCMC()),
    "meco": ("MECO, as published", lambda study, problem: _standard(study, study.batch)),
    "meco-small": ("MECO, as published, small batch", lambda study, problem: _standard(study, study.small)),
    "meco-fitted": ("MECO, noise fitted, theta from 0", lambda study, problem: _fitted(study, problem, False)),
    "meco-fitted-start": (
        "MECO, noise fitted, theta from the noise",
        lambda study, problem: _fitted(study, problem, True),
    ),
    "bridges-linear": (
        "MECO, bridges, linear heads",
        lambda study, problem: Bridges(study.bridges(problem.distance), "linear", gamma=GAMMA),
    ),
    "bridges-quadratic": (
        "MECO, bridges, free quadratic heads",
        lambda study, problem: Bridges(study.bridges(problem.distance), "quadratic", gamma=GAMMA),
    ),
    "bridges-gaussian": (
        "MECO, bridges, heads of one Gaussian",
        lambda study, problem: Bridges(study.bridges(problem.distance), "gaussian", gamma=GAMMA),
    ),
    "mle": ("exact MLE", None),
}


def _standard(study: Study, n_noise: int) -> Plain:
    return Plain(torch.zeros(study.seeds), torch.ones(study.seeds), n_noise, GAMMA)


def _fitted(study: Study, problem: Problem, from_noise: bool) -> Plain:
    rows = problem.rows
    return Plain(rows.mean(-1), rows.std(-1), study.batch, GAMMA, from_noise=from_noise)


def _rmse(theta: Tensor, distance: float) -> float:
    return float((theta.double() - distance).square().mean().sqrt())


def _ratio(theta: Tensor, problem: Problem) -> float:
    """The root mean square error of `theta`, (seeds,), in units of the MLE's standard error, 1 / sqrt(n)."""
    return _rmse(theta, problem.distance) * math.sqrt(problem.n)


def tuned(run: Run, distance: float) -> int:
    """The learning rate with the least final mean squared error: chosen on the outcome, as the paper does."""
    final = (run.theta[-1].double() - distance).square().mean(-1)
    return int(final.nan_to_num(math.inf).argmin())


class Warned(NamedTuple):
    """Of how many seeds something happened, and the median step where it first did.

    `over`: the claimed gap exceeded the limit; `over_theta` is theta then. `behind`: the tracker's lag exceeded 1 nat.
    `ran`: theta ran away, |theta - R| > 2 R. `over_first` and `behind_first` count those that ran away later than that,
    `unwarned` those that ran away before either.
    """

    over: int
    over_at: float | None
    over_theta: float | None
    behind: int
    behind_at: float | None
    ran: int
    ran_at: float | None
    over_first: int
    behind_first: int
    unwarned: int


def warnings_of(theta: Tensor, gap: Tensor, lag: Tensor, *, distance: float, limit: float) -> Warned:
    """Compare the first step with a warning to the first that begins with |theta - R| > 2 R.

    Args:
        theta: at the start of each step and after the last, (steps + 1, seeds).
        gap, lag: read in each step, (steps, seeds).

    >>> theta, gap = torch.tensor([0.0, 1.0, 2.0, 9.0])[:, None], torch.tensor([0.0, 1.0, 8.0])[:, None]
    >>> found = warnings_of(theta, gap, 0 * gap, distance=2.0, limit=5.0)
    >>> found.over_at, found.ran_at, found.over_first, found.behind
    (3.0, 4.0, 1, 0)
    """
    never = len(theta) + 1
    ran = _first((theta - distance).abs() > 2 * distance, never)
    over, behind = _first(gap > limit, never), _first(lag > LAG, never)
    then = theta[(over - 1).clamp(max=len(theta) - 1), torch.arange(theta.shape[1])][over < never]
    return Warned(
        over=int((over < never).sum()),
        over_at=_median(over[over < never]),
        over_theta=_median(then),
        behind=int((behind < never).sum()),
        behind_at=_median(behind[behind < never]),
        ran=int((ran < never).sum()),
        ran_at=_median(ran[ran < never]),
        over_first=int(((over < ran) & (ran < never)).sum()),
        behind_first=int(((behind < ran) & (ran < never)).sum()),
        unwarned=int(((ran < never) & (ran <= over) & (ran <= behind)).sum()),
    )


def _first(happened: Tensor, never: int) -> Tensor:
    """The first step, counted from 1, of each seed."""
    steps = torch.arange(1, len(happened) + 1)[:, None]
    return torch.where(happened, steps, never).amin(0)


def _median(values: Tensor) -> float | None:
    return float(values.double().quantile(0.5)) if len(values) else None


class _Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.theta * x - x.square() / 2).squeeze(-1)


def times(steps: int, batch: int, repeats: int) -> dict[str, float]:
    """Seconds of `steps` of one replica at R = 1 with the library's classes, side by side; best of `repeats`."""
    noise, best = Gaussian(1), dict[str, float]()
    rows = 1 + torch.randn(10 * batch, 1, generator=stream(0, "rows"))
    for _ in range(repeats):
        for name, (model, estimator, optimizer) in _subjects(noise).items():
            generator = stream(0, "training")
            began = time.perf_counter()
            for _ in range(steps):
                x = rows[torch.randint(len(rows), (batch,), generator=generator)]
                step(model, estimator, optimizer, x, generator=generator)
            best[name] = min(best.get(name, math.inf), time.perf_counter() - began)
    return best


def _subjects(noise: Gaussian) -> dict[str, tuple[nn.Module, Any, torch.optim.Optimizer]]:
    def subject(model: nn.Module, estimator: nn.Module, optimizer: Callable[..., Any], lr: float) -> Any:
        return model, estimator, optimizer([*model.parameters(), *estimator.parameters()], lr)

    telescope = Telescope(noise, FEW_BRIDGES)
    return {
        "nce-sgd": subject(_Mean(), NCE(noise), optim.sgd, 0.1),
        "nce-ngd": subject(_Mean(), NCE(noise), optim.NGD, 0.1),
        "ence-ngd": subject(_Mean(), ENCE(noise), optim.NGD, 0.1),
        "mcmc": subject(_Mean(), MCMCLikelihood(noise), optim.sgd, 0.1),
        "meco": subject(_Mean(), MECO(noise), optim.sgd, 0.1),
        "bridges-linear": subject(Bridged(noise, nn.Linear(1, FEW_BRIDGES)), telescope, optim.sgd, 0.1),
    }
