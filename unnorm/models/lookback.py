"""A convolutional network of single-channel images whose head for a pixel sees that pixel and those before it only."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, silu

from unnorm.data.affine import Identity
from unnorm.data.transforms import Transform
from unnorm.errors import InvalidValue
from unnorm.models.seen import VIEWS
from unnorm.names import choose
from unnorm.types import event_shape

__all__ = ["Context", "Lookback"]

ABOVE = 5  # rows that the first layer sees
APART = (1, 2, 4)  # pixels between those that a block sees, block by block: what is far matters to a digit
FAR = 12.0  # coordinates that have no shades lie within this
FAR_OUT = (8.0, 10.0, 13.0, 18.0, 26.0)  # ends of pieces beyond those of width one
CUTS = (1, 2, 4, 8, 16, 32, 64)  # shades from either end at which a piece of the integral ends, and the middle
FEW_LEVELS = 32  # up to which it ends at every shade
CALM = 4.0  # deviations of the noise that the network sees as one


class Context(NamedTuple):
    """What is known of some coordinates from those before them.

    Attributes:
        features: numbers for each, (n, P, features).
        mean: where each is seen if the noise is at its mean, (n, P).
        places: which of the flattened coordinates these are.
    """

    features: Tensor
    mean: Tensor
    places: slice


class Lookback(nn.Module):
    """Heads f_k(z_1, ..., z_k), one for each pixel in reading order, for `Stepwise` models.

    Masked convolutions, as PixelCNN has them (van den Oord et al. 2016), make `features` numbers of the pixels before
    the k-th, and a small network makes f_k of these and of candidates for the k-th itself. So all heads at the data are
    one pass, and a further candidate for every pixel costs only the small network. It begins at zero.

    Args:
        event: the shape of one image, (1, height, width).
        seen: from what the network sees to the coordinates z; a triangular affine map, as `Whiten` is.
        levels: shades of a pixel; None where coordinates are not pixels. Their places as the network sees them are
            the buffer `edges`, (pixels, levels + 1): a coordinate lies between the first and the last.
        views: of the shades, as of `Views`.
        width: channels.
        blocks: residual blocks, which see one, two and four rows further up in turn.
        features: of each pixel, and width of the small network.
        generator: draws the initial weights.

    >>> net = Lookback((1, 4, 4), width=8, blocks=1, features=4)
    >>> z = torch.zeros(5, 1, 4, 4)
    >>> net(z).shape, net.heads(net.context(z), torch.zeros(3, 5, 16)).shape
    (torch.Size([5, 16]), torch.Size([3, 5, 16]))
    """

    slope: Tensor
    edges: Tensor

    def __init__(
        self,
        event: Sequence[int],
        seen: Transform | None = None,
        levels: int | None = None,
        views: Sequence[str] = (),
        width: int = 48,
        blocks: int = 6,
        features: int = 32,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        shape = event if isinstance(event, int) else tuple(event)
        self.event = event_shape(shape)
        if len(self.event) != 3 or self.event[0] != 1:
            raise InvalidValue(f"The 'event' of Lookback must be (1, height, width): grey images. Got {self.event}.")
        if min(width, features) < 1 or blocks < 0:
            raise InvalidValue(
                f"A Lookback needs width, features and blocks. Got {width}, {features} and {blocks} blocks."
            )
        if levels is not None and levels < 2:
            raise InvalidValue(f"The 'levels' of Lookback must be an integer of 2 at least. Got {levels}.")
        if views and levels is None:
            raise InvalidValue("The 'views' of Lookback are of shades: it needs 'levels'.")
        for name in views:
            choose("view", name, VIEWS)
        self.seen, self.levels, self.views = seen if seen is not None else Identity(), levels, tuple(views)
        self.width, self.blocks, self.features = width, blocks, features
        size = math.prod(self.event)
        shown = 1 + sum(len(VIEWS[name](torch.zeros(()), 2)) for name in self.views)
        self.first = _Back(shown + 3, width, ABOVE, ABOVE - 1, itself=False)
        apart = [APART[place % len(APART)] for place in range(blocks)]
        self.stages = nn.ModuleList(_Block(width, 1 + place % 2, each) for place, each in enumerate(apart))
        self.above = ABOVE + sum(apart)  # rows that matter to a pixel, its own among them
        self.gather = nn.Linear(width + 4, features)
        self.candidate = nn.Linear(shown + 1, features)
        self.inner = nn.Linear(features, features)
        self.last = nn.Linear(features, 1, bias=False)  # constants are the business of log Z
        self.register_buffer("slope", torch.ones(size))  # of what is seen, by the coordinate itself
        self.register_buffer("edges", _even(size, levels))
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
            nn.init.zeros_(self.last.weight)
            for module in self.modules():
                if isinstance(module, _Block):  # the identity
                    nn.init.zeros_(module.second.weight)

    @property
    def config(self) -> Mapping[str, Any]:
        shown = {"event": list(self.event), "seen": self.seen, "levels": self.levels, "views": list(self.views)}
        return {**shown, "width": self.width, "blocks": self.blocks, "features": self.features}

    def look(self, pixels: Transform | None = None) -> "Lookback":
        """Learn how coordinates and shades are seen: `pixels` goes from shades in [0, 1] to what the network sees."""
        size, dtype = math.prod(self.event), self.slope.dtype
        if not isinstance(self.seen, Identity):
            unit = torch.eye(size, dtype=torch.float64, device=self.slope.device).view(size, *self.event)
            matrix = (self.seen.inverse(unit) - self.seen.inverse(torch.zeros_like(unit[:1]))).flatten(1)
            if not bool((matrix.tril(-1).abs() <= 1e-9 * matrix.abs().max()).all()):  # row k: what coordinate k moves
                raise InvalidValue("The 'seen' of Lookback must be triangular: no pixel may depend on a later one.")
            self.slope.copy_(matrix.diagonal().to(dtype))
        if self.levels is not None and pixels is not None:
            shades = torch.arange(self.levels + 1, dtype=torch.float64, device=self.slope.device) / self.levels
            found = pixels(shades.view(-1, 1, 1, 1).expand(-1, *self.event).contiguous())[0]
            self.edges.copy_(found.flatten(1).mT.to(dtype))
        return self

    def forward(self, z: Tensor) -> Tensor:
        """f_k at the coordinates themselves, (n, pixels)."""
        return self.heads(self.context(z), z.flatten(1)[None])[0]

    def context(self, z: Tensor) -> Context:
        """Of every coordinate, in one pass."""
        seen = self.seen.inverse(z)
        mean = seen.flatten(1) - self.slope * z.flatten(1)
        return self._context(seen, mean, 0, slice(0, math.prod(self.event)))

    def context_at(self, z: Tensor, place: int) -> Context:
        """Of one coordinate, of as few rows as matter to it; later coordinates of z must be zero."""
        seen, row = self.seen.inverse(z), place // self.event[2]
        top = max(0, row + 1 - self.above)
        mean = seen.flatten(1)[:, place : place + 1]
        return self._context(seen[:, :, top : row + 1], mean, top, slice(place, place + 1))

    def heads(self, context: Context, z: Tensor) -> Tensor:
        """f_k at candidates (m, n, P) for the coordinates of the context."""
        y = context.mean + self.slope[context.places] * z
        shown = torch.stack([z / CALM, y, *self._shown(y, context.places)], -1)
        inner = silu(self.inner(silu(context.features + self.candidate(shown))))
        with torch.autocast(z.device.type, enabled=False):  # a sum of hundreds of heads is not for bf16
            return self.last(inner.to(z.dtype)).squeeze(-1)

    def bounds(self, context: Context) -> tuple[Tensor, Tensor]:
        """Between which numbers the coordinates lie, (n, P) each."""
        if self.levels is None:
            return torch.full_like(context.mean, -FAR), torch.full_like(context.mean, FAR)
        edges, slope = self.edges[context.places], self.slope[context.places]
        return (edges[:, 0] - context.mean) / slope, (edges[:, -1] - context.mean) / slope

    def pieces(self, context: Context) -> Tensor:
        """Ends of pieces within which e^f_k times a normal density is smooth, in order: (E, n, P).

        They are one wide where the noise is, and end where a shade does near the first and the last.
        """
        low, high = self.bounds(context)
        even = torch.arange(-FAR_OUT[0], FAR_OUT[0] + 1).tolist()
        ends = [*(-far for far in FAR_OUT[:0:-1]), *even, *FAR_OUT[1:]]
        found = torch.tensor(ends, dtype=low.dtype, device=low.device).view(-1, 1, 1).expand(-1, *low.shape)
        parts = [low[None], found, high[None]]
        if self.levels is not None:
            near = range(self.levels) if self.levels <= FEW_LEVELS else (*CUTS, self.levels // 2)
            kept = sorted({cut for least in near for cut in (least, self.levels - least) if 0 < cut < self.levels})
            at = self.edges[context.places][:, kept].mT.unsqueeze(1)  # (cuts, 1, P)
            parts.append((at - context.mean) / self.slope[context.places])
        return torch.cat(parts).clamp(low, high).sort(0).values

    def _context(self, seen: Tensor, mean: Tensor, top: int, places: slice) -> Context:
        """Of the whole, or of the last place of some rows from `top` on."""
        n, _, height, wide = seen.shape
        rows = slice(top * wide, (top + height) * wide)
        shown = [seen, *(part.view(seen.shape) for part in self._shown(seen.flatten(1), rows))]
        where = self._places(seen)[:, top : top + height].expand(n, -1, -1, -1)
        x = torch.cat([*shown, torch.ones_like(seen), where], 1).contiguous(memory_format=torch.channels_last)
        x = self.first(x)
        for stage in self.stages:
            x = stage(x)
        picked = slice(places.start - rows.start, places.stop - rows.start)
        flat, where = (part.permute(0, 2, 3, 1).flatten(1, 2)[:, picked] for part in (silu(x), where))
        beside = torch.stack([mean, self.slope[places].log().expand_as(mean)], -1)
        gathered = self.gather(torch.cat([flat, beside.to(flat), where.to(flat)], -1))
        return Context(gathered, mean, places)

    def _places(self, like: Tensor) -> Tensor:
        """How far down and how far right each pixel is, (2, height, width), from -1 to 1."""
        down, right = (
            torch.linspace(-1, 1, side, dtype=like.dtype, device=like.device) if side > 1 else like.new_zeros(1)
            for side in self.event[1:]
        )
        return torch.stack(torch.meshgrid(down, right, indexing="ij"))

    def _shown(self, y: Tensor, places: slice) -> list[Tensor]:
        """Views of the shades at (..., P), each of which is straight between the shade's edges."""
        if self.levels is None:
            return []
        shade = self._shade(y, self.edges[places].to(y.dtype))
        return [part for name in self.views for part in VIEWS[name](shade, self.levels)]

    def _shade(self, y: Tensor, edges: Tensor) -> Tensor:
        column = y.movedim(-1, 0)
        flat = column.reshape(len(column), -1).contiguous()
        cell = (torch.searchsorted(edges.contiguous(), flat.detach()) - 1).clamp(0, edges.shape[1] - 2)
        low, high = edges.gather(1, cell), edges.gather(1, cell + 1)
        shade = (cell + ((flat - low) / (high - low)).clamp(0, 1)) / (edges.shape[1] - 1)
        return shade.view(column.shape).movedim(0, -1)


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
    """x + what a convolution that looks back makes of it; it begins as the identity."""

    def __init__(self, width: int, beside: int, apart: int):
        super().__init__()
        self.first = _Back(width, width, 2, beside, apart, itself=True)
        self.second = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(silu(self.first(silu(x))))


def _even(size: int, levels: int | None) -> Tensor:
    """Edges of shades, until `look` has seen where they are."""
    return torch.linspace(0, 1, levels + 1).repeat(size, 1) if levels is not None else torch.zeros(size, 0)
