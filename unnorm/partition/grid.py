"""log Z by quadrature on a grid, in one to three dimensions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.types import LogDensity, LogZ, effective_sample_size, log_density

__all__ = ["CELLS", "Grid", "bounding_box", "evaluate", "fitting_box", "grid"]

CELLS = {1: 4096, 2: 512, 3: 128}  # per dimension
LEAST_OUTSIDE = 1e-6  # of the mass
BOX_CELLS = {1: 1024, 2: 48, 3: 24}  # enough to see whether mass lies at the border


class Grid(NamedTuple):
    """log p~ at the centres of the cells of a box: `log_p` has one axis per dimension."""

    log_p: Tensor
    lower: Tensor
    cell: Tensor

    @property
    def log_masses(self) -> Tensor:
        return self.log_p + float(self.cell.log().sum())

    def centres(self, index: Tensor) -> Tensor:
        """The centres of cells given by integer coordinates (n, d)."""
        return self.lower + (index + 0.5) * self.cell


def bounding_box(points: Tensor, margin: float = 0.25) -> Tensor:
    """Lower and upper corner, (2, d), of a box around `points`, wider by `margin` on each side.

    >>> bounding_box(torch.tensor([[0.0, 0.0], [4.0, 8.0]]))
    tensor([[-1., -2.],
            [ 5., 10.]], dtype=torch.float64)
    """
    lower, upper = points.double().amin(0), points.double().amax(0)
    slack = margin * (upper - lower)
    return torch.stack([lower - slack, upper + slack])


@torch.no_grad()
def evaluate(model: LogDensity, box: Tensor, cells: int, *, like: Tensor, chunk: int = 1024) -> Grid:
    """log p~ on `cells` per dimension of the box; `like` gives the dtype and device the model expects."""
    lower, upper = box
    size = len(lower)
    if size not in CELLS:
        raise InvalidValue(f"A grid is for 1 to 3 dimensions. Got {size}.")
    values = torch.empty([cells] * size, dtype=torch.float64, device=lower.device)
    grid = Grid(values, lower, (upper - lower) / cells)
    for start in range(0, values.numel(), chunk):
        cell = torch.arange(start, min(start + chunk, values.numel()), device=lower.device)
        place = torch.stack(torch.unravel_index(cell, values.shape), -1)
        values.view(-1)[start : start + chunk] = log_density(model, grid.centres(place).to(like)).to(values)
    return grid


def grid(
    model: LogDensity, box: Tensor | Sequence[Sequence[float]], *, like: Tensor | None = None, cells: int | None = None
) -> LogZ:
    """log Z by the midpoint rule in 1 to 3 dimensions; `stderr` adds what coarser ones change, what may lie
    outside the box, and what cells as wide as the mass may miss (`summary`).

    Args:
        model: log p~.
        box: lower and upper corner, (2, d); `fitting_box` finds one.
        like: a tensor of the dtype and on the device that the model computes with; torch's default dtype on the CPU
            when None.
        cells: per dimension; 4096, 512 or 128 in 1, 2 or 3 dimensions when None.

    >>> from unnorm import Quadratic
    >>> found = grid(Quadratic(2), [[-8.0, -8.0], [8.0, 8.0]])
    >>> round(found.value, 4), round(found.stderr, 4)
    (1.8379, 0.0)
    """
    if cells is not None and (not isinstance(cells, int) or cells < 1):
        raise InvalidValue(f"The 'cells' of a grid must be a positive integer. Got {cells}.")
    box = _corners(box)
    like = torch.zeros(()) if like is None else like
    cells = cells or CELLS.get(box.shape[1], 0)
    return summary(*resolutions(model, box, cells, like=like))


def resolutions(model: LogDensity, box: Tensor, cells: int, *, like: Tensor) -> list[Grid]:
    """`evaluate` with so many cells, with about 0.7 and with half of them.

    On a thin ridge two resolutions err by what its slope makes of the cells, and may agree by chance; a third that has
    no common measure with them seldom does.
    """
    counts = (cells, max(round(cells / math.sqrt(2)), 1), max(cells // 2, 1))
    return [evaluate(model, box, n, like=like) for n in counts]


def summary(fine: Grid, *coarser: Grid) -> LogZ:
    """The estimate, and its error from what coarser resolutions change at most.

    Where the mass sits in a few cells both can agree by chance, so exp(-m) is added, where m is the number of cells
    with mass in each of d dimensions: ess^(1/d), with ess = 1 / sum of squared shares of the fine cells. That bounds
    with a margin: a Gaussian with a deviation of one cell has m = 3.5, exp(-m) = 0.03, and the midpoint rule is exact
    to 1e-8 there. Modes far apart count together.
    """
    value = float(torch.logsumexp(fine.log_masses.flatten(), 0))
    change = max(abs(value - float(torch.logsumexp(other.log_masses.flatten(), 0))) for other in coarser)
    across = float(effective_sample_size(fine.log_p.flatten())) ** (1 / fine.log_p.ndim)
    stderr = change + math.log1p(mass_outside(fine)) + math.exp(-across)
    return LogZ(value, stderr, math.nan, math.nan, "grid", sum(each.log_p.numel() for each in (fine, *coarser)))


def _corners(box: Tensor | Sequence[Sequence[float]]) -> Tensor:
    """The box as float64, (2, d), if it is one."""
    corners = [torch.as_tensor(corner, dtype=torch.float64) for corner in box]
    shapes = [tuple(corner.shape) for corner in corners]
    if len(corners) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 1:
        raise InvalidValue(f"The 'box' of a grid must be a lower and an upper corner, (2, d). Got shapes {shapes}.")
    lower, upper = corners
    if not bool(((lower < upper) & lower.isfinite() & upper.isfinite()).all()):
        raise InvalidValue(
            "The 'box' of a grid must have its lower corner first, finite, and below the upper one in every dimension. "
            f"Got {lower.tolist()}, {upper.tolist()}."
        )
    return torch.stack(corners)


def fitting_box(model: LogDensity, points: Tensor, *, like: Tensor) -> Tensor:
    """A box around `points` that grows while mass of the model is found at its border.

    >>> wide = lambda x: -x.square().sum(-1) / 200
    >>> fitting_box(wide, torch.tensor([[-10.0], [10.0]]), like=torch.zeros(())).abs().min() > 50
    tensor(True)
    """
    return fitting_boxes(model, points, like=like)[0]


def fitting_boxes(model: LogDensity, points: Tensor, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """That box, and the part of it where coarse cells find mass; these may overlook the ends of a thin ridge."""
    box = bounding_box(points)
    for _ in range(6):
        found = evaluate(model, box, BOX_CELLS[box.shape[1]], like=like)
        if mass_outside(found) < LEAST_OUTSIDE:
            return box, occupied(found)
        box = bounding_box(box)
    return box, box


def occupied(grid: Grid, least: float = 1e-9) -> Tensor:
    """The box of the cells with more than `least` of the mass, and two cells more on each side.

    >>> occupied(Grid(torch.tensor([-99.0, -99.0, 0.0, 0.0, -99.0, -99.0]), torch.zeros(1), torch.ones(1)))
    tensor([[0.],
            [6.]])
    """
    masses = torch.softmax(grid.log_p.flatten(), 0).view_as(grid.log_p)
    place = (masses > least).nonzero()
    return torch.stack([grid.lower + (place.amin(0) - 2) * grid.cell, grid.lower + (place.amax(0) + 3) * grid.cell])


def mass_outside(grid: Grid) -> float:
    """What may lie outside the box, as a share of what lies inside.

    The two outermost frames of the box, each a hundredth of it wide, hold shares a (outer) and b of the mass. If the
    mass goes on falling by a/b from frame to frame, a^2/(b - a) is left beyond; if it falls like a power of the
    distance from the middle, r^-(k + 1), a r / (k w) with w the width of a frame. The larger of the two, with the
    outermost frame itself, to be safe. Infinite where the mass does not fall fast enough to have an end.

    >>> uniform = Grid(torch.zeros(400), torch.zeros(1), torch.ones(1))
    >>> mass_outside(uniform)
    inf
    """
    masses = torch.softmax(grid.log_p.flatten(), 0).view_as(grid.log_p)
    width = max(1, grid.log_p.shape[0] // 100)
    whole, inner, core = (
        float(masses[tuple(slice(k * width, n - k * width) for n in masses.shape)].sum()) for k in (0, 1, 2)
    )
    outer, next_to_it = whole - inner, inner - core
    if outer < 1e-12:
        return max(outer, 0.0)
    if not outer < (1 - 1e-9) * next_to_it:  # beyond rounding
        return math.inf
    steps = grid.log_p.shape[0] / (2 * width)  # frames from the middle to the border
    power = math.log(next_to_it / outer) / math.log((steps - 0.5) / (steps - 1.5)) - 1 if steps > 2 else math.inf
    beyond = outer * steps / power if power > 0 else math.inf
    return outer + max(outer**2 / (next_to_it - outer), beyond)
