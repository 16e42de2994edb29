"""A noise tilted by a network."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from unnorm.noise.base import Noise
from unnorm.types import LogDensity, log_density

__all__ = ["Tilted", "log_weight", "tilt_of"]


class Tilted(nn.Module):
    """log p~(x) = log q(x) + f(x): the network only learns how the data differ from the noise.

    The importance weight p~/q is e^f. For a network that grows at most linearly (any MLP) and a Gaussian q,
    Z and every moment of the weights are finite; for a plain network under a Gaussian noise they need not be.

    Args:
        noise: q, kept fixed.
        net: f, any module mapping (n, *event) to (n,).

    >>> import torch
    >>> from unnorm import MLP, Gaussian
    >>> q = Gaussian(2)
    >>> model = Tilted(q, MLP(2, hidden=(8,)))
    >>> x = q.sample(3)
    >>> torch.equal(model(x), q.log_prob(x) + model.net(x))
    True
    """

    def __init__(self, noise: Noise, net: nn.Module):
        super().__init__()
        self.noise, self.net = noise, net

    def forward(self, x: Tensor) -> Tensor:
        return self.noise.log_prob(x) + self.net(x)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"noise": self.noise, "net": self.net}


def tilt_of(model: LogDensity, noise: Noise) -> nn.Module | None:
    """The network f of a model that is this very noise, tilted: log p~ - log q without cancellation; else None."""
    return model.net if isinstance(model, Tilted) and model.noise is noise else None


def log_weight(model: LogDensity, noise: Noise, x: Tensor) -> Tensor:
    """log_w = log p~(x) - log q(x); of a model that is this noise tilted, the network alone.

    >>> import torch
    >>> from unnorm import Gaussian, Quadratic
    >>> log_weight(Quadratic(2), Gaussian(2), torch.zeros(1, 2))
    tensor([1.8379], ...)
    """
    net = tilt_of(model, noise)
    return log_density(model, x) - noise.log_prob(x) if net is None else log_density(net, x)
