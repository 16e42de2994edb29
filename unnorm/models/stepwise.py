"""A noise tilted one coordinate at a time: a normalised density, because each step's integral has one dimension."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.models.lookback import Context, Lookback
from unnorm.models.tilted import Tilted
from unnorm.noise.base import Noise, event_of
from unnorm.progress import Progress
from unnorm.types import check_whole

__all__ = ["Stepwise"]

TOGETHER = 16  # rows that are looked at in one go: more do not fit into a cache, and take three times as long
CELLS = 8  # of equal width in each piece, from which samples are drawn
DRAWN = 500  # rows that are drawn together
FLAT = 1e-4  # change of log p across a cell that does not bend a draw
SLACK = 1e-5  # of a bound: black is not outside because of its rounding
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Stepwise(Tilted):
    """log p(z) = log q(z) + sum over k of [f_k(z_1..z_k) - log Z_k(z_1..z_{k-1})], q a standard normal.

    Z_k is the integral of e^f_k under z_k ~ N(0, 1), given what comes before: one dimension, by Gauss-Legendre
    quadrature on pieces where it is smooth (`Lookback.pieces`). So p integrates to one whatever the heads are, up to
    the error of the quadrature, which `error` estimates, and samples need no chains. Mass much narrower than a piece
    over `nodes` can hide from it.

    Args:
        noise: q, a standard normal: go to a noise's own coordinates first.
        net: the heads.
        nodes: points of the quadrature in each piece.

    >>> from unnorm import Gaussian
    >>> q = Gaussian((1, 2, 2), "diagonal")
    >>> model = Stepwise(q, Lookback((1, 2, 2), width=8, blocks=1, features=4))
    >>> z = q.sample(3)
    >>> torch.allclose(model(z), q.log_prob(z), atol=1e-5)           # heads begin at zero: the noise itself
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
        if not _is_standard(noise, net.event):
            raise InvalidValue(
                "The 'noise' of Stepwise must be a standard normal. Go to a noise's own coordinates first: "
                "Noise.coordinates()."
            )
        self.nodes = nodes

    @property
    def config(self) -> Mapping[str, Any]:
        return {**super().config, "nodes": self.nodes}

    def forward(self, x: Tensor, candidates: Tensor | None = None) -> Tensor:
        """log p; or f_k at x and, with each coordinate in turn replaced by a candidate (m, n, d), there: (1 + m, n, d).

        Where no coordinate can be, a head is minus infinity.
        """
        if candidates is None:
            return super().forward(x)
        context = self.net.context(x)
        low, high = self.net.bounds(context)
        each = self.net.heads(context, torch.cat([x.flatten(1)[None], candidates]))
        inside = (candidates >= low) & (candidates <= high)
        return torch.cat([each[:1], torch.where(inside, each[1:], -torch.inf)])

    def tilt(self, x: Tensor) -> Tensor:
        return torch.cat([self._tilt(part) for part in x.split(TOGETHER)]) if len(x) else x.flatten(1).sum(1)

    def log_zs(self, context: Context, nodes: int | None = None) -> Tensor:
        """log Z_k of the coordinates of a context, (n, P)."""
        points, weights = np.polynomial.legendre.leggauss(nodes or self.nodes)
        ends = self.net.pieces(context)
        like = {"dtype": ends.dtype, "device": ends.device}
        at = torch.tensor(points, **like).view(-1, 1, 1)  # type: ignore[arg-type]
        log_weight = torch.tensor(np.log(weights), **like).view(-1, 1, 1)  # type: ignore[arg-type]
        total = torch.full_like(context.mean, -torch.inf)
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
        for part in x.split(TOGETHER):
            context = self.net.context(part)
            found.append((self.log_zs(context, nodes) - self.log_zs(context, 2 * nodes)).sum(-1))
        return torch.cat(found)

    @torch.no_grad()
    def sample(self, n: int, *, generator: torch.Generator | None = None, progress: bool | None = False) -> Tensor:
        """Independent draws, one coordinate after the other; log p is taken as straight in an eighth of a piece."""
        event, like = self.net.event, next(self.net.parameters())
        size, drawn = math.prod(event), list[Tensor]()
        with Progress(size * math.ceil(n / DRAWN), enabled=progress, label="pixels") as bar:
            for first in range(0, n, DRAWN):
                z = torch.zeros(min(DRAWN, n - first), size, dtype=like.dtype, device=like.device)
                for place in range(size):
                    z[:, place] = self._draw(self.net.context_at(z.view(-1, *event), place), generator)
                    bar.show(size * len(drawn) + place + 1, {})
                drawn.append(z)
        return torch.cat(drawn).view(n, *event)

    def _tilt(self, x: Tensor) -> Tensor:
        context, z = self.net.context(x), x.flatten(1)
        low, high = self.net.bounds(context)
        inside = ((z >= low - SLACK * (1 + low.abs())) & (z <= high + SLACK * (1 + high.abs()))).all(1)
        value = (self.net.heads(context, z[None])[0] - self.log_zs(context)).sum(-1)
        return torch.where(inside, value, -torch.inf)

    def _draw(self, context: Context, generator: torch.Generator | None) -> Tensor:
        """The next coordinate of every row, (n,)."""
        ends = self.net.pieces(context)[..., 0]  # (E, n)
        share = torch.arange(CELLS, dtype=ends.dtype, device=ends.device).view(-1, 1) / CELLS
        inner = (ends[:-1, None] + share * ends.diff(dim=0)[:, None]).flatten(0, 1)
        edges = torch.cat([inner, ends[-1:]])  # (cells + 1, n)
        log_p = self.net.heads(context, edges.unsqueeze(-1)).squeeze(-1) - edges.square() / 2
        return drawn_from(edges, log_p, generator)


def drawn_from(edges: Tensor, log_p: Tensor, generator: torch.Generator | None) -> Tensor:
    """One draw for each column from a density whose log is straight between edges (cells + 1, n) in order.

    >>> edges = torch.tensor([0.0, 1.0, 3.0]).unsqueeze(-1).expand(-1, 10_000)
    >>> falling = drawn_from(edges, -2 * edges, torch.Generator().manual_seed(0))
    >>> round(float(falling.mean()), 2)                              # of an exponential of rate 2, cut off at 3
    0.49
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
    return (edges.gather(0, cell) + within * width.gather(0, cell))[0]


def _is_standard(noise: Noise, event: tuple[int, ...]) -> bool:
    """By its density at some points; a module of shapes only is filled later."""
    like = next(noise.buffers(), None)
    if like is not None and like.is_meta:
        return True
    size = math.prod(event)
    points = torch.stack([torch.zeros(size), torch.linspace(-2, 2, size), torch.linspace(1, -3, size)])
    points = points if like is None else points.to(like)
    expected = -points.square().sum(1) / 2 - size * HALF_LOG_2PI
    found = noise.log_prob(points.view(-1, *event)).to(expected)
    return bool(torch.allclose(found, expected, rtol=1e-4, atol=1e-3))
