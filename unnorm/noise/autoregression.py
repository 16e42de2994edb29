"""A map of grey images, one pixel after the other: each is bent by what those before it say."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from unnorm.data.transforms import Transform
from unnorm.errors import InvalidValue
from unnorm.noise.bends import Bend
from unnorm.noise.masked import Masked, ends_of_shades, root, shades
from unnorm.randomness import stream
from unnorm.types import check_whole, event_shape

__all__ = ["Autoregression"]

SHOWN = 3  # a pixel, its shade, and the root of that


class Autoregression(Transform):
    """z_k = T_k(y_k; y_1 ... y_{k-1}) in reading order, T_k a monotone `Bend` (masked autoregressive flow, Papamakarios
    et al. 2017, with splines and masked convolutions).

    The way there is one pass; the way back goes pixel by pixel.

    Args:
        event: the shape of one image, (1, height, width).
        levels: shades of a pixel; their places in y are the buffer `edges`, (pixels, levels + 1).
        width, blocks: of the network (`Masked`).
        features: numbers of each pixel that its bend is read off.
        bins: pieces of each spline.
        generator: draws the initial weights.

    >>> flow = Autoregression((1, 4, 4), levels=8, width=8, blocks=1, features=8, bins=4)
    >>> y = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> z, log_det = flow(y)                                            # it begins as the identity
    >>> bool((z - y).abs().max() < 1e-5), log_det.shape, bool((flow.inverse(z) - y).abs().max() < 1e-4)
    (True, torch.Size([3]), True)
    """

    edges: Tensor

    def __init__(
        self,
        event: Sequence[int],
        levels: int = 256,
        width: int = 48,
        blocks: int = 6,
        features: int = 64,
        bins: int = 16,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.event = event_shape(tuple(event))
        if len(self.event) != 3 or self.event[0] != 1:
            raise InvalidValue(
                f"The 'event' of Autoregression must be (1, height, width): grey images. Got {self.event}."
            )
        check_whole("Autoregression", 1, width=width, blocks=blocks, features=features)
        check_whole("Autoregression", 2, bins=bins, levels=levels)
        self.levels, self.width, self.blocks, self.features, self.bins = levels, width, blocks, features, bins
        self.trunk = Masked(SHOWN, width, blocks)
        self.gather, self.last = nn.Linear(width, features), nn.Linear(features, Bend.numbers(bins))
        self.register_buffer("edges", torch.linspace(0, 1, levels + 1).repeat(math.prod(self.event), 1))
        generator = generator or stream(0, "weights")
        with torch.no_grad():
            self.trunk.initialise(generator)
            nn.init.kaiming_normal_(self.gather.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(self.gather.bias)
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    @property
    def config(self) -> Mapping[str, Any]:
        shape = {"event": list(self.event), "levels": self.levels, "width": self.width, "blocks": self.blocks}
        return {**shape, "features": self.features, "bins": self.bins}

    def look(self, pixels: Transform) -> "Autoregression":
        """Learn where the shades are: `pixels` goes from shades in [0, 1] to y."""
        self.edges.copy_(ends_of_shades(pixels, self.levels, self.event, self.edges.device))
        return self

    def initialise(self, y: Tensor) -> None:
        """Nothing to scale: pixels are bent one by one."""

    def compile_steps(self) -> None:
        """For training on a GPU."""
        self.trunk.compile()

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        y = x.to(self.last.weight.dtype)
        z, log_slope = self.bends(y)(y.flatten(1))
        return z.view_as(y), log_slope.sum(1)

    def inverse(self, z: Tensor) -> Tensor:
        z = z.to(self.last.weight.dtype)
        y, flat = torch.zeros_like(z), z.flatten(1)
        for place in range(flat.shape[1]):
            y.view(len(y), -1)[:, place] = self.bend_at(y, place).inverse(flat[:, place : place + 1])[:, 0]
        return y

    def bends(self, y: Tensor) -> Bend:
        """Of all pixels, (n, P), in one pass."""
        features = self.trunk(self._shown(y, 0)).permute(0, 2, 3, 1).flatten(1, 2)
        return self._bend(features, y.dtype)

    def bend_at(self, y: Tensor, place: int) -> Bend:
        """Of one pixel, (n, 1), by as few rows as matter to it; those from there on do not."""
        _, height, wide = self.event
        row, column = divmod(place, wide)
        top = max(0, row + 1 - self.trunk.above)
        where = self.trunk.places(height, wide, y)[:, top : row + 1]
        features = self.trunk(self._shown(y[:, :, top : row + 1], top), where)[:, :, -1:, column].mT
        return self._bend(features, y.dtype)

    def _shown(self, y: Tensor, top: int) -> Tensor:
        """Rows of images from `top` on, as the network sees them."""
        places = slice(top * self.event[2], top * self.event[2] + y[0].numel())
        shade = shades(y.flatten(1), self.edges[places].to(y.dtype)).view_as(y)
        return torch.cat([y, 2 * shade - 1, root(shade, self.levels)], 1)

    def _bend(self, features: Tensor, dtype: torch.dtype) -> Bend:
        return Bend.of(self.last(silu(self.gather(features))).to(dtype), self.bins)
