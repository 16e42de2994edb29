"""Equal-time quality: every method trains for the same seconds, and its exact likelihood is compared with the truth's.

    python benchmarks/quality.py [--quick] [--seconds 30] [--threads 1] [--jobs 2] [--out cells.jsonl]

Each cell (data set, method, seed) first times the method's step on throw-away pieces, then trains the steps that fit
into the seconds with a cosine schedule, otherwise as `unnorm fit` does by default: 50,000 standardised points, a 3x300
network tilting their Gaussian, Adam 1e-3, batch 500. log Z is the grid's. The excess is that of the negative
log-likelihood over the truth's on the same 10,000 fresh points, in nats; the noise alone is what a model must beat.
Cells that run at the same time share the machine: give no more jobs than idle cores / threads.
"""

import argparse
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from cells import chosen, run, warned
from figures import figure
from torch import nn

from unnorm import Density, Estimator, Gaussian, Training, train
from unnorm.data import toy
from unnorm.data.transforms import Standardize, Transformed
from unnorm.errors import NonFiniteObjective
from unnorm.settings import Job

DATA = ("8gaussians", "2spirals")
ROWS, TEST = 50_000, 10_000
GRID_LIMIT = 0.01  # nats; a likelihood whose log Z may be off by more has the warning 'grid-error'
TRIED = 20  # steps from which a method's speed is told


class Cell(NamedTuple):
    data: str
    method: str
    seed: int
    budget: float  # seconds of training


class Scored(NamedTuple):
    steps: int
    seconds: float
    excess: float
    noise_excess: float
    grid_error: float
    warnings: tuple[str, ...]


class Pieces(NamedTuple):
    model: nn.Module
    estimator: Estimator
    noise: Gaussian


def pieces(cell: Cell, rows: Transformed, training: Training) -> Pieces:
    noise, job = Gaussian.fit(rows), Job(cell.data, estimator=cell.method, training=training)
    return Pieces(job.build_model(2, noise), job.build_estimator(noise), noise)


def trained(cell: Cell, rows: Transformed, steps: int) -> tuple[Pieces, tuple[str, ...], float]:
    """What `unnorm fit` trains, the warnings, and the seconds that its steps took."""
    training = Training(steps=steps, schedule="cosine", seed=cell.seed)
    made = pieces(cell, rows, training)
    history = train(made.model, made.estimator, rows, training, progress=False)
    return made, warned(history), history["seconds"][-1]


def score(cell: Cell) -> Scored:
    truth, generator = toy(cell.data), torch.Generator().manual_seed(cell.seed)
    x, test = (truth.sample(n, generator=generator) for n in (ROWS, TEST))
    transform = Standardize.fit(x)
    rows = Transformed(x, transform)
    trained(cell, rows, 3)  # what is done only once is done here
    tried = TRIED if cell.budget >= 10 else 5
    steps = max(1, int(cell.budget * tried / trained(cell, rows, tried)[2]))
    (model, _, noise), warnings, seconds = trained(cell, rows, steps)
    density = Density.normalise(model, noise, transform, data=x, n=1000)
    with torch.no_grad():
        log_p = density.log_prob(test).double() + density.log_z.value - density.log_zs["grid"].value
        log_q, log_true = density.noise_log_prob(test).double(), truth.log_prob(test.double())
    excess, grid_error = float((log_true - log_p).mean()), density.log_zs["grid"].stderr
    if not math.isfinite(excess):
        raise NonFiniteObjective(f"the negative log-likelihood after {steps} steps is {excess}.")
    if not grid_error < GRID_LIMIT:
        warnings += ("grid-error",)
    return Scored(steps, seconds, excess, float((log_true - log_q).mean()), grid_error, warnings)


def line(cell: Cell, result: Scored | str) -> str:
    """One cell as JSON."""
    outcome = {"failure": result} if isinstance(result, str) else result._asdict()
    return json.dumps(cell._asdict() | outcome)


def row(name: str, results: Sequence[Scored | str]) -> tuple[str, float]:
    """A line of the table, and the mean excess over the seeds that did not diverge."""
    good = [result for result in results if isinstance(result, Scored)]
    notes = Counter(name for result in good for name in result.warnings)
    notes.update(result for result in results if isinstance(result, str))
    said = ", ".join(f"{count} x {note}" for note, count in notes.items())
    if not good:
        return f"| {name} | | | | | {said} |", math.nan
    mean = statistics.fmean(result.excess for result in good)
    low, high = min(result.excess for result in good), max(result.excess for result in good)
    steps = statistics.fmean(result.steps for result in good)
    seconds = statistics.fmean(result.seconds for result in good)
    return f"| {name} | {steps:.0f} | {seconds:.1f} | {mean:.4f} | {low:.4f} .. {high:.4f} | {said} |", mean


def table(data: str, results: Mapping[str, Sequence[Scored | str]]) -> dict[str, float]:
    """Print a table in Markdown; returns the mean excess of each method."""
    print(f"\n| {data} | steps | seconds | excess NLL | min .. max | warnings |")
    print("|---|---|---|---|---|---|")
    noise = [result.noise_excess for found in results.values() for result in found if isinstance(result, Scored)]
    if noise:
        print(f"| the noise alone | | | {statistics.fmean(noise):.4f} | {min(noise):.4f} .. {max(noise):.4f} | |")
    excess = {}
    for method, found in results.items():
        shown, excess[method] = row(method, found)
        print(shown)
    return excess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one data set, one seed, 2 seconds; under a minute")
    parser.add_argument("--seconds", type=float, help="of training per cell; 30, or 2 with --quick")
    parser.add_argument("--threads", type=int, default=1, help="of each cell")
    parser.add_argument("--jobs", type=int, help="cells at a time; as many as there are cores when left out")
    parser.add_argument("--methods", help="names separated by commas; all when left out")
    parser.add_argument("--seeds", type=int, help="how many; 3, or 1 with --quick")
    parser.add_argument("--out", type=Path, help="a file for one JSON line per cell, written as they come")
    options = parser.parse_args()
    seconds, seeds = options.seconds or (2 if options.quick else 30), options.seeds or (1 if options.quick else 3)
    jobs = options.jobs or max(1, (os.cpu_count() or 1) // options.threads)
    methods, sets = chosen(options.methods), DATA[:1] if options.quick else DATA
    results: dict[str, dict[str, list[Scored | str]]] = {data: {name: [] for name in methods} for data in sets}
    cells = [Cell(data, name, seed, seconds) for data in sets for name in methods for seed in range(seeds)]
    if options.out:
        options.out.write_text("")
    for cell, result in run(score, cells, jobs=jobs, threads=options.threads):
        results[cell.data][cell.method].append(result)
        if options.out:
            with options.out.open("a") as file:
                file.write(line(cell, result) + "\n")
    print(f"{seconds:g} s of training x {options.threads} threads, seeds {seeds}, cells at a time {jobs}")
    excess = {data: table(data, found) for data, found in results.items()}
    for data, means in excess.items():
        for name, mean in means.items():
            figure(f"{name} excess NLL, {data}", mean)


if __name__ == "__main__":
    main()
