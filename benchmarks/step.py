"""One MECO step against the floor, and one step of every other method against MECO's.

    python benchmarks/step.py [--quick]

The MECO step is what `unnorm.train` repeats: draw a batch and noise, one forward over both, the tracked objective, the
finiteness check, backward and optimizer through the library. The floor is the same forward and backward over the
same 1,000 points, ready-made, with a plain mean as its loss. All run in one process, interleaved, medians; the floor
against itself shows the noise. The methods have the defaults of the command line (mcmc: 20 Langevin steps). The
paper's ratios are from its Table 1. A bridged step with 8 and with 24 bridges has as its floor the same forward and
backward over the same (K + 1) x batch points.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from cells import METHODS
from figures import figure
from timing import medians

from unnorm import MLP, Bridged, Gaussian, Telescope, step
from unnorm.data import toy
from unnorm.device import fabric_for
from unnorm.optim import adam
from unnorm.settings import Job

BATCH = 500
TABLE_1 = {"meco": 1.0, "nce": 1.05, "ence": 1.01, "mcmc": 10.5}


def method_step(name: str, generator: torch.Generator) -> Callable[[], None]:
    x = toy("8gaussians").sample(50_000, generator=generator)
    model, estimator = MLP(2, generator=generator), Job("8gaussians", estimator=name).build_estimator(Gaussian.fit(x))
    fabric = fabric_for("cpu")
    parameters = [*model.parameters(), *estimator.parameters()]
    wrapped, optimizer = fabric.setup(model, adam(parameters, lr=1e-3))

    def once() -> None:
        index = torch.randint(len(x), (BATCH,), generator=generator)
        step(wrapped, estimator, optimizer, x[index], generator=generator, backward=fabric.backward)

    return once


def floor_step(
    generator: torch.Generator, points_seen: int = 2 * BATCH, outputs: int | None = None
) -> Callable[[], None]:
    points = torch.randn(points_seen, 2, generator=generator)
    model = MLP(2, outputs=outputs, generator=generator)
    optimizer = adam(model.parameters(), lr=1e-3)

    def once() -> None:
        optimizer.zero_grad()
        model(points).mean().backward()
        optimizer.step()

    return once


def against_floor(rounds: int, generator: torch.Generator) -> float:
    steps = {"meco": method_step("meco", generator)}
    steps |= {name: floor_step(generator) for name in ("floor", "floor again")}
    found = medians(steps, rounds)
    print(f"3x300 MLP, batch {BATCH} + {BATCH} noise, {torch.get_num_threads()} threads, {rounds} rounds interleaved")
    for name, milliseconds in found.items():
        print(f"  {name:12s} {milliseconds:8.3f} ms")
    print(f"  floor against itself: {found['floor again'] / found['floor']:.3f}")
    return found["meco"] / found["floor"]


def bridged_step(bridges: int, batch: int, generator: torch.Generator) -> Callable[[], None]:
    x = toy("8gaussians").sample(50_000, generator=generator)
    q = Gaussian.fit(x)
    model, estimator = Bridged(q, MLP(2, outputs=bridges, generator=generator)), Telescope(q, bridges)
    fabric = fabric_for("cpu")
    wrapped, optimizer = fabric.setup(model, adam(model.parameters(), lr=1e-3))

    def once() -> None:
        index = torch.randint(len(x), (batch,), generator=generator)
        step(wrapped, estimator, optimizer, x[index], generator=generator, backward=fabric.backward)

    return once


def bare_step(generator: torch.Generator, points_seen: int, outputs: int) -> Callable[[], None]:
    """Forward and backward, and nothing else."""
    points, model = torch.randn(points_seen, 2, generator=generator), MLP(2, outputs=outputs, generator=generator)

    def once() -> None:
        model.zero_grad()
        model(points).mean().backward()

    return once


def bridged_against_floor(bridges: int, batch: int, rounds: int, generator: torch.Generator) -> float:
    steps = {
        "bridged": bridged_step(bridges, batch, generator),
        "floor": bare_step(generator, (bridges + 1) * batch, bridges),
    }
    found = medians(steps, rounds, warmup=5)
    print(f"{bridges} bridges, batch {batch}: {found['bridged']:.2f} ms, its floor {found['floor']:.2f} ms")
    return found["bridged"] / found["floor"]


def against_meco(rounds: int, generator: torch.Generator) -> dict[str, float]:
    found = medians({name: method_step(name, generator) for name in METHODS}, rounds, warmup=5)
    ratios = {name: milliseconds / found["meco"] for name, milliseconds in found.items()}
    print(f"every method, {rounds} rounds interleaved")
    print("  method        ms   / meco   paper")
    for name, ratio in ratios.items():
        print(f"  {name:8s} {found[name]:7.2f}  {ratio:7.2f}  {TABLE_1.get(name, ''):>6}")
    return ratios


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    quick = parser.parse_args().quick
    generator = torch.Generator().manual_seed(0)
    floor_ratio = against_floor(300 if quick else 1500, generator)
    ratios = against_meco(25 if quick else 200, generator)
    rounds = 20 if quick else 100
    bridged = {
        (k, batch): bridged_against_floor(k, batch, rounds, generator)
        for k, batch in ((8, 250), (24, 100), (8, 50), (24, 20))
    }
    ok = figure("meco step / floor, cpu", floor_ratio, 1.10)
    for (k, batch), ratio in bridged.items():  # of a few hundred points the optimizer's share is no longer small
        goal = 1.15 if batch >= 100 else None
        ok &= figure(f"bridged step with {k} bridges, batch {batch} / forward and backward, cpu", ratio, goal)
    for name, ratio in ratios.items():
        if name != "meco":
            figure(f"{name} step / meco, cpu", ratio)
    return ok


if __name__ == "__main__":
    sys.exit(not main())
