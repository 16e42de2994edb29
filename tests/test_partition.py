"""log Z and its error against closed forms, exact sums, scipy, and slow obvious versions of themselves."""

import importlib
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from scipy import integrate, optimize, special, stats
from torch import distributions as td
from torch import nn

from unnorm import MLP, Gaussian, Quadratic, Tilted, from_distribution
from unnorm.data.targets import mixture, target
from unnorm.diagnostics import believable, doubt, pareto_khat, smooth_tail, tail_length
from unnorm.errors import InvalidValue
from unnorm.partition import (
    Annealing,
    Bracket,
    Grid,
    Schedule,
    ais,
    bennett,
    bounding_box,
    bracket,
    fitting_box,
    geometric,
    grid,
    importance,
    ladder,
    log_weights,
    mass_not_ruled_out,
    plan,
    reverse_ais,
)
from unnorm.partition.annealed import _resample, estimate, stuck
from unnorm.partition.bridge import unseen
from unnorm.partition.grid import evaluate, mass_outside, resolutions, summary
from unnorm.partition.path import FEWEST, MOST, _next_beta, conditional_ess, resampled
from unnorm.partition.probes import RAYS
from unnorm.partition.routes import Annealed, Geometric, Tempered, picked
from unnorm.partition.weights import RAREST, Weights
from unnorm.samplers import HMC, MALA
from unnorm.types import LogZ

F64 = torch.float64
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small: a second thread costs more than it brings, above all where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed), dtype=F64)


def mean_is(values, truth, errors=4.0):
    """Whether the mean of independent values is `truth` within so many of its own standard errors."""
    values = torch.as_tensor(values, dtype=F64)
    return bool(((values.mean(0) - truth).abs() < errors * values.std(0) / len(values) ** 0.5).all())


def chi_squared(scores, tail=1e-3):
    """Whether a sum of squared z-scores is one of standard normals, at this level on each side."""
    low, high = stats.chi2(len(scores)).ppf([tail, 1 - tail])
    return low < np.square(scores).sum() < high


class Counted(nn.Module):
    """Counts the points at which a density is evaluated."""

    def __init__(self, log_density):
        super().__init__()
        self.log_density, self.points = log_density, 0

    def forward(self, x):
        self.points += len(x)
        return self.log_density(x)


# Weights.

STREAMS = {
    "normal": randn(3000),
    "some are zero": torch.where(randn(3000, seed=1) < 0.5, -INF, 2 * randn(3000)),
    "begins with zeros": torch.cat([torch.full((700,), -INF, dtype=F64), randn(2300)]),
    "huge": 1e4 + 3 * randn(3000),
    "tiny": -1e4 + 3 * randn(3000),
    "wide": 1e4 * randn(3000),
    "heavy": -0.9 * torch.rand(3000, generator=seeded(), dtype=F64).log(),
    "equal": torch.full((3000,), 5.0, dtype=F64),
    "few": randn(26),
    "fewer": randn(20),
    "two": randn(2),
}
every_stream = pytest.mark.parametrize("log_w", STREAMS.values(), ids=STREAMS.keys())
every_chunk = pytest.mark.parametrize("chunk", [3, 64, 1024, 10_000])


def streamed(log_w, chunk=10**9, n=None):
    weights = Weights(len(log_w) if n is None else n)
    for part in log_w.split(chunk):
        weights.add(part)
    return weights


def dense(log_w):
    """log-mean-exp, ESS, and the delta method's error std(w) / (mean(w) sqrt(n)), from all weights at once."""
    shift = log_w.max()
    w = (log_w - shift).exp().numpy()
    value = math.log(w.mean()) + shift
    return float(value), w.std(ddof=1) / w.mean() / math.sqrt(len(w)), w.sum() ** 2 / np.square(w).sum()


def psis(log_w):
    """Pareto-smoothed log-weights and k of all positive weights at once, in the units of `log_w`."""
    alive = log_w[log_w != -INF].numpy()
    smoothed, khat = array_stats.psislw(-alive)
    least = alive.argmin()  # it is left as it was
    return torch.from_numpy(smoothed + alive[least] - smoothed[least]), float(khat)


class TestWeights:
    @every_chunk
    @every_stream
    def test_streaming_is_the_dense_formula(self, log_w, chunk):
        found = streamed(log_w, chunk).log_z("importance")
        value, stderr, ess = dense(log_w)
        assert math.isclose(found.value, value, rel_tol=1e-11, abs_tol=1e-11)
        assert math.isclose(found.stderr, stderr, rel_tol=1e-6, abs_tol=1e-7)
        assert math.isclose(found.ess, ess, rel_tol=1e-7)  # a stream of threes adds 1,000 rounded sums of 2e4
        assert (found.n, found.method) == (len(log_w), "importance")

    @every_stream
    def test_the_largest(self, log_w):
        assert streamed(log_w, 7).largest == log_w.max()
        assert Weights(10).largest == -INF

    @pytest.mark.parametrize("n", [26, 225, 226, 5000])
    @pytest.mark.parametrize("chunk", [11, 10**9])
    @pytest.mark.parametrize("scale", [0.5, 1.5, 4.0])
    def test_khat_and_smoothing_are_those_of_psis(self, n, chunk, scale):
        log_w = scale * randn(n, seed=n)
        smoothed, khat = psis(log_w)
        weights = streamed(log_w, chunk)
        plain, smooth = weights.log_z("importance"), weights.log_z("importance", smooth=True)
        assert math.isclose(plain.khat, khat, abs_tol=1e-9)
        assert math.isclose(pareto_khat(log_w), khat, abs_tol=1e-9)
        assert smooth.khat == plain.khat
        value, stderr, ess = dense(smoothed)
        assert math.isclose(smooth.value, value, abs_tol=1e-9)
        assert math.isclose(smooth.stderr, stderr, rel_tol=1e-7)
        assert math.isclose(smooth.ess, ess, rel_tol=1e-7)
        assert smooth.value != plain.value

    def test_zeros_have_no_part_in_the_tail(self):
        """Nor does it matter that more weights were expected than came."""
        log_w = torch.where(torch.arange(3000) % 3 == 0, -INF, randn(3000))
        _, khat = psis(log_w)
        for n in (3000, 100_000):
            assert math.isclose(streamed(log_w, 100, n=n).log_z("importance").khat, khat, abs_tol=1e-9)

    def test_smoothing_keeps_the_order_the_beginning_and_the_largest(self):
        log_w = 3 * randn(1000)
        top = log_w.topk(tail_length(1000) + 1).values
        smoothed, _ = smooth_tail(top, 1000)
        assert smoothed.shape == top.shape
        assert math.isclose(smoothed[-1], top[-1], rel_tol=1e-12)
        assert (smoothed.diff() <= 0).all()
        assert smoothed.max() <= top.max() + 1e-12
        expected = psis(log_w)[0].sort(descending=True).values[: len(top)]
        torch.testing.assert_close(smoothed, expected, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("n", [500, 5000])
    def test_cauchy_log_weights_have_no_tail(self, n):
        """Weights of exp(Cauchy) have no moment of any order, and numbers too large for a fit: never a good value."""
        for seed in range(10):
            log_w = torch.empty(n, dtype=F64).cauchy_(generator=seeded(seed)) * 100
            assert streamed(log_w, 100).log_z("importance").khat >= 0.7
        assert streamed(torch.tan(math.pi * (torch.arange(n, dtype=F64) / n - 0.5)) * 1e4).log_z("").khat == INF

    def test_equal_largest_weights_have_no_tail(self):
        log_w = torch.cat([torch.full((500,), 2.0, dtype=F64), randn(2000).clamp(max=1)])
        found = streamed(log_w).log_z("importance", smooth=True)
        assert found.khat == 0
        assert math.isclose(found.value, dense(log_w)[0], rel_tol=1e-12)

    def test_too_few_have_no_khat(self):
        assert streamed(randn(24)).log_z("importance").khat == INF
        assert math.isfinite(streamed(randn(25)).log_z("importance").khat)
        mostly_zero = torch.cat([randn(24), torch.full((476,), -INF, dtype=F64)])
        assert streamed(mostly_zero, 100).log_z("importance").khat == INF

    def test_all_zero(self):
        found = streamed(torch.full((50,), -INF)).log_z("importance", smooth=True)
        assert found[:4] == (-INF, INF, 0.0, INF)
        assert not believable(found)

    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_one_that_is_not_finite_spoils_all(self, bad):
        log_w = randn(5000)
        log_w[1234] = bad
        for smooth in (False, True):
            found = streamed(log_w, 100).log_z("importance", smooth=smooth)
            assert found[1:4] == (INF, 0.0, INF)
            assert not math.isfinite(found.value)

    def test_weights_of_the_inverse(self):
        log_w = randn(100)
        plain, inverse = (streamed(log_w).log_z("", sign=sign) for sign in (1, -1))
        assert inverse == plain._replace(value=-plain.value)

    @pytest.mark.parametrize("chunk", [5, 100, 10_000])
    def test_share_of_the_rarest(self, chunk):
        log_w, log_q = 2 * randn(3000, seed=1), randn(3000, seed=2)
        weights = Weights(3000)
        for w, q in zip(log_w.split(chunk), log_q.split(chunk), strict=True):
            weights.add(w, q)
        rarest = log_q.argsort()[:RAREST]
        expected = float(log_w[rarest].exp().sum() / log_w.exp().sum())
        assert math.isclose(weights.share_of_rarest(), expected, rel_tol=1e-10)
        assert streamed(log_w).share_of_rarest() == 0

    def test_memory_grows_with_the_root(self):
        weights, generator = Weights(10**6), seeded()
        for _ in range(100):
            log_q = torch.randn(10_000, generator=generator)
            weights.add(-log_q, log_q)
        held = [value for value in vars(weights).values() if isinstance(value, torch.Tensor)]
        assert weights.n == 10**6
        # Storages, not shapes: a slice would keep the whole alive.
        assert sum(value.untyped_storage().nbytes() for value in held) / 8 <= 3 * 1000 + 2 * RAREST + 10
        assert weights.log_z("importance").khat < 0.7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"khat": 0.69}, None),
        ({"khat": 0.7}, "Pareto k is 0.70, not below 0.7"),
        ({"khat": -3.0}, None),
        ({"khat": INF}, "Pareto k is inf"),
        ({"khat": NAN}, "Pareto k is nan"),
        ({"ess": 100.0}, None),
        ({"ess": 99.0}, "only 99 effective draws of 1000 stand behind it"),
        ({"ess": NAN}, "only nan effective draws"),
        ({"value": NAN}, "log Z is nan ± 0.01"),
        ({"value": -INF}, "log Z is -inf"),
        ({"stderr": INF}, "± inf"),
        ({"stderr": NAN}, "± nan"),
        ({"stderr": 9.0}, None),
        ({"method": "ais", "khat": 0.8}, "Pareto k"),
        ({"method": "smc", "ess": 3.0}, "only 3 effective"),
        ({"method": "bracket", "khat": NAN}, None),
        ({"method": "bracket", "khat": NAN, "ess": 99.0}, "only 99 effective"),
        ({"method": "bracket", "khat": NAN, "stderr": INF}, "± inf"),
        ({"method": "grid", "khat": NAN, "ess": NAN}, None),
        ({"method": "grid", "khat": NAN, "ess": NAN, "stderr": INF}, "± inf"),
    ],
)
def test_doubt(changes, words):
    found = LogZ(0.0, 0.01, 900.0, 0.2, "importance", 1000)._replace(**changes)
    assert believable(found) == (words is None)
    assert doubt(found) is None if words is None else words in doubt(found)


# Importance sampling.


class TestImportance:
    def test_is_the_mean_of_its_own_weights(self):
        q = Gaussian(3)
        model = Quadratic(3)
        model.log_diagonal.data.fill_(0.7)
        _, log_w = log_weights(model, q, 3000, generator=seeded(), chunk=256)
        found = importance(model, q, 3000, generator=seeded(), chunk=256)
        value, stderr, ess = dense(log_w)
        assert math.isclose(found.value, value, rel_tol=1e-12)
        assert math.isclose(found.stderr, stderr, rel_tol=1e-9)
        assert math.isclose(found.ess, ess, rel_tol=1e-9)
        assert abs(found.value - model.log_z.item()) < 4 * found.stderr

    def test_smoothing_is_psis_of_its_own_weights(self):
        wide = Quadratic(2)
        wide.log_diagonal.data.fill_(-0.4)
        _, log_w = log_weights(wide, Gaussian(2), 2000, generator=seeded())
        found = importance(wide, Gaussian(2), 2000, smooth=True, generator=seeded())
        smoothed, khat = psis(log_w)
        assert math.isclose(found.khat, khat, abs_tol=1e-9)
        assert math.isclose(found.value, dense(smoothed)[0], abs_tol=1e-9)
        assert found.value != importance(wide, Gaussian(2), 2000, generator=seeded()).value

    def test_a_tilt_is_not_lost_under_a_huge_noise(self):
        """In float32 log q of 600 coordinates of scale e^20 is rounded to 1e-3, ten times all of the tilt."""
        q = Gaussian(600, "diagonal")
        q.scale.fill_(math.exp(20))
        net = nn.Module()
        net.forward = lambda x: 1e-4 * torch.tanh(x[:, 0] * math.exp(-20))
        u, weight = np.polynomial.hermite_e.hermegauss(60)
        truth = math.log((weight * np.exp(1e-4 * np.tanh(u))).sum() / weight.sum())
        found = importance(Tilted(q, net), q, 4000, generator=seeded(), chunk=1000)
        assert abs(found.value - truth) < 4 * found.stderr
        assert 5e-7 < found.stderr < 2e-6
        plain = importance(lambda x: Tilted(q, net)(x), q, 4000, generator=seeded(), chunk=1000)
        assert not 0.5 < plain.stderr / found.stderr < 2  # the difference of two densities is all rounding
        run = ais(Tilted(q, net), q, n_chains=64, betas=[0.0, 0.5, 1.0], generator=seeded())
        assert run.log_w.abs().max() < 1.1e-4
        assert run.log_w.std() > 3e-5

    def test_refusals(self):
        with pytest.raises(InvalidValue, match=r"number of draws 'n' must be a whole number. Got 10000.0: give an int"):
            importance(Quadratic(1), Gaussian(1), n=1e4)
        with pytest.raises(InvalidValue, match="number of draws 'n' must be at least 1. Got 0"):
            log_weights(Quadratic(1), Gaussian(1), 0)
        for chunk, rule in ((0, "at least 1. Got 0"), (-1, "at least 1. Got -1"), (64.0, "a whole number. Got 64.0")):
            for method in (importance, log_weights):
                with pytest.raises(InvalidValue, match=f"The 'chunk' of {method.__name__} must be {rule}"):
                    method(Quadratic(1), Gaussian(1), 100, chunk=chunk)
        assert importance(Quadratic(1), Gaussian(1), np.int64(100), chunk=np.int64(30)).n == 100


