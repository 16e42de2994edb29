"""A noise tilted by a network."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from unnorm.noise.base import Noise

__all__ = ["Tilted"]


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
