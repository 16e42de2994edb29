"""A noise tilted by a network."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.noise.base import Noise
from unnorm.types import LogDensity, log_density

__all__ = ["Bridged", "Tilted", "log_weight", "tilt_of"]


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

    def tilt(self, x: Tensor) -> Tensor:
        """f(x), the log of p~/q."""
        return self.net(x)

    def forward(self, x: Tensor) -> Tensor:
        log_q = self.noise.log_prob(x)
        return torch.where(log_q == -torch.inf, log_q, log_q + self.tilt(x))  # not even a NaN of f matters there

    @property
    def config(self) -> Mapping[str, Any]:
        return {"noise": self.noise, "net": self.net}


class Bridged(Tilted):
    """log p~(x) = log q(x) + f_1(x) + ... + f_K(x): one head for each bridge of a `Telescope`, on a shared trunk.

    Head k learns how much likelier a point is at one waymark than at the next. In all other respects this is a model
    like any other; one pass of the network gives all heads.

    Args:
        noise: q, kept fixed.
        net: any module mapping (n, *event) to (n, K), such as MLP(..., outputs=K).

    >>> import torch
    >>> from unnorm import MLP, Gaussian
    >>> q = Gaussian(2)
    >>> model = Bridged(q, MLP(2, hidden=(8,), outputs=5))
    >>> x = q.sample(3)
    >>> model(x).shape, model(x, heads=True).shape
    (torch.Size([3]), torch.Size([3, 5]))
    """

    def tilt(self, x: Tensor) -> Tensor:
        return self.forward(x, heads=True).sum(-1)

    def forward(self, x: Tensor, heads: bool = False) -> Tensor:
        """log p~, or with `heads` what each head adds to it, (n, K)."""
        if not heads:
            return super().forward(x)
        each = self.net(x)
        if each.ndim != 2:  # the sum over the heads would be one over the batch
            raise InvalidValue(
                f"The network of Bridged must map (n, *event) to (n, K). Got {tuple(x.shape)} -> {tuple(each.shape)}."
            )
        return each


def tilt_of(model: LogDensity, noise: Noise) -> LogDensity | None:
    """log p~ - log q of a model that is this very noise, tilted: known without cancellation; else None."""
    return model.tilt if isinstance(model, Tilted) and model.noise is noise else None


def log_weight(model: LogDensity, noise: Noise, x: Tensor) -> Tensor:
    """log_w = log p~(x) - log q(x); of a model that is this noise tilted, the network alone.

    >>> import torch
    >>> from unnorm import Gaussian, Quadratic
    >>> log_weight(Quadratic(2), Gaussian(2), torch.zeros(1, 2))
    tensor([1.8379], ...)
    """
    tilt = tilt_of(model, noise)
    return log_density(model, x) - noise.log_prob(x) if tilt is None else log_density(tilt, x)
