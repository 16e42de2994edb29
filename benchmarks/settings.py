"""Settings of the study's rows that go pixel by pixel, by *validation* images: no test image is looked at.

    python benchmarks/settings.py [--size desktop] [--seconds 30] [--noises copula,gaussian] [--out settings.jsonl]
    python benchmarks/settings.py --quick

Around the settings of `unnorm reproduce mnist` one is changed at a time: the learning rate, or the draws of the noise
for each pixel. Each trains for the same seconds, as the study does, with as many steps as a short
trial says; the first validation images choose among its iterates, and its bits per dimension are those of the last 500
validation images, which chose nothing. The figures are, for each noise, how much the best is ahead of the study's: what
a change could gain.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from figures import figure

from unnorm.device import fabric_for
from unnorm.metrics import bits_per_dim
from unnorm.paper.mnist.problem import Problem
from unnorm.paper.mnist.runs import learnt, step_seconds
from unnorm.paper.mnist.spec import SIZES, Row, Size

ALPHAS = (0.0, 1.0)
JUDGES = 500  # validation images, the last ones
NEGLIGIBLE = 0.01  # bits per dimension


def candidates(size: Size) -> Iterator[tuple[str, Size]]:
    """The study's own settings, and others that differ in one thing."""
    yield "the study's", size
    for factor in (1 / 3, 2):
        yield f"lr {size.pixel_lr * factor:.0e}", replace(size, pixel_lr=size.pixel_lr * factor)
    for factor in (0.5, 2):
        draws = max(1, round(size.draws * factor))
        yield f"{draws} draws", replace(size, draws=draws)


def tried(problem: Problem, noise: str, name: str) -> dict[str, Any]:
    row, size = Row("pixels-meco", noise), problem.size
    seconds = step_seconds(problem, row, ALPHAS)
    model, history = learnt(problem, row, 0, max(2, int(size.seconds / seconds)), ALPHAS)
    images = problem.data.validation.images[size.judged :][-JUDGES:].to(problem.fabric.device)
    model.nodes = size.nodes[-1]
    generator = torch.Generator(problem.fabric.device).manual_seed(5)
    found = bits_per_dim(model, images, problem.where_of(row).transform, log_z=None, generator=generator)
    facts = {"noise": noise, "settings": name, "lr": size.pixel_lr, "draws": size.draws, **size.lookback}
    facts |= {"steps": int(history["step"][-1]), "seconds": round(float(history["seconds"][-1]), 1)}
    return facts | {"bits": round(found.value, 5), "se": round(found.stderr, 5)}


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--size", choices=("smoke", "desktop", "full"), default="desktop", help="of the study")
    parser.add_argument("--seconds", type=float, help="of training, the study's unless given")
    parser.add_argument("--noises", default="copula,gaussian")
    parser.add_argument("--root", type=Path, help="the folder of the data sets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a file to which lines are added")
    options = parser.parse_args()
    size = SIZES["smoke" if options.quick else options.size]
    size = replace(size, seconds=options.seconds or size.seconds)
    fabric = fabric_for(options.device, "bf16" if options.device == "cuda" else size.precision)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for noise in options.noises.split(","):
            found = dict[str, float]()
            for name, changed in islice(candidates(size), 2 if options.quick else None):
                line = tried(Problem(changed, Path(folder), fabric, options.root), noise, name)
                found[name] = line["bits"]
                print(json.dumps(line), flush=True)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
            best = min(found, key=found.__getitem__)
            ahead = found["the study's"] - found[best]
            print(f"{noise}: best is '{best}', {found[best]:.4f} bits")
            goal = None if options.quick else NEGLIGIBLE
            good &= figure(f"bits that other settings could gain, {noise} noise", ahead, goal)
    return good


if __name__ == "__main__":
    sys.exit(not main())
