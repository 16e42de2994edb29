"""The runs of the synthetic study that are trained side by side: their specs, their models, their numbers."""

import copy
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unnorm import loop, replicas
from unnorm.device import fabric_for
from unnorm.errors import HealthWarning
from unnorm.estimators import (
    ENCE,
    MECO,
    NCE,
    SNL,
    ContrastiveDivergence,
    Estimator,
    MaximumLikelihood,
    MCMCLikelihood,
    ScoreMatching,
    Telescope,
)
from unnorm.ledger import key_of
from unnorm.models import MLP, Bridged
from unnorm.noise import Noise
from unnorm.paper.toy2d.flow import SplineDensity
from unnorm.paper.toy2d.problem import DRAWS, START, STREAM, Measured, Problem, picture, plane, sampled
from unnorm.paper.toy2d.results import choose
from unnorm.paper.toy2d.spec import METHODS, Method, Size
from unnorm.replicas import Replicas, Stacked, StackedNoise
from unnorm.replicas.training import matmul_precision
from unnorm.training import Training
from unnorm.types import apart

__all__ = ["STACKED", "Run", "Stack", "stacks"]

ESTIMATORS: Mapping[str, Callable[..., Estimator]] = {
    "nce": NCE,
    "ence": ENCE,
    "snl": SNL,
    "meco": MECO,
    "telescope": Telescope,
    "mcmc": MCMCLikelihood,
    "cd": ContrastiveDivergence,
    "sm": lambda noise, **options: ScoreMatching(**options),
    "flow": lambda noise, **options: MaximumLikelihood(**options),
}
STACKED = tuple(name for name, method in METHODS.items() if method.estimator in ESTIMATORS)
OPTIMIZERS = {"sgd": ("sgd", "ngd"), "adam": ("adam", "ngd-adam"), "own": ("adam", "ngd-adam")}
USUAL_BETA = {"sgd": 1.0, "adam": 0.1, "own": 0.1}  # plain SGD, and Adam with torch's momentum of 0.9
PAPER_BETA, PAPER_GAMMA = 0.9, 0.1
CHUNK = {"cpu": 1024, "cuda": 8192}  # points of each replica evaluated at once
AHEAD = 32  # draws of each replica at once, on a GPU
TRIAL_SECONDS = {"cpu": 0.3, "cuda": 0.6}
TRIAL_RUNS = {"cpu": 4, "cuda": 120}
MOST_STEPS = 200_000


class Run(NamedTuple):
    """One cell: what is trained, on what, how."""

    method: str
    style: str
    data: str
    seed: int
    lr: float
    n_steps: int | None

    def key(self, common: Mapping[str, Any], steps: int) -> str:
        return key_of({**common, **self._asdict(), "steps": steps})


