"""The main job: a table in, a folder with a normalised density, its numbers, a picture and a verdict out."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from unnorm import __version__, groundwork, report
from unnorm.checkpoint import read_tensors, write_atomically
from unnorm.data import tables
from unnorm.data.rows import RowSource, chunks, spread
from unnorm.data.toy import TOYS
from unnorm.data.transforms import Standardize, Transformed
from unnorm.density import Density
from unnorm.device import fabric_for
from unnorm.diagnostics import verdict
from unnorm.errors import BrokenFile, DataError, NonFiniteObjective, WeightsWarning
from unnorm.folders import CONFIG, GROUNDWORK, RESULT, claim, read_json, sealed
from unnorm.iterates import VALIDATED
from unnorm.metrics import log_probs, nll
from unnorm.noise.base import event_of
from unnorm.points import Points, prepare
from unnorm.randomness import stream
from unnorm.settings import Job
from unnorm.train import CHECKPOINT, check_resumable, fit
from unnorm.training import Training

__all__ = ["Job", "load_job", "run"]

LARGEST = 1e100


def run(
    job: Job, out: Path, *, resume: bool = False, force: bool = False, progress: bool | None = None
) -> dict[str, Any]:
    """Fit, normalise, judge and write the folder `out`; returns what `result.json` holds."""
    fabric = fabric_for(job.device, job.precision)
    points = prepare(job)
    standardize = _standardize(points)
    config = _config(job, points, standardize)
    dtype = torch.float64 if job.precision == "64" else torch.float32
    ground = groundwork.load(out) if resume else None
    if resume and ground is None and (out / CHECKPOINT).exists():
        raise BrokenFile(f"'{out / GROUNDWORK}' is missing: what this run settled before it trained is not known.")
    if ground is not None and event_of(ground.noise) != (len(points.columns),):
        raise BrokenFile(f"'{out / GROUNDWORK}' is another run's: its noise has events of {event_of(ground.noise)}.")
    if resume:
        _same_data(config, out)
        resume = ground is not None and (out / CHECKPOINT).exists()  # a run killed before that starts anew
        if resume and ground is not None:
            settings = job.build_estimator(ground.noise, ground.alphas).settings
            check_resumable(read_tensors(out / CHECKPOINT)[1], job.training, settings)
        write_atomically(out / CONFIG, sealed(config))
    else:
        claim(out, force, sealed(config))
    if ground is None:
        ground = groundwork.laid(job, points.train, points.validation, standardize, dtype, fabric)
        groundwork.save(out, ground)
    transform = ground.transform
    train, noise = Transformed(points.train, transform, dtype), ground.noise
    model = job.build_model(len(points.columns), noise, ground.alphas).to(dtype)
    estimator = job.build_estimator(noise, ground.alphas)
    validation = None
    if points.validation is not None:
        validation = groundwork.reached(Transformed(points.validation, transform, dtype))
    history = fit(
        model,
        estimator,
        _near(train, fabric.device),
        job.training,
        validation=validation,
        fabric=fabric,
        folder=out,
        resume=resume,
        strict=job.strict,
        progress=progress,
    )
    generator = stream(job.training.seed, "log Z", device=fabric.device)
    transform.to(fabric.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeightsWarning)  # the verdict says it
        density = Density.normalise(
            model,
            noise,
            transform,
            data=points.train,
            held_out=points.test,
            n=job.n_importance,
            generator=generator,
            progress=progress,
        ).cpu()
    if not math.isfinite(density.log_z.value):
        raise NonFiniteObjective(f"log Z is {density.log_z.value}: training diverged. Lower the learning rate.")
    density.save(out)
    seconds = history["seconds"][-1] if len(history) else math.nan
    result = _judge(job, density, points, history.warnings)
    result |= {"fit_seconds": seconds, "steps": int(history["step"][-1]) if len(history) else 0}
    result |= {"chosen": ground.said, "bridges": max(1, len(ground.alphas) - 1), "certified": history.certified}
    for name in ("log_u", "log_z"):
        if history[name] and job.training.iterate == "last":  # another iterate's says nothing of the one that is kept
            result[f"training_{name}"] = history[name][-1]
    write_atomically(out / RESULT, sealed(result))
    report.write(out, asdict(job), points, density, result)
    return result


def _standardize(points: Points) -> Standardize:
    transform = Standardize.fit(points.train)
    sizes = torch.maximum(transform.loc.abs(), transform.scale)
    for name, size, scale in zip(points.columns, sizes.tolist(), transform.scale.tolist(), strict=True):
        if not (size < LARGEST and scale > 1 / LARGEST):
            raise DataError(f"Column '{name}' has size {size:.3g} and spread {scale:.3g}: rescale it toward 1.")
    return transform


def _discrete(rows: torch.Tensor) -> int:
    """How many columns repeat values: one value in a twentieth of the rows, or fewer values than half the rows."""
    if len(rows) < 100:
        return 0
    counts = [column.unique(return_counts=True)[1] for column in rows.T]
    return sum(bool(count.max() > 0.05 * len(rows) or len(count) < 0.5 * len(rows)) for count in counts)


def _singular(rows: torch.Tensor) -> int:
    """1 where some column is a linear function of the others, so that the rows have no density; else 0."""
    if not 2 <= rows.shape[1] <= 1000 or len(rows) <= rows.shape[1]:
        return 0
    return int(torch.linalg.eigvalsh(torch.corrcoef(rows.T.double()))[0] < 1e-9)


def _near(rows: RowSource, device: torch.device) -> RowSource:
    """On an accelerator, rows that fit into a gigabyte as one tensor there; else the rows as they are."""
    if device.type == "cpu" or len(rows) * rows[torch.zeros(1, dtype=torch.int64)].numel() > 2**28:
        return rows
    return torch.cat([chunk.to(device) for chunk in chunks(rows)])


def _judge(job: Job, density: Density, points: Points, warned: Sequence[str]) -> dict[str, Any]:
    """Likelihoods on train, test and under the noise alone, log Z by method, and the verdict."""
    some = spread(len(points.train), 10_000)
    log_p, log_q = (log_probs(each, points.test) for each in (density.log_prob, density.noise_log_prob))
    test = nll(log_p, log_z_stderr=density.log_z.stderr)
    train = nll(log_probs(density.log_prob, points.train[some]))

    numbers = {
        "test_nll": test.value,
        "test_stderr": test.stderr,
        "test_rows": test.n,
        "train_nll": train.value,
        "noise_nll": nll(log_q).value,
        "gain_stderr": nll(log_q - log_p).stderr,
        "best_kept": int(job.training.iterate in VALIDATED),
    }
    numbers["discrete"] = _discrete(points.train[some])
    numbers["singular"] = _singular(points.train[some])
    judged = verdict(density.log_zs, numbers, warned, density.doubts)
    result: dict[str, Any] = {
        "data": Path(job.data).name,
        "rows": {"train": len(points.train), "test": len(points.test), "dropped": points.dropped},
        **numbers,
    }
    if points.truth is not None:
        gap = log_probs(points.truth.log_prob, points.test) - log_probs(density.log_prob, points.test)
        result["truth"] = {
            "entropy": points.truth.entropy,
            "excess": float(gap.mean()),
            "excess_stderr": float(gap.std() / math.sqrt(len(gap))),
        }
    result["log_z"] = {method: found._asdict() for method, found in density.log_zs.items()}
    result["rungs"] = density.climb.lines() if density.climb is not None else []
    return result | {"warnings": list(warned), "verdict": judged.line(), "verdict_level": judged.level}


def _config(job: Job, points: Points, transform: Standardize) -> dict[str, Any]:
    settings = asdict(job)
    settings["data"] = job.data if job.data in TOYS else str(tables.find(job.data).resolve())
    return {
        "unnorm": __version__,
        "job": settings,
        "columns": list(points.columns),
        "named": points.named,
        "places": list(points.places),
        "width": points.width,
        "rows": [len(points.train), len(points.test), 0 if points.validation is None else len(points.validation)],
        "loc": transform.loc.tolist(),
        "scale": transform.scale.tolist(),
    }


def load_job(folder: Path, steps: int | None = None) -> Job:
    """The job a run folder was started with, to resume it; `steps` extends it."""
    path = folder / CONFIG
    if not path.exists():
        raise BrokenFile(f"There is no run to resume at '{folder}' ('{CONFIG}' is missing).")
    settings = read_json(path, {"job"})["job"]
    try:
        training = Training(**settings.pop("training"))
        lists = {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
        job = Job(training=training, **(settings | lists))
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise BrokenFile(f"'{path}' is truncated, edited, or not a run's: {problem}") from problem
    return job if steps is None else replace(job, training=replace(job.training, steps=steps))


def _same_data(config: Mapping[str, Any], out: Path) -> None:
    before = read_json(out / CONFIG, set())
    for name in ("columns", "rows", "loc", "scale"):
        if before.get(name) != config[name]:
            raise DataError(f"The data changed since this run was started ({name} differ): it cannot be resumed.")
