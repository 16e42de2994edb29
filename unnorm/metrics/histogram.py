"""The picture of scores: of inliers and outliers, or of any sets."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from unnorm.errors import DataError
from unnorm.metrics.detection import Scores, as_numbers

__all__ = ["score_histogram"]


def score_histogram(
    path: Path | str, scores: Mapping[str, Scores], title: str = "", of: str = "log density, nats"
) -> None:
    """Histograms of log densities, one for each named set, over one axis; those at infinity are counted in the legend.

    Args:
        path: the file; its ending says the format.
        scores: (n,) of each set by name; those of `detect`, for one.
        title: above it.
        of: what the scores are.

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
    finite = {name: own[np.isfinite(own)] for name, own in values.items()}
    everything = np.concatenate(list(finite.values())) if finite else np.empty(0)
    span = tuple(np.quantile(everything, (0.005, 0.995))) if len(everything) else (0.0, 1.0)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, own in finite.items():
        ends = {"-inf": int((values[name] == -np.inf).sum()), "inf": int((values[name] == np.inf).sum())}
        lost = "".join(f", {count:,} at {end}" for end, count in ends.items() if count)
        label = f"{name} ({len(values[name]):,}{lost})"
        # Weights, not density: what lies outside the axis or at infinity still counts in the whole.
        weights = np.full(len(own), 1 / max(1, len(values[name])))
        axis.hist(own, bins=80, range=span, weights=weights, alpha=0.5, label=label.replace("$", r"\$"))
    axis.set(title=title.replace("$", r"\$"), xlabel=of, ylabel="share of the set")
    axis.legend()
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)
