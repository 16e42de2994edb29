"""Random numbers for many runs at once, each run's from a generator of its own.

`Streams` is a generator like any other. What the library draws, it draws by the functions here, which divide the first
axis of a request among the streams, in order: each run gets the numbers it would have got alone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.errors import InvalidValue

__all__ = ["Streams", "choices", "integers", "normal", "uniform"]


class Request(NamedTuple):
    """What one stream is asked for: numbers of a kind, of a shape; integers lie below `high`."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int = 0


def _torchs(kind: str) -> Callable[..., Tensor]:
    return torch.randn if kind == "normal" else torch.rand


class Streams(torch.Generator):
    """Generators for runs side by side.

    Args:
        seeds: one for each run.
        device: where the numbers are made.
        ahead: how many requests of a kind are drawn at once. With 1, a stream's numbers are those of one torch
            generator with its seed, asked in the same order. More is faster where there are many streams on a GPU; the
            numbers still depend on the stream's seed alone, but come in another order.

    >>> both = Streams([3, 4])
    >>> x = normal((6, 2), generator=both)
    >>> torch.equal(x[3:], torch.randn(3, 2, generator=torch.Generator().manual_seed(4)))
    True
    """

    seeds: tuple[int, ...]
    ahead: int
    generators: list[torch.Generator]

    def __new__(cls, seeds: Sequence[int], device: torch.device | str = "cpu", ahead: int = 1) -> "Streams":
        return super().__new__(cls, device)  # type: ignore[call-arg]

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu", ahead: int = 1):
        if not seeds or ahead < 1:
            raise InvalidValue(f"Streams need at least one seed and ahead >= 1. Got {list(seeds)}, {ahead}.")
        self.seeds, self.ahead = tuple(seeds), ahead
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._stock: dict[Request, tuple[Tensor, int]] = {}
        self._fixed: list[tuple[Request, Tensor]] | None = None
        self._place: int | None = None

    def __len__(self) -> int:
        return len(self.seeds)

    def draw(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, high: int = 0) -> Tensor:
        """Numbers of shape `shape`, whose first axis is divided among the streams."""
        each, rest = divmod(shape[0], len(self))
        if rest:
            raise InvalidValue(f"{shape[0]} draws cannot be divided among {len(self)} streams.")
        request = Request(kind, (each, *shape[1:]), dtype, high)
        if self._fixed is not None and self._place is not None:
            asked, found = self._fixed[self._place]
            if asked != request:
                raise InvalidValue(f"A step that repeats another asked for {request} in place of {asked}.")
            self._place += 1
            return found
        found = self._next(request)
        if self._fixed is not None:
            found = found.clone()
            self._fixed.append((request, found))
        return found

    def fix(self) -> None:
        """From now on remember each tensor handed out, until `repeat` hands them out again.

        For a CUDA graph, which reads the same memory at each replay.
        """
        self._fixed, self._place = [], None

    def repeat(self) -> None:
        """From now on hand out the tensors remembered since `fix`, in order; draw nothing."""
        self._place = 0

    def renew(self) -> None:
        """Write new numbers into them, those that would have come."""
        for request, place in self._fixed or ():
            place.copy_(self._next(request))
        self._place = 0

    def _next(self, request: Request) -> Tensor:
        drawn, place = self._stock.get(request, (torch.empty(0), 0))
        if place >= len(drawn):
            drawn, place = self._drawn(request), 0
        self._stock[request] = (drawn, place + 1)
        return drawn[place].flatten(0, 1)

    def _drawn(self, request: Request) -> Tensor:
        """(ahead, streams, *shape)."""
        shape, options = (self.ahead, *request.shape), {"dtype": request.dtype, "device": self.device}
        out = torch.empty(self.ahead, len(self), *request.shape, dtype=request.dtype, device=self.device)
        for k, generator in enumerate(self.generators):
            if request.kind == "choices":
                order = torch.randperm(request.high, generator=generator, device=self.device)
                out[:, k] = order[: request.shape[0]]
            elif request.kind == "integers":
                out[:, k] = torch.randint(request.high, shape, generator=generator, **options)  # type: ignore[call-overload]
            else:
                out[:, k] = _torchs(request.kind)(shape, generator=generator, **options)
        return out


def _draw(
    kind: str,
    shape: Sequence[int],
    generator: torch.Generator | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    if isinstance(generator, Streams):
        return generator.draw(kind, tuple(shape), dtype or torch.get_default_dtype())
    return _torchs(kind)(tuple(shape), generator=generator, device=device, dtype=dtype)


def normal(
    shape: Sequence[int],
    *,
    generator: torch.Generator | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Standard normal numbers."""
    return _draw("normal", shape, generator, device, dtype)


def uniform(
    shape: Sequence[int],
    *,
    generator: torch.Generator | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Uniform numbers in [0, 1)."""
    return _draw("uniform", shape, generator, device, dtype)


def integers(
    high: int, shape: Sequence[int], *, generator: torch.Generator | None, device: torch.device | str | None = None
) -> Tensor:
    """Integers from 0 to high - 1, uniformly.

    >>> integers(3, (4,), generator=Streams([0, 1])).max() < 3
    tensor(True)
    """
    if isinstance(generator, Streams):
        return generator.draw("integers", tuple(shape), torch.int64, high)
    return torch.randint(high, tuple(shape), generator=generator, device=device)


def choices(
    size: int, n: int, *, generator: torch.Generator | None, device: torch.device | str | None = None
) -> Tensor:
    """`n` different integers below `size`; of streams, each has `size` of its own, one stream's after the other's.

    >>> sorted(choices(3, 3, generator=None).tolist()), choices(3, 6, generator=Streams([0, 1]))[3:].min() >= 3
    ([0, 1, 2], tensor(True))
    """
    if not isinstance(generator, Streams):
        return torch.randperm(size, generator=generator, device=device)[:n]
    problems = len(generator)
    if generator.ahead == 1:
        places = generator.draw("choices", (n,), torch.int64, size).view(problems, -1)
    else:  # a permutation of each stream would take a kernel of each; the largest of uniform keys are as good
        keys = generator.draw("uniform", (problems * size,), torch.float32).view(problems, size)
        places = keys.topk(n // problems, sorted=False).indices
    return (places + size * torch.arange(problems, device=places.device)[:, None]).flatten()
