"""The report of the study of images: one page of tables, sheets and curves from its JSON lines."""

import math
from pathlib import Path

from unnorm.paper.mnist.figures import convergence, curves, memory, sheets
from unnorm.paper.mnist.results import APART, Line, Results, Run, fallen, read, summarise
from unnorm.paper.mnist.results import apart as apart_of
from unnorm.paper.mnist.spec import METHODS, NOISES, OTHERS
from unnorm.paper.page import Block, Entry, Grid, Heading, Lines, label, written

__all__ = ["write"]

LEGEND = (
    "Bits per dimension on the test images, mean and deviation over the seeds; smaller is better. Below it stand the "
    "least and the greatest that both sides of log Z allow: chains from the noise make a likelihood look better than "
    "it is, chains from held-out images worse. Rows pixel by pixel are normalised step by step, without chains: their "
    "sides are the error of the quadrature, or those of draws weighted by the density they come from, whichever are "
    f"wider. A number whose sides are more than {APART} apart is not claimed. "
    "'Paper' is its Table 5, where every method has the third noise, the training images + Gaussian; 'TRE' is Rhodes, "
    "Xu, Gutmann 2020."
)
SAMPLES = (
    "A classifier's view of the samples that the sheets show: the share with a class of probability above 0.9, and the "
    "entropy of the classes (log 10 = 2.303 where all are as frequent). 'Nearest' is the median distance to the "
    "nearest training image, a root mean square of shades from 0 to 1: far below that of test images it would be "
    "memory."
)
PROTOCOL = (
    "Images are dequantised uniformly, anew at each reading; the Gaussian lives in the space of logits with alpha "
    "1e-6, as TRE has it. Bits have every Jacobian and the offset of the levels.",
    "Waymarks and chains live in the noise's own coordinates, where it is a standard normal; networks see standardised "
    "logits (Gaussian), normal scores of the pixels (copula), or the flow's own coordinates.",
    "Rows without bridges: log p~ is the fitted Gaussian plus the network, so that it has an integral. The paper's is "
    "the network alone. Their noises are the paper's, in the Gaussian's coordinates; the third is a training image "
    "plus Gaussian noise whose width leave-one-out likelihood chose.",
    "Every run trains for the same seconds, by a trial of its step; looks at validation images are not counted. A "
    "cosine brings the learning rate to zero, training images are moved by the pixels of 'shift', and a moving average "
    "of the weights is kept, with bridges the one that is best on validation images. Short trainings, the first with "
    "even waymarks, say where these belong, once for each noise and for all methods.",
    "Pixel by pixel: the bridges are as many as the pixels, in reading order. Each waymark has one pixel more of the "
    "data, and a masked convolutional network has a head for each (TRE's dimension-wise mixing). After training each "
    "head is normalised for what comes before it, by quadrature in one dimension: log Z is 0. 'lookback' is its "
    "network, 'few' its batch, 'draws' the noise draws for each image and pixel.",
    "log Z: annealed chains from the noise (over the waymarks where there are some), and back from validation images "
    "after some transitions of the model. The two are joined by Bennett's acceptance ratio.",
    "Samples are the ends of the chains from the noise after some transitions of the model, or, pixel by pixel, "
    "independent draws; none is picked.",
    "Diverged: numbers that are not finite, or a model that annealed chains do not reach.",
)


def write(folder: Path) -> list[Path]:
    """Write the report of the study in `folder` beside its `results.jsonl`; return the files written.

    Raises:
        InvalidValue: there is no `results.jsonl`.
        BrokenFile: it is not the record of a study, or a line of it is broken.
    """
    return written(Path(folder), _blocks(read(folder)))


