"""One run of the study of images: trained for its seconds, normalised from both ends, its samples judged."""

import math
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.bridges import respaced
from unnorm.data.transforms import Transform
from unnorm.errors import HealthWarning, InvalidValue, NonFiniteObjective
from unnorm.estimators import MECO, StepwiseTelescope, Telescope, even_alphas
from unnorm.estimators.base import Estimator
from unnorm.loop import train
from unnorm.metrics import BitsPerDim, bits_per_dim
from unnorm.models import Stepwise
from unnorm.paper.mnist.judge import Judge, nearest
from unnorm.paper.mnist.problem import Problem
from unnorm.paper.mnist.spec import METHODS, Row, Size
from unnorm.partition import Annealing, Schedule, ais, bracket, plan
from unnorm.partition.annealed import settled
from unnorm.partition.routes import usual_path
from unnorm.plots import sheet
from unnorm.randomness import stream
from unnorm.samplers import HMC
from unnorm.samplers.base import frozen
from unnorm.samplers.run import run as run_chains
from unnorm.training import Training
from unnorm.types import History, effective_sample_size

__all__ = ["bits_of_noise", "forget", "learnt", "outcome", "spacing", "step_seconds"]

LEAST_BRIDGES = 2
EACH, TIMES = 20, 4  # steps in each part of a trial of the step's time, the first of which does not count
POINTS = 60  # of a curve
LOOKS, FEW_LOOKS = 20, 8  # at validation images; where each costs a quadrature for every pixel
MEMORISED = 20  # samples that are shown beside their nearest training images
LOST_STEPS = 200  # of chains on a model to which no path leads


def bits_of_noise(problem: Problem, noise: str) -> dict[str, float]:
    """Bits per dimension of the test images under a noise with a density, alone."""
    where = problem.where(noise)
    alone = problem.training_noise(noise) if noise == "smoothed" else where.noise
    found = _scored(problem, alone, where.transform)
    return {"bits": found.value, "se": found.stderr}


def _scored(problem: Problem, log_prob: nn.Module, transform: Transform) -> BitsPerDim:
    images = problem.data.test.images.to(problem.fabric.device)
    return bits_per_dim(
        log_prob, images, transform, log_z=None, chunk=500, generator=_own(problem, 0, "places in the cells")
    )


def spacing(problem: Problem, noise: str) -> dict[str, Any]:
    """Waymarks that lie as far from each other as wanted, by the gaps that short trainings show."""
    size, where, row = problem.size, problem.where(noise), Row("bridges-meco", noise)
    alphas = tuple(alpha**2 for alpha in even_alphas(size.even))  # what is sharp shows near the data alone
    began, trials = time.perf_counter(), []
    for _ in range(size.rounds):
        model, estimator = problem.model(row, len(alphas) - 1, 0), Telescope(where.noise, alphas)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)  # gaps too large are what it is here to find
            _fit(problem, row, model, estimator, size.trial, 0, None)
        with torch.no_grad():
            gaps = estimator.gaps(
                model, problem.held_out(row, size.judged), generator=_own(problem, 0, "gaps")
            ).tolist()
        trials.append({"alphas": alphas, "gaps": gaps})
        alphas = respaced(alphas, gaps, size.wanted, LEAST_BRIDGES)
    return {"alphas": alphas, "trials": trials, "seconds": time.perf_counter() - began}


def step_seconds(problem: Problem, row: Row, alphas: Sequence[float]) -> float:
    """Of one step of training, after the first ones; of three parts the fastest, which had the machine for itself."""
    model = problem.model(row, len(alphas) - 1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)
        history = _fit(problem, row, model, _estimator(problem, row, alphas), EACH * TIMES, 0, None, looks=1)
    seconds = dict(zip(history["step"], history["seconds"], strict=True))
    ends = [seconds[EACH * part] for part in range(1, TIMES + 1)]
    return min(later - sooner for sooner, later in pairwise(ends)) / EACH


def outcome(
    problem: Problem, row: Row, seed: int, steps: int, alphas: Sequence[float], judge: Judge, folder: Path, more: bool
) -> dict[str, Any]:
    """Train, normalise, sample, judge; `more` also shows how log Z converges with the temperatures.

    A run that was killed while training goes on from its checkpoint. Sheets of samples are written into the folder.
    """
    facts: dict[str, Any] = {"bridges": _bridges(problem, row, alphas), "steps": steps}
    try:
        model, history = learnt(problem, row, seed, steps, alphas, folder / f"run-{row.name}-{seed}")
    except NonFiniteObjective as problem_found:
        return facts | {"status": "diverged", "why": str(problem_found)}
    facts |= {
        "kept_step": _kept(history, steps),
        "warnings": list(history.warnings),
        "seconds": float(history["seconds"][-1]),
        **_curve(history),
    }
    if isinstance(model, Stepwise):
        found, chains = _by_steps(problem, row, model, seed, more)
    else:
        found, chains = _normalised(problem, row, model, seed, more)
    facts |= found
    name = f"samples-{row.name}-{seed}.png"
    images = problem.where_of(row).transform.inverse(chains.double()).cpu()
    sheet(folder / name, images[:100], levels=problem.data.levels)
    facts |= {"sheet": name, **judge.verdict(images)._asdict()}
    near = nearest(images, problem.data.train.images, problem.data.levels)
    if more:
        pairs = torch.cat([images[:MEMORISED], near.images[:MEMORISED].to(images)])
        sheet(folder / f"nearest-{row.name}.png", pairs, columns=MEMORISED, levels=problem.data.levels)
        facts["nearest_sheet"] = f"nearest-{row.name}.png"
    facts["nearest"] = float(near.distance.median())
    return facts


