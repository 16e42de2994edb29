"""Memory and time of the exact MMD over 10,000 x 10,000 points in 50 dimensions.

    python benchmarks/metrics.py [--quick]

A fresh process notes its resident memory, computes, and reports its peak above that (Linux only: it reads /proc). The
time is against the obvious implementation, which holds all distances of a pair of sets at once, in one process,
interleaved; both in float64, with the same bandwidth, and their values must agree. --quick times 4,000 points.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from figures import figure
from memory import resident
from timing import medians
from torch import Tensor

from unnorm.metrics import mmd

POINTS, SIZE = 10_000, 50
BANDWIDTH = 10.0


def points(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y + 0.1


def dense(x: Tensor, y: Tensor) -> float:
    """The definition, a whole matrix at a time."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * BANDWIDTH**2))

    n, m = len(x), len(y)
    within = (kernel(x, x).sum() - n) / (n * (n - 1)) + (kernel(y, y).sum() - m) / (m * (m - 1))
    return float(within - 2 * kernel(x, y).mean())


def child() -> None:
    """Compute in this process and print the megabytes above what was there before."""
    x, y = points(POINTS)
    mmd(x[:10], y[:10])  # the first call loads libraries
    baseline = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    mmd(x, y)
    print(resident("VmHWM") - baseline)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points to time, under a minute")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return True
    done = subprocess.run([sys.executable, __file__, "--child"], capture_output=True, text=True, check=True)
    above = float(done.stdout)
    n, rounds = (4000, 3) if options.quick else (POINTS, 2)
    x, y = points(n)
    found = medians({"mmd": lambda: mmd(x, y, bandwidths=BANDWIDTH), "dense": lambda: dense(x, y)}, rounds, warmup=1)
    apart = abs(mmd(x, y, bandwidths=BANDWIDTH) - dense(x, y))
    print(f"{n} x {n} points in {SIZE} dimensions, {torch.get_num_threads()} threads")
    for name, milliseconds in found.items():
        print(f"  {name:6s} {milliseconds:9.1f} ms")
    ok = figure("mmd peak memory at 10,000 x 10,000 points, MiB", above, 1000.0)
    ok &= figure("mmd time / dense", found["mmd"] / found["dense"], 1.0)
    return figure("mmd minus dense", apart, 1e-9) and ok


if __name__ == "__main__":
    sys.exit(not main())
