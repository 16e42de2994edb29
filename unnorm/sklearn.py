"""scikit-learn estimators: a normalised density of a table, and a detector of its anomalies.

Here scikit-learn's meaning of `score` and `score_samples` wins: a score is a log density, not the gradient of one.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import joblib
import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, DensityMixin, OutlierMixin, _fit_context
from sklearn.utils import Tags
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from unnorm.data.rows import chunks
from unnorm.density import Density
from unnorm.errors import ConstantColumnWarning, HealthWarning, InvalidValue, WeightsWarning
from unnorm.noise.fitting import KINDS
from unnorm.tables.density import seed_of
from unnorm.tables.frames import Source, kind_of_frame, source_of, table_of
from unnorm.tables.weights import repeated, repetitions
from unnorm.types import LogZ

__all__ = ["EnergyDensity", "EnergyOutlierDetector", "warn_of_constants"]

CHUNK = 2**14
SAME = 1e-9  # relative: a constant is met within rounding
COMMON: dict[str, list[Any]] = {
    "device": [StrOptions({"auto", "cpu", "cuda"})],
    "random_state": ["random_state"],
    "n_jobs": [Integral, None],
    "verbose": ["verbose"],
}


class _Table(BaseEstimator):
    """What both estimators share: how they take a table, and what a fitted one has."""

    density_: Density
    device: str
    random_state: Any
    n_jobs: int | None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags

    def _weighted(self, x: np.ndarray, sample_weight: ArrayLike | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return rows and how often each counts; rows of weight 0 are left out."""
        counts = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
            x, weights = x[weights > 0], weights[weights > 0]
            if len(x) < 2:
                raise ValueError(f"{len(x)} rows have a sample weight above zero, while a minimum of 2 is required.")
            counts = repetitions(x, weights)
        with np.errstate(over="ignore"):
            if not np.isfinite(x.max(0) - x.min(0)).all():
                raise ValueError(
                    "Input X contains values too large for dtype('float64'): a column's range is infinite."
                )
        kept = x if counts is None else x[counts > 0]
        if (kept == kept[0]).all():
            why = "" if counts is None else ", with nearly all of the sample weights on equal rows"
            raise ValueError(f"All {x.shape[1]} columns are constant (n_samples={len(x)}){why}: they have no density.")
        return x, counts

    @property
    def log_z_(self) -> LogZ:
        """log Z with its standard error and how it was found."""
        check_is_fitted(self)
        return self.density_.log_z

    @property
    def noise_(self) -> torch.nn.Module:
        """The noise, in the model's units.

        A noise that was picked is often a standard normal in coordinates of its own, and the map to these is a part of
        `density_.transform`: of a copula this is a `Gaussian`. `diagnostics_["chosen"]["noise"]` names what was picked.
        """
        check_is_fitted(self)
        return self.density_.noise

    @property
    def model_(self) -> torch.nn.Module:
        """The model, log p~, in its own units."""
        check_is_fitted(self)
        return self.density_.model


