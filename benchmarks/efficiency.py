"""How many standard errors of maximum likelihood each method is off: the paper's relative efficiency (Theorem 1).

    python benchmarks/efficiency.py [--quick] [--methods meco,nce] [--seeds 30] [--steps 2000] [--jobs 16]

The data are 1,000 rows of a five-dimensional Gaussian with unit variances and correlations 0.5^|i - j|; the model is
`Quadratic(5)`, which contains the truth; the noise is the Gaussian of the rows with 1.3 times its covariance. Every
method has the defaults of the command line and is trained by Adam in float64: FIRST steps to come near, at a constant
rate, then STEPS with a fresh optimizer and a cosine, whose averaged iterate counts. Batches are of 1,000 rows, larger
for the two methods whose own noise is large. Trained three times on the same rows, methods differed by 0.04 to 0.08
standard errors. The problem is a kind one: with correlations of 0.6 and means of 1, first-order training needs several
times the steps to come as near to maximum likelihood. For mean and precision the table has

    rms      root mean square over seeds and coordinates of (estimate - truth) / (ML standard error), +- over seeds
    bias     the same of the mean over seeds, less what its own scatter adds
    from ML  the same of (estimate - ML estimate of the same rows): what the method and its training add

The ML standard errors are those of Fisher's information: Sigma_ii / n for the mean, (P_ii P_jj + P_ij^2) / n for the
precision P. Denoising score matching learns the covariance plus sigma^2 I; that is taken off before comparing.
"""

import argparse
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from cells import chosen, run, warned
from figures import figure
from torch import Tensor

from unnorm import Estimator, Gaussian, Quadratic, Training, train
from unnorm.errors import NonFiniteObjective
from unnorm.estimators import DenoisingScoreMatching
from unnorm.settings import Job

DIMENSION, ROWS, WIDER = 5, 1000, 1.3
FIRST, STEPS, FIRST_LR, LR = 500, 2000, 0.05, 0.02
BATCH, BATCHES = 1000, {"dsm": 16_000, "cnce": 4000}
SLOW = ("mcmc", "cd", "pcd", "dsm")  # begun first, so that no process ends long after the others
MEAN = torch.tensor([0.5, -0.5, 0.25, 0.0, -0.25], dtype=torch.float64)
PLACES = torch.arange(DIMENSION)
COVARIANCE = 0.5 ** (PLACES[:, None] - PLACES).abs().double()
UPPER = torch.triu_indices(DIMENSION, DIMENSION)


class Cell(NamedTuple):
    method: str
    seed: int
    first: int
    steps: int


class Fitted(NamedTuple):
    """Errors in units of the ML standard error, (20,): the mean's five, then the precision's fifteen."""

    from_truth: Tensor
    from_ml: Tensor
    warnings: tuple[str, ...]
    seconds: float


