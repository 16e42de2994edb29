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
from unnorm.noise.base import Noise
from unnorm.progress import Progress

__all__ = ["Stepwise"]

TOGETHER = 16  # rows that are looked at in one go: more do not fit into a cache, and take three times as long
CELLS = 8  # of equal width in each piece, from which samples are drawn
SLACK = 1e-5  # of a bound: black is not outside because of its rounding
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Stepwise(Tilted):
    """log p(z) = log q(z) + sum over k of [f_k(z_1..z_k) - log Z_k(z_1..z_{k-1})], q a standard normal.

    Z_k is the integral of e^f_k under z_k ~ N(0, 1), given what comes before: one dimension, by Gauss-Legendre
    quadrature on pieces where it is smooth (`Lookback.pieces`). So p integrates to one whatever the heads are, up to
    the error of the quadrature, which `error` measures, and samples need no chains.

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
        if not isinstance(nodes, int) or nodes < 1:
            raise InvalidValue(f"The 'nodes' of Stepwise must be a positive integer. Got {nodes}.")
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
        """Independent draws, coordinate by coordinate; uniform within cells an eighth as wide as a piece."""
        event = self.net.event
        like = next(self.net.parameters())
        z = torch.zeros(n, math.prod(event), dtype=like.dtype, device=like.device)
        with Progress(z.shape[1], enabled=progress, label="pixels") as bar:
            for place in range(z.shape[1]):
                z[:, place] = self._draw(self.net.context_at(z.view(n, *event), place), generator)
                bar.show(place + 1, {})
        return z.view(n, *event)

    def _tilt(self, x: Tensor) -> Tensor:
        context, z = self.net.context(x), x.flatten(1)
        low, high = self.net.bounds(context)
        inside = ((z >= low - SLACK * (1 + low.abs())) & (z <= high + SLACK * (1 + high.abs()))).all(1)
        value = (self.net.heads(context, z[None])[0] - self.log_zs(context)).sum(-1)
        return torch.where(inside, value, -torch.inf)

    def _draw(self, context: Context, generator: torch.Generator | None) -> Tensor:
        """The next coordinate of every row, (n,)."""
        ends = self.net.pieces(context)[..., 0]  # (E, n)
        share = torch.arange(CELLS, dtype=ends.dtype, device=ends.device).view(-1, 1, 1) / CELLS
        width = (ends[1:] - ends[:-1]) / CELLS
        left = (ends[:-1] + share * (ends[1:] - ends[:-1])).flatten(0, 1)  # (cells, n)
        width = width.expand(CELLS, -1, -1).flatten(0, 1)
        middle = left + width / 2
        log_p = self.net.heads(context, middle.unsqueeze(-1)).squeeze(-1) - middle.square() / 2
        log_p = torch.where(width > 0, log_p + width.clamp_min(torch.finfo(width.dtype).tiny).log(), -torch.inf)
        cell = torch.multinomial(torch.softmax(log_p, 0).mT, 1, generator=generator).mT
        within = torch.rand(cell.shape, generator=generator, dtype=ends.dtype, device=ends.device)
        return (left.gather(0, cell) + within * width.gather(0, cell))[0]
