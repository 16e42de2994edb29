"""One MECO step against the floor: the same forward and backward over the same points, and the same optimizer.

    python benchmarks/step.py [--quick]

The MECO step is what `unnorm.fit` repeats: draw a batch and noise, one forward over both, the tracked objective, the
finiteness check, backward and optimizer through Lightning Fabric. The floor takes the 1,000 points ready-made and a
plain mean as its loss. All run in one process, interleaved, medians; the floor against itself shows the noise.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from figures import figure
from lightning_fabric import Fabric

from unnorm import MECO, MLP, Gaussian, step
from unnorm.data import toy
from unnorm.optim import adam

BATCH = 500


def meco_step(generator: torch.Generator) -> Callable[[], None]:
    x = toy("8gaussians").sample(50_000, generator=generator)
    model, estimator = MLP(2, generator=generator), MECO(Gaussian.fit(x))
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, adam(model.parameters(), lr=1e-3))

    def once() -> None:
        index = torch.randint(len(x), (BATCH,), generator=generator)
        step(wrapped, estimator, optimizer, x[index], generator=generator, backward=fabric.backward)

    return once


def floor_step(generator: torch.Generator) -> Callable[[], None]:
    points = torch.randn(2 * BATCH, 2, generator=generator)
    model = MLP(2, generator=generator)
    optimizer = adam(model.parameters(), lr=1e-3)

    def once() -> None:
        optimizer.zero_grad()
        model(points).mean().backward()
        optimizer.step()

    return once


def medians(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, one call of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 20):
        for name, once in steps.items():
            began = time.perf_counter()
            once()
            if turn >= 20:
                times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    rounds = 300 if parser.parse_args().quick else 1500
    generator = torch.Generator().manual_seed(0)
    steps = {"meco": meco_step(generator), "floor": floor_step(generator), "floor again": floor_step(generator)}
    found = medians(steps, rounds)
    print(f"3x300 MLP, batch {BATCH} + {BATCH} noise, {torch.get_num_threads()} threads, {rounds} rounds interleaved")
    for name, milliseconds in found.items():
        print(f"  {name:12s} {milliseconds:8.3f} ms")
    print(f"  floor against itself: {found['floor again'] / found['floor']:.3f}")
    return figure("meco step / floor, cpu", found["meco"] / found["floor"], 1.10)


if __name__ == "__main__":
    sys.exit(not main())
