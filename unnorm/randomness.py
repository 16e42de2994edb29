"""Random number streams: one seed gives a separate stream to every purpose.

A model, its data and its noise must not see the same random numbers. If the rows of a data set were drawn with seed 0
and the training loop used seed 0 as well, its noise would repeat the rows' own normal numbers. Everything in the
library that draws numbers by a seed therefore asks `stream` for a generator, and names what it is for.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["TRAINING", "derive_seed", "fork_global_generators", "numpy_stream", "stream"]

TRAINING = "training"  # batches and noise of a run; its rank follows, so that replicas can repeat single runs


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return the seed of the stream that belongs to `purpose`, an integer below 2^32.

    It is a hash (SHA-256) of the seed and the purpose, so that neighbouring seeds and different purposes have unrelated
    streams. It has 32 bits because that is what torch's generator on a CPU uses of a seed.

    >>> derive_seed(0, "training") == derive_seed(0, "training")
    True
    >>> len({derive_seed(0, "training"), derive_seed(1, "training"), derive_seed(0, "log Z"), 0, 1})
    5
    """
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")


def stream(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator for one purpose.

    Args:
        seed: the user's seed.
        purpose: what the numbers are for, such as "training", or "weights" and the number of a network.
        device: where the numbers are made.

    >>> x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    >>> torch.equal(x, torch.randn(3, generator=stream(0, "training", 0)))
    False
    """
    return torch.Generator(device).manual_seed(derive_seed(seed, *purpose))


def numpy_stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return numpy's generator for one purpose; `stream` has torch's.

    >>> float(numpy_stream(0, "split").random()) == float(numpy_stream(0, "split").random())
    True
    """
    return np.random.default_rng(derive_seed(seed, *purpose))


@contextmanager
def fork_global_generators(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators (the CPU's and `device`'s) from `generator`, and restore them at the end.

    This is for code that draws from the global generators. The same generator gives the same bits. Without a generator
    nothing happens: the global generators are used as they are.

    >>> with fork_global_generators(torch.Generator().manual_seed(0), torch.device("cpu")):
    ...     x = torch.randn(1)
    >>> with fork_global_generators(torch.Generator().manual_seed(0), torch.device("cpu")):
    ...     print(bool(x == torch.randn(1)))
    True
    """
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu):
        torch.default_generator.manual_seed(seed)
        for gpu in on_gpu:
            torch.cuda.default_generators[gpu.index or 0].manual_seed(seed)
        yield
