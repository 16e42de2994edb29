"""Unnormalized densities whose log Z is known, with exact independent samples: what an estimator of log Z is tried on.

Each leaves out constants, so that no log Z is zero. Each log Z is a closed form, a finite sum over hidden states
(`rbm`), or a sum of one-dimensional integrals (`double-well-20`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from unnorm.errors import InvalidValue
from unnorm.names import choose
from unnorm.types import event_shape

__all__ = [
    "TARGETS",
    "Target",
    "banana",
    "double_well",
    "funnel",
    "gaussian",
    "heavy_axes",
    "heavy_direction",
    "mixture",
    "rbm",
    "student_t",
    "target",
]

LOG_2PI = math.log(2 * math.pi)
MOST_HIDDEN = 20  # 2^20 hidden states are summed in a second or two
STEEPEST = 1e4  # a higher barrier makes wells narrower than the quadrature resolves


@final
@dataclass(frozen=True, eq=False)
class Target:
    """log p~, its log Z, and exact draws of p = p~ / Z.

    Args:
        name: what it is called.
        event: the shape of one point.
        log_z: the log of the integral of p~.
        numbers: the parameters, float64 on the CPU; they follow the points' dtype and device.
        density: `density(x, *numbers) -> (n,)`, log p~ as a function of tensors.
        draw: `draw(n, generator, *numbers) -> (n, *event)`.

    >>> t = target("funnel-10")
    >>> x = t.sample(1000, generator=torch.Generator().manual_seed(0))
    >>> t.event, t.log_density(x).shape, round(t.log_z, 4)
    ((10,), torch.Size([1000]), 10.288)
    """

    name: str
    event: tuple[int, ...]
    log_z: float
    numbers: tuple[Tensor, ...] = field(repr=False)
    density: Callable[..., Tensor] = field(repr=False)
    draw: Callable[..., Tensor] = field(repr=False)
    _moved: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "event", event_shape(self.event))

    def log_density(self, x: Tensor) -> Tensor:
        """log p~, (n, *event) -> (n,), in the dtype and on the device of `x`; never in half precision.

        >>> target("banana-2").log_density(torch.zeros(5, 3))
        Traceback (most recent call last):
        unnorm.errors.InvalidValue: Points of 'banana-2' have shape (n, 2). Got (5, 3).
        """
        if x.ndim != 1 + len(self.event) or x.shape[1:] != self.event:
            shape = ", ".join(str(size) for size in self.event)
            raise InvalidValue(f"Points of '{self.name}' have shape (n, {shape}). Got {tuple(x.shape)}.")
        if x.dtype not in (torch.float32, torch.float64):
            raise InvalidValue(f"Points of '{self.name}' must be float32 or float64. Got {x.dtype}.")
        with torch.autocast(x.device.type, enabled=False):
            return self.density(x, *self._numbers(x.device, x.dtype))

    @torch.no_grad()
    def sample(self, n: int, *, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        """`n` independent draws, shape (n, *event), on the generator's device; drawn in float64, then rounded."""
        if n < 1:
            raise InvalidValue(f"The number of draws must be at least 1. Got {n}.")
        device = torch.device("cpu") if generator is None else generator.device
        return self.draw(n, generator, *self._numbers(device, torch.float64)).to(dtype)

    def _numbers(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The parameters there; kept, because a copy to an accelerator waits for all its work."""
        if (device, dtype) not in self._moved:
            with torch.inference_mode(False):  # what is made under inference mode could never be differentiated through
                self._moved[device, dtype] = tuple(number.to(device, dtype) for number in self.numbers)
        return self._moved[device, dtype]


def gaussian(mean: Tensor, covariance: Tensor, *, name: str = "gaussian") -> Target:
    """exp(-m / 2), m = (x - mean)^T covariance^-1 (x - mean).

    >>> round(gaussian(torch.zeros(2), torch.eye(2)).log_z, 4) == round(math.log(2 * math.pi), 4)
    True
    """
    mean, tril = _location_and_scale("gaussian", mean, covariance)
    size = len(mean)
    log_z = size / 2 * LOG_2PI + _log_det(tril)
    return Target(name, (size,), log_z, (mean, tril), _gaussian, _draw_gaussian)


def _gaussian(x: Tensor, mean: Tensor, tril: Tensor) -> Tensor:
    return -_mahalanobis(x, mean, tril) / 2


def _draw_gaussian(n: int, generator: torch.Generator | None, mean: Tensor, tril: Tensor) -> Tensor:
    return mean + _normal(mean, n, len(mean), generator=generator) @ tril.mT


def mixture(amplitude: Tensor, mean: Tensor, covariance: Tensor, *, name: str = "mixture") -> Target:
    """sum_k a_k exp(-m_k / 2), with m_k as in `gaussian`: the share of component k is a_k sqrt(det covariance_k).

    Args:
        amplitude: positive, shape (k,).
        mean: shape (k, d).
        covariance: shape (k, d, d).
        name: what it is called.

    >>> two = mixture(torch.ones(2), torch.tensor([[-5.0], [5.0]]), torch.ones(2, 1, 1))
    >>> round(two.log_z, 4) == round(math.log(2 * math.sqrt(2 * math.pi)), 4)
    True
    """
    mean, tril = _location_and_scale("mixture", mean, covariance, batch=1)
    log_amplitude = _positive("mixture", "amplitude", amplitude, mean.shape[:1]).log()
    size = mean.shape[1]
    log_z = size / 2 * LOG_2PI + float(_log_shares(log_amplitude, tril).logsumexp(0))
    return Target(name, (size,), log_z, (log_amplitude, mean, tril), _mixture, _draw_mixture)


def _log_shares(log_amplitude: Tensor, tril: Tensor) -> Tensor:
    return log_amplitude + tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _mixture(x: Tensor, log_amplitude: Tensor, mean: Tensor, tril: Tensor) -> Tensor:
    return torch.logsumexp(log_amplitude[:, None] - _mahalanobis(x, mean[:, None], tril) / 2, 0)


def _draw_mixture(
    n: int, generator: torch.Generator | None, log_amplitude: Tensor, mean: Tensor, tril: Tensor
) -> Tensor:
    which = _choice(n, _log_shares(log_amplitude, tril), generator)
    return mean[which] + (tril[which] @ _normal(mean, n, mean.shape[1], 1, generator=generator)).squeeze(-1)


def funnel(size: int = 10, spread: float = 3.0, *, name: str = "funnel") -> Target:
    """Neal's funnel (2003): v ~ N(0, spread^2) is the first coordinate, the others are N(0, e^v).

    >>> funnel(3, 2.0).log_density(torch.tensor([[2.0, 0.0, 0.0]]))      # -v^2 / 2 spread^2 - 2 v / 2
    tensor([-2.5000])
    """
    if size < 2:
        raise InvalidValue(f"The 'size' of funnel must be at least 2. Got {size}.")
    deviation = _positive("funnel", "spread", spread, torch.Size())
    log_z = size / 2 * LOG_2PI + float(deviation.log())
    return Target(name, (size,), log_z, (deviation,), _funnel, partial(_draw_funnel, size))


def _funnel(x: Tensor, spread: Tensor) -> Tensor:
    v, rest = x[:, 0], x[:, 1:]
    white = rest * torch.exp(-v / 2)[:, None]  # squared last: e^-v would overflow at half the distance
    return -(v / spread).square() / 2 - white.square().sum(-1) / 2 - rest.shape[1] * v / 2


def _draw_funnel(size: int, n: int, generator: torch.Generator | None, spread: Tensor) -> Tensor:
    white = _normal(spread, n, size, generator=generator)
    v = spread * white[:, :1]
    return torch.cat([v, white[:, 1:] * torch.exp(v / 2)], -1)


def banana(spread: float = 10.0, bend: float = 0.03, *, name: str = "banana") -> Target:
    """x1 ~ N(0, spread^2) and x2 ~ N(bend (x1^2 - spread^2), 1) (Haario, Saksman, Tamminen 1999).

    A twist of a Gaussian that keeps volumes, so Z is the Gaussian's.

    >>> banana().log_density(torch.tensor([[0.0, -1.0], [10.0, 0.0]]))
    tensor([-2.0000, -0.5000])
    """
    deviation = _positive("banana", "spread", spread, torch.Size())
    numbers = (deviation, _float64(bend))
    return Target(name, (2,), LOG_2PI + float(deviation.log()), numbers, _banana, _draw_banana)


def _banana(x: Tensor, spread: Tensor, bend: Tensor) -> Tensor:
    straight = x[:, 1] - bend * (x[:, 0].square() - spread.square())
    return -((x[:, 0] / spread).square() + straight.square()) / 2


def _draw_banana(n: int, generator: torch.Generator | None, spread: Tensor, bend: Tensor) -> Tensor:
    white = _normal(spread, n, 2, generator=generator)
    first = spread * white[:, 0]
    return torch.stack([first, white[:, 1] + bend * (first.square() - spread.square())], -1)


def student_t(df: int, mean: Tensor, scale: Tensor, *, name: str = "student-t") -> Target:
    """(1 + m / df)^(-(df + d) / 2), m = (x - mean)^T scale^-1 (x - mean), for a whole number `df` of degrees.

    >>> cauchy = student_t(1, torch.zeros(1), torch.eye(1))
    >>> round(cauchy.log_z, 4) == round(math.log(math.pi), 4)
    True
    """
    if not isinstance(df, int) or df < 1:
        raise InvalidValue(f"The 'df' of student_t must be a whole number from 1. Got {df}.")
    mean, tril = _location_and_scale("student_t", mean, scale)
    size = len(mean)
    log_z = math.lgamma(df / 2) - math.lgamma((df + size) / 2) + size / 2 * math.log(df * math.pi) + _log_det(tril)
    return Target(name, (size,), log_z, (_float64(df), mean, tril), _student_t, _draw_student_t)


def _student_t(x: Tensor, df: Tensor, mean: Tensor, tril: Tensor) -> Tensor:
    return -(df + len(mean)) / 2 * torch.log1p(_mahalanobis(x, mean, tril) / df)


def _draw_student_t(n: int, generator: torch.Generator | None, df: Tensor, mean: Tensor, tril: Tensor) -> Tensor:
    white = _normal(mean, n, len(mean), generator=generator)
    chi_squared = _normal(mean, n, int(df), generator=generator).square().sum(-1, keepdim=True)
    return mean + white @ tril.mT * (df / chi_squared).sqrt()


def heavy_axes(df: int, heavy: int, size: int, *, name: str = "heavy-axes") -> Target:
    """`heavy` coordinates with the density (1 + x^2 / df)^(-(df + 1) / 2), and normal ones, all independent.

    On a ray in a random direction the normal coordinates hide the heavy ones.

    >>> round(heavy_axes(1, 1, 2).log_z, 4) == round(math.log(math.pi) + math.log(2 * math.pi) / 2, 4)
    True
    """
    if not (isinstance(df, int) and df >= 1 and 1 <= heavy <= size):
        raise InvalidValue(
            f"heavy_axes needs a whole number of degrees, and from 1 to {size} heavy axes. Got {df} and {heavy}."
        )
    each = math.lgamma(df / 2) - math.lgamma((df + 1) / 2) + math.log(df * math.pi) / 2
    log_z = heavy * each + (size - heavy) / 2 * math.log(2 * math.pi)
    parameters = (_float64(df), torch.arange(size, dtype=torch.float64) < heavy)
    return Target(name, (size,), log_z, parameters, _heavy_axes, _draw_heavy_axes)


def _heavy_axes(x: Tensor, df: Tensor, heavy: Tensor) -> Tensor:
    square = x.square()
    return -torch.where(heavy > 0, (df + 1) * torch.log1p(square / df), square).sum(-1) / 2


def _draw_heavy_axes(n: int, generator: torch.Generator | None, df: Tensor, heavy: Tensor) -> Tensor:
    white = _normal(df, n, len(heavy), generator=generator)
    chi_squared = _normal(df, n, len(heavy), int(df), generator=generator).square().sum(-1)
    return torch.where(heavy > 0, white * (df / chi_squared).sqrt(), white)


def heavy_direction(df: int, direction: Tensor, *, name: str = "heavy-direction") -> Target:
    """(1 + t^2 / df)^(-(df + 1) / 2) along one direction, where t is the coordinate along it, and normal across it.

    In a direction that is oblique to the coordinates, no coordinate and no random ray shows the heavy tail.

    Args:
        df: degrees of freedom, a whole number.
        direction: of any length but zero, shape (d,).
        name: what it is called.

    >>> round(heavy_direction(1, torch.tensor([3.0, 4.0])).log_z, 4) == round(heavy_axes(1, 1, 2).log_z, 4)
    True
    """
    direction = _float64(direction)
    if not isinstance(df, int) or df < 1:
        raise InvalidValue(f"The 'df' of heavy_direction must be a whole number from 1. Got {df}.")
    length = direction.norm()
    if direction.ndim != 1 or not bool(length.isfinite() & (length > 0)):
        raise InvalidValue(
            f"The 'direction' of heavy_direction must have shape (d,), be finite, and not be zero. "
            f"Got shape {tuple(direction.shape)} and length {float(length):g}."
        )
    size = len(direction)
    numbers = (_float64(df), direction / length)
    return Target(name, (size,), heavy_axes(df, 1, size).log_z, numbers, _heavy_direction, _draw_heavy_direction)


def _heavy_direction(x: Tensor, df: Tensor, direction: Tensor) -> Tensor:
    along = x @ direction
    across = x - along[:, None] * direction
    return -((df + 1) * torch.log1p(along.square() / df) + across.square().sum(-1)) / 2


def _draw_heavy_direction(n: int, generator: torch.Generator | None, df: Tensor, direction: Tensor) -> Tensor:
    white = _normal(df, n, len(direction), generator=generator)
    chi_squared = _normal(df, n, int(df), generator=generator).square().sum(-1)
    along = white @ direction
    return white + (along * ((df / chi_squared).sqrt() - 1))[:, None] * direction


def rbm(weight: Tensor, visible_bias: Tensor, hidden_bias: Tensor, sigma: float = 1.0, *, name: str = "rbm") -> Target:
    """A restricted Boltzmann machine, Gaussian v (d of them) and binary h (at most 20), with h summed out.

    log p~(v) = -|v - b|^2 / 2 sigma^2 + sum_j softplus(c_j + v . W_j / sigma). The integral over v for one h gives
    log Z = d/2 log(2 pi sigma^2) + log sum_h exp(c . h + b . Wh / sigma + |Wh|^2 / 2).

    Args:
        weight: W, shape (d, hidden).
        visible_bias: b, shape (d,).
        hidden_bias: c, shape (hidden,).
        sigma: deviation of a visible unit when h is known.
        name: what it is called.

    >>> idle = rbm(torch.zeros(2, 3), torch.zeros(2), torch.zeros(3))
    >>> round(idle.log_z, 4) == round(math.log(2 * math.pi) + 3 * math.log(2), 4)
    True
    """
    weight, b, c = _float64(weight), _float64(visible_bias), _float64(hidden_bias)
    if weight.ndim != 2 or b.shape != weight.shape[:1] or c.shape != weight.shape[1:]:
        got = f"{tuple(weight.shape)}, {tuple(b.shape)}, {tuple(c.shape)}"
        raise InvalidValue(f"The 'weight' and biases of rbm must have shapes (d, hidden), (d,), (hidden,). Got {got}.")
    size, hidden = weight.shape
    if hidden > MOST_HIDDEN:
        raise InvalidValue(f"The 'weight' of rbm must have at most {MOST_HIDDEN} hidden units. Got {hidden}.")
    deviation = _positive("rbm", "sigma", sigma, torch.Size())
    numbers = (weight, b, c, deviation)
    log_z = size / 2 * LOG_2PI + size * math.log(sigma) + float(_rbm_components(*numbers)[1].logsumexp(0))
    return Target(name, (size,), log_z, numbers, _rbm, _draw_rbm)


def _rbm(v: Tensor, weight: Tensor, b: Tensor, c: Tensor, sigma: Tensor) -> Tensor:
    # torch's own threshold, 20, drops e^-20: more than float64 rounds.
    free = functional.softplus(c + v @ weight / sigma, threshold=50).sum(-1)
    return free - ((v - b) / sigma).square().sum(-1) / 2


def _rbm_components(weight: Tensor, b: Tensor, c: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """For each hidden state h, the mean b + sigma Wh of v, and the log of h's share up to a constant."""
    places = torch.arange(len(c), device=c.device)
    states = (torch.arange(2 ** len(c), device=c.device)[:, None] >> places & 1).to(c.dtype)
    pull = states @ weight.mT
    return b + sigma * pull, states @ c + pull @ b / sigma + pull.square().sum(-1) / 2


def _draw_rbm(n: int, generator: torch.Generator | None, weight: Tensor, b: Tensor, c: Tensor, sigma: Tensor) -> Tensor:
    means, log_shares = _rbm_components(weight, b, c, sigma)
    which = _choice(n, log_shares, generator)
    return means[which] + sigma * _normal(b, n, len(b), generator=generator)


def double_well(barrier: Tensor, tilt: Tensor, *, name: str = "double-well") -> Target:
    """prod_i exp(-a_i (x_i^2 - 1)^2 + t_i x_i): two wells in each of d coordinates, 2^d modes.

    Args:
        barrier: a, the height between the wells in nats, shape (d,).
        tilt: t, shape (d,), at most a in size, so that both wells stay.
        name: what it is called.

    >>> round(double_well(torch.full((5,), 4.0), torch.zeros(5)).log_z, 4)
    -0.2679
    """
    tilt = _float64(tilt)
    if tilt.ndim != 1:
        raise InvalidValue(f"The 'tilt' of double_well must have shape (d,). Got {tuple(tilt.shape)}.")
    barrier = _positive("double_well", "barrier", barrier, tilt.shape)
    if not bool((barrier <= STEEPEST).all()):
        raise InvalidValue(f"The 'barrier' of double_well must be at most {STEEPEST:g}. Got {float(barrier.max()):g}.")
    if not bool((tilt.abs() <= barrier).all()):
        raise InvalidValue(f"The 'tilt' of double_well must be at most the barrier in size. Got {tilt.tolist()}.")
    log_z = _double_well_log_z(barrier, tilt)
    return Target(name, tuple(tilt.shape), log_z, (barrier, tilt), _double_well, _draw_double_well)


def _double_well(x: Tensor, barrier: Tensor, tilt: Tensor) -> Tensor:
    return (tilt * x - barrier * (x.square() - 1).square()).sum(-1)


def _double_well_log_z(barrier: Tensor, tilt: Tensor, nodes: int = 4000) -> float:
    """The sum of log one-dimensional integrals, by a midpoint rule: for such functions its error is rounding.

    It ends where the density is e^-50 of what it is in a well, whatever the tilt.
    """
    edge = (2 + (50 / barrier).sqrt()).sqrt()
    u = (torch.arange(nodes, dtype=torch.float64) + 0.5) * 2 / nodes - 1
    x = edge * u[:, None]
    log_p = tilt * x - barrier * (x.square() - 1).square()
    return float((log_p.logsumexp(0) + torch.log(2 * edge / nodes)).sum())


def _draw_double_well(n: int, generator: torch.Generator | None, barrier: Tensor, tilt: Tensor) -> Tensor:
    """By rejection, each coordinate alone: (y^2 - 1)^2 = (y - 1)^2 (y + 1)^2 >= (y - 1)^2 for y = |x|.

    Its envelope exp(-a (y - 1)^2 + t s y), s the sign of x, is a Gaussian for each s; half the proposals stay.
    """
    x = barrier.new_empty(n * len(barrier))
    pending = torch.arange(len(x), device=x.device)
    while len(pending):
        a, t = barrier[pending % len(barrier)], tilt[pending % len(barrier)]
        u = torch.rand(2, len(pending), generator=generator, dtype=x.dtype, device=x.device)
        sign = torch.where(u[0] < torch.sigmoid(2 * t), 1.0, -1.0).to(x.dtype)
        y = 1 + sign * t / (2 * a) + _normal(x, len(pending), generator=generator) / (2 * a).sqrt()
        stays = (y > 0) & (u[1] < torch.exp(-a * (y - 1).square() * y * (y + 2)))
        x[pending[stays]] = (sign * y)[stays]
        pending = pending[~stays]
    return x.view(n, len(barrier))


def _location_and_scale(what: str, mean: Tensor, covariance: Tensor, batch: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and Cholesky factor in float64, or an error that names the matrix."""
    mean, covariance = _float64(mean), _float64(covariance)
    if mean.ndim != 1 + batch or covariance.shape != (*mean.shape, mean.shape[-1]):
        got = f"{tuple(mean.shape)} and {tuple(covariance.shape)}"
        raise InvalidValue(f"The mean and matrix of {what} must have shapes (..., d) and (..., d, d). Got {got}.")
    tril, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed.any()) or not torch.allclose(covariance, covariance.mT):
        least = float(torch.linalg.eigvalsh((covariance + covariance.mT) / 2).min())
        raise InvalidValue(
            f"The matrix of {what} must be symmetric and positive definite. Got a least eigenvalue of {least:.3g}."
        )
    return mean, tril


def _positive(what: str, parameter: str, value: Tensor | float, shape: torch.Size) -> Tensor:
    value = _float64(value)
    if value.shape != shape:
        raise InvalidValue(f"The '{parameter}' of {what} must have shape {tuple(shape)}. Got {tuple(value.shape)}.")
    if not bool((value > 0).all()) or not bool(value.isfinite().all()):
        raise InvalidValue(f"The '{parameter}' of {what} must be positive and finite. Got {value.tolist()}.")
    return value


def _float64(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()


def _mahalanobis(x: Tensor, mean: Tensor, tril: Tensor) -> Tensor:
    """|tril^-1 (x - mean)|^2, shape (..., n) for a tril of shape (..., d, d)."""
    return torch.linalg.solve_triangular(tril, (x - mean).mT, upper=False).square().sum(-2)


def _log_det(tril: Tensor) -> float:
    return float(tril.diagonal().log().sum())


def _normal(like: Tensor, *shape: int, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def _choice(n: int, log_shares: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(torch.softmax(log_shares, 0), n, replacement=True, generator=generator)


def _ellipsoid(size: int, least: float, most: float, seed: int) -> tuple[Tensor, Tensor]:
    """A mean, and a turned covariance whose eigenvalues are spread evenly in the log from `least` to `most`."""
    random = np.random.RandomState(seed)  # frozen: the same numbers under every version of numpy
    mean = random.standard_normal(size)
    axes = _orthogonal(random, size)
    covariance = axes * np.geomspace(least, most, size) @ axes.T
    return torch.from_numpy(mean), torch.from_numpy((covariance + covariance.T) / 2)


def _orthogonal(random: np.random.RandomState, size: int) -> np.ndarray:
    axes, upper = np.linalg.qr(random.standard_normal((size, size)))
    return axes * np.sign(np.diag(upper))  # which makes the factor unique, whoever computes it


def _gaussian_of(name: str, size: int, least: float, most: float) -> Target:
    return gaussian(*_ellipsoid(size, least, most, seed=size), name=name)


def _mixture_40(name: str) -> Target:
    """Forty components in [-40, 40]^2, deviations from 0.7 to 1.4, amplitudes from 0.5 to 1.5."""
    random = np.random.RandomState(40)
    mean = random.uniform(-40, 40, (40, 2))
    amplitude = random.uniform(0.5, 1.5, 40)
    variances, angle = random.uniform(0.7, 1.4, (40, 2)) ** 2, random.uniform(0, np.pi, 40)
    axes = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(40, 2, 2)
    covariance = np.einsum("kij,kj,klj->kil", axes, variances, axes)
    return mixture(torch.from_numpy(amplitude), torch.from_numpy(mean), torch.from_numpy(covariance), name=name)


def _rare_modes_30(name: str) -> Target:
    """Three modes with shares .93, .05 and .02 in thirty dimensions, the rare ones twelve from the common one.

    Their covariances are turned, with eigenvalues from 0.5 to 2. A noise that draws from the common mode alone finds
    93% of the mass, and weights that look good.
    """
    shares = torch.tensor([0.93, 0.05, 0.02], dtype=torch.float64)
    away = _orthogonal(np.random.RandomState(30), 30)[:, :3].T * np.array([[1.0], [12.0], [12.0]])
    covariance = torch.stack([_ellipsoid(30, 0.5, 2.0, seed=seed)[1] for seed in (31, 32, 33)])
    amplitude = shares / torch.linalg.det(covariance).sqrt()
    return mixture(amplitude, torch.from_numpy(away), covariance, name=name)


def _student_t_5(name: str) -> Target:
    return student_t(3, *_ellipsoid(5, 0.1, 10.0, seed=5), name=name)


def _rbm_10_8(name: str) -> Target:
    """Hidden units that move v by four deviations and lean a little: some forty of 256 states share the mass."""
    random = np.random.RandomState(14)
    weight = 4 * _orthogonal(random, 10)[:, :8] + 0.3 * random.standard_normal((10, 8))
    b, lean, sigma = random.standard_normal(10), 0.5 * random.standard_normal(8), 0.5
    c = lean - b @ weight / sigma - (weight.T @ weight).sum(-1) / 2
    return rbm(torch.from_numpy(weight), torch.from_numpy(b), torch.from_numpy(c), sigma, name=name)


def _double_well_20(name: str) -> Target:
    return double_well(
        torch.linspace(3, 6, 20, dtype=torch.float64), torch.linspace(-0.4, 0.6, 20, dtype=torch.float64), name=name
    )


_BUILDERS: dict[str, Callable[[str], Target]] = {
    "gaussian-2": partial(_gaussian_of, size=2, least=1e-3, most=10.0),
    "gaussian-10": partial(_gaussian_of, size=10, least=1e-3, most=10.0),
    "gaussian-10-easy": partial(_gaussian_of, size=10, least=0.5, most=5.0),
    "gaussian-100": partial(_gaussian_of, size=100, least=1e-3, most=10.0),
    "mixture-40": _mixture_40,
    "rare-modes-30": _rare_modes_30,
    "funnel-10": lambda name: funnel(10, 3.0, name=name),
    "banana-2": lambda name: banana(10.0, 0.03, name=name),
    "student-t-5": _student_t_5,
    "heavy-axes-10": lambda name: heavy_axes(2, 2, 10, name=name),
    "heavy-oblique-10": lambda name: heavy_direction(3, torch.arange(1.0, 11.0), name=name),
    "rbm": _rbm_10_8,
    "double-well-20": _double_well_20,
}

TARGETS: Mapping[str, Callable[[], Target]] = {name: partial(build, name) for name, build in _BUILDERS.items()}


def target(name: str) -> Target:
    """One of the targets by its name.

    >>> target("funel-10")
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: Unknown target 'funel-10'. Did you mean 'funnel-10'? Known: gaussian-2, ...
    """
    return choose("target", name, TARGETS)()
