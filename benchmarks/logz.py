"""Is log Z with its error right? The ladder on every target whose log Z is known, many times over.

    python benchmarks/logz.py [--quick] [--repetitions 100] [--jobs 2] [--out z.jsonl] [--seconds 3000] [--from z.jsonl]

Each repetition draws 2,000 samples of the target, fits a Gaussian to them as the noise (diagonal for the Gaussian
targets, so that it is bad on purpose), and asks for a standard error of 0.02, with 4,000 held-out samples and without;
float64, one thread; a million evaluations by annealed chains, as `Density` allows. With --noises standard the noise is
N(0, 1) and knows nothing of the target. --out is written as they come and read first: a second call does what is
missing. The repetitions go round the targets, so that a run stopped by --seconds, after what it has begun, has about as
many of each.

A row is right if no repetition is confidently wrong (trusted, and off by more than 4 errors and 0.01), the ladder
refused none, and the 95% interval covers the truth in 90% of the trusted repetitions or more: an exact binomial test
must reject that at 1% before a row fails (of a hundred, 82 are let pass). Above 99% it rejects too, but not before some
460 repetitions without a miss: with a hundred nothing can be said against covering always. Where the error is too large
the columns rmse and stderr show it. The error of a grid is a bound, and may cover always.
A row all of whose repetitions are flagged is right too. Bias and root mean square error are over all repetitions.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cells import run
from figures import figure

from unnorm import Gaussian
from unnorm.data.targets import TARGETS, target
from unnorm.partition import ladder

SLOW = ("gaussian-10", "gaussian-100", "funnel-10", "double-well-20")
FITTED, HELD_OUT, WANTED, EVALUATIONS = 2000, 4000, 0.02, 1_000_000
LOW, HIGH, LEVEL = 0.90, 0.99, 0.01  # coverage, and the test of it
WRONG_ERRORS, WRONG_NATS = 4.0, 0.01
ROUNDING = 1e-9  # a smaller error than this nobody can be held to


class Row(NamedTuple):
    target: str
    data: bool
    noise: str = "fitted"


class Cell(NamedTuple):
    row: Row
    seed: int
    until: float  # the time after which it is not begun
    evaluations: int = EVALUATIONS


class Repetition(NamedTuple):
    """What one call of the ladder said, and by how much it was off."""

    rung: str
    value: float
    error: float
    stderr: float
    ess: float
    khat: float
    trusted: bool
    doubts: tuple[str, ...]
    seconds: float

    @property
    def off(self) -> float:
        """The error in stated errors."""
        return abs(self.error) / max(self.stderr, ROUNDING)

    @property
    def covered(self) -> bool:
        return self.off <= 1.96

    @property
    def wrong(self) -> bool:
        return self.trusted and not (self.off <= WRONG_ERRORS or abs(self.error) <= WRONG_NATS)


Results = dict[Row, dict[int, Repetition | str]]


def measure(cell: Cell) -> Repetition | None:
    if time.time() > cell.until:
        return None
    problem, generator = target(cell.row.target), torch.Generator().manual_seed(cell.seed)
    covariance = "diagonal" if problem.name.startswith("gaussian") else "full"
    noise = Gaussian(problem.event)
    if cell.row.noise == "fitted":
        noise = Gaussian.fit(problem.sample(FITTED, generator=generator), covariance)
    noise = noise.double()
    data = problem.sample(HELD_OUT, generator=generator) if cell.row.data else None
    began = time.perf_counter()
    climb = ladder(
        problem.log_density, noise, data=data, stderr=WANTED, evaluations=cell.evaluations, generator=generator
    )
    seconds, found = time.perf_counter() - began, climb.log_z
    error = found.value - problem.log_z
    return Repetition(
        found.method, found.value, error, found.stderr, found.ess, found.khat, climb.trusted, climb.doubts, seconds
    )


def line(row: Row, seed: int, result: Repetition | str) -> str:
    """One repetition as JSON, which knows no infinity."""
    outcome = {"failure": result} if isinstance(result, str) else result._asdict()
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in outcome.items()
    }
    return json.dumps({**row._asdict(), "seed": seed, **finite})


def parsed(text: str) -> tuple[Row, int, Repetition | str]:
    fields: dict[str, Any] = json.loads(text)
    row = Row(fields.pop("target"), fields.pop("data"), fields.pop("noise", "fitted"))
    seed = fields.pop("seed")
    if "failure" in fields:
        return row, seed, fields["failure"]
    unknown = {"stderr": math.inf} | dict.fromkeys(("value", "error", "ess", "khat"), math.nan)
    known = {key: unknown[key] if value is None else value for key, value in fields.items()}
    return row, seed, Repetition(**known | {"doubts": tuple(fields["doubts"])})


def complete_lines(path: Path) -> list[str]:
    """Without the last one if a run was killed while writing it."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def repeat(
    rows: Sequence[Row], seeds: range, known: Results, *, jobs: int, seconds: float, evaluations: int
) -> Iterator[str]:
    """Add to `known` what it lacks, and give each as a line; those that the time was too short for are left out."""
    until = time.time() + seconds
    cells = [Cell(row, seed, until, evaluations) for seed in seeds for row in rows if seed not in known[row]]
    for cell, result in run(measure, cells, jobs=jobs):
        if result is not None:
            known[cell.row][cell.seed] = result
            yield line(cell.row, cell.seed, result)


