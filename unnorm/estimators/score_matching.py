"""Score matching: fit the gradient of log p~ in x, which knows nothing of Z.

All three differentiate the score once more for the parameters, always in full precision. `torch.compile` cannot
differentiate a compiled model twice, so that these refuse one.
"""

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.estimators.base import Estimator, check_at_least, distributed
from unnorm.samplers.base import relative_score, spread, unwrapped
from unnorm.streams import integers, normal
from unnorm.types import LogDensity, Objective, apart, log_density

__all__ = [
    "PIECEWISE_LINEAR",
    "DenoisingScoreMatching",
    "ScoreMatching",
    "SlicedScoreMatching",
    "denoising_loss",
    "score_matching_loss",
]


def score_matching_loss(score: Tensor, curvature: Tensor) -> Tensor:
    """E[|s|^2 / 2 + tr(ds/dx)], which is Fisher's divergence up to a constant of the data (Hyvarinen 2005).

    Args:
        score: (..., n, d).
        curvature: the trace of the Jacobian of s, or an unbiased estimate of it, (..., n).

    >>> score_matching_loss(torch.ones(3, 5, 2), -torch.ones(3, 5))
    tensor([0., 0., 0.])
    """
    return (score.square().sum(-1) / 2 + curvature).mean(-1)


def denoising_loss(score: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """E|sigma s(x + sigma xi) + xi|^2 / 2: the score at a noisy point should lead back (Vincent 2011).

    Args:
        score: at the noisy points, (..., n, d).
        noise: xi, (..., n, d).
        sigma: the noise's standard deviation.

    >>> denoising_loss(-torch.ones(5, 2), torch.ones(5, 2), sigma=1.0)
    tensor(0.)
    """
    return (sigma * score + noise).square().sum(-1).mean(-1) / 2


def _differentiable_score(model: LogDensity, x: Tensor) -> tuple[Tensor, Tensor]:
    """x as a leaf, (n, *event), and the score there with its graph, (n, d)."""
    if isinstance(model, nn.Module) and any(hasattr(part, "_orig_mod") for part in model.modules()):
        raise InvalidValue(
            "Score matching differentiates the model twice, which torch.compile cannot: give the model uncompiled."
        )
    if not distributed():  # there the wrapper must see the pass, to average the gradients
        model = unwrapped(model)
    x = x.detach().clone().requires_grad_()
    log_p = log_density(model, x)
    if not log_p.requires_grad:
        raise InvalidValue("The model's log density does not depend on x: it has no score.")
    (score,) = torch.autograd.grad(log_p.sum(), x, create_graph=True)
    return x, score.flatten(1)


def _derivative(along: Tensor, x: Tensor) -> Tensor:
    """The gradient of the sum of `along` in x, flat; zero where `along` is constant."""
    found = None
    if along.requires_grad:
        (found,) = torch.autograd.grad(along.sum(), x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x).flatten(1) if found is None else found.flatten(1)


PIECEWISE_LINEAR = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.PReLU, nn.Hardtanh, nn.Hardswish, nn.Threshold)


