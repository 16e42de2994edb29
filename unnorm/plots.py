"""The picture of a fit, and images side by side."""

import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor

from unnorm.errors import InvalidValue, MixingWarning, WeightsWarning
from unnorm.randomness import stream
from unnorm.tables.density import TableDensity

__all__ = ["picture", "sheet"]

DATA, MODEL, NOISE = "#1b6ca8", "#d1495b", "#8d99ae"
SHOWN, SCORED = 5000, 500  # rows that are drawn, and whose density is found


def picture(path: Path, density: TableDensity, train: np.ndarray, test: np.ndarray | None, title: str) -> None:
    """Draw data, fitted density and samples in one or two dimensions; above, histograms and a corner plot.

    Args:
        path: where to.
        density: of a table.
        train, test: rows of the table as numbers; words as the numbers of their levels.
        title: above the picture.
    """
    places = [density.columns.places(column)[0] for column in density.columns.modelled]
    plain = not density.columns.averaged.any()
    draw = {1: _line, 2: _plane}.get(len(places), _corner) if plain else _corner
    drawn = len(train) if draw is not _corner else min(SHOWN, max(len(train), 500))
    with warnings.catch_warnings():
        for kind in (MixingWarning, WeightsWarning):  # the verdict says it
            warnings.simplefilter("ignore", kind)
        samples, _ = density.draw(drawn, generator=stream(0, "picture"))
    # A dollar sign would start a formula.
    names = tuple(density.columns.names[place].replace("$", r"\$") for place in places)
    rows = _Rows(density, places, train, train if test is None else test, samples)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a font without the letters of some column's name
        warnings.filterwarnings("ignore", message="invalid value")  # a histogram of a model that lies elsewhere
        figure = draw(rows, names)
        figure.suptitle(title.replace("$", r"\$"))
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=110)


class _Rows(NamedTuple):
    """What a picture shows: rows as numbers, of all columns, and the places of those to show."""

    density: TableDensity
    places: list[int]
    train: np.ndarray
    test: np.ndarray
    samples: np.ndarray

    def log_prob(self, shown: np.ndarray) -> np.ndarray:
        """Return the log density of rows of the columns that are shown."""
        rows = np.repeat(self.train[:1], len(shown), axis=0)
        rows[:, self.places] = shown
        return self.density.log_prob(rows)


def _line(rows: _Rows, columns: tuple[str, ...]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    train, samples = (own[:, rows.places[0]] for own in (rows.train, rows.samples))
    low, high = float(train.min()), float(train.max())
    slack = 0.05 * (high - low)
    x = np.linspace(low - slack, high + slack, 800)
    p = np.exp(rows.log_prob(x[:, None]))
    for axis, points, name, colour in ((axes[0], train, "data", DATA), (axes[2], samples, "samples", MODEL)):
        axis.hist(points, bins=80, range=(low, high), density=True, color=colour, alpha=0.6)
        axis.set(title=name, xlabel=columns[0])
        axis.plot(x, p, color="black", lw=1)
    axes[1].fill_between(x, p, color=MODEL, alpha=0.4)
    axes[1].plot(x, p, color=MODEL)
    axes[1].set(title="fitted density", xlabel=columns[0])
    axes[0].set_ylabel("density")
    return figure


def _plane(rows: _Rows, columns: tuple[str, ...]) -> Figure:
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    train, samples = (own[:, rows.places] for own in (rows.train, rows.samples))
    lower, upper = np.quantile(train, (0.0005, 0.9995), axis=0)
    slack = 0.08 * (upper - lower)
    extent = [float(v) for pair in zip(lower - slack, upper + slack, strict=True) for v in pair]
    cells = 220
    x, y = (np.linspace(extent[2 * k], extent[2 * k + 1], cells) for k in (0, 1))
    grid = np.stack(np.meshgrid(x, y, indexing="ij"), -1).reshape(-1, 2)
    p = np.exp(rows.log_prob(grid)).reshape(cells, cells)
    for axis, points, name in ((axes[0], train, "data"), (axes[2], samples, "samples")):
        axis.hist2d(*points.T, bins=110, range=[extent[:2], extent[2:]], cmap="viridis", density=True)
        axis.set_title(f"{name} ({len(points):,})")
    axes[1].imshow(p.T, origin="lower", extent=extent, aspect="auto", cmap="viridis")
    axes[1].set_title("fitted density")
    for axis in axes:
        axis.set_xlabel(columns[0])
    axes[0].set_ylabel(columns[1])
    return figure


def _corner(rows: _Rows, columns: tuple[str, ...]) -> Figure:
    shown = min(4, len(columns))
    figure = Figure(figsize=(13, 7), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.6), squeeze=False)[0]
    _histograms(left.subplots(), rows)
    panels = right.subplots(shown, shown, squeeze=False)
    data, drawn = rows.train[:SHOWN, rows.places], rows.samples[:, rows.places]
    limits = _limits(data)
    for row in range(shown):
        for column in range(shown):
            axis = panels[row, column]
            if column > row:
                axis.axis("off")
                continue
            span = (limits[0, column], limits[1, column])
            if row == column:
                for points, colour, name in ((data, DATA, "data"), (drawn, MODEL, "samples")):
                    axis.hist(
                        points[:, row], bins=50, range=span, density=True, color=colour, histtype="step", label=name
                    )
                axis.set_yticks([])
            else:
                for points, colour in ((data, DATA), (drawn, MODEL)):
                    axis.scatter(points[:1500, column], points[:1500, row], s=2, color=colour, alpha=0.35, lw=0)
                axis.set_ylim(limits[0, row], limits[1, row])
            axis.set_xlim(*span)
            axis.tick_params(labelsize=7)
            if row == shown - 1:
                axis.set_xlabel(columns[column])
            if column == 0 and row > 0:
                axis.set_ylabel(columns[row])
    panels[0, 0].legend(loc="upper right", fontsize=7)
    return figure