def learnt(
    problem: Problem, row: Row, seed: int, steps: int, alphas: Sequence[float], folder: Path | None = None
) -> tuple[nn.Module, History]:
    """A model that was trained as the study does, and its training."""
    model = problem.model(row, len(alphas) - 1, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)  # the history has them
        return model, _fit(problem, row, model, _estimator(problem, row, alphas), steps, seed, folder)


def forget(folder: Path, row: Row, seed: int) -> None:
    """The checkpoint of a run whose line is written: nothing else is needed from there on."""
    kept = folder / f"run-{row.name}-{seed}"
    for left in kept.glob("*"):
        left.unlink()
    if kept.exists():
        kept.rmdir()


def _bridges(problem: Problem, row: Row, alphas: Sequence[float]) -> int:
    return {"direct": 0, "waymarks": len(alphas) - 1, "pixels": problem.dims}[METHODS[row.method].way]


def _estimator(problem: Problem, row: Row, alphas: Sequence[float]) -> Estimator:
    method = METHODS[row.method]
    if method.way == "pixels":
        return StepwiseTelescope(problem.where_of(row).noise, method.estimator, draws=problem.size.draws)
    if method.way == "waymarks":
        return Telescope(problem.where_of(row).noise, alphas, method.estimator)
    n_noise, make = problem.size.n_noise, method.estimator
    options: Any = {"n_noise": n_noise} if make is MECO else {"nu": n_noise / problem.size.batch}
    return make(problem.training_noise(row.noise), **options)


