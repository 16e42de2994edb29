"""The picture of a fit, and images side by side."""

import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor

from unnorm.density import Density
from unnorm.errors import InvalidValue
from unnorm.metrics import log_probs
from unnorm.randomness import stream

__all__ = ["picture", "sheet"]

DATA, MODEL, NOISE = "#1b6ca8", "#d1495b", "#8d99ae"
SHOWN = 5000


def picture(path: Path, density: Density, train: Tensor, test: Tensor, columns: tuple[str, ...], title: str) -> None:
    """Draw data, fitted density and samples in one or two dimensions; above, histograms and a corner plot."""
    width = train.shape[1]
    draw = {1: _line, 2: _plane}.get(width, _corner)
    drawn = len(train) if width <= 2 else min(SHOWN, max(len(train), 500))
    samples = density.sample(drawn, generator=stream(0, "picture"))
    plain = tuple(name.replace("$", r"\$") for name in columns)  # a dollar sign would start a formula
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a font without the letters of some column's name
        warnings.filterwarnings("ignore", message="invalid value")  # a histogram of a model that lies elsewhere
        figure = draw(density, train, test, samples, plain)
        figure.suptitle(title.replace("$", r"\$"))
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=110)


def _line(density: Density, train: Tensor, test: Tensor, samples: Tensor, columns: tuple[str, ...]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    low, high = float(train.min()), float(train.max())
    slack = 0.05 * (high - low)
    x = torch.linspace(low - slack, high + slack, 800, dtype=train.dtype)[:, None]
    p = log_probs(density.log_prob, x).exp()
    for axis, points, name, colour in ((axes[0], train, "data", DATA), (axes[2], samples, "samples", MODEL)):
        axis.hist(points[:, 0].numpy(), bins=80, range=(low, high), density=True, color=colour, alpha=0.6)
        axis.set(title=name, xlabel=columns[0])
        axis.plot(x[:, 0], p, color="black", lw=1)
    axes[1].fill_between(x[:, 0].numpy(), p.numpy(), color=MODEL, alpha=0.4)
    axes[1].plot(x[:, 0], p, color=MODEL)
    axes[1].set(title="fitted density", xlabel=columns[0])
    axes[0].set_ylabel("density")
    return figure


def _plane(density: Density, train: Tensor, test: Tensor, samples: Tensor, columns: tuple[str, ...]) -> Figure:
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    lower, upper = (torch.quantile(train[:20_000].double(), share, dim=0) for share in (0.0005, 0.9995))
    slack = 0.08 * (upper - lower)
    extent = [float(v) for pair in zip(lower - slack, upper + slack, strict=True) for v in pair]
    cells = 220
    x, y = (torch.linspace(extent[2 * k], extent[2 * k + 1], cells, dtype=train.dtype) for k in (0, 1))
    p = log_probs(density.log_prob, torch.cartesian_prod(x, y)).exp().view(cells, cells)
    for axis, points, name in ((axes[0], train, "data"), (axes[2], samples, "samples")):
        axis.hist2d(
            points[:, 0].numpy(),
            points[:, 1].numpy(),
            bins=110,
            range=[extent[:2], extent[2:]],
            cmap="viridis",
            density=True,
        )
        axis.set_title(f"{name} ({len(points):,})")
    axes[1].imshow(p.T.numpy(), origin="lower", extent=extent, aspect="auto", cmap="viridis")
    axes[1].set_title("fitted density")
    for axis in axes:
        axis.set_xlabel(columns[0])
    axes[0].set_ylabel(columns[1])
    return figure


def _corner(density: Density, train: Tensor, test: Tensor, samples: Tensor, columns: tuple[str, ...]) -> Figure:
    shown = min(4, len(columns))
    figure = Figure(figsize=(13, 7), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.6), squeeze=False)[0]
    _histograms(left.subplots(), density, train, test)
    panels = right.subplots(shown, shown, squeeze=False)
    data, drawn = train[:SHOWN].numpy(), samples.numpy()
    limits = np.quantile(data, (0.001, 0.999), axis=0)
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


def _histograms(axis: Any, density: Density, train: Tensor, test: Tensor) -> None:
    noise = density.transform.inverse(
        density.noise.sample(len(test), generator=stream(0, "noise of the picture")).double()
    )
    sets = (("train", train[:SHOWN], DATA), ("test", test[:SHOWN], MODEL), ("noise", noise[:SHOWN], NOISE))
    values = {name: log_probs(density.log_prob, points).numpy() for name, points, _ in sets}
    everything = np.concatenate(list(values.values()))
    span = tuple(np.quantile(everything[np.isfinite(everything)], (0.01, 1.0)))
    for name, _, colour in sets:
        axis.hist(values[name], bins=70, range=span, density=True, histtype="step", color=colour, label=name)
    axis.set(title="log density", xlabel="log p(x), nats", yticks=[])
    axis.legend()


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