def _blocks(results: Results) -> list[Block]:
    drawn = [picture for picture in (convergence(results), curves(results)) if picture is not None]
    return [
        Heading(1, f"The study of MNIST, size {results.size}"),
        Heading(2, "Summary"),
        Lines(summarise(results)),
        Heading(2, "The table of the paper"),
        Lines([LEGEND]),
        _table(results),
        _published(results),
        _noises(results),
        Heading(2, "Samples"),
        Lines([SAMPLES]),
        _verdicts(results),
        *sheets(results),
        Heading(3, "Nearest training images"),
        *memory(results),
        Heading(2, "log Z and training"),
        _convergence(results),
        *drawn,
        Heading(2, "What diverged, and what the health monitor said"),
        _told(results),
        Heading(2, "How it was done"),
        Lines(PROTOCOL),
        _spacing(results),
        _settings(results),
        _clock(results),
    ]


def _table(results: Results) -> Grid:
    best = {
        bridged: min((line.bits for line in results.lines if _bridged(line) == bridged and line.bits), default=None)
        for bridged in (True, False)
    }
    rows = []
    for line in results.lines:
        method = METHODS[line.row.method]
        paper = method.paper if line.row.noise == "smoothed" and results.of_mnist else None
        published = method.published.get(line.row.noise) if results.of_mnist else None
        alone = results.noises.get(line.row.noise)
        rows.append(
            [
                label(method.title),
                label(NOISES[line.row.noise]),
                _bits(line, line.bits is not None and line.bits == best[_bridged(line)]),
                Entry("-") if alone is None else Entry(f"{alone['bits']:.4f}", alone["bits"]),
                Entry("-") if paper is None else Entry(f"{paper[0]:.3f} ± {paper[1]:.3f}", paper[0]),
                Entry("-") if published is None else Entry(f"{published:.2f}", published),
                Entry(str(len(line.runs)), len(line.runs)),
                Entry(f"{line.runs[0]['steps']:,}", line.runs[0]["steps"], note=_kept(line.runs[0])),
                _seconds(line),
            ]
        )
    head = ["Method", "Noise", "Bits/dim", "Noise alone", "Paper", "TRE", "Seeds", "Steps", "Seconds"]
    return Grid("Bits per dimension of the test images", head, rows)


def _kept(run: Run) -> str:
    kept = run.get("kept_step")
    return "" if kept is None or kept == run["steps"] else f"kept: {kept:,}"


def _seconds(line: Line) -> Entry:
    known = [float(run["seconds"]) for run in line.runs if run.get("seconds") is not None]
    return Entry(f"{sum(known) / len(known):.0f}", sum(known) / len(known)) if known else Entry("-")


def _bridged(line: Line) -> bool:
    return METHODS[line.row.method].bridged


def _bits(line: Line, best: bool) -> Entry:
    if line.bits is not None and line.sides is not None:
        error = "" if line.deviation is None else f" ± {line.deviation:.4f}"
        return Entry(f"{line.bits:.4f}{error}", line.bits, best, f"{line.sides[0]:.4f} to {line.sides[1]:.4f}")
    fell = [run for run in line.runs if fallen(run)]
    if fell:
        every = f"{len(fell)} of {len(line.runs)} seeds" if len(line.runs) > 1 else ""
        return Entry("diverged", math.inf, note=every)
    wide = max(line.runs, key=apart_of)
    return Entry("not known", 1e6, note=f"sides {wide['lower']:.3f} and {wide['upper']:.3f}")


def _published(results: Results) -> Grid:
    others = OTHERS if results.of_mnist else {}
    rows = [[label(name), Entry(f"{value:.3f} ± {error:.3f}", value)] for name, (value, error) in others.items()]
    return Grid("Methods that stand in the paper's table only", ["Method", "Bits/dim (paper)"], rows)


def _noises(results: Results) -> Grid:
    rows = [
        [label(NOISES[name]), Entry(f"{one['bits']:.4f}", one["bits"], note=f"± {one.get('se') or math.nan:.4f}")]
        for name, one in results.noises.items()
    ]
    return Grid("The noises alone", ["Noise", "Bits/dim"], rows)


