"""The figures of the study of images: curves of training, both sides of log Z, and sheets."""

from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unnorm.paper.mnist.results import Results, Run
from unnorm.paper.page import Picture

__all__ = ["convergence", "curves", "memory", "sheets"]

WIDE = 5.0  # nats on an axis, beyond which it is logarithmic


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    content = BytesIO()
    figure.savefig(content, dpi=110, format="png")
    return content.getvalue()


def curves(results: Results) -> Picture | None:
    """Claimed nats by the step, of the first seed of each row: what training believes, not what is true."""
    lines = [(line.row, line.runs[0]) for line in results.lines if line.runs[0].get("curve")]
    if not lines:
        return None
    kinds = [kind for kind in (True, False) if any((run["bridges"] > 0) == kind for _, run in lines)]
    figure = Figure(figsize=(3 + 5 * len(kinds), 4.2), layout="constrained")
    for axis, bridged in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for row, run in lines:
            if (run["bridges"] > 0) != bridged:
                continue
            steps, values = run["curve"]["step"], run["curve"]["value"]
            axis.plot(steps, values, lw=1, label=row.title)
        axis.set(title="with bridges" if bridged else "without bridges", xlabel="step", ylabel="claimed nats")
        if not bridged:
            axis.set_yscale("symlog")
    figure.legend(loc="outside right upper", fontsize=6)
    return Picture(
        "curves.png", "What training claims, by the step. Only log Z from both ends is evidence.", _png(figure)
    )


def convergence(results: Results) -> Picture | None:
    """Both sides of log Z against the number of temperatures."""
    found = [(line.row, line.runs[0]) for line in results.lines]
    lines = [(row, run) for row, run in found if len(_sides(run)) > 1 and "betas" in _sides(run)[0]]
    lines = [(row, run) for row, run in lines if run["bridges"]] or lines  # those that numbers are claimed for
    if not lines:
        return None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axis = figure.subplots()
    ticks = sorted({one["betas"] for _, run in lines for one in _sides(run)})
    for place, (row, run) in enumerate(lines):
        sides = _sides(run)
        betas, last = [one["betas"] for one in sides], sides[-1]["joined"]
        colour = f"C{place % 10}"
        axis.plot(betas, [one["lower"] - last for one in sides], "v-", color=colour, lw=1, ms=4, label=row.title)
        axis.plot(betas, [one["upper"] - last for one in sides], "^--", color=colour, lw=1, ms=4)
    axis.set(xlabel="temperatures", ylabel="log Z less the last joined one, nats", xscale="log")
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    if max(map(abs, axis.get_ylim())) > WIDE:
        axis.set_yscale("symlog", linthresh=1.0)
    axis.axhline(0, color="black", lw=0.5)
    figure.legend(loc="outside right upper", fontsize=7)
    words = "log Z from the noise (down) and from held-out images (up), by the number of temperatures."
    return Picture("convergence.png", words, _png(figure))


def _sides(run: Run) -> list[Run]:
    return [one for one in run.get("sides") or () if one.get("lower") is not None and one.get("upper") is not None]


def sheets(results: Results) -> list[Picture]:
    """A sheet of samples of each row, of its first seed, not picked."""
    pictures = []
    for line in results.lines:
        run = line.runs[0]
        lost = "" if run["status"] == "ok" else " (diverged: where plain chains got from the noise)"
        words = f"Samples, not picked: {line.row.title}{lost}."
        pictures += _file(results, run.get("sheet"), words)
    return pictures


def memory(results: Results) -> list[Picture]:
    """Samples above, and below each its nearest training image, of rows with bridges."""
    pictures = []
    for line in results.lines:
        run = line.runs[0]
        if run.get("bridges"):
            words = f"Above samples, below each its nearest training image: {line.row.title}."
            pictures += _file(results, run.get("nearest_sheet"), words)
    return pictures


def _file(results: Results, name: str | None, words: str) -> list[Picture]:
    path = results.folder / name if name and "/" not in name else None
    return [Picture(name, words, path.read_bytes())] if name and path is not None and path.is_file() else []
