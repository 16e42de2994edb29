"""The noise toolkit against scipy, scikit-learn, closed forms and quadrature; and every kind on awkward data."""

import json
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from sklearn.mixture import GaussianMixture as SklearnMixture
from torch import nn

from tests.laws import NOISES
from unnorm import Density, Quadratic
from unnorm.architecture import build, describe, is_custom
from unnorm.data import Gaussianize, Identity, Probit, Rows, Standardize, Whiten
from unnorm.data.splines import Piece, inverse_spline, spline
from unnorm.errors import BrokenFile, DataError, InvalidValue, ShrinkageWarning
from unnorm.noise import (
    Choice,
    Copula,
    DistributionNoise,
    Flow,
    Gaussian,
    GaussianMixture,
    Mixture,
    Pushed,
    Smoothed,
    SplineFlow,
    Uniform,
    em,
    fit,
    fitting,
    smoothed,
)

KINDS = [*fitting.KINDS]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_noise = pytest.mark.parametrize("make", NOISES.values(), ids=NOISES.keys())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def clusters(n, seed=0, width=2, count=3, apart=8.0):
    g = seeded(seed)
    which = torch.randint(count, (n,), generator=g)
    return torch.randn(n, width, generator=g, dtype=torch.float64) + apart * which[:, None]


def quick(kind, data):
    """`fit` of the kind; a flow is trained for a moment only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkageWarning)
        if kind == "flow":
            return Flow.fit(data, steps=60, batch=64, transforms=1, hidden=(16,), bins=4)
        return fit(data, kind)


def awkward():
    heavy = torch.from_numpy(stats.cauchy.rvs(size=(300, 3), random_state=0))
    constant = normal(200, 3)
    constant[:, 1] = 7.0
    twice = normal(200, 3)
    twice[:, 2] = twice[:, 0]
    return {
        "fewer rows than columns": normal(12, 30),
        "a constant column": constant,
        "only constants": torch.full((20, 2), 3.0),
        "copies of rows": normal(10, 2).repeat(20, 1),
        "a column twice": twice,
        "heavy tails": torch.cat([heavy[:, :1], normal(300, 2)], 1),
        "heavy tails only": heavy,
        "integers": torch.randint(0, 256, (300, 2), generator=seeded()).double(),
        "bytes": torch.randint(0, 3, (300, 2), generator=seeded()).to(torch.uint8),
        "mostly zero": normal(300, 2).clamp_min(0.5) - 0.5,
        "images": torch.rand(150, 1, 3, 3, generator=seeded()),
        "large numbers": 1e6 + 1e4 * normal(200, 2),
        "small numbers": 1e-6 * normal(200, 2),
    }


@every_kind
class TestEveryKind:
    @pytest.mark.parametrize("name", awkward())
    def test_awkward_data(self, kind, name):
        x = awkward()[name]
        q = quick(kind, x)
        draws = q.sample(50, generator=seeded())
        assert draws.shape == (50, *x.shape[1:])
        assert torch.isfinite(draws).all()
        inside = q.log_prob(x.float())
        assert torch.isfinite(inside).all()
        assert torch.isfinite(q.log_prob(draws)).all()
        value, score = q.double().log_prob_and_score(x.double())
        assert torch.isfinite(value).all()
        assert torch.isfinite(score).all()

    def test_integrates_to_one_and_is_the_law_of_its_samples(self, kind):
        """In one dimension: by quadrature, and Kolmogorov-Smirnov against the integrated density."""
        x = torch.cat([normal(300, 1), 4 + 0.3 * normal(100, 1, seed=1)])
        q = quick(kind, x).double()
        at = np.linspace(-25, 30, 100_001)
        density = np.concatenate([q.log_prob(torch.from_numpy(part)[:, None]).exp() for part in np.split(at[:-1], 40)])
        density = np.append(density, 0.0)
        cdf = integrate.cumulative_trapezoid(density, at, initial=0)
        assert cdf[-1] == pytest.approx(1, abs=2e-4)
        draws = q.sample(5000, generator=seeded())[:, 0].numpy()
        assert stats.kstest(draws, lambda value: np.interp(value, at, cdf / cdf[-1])).pvalue > 0.003

    def test_in_five_dimensions(self, kind):
        """E_q[r / q] = 1 for a narrower r: too large a q would say less, too small a one more."""
        x = normal(400, 5) @ (torch.eye(5, dtype=torch.float64) + 0.3)
        q = quick(kind, x).double()
        with warnings.catch_warnings():
            narrow = Gaussian.fit(0.5 * (x - x.mean(0)) + x.mean(0)).double()
        draws = q.sample(40_000, generator=seeded())
        ratio = (narrow.log_prob(draws) - q.log_prob(draws)).exp()
        error = float(ratio.std() / len(ratio) ** 0.5)
        assert error < 0.25
        assert float(ratio.mean()) == pytest.approx(1, abs=4 * error)

    def test_chi_square_in_two_dimensions(self, kind):
        """Cells of a grid: draws that fall in each, and the density's integral over it."""
        x = torch.stack([normal(400, seed=1).exp(), normal(400, seed=2)], 1)
        q = quick(kind, x).double()
        edges = [np.linspace(0.2, 3.2, 9), np.linspace(-2, 2, 9)]
        fine = [(np.linspace(e[0], e[-1], 321)[:-1] + (e[-1] - e[0]) / 640) for e in edges]
        points = torch.from_numpy(np.stack(np.meshgrid(*fine, indexing="ij"), -1).reshape(-1, 2))
        cell = (edges[0][-1] - edges[0][0]) * (edges[1][-1] - edges[1][0]) / 320**2
        mass = (q.log_prob(points).exp().numpy() * cell).reshape(8, 40, 8, 40).sum((1, 3)).ravel()
        draws = q.sample(20_000, generator=seeded()).numpy()
        count = np.histogram2d(*draws.T, bins=edges)[0].ravel()
        expected = np.append(mass, 1 - mass.sum()) * len(draws)
        found = np.append(count, len(draws) - count.sum())
        keep = expected > 5
        statistic = ((found - expected)[keep] ** 2 / expected[keep]).sum()
        assert stats.chi2(keep.sum() - 1).sf(statistic) > 0.003

    def test_knows_what_it_is(self, kind):
        if kind != "flow":
            assert quick(kind, normal(50, 2)).choice == Choice(kind)

    def test_any_event_shape(self, kind):
        x = torch.rand(100, 2, 2, generator=seeded())
        q, flat = quick(kind, x), quick(kind, x.flatten(1))
        torch.testing.assert_close(q.log_prob(x), flat.log_prob(x.flatten(1)))

    def test_reads_rows_from_disk(self, kind):
        x = normal(100, 2)
        q, other = quick(kind, Rows(x.numpy())), quick(kind, x)
        torch.testing.assert_close(q.log_prob(x.float()), other.log_prob(x.float()))

    def test_refuses_what_is_no_number(self, kind):
        with pytest.raises(DataError):
            quick(kind, torch.tensor([[1.0], [math.nan]] * 10))


