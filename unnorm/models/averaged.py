"""Networks averaged: the log density of a product of experts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue

__all__ = ["Averaged"]


class Averaged(nn.Module):
    """The mean of several networks' outputs: as log p~, the geometric mean of their densities, an unnormalized one.

    Args:
        nets: modules that map (n, *event) to (n,).

    >>> one, two = (torch.nn.Sequential(torch.nn.Flatten(0)) for _ in range(2))
    >>> Averaged([one, two])(torch.tensor([[1.0], [3.0]]))
    tensor([1., 3.])
    """

    def __init__(self, nets: Sequence[nn.Module]):
        super().__init__()
        if not nets:
            raise InvalidValue("The 'nets' of Averaged must be at least one. Got none.")
        self.nets = nn.ModuleList(nets)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"nets": list(self.nets)}

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([net(x) for net in self.nets]).mean(0)