def _limits(data: np.ndarray) -> np.ndarray:
    """Return the range to show of each column, with some room around columns of few values."""
    low, high = np.quantile(data, (0.001, 0.999), axis=0)
    room = np.where(high > low, 0.02 * (high - low), 0.5)
    return np.stack([low - room, high + room])


def _histograms(axis: Any, rows: _Rows) -> None:
    scored = {"train": (rows.train, DATA), "test": (rows.test, MODEL), "samples": (rows.samples, NOISE)}
    values = {name: rows.density.log_prob(_finite(own, rows.places)[:SCORED]) for name, (own, _) in scored.items()}
    everything = np.concatenate(list(values.values()))
    finite = everything[np.isfinite(everything)]
    span = tuple(np.quantile(finite, (0.01, 1.0))) if len(finite) else (0.0, 1.0)
    for name, (_, colour) in scored.items():
        axis.hist(values[name], bins=70, range=span, density=True, histtype="step", color=colour, label=name)
    axis.set(title="log density", xlabel="log p(x), nats", yticks=[])
    axis.legend()


def _finite(rows: np.ndarray, places: list[int]) -> np.ndarray:
    """Return the rows that are finite: samples of a density without an integral may not be."""
    return rows[np.isfinite(rows[:, places]).all(1)]


def sheet(path: Path | BytesIO, images: Tensor, columns: int = 10, levels: int = 256, gap: int = 1) -> None:
    """Write images side by side into one PNG, row after row.

    Args:
        path: where to, or a buffer.
        images: (n, channels, height, width) with 1 or 3 channels, from 0 to levels - 1.
        columns: images in a row.
        levels: of a pixel.
        gap: pixels between two images.

    >>> target = BytesIO()
    >>> sheet(target, torch.zeros(7, 1, 8, 8), columns=5)
    >>> target.getvalue()[1:4]
    b'PNG'
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise InvalidValue(f"A sheet shows images of shape (n, 1 or 3, height, width). Got {tuple(images.shape)}.")
    n, channels, height, width = images.shape
    rows = math.ceil(n / columns)
    shades = images.detach().cpu().double().clamp(0, levels - 1) / (levels - 1)
    blank = 0.35 * torch.ones(rows * columns, channels, height + gap, width + gap, dtype=torch.float64)
    blank[:n, :, :height, :width] = shades
    whole = blank.view(rows, columns, channels, height + gap, width + gap).permute(2, 0, 3, 1, 4)
    whole = whole.reshape(channels, rows * (height + gap), columns * (width + gap))[:, : -gap or None, : -gap or None]
    scale = max(1, round(400 / whole.shape[2]))  # small images are shown large
    whole = whole.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    imsave(path, whole.expand(3, -1, -1).permute(1, 2, 0).numpy(), format="png")
