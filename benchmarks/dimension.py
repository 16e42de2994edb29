"""Likelihood above the plane at equal training time: plain and bridged MECO, bridged NCE, the noise, a flow, the truth.

    python benchmarks/dimension.py [--quick] [--seconds 120] [--seeds 1] [--jobs 2] [--data NAMES] [--out cells.jsonl]
    python benchmarks/dimension.py --from cells.jsonl

Three sets whose density is known: mixtures of 16 Gaussians in 32 and 100 dimensions, each component with a covariance
of its own, and a table of 50 columns, correlated and heavy-tailed: a Student-t with 5 degrees of freedom and factors,
each column bent by a quadratic of its own. 20,000 rows to train on, 2,000 to validate (the best iterate is kept), 4,000
to test. The noise is the Gaussian of the mixtures and the copula of the table, given, so that there is something to
learn. What `noise.fit` picks by itself stands in a row of its own, and "default" begins there, with the bridges that a
pilot chooses, as `unnorm fit` does. Everybody trains for about the same seconds on one thread (as many steps as a trial
says fit; what it took is in the table), the pilot that places the bridges included: a 3x300 network, or zuko's neural
spline flow (Adam 1e-3, cosine, batch 500, best of validation too). log Z is the ladder's with test rows held out; its
error is part of the error shown.
"""

import argparse
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from cells import run
from figures import figure
from torch import Tensor

from unnorm import MECO, MLP, NCE, Bridged, Density, Noise, Telescope, Tilted, Training, loop, noise
from unnorm.bridges import pilot
from unnorm.data import Standardize, Transform
from unnorm.data.affine import Identity
from unnorm.data.transforms import Compose
from unnorm.errors import ShrinkageWarning

ROWS, VALID, TEST = 20_000, 2000, 4000
METHODS = ("noise", "auto noise", "plain meco", "bridged meco", "bridged nce", "default", "flow", "truth")
PILOTED = ("bridged meco", "bridged nce", "default")
TRIED = 15
EVALUATIONS = 400_000


class Known(NamedTuple):
    """A distribution that can be drawn from and evaluated."""

    sample: Callable[[int, torch.Generator], Tensor]
    log_prob: Callable[[Tensor], Tensor]
    noise: str


def mixture(size: int, components: int = 16) -> Known:
    g = torch.Generator().manual_seed(size)
    locs = 3 * torch.randn(components, size, generator=g, dtype=torch.float64) / math.sqrt(size) * 2
    factors = torch.randn(components, size, size, generator=g, dtype=torch.float64) / math.sqrt(size)
    covariances = 0.4 * factors @ factors.mT + 0.1 * torch.eye(size, dtype=torch.float64)
    trils = torch.linalg.cholesky(covariances)
    each = torch.distributions.MultivariateNormal(locs, scale_tril=trils)

    def sample(n: int, generator: torch.Generator) -> Tensor:
        which = torch.randint(components, (n,), generator=generator)
        white = torch.randn(n, size, generator=generator, dtype=torch.float64)
        return locs[which] + (trils[which] @ white[:, :, None]).squeeze(-1)

    def log_prob(x: Tensor) -> Tensor:
        parts = [each.log_prob(part[:, None]) for part in x.split(1000)]
        return torch.logsumexp(torch.cat(parts), -1) - math.log(components)

    return Known(sample, log_prob, "gaussian")


def table(size: int = 50, factors: int = 6, df: int = 5) -> Known:
    g = torch.Generator().manual_seed(5)
    loadings = torch.randn(size, factors, generator=g, dtype=torch.float64)
    covariance = loadings @ loadings.mT + torch.eye(size, dtype=torch.float64)
    spread = covariance.diagonal().sqrt()
    tril = torch.linalg.cholesky(covariance / spread / spread[:, None])
    bend = 0.3 * torch.rand(size, generator=g, dtype=torch.float64)
    constant = math.lgamma((df + size) / 2) - math.lgamma(df / 2) - size / 2 * math.log(df * math.pi)

    def sample(n: int, generator: torch.Generator) -> Tensor:
        white = torch.randn(n, size, generator=generator, dtype=torch.float64) @ tril.mT
        chi = torch.randn(n, df, generator=generator, dtype=torch.float64).square().sum(-1, keepdim=True)
        t = white * (df / chi).sqrt()
        return t + bend * t * t.abs()

    def log_prob(x: Tensor) -> Tensor:
        t = x.sign() * 2 * x.abs() / (1 + (1 + 4 * bend * x.abs()).sqrt())  # t + bend t |t| = x
        white = torch.linalg.solve_triangular(tril, t.mT, upper=False)
        log_t = constant - tril.diagonal().log().sum() - (df + size) / 2 * torch.log1p(white.square().sum(0) / df)
        return log_t - torch.log1p(2 * bend * t.abs()).sum(-1)

    return Known(sample, log_prob, "copula")


