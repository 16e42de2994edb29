"""A noise tilted one coordinate at a time: a normalised density, because each step's integral has one dimension."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.models.lookback import Context, Lookback
from unnorm.models.tilted import Tilted
from unnorm.noise.base import Noise, event_of
from unnorm.noise.steps import Steps
from unnorm.progress import Progress
from unnorm.types import check_whole

__all__ = ["Heads", "Stepwise"]

TOGETHER = 12_544  # pixels that are looked at in one go: more do not fit into a cache, and take three times as long
CELLS = 8  # of equal width in each piece, from which samples are drawn
DRAWN = 500  # rows that are drawn together
FLAT = 1e-4  # change of log p across a cell that does not bend a draw
SLACK = 1e-5  # of a bound: black is not outside because of its rounding
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Heads(NamedTuple):
    """What a `StepwiseTelescope` compares.

    Attributes:
        at_data: f_k there, (n, P).
        at_noise: f_k with each coordinate in turn replaced by a draw of the noise, (m, n, P).
        log_q: of the data, (n,).
    """

    at_data: Tensor
    at_noise: Tensor
    log_q: Tensor


class Stepwise(Tilted):
    """log p(y) = log q(y) + sum over k of [f_k(y_1..y_k) - log Z_k(y_1..y_{k-1})], q a noise of `Steps`.

    Z_k is the expectation of e^f_k under q(y_k | y_1..y_{k-1}): one dimension, that of the standard normal number z_k
    that q makes y_k of, by Gauss-Legendre quadrature on pieces (`Lookback.pieces`). So p integrates to one whatever the
    heads are, up to the error of the quadrature, which `error` estimates and `weighted` draws check, and samples need
    no chains. Mass much narrower than a piece over `nodes` can hide from it.

    Args:
        noise: q, which goes one coordinate after the other: a Gaussian, one pushed through a triangular affine map, or
            a standard normal pushed through an `Autoregression`.
        net: the heads.
        nodes: points of the quadrature in each piece.

    >>> from unnorm import Gaussian
    >>> q = Gaussian((1, 2, 2), "diagonal")
    >>> model = Stepwise(q, Lookback((1, 2, 2), width=8, blocks=1, features=4))
    >>> y = q.sample(3)
    >>> torch.allclose(model(y), q.log_prob(y), atol=1e-5)           # heads begin at zero: the noise itself
    True
    >>> model.sample(5, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([5, 1, 2, 2])
    """

    net: Lookback

    def __init__(self, noise: Noise, net: Lookback, nodes: int = 6):
        super().__init__(noise, net)
        if not isinstance(net, Lookback):
            raise InvalidValue(f"The 'net' of Stepwise must be a Lookback. Got {type(net).__name__}.")
        check_whole("Stepwise", 1, nodes=nodes)
        if event_of(noise) != net.event:
            raise InvalidValue(f"The net of Stepwise is of events {net.event}, the noise of {event_of(noise)}.")
        self.nodes, self.steps = nodes, Steps(noise)

    @property
    def config(self) -> Mapping[str, Any]:
        return {**super().config, "nodes": self.nodes}

    def forward(self, x: Tensor, draws: Tensor | None = None) -> Tensor | Heads:  # type: ignore[override]
        """log p; or with draws (m, n, P), standard normal, of each coordinate given those before it, all `Heads`.

        Where no coordinate can be, a head is minus infinity.
        """
        if draws is None:
            return self._in_parts(x, with_noise=True)
        context = self.context(x)
        low, high = self.net.bounds(context)
        z, log_slope = context.step(x.flatten(1))
        each = self.net.heads(context, torch.cat([z[None], draws]))
        at_noise = torch.where((draws >= low) & (draws <= high), each[1:], -torch.inf)
        return Heads(each[0], at_noise, log_normal(z, log_slope))

    def context(self, x: Tensor) -> Context:
        """What is known of every coordinate from those before it."""
        return self.net.context(x, self.steps.all(x))

    def tilt(self, x: Tensor) -> Tensor:
        return self._in_parts(x, with_noise=False)

    def log_zs(self, context: Context, nodes: int | None = None) -> Tensor:
        """log Z_k of the coordinates of a context, (n, P)."""
        points, weights = np.polynomial.legendre.leggauss(nodes or self.nodes)
        ends = self.net.pieces(context)
        like = {"dtype": ends.dtype, "device": ends.device}
        at = torch.tensor(points, **like).view(-1, 1, 1)  # type: ignore[arg-type]
        log_weight = torch.tensor(np.log(weights), **like).view(-1, 1, 1)  # type: ignore[arg-type]
        total = torch.full_like(ends[0], -torch.inf)
        for low, high in pairwise(ends):
            half = (high - low) / 2
            z = (low + high) / 2 + half * at
            log_p = self.net.heads(context, z) - z.square() / 2 - HALF_LOG_2PI + log_weight
            some = torch.logsumexp(log_p, 0) + half.clamp_min(torch.finfo(half.dtype).tiny).log()
            total = torch.logaddexp(total, torch.where(half > 0, some, -torch.inf))
        return total

    @torch.no_grad()
    def error(self, x: Tensor, nodes: int | None = None) -> Tensor:
        """How much log p at x changes with twice as many nodes, (n,): what the quadrature does not know."""
        nodes, found = nodes or self.nodes, []
        for part in self._parts(x):
            context = self.context(part)
            found.append((self.log_zs(context, nodes) - self.log_zs(context, 2 * nodes)).sum(-1))
        return torch.cat(found)

    @torch.no_grad()
    def sample(self, n: int, *, generator: torch.Generator | None = None, progress: bool | None = False) -> Tensor:
        """Independent draws, one coordinate after the other; log p is taken as straight in an eighth of a piece."""
        return self._sampled(n, generator, progress)[0]

    @torch.no_grad()
    def weighted(
        self, n: int, *, generator: torch.Generator | None = None, progress: bool | None = False
    ) -> tuple[Tensor, Tensor]:
        """Draws of `sample` and log w = log p - log r, (n,), r the density they were drawn from, which has no error.

        So E[w] is the integral of p, quadrature and all, and the spread of log w says how far draws are from p's.
        """
        y, log_r = self._sampled(n, generator, progress)
        return y, (self(y) - log_r).double()

    def _sampled(self, n: int, generator: torch.Generator | None, progress: bool | None) -> tuple[Tensor, Tensor]:
        """Draws, and the log of the density they were drawn from."""
        if n < 1:
            raise InvalidValue(f"The number of draws must be at least 1. Got {n}.")
        event, like = self.net.event, next(self.net.parameters())
        size, drawn = math.prod(event), list[Tensor]()
        log_r = torch.zeros(n, dtype=torch.float64, device=like.device)
        with Progress(size * math.ceil(n / DRAWN), enabled=progress, label="pixels") as bar:
            for first in range(0, n, DRAWN):
                y = torch.zeros(min(DRAWN, n - first), size, dtype=like.dtype, device=like.device)
                for place in range(size):
                    so_far = y.view(-1, *event)
                    step = self.steps.at(so_far, place)
                    z, more = self._draw(self.net.context_at(so_far, step, place), generator)
                    y[:, place : place + 1] = step.inverse(z)
                    log_r[first : first + DRAWN] += (more + step(y[:, place : place + 1])[1])[:, 0]
                    bar.show(size * len(drawn) + place + 1, {})
                drawn.append(y)
        return torch.cat(drawn).view(n, *event), log_r

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(max(1, TOGETHER // math.prod(self.net.event)))

    def _in_parts(self, x: Tensor, with_noise: bool) -> Tensor:
        return torch.cat([self._value(part, with_noise) for part in self._parts(x)]) if len(x) else x.flatten(1).sum(1)

    def _value(self, x: Tensor, with_noise: bool) -> Tensor:
        """log p - log q, or with the noise log p, by one and the same step."""
        context = self.context(x)
        z, log_slope = context.step(x.flatten(1))
        low, high = self.net.bounds(context)
        inside = ((z >= low - SLACK * (1 + low.abs())) & (z <= high + SLACK * (1 + high.abs()))).all(1)
        value = (self.net.heads(context, z[None])[0] - self.log_zs(context)).sum(-1)
        if with_noise:
            value = value + log_normal(z, log_slope)
        return torch.where(inside, value, -torch.inf)

    def _draw(self, context: Context, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The next coordinate's z of every row, (n, 1), and the log of the density it was drawn from."""
        ends = self.net.pieces(context)[..., 0]  # (E, n)
        share = torch.arange(CELLS, dtype=ends.dtype, device=ends.device).view(-1, 1) / CELLS
        inner = (ends[:-1, None] + share * ends.diff(dim=0)[:, None]).flatten(0, 1)
        edges = torch.cat([inner, ends[-1:]])  # (cells + 1, n)
        log_p = self.net.heads(context, edges.unsqueeze(-1)).squeeze(-1) - edges.square() / 2
        z, log_r = drawn_from(edges, log_p, generator)
        return z.unsqueeze(-1), log_r.unsqueeze(-1)


def log_normal(z: Tensor, log_slope: Tensor) -> Tensor:
    """Of coordinates that are standard normal numbers z by such slopes, (n,)."""
    return (log_slope - z.square() / 2 - HALF_LOG_2PI).sum(-1)


def drawn_from(edges: Tensor, log_p: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """One draw for each column from a density whose log is straight between edges (cells + 1, n) in order, and its log.

    >>> edges = torch.tensor([0.0, 1.0, 3.0]).unsqueeze(-1).expand(-1, 10_000)
    >>> falling, log_r = drawn_from(edges, -2 * edges, torch.Generator().manual_seed(0))
    >>> round(float(falling.mean()), 2)                              # of an exponential of rate 2, cut off at 3
    0.49
    >>> torch.allclose(log_r, math.log(2) - 2 * falling - math.log(1 - math.exp(-6)), atol=1e-4)
    True
    """
    width, rise = edges.diff(dim=0), log_p.diff(dim=0)
    steep = rise.abs().clamp_min(FLAT)
    log_mean = torch.maximum(log_p[:-1], log_p[1:]) + torch.log(-torch.expm1(-steep) / steep)
    mass = torch.where(width > 0, log_mean + width.clamp_min(torch.finfo(width.dtype).tiny).log(), -torch.inf)
    cell = torch.multinomial(torch.softmax(mass, 0).mT, 1, generator=generator).mT
    share = torch.rand(cell.shape, generator=generator, dtype=edges.dtype, device=edges.device)
    steep, rise = steep.gather(0, cell), rise.gather(0, cell)
    fallen = -torch.log1p(share * torch.expm1(-steep)) / steep  # from the higher end
    within = torch.where(rise > 0, 1 - fallen, fallen).clamp(0, 1)
    log_r = torch.maximum(log_p.gather(0, cell), log_p.gather(0, cell + 1)) - steep * fallen
    log_r = log_r - torch.logsumexp(mass, 0)
    return (edges.gather(0, cell) + within * width.gather(0, cell))[0], log_r[0]
