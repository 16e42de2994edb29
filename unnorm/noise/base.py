"""The noise contract."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from unnorm.data.affine import Identity
from unnorm.data.transforms import Transform
from unnorm.errors import InvalidValue
from unnorm.noise.choice import Choice
from unnorm.randomness import stream

__all__ = ["Noise", "event_of", "own_generator"]

_HALVES = (torch.float16, torch.bfloat16)


class Noise(nn.Module, ABC):
    """A distribution q that is easy to sample and to evaluate, positive wherever the model is.

    Its numbers live in buffers, so `.to()` and `state_dict()` work. A new noise writes two private methods:

    >>> class Uniform(Noise):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("width", torch.tensor(2.0))
    ...     def _sample(self, n, generator):
    ...         return self.width * torch.rand(n, 1, generator=generator, device=self.width.device)
    ...     def _log_prob(self, x):
    ...         inside = ((x >= 0) & (x <= self.width)).all(-1)
    ...         return torch.where(inside, -self.width.log(), -torch.inf)
    >>> q = Uniform()
    >>> q.log_prob(q.sample(2, generator=torch.Generator().manual_seed(0)))
    tensor([-0.6931, -0.6931])

    Attributes:
        choice: how `noise.fit` came to pick it; None for a noise made otherwise.
    """

    choice: Choice | None = None

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """`n` independent draws, shape (n, *event)."""
        if n < 1:
            raise InvalidValue(f"The number of draws must be at least 1. Got {n}.")
        with torch.no_grad():
            return self._sample(n, generator)

    def log_prob(self, x: Tensor) -> Tensor:
        """The normalised log density, (n, *event) -> (n,); in full precision also under autocast."""
        if not torch.is_autocast_enabled(x.device.type):
            return self._log_prob(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._log_prob(x.to(torch.get_default_dtype()) if x.dtype in _HALVES else x)

    def forward(self, x: Tensor) -> Tensor:
        """A noise is a LogDensity too."""
        return self.log_prob(x)

    def log_prob_and_score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The log density and its gradient in x, detached; zero where the density is flat.

        A noise that knows its score in closed form says so here.
        """
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = self.log_prob(x)
            score = None
            if value.requires_grad:
                (score,) = torch.autograd.grad(value, x, torch.ones_like(value), allow_unused=True)
        return value.detach(), torch.zeros_like(x) if score is None else score

    def coordinates(self) -> tuple[Transform, "Noise"]:
        """A map T to coordinates of the noise's own, and the noise as it is there.

        Exactly the same law: log q(x) = log q_z(z) + log_det with z, log_det = T(x). A noise that is a transformed
        standard normal says so here; any other stays where it is.
        """
        return Identity(), self

    @abstractmethod
    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor: ...

    @abstractmethod
    def _log_prob(self, x: Tensor) -> Tensor: ...


def own_generator(noise: Noise) -> torch.Generator:
    """A generator on the noise's device, so that looking at a noise changes nobody's random numbers."""
    device = next((buffer.device for buffer in noise.buffers()), torch.device("cpu"))
    return stream(0, "own draws of a noise", device=device)


def event_of(noise: Noise) -> tuple[int, ...]:
    """The shape of one draw.

    >>> from unnorm import Gaussian
    >>> event_of(Gaussian(3))
    (3,)
    """
    known = getattr(noise, "event", None)
    return tuple(noise.sample(1, generator=own_generator(noise)).shape[1:]) if known is None else tuple(known)
