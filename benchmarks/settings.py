"""Settings of the study's rows that go pixel by pixel, by *validation* images: no test image is looked at.

    python benchmarks/settings.py [--size desktop] [--seconds 30] [--rates 3e-3,6e-3] [--draws 2,4] [--out FILE]
    python benchmarks/settings.py --quick

The settings of `unnorm reproduce mnist` first, then every learning rate with every number of draws of the noise for
each pixel. Each trains for the same seconds, as the study does, with as many steps as a short trial says; the first
validation images choose among its iterates, and its bits per dimension are those of the last 500 validation images,
which chose nothing (a flow's own training may have looked at some). The figures are, for each noise, how much the best
is ahead of the study's: what a change could gain.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from figures import figure

from unnorm.device import fabric_for
from unnorm.metrics import bits_per_dim
from unnorm.models import Stepwise
from unnorm.paper.mnist.problem import Problem
from unnorm.paper.mnist.runs import learnt, step_seconds
from unnorm.paper.mnist.spec import SIZES, Row, Size

ALPHAS = (0.0, 1.0)
JUDGES = 500  # validation images, the last ones
NEGLIGIBLE = 0.01  # bits per dimension


def candidates(size: Size, noise: str, rates: list[float], draws: list[int]) -> Iterator[Size]:
    """The study's own settings, and every rate with every number of draws."""
    yield size
    for rate, each in product(rates, draws):
        if (rate, each) != (size.pixel_lr[noise], size.draws):
            yield replace(size, pixel_lr={noise: rate}, draws=each)


def tried(problem: Problem, noise: str) -> dict[str, Any]:
    row, size = Row("pixels-meco", noise), problem.size
    seconds = step_seconds(problem, row, ALPHAS)
    model, history = learnt(problem, row, 0, max(2, int(size.seconds / seconds)), ALPHAS)
    images = problem.data.validation.images[size.judged :][-JUDGES:].to(problem.fabric.device)
    assert isinstance(model, Stepwise)
    model.nodes = size.nodes[-1]
    generator = torch.Generator(problem.fabric.device).manual_seed(5)
    found = bits_per_dim(model, images, problem.where_of(row).transform, log_z=None, generator=generator)
    facts = {"noise": noise, "lr": size.pixel_lr[noise], "draws": size.draws, **size.lookback}
    facts |= {"steps": int(history["step"][-1]), "seconds": round(float(history["seconds"][-1]), 1)}
    return facts | {"bits": round(found.value, 5), "se": round(found.stderr, 5)}


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--size", choices=("smoke", "desktop", "full"), default="desktop", help="of the study")
    parser.add_argument("--seconds", type=float, help="of training, the study's unless given")
    parser.add_argument("--noises", default="copula,gaussian")
    parser.add_argument("--rates", default="1e-3,3e-3,6e-3", help="learning rates")
    parser.add_argument("--draws", default="2,4,8", help="of the noise for each image and pixel")
    parser.add_argument("--root", type=Path, help="the folder of the data sets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a file to which lines are added")
    options = parser.parse_args()
    size = SIZES["smoke" if options.quick else options.size]
    size = replace(size, seconds=options.seconds or size.seconds)
    fabric = fabric_for(options.device, "bf16" if options.device == "cuda" else size.precision)
    rates, draws = [float(one) for one in options.rates.split(",")], [int(one) for one in options.draws.split(",")]
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for noise in options.noises.split(","):
            found = list[dict[str, Any]]()
            for changed in islice(candidates(size, noise, rates, draws), 2 if options.quick else None):
                found.append(tried(Problem(changed, Path(folder), fabric, options.root), noise))
                print(json.dumps(found[-1]), flush=True)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(found[-1]) + "\n")
            best = min(found, key=lambda line: line["bits"])
            print(f"{noise}: best is lr {best['lr']:g} with {best['draws']} draws, {best['bits']:.4f} bits")
            goal = None if options.quick else NEGLIGIBLE
            gain = found[0]["bits"] - best["bits"]
            good &= figure(f"bits that other settings could gain, {noise} noise", gain, goal)
    return good


if __name__ == "__main__":
    sys.exit(not main())
