"""Bits per dimension of two Gaussian baselines on MNIST: the check of the likelihoods' book-keeping.

    python benchmarks/mnist.py [--quick] [--root FOLDER]

A Gaussian of full covariance after dequantisation and logit (alpha = 1e-6), and a Gaussian copula: each pixel to a
standard normal by its own distribution over the 256 levels, then the same Gaussian. Both are fitted to the 60,000
training images and scored on the 10,000 test images. --quick takes 10,000 and 2,000: its numbers have no goal, a
covariance of 784 coordinates needs all rows. The files are found under UNNORM_DATA/mnist, or in --root.
"""

import argparse
import sys
import time

import torch
from figures import figure
from torch import Tensor

from unnorm.data import Compose, Dequantize, Gaussianize, Logit, Transform, Transformed, chunks, mnist
from unnorm.metrics import BitsPerDim, bits_per_dim
from unnorm.noise import Gaussian

GOALS = {"gaussian after logit": 2.01, "gaussian copula": 1.45}
EDGES = torch.arange(257) / 256


def rows(data: Tensor, transform: Transform, generator: torch.Generator) -> Tensor:
    """All rows in the model's units, dequantised once."""
    return torch.cat(list(chunks(Transformed(data, transform, torch.float64, generator=generator), 2000)))


def gaussian(name: str, train: Tensor, test: Tensor, generator: torch.Generator) -> BitsPerDim:
    if name == "gaussian after logit":
        transform = Compose([Dequantize(256), Logit(1e-6)])
    else:
        own = Gaussianize.fit(rows(train, Dequantize(256), generator), EDGES)
        transform = Compose([Dequantize(256), own])
    noise = Gaussian.fit(rows(train, transform, generator)).double()
    return bits_per_dim(noise, test, transform, log_z=None, dtype=torch.float64, generator=generator)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--root", help="the folder with the idx files")
    options = parser.parse_args()
    train, test = (mnist(options.root, train=part).images for part in (True, False))
    if options.quick:
        train, test = train[:10_000], test[:2000]
    generator, ok = torch.Generator().manual_seed(0), True
    for name, goal in GOALS.items():
        began = time.perf_counter()
        found = gaussian(name, train, test, generator)
        print(f"{name}: {found.value:.4f} +- {found.stderr:.4f} bits/dim, {time.perf_counter() - began:.1f} s")
        figure(f"mnist {name}, bits/dim", found.value)
        if not options.quick:
            ok &= figure(f"mnist {name}, distance from {goal}", abs(found.value - goal), 0.01)
    return ok


if __name__ == "__main__":
    sys.exit(not main())
