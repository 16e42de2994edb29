"""Any `torch.distributions` object as a noise."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Transform

from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise
from unnorm.randomness import fork_global_generators, stream

__all__ = ["DistributionNoise", "from_distribution"]


def from_distribution(distribution: Distribution) -> "DistributionNoise":
    """A noise that draws from and evaluates `distribution`; its batch axes become part of the event.

    Outside its support the log density is -inf. A scalar distribution has events of shape (1,).

    >>> q = from_distribution(torch.distributions.Laplace(torch.zeros(2), torch.ones(2)))
    >>> q.log_prob(torch.zeros(1, 2))
    tensor([-1.3863])
    >>> q.sample(3, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([3, 2])
    """
    if not isinstance(distribution, Distribution):
        raise InvalidValue(f"from_distribution takes a torch.distributions object. Got {type(distribution).__name__}.")
    return DistributionNoise(distribution)


class DistributionNoise(Noise):
    """A `torch.distributions` object whose tensors are this module's buffers.

    `torch.distributions` draw from torch's global generators; here a draw with `generator=` seeds a fork of
    them, so that the same generator gives the same bits and the global state is left as it was.
    """

    def __init__(self, distribution: Distribution):
        super().__init__()
        own = _detached(distribution)
        if not (own.batch_shape or own.event_shape):
            own = own.expand(torch.Size([1]))
        self._distribution = Independent(own, len(own.batch_shape)) if own.batch_shape else own
        for name, holder, key in _tensors(self._distribution):
            self.register_buffer(name, _get(holder, key).clone())
        self._share()

    def _share(self) -> None:
        """Make the distribution use the buffers themselves, and forget what it derived from the old ones."""
        for name, holder, key in list(_tensors(self._distribution)):
            if name in self._buffers:
                _set(holder, key, self._buffers[name])
            else:
                vars(holder).pop(key)

    def _apply(self, fn: Any, recurse: bool = True) -> "DistributionNoise":
        super()._apply(fn, recurse)
        self._share()
        return self

    @property
    def _device(self) -> torch.device:
        return next((buffer.device for buffer in self.buffers()), torch.device("cpu"))

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        with fork_global_generators(generator, self._device):
            return self._distribution.sample((n,))

    def _log_prob(self, x: Tensor) -> Tensor:
        try:
            support = self._distribution.support
        except NotImplementedError:
            support = None
        if support is None:
            return self._distribution.log_prob(x)
        inside = support.check(x)
        # Torch refuses points outside the support; the density there is zero.
        somewhere = torch.where(_wide(inside, x), x, self._sample(1, _fixed(self._device)).to(x.dtype))
        return torch.where(inside, self._distribution.log_prob(somewhere), -torch.inf)


def _wide(inside: Tensor, x: Tensor) -> Tensor:
    return inside.view(-1, *[1] * (x.ndim - 1))


def _fixed(device: torch.device) -> torch.Generator:
    return stream(0, "point of the support", device=device)


def _parts(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, list):
        yield from ((str(place), part) for place, part in enumerate(holder))
    elif isinstance(holder, (Distribution, Transform)):
        yield from sorted(vars(holder).items())


def _tensors(holder: Any, path: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any, str]]:
    """Every tensor reachable from a distribution: buffer name, the object that holds it, and under which key."""
    if id(holder) in seen:  # a transform and its inverse know each other
        return
    for key, part in _parts(holder):
        name = f"{path}{key}"
        if isinstance(part, Tensor):
            yield name, holder, key
        else:
            yield from _tensors(part, f"{name}_", seen | {id(holder)})


def _get(holder: Any, key: str) -> Tensor:
    return holder[int(key)] if isinstance(holder, list) else vars(holder)[key]


def _set(holder: Any, key: str, value: Tensor | None) -> None:
    if isinstance(holder, list):
        holder[int(key)] = value
    else:
        vars(holder)[key] = value


def _detached(distribution: Distribution) -> Distribution:
    """A shallow walk that detaches tensors in a copy, because non-leaf tensors cannot be deep-copied."""
    memo = {id(_get(holder, key)): _get(holder, key).detach() for _, holder, key in _tensors(distribution)}
    return copy.deepcopy(distribution, memo)
