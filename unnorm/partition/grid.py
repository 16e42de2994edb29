"""log Z by quadrature on a grid, in one and two dimensions."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.types import LogDensity, LogZ, log_density

__all__ = ["Grid", "bounding_box", "evaluate", "grid"]

CELLS = {1: 4096, 2: 512}


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


def bounding_box(points: Tensor, margin: float = 0.25) -> tuple[Tensor, Tensor]:
    """Lower and upper corner of a box around `points`, wider by `margin` on each side.

    >>> bounding_box(torch.tensor([[0.0, 0.0], [4.0, 8.0]]))
    (tensor([-1., -2.], dtype=torch.float64), tensor([ 5., 10.], dtype=torch.float64))
    """
    lower, upper = points.double().amin(0), points.double().amax(0)
    slack = margin * (upper - lower)
    return lower - slack, upper + slack


@torch.no_grad()
def evaluate(model: LogDensity, box: tuple[Tensor, Tensor], cells: int, *, like: Tensor, chunk: int = 4096) -> Grid:
    """log p~ on `cells` per dimension of the box; `like` gives the dtype and device the model expects."""
    lower, upper = box
    size = len(lower)
    if size not in CELLS:
        raise InvalidValue(f"A grid is for 1 or 2 dimensions. Got {size}.")
    cell = (upper - lower) / cells
    axes = [
        lower[k] + (torch.arange(cells, dtype=torch.float64, device=lower.device) + 0.5) * cell[k] for k in range(size)
    ]
    points = torch.cartesian_prod(*axes).reshape(-1, size)
    values = torch.empty(len(points), dtype=torch.float64, device=points.device)
    for place, part in zip(values.split(chunk), points.split(chunk), strict=True):
        place.copy_(log_density(model, part.to(like)))
    return Grid(values.view(*[cells] * size), lower, cell)


def grid(model: LogDensity, box: tuple[Tensor, Tensor], *, like: Tensor, cells: int | None = None) -> LogZ:
    """log Z by the midpoint rule; `stderr` adds what half the resolution changes and the share of mass at the border.

    >>> from unnorm import Quadratic
    >>> box = (torch.tensor([-8.0, -8.0]).double(), torch.tensor([8.0, 8.0]).double())
    >>> found = grid(Quadratic(2), box, like=torch.zeros(1))
    >>> round(found.value, 4), round(found.stderr, 4)
    (1.8379, 0.0)
    """
    cells = cells or CELLS.get(len(box[0]), 0)
    return summary(evaluate(model, box, cells, like=like), evaluate(model, box, max(cells // 2, 1), like=like))


def summary(fine: Grid, coarse: Grid) -> LogZ:
    """The estimate and its error from two resolutions."""
    value = float(torch.logsumexp(fine.log_masses.flatten(), 0))
    change = abs(value - float(torch.logsumexp(coarse.log_masses.flatten(), 0)))
    inside = fine.log_masses[tuple(slice(max(1, k // 100), -max(1, k // 100)) for k in fine.log_p.shape)]
    border = -math.expm1(min(0.0, float(torch.logsumexp(inside.flatten(), 0)) - value))
    return LogZ(value, change + border, math.nan, math.nan, "grid", fine.log_p.numel() + coarse.log_p.numel())
