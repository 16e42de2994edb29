"""The figures of the synthetic study: densities, KL of all methods, MECO's sensitivity."""

import base64
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from PIL import Image

from unnorm.errors import BrokenFile
from unnorm.paper.page import Picture
from unnorm.paper.toy2d.results import Place, Results, Row
from unnorm.paper.toy2d.spec import METHODS, STYLES, TABLES
from unnorm.paper.toy2d.stack import PAPER_BETA, PAPER_GAMMA

__all__ = ["figures"]

INK = "#7a808a"  # readable on white and on near black: figures have no background of their own
STYLE: dict[Any, Any] = {
    **{f"{name}color": INK for name in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.")},
    "legend.frameon": False,
}
COLOURS = {"sgd": "#1b8ac4", "adam": "#d1495b", "own": "#3a9d5d"}
OTHERS = ["sensitivity", "beyond", "instead"]  # methods that are not in the paper's tables
SIZE, GAP = 96, 6  # pixels of a density, and between two
DENSITY_DPI = 200  # two pixels for each of a hundredth of an inch: cells are drawn whole
LEVELS, SHADES = 64, 32  # of a density's colour and of the ink: what can be seen, and a file of a third of the size


def figures(results: Results) -> list[Picture]:
    """Those there is something to draw for."""
    with rc_context(STYLE):
        parts = ((style, origins) for style in ("sgd", "adam") for origins in (["paper"], OTHERS))
        found = [_densities(results, style, origins) for style, origins in parts]
        return [one for one in (*found, _kl(results), _sensitivity(results)) if one is not None]


def _rgba(figure: Figure, dpi: int) -> np.ndarray:
    """The figure's pixels, (height, width, 4), with nothing behind them."""
    figure.set_dpi(dpi)
    for background in (figure.patch, *(axis.patch for axis in figure.axes)):
        background.set_alpha(0)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="png", optimize=True)
    return content.getvalue()


def _snapped(rgba: np.ndarray, palette: np.ndarray) -> Image.Image:
    """Each pixel as the nearest of the palette's colours, (n, 4), as they look: a faint one counts less.

    >>> red, clear = (255, 0, 0, 255), (0, 0, 0, 0)
    >>> image = _snapped(np.array([[[250, 9, 0, 255], [90, 90, 90, 1]]], np.uint8), np.array([red, clear], np.uint8))
    >>> [image.convert("RGBA").getpixel((x, 0)) for x in (0, 1)] == [red, clear]
    True
    """
    codes, place = np.unique(np.ascontiguousarray(rgba).view(np.uint32), return_inverse=True)
    colours = codes.view(np.uint8).reshape(-1, 4)
    seen = [np.c_[one[:, :3] * (one[:, 3:] / 255), one[:, 3]] for one in (colours, palette)]
    nearest = np.square(seen[0][:, None] - seen[1][None]).sum(-1).argmin(-1).astype(np.uint8)
    image = Image.fromarray(nearest[place.reshape(rgba.shape[:2])])
    image.putpalette(palette.tobytes(), "RGBA")
    return image


def _densities(results: Results, style: str, origins: Sequence[str]) -> Picture | None:
    """Figure 3: a row for each method, a column for each data set, on the scale of the truth of its column."""
    rows = results.rows(style, "own", origins=origins)
    shown = [row for row in rows if any(results.picture(Place(*row, data)) for data in results.data)]
    if not shown:
        return None
    canvas, absent = _canvas(results, [("truth", ""), *shown])
    width, height = canvas.shape[1] / 100, canvas.shape[0] / 100
    figure = Figure(figsize=(width + 2.3, height + 0.4))
    axis = figure.add_axes((2.3 / (width + 2.3), 0, width / (width + 2.3), height / (height + 0.4)))
    axis.imshow(canvas, interpolation="nearest", aspect="auto")
    names = ["Truth", *(METHODS[row[0]].title for row in shown)]
    axis.set_xticks(_middle(np.arange(len(results.data))), results.data)
    axis.set_yticks(_middle(np.arange(len(names))), names)
    axis.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    for column, line in absent:
        axis.text(_middle(column), _middle(line), "none", ha="center", va="center")
    axis.spines[:].set_visible(False)
    own = origins == ["paper"]
    whose = "the paper's methods" if own else "the other methods"
    alt = (
        f"Densities, {STYLES[style]}, {whose}, first seed, at the chosen settings: the truth above, below it a row for "
        f"each method, a column for each data set ({', '.join(results.data)}). Each column has the colour scale of "
        "its truth."
    )
    ink = [[*(round(255 * part) for part in to_rgb(INK)), round(255 * k / (SHADES - 1))] for k in range(SHADES)]
    palette = np.concatenate([colormaps["viridis"](np.linspace(0, 1, LEVELS), bytes=True), np.array(ink, np.uint8)])
    return Picture(
        f"densities-{style}{'' if own else '-others'}.png", alt, _png(_snapped(_rgba(figure, DENSITY_DPI), palette))
    )


def _middle(place: Any) -> Any:
    return place * (SIZE + GAP) + SIZE / 2


