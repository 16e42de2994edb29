"""Noises side by side, one for each replica."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise, event_of
from unnorm.noise.gaussian import Gaussian
from unnorm.streams import Streams, normal
from unnorm.types import apart

__all__ = ["StackedNoise"]


class StackedNoise(Noise):
    """R noises of one kind, as one: rows are divided among them in order, as `Streams` divides random numbers.

    Full Gaussians are drawn in one pass, others one after the other; densities are evaluated in one pass.

    Args:
        noises: of one class, event and structure.

    Attributes:
        by_streams: whether draws come from `Streams` in one pass; only then a CUDA graph can hold them.

    >>> from unnorm import Gaussian
    >>> narrow, wide = Gaussian(1), Gaussian.fit(10 * torch.randn(100, 1, generator=torch.Generator().manual_seed(0)))
    >>> both = StackedNoise([narrow, wide])
    >>> x = both.sample(400, generator=Streams([0, 1]))
    >>> x[:200].std() < 2 < x[200:].std(), torch.equal(both.log_prob(x)[:200], narrow.log_prob(x[:200]))
    (tensor(True), True)
    """

    def __init__(self, noises: Sequence[Noise]):
        super().__init__()
        states = [{**dict(noise.named_parameters()), **dict(noise.named_buffers())} for noise in noises]
        shapes = [{name: value.shape for name, value in state.items()} for state in states]
        if len({type(noise) for noise in noises}) != 1 or any(own != shapes[0] for own in shapes):
            kinds = ", ".join(sorted({type(noise).__name__ for noise in noises}))
            raise InvalidValue(f"Noises side by side must be of one kind, event and structure. Got {kinds}.")
        self.noises = nn.ModuleList(copy.deepcopy(noise) for noise in noises)
        self.event = event_of(noises[0])
        for name in states[0]:
            stacked = torch.stack([state[name] for state in states])
            self.register_buffer(name.replace(".", ":"), stacked.detach().clone())

    @property
    def each(self) -> list[Noise]:
        """The noises themselves."""
        return [noise for noise in self.noises if isinstance(noise, Noise)]

    @property
    def shape(self) -> tuple[int]:
        return (len(self.noises),)

    @property
    def by_streams(self) -> bool:
        first = self.noises[0]
        return isinstance(first, Gaussian) and first.covariance == "full"

    @property
    def _state(self) -> dict[str, Tensor]:
        return {name.replace(":", "."): value for name, value in self.named_buffers(recurse=False)}

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        if self.by_streams:
            state = self._state
            z = normal((n, state["loc"].shape[1]), generator=generator, device=self._device, dtype=state["loc"].dtype)
            centred = apart(z, self.shape) @ state["scale_tril"].mT
            return (state["loc"][:, None] + centred).view(n, *self.event)
        own = generator.generators if isinstance(generator, Streams) else [generator] * len(self.noises)
        each = n // len(self.noises)
        return torch.cat([noise.sample(each, generator=g) for noise, g in zip(self.noises, own, strict=True)])  # type: ignore[operator]

    @property
    def _device(self) -> torch.device:
        return next(self.buffers()).device

    def _log_prob(self, x: Tensor) -> Tensor:
        first = self.noises[0]

        def one(state: dict[str, Tensor], points: Tensor) -> Tensor:
            return functional_call(first, state, (points,))

        return vmap(one)(self._state, apart(x, self.shape)).flatten()