def rows(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(ROWS, DIMENSION, generator=generator, dtype=torch.float64)
    return MEAN + white @ torch.linalg.cholesky(COVARIANCE).mT


def flat(mean: Tensor, precision: Tensor) -> Tensor:
    return torch.cat([mean, precision[UPPER[0], UPPER[1]]])


def maximum_likelihood(x: Tensor) -> Tensor:
    return flat(x.mean(0), torch.linalg.inv(torch.cov(x.mT, correction=0)))


def standard_errors() -> Tensor:
    precision = torch.linalg.inv(COVARIANCE)
    spread = precision.diagonal()[:, None] * precision.diagonal() + precision.square()
    return (flat(COVARIANCE.diagonal(), spread) / ROWS).sqrt()


def estimate(model: Quadratic, estimator: Estimator) -> Tensor:
    precision = model.precision.detach()
    if isinstance(estimator, DenoisingScoreMatching):
        blurred = torch.linalg.inv(precision)
        precision = torch.linalg.inv(blurred - estimator.sigma**2 * torch.eye(DIMENSION, dtype=blurred.dtype))
    return flat(model.mean.detach(), precision)


def fitted(cell: Cell) -> Fitted:
    x, began = rows(cell.seed), time.perf_counter()
    truth, errors, best = flat(MEAN, torch.linalg.inv(COVARIANCE)), standard_errors(), maximum_likelihood(x)
    if cell.method == "ml":
        return Fitted((best - truth) / errors, torch.zeros_like(best), (), 0.0)
    noise = Gaussian.fit(x).double()
    noise.scale_tril.mul_(math.sqrt(WIDER))
    first = Training(cell.first, BATCHES.get(cell.method, BATCH), FIRST_LR, seed=cell.seed)
    training = replace(first, steps=cell.steps, lr=LR, schedule="cosine", iterate="averaged", seed=cell.seed + 1000)
    model = Quadratic(DIMENSION).double()
    estimator = Job("8gaussians", estimator=cell.method, training=training).build_estimator(noise)
    histories = [train(model, estimator, x, stage, progress=False) for stage in (first, training)]
    found = estimate(model, estimator)
    if not torch.isfinite(found).all():
        raise NonFiniteObjective("the estimate is not finite.")
    seconds = time.perf_counter() - began
    return Fitted((found - truth) / errors, (found - best) / errors, warned(histories[-1]), seconds)


def rms(errors: Tensor) -> tuple[float, float]:
    """Over seeds and coordinates, (seeds, coordinates), and its standard error over seeds by the delta method."""
    squares = errors.square().mean(1)
    value = squares.mean().sqrt().item()
    scatter = squares.std().item() if len(squares) > 1 else math.nan
    return value, scatter / (2 * value * math.sqrt(len(squares))) if value else 0.0


def bias(errors: Tensor) -> float:
    squares = errors.mean(0).square()
    if len(errors) > 1:
        squares = squares - errors.var(0) / len(errors)
    return math.sqrt(max(squares.mean().item(), 0.0))


def show(method: str, results: Sequence[Fitted | str]) -> float:
    """Print the row of one method, and what went wrong; returns the rms over all coordinates."""
    good = [result for result in results if isinstance(result, Fitted)]
    value = math.nan
    if good:
        from_truth, from_ml = torch.stack([g.from_truth for g in good]), torch.stack([g.from_ml for g in good])
        line = f"{method:6s} {len(good):5d}"
        for part in (slice(None, DIMENSION), slice(DIMENSION, None)):
            size, error = rms(from_truth[:, part])
            line += f" | {size:8.3f} +- {error:5.3f} {bias(from_truth[:, part]):7.3f} {rms(from_ml[:, part])[0]:8.3f}"
        print(f"{line} | {sum(g.seconds for g in good) / len(good):7.1f}")
        value = rms(from_truth)[0]
    notes = Counter([result for result in results if isinstance(result, str)])
    notes.update(f"warned: {name}" for result in good for name in result.warnings)
    for note, count in notes.items():
        print(f"       {method}, {count} of {len(results)}: {note}")
    return value


def table(results: Mapping[str, Sequence[Fitted | str]]) -> dict[str, float]:
    group = f"{'rms':>17s} {'bias':>7s} {'from ML':>8s}"
    print(f"{'':12s} | {'mean':>34s} | {'precision':>34s} |")
    print(f"{'method':6s} {'seeds':>5s} | {group} | {group} | seconds")
    return {method: show(method, found) for method, found in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 seeds and too few steps, under a minute")
    parser.add_argument("--methods", help="names separated by commas; all when left out")
    parser.add_argument("--seeds", type=int, help="how many; 30, or 3 with --quick")
    parser.add_argument("--steps", type=int, help=f"of the second stage; {STEPS}, or 100 with --quick")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, of one thread each")
    options = parser.parse_args()
    seeds = options.seeds or (3 if options.quick else 30)
    first, steps = (50, 100) if options.quick else (FIRST, STEPS)
    steps = options.steps or steps
    results: dict[str, list[Fitted | str]] = {name: [] for name in ("ml", *chosen(options.methods))}
    cells = [Cell(method, seed, first, steps) for method in results for seed in range(seeds)]
    cells.sort(key=lambda cell: cell.method not in SLOW)
    for cell, result in run(fitted, cells, jobs=options.jobs):
        results[cell.method].append(result)
    print(f"{ROWS} rows, {DIMENSION} dimensions, noise covariance x {WIDER}, {seeds} seeds, float64")
    print(f"{first} steps at {FIRST_LR}, {steps} from {LR} by a cosine, batch {BATCH} {BATCHES}")
    for method, value in table(results).items():
        figure(f"{method} error / ML standard error", value)


if __name__ == "__main__":
    main()