def _canvas(results: Results, rows: Sequence[Row]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """All densities as one image, and the column and line of those there are not."""
    canvas = np.zeros((len(rows) * (SIZE + GAP), len(results.data) * (SIZE + GAP), 4), dtype=np.uint8)
    absent = []
    for column, data in enumerate(results.data):
        truth = results.picture(Place("truth", "", data))
        for line, row in enumerate(rows):
            if (record := results.picture(Place(*row, data))) is None:
                absent.append((column, line))
                continue
            image = np.clip(_density(record) / ((truth or record)["peak"] or 1), 0, 1)
            top, left = line * (SIZE + GAP), column * (SIZE + GAP)
            canvas[top : top + SIZE, left : left + SIZE] = colormaps["viridis"](image.T[::-1], bytes=True)
    return canvas, absent


def _density(record: Mapping[str, Any]) -> np.ndarray:
    """The density on SIZE x SIZE cells, axis 0 along x."""
    try:
        cells = int(record["cells"])
        packed = base64.b64decode(record["density"], validate=True)
        values = np.frombuffer(zlib.decompressobj().decompress(packed, cells**2 + 1), dtype=np.uint8)
        nearest = np.arange(SIZE) * cells // SIZE
        return values.reshape(cells, cells)[np.ix_(nearest, nearest)] * (float(record["peak"]) / 255)
    except (TypeError, ValueError, zlib.error) as problem:
        raise BrokenFile(f"The picture of '{record['method']}' on '{record['data']}' is broken: {problem}") from problem


def _plain(figure: Figure, file: str, alt: str) -> Picture:
    """A figure of lines and dots, whose few colours any palette holds."""
    image = Image.fromarray(_rgba(figure, 125))
    return Picture(file, alt, _png(image.quantize(method=Image.Quantize.FASTOCTREE)))


def _kl(results: Results) -> Picture:
    names = list(dict.fromkeys(row[0] for row in results.rows()))
    columns = min(3, len(results.data))
    lines = math.ceil(len(results.data) / columns)
    figure = Figure(figsize=(2.2 + 3.0 * columns, 0.6 + lines * (0.7 + 0.24 * len(names))), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for axis in panels[len(results.data) :]:
        axis.axis("off")
    for axis, data in zip(panels, results.data, strict=False):
        _kl_panel(axis, results, data, names)
    panels[0].set_yticks(range(len(names)), [METHODS[name].title for name in names])
    panels[0].invert_yaxis()
    for style in dict.fromkeys(row[1] for row in results.rows()):
        panels[0].plot([], [], "o", color=COLOURS[style], label=STYLES[style])
    figure.legend(loc="outside upper center", ncols=3)
    alt = (
        "KL(truth, model) in nats on a logarithmic axis, a panel for each data set, a line for each method. Large dots "
        "are means, small dots seeds, a cross at the right edge is a method that diverged."
    )
    return _plain(figure, "kl.png", alt)


def _kl_panel(axis: Axes, results: Results, data: str, names: Sequence[str]) -> None:
    for row in results.rows():
        place = names.index(row[0]) + {"sgd": -0.15, "adam": 0.15, "own": 0}[row[1]]
        cell = results.cell("kl", row, data)
        if cell is None:
            continue
        if cell.failed or not cell.mean > 0:
            axis.plot(0.97, place, "x", color=COLOURS[row[1]], ms=6, transform=axis.get_yaxis_transform())
            continue
        values = [value for value in cell.values.values() if value > 0]
        axis.plot(values, [place] * len(values), ".", color=COLOURS[row[1]], ms=3, alpha=0.6)
        axis.plot(cell.mean, place, "o", color=COLOURS[row[1]], ms=5)
    axis.set(title=data, xscale="log")
    _label_decades(axis)
    axis.grid(axis="x", color=INK, alpha=0.25)


def _label_decades(axis: Axes) -> None:
    """Each decade of the x axis, and its third where there are few; matplotlib's own would overlap."""
    low, high = axis.get_xlim()
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 100 * low else (1,)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _sensitivity(results: Results) -> Picture | None:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    drawn = False
    for axis, rate, default in zip(panels, ("gamma", "beta"), (PAPER_GAMMA, PAPER_BETA), strict=True):
        found = {getattr(METHODS[name], rate) or default: (name, "sgd") for name in TABLES[rate].paper}
        for place, data in enumerate(results.data):
            cells = {value: results.cell("kl", row, data) for value, row in sorted(found.items())}
            points = {value: cell.mean for value, cell in cells.items() if cell and not cell.failed and cell.mean > 0}
            axis.plot(list(points), list(points.values()), "o-", color=colormaps["tab10"](place), label=data)
            drawn = drawn or len(points) > 1
        axis.set(title=f"by {rate}", xlabel=rate, yscale="log", xticks=sorted(found))
        axis.grid(color=INK, alpha=0.25)
    panels[0].set_ylabel("KL(truth, MECO), nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    alt = (
        f"Sensitivity of MECO, SGD-style: KL(truth, model) by gamma (beta {PAPER_BETA}) and by beta (gamma "
        f"{PAPER_GAMMA}), a line a set."
    )
    return _plain(figure, "sensitivity.png", alt) if drawn else None