SETS: dict[str, Callable[[], Known]] = {
    "mixture-32": lambda: mixture(32),
    "mixture-100": lambda: mixture(100),
    "table-50": table,
}


class Cell(NamedTuple):
    data: str
    method: str
    seed: int
    seconds: float


class Scored(NamedTuple):
    value: float  # mean test log-likelihood, nats
    stderr: float  # of its difference to the truth, row by row, and of log Z
    steps: int
    seconds: float
    bridges: int
    trusted: bool
    note: str


class Task(NamedTuple):
    """Rows in the model's units, the noise there, and what brings log densities back."""

    train: Tensor
    valid: Tensor
    test: Tensor
    noise: Noise
    transform: Transform
    truth: Tensor
    raw: Tensor


def prepared(name: str, seed: int, kind: str | None = None) -> Task:
    known, g = SETS[name](), torch.Generator().manual_seed(1000 + seed)
    train, valid, test = (known.sample(n, g) for n in (ROWS, VALID, TEST))
    standardize = Standardize.fit(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkageWarning)
        q = noise.fit(standardize(train)[0], kind or known.noise, held_out=standardize(valid)[0])
    said = q.choice
    way, own = q.coordinates()
    transform = standardize if isinstance(way, Identity) else Compose([standardize, way])
    train, valid, z = (transform(x)[0].float() for x in (train, valid, test))
    own = own.float()
    own.choice = said
    return Task(train, valid, z, own, transform, known.log_prob(test), test)


def net(size: int, outputs: int | None, seed: int) -> MLP:
    return MLP(size, outputs=outputs, generator=torch.Generator().manual_seed(seed))


def by_fit(task: Task, cell: Cell) -> Scored:
    """Plain or bridged: a pilot if there are bridges, a trial of the step's speed, and what fits into the seconds."""
    began, size = time.perf_counter(), task.train.shape[1]
    base = NCE if cell.method.endswith("nce") else MECO
    alphas: tuple[float, ...] = ()
    if cell.method in PILOTED:
        short = 40 if cell.seconds < 30 else 200
        found = pilot(
            lambda k: net(size, k, cell.seed), task.noise, task.train, base=base, steps=short, held_out=task.valid
        )
        alphas = found.alphas

    def pieces() -> tuple[Tilted, MECO | Telescope]:
        if len(alphas) > 2:
            return Bridged(task.noise, net(size, len(alphas) - 1, cell.seed)), Telescope(task.noise, alphas, base)
        return Tilted(task.noise, net(size, None, cell.seed)), base(task.noise)  # type: ignore[return-value]

    loop.train(*pieces(), task.train, Training(steps=2), progress=False)  # the first steps of a process are slow
    trial = time.perf_counter()
    loop.train(*pieces(), task.train, Training(steps=TRIED), progress=False)
    each = (time.perf_counter() - trial) / TRIED
    steps = max(20, int((began + cell.seconds - time.perf_counter()) / each))
    model, estimator = pieces()
    training = Training(steps=steps, schedule="cosine", iterate="best", seed=cell.seed)
    history = loop.train(model, estimator, task.train, training, validation=task.valid, progress=False)
    seconds = time.perf_counter() - began
    g = torch.Generator().manual_seed(cell.seed + 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        density = Density.normalise(
            model, task.noise, task.transform, held_out=task.raw, evaluations=EVALUATIONS, generator=g
        )
    told = " ".join(line.split(", ")[1].split(":")[0] for line in history.warnings)
    value, error = scored(density.log_prob(task.raw), task.truth, density.log_z.stderr)
    return Scored(value, error, steps, seconds, max(1, len(alphas) - 1), not density.doubts, told)


def by_flow(task: Task, cell: Cell) -> Scored:
    """zuko's neural spline flow by maximum likelihood, the iterate that validates best."""
    import zuko

    began = time.perf_counter()
    torch.manual_seed(cell.seed)
    flow = zuko.flows.NSF(task.train.shape[1], transforms=3, hidden_features=(128, 128))
    g = torch.Generator().manual_seed(cell.seed)

    def step(optimizer: torch.optim.Optimizer) -> None:
        x = task.train[torch.randint(len(task.train), (500,), generator=g)]
        optimizer.zero_grad()
        (-flow().log_prob(x).mean()).backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
        optimizer.step()

    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    trial = time.perf_counter()
    for _ in range(TRIED):
        step(optimizer)
    each = (time.perf_counter() - trial) / TRIED
    steps = max(20, int((began + cell.seconds - time.perf_counter()) / each / 1.05))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, kept = math.inf, {name: part.clone() for name, part in flow.state_dict().items()}
    for t in range(1, steps + 1):
        step(optimizer)
        schedule.step()
        if t % 100 == 0 or t == steps:
            with torch.no_grad():
                value = float(-flow().log_prob(task.valid).mean())
            if value < best:
                best, kept = value, {name: part.clone() for name, part in flow.state_dict().items()}
    flow.load_state_dict(kept)
    with torch.no_grad():
        log_det = task.transform(task.raw)[1]
        value, error = scored(flow().log_prob(task.test).double() + log_det, task.truth, 0.0)
    return Scored(value, error, steps, time.perf_counter() - began, 0, True, "")


def scored(log_prob: Tensor, truth: Tensor, log_z_stderr: float) -> tuple[float, float]:
    log_prob = log_prob.detach().double()
    gap = log_prob - truth
    return float(log_prob.mean()), math.hypot(float(gap.std()) / math.sqrt(len(gap)), log_z_stderr)


def measure(cell: Cell) -> Scored:
    task = prepared(cell.data, cell.seed, "auto" if cell.method in ("auto noise", "default") else None)
    if cell.method == "truth":
        return Scored(float(task.truth.mean()), 0.0, 0, 0.0, 0, True, "")
    if cell.method in ("noise", "auto noise"):
        log_q = task.noise.log_prob(task.test).double() + task.transform(task.raw)[1]
        value, error = scored(log_q, task.truth, 0.0)
        return Scored(value, error, 0, 0.0, 0, True, task.noise.choice.kind if task.noise.choice else "")
    return by_flow(task, cell) if cell.method == "flow" else by_fit(task, cell)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="mixture-32 alone, 6 seconds for each: a smoke test")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, for each method")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    parser.add_argument("--data", help="names separated by commas")
    parser.add_argument("--methods", help="names separated by commas")
    parser.add_argument("--out", type=Path, help="a file for one JSON line per cell")
    parser.add_argument("--from", type=Path, dest="source", help="only print the table of such a file")
    options = parser.parse_args()
    names = options.data.split(",") if options.data else ["mixture-32"] if options.quick else list(SETS)
    seconds = 6.0 if options.quick else options.seconds
    methods = options.methods.split(",") if options.methods else METHODS
    cells = [Cell(name, method, seed, seconds) for seed in range(options.seeds) for name in names for method in methods]
    found: dict[Cell, Scored | str] = {}
    if options.source:
        for line in options.source.read_text().splitlines():
            record = json.loads(line)
            result = record.pop("result")
            found[Cell(**record)] = result if isinstance(result, str) else Scored(*result)
        return report(names, found, quick=False)
    for cell, result in run(measure, cells, jobs=options.jobs):
        found[cell] = result
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps({**cell._asdict(), "result": result}) + "\n")
    return report(names, found, quick=options.quick)


