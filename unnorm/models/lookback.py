"""A convolutional network of single-channel images whose head for a pixel sees that pixel and those before it only."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from unnorm.data.transforms import Transform
from unnorm.errors import InvalidValue
from unnorm.models.seen import VIEWS
from unnorm.names import choose
from unnorm.noise.masked import Masked, ends_of_shades, shades
from unnorm.noise.steps import Line, Step
from unnorm.types import check_whole, event_shape

__all__ = ["Context", "Lookback"]

FAR = 12.0  # coordinates that have no shades lie within this
FAR_OUT = (8.0, 10.0, 13.0, 18.0, 26.0)  # ends of pieces beyond those of width one
CUTS = (1, 2, 4, 8, 16, 32, 64)  # shades from either end at which a piece of the integral ends, and the middle
FEW_LEVELS = 32  # up to which it ends at every shade
CALM = 4.0  # deviations of the noise that the network sees as one


class Context(NamedTuple):
    """What is known of some coordinates from those before them.

    Attributes:
        features: numbers for each, (n, P, features).
        step: between each and a standard normal number, for the noise.
        places: which of the flattened coordinates these are.
    """

    features: Tensor
    step: Step
    places: slice


class Lookback(nn.Module):
    """Heads f_k(y_1, ..., y_k), one for each pixel in reading order, for `Stepwise` models.

    Masked convolutions, as PixelCNN has them (van den Oord et al. 2016), make `features` numbers of the pixels before
    the k-th, and a small network makes f_k of these and of candidates for the k-th itself. So all heads at the data are
    one pass, and a further candidate for every pixel costs only the small network. It begins at zero.

    Candidates are given as the standard normal numbers z that a noise would make pixels of, by its `Step`.

    Args:
        event: the shape of one image, (1, height, width).
        levels: shades of a pixel; None where coordinates are not pixels. Their places as the network sees them are
            the buffer `edges`, (pixels, levels + 1), which `look` learns: a coordinate lies between the first and the
            last.
        views: of the shades, as of `Views`.
        width: channels.
        blocks: residual blocks, which see one, two and four rows further up in turn.
        features: of each pixel, and width of the small network.
        generator: draws the initial weights.

    >>> net = Lookback((1, 4, 4), width=8, blocks=1, features=4)
    >>> y = torch.zeros(5, 1, 4, 4)
    >>> net(y).shape, net.heads(net.context(y), torch.zeros(3, 5, 16)).shape
    (torch.Size([5, 16]), torch.Size([3, 5, 16]))
    """

    edges: Tensor

    def __init__(
        self,
        event: Sequence[int],
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
        check_whole("Lookback", 1, width=width, features=features)
        check_whole("Lookback", 0, blocks=blocks)
        if levels is not None:
            check_whole("Lookback", 2, levels=levels)
        if views and levels is None:
            raise InvalidValue("The 'views' of Lookback are of shades: it needs 'levels'.")
        for name in views:
            choose("view", name, VIEWS)
        self.levels, self.views = levels, tuple(views)
        self.width, self.blocks, self.features = width, blocks, features
        shown = 1 + sum(len(VIEWS[name](torch.zeros(()), 2)) for name in self.views)
        self.trunk = Masked(shown, width, blocks)
        self.gather = nn.Linear(width + 4, features)
        self.candidate = nn.Linear(shown + 1, features)
        self.inner = nn.Linear(features, features)
        self.last = nn.Linear(features, 1, bias=False)  # constants are the business of log Z
        self.register_buffer("edges", _even(math.prod(self.event), levels))
        with torch.no_grad():
            self.trunk.initialise(generator)
            for layer in (self.gather, self.candidate, self.inner):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
                nn.init.zeros_(layer.bias)
            nn.init.zeros_(self.last.weight)

    @property
    def config(self) -> Mapping[str, Any]:
        shown = {"event": list(self.event), "levels": self.levels, "views": list(self.views)}
        return {**shown, "width": self.width, "blocks": self.blocks, "features": self.features}

    def look(self, pixels: Transform) -> "Lookback":
        """Learn how shades are seen: `pixels` goes from shades in [0, 1] to what the network sees."""
        if self.levels is not None:
            self.edges.copy_(ends_of_shades(pixels, self.levels, self.event, self.edges.device))
        return self

    def forward(self, y: Tensor, step: Step | None = None) -> Tensor:
        """f_k at the pixels themselves, (n, pixels); for a standard normal noise unless a step is given."""
        context = self.context(y, step)
        return self.heads(context, context.step(y.flatten(1)[None])[0])[0]

    def context(self, y: Tensor, step: Step | None = None) -> Context:
        """Of every coordinate, in one pass."""
        if step is None:
            step = Line(torch.zeros_like(y).flatten(1), y.new_ones(y[0].numel()))
        return self._context(y, step, 0, slice(0, y[0].numel()))

    def context_at(self, y: Tensor, step: Step, place: int) -> Context:
        """Of one coordinate, of as few rows as matter to it; those from there on do not."""
        row = place // self.event[2]
        top = max(0, row + 1 - self.trunk.above)
        return self._context(y[:, :, top : row + 1], step, top, slice(place, place + 1))

    def heads(self, context: Context, z: Tensor) -> Tensor:
        """f_k at candidates (m, n, P) for the coordinates of the context."""
        y = context.step.inverse(z)
        shown = torch.stack([z / CALM, y, *self._shown(y, context.places)], -1)
        inner = silu(self.inner(silu(context.features + self.candidate(shown))))
        with torch.autocast(z.device.type, enabled=False):  # a sum of hundreds of heads is not for bf16
            return self.last(inner.to(z.dtype)).squeeze(-1)

    def bounds(self, context: Context) -> tuple[Tensor, Tensor]:
        """Between which numbers z the coordinates lie, (n, P) each."""
        if self.levels is None:
            like = context.features[..., 0].detach().to(self.edges.dtype)
            return torch.full_like(like, -FAR), torch.full_like(like, FAR)
        low, high = self._ends(context, [0, self.levels])
        return low, high

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
            parts.append(
                self._ends(
                    context,
                    sorted({cut for least in near for cut in (least, self.levels - least) if 0 < cut < self.levels}),
                )
            )
        return torch.cat(parts).clamp(low, high).sort(0).values

    def _ends(self, context: Context, shades: list[int]) -> Tensor:
        """Where shades begin, as numbers z: (shades, n, P)."""
        at = self.edges[context.places][:, shades].mT.unsqueeze(1).expand(-1, len(context.features), -1)
        return context.step(at)[0]

    def _context(self, y: Tensor, step: Step, top: int, places: slice) -> Context:
        """Of the whole, or of the last place of some rows from `top` on."""
        n, _, height, wide = y.shape
        rows = slice(top * wide, (top + height) * wide)
        shown = [y, *(part.view(y.shape) for part in self._shown(y.flatten(1), rows))]
        where = self.trunk.places(self.event[1], wide, y)[:, top : top + height]
        x = self.trunk(torch.cat(shown, 1), where)
        picked = slice(places.start - rows.start, places.stop - rows.start)
        flat, where = (part.permute(0, 2, 3, 1).flatten(1, 2)[:, picked] for part in (x, where.expand(n, -1, -1, -1)))
        middle = step.inverse(y.new_zeros(n, places.stop - places.start))
        beside = torch.stack([middle, -step(middle)[1]], -1)  # where the noise would have it, and how sharply
        gathered = self.gather(torch.cat([flat, beside.to(flat), where.to(flat)], -1))
        return Context(gathered, step, places)

    def _shown(self, y: Tensor, places: slice) -> list[Tensor]:
        """Views of the shades at (..., P), each of which is straight between the shade's edges."""
        if self.levels is None:
            return []
        shade = shades(y, self.edges[places].to(y.dtype))
        return [part for name in self.views for part in VIEWS[name](shade, self.levels)]


def _even(size: int, levels: int | None) -> Tensor:
    """Edges of shades, until `look` has seen where they are."""
    return torch.linspace(0, 1, levels + 1).repeat(size, 1) if levels is not None else torch.zeros(size, 0)
