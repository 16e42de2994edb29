"""How far samples are from data: MMD, Frechet distance, sliced Wasserstein.

Each is a function of two sets of points, (n, *event) and (m, *event), tensors or numpy arrays; `compare` adds the noise
floor.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from unnorm.data.rows import spread
from unnorm.errors import DataError, InvalidValue
from unnorm.metrics.floor import Discrepancy, Metric, noise_floor
from unnorm.names import choose, unknown

__all__ = ["compare", "frechet", "median_bandwidth", "mmd", "sliced_wasserstein"]

BLOCK = 2**21  # kernel values held at once: 16 MB in float64
LOOKED_AT = 1000  # points of each set that choose the bandwidth
PROJECTIONS = 256
DIRECTIONS = 64  # projections held at once

Points: TypeAlias = Tensor | np.ndarray
Bandwidths: TypeAlias = float | np.floating | Sequence[float] | Points


def compare(
    samples: Points,
    data: Points,
    metric: str | Callable[..., float] = "mmd",
    *,
    again: Points | None = None,
    splits: int = 10,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Discrepancy:
    """A metric between samples and data, with its noise floor.

    Args:
        samples: (n, *event) of the model.
        data: (m, *event), held out.
        metric: "mmd", "frechet", "sliced-wasserstein", or any `Metric` of your own. By name, the MMD's bandwidth and
            the directions of the slices are chosen once, for the value and for the floor alike.
        again: more independent data, for the floor only. With as many as there are samples, the floor is that of the
            full sizes; without, the data are divided, and the floor is higher than it need be.
        splits: how many random divisions of the data the floor averages.
        generator: draws the divisions (and directions), on the CPU.
        options: of the metric, for the value and for the floor alike: the `bandwidths` of "mmd", the `features` of
            "frechet" (found anew for each division), `n_projections` and `p` of "sliced-wasserstein".

    >>> g = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(300, 2, generator=g), torch.randn(300, 2, generator=g)
    >>> compare(x, y, generator=g).resolved, compare(x + 1, y, generator=g).resolved
    (False, True)
    >>> compare(x, y, bandwidths=[0.5, 2.0], generator=g).metric
    'mmd'
    """
    samples, data = _tensor(samples), _tensor(data)
    _points(samples, data)
    if again is not None:
        again = _tensor(again).to(data.device)
        _points(again, data)
    measure: Metric
    if isinstance(metric, str):
        name, prepare = metric, choose("metric", metric, PREPARED)
        known = list(inspect.signature(prepare).parameters)[3:]
        for option in options:
            if option not in known:
                raise InvalidValue(unknown(f"option of {metric}", option, known))
        measure = prepare(samples, data, generator, **options)
    else:
        name, measure = _name(metric), partial(metric, **options) if options else metric
    n = len(samples), len(data)
    pool = data if again is None else torch.cat([data, again])
    floor = noise_floor(measure, pool, n, splits=splits, generator=generator)
    return Discrepancy(name, measure(samples, data), floor.rms, n, floor.n, floor.chance)


def mmd(x: Points, y: Points, *, bandwidths: Bandwidths | None = None) -> float:
    """The squared maximum mean discrepancy, unbiased (Gretton et al. 2012, eq. 3), exact over all pairs.

        MMD^2 = mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j)

    with k(a, b) the mean over `bandwidths` h of exp(-|a - b|^2 / (2 h^2)). Its mean is zero where both sets are draws
    of one distribution, so it is negative about half of the time there. Computed in float64, a block at a time.

    Args:
        x: (n, *event).
        y: (m, *event).
        bandwidths: one h or several; `median_bandwidth(x, y)` when None.

    >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]])
    >>> h = 2**-0.5          # so that k(a, b) is exp(-|a - b|^2)
    >>> expected = math.exp(-1) + math.exp(-9) - 2 * (1 + math.exp(-9) + math.exp(-1) + math.exp(-4)) / 4
    >>> abs(mmd(x, y, bandwidths=h) - expected) < 1e-12
    True
    """
    x, y = _points(x, y)
    if bandwidths is None:
        bandwidths = median_bandwidth(x, y)
    if isinstance(bandwidths, str):
        raise InvalidValue(
            f"The 'bandwidths' of mmd are one number or several; None is the median. Got '{bandwidths}'."
        )
    one = isinstance(bandwidths, (int, float)) or getattr(bandwidths, "ndim", 1) == 0
    widths = tuple(float(h) for h in ((bandwidths,) if one else bandwidths))  # type: ignore[union-attr, arg-type]
    if not widths or not all(0 < h < math.inf for h in widths):
        raise InvalidValue(f"The 'bandwidths' of mmd must be positive. Got {bandwidths}.")
    n, m = len(x), len(y)
    centre = y.mean(0)  # squares of large numbers would cancel
    x, y = x - centre, y - centre
    within = _kernel_sum(x, x, widths, same=True) / (n * (n - 1)) + _kernel_sum(y, y, widths, same=True) / (m * (m - 1))
    return within - 2 * _kernel_sum(x, y, widths, same=False) / (n * m)


def median_bandwidth(x: Points, y: Points) -> float:
    """The median distance over all pairs of different points in both sets together: the median heuristic.

    Of a set beyond 1,000 points, 1,000 evenly spread in its order are looked at.

    >>> median_bandwidth(torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [4.0]]))     # of 1, 3, 4, 2, 3, 1
    2.5
    """
    x, y = _points(x, y)
    pooled = torch.cat([part[spread(len(part), LOOKED_AT).to(part.device)] for part in (x, y)])
    found = float(torch.quantile(torch.nn.functional.pdist(pooled), 0.5))
    if not found > 0:
        raise DataError("More than half of the points coincide, so their median distance is 0: give 'bandwidths'.")
    return found


def frechet(x: Points, y: Points, *, features: Callable[[Tensor], Tensor] | None = None) -> float:
    """The squared Frechet (2-Wasserstein) distance of two Gaussians with the means and covariances of x and y.

        d^2 = |mean_x - mean_y|^2 + tr(S_x + S_y - 2 (S_x S_y)^(1/2))

    With centred points A^T A = S_x and B^T B = S_y the last trace is the sum of singular values of A B^T. That needs no
    root of a matrix, so singular covariances, also of fewer points than coordinates, are as good as others. The
    covariances divide by n - 1. It is biased upward: about d^2 / 2n for two draws of n points from one Gaussian.

    Args:
        x: (n, *event).
        y: (m, *event).
        features: maps both to (n, k) first; the points themselves, flattened, when None.

    >>> x = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])          # singular: the second coordinate is constant
    >>> round(frechet(x, 3 * x + torch.tensor([0.0, 5.0])), 6)          # 25 + (3 - 1)^2 * variance 2
    33.0
    """
    if features is not None:
        with torch.no_grad():
            x, y = features(_tensor(x)), features(_tensor(y))
    x, y = _points(x, y)
    mean_x, mean_y = x.mean(0), y.mean(0)
    a, b = ((part - mean) / math.sqrt(len(part) - 1) for part, mean in ((x, mean_x), (y, mean_y)))
    cross = torch.linalg.svdvals(_triangle(a) @ _triangle(b).mT).sum()
    distance = (mean_x - mean_y).square().sum() + a.square().sum() + b.square().sum() - 2 * cross
    return max(0.0, float(distance))


def sliced_wasserstein(
    x: Points, y: Points, *, n_projections: int = PROJECTIONS, p: float = 2.0, generator: torch.Generator | None = None
) -> float:
    """The sliced p-Wasserstein distance: (mean over directions of W_p^p)^(1/p) (Bonneel, Rabin, Peyre, Pfister 2015).

    Each W_p is that of the points projected on a random unit vector, found by sorting, exact also for unequal sizes.
    It is positive also for two draws of one distribution.

    >>> x = torch.tensor([[0.0], [2.0]])
    >>> sliced_wasserstein(x, x + 3, n_projections=1)
    3.0
    """
    x, y = _points(x, y)
    return _sliced(x, y, _directions(x.shape[1], n_projections, generator), p)


def _tensor(points: Points) -> Tensor:
    """A numpy array (of any byte order, perhaps read-only) as a tensor of its own; a tensor as it is."""
    if isinstance(points, Tensor):
        return points
    values = np.asarray(points)
    return torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))


def _name(metric: Callable[..., float]) -> str:
    while isinstance(metric, partial):
        metric = metric.func
    return getattr(metric, "__name__", type(metric).__name__)


def _points(x: Points, y: Points) -> tuple[Tensor, Tensor]:
    """Both as float64 of shape (n, coordinates), finite, and of one event."""
    x, y = _tensor(x), _tensor(y)
    if x.ndim < 2 or y.ndim < 2 or x.shape[1:] != y.shape[1:]:
        raise InvalidValue(
            f"Two sets of points must have shapes (n, *event) and (m, *event). Got {tuple(x.shape)}, {tuple(y.shape)}."
        )
    for points in (x, y):
        if len(points) < 2:
            raise DataError(f"A set of points must have at least 2. Got {len(points)}.")
        if not torch.isfinite(points).all():
            raise DataError("The points contain NaN or infinity.")
    return x.detach().flatten(1).double(), y.detach().flatten(1).double().to(x.device)


def _kernel_sum(x: Tensor, y: Tensor, widths: Sequence[float], *, same: bool) -> float:
    """The sum of kernel values over all pairs; over those of different points where both sets are the same one."""
    rows = max(1, BLOCK // len(y))
    square_x, square_y = x.square().sum(-1), y.square().sum(-1)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in range(0, len(x), rows):
        stop = min(start + rows, len(x))
        begin = start if same else 0  # by symmetry, the pairs to the left were counted
        block = torch.addmm(square_y[begin:], x[start:stop], y[begin:].mT, alpha=-2)
        block += square_x[start:stop, None]
        block.clamp_min_(0)
        if same:
            block[:, : stop - start].fill_diagonal_(torch.inf)  # a point's kernel with itself is left out
        for h in widths:
            values = torch.mul(block, -0.5 / h**2).exp_()
            if same:  # pairs inside the block appear twice already
                total += 2 * values.sum() - values[:, : stop - start].sum()
            else:
                total += values.sum()
    return float(total) / len(widths)


def _triangle(centred: Tensor) -> Tensor:
    """R with R^T R = A^T A."""
    return torch.linalg.qr(centred, mode="r").R


def _directions(size: int, count: int, generator: torch.Generator | None) -> Tensor:
    if count < 1:
        raise InvalidValue(f"The 'n_projections' of sliced_wasserstein must be at least 1. Got {count}.")
    normal = torch.randn(size, count, generator=generator, dtype=torch.float64)
    return normal / normal.norm(dim=0)


def _sliced(x: Tensor, y: Tensor, directions: Tensor, p: float) -> float:
    if not 1 <= p < math.inf:
        raise InvalidValue(f"The 'p' of sliced_wasserstein must be finite and at least 1. Got {p}.")
    n, m = len(x), len(y)
    # Between neighbours of the steps i/n and j/m both quantile functions are constant.
    steps = torch.cat([torch.arange(n + 1, dtype=torch.float64) / n, torch.arange(1, m, dtype=torch.float64) / m])
    steps = steps.sort().values
    middle, width = (steps[1:] + steps[:-1]) / 2, steps.diff().to(x.device)
    at_x, at_y = ((middle * size).long().to(x.device) for size in (n, m))
    total = 0.0
    for part in directions.to(x.device).split(DIRECTIONS, dim=1):
        gap = (x @ part).sort(dim=0).values[at_x] - (y @ part).sort(dim=0).values[at_y]
        total += float((gap.abs() ** p * width[:, None]).sum())
    return (total / directions.shape[1]) ** (1 / p)


def _prepared_mmd(
    x: Tensor, y: Tensor, generator: torch.Generator | None, bandwidths: Bandwidths | None = None
) -> Metric:
    h = median_bandwidth(x, y) if bandwidths is None else bandwidths
    return lambda x, y: mmd(x, y, bandwidths=h)


def _prepared_frechet(
    x: Tensor, y: Tensor, generator: torch.Generator | None, features: Callable[[Tensor], Tensor] | None = None
) -> Metric:
    return lambda x, y: frechet(x, y, features=features)


def _prepared_sliced(
    x: Tensor, y: Tensor, generator: torch.Generator | None, n_projections: int = PROJECTIONS, p: float = 2.0
) -> Metric:
    directions = _directions(math.prod(x.shape[1:]), n_projections, generator)
    return lambda x, y: _sliced(*_points(x, y), directions, p)


PREPARED: dict[str, Callable[..., Metric]] = {
    "mmd": _prepared_mmd,
    "frechet": _prepared_frechet,
    "sliced-wasserstein": _prepared_sliced,
}