def at_most(k: int, n: int, p: float) -> float:
    """P(X <= k) of a binomial X."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def coverage_fails(trusted: Sequence[Repetition]) -> bool:
    covered = sum(result.covered for result in trusted)
    drawn = [result for result in trusted if result.rung != "grid"]
    missed = sum(not result.covered for result in drawn)
    return at_most(covered, len(trusted), LOW) < LEVEL or at_most(missed, len(drawn), 1 - HIGH) < LEVEL


def faults(results: Sequence[Repetition | str]) -> list[str]:
    """What is wrong with a row."""
    good = [result for result in results if isinstance(result, Repetition)]
    counts = {"refused": len(results) - len(good), "confidently wrong": sum(result.wrong for result in good)}
    found = [f"{count} {what}" for what, count in counts.items() if count]
    return [*found, "coverage"] if coverage_fails([result for result in good if result.trusted]) else found


def shown(row: Row, results: Sequence[Repetition | str]) -> str:
    """A row of the table."""
    good = [result for result in results if isinstance(result, Repetition)]
    trusted = [result for result in good if result.trusted]
    rungs = ", ".join(f"{name} {count}" for name, count in Counter(result.rung for result in good).most_common())
    errors = [result.error for result in good if math.isfinite(result.error)] or [math.nan]
    stated = [result.stderr for result in good if math.isfinite(result.stderr)] or [math.nan]
    covered = f"{statistics.fmean(r.covered for r in trusted):.2f} of {len(trusted)}" if trusted else "none trusted"
    columns = (
        row.target,
        row.noise,
        "yes" if row.data else "no",
        f"{target(row.target).log_z:.4f}",
        rungs,
        f"{statistics.fmean(errors):+.4f}",
        f"{math.sqrt(statistics.fmean(error**2 for error in errors)):.4f}",
        f"{statistics.fmean(stated):.4f}",
        covered,
        f"{len(good) - len(trusted)} of {len(good)}",
        f"{max((result.off for result in trusted), default=math.nan):.1f}",
        f"{statistics.fmean(result.seconds for result in good) if good else math.nan:.2f}",
        ", ".join(faults(results)) or "none",
    )
    return f"| {' | '.join(columns)} |"


def table(results: Mapping[Row, Mapping[int, Repetition | str]]) -> None:
    heads = ["target", "noise", "data", "log Z", "rungs", "bias", "rmse", "stderr", "covered", "flagged"]
    heads += ["most errors off", "s", "faults"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for row, found in results.items():
        if found:
            print(shown(row, list(found.values())))


def chosen(names: str | None, quick: bool) -> list[str]:
    targets = [name for name in TARGETS if not (quick and name in SLOW)] if names is None else names.split(",")
    if unknown := set(targets) - set(TARGETS):
        sys.exit(f"Unknown targets: {', '.join(sorted(unknown))}. Known: {', '.join(TARGETS)}.")
    return targets


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the fast targets, 20 repetitions, 45 seconds at most")
    parser.add_argument("--repetitions", type=int, help="of each target, with data and without; 100 when left out")
    parser.add_argument("--first-seed", type=int, default=0, help="the repetitions have seeds from this one on")
    parser.add_argument("--noises", default="fitted", help="fitted, standard, or both, separated by a comma")
    parser.add_argument("--targets", help="names separated by commas; all when left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS, help="by annealed chains, at most")
    parser.add_argument("--seconds", type=float, help="after these nothing new is begun")
    parser.add_argument("--out", type=Path, help="a file for one JSON line per repetition; what it has is not repeated")
    parser.add_argument("--from", dest="given", type=Path, help="such a file, to print its table and run nothing")
    options = parser.parse_args()
    noises = options.noises.split(",")
    if set(noises) - {"fitted", "standard"}:
        sys.exit(f"The noises are fitted and standard. Got {options.noises}.")
    targets = chosen(options.targets, options.quick)
    rows = [Row(name, data, noise) for noise in noises for name in targets for data in (True, False)]
    repetitions = options.repetitions or (20 if options.quick else 100)
    seeds = range(options.first_seed, options.first_seed + repetitions)
    results: Results = {row: {} for row in rows}
    before = options.given or options.out
    lines = complete_lines(before) if before and (options.given or before.exists()) else []
    for row, seed, result in map(parsed, lines):
        if row in results and (options.given or seed in seeds):
            results[row][seed] = result
    if not options.given:
        if options.out:
            options.out.write_text("".join(f"{text}\n" for text in lines))
        seconds = options.seconds or (45.0 if options.quick else math.inf)
        limits = {"jobs": options.jobs, "seconds": seconds, "evaluations": options.evaluations}
        for text in repeat(rows, seeds, results, **limits):
            if options.out:
                with options.out.open("a") as file:
                    file.write(text + "\n")
    done = [list(found.values()) for found in results.values()]
    expected = f" of {len(rows) * repetitions}" if not options.given else ""
    print(f"{sum(map(len, done))}{expected} repetitions, stderr {WANTED} wanted, {HELD_OUT} held-out rows if any")
    table(results)
    wrong = sum(isinstance(result, Repetition) and result.wrong for found in done for result in found)
    found = [
        figure("log z rows at fault", sum(bool(faults(found)) for found in done), 0),
        figure("log z confidently wrong", wrong, 0),
    ]
    return all(found)


if __name__ == "__main__":
    sys.exit(not main())
