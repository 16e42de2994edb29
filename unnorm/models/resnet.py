"""A residual network for images, and a network that looks at its input through a transform."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from unnorm.data.transforms import Transform
from unnorm.errors import InvalidValue
from unnorm.types import event_shape

__all__ = ["ResNet", "Seen"]


class ResNet(nn.Module):
    """Residual blocks of 3x3 convolutions, half the resolution and more channels from stage to stage, no normalisation.

    Each block begins as the identity (its second convolution is zero), so that depth costs no stability. Smooth
    (SiLU) throughout: the score exists everywhere.

    Args:
        event: the shape of one image, (channels, height, width).
        widths: channels of each stage.
        blocks: residual blocks in each stage.
        features: width of the last hidden layer.
        outputs: numbers for each image, (n, outputs), as `Bridged` wants them; one, (n,), when None.
        generator: draws the initial weights.

    >>> net = ResNet((1, 8, 8), widths=(4, 8), blocks=1, features=16, outputs=3)
    >>> net(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        event: Sequence[int],
        widths: Sequence[int] = (64, 128, 256),
        blocks: int = 2,
        features: int = 512,
        outputs: int | None = None,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        shape = event if isinstance(event, int) else tuple(event)
        self.event, self.widths, self.blocks = event_shape(shape), tuple(widths), blocks
        self.features, self.outputs = features, outputs
        if len(self.event) != 3:
            raise InvalidValue(f"The 'event' of ResNet must be (channels, height, width). Got {self.event}.")
        if blocks < 1 or not self.widths or min(self.widths) < 1:
            raise InvalidValue(f"A ResNet needs widths and blocks. Got widths {self.widths} and blocks {blocks}.")
        if features < 1 or (outputs is not None and outputs < 1):
            raise InvalidValue(f"The 'features' and 'outputs' of ResNet must be positive. Got {features}, {outputs}.")
        channels, height, width = self.event
        stages: list[nn.Module] = [_convolution(channels, self.widths[0], generator)]
        for place, wide in enumerate(self.widths):
            if place:
                stages.append(_convolution(self.widths[place - 1], wide, generator, stride=2))
                height, width = math.ceil(height / 2), math.ceil(width / 2)
            stages += [_Block(wide, generator) for _ in range(blocks)]
        self.stages = nn.Sequential(*stages)
        self.gather = nn.Linear(self.widths[-1] * height * width, features)
        self.last = nn.Linear(features, outputs or 1)
        with torch.no_grad():
            nn.init.kaiming_normal_(self.gather.weight, nonlinearity="relu", generator=generator)
            nn.init.kaiming_normal_(self.last.weight, nonlinearity="relu", generator=generator)
            self.last.weight.mul_(0.1)
            nn.init.zeros_(self.gather.bias), nn.init.zeros_(self.last.bias)

    @property
    def config(self) -> Mapping[str, Any]:
        return {
            "event": list(self.event),
            "widths": list(self.widths),
            "blocks": self.blocks,
            "features": self.features,
            "outputs": self.outputs,
        }

    def forward(self, x: Tensor) -> Tensor:
        value = self.last(silu(self.gather(silu(self.stages(x)).flatten(1))))
        return value.squeeze(-1) if self.outputs is None else value


class _Block(nn.Module):
    def __init__(self, width: int, generator: torch.Generator | None):
        super().__init__()
        self.first, self.second = (_convolution(width, width, generator) for _ in range(2))
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(silu(self.first(silu(x))))


def _convolution(before: int, after: int, generator: torch.Generator | None, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(before, after, 3, stride=stride, padding=1)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class Seen(nn.Module):
    """A network that sees its input as it was before a transform: net(T^-1(z)).

    Waymarks and chains want coordinates where the noise is round; an image network wants pixels side by side.

    Args:
        transform: T, kept fixed.
        net: any module.

    >>> from unnorm.data import Standardize
    >>> from unnorm.models import MLP
    >>> net = MLP(2, hidden=(4,))
    >>> x = torch.randn(6, 2)
    >>> T = Standardize.fit(x)
    >>> torch.allclose(Seen(T, net)(T(x)[0]), net(x), atol=1e-5)
    True
    """

    def __init__(self, transform: Transform, net: nn.Module):
        super().__init__()
        self.transform, self.net = transform, net

    @property
    def config(self) -> Mapping[str, Any]:
        return {"transform": self.transform, "net": self.net}

    def forward(self, z: Tensor) -> Tensor:
        return self.net(self.transform.inverse(z))