def _fit(
    problem: Problem,
    row: Row,
    model: nn.Module,
    estimator: Estimator,
    steps: int,
    seed: int,
    folder: Path | None,
    looks: int | None = None,
) -> History:
    method = METHODS[row.method]
    looks = looks or (FEW_LOOKS if method.way == "pixels" else LOOKS)
    training = Training(
        steps=steps,
        batch=problem.size.few if method.way == "pixels" else problem.size.batch,
        lr=_rate(problem.size, row),
        beta=method.beta,
        optimizer=method.optimizer,
        schedule="cosine",
        iterate="best-ema" if method.bridged else "ema",  # without bridges nothing is to hide how a run ends
        validate_every=max(1, steps // looks),
        log_every=max(1, min(EACH, steps // TIMES)),
        checkpoint_every=2000,
        seed=seed,
    )
    size, where = problem.size, problem.where_of(row)
    rows = where.rows(problem.data.train.images, problem.fabric.device, seed, size.shift)
    resume = folder is not None and (folder / "checkpoint.safetensors").exists()
    return train(
        model,
        estimator,
        rows,
        training,
        validation=problem.held_out(row, size.judged),
        fabric=problem.fabric,
        folder=folder,
        resume=resume,
        progress=False,
    )


def _rate(size: Size, row: Row) -> float:
    method = METHODS[row.method]
    if method.way == "pixels":
        return size.pixel_lr[row.noise]
    if method.way == "waymarks":
        return size.waymark_lr
    assert method.lr is not None
    return method.lr


def _kept(history: History, steps: int) -> int:
    """At which step validation saw the average that was kept; the last where it had no say."""
    best, kept = math.inf, steps
    for record in history.records:
        if record.get("best", math.inf) < best:
            best, kept = record["best"], int(record["step"])
    return kept


def _curve(history: History) -> dict[str, Any]:
    """Training in a few points: the step, the value (the claimed nats), the largest gap, and the worst share."""
    every = max(1, len(history) // POINTS)
    found = {name: history[name][::every] for name in ("step", "value", "gap", "ess")}
    found |= {"validated": [one["step"] for one in history.records if "validation" in one]}
    found |= {"validation": history["validation"]}
    return {"curve": {name: [round(float(value), 4) for value in values] for name, values in found.items() if values}}


def _own(problem: Problem, seed: int, purpose: str = "log Z and samples") -> torch.Generator:
    return stream(seed, purpose, device=problem.fabric.device)


def _normalised(problem: Problem, row: Row, model: nn.Module, seed: int, more: bool) -> tuple[dict[str, Any], Tensor]:
    """Bits per dimension with both sides of log Z, and chains that ended at the model."""
    size, where = problem.size, problem.where_of(row)
    generator, began = _own(problem, seed), time.perf_counter()
    path = usual_path(model, where.noise)
    try:
        with frozen(model) as target, torch.no_grad():
            schedule = plan(target, where.noise, path=path, n_chains=size.pilot, most=size.stages, generator=generator)
        piloted = time.perf_counter() - began
        held_out, sides = problem.held_out(row, size.chains), []
        for n in size.betas if more else size.betas[-1:]:
            forward, found = _sides(model, problem, row, schedule.spread(n), held_out, generator)
            sides.append(found)
    except InvalidValue as refusal:
        lost = {"status": "diverged", "why": f"Annealed chains do not reach the model: {refusal}"}
        return lost, _lost_chains(model, where.noise.sample(size.chains, generator=generator), generator)
    scored = _scored(problem, model, where.transform)
    nats = problem.dims * math.log(2)
    claimed = sides[-1]
    facts = {"status": "ok", "se": scored.stderr, "raw_bits": scored.value, "pilot_seconds": piloted, "sides": sides}
    bits = {side: scored.value + claimed[side] / nats for side in ("lower", "joined", "upper")}
    facts |= bits
    if not all(math.isfinite(side) for side in bits.values()):
        facts |= {"status": "diverged", "why": "log Z is not finite."}
    ends = settled(forward, model, where.noise, size.settle, generator=generator)  # not chosen: none is there twice
    return facts | {"length": schedule.length, "path": schedule.path}, ends.x


def _by_steps(problem: Problem, row: Row, model: Stepwise, seed: int, more: bool) -> tuple[dict[str, Any], Tensor]:
    """Bits per dimension of a model that is normalised step by step, with two sides for its log Z, and samples.

    log Z = 0 is doubted in two ways: by the quadrature's error at validation images, and by weighted draws. What is
    claimed holds both.
    """
    size, nats = problem.size, problem.dims * math.log(2)
    held_out, sides = problem.held_out(row, size.chains), list[dict[str, Any]]()
    for nodes in size.nodes if more else size.nodes[-1:]:
        began = time.perf_counter()
        error = float(model.error(held_out, nodes).double().abs().mean())
        seconds = time.perf_counter() - began
        sides.append({"nodes": nodes, "lower": -error, "joined": 0.0, "upper": error, "seconds": seconds})
    model.nodes, began = size.nodes[-1], time.perf_counter()
    scored = _scored(problem, model, problem.where_of(row).transform)
    facts: dict[str, Any] = {"status": "ok", "se": scored.stderr, "raw_bits": scored.value, "sides": sides}
    facts["scored_seconds"], began = time.perf_counter() - began, time.perf_counter()
    samples, log_w = model.weighted(size.chains, generator=_own(problem, seed))
    facts["sampled_seconds"] = time.perf_counter() - began
    sides.append({"draws": len(log_w), **_drawn(log_w), "seconds": facts["sampled_seconds"]})
    low, high = (pick(one[side] for one in sides[-2:]) for side, pick in (("lower", min), ("upper", max)))
    facts |= {side: scored.value + log_z / nats for side, log_z in (("lower", low), ("joined", 0.0), ("upper", high))}
    if not math.isfinite(scored.value):
        facts |= {"status": "diverged", "why": "Test images have no density."}
    elif not all(math.isfinite(one[side]) for one in sides[-2:] for side in ("lower", "upper")):
        facts |= {"status": "diverged", "why": "Some of its own draws have no density."}
    return facts, samples


def _drawn(log_w: Tensor) -> dict[str, float]:
    """Both sides of log Z by log p - log r of draws from r: r's mean of it is below, p's, by weights, is above.

    >>> _drawn(torch.zeros(4, dtype=torch.float64))["upper"]
    0.0
    """
    share, n = torch.softmax(log_w, 0), len(log_w)
    joined = torch.logsumexp(log_w, 0) - math.log(n)
    ess = effective_sample_size(log_w)
    found = {"lower": log_w.mean(), "joined": joined, "upper": (share * log_w).sum(), "joined_ess": ess}
    found["joined_stderr"] = ((n / ess - 1).clamp_min(0) / (n - 1)).sqrt()
    return {name: float(value) for name, value in found.items()}


def _sides(
    model: nn.Module, problem: Problem, row: Row, schedule: Schedule, held_out: Tensor, generator: torch.Generator
) -> tuple[Annealing, dict[str, Any]]:
    size, noise = problem.size, problem.where_of(row).noise
    began = time.perf_counter()
    forward = ais(model, noise, n_chains=size.chains, schedule=schedule, generator=generator)
    found = bracket(
        model, noise, held_out, n_chains=size.chains, forward=forward, settle=size.settle, generator=generator
    )
    facts: dict[str, Any] = {"betas": len(schedule), "evaluations": schedule.evaluations, "chains": size.chains}
    for name, side in (("lower", found.lower), ("joined", found.log_z), ("upper", found.upper)):
        facts |= {name: side.value, f"{name}_stderr": side.stderr, f"{name}_ess": side.ess}
    return forward, facts | {"unseen": found.unseen, "seconds": time.perf_counter() - began}


def _lost_chains(model: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Where plain chains get from the noise, with a step size of their own: all there is to show of such a model."""
    chain = run_chains(HMC(0.01, 5), model, x, 1, warmup=LOST_STEPS, generator=generator)
    return chain.samples[-1]
