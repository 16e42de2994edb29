"""Networks that look at their input through a transform, and at pixels in several ways at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.data.transforms import Transform
from unnorm.errors import InvalidValue
from unnorm.names import choose
from unnorm.noise.masked import root

__all__ = ["VIEWS", "Seen", "Views"]

SHARP = 2.0  # of the views of the first and last shade: a shade is half as wide as the bend of the tanh


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


class Views(nn.Module):
    """A network that sees each pixel as it is, and its shade in one or more ways besides.

    What is plain in one scale is hidden in another. Most pixels of most images have the first or the last shade;
    dequantised, they fill a cell whose density ends like a cut. In the space of logits a network learns that cut
    slowly; the view "ends" puts it before its eyes. And in a space of normal scores a pixel's shade depends on where
    the pixel is, so that convolutions cannot tell a stroke from the paper.

    Args:
        pixels: from shades in [0, 1] to the network's input; kept fixed.
        views: of `VIEWS`: "shade", 2 s - 1; "root", 2 sqrt(s) - 1, where dark shades are farther apart; "ends",
            tanh(2 (levels s - 1)) and the same of 1 - s, where in the first and in the last shade a pixel is. That one
            is for spaces that are smooth in s, as logits are: on the steep densities of steep views chains are slow.
        levels: how many shades there are.
        net: any module that takes `Views.channels` times the channels.

    >>> from unnorm.data import Logit
    >>> from unnorm.models import ResNet
    >>> net = ResNet((Views.channels(("shade", "ends")), 8, 8), widths=(4,), blocks=1, features=4)
    >>> Views(Logit(), ("shade", "ends"), 256, net)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5])
    """

    def __init__(self, pixels: Transform, views: Sequence[str], levels: int, net: nn.Module):
        super().__init__()
        if not isinstance(levels, int) or levels < 2:
            raise InvalidValue(f"The 'levels' of Views must be an integer of 2 at least. Got {levels}.")
        self.views = tuple(views)
        for name in self.views:
            choose("view", name, VIEWS)
        self.pixels, self.levels, self.net = pixels, levels, net

    @staticmethod
    def channels(views: Sequence[str]) -> int:
        """How many there are for each of the input's.

        >>> Views.channels(("shade", "ends"))
        4
        """
        return 1 + sum(len(VIEWS[name](torch.zeros(()), 2)) for name in views)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"pixels": self.pixels, "views": list(self.views), "levels": self.levels, "net": self.net}

    def forward(self, x: Tensor) -> Tensor:
        shade = self.pixels.inverse(x)
        seen = (part for name in self.views for part in VIEWS[name](shade, self.levels))
        return self.net(torch.cat([x, *seen], 1))


def _shade(s: Tensor, levels: int) -> tuple[Tensor, ...]:
    return (2 * s - 1,)


def _root(s: Tensor, levels: int) -> tuple[Tensor, ...]:
    return (root(s, levels),)


def _ends(s: Tensor, levels: int) -> tuple[Tensor, ...]:
    return tuple(torch.tanh(SHARP * (levels * end - 1)) for end in (s, 1 - s))


VIEWS: Mapping[str, Callable[[Tensor, int], tuple[Tensor, ...]]] = {"shade": _shade, "root": _root, "ends": _ends}