def _check_curved(model: LogDensity, curvature: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse what has no second derivative, also where another part of the model, such as Tilted's noise, has one.

    Of problems side by side only the parts are looked at: a GPU would have to wait for the numbers.
    """
    parts = getattr(model, "modules_of_one", model.modules)() if isinstance(model, nn.Module) else ()
    flat = any(isinstance(part, PIECEWISE_LINEAR) for part in parts)
    if flat or not (shape or curvature.any()):
        raise InvalidValue(
            "The model's score does not change with x: score matching needs second derivatives, "
            "which a piecewise linear network (relu) has not. Use a smooth activation such as silu."
        )


def _objective(loss: Tensor, score: Tensor, x: Tensor, shape: tuple[int, ...]) -> Objective:
    size = relative_score(score, spread(x, shape), shape)
    return Objective(loss, {"value": loss.detach(), "score": size})


class ScoreMatching(Estimator):
    """Exact score matching (Hyvarinen 2005): E[|s|^2 / 2 + tr(ds/dx)], the trace by one backward pass per coordinate.

    For few dimensions; `SlicedScoreMatching` costs one backward pass in any. The model must be smooth.

    Args:
        shape: of independent problems solved side by side, see `Estimator`.

    `info` has `value`, the loss, and `score`, the size of the score in units of 1 / the data's spread.

    >>> from unnorm import Quadratic
    >>> ScoreMatching()(Quadratic(3), torch.ones(8, 3)).info["value"]           # 3/2 - 3
    tensor(-1.5000)
    """

    def __init__(self, *, shape: tuple[int, ...] = ()):
        super().__init__()
        self.shape = shape

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        with torch.enable_grad():
            x, score = _differentiable_score(model, x)
            columns = range(score.shape[1])
            trace = torch.stack([_derivative(score[:, i], x)[:, i] for i in columns]).sum(0)
            _check_curved(model, trace, self.shape)
            loss = score_matching_loss(apart(score, self.shape), apart(trace, self.shape))
        return _objective(loss, score, x, self.shape)


class SlicedScoreMatching(Estimator):
    """Sliced score matching (Song et al. 2019): the trace by random directions, E_v[v.(ds/dx) v].

    The variant with reduced variance, which keeps |s|^2 exact. Directions are random signs, whose estimate of the
    trace has no variance from the diagonal (Hutchinson 1990).

    Args:
        n_slices: directions per point.
        shape: of independent problems solved side by side, see `Estimator`.

    `info` has `value`, the loss, and `score`.

    >>> from unnorm import Quadratic
    >>> SlicedScoreMatching()(Quadratic(3), torch.ones(8, 3)).info["value"]     # exact for a diagonal Jacobian
    tensor(-1.5000)
    """

    def __init__(self, *, n_slices: int = 1, shape: tuple[int, ...] = ()):
        super().__init__()
        self.shape = shape
        check_at_least("SlicedScoreMatching", "n_slices", n_slices, 1)
        self.n_slices = n_slices

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {**super().settings, "n_slices": self.n_slices}

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        with torch.enable_grad():
            x, score = _differentiable_score(model, x)
            trace = torch.zeros_like(score[:, 0])
            for _ in range(self.n_slices):
                bits = integers(2, score.shape, generator=generator, device=x.device)
                signs = 2 * bits.to(x.dtype) - 1
                trace = trace + (_derivative(score * signs, x) * signs).sum(-1) / self.n_slices
            _check_curved(model, trace, self.shape)
            loss = score_matching_loss(apart(score, self.shape), apart(trace, self.shape))
        return _objective(loss, score, x, self.shape)


class DenoisingScoreMatching(Estimator):
    """Denoising score matching (Vincent 2011): E|sigma s(x + sigma xi) + xi|^2 / 2.

    Learns the density of the data *plus* Gaussian noise of standard deviation sigma: small sigma, small bias, large
    variance. First derivatives in x are enough.

    Args:
        sigma: the noise's standard deviation, in the units of the model.
        shape: of independent problems solved side by side, see `Estimator`.

    `info` has `value`, the loss, and `score`.

    >>> from unnorm import Quadratic
    >>> estimator = DenoisingScoreMatching(sigma=0.3)
    >>> estimator(Quadratic(3), torch.zeros(8, 3), generator=torch.Generator().manual_seed(0)).info["value"] > 0
    tensor(True)
    """

    def __init__(self, *, sigma: float = 0.1, shape: tuple[int, ...] = ()):
        super().__init__()
        self.shape = shape
        if not sigma > 0:
            raise InvalidValue(f"The 'sigma' of DenoisingScoreMatching must be positive. Got {sigma}.")
        self.sigma = sigma

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        return {**super().settings, "sigma": self.sigma}

    def forward(self, model: LogDensity, x: Tensor, *, generator: torch.Generator | None = None) -> Objective:
        with torch.enable_grad():
            noise = normal(x.shape, generator=generator, device=x.device, dtype=x.dtype)
            _, score = _differentiable_score(model, x + self.sigma * noise)
            loss = denoising_loss(apart(score, self.shape), apart(noise.flatten(1), self.shape), self.sigma)
        return _objective(loss, score, x, self.shape)