def _verdicts(results: Results) -> Grid:
    rows = []
    for line in results.lines:
        runs = [run for run in line.runs if run.get("confident") is not None]
        if runs:
            rows.append([label(line.row.title), *_verdict(runs)])
    foot = [] if results.classifier is None else [[label("Test images"), *_verdict([results.classifier])]]
    return Grid("What a classifier says", ["Samples of", "Above 0.9", "Entropy", "Nearest", "Images"], rows, foot)


def _verdict(runs: list[Run]) -> list[Entry]:
    def mean(name: str) -> float:
        return sum(float(run[name]) for run in runs) / len(runs)

    shown = [Entry(f"{mean('confident'):.1%}", mean("confident")), Entry(f"{mean('entropy'):.3f}", mean("entropy"))]
    shown.append(Entry(f"{mean('nearest'):.3f}", mean("nearest")))
    return [*shown, Entry(f"{sum(int(run['n']) for run in runs):,}")]


def _convergence(results: Results) -> Grid:
    rows = []
    for line in results.lines:
        run = line.runs[0]
        for one in run.get("sides") or ():
            sides = [one.get(side) for side in ("lower", "joined", "upper")]
            shown = [
                Entry("-") if value is None else Entry(f"{value:.{2 if abs(value) > 0.1 else 4}f}", value)
                for value in sides
            ]
            time = Entry(f"{one['seconds']:.1f}", one["seconds"])
            fine = Entry(f"{one['betas']:,}", one["betas"]) if "betas" in one else Entry(_fineness(one))
            rows.append([label(line.row.title), fine, *shown, time])
    head = ["Row (first seed)", "Temperatures", "From the noise", "Joined", "From images", "Seconds"]
    return Grid(
        "log Z, nats, by the number of temperatures, of nodes of a quadrature, or of weighted draws", head, rows
    )


def _fineness(side: Run) -> str:
    return f"{side['nodes']} nodes" if "nodes" in side else f"{side['draws']} draws"


def _told(results: Results) -> Grid:
    rows = []
    for line in results.lines:
        for run in line.runs:
            said = [why] if (why := fallen(run)) else []
            said += list(run.get("warnings") or ())
            rows += [[label(line.row.title), Entry(str(run["seed"]), run["seed"]), label(text)] for text in said]
    return Grid("Messages", ["Row", "Seed", "Message"], rows)


def _spacing(results: Results) -> Grid:
    rows = []
    for name, one in results.spacings.items():
        alphas = " ".join(f"{alpha:.3f}" for alpha in one["alphas"])
        trials = one.get("trials") or []
        seen = "; then ".join(f"{max(trial['gaps']):.2f} at most" for trial in trials) or "-"
        rows.append([label(NOISES[name]), Entry(str(len(one["alphas"]) - 1)), label(seen), label(alphas)])
    return Grid("Bridges", ["Noise", "Bridges", "Gaps in the trials, nats", "Shares of noise at the waymarks"], rows)


def _settings(results: Results) -> Grid:
    start = results.starts[-1]
    rows = [[label(str(name)), label(_plain(value))] for name, value in (start.get("settings") or {}).items()]
    names = ("command", "version", "commit", "hardware", "python", "torch", "libraries", "started")
    rows += [[label(name), label(str(start.get(name)))] for name in names if start.get(name)]
    return Grid("Settings, and where it ran last", ["What", "Value"], rows)


def _plain(value: object) -> str:
    """
    >>> _plain({"widths": [8, 16], "blocks": 2}), _plain(None)
    ('widths 8, 16; blocks 2', 'all')
    """
    match value:
        case None:
            return "all"
        case dict():
            return "; ".join(f"{name} {_plain(part)}" for name, part in value.items())
        case list() | tuple():
            return ", ".join(map(_plain, value))
        case _:
            return f"{value:,}" if isinstance(value, int) else str(value)


def _clock(results: Results) -> Grid:
    rows = [[label(part), Entry(f"{seconds:,.0f}", seconds)] for part, seconds in results.clock.items()]
    return Grid("Wall seconds noted, by part, of all starts together", ["Part", "Seconds"], rows)
