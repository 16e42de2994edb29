"""Couplings of convolutions: an invertible map of images, at two or more resolutions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle, silu

from unnorm.data.transforms import Transform
from unnorm.errors import InvalidValue
from unnorm.noise.bends import Bend
from unnorm.randomness import stream
from unnorm.types import event_shape

__all__ = ["Couplings"]

LEAST = 1e-3  # deviation of a channel that is scaled to one


class Couplings(Transform):
    """Image to image, one-to-one: at each level the resolution is halved and steps follow, at last it is as it was.

    A step scales the channels, mixes them by an invertible matrix (Kingma, Dhariwal 2018), and transforms half of
    them by monotone splines after a scale and a shift (Dinh et al. 2017, Durkan et al. 2019), which a small residual
    network reads off the other half. The inverse is in closed form.

    Args:
        event: the shape of one image, (channels, height, width).
        steps: of each level.
        width: channels of the networks.
        blocks: residual blocks of each.
        bins: pieces of each spline.
        generator: draws the initial weights.

    >>> flow = Couplings((1, 8, 8), steps=(2, 2), width=8, blocks=1, bins=4)
    >>> x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> z, log_det = flow(x)
    >>> z.shape, log_det.shape, bool((flow.inverse(z) - x).abs().max() < 1e-4)
    (torch.Size([3, 1, 8, 8]), torch.Size([3]), True)
    """

    def __init__(
        self,
        event: Sequence[int],
        steps: Sequence[int] = (8, 8),
        width: int = 64,
        blocks: int = 2,
        bins: int = 8,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.event = event_shape(tuple(event))
        self.steps, self.width, self.blocks, self.bins = tuple(steps), width, blocks, bins
        if len(self.event) != 3 or any(size % 2 ** len(self.steps) for size in self.event[1:]):
            raise InvalidValue(
                f"{len(self.steps)} levels of Couplings need images (channels, height, width) whose sides halve "
                f"so often. Got {self.event}."
            )
        if not self.steps or min(*self.steps, width, blocks, bins - 1) < 1:
            raise InvalidValue("Couplings need a step at each level, a width, a block, and 2 bins at least.")
        generator = generator or stream(0, "weights")
        self.step: Callable[..., tuple[Tensor, Tensor]] = _Step.__call__
        with torch.random.fork_rng(devices=[]):  # torch's layers draw weights of their own, which are not kept
            self.levels = nn.ModuleList(
                nn.ModuleList(
                    _Step(self.event[0] * 4 ** (level + 1), width, blocks, bins, generator) for _ in range(count)
                )
                for level, count in enumerate(self.steps)
            )

    @property
    def config(self) -> Mapping[str, Any]:
        shape = {"event": list(self.event), "steps": list(self.steps)}
        return {**shape, "width": self.width, "blocks": self.blocks, "bins": self.bins}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        z, log_det = x.to(self._dtype), x.new_zeros(len(x), dtype=self._dtype)
        for level in self.levels:
            z = pixel_unshuffle(z, 2)
            for step in _steps(level):
                z, more = self.step(step, z)
                log_det = log_det + more
        return pixel_shuffle(z, 2 ** len(self.levels)), log_det

    def inverse(self, z: Tensor) -> Tensor:
        x = pixel_unshuffle(z.to(self._dtype), 2 ** len(self.levels))
        for level in reversed(self.levels):
            for step in reversed(_steps(level)):
                x = step.inverse(x)
            x = pixel_shuffle(x, 2)
        return x

    @torch.no_grad()
    def initialise(self, x: Tensor) -> None:
        """Scale the channels of every step to deviations of one on these images."""
        z = x.to(self._dtype)
        for level in self.levels:
            z = pixel_unshuffle(z, 2)
            for step in _steps(level):
                deviation, mean = torch.std_mean(z, dim=(0, 2, 3))
                step.shift.copy_(-mean)
                step.log_scale.copy_(-deviation.clamp_min(LEAST).log())
                z = step(z)[0]

    def compile_steps(self) -> None:
        """For training on a GPU."""
        self.step = _compiled_step()

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def _steps(level: nn.Module) -> list["_Step"]:
    return [step for step in level.children() if isinstance(step, _Step)]


class _Step(nn.Module):
    """Scale the channels, mix them, transform half of them by what the other half says."""

    permutation: Tensor

    def __init__(self, channels: int, width: int, blocks: int, bins: int, generator: torch.Generator):
        super().__init__()
        self.bins, self.kept = bins, channels // 2
        self.shift, self.log_scale = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))
        rotation = torch.linalg.qr(torch.randn(channels, channels, generator=generator))[0]
        permutation, lower, upper = torch.linalg.lu(rotation)
        self.register_buffer("permutation", permutation)
        self.lower, self.upper = nn.Parameter(lower.tril(-1)), nn.Parameter(upper.triu(1))
        self.register_buffer("sign", upper.diagonal().sign())
        self.log_diagonal = nn.Parameter(upper.diagonal().abs().log())
        self.net = _Reader(self.kept, (channels - self.kept) * Bend.numbers(bins), width, blocks, generator)

    def _mixing(self) -> Tensor:
        """P L U with ones on the diagonal of L."""
        eye = torch.eye(len(self.shift), device=self.shift.device, dtype=self.shift.dtype)
        upper = self.upper.triu(1) + torch.diag(self.sign * self.log_diagonal.exp())  # type: ignore[operator]
        with torch.autocast(eye.device.type, enabled=False):
            return self.permutation @ (self.lower.tril(-1) + eye) @ upper

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = x.shape[2] * x.shape[3]
        scaled = (x + self.shift[:, None, None]) * self.log_scale.exp()[:, None, None]
        mixed = _mixed(self._mixing(), scaled)
        kept, other = mixed[:, : self.kept], mixed[:, self.kept :]
        z, log_slope = self._read(kept)(other)
        log_det = log_slope.flatten(1).sum(1) + places * (self.log_scale + self.log_diagonal).sum()
        return torch.cat([kept, z], 1), log_det

    def inverse(self, z: Tensor) -> Tensor:
        kept, bent = z[:, : self.kept], z[:, self.kept :]
        mixed = torch.cat([kept, self._read(kept).inverse(bent)], 1)
        scaled = _mixed(torch.linalg.inv(self._mixing()), mixed)
        return scaled * (-self.log_scale).exp()[:, None, None] - self.shift[:, None, None]

    def _read(self, kept: Tensor) -> Bend:
        """Of each number of the other half."""
        n, _, height, width = kept.shape
        said = self.net(kept).to(kept.dtype).view(n, -1, Bend.numbers(self.bins), height, width)
        return Bend.of(said.movedim(2, -1), self.bins)


def _mixed(matrix: Tensor, x: Tensor) -> Tensor:
    """The channels of x by a matrix; in full precision also under autocast, so that the inverse stays one."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("ij,njhw->nihw", matrix, x)


class _Reader(nn.Module):
    """A residual network of 3x3 convolutions that begins at zero."""

    def __init__(self, before: int, after: int, width: int, blocks: int, generator: torch.Generator):
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)
            )
            for _ in range(blocks)
        )
        self.last = nn.Conv2d(width, after, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        for block in self.blocks:
            nn.init.zeros_(block[-1].weight)  # type: ignore[index]
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(silu(h))


@functools.cache
def _compiled_step() -> Callable[..., tuple[Tensor, Tensor]]:
    """A step, compiled once for all of one shape."""
    found: Callable[..., tuple[Tensor, Tensor]] = torch.compile(_Step.forward)
    return found
