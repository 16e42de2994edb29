"""The ladder against annealed importance sampling, 300 temperatures and 128 chains, on a 3x300 network in the plane.

    python benchmarks/ladder.py [--quick]

A 3x300 network that tilts the data's Gaussian is trained on 8gaussians; its log Z is known from a grid of 512 x 512.
`ladder` with its defaults and `ais` are called in turn, medians count, and both are held to that grid. AIS is timed on
a schedule that is ready (the transitions are tuned, the temperatures placed) and with the pilot that finds it; MALA
takes one evaluation of network and score at each temperature, and is the cheapest AIS there is.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from figures import figure
from timing import Once, medians

from unnorm import MECO, MLP, Gaussian, LogZ, Tilted, Training, train
from unnorm.data import toy
from unnorm.partition import ais, fitting_box, grid, ladder, plan
from unnorm.samplers.base import frozen

TEMPERATURES, CHAINS = 300, 128
GOAL = 10.0


class Fitted(NamedTuple):
    model: Tilted
    noise: Gaussian
    truth: LogZ


def fitted(steps: int, generator: torch.Generator) -> Fitted:
    x = toy("8gaussians").sample(20_000, generator=generator)
    noise = Gaussian.fit(x)
    model = Tilted(noise, MLP(2, generator=generator))
    train(model, MECO(noise), x, Training(steps=steps, schedule="cosine"), progress=False)
    return Fitted(model, noise, grid(model, fitting_box(model, x, like=x), like=x))


def kept(estimate: Callable[[], LogZ], found: list[LogZ]) -> Once:
    return lambda: found.append(estimate())


def compare(given: Fitted, transition: str, rounds: int, generator: torch.Generator) -> dict[str, tuple[float, float]]:
    """Milliseconds and root mean square error of the ladder, of AIS, and of AIS with its pilot."""
    model, noise, truth = given
    with frozen(model) as target:
        schedule = plan(target, noise, n_betas=TEMPERATURES, transition=transition, generator=generator)

    def by_ladder() -> LogZ:
        return ladder(model, noise, generator=generator).log_z

    def by_ais() -> LogZ:
        return ais(model, noise, n_chains=CHAINS, schedule=schedule, generator=generator).log_z

    def with_pilot() -> LogZ:
        run = ais(model, noise, n_chains=CHAINS, n_betas=TEMPERATURES, transition=transition, generator=generator)
        return run.log_z

    estimates = {"ladder": by_ladder, f"ais {transition}": by_ais, f"pilot + ais {transition}": with_pilot}
    found: dict[str, list[LogZ]] = {name: [] for name in estimates}
    times = medians(
        {name: kept(estimate, found[name]) for name, estimate in estimates.items()}, rounds, warmup=min(1, rounds // 4)
    )
    print(f"{transition}: {schedule.evaluations} evaluations by each chain; {rounds} rounds interleaved")
    print("                        ms      rmse   stderr        n")
    results = {}
    for name, milliseconds in times.items():
        rmse = math.sqrt(statistics.fmean((each.value - truth.value) ** 2 for each in found[name]))
        last = found[name][-1]
        print(f"  {name:15s} {milliseconds:8.1f}  {rmse:8.5f}  {last.stderr:7.5f}  {last.n:7d} ({last.method})")
        results[name] = milliseconds, rmse
    return results


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less training, fewer rounds, MALA alone; under a minute")
    quick = parser.parse_args().quick
    generator = torch.Generator().manual_seed(0)
    given = fitted(400 if quick else 2500, generator)
    print(f"3x300 MLP on 8gaussians, {torch.get_num_threads()} threads; log Z {given.truth.value:.5f} by the grid")
    rounds_of = {"mala": 3} if quick else {"mala": 50, "hmc": 12}
    results = {transition: compare(given, transition, rounds, generator) for transition, rounds in rounds_of.items()}
    ok = True
    for found in results.values():
        time, error = found.pop("ladder")
        for name, (theirs, rmse) in found.items():
            ok &= figure(f"{name} time / ladder", theirs / time, GOAL, at_least=True)
            ok &= figure(f"ladder rmse / {name}", error / rmse, 1.0)
    return ok


if __name__ == "__main__":
    sys.exit(not main())