# The path.


class Flat(nn.Module):
    """f with f(x) = 0.5 for every x: it has no gradient."""

    def forward(self, x):
        return x.new_full((len(x),), 0.5)


def lopsided(x):
    """A density that is neither round nor even, over any event."""
    x = x.flatten(1)
    return -(x[:, 0] ** 4) / 4 - (x[:, 1:] - 0.5 * x[:, :1]).square().sum(-1) / 3 + 0.3 * x[:, 0]


def gaussian_of(dim, loc=0.3, scale=1.7):
    q = Gaussian(dim, "diagonal").double()
    q.loc.fill_(loc)
    q.scale.fill_(scale)
    return q


class Half(nn.Module):
    """exp(-x^2 / 2) where x is positive, else zero."""

    def forward(self, x):
        return torch.where(x[:, 0] > 0, -x[:, 0].square() / 2, -INF)


class TestPath:
    @pytest.mark.parametrize("beta", [0.0, 0.2, 0.7, 1.0])
    @pytest.mark.parametrize("event", [(3,), (2, 3)])
    def test_position_by_autograd(self, beta, event):
        q = gaussian_of(event)
        x = randn(20, *event)
        here = Tempered(lopsided, q, beta).position(x)
        normal = td.Independent(td.Normal(torch.tensor(0.3, dtype=F64).expand(event), 1.7), len(event))
        leaf = x.clone().requires_grad_()
        log_w = lopsided(leaf) - normal.log_prob(leaf)
        log_p = (1 - beta) * normal.log_prob(leaf) + beta * lopsided(leaf)
        (score,) = torch.autograd.grad(log_p.sum(), leaf, retain_graph=True)
        (score_w,) = torch.autograd.grad(log_w.sum(), leaf)
        for found, expected in zip(here, (x, log_p, score, log_w, score_w), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)
            assert not found.requires_grad
        torch.testing.assert_close(Tempered(lopsided, q, beta)(x), log_p.detach(), rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize(("low", "high"), [(0.0, 0.3), (0.3, 1.0), (1.0, 0.4)])
    def test_hotter_is_a_fresh_evaluation(self, low, high):
        x, q = randn(20, 3), gaussian_of(3)
        moved = Tempered(lopsided, q, low).position(x).hotter(high - low)
        for found, expected in zip(moved, Tempered(lopsided, q, high).position(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    def test_pick(self):
        here = Tempered(lopsided, gaussian_of(3), 0.5).position(randn(5, 3))
        for found, expected in zip(picked(here, torch.tensor([3, 3, 0])), here, strict=True):
            assert torch.equal(found, expected[[3, 3, 0]])

    def test_a_uniform_noise_has_score_zero(self):
        q = from_distribution(td.Uniform(torch.full((2,), -3.0, dtype=F64), torch.full((2,), 3.0, dtype=F64)))
        x = randn(20, 2).clamp(-2.9, 2.9)
        here = Tempered(lopsided, q, 0.0).position(x)
        assert (here.score == 0).all()
        torch.testing.assert_close(here.log_p, torch.full((20,), -2 * math.log(6), dtype=F64))
        expected = Tempered(lopsided, gaussian_of(2), 1.0).position(x)
        torch.testing.assert_close(Tempered(lopsided, q, 1.0).position(x).score, expected.score)
        torch.testing.assert_close(here.log_w, lopsided(x) + 2 * math.log(6))

    def test_a_tilt_is_the_plain_difference(self):
        q, x = gaussian_of(3), randn(20, 3)
        model = Tilted(q, MLP(3, hidden=(16,), generator=seeded())).double()
        fast, plain = (Tempered(each, q, 0.6).position(x) for each in (model, lambda x: model(x)))
        for found, expected in zip(fast, plain, strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
        flat = Tempered(Tilted(q, Flat()), q, 0.6).position(x)
        torch.testing.assert_close(flat.log_p, q.log_prob(x) + 0.3)
        assert (flat.score_w == 0).all()

    def test_another_noise_is_no_tilt(self):
        """Equal numbers are not the same noise: the difference is taken."""
        model = Tilted(gaussian_of(3), MLP(3, hidden=(16,), generator=seeded())).double()
        other, x = gaussian_of(3, 0.0, 2.0), randn(20, 3)
        here = Tempered(model, other, 1.0).position(x)
        torch.testing.assert_close(here.log_p, model(x).detach())
        torch.testing.assert_close(here.log_w, (model(x) - other.log_prob(x)).detach())

    def test_the_noise_is_itself_where_the_model_is_zero(self):
        x, q = torch.tensor([[-1.0], [1.0]], dtype=F64), gaussian_of(1)
        cold = Tempered(Half(), q, 0.0)
        assert torch.equal(cold.position(x).log_p, q.log_prob(x))
        assert torch.equal(cold(x), q.log_prob(x))
        assert cold.position(x).hotter(0.5).log_p.isneginf().tolist() == [True, False]

    @pytest.mark.parametrize("event", [(3,), (2, 3)])
    def test_chains_carry_what_they_know(self, event):
        """After a step of HMC or MALA every field is that of the point where the chain stands."""
        density = Tempered(lopsided, gaussian_of(event), 0.4)
        for sampler in (HMC(0.5, n_leapfrog=3), MALA(0.2)):
            start = density.position(randn(200, *event))
            state, info = sampler.step(start, density, generator=seeded())
            moved = (state.x != start.x).flatten(1).any(-1)
            assert 20 < moved.sum() < 200
            assert isinstance(state, Annealed)
            for found, expected in zip(state, density.position(state.x), strict=True):
                torch.testing.assert_close(found, expected)
            assert torch.equal(info.log_p, state.log_p)


# HMC along the target's covariance.

FACTOR = torch.tensor([[2.0, 0.0, 0.0], [1.5, 0.5, 0.0], [-1.0, 0.3, 0.2]], dtype=F64)


class TestFactor:
    @pytest.mark.parametrize("variance", [1.0, torch.tensor([0.5, 1.0, 2.0], dtype=F64)])
    def test_is_plain_hmc_in_other_coordinates(self, variance):
        ours = HMC(0.4, n_leapfrog=3, factor=FACTOR, variance=variance)
        plain = HMC(0.4, n_leapfrog=3, variance=variance)

        def inner(y):
            return lopsided(y @ FACTOR.mT)

        y = randn(50, 3)
        state, other = ours.init(y @ FACTOR.mT, lopsided), plain.init(y, inner)
        generators = seeded(3), seeded(3)
        for _ in range(10):
            state, info = ours.step(state, lopsided, generator=generators[0])
            other, seen = plain.step(other, inner, generator=generators[1])
            torch.testing.assert_close(state.x, other.x @ FACTOR.mT, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(info.acceptance, seen.acceptance, rtol=1e-8, atol=1e-8)

    def test_a_diagonal_one_is_a_variance(self):
        variance, x = torch.tensor([0.5, 1.0, 2.0], dtype=F64), randn(50, 3)
        ends = []
        for sampler in (HMC(0.3, variance=variance), HMC(0.3, factor=torch.diag(variance.sqrt()))):
            state, info = sampler.step(sampler.init(x, lopsided), lopsided, generator=seeded())
            ends.append((state.x, info.acceptance))
        for one, other in zip(*ends, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)

    def test_leaves_a_gaussian_invariant(self):
        """Exact draws, a poor factor, a rough step: after five steps the moments still are the covariance's."""
        covariance = FACTOR @ FACTOR.mT
        precision = covariance.inverse()
        x = randn(40_000, 3) @ FACTOR.mT

        def log_p(x):
            return -torch.einsum("ni,ij,nj->n", x, precision, x) / 2

        sampler = HMC(0.9, n_leapfrog=2, factor=FACTOR @ torch.diag(torch.tensor([1.0, 0.6, 1.3], dtype=F64)))
        state, generator = sampler.init(x, log_p), seeded(1)
        for _ in range(5):
            state, info = sampler.step(state, log_p, generator=generator)
        assert 0.3 < info.acceptance.mean() < 0.95
        assert mean_is(state.x, 0.0)
        products = state.x[:, :, None] * state.x[:, None]
        assert mean_is(products, covariance)

    def test_events_of_any_shape(self):
        x = randn(10, 6)
        mixing = torch.eye(6, dtype=F64) + 0.1 * randn(6, 6, seed=4).tril()
        sampler = HMC(0.3, factor=mixing)
        flat, shaped = (
            sampler.step(sampler.init(each, lopsided), lopsided, generator=seeded())[0].x
            for each in (x, x.view(10, 2, 3))
        )
        torch.testing.assert_close(shaped.flatten(1), flat)
        assert not torch.equal(flat, x)

    def test_is_refused_with_bounds(self):
        with pytest.raises(InvalidValue, match="give no 'factor' with them"):
            HMC(0.1, factor=FACTOR, bounds=(-1.0, 1.0))

    def test_mala_is_hmc_of_one_step(self):
        e, x = 0.15, randn(100, 3)
        mala, hmc = MALA(e), HMC((2 * e) ** 0.5, n_leapfrog=1, jitter=0.0)
        one, other = mala.init(x, lopsided), hmc.init(x, lopsided)
        generators = seeded(3), seeded(3)
        for _ in range(5):
            one, info = mala.step(one, lopsided, generator=generators[0])
            other, seen = hmc.step(other, lopsided, generator=generators[1])
            torch.testing.assert_close(one.x, other.x, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(info.acceptance, seen.acceptance, rtol=1e-8, atol=1e-8)


# Schedules.


def steps(n):
    return tuple(HMC(0.1 * (k + 1)) for k in range(n))


class TestSchedule:
    schedule = Schedule((0.0, 0.1, 0.4, 1.0), steps(3), (2.0, 0.0, 3.0))

    @pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 1000])
    def test_spread_is_even_in_length(self, n):
        """By interpolation: the betas' lengths along the old path are k / n of the whole."""
        spread = self.schedule.spread(n)
        assert len(spread) == n
        assert spread.length == pytest.approx(5.0)
        assert spread.lengths == (5.0 / n,) * n
        lengths = np.interp(spread.betas, self.schedule.betas, [0.0, 2.0, 2.0, 5.0])
        np.testing.assert_allclose(lengths, np.arange(n + 1) * 5 / n, atol=1e-12)
        for beta, sampler in zip(spread.betas[1:], spread.samplers, strict=True):
            assert sampler is self.schedule.samplers[0 if beta <= 0.1 + 1e-9 else 2]

    def test_spread_of_even_steps_is_the_same(self):
        even = Schedule((0.0, 0.1, 0.4, 1.0), steps(3), (2.0,) * 3)
        assert even.spread(3).betas == pytest.approx(even.betas)
        assert even.spread(3).samplers == even.samplers
        assert even.spread(300).spread(3).betas == pytest.approx(even.betas)

    def test_a_path_of_no_length(self):
        """Where log_w does not vary any betas do."""
        assert Schedule((0.0, 1.0), steps(1), (0.0,)).spread(4).betas == pytest.approx((0, 0.25, 0.5, 0.75, 1))
        assert Schedule((0.0, 1.0), steps(1), (0.0,)).spread(4).length == 0
        q = Gaussian(2)
        run = ais(Tilted(q, Flat()), q, n_chains=16, generator=seeded())
        assert len(run.schedule) == FEWEST
        assert run.log_z.value == pytest.approx(0.5, abs=1e-6)

    @pytest.mark.parametrize(("variance", "n"), [(0.5, 50), (0.51, 50), (1.25, 20), (1e9, FEWEST), (1e-9, MOST)])
    def test_to_reach(self, variance, n):
        assert len(self.schedule.to_reach(variance)) == n

    def test_evaluations(self):
        samplers = (HMC(0.1, n_leapfrog=3), HMC(math.pi / 20))
        assert Schedule((0.0, 0.5, 1.0), samplers, (1.0, 1.0)).evaluations == 3 + 10

    @pytest.mark.parametrize(
        "betas",
        [(0.0,), (), (0.0, 0.5), (0.1, 1.0), (0.0, 0.5, 0.5, 1.0), (0.0, 0.7, 0.3, 1.0), (0.0, NAN, 1.0)],
    )
    def test_betas_must_rise(self, betas):
        with pytest.raises(InvalidValue, match=f"must rise from 0 to 1. Got {len(betas)} of them"):
            Schedule(betas, steps(len(betas) - 1), (1.0,) * (len(betas) - 1))
        with pytest.raises(InvalidValue, match="must rise from 0 to 1"):
            plan(Quadratic(1), Gaussian(1), betas=betas)

    def test_one_sampler_and_one_length_less(self):
        for samplers, lengths in ((2, 1), (1, 2), (1, 1)):
            with pytest.raises(InvalidValue, match="A schedule of 3 betas has one sampler and one length less"):
                Schedule((0.0, 0.5, 1.0), steps(samplers), (1.0,) * lengths)

    def test_geometric(self):
        betas = geometric(20, 1e-3)
        assert len(betas) == 21
        assert betas[:2] == pytest.approx((0.0, 1e-3))
        assert betas[-1] == 1
        ratios = np.array(betas[2:]) / np.array(betas[1:-1])
        np.testing.assert_allclose(ratios, 1000 ** (1 / 19))
        for n, first in ((1, 0.1), (5, 0.0), (5, 1.0)):
            with pytest.raises(InvalidValue, match=f"Got n {n}, first {first}"):
                geometric(n, first)


class TestResampling:
    def test_counts_are_within_one_of_their_share(self):
        log_w = 2 * randn(200)
        share = 200 * torch.softmax(log_w, 0)
        for seed in range(50):
            counts = torch.bincount(resampled(log_w, generator=seeded(seed)), minlength=200)
            assert counts.sum() == 200
            assert ((counts - share).abs() < 1 + 1e-9).all()

    def test_is_unbiased(self):
        log_w = 2 * randn(7)
        generator = seeded()
        index = resampled(log_w.expand(20_000, 7), generator=generator)
        counts = nn.functional.one_hot(index, 7).sum(1).double()
        share = 7 * torch.softmax(log_w, 0)
        assert ((counts.mean(0) - share).abs() < 4 * counts.std(0) / 20_000**0.5 + 1e-12).all()
        assert ((counts - share).abs() < 1 + 1e-9).all()

    def test_rows_are_independent(self):
        index = resampled(torch.zeros(2, 20_000, 2).log_softmax(-1) + torch.tensor([0.0, 1.0]), generator=seeded())
        kept = (index[..., 0] == 0).double()  # by chance of the row alone
        products = (kept[0] - kept.mean()) * (kept[1] - kept.mean())
        assert kept.std() > 0.1
        assert mean_is(products, 0.0)

    def test_zeros_do_not_go_on(self):
        log_w = torch.tensor([-INF, 0.0, -INF, 1e4, -INF])
        for seed in range(20):
            assert (resampled(log_w, generator=seeded(seed)) == 3).all()
        kept = resampled(torch.tensor([-INF, 0.0, -INF, 0.0, -INF]), generator=seeded())
        assert set(kept.tolist()) == {1, 3}

    def test_each_worn_population_by_itself(self):
        """One of 32 has a single weight that counts: it alone is resampled, and its mean is kept."""
        log_w = 0.1 * randn(32, 4)
        log_w[5] = torch.tensor([-50.0, 3.0, -50.0, -INF], dtype=F64)
        x = torch.arange(128, dtype=F64)[:, None]
        state = Annealed(x, x[:, 0], x, x[:, 0], x)
        before = torch.arange(32, dtype=F64)
        state, after, gained = _resample(state, log_w.flatten(), before, seeded())
        expected = torch.arange(128, dtype=F64)
        expected[20:24] = 21
        assert torch.equal(state.x[:, 0], expected)
        assert torch.equal(state.log_w, expected)
        assert torch.equal(after.view(32, 4)[5], torch.zeros(4, dtype=F64))
        rest = torch.arange(32) != 5
        assert torch.equal(after.view(32, 4)[rest], log_w[rest])
        assert torch.equal(gained[rest], before[rest])
        assert gained[5] == pytest.approx(5 + math.log((math.exp(3) + 2 * math.exp(-50)) / 4))

    def test_a_population_resamples_when_half_of_it_is_left(self):
        """Equal weights on m of 8: an effective size of m."""
        log_w = torch.zeros(32, 8, dtype=F64)
        for m in range(1, 9):
            log_w[m, m:] = -INF
        x = torch.zeros(256, 1, dtype=F64)
        _, after, _ = _resample(Annealed(x, x[:, 0], x, x[:, 0], x), log_w.flatten(), torch.zeros(32), seeded())
        worn = (after.view(32, 8) == 0).all(-1)
        assert worn[1:9].tolist() == [True, True, True, False, False, False, False, True]

    def test_conditional_ess_by_hand(self):
        w, v = np.array([1.0, 2.0, 5.0]), np.array([3.0, 0.5, 1.0])
        w = w / w.sum()
        expected = (w * v).sum() ** 2 / (w * np.square(v)).sum()
        found = conditional_ess(torch.tensor(w).log() + 77, torch.tensor(v).log())
        assert float(found) == pytest.approx(expected)
        shifted = conditional_ess(torch.tensor(w).log(), torch.tensor(v).log() + 1e4)
        assert float(shifted) == pytest.approx(expected, rel=1e-9)
        assert conditional_ess(torch.zeros(2, 9), torch.ones(2, 9)).tolist() == pytest.approx([1.0, 1.0])

    @pytest.mark.parametrize("beta", [0.0, 0.3])
    def test_next_beta_keeps_the_share(self, beta):
        log_w = 6 * randn(300)

        def left(change):
            v = np.exp(change * (log_w.numpy() - log_w.numpy().max()))
            return v.mean() ** 2 / np.square(v).mean() - 0.85

        def next_beta(log_w):
            way = Geometric(lambda x: x[:, 0], gaussian_of(1))
            return _next_beta(way, Annealed(log_w, log_w, log_w, log_w, log_w), beta)

        expected = beta + optimize.brentq(left, 0, 1 - beta)
        assert next_beta(log_w) == pytest.approx(expected, rel=1e-6)
        assert next_beta(0.01 * log_w) == 1
        dead = torch.cat([log_w, torch.full((900,), -INF, dtype=F64)])
        assert next_beta(dead) == pytest.approx(expected, rel=1e-6)


class TestPlan:
    def test_names(self):
        with pytest.raises(InvalidValue, match="Unknown transition 'hcm'. Did you mean 'hmc'?"):
            plan(Quadratic(1), Gaussian(1), transition="hcm")
        with pytest.raises(InvalidValue, match="Unknown choice of betas 'geometrical'. Did you mean 'geometric'?"):
            plan(Quadratic(1), Gaussian(1), betas="geometrical")
        with pytest.raises(InvalidValue, match="'n_betas' must be at least 1. Got 0"):
            plan(Quadratic(1), Gaussian(1), n_betas=0)
        with pytest.raises(InvalidValue, match="either a list of 'betas' or 'n_betas', not both"):
            plan(Quadratic(1), Gaussian(1), betas=[0.0, 1.0], n_betas=3)

    def test_betas(self):
        options = {"generator": seeded(), "n_chains": 50}
        assert plan(Quadratic(1), Gaussian(1), betas=[0, 0.2, 1], **options).betas == (0.0, 0.2, 1.0)
        assert plan(Quadratic(1), Gaussian(1), betas="geometric", n_betas=7, **options).betas == geometric(7)
        assert len(plan(Quadratic(1), Gaussian(1), betas="geometric", **options)) == 100
        assert len(plan(Quadratic(1), Gaussian(1), n_betas=5, **options)) == 5

    @pytest.mark.parametrize("a", [0.2, 8.0])
    def test_length_of_a_path_between_gaussians(self, a):
        """log_w has variance d (a - 1)^2 / 2 l^2 at the precision l = 1 + beta (a - 1): length sqrt(d / 2) |log a|.

        A variance of 2,000 chains is known to 3%, and the steps are many.
        """
        d = 6
        schedule = plan(lambda x: -a * x.square().sum(-1) / 2, Gaussian(d).double(), n_chains=2000, generator=seeded())
        length = math.sqrt(d / 2) * abs(math.log(a))
        assert schedule.length == pytest.approx(length, rel=0.05)
        assert len(schedule) == max(FEWEST, math.ceil(schedule.length**2 / 0.5))
        # The half of the length lies at beta with 1 + beta (a - 1) = sqrt(a).
        half = schedule.spread(2).betas[1]
        assert half == pytest.approx((math.sqrt(a) - 1) / (a - 1), rel=0.1)

    def test_log_weights_vary_as_planned(self):
        """With perfect mixing by length^2 / K; a sample variance of 1,000 is known to 4.5%, the length to 5%.

        Short steps are accepted, and a quarter turn of a Gaussian all but forgets where it began.
        """
        q = Gaussian(10).double()

        def narrow(x):
            return -30 * x.square().sum(-1) / 2

        planned = plan(narrow, q, generator=seeded())
        samplers = tuple(replace(sampler, step_size=0.25) for sampler in planned.samplers)
        run = ais(narrow, q, n_chains=1000, schedule=replace(planned, samplers=samplers), generator=seeded(1))
        expected = planned.length**2 / len(planned)
        assert 0.45 < expected <= 0.5
        assert expected / 1.2 < run.log_w.var() < 1.5 * expected

    @pytest.mark.parametrize(("transition", "wanted"), [("hmc", 0.8), ("mala", 0.574)])
    def test_acceptance_at_each_temperature(self, transition, wanted):
        narrow = target("gaussian-10")
        q = gaussian_of(10, 0.0, 2.0)
        schedule = plan(narrow.log_density, q, transition=transition, n_betas=30, generator=seeded())
        run = ais(narrow.log_density, q, n_chains=500, schedule=schedule, generator=seeded(1))
        assert len(run.acceptance) == 30
        assert max(abs(acceptance - wanted) for acceptance in run.acceptance) < 0.2
        assert abs(np.mean(run.acceptance) - wanted) < 0.15
        assert all((sampler.leapfrog_steps == 1) == (transition == "mala") for sampler in schedule.samplers)

    def test_trajectories_follow_the_covariance(self):
        narrow = target("gaussian-10")
        schedule = plan(narrow.log_density, gaussian_of(10, 0.0, 2.0), n_betas=5, n_chains=2000, generator=seeded())
        _, tril = narrow.numbers
        shape = torch.linalg.solve_triangular(tril, schedule.samplers[-1].factor, upper=False)
        eigenvalues = torch.linalg.eigvalsh(shape @ shape.mT)  # of a sample covariance: all near 1
        assert 0.6 < eigenvalues.min() < eigenvalues.max() < 1.6

    def test_many_coordinates_have_variances_alone(self):
        q = Gaussian(600, "diagonal")
        q.scale.copy_(torch.linspace(0.5, 2.0, 600))
        schedule = plan(lambda x: q.log_prob(x), q, betas=[0.0, 1.0], transition="mala", generator=seeded())
        last = schedule.samplers[-1]
        assert last.factor is None
        assert last.variance.shape == (600,)
        ratio = last.variance / q.scale.square()  # of variances of 1,024 chains: 1 within 4 times 4.4%
        assert ratio.mean() == pytest.approx(1, abs=0.05)
        assert ratio.std() < 0.07

    def test_chains_of_the_pilot(self):
        """256, four for each coordinate, at most 1,024: counted at the first evaluation."""
        for dim, n in ((2, 256), (100, 400), (400, 1024)):
            seen = []

            def log_p(x, seen=seen):
                seen.append(len(x))
                return -x.square().sum(-1) / 2

            plan(log_p, Gaussian(dim, "diagonal"), betas=[0.0, 1.0], generator=seeded())
            assert set(seen) == {n}

    def test_same_generator_same_bits(self):
        before = torch.get_rng_state()
        first, second, other = (plan(lopsided, gaussian_of(3), generator=seeded(seed)) for seed in (3, 3, 4))
        assert first.betas == second.betas != other.betas
        assert [s.step_size for s in first.samplers] == [s.step_size for s in second.samplers]
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_there_is_no_path_to_what_is_not_finite(self, bad):
        with pytest.raises(InvalidValue, match="not finite at draws of the noise"):
            plan(lambda x: torch.full((len(x),), bad), Gaussian(2))

    def test_one_draw_inside_the_support(self):
        """Of 64 pilot chains a single one lives: the path can still be planned, and walked."""
        q = Gaussian(1).double()
        edge = float(q.sample(64, generator=seeded()).max()) - 1e-9

        def log_p(x):
            return torch.where(x[:, 0] > edge, -x[:, 0].square() / 2, -INF)

        schedule = plan(log_p, q, n_chains=64, generator=seeded())
        run = ais(log_p, q, n_chains=100_000, schedule=schedule, generator=seeded(1))
        truth = stats.norm.sf(edge) * math.sqrt(2 * math.pi)
        assert mean_is(run.log_w.exp(), truth)

    def test_too_far_away(self):
        with pytest.raises(InvalidValue, match="needs more than 3 temperatures: the noise is too far away"):
            plan(lambda x: -100 * (x - 50).square().sum(-1), Gaussian(5), most=3, generator=seeded())


# Annealed importance sampling. Two normals in one dimension: log Z = 0.7, and exact draws.

LOG_Z = 0.7
SHARES, MEANS, SCALES = (0.35, 0.65), (-1.2, 1.5), (0.5, 0.8)


def two(x):
    parts = [
        math.log(share / scale) - ((x[:, 0] - mean) / scale).square() / 2
        for share, mean, scale in zip(SHARES, MEANS, SCALES, strict=True)
    ]
    return torch.logaddexp(*parts) + LOG_Z - math.log(2 * math.pi) / 2


def draws_of_two(n, seed=0):
    left = torch.rand(n, 1, generator=seeded(seed), dtype=F64) < SHARES[0]
    white = randn(n, 1, seed=seed + 1)
    return torch.where(left, MEANS[0] + SCALES[0] * white, MEANS[1] + SCALES[1] * white)


# Few temperatures, unevenly spread, and transitions that are exact but far from perfect mixing, no two alike.
POOR = Schedule(
    (0.0, 0.15, 0.4, 0.7, 1.0),
    (HMC(1.3, n_leapfrog=1), HMC(0.8, n_leapfrog=2), HMC(0.7, n_leapfrog=1), HMC(0.5, n_leapfrog=3)),
    (1.0, 1.0, 1.0, 1.0),
)
SINGLE = Schedule((0.0, 1.0), (HMC(0.5, n_leapfrog=1),), (1.0,))
WIDE = gaussian_of(1, 0.2, 1.6)
N = 200_000


@pytest.fixture(scope="module")
def there():
    return ais(two, WIDE, n_chains=N, schedule=POOR, generator=seeded(1))


@pytest.fixture(scope="module")
def back():
    return reverse_ais(two, WIDE, draws_of_two(N), schedule=POOR, generator=seeded(2))


class TestAnnealing:
    def test_one_temperature_is_importance_sampling(self):
        x = WIDE.sample(1000, generator=seeded())
        run = ais(two, WIDE, n_chains=1000, schedule=SINGLE, generator=seeded())
        torch.testing.assert_close(run.log_w, two(x) - WIDE.log_prob(x))
        y = draws_of_two(1000)
        state, _ = SINGLE.samplers[0].step(SINGLE.samplers[0].init(y, two), two, generator=seeded())
        run = reverse_ais(two, WIDE, y, schedule=SINGLE, generator=seeded())
        torch.testing.assert_close(run.log_w, two(state.x) - WIDE.log_prob(state.x))
        torch.testing.assert_close(run.x, state.x)

    def test_is_the_algorithm_of_the_paper(self):
        """Neal's box, written out: x_0 of q, weights before moves; backwards moves before weights."""

        def log_p(beta, x):
            return (1 - beta) * WIDE.log_prob(x) + beta * two(x)

        generator = seeded(5)
        x = WIDE.sample(50, generator=generator)
        log_w = torch.zeros(50, dtype=F64)
        for k in range(1, 5):
            low, high = (partial(log_p, beta) for beta in POOR.betas[k - 1 : k + 1])
            log_w += high(x) - low(x)
            sampler = POOR.samplers[k - 1]
            x = sampler.step(sampler.init(x, high), high, generator=generator)[0].x
        run = ais(two, WIDE, n_chains=50, schedule=POOR, generator=seeded(5))
        torch.testing.assert_close(run.log_w, log_w, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(run.x, x, rtol=1e-9, atol=1e-9)

        generator, x, log_w, acceptance = seeded(6), draws_of_two(50), torch.zeros(50, dtype=F64), []
        for k in range(4, 0, -1):
            low, high = (partial(log_p, beta) for beta in POOR.betas[k - 1 : k + 1])
            sampler = POOR.samplers[k - 1]
            state, info = sampler.step(sampler.init(x, high), high, generator=generator)
            x = state.x
            acceptance.append(float(info.acceptance.mean()))
            log_w += high(x) - low(x)
        run = reverse_ais(two, WIDE, draws_of_two(50), schedule=POOR, generator=seeded(6))
        torch.testing.assert_close(run.log_w, log_w, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(run.x, x, rtol=1e-9, atol=1e-9)
        assert run.acceptance == pytest.approx(acceptance[::-1])

    def test_settling_is_a_few_transitions_of_the_model(self):
        generator, last = seeded(8), POOR.samplers[-1]
        state = last.init(draws_of_two(50), two)
        for _ in range(3):
            state, _ = last.step(state, two, generator=generator)
        expected = reverse_ais(two, WIDE, state.x, schedule=POOR, generator=generator)
        found = reverse_ais(two, WIDE, draws_of_two(50), schedule=POOR, settle=3, generator=seeded(8))
        torch.testing.assert_close(found.log_w, expected.log_w, rtol=1e-9, atol=1e-9)

    def test_z_is_unbiased(self, there):
        assert mean_is(there.log_w.exp(), math.exp(LOG_Z))
        assert there.log_w.std() > 0.3  # nothing to see, were it exact

    def test_the_inverse_of_z_is_unbiased(self, back):
        assert mean_is((-back.log_w).exp(), math.exp(-LOG_Z))
        assert back.log_w.std() > 0.3

    @pytest.mark.parametrize("centre", [-1.0, 0.0, 0.7, 1.0, 1.3])
    def test_crooks_relation(self, there, back, centre):
        """E_forward[h w] = Z E_backward[h] for bounded h, here logistic and a window."""
        for h in (lambda w: torch.sigmoid(centre - w), lambda w: ((w - centre).abs() < 0.3).double()):
            ours, theirs = h(there.log_w) * (there.log_w - LOG_Z).exp(), h(back.log_w)
            error = math.sqrt(ours.var() / N + theirs.var() / N)
            assert abs(ours.mean() - theirs.mean()) < 4 * error

    def test_weighted_ends_are_samples(self, there, back):
        w = (there.log_w - LOG_Z).exp()
        mean = sum(share * m for share, m in zip(SHARES, MEANS, strict=True))
        square = sum(share * (m**2 + s**2) for share, m, s in zip(SHARES, MEANS, SCALES, strict=True))
        assert mean_is(w * there.x[:, 0], mean)
        assert mean_is(w * there.x[:, 0].square(), square)
        w = (LOG_Z - back.log_w).exp()
        assert mean_is(w * back.x[:, 0], 0.2)
        assert mean_is(w * (back.x[:, 0] - 0.2).square(), 1.6**2)

    def test_what_it_tells(self, there, back):
        value, stderr, ess = dense(there.log_w)
        assert there.log_z.value == pytest.approx(value)
        assert there.log_z.stderr == pytest.approx(stderr, rel=0.2)
        assert there.log_z.ess == pytest.approx(ess)
        assert (there.log_z.method, there.log_z.n) == ("ais", N)
        value, stderr, _ = dense(-back.log_w)
        assert back.log_z.value == pytest.approx(-value)
        assert back.log_z.stderr >= stderr * (1 - 1e-9)
        assert (back.log_z.method, back.log_z.n) == ("reverse-ais", N)
        assert there.log_w.dtype == back.log_w.dtype == F64
        assert there.schedule is back.schedule is POOR

    @pytest.mark.parametrize("direction", ["there", "back"])
    def test_errors_cover(self, there, back, direction):
        """Forty runs of 5,000 chains."""
        run, sign = (there, 1) if direction == "there" else (back, -1)
        found = [estimate(part, "ais", sign) for part in run.log_w.split(5000)]
        assert chi_squared([(each.value - LOG_Z) / each.stderr for each in found])

    def test_few_chains_admit_the_weights_they_have_not_seen(self):
        """Normal log-weights of deviation 3: the error of 300 of them by the delta method is too small, as a rule."""
        c, s = 1.0, 3.0
        log_w = c - s**2 / 2 + s * randn(300, 200)
        z = [(estimate(part, "ais").value - c) / estimate(part, "ais").stderr for part in log_w.T]
        naive = [(dense(part)[0] - c) / dense(part)[1] for part in log_w.T]
        assert np.mean(np.abs(naive) > 4) > 0.05
        assert np.mean(np.abs(z) > 4) < 0.005
        width = (np.quantile(log_w[:, 0], 0.975) - np.quantile(log_w[:, 0], 0.5)) / stats.norm.ppf(0.975)
        expected = math.sqrt(math.expm1(width**2) / 299)
        assert estimate(log_w[:, 0], "ais").stderr == pytest.approx(expected, rel=1e-3)
        other = estimate(-log_w[:, 0], "reverse-ais", sign=-1)
        assert other.stderr == pytest.approx(expected, rel=1e-3)
        assert other.value == pytest.approx(-estimate(log_w[:, 0], "ais").value)

    @pytest.mark.parametrize("transition", ["hmc", "mala"])
    @pytest.mark.parametrize("betas", ["adaptive", "geometric", (0.0, 0.02, 0.1, 0.3, 1.0)])
    def test_with_a_plan_of_its_own(self, transition, betas):
        narrow = target("gaussian-10-easy")
        n_betas = 12 if isinstance(betas, str) else None
        run = ais(
            narrow.log_density,
            gaussian_of(10, 0.0, 2.0),
            betas=betas,
            n_betas=n_betas,
            transition=transition,
            generator=seeded(),
        )
        assert abs(run.log_z.value - narrow.log_z) < 4 * run.log_z.stderr
        assert run.log_z.n == 512

    def test_where_the_model_is_zero(self):
        """Half of the noise's draws are worth nothing; the others live on, and Z = sqrt(pi / 2) is unbiased."""
        run = ais(Half(), WIDE, n_chains=20_000, schedule=POOR, generator=seeded())
        dead = run.log_w == -INF
        assert 0.3 < dead.double().mean() < 0.6
        assert mean_is(run.log_w.exp(), math.sqrt(math.pi / 2))
        assert (run.x[~dead] > 0).all()
        planned = ais(Half(), WIDE, n_chains=20_000, generator=seeded())
        assert mean_is(planned.log_w.exp(), math.sqrt(math.pi / 2))
        assert min(planned.acceptance) > 0.5

    def test_from_a_uniform_noise(self):
        q = from_distribution(td.Uniform(torch.tensor([-6.0], dtype=F64), torch.tensor([6.0], dtype=F64)))
        run = ais(two, q, n_chains=20_000, schedule=POOR, generator=seeded())
        assert mean_is(run.log_w.exp(), math.exp(LOG_Z))  # 1e-8 of the mass is outside
        assert run.x.abs().max() < 6
        run = reverse_ais(two, q, draws_of_two(20_000), schedule=POOR, generator=seeded())
        assert mean_is((-run.log_w).exp(), math.exp(-LOG_Z))

    @pytest.mark.parametrize("resample", [False, True])
    def test_any_event_shape(self, resample):
        q, flat_q = Gaussian((2, 3)), Gaussian(6)
        options = {"n_chains": 64, "n_betas": 5, "resample": resample}
        shaped, flat = (ais(lopsided, each, generator=seeded(), **options) for each in (q, flat_q))
        assert shaped.x.shape == (64, 2, 3)
        torch.testing.assert_close(shaped.log_w, flat.log_w, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(shaped.x.flatten(1), flat.x, rtol=1e-3, atol=1e-3)
        back = reverse_ais(lopsided, q, shaped.x, schedule=shaped.schedule, generator=seeded())
        assert back.x.shape == (64, 2, 3)

    def test_float32(self):
        q = Gaussian(1)
        run = ais(two, q, n_chains=4000, generator=seeded())
        assert (run.x.dtype, run.log_w.dtype) == (torch.float32, F64)
        assert abs(run.log_z.value - LOG_Z) < 4 * run.log_z.stderr
        back = reverse_ais(two, q, draws_of_two(4000).float(), schedule=run.schedule, generator=seeded())
        assert (back.x.dtype, back.log_w.dtype) == (torch.float32, F64)

    def test_same_generator_same_bits(self):
        for resample in (False, True):
            before = torch.get_rng_state()
            first, second, other = (
                ais(two, WIDE, n_chains=64, n_betas=5, resample=resample, generator=seeded(seed)) for seed in (3, 3, 4)
            )
            assert torch.equal(first.log_w, second.log_w)
            assert torch.equal(first.x, second.x)
            assert first.log_z == second.log_z != other.log_z
            assert torch.equal(before, torch.get_rng_state())

    def test_progress(self, capsys):
        for walk in (
            partial(ais, n_chains=64),
            partial(ais, n_chains=64, resample=True),
            partial(reverse_ais, x=draws_of_two(64)),
        ):
            run = walk(two, WIDE, schedule=POOR, progress=True)
            written = capsys.readouterr()
            assert "anneal" in written.err
            assert "4/4" in written.err
            assert written.out == ""
            assert isinstance(run, Annealing)
        ais(two, WIDE, n_chains=64, schedule=POOR)
        assert capsys.readouterr().err == ""

    def test_the_model_stays_as_trainable_as_it_was(self):
        q = Gaussian(2)
        model = Tilted(q, MLP(2, hidden=(8,), generator=seeded()))
        next(model.parameters()).requires_grad_(False)
        before = [p.requires_grad for p in model.parameters()]
        run = ais(model, q, n_chains=8, n_betas=3, generator=seeded())
        back = reverse_ais(model, q, run.x, schedule=run.schedule, generator=seeded())
        found = bracket(model, q, n_chains=8, n_betas=3, generator=seeded())
        climb = ladder(model, q, n=200, first=200, evaluations=1000, generator=seeded())
        assert isinstance(found, Bracket)
        assert climb.rungs
        assert [p.requires_grad for p in model.parameters()] == before
        assert all(p.grad is None for p in model.parameters())
        assert not any(t.requires_grad for t in (run.x, run.log_w, back.x, back.log_w))

        def broken(x):
            raise ZeroDivisionError

        model.net.forward = broken
        with pytest.raises(ZeroDivisionError):
            ais(model, q, n_chains=8)
        assert [p.requires_grad for p in model.parameters()] == before

    def test_refusals(self):
        with pytest.raises(InvalidValue, match="'n_chains' must be at least 2. Got 1"):
            ais(two, WIDE, n_chains=1)
        with pytest.raises(InvalidValue, match="32 equal populations. Got n_chains 100: .* a multiple of 32"):
            ais(two, WIDE, n_chains=100, resample=True)
        with pytest.raises(InvalidValue, match="number of chains 'n_chains' must be a whole number. Got 10.5"):
            ais(two, WIDE, n_chains=10.5)
        for x in (torch.zeros(5, 2, dtype=F64), torch.zeros(1, 1, dtype=F64)):
            with pytest.raises(InvalidValue, match=r"must have shape \(n, \(1,\)\), n >= 2. Got"):
                reverse_ais(two, WIDE, x)
        with pytest.raises(InvalidValue, match="not finite at some of the samples"):
            reverse_ais(Half(), WIDE, torch.tensor([[1.0], [-1.0]], dtype=F64))


FAR = gaussian_of(1, -2.0, 1.5)


@pytest.fixture(scope="module")
def runs():
    """200 runs of 32 populations of 8 chains, from so far that most of them resample."""
    return [ais(two, FAR, n_chains=256, schedule=POOR, resample=True, generator=seeded(s)) for s in range(200)]


class TestPopulations:
    """Sequential Monte Carlo: ais(resample=True)."""

    def test_z_is_unbiased(self, runs):
        z = torch.cat([run.log_w for run in runs]).exp()
        assert len(z) == 32 * 200
        assert mean_is(z, math.exp(LOG_Z))

    def test_values_are_the_populations_mean(self, runs):
        for run in runs[:5]:
            value, stderr, ess = dense(run.log_w)
            assert run.log_z.value == pytest.approx(value)
            assert run.log_z.stderr >= stderr * (1 - 1e-9)
            assert run.log_z.ess == pytest.approx(8 * ess)
            assert (run.log_z.method, run.log_z.n) == ("smc", 256)
            assert run.x.shape == (256, 1)
            assert len(run.acceptance) == 4

    def test_errors_cover(self, runs):
        """The error is allowed to be larger than needed, never less."""
        z = np.array([(run.log_z.value - LOG_Z) / run.log_z.stderr for run in runs])
        low, high = stats.chi2(len(z)).ppf([1e-3, 1 - 1e-3])
        assert low / 2 < np.square(z).sum() < high

    def test_ends_are_samples(self, runs):
        """Those of one run have ancestors in common: its mean is one number."""
        mean = sum(share * m for share, m in zip(SHARES, MEANS, strict=True))
        # A ratio of sums of 256 is biased by their relative variance.
        z = torch.stack([run.log_z.value + torch.zeros(()) for run in runs]).exp().double()
        ends = torch.stack([run.x.mean() for run in runs])
        assert mean_is(z * (ends - mean), 0.0)

    def test_resampling_pays_where_weights_vary(self, runs):
        plain = ais(two, FAR, n_chains=256 * 200, schedule=POOR, generator=seeded(1)).log_w
        alone = torch.stack([part.exp().mean() for part in plain.split(8)])
        assert torch.cat([run.log_w for run in runs]).exp().var() < 0.9 * alone.var()


# Both directions together.


def works(n, m, c=1.3, s=1.5, seed=0):
    """Log-weights that obey Crooks' relation: normal, of means c -+ s^2 / 2."""
    return c - s**2 / 2 + s * randn(n, seed=seed), c + s**2 / 2 + s * randn(m, seed=seed + 10_000)


class TestBennett:
    @pytest.mark.parametrize(("n", "m"), [(200, 200), (50, 1000), (2000, 30)])
    def test_is_the_root_of_its_equation(self, n, m):
        forward, backward = works(n, m)

        def excess(c):
            odds = m / n
            return (1 / (1 + np.exp(c - forward.numpy()) / odds)).sum() - (
                1 / (1 + odds * np.exp(backward.numpy() - c))
            ).sum()

        c = optimize.brentq(excess, -50, 50, xtol=1e-12)
        found = bennett(forward, backward)
        assert found.value == pytest.approx(c, abs=1e-9)
        # Shirts and Chodera 2008, eq. 9, over the pooled weights.
        fermi = 1 / (2 + 2 * np.cosh(math.log(m / n) + np.concatenate([forward, backward]) - c))
        variance = 1 / fermi.sum() - (n + m) / (n * m)
        assert found.stderr == pytest.approx(math.sqrt(variance), rel=1e-6)
        assert found.ess == pytest.approx(4 * fermi.sum(), rel=1e-9)
        assert math.isnan(found.khat)
        assert (found.method, found.n) == ("bracket", n + m)

    @pytest.mark.parametrize(("n", "m"), [(100, 100), (400, 50), (50, 400)])
    @pytest.mark.parametrize("s", [0.5, 2.5])
    def test_covers(self, n, m, s):
        scores = []
        for seed in range(60):
            found = bennett(*works(n, m, s=s, seed=seed))
            scores.append((found.value - 1.3) / found.stderr)
        assert chi_squared(scores)
        assert abs(np.mean(scores)) < 4 / math.sqrt(60)

    def test_is_better_than_either_alone(self):
        """Weights of deviation 2.5: exponential averages of a hundred miss, the acceptance ratio does not."""
        both = [works(100, 100, s=2.5, seed=seed) for seed in range(100)]
        joint = [bennett(*each).value - 1.3 for each in both]
        lower, upper = ([dense(each[0])[0] - 1.3 for each in both], [-dense(-each[1])[0] - 1.3 for each in both])
        assert np.mean(lower) < -0.2 < 0.2 < np.mean(upper)
        assert np.std(joint) < 0.6 * min(np.std(lower), np.std(upper))

    def test_exchanging_the_directions_turns_the_sign(self):
        forward, backward = works(70, 300)
        one, other = bennett(forward, backward), bennett(-backward, -forward)
        assert one.value == pytest.approx(-other.value, abs=1e-9)
        assert one[1:3] == pytest.approx(other[1:3])

    def test_a_shift_is_a_shift(self):
        forward, backward = works(70, 300)
        for shift in (-1e4, 1e4):
            moved = bennett(forward + shift, backward + shift)
            assert moved.value - shift == pytest.approx(bennett(forward, backward).value, abs=1e-7)
            assert moved.stderr == pytest.approx(bennett(forward, backward).stderr, abs=1e-7)

    def test_zeros_count(self):
        """A third of the noise is worth nothing: Z is a third less than from the others alone."""
        forward, backward = works(2000, 2000)
        with_zeros = torch.cat([forward, torch.full((1000,), -INF, dtype=F64)])
        found = bennett(with_zeros, backward)
        assert abs(found.value - (1.3 + math.log(2 / 3))) < 4 * found.stderr

    def test_directions_that_do_not_meet(self):
        forward, backward = torch.full((300,), -100.0), torch.full((300,), 100.0)
        found = bennett(forward, backward)
        assert found.stderr > 10
        assert found.ess < 1
        assert not believable(found)
        apart = bennett(forward - 1e6, backward + 1e6)
        assert apart.stderr > 1e6
        assert not believable(apart)

    def test_nothing_finite(self):
        found = bennett(torch.full((5,), -INF), torch.full((5,), INF))
        assert math.isnan(found.value)
        assert found.stderr == INF
        assert not believable(found)
        spoilt = bennett(torch.tensor([NAN, 0.0]), torch.zeros(2))
        assert not believable(spoilt)

    def test_refuses_one(self):
        with pytest.raises(InvalidValue, match="two weights. Got 1 and 2"):
            bennett(torch.zeros(1), torch.zeros(2))


class TestBracket:
    def test_is_made_of_its_runs(self):
        x, generator = draws_of_two(300), seeded(7)
        forward = ais(two, WIDE, n_chains=300, schedule=POOR, generator=generator)
        backward = reverse_ais(two, WIDE, x[:200], schedule=POOR, generator=generator)
        generator = seeded(7)
        again = ais(two, WIDE, n_chains=300, schedule=POOR, generator=generator)
        found = bracket(two, WIDE, x, n_chains=200, forward=again, generator=generator)
        assert found.lower == forward.log_z
        assert found.upper == backward.log_z
        joint = bennett(forward.log_w, backward.log_w)
        assert found.log_z[:3] == joint[:3]
        assert found.from_data
        assert found.unseen == pytest.approx(float((backward.log_w > forward.log_w.max()).double().mean()))
        assert found.gap == found.upper.value - found.lower.value

    def test_interval_is_from_the_lowest_to_the_highest(self):
        low, high = LogZ(1.0, 0.1, 90.0, 0.2, "ais", 100), LogZ(1.2, 0.2, 90.0, 0.2, "reverse-ais", 100)
        found = Bracket(low, high, low, 0.0, True)
        assert found.interval() == pytest.approx((1 - 0.196, 1.2 + 0.392))
        assert found._replace(lower=high, upper=low).interval() == found.interval()
        assert found._replace(upper=high._replace(stderr=9.0)).interval()[0] == pytest.approx(1.2 - 9 * 1.96)

    @pytest.mark.parametrize("own", [False, True])
    def test_covers(self, own):
        """Forty brackets; the interval is wider than 95%, the joint error is right or, of own samples, too large."""
        scores, inside = [], 0
        for seed in range(40):
            x = None if own else draws_of_two(200, seed=1000 + 2 * seed)
            found = bracket(two, WIDE, x, n_chains=200, schedule=POOR, generator=seeded(seed))
            low, high = found.interval()
            inside += low < LOG_Z < high
            scores.append((found.log_z.value - LOG_Z) / found.log_z.stderr)
            assert found.from_data is not own
            if own:
                assert found.log_z.stderr >= found.lower.stderr
        assert inside >= 36
        if own:
            assert np.square(scores).sum() < stats.chi2(40).ppf(1 - 1e-3)
        else:
            assert chi_squared(scores)

    def test_bounds_on_average(self):
        """Jensen: ten chains from the noise lie below, ten from the model above."""
        forward = ais(two, FAR, n_chains=6000, schedule=POOR, generator=seeded())
        backward = reverse_ais(two, FAR, draws_of_two(6000), schedule=POOR, generator=seeded())
        for run, sign in ((forward, -1), (backward, 1)):
            values = [-sign * dense(-sign * part)[0] for part in run.log_w.split(10)]
            assert sign * (np.mean(values) - LOG_Z) > 4 * np.std(values) / math.sqrt(600)

    def test_own_samples_are_the_chains_that_count(self):
        """Chains at -1 weigh nothing, those at 1.5 all: with steps that lead nowhere, all that return begin there."""
        still = Schedule((0.0, 1.0), (HMC(1e-9, n_leapfrog=1),), (1.0,))
        x = torch.tensor([-1.0, 1.5], dtype=F64).repeat(50)[:, None]
        log_w = torch.where(x[:, 0] > 0, 0.0, -INF)
        forward = Annealing(estimate(log_w, "ais"), log_w, x, (1.0,), still)
        found = bracket(two, WIDE, forward=forward, generator=seeded())
        there = torch.tensor([[1.5]], dtype=F64)
        assert found.upper.value == pytest.approx(float(two(there) - WIDE.log_prob(there)))
        assert found.upper.n == 100

    def test_a_zero_density_is_no_hindrance(self):
        x = randn(2000, 1).abs()
        found = bracket(Half(), WIDE, x, n_chains=2000, schedule=POOR, generator=seeded())
        assert abs(found.log_z.value - math.log(math.pi / 2) / 2) < 4 * found.log_z.stderr

    def test_unseen(self):
        assert unseen(torch.tensor([0.0, 1.0, 2.0, 3.0]), 2.0) == 0.25
        assert unseen(torch.tensor([NAN, -INF]), 2.0) == 0
        assert unseen(torch.tensor([0.0, 1.0]), -INF) == 1

    def test_refuses_populations(self):
        run = ais(two, WIDE, n_chains=64, schedule=POOR, resample=True)
        with pytest.raises(InvalidValue, match="give a 'forward' run without 'resample'"):
            bracket(two, WIDE, forward=run)

    def test_same_generator_same_bits(self):
        first, second = (bracket(two, WIDE, n_chains=50, generator=seeded(3)) for _ in range(2))
        assert first == second


class TestStuck:
    def test_nowhere_in_a_gaussian(self):
        easy, q = target("gaussian-10"), gaussian_of(10, 0.0, 2.0)
        run = ais(easy.log_density, q, n_betas=40, generator=seeded())
        assert stuck(run, easy.log_density, q, generator=seeded()) == 0

    def test_in_the_neck_of_a_funnel(self):
        neck = target("funnel-10")
        q = Gaussian.fit(neck.sample(4000, generator=seeded())).double()
        run = ais(neck.log_density, q, n_chains=8, n_betas=20, generator=seeded())
        exact = run._replace(x=neck.sample(512, generator=seeded(1)), log_w=torch.zeros(512, dtype=F64))
        assert stuck(exact, neck.log_density, q, generator=seeded()) > 0.1

    def test_by_hand(self):
        """A long step in a mixture of a wide and a narrow normal: the chains of the narrow one stand still."""
        share = 0.3

        def log_p(x):
            near, far = ((x[:, 0] / scale).square() / 2 for scale in (1e-3, 1.0))
            return torch.logaddexp(math.log(share / 1e-3) - near, math.log(1 - share) - far)

        narrow = torch.rand(2000, 1, generator=seeded(), dtype=F64) < share
        x = torch.where(narrow, 1e-3, 1.0) * randn(2000, 1)
        schedule = Schedule((0.0, 1.0), (HMC(1.0, n_leapfrog=1),), (1.0,))
        found = LogZ(0.0, 0.0, 0.0, 0.0, "ais", 2000)
        run = Annealing(found, torch.zeros(2000, dtype=F64), x, (1.0,), schedule)
        error = math.sqrt(share * (1 - share) / 512)
        assert abs(stuck(run, log_p, gaussian_of(1), generator=seeded()) - share) < 4 * error
        # By their weights the narrow ones count nothing.
        weighted = run._replace(log_w=torch.where(narrow[:, 0], -INF, 0.0).double())
        assert stuck(weighted, log_p, gaussian_of(1), generator=seeded()) < 0.02


# Grids.


def box_of(half, dim):
    return torch.tensor([-half, half], dtype=F64)[:, None].expand(2, dim).clone()


LIKE = torch.zeros((), dtype=F64)


class TestGrid:
    @pytest.mark.parametrize(("dim", "cells"), [(1, 512), (2, 128), (3, 40)])
    def test_quartic(self, dim, cells):
        """The integral of exp(-x^4) is 2 Gamma(5/4) in each coordinate."""
        found = grid(lambda x: -x.pow(4).sum(-1), box_of(3.0, dim), like=LIKE, cells=cells)
        truth = dim * math.log(2 * special.gamma(1.25))
        assert abs(found.value - truth) <= found.stderr + 1e-12
        assert found.stderr < 1e-3
        points = sum(n**dim for n in (cells, round(cells / 2**0.5), cells // 2))
        assert (found.method, found.n) == ("grid", points)

    def test_a_thin_ridge_fools_two_resolutions(self):
        """By chance 256 cells and half of them agree to 3e-5 on what is wrong by 3e-3; a third resolution does not."""
        aim, box = target("gaussian-2"), torch.tensor([[-11.1679, -14.6643], [11.7103, 12.9963]], dtype=F64)
        fine, other, coarse = resolutions(aim.log_density, box, 256, like=LIKE)
        two, three = summary(fine, coarse), summary(fine, other, coarse)
        error = abs(three.value - aim.log_z)
        assert error > 20 * two.stderr
        assert error < 1.96 * three.stderr

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_is_the_midpoint_rule(self, dim):
        box = torch.stack([torch.linspace(-2, -1, dim), torch.linspace(1, 3, dim)]).double()
        found = evaluate(lopsided if dim > 1 else two, box, 6, like=LIKE)
        axes = [np.linspace(a, b, 7)[:-1] + (b - a) / 12 for a, b in box.T.tolist()]
        points = torch.tensor(np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, dim))
        values = (lopsided if dim > 1 else two)(points)
        torch.testing.assert_close(found.log_p.flatten(), values)
        volume = float((box[1] - box[0]).prod()) / 6**dim
        assert float(found.log_masses.exp().sum()) == pytest.approx(float(values.exp().sum() * volume))
        index = torch.tensor([[0] * dim, [5] * dim])
        torch.testing.assert_close(found.centres(index), points[[0, -1]])

    def test_chunks_do_not_matter(self):
        whole, parts = (evaluate(two, box_of(3.0, 1), 100, like=LIKE, chunk=chunk) for chunk in (4096, 7))
        assert torch.equal(whole.log_p, parts.log_p)

    @pytest.mark.parametrize("cells", [6, 8, 10, 14, 30, 100])
    def test_error_from_the_resolution(self, cells):
        """A normal of deviation 0.3 between cells of 8 / n: the error is known, and admitted."""
        found = grid(lambda x: -((x[:, 0] - 0.1) / 0.3).square() / 2, box_of(4.0, 1), like=LIKE, cells=cells)
        error = abs(found.value - math.log(0.3 * math.sqrt(2 * math.pi)))
        assert error <= found.stderr + 1e-10
        assert (found.stderr > 0.1) == (cells < 30)

    @pytest.mark.parametrize("half", [20.0, 50.0, 500.0])
    @pytest.mark.parametrize("df", [0.5, 1.0, 3.0])
    def test_error_from_a_heavy_tail(self, half, df):
        """A Student-t: the error bounds what is missing, and is not much more."""
        t = stats.t(df)
        constant = float(t.logpdf(0.0))
        found = grid(lambda x: constant - (df + 1) / 2 * torch.log1p(x[:, 0] ** 2 / df), box_of(half, 1), like=LIKE)
        missing = -math.log1p(-2 * t.sf(half))
        assert found.value == pytest.approx(-missing, abs=1e-3 * missing + 1e-4)
        assert 0.98 * missing < found.stderr < 1.5 * missing + 1e-3

    @pytest.mark.parametrize("half", [2.0, 5.0, 10.0])
    def test_error_from_the_border(self, half):
        """exp(-|x|) goes on falling outside as at the border; what is left there is e^-half, and a frame is added. A
        power of the distance that falls as fast there has 1 + 1 / (half - 1) times as much beyond."""
        found = grid(lambda x: -x[:, 0].abs(), box_of(half, 1), like=LIKE, cells=10_000)
        missing = math.log(2) - found.value
        assert missing == pytest.approx(-math.log1p(-math.exp(-half)), rel=1e-2)
        frame = 2 * half / 100
        expected = math.exp(-(half - frame)) / -math.expm1(-half)
        fine = evaluate(lambda x: -x[:, 0].abs(), box_of(half, 1), 10_000, like=LIKE)
        power = math.exp(-half) * (half / (half - 1) + math.expm1(frame)) / -math.expm1(-half)
        assert mass_outside(fine) == pytest.approx(power, rel=0.2)
        assert mass_outside(fine) > 0.99 * expected
        assert missing < found.stderr < 2.1 * missing

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_mass_outside_of_a_gaussian(self, dim):
        for half in (2.0, 3.0):
            truth = 1 / (stats.norm.cdf(half) - stats.norm.cdf(-half)) ** dim - 1
            fine = evaluate(lambda x: -x.square().sum(-1) / 2, box_of(half, dim), 100, like=LIKE)
            assert truth < mass_outside(fine) < 12 * truth

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_mass_that_does_not_fall(self, dim):
        for cells in (7, 40, 250) if dim < 3 else (7, 40):
            assert mass_outside(Grid(torch.zeros([cells] * dim, dtype=F64), torch.zeros(dim), torch.ones(dim))) == INF
        assert grid(lambda x: x.square().sum(-1), box_of(1.0, dim), like=LIKE, cells=40).stderr == INF

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_fitting_box(self, dim):
        """Around points in the middle: it grows until less than 1e-6 is left outside, and not much farther."""
        scale = torch.tensor([1.0, 3.0, 0.5], dtype=F64)[:dim]
        points = 0.4 * scale * randn(100, dim)

        def log_p(x):
            return -(x / scale).square().sum(-1) / 2

        low, high = fitting_box(log_p, points, like=LIKE)
        inside = (stats.norm.cdf(high / scale) - stats.norm.cdf(low / scale)).prod()
        assert 1 - inside < 1e-6
        assert (high - low).max() < 40 * scale.max()
        near = 8 * torch.stack([-scale, scale])
        assert torch.equal(fitting_box(log_p, near, like=LIKE), bounding_box(near))

    def test_fitting_box_gives_up(self):
        points = torch.tensor([[-1.0], [1.0]], dtype=F64)
        low, high = fitting_box(lambda x: 0 * x[:, 0], points, like=LIKE)
        assert high - low == pytest.approx(2 * 1.5**7)

    def test_in_the_models_precision(self):
        seen = set()

        def log_p(x):
            seen.add(x.dtype)
            return -x.square().sum(-1) / 2

        grid(log_p, box_of(5.0, 1), like=torch.zeros(()), cells=8)
        assert seen == {torch.float32}

    def test_default_resolution(self):
        for dim, cells in ((1, 4096), (2, 512)):
            points = sum(n**dim for n in (cells, round(cells / 2**0.5), cells // 2))
            assert grid(two, box_of(5.0, dim), like=LIKE).n == points
        with pytest.raises(InvalidValue, match="1 to 3 dimensions. Got 4"):
            grid(two, box_of(5.0, 4), like=LIKE)

    def test_agrees_with_scipy(self):
        def density(y, x):
            return math.exp(-(x**4) / 4 - (y - 0.5 * x) ** 2 / 3 + 0.3 * x)

        truth = math.log(integrate.dblquad(density, -4, 4, -12, 12)[0])
        found = grid(lopsided, torch.tensor([[-4.0, -12.0], [4.0, 12.0]], dtype=F64), like=LIKE, cells=200)
        assert found.value == pytest.approx(truth, abs=1e-6)

    def test_two_resolutions_that_agree_by_chance(self):
        """A Student-t of 2 degrees, of width 1, in cells of width 1 to 6: its density is normalised, log Z is 0."""

        def t_logp(x):
            return -1.5 * torch.log(2 + x[:, 0].square())

        x = torch.tensor([[0.3], [-7.0]], dtype=F64)
        np.testing.assert_allclose(t_logp(x), stats.t(2).logpdf(x[:, 0]), rtol=1e-12)
        resolutions_alone = []
        for half in np.linspace(500, 3000, 201):
            box = [[-half], [1.07 * half]]
            found = grid(t_logp, box, like=LIKE, cells=1024)
            assert abs(found.value) < 4 * found.stderr + 0.005
            fine, coarse = (evaluate(t_logp, torch.tensor(box, dtype=F64), n, like=LIKE) for n in (1024, 512))
            change = abs(float(fine.log_masses.logsumexp(0) - coarse.log_masses.logsumexp(0)))
            resolutions_alone.append(abs(found.value) < 4 * (change + math.log1p(mass_outside(fine))) + 0.005)
        assert 10 < resolutions_alone.count(False) < 100  # what the further term is for

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_mass_in_few_cells(self, dim):
        """A Gaussian of a deviation of s cells: 1 / sum of squared shares is 2 sqrt(pi) s in each dimension."""
        for s in (1.0, 2.0):
            found = grid(lambda x, s=s: -(x / s).square().sum(-1) / 2, box_of(16.0, dim), like=LIKE, cells=32)
            assert abs(found.value - dim * math.log(s * math.sqrt(2 * math.pi))) < 1e-7
            coarse = grid(lambda x, s=s: -(x / s).square().sum(-1) / 2, box_of(16.0, dim), like=LIKE, cells=16)
            change = abs(found.value - coarse.value)
            assert found.stderr - change == pytest.approx(math.exp(-2 * math.sqrt(math.pi) * s), rel=1e-3)

    def test_usual_cases_keep_a_small_error(self):
        found = grid(Quadratic(2), [[-8.0, -8.0], [8.0, 8.0]])
        assert found.stderr < 1e-6
        assert abs(found.value - math.log(2 * math.pi)) < 1e-5

    def test_a_box_in_any_form(self):
        expected = grid(two, box_of(5.0, 1), like=LIKE, cells=64)
        for box in ([[-5.0], [5.0]], np.array([[-5], [5]]), list(box_of(5.0, 1).float())):
            assert grid(two, box, like=LIKE, cells=64) == expected

    def test_without_like_in_the_default_dtype(self):
        seen = set()

        def log_p(x):
            seen.add(x.dtype)
            return -x.square().sum(-1) / 2

        grid(log_p, [[-5.0], [5.0]], cells=8)
        assert seen == {torch.get_default_dtype()}

    def test_boxes_that_are_none(self):
        with pytest.raises(InvalidValue, match=r"below the upper one in every dimension. Got \[8.0\], \[-8.0\]"):
            grid(two, [[8.0], [-8.0]], like=LIKE)
        for lower in ([-8.0, 8.0], [-8.0, 9.0], [-8.0, -INF], [NAN, -8.0]):
            with pytest.raises(InvalidValue, match="must have its lower corner first, finite, and below"):
                grid(two, [lower, [8.0, 8.0]], like=LIKE)
        for box in ([-8.0, 8.0], [[-8.0], [8.0, 8.0]], [[-8.0]], torch.zeros(3, 2)):
            with pytest.raises(InvalidValue, match=r"a lower and an upper corner, \(2, d\). Got shapes \["):
                grid(two, box, like=LIKE)


# The ladder.


LADDER = importlib.import_module("unnorm.partition.ladder")  # in the package this is the function's name


def fitted(name, seed):
    """A target, a Gaussian noise fitted to some of its draws, and others held out."""
    aim = target(name)
    x = aim.sample(6000, generator=seeded(seed))
    return aim, Gaussian.fit(x[:4000]).double(), x[4000:]


def error_of(climb, truth):
    """In units of the stated error; a grid's at least 1e-6, for its own rounding."""
    return (climb.log_z.value - truth) / max(climb.log_z.stderr, 1e-6)


def methods(climb):
    return [rung.log_z.method for rung in climb.rungs]


def two_far(dim, apart=20.0):
    """Two unit normals, the second with a third of the mass; log Z = 0.5."""
    mean = torch.zeros(dim, dtype=F64)
    mean[0] = apart

    def log_p(x):
        near, far = (-(x - m).square().sum(-1) / 2 for m in (torch.zeros_like(x[0]), mean.to(x)))
        return torch.logaddexp(math.log(2 / 3) + near, math.log(1 / 3) + far) + 0.5 - dim / 2 * math.log(2 * math.pi)

    x = randn(6000, dim)
    x[4000:] += mean
    return log_p, x  # sorted, as data often are


class TestLadder:
    @pytest.mark.parametrize(
        ("given", "seeds"),
        [
            (False, range(12)),
            (True, range(5)),
            pytest.param(False, range(20, 60), marks=pytest.mark.slow),
            pytest.param(True, range(20, 60), marks=pytest.mark.slow),
        ],
        ids=["alone", "data", "alone many", "data many"],
    )
    def test_never_trusted_and_wrong(self, given, seeds):
        """Three targets, each seed with a noise and data of its own; the errors of those without doubts cover."""
        scores = []
        names = ("gaussian-10-easy", "student-t-5", "rbm") if given else ("gaussian-10-easy", "rbm")
        for name in names:
            for seed in seeds:
                aim, q, data = fitted(name, seed)
                climb = ladder(
                    aim.log_density,
                    q,
                    data=data if given else None,
                    evaluations=200_000,
                    generator=seeded(1000 + seed),
                )
                assert climb.trusted == (given and not climb.doubts)
                if not climb.doubts:
                    scores.append(error_of(climb, aim.log_z))
        assert len(scores) >= 0.8 * len(names) * len(seeds)
        assert np.abs(scores).max() < 4
        # Annealed chains may state too large an error, not too small a one.
        low, high = stats.chi2(len(scores)).ppf([1e-3, 1 - 1e-3])
        assert low / 2 < np.square(scores).sum() < high

    @pytest.mark.parametrize(("name", "seeds"), [("banana-2", 20), ("gaussian-2", 5), ("mixture-40", 1)])
    @pytest.mark.parametrize("given", [False, True], ids=["alone", "data"])
    def test_in_the_plane_a_grid_decides(self, name, seeds, given):
        """A grid's error is a bound, no deviation."""
        for seed in range(seeds):
            aim, q, data = fitted(name, seed)
            climb = ladder(aim.log_density, q, data=data if given else None, generator=seeded(seed))
            assert not climb.doubts
            assert climb.trusted == (given or climb.log_z.method == "grid")
            assert methods(climb)[:2] == ["importance", "grid"]
            assert abs(error_of(climb, aim.log_z)) < (2 if climb.log_z.method == "grid" else 4)
            # An ellipse a hundred times as long as wide is too narrow for the cells.
            assert climb.log_z.method == "grid" or name == "gaussian-2"
            assert climb.log_z.stderr <= climb.wanted

    def test_does_not_depend_on_units(self):
        """Fitted noises of two Gaussians from the same random numbers are one problem in two coordinate systems."""
        errors = []
        for name in ("gaussian-10-easy", "gaussian-10"):
            aim, q, _ = fitted(name, 3)
            climb = ladder(aim.log_density, q, generator=seeded())
            assert not climb.doubts
            errors.append(climb.log_z.value - aim.log_z)
        assert errors[0] == pytest.approx(errors[1], abs=1e-4)
        assert abs(errors[1]) < 4 * climb.log_z.stderr

    @pytest.mark.parametrize("given", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "data"])
    def test_a_funnel_is_flagged(self, given):
        aim, q, data = fitted("funnel-10", 0)
        climb = ladder(
            aim.log_density, q, data=data if given else None, n=20_000, evaluations=100_000, generator=seeded()
        )
        assert not climb.trusted
        assert methods(climb) == ["importance", "ais", "bracket"]
        assert "NOT to be trusted" in climb.lines()[-1]

    @pytest.mark.parametrize(
        ("share", "given", "sound"),
        [(0.0, False, True), (0.004, False, True), (0.006, False, False), (0.015, True, True), (0.03, True, False)],
    )
    def test_chains_that_stand_still_are_not_trusted(self, monkeypatch, share, given, sound):
        monkeypatch.setattr(LADDER, "stuck", lambda *_, **__: share)
        aim, q = target("gaussian-10-easy"), gaussian_of(10, 0.0, 1.2)
        data = aim.sample(2000, generator=seeded(3)) if given else None
        climb = ladder(aim.log_density, q, data=data, n=20_000, generator=seeded())
        assert (not climb.doubts) == sound
        assert climb.trusted == (sound and given)
        assert sound != (f"in {share:.1%} of the mass the chains all but stand still" in climb.lines()[-1])
        assert methods(climb)[-1] == ("ais" if sound and not given else "bracket")

    def test_later_chains_join_the_first(self, monkeypatch):
        """Weights and ends of both runs, in one order; the error is that of all."""
        aim, q, seen = target("gaussian-10-easy"), gaussian_of(10, 0.0, 1.2), []

        def marked(*arguments, **options):
            run = ais(*arguments, **options)
            seen.append(run.log_w)
            return run._replace(x=run.log_w[:, None].expand_as(run.x).clone())

        def ends(run, *_, **__):
            assert torch.equal(run.x[:, 0], run.log_w)
            assert torch.equal(run.log_w, torch.cat(seen))
            assert run.log_z == estimate(run.log_w, "ais")
            return 0.0

        monkeypatch.setattr(LADDER, "ais", marked)
        monkeypatch.setattr(LADDER, "stuck", ends)
        climb = ladder(aim.log_density, q, n=2000, generator=seeded())
        assert len(seen) == 2
        assert len(seen[0]) == 512
        assert climb.rungs[1].log_z.n == sum(len(log_w) for log_w in seen)
        assert climb.rungs[1].log_z.stderr <= 0.02

    def test_stops_at_importance_where_that_is_enough(self):
        model, x = Counted(lambda x: -x.square().sum(-1) / 2), randn(500, 4)
        climb = ladder(model, gaussian_of(4, 0.0, 1.2), data=x, generator=seeded())
        assert methods(climb) == ["importance"]
        assert climb.trusted
        assert model.points == 10_000 + 500 + 2 * (RAYS + 2 * 4)  # at two distances, along rays and four axes
        assert abs(climb.log_z.value - 2 * math.log(2 * math.pi)) < 4 * climb.log_z.stderr
        assert climb.lines()[-1].startswith("log Z by importance, trusted: ")
        assert "(enough): stderr" in climb.lines()[0]

    def test_draws_as_many_as_the_error_takes(self):
        """N(0, 1) by N(0, s^2): a weight's relative variance is (s^2 / sqrt(2 s^2 - 1))^4 - 1 in four coordinates."""
        q, s = gaussian_of(4, 0.0, 1.5), 1.5
        variance = (s**2 / math.sqrt(2 * s**2 - 1)) ** 4 - 1

        def climbed(**options):
            return ladder(lambda x: -x.square().sum(-1) / 2, q, evaluations=10_000, generator=seeded(), **options)

        climb = climbed(stderr=0.01, first=1000)
        assert methods(climb) == ["importance"]
        assert 0.95 < climb.log_z.n / (variance / 0.01**2) < 1.5
        look = importance(lambda x: -x.square().sum(-1) / 2, q, 1000, generator=seeded())
        assert climb.log_z.n == int(1.1 * 1000 * (look.stderr / 0.01) ** 2)
        # Out of reach: an eighth is enough to know.
        hopeless = climbed(stderr=1e-3, n=80_000)
        assert hopeless.rungs[0].log_z.n == 10_000
        assert hopeless.rungs[0].why.endswith("is above the wanted 0.001")
        assert "(not enough)" in hopeless.lines()[0]
        unsure = climbed(stderr=1e-3, n=80_000, first=2000)
        assert unsure.rungs[0].log_z.n > 10_000 - 1
        assert climbed(stderr=1e-9, n=500).rungs[0].log_z.n == 500

    def test_every_rung_is_reached_and_named(self):
        aim, q, data = fitted("student-t-5", 1)
        climb = ladder(aim.log_density, q, data=data, generator=seeded(1001))
        assert methods(climb) == ["importance", "ais", "bracket"]
        lines = climb.lines()
        assert len(lines) == 4
        for line, rung in zip(lines, climb.rungs, strict=False):
            assert line.startswith(f"{rung.log_z.method}: {rung.log_z.value:.4f} ± {rung.log_z.stderr:.4f} (")
            assert line.endswith(rung.why)
        assert "mass was missed" in lines[0]
        assert "the data said" in lines[1]
        assert "between" in lines[2]
        assert set(climb.log_zs()) == set(methods(climb))
        assert list(climb.log_zs().values())[-1] == climb.log_z
        aim, q = target("gaussian-10-easy"), gaussian_of(10, 0.0, 1.2)
        climb = ladder(aim.log_density, q, n=20_000, generator=seeded())
        assert methods(climb) == ["importance", "ais"]
        assert not climb.doubts
        assert abs(error_of(climb, aim.log_z)) < 4

    def test_three_dimensions_have_a_grid_between(self):
        narrow = gaussian_of(3, 0.0, 0.6)
        climb = ladder(lambda x: -x.square().sum(-1) / 2, narrow, n=20_000, generator=seeded())
        assert methods(climb) == ["importance", "grid"]
        assert climb.log_z.value == pytest.approx(1.5 * math.log(2 * math.pi), abs=1e-3)
        assert climb.trusted
        wide = ladder(lambda x: -x.square().sum(-1) / 2, gaussian_of(3, 0.0, 1.2), generator=seeded())
        assert methods(wide) == ["importance"]

    @pytest.mark.parametrize("apart", [5.0, 6.0, 8.0, 12.0])
    def test_a_mode_at_the_border_of_the_noise(self, apart):
        """Where a draw or two come near it, the weights are bad and the data speak, too: neither drowns the other."""
        log_p, data = two_far(4, apart)
        for seed in range(3):
            climb = ladder(
                log_p, gaussian_of(4, 0.0, 1.2), data=data, n=20_000, evaluations=100_000, generator=seeded(seed)
            )
            assert not climb.rungs[0].enough
            assert LADDER.MISSES in climb.rungs[0].why
            assert "the data said" in climb.rungs[1].why
            assert not climb.trusted or abs(climb.log_z.value - 0.5) < 4 * climb.log_z.stderr

    @pytest.mark.parametrize("dim", [1, 2, 3, 4, 6])
    def test_a_mode_that_the_noise_misses(self, dim):
        """Draws of the noise alone see two thirds, with the best of weights; data show the rest."""
        log_p, data = two_far(dim)
        q = gaussian_of(dim, 0.0, 1.2)
        assert believable(importance(log_p, q, 20_000, generator=seeded()))
        for seed in range(3 if dim != 3 else 1):
            climb = ladder(log_p, q, data=data, n=40_000, evaluations=200_000, generator=seeded(seed))
            assert not climb.rungs[0].enough
            # A third of the rows lies there: 4,000 of 6,000 are looked at, and near the top of the other mode a row or
            # two may exceed all draws by chance.
            share = float(climb.rungs[0].why.split("%")[0].split()[-1]) / 100
            error = math.sqrt(2 / 9 / 4000 * (1 - 4000 / 6000))
            assert abs(share - 1 / 3) < 4 * error + 5 / 4000
            assert not climb.trusted or abs(climb.log_z.value - 0.5) < 4 * max(climb.log_z.stderr, 1e-6)
            assert climb.trusted or dim > 3

    def test_what_no_data_show_is_missed(self):
        """Nothing else can find it."""
        log_p, data = two_far(4)
        near = data[data[:, 0] < 10]
        q = gaussian_of(4, 0.0, 1.2)
        blind = ladder(log_p, q, data=near, n=40_000, generator=seeded())
        assert blind.log_z.value == pytest.approx(0.5 + math.log(2 / 3), abs=4 * blind.log_z.stderr)
        far = data[data[:, 0] > 10]
        for rows, enough in ((0, True), (60, False)):
            told = torch.cat([near[:1000], far[:rows]])
            climb = ladder(log_p, q, data=told, n=40_000, evaluations=50_000, generator=seeded())
            assert climb.rungs[0].enough == enough

    @pytest.mark.parametrize("given", [False, True], ids=["alone", "data"])
    @pytest.mark.parametrize("evaluations", [80_000, 300_000])
    def test_evaluations_are_kept(self, evaluations, given):
        """All of both rungs of chains, but for the pilot's, those of `stuck`, and the chains' first."""
        aim, q = target("gaussian-10"), gaussian_of(10, 0.0, 2.0)
        data = aim.sample(4000, generator=seeded()) if given else None
        model, pilot = (Counted(aim.log_density) for _ in range(2))
        climb = ladder(
            model, q, data=data, stderr=1e-3, n=2000, first=1000, evaluations=evaluations, generator=seeded()
        )
        assert methods(climb) == ["importance", "ais", "bracket"]
        schedule = plan(pilot, q, generator=seeded(1))
        overhead = climb.rungs[2].log_z.n + 512 * (1 + 20 * schedule.samplers[-1].leapfrog_steps)
        spent = model.points - climb.rungs[0].log_z.n - 4000 * given - pilot.points
        assert spent <= 1.1 * (evaluations + overhead)
        assert spent > 0.4 * evaluations

    @pytest.mark.parametrize("dim", [1, 4])
    @pytest.mark.parametrize(
        "bad",
        [
            lambda x: torch.full((len(x),), NAN),
            lambda x: torch.full((len(x),), -INF),
            lambda x: torch.where(x[:, 0] > 2, NAN, -x.square().sum(-1) / 2),
            lambda x: torch.where(x[:, 0] > 2, INF, -x.square().sum(-1) / 2),
        ],
        ids=["nan", "zero", "nan somewhere", "inf somewhere"],
    )
    def test_a_model_that_is_not_finite(self, bad, dim):
        for data in (None, torch.zeros(20, dim)):
            climb = ladder(bad, Gaussian(dim), data=data, n=2000, first=2000, evaluations=10_000, generator=seeded())
            assert not climb.trusted
            assert "log Z is" in climb.lines()[0]

    @pytest.mark.parametrize("kind", ["data", "train"])
    @pytest.mark.parametrize("place", [0, 7, 100, 150, 199])
    def test_rows_where_the_model_is_zero(self, place, kind):
        """Such a row is found wherever it stands among the others: chains back start at 128 of the 200 at most."""

        def log_p(x):
            return torch.where(x[:, 0] > -3, -50 * x.square().sum(-1), -INF)

        rows = 0.1 * randn(200, 4)
        rows[place, 0] = -4
        climb = ladder(
            log_p, Gaussian(4), **{kind: rows}, n=2000, first=1000, evaluations=20_000, generator=seeded(place)
        )
        assert not climb.trusted
        assert "no density at 1 of 200 rows from the data: chains cannot start there" in climb.lines()[-1]

    def test_a_spike_between_the_cells(self):
        """A tenth of the mass within 1e-4 of a point that neither draws nor cells come near; some data are there.

        The grid is told so by them, or the next rungs find it.
        """
        spot = torch.tensor([1.234567, 0.7654321], dtype=F64)

        def log_p(x):
            near, far = ((x - spot) / 1e-4).square().sum(-1) / 2, x.square().sum(-1) / 2
            return torch.logaddexp(math.log(0.1 / 1e-8) - near, math.log(0.9) - far) - math.log(2 * math.pi)

        data = torch.cat([randn(900, 2), spot + 1e-4 * randn(100, 2, seed=1)])
        climb = ladder(log_p, gaussian_of(2, 0.0, 1.2), data=data, evaluations=50_000, generator=seeded())
        assert methods(climb)[1] == "grid"
        assert LADDER.MISSES in climb.rungs[1].why
        assert not climb.trusted or abs(climb.log_z.value) < 4 * climb.log_z.stderr

    def test_a_spike_that_only_the_noise_knows(self):
        """No cell sees a third of the mass, draws of the noise do: the grid is below them, and not trusted."""
        spot = torch.tensor([1.234567, 0.7654321], dtype=F64)
        places, scales = torch.stack([torch.zeros(2, dtype=F64), spot]), torch.tensor([1.0, 1e-5], dtype=F64)
        parts = td.Independent(td.Normal(places, scales[:, None].expand(2, 2)), 1)
        shares = torch.tensor([[0.7, 0.3], [0.6, 0.4]], dtype=F64)
        model, q = (td.MixtureSameFamily(td.Categorical(share), parts) for share in shares)
        climb = ladder(model.log_prob, from_distribution(q), evaluations=50_000, generator=seeded())
        assert not climb.rungs[1].enough
        assert "errors below importance sampling" in climb.rungs[1].why
        assert not climb.trusted or abs(climb.log_z.value) < 4 * climb.log_z.stderr

    def test_data_that_are_not_quite_the_models(self, monkeypatch):
        """Too close together by a third, but in the right mode: they are settled before they count."""
        settled = []

        def noted(*arguments, **options):
            settled.append(options["settle"])
            return bracket(*arguments, **options)

        monkeypatch.setattr(LADDER, "bracket", noted)
        aim, q = target("gaussian-10-easy"), gaussian_of(10, 0.0, 1.2)
        data = aim.numbers[0] + 0.65 * (aim.sample(2000, generator=seeded()) - aim.numbers[0])
        climb = ladder(aim.log_density, q, data=data, n=2000, evaluations=2_000_000, generator=seeded())
        assert methods(climb) == ["importance", "ais", "bracket"]
        assert climb.trusted
        assert abs(error_of(climb, aim.log_z)) < 4
        assert climb.log_z.stderr < 0.03
        ladder(aim.log_density, q, stderr=1e-3, n=2000, evaluations=20_000, generator=seeded())
        assert settled == [LADDER.SETTLE, 0]

    def test_a_conflict_is_not_trusted(self, monkeypatch):
        monkeypatch.setattr(LADDER, "_conflict", lambda found, rungs: f"{found.method} and {len(rungs)} disagree")
        aim, q = target("gaussian-10-easy"), gaussian_of(10, 0.0, 1.2)
        climb = ladder(aim.log_density, q, n=20_000, generator=seeded())
        assert climb.rungs[1].why == "ais and 1 disagree"
        assert climb.doubts == ("ais and 1 disagree",)

    def test_a_tail_beyond_the_noise(self):
        """Cauchy's tails in four coordinates: no weight is finite in the mean square."""
        heavy = td.StudentT(torch.tensor(1.0, dtype=F64))
        climb = ladder(
            lambda x: heavy.log_prob(x).sum(-1),
            gaussian_of(4, 0.0, 2.0),
            n=20_000,
            evaluations=50_000,
            generator=seeded(),
        )
        assert not climb.rungs[0].enough
        assert not climb.trusted or abs(climb.log_z.value) < 4 * climb.log_z.stderr

    def test_events_of_any_shape(self):
        q = Gaussian((2, 3))
        q.scale_tril.mul_(1.3)
        climb = ladder(lambda x: -x.flatten(1).square().sum(-1) / 2, q, data=torch.randn(50, 2, 3), generator=seeded())
        assert climb.trusted
        assert abs(climb.log_z.value - 3 * math.log(2 * math.pi)) < 4 * climb.log_z.stderr

    @pytest.mark.parametrize(("k", "factor"), [(0.1, 1.0), (0.5, 1.5), (0.62, 1.8), (0.9, 1.0)])
    def test_heavy_weights_state_a_larger_error(self, k, factor):
        """From Pareto k 0.3 up to twice at 0.7, beyond which no error is believed; k is fitted to 0.05."""
        log_w = -k * ((torch.arange(20_000, dtype=F64) + 0.5) / 20_000).log()
        weights = streamed(log_w)
        ratio = LADDER._stated(weights).stderr / weights.log_z("importance").stderr
        assert ratio == pytest.approx(factor, abs=0.15 if factor > 1 else 1e-12)

    side = LogZ(1.0, 0.05, 900.0, 0.2, "ais", 1000)

    @pytest.mark.parametrize(
        ("value", "sound", "conflict"), [(1.3, True, False), (1.5, True, True), (1.5, False, False)]
    )
    def test_rungs_that_contradict_each_other(self, value, sound, conflict):
        """0.3 and 0.5 nats apart, with an error of 0.1 together."""
        other = LADDER.Rung(LogZ(value, math.sqrt(0.0075), 900.0, 0.2, "importance", 1000), sound, False, "")
        said = LADDER._conflict(self.side, [other])
        assert (said is not None) == conflict
        assert said is None or "ais and importance are 0.5 nats apart" in said

    @pytest.mark.parametrize(
        ("lower", "upper", "joint", "words"),
        [
            ({}, {}, {}, []),
            ({}, {"value": 1.3}, {}, ["from the model alone are 0.3 nats"]),
            ({"value": 0.7}, {}, {}, ["from the noise alone are 0.3 nats"]),
            ({"value": 0.7, "stderr": 0.1}, {"value": 1.1}, {}, []),
            ({"value": 0.7, "khat": 0.9}, {}, {}, []),
            ({"khat": 0.9}, {"value": 1.3, "khat": 0.9}, {}, ["neither end can be believed alone (Pareto k is 0.90"]),
            ({}, {"khat": 0.9}, {}, []),
            ({}, {}, {"ess": 50.0}, ["only 50 effective"]),
            ({}, {}, {"stderr": INF}, ["± inf"]),
        ],
    )
    def test_what_the_sides_have_against_a_bracket(self, lower, upper, joint, words):
        joined = self.side._replace(**({"stderr": 0.04, "khat": NAN, "method": "bracket"} | joint))
        found = Bracket(self.side._replace(**lower), self.side._replace(**upper), joined, 0.0, True)
        rung, doubts = LADDER._weigh(found, 0.1)
        assert len(doubts) == len(words)
        assert all(word in doubt for word, doubt in zip(words, doubts, strict=True))
        assert rung.log_z.value == joined.value
        assert rung.log_z.stderr >= joined.stderr
        assert rung.sound == (not words)
        assert not (rung.enough and words)
        rung, doubts = LADDER._weigh(found._replace(from_data=False), 0.01)
        assert not rung.enough
        assert any("neither end" in each for each in doubts) == ("khat" in lower)

    def test_same_generator_same_bits(self):
        aim, q, data = fitted("student-t-5", 1)
        before = torch.get_rng_state()
        first, second = (ladder(aim.log_density, q, data=data, generator=seeded(5)) for _ in range(2))
        assert first.lines() == second.lines()
        assert first.log_z == second.log_z
        assert torch.equal(before, torch.get_rng_state())

    def test_refusals(self):
        for options in ({"stderr": 0.0}, {"stderr": NAN}, {"n": 99}, {"first": 99}):
            with pytest.raises(InvalidValue, match="The ladder needs stderr > 0 and 100 draws"):
                ladder(two, WIDE, **options)


# What rows from the data can rule out.


class TestMassNotRuledOut:
    @pytest.mark.parametrize("n", [1, 25, 100, 1000, 4000])
    def test_the_rule_of_three(self, n):
        """A share m is missed by all of n rows with probability (1 - m)^n: at the limit with one of 5%."""
        assert mass_not_ruled_out(n) == pytest.approx(1 - 0.05 ** (1 / n), rel=1e-9)
        if n >= 25:
            assert mass_not_ruled_out(n) == pytest.approx(3 / n, rel=0.07)

    @pytest.mark.parametrize(("n", "missed"), [(25, 1), (100, 2), (1000, 40), (4000, 3999)])
    def test_where_some_rows_were_missed(self, n, missed):
        """So few or fewer rows lie there with a probability of 5%, by the binomial distribution."""
        assert stats.binom(n, mass_not_ruled_out(n, missed)).cdf(missed) == pytest.approx(0.05, rel=1e-6)

    def test_nothing_is_ruled_out(self):
        assert mass_not_ruled_out(0) == 1
        assert mass_not_ruled_out(30, 30) == 1

    @pytest.mark.parametrize(("share", "n"), [(0.02, 100), (0.05, 50), (0.07, 40), (0.001, 1000)])
    def test_covers(self, share, n):
        """Over all numbers of rows that may lie there, by their probabilities."""
        covered = sum(stats.binom(n, share).pmf(k) for k in range(n + 1) if mass_not_ruled_out(n, k) >= share)
        assert covered >= 0.95


def climb_of(*, rows=0, missed=0, doubts=(), unchecked="", **changes):
    found = LogZ(1.0, 0.01, 900.0, 0.2, "importance", 1000)._replace(**changes)
    return LADDER.Climb((LADDER.Rung(found, True, True, "because", rows, missed),), 0.02, doubts, unchecked)


class TestInterval:
    @pytest.mark.parametrize("method", ["importance", "ais", "bracket"])
    def test_includes_the_mass_that_rows_cannot_rule_out(self, method):
        """exp(log Z) (1 - m) is what was found if m was missed."""
        low, high = climb_of(rows=100, method=method).interval
        assert low == pytest.approx(1 - 1.96 * 0.01)
        missed = -math.expm1(1 + 1.96 * 0.01 - high)
        assert (1 - missed) ** 100 == pytest.approx(0.05, rel=1e-6)

    def test_rows_that_were_missed_widen_it(self):
        _, high = climb_of(rows=100, missed=2).interval
        missed = -math.expm1(1 + 1.96 * 0.01 - high)
        assert stats.binom(100, missed).cdf(2) == pytest.approx(0.05, rel=1e-6)

    def test_has_no_upper_end_without_rows(self):
        climb = climb_of()
        assert climb.interval == (pytest.approx(1 - 1.96 * 0.01), INF)
        assert (climb.rows, climb.mass_not_ruled_out) == (0, 1)

    @pytest.mark.parametrize("method", ["grid", "quadrature"])
    def test_of_a_grid_is_its_bound(self, method):
        climb = climb_of(method=method, khat=NAN, ess=NAN)
        assert climb.interval == climb.log_z.interval()
        assert climb.mass_not_ruled_out == 0

    def test_belongs_to_the_estimate_in_use(self):
        """The more exact of two that can be believed, with its own rows."""
        found = LogZ(1.0, 0.1, 900.0, 0.2, "importance", 1000)
        first = LADDER.Rung(found, True, False, "", 4000)
        second = LADDER.Rung(found._replace(stderr=0.05, method="bracket"), True, False, "", 300)
        climb = LADDER.Climb((first, second), 0.02, ())
        assert climb.log_z.method == "bracket"
        assert climb.rows == 300
        assert LADDER.Climb((first, second._replace(sound=False)), 0.02, ()).rows == 4000

    def test_the_last_line_says_so(self):
        assert climb_of(rows=300).lines()[-1] == (
            "log Z by importance, trusted: 0.9804 to 1.0296 at 95%, including the 0.99% of the mass that 300 rows "
            "cannot rule out"
        )
        assert "trusted, but known only to 0.03 nats: 0.9" in climb_of(rows=300, stderr=0.03).lines()[-1]
        assert climb_of(method="grid").lines()[-1] == "log Z by grid, trusted: 0.9804 to 1.0196 at 95%"
        assert climb_of(unchecked="nobody looked").lines()[-1] == (
            "log Z by importance, not checked: nobody looked. Rows of the data, held out or trained on, would settle it"
        )
        assert climb_of(doubts=("a", "b"), unchecked="c").lines()[-1] == "log Z by importance, NOT to be trusted: a; b"


# Shares of 0.93, 0.05 and 0.02 of the mass in thirty dimensions, and a noise that knows of all or of nothing.


def rare_modes(noise, seed=0):
    aim = target("rare-modes-30")
    q = Gaussian.fit(aim.sample(2000, generator=seeded(seed))) if noise == "fitted" else Gaussian(30)
    return aim, q.double()


class TestRows:
    @pytest.mark.parametrize("noise", ["fitted", "standard"])
    def test_no_trust_without_rows(self, noise):
        """Nothing speaks against an answer that misses 7% of the mass, and it is stated with a small error."""
        aim, q = rare_modes(noise)
        climb = ladder(aim.log_density, q, evaluations=200_000, generator=seeded())
        assert climb.log_z.value < aim.log_z - 0.02
        assert climb.log_z.stderr < 0.04
        assert climb.doubts == ()
        assert not climb.trusted
        assert not climb.reached
        assert climb.unchecked.startswith("no rows from the data were given, and only these can show mass")
        assert climb.lines()[-1].endswith("Rows of the data, held out or trained on, would settle it")
        assert climb.interval[0] < aim.log_z < climb.interval[1] == INF

    @pytest.mark.parametrize("kind", ["data", "train"])
    @pytest.mark.parametrize("noise", ["fitted", "standard"])
    def test_a_hundred_rows_by_chance_without_a_mode(self, noise, kind):
        """A mode with 2% of the mass, far away, has none of the rows, as happens to one in eight sets of a hundred.

        It is missed, and the interval includes it; without the mass that the rows cannot rule out it would not.
        """
        away = torch.zeros(2, 30, dtype=F64)
        away[1, 0] = 14
        aim = mixture(torch.tensor([0.98, 0.02]), away, torch.eye(30).expand(2, 30, 30))
        short = []
        for seed in range(3):
            q = Gaussian.fit(aim.sample(2000, generator=seeded(seed))) if noise == "fitted" else Gaussian(30)
            x = aim.sample(200, generator=seeded(10 + seed))
            rows = x[x[:, 0] < 7][:100]
            climb = ladder(aim.log_density, q.double(), **{kind: rows}, stderr=0.005, generator=seeded(seed))
            assert climb.trusted
            assert climb.rows == 100
            low, high = climb.interval
            assert low < aim.log_z < high
            _, without = climb.log_z.interval()
            assert high - without == pytest.approx(-math.log(0.05) / 100)  # -log(1 - m) with (1 - m)^100 = 0.05
            short.append(without < aim.log_z)
        assert any(short)

    @pytest.mark.parametrize("noise", ["fitted", "standard"])
    def test_many_rows_show_all_modes(self, noise):
        aim, q = rare_modes(noise)
        rows = aim.sample(1000, generator=seeded(1))
        climb = ladder(aim.log_density, q, data=rows, evaluations=1_000_000, generator=seeded())
        assert climb.trusted
        assert climb.interval[0] < aim.log_z < climb.interval[1]
        assert climb.interval[1] - climb.log_z.interval()[1] < 0.012

    def test_a_small_table_can_earn_trust(self):
        """178 rows, 18 of them held out: these are too few alone, and with the training rows enough."""
        aim, q = target("gaussian-10-easy"), gaussian_of(10, 0.0, 1.5)
        x = aim.sample(178, generator=seeded())
        alone = ladder(aim.log_density, q, data=x[:18], evaluations=500_000, generator=seeded())
        assert not alone.trusted
        assert alone.doubts == ()
        assert alone.unchecked.startswith("only 18 rows from the data were given, fewer than 25")
        climb = ladder(aim.log_density, q, data=x[:18], train=x[18:], evaluations=500_000, generator=seeded())
        assert climb.trusted
        assert climb.rows == 178
        low, high = climb.interval
        assert low < aim.log_z < high
        assert max(climb.log_z.value - low, high - climb.log_z.value) < 0.1  # what a verdict takes for known

    @pytest.mark.parametrize("train", [False, True], ids=["held out", "and training"])
    def test_training_rows_show_what_only_they_can(self, train):
        """A model that has learned 200 rows by heart: 30% of its mass is around these, and no held-out row is there."""
        rows, others = randn(200, 5), randn(1000, 5, seed=1)

        def by_heart(x):
            broad = -x.square().sum(-1) / 2 - 2.5 * math.log(2 * math.pi)
            near = -torch.cdist(x, rows.to(x)).square() / (2 * 1e-6) - 2.5 * math.log(2e-6 * math.pi)
            return torch.logaddexp(math.log(0.7) + broad, math.log(0.3 / 200) + near.logsumexp(-1))

        climb = ladder(
            by_heart,
            gaussian_of(5, 0.0, 1.2),
            data=others,
            train=rows if train else None,
            n=20_000,
            evaluations=50_000,
            generator=seeded(),
        )
        if train:
            assert LADDER.MISSES in climb.rungs[0].why
            assert not climb.trusted or climb.interval[0] < 0 < climb.interval[1]
        else:  # nothing can be seen of it
            assert climb.log_z.value == pytest.approx(math.log(0.7), abs=4 * climb.log_z.stderr)

    def test_chains_back_start_at_both_kinds_by_turns(self, monkeypatch):
        begun = []

        def noted(model, noise, x, **options):
            begun.append(x[: options["n_chains"]])
            return bracket(model, noise, x, **options)

        monkeypatch.setattr(LADDER, "bracket", noted)
        aim, q = target("gaussian-10-easy"), gaussian_of(10, 0.0, 1.2)
        x = aim.sample(1030, generator=seeded())
        data, train = x[:30], x[30:]
        climb = ladder(aim.log_density, q, data=data, train=train, n=2000, evaluations=50_000, generator=seeded())
        start = begun[0]
        held_out, given = ((start[:, None] == rows).all(-1).any(1) for rows in (data, x))
        assert climb.rungs[-1].rows == len(start)
        assert 60 < len(start) < 1030
        assert held_out[:60].tolist() == [True, False] * 30
        assert not held_out[60:].any()
        assert given.all()
        assert len(start.unique(dim=0)) == len(start)

    def test_rows_that_are_missed_and_tolerated_count(self):
        """One row beyond all draws does not stop an estimate; the mass that it may stand for is in the interval."""
        log_p, data = two_far(4)
        near, far = data[data[:, 0] < 10], data[data[:, 0] > 10]
        for rows in (0, 1):
            told = torch.cat([near[:300], far[:rows]])
            climb = ladder(log_p, gaussian_of(4, 0.0, 1.2), data=told, n=40_000, generator=seeded())
            assert climb.trusted
            assert climb.rung.rows == 300 + rows
            assert climb.rung.missed >= rows
            expected = stats.beta(climb.rung.missed + 1, climb.rows - climb.rung.missed).ppf(0.95)
            assert climb.mass_not_ruled_out == pytest.approx(expected)
            assert climb.interval[1] - climb.log_z.interval()[1] == pytest.approx(-math.log1p(-expected))

    def test_no_more_rows_count_than_were_looked_at(self):
        aim, q = target("gaussian-10-easy"), Gaussian.fit(target("gaussian-10-easy").sample(5000, generator=seeded()))
        x = aim.sample(9000, generator=seeded(1))
        for data, train, n in ((x, None, 4000), (None, x, 4000), (x[:5000], x[5000:], 8000), (x[:10], x[10:], 4010)):
            climb = ladder(aim.log_density, q.double(), data=data, train=train, generator=seeded())
            assert climb.rungs[0].rows == n

    def test_a_grid_needs_no_rows(self):
        climb = ladder(two, WIDE, generator=seeded())
        assert climb.log_z.method == "grid"
        assert climb.trusted
        assert climb.unchecked == ""
        assert climb.interval == climb.log_z.interval()

    def test_a_few_rows_have_no_say(self):
        """Three correct rows do not make a good answer a bad one; the last line says that nobody checked."""
        model = lambda x: -50 * x.square().sum(-1)  # noqa: E731
        truth = 2.5 * math.log(math.pi / 50)
        alone, few, many = (
            ladder(model, gaussian_of(5, 0.0, 1.0), data=data, evaluations=200_000, generator=seeded())
            for data in (None, 0.1 * randn(3, 5), 0.1 * randn(400, 5))
        )
        assert few.rungs == alone.rungs
        assert few.doubts == alone.doubts == ()
        assert abs(few.log_z.value - truth) < 4 * few.log_z.stderr
        assert "not checked: only 3 rows from the data were given, fewer than 25" in few.lines()[-1]
        assert "not checked: no rows from the data were given" in alone.lines()[-1]
        assert many.unchecked == ""
        assert many.trusted

    def test_refusals(self):
        for rows in (torch.zeros(0, 3), torch.zeros(5, 2), torch.full((5, 3), NAN)):
            with pytest.raises(InvalidValue, match="The ladder's training rows"):
                ladder(Gaussian(3), Gaussian(3), train=rows)


def test_samples_of_another_model_widen_a_bracket():
    """The chains from them arrive far below those from the noise: no error is stated that would not cover that."""
    model, q = (lambda x: -x.square().sum(-1)), gaussian_of(2, 0.0, 1.0)
    good, bad = (
        bracket(model, q, scale * randn(200, 2), n_chains=200, generator=seeded()) for scale in (0.5**0.5, 100.0)
    )
    assert good.log_z.stderr < 0.1
    assert bad.upper.value < bad.lower.value - 100
    assert abs(bad.log_z.value - math.log(math.pi)) < bad.log_z.stderr


def test_annealing_refuses_and_converts():
    q, x = gaussian_of(2, 0.0, 1.0), randn(50, 2)
    with pytest.raises(InvalidValue, match="transitions to 'settle' must not be negative. Got -1"):
        reverse_ais(q, q, x, settle=-1)
    found = [reverse_ais(q, q, own, generator=seeded()).log_z.value for own in (x, x.float().numpy())]
    assert found == pytest.approx([0.0, 0.0], abs=1e-5)
    with pytest.raises(InvalidValue, match="'cells' of a grid must be a positive integer. Got -4"):
        grid(q, [[-8.0, -8.0], [8.0, 8.0]], cells=-4)
    with pytest.raises(InvalidValue, match="The ladder needs stderr > 0 and 100 draws. Got .* n 10000.0"):
        ladder(q, q, n=1e4)
