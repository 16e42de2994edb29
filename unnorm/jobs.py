"""The main job: a table in, a folder with a normalised density, its numbers, a picture and a verdict out."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from unnorm import __version__, archive, report
from unnorm.checkpoint import write_atomically
from unnorm.data import tables
from unnorm.data.rows import Rows, RowSource, chunks, spread
from unnorm.data.toy import TOYS, Toy, toy
from unnorm.data.transforms import Standardize, Transformed
from unnorm.density import Density
from unnorm.device import fabric_for
from unnorm.diagnostics import verdict
from unnorm.errors import BrokenFile, DataError, InvalidValue, NonFiniteObjective
from unnorm.estimators import MECO, Estimator
from unnorm.metrics import log_probs, nll
from unnorm.models import MLP, Quadratic, Tilted
from unnorm.names import choose, unknown
from unnorm.noise import Gaussian, Noise
from unnorm.train import CHECKPOINT, HISTORY, Training, fit

__all__ = [
    "CONFIG",
    "RESULT",
    "Job",
    "Points",
    "load_job",
    "points_for_scoring",
    "prepare",
    "read_json",
    "run",
    "without_nan",
]

CONFIG, RESULT = "config.json", "result.json"
ESTIMATORS = {"meco": MECO}
MODELS = ("tilted", "mlp", "quadratic")
NOISES = {"gaussian": "full", "gaussian-diagonal": "diagonal", "gaussian-low-rank": "low-rank"}
OWN_FILES = (CONFIG, RESULT, CHECKPOINT, HISTORY, "model.safetensors", "model.json", "density.png", "report.md")
LEAST_ROWS = 10
MOST_VALIDATION = 2000
LARGEST = 1e100


@dataclass(frozen=True)
class Job:
    """Everything `unnorm fit` was asked; plain values, saved as `config.json`."""

    data: str
    key: str | None = None
    columns: tuple[str, ...] | None = None
    drop_nonfinite: bool = False
    drop_constant: bool = False
    n: int = 50_000
    test: float = 0.1
    model: str = "tilted"
    hidden: tuple[int, ...] = (300, 300, 300)
    activation: str = "silu"
    noise: str = "gaussian"
    estimator: str = "meco"
    gamma: float | None = None
    tracker: str = "ema"
    n_noise: int | None = None
    n_importance: int = 200_000
    device: str = "auto"
    precision: str = "32"
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        if self.n < LEAST_ROWS:
            raise InvalidValue(f"The number of points 'n' must be at least {LEAST_ROWS}. Got {self.n}.")
        if not 0 < self.test < 1:
            raise InvalidValue(f"The 'test' share must be between 0 and 1. Got {self.test}.")
        if self.n_importance < 100:
            raise InvalidValue(f"The 'n-importance' draws for log Z must be at least 100. Got {self.n_importance}.")
        if self.model not in MODELS:
            raise InvalidValue(unknown("model", self.model, MODELS))
        choose("noise", self.noise, NOISES)
        choose("estimator", self.estimator, ESTIMATORS)
        if self.training.schedule == "pl":
            if self.gamma is not None:
                raise InvalidValue("The schedule 'pl' sets gamma and beta itself (Theorem 4): give neither.")
            if self.tracker != "ema":
                raise InvalidValue(f"The schedule 'pl' sets the gamma of the tracker 'ema'. Got '{self.tracker}'.")
        # What the parts refuse, they refuse before any data are read.
        self._build_model(2, Gaussian(2)), self._build_estimator(Gaussian(2))

    def _build_model(self, width: int, noise: Noise) -> nn.Module:
        generator = torch.Generator().manual_seed(self.training.seed)
        if self.model == "quadratic":
            return Quadratic(width)
        net = MLP(width, self.hidden, self.activation, generator=generator)
        return net if self.model == "mlp" else Tilted(noise, net)

    def _build_estimator(self, noise: Noise) -> Estimator:
        return ESTIMATORS[self.estimator](noise, n_noise=self.n_noise, gamma=self.gamma, tracker=self.tracker)


class Points(NamedTuple):
    """Rows to train on and to test on, in the user's units, with the names of their columns."""

    train: RowSource
    test: RowSource
    validation: RowSource | None  # rows of neither, where the best iterate is asked for
    columns: tuple[str, ...]
    named: bool  # whether the names came with the data
    width: int  # columns of the file, before any were left out
    places: tuple[int, ...]  # where the columns stand in the file
    truth: Toy | None


def prepare(job: Job) -> Points:
    """Read and check the data, and split them by the seed."""
    return _toy_points(job) if job.data in TOYS else _table_points(job)


def _toy_points(job: Job) -> Points:
    truth = toy(job.data)
    generator = torch.Generator().manual_seed(job.training.seed)
    train = truth.sample(job.n, generator=generator)
    test = truth.sample(max(1000, round(job.n * job.test / (1 - job.test))), generator=generator)
    validation = truth.sample(MOST_VALIDATION, generator=generator) if job.training.iterate == "best" else None
    return Points(train, test, validation, ("x", "y"), False, 2, (0, 1), truth)


