"""The one pipeline for tables, behind `unnorm.fit`, the command `unnorm fit` and `EnergyDensity`."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unnorm import groundwork
from unnorm.checkpoint import CHECKPOINT
from unnorm.data.robust import LogTails, robust_scale
from unnorm.data.rows import RowSource, spread
from unnorm.data.tables import select
from unnorm.data.transforms import Compose, Transformed
from unnorm.density import Density
from unnorm.device import Machine, fabric_for
from unnorm.diagnostics import LEAST_ROWS_TO_JUDGE, Verdict, believable, judge_fit, judge_log_z, judge_samples
from unnorm.errors import (
    BrokenFile,
    DataError,
    HealthWarning,
    InvalidValue,
    MixingWarning,
    NonFiniteObjective,
    ShrinkageWarning,
    WeightsWarning,
)
from unnorm.folders import GROUNDWORK
from unnorm.loop import train
from unnorm.noise.base import event_of
from unnorm.partition.importance import log_weights
from unnorm.randomness import stream
from unnorm.settings import AUTOMATIC, DRAWS, MANY, Job
from unnorm.tables.bounds import Bounds
from unnorm.tables.columns import Columns
from unnorm.tables.density import TableDensity
from unnorm.tables.frames import Source, exclude, kind_of_frame, source_of, table_of
from unnorm.tables.hashing import order_of_rows
from unnorm.training import Training
from unnorm.types import History

__all__ = ["STAGES", "Finished", "Parts", "chosen", "divide", "fit", "fit_source"]

STAGES = ("plain", "bridges")  # folders of the two trials, where a run tries both

FEW_ROWS = 40  # fewer are not divided: the noise alone is the density
VALIDATION, MOST_VALIDATION = 0.2, 5000
COPIED = 0.5  # of the rows: a table with more copies than this is one of discrete columns, and copies are no accident
SCALED_ROWS = 50_000  # that tell the scale of the columns
IN_MEMORY = 2**23  # numbers of the training rows that are held ready
EVALUATIONS, MANY_EVALUATIONS = 100_000, 1_000_000  # of the model for log Z, for few and many rows
EACH_SECOND, LEAST_EVALUATIONS = 20_000, 4_000  # where there are seconds to keep to
TRAINING_SHARE, LEAST_SECONDS = 0.6, 0.05  # of the seconds that are left when the noise is there
BOUND_DRAWS, CHAIN_DRAWS, LEAST_SHARE = 20_000, 2_000, 0.02  # weighted draws that find the bounds, if so many count
SAMPLES = 1000  # that tell what samples are worth
TOLD, TOLD_OF_CELLS, TESTED = 10_000, 200, 5000  # training rows whose likelihood is reported, and held-out rows
BETTER = 1.0  # standard errors by which bridges must be better on validation rows
OURS = (HealthWarning, ShrinkageWarning, WeightsWarning, MixingWarning)


def fit(
    table: Any,
    *misplaced: Any,
    test: float = 0.1,
    seed: int = 0,
    columns: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    noise: str = "auto",
    bridges: str | int = "auto",
    hidden: Sequence[int] | None = None,
    steps: int | None = None,
    lr: float | None = None,
    estimator: str = "meco",
    max_time: float | None = None,
    device: str = "cpu",
    progress: bool | None = False,
    **options: Any,
) -> TableDensity:
    """Fit a normalised density to the rows of a table.

    Words and truth values are categories. Rows with a missing cell are left out, and a warning says how many. Columns
    of dates are refused.

    Args:
        table: a data frame of pandas or polars, an array, or the name of a file.
        misplaced: nothing; here to say where the training loop is.
        test: share of the rows that are kept out, to judge the fit on.
        seed: of everything random.
        columns: some columns only, by name or position.
        exclude: columns to leave out.
        noise: "auto", which compares on held-out rows, or a kind (`unnorm.noise.fit`).
        bridges: "auto", "none", or how many.
        hidden: widths of the network's layers; they follow from the size of the table when None.
        steps: of training at most; they follow from the number of rows when None.
        lr: learning rate; 0.001 when None.
        estimator: by its name on the command line.
        max_time: seconds for all of it, about.
        device: "cpu", "cuda" or "auto".
        progress: a bar while it trains; None shows it on a terminal.
        options: of the estimator, such as gamma=0.05 of MECO.

    >>> x = np.random.default_rng(0).normal(size=(200, 2))
    >>> density = fit(x, steps=25)
    >>> density.verdict.log_z.level
    'TRUST'
    """
    if misplaced or isinstance(table, nn.Module):
        raise InvalidValue(
            "unnorm.fit fits a density to a table: unnorm.fit(frame). The training loop is "
            "unnorm.train(model, estimator, rows, Training(...))."
        )
    given = {"steps": steps, "lr": lr}
    job = Job(
        "table",
        columns=None if columns is None else tuple(map(str, columns)),
        exclude=tuple(map(str, exclude)),
        test=test,
        noise=noise,
        bridges=str(bridges),
        hidden=None if hidden is None else tuple(hidden),
        estimator=estimator,
        training=Training(seed=seed, log_every=25, **{k: v for k, v in given.items() if v is not None}),  # type: ignore[arg-type]
        automatic=tuple(name for name in AUTOMATIC if given.get(name) is None),
        **options,
    )
    read = source_of(chosen(table_of(table), job))
    if read.dropped:
        warnings.warn(read.left_out(), UserWarning, stacklevel=2)
    with torch.random.fork_rng(devices=[]):  # torch's layers draw from its own generator before they are initialised
        fitted = fit_source(
            read, job, fabric=fabric_for(device), seconds=max_time, frame=kind_of_frame(table), progress=progress
        ).density
    fitted.columns.warn()
    fitted.warn_of_doubts()
    return fitted


def chosen(table: Any, job: Job) -> Any:
    """Return the columns of a table that a job asks for.

    Columns chosen from a table without names are called by their places there, and found again by them.
    """
    if job.columns is not None:
        table = select(table, job.columns)
    table = exclude(table, job.exclude)
    return table if job.columns is None and not job.exclude else table._replace(named=True)


class Fitted(NamedTuple):
    """One way to fit that was tried: a model and its training, normalised."""

    density: Density
    history: History
    alphas: tuple[float, ...]
    failed: str


@dataclass(frozen=True)
class Parts:
    """The rows of a table in the order of the fit, divided.

    Attributes:
        train, validation, test: rows as a model sees them; None where there are none.
    """

    train: "EncodedRows"
    validation: "EncodedRows | None"
    test: "EncodedRows | None"

    @property
    def held_out(self) -> "EncodedRows | None":
        """All rows that were not trained on."""
        parts = [part for part in (self.validation, self.test) if part is not None]
        if not parts:
            return None
        first = parts[0]
        return EncodedRows(first.values, first.columns, first.order, np.concatenate([p.at for p in parts]), first.seed)


class Finished(NamedTuple):
    """A density of a table, and its rows as they were divided."""

    density: TableDensity
    parts: Parts


class EncodedRows:
    """Rows of a table as a model sees them, each number at its place within its cell; read when they are asked for.

    Args:
        values: of the table.
        columns: of the table.
        order: the place in the table of each row in the order of the fit.
        at: which rows of that order.
        seed: of the places within cells.
    """

    def __init__(self, values: np.ndarray, columns: Columns, order: np.ndarray, at: np.ndarray, seed: int):
        self.values, self.columns, self.order, self.at, self.seed = values, columns, order, at, seed

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, index: Tensor, /) -> Tensor:
        at = self.at[index.numpy()]
        codes = self.columns.codes(self.values[self.order[at]])
        return torch.from_numpy(self.columns.spread(codes, at, self.seed))

    def rows(self) -> np.ndarray:
        """Return the rows as they stand in the table."""
        return np.asarray(self.values[self.order[self.at]], dtype=np.float64)


def fit_source(
    source: Source,
    job: Job,
    *,
    fabric: Machine,
    weights: np.ndarray | None = None,
    divided: "tuple[Parts, Columns] | None" = None,
    seconds: float | None = None,
    folder: Path | None = None,
    resume: bool = False,
    frame: str = "",
    progress: bool | None = False,
) -> "Finished":
    """Fit a density to a table that was read: the computation behind every way to ask for it.

    Args:
        source: the table.
        job: how to fit; `job.test` is the share of the rows to judge on, `job.training.seed` the seed.
        fabric: device and precision.
        weights: how many rows each row of `source.kept` counts as.
        divided: the rows, where they have been divided already.
        seconds: for all of it, about.
        folder: for checkpoints.
        resume: continue from the checkpoints in the folder.
        frame: the kind of data frame to return samples as.
        progress: a bar; None shows it on a terminal.
    """
    began, seed = time.perf_counter(), job.training.seed
    parts, columns = divide(source, job.test, seed, weights) if divided is None else divided
    job = job.for_table(len(parts.train), len(columns.modelled))
    transform = Compose([robust_scale(_some(parts.train, SCALED_ROWS)), LogTails()])
    dtype = torch.float64 if job.precision == "64" else torch.float32
    with gathered() as told:
        ground = groundwork.load(folder) if resume and folder is not None else None
        if ground is None:
            ground = groundwork.laid(job, parts.train, parts.validation, transform, dtype, fabric)
            if folder is not None:
                groundwork.save(folder, ground)
        elif event_of(ground.noise) != (len(columns.modelled),):
            where = GROUNDWORK if folder is None else folder / GROUNDWORK
            raise BrokenFile(f"'{where}' is another run's: its noise has events of {event_of(ground.noise)}.")
        if seconds is not None:
            left = max(LEAST_SECONDS, seconds - (time.perf_counter() - began))
            job = replace(job, training=replace(job.training, seconds=TRAINING_SHARE * left))
        trial = _Trial(parts, job, ground, fabric, folder, resume, progress, dtype)
        best, why = _best(
            trial, _affordable(EVALUATIONS if len(parts.train) < MANY else MANY_EVALUATIONS, seconds, began)
        )
        density = best.density.cpu().eval()
        bounds = _bounds(density, columns, len(parts.train) + _count(parts.validation), seed)
    said = dict(ground.said)
    if why:
        said["bridges"] = why
    table = TableDensity(
        density,
        columns,
        bounds,
        verdict=Verdict(judge_log_z(density.log_zs, density.doubts, density.unchecked, density.not_ruled_out)),
        result={},
        history=best.history,
        frame=frame,
        named=source.named,
    )
    result, verdict = judge(table, parts, best, job)
    rows = {name: _count(getattr(parts, name)) for name in ("train", "validation", "test")}
    result |= {"rows": {**rows, "dropped": source.dropped}, "chosen": said}
    result |= {"warnings": list(dict.fromkeys(map(str, told))), "seconds": time.perf_counter() - began}
    table.result, table.verdict = result, verdict
    return Finished(table, parts)


def divide(source: Source, test: float, seed: int, weights: np.ndarray | None = None) -> tuple[Parts, Columns]:
    """Divide the rows, and decide the kinds of the columns on those that are not test rows.

    The content of a row and the seed decide where it goes, not its place in the table. Copies of a row stay together,
    unless most rows are copies.
    """
    order, first = order_of_rows(source.values, source.kept, seed)
    if weights is not None:
        counts = _of_order(source, weights)[order]
        group, order = np.repeat(first.cumsum(), counts), np.repeat(order, counts)
        first = np.append(True, group[1:] != group[:-1])[: len(order)]
    n = len(order)
    if n < 2:
        raise DataError(f"A density needs at least 2 rows. Got {n}.")
    together = first
    if first.mean() <= 1 - COPIED:
        order, first = _apart(order, first, seed)
        together = np.ones(n, dtype=bool)
    starts = np.flatnonzero(together)
    tested = 0 if test == 0 else _boundary(starts, min(max(1, round(test * n)), n - 4), n)
    distinct = int(together[tested:].sum())
    validated = 0
    if distinct >= FEW_ROWS:
        share = min(MOST_VALIDATION, round(VALIDATION * (n - tested)))
        validated = _boundary(starts, tested + share, n) - tested
    at = np.arange(n, dtype=order.dtype)
    own = order[tested:]
    everything = source.kept is None and tested == 0 and weights is None
    rows = source.values if everything else source.values[own]
    fresh = first[tested:]
    places = None if fresh.all() else (own[fresh] if everything else np.flatnonzero(fresh))
    with np.errstate(over="ignore"):  # said below
        columns = Columns.of(rows, source.names, source.words, source.whole, places)
    if not columns.modelled:
        raise DataError(f"No column of the {len(source.names)} varies: there is no density to fit.")
    for column in columns.modelled:
        low, high = column.numbers.low, column.numbers.high
        if not math.isfinite(high - low):
            raise DataError(f"Column '{column.name}' reaches from {low:.3g} to {high:.3g}: rescale it toward 1.")

    def part(low: int, high: int) -> EncodedRows | None:
        return EncodedRows(source.values, columns, order, at[low:high], seed) if high > low else None

    training = part(tested + validated, n)
    assert training is not None
    return Parts(training, part(tested, tested + validated), part(0, tested)), columns


def _apart(order: np.ndarray, first: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows in an order in which copies stand apart, and which of them is the last of its copies.

    Beside each other they would go to one part together: it would have many rows of few kinds, the others none of them.
    """
    mixed = torch.randperm(len(order), generator=stream(seed, "copies apart")).numpy()
    group = first.cumsum()[mixed]
    last = np.zeros(len(order), dtype=bool)
    last[len(order) - 1 - np.unique(group[::-1], return_index=True)[1]] = True
    return order[mixed], last