@every_noise
class TestEveryNoise:
    def test_coordinates_are_the_same_law(self, make):
        q = make().double()
        transform, inner = q.coordinates()
        x = q.sample(100, generator=seeded())
        z, log_det = transform(x)
        assert z.dtype == log_det.dtype == torch.float64
        torch.testing.assert_close(inner.log_prob(z) + log_det, q.log_prob(x), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(transform.inverse(z), x, rtol=1e-5, atol=1e-5)
        if not isinstance(transform, Identity) and not isinstance(q, Pushed):
            white = stats.norm.logpdf(z.flatten(1).numpy()).sum(-1)
            np.testing.assert_allclose(inner.log_prob(z), white, rtol=1e-6)

    def test_coordinates_in_single_precision(self, make):
        q = make()
        transform, inner = q.coordinates()
        x = q.sample(5, generator=seeded())
        z, log_det = transform(x)
        assert z.dtype == log_det.dtype == torch.float32
        torch.testing.assert_close(inner.log_prob(z) + log_det, q.log_prob(x), rtol=1e-3, atol=1e-3)

    def test_through_a_description_and_back(self, make):
        """The noise and its coordinates, as a file has them: plain JSON, and tensors."""
        q = make()
        if isinstance(q, DistributionNoise) or type(q) is Flow or describe(q).get("base", {}).get("kind") == "custom":
            assert is_custom(describe(q))
            return
        x = q.sample(6, generator=seeded())
        built = rebuilt(q)
        assert torch.equal(built.log_prob(x), q.log_prob(x))
        assert torch.equal(built.sample(6, generator=seeded()), x)
        assert not any(p.requires_grad for p in built.parameters())
        transform, _ = q.coordinates()
        assert torch.equal(rebuilt(transform)(x)[0], transform(x)[0])


def rebuilt(module):
    spec = json.loads(json.dumps(describe(module)))
    built = build(spec)
    built.load_state_dict(module.state_dict(), assign=True)
    return built


class TestGaussianMixture:
    @pytest.mark.parametrize(("covariance", "name"), [("full", "full"), ("diagonal", "diag")])
    def test_log_prob_is_scikit_learns(self, covariance, name):
        q = GaussianMixture.fit(clusters(600), 3, covariance).double()
        oracle = SklearnMixture(3, covariance_type=name)
        oracle.weights_, oracle.means_ = q.log_weight.exp().numpy(), q.loc.numpy()
        if covariance == "full":
            oracle.precisions_cholesky_ = torch.linalg.inv(q.scale_tril).mT.numpy()
        else:
            oracle.precisions_cholesky_ = 1 / q.scale.numpy()
        x = 10 * normal(50, 2)
        np.testing.assert_allclose(q.log_prob(x), oracle.score_samples(x.numpy()), rtol=1e-6)

    def test_as_good_as_scikit_learns_own_fit(self):
        train, test = clusters(3000, seed=1, apart=3.0), clusters(3000, seed=2, apart=3.0)
        ours = float(GaussianMixture.fit(train, 3).double().log_prob(test).mean())
        theirs = SklearnMixture(3, n_init=3, random_state=0).fit(train.numpy()).score(test.numpy())
        assert ours == pytest.approx(theirs, abs=0.01)

    @pytest.mark.parametrize("count", [1, 2, 4])
    def test_bic_finds_the_number(self, count):
        q = GaussianMixture.fit(clusters(1500, count=count, width=3))
        assert (q.components, q.covariance) == (count, "full")

    def test_bic_is_scikit_learns(self):
        x = clusters(500)
        oracle = SklearnMixture(3, random_state=0).fit(x.numpy())
        parts = (oracle.weights_, oracle.means_, np.linalg.cholesky(oracle.covariances_))
        found = em.Components(*(torch.from_numpy(part) for part in parts))
        assert em._bic(found, x) == pytest.approx(oracle.bic(x.numpy()), rel=1e-9)
        oracle = SklearnMixture(3, covariance_type="diag", random_state=0).fit(x.numpy())
        parts = (oracle.weights_, oracle.means_, np.sqrt(oracle.covariances_))
        found = em.Components(*(torch.from_numpy(part) for part in parts))
        assert em._bic(found, x) == pytest.approx(oracle.bic(x.numpy()), rel=1e-9)

    @pytest.mark.parametrize("covariance", ["full", "diagonal"])
    @pytest.mark.parametrize("name", ["fewer rows than columns", "a constant column", "heavy tails"])
    def test_one_component_is_the_gaussian(self, covariance, name):
        x = awkward()[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkageWarning)
            q, other = GaussianMixture.fit(x, 1, covariance), Gaussian.fit(x, covariance)
        scale = (q.scale_tril, other.scale_tril) if covariance == "full" else (q.scale, other.scale)
        torch.testing.assert_close(q.loc[0], other.loc)
        torch.testing.assert_close(scale[0][0], scale[1])

    def test_one_component_says_what_it_regularised(self):
        with pytest.warns(ShrinkageWarning, match="covariance of 12 rows in 30 coordinates is singular"):
            GaussianMixture.fit(normal(12, 30), 1)

    def test_several_say_so_too(self):
        x = clusters(300, width=3)
        x[:, 1] = 7.0
        for components in (3, None):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                GaussianMixture.fit(x, components)
            assert [w.category for w in said] == [ShrinkageWarning]
            assert "1 of 3 coordinates are constant (1)" in str(said[0].message)

    def test_as_many_components_as_rows(self):
        q = GaussianMixture.fit(normal(30, 2), 30)
        assert torch.isfinite(q.log_prob(normal(30, 2).float())).all()

    def test_diagonal_where_rows_are_few_or_columns_many(self):
        assert GaussianMixture.fit(clusters(100, width=9), 2).covariance == "diagonal"
        assert GaussianMixture.fit(clusters(180, width=9), 2).covariance == "full"
        assert GaussianMixture.fit(clusters(3000, width=65), 2).covariance == "diagonal"

    def test_outliers_do_not_choose_where_it_begins(self):
        x = torch.cat([clusters(600, count=2), torch.tensor([[1e5, 0.0], [0.0, -1e5]], dtype=torch.float64)])
        q = GaussianMixture.fit(x, 4)
        assert float(q.double().log_prob(clusters(300, seed=5, count=2)).mean()) > -4.2  # 3.53 with the truth

    def test_a_constant_column_keeps_its_width(self):
        x = clusters(400, width=3)
        x[:, 1] = 7.0
        for covariance in ("full", "diagonal"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ShrinkageWarning)
                wide = Gaussian.fit(x, "diagonal").scale[1]
                q = GaussianMixture.fit(x, 3, covariance)
            draws = q.sample(4000, generator=seeded())[:, 1]
            assert float(draws.std() / wide) == pytest.approx(1, rel=0.1)

    def test_the_same_each_time(self):
        x = clusters(500)
        first, second = (GaussianMixture.fit(x, 4).state_dict() for _ in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first)

    def test_refusals(self):
        for bad in (0, 11):
            with pytest.raises(InvalidValue, match=f"must be between 1 and the 10 rows. Got {bad}"):
                GaussianMixture.fit(normal(10, 2), bad)
        with pytest.raises(InvalidValue, match="Unknown covariance of a mixture 'ful'. Did you mean 'full'"):
            GaussianMixture.fit(normal(10, 2), 2, "ful")
        with pytest.raises(InvalidValue, match="'components' of GaussianMixture must be at least 1. Got 0"):
            GaussianMixture(2, 0)


class TestMixture:
    def test_log_prob_by_hand(self):
        one, two = Gaussian.fit(normal(50, 2) - 3).double(), Gaussian.fit(normal(50, 2) + 3).double()
        q = Mixture([one, two], [1, 3]).double()
        x = normal(20, 2)
        expected = np.logaddexp(math.log(0.25) + one.log_prob(x).numpy(), math.log(0.75) + two.log_prob(x).numpy())
        np.testing.assert_allclose(q.log_prob(x), expected, rtol=1e-6)

    def test_draws_are_shared_by_weight_and_in_random_order(self):
        parts = [Uniform.fit(torch.tensor([[place + 0.1], [place + 0.9]]), margin=0.0) for place in (0.0, 10.0)]
        high = Mixture(parts, [1, 3]).sample(20_000, generator=seeded())[:, 0] > 5
        assert stats.binomtest(int(high.sum()), len(high), 0.75).pvalue > 0.003
        first = high[:10_000]
        assert stats.binomtest(int(first.sum()), len(first), 0.75).pvalue > 0.003

    def test_one_part_may_be_zero_somewhere(self):
        q = Mixture([Uniform(1), Uniform(1)])
        value, score = q.log_prob_and_score(torch.tensor([[0.5], [2.0]]))
        assert value.tolist() == [0.0, -math.inf]
        assert score.tolist() == [[0.0], [0.0]]

    def test_the_papers_third_noise(self, tmp_path):
        """Data plus noise mixed with a Gaussian, in a saved density."""
        x = normal(60, 2)
        q = Mixture([Smoothed.fit(x, "loo"), Gaussian.fit(x)])
        density = Density.normalise(Quadratic(2), q, n=2000, generator=seeded())
        density.save(tmp_path)
        loaded = Density.load(tmp_path)
        assert torch.equal(loaded.noise_log_prob(x), density.noise_log_prob(x))
        assert torch.equal(loaded.noise.log_weight, q.log_weight)

    def test_refusals(self):
        with pytest.raises(InvalidValue, match="'parts' of Mixture must be at least one noise. Got none"):
            Mixture([])
        with pytest.raises(InvalidValue, match="'parts' of Mixture must be noises. Got ReLU"):
            Mixture([torch.nn.ReLU()])
        with pytest.raises(InvalidValue, match="'weights' of Mixture must be 1, one for each part. Got 2"):
            Mixture([Gaussian(1)], [1, 2])
        with pytest.raises(InvalidValue, match="'weights' of Mixture must be positive. Got .1, 0."):
            Mixture([Gaussian(1), Gaussian(1)], [1, 0])


class TestSmoothed:
    def test_is_scipys_kernel_estimate(self):
        """scipy's covariance divides by n - 1, ours by n."""
        x = normal(150, 3) @ (torch.eye(3, dtype=torch.float64) + 0.4)
        q = Smoothed.fit(x).double()
        oracle = stats.gaussian_kde(x.numpy().T, bw_method="scott")
        assert q.bandwidth() == pytest.approx(oracle.factor, rel=1e-6)
        oracle.set_bandwidth(oracle.factor * math.sqrt(149 / 150))
        at = 2 * normal(40, 3, seed=2)
        np.testing.assert_allclose(q.log_prob(at), oracle.logpdf(at.numpy().T), rtol=1e-5)

    def test_blocks_change_nothing(self, monkeypatch):
        x, at = normal(100, 2), normal(30, 2, seed=1)
        q = Smoothed.fit(x).double()
        whole, score = q.log_prob_and_score(at)
        monkeypatch.setattr(smoothed, "POINTS", 7)
        monkeypatch.setattr(smoothed, "ROWS", 9)
        found, other = q.log_prob_and_score(at)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other, score, rtol=1e-10, atol=1e-10)

    def test_far_away_is_finite(self):
        value = Smoothed.fit(normal(100, 2)).log_prob(torch.full((1, 2), 1e4))
        assert torch.isfinite(value).all()

    def test_leave_one_out_is_the_best_of_a_slow_search(self):
        x = torch.cat([normal(40, 1), 6 + 0.2 * normal(40, 1, seed=1)])
        q = Smoothed.fit(x, "loo")
        deviation = float(x.std(correction=0))

        def slow(h):
            each = stats.norm.logpdf(x.numpy(), x.numpy().T, h * deviation)
            return -np.mean([np.logaddexp.reduce(np.delete(row, place)) for place, row in enumerate(each)])

        grid = np.exp(np.linspace(math.log(0.02), 0, 150))
        best = grid[np.argmin([slow(h) for h in grid])]
        assert q.bandwidth() == pytest.approx(best, rel=0.03)
        assert slow(q.bandwidth()) < slow(Smoothed.fit(x).bandwidth()) - 0.1

    def test_copies_do_not_make_it_narrow(self):
        x = normal(100, 2)
        once, twice = Smoothed.fit(x, "loo"), Smoothed.fit(x.repeat(2, 1), "loo")
        assert twice.bandwidth() == pytest.approx(once.bandwidth(), rel=0.05)
        assert Smoothed.fit(torch.cat([x, x[:1].repeat(200, 1)]), "loo").bandwidth() > 0.05

    def test_batch_is_the_density_of_the_rows_last_drawn(self):
        x = normal(500, 2)
        q, exact = (Smoothed.fit(x, 0.3, density=density).double() for density in ("batch", "exact"))
        at = normal(50, 2, seed=1)
        torch.testing.assert_close(q.log_prob(at), exact.log_prob(at))  # before the first draw
        draws = q.sample(20, generator=seeded())
        rows = torch.randint(500, (20,), generator=seeded())
        kernels = stats.norm.logpdf((at[:, None] - x[rows]).numpy() @ np.linalg.inv(q.scale_tril.numpy()).T).sum(-1)
        log_det = float(q.scale_tril.diagonal().log().sum())
        expected = np.logaddexp.reduce(kernels, axis=1) - math.log(20) - log_det
        np.testing.assert_allclose(q.log_prob(at), expected, rtol=1e-5)
        assert float((q.log_prob(draws) - exact.log_prob(draws)).mean()) > 0.2  # as the docstring warns
        assert q.density == rebuilt(q).density == "batch"

    def test_refusals(self):
        x = normal(10, 1)
        for bad in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(InvalidValue, match="'bandwidth' of Smoothed must be positive. Got"):
                Smoothed.fit(x, bad)
        with pytest.raises(InvalidValue, match="Unknown bandwidth 'scot'. Did you mean 'scott'"):
            Smoothed.fit(x, "scot")
        with pytest.raises(InvalidValue, match="Unknown density of Smoothed 'bach'. Did you mean 'batch'"):
            Smoothed(1, 10, "bach")
        with pytest.raises(InvalidValue, match="'rows' of Smoothed must be at least 1. Got 0"):
            Smoothed(1, 0)