def _table_points(job: Job) -> Points:
    table, places, width = _read(job)
    order = np.arange(table.rows, dtype=np.int32 if table.rows < 2**31 else np.int64)
    np.random.default_rng(job.training.seed).shuffle(order)
    if table.kept is not None:
        order = table.kept[order]
    tested = min(max(1, round(job.test * len(order))), len(order) - 4)
    validated = 0
    if job.training.iterate == "best":
        validated = min(max(2, round(0.1 * (len(order) - tested))), MOST_VALIDATION)
    test, validation, train = (
        Rows(table.values, np.sort(part)) for part in np.split(order, [tested, tested + validated])
    )
    return Points(train, test, validation if validated else None, table.columns, table.named, width, places, None)


def _read(job: Job) -> tuple[tables.Table, tuple[int, ...], int]:
    try:
        path = tables.find(job.data)
    except DataError as problem:
        if Path(job.data).suffix or os.sep in job.data or Path(job.data).exists():
            raise
        raise DataError(unknown("data set", job.data, TOYS) + " Or give a file.") from problem
    table = tables.read(path, key=job.key)
    width, names = len(table.columns), table.columns
    if job.columns is not None:
        table = tables.select(table, job.columns)
    table = tables.finite(table, drop=job.drop_nonfinite)
    if table.rows < LEAST_ROWS:
        rows = "1 row" if table.rows == 1 else f"{table.rows} rows"
        raise DataError(f"'{job.data}' has {rows}; fitting and testing a density takes at least {LEAST_ROWS}.")
    constant = _constant_columns(table)
    if constant and not job.drop_constant:
        listed = ", ".join(f"'{name}'" for name in constant)
        raise DataError(f"Constant columns have no density: {listed}. Leave them out with --drop-constant.")
    if constant:
        kept = [name for name in table.columns if name not in constant]
        if not kept:
            raise DataError(f"Every column of '{job.data}' is constant: there is no density to fit.")
        table = tables.select(table, kept)
    return table, tuple(names.index(name) for name in table.columns), width


def _constant_columns(table: tables.Table) -> list[str]:
    first = table.values[0 if table.kept is None else table.kept[0]]
    varies = np.zeros(len(table.columns), dtype=bool)
    for start in range(0, table.rows, tables.CHUNK_ROWS):
        place = slice(start, start + tables.CHUNK_ROWS)
        varies |= (table.values[place if table.kept is None else table.kept[place]] != first).any(0)
        if varies.all():
            break
    return [name for name, moves in zip(table.columns, varies, strict=True) if not moves]


def run(
    job: Job, out: Path, *, resume: bool = False, force: bool = False, progress: bool | None = None
) -> dict[str, Any]:
    """Fit, normalise, judge and write the folder `out`; returns what `result.json` holds."""
    fabric = fabric_for(job.device, job.precision)
    points = prepare(job)
    transform = _standardize(points)
    config = _config(job, points, transform)
    if resume:
        _same_data(config, out)
        write_atomically(out / CONFIG, _sealed(config))
        resume = (out / CHECKPOINT).exists()  # a run killed before its first checkpoint starts anew
    else:
        _claim(out, force, _sealed(config))
    dtype = torch.float64 if job.precision == "64" else torch.float32
    train = Transformed(points.train, transform, dtype)
    noise = Gaussian.fit(train, covariance=NOISES[job.noise]).to(dtype)
    model, estimator = job._build_model(len(points.columns), noise).to(dtype), job._build_estimator(noise)
    validation = None
    if points.validation is not None:
        validation = torch.cat(list(chunks(Transformed(points.validation, transform, dtype))))
    history = fit(
        model,
        estimator,
        _near(train, fabric.device),
        job.training,
        validation=validation,
        fabric=fabric,
        folder=out,
        resume=resume,
        progress=progress,
    )
    generator = torch.Generator(fabric.device).manual_seed(job.training.seed + 1)
    transform.to(fabric.device)
    density = Density.normalise(
        model, noise, transform, data=points.train, n=job.n_importance, generator=generator
    ).cpu()
    if not math.isfinite(density.log_z.value):
        raise NonFiniteObjective(f"log Z is {density.log_z.value}: training diverged. Lower the learning rate.")
    density.save(out)
    seconds = history["seconds"][-1] if len(history) else math.nan
    result = _judge(job, density, points) | {"fit_seconds": seconds, "steps": job.training.steps}
    if isinstance(estimator, MECO):
        result["tracked_log_u"] = float(estimator.log_u)
    write_atomically(out / RESULT, _sealed(result))
    report.write(out, asdict(job), points, density, result)
    return result


def _standardize(points: Points) -> Standardize:
    transform = Standardize.fit(points.train)
    sizes = torch.maximum(transform.loc.abs(), transform.scale)
    for name, size, scale in zip(points.columns, sizes.tolist(), transform.scale.tolist(), strict=True):
        if not (size < LARGEST and scale > 1 / LARGEST):
            raise DataError(f"Column '{name}' has size {size:.3g} and spread {scale:.3g}: rescale it toward 1.")
    return transform