def _of_order(source: Source, weights: np.ndarray) -> np.ndarray:
    """Return the weights by the place in the table."""
    if source.kept is None:
        return weights
    found = np.zeros(len(source.values), dtype=weights.dtype)
    found[source.kept] = weights
    return found


def _boundary(starts: np.ndarray, wanted: int, n: int) -> int:
    """Return the first start of a group of copies at or after a place, or the last one before it."""
    at = int(np.searchsorted(starts, wanted))
    return int(starts[at]) if at < len(starts) else int(starts[-1])


def _some(rows: RowSource, count: int) -> np.ndarray:
    return rows[spread(len(rows), count)].numpy()


def _count(rows: RowSource | None) -> int:
    return 0 if rows is None else len(rows)


def _affordable(most: int, seconds: float | None, began: float) -> Callable[[], int]:
    """Return how many evaluations of the model there is time for, when it is asked."""

    def evaluations() -> int:
        if seconds is None:
            return most
        left = seconds - (time.perf_counter() - began)
        return int(np.clip(EACH_SECOND * left, LEAST_EVALUATIONS, most))

    return evaluations


@dataclass(frozen=True)
class _Trial:
    """What is needed to train a model, with some bridges or without."""

    parts: Parts
    job: Job
    ground: groundwork.Groundwork
    fabric: Machine
    folder: Path | None
    resume: bool
    progress: bool | None
    dtype: torch.dtype

    def fitted(self, alphas: tuple[float, ...], evaluations: int, name: str = "") -> Fitted:
        """Train and normalise; where the numbers leave the finite ones, the noise alone is kept."""
        job, ground, parts = self.job, self.ground, self.parts
        width = len(parts.train.columns.modelled)
        model = job.build_model(width, ground.noise, alphas).to(self.dtype)
        if job.model == "tilted":
            _flatten(model)
        history, failed = History([]), ""
        if parts.validation is not None or job.model != "tilted":
            history, failed = self._trained(model, alphas, name)
        device = self.fabric.device
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeightsWarning)  # the verdict says it
            density = Density.normalise(
                model.to(device),
                ground.noise.to(device),
                ground.transform.to(device),
                data=parts.train,
                held_out=parts.held_out,
                n=job.n_importance or DRAWS,
                evaluations=evaluations,
                generator=stream(job.training.seed, "log Z", device=device),
                progress=self.progress,
            )
        return Fitted(density, history, alphas, failed)

    def _trained(self, model: nn.Module, alphas: tuple[float, ...], name: str) -> tuple[History, str]:
        job, ground, parts = self.job, self.ground, self.parts
        rows: RowSource = Transformed(parts.train, ground.transform, self.dtype)
        if len(parts.train) * len(parts.train.columns.modelled) <= IN_MEMORY:
            rows = rows[torch.arange(len(rows))].to(self.fabric.device)
        held = None
        if parts.validation is not None:
            held = groundwork.reached(Transformed(parts.validation, ground.transform, self.dtype))
        training = job.training
        if held is None and training.iterate.startswith("best"):
            training = replace(training, iterate="last", patience=None)
        folder = None if self.folder is None else self.folder / name
        before = {key: value.clone() for key, value in model.state_dict().items()}
        try:
            history = train(
                model,
                job.build_estimator(ground.noise, alphas),
                rows,
                training,
                validation=held,
                fabric=self.fabric,
                folder=folder,
                resume=self.resume and folder is not None and (folder / CHECKPOINT).exists(),
                strict=job.strict,
                watch=True,
                progress=self.progress,
            )
        except NonFiniteObjective as problem:
            if job.strict or job.model != "tilted":
                raise
            text = str(problem)
            warnings.warn(
                f"Training was given up, and the noise alone is the density: {text}", HealthWarning, stacklevel=2
            )
            model.load_state_dict(before)
            return History([]), text
        return history, ""

    def log_p(self, density: Density) -> Tensor:
        """Return the log density of the validation rows."""
        assert self.parts.validation is not None
        return _log_probs(density.log_prob, self.parts.validation)