class TestSplines:
    piece = Piece(*torch.tensor([1.0, 3.0, -0.5, 2.0, 0.3, 4.0], dtype=torch.float64))

    def test_ends(self):
        z, log_slope = spline(self.piece, torch.tensor([1.0, 3.0], dtype=torch.float64))
        np.testing.assert_allclose(z, [-0.5, 2.0])
        np.testing.assert_allclose(log_slope.exp(), [0.3, 4.0])

    def test_slope_by_autograd_and_inverse_by_root_finding(self):
        x = torch.linspace(1.001, 2.999, 50, dtype=torch.float64, requires_grad=True)
        z, log_slope = spline(self.piece, x)
        (slope,) = torch.autograd.grad(z.sum(), x)
        torch.testing.assert_close(log_slope.exp(), slope)
        assert (slope > 0).all()
        for target in (-0.4, 0.7, 1.9):
            root = optimize.brentq(lambda at, t=target: float(spline(self.piece, torch.tensor(at))[0]) - t, 1, 3)
            found = inverse_spline(self.piece, torch.tensor(target, dtype=torch.float64))
            assert float(found) == pytest.approx(root, rel=1e-6)


class TestSmoothGaussianize:
    def test_log_density_is_continuous(self):
        """At every knot, where linear pieces jump."""
        x = torch.stack([normal(2000).exp(), normal(2000, seed=1)], 1)
        for smooth, largest in ((True, 1e-4), (False, None)):
            transform = Gaussianize.fit(x, smooth=smooth)
            knots = transform.knots.mT
            step = 1e-10 * (knots[-1] - knots[0])

            def log_density(at, transform=transform):
                z, log_det = transform(at)
                return torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1) + log_det

            jump = (log_density(knots + step) - log_density(knots - step)).abs().max()
            assert (jump < largest) if largest else (jump > 0.1)

    def test_monotone_and_invertible_far_outside(self):
        x = torch.rand(500, 1, generator=seeded(), dtype=torch.float64)
        transform = Gaussianize.fit(x, smooth=True)
        at = torch.linspace(-5, 6, 3001, dtype=torch.float64)[:, None]
        z, log_det = transform(at)
        assert (z.diff(dim=0) > 0).all()
        torch.testing.assert_close(transform.inverse(z), at, rtol=1e-8, atol=1e-8)
        slope = torch.autograd.functional.jacobian(lambda a: transform(a)[0].sum(), at)
        torch.testing.assert_close(log_det.exp(), slope[:, 0], rtol=1e-8, atol=1e-8)

    @pytest.mark.parametrize("draw", [stats.norm(3, 2), stats.gamma(3.0), stats.t(3), stats.lognorm(1.0)])
    def test_close_to_the_truth(self, draw):
        """Closer than the linear pieces: mean log density of fresh points, against the truth's own."""
        train, test = (torch.from_numpy(draw.rvs((5000, 1), random_state=seed)) for seed in (0, 1))
        q, other = Copula.fit(train).double(), Copula.fit(train, smooth=False).double()
        own = draw.logpdf(test[:, 0].numpy())
        loss, worse = ((own - each.log_prob(test).numpy()).mean() for each in (q, other))
        assert -0.005 < loss < 0.02
        assert loss < worse

    def test_integers_have_their_frequencies(self):
        """Also 250 levels of which some never occur: the mass of k - 1/2 to k + 1/2, with half a row for each cell."""
        x = torch.from_numpy(stats.binom(249, 0.3).rvs((1000, 1), random_state=0)).double()
        x[0], x[1] = 0, 249
        transform = Gaussianize.fit(torch.cat([x, normal(1000, 1)], 1), smooth=True)
        assert transform.pieces == 250
        assert (transform.slope[:, 0] > 0).tolist() == [False, True]
        levels = np.arange(250)
        ends = torch.from_numpy(np.stack([levels - 0.5, levels + 0.5], 1)).reshape(-1, 1)
        z, _ = transform(torch.cat([ends, 0 * ends], 1))
        mass = np.diff(stats.norm.cdf(z[:, 0].numpy().reshape(-1, 2)), axis=1)[:, 0]
        counts = np.bincount(x[:, 0].long(), minlength=250)
        np.testing.assert_allclose(mass, (counts + 0.5) / (1000 + 126), atol=1e-12)
        q = Copula.fit(x).double()  # and the density at a level is that mass, for the cell is one wide
        at = torch.tensor([[70.0], [80.0]], dtype=torch.float64)
        np.testing.assert_allclose(q.log_prob(at).exp(), (counts[[70, 80]] + 0.5) / 1126, rtol=1e-9)

    def test_given_knots_stay_linear(self):
        x, knots = torch.rand(300, 2, generator=seeded()), torch.arange(11) / 10
        one, two = Gaussianize.fit(x, knots, smooth=True), Gaussianize.fit(x, knots)
        assert torch.equal(one(x)[0], two(x)[0])

    def test_few_rows_have_few_pieces(self):
        def own(n):
            transform = Gaussianize.fit(normal(n, 1), smooth=True)
            return int((transform.knots[0] >= normal(n, 1).min()).sum()) - 1

        assert [own(5), own(100)] == [1, 4]
        assert 18 <= own(2000) <= 21
        assert own(100_000) <= 64

    def test_the_ends_are_those_of_all_rows(self, monkeypatch):
        monkeypatch.setattr("unnorm.data.quantiles.LOOKED_AT", 50)
        x = normal(1000, 1)
        knots = Gaussianize.fit(x, smooth=True).knots[0]
        assert knots[-1] == x.max()
        assert knots.diff().min() > 0

    def test_padding_changes_nothing(self):
        x, at = normal(300, 1), torch.linspace(-6, 6, 101, dtype=torch.float64)[:, None]
        one, two = (Gaussianize.fit(x, pieces, smooth=True)(at) for pieces in (10, 40))
        for first, second in zip(one, two, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)

    def test_the_old_default_has_the_old_tensors(self):
        assert set(Gaussianize.fit(normal(50, 1)).state_dict()) == {"knots", "cdf"}
        old = build({"kind": "gaussianize", "event": [1], "pieces": 4})
        assert not old.smooth


