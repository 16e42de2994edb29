"""Residual networks for images."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize, silu
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from unnorm.errors import InvalidValue
from unnorm.types import event_shape

__all__ = ["ResNet", "WideResNet"]


class ResNet(nn.Module):
    """Residual blocks of 3x3 convolutions, half the resolution and more channels from stage to stage, no normalisation.

    Each block begins as the identity (its second convolution is zero), so that depth costs no stability, and the last
    layer begins at zero: a tilted noise begins as the noise. With heads of random functions Adam first drives these to
    nothing, and on MNIST stays there for hundreds of steps. Smooth (SiLU) throughout: the score exists everywhere.
    Batch normalisation is not among the options: it would let the noise of a batch change what the data are worth.

    Args:
        event: the shape of one image, (channels, height, width).
        widths: channels of each stage.
        blocks: residual blocks in each stage.
        features: width of the last hidden layer.
        outputs: numbers for each image, (n, outputs), as `Bridged` wants them; one, (n,), when None.
        pooled: average over the places before the last hidden layer, in place of a weight for each.
        spectral: hold the largest singular value of every weight but the last layer's at one or below, by a step of
            the power iteration at each training pass (Miyato et al. 2018; a convolution's weight as a matrix).
        checkpointing: compute blocks anew in the backward pass: less memory, a third more time.
        gain: times the last layer's output. Adam moves every weight alike: with a small step and a large gain the heads
            learn as fast as with a large step, while the trunk that bridges share stays in small ones.
        dropout: share of each block's inner numbers that are dropped while training. Which ones is torch's global
            generator's choice: such a run is not the same to the bit when it is repeated or resumed.
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
        pooled: bool = False,
        spectral: bool = False,
        checkpointing: bool = False,
        gain: float = 1.0,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        shape = event if isinstance(event, int) else tuple(event)
        self.event, self.widths, self.blocks = event_shape(shape), tuple(widths), blocks
        self.features, self.outputs = features, outputs
        self.pooled, self.spectral, self.checkpointing, self.dropout = pooled, spectral, checkpointing, dropout
        self.gain = gain
        if len(self.event) != 3:
            raise InvalidValue(f"The 'event' of ResNet must be (channels, height, width). Got {self.event}.")
        if blocks < 1 or not self.widths or min(self.widths) < 1:
            raise InvalidValue(f"A ResNet needs widths and blocks. Got widths {self.widths} and blocks {blocks}.")
        if features < 1 or (outputs is not None and outputs < 1):
            raise InvalidValue(f"The 'features' and 'outputs' of ResNet must be positive. Got {features}, {outputs}.")
        if not gain > 0:
            raise InvalidValue(f"The 'gain' of ResNet must be positive. Got {gain}.")
        if not 0 <= dropout < 1:
            raise InvalidValue(f"The 'dropout' of ResNet must be in [0, 1). Got {dropout}.")
        channels, height, width = self.event
        stages: list[nn.Module] = [_convolution(channels, self.widths[0], generator)]
        for place, wide in enumerate(self.widths):
            if place:
                stages.append(_convolution(self.widths[place - 1], wide, generator, stride=2))
                height, width = math.ceil(height / 2), math.ceil(width / 2)
            stages += [_Block(wide, dropout, generator) for _ in range(blocks)]
        self.stages = nn.Sequential(*stages)
        self.gather = nn.Linear(self.widths[-1] * (1 if pooled else height * width), features)
        self.last = nn.Linear(features, outputs or 1)
        with torch.no_grad():
            nn.init.kaiming_normal_(self.gather.weight, nonlinearity="relu", generator=generator)
            for part in (self.gather.bias, self.last.weight, self.last.bias):
                nn.init.zeros_(part)
        if spectral:
            for module in list(self.modules()):
                if isinstance(module, nn.Conv2d) or module is self.gather:
                    weight = module.weight
                    register_parametrization(module, "weight", _Held(weight, generator), unsafe=True)

    @property
    def config(self) -> Mapping[str, Any]:
        shape = {"event": list(self.event), "widths": list(self.widths), "blocks": self.blocks}
        settings = {**shape, "features": self.features, "outputs": self.outputs}
        gain = {"gain": self.gain} if self.gain != 1 else {}
        return settings | gain | self._flags("pooled", "spectral", "checkpointing", "dropout")

    def _flags(self, *names: str) -> dict[str, Any]:
        """Those that are not as usual."""
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            again = self.checkpointing and isinstance(stage, _Block) and torch.is_grad_enabled()
            x = checkpoint(stage, x, use_reentrant=False) if again else stage(x)
        x = silu(x)
        value = self.gain * self.last(silu(self.gather(x.mean((2, 3)) if self.pooled else x.flatten(1))))
        return value.squeeze(-1) if self.outputs is None else value


class WideResNet(ResNet):
    """A wide residual network (Zagoruyko, Komodakis 2016) without its normalisation: three stages, pooled.

    Args:
        event: the shape of one image, (channels, height, width).
        depth: 6 n + 4 layers, n blocks in each stage.
        width: times 16, 32 and 64 channels.
        outputs: as of `ResNet`.
        options: `spectral`, `checkpointing`, `dropout` and `generator` of `ResNet`.

    >>> net = WideResNet((3, 32, 32), depth=10, width=1)
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.widths
    (torch.Size([2]), (16, 32, 64))
    """

    def __init__(
        self, event: Sequence[int], depth: int = 28, width: int = 10, outputs: int | None = None, **options: Any
    ):
        if depth < 10 or (depth - 4) % 6:
            raise InvalidValue(f"The 'depth' of WideResNet must be 6 n + 4, from 10 on. Got {depth}.")
        if width < 1:
            raise InvalidValue(f"The 'width' of WideResNet must be positive. Got {width}.")
        self.depth, self.width = depth, width
        widths = tuple(width * base for base in (16, 32, 64))
        super().__init__(event, widths, (depth - 4) // 6, widths[-1], outputs, pooled=True, **options)

    @property
    def config(self) -> Mapping[str, Any]:
        own = {"event": list(self.event), "depth": self.depth, "width": self.width, "outputs": self.outputs}
        return own | self._flags("spectral", "checkpointing", "dropout")


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float, generator: torch.Generator | None):
        super().__init__()
        self.dropout = dropout
        self.first, self.second = (_convolution(width, width, generator) for _ in range(2))
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(dropout(silu(self.first(silu(x))), self.dropout, self.training))


def _convolution(before: int, after: int, generator: torch.Generator | None, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(before, after, 3, stride=stride, padding=1)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class _Held(nn.Module):
    """A weight, divided by its largest singular value where that is above one."""

    left: Tensor

    def __init__(self, weight: Tensor, generator: torch.Generator | None):
        super().__init__()
        self.register_buffer("left", normalize(torch.randn(len(weight), generator=generator).to(weight), dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        matrix = weight.flatten(1)
        with torch.no_grad():
            right = normalize(matrix.mT @ self.left, dim=0)
            left = normalize(matrix @ right, dim=0)
            if self.training:
                self.left.copy_(left)
        return weight / (left @ (matrix @ right)).clamp_min(1.0)