def _best(trial: _Trial, evaluations: Callable[[], int]) -> tuple[Fitted, str]:
    """Fit with the bridges that were chosen, and where a pilot chose some, also without; keep the better.

    Returns:
        The better one, and in words why, where there was a choice.
    """
    alphas = trial.ground.alphas
    if trial.job.count_of_bridges is not None or not alphas or trial.parts.validation is None:
        return trial.fitted(alphas, evaluations()), ""
    plain = trial.fitted((), evaluations(), STAGES[0])
    bridged = trial.fitted(alphas, evaluations(), STAGES[1])
    better, why = _better(trial, plain, bridged)
    if trial.folder is not None:
        (trial.folder / STAGES[better is bridged] / "chosen").write_text("")
    return better, why


def _better(trial: _Trial, plain: Fitted, bridged: Fitted) -> tuple[Fitted, str]:
    """Return the better of two fits by the validation rows, and why."""
    gap = trial.log_p(bridged.density) - trial.log_p(plain.density)
    gain, error = float(gap.mean()), float(gap.std() / math.sqrt(max(1, len(gap))))
    count, known = len(bridged.alphas) - 1, f"{gain:+.3f} ± {error:.3f} nats a validation row"
    doubted = bool(plain.density.doubts) and not bridged.density.doubts
    if bridged.density.doubts and not plain.density.doubts:
        return plain, f"No bridges: with {count} log Z cannot be believed."
    if (math.isfinite(gain) and gain > BETTER * error) or doubted:
        why = f"without them log Z cannot be believed ({known})" if doubted else f"they gain {known}"
        return bridged, f"{count} bridges: {why}."
    return plain, f"No bridges: {count} would gain {known}."