@dataclass(frozen=True)
class Stack:
    """Methods that are one computation: they differ in numbers only.

    Attributes:
        kin: the first of all methods of that kind, whether it is asked for or not: the name of the computation.
        methods: those that are asked for.
        style: of the optimizer.
        n_steps: Langevin steps, where there are any.
        data: the data sets.
    """

    kin: str
    methods: tuple[str, ...]
    style: str
    n_steps: int | None
    data: tuple[str, ...]

    @property
    def first(self) -> Method:
        return METHODS[self.methods[0]]

    @property
    def name(self) -> str:
        return f"{self.kin}, {self.style}" + (f", {self.n_steps} Langevin steps" if self.n_steps else "")

    def runs(self, size: Size) -> list[Run]:
        return [
            Run(method, self.style, data, seed, lr, self.n_steps)
            for method in self.methods
            for data in self.data
            for lr in size.rates[self.style]
            for seed in range(size.first_seed, size.first_seed + size.seeds)
        ]

    def parts(self, size: Size, most: int) -> list[list[Run]]:
        """The runs in parts of at most `most`, but all settings and seeds of a method on a data set in one."""
        places: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in self.runs(size):
            places[run.method, run.data].append(run)
        found: list[list[Run]] = []
        for own in places.values():
            if found and len(found[-1]) + len(own) <= most:
                found[-1].extend(own)
            else:
                found.append(own)
        return found

    def training(self, size: Size, steps: int) -> Training:
        plain, normalised = OPTIMIZERS[self.style]
        optimizer = normalised if self.first.normalised else plain
        return Training(steps=steps, batch=size.batch, optimizer=optimizer, schedule="cosine", log_every=10**9)

    def beta(self, run: Run) -> float:
        if self.first.normalised and self.style == "sgd":
            return 1.0
        usual = PAPER_BETA if self.first.estimator in ("meco", "telescope") else USUAL_BETA[self.style]
        own = METHODS[run.method].beta
        return usual if own is None else own

    def model(self, run: Run, size: Size) -> nn.Module:
        """As it is before training: the same network for all methods with one seed."""
        problem = _problem(run.data, run.seed, size)
        if self.first.estimator == "flow":
            return SplineDensity(problem)
        outputs = self.first.options.get("bridges")
        net = MLP(2, size.hidden, outputs=outputs, generator=problem.generator(START))
        return net if outputs is None else Bridged(problem.noise, net)

    def estimator(self, noise: Noise, gamma: Any = None, **options: Any) -> Estimator:
        options |= dict(self.first.options)
        if self.n_steps is not None:
            options["n_steps"] = self.n_steps
        if self.first.estimator == "meco" and "tracker" not in options:
            options["gamma"] = gamma
        return ESTIMATORS[self.first.estimator](noise, **options)

    def train(self, runs: Sequence[Run], size: Size, steps: int, device: str) -> Replicas:
        problems = [_problem(run.data, run.seed, size) for run in runs]
        own = list(dict.fromkeys((run.data, run.seed) for run in runs))
        rows = torch.stack([_problem(*place, size).train for place in own])
        gammas = [METHODS[run.method].gamma or PAPER_GAMMA for run in runs]
        noise = StackedNoise([problem.noise for problem in problems])
        gamma = torch.tensor(gammas, dtype=torch.float32, device=device)
        return replicas.fit(
            [self.model(run, size) for run in runs],
            self.estimator(noise, gamma, shape=(len(runs),)),
            rows,
            self.training(size, steps),
            sets=[own.index((run.data, run.seed)) for run in runs],
            lr=[run.lr for run in runs],
            beta=[self.beta(run) for run in runs],
            seeds=[problem.number(STREAM) for problem in problems],
            device=device,
            ahead=AHEAD if device == "cuda" else 1,
            matmul=size.matmul,
        )

    def step_seconds(self, size: Size, device: str) -> tuple[float, int]:
        """Seconds of a step for each of the replicas, by a short trial; and how many replicas."""
        runs = self.runs(size)[: TRIAL_RUNS[device]]  # as many for all: a wide stack would get more steps for its width
        long = min(TRIAL_SECONDS[device], len(runs) * size.seconds)  # no longer than what it is a trial of
        return _tried(lambda steps: self.train(runs, size, steps, device).seconds, long) / len(runs), len(runs)

    def single_seconds(self, size: Size, device: str) -> float:
        """Seconds of a step of one run alone, by `train`: the first with the least rate, which does not diverge."""
        run = min(self.runs(size), key=lambda run: run.lr)
        problem = _problem(run.data, run.seed, size)
        fabric = fabric_for("cuda" if device == "cuda" else "cpu")

        def seconds(steps: int) -> float:
            estimator = self.estimator(copy.deepcopy(problem.noise), METHODS[run.method].gamma)
            model = copy.deepcopy(self.model(run, size))
            began = time.perf_counter()
            with warnings.catch_warnings(), matmul_precision(size.matmul):
                warnings.simplefilter("ignore", HealthWarning)
                training = replace(self.training(size, steps), lr=run.lr, beta=self.beta(run), seed=run.seed)
                loop.train(model, estimator, problem.train, training, fabric=fabric, progress=False)
            return time.perf_counter() - began

        return _tried(seconds, TRIAL_SECONDS[device])

    def records(
        self,
        part: Sequence[Run],
        size: Size,
        steps: int,
        device: str,
        common: Mapping[str, Any],
        known: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[dict[str, Any]]:
        """Train the runs of a part and measure them; MMD, Frechet distance and pictures for each data set's best rate.

        Runs that are `known` already are not trained again, and have a say in which rate is best.
        """
        there = {facts["key"] for facts in known}
        runs = [run for run in part if run.key(common, steps) not in there]
        done = self.train(runs, size, steps, device)
        measured: dict[Run, dict[str, Any]] = {}
        grids: dict[Run, Tensor] = {}
        trained: dict[Run, tuple[Stacked, int]] = {}
        for place, (run, facts, grid) in enumerate(self._measured(runs, done, size)):
            facts |= {"key": run.key(common, steps), "steps": steps, "seconds": done.seconds / len(runs)}
            measured[run], grids[run], trained[run] = facts, grid, (done.model, place)
        for run in _candidates(measured, known):
            if measured[run]["status"] == "ok":
                problem, where = _problem(run.data, run.seed, size), plane(run.data, size.cells)
                model = trained[run][0].one(trained[run][1])
                if isinstance(model, SplineDensity):
                    samples = model.cpu().sample(size.points, problem.number(DRAWS))
                else:
                    samples = sampled(grids[run], where, size.points, problem.generator(DRAWS))
                measured[run] |= problem.discrepancy(samples.to(device))
                if run.seed == size.first_seed:
                    yield self._picture(run, trained[run], measured[run])
        yield from measured.values()

    @torch.no_grad()
    def _measured(
        self, runs: Sequence[Run], done: Replicas, size: Size
    ) -> Iterator[tuple[Run, dict[str, Any], Tensor]]:
        """Of each replica: its spec and numbers, and log p~ at the plane's cells."""
        problems = [_problem(run.data, run.seed, size) for run in runs]
        planes = [plane(run.data, size.cells) for run in runs]
        on_plane = everywhere(done.model, [where.centres for where in planes])
        validation = everywhere(done.model, [problem.validation for problem in problems])
        test = everywhere(done.model, [problem.test for problem in problems])
        for k, run in enumerate(runs):
            normalised = self.first.estimator == "flow"
            found = Measured.of(on_plane[k], validation[k], test[k], planes[k], normalised)
            fell = int(done.diverged_at[k])
            ok = fell == 0 and found.finite
            facts = {"kind": "run", **run._asdict(), "setting": None, "status": "ok" if ok else "diverged"}
            facts |= {"diverged_at": fell or None}
            facts |= found._asdict() if ok else dict.fromkeys(Measured._fields)
            yield run, facts | {"mmd": None, "frechet": None}, on_plane[k]

    def _picture(self, run: Run, trained: tuple[Stacked, int], facts: Mapping[str, Any]) -> dict[str, Any]:
        model = trained[0].one(trained[1])
        device = next(model.parameters()).device
        with torch.no_grad():
            drawn = picture(lambda x: model(x.to(device)) - facts["log_z"], run.data)
        return {"kind": "picture", "run": facts["key"], **run._asdict(), **drawn}


def _tried(seconds: Callable[[int], float], long: float) -> float:
    """Seconds of a step, from what a few steps and a `long` trial take: each the better of two, as chance only adds."""
    few = 6
    seconds(few)  # warms up
    base = min(seconds(few), seconds(few))
    more = max(few, min(100, round(long / (base / few))))
    longer = min(seconds(few + more), seconds(few + more))
    return max(longer - base, 0.05 * longer) / more


def _candidates(measured: Mapping[Run, Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> list[Run]:
    """The runs of the rate that validates best, of each method and data set."""
    best = choose([*known, *measured.values()])
    keys = {facts["key"] for chosen in best.values() for facts in chosen}
    return [run for run, facts in measured.items() if facts["key"] in keys]


def stacks(size: Size, data: tuple[str, ...], methods: Sequence[str], *, apart: bool) -> list[Stack]:
    """All stacks of the study; `apart` gives each data set its own, which processes can share out."""
    found: dict[Any, list[str]] = defaultdict(list)
    for name, method in METHODS.items():
        for style in method.styles:
            langevin: list[int | None] = [n for n in method.n_steps if n in size.n_steps]
            for n_steps in langevin or [None]:
                alike = (method.estimator, json.dumps(dict(method.options)), method.normalised, style, n_steps)
                found[alike].append(name)
    places = [(name,) for name in data] if apart else [data]
    return [
        Stack(names[0], chosen, style, n_steps, place)
        for (_, _, _, style, n_steps), names in found.items()
        if (chosen := tuple(name for name in names if name in methods))
        for place in places
    ]


@lru_cache(maxsize=512)
def _problem(data: str, seed: int, size: Size) -> Problem:
    return Problem(data, seed, size)


def everywhere(model: Stacked, points: Sequence[Tensor]) -> Tensor:
    """log p~ of each replica at points of its own, (R, n)."""
    parameter = next(model.parameters())
    chunk = CHUNK[parameter.device.type]
    found = []
    for start in range(0, len(points[0]), chunk):
        part = torch.cat([own[start : start + chunk] for own in points]).to(parameter)
        found.append(apart(model(part), model.shape).cpu())
    return torch.cat(found, -1)
