"""Each coordinate to a standard normal, through the data's own distribution function."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unnorm.data.rows import RowSource, chunks, spread
from unnorm.data.splines import Piece, inverse_spline, padded_spline, spline
from unnorm.data.transforms import Transform, floating
from unnorm.errors import DataError, InvalidValue
from unnorm.types import event_shape

__all__ = ["Gaussianize", "discrete_cells"]

LOOKED_AT = 10_000  # rows that choose the knots; all rows are counted
LEVELS = 256  # integers within so wide a range have a piece each, where `smooth` is asked for
BEYOND = 8  # rows at least that lie outside a smooth coordinate's inner knots, on either side
NARROW = 1e-12  # the least distance of knots, as a share of the largest value: some thousand roundings
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Gaussianize(Transform):
    """z = Phi^-1(F(x)) for each coordinate; F is its distribution function, linear between knots.

    With a Gaussian of full covariance on z this is a Gaussian copula. Beyond the knots z goes on along a line with the
    slope of the chord from the first knot to the last, so the map is one-to-one everywhere and the tails are Gaussian.

    A density that is linear between knots jumps at them. With `smooth`, coordinates of many values have instead a
    monotone rational-quadratic spline through the points (knot, z), of Gregory and Delbourgo (1982), whose slope goes
    over into that of the tails: their log density is continuous. Integers and coordinates of few values stay as they
    are, because there the linear pieces are exact: each value has its frequency.

    Args:
        event: the shape of one example.
        pieces: how many pieces each coordinate has.
        smooth: whether coordinates may be splines.

    >>> x = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0)) ** 2
    >>> transform = Gaussianize.fit(x)
    >>> z, log_det = transform(x)
    >>> z.mean(0).abs() < 0.1, (z.std(0) - 1).abs() < 0.1
    (tensor([True, True]), tensor([True, True]))
    >>> torch.allclose(transform.inverse(z), x, atol=1e-6)
    True
    """

    knots: Tensor
    cdf: Tensor
    slope: Tensor  # dz/dx at the knots, with `smooth` only; 0 marks a coordinate of linear pieces

    def __init__(self, event: int | tuple[int, ...], pieces: int = 64, smooth: bool = False):
        super().__init__()
        self.event = event_shape(event)
        self.pieces = _positive(pieces)
        even = torch.linspace(-4, 4, pieces + 1, dtype=torch.float64).repeat(math.prod(self.event), 1)
        self.register_buffer("knots", even)
        self.register_buffer("cdf", torch.special.ndtr(even))
        self.smooth = smooth
        if smooth:
            self.register_buffer("slope", torch.ones_like(even))

    @classmethod
    def fit(
        cls, data: RowSource, pieces: int | Tensor = 64, *, pseudo_count: float = 0.5, smooth: bool = False
    ) -> "Gaussianize":
        """Count the data between knots.

        Args:
            data: rows in the units this transform is to read.
            pieces: how many; the knots are then quantiles of at most 10,000 rows, or, for a coordinate with no more
                than that many values, the midpoints between them. Or the knots themselves, increasing, the same for
                all coordinates: for integers after `Dequantize(levels)`, `torch.arange(levels + 1) / levels`.
            pseudo_count: is added to the count of each piece and of both tails.
            smooth: splines for coordinates of many values: of n rows at most n^0.4 pieces (but 4 are allowed), closer
                together toward the tails, from the least value to the greatest. Integers less than 256 apart, and
                other evenly spaced values that are repeated, have a piece each, from k - 1/2 to k + 1/2, also where
                these are more than `pieces`.
        """
        if not pseudo_count > 0:
            raise InvalidValue(f"The 'pseudo_count' of Gaussianize must be positive. Got {pseudo_count}.")
        looked_at = data[spread(len(data), LOOKED_AT)] if len(data) else torch.empty(0)
        if not len(looked_at) or not torch.isfinite(looked_at).all():
            raise DataError("Gaussianize needs rows of finite numbers.")
        columns = looked_at.double().cpu().flatten(1).numpy().T
        curved = np.zeros(len(columns), dtype=bool)
        if isinstance(pieces, Tensor):
            knots = [_given(pieces)] * len(columns)
            pieces = len(pieces) - 1
        elif smooth:
            knots, curved = _for_splines(data, columns, _positive(pieces))
            pieces = max(pieces, *(len(own) - 1 for own in knots))
        else:
            knots = [_chosen(column, _positive(pieces)) for column in columns]
        transform = cls(tuple(looked_at.shape[1:]), pieces, smooth)
        for place, (own, counts) in enumerate(zip(knots, _counts(data, knots), strict=True)):
            mass = (counts + pseudo_count) / (counts + pseudo_count).sum()
            if curved[place]:
                own, cdf, slope = padded_spline(own, mass.cumsum()[:-1], pieces)
            else:
                (own, cdf), slope = _padded(own, mass.cumsum()[:-1], pieces), np.zeros(pieces + 1)
            transform.knots[place] = torch.from_numpy(own)
            transform.cdf[place] = torch.from_numpy(cdf)
            if smooth:
                transform.slope[place] = torch.from_numpy(slope)
        return transform

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event), "pieces": self.pieces, "smooth": self.smooth}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        column = x.to(self.knots.dtype).flatten(1).mT.contiguous()
        first, last, _, chord = self._ends()
        inside = column.clamp(first, last)
        left, low, rise = self._piece(self.knots, inside)
        z = torch.special.ndtri(low + (inside - left) * rise)
        beyond = (column < first) | (column > last)
        log_rise = rise.log() + z.square() / 2 + HALF_LOG_2PI
        if self.smooth:
            own_z, own_log_rise = spline(self._spline_piece(self.knots, inside), inside)
            curved = self.slope[:, :1] > 0
            z, log_rise = torch.where(curved, own_z, z), torch.where(curved, own_log_rise, log_rise)
        log_slope = torch.where(beyond, chord.log(), log_rise)
        z = z + (column - inside) * chord
        return z.mT.reshape(x.shape).to(floating(x)), log_slope.sum(0).to(floating(x))

    def inverse(self, z: Tensor) -> Tensor:
        column = z.to(self.knots.dtype).flatten(1).mT.contiguous()
        first, last, z_first, chord = self._ends()
        inside = column.clamp(z_first, z_first + chord * (last - first))
        mass = torch.special.ndtr(inside)
        left, low, rise = self._piece(self.cdf, mass)
        x = left + (mass - low) / rise
        if self.smooth:
            own_x = inverse_spline(self._spline_piece(torch.special.ndtri(self.cdf), inside), inside)
            x = torch.where(self.slope[:, :1] > 0, own_x, x)
        x = x + (column - inside) / chord
        return x.mT.reshape(z.shape).to(z.dtype)

    def _ends(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First and last knot, z at the first, and the slope between them: (coordinates, 1) each."""
        first, last = self.knots[:, :1], self.knots[:, -1:]
        z_first, z_last = torch.special.ndtri(self.cdf[:, :1]), torch.special.ndtri(self.cdf[:, -1:])
        return first, last, z_first, (z_last - z_first) / (last - first)

    def _piece(self, edges: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the piece that holds each value: its left knot, F there, and the slope of F."""
        place = self._place(edges, values)
        rise = self.cdf.diff(dim=-1) / self.knots.diff(dim=-1)
        return self.knots.gather(-1, place), self.cdf.gather(-1, place), rise.gather(-1, place)

    def _spline_piece(self, edges: Tensor, values: Tensor) -> Piece:
        place = self._place(edges, values)
        slope = torch.where(self.slope > 0, self.slope, 1.0)  # for a linear coordinate any number: it is not used
        ends = [
            table.gather(-1, at)
            for table in (self.knots, torch.special.ndtri(self.cdf), slope)
            for at in (place, place + 1)
        ]
        return Piece(*ends)

    def _place(self, edges: Tensor, values: Tensor) -> Tensor:
        return (torch.searchsorted(edges, values.detach(), right=True) - 1).clamp(0, self.pieces - 1)


def discrete_cells(data: RowSource) -> list[Tensor | None]:
    """The edges of the cells of each coordinate's values where these are few or integers; None where they are not.

    >>> [None if edges is None else edges.tolist() for edges in discrete_cells(torch.tensor([[1, 0.3], [2, 0.4]]))]
    [[0.5, 1.5, 2.5], None]
    """
    columns = data[spread(len(data), LOOKED_AT)].double().cpu().flatten(1).numpy().T
    knots, curved = _for_splines(data, columns, 64)
    return [None if smooth else torch.from_numpy(own) for own, smooth in zip(knots, curved, strict=True)]


def _positive(pieces: int) -> int:
    if not isinstance(pieces, int) or pieces < 1:
        raise InvalidValue(f"The 'pieces' of Gaussianize must be at least 1. Got {pieces}.")
    return pieces


def _given(knots: Tensor) -> np.ndarray:
    if knots.ndim != 1 or len(knots) < 2 or not (knots.diff() > 0).all() or not torch.isfinite(knots).all():
        raise InvalidValue(f"The knots of Gaussianize must be two or more increasing numbers. Got {knots}.")
    return knots.double().cpu().numpy()


def _chosen(column: np.ndarray, pieces: int) -> np.ndarray:
    """Quantiles; or, where there are few values, the midpoints between them, the outer ones as far out again.

    >>> _chosen(np.array([1.0, 2.0, 2.0, 4.0]), 8)
    array([0.5, 1.5, 3. , 5. ])
    """
    values = np.unique(column)
    if len(values) > pieces:
        knots = np.unique(np.quantile(column, np.linspace(0, 1, pieces + 1)))
    else:
        middle = (values[1:] + values[:-1]) / 2 if len(values) > 1 else values
        knots = np.concatenate([[2 * values[0] - middle[0]], middle, [2 * values[-1] - middle[-1]]])
    return _apart(knots, np.abs(values).max())


def _apart(knots: np.ndarray, largest: float) -> np.ndarray:
    """Knots far enough apart to tell them from rounding; a single one is made the middle of two."""
    gap = NARROW * largest
    if (np.diff(knots) <= gap).any():  # what only rounding tells apart is one value
        steps = np.round((knots - knots[0]) / gap) if gap > 0 else np.zeros(1)
        knots = knots[0] + gap * np.unique(steps)
    half = 0.5 * max(1.0, 1e-6 * abs(knots[0]))
    return knots if len(knots) > 1 else knots[0] + np.array([-half, half])


def _for_splines(data: RowSource, columns: np.ndarray, pieces: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The knots of each coordinate, and which are to be splines."""
    low, high = columns.min(1), columns.max(1)
    for chunk in chunks(data):
        rows = chunk.double().cpu().flatten(1).numpy()
        low, high = np.minimum(low, rows.min(0)), np.maximum(high, rows.max(0))
    found = [_for_spline(column, len(data), pieces, *ends) for column, *ends in zip(columns, low, high, strict=True)]
    return [knots for knots, _ in found], np.array([curved for _, curved in found])


def _for_spline(column: np.ndarray, n: int, pieces: int, low: float, high: float) -> tuple[np.ndarray, bool]:
    """The knots of a coordinate of n rows, and whether it is to be a spline: not where its values are few or integers.

    >>> _for_spline(np.array([1.0, 2.0, 2.0, 4.0]), 4, 64, 1.0, 4.0)
    (array([0.5, 1.5, 2.5, 3.5, 4.5]), False)
    >>> _for_spline(np.array([0.5, 0.1, 0.2, 0.4]), 4, 64, 0.1, 0.5)
    (array([0.1, 0.5]), True)
    """
    if (column == np.round(column)).all() and high - low < LEVELS and max(abs(low), abs(high)) < 2**40:
        return np.arange(math.floor(low) - 0.5, math.ceil(high) + 1.0), False
    values = np.unique(column)
    repeated = len(values) < len(column) / 2
    if repeated and (knots := _lattice(values, low, high)) is not None:
        return knots, False
    if len(values) <= pieces and (repeated or len(values) == 1):
        return _chosen(column, pieces), False
    few = min(pieces, max(4, round(n**0.4)))
    level = np.sin(np.pi / 2 * np.linspace(0, 1, few + 1)) ** 2  # equally hard to know: Var F(x) = F (1 - F) / n
    level = level[(n * level >= BEYOND) & (n * (1 - level) >= BEYOND)]
    knots = np.unique(np.concatenate([[low], np.quantile(column, level), [high]]))
    knots = _apart(knots, np.abs(knots).max())
    return knots, len(values) > 1


def _lattice(values: np.ndarray, low: float, high: float) -> np.ndarray | None:
    """The edges of the cells of values that are evenly spaced, such as integers that were standardised; else None.

    >>> _lattice(np.array([-0.5, 0.0, 1.0]), -0.5, 1.0)
    array([-0.75, -0.25,  0.25,  0.75,  1.25])
    >>> _lattice(np.array([0.0, 1.0, 2.5]), 0.0, 2.5)
    """
    if len(values) < 2:
        return None
    least = np.diff(values).min()
    n = round((high - low) / least) if (high - low) < LEVELS * least else LEVELS
    step = (high - low) / n
    places = (values - low) / step
    if n >= LEVELS or np.abs(places - np.round(places)).max() > 1e-3:
        return None
    return np.asarray(low + step * (np.arange(n + 2) - 0.5))


def _counts(data: RowSource, knots: list[np.ndarray]) -> list[np.ndarray]:
    """Rows below, between and above the knots of each coordinate."""
    most = max(len(own) for own in knots)
    edges = torch.full((len(knots), most), torch.inf, dtype=torch.float64)
    for place, own in enumerate(knots):
        edges[place, : len(own)] = torch.from_numpy(own)
    offset = (most + 1) * torch.arange(len(knots))[:, None]
    total = torch.zeros(len(knots) * (most + 1), dtype=torch.int64)
    for chunk in chunks(data):
        cell = torch.searchsorted(edges, chunk.double().cpu().flatten(1).mT.contiguous(), right=True)
        total += torch.bincount((cell + offset).flatten(), minlength=len(total))
    return [
        row[: len(own) + 1].numpy().astype(float) for row, own in zip(total.view(len(knots), -1), knots, strict=True)
    ]


def _padded(knots: np.ndarray, cdf: np.ndarray, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """The same function with as many pieces as asked for: the widest is divided."""
    widest = int(np.diff(knots).argmax())
    more = np.linspace(knots[widest], knots[widest + 1], pieces - len(knots) + 3)[1:-1]
    all_knots = np.insert(knots, widest + 1, more)
    return all_knots, np.interp(all_knots, knots, cdf)
