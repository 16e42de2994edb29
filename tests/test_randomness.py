"""Streams of random numbers: what the data, the noise and the validation draw is never the same."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from unnorm import MECO, MLP, Tilted, Training, bridges, replicas
from unnorm.loop import train
from unnorm.noise import Noise
from unnorm.randomness import derive_seed, numpy_stream, stream
from unnorm.replicas import StackedNoise

PACKAGE = Path(__file__).parents[1] / "unnorm"
LOG_2PI = math.log(2 * math.pi)


class Record(list):
    """A list that copies of a noise share."""

    def __deepcopy__(self, memo):
        return self


class Recorded(Noise):
    """A standard normal noise that remembers what it drew, in float64: equal numbers are then no accident."""

    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.ones((), dtype=torch.float64))
        self.event, self.drawn = (2,), Record()

    def _sample(self, n, generator):
        x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        self.drawn.append(x.flatten())
        return x.to(self.one)

    def _log_prob(self, x):
        return -0.5 * (x.square() + LOG_2PI).sum(-1)


def normals(seed, n):
    """The numbers of a user who draws rows with a generator of this seed."""
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shared(first, second):
    """The share of the first's numbers that the second has too, bit by bit."""
    return float(np.isin(first.flatten().numpy(), second.flatten().numpy()).mean())


def model(noise):
    return Tilted(noise, MLP(2, hidden=(8,)).double())


@pytest.mark.parametrize("seed", [0, 1])
def test_the_noise_repeats_nothing_of_rows_that_were_drawn_with_the_same_seed(seed):
    rows, noise = normals(seed, 50_000), Recorded()
    train(model(noise), MECO(noise), rows, Training(steps=50, batch=500, seed=seed), progress=False)
    assert len(torch.cat(noise.drawn)) >= 2 * 50 * 500
    assert shared(torch.cat(noise.drawn), rows) == 0.0


def test_validation_draws_repeat_nothing_of_training():
    rows, noise = normals(0, 2000), Recorded()
    training = Training(steps=50, batch=500, validate_every=25, seed=0)
    train(model(noise), MECO(noise), rows[500:], training, validation=rows[:500], progress=False)
    first, *later = noise.drawn  # the first look comes before the first step; its draws are used at each look
    looks = [drawn for drawn in later if torch.equal(drawn, first)]
    trained = torch.cat([drawn for drawn in later if not torch.equal(drawn, first)])
    assert len(looks) == 2
    assert len(trained) >= 2 * 50 * 500
    assert shared(first, trained) == 0.0
    assert shared(first, rows) == 0.0


def test_the_pilot_repeats_neither_the_rows_nor_the_training():
    rows, pilot, noise = normals(0, 2000), Recorded(), Recorded()
    bridges.pilot(lambda k: MLP(2, (8,), outputs=k).double(), pilot, rows, steps=20, batch=200)
    train(model(noise), MECO(noise), rows, Training(steps=20, batch=200), progress=False)
    assert shared(torch.cat(pilot.drawn), rows) == 0.0
    assert shared(torch.cat(pilot.drawn), torch.cat(noise.drawn)) == 0.0


def test_replicas_repeat_neither_the_rows_nor_each_other():
    rows, noises = normals(0, 5000), [Recorded(), Recorded()]
    estimator = MECO(StackedNoise(noises), shape=(2,))
    models = [model(noise) for noise in noises]
    replicas.fit(models, estimator, rows, Training(steps=20, batch=200), seeds=[0, 1])
    first, second = (torch.cat(noise.drawn) for noise in noises)
    assert min(len(first), len(second)) >= 20 * 200
    assert shared(torch.cat([first, second]), rows) == shared(first, second) == 0.0


def test_a_purpose_has_a_stream_of_its_own():
    purposes = [("training", 0), ("training", 1), ("validation",), ("log Z",), ("weights",), ("weights", 1)]
    seeds = [derive_seed(seed, *purpose) for seed in range(100) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert torch.equal(torch.randn(5, generator=stream(3, "a")), torch.randn(5, generator=stream(3, "a")))
    assert not torch.equal(torch.randn(5, generator=stream(3, "a")), torch.randn(5, generator=stream(3, "b")))
    assert numpy_stream(3, "a").random() == numpy_stream(3, "a").random() != numpy_stream(3, "b").random()


def test_the_bits_of_a_seed_do_not_change():
    """A fit of an older version can be repeated: the hash is part of what a seed means."""
    assert derive_seed(0, "training", 0) == 0xEE814892
    assert derive_seed(7, "validation") == 0xB4050ADB


def test_no_other_place_turns_a_seed_into_numbers():
    """`data/targets.py` has densities that are defined by the numbers of a seed; `streams.py` takes derived seeds."""
    pattern = re.compile(r"manual_seed\(|default_rng\(|RandomState\(|random_state=\d|seed=\d")
    allowed = {"randomness.py", "streams.py", "data/targets.py", "metrics/images.py", "paper/toy2d/flow.py"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0].strip()
            if pattern.search(code) and not code.startswith((">>>", "...")):
                found.append((str(path.relative_to(PACKAGE)), number))
    assert [place for place in found if place[0] not in allowed] == []