class TestCopula:
    def test_recovers_a_gaussian_copula(self):
        """Exponential marginals, correlation 0.6: the joint density in closed form."""
        truth = stats.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]])

        def draw(seed):
            return torch.from_numpy(stats.expon.ppf(stats.norm.cdf(truth.rvs(5000, random_state=seed))))

        q = Copula.fit(draw(0)).double()
        x = draw(1)
        z = stats.norm.ppf(stats.expon.cdf(x.numpy()))
        own = truth.logpdf(z) - stats.norm.logpdf(z).sum(1) + stats.expon.logpdf(x.numpy()).sum(1)
        assert -0.01 < (own - q.log_prob(x).numpy()).mean() < 0.04
        tril = q.base.scale_tril
        np.testing.assert_allclose((tril @ tril.mT).diagonal(), 1, atol=1e-6)
        assert float((tril @ tril.mT)[0, 1]) == pytest.approx(0.6, abs=0.03)

    def test_marginals_are_kept_exactly(self):
        """Also of a column that depends on another: the draws' normal scores are standard normal."""
        x = torch.stack([normal(800).exp(), normal(800).round()], 1)
        q = Copula.fit(x).double()
        z, _ = q.transform(q.sample(5000, generator=seeded()))
        for column in z.T:
            assert stats.kstest(column.numpy(), "norm").pvalue > 0.003

    def test_independent_columns(self):
        q = Copula.fit(normal(200, 3), covariance="diagonal")
        assert q.base.covariance == "diagonal"
        assert torch.equal(q.base.scale, torch.ones(3))

    def test_says_what_it_regularised(self):
        x = normal(100, 3)
        x[:, 1] = 7.25
        with pytest.warns(ShrinkageWarning, match=r"1 of 3 coordinates are constant \(1, ...\): .* piece, 1 wide"):
            Copula.fit(x)
        with pytest.warns(ShrinkageWarning, match="covariance of 12 rows in 30 coordinates is singular"):
            Copula.fit(normal(12, 30))

    def test_refusals(self):
        with pytest.raises(InvalidValue, match="Unknown covariance of a copula 'low-rank'"):
            Copula(2, covariance="low-rank")
        with pytest.raises(InvalidValue, match="'base' of Pushed must be a noise. Got ReLU"):
            Pushed(torch.nn.ReLU(), Identity())
        with pytest.raises(InvalidValue, match="'transform' of Pushed must be a transform. Got ReLU"):
            Pushed(Gaussian(1), torch.nn.ReLU())

    def test_in_a_saved_density(self, tmp_path):
        x = normal(200, 2).exp()
        density = Density.normalise(Quadratic(2), Copula.fit(x), Standardize.fit(x), n=2000, generator=seeded())
        density.save(tmp_path)
        assert torch.equal(Density.load(tmp_path).noise_log_prob(x), density.noise_log_prob(x))


