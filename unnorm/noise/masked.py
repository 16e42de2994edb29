"""Convolutions of images that see only what comes before a pixel in reading order."""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, silu

from unnorm.data.transforms import Transform

__all__ = ["Masked", "ends_of_shades", "root", "shades"]

ABOVE = 5  # rows that the first layer sees
APART = (1, 2, 4)  # pixels between those that a block sees, block by block: what is far matters to a digit
PLACES = 3  # channels that say where a pixel is, and where the image ends


class Masked(nn.Module):
    """`width` numbers for each pixel of those before it, by masked convolutions (PixelCNN, van den Oord et al. 2016).

    Args:
        channels: of what it sees.
        width: channels within, and of what it says.
        blocks: residual blocks, which see one, two and four rows further up in turn.

    >>> Masked(2, width=8, blocks=1)(torch.zeros(3, 2, 4, 4)).shape
    torch.Size([3, 8, 4, 4])
    """

    def __init__(self, channels: int, width: int, blocks: int):
        super().__init__()
        self.first = _Back(channels + PLACES, width, ABOVE, ABOVE - 1, itself=False)
        apart = [APART[place % len(APART)] for place in range(blocks)]
        self.stages = nn.ModuleList(_Block(width, 1 + place % 2, each) for place, each in enumerate(apart))
        self.above = ABOVE + sum(apart)  # rows that matter to a pixel, its own among them

    def forward(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """Of images, or with `where` of some rows of them: what `places` says of these."""
        n, _, height, wide = x.shape
        where = self.places(height, wide, x) if where is None else where
        x = torch.cat([x, torch.ones_like(x[:, :1]), where.expand(n, -1, -1, -1)], 1)
        x = self.first(x.contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            x = stage(x)
        return silu(x)

    def initialise(self, generator: torch.Generator | None) -> None:
        """Blocks begin as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        for module in self.modules():
            if isinstance(module, _Block):
                nn.init.zeros_(module.second.weight)

    @torch.no_grad()
    def begin_as(self, other: "Masked", shared: int) -> None:
        """Take over the weights of one as wide and as deep, of which the first `shared` channels are the same."""
        here, there = self.first.weight, other.first.weight
        here.zero_()
        here[:, :shared], here[:, -PLACES:] = there[:, :shared], there[:, -PLACES:]
        self.first.bias.copy_(other.first.bias)  # type: ignore[union-attr, arg-type]
        self.stages.load_state_dict(other.stages.state_dict())

    @staticmethod
    def places(height: int, width: int, like: Tensor) -> Tensor:
        """How far down and how far right each pixel is, (2, height, width), from -1 to 1."""
        down, right = (
            torch.linspace(-1, 1, side, dtype=like.dtype, device=like.device) if side > 1 else like.new_zeros(1)
            for side in (height, width)
        )
        return torch.stack(torch.meshgrid(down, right, indexing="ij"))


class _Back(nn.Conv2d):
    """A convolution that sees rows above, and of its own row what is on the left, and `itself` if it may."""

    def __init__(self, channels: int, width: int, rows: int, beside: int, apart: int = 1, *, itself: bool):
        super().__init__(channels, width, (rows, 2 * beside + 1), dilation=apart)
        self.rows, self.beside, self.apart, self.itself = rows, beside, apart, itself

    def forward(self, x: Tensor) -> Tensor:
        side = self.beside * self.apart
        around = pad(x, (side, side, (self.rows - 1) * self.apart, 0))
        mask = torch.ones_like(self.weight[:1, :1])
        mask[..., -1, self.beside + self.itself :] = 0
        return conv2d(around, self.weight * mask, self.bias, dilation=self.apart)


class _Block(nn.Module):
    """x + what a convolution that looks back makes of it."""

    def __init__(self, width: int, beside: int, apart: int):
        super().__init__()
        self.first = _Back(width, width, 2, beside, apart, itself=True)
        self.second = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(silu(self.first(silu(x))))


def shades(y: Tensor, edges: Tensor) -> Tensor:
    """Shades in [0, 1] of pixels (..., P) that are straight between edges (P, levels + 1).

    >>> shades(torch.tensor([[-2.0], [0.5], [9.0]]), torch.tensor([[-1.0, 0.0, 2.0]])).flatten()
    tensor([0.0000, 0.6250, 1.0000])
    """
    column = y.movedim(-1, 0)
    flat = column.reshape(len(column), -1).contiguous()
    cell = (torch.searchsorted(edges.contiguous(), flat.detach()) - 1).clamp(0, edges.shape[1] - 2)
    low, high = edges.gather(1, cell), edges.gather(1, cell + 1)
    shade = (cell + ((flat - low) / (high - low)).clamp(0, 1)) / (edges.shape[1] - 1)
    return shade.view(column.shape).movedim(0, -1)


def ends_of_shades(pixels: Transform, levels: int, event: tuple[int, ...], device: torch.device) -> Tensor:
    """Where shades begin and end, (P, levels + 1), by `pixels`, a map from shades in [0, 1] to what a network sees."""
    even = torch.arange(levels + 1, dtype=torch.float64, device=device) / levels
    return pixels(even.view(-1, 1, 1, 1).expand(-1, *event).contiguous())[0].flatten(1).mT


def root(shade: Tensor, levels: int) -> Tensor:
    """2 sqrt(s) - 1 beyond the first shade, where dark shades are farther apart; below, where that is steep, a line.

    >>> root(torch.tensor([0.0, 0.125, 0.25, 1.0]), 4)
    tensor([-1.0000, -0.5000,  0.0000,  1.0000])
    """
    least = 1 / levels
    return 2 * torch.where(shade > least, shade.clamp_min(least).sqrt(), shade * least**-0.5) - 1
