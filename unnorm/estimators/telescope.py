"""Bridges: a ratio too large to learn at once, learned as a product of small ones between waymarks."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.estimators.base import Contrast, Contrastive, Estimator
from unnorm.estimators.meco import MECO
from unnorm.names import options_of
from unnorm.noise.base import Noise, own_generator
from unnorm.noise.gaussian import Gaussian
from unnorm.noise.stacked import StackedNoise
from unnorm.types import LogDensity, Objective, apart

__all__ = ["Telescope", "even_alphas", "waymarks"]

COUPLINGS = ("shared", "independent", "own")
CENTRE_DRAWS = 4096  # of a noise whose mean is not known; any point near it would do


def even_alphas(bridges: int) -> tuple[float, ...]:
    """Shares of noise from none to all, at even angles: alpha = sin(angle), and the data's share is its cosine.

    >>> even_alphas(2)
    (0.0, 0.7071067811865475, 1.0)
    """
    if not isinstance(bridges, int) or isinstance(bridges, bool) or bridges < 1:
        raise InvalidValue(f"The number of bridges must be a positive integer. Got {bridges}.")
    return (0.0, *(math.sin(math.pi / 2 * k / bridges) for k in range(1, bridges)), 1.0)


def waymarks(x: Tensor, z: Tensor, alphas: Tensor, centre: Tensor, lead: int = 0) -> Tensor:
    """sqrt(1 - alpha^2) x + alpha z around `centre`, for each alpha: (K + 1, n, *event), from data to noise.

    Every waymark is made of the same pairs (x, z): what these have by chance moves neighbours together. With `lead`
    axes before the points' axis the waymarks come after these, as draws for each waymark in `z` do.

    >>> waymarks(torch.ones(1, 1), torch.zeros(1, 1), torch.tensor([0.0, 0.6, 1.0]), torch.zeros(1)).flatten()
    tensor([1.0000, 0.8000, 0.0000])
    """
    alpha, x = alphas.view(-1, *[1] * (x.ndim - lead)), x.unsqueeze(lead)
    kept = (1 - alpha.square()).sqrt()
    return kept * x + alpha * z + (1 - kept - alpha) * centre  # at the ends x and z to the last bit


class Telescope(Estimator):
    """Bridges from the noise to the data (telescoping ratio estimation, Rhodes, Xu, Gutmann 2020).

    Between data (alpha = 0) and noise (alpha = 1) lie the waymarks z_k = sqrt(1 - alpha_k^2) x + alpha_k z. Head k of a
    `Bridged` model learns log p_k / p_{k+1} of the neighbours by the base estimator, each a small step that draws of
    its own can certify, and log p~ = log q + sum of the heads. One forward pass over all waymarks of a batch.

    Waymarks are straight in the units of the noise: where it has coordinates of its own (`Noise.coordinates`), train
    there, and let `Density` carry the transform.

    Args:
        noise: q.
        bridges: how many, or the alphas from 0 to 1 (see `unnorm.bridges.pilot`, which chooses them).
        base: MECO (the default), NCE (as published), ENCE or SNL: what learns each ratio.
        coupling: "shared" noise draws for all waymarks, "independent" ones for each waymark, or each bridge's "own",
            of which both of its waymarks are made: 2 K n points a step instead of (K + 1) n. Networks learn faster of
            the first; parameters that add up over the bridges add up its chance too (`results/gaussian-mean`).
        shape: of independent problems solved side by side, see `Estimator`.
        options: of the base. MECO is `centred` unless told otherwise: heads know nothing of their constants.

    `info` has `value` (the negative log-likelihood that the tracked or learned log Z of all bridges claim together),
    `gap` (the largest KL between neighbours), `lag` and `ess` (the worst bridge's), and sums over the bridges of what
    else the base reports.

    >>> from unnorm import MLP, Bridged, Gaussian
    >>> q = Gaussian(2)
    >>> model, estimator = Bridged(q, MLP(2, hidden=(8,), outputs=4)), Telescope(q, 4)
    >>> objective = estimator(model, torch.zeros(6, 2), generator=torch.Generator().manual_seed(0))
    >>> sorted(objective.info), estimator.base.log_u.shape
    (['ess', 'gap', 'lag', 'log_u', 'value'], torch.Size([4]))
    """

    alphas: Tensor
    centre: Tensor

    def __init__(
        self,
        noise: Noise,
        bridges: int | Sequence[float] = 8,
        base: type[Contrastive] = MECO,
        *,
        coupling: str = "shared",
        shape: tuple[int, ...] = (),
        **options: Any,
    ):
        super().__init__()
        self.shape = shape
        alphas = even_alphas(bridges) if isinstance(bridges, int) else _checked(bridges)
        if not (isinstance(base, type) and issubclass(base, Contrastive)):
            raise InvalidValue(f"The base of a Telescope is MECO, NCE, ENCE or SNL. Got {base}.")
        if coupling not in COUPLINGS:
            raise InvalidValue(f"The coupling of a Telescope is one of {', '.join(COUPLINGS)}. Got {coupling!r}.")
        if issubclass(base, MECO):
            options.setdefault("centred", True)
        self.noise, self.coupling = noise, coupling
        with options_of(f"base {base.__name__} of a Telescope"):
            self.base = base(noise, shape=(*shape, len(alphas) - 1), **options)
        self.register_buffer("alphas", torch.tensor(alphas))
        self.register_buffer("centre", _centre(noise))

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        alphas = " ".join(f"{alpha:.6g}" for alpha in self.alphas.tolist())
        return {
            **self.base.settings,
            "base": type(self.base).__name__,
            **super().settings,
            "alphas": alphas,
            "coupling": self.coupling,
        }

    @property
    def effective_draws(self) -> float:
        return self.base.effective_draws

    @property
    def parts(self) -> int:
        return len(self.alphas) - 1

    def set_gamma(self, gamma: float | Tensor | None) -> None:
        self.base.set_gamma(gamma)

    def draws(self, batch: int) -> int:
        return max(batch, self.base.draws(batch))

    def gaps(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The estimated KL of each waymark against the next, (K,)."""
        return self._compare(model, x, generator)[0].info["gap"]

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        each, log_ratio, x = self._compare(model, x, generator)
        return of_all_bridges(each, log_ratio + apart(self.noise.log_prob(x), self.shape))

    def _compare(
        self, model: LogDensity, x: Tensor, generator: torch.Generator | None
    ) -> tuple[Objective, Tensor, Tensor]:
        """The base's objective for each bridge; the claimed log p/q at the data; and these data, each row as often as
        there are draws for it."""
        n, lead, n_bridges = len(x) // math.prod(self.shape), len(self.shape), len(self.alphas) - 1
        pairs = self.draws(n)
        if pairs > n:
            repeated = torch.arange(pairs, device=x.device) % n
            x = apart(x, self.shape).index_select(lead, repeated).flatten(0, lead)
        points = self._points(x, generator)
        heads = self._heads(model, points.flatten(0, -x.ndim), n_bridges).view(
            *points.shape[: -x.ndim], pairs, n_bridges
        )
        own = self.coupling == "own"
        before, after = heads.unbind(lead) if own else (heads[..., :-1, :, :], heads[..., 1:, :, :])
        at_data = before.diagonal(dim1=-3, dim2=-1).mT  # head k at waymark k: (*shape, K, n)
        at_noise = after.diagonal(dim1=-3, dim2=-1).mT  # and at the next one
        each = self.base.compare(Contrast(at_data, torch.zeros_like(at_data), at_noise))
        with torch.no_grad():
            log_ratio = before[..., 0, :, :].sum(-1) - claimed(each, at_data).sum(-1, keepdim=True)
        return each, log_ratio, x

    def _points(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """The waymarks (*shape, K + 1, n, *event).

        Of own pairs those before and after each bridge, (*shape, 2, K, n, *event).
        """
        k, lead = len(self.alphas) - 1, len(self.shape)
        times = {"shared": 1, "independent": k + 1, "own": k}[self.coupling]
        z = self.noise.sample(times * len(x), generator=generator).to(x.dtype)
        if x.shape[1:] != z.shape[1:]:
            raise InvalidValue(f"The data have events of shape {tuple(x.shape[1:])}, the noise {tuple(z.shape[1:])}.")
        alphas, centre = self.alphas.to(x.dtype), self.centre.to(x.dtype)
        x = apart(x, self.shape)
        z = z.view(*self.shape, times, *x.shape[lead:])
        centre = centre.view(*centre.shape[: centre.ndim - x.ndim + lead + 1], 1, 1, *x.shape[lead + 1 :])
        if self.coupling != "own":
            return waymarks(x, z, alphas, centre, lead)
        return torch.stack([waymarks(x, z, part, centre, lead) for part in (alphas[:-1], alphas[1:])], lead)

    @staticmethod
    def _heads(model: LogDensity, points: Tensor, n_bridges: int) -> Tensor:
        try:
            heads = model(points, heads=True)  # type: ignore[call-arg]
        except TypeError as problem:
            if "heads" not in str(problem):
                raise
            raise InvalidValue("A Telescope trains a model with a head for each bridge: Bridged(noise, net).") from None
        if heads.shape != (len(points), n_bridges):
            raise InvalidValue(
                f"{n_bridges} bridges need as many heads: the network of Bridged must map {tuple(points.shape)} to "
                f"{(len(points), n_bridges)}. Got {tuple(heads.shape)}."
            )
        return heads


def of_all_bridges(each: Objective, log_p: Tensor) -> Objective:
    """One objective of those of all bridges, (..., K), and the data's log density that they claim together, (..., n).

    Sums, but of `gap` and `lag` the largest and of `ess` the least.
    """
    info = {name: number.sum(-1) for name, number in each.info.items()}
    info["value"] = -log_p.detach().mean(-1)
    info |= {name: each.info[name].amax(-1) for name in ("gap", "lag") if name in info}
    info["ess"] = each.info["ess"].amin(-1)
    return Objective(each.surrogate.sum(-1), info)


def claimed(each: Objective, at_data: Tensor) -> Tensor:
    """log Z of every bridge, (..., K): a bridge's value is its log Z less its mean at its data, (..., K, n)."""
    return each.info["value"] + at_data.detach().mean(-1)


def _checked(alphas: Sequence[float]) -> tuple[float, ...]:
    try:
        found = tuple(float(alpha) for alpha in alphas)
    except (TypeError, ValueError):
        raise InvalidValue(f"The bridges of a Telescope are a number, or alphas from 0 to 1. Got {alphas!r}.") from None
    if len(found) < 2 or found[0] != 0 or found[-1] != 1 or not all(a < b for a, b in pairwise(found)):
        raise InvalidValue(f"The alphas of a Telescope increase from 0 to 1. Got {found}.")
    return found


def _centre(noise: Noise) -> Tensor:
    """A point in the middle of the noise, about which data and noise are mixed; of noises side by side, one each."""
    if isinstance(noise, StackedNoise):
        return torch.stack([_centre(each) for each in noise.each])
    if isinstance(noise, Gaussian):
        return noise.loc.clone().view(noise.event)
    return noise.sample(CENTRE_DRAWS, generator=own_generator(noise)).mean(0)
