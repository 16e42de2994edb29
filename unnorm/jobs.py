"""The command `unnorm fit`: a table in; a folder with a density, its numbers, a picture, a report and a verdict out."""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unnorm import __version__, report
from unnorm.checkpoint import CHECKPOINT, HISTORY, write_atomically
from unnorm.data import tables
from unnorm.data.sources import locate
from unnorm.data.toys import Toy, toy
from unnorm.device import fabric_for
from unnorm.errors import BrokenFile, DataError, InvalidValue, NonFiniteObjective
from unnorm.folders import CONFIG, GROUNDWORK, RESULT, claim, read_json, sealed
from unnorm.randomness import stream
from unnorm.settings import LEAST_ROWS, Job
from unnorm.tables.fit import STAGES, Finished, Parts, chosen, divide, fit_source
from unnorm.tables.frames import Source, source_of
from unnorm.tables.hashing import digest_of_rows
from unnorm.training import Training

__all__ = ["Job", "Read", "held_out_rows", "load_job", "read_source", "run"]


class Read(NamedTuple):
    """The table of a job, and the truth behind it, where that is known."""

    source: Source
    truth: Toy | None


def run(
    job: Job, out: Path, *, resume: bool = False, force: bool = False, progress: bool | None = None
) -> dict[str, Any]:
    """Fit, normalise, judge and write the folder `out`; return what `result.json` holds."""
    fabric = fabric_for(job.device, job.precision)
    source, truth = read_source(job)
    config = _config(job, source)
    divided = divide(
        source, job.test, job.training.seed
    )  # what is wrong with the table is said before a folder is made
    if resume:
        _check_same_data(config, out)
        trained = any((folder / CHECKPOINT).exists() for folder in (out, *(out / stage for stage in STAGES)))
        if trained and not (out / GROUNDWORK).exists():
            raise BrokenFile(f"'{out / GROUNDWORK}' is missing: what this run settled before it trained is not known.")
    else:
        claim(out, force, sealed(config))
    with _settled(config, out):
        finished = fit_source(source, job, fabric=fabric, divided=divided, folder=out, resume=resume, progress=progress)
    density = finished.density
    if not math.isfinite(density.log_z.value):
        raise NonFiniteObjective(f"log Z is {density.log_z.value}: training diverged. Lower the learning rate.")
    _keep_the_winner(out)
    messages = [source.left_out()] if source.dropped else []
    messages += density.columns.messages() + density.result["warned"]
    result: dict[str, Any] = {"data": Path(job.data).name, "messages": messages}
    result |= density.result
    if truth is not None and finished.parts.test is not None:
        result["truth"] = _beside(truth, finished)
    result |= {"verdict": density.verdict.plain(), "verdict_level": density.verdict.level}
    density.save(out)
    write_atomically(out / RESULT, sealed(result))
    report.write(out, asdict(job), finished, result)
    return result


@contextmanager
def _settled(config: Mapping[str, Any], out: Path) -> Iterator[None]:
    """Write what a run is asked; put back what it was asked before, where that cannot be resumed with this."""
    before = (out / CONFIG).read_bytes()
    write_atomically(out / CONFIG, sealed(config))
    try:
        yield
    except InvalidValue:
        write_atomically(out / CONFIG, before)
        raise


def _keep_the_winner(out: Path) -> None:
    """Put the checkpoint and the history of the better of two trials where those of a single one are."""
    found = [out / stage for stage in STAGES if (out / stage / HISTORY).exists()]
    winner = next((stage for stage in found if (stage / "chosen").exists()), None)
    if winner is not None:
        for name in (CHECKPOINT, HISTORY):
            shutil.copyfile(winner / name, out / name)


def _beside(truth: Toy, finished: Finished) -> dict[str, float]:
    """Return how far the density is above the truth, on the same test rows."""
    assert finished.parts.test is not None
    rows = finished.parts.test.rows()
    gap = truth.log_prob(torch.from_numpy(rows)).double().numpy() - finished.density.log_prob(rows)
    error = float(gap.std(ddof=1) / math.sqrt(len(gap)))
    return {"entropy": truth.entropy, "excess": float(gap.mean()), "excess_stderr": error}


def read_source(job: Job) -> Read:
    """Read and check the table of a job; draw it, where it is a toy set."""
    path = locate(job.data)
    if path is None:
        truth = toy(job.data)
        n = round(job.n / (1 - job.test))
        points = truth.sample(n, generator=stream(job.training.seed, "points of a toy set")).double().numpy()
        return Read(Source(points, ("x", "y"), {}, (), None, False), truth)
    source = source_of(chosen(tables.read(path, key=job.key), job), drop_infinite=job.drop_nonfinite)
    if source.rows < LEAST_ROWS:
        rows = "1 row" if source.rows == 1 else f"{source.rows} rows"
        raise DataError(f"'{job.data}' has {rows}; fitting and testing a density takes at least {LEAST_ROWS}.")
    return Read(source, None)


def held_out_rows(folder: Path) -> Parts:
    """Return the rows of a run in its folder, divided as they were for the fit."""
    job = load_job(folder)
    source, _ = read_source(job)
    _check_same_data(_config(job, source), folder)
    return divide(source, job.test, job.training.seed)[0]


def _config(job: Job, source: Source) -> dict[str, Any]:
    settings = asdict(job)
    path = locate(job.data)
    settings["data"] = job.data if path is None else str(path.resolve())
    return {
        "unnorm": __version__,
        "job": settings,
        "columns": list(source.names),
        "rows": source.rows,
        "digest_of_rows": digest_of_rows(source.values, source.kept),
    }


def load_job(folder: Path, steps: int | None = None) -> Job:
    """Return the job a run folder was started with, to resume it; `steps` extends it."""
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
    if steps is None:
        return job
    automatic = tuple(name for name in job.automatic if name != "steps")
    return replace(job, training=replace(job.training, steps=steps), automatic=automatic)


def _check_same_data(config: Mapping[str, Any], out: Path) -> None:
    before = read_json(out / CONFIG, set())
    for name in ("columns", "rows", "digest_of_rows"):
        if before.get(name) != config[name]:
            what = name.replace("digest_of_rows", "values")
            raise DataError(f"The data changed since this run was started ({what} differ): it cannot be resumed.")
