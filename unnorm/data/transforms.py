"""Invertible maps from the user's units to the model's, each carrying its log|det J|."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.data.rows import RowSource, moments
from unnorm.errors import DataError, InvalidValue
from unnorm.types import event_shape

__all__ = ["Compose", "Dequantize", "Logit", "Standardize", "Transform", "Transformed", "floating", "levels_of"]


class Transform(nn.Module, ABC):
    """An invertible map z = T(x) with the log of its volume change.

    If p is the density of z, the density of x is `p(T(x)) * exp(log_det)`: nobody can forget the term
    because `forward` hands it over with z. Only a transform that draws (`Dequantize`) uses the generator.

    >>> class Log(Transform):
    ...     def forward(self, x, *, generator=None):
    ...         return x.log(), -x.log().sum(-1)
    ...     def inverse(self, z):
    ...         return z.exp()
    >>> z, log_det = Log()(torch.tensor([[2.0]]))
    >>> bool(log_det == -z)
    True
    """

    @abstractmethod
    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """x of shape (n, *event) to z of the same shape and log|det dz/dx| of shape (n,)."""

    @abstractmethod
    def inverse(self, z: Tensor) -> Tensor:
        """z back to x."""


def floating(x: Tensor) -> torch.dtype:
    """The dtype of results computed from x: its own, or float64 for integers.

    >>> floating(torch.zeros(1)), floating(torch.zeros(1, dtype=torch.uint8))
    (torch.float32, torch.float64)
    """
    return x.dtype if x.is_floating_point() else torch.float64


class Standardize(Transform):
    """z = (x - loc) / scale for each coordinate, computed in float64.

    >>> x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    >>> transform = Standardize.fit(x)
    >>> z, log_det = transform(x)
    >>> z
    tensor([[-1., -1.],
            [ 1.,  1.]])
    >>> torch.equal(transform.inverse(z), x)
    True
    """

    loc: Tensor
    scale: Tensor

    def __init__(self, event: int | tuple[int, ...]):
        super().__init__()
        self.event = event_shape(event)
        self.register_buffer("loc", torch.zeros(self.event, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(self.event, dtype=torch.float64))

    @classmethod
    def fit(cls, data: RowSource) -> "Standardize":
        """Mean and standard deviation of the data; a constant coordinate keeps scale 1."""
        found = moments(data)
        transform = cls(tuple(found.mean.shape))
        scale = found.variance.sqrt()
        transform.loc.copy_(found.mean)
        transform.scale.copy_(torch.where(found.constant, 1.0, scale))
        return transform

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event)}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        z = (x.to(self.loc.dtype) - self.loc) / self.scale
        log_det = -self.scale.log().sum()
        dtype = floating(x)
        return z.to(dtype), log_det.to(dtype).expand(x.shape[0])

    def inverse(self, z: Tensor) -> Tensor:
        return (z.to(self.loc.dtype) * self.scale + self.loc).to(z.dtype)


class Dequantize(Transform):
    """Integers 0 ... levels - 1 to (x + u) / levels in the unit interval, u uniform in [0, 1) and new at each call.

    A density of the result, with this log|det J| = -D log(levels), bounds the probability of the integers from below
    on average over u (Theis, van den Oord, Bethge 2016). Anything but integers in range is refused: pixels that were
    scaled already would score log(levels) nats per coordinate too well. The inverse rounds down, exactly.

    >>> z, log_det = Dequantize(4)(torch.tensor([[0, 3]]), generator=torch.Generator().manual_seed(0))
    >>> z, log_det
    (tensor([[...]], dtype=torch.float64), tensor([-2.7726], dtype=torch.float64))
    >>> Dequantize(4).inverse(z)
    tensor([[0., 3.]], dtype=torch.float64)
    >>> Dequantize()(torch.tensor([[0.25]]))
    Traceback (most recent call last):
    unnorm.errors.DataError: Dequantize needs integers from 0 to 255. Got 0.25.
    """

    def __init__(self, levels: int = 256):
        super().__init__()
        if not isinstance(levels, int) or not 2 <= levels <= 2**16:
            raise InvalidValue(f"The 'levels' of Dequantize must be an integer from 2 to 65536. Got {levels}.")
        self.levels = levels

    @property
    def config(self) -> Mapping[str, Any]:
        return {"levels": self.levels}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        exact = x.double()
        wrong = (exact != exact.floor()) | (exact < 0) | (exact > self.levels - 1)
        if wrong.any():
            got = f"{exact[wrong][0]:g}"
            raise DataError(f"Dequantize needs integers from 0 to {self.levels - 1}. Got {got}.")
        dtype = torch.float64 if x.dtype in (torch.float16, torch.bfloat16) else floating(x)
        u = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64)
        margin = 2 * self.levels * torch.finfo(dtype).eps  # so that rounding cannot move a value to the next level
        z = (exact + u.clamp(margin, 1 - margin)) / self.levels
        log_det = -math.log(self.levels) * math.prod(x.shape[1:])
        return z.to(dtype), torch.full(x.shape[:1], log_det, device=x.device, dtype=dtype)

    def inverse(self, z: Tensor) -> Tensor:
        return (z.double() * self.levels).floor().clamp(0, self.levels - 1).to(z.dtype)


class Logit(Transform):
    """z = log(y / (1 - y)) with y = alpha + (1 - 2 alpha) x, for x in [0, 1].

    `alpha` keeps the ends finite. Close to one, 1 - y is found from 1 - x, so that float32 loses nothing. The inverse
    of a z beyond the image of [0, 1] is the nearer end.

    >>> transform = Logit(1e-6)
    >>> z, log_det = transform(torch.tensor([[0.0, 0.5, 1.0]]))
    >>> z
    tensor([[-13.8155,   0.0000,  13.8155]])
    >>> transform.inverse(z)
    tensor([[0.0000, 0.5000, 1.0000]])
    """

    def __init__(self, alpha: float = 1e-6):
        super().__init__()
        if not 0 < alpha < 0.5:
            raise InvalidValue(f"The 'alpha' of Logit must be above 0 and below 0.5. Got {alpha}.")
        self.alpha = alpha

    @property
    def config(self) -> Mapping[str, Any]:
        return {"alpha": self.alpha}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        wrong = ~((x >= 0) & (x <= 1))
        if wrong.any():
            raise DataError(f"Logit needs values from 0 to 1. Got {x[wrong][0]:g}.")
        slope = 1 - 2 * self.alpha
        below, above = (self.alpha + slope * x).log(), (self.alpha + slope * (1 - x)).log()
        return below - above, (math.log(slope) - below - above).flatten(1).sum(-1)

    def inverse(self, z: Tensor) -> Tensor:
        return ((torch.sigmoid(z) - self.alpha) / (1 - 2 * self.alpha)).clamp(0, 1)


class Compose(Transform):
    """One transform after another, from the user's units to the model's; their log|det J| add up.

    >>> transform = Compose([Dequantize(256), Logit(1e-6)])
    >>> z, log_det = transform(torch.tensor([[0, 255]]), generator=torch.Generator().manual_seed(0))
    >>> transform.inverse(z)
    tensor([[  0., 255.]], dtype=torch.float64)
    """

    def __init__(self, transforms: Sequence[Transform]):
        super().__init__()
        for part in transforms:
            if not isinstance(part, Transform):
                raise InvalidValue(f"The 'transforms' of Compose must be transforms. Got {type(part).__name__}.")
        if not transforms:
            raise InvalidValue("The 'transforms' of Compose must be at least one. Got none.")
        self.transforms = nn.ModuleList(transforms)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"transforms": list(self.transforms)}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        first, *rest = self.transforms
        z, log_det = first(x, generator=generator)
        for transform in rest:
            z, more = transform(z, generator=generator)
            log_det = log_det + more
        return z, log_det

    def inverse(self, z: Tensor) -> Tensor:
        for transform in reversed(self.transforms):
            z = transform.inverse(z)  # type: ignore[operator]
        return z


def levels_of(transform: Transform) -> int | None:
    """How many values a number may have before a transform that begins with `Dequantize`; None for any other.

    >>> levels_of(Compose([Dequantize(17), Logit(0.1)])), levels_of(Logit(0.1))
    (17, None)
    """
    while isinstance(transform, Compose):
        transform = transform.transforms[0]  # type: ignore[assignment]
    return transform.levels if isinstance(transform, Dequantize) else None


class Transformed:
    """The rows of `data` in the model's units and `dtype`, transformed as they are read.

    What a transform draws is drawn anew at each reading, from `generator`.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> Transformed(x, Standardize.fit(x))[torch.tensor([0])]
    tensor([[-1.]])
    """

    def __init__(
        self,
        data: RowSource,
        transform: Transform,
        dtype: torch.dtype = torch.float32,
        *,
        generator: torch.Generator | None = None,
    ):
        self.data, self.transform, self.dtype, self.generator = data, transform, dtype, generator

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Tensor, /) -> Tensor:
        z, _ = self.transform(self.data[index], generator=self.generator)
        return z.to(self.dtype)