class EnergyDensity(DensityMixin, _Table):
    """A normalised density of a table, learned as an energy-based model by MECO.

    This is `unnorm.fit` as a scikit-learn estimator: one computation, with the same scores and the same samples for one
    seed and one share of test rows. Columns are scaled by medians and quartiles, with far tails drawn in; a noise is
    chosen on held-out rows, and a network tilts it as long as held-out rows say that this helps. The order of the rows
    does not matter. Data frames may have columns of words, and `sample` then returns a data frame. Missing values are
    refused.

    Args:
        noise: "auto", which compares on held-out rows, or a kind (`unnorm.noise.fit`).
        bridges: "auto", "none" or how many.
        hidden: widths of the network; they follow from the size of the table when None.
        steps: of training at most; they follow from the number of rows when None.
        lr: learning rate, falling along a cosine.
        patience: looks at the held-out rows, 25 steps apart, without a new best, after which training ends.
        test: share of the rows that are kept out, to judge the fit on.
        max_time: seconds of fitting, about. The noise is fitted first, which takes its time whatever is said here.
        device: "cpu", "cuda" or "auto".
        random_state: of everything random. An integer is the seed of `unnorm.fit`.
        n_jobs: threads; None leaves torch's own number.
        verbose: show a progress bar.

    Attributes:
        table_: the `unnorm.TableDensity`.
        density_: the `unnorm.Density` of the columns as the model sees them.
        log_z_: a `LogZ`: value, stderr, ess, khat, method, n.
        noise_, model_: in the model's units.
        history_: of training.
        diagnostics_: whether log Z is to be trusted, what speaks against it, the verdict, what was chosen, seconds.
            `["chosen"]["noise"]` names the noise that "auto" picked, in the units of the scaled columns.
        columns_: the kinds of the table's columns.

    >>> x = np.random.RandomState(0).standard_normal((300, 2))
    >>> density = EnergyDensity(random_state=0, noise="gaussian", bridges="none", steps=25).fit(x)
    >>> bool(abs(density.score(x) + 2.8) < 0.2), density.sample(3).shape
    (True, (3, 2))
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **COMMON,
        "noise": [StrOptions({"auto", *KINDS})],
        "bridges": [StrOptions({"auto", "none"}), Interval(Integral, 1, None, closed="left")],
        "hidden": ["array-like", None],
        "steps": [Interval(Integral, 1, None, closed="left"), None],
        "lr": [Interval(Real, 0, None, closed="neither")],
        "patience": [Interval(Integral, 1, None, closed="left")],
        "test": [Interval(Real, 0, 1, closed="left")],
        "max_time": [Interval(Real, 0, None, closed="neither"), None],
    }

    def __init__(
        self,
        *,
        noise: str = "auto",
        bridges: str | int = "auto",
        hidden: Sequence[int] | None = None,
        steps: int | None = None,
        lr: float = 1e-3,
        patience: int = 20,
        test: float = 0.0,
        max_time: float | None = None,
        device: str = "cpu",
        random_state: Any = None,
        n_jobs: int | None = None,
        verbose: bool | int = False,
    ):
        self.noise, self.bridges, self.hidden = noise, bridges, hidden
        self.steps, self.lr, self.patience, self.test, self.max_time = steps, lr, patience, test, max_time
        self.device, self.random_state, self.n_jobs, self.verbose = device, random_state, n_jobs, verbose

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: Any = None, sample_weight: ArrayLike | None = None) -> Self:
        """Fit to rows; a row of weight two counts as two rows, one of weight 0 as none.

        Whole weights are numbers of copies: all 2 is a table of twice as many rows, and another fit than all 1. Weights
        that are not whole are divided by the least of them: all 0.5 is the same as none. Where the quotients are not
        whole either, they are rounded.
        """
        from unnorm.device import fabric_for  # what trains takes seconds to import: only fitting waits for it
        from unnorm.settings import AUTOMATIC, Job
        from unnorm.tables.fit import fit_source
        from unnorm.training import Training

        read, frame = self._read(X)
        values, counts = self._weighted(read.values, sample_weight)
        seed = seed_of(self.random_state)
        given = {"steps": self.steps, "patience": self.patience}
        known: dict[str, Any] = {name: int(value) for name, value in given.items() if value is not None}
        job = Job(
            "table",
            test=self.test,
            noise=self.noise,
            bridges=str(self.bridges),
            hidden=None if self.hidden is None else tuple(self.hidden),
            training=Training(seed=seed, lr=self.lr, log_every=25, **known),
            automatic=tuple(name for name in AUTOMATIC if name not in known),
        )
        with _apart(self.n_jobs):
            table = fit_source(
                read._replace(values=values),
                job,
                fabric=fabric_for(self.device),
                weights=counts,
                seconds=self.max_time,
                frame=frame,
                progress=bool(self.verbose),
            ).density
        self.table_, self.density_, self.history_, self.columns_ = table, table.density, table.history, table.columns
        self.diagnostics_ = {
            "log_z": table.density.log_z,
            "trusted": not table.density.doubts,
            "doubts": list(table.density.doubts),
            "verdict": table.verdict,
            **{name: table.result[name] for name in ("warnings", "chosen", "bridges", "steps", "seconds")},
        }
        self.columns_.warn()
        if failed := table.result["failed"]:
            text = f"Training was given up, and the noise alone is the density: {failed}"
            warnings.warn(text, HealthWarning, stacklevel=2)
        table.warn_of_doubts()
        return self

    def _read(self, X: Any) -> tuple[Source, str]:
        """Return the table as numbers, and the kind of data frame it is; what scikit-learn refuses is refused."""
        frame = kind_of_frame(X)
        if not frame:
            x = validate_data(self, _numbers(X), dtype=np.float64, ensure_min_samples=2)
            names = tuple(map(str, getattr(self, "feature_names_in_", range(x.shape[1]))))
            return Source(x, names, {}, (), None, False), ""
        validate_data(self, _numbers(X), skip_check_array=True)
        if len(X) < 2:
            raise ValueError(f"Found array with {len(X)} sample(s) while a minimum of 2 is required.")
        read = source_of(table_of(X))
        if read.dropped:
            raise ValueError(
                f"Input X contains NaN: {read.dropped:,} rows have a missing cell. unnorm.fit leaves such rows out."
            )
        return read, frame

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Return the normalised log density of each row, in the units of X (`TableDensity.score_samples`)."""
        check_is_fitted(self)
        if kind_of_frame(X):
            validate_data(self, _numbers(X), skip_check_array=True, reset=False)
            rows, _ = self.table_.rows_of(table_of(X), "X")
            if np.isnan(rows).any():
                raise ValueError("Input X contains NaN.")
        else:
            rows = validate_data(self, _numbers(X), dtype=np.float64, reset=False)
        with _threads(self.n_jobs):
            return self.table_.log_prob(rows)

    def score(self, X: ArrayLike, y: Any = None) -> float:
        """Return the mean log density of the rows, in nats, as of GaussianMixture; KernelDensity returns their sum."""
        return float(self.score_samples(X).mean())

    def sample(self, n_samples: int = 1, random_state: Any = None) -> Any:
        """Draw rows, in the units of X: a data frame where the estimator was fitted to one, else an array.

        Discrete columns and words have only values that occur, and constant columns are as they were.
        """
        check_is_fitted(self)
        if isinstance(n_samples, bool) or not isinstance(n_samples, Integral) or n_samples < 1:
            raise InvalidValue(f"n_samples must be an int of at least 1. Got {n_samples!r}.")
        with _threads(self.n_jobs):
            return self.table_.sample(
                int(n_samples), random_state=self.random_state if random_state is None else random_state
            )


