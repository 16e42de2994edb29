"""Peak memory of `unnorm fit` on 1,000,000 x 10 float32 rows from a memory-mapped .npy file.

    python benchmarks/memory.py [--quick]

A fresh process imports everything, notes its resident memory, fits, and reports its peak above that, as a multiple of
the file's size (40 MB). Resident memory counts the pages of the mapped file too. --quick trains fewer steps; the data
are the same. Linux only: it reads /proc.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from figures import figure

ROWS, COLUMNS = 1_000_000, 10


def resident(which: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def child(path: str, steps: int) -> None:
    """Fit in this process and print the megabytes above what imports alone had taken."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import sklearn.utils.extmath  # noqa: F401

    from unnorm.jobs import Job, run
    from unnorm.training import Training

    baseline = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    run(Job(path, training=Training(steps=steps)), Path(path).parent / "run")
    print(resident("VmHWM") - baseline)


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
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]))
        return True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        write_rows(path)
        size = path.stat().st_size / 2**20
        command = [sys.executable, __file__, "--child", str(path), "50" if options.quick else "1000"]
        above = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"file {size:.1f} MiB, peak {above:.1f} MiB above the import baseline")
    return figure("fit peak memory / file size", above / size, 3.0)


if __name__ == "__main__":
    sys.exit(not main())