class TestUniform:
    def test_the_range_and_a_margin(self):
        q = Uniform.fit(torch.tensor([[0.0, -4.0], [10.0, 4.0]]), margin=0.1)
        np.testing.assert_allclose(q.low, [-1, -4.8], rtol=1e-6)
        np.testing.assert_allclose(q.high, [11, 4.8], rtol=1e-6)
        points = torch.tensor([[0.0, 0.0], [11.5, 0.0], [0.0, -5.0]])
        assert q.log_prob(points).tolist() == [pytest.approx(-math.log(12 * 9.6)), -math.inf, -math.inf]

    def test_probit_at_and_beyond_the_border(self):
        z, log_det = Probit(1)(torch.tensor([[0.0], [1.0], [1.5], [-0.5]], dtype=torch.float64))
        assert torch.isfinite(z[:2]).all()
        assert torch.isfinite(log_det).all()
        assert z[2:].tolist() == [[math.inf], [-math.inf]]

    def test_says_what_it_widened(self):
        with pytest.warns(ShrinkageWarning, match="1 of 2 coordinates are constant"):
            Uniform.fit(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))

    def test_refusals(self):
        with pytest.raises(InvalidValue, match="'margin' of Uniform must not be negative. Got -0.1"):
            Uniform.fit(normal(5, 1), margin=-0.1)
        with pytest.raises(InvalidValue, match="too narrow for its size in float32"):
            Uniform.fit(1 + 1e-12 * normal(5, 1))


