"""Is log Z with its error right? The ladder on every target whose log Z is known, many times over.

    python benchmarks/logz.py [--quick] [--repetitions 100] [--rows 0,100] [--jobs 2] [--out z.jsonl] [--seconds 3000]

Each repetition draws 2,000 samples of the target, fits a Gaussian to them as the noise (diagonal for the Gaussian
targets, so that it is bad on purpose), and asks for a standard error of 0.02, with held-out samples and without;
float64, one thread; a million evaluations by annealed chains, as `Density` allows. There are 4,000 held-out rows, or
none. The two targets that were made to be missed, `rare-modes-30` (a mode has 2% of the mass, another one 5%) and
`heavy-oblique-10` (a heavy tail that no coordinate and no random ray shows), are tried with 0, 50, 100 and 1,000 rows.
--rows has other numbers, for all targets. With --noises standard the noise is N(0, 1) and knows nothing of the target.
--out is written as they come and read first: a second call does what is missing; --from prints the table of such a
file. The repetitions go round the targets, so that a run stopped by --seconds, after what it has begun, has about as
many of each.

A repetition is confidently wrong if it is trusted, off by more than 0.01, and log Z lies outside the stated 95%
interval by more than 2.04 standard errors. Where the interval has nothing but 1.96 standard errors on each side, that
is more than 4 errors from the estimate. Where it includes the mass that the rows cannot rule out, so much more is
allowed above the estimate, and nothing more below. Without rows an answer is trusted only if a grid gives it.

A row of the table is right if no repetition is confidently wrong, the ladder refused none, and the stated interval
covers the truth in 90% of the trusted repetitions or more: an exact binomial test must reject that at 1% before a row
fails (of a hundred, 82 are let pass). It fails too where 1.96 standard errors alone cover more than 99%, but not before
some 460 repetitions without a miss: with a hundred nothing can be said against covering always. Where the error is too
large the columns rmse and stderr show it. The error of a grid is a bound, and may cover always.
A row all of whose repetitions are doubted or unchecked is right too. Bias and root mean square error are over all
repetitions; `above` is how far the upper end of the interval is from the estimate, on average where it is trusted, and
`most outside` how far log Z is outside the interval at worst, in standard errors.
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
MADE_TO_BE_MISSED = ("rare-modes-30", "heavy-oblique-10")
FITTED, HELD_OUT, WANTED, EVALUATIONS = 2000, 4000, 0.02, 1_000_000
USUAL_ROWS, FEW_ROWS, QUICK_ROWS = (HELD_OUT, 0), (0, 50, 100, 1000), (0, 100)
LOW, HIGH, LEVEL = 0.90, 0.99, 0.01  # coverage, and the test of it
WRONG_ERRORS, WRONG_NATS = 4.0 - 1.96, 0.01  # outside the interval, and off
ROUNDING = 1e-9  # a smaller error than this nobody can be held to


class Row(NamedTuple):
    target: str
    rows: int  # that are held out
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
    low: float
    high: float
    unchecked: str = ""

    @property
    def outside(self) -> float:
        """How far log Z is outside the stated interval."""
        truth = self.value - self.error
        return max(self.low - truth, truth - self.high, 0.0)

    @property
    def off(self) -> float:
        """The error in stated errors."""
        return abs(self.error) / max(self.stderr, ROUNDING)

    @property
    def covered(self) -> bool:
        return self.outside <= 1.96 * ROUNDING

    @property
    def wrong(self) -> bool:
        near = self.outside <= WRONG_ERRORS * max(self.stderr, ROUNDING)
        return self.trusted and not (near or abs(self.error) <= WRONG_NATS)


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
    data = problem.sample(cell.row.rows, generator=generator) if cell.row.rows else None
    began = time.perf_counter()
    climb = ladder(
        problem.log_density, noise, data=data, stderr=WANTED, evaluations=cell.evaluations, generator=generator
    )
    seconds, found = time.perf_counter() - began, climb.log_z
    error = found.value - problem.log_z
    return Repetition(
        found.method,
        found.value,
        error,
        found.stderr,
        found.ess,
        found.khat,
        climb.trusted,
        climb.doubts,
        seconds,
        *climb.interval,
        climb.unchecked,
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
    held_out = HELD_OUT * fields.pop("data") if "data" in fields else fields.pop("rows")  # older files say "data"
    row = Row(fields.pop("target"), held_out, fields.pop("noise", "fitted"))
    seed = fields.pop("seed")
    if "failure" in fields:
        return row, seed, fields["failure"]
    unknown = {"stderr": math.inf, "low": -math.inf, "high": math.inf}
    unknown |= dict.fromkeys(("value", "error", "ess", "khat"), math.nan)
    known = {key: unknown[key] if value is None else value for key, value in fields.items()}
    plain = {"low": known["value"] - 1.96 * known["stderr"], "high": known["value"] + 1.96 * known["stderr"]}
    return row, seed, Repetition(**plain | known | {"doubts": tuple(fields["doubts"])})


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
    missed = sum(result.off > 1.96 for result in drawn)
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
        f"{row.rows:,}",
        f"{target(row.target).log_z:.4f}",
        rungs,
        f"{statistics.fmean(errors):+.4f}",
        f"{math.sqrt(statistics.fmean(error**2 for error in errors)):.4f}",
        f"{statistics.fmean(stated):.4f}",
        f"{statistics.fmean(r.high - r.value for r in trusted):.4f}" if trusted else "",
        covered,
        f"{sum(bool(result.doubts) for result in good)} of {len(good)}",
        f"{sum(bool(result.unchecked) for result in good)} of {len(good)}",
        f"{max((result.off for result in trusted), default=math.nan):.1f}",
        f"{max((result.outside / max(result.stderr, ROUNDING) for result in trusted), default=math.nan):.1f}",
        f"{statistics.fmean(result.seconds for result in good) if good else math.nan:.2f}",
        ", ".join(faults(results)) or "none",
    )
    return f"| {' | '.join(columns)} |"


def table(results: Mapping[Row, Mapping[int, Repetition | str]]) -> None:
    heads = ["target", "noise", "rows", "log Z", "rungs", "bias", "rmse", "stderr", "above", "covered", "doubted"]
    heads += ["unchecked", "most errors off", "most outside", "s", "faults"]
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


def numbers(given: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in given.split(",")):
        sys.exit(f"The --rows are whole numbers separated by commas. Got {given}.")
    return tuple(int(part) for part in given.split(","))


def rows_of(name: str, given: str | None, quick: bool) -> tuple[int, ...]:
    """How many rows are held out for a target, in turn."""
    if given is not None:
        return numbers(given)
    few = QUICK_ROWS if quick else FEW_ROWS
    return few if name in MADE_TO_BE_MISSED else USUAL_ROWS


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the fast targets, 20 repetitions, 45 seconds at most")
    parser.add_argument("--repetitions", type=int, help="of each target, noise and number of rows; 100 when left out")
    parser.add_argument("--first-seed", type=int, default=0, help="the repetitions have seeds from this one on")
    parser.add_argument("--noises", default="fitted", help="fitted, standard, or both, separated by a comma")
    parser.add_argument("--targets", help="names separated by commas; all when left out")
    parser.add_argument("--rows", help="held-out rows, numbers separated by commas; when left out as said above")
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
    rows = [
        Row(name, count, noise)
        for noise in noises
        for name in targets
        for count in rows_of(name, options.rows, options.quick)
    ]
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
    print(f"{sum(map(len, done))}{expected} repetitions, stderr {WANTED} wanted")
    table(results)
    wrong = sum(isinstance(result, Repetition) and result.wrong for found in done for result in found)
    found = [
        figure("log z rows at fault", sum(bool(faults(found)) for found in done), 0),
        figure("log z confidently wrong", wrong, 0),
    ]
    return all(found)


if __name__ == "__main__":
    sys.exit(not main())