def _flatten(model: nn.Module) -> None:
    """Begin at the noise: set the network's last layer to zero."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if layers:
        nn.init.zeros_(layers[-1].weight)
        nn.init.zeros_(layers[-1].bias)


def _bounds(density: Density, columns: Columns, n: int, seed: int) -> Bounds:
    """Find the bounds by weighted draws of the noise where these can be believed, else by draws of the density."""
    if (cells := density.mass_by_cells()) is not None:
        points, shares = cells
        return Bounds.of(columns, n, points.numpy(), shares.numpy(), math.inf)
    generator, first = stream(seed, "bounds"), density.log_zs.get("importance")
    if first is not None and believable(first) and first.ess > LEAST_SHARE * first.n:
        with torch.no_grad():
            z, log_w = log_weights(density.model, density.noise, BOUND_DRAWS, generator=generator)
            x, shares = density.transform.inverse(z.double()).numpy(), torch.softmax(log_w.double(), 0)
        return Bounds.of(columns, n, x, shares.numpy(), float(1 / shares.square().sum()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MixingWarning)  # the verdict on samples says it
        draws = density.draws(CHAIN_DRAWS, generator=generator, progress=False)
    return Bounds.of(columns, n, draws.x.numpy(), worth=draws.ess)


def _log_probs(log_prob: Callable[[Tensor], Tensor], rows: RowSource) -> Tensor:
    with torch.no_grad():
        parts = torch.arange(len(rows)).split(2**14)
        return torch.cat([log_prob(rows[part]) for part in parts]).double()


def judge(table: TableDensity, parts: Parts, best: Fitted, job: Job) -> tuple[dict[str, Any], Verdict]:
    """Return the numbers of a fit and the verdict."""
    density, history = table.density, best.history
    enough = parts.test is not None and len(parts.test) >= LEAST_ROWS_TO_JUDGE
    held = parts.test if enough else parts.held_out
    result: dict[str, Any] = {"log_z": {method: z._asdict() for method, z in density.log_zs.items()}}
    result["log_z_stderr"], result["log_mass"] = table.log_z.stderr, table.bounds.log_mass
    result["rungs"] = density.climb.lines() if density.climb is not None else []
    result["steps"] = int(history["step"][-1]) if len(history) else 0
    result["fit_seconds"] = history["seconds"][-1] if len(history) else 0.0
    result["bridges"], result["certified"] = max(1, len(best.alphas) - 1), history.certified
    of_both = "validation" if parts.test is None else "test and validation"
    result["judged_on"] = "test" if enough else of_both if held is not None else None
    result["train_nll"] = -float(
        table.log_prob(_part(parts.train, TOLD_OF_CELLS if table.columns.averaged.any() else TOLD).rows()).mean()
    )
    gain, error, n, finite = None, math.inf, 0, True
    if held is not None:
        held = _part(held, TESTED)
        scores = table.log_prob(held.rows())
        log_p, log_q = (_log_probs(each, held).numpy() for each in (density.log_prob, density.noise_log_prob))
        n, finite = len(scores), bool(np.isfinite(scores).all())
        gap = log_p - log_q
        gain, error = float(gap.mean()), _standard_error(gap)
        result["test_nll"], result["test_rows"] = -float(scores.mean()), n
        result["test_stderr"] = math.hypot(_standard_error(scores), table.log_z.stderr)
        result["noise_nll"] = result["test_nll"] + gain
        result["gain_stderr"] = error
    kept = history.kept_step if history.kept_step is not None else math.inf
    warned = [line for line, step in zip(history.warnings, history.warned_at, strict=True) if step <= kept]
    problems = []
    if _singular(_some(parts.train, TOLD)):
        problems.append("some column is a linear function of the others: such rows have no density")
    fit = judge_fit(
        gain,
        error,
        n,
        history.trend,
        wholly_finite=finite,
        steps=result["steps"],
        warned=warned,
        problems=problems,
        failed=best.failed,
    )
    with warnings.catch_warnings():
        for kind in (MixingWarning, WeightsWarning):  # the verdict says it
            warnings.simplefilter("ignore", kind)
        _, draws = table.draw(SAMPLES, generator=stream(job.training.seed, "samples of the verdict"))
    result["samples"] = {"method": draws.method, "worth": draws.ess, "n": SAMPLES}
    result["samples"]["r_hat"] = None if math.isnan(draws.r_hat) else draws.r_hat
    doubts = [*density.doubts]
    if not math.isfinite(table.bounds.stderr):
        doubts.append("hardly any of the density lies within the ranges of the columns")
    verdict = Verdict(
        judge_log_z(density.log_zs, doubts, density.unchecked, density.not_ruled_out),
        fit,
        judge_samples(draws.how(), SAMPLES, draws.ess, draws.r_hat),
    )
    result["health"], result["warned"], result["failed"] = list(history.warnings), warned, best.failed
    for name in ("log_u", "log_z"):
        if history[name] and history.kept_step is None:  # another iterate's says nothing of the one that is kept
            result[f"training_{name}"] = history[name][-1]
    return result, verdict


def _part(rows: EncodedRows, count: int) -> EncodedRows:
    """Return at most `count` of the rows, which are in a random order."""
    return EncodedRows(rows.values, rows.columns, rows.order, rows.at[:count], rows.seed)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf


def _singular(rows: np.ndarray) -> bool:
    """Return whether some column is a linear function of the others, so that the rows have no density."""
    if not 2 <= rows.shape[1] <= 1000 or len(rows) <= rows.shape[1]:
        return False
    size = np.maximum(np.abs(rows).max(0), 1e-300)  # so that squares do not overflow
    centred = rows / size - (rows / size).mean(0)
    scaled = centred / np.maximum(centred.std(0), 1e-300)
    return bool(np.linalg.eigvalsh(scaled.T @ scaled / len(rows))[0] < 1e-9)


@contextmanager
def gathered() -> Iterator[list[Warning]]:
    """Gather what the parts warn of: a person with a table reads it in one place. Others' warnings go on their way."""
    told: list[Warning] = []
    with warnings.catch_warnings(record=True) as caught:
        for kind in OURS:
            warnings.simplefilter("always", kind)
        yield told
    for one in caught:
        if isinstance(one.message, OURS):
            told.append(one.message)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