class TestWhiten:
    def test_against_numpy(self):
        x = normal(50, 4).view(50, 2, 2)
        transform = Whiten((2, 2))
        tril = torch.linalg.cholesky(x.flatten(1).T.cov())
        transform.scale_tril.copy_(tril)
        transform.loc.copy_(x.flatten(1).mean(0))
        z, log_det = transform(x)
        np.testing.assert_allclose(z.flatten(1).T.cov(), np.eye(4), atol=1e-12)
        np.testing.assert_allclose(log_det, -0.5 * np.linalg.slogdet(np.cov(x.flatten(1).T))[1])
        torch.testing.assert_close(transform.inverse(z), x)


class TestFlow:
    def test_learns_what_a_gaussian_cannot(self):
        theta = 2 * math.pi * torch.rand(1500, generator=seeded(), dtype=torch.float64)
        ring = 3 * torch.stack([theta.cos(), theta.sin()], 1) + 0.3 * normal(1500, 2)
        q = SplineFlow.fit(ring[:1000], steps=300, transforms=2, hidden=(32,))
        test = ring[1000:].float()
        assert float((q.log_prob(test) - Gaussian.fit(ring[:1000]).log_prob(test)).mean()) > 0.5

    def test_frozen_seeded_and_quiet(self):
        x, before = normal(100, 2), torch.get_rng_state()
        options = {"steps": 5, "transforms": 1, "hidden": (8,)}
        one, two, three = (Flow.fit(x, generator=seeded(seed), **options) for seed in (1, 1, 2))
        assert torch.equal(before, torch.get_rng_state())
        assert not any(p.requires_grad for p in one.parameters())
        at = normal(5, 2).float()
        assert torch.equal(one.log_prob(at), two.log_prob(at))
        assert not torch.equal(one.log_prob(at), three.log_prob(at))

    def test_any_zuko_flow_is_trained(self):
        zuko = pytest.importorskip("zuko")

        def bent(seed):
            z = normal(1000, 2, seed=seed)
            return torch.stack([z[:, 0], z[:, 0] ** 2 + 0.3 * z[:, 1]], 1)

        x, apart = bent(0), bent(1)
        torch.manual_seed(0)
        flow = zuko.flows.MAF(2, hidden_features=(32, 32))
        q = fit(x, "flow", flow=flow, steps=400)
        assert isinstance(q, Flow)
        assert q.log_prob(apart.float()).mean() > Gaussian.fit(x).log_prob(apart.float()).mean() + 0.2
        assert not any(parameter.requires_grad for parameter in flow.parameters())
        with pytest.raises(InvalidValue, match="'flow' to train must be a module with parameters. Got int"):
            Flow.fit(x, flow=3)
        for wrong in (zuko.flows.MAF(3), nn.Linear(2, 2)):
            with pytest.raises(InvalidValue, match=r"The 'flow' must be one over events of shape \(2,\)"):
                Flow.fit(x, flow=wrong)
        assert Flow.fit(x, flow=zuko.flows.MAF(2).double(), steps=3).log_prob(x).dtype == torch.float64

    def test_stops_early_and_keeps_the_best(self):
        """Of twenty rows it learns too much; what is kept is as good on the rows set aside as at any look."""
        x, held_out = normal(20, 2), normal(500, 2, seed=1)
        options = {"held_out": held_out, "batch": 20, "transforms": 1, "hidden": (32,), "lr": 0.02}
        short, long = (SplineFlow.fit(x, steps=600, patience=patience, **options) for patience in (3, 1000))
        best = float(long.log_prob(held_out.float()).mean())
        assert best == pytest.approx(float(short.log_prob(held_out.float()).mean()), abs=0.05)
        assert best > -3.2  # the truth has -2.84

    def test_any_object_with_sample_and_log_prob(self):
        class Triangle:
            def sample(self, n):
                return torch.rand(n, 1) + torch.rand(n, 1) - 1

            def log_prob(self, x):
                return (1 - x[:, 0].abs()).log()

        q = Flow(Triangle(), event=1)
        draws = q.sample(4000, generator=seeded())
        assert stats.kstest(draws[:, 0].numpy(), stats.triang(0.5, -1, 2).cdf).pvalue > 0.003
        assert isinstance(q.coordinates()[0], Identity)

    def test_a_base_that_is_not_standard_normal_stays_where_it_is(self):
        import zuko

        flow = zuko.flows.NSF(1, transforms=1, hidden_features=(4,))
        flow.base = zuko.lazy.UnconditionalDistribution(
            zuko.distributions.DiagNormal, torch.ones(1), torch.ones(1), buffer=True
        )
        assert isinstance(Flow(flow, 1).coordinates()[0], Identity)

    def test_without_zuko(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "zuko", None)
        with pytest.raises(InvalidValue, match=r"pip install 'unnorm\[flow\]'"):
            fit(normal(50, 2), "flow")
        with pytest.raises(BrokenFile, match=r"unnorm\[flow\]"):
            build({"kind": "spline-flow", "event": [2]})

    def test_refusals(self):
        for neither in (3, lambda: 3):
            with pytest.raises(InvalidValue, match="'flow' of Flow must have 'sample' and 'log_prob'. Got"):
                Flow(neither, 1)
        with pytest.raises(InvalidValue, match="needs positive whole numbers, and 2 bins at least. Got"):
            SplineFlow(2, bins=1)
        with pytest.raises(InvalidValue, match="is too large: make 'hidden' smaller"):
            SplineFlow(10_000, hidden=(4096,))
        with pytest.raises(DataError, match="A flow needs 4 rows at least, to set some aside. Got 3"):
            SplineFlow.fit(normal(3, 1))


