"""The picture of scores: of inliers and outliers, or of any sets."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from types import MappingProxyType

import numpy as np

from unnorm.errors import DataError, InvalidValue
from unnorm.metrics.detection import Scores, as_numbers

__all__ = ["score_histogram"]

COLOURS = ("#1b8ac4", "#d1495b", "#66a182", "#edae49", "#8d6a9f")


def score_histogram(
    path: Path | str,
    scores: Mapping[str, Scores],
    title: str = "",
    of: str = "log density, nats",
    *,
    cut: float = 0.005,
    counts: bool = False,
    marks: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Histograms of log densities, one for each named set, over one axis; those at infinity are counted in the legend.

    Args:
        path: the file; its ending says the format.
        scores: (n,) of each set by name; those of `detect`, for one.
        title: above it.
        of: what the scores are.
        cut: the share of scores beyond each end of the axis; the first and the last bar hold them, as the axis says.
        counts: draw how many, on a logarithmic axis, so that a bar of one is seen beside a bar of thousands; else the
            share of each set.
        marks: places of vertical lines by name: a threshold, for one.

    >>> import tempfile
    >>> from unnorm.metrics import detect
    >>> scores = {"inliers": [3.0, 2.0, 1.0], "outliers": [0.0, 2.0, -1.0]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     score_histogram(f"{folder}/scores.png", scores, f"AUROC {detect(**scores).auroc:.3f}")
    ...     Path(folder, "scores.png").exists()
    True
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # only who draws waits for it
    from matplotlib.figure import Figure

    values = {name: as_numbers(own) for name, own in scores.items()}
    for name, own in values.items():
        if np.isnan(own).any():
            raise DataError(f"{int(np.isnan(own).sum())} of {len(own)} scores of '{name}' are NaN.")
    if not 0 <= cut < 0.5:
        raise InvalidValue(f"The 'cut' of score_histogram must be at least 0 and below 0.5. Got {cut}.")
    finite = {name: own[np.isfinite(own)] for name, own in values.items()}
    everything = np.concatenate(list(finite.values())) if finite else np.empty(0)
    low, high = np.quantile(everything, (cut, 1 - cut)) if len(everything) else (0.0, 1.0)
    beyond = int(((everything < low) | (everything > high)).sum())
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for (name, own), colour in zip(finite.items(), cycle(COLOURS), strict=False):
        ends = {"-inf": int((values[name] == -np.inf).sum()), "inf": int((values[name] == np.inf).sum())}
        lost = "".join(f", {count:,} at {end}" for end, count in ends.items() if count)
        label = f"{name} ({len(values[name]):,}{lost})"
        # Weights, not density: what lies at infinity still counts in the whole.
        weights = np.full(len(own), 1.0 if counts else 1 / max(1, len(values[name])))
        shown = np.clip(own, low, high)
        label = label.replace("$", r"\$")
        axis.hist(shown, bins=80, range=(low, high), weights=weights, alpha=0.5, color=colour, label=label)
    for name, place in marks.items():
        axis.axvline(place, ls="--", color="#3b3f46", label=f"{name} {place:.3g}".replace("$", r"\$"))
    if counts:
        axis.set_yscale("log")
        axis.set_ylim(bottom=0.5)
        axis.yaxis.set_major_formatter("{x:,g}")
    said = f"{of}; the first and the last bar hold {beyond:,} that lie beyond" if beyond else of
    axis.set(
        title=title.replace("$", r"\$"), xlabel=said, ylabel="how many (log scale)" if counts else "share of the set"
    )
    axis.legend()
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)
