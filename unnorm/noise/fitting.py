"""One call from data to noise; `auto` compares what is cheap on rows set aside."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unnorm.data.quantiles import discrete_cells
from unnorm.data.rows import RowSource, moments, spread
from unnorm.errors import DataError, InvalidValue, ShrinkageWarning
from unnorm.names import choose, options_of
from unnorm.noise.base import Noise
from unnorm.noise.choice import Choice
from unnorm.noise.copula import Copula
from unnorm.noise.flow import Flow
from unnorm.noise.gaussian import Gaussian
from unnorm.noise.mixture import GaussianMixture, Mixture
from unnorm.noise.smoothed import Smoothed
from unnorm.noise.uniform import Uniform
from unnorm.randomness import stream

__all__ = ["fit"]

Fit = Callable[..., Noise]


def _smoothed(data: RowSource, generator: torch.Generator | None, **options: Any) -> Noise:
    return Smoothed.fit(data, **{"bandwidth": "loo"} | options)


def _with_gaussian(data: RowSource, generator: torch.Generator | None, share: float = 0.5, **options: Any) -> Noise:
    if not 0 < share < 1:
        raise InvalidValue(f"The 'share' of the smoothed rows must be between 0 and 1. Got {share}.")
    return Mixture([_smoothed(data, generator, **options), Gaussian.fit(data)], [share, 1 - share])


KINDS: Mapping[str, Fit] = {
    "gaussian": lambda data, generator, **options: Gaussian.fit(data, **options),
    "gaussian-diagonal": lambda data, generator, **options: Gaussian.fit(data, "diagonal", **options),
    "gaussian-low-rank": lambda data, generator, **options: Gaussian.fit(data, "low-rank", **options),
    "copula": lambda data, generator, **options: Copula.fit(data, **options),
    "mixture": lambda data, generator, **options: GaussianMixture.fit(data, **options),
    "smoothed": _smoothed,
    "smoothed+gaussian": _with_gaussian,
    "flow": lambda data, generator, **options: Flow.fit(data, **{"generator": generator} | options),
    "uniform": lambda data, generator, **options: Uniform.fit(data, **options),
}
WIDE = 2000  # columns above which no full covariance is fitted
MIXTURE_COLUMNS = 100
SMOOTHED_COLUMNS, SMOOTHED_ROWS = 20, 5000
LEAST_ROWS = 20  # fewer are not divided
HELD_OUT = 5000
COMPARED = 100_000  # rows that candidates are fitted to at most; the winner is fitted to all


def fit(
    data: RowSource,
    kind: str = "auto",
    *,
    held_out: RowSource | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Noise:
    """A noise close to the data; its attribute `choice` says which, and `choice.line()` says it to a person.

    Args:
        data: rows to fit to.
        kind: "gaussian", "gaussian-diagonal", "gaussian-low-rank", "copula", "mixture" (of Gaussians), "smoothed" (a
            data point plus noise), "smoothed+gaussian" (the paper's mixture of these two; `share` is the first's),
            "flow" (a trained one; needs zuko), "uniform"; or "auto".
        held_out: rows that "auto" compares on, at most 5,000 of them; the noise is not fitted to them. When None, a
            tenth of the data, from 5 to 5,000 rows, is set aside for it, and the winner is fitted anew to all.
        generator: draws which rows are set aside, and a flow's training; seed 0 when None.
        options: of the kind's own `fit`, such as components=8 of a mixture; "auto" has none.

    "auto" tries the Gaussian (low-rank and diagonal above 2,000 columns), the copula (up to 2,000 columns), the mixture
    (up to 100 columns) and the smoothed rows (up to 20 columns and 5,000 rows). It takes the one with the highest mean
    log density of the held-out rows, or the first in this order that is within one standard error of it (of the
    difference, row by row). A flow is never tried. Fewer than 20 rows are not divided: the Gaussian is taken.

    A density of a constant column, or of integers, can be as high as its spikes are narrow. Therefore constant columns
    have no part in the comparison, and in it each value of a discrete column is spread evenly over its cell, as
    `Gaussianize` has it.

    >>> x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)).exp()
    >>> q = fit(x)
    >>> q.choice.kind
    'copula'
    >>> fit(x, "gaussain")
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: Unknown kind of noise 'gaussain'. Did you mean 'gaussian'? Known: gaussian, ...
    """
    if kind != "auto":
        make = choose("kind of noise", kind, {**KINDS, "auto": KINDS["gaussian"]})
        with options_of(f"noise '{kind}'"):
            noise = make(data, generator, **options)
        noise.choice = Choice(kind)
        return noise
    if options:
        raise InvalidValue(f"The noise 'auto' has no options: name the kind to give it {', '.join(options)}.")
    if len(data) == 0 or (held_out is not None and len(held_out) == 0):
        raise DataError("The data have no rows." if len(data) == 0 else "The 'held_out' data have no rows.")
    generator = generator or stream(0, "noise")
    some, judge = _divided(data, held_out, generator)
    names, left_out = _candidates(some)
    tried: dict[str, Tried] = {}
    if judge is None:
        left_out = dict.fromkeys([*names[1:], *left_out], f"{len(data)} rows are too few to set some aside")
    else:
        tried, failed = _compared(names, *_comparable(some, judge, generator), generator)
        left_out |= failed
    winner = _pick(tried) if tried else names[0]
    noise = _anew(winner, tried, data, generator)
    scores = {name: float(found.log_q.mean()) for name, found in tried.items()}
    errors = {name: _difference(tried[winner], found)[1] for name, found in tried.items() if name != winner}
    noise.choice = Choice(winner, scores, errors, left_out, 0 if judge is None else len(judge))
    return noise


class Tried(NamedTuple):
    """A candidate and its log density of each held-out row."""

    noise: Noise
    log_q: Tensor


class _Some:
    """Rows `index` of the data."""

    def __init__(self, data: RowSource, index: Tensor):
        self.data, self.index = data, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: Tensor, /) -> Tensor:
        return self.data[self.index[index]]


def _divided(
    data: RowSource, held_out: RowSource | None, generator: torch.Generator
) -> tuple[RowSource, Tensor | None]:
    """The rows to fit to, and those to compare on."""
    if held_out is not None:
        return _Some(data, spread(len(data), COMPARED)), held_out[spread(len(held_out), HELD_OUT)]
    if len(data) < LEAST_ROWS:
        return data, None
    some = spread(len(data), COMPARED + HELD_OUT)
    apart = min(HELD_OUT, max(5, len(some) // 10))
    order = some[torch.randperm(len(some), generator=generator, device=generator.device).cpu()]
    return _Some(data, order[apart:].sort().values), data[order[:apart].sort().values]


class _Columns:
    """Rows as flat ones, less their constant columns; values of discrete columns spread evenly over their cells."""

    def __init__(self, data: RowSource, varying: Tensor, cells: list[Tensor | None], generator: torch.Generator):
        self.data, self.varying, self.cells = data, varying, cells
        discrete = sum(own is not None for own in cells)
        self.places = torch.rand(len(data), discrete, generator=generator, device=generator.device).cpu()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Tensor, /) -> Tensor:
        rows = self.data[index].flatten(1)[:, self.varying.to(index.device)].double()
        places = iter(self.places[index.cpu()].to(rows).T)
        for column, edges in enumerate(self.cells):
            if edges is not None:
                edges = edges.to(rows)
                place = torch.searchsorted(edges, rows[:, column].contiguous(), right=True) - 1
                cell = place.clamp(0, len(edges) - 2)
                rows[:, column] = edges[cell] + next(places) * (edges[cell + 1] - edges[cell])
        return rows


def _comparable(data: RowSource, judge: Tensor, generator: torch.Generator) -> tuple[RowSource, Tensor]:
    """The rows to compare on, and those set aside, without what would decide by the width of spikes."""
    constant = moments(data).constant.flatten().cpu()
    cells = discrete_cells(data)
    if constant.all() or not (constant.any() or any(own is not None for own in cells)):
        return data, judge
    kept = [own for own, still in zip(cells, constant.tolist(), strict=True) if not still]
    everything = torch.arange(len(judge), device=judge.device)
    return _Columns(data, ~constant, kept, generator), _Columns(judge, ~constant, kept, generator)[everything]


def _candidates(data: RowSource) -> tuple[list[str], dict[str, str]]:
    """What is cheap at this size, the simplest first; and why the rest is not."""
    width = math.prod(data[torch.zeros(1, dtype=torch.int64)].shape[1:])
    narrow = {"copula": WIDE, "mixture": MIXTURE_COLUMNS, "smoothed": SMOOTHED_COLUMNS}
    names, left_out = ["gaussian"] if width <= WIDE else ["gaussian-low-rank", "gaussian-diagonal"], {}
    for name, most in narrow.items():
        if width > most:
            left_out[name] = f"{width} columns are more than {most}"
        elif name == "smoothed" and len(data) > SMOOTHED_ROWS:
            left_out[name] = f"{len(data)} rows are more than {SMOOTHED_ROWS}"
        else:
            names.append(name)
    return names, left_out


def _compared(
    names: list[str], data: RowSource, judge: Tensor, generator: torch.Generator
) -> tuple[dict[str, Tried], dict[str, str]]:
    """The candidates that could be fitted; and why the rest could not."""
    found = {name: _try(name, data, judge, generator) for name in names}
    tried = {name: result for name, result in found.items() if isinstance(result, Tried)}
    failed = {name: result for name, result in found.items() if isinstance(result, str)}
    if not tried:
        raise DataError(f"No noise could be fitted: {'; '.join(f'{name}: {why}' for name, why in failed.items())}.")
    return tried, failed


def _try(name: str, data: RowSource, judge: Tensor, generator: torch.Generator) -> Tried | str:
    """The candidate, or why there is none."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", ShrinkageWarning)  # the winner says it when it is fitted anew
            noise = KINDS[name](data, generator).double()
            log_q = torch.cat([noise.log_prob(part.double().cpu()) for part in judge.split(1000)])
    except (ArithmeticError, RuntimeError, ValueError) as problem:
        return f"it failed: {' '.join(str(problem).split())[:120]}"
    if log_q.isnan().any():
        return f"its log density is not a number at {int(log_q.isnan().sum())} of {len(log_q)} held-out rows"
    return Tried(noise, log_q)


def _difference(first: Tried, second: Tried) -> tuple[float, float]:
    """Mean difference of log density and its standard error."""
    difference = first.log_q - second.log_q
    if not torch.isfinite(difference).all():
        return float(first.log_q.mean() - second.log_q.mean()), math.inf
    return float(difference.mean()), float(difference.std(correction=0) / math.sqrt(len(difference)))


def _pick(tried: Mapping[str, Tried]) -> str:
    """The best, or the first that is within one standard error of it."""
    best = max(tried, key=lambda name: float(tried[name].log_q.mean()))
    for name, found in tried.items():
        gap, error = _difference(tried[best], found)
        if math.isfinite(gap) and gap <= error:
            return name
    return best


def _anew(name: str, tried: Mapping[str, Tried], data: RowSource, generator: torch.Generator) -> Noise:
    """The winner, fitted to all rows; of a mixture the number of components is known by now."""
    before = tried[name].noise if name in tried else None
    if isinstance(before, GaussianMixture):
        return GaussianMixture.fit(data, before.components, before.covariance)
    return KINDS[name](data, generator)
