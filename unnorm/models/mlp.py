"""The multi-layer perceptron of the paper's synthetic study."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.names import choose
from unnorm.types import event_shape

__all__ = ["MLP"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "leaky-relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}


class MLP(nn.Module):
    """A perceptron with one output per example, by default the paper's three hidden layers of 300.

    Weights start at He's scale (He et al. 2015). With torch's smaller default a smooth activation spends
    thousands of steps on the coarse outline of 8gaussians before it separates the modes.

    Args:
        event: the shape of one example; it is flattened.
        hidden: the width of each hidden layer.
        activation: silu (smooth), relu, leaky-relu, elu, gelu, softplus or tanh.
        outputs: numbers for each example, (n, outputs), as `Bridged` wants them; one, (n,), when None.
        generator: draws the initial weights.

    >>> model = MLP(2, hidden=(16, 16), generator=torch.Generator().manual_seed(0))
    >>> model(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    def __init__(
        self,
        event: int | tuple[int, ...],
        hidden: Sequence[int] = (300, 300, 300),
        activation: str = "silu",
        outputs: int | None = None,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.event, self.hidden, self.activation = event_shape(event), tuple(hidden), activation
        self.outputs = outputs
        kind = choose("activation", activation, ACTIVATIONS)
        if not all(isinstance(width, int) and width > 0 for width in self.hidden):
            raise InvalidValue(f"The 'hidden' widths of MLP must be positive integers. Got {self.hidden}.")
        if outputs is not None and (not isinstance(outputs, int) or outputs < 1):
            raise InvalidValue(f"The 'outputs' of MLP must be a positive integer. Got {outputs}.")
        layers: list[nn.Module] = []
        width = math.prod(self.event)
        for size in self.hidden:
            layers += [nn.Linear(width, size), kind()]
            width = size
        last = nn.Linear(width, outputs or 1)
        self.layers = nn.Sequential(*layers, last)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
                nn.init.zeros_(layer.bias)
        with torch.no_grad():  # start near log p~ = const, where importance weights are harmless
            last.weight.mul_(0.1)

    @property
    def config(self) -> Mapping[str, Any]:
        settings = {"event": list(self.event), "hidden": list(self.hidden), "activation": self.activation}
        return settings if self.outputs is None else settings | {"outputs": self.outputs}

    def forward(self, x: Tensor) -> Tensor:
        value = self.layers(x.flatten(1))
        return value.squeeze(-1) if self.outputs is None else value