class EnergyOutlierDetector(OutlierMixin, _Table):
    """A detector of anomalies: three energies of a row, each as the share of rows that are as unusual, combined.

    The three are the tails of single columns, a mixture of few Gaussians, and a learned density: networks trained by
    MECO against a Gaussian wider than the rows, averaged. Rows that hold groups of anomalies teach a density of great
    capacity that these are usual; the learned one is trained for a short time, and the two simpler ones hardly notice.
    An integer or a category is a number like any other here.

    Args:
        contamination: the share of the training rows that `predict` calls anomalies, in (0, 0.5]. Of new rows it calls
            more, the fewer the training rows and the more the columns: the energies were fitted to the training rows,
            which are less unusual to them. At 0.1 it is 20 to 27% of new normal rows after 100 rows of 5 columns,
            15 to 17% after 2,000 of 20. For a share of new rows take a quantile of `score_samples` of held-out rows.
        experts: networks that are averaged.
        hidden: widths of each.
        steps: of their training.
        max_time: seconds of fitting, about; training ends when half of them are over.
        device: "cpu", "cuda" or "auto".
        random_state: of everything random.
        n_jobs: threads; None leaves torch's own number.
        verbose: show a progress bar.

    Attributes:
        offset_: what `decision_function` takes from `score_samples`.
        committee_: the three energies and their calibration.
        rows_: how many rows these were fitted to, weights counted.
        density_, log_z_, noise_, model_: of the learned one, over the columns that vary.
        history_: of its training.
        diagnostics_: how many networks it has, whether its log Z is to be trusted, seconds.
        varying_: which columns vary.

    >>> rng = np.random.RandomState(0)
    >>> x = np.r_[rng.standard_normal((200, 2)), [[9.0, 9.0]]]
    >>> detector = EnergyOutlierDetector(random_state=0, contamination=0.01, steps=25).fit(x)
    >>> detector.predict([[0.0, 0.0], [9.0, 9.0]]).tolist()
    [1, -1]
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **COMMON,
        "contamination": [Interval(Real, 0, 0.5, closed="right")],
        "experts": [Interval(Integral, 1, None, closed="left")],
        "hidden": ["array-like"],
        "steps": [Interval(Integral, 1, None, closed="left")],
        "max_time": [Interval(Real, 0, None, closed="neither"), None],
    }

    def __init__(
        self,
        *,
        contamination: float = 0.1,
        experts: int = 4,
        hidden: Sequence[int] = (64, 64),
        steps: int = 300,
        max_time: float | None = None,
        device: str = "cpu",
        random_state: Any = None,
        n_jobs: int | None = None,
        verbose: bool | int = False,
    ):
        self.contamination, self.experts, self.hidden = contamination, experts, hidden
        self.steps, self.max_time = steps, max_time
        self.device, self.random_state, self.n_jobs, self.verbose = device, random_state, n_jobs, verbose

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: Any = None, sample_weight: ArrayLike | None = None) -> Self:
        """Fit to rows, anomalies among them or not; labels are never looked at.

        Weights count as of `EnergyDensity`: whole ones are numbers of copies, others are divided by the least of them.
        """
        from unnorm.device import fabric_for
        from unnorm.tables.committee import Experts, fit_committee

        x, counts = self._weighted(
            validate_data(self, _numbers(X), dtype=np.float64, ensure_min_samples=2), sample_weight
        )
        rows, seed = repeated(x, counts), seed_of(self.random_state)
        self.constants_, self.varying_ = rows[0].copy(), (rows != rows[0]).any(0)
        warn_of_constants(self.varying_, getattr(self, "feature_names_in_", np.arange(x.shape[1])))
        varying = rows[:, self.varying_]
        experts = Experts(
            self.experts,
            tuple(self.hidden),
            self.steps,
            seconds=None if self.max_time is None else 0.5 * self.max_time,
            seed=seed,
            progress=bool(self.verbose),
        )
        began = time.perf_counter()
        with _apart(self.n_jobs):
            self.committee_ = fit_committee(varying, experts, fabric_for(self.device))
        self.rows_ = len(rows)
        learned = self.committee_.learned
        self.density_, self.history_ = learned.density, learned.history
        self.offset_ = float(np.quantile(-self.committee_.surprise(varying), self.contamination))
        self.diagnostics_ = {
            "log_z": learned.density.log_z,
            "trusted": not learned.density.doubts,
            "doubts": list(learned.density.doubts),
            "experts": learned.alive,
            "components": self.committee_.mixture.n_components,
            "steps": int(learned.history["step"][-1]),
            "seconds": time.perf_counter() - began,
        }
        if learned.alive < self.experts:
            rest = "the others are the learned energy" if learned.alive else "the noise alone is the learned energy"
            warnings.warn(
                f"{self.experts - learned.alive} of {self.experts} networks diverged and have no say: {rest}.",
                HealthWarning,
                stacklevel=3,
            )
        return self

    def _read(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self)
        x: np.ndarray = validate_data(self, _numbers(X), dtype=np.float64, reset=False)
        return x

    def log_density(self, X: ArrayLike) -> np.ndarray:
        """The normalised log density of each row by the learned energy, in the units of X.

        Where its log Z is not to be trusted a WeightsWarning says why: all values are then off by the same number.
        """
        x = self._read(X)
        if self.density_.doubts:
            warnings.warn(
                f"log Z cannot be believed: {'; '.join(self.density_.doubts)}. The ranks of rows are not concerned.",
                WeightsWarning,
                stacklevel=2,
            )
        rows = torch.from_numpy(np.ascontiguousarray(x[:, self.varying_]))
        with torch.no_grad(), _threads(self.n_jobs):
            return torch.cat([self.density_.log_prob(part) for part in chunks(rows, CHUNK)]).numpy()

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """The mean over the three energies of the log share of training rows that are as unusual; low is unusual.

        How far out an energy is takes a little more away, by its logarithm. A row with another value in a column that
        was constant is more unusual than all: there was none among the rows.
        """
        x = self._read(X)
        rest = ~self.varying_
        new = ~np.isclose(x[:, rest], self.constants_[rest], rtol=SAME, atol=0.0)
        with _threads(self.n_jobs):
            return -self.committee_.surprise(x[:, self.varying_]) - np.log1p(self.rows_) * new.sum(1)

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """`score_samples` less `offset_`: below zero is an anomaly."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> np.ndarray:
        """-1 for anomalies, 1 for the others; new rows exceed `contamination` (see there)."""
        return np.where(self.decision_function(X) < 0, -1, 1)


