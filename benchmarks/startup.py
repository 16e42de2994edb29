"""Time until a new process has done its first work: the command, `import unnorm`, and the first score of a saved model.

    python benchmarks/startup.py [--quick]

Each case runs in fresh processes, all cases in turn, round after round, so that a busy machine slows all of them alike.
A figure is the median over the rounds of a case's seconds, or of its seconds less those of another case in the same
round: what `import unnorm` adds to Python, and what the rest adds to `import torch, sklearn`. Seconds are of processor
time, user and system, on one thread: on a quiet machine they agree with the clock, which the table shows beside them.
A first round, which warms the disk's cache, does not count. --quick runs fewer rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from figures import figure

ROUNDS, QUICK_ROUNDS = 11, 3
ROWS = 20  # of wine, which are scored
PYTHON, BASE = "python", "import torch, sklearn"
# Each case, what it is compared with, and the goal in seconds.
GOALS: dict[str, tuple[str | None, float]] = {
    "unnorm fit nosuch.csv": (None, 1.0),
    "unnorm --help": (None, 0.5),
    "import unnorm": (PYTHON, 0.1),
    "import unnorm.sklearn": (BASE, 0.5),
    "first score, joblib": (BASE, 0.5),
    "first score, TableDensity.load": (BASE, 0.5),
    "first score, unnorm score": (BASE, 0.5),
}


class Spent(NamedTuple):
    """What a process took: seconds of the processor, seconds by the clock, and its peak of memory in MiB."""

    processor: float
    clock: float
    peak: float


def prepare(folder: Path) -> None:
    """Fit wine with its classes, and save it in both ways; the rows to score stand beside."""
    import joblib
    import numpy as np
    from sklearn.datasets import load_wine

    import unnorm
    from unnorm.sklearn import EnergyDensity

    x, y = load_wine(return_X_y=True)
    rows = np.column_stack([x, y])
    unnorm.fit(rows, steps=25).save(folder / "table")
    joblib.dump(EnergyDensity(random_state=0, steps=25).fit(rows), folder / "density.joblib")
    np.save(folder / "rows.npy", rows[:ROWS])


def cases(folder: Path) -> dict[str, list[str]]:
    """The arguments to Python of each case."""
    rows = f"np.load({str(folder / 'rows.npy')!r})"
    scored = (
        f"import joblib, numpy as np; joblib.load({str(folder / 'density.joblib')!r}).score_samples({rows})",
        "import numpy as np; from unnorm.tables.density import TableDensity; "
        f"TableDensity.load({str(folder / 'table')!r}).score_samples({rows})",
    )
    return {
        PYTHON: ["-c", "pass"],
        BASE: ["-c", BASE],
        "unnorm fit nosuch.csv": ["-m", "unnorm", "fit", "nosuch.csv"],
        "unnorm --help": ["-m", "unnorm", "--help"],
        "import unnorm": ["-c", "import unnorm"],
        "import unnorm.sklearn": ["-c", "import unnorm.sklearn"],
        "first score, joblib": ["-c", scored[0]],
        "first score, TableDensity.load": ["-c", scored[1]],
        "first score, unnorm score": ["-m", "unnorm", "score", str(folder / "table"), str(folder / "rows.npy")],
    }


def spent(arguments: list[str]) -> Spent:
    """Run Python on one thread, and see what it took."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    expected = 2 if "nosuch.csv" in arguments else 0
    if process.returncode != expected:
        raise RuntimeError(f"{arguments} ended with {process.returncode}, not {expected}.")
    return Spent(usage.ru_utime + usage.ru_stime, time.perf_counter() - began, usage.ru_maxrss / 1024)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds, under two minutes")
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        prepare(Path(options.child))
        return True
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, __file__, "--child", name], check=True)
        work = cases(Path(name))
        rounds = [
            {case: spent(arguments) for case, arguments in work.items()}
            for _ in range(1 + (QUICK_ROUNDS if options.quick else ROUNDS))
        ][1:]
    print(f"{'':32}{'processor, s':>14}{'clock, s':>10}{'peak, MiB':>11}")
    for case in work:
        own = Spent(*map(statistics.median, zip(*(found[case] for found in rounds), strict=True)))
        print(f"{case:32}{own.processor:14.2f}{own.clock:10.2f}{own.peak:11.0f}")
    found = []
    for case, (other, goal) in GOALS.items():
        seconds = [r[case].processor - (r[other].processor if other else 0.0) for r in rounds]
        less = f" less {other}" if other else ""
        found.append(figure(f"{case}, seconds{less}", statistics.median(seconds), goal))
    return all(found)


if __name__ == "__main__":
    sys.exit(not main())
