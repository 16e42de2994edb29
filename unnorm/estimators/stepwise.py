"""Bridges of one coordinate each: waymarks whose first coordinates are the data's and whose others are the noise's."""

import math
from typing import Any

import torch
from torch import Tensor

from unnorm.errors import InvalidValue
from unnorm.estimators.base import Contrast, Contrastive, Estimator, check_at_least
from unnorm.estimators.meco import MECO
from unnorm.estimators.nce import ENCE, NCE
from unnorm.estimators.telescope import claimed, of_all_bridges
from unnorm.models.stepwise import Heads, Stepwise
from unnorm.names import options_of
from unnorm.noise.base import Noise, event_of
from unnorm.types import LogDensity, Objective, log_density

__all__ = ["StepwiseTelescope"]

UNSURE = 16  # rows that tell the error of a quadrature


class StepwiseTelescope(Estimator):
    """A telescope that replaces the noise by the data one coordinate at a time (dimension-wise mixing of TRE).

    Waymark k has the first k coordinates of the data and the others of the noise. Neighbours differ in one coordinate:
    log p_k / p_{k-1} = log p(z_k | z_1..z_{k-1}) - log N(z_k) is a small number and a function of z_1..z_k alone, so
    head k of a `Lookback` can learn it by the base estimator, from clean data and a draw for one coordinate. There are
    as many bridges as coordinates, and a step costs one pass over the data.

    The base knows one log Z for each bridge, and `value` is what these claim. A `Stepwise` model has one for each
    bridge and each context, by quadrature: in eval mode, where iterates are compared, `value` is the model's own
    negative log-likelihood, plus what its quadrature does not know, so that hiding mass from it gains nothing. There
    are no draws whose weights could mislead.

    Args:
        noise: q, the model's, whose own steps the draws go through.
        base: MECO (the default), NCE, ENCE or SNL: what learns each ratio.
        draws: of the noise for each data point and coordinate.
        options: of the base. MECO is `centred` unless told otherwise: heads know nothing of their constants.

    `info` as of `Telescope`; in eval mode `value` alone.

    >>> from unnorm import Gaussian
    >>> from unnorm.models import Lookback, Stepwise
    >>> q = Gaussian((1, 2, 2), "diagonal")
    >>> model, estimator = Stepwise(q, Lookback((1, 2, 2), width=4, blocks=1, features=4)), StepwiseTelescope(q)
    >>> objective = estimator(model, q.sample(6), generator=torch.Generator().manual_seed(0))
    >>> sorted(objective.info), estimator.base.log_u.shape
    (['ess', 'gap', 'lag', 'log_u', 'value'], torch.Size([4]))
    """

    def __init__(self, noise: Noise, base: type[Contrastive] = MECO, *, draws: int = 8, **options: Any):
        super().__init__()
        if not (isinstance(base, type) and issubclass(base, Contrastive)):
            raise InvalidValue(f"The base of a StepwiseTelescope is MECO, NCE, ENCE or SNL. Got {base}.")
        check_at_least("StepwiseTelescope", "draws", draws, 1)
        if issubclass(base, MECO):
            options.setdefault("centred", True)
        self.noise, self.n_draws = noise, draws
        if taken := [name for name in ("n_noise", "nu") if name in options]:
            raise InvalidValue(
                f"A StepwiseTelescope takes 'draws' for each data point and coordinate, no '{taken[0]}' of its base."
            )
        if issubclass(base, NCE | ENCE):
            options["nu"] = draws
        size = math.prod(event_of(noise))
        with options_of(f"base {base.__name__} of a StepwiseTelescope"):
            self.base = base(noise, shape=(size,), **options)

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        own = {"base": type(self.base).__name__, **super().settings, "draws": self.n_draws}
        return {**self.base.settings, **own}

    @property
    def effective_draws(self) -> float:
        return self.base.effective_draws

    @property
    def parts(self) -> int:
        return int(self.base.shape[0])

    def set_gamma(self, gamma: float | Tensor | None) -> None:
        self.base.set_gamma(gamma)

    def draws(self, batch: int) -> int:
        return self.n_draws * batch

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        if x.shape[1:] != event_of(self.noise):
            raise InvalidValue(f"The data have events of shape {tuple(x.shape[1:])}, the noise {event_of(self.noise)}.")
        if not self.training:
            nll = -log_density(model, x).mean()
            unsure = model.error(x[:UNSURE]).abs().mean() if isinstance(model, Stepwise) else 0.0
            return Objective(nll, {"value": nll.detach() + unsure})
        draws = torch.randn(
            self.n_draws, len(x), x[0].numel(), dtype=x.dtype, device=x.device, generator=generator
        )  # each coordinate's, given those before it: the noise's steps begin at standard normal numbers
        try:
            heads: Any = model(x, draws=draws)  # type: ignore[call-arg]
        except TypeError as problem:
            if "draws" not in str(problem):
                raise
            raise InvalidValue("A StepwiseTelescope trains a Stepwise model: Stepwise(noise, Lookback(...)).") from None
        if not isinstance(heads, Heads):
            raise InvalidValue(
                f"With draws a Stepwise model must map {tuple(x.shape)} to Heads of {tuple(draws.shape)}. Got "
                f"{type(heads).__name__} {tuple(getattr(heads, 'shape', ()))}."
            )
        at_data, log_w = heads.at_data.mT, heads.at_noise.flatten(0, 1).mT  # (K, n) and (K, n_draws n)
        found = self.base.compare(Contrast(at_data, torch.zeros_like(at_data), log_w))
        log_ratio = at_data.detach().sum(0) - claimed(found, at_data).sum()
        return of_all_bridges(found, log_ratio + heads.log_q.detach())
