"""A store of past negatives from which chains go on."""

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise
from unnorm.samplers.base import per_event
from unnorm.streams import choices, uniform
from unnorm.types import event_shape

__all__ = ["ReplayBuffer"]


class ReplayBuffer(nn.Module):
    """Points that chains reached before; its content is a buffer, so it is saved and resumed with the estimator.

    `draw` hands out chains to continue, some of them restarted from the noise, as are those never stored; `put` takes
    them back (Du and Mordatch 2019).

    Args:
        event: the shape of one point.
        size: how many points it holds.
        restart: the share of the drawn chains that start anew from the noise.
        problems: how many runs side by side have `size` points each; they draw by `Streams`, one for each.

    >>> from unnorm import Gaussian
    >>> buffer = ReplayBuffer(2, size=100)
    >>> x, places = buffer.draw(10, Gaussian(2), generator=torch.Generator().manual_seed(0))
    >>> buffer.put(places, x + 1)
    >>> torch.equal(buffer.points[places], x + 1)
    True
    """

    points: Tensor
    filled: Tensor

    def __init__(self, event: int | tuple[int, ...], size: int = 10_000, restart: float = 0.05, problems: int = 1):
        super().__init__()
        if size < 1:
            raise InvalidValue(f"The 'size' of ReplayBuffer must be at least 1. Got {size}.")
        if not 0 <= restart <= 1:
            raise InvalidValue(f"The 'restart' of ReplayBuffer must be in [0, 1]. Got {restart}.")
        self.size, self.restart = size, restart
        self.register_buffer("points", torch.zeros(problems * size, *event_shape(event)))
        self.register_buffer("filled", torch.zeros(problems * size, dtype=torch.bool))

    def draw(self, n: int, noise: Noise, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """`n` points to start from, and their places in the buffer, all different."""
        if n > len(self.points):
            raise InvalidValue(f"The ReplayBuffer holds {len(self.points)} points. Got a request for {n}.")
        device = self.points.device
        places = choices(self.size, n, generator=generator, device=device)
        restarted = uniform((n,), generator=generator, device=device, dtype=torch.float32) < self.restart
        fresh = noise.sample(n, generator=generator).to(self.points)
        return torch.where(per_event(restarted | ~self.filled[places], fresh), fresh, self.points[places]), places

    def put(self, places: Tensor, x: Tensor) -> None:
        """Take points back; one that is not finite leaves what was there before."""
        usable = torch.isfinite(x.flatten(1)).all(-1)
        self.points[places] = torch.where(per_event(usable, x), x.detach().to(self.points), self.points[places])
        self.filled[places] |= usable
