"""Code that draws from torch's global generators, made to draw from ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["forked"]


@contextmanager
def forked(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Within it the global generators (the CPU's and `device`'s) are seeded from `generator`; then they are as before.

    The same generator gives the same bits. Without one nothing happens: the global generators are used as they are.

    >>> with forked(torch.Generator().manual_seed(0), torch.device("cpu")):
    ...     x = torch.randn(1)
    >>> with forked(torch.Generator().manual_seed(0), torch.device("cpu")):
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
