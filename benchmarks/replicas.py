"""Replica-steps per second: many runs as one computation against the same runs one by one, in the same process.

On a CPU replicas must cost at most 1.1 times the sum of the single runs; on a GPU at least 50 times less.
"""

import argparse
import time
import warnings
from typing import Any

import torch
from figures import figure

from unnorm import loop, replicas
from unnorm.data import toy
from unnorm.device import fabric_for
from unnorm.errors import HealthWarning
from unnorm.estimators import MECO, NCE, ContrastiveDivergence, ScoreMatching
from unnorm.models import MLP
from unnorm.noise import Gaussian
from unnorm.replicas import StackedNoise
from unnorm.replicas.training import matmul_precision
from unnorm.training import Training

SUBJECTS = {
    "meco": (lambda q, **o: MECO(q, **o), "sgd"),
    "meco-adam": (lambda q, **o: MECO(q, **o), "adam"),
    "nce-ngd": (lambda q, **o: NCE(q, **o), "ngd"),
    "sm": (lambda q, **o: ScoreMatching(**o), "sgd"),
    "cd": (lambda q, **o: ContrastiveDivergence(q, **o), "sgd"),
}


def models(count: int) -> list[MLP]:
    return [MLP(2, generator=torch.Generator().manual_seed(k)) for k in range(count)]


def singly(name: str, x: torch.Tensor, steps: int, device: str, matmul: str) -> float:
    """Seconds of a step of one run by `unnorm.train`, after a few steps to warm up."""
    make, optimizer = SUBJECTS[name]
    fabric = fabric_for("cuda" if device == "cuda" else "cpu")
    taken = []
    for count in (5, steps):
        noise, training = Gaussian.fit(x), Training(steps=count, optimizer=optimizer, lr=1e-3, log_every=10**6)
        began = time.perf_counter()
        with warnings.catch_warnings(), matmul_precision(matmul):
            warnings.simplefilter("ignore", HealthWarning)
            loop.train(models(1)[0], make(noise), x, training, fabric=fabric, progress=False)
        taken.append(time.perf_counter() - began)
    return taken[1] / steps


def train_stack(name: str, x: torch.Tensor, steps: int, count: int, device: str, **options: Any) -> replicas.Replicas:
    make, optimizer = SUBJECTS[name]
    estimator = make(StackedNoise([Gaussian.fit(x)] * count), shape=(count,))
    training = Training(steps=steps, optimizer=optimizer, lr=1e-3, log_every=10**6)
    ahead = 1 if device == "cpu" else 32
    return replicas.fit(models(count), estimator, x, training, device=device, ahead=ahead, **options)


def stacked(name: str, x: torch.Tensor, steps: int, count: int, device: str, matmul: str) -> float:
    """Seconds of a step of each of `count` runs side by side."""
    train_stack(name, x, 5, count, device, matmul=matmul)
    return train_stack(name, x, steps, count, device, matmul=matmul).seconds / steps / count


def graphs(x: torch.Tensor, steps: int) -> None:
    """On a GPU: what a CUDA graph and torch.compile make of a step; and that a graph changes no number."""
    ways = {"plain": {"graph": False}, "graph": {}, "compiled, graph": {"compiled": True}}
    for count in (1, 8, 120, 600):
        for way, options in ways.items():
            short, long = (
                train_stack("meco-adam", x, length, count, "cuda", **options).seconds for length in (50, 50 + steps)
            )
            print(f"meco-adam: {count} replicas, {way}: {1e6 * (long - short) / steps / count:.1f} us a replica-step")
    for name in SUBJECTS:
        plain, graph = (train_stack(name, x, 30, 8, "cuda", graph=way).model.state() for way in (False, True))
        apart = max(float((plain[key] - graph[key]).detach().abs().max()) for key in plain)
        figure(f"replicas_graph_changes_{name}", apart, goal=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="on a GPU, with and without CUDA graphs")
    parser.add_argument("--matmul", default="highest", help="high: matrix products in TF32, both ways")
    parser.add_argument("--replicas", type=int, help="side by side; 8 on a CPU, 120 on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, on_cpu = arguments.device, arguments.device == "cpu"
    count = arguments.replicas or (8 if on_cpu else 120)
    steps = {True: 5, False: 25}[arguments.quick] if on_cpu else {True: 50, False: 200}[arguments.quick]
    x = toy("8gaussians").sample(20_000, generator=torch.Generator().manual_seed(0))
    if arguments.graphs:
        graphs(x, steps)
        return
    for name in SUBJECTS:
        length = steps * count if on_cpu else steps
        rounds = [
            (
                singly(name, x, length, device, arguments.matmul),
                stacked(name, x, steps, count, device, arguments.matmul),
            )
            for _ in range(1 if arguments.quick else 2)
        ]
        single, own = (min(values) for values in zip(*rounds, strict=True))
        print(f"{name}: one by one {1e3 * single:.3f} ms a step, {count} side by side {1e3 * own:.3f} ms each")
        if on_cpu:
            figure(f"replicas_cost_{name}", own / single, goal=1.1)
        else:
            figure(f"replicas_speedup_{name}", single / own, goal=50, at_least=True)


if __name__ == "__main__":
    main()
