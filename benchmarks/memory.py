"""Peak memory of `unnorm fit` on 1,000,000 x 10 float32 rows from a memory-mapped .npy file, and of many draws.

    python benchmarks/memory.py [--quick]

A fresh process imports everything, notes its resident memory, fits, and reports its peak above that, as a multiple of
the file's size (40 MB). Resident memory counts the pages of the mapped file too. --quick trains fewer steps; the data
are the same. log Z from 10^7 draws (10^6 with --quick) may take 50 MB more than from 10^5, each in its own process.
Linux only: it reads /proc.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from figures import figure

ROWS, COLUMNS = 1_000_000, 10
FEW_DRAWS, MANY_DRAWS, QUICK_DRAWS = 100_000, 10_000_000, 1_000_000


def resident(which: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def forget_peak() -> float:
    """Start to watch the peak anew, and say what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def fit_child(path: str, steps: int) -> None:
    """Fit in this process and print the megabytes above what imports alone had taken."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import sklearn.utils.extmath  # noqa: F401

    from unnorm.jobs import Job, run
    from unnorm.training import Training

    baseline = forget_peak()
    run(Job(path, training=Training(steps=steps)), Path(path).parent / "run")
    print(resident("VmHWM") - baseline)


def importance_child(n: int) -> None:
    """The same for log Z of a cheap model from `n` draws."""
    import arviz_stats  # noqa: F401
    import torch

    from unnorm import Gaussian, Quadratic
    from unnorm.partition import importance

    baseline = forget_peak()
    model = Quadratic(COLUMNS)
    model.log_diagonal.data.fill_(0.2)
    importance(model, Gaussian(COLUMNS), n, generator=torch.Generator().manual_seed(0))
    print(resident("VmHWM") - baseline)


def in_child(*arguments: object) -> float:
    """The megabytes that a fresh process reports."""
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write_rows(path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(ROWS, COLUMNS))
    mix = rng.normal(size=(COLUMNS, COLUMNS))
    for start in range(0, ROWS, 50_000):
        rows[start : start + 50_000] = rng.normal(size=(50_000, COLUMNS)) @ mix
    rows.flush()


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, under a minute")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, *rest = options.child
        fit_child(rest[0], int(rest[1])) if what == "fit" else importance_child(int(rest[0]))
        return True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        write_rows(path)
        size = path.stat().st_size / 2**20
        above = in_child("fit", path, 50 if options.quick else 1000)
    many = QUICK_DRAWS if options.quick else MANY_DRAWS
    draws = {n: in_child("importance", n) for n in (FEW_DRAWS, many)}
    print(f"file {size:.1f} MiB, peak {above:.1f} MiB above the import baseline")
    for n, megabytes in draws.items():
        print(f"importance sampling, {n:,} draws: peak {megabytes:.1f} MiB above the import baseline")
    found = [
        figure("fit peak memory / file size", above / size, 3.0),
        figure(f"importance peak MiB, {many:,} draws less {FEW_DRAWS:,}", draws[many] - draws[FEW_DRAWS], 50.0),
    ]
    return all(found)


if __name__ == "__main__":
    sys.exit(not main())