def warn_of_constants(varying: np.ndarray, names: np.ndarray) -> None:
    """Say which columns are left out."""
    places = np.flatnonzero(~varying)
    if len(places):
        called = ", ".join(str(names[place]) for place in places[:5]) + (", ..." if len(places) > 5 else "")
        verb = "is" if len(places) == 1 else "are"
        text = f"{len(places)} of {len(varying)} columns {verb} constant and left out: {called}."
        warnings.warn(text, ConstantColumnWarning, stacklevel=3)


def _numbers(X: Any) -> Any:
    """X as it is; a query that was not run, and dates, are refused: scikit-learn's words would not say why."""
    if hasattr(X, "collect") and not hasattr(X, "__array__"):
        raise TypeError(f"X is a {type(X).__name__}, whose rows are not computed yet. Pass X.collect().")
    frame = hasattr(X, "columns") and hasattr(X, "dtypes")
    for place, kind in enumerate(X.dtypes if frame else [getattr(X, "dtype", None)]):
        if _temporal(kind):
            called = f"Column {X.columns[place]!r} of X" if frame else "X"
            raise TypeError(
                f"{called} holds dates or times ({kind}). Turn them into numbers first, such as days since the first."
            )
    return X


def _temporal(kind: Any) -> bool:
    """Whether a dtype of numpy, pandas or polars is of dates, times or spans of time."""
    return bool(kind.is_temporal()) if hasattr(kind, "is_temporal") else getattr(kind, "kind", "") in ("m", "M")


@contextmanager
def _apart(n_jobs: int | None) -> Iterator[None]:
    """As many threads as asked for, and torch's global generator as it was: building a network draws from it."""
    with _threads(n_jobs), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _threads(n_jobs: int | None) -> Iterator[None]:
    """As many of torch's threads as asked for; None changes nothing."""
    if n_jobs is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(joblib.effective_n_jobs(n_jobs))
    try:
        yield
    finally:
        torch.set_num_threads(before)