class TestOptions:
    def test_are_the_kinds_own(self):
        x = clusters(300)
        assert fit(x, "mixture", components=3).components == 3
        narrow = fit(x, "smoothed", bandwidth=0.25)
        assert torch.equal(narrow.log_prob(x.float()), Smoothed.fit(x, 0.25).log_prob(x.float()))
        assert fit(x, "copula", pieces=8).transform.pieces == 8
        with pytest.raises(InvalidValue, match="The noise 'mixture' has no such option: .*'component'"):
            fit(x, "mixture", component=3)
        with pytest.raises(InvalidValue, match="The noise 'auto' has no options: name the kind to give it components"):
            fit(x, components=3)

    def test_the_papers_mixture(self):
        """Data points plus noise, and a Gaussian."""
        x = clusters(200)
        q = fit(x, "smoothed+gaussian", share=0.25, bandwidth=0.5).double()
        parts = (Smoothed.fit(x, 0.5).double(), Gaussian.fit(x).double())
        expected = (0.25 * parts[0].log_prob(x).exp() + 0.75 * parts[1].log_prob(x).exp()).log()
        torch.testing.assert_close(q.log_prob(x), expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(InvalidValue, match="'share' of the smoothed rows must be between 0 and 1. Got 1"):
            fit(x, "smoothed+gaussian", share=1)


class TestAuto:
    @pytest.mark.parametrize(
        ("kind", "data"),
        [
            ("gaussian", lambda: normal(1000, 3) @ (torch.eye(3, dtype=torch.float64) + 0.5)),
            ("copula", lambda: normal(1000, 3).exp()),
            ("mixture", lambda: clusters(1000, width=3)),
        ],
    )
    def test_picks_what_fits(self, kind, data):
        x = data()
        q = fit(x)
        assert q.choice.kind == kind
        assert set(q.choice.scores) == {"gaussian", "copula", "mixture", "smoothed"}
        assert q.choice.line().startswith(f"Picked {kind}: by the log density ")
        direct = fit(x, kind)
        torch.testing.assert_close(q.log_prob(x.float()), direct.log_prob(x.float()), rtol=1e-4, atol=1e-4)

    def test_smoothed_where_nothing_else_fits(self):
        """A thin spiral."""
        t = 12 * torch.rand(1500, generator=seeded(), dtype=torch.float64).sqrt()
        q = fit(torch.stack([t * (2 * t).cos(), t * (2 * t).sin()], 1) + 0.05 * normal(1500, 2))
        assert q.choice.kind == "smoothed"

    def test_scores_are_mean_log_densities_of_the_held_out_rows(self):
        x, apart = normal(500, 2).exp(), normal(300, 2, seed=1).exp()
        choice = fit(x, held_out=apart).choice
        assert choice.n == 300
        for kind, score in choice.scores.items():
            assert score == pytest.approx(float(fit(x, kind).double().log_prob(apart).mean()), abs=1e-5)
        difference = fit(x, "copula").double().log_prob(apart) - fit(x, "gaussian").double().log_prob(apart)
        assert choice.stderr["gaussian"] == pytest.approx(float(difference.std(correction=0)) / 300**0.5, rel=1e-4)

    @pytest.mark.filterwarnings("ignore::unnorm.errors.ShrinkageWarning")
    @pytest.mark.parametrize("width", [1e-3, 1.0, 1e3])
    def test_constant_columns_have_no_say(self, width):
        """The scores are those without them, whatever width a noise gives them."""
        x, apart = normal(500, 2).exp(), normal(300, 2, seed=1).exp()
        still = torch.full((1, 1), width, dtype=torch.float64)
        more, more_apart = (torch.cat([rows, still.expand(len(rows), 1)], 1) for rows in (x, apart))
        alone, together = fit(x, held_out=apart), fit(more, held_out=more_apart)
        assert together.choice.kind == alone.choice.kind
        assert together.choice.scores == pytest.approx(alone.choice.scores, abs=1e-4)
        assert together.sample(3).shape == (3, 3)

    @pytest.mark.parametrize("scale", [1.0, 0.37])
    def test_counts_are_compared_as_spread_over_their_cells(self, scale):
        """Spikes on the integers have any score they like; spread out, the copula's is -(entropy + log scale) each."""
        g = seeded(3)
        counts = torch.poisson(torch.full((4000, 2), 4.0, dtype=torch.float64), generator=g)
        apart = torch.poisson(torch.full((2000, 2), 4.0, dtype=torch.float64), generator=g)
        assert GaussianMixture.fit(scale * counts, 64).log_prob(scale * apart).mean() > -2  # the spikes
        choice = fit(scale * counts, held_out=scale * apart).choice
        assert choice.kind == "copula"
        expected = -2 * (stats.poisson(4).entropy() + math.log(scale))
        assert choice.scores["copula"] == pytest.approx(expected, abs=0.06)
        assert max(choice.scores.values()) < expected + 0.06

    def test_held_out_rows_are_not_fitted_to(self):
        x = normal(200, 2)
        q = fit(x, held_out=x[:50] + 100)
        direct = fit(x, q.choice.kind)
        assert torch.equal(q.log_prob(x.float()), direct.log_prob(x.float()))

    def test_all_rows_are_fitted_to_in_the_end(self):
        x = normal(200, 2)
        q = fit(x)
        assert q.choice.kind == "gaussian"
        assert torch.equal(q.loc, Gaussian.fit(x).loc)
        assert q.choice.n == 20

    def test_a_simpler_one_within_a_standard_error(self):
        def tried(shift, noise):
            return fitting.Tried(Gaussian(1), normal(400, seed=3) + shift + noise * normal(400, seed=4))

        assert fitting._pick({"gaussian": tried(0.0, 0.0), "copula": tried(0.01, 1.0)}) == "gaussian"
        assert fitting._pick({"gaussian": tried(0.0, 0.0), "copula": tried(0.01, 0.01)}) == "copula"
        assert fitting._pick({"gaussian": tried(-math.inf, 0.0), "copula": tried(-5.0, 1.0)}) == "copula"

    def test_what_is_too_large_is_left_out_and_says_why(self):
        choice = fit(normal(400, 21)).choice
        assert choice.left_out == {"smoothed": "21 columns are more than 20"}
        assert choice.line().endswith("Not tried: smoothed (21 columns are more than 20).")
        names, left_out = fitting._candidates(torch.zeros(6000, 2001))
        assert names == ["gaussian-low-rank", "gaussian-diagonal"]
        assert set(left_out) == {"copula", "mixture", "smoothed"}
        names, left_out = fitting._candidates(torch.zeros(5001, 20))
        assert names == ["gaussian", "copula", "mixture"]
        assert left_out == {"smoothed": "5001 rows are more than 5000"}

    def test_a_candidate_that_fails_is_left_out_and_says_why(self, monkeypatch):
        def fails(data, generator):
            raise RuntimeError("the matrix\nis odd")

        monkeypatch.setattr(fitting, "KINDS", {**fitting.KINDS, "copula": fails})
        choice = fit(normal(100, 2).exp()).choice
        assert choice.left_out == {"copula": "it failed: the matrix is odd"}
        assert "copula" not in choice.scores
        everything = dict.fromkeys(fitting.KINDS, fails)
        monkeypatch.setattr(fitting, "KINDS", everything)
        with pytest.raises(DataError, match="No noise could be fitted: gaussian: it failed: the matrix is odd"):
            fit(normal(100, 2))

    def test_few_rows_are_not_divided(self):
        choice = fit(normal(19, 2)).choice
        assert choice == Choice("gaussian", {}, {}, choice.left_out, 0)
        assert set(choice.left_out.values()) == {"19 rows are too few to set some aside"}
        assert fit(normal(20, 2)).choice.n == 5

    @pytest.mark.parametrize("name", awkward())
    def test_awkward_data(self, name):
        x = awkward()[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkageWarning)
            q = fit(x)
        assert torch.isfinite(q.log_prob(x.float())).all()

    def test_says_once_what_was_regularised(self):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(normal(30, 50))
        assert [w.category for w in said] == [ShrinkageWarning]

    def test_the_same_each_time_and_quiet(self):
        x, before = normal(300, 2).exp(), torch.get_rng_state()
        one, two, other = (fit(x, generator=g).choice for g in (None, None, seeded(9)))
        assert one == two
        assert one.scores != other.scores
        assert torch.equal(before, torch.get_rng_state())

    def test_refusals(self):
        with pytest.raises(InvalidValue, match="Unknown kind of noise 'copla'. Did you mean 'copula'"):
            fit(normal(10, 2), "copla")
        with pytest.raises(DataError, match="The data have no rows"):
            fit(torch.empty(0, 2))
        with pytest.raises(DataError, match="The 'held_out' data have no rows"):
            fit(normal(10, 2), held_out=torch.empty(0, 2))
