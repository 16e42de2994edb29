"""How the synthetic study was done: chosen settings, step times, its protocol, where and how long it ran."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unnorm.paper.page import Block, Entry, Grid, Lines, label
from unnorm.paper.toy2d.completeness import RUNAWAY_KL
from unnorm.paper.toy2d.results import FLOOR_ERRORS, Place, Results, Run, Setting, title
from unnorm.paper.toy2d.spec import METHODS, STYLES
from unnorm.paper.toy2d.stack import PAPER_BETA, PAPER_GAMMA

__all__ = ["chosen_settings", "protocol", "provenance"]

SETTINGS = {
    "seeds": "seeds",
    "first_seed": "the first seed",
    "seconds": "seconds of training for a run",
    "rates": "learning rates to choose from",
    "n_steps": "Langevin steps of MCMC to choose from",
    "bandwidths": "bandwidths of the kernel density to choose from",
    "components": "components of the Gaussian mixture to choose from",
    "batch": "rows in a batch",
    "train": "rows for training",
    "validation": "rows for validation",
    "test": "rows for the test",
    "points": "points for MMD and Frechet distance",
    "cells": "cells on a side of the grid",
    "hidden": "hidden widths of the network",
    "matmul": "precision of matrix products in training",
}
PROTOCOL = (
    "Model: log p~ is a network{layers} with SiLU. The noise is a Gaussian fitted to the training rows.",
    "Normalisation: models without an integral of their own are normalised on a grid{cells} over the square of half "
    "side 1.5 extents of the data set, so a model is its restriction to that square. Their samples are drawn from "
    "that grid. Flows, kernel densities and mixtures have an integral and samples of their own.",
    "Training: batches{batch} drawn with replacement, a learning rate that falls along a cosine, the last iterate. "
    "Every seed has its own data, network and random numbers, the same for all methods.",
    "Optimizers: MECO has gamma {gamma} and beta {beta}, unless its name says otherwise. Its beta is the weight of the "
    "new gradient, so Adam-style MECO is torch's Adam with betas ({memory:g}, 0.999). The other methods have plain "
    "SGD, or Adam with torch's usual betas (0.9, 0.999). NGD takes steps of the length of the learning rate; its "
    "Adam-style form is Adam fed with gradients of length one (the paper does not say which form it used).",
    "MCMC and contrastive divergence walk by Metropolis-adjusted Langevin steps whose size follows their acceptance; "
    "contrastive divergence takes 10 of them.",
    "The flow is zuko's NSF with 3 transforms and networks of 128 x 128, trained with Adam. MECO with bridges has 4 "
    "of them: log p~ is log q and the sum of as many heads.",
    "MMD: unbiased, squared, Gaussian kernel, between {points} of the model and of the truth. Its bandwidth is the "
    "median distance between points of the truth, one for each data set and seed.",
    "Frechet distance: squared, of the Gaussians with the means and covariances of the two samples.",
    "Test NLL: mean of -log p over the test rows, in nats.",
    "KL(truth, model): in nats, by the same grid; for kernel densities and mixtures by one of half as many cells on a "
    "side.",
    "Noise floor: the same metric between independent samples of the truth, mean and deviation over pairs. "
    "A method is at it where its mean over n seeds is at most the floor's mean + {errors} deviations x sqrt(1/n + "
    "1/pairs).",
    "Diverged: a run whose numbers became NaN or infinite. It counts as a loss. Ran away: a run with finite numbers "
    "and a KL above {runaway:g} nats. It counts by its numbers.",
)
INNER = 3  # values of a grid that has one between its edges
PRODUCTS = {"highest": "full float32", "high": "TF32", "medium": "bfloat16"}


def chosen_settings(results: Results) -> list[Block]:
    """The setting of every cell, and the step times that made its number of steps."""
    tried: dict[Place, set[float]] = {}
    for run in results.runs:
        if (value := _tuned(run)) is not None:
            tried.setdefault(Place(run["method"], run["style"], run["data"]), set()).add(value)
    lines, edges, total = [], 0, 0
    for row in results.rows():
        line = [label(title(row))]
        for data in results.data:
            runs, values = results.chosen.get(Place(*row, data)), tried.get(Place(*row, data), set())
            if runs is None:
                line.append(Entry("-"))
                continue
            edge = len(values) >= INNER and _tuned(runs[0]) in (min(values), max(values))
            total, edges = total + (len(values) >= INNER), edges + edge
            line.append(_setting(runs, edge))
        lines.append(line)
    budget = results.plan.get("seconds")
    time = f" of {budget} s" if budget is not None else ""
    marked = [
        "^: the learning rate, bandwidth or number of components is the least or the largest of three or more that "
        f"were tried: {edges} of {total}."
    ]
    words = [
        f"Methods with an optimizer have an equal training time{time}: a slower step means fewer. "
        "The setting is the one with the least mean validation NLL over the seeds; the test set has no say.",
        *(marked if total else []),
    ]
    caption = "Chosen learning rate (Langevin steps) or other setting; below it, steps and seconds of a run"
    return [Lines(words), Grid(caption, ["Method", *results.data], lines), *_timings(results)]


def _tuned(run: Run) -> float | None:
    """What its method has a grid of: the learning rate, or what stands in its place.

    >>> _tuned({"method": "meco", "lr": 0.1}), _tuned({"method": "kde", "lr": None, "setting": {"bandwidth": 0.2}})
    (0.1, 0.2)
    """
    name = METHODS[run["method"]].tuned
    value = run.get("lr") if name == "lr" else (run.get("setting") or {}).get(name)
    return value if isinstance(value, (int, float)) else None


def _setting(runs: Sequence[Run], edge: bool) -> Entry:
    lr, n_steps, _ = Setting.of(runs[0])
    tuned, mark = METHODS[runs[0]["method"]].tuned, " ^" if edge else ""
    words = [f"{lr:g}{mark}"] if lr is not None else []
    words += [f"({n_steps} Langevin)"] if n_steps is not None else []
    other = runs[0].get("setting") or {}
    words += [f"{name} {value}{mark if name == tuned else ''}" for name, value in other.items()]
    notes = []
    for name, unit in (("steps", "steps"), ("seconds", "s")):
        values = [run[name] for run in runs if run.get(name) is not None]
        notes += [f"{np.mean(values):{',.0f' if name == 'steps' else '.3g'}} {unit}"] if values else []
    text = " ".join(words) or "-"
    return Entry(text, text if lr is None else lr, note=", ".join(notes))


def _timings(results: Results) -> list[Block]:
    lines = []
    for one in results.timings:
        alone, stacked = one.get("single_seconds"), one.get("step_seconds")
        values = (one.get("n_steps"), one.get("replicas"), one.get("steps"))
        times = (stacked and 1e6 * stacked, alone and 1e6 * alone, _ratio(one))
        entries = [Entry("-" if value is None else f"{value:,}", value) for value in values]
        entries += [
            Entry("-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", value)
            for value in times
        ]
        lines.append([label(title((one["method"], one["style"]))), *entries])
    head = ["Method", "Langevin steps", "replicas", "steps in the time", "µs a step, stacked", "µs a step, alone"]
    return [Grid("Step times", [*head, "ratio"], lines)] if lines else []


def protocol(results: Results) -> Lines:
    """What a reader has to know to do it again; what differs between sizes is from the settings."""
    plan = results.plan
    widths = tuple(plan.get("hidden") or ())
    layers = f" of {len(widths)} hidden layers of {_plain(widths[0])}" if len(set(widths)) == 1 else ""
    known = {
        "layers": layers or (f" of hidden layers {_plain(widths)}" if widths else ""),
        "cells": f" of {_plain(plan['cells'])} cells on a side" if plan.get("cells") else "",
        "batch": f" of {_plain(plan['batch'])} rows" if plan.get("batch") else "",
        "gamma": PAPER_GAMMA,
        "beta": PAPER_BETA,
        "memory": 1 - PAPER_BETA,
        "errors": FLOOR_ERRORS,
        "runaway": RUNAWAY_KL,
        "points": f"{_plain(plan['points'])} points" if plan.get("points") else "samples",
    }
    lines = [line.format(**known) for line in PROTOCOL]
    if precision := PRODUCTS.get(str(plan.get("matmul"))):
        lines.append(f"Matrix products in training: {precision}. What is measured is measured in full precision.")
    return Lines(lines)


def provenance(results: Results) -> list[Block]:
    """Where, when and how long the study ran, and the settings of its size."""
    facts = {name: results.starts[-1].get(name) for name in ("size", "seed", "seeds")}
    facts["runs"] = len(results.runs)
    facts["seconds of training, all runs"] = f"{sum(run.get('seconds') or 0 for run in results.runs):,.1f}"
    if results.throughput is not None:
        facts["throughput"] = _throughput(results, results.throughput)
    order = sorted(results.plan, key=lambda name: [*SETTINGS, name].index(name))
    settings = {SETTINGS.get(name, name): results.plan[name] for name in order}
    if precision := PRODUCTS.get(str(results.plan.get("matmul"))):
        settings[SETTINGS["matmul"]] = f"{results.plan['matmul']} ({precision})"
    return [_facts("The study", facts), _starts(results), *_clock(results), _facts("Settings of this size", settings)]


def _starts(results: Results) -> Grid:
    """Each start once: a resumed study may have another commit or machine each time."""
    names = ("started", "command", "commit", "hardware", "version", "python", "torch", "libraries")
    found = dict.fromkeys(tuple(_plain(one.get(name)) for name in names) for one in results.starts)
    return Grid("Starts: the first, then each time it was resumed", names, [list(map(label, one)) for one in found])


def _facts(caption: str, facts: Mapping[str, Any]) -> Grid:
    return Grid(caption, ["What", "Value"], [[label(name), label(_plain(value))] for name, value in facts.items()])


def _throughput(results: Results, one: Run) -> str:
    def known(name: str) -> str:
        return "an unknown number of" if one.get(name) is None else f"{one[name]:,.0f}"

    ratios = [ratio for timing in results.timings if (ratio := _ratio(timing)) is not None]
    each = f", by method {min(ratios):.0f} to {max(ratios):.0f}" if ratios else ""
    precision = PRODUCTS.get(str(results.plan.get("matmul")))
    products = f" Matrix products of both: {precision}." if precision else ""
    return (
        f"{known('replicas')} replicas on {one.get('device')}: {known('stacked_per_second')} replica-steps a second "
        f"side by side, {known('single_per_second')} one by one: {known('ratio')} times as many{each}. One by one "
        "is the time of a step of `train`, which has no CUDA graph, with the model, data and estimator of a run of "
        f"each computation, in a short trial.{products}"
    )


def _ratio(timing: Run) -> float | None:
    """How many times longer a step takes alone than its share of a step side by side.

    >>> _ratio({"single_seconds": 0.004, "step_seconds": 0.0001}), _ratio({"step_seconds": 0.1})
    (40.0, None)
    """
    alone, stacked = timing.get("single_seconds"), timing.get("step_seconds")
    return alone / stacked if alone and stacked else None


def _clock(results: Results) -> list[Grid]:
    if not results.clock:
        return []
    rows = [[label(part), Entry(f"{seconds:,.1f}", seconds)] for part, seconds in results.clock.items()]
    total = [label("noted"), Entry(f"{sum(results.clock.values()):,.1f}")]
    return [Grid("Wall seconds noted, by part, of all starts together", ["Part", "Seconds"], rows, [total])]


def _plain(value: Any) -> str:
    """A setting for a person; of a mapping, names with equal values stand together.

    >>> _plain({"sgd": [0.1, 0.01], "adam": [0.1, 0.01], "own": [1e-3]}), _plain(20000), _plain(None)
    ('SGD-style, Adam-style: 0.1, 0.01; its own way: 0.001', '20,000', 'unknown')
    """
    match value:
        case None:
            return "unknown"
        case dict():
            names: dict[str, list[str]] = {}
            for name, part in value.items():
                names.setdefault(_plain(part), []).append(STYLES.get(str(name), str(name)))
            return "; ".join(f"{', '.join(own)}: {part}" for part, own in names.items())
        case list() | tuple():
            return ", ".join(map(_plain, value))
        case int() if not isinstance(value, bool):
            return f"{value:,}"
        case _:
            return str(value)