def report(names: Sequence[str], found: dict[Cell, Scored | str], *, quick: bool) -> bool:
    print("| data | method | test log-likelihood | below the truth | s | steps | bridges | log Z trusted | warned |")
    print("|---|---|---|---|---|---|---|---|---|")
    ok, means = True, dict[tuple[str, str], float]()
    for name in names:
        for method in METHODS:
            results = [result for cell, result in found.items() if (cell.data, cell.method) == (name, method)]
            good = [result for result in results if isinstance(result, Scored)]
            if not good:
                print(f"| {name} | {method} | {results} |")
                continue
            means[name, method] = value = statistics.fmean(result.value for result in good)
            known = [r.value for c, r in found.items() if c[:2] == (name, "truth") and isinstance(r, Scored)]
            truth = statistics.fmean(known) if known else math.nan
            error = math.hypot(*(result.stderr for result in good)) / len(good)
            steps, bridges = (
                " ".join(f"{part}" for part in sorted({getattr(result, what) for result in good}) if part)
                for what in ("steps", "bridges")
            )
            trusted = all(result.trusted for result in good)
            seconds = " ".join(f"{result.seconds:.0f}" for result in good if result.seconds)
            notes = " ".join(sorted({result.note for result in good}))
            print(
                f"| {name} | {method} | {value:.3f} | {truth - value:.3f} ± {error:.3f} | {seconds} | {steps} "
                f"| {bridges} | {'yes' if trusted else 'no'} | {notes} |"
            )
        if (name, "bridged meco") in means:
            gain = means[name, "bridged meco"] - means[name, "noise"]
            ok &= figure(f"{name}: bridged meco above its noise, nats", gain, 0.0, at_least=True)
            for other in ("plain meco", "bridged nce", "flow"):
                if (name, other) in means:
                    figure(
                        f"{name}: bridged meco above {other}, nats", means[name, "bridged meco"] - means[name, other]
                    )
            if (name, "default") in means:
                gain = means[name, "default"] - means[name, "auto noise"]
                ok &= figure(f"{name}: default above its noise, nats", gain, -0.01, at_least=True)
    return ok or quick


if __name__ == "__main__":
    import sys

    sys.exit(not main())