def _near(rows: RowSource, device: torch.device) -> RowSource:
    """On an accelerator, rows that fit into a gigabyte as one tensor there; else the rows as they are."""
    if device.type == "cpu" or len(rows) * rows[torch.zeros(1, dtype=torch.int64)].numel() > 2**28:
        return rows
    return torch.cat([chunk.to(device) for chunk in chunks(rows)])


def _judge(job: Job, density: Density, points: Points) -> dict[str, Any]:
    """Likelihoods on train, test and under the noise alone, log Z by method, and the verdict."""
    some = spread(len(points.train), 10_000)
    test = nll(log_probs(density.log_prob, points.test), density.log_z)
    train = nll(log_probs(density.log_prob, points.train[some]))

    def noise_log_prob(x: torch.Tensor) -> torch.Tensor:
        z, log_det = density.transform(x)
        return density.noise.log_prob(z.to(density._like())) + log_det

    numbers = {
        "test_nll": test.value,
        "test_stderr": test.stderr,
        "test_rows": test.n,
        "train_nll": train.value,
        "noise_nll": nll(log_probs(noise_log_prob, points.test)).value,
    }
    judged = verdict(density.log_zs, numbers)
    result: dict[str, Any] = {
        "data": job.data,
        "rows": {"train": len(points.train), "test": len(points.test)},
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
    return result | {"verdict": judged.line(), "verdict_level": judged.level}


def points_for_scoring(
    folder: Path, data: str, *, key: str | None, drop_nonfinite: bool
) -> tuple[Rows, np.ndarray | None]:
    """The rows of another file, with the columns the model in `folder` was fitted on; and which rows were kept.

    Columns are found by name where both files name theirs, else by their place.
    """
    table = tables.read(tables.find(data), key=key)
    if (folder / CONFIG).exists():
        table = _matching(table, data, read_json(folder / CONFIG, {"columns", "named", "places", "width"}))
    table = tables.finite(table, drop=drop_nonfinite)
    return Rows(table.values, table.kept), table.kept


def _matching(table: tables.Table, data: str, config: Mapping[str, Any]) -> tables.Table:
    names, places, width = config["columns"], config["places"], config["width"]
    if table.named and config["named"]:
        if missing := [name for name in names if name not in table.columns]:
            raise DataError(f"'{data}' lacks columns the model was fitted on: {_some(missing)}.")
        return tables.select(table, names)
    if len(table.columns) == len(names):
        return table
    if len(table.columns) == width:
        return table._replace(values=table.values[:, places], columns=tuple(names))
    raise DataError(
        f"'{data}' has {len(table.columns)} columns; the model was fitted on {len(names)} ({_some(names)})."
    )


def read_json(path: Path, needed: set[str]) -> dict[str, Any]:
    """A JSON object of ours with the `needed` keys, or a clear error."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as problem:
        raise BrokenFile(f"'{path}' is truncated, edited, or not a run's: {problem}") from problem
    if not isinstance(content, dict) or content.pop("digest", None) != archive.digest(content):
        raise BrokenFile(f"'{path}' was edited after it was written, or is not a run's: its digest does not match.")
    if not needed <= content.keys():
        raise BrokenFile(f"'{path}' does not hold {', '.join(sorted(needed - content.keys()))}.")
    return content


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


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
        "rows": [len(points.train), len(points.test)],
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


def _claim(out: Path, force: bool, config: bytes) -> None:
    """Make the output folder ours, or say why not; only files of a run of ours are ever replaced."""
    try:
        _may_replace(out, force)
        out.mkdir(parents=True, exist_ok=True)
        for name in OWN_FILES:
            (out / name).unlink(missing_ok=True)
        write_atomically(out / CONFIG, config)
    except OSError as problem:
        raise InvalidValue(f"The output folder '{out}' cannot be written: {problem.strerror}.") from problem


def _may_replace(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidValue(f"The output '{out}' is a file, not a folder.")
    if out.exists() and any(out.iterdir()):
        if not force:
            resumable = f", --resume {out} to continue it" if (out / CHECKPOINT).exists() else ""
            raise InvalidValue(
                f"The output folder '{out}' exists. Use --force to replace its run{resumable}, or another --out."
            )
        if foreign := _not_ours(out):
            raise InvalidValue(f"'{out / foreign}' was not written by unnorm: it is not replaced. Use another --out.")


def _not_ours(out: Path) -> str | None:
    """A file that stands where one of ours would, in a folder that holds no run of ours."""
    try:
        ours = "unnorm" in read_json(out / CONFIG, set())
    except BrokenFile:
        ours = False
    return None if ours else next((name for name in OWN_FILES if (out / name).exists()), None)


def _sealed(content: Mapping[str, Any]) -> bytes:
    """JSON with a digest of itself, which `read_json` checks."""
    plain = json.loads(json.dumps(without_nan(content), allow_nan=False))
    return (json.dumps(plain | {"digest": archive.digest(plain)}, indent=2) + "\n").encode()


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
