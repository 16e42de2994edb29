"""The scikit-learn estimators: scikit-learn's own checks, integrals in the user's units, and bad tables."""

import itertools
import warnings

import joblib
import numpy as np
import pytest
import scipy.sparse
import torch
from scipy import integrate, stats
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from unnorm.density import Density
from unnorm.errors import ConstantColumnWarning, HealthWarning, InvalidValue, WeightsWarning
from unnorm.models import MLP
from unnorm.sklearn import EnergyDensity, EnergyOutlierDetector
from unnorm.tables import committee
from unnorm.tables.weights import repeated, repetitions

QUICK = {"steps": 50, "hidden": (16,), "bridges": "none", "random_state": 0}
SHORT = {"steps": 20, "hidden": (16,), "experts": 2, "random_state": 0}
OPTIONS = {EnergyDensity: QUICK, EnergyOutlierDetector: SHORT}


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([EnergyDensity(**QUICK), EnergyOutlierDetector(**SHORT)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def rows(n=1000, seed=0):
    rng = np.random.RandomState(seed)
    return np.c_[rng.gamma(2.0, 50.0, n), rng.standard_normal(n) * 1e-3 + 7.0]


def zeros_and_ones(n, width, seed, share):
    """Columns of their own with this share of ones, or (None) that have a normal variable in common."""
    rng = np.random.RandomState(seed)
    if share is None:
        return (rng.standard_normal((n, 1)) + rng.standard_normal((n, width)) > 0.5).astype(float)
    return (rng.uniform(size=(n, width)) < share).astype(float)


def log_probability(x, share):
    """The truth of `zeros_and_ones`."""
    if share is not None:
        return stats.bernoulli(share).logpmf(x).sum(1)
    nodes, masses = np.polynomial.hermite_e.hermegauss(60)
    ones = stats.norm.cdf(nodes - 0.5)
    count = x.sum(1, keepdims=True)
    return np.log(ones**count * (1 - ones) ** (x.shape[1] - count) @ masses / np.sqrt(2 * np.pi))


def total(density, *values):
    """The sum of the probabilities of all cells with these values in each column."""
    return np.exp(density.score_samples(np.array(list(itertools.product(*values))))).sum()


class TestDensity:
    @pytest.mark.parametrize("noise", ["auto", "gaussian", "copula", "mixture", "smoothed"])
    def test_integrates_to_one_in_one_dimension(self, noise):
        x = rows()[:, :1]
        density = EnergyDensity(random_state=0, steps=200, noise=noise).fit(x)
        grid = np.concatenate([-np.geomspace(1e6, 1e-3, 20_000), np.geomspace(1e-3, 1e6, 60_000)])
        total = integrate.trapezoid(np.exp(density.score_samples(grid[:, None])), grid)
        assert abs(total - 1) < 0.01

    def test_integrates_to_one_in_two_dimensions(self):
        x = rows()
        density = EnergyDensity(random_state=0, steps=200).fit(x)
        a, b = np.linspace(-150, 1500, 800), np.linspace(6.985, 7.015, 400)
        grid = np.stack(np.meshgrid(a, b, indexing="ij"), -1).reshape(-1, 2)
        values = np.exp(density.score_samples(grid)).reshape(len(a), len(b))
        assert abs(integrate.trapezoid(integrate.trapezoid(values, b), a) - 1) < 0.01

    def test_log_density_of_a_gaussian_is_its_own(self):
        rng = np.random.RandomState(0)
        cov = np.array([[4.0, 1.5], [1.5, 1.0]])
        x = rng.multivariate_normal([10, -3], cov, 5000)
        density = EnergyDensity(random_state=0).fit(x[:4000])
        gap = stats.multivariate_normal([10, -3], cov).logpdf(x[4000:]) - density.score_samples(x[4000:])
        assert abs(gap.mean()) < 0.02
        assert density.score(x[4000:]) == pytest.approx(density.score_samples(x[4000:]).mean())

    def test_samples_are_the_datas_own(self):
        x = np.c_[rows(), np.random.RandomState(1).poisson(2.0, 1000), np.full(1000, 5.0)]
        with pytest.warns(ConstantColumnWarning, match="1 of 4 columns is constant and left out: 3"):
            density = EnergyDensity(random_state=0, steps=200).fit(x)
        drawn = density.sample(2000, random_state=1)
        assert drawn.shape == (2000, 4)
        assert (drawn[:, 3] == 5.0).all()
        assert (drawn[:, 2] == np.round(drawn[:, 2])).all()
        for column in range(2):
            assert stats.ks_2samp(drawn[:, column], x[:, column]).pvalue > 1e-4
        np.testing.assert_array_equal(drawn, density.sample(2000, random_state=1))
        assert density.sample(np.int64(3)).shape == (3, 4)
        for count in (0, -1, 1.5, "3", True, None):
            with pytest.raises(InvalidValue, match="n_samples must be an int of at least 1"):
                density.sample(count)

    def test_integers_have_probabilities(self):
        """Two independent columns of integers: the density at a pair is its probability."""
        rng = np.random.RandomState(0)
        x = np.c_[rng.binomial(1, 0.3, 4000), rng.binomial(6, 0.5, 4000)].astype(float)
        density = EnergyDensity(random_state=0).fit(x)
        pairs = np.array([[a, b] for a in range(2) for b in range(7)], dtype=float)
        exact = stats.binom(1, 0.3).pmf(pairs[:, 0]) * stats.binom(6, 0.5).pmf(pairs[:, 1])
        found = np.exp(density.score_samples(pairs))
        assert np.abs(found - exact).max() < 0.03
        assert abs(found.sum() - 1) < 0.01

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
    def test_one_column_sums_to_one(self, seed, share):
        density = EnergyDensity(random_state=seed).fit(zeros_and_ones(1000, 1, seed, share))
        assert abs(total(density, [0.0, 1.0]) - (1 - 1 / 1002)) < 0.003
        assert abs(total(density, np.arange(-1000.0, 1000.0)) - 1) < 0.003

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("share", [0.3, 0.5, None])
    def test_two_columns_of_zeros_and_ones_sum_to_one(self, seed, share):
        """All but the small probability of other values."""
        density = EnergyDensity(random_state=seed).fit(zeros_and_ones(1000, 2, seed, share))
        assert abs(total(density, *2 * [[0.0, 1.0]]) - (1 - 1 / 1002) ** 2) < 0.01

    @pytest.mark.parametrize("seed", range(3))
    def test_two_columns_of_counts_sum_to_one(self, seed):
        rng = np.random.RandomState(seed)
        rate = rng.gamma(3.0, 1.0, 1000)
        density = EnergyDensity(random_state=seed).fit(rng.poisson(np.c_[rate, 2 * rate].T).T.astype(float))
        assert abs(total(density, np.arange(-2.0, 30.0), np.arange(-2.0, 50.0)) - 1) < 0.01

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("share", [0.3, None])
    def test_four_columns_of_zeros_and_ones_sum_to_one(self, seed, share):
        density = EnergyDensity(random_state=seed).fit(zeros_and_ones(1000, 4, seed, share))
        assert abs(total(density, *4 * [[0.0, 1.0]]) - 1) < 0.02

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("share", [0.3, None])
    def test_eight_columns_of_zeros_and_ones(self, seed, share):
        """They add up to one; rows that were not fitted are no likelier than under the truth."""
        x = zeros_and_ones(5000, 8, seed, share)
        density = EnergyDensity(random_state=seed).fit(x[:2000])
        assert 0.97 < total(density, *8 * [[0.0, 1.0]]) < 1.02
        gain = density.score_samples(x[2000:]) - log_probability(x[2000:], share)
        assert -0.2 < gain.mean() < 3 * gain.std() / np.sqrt(len(gain))

    def test_the_truth_of_zeros_and_ones(self):
        cells = np.array(list(itertools.product([0.0, 1.0], repeat=3)))
        x = zeros_and_ones(100_000, 3, 0, None)
        found = np.array([(x == cell).all(1).mean() for cell in cells])
        np.testing.assert_allclose(np.exp(log_probability(cells, None)), found, atol=0.006)

    @pytest.mark.parametrize("width", [1, 2, 5])
    def test_a_row_has_its_score_whatever_comes_with_it(self, width):
        x = np.c_[zeros_and_ones(300, width, 0, 0.4), np.random.RandomState(1).standard_normal(300)]
        density = EnergyDensity(**QUICK).fit(x)
        scores = density.score_samples(x)
        np.testing.assert_array_equal(density.score_samples(x), scores)
        np.testing.assert_allclose(density.score_samples(x[7:8]), scores[7:8], rtol=1e-5)
        np.testing.assert_allclose(density.score_samples(np.r_[x[::-1], x]), np.r_[scores[::-1], scores], rtol=1e-5)

    @pytest.mark.parametrize("share", [0.1, 0.5])
    def test_one_column_of_zeros_and_ones(self, share):
        x = np.random.RandomState(0).binomial(1, share, 2000)[:, None].astype(float)
        density = EnergyDensity(random_state=0).fit(x)
        found = np.exp(density.score_samples([[0.0], [1.0], [2.0]]))
        assert found == pytest.approx([1 - x.mean(), x.mean(), 0.0], abs=3.5 * np.sqrt(share * (1 - share) / 2000))
        assert abs(found.sum() - 1) < 0.02

    @pytest.mark.parametrize("step", [1.0, 10.0, 1000.0])
    def test_integers_of_any_step(self, step):
        """Hundreds or thousands are as much a lattice as ones: density times step is a probability."""
        counts = np.random.RandomState(0).poisson(3.0, 2000).astype(float)
        density = EnergyDensity(random_state=0).fit(step * counts[:, None])
        assert density.columns_.modelled[0].numbers.step == step
        found = density.score_samples(step * np.arange(8.0)[:, None]) + np.log(step)
        assert np.abs(np.exp(found) - stats.poisson(3.0).pmf(np.arange(8))).max() < 0.03
        drawn = density.sample(500, random_state=0)
        assert (drawn % step == 0).all()

    def test_weights_count_rows(self):
        x = rows(400)
        weights = np.random.RandomState(1).randint(0, 3, 400)
        a = EnergyDensity(**QUICK).fit(x, sample_weight=weights)
        b = EnergyDensity(**QUICK).fit(np.repeat(x, weights, axis=0))
        np.testing.assert_allclose(a.score_samples(x), b.score_samples(x))
        half = EnergyDensity(**QUICK).fit(x, sample_weight=0.5 * np.ones(400))
        np.testing.assert_allclose(half.score_samples(x), EnergyDensity(**QUICK).fit(x).score_samples(x))
        tiny = EnergyDensity(**QUICK).fit(x, sample_weight=np.full(400, 1e-12))
        np.testing.assert_allclose(tiny.score_samples(x), half.score_samples(x))
        with pytest.raises(ValueError, match="Negative values"):
            EnergyDensity(**QUICK).fit(x, sample_weight=-np.ones(400))
        one = np.r_[1e12, np.full(399, 1.1)]
        with pytest.raises(ValueError, match="nearly all of the sample weights on equal rows"):
            EnergyDensity(**QUICK).fit(x, sample_weight=one)

    @pytest.mark.parametrize("kind", [EnergyDensity, EnergyOutlierDetector])
    def test_a_row_of_weight_zero_is_left_out(self, kind):
        """It ends no group of categories, no lattice and no constant, and has no range."""
        rng = np.random.RandomState(0)
        x = np.c_[rng.standard_normal(200), rng.poisson(2.0, 200), np.eye(3)[rng.randint(0, 3, 200)], np.full(200, 4.0)]
        more = np.r_[x, [[1.7e308, 0.3, 0, 0, 0, 5.0], [-1.7e308, 0.0, 1, 1, 0, 4.0]]]
        weights = rng.uniform(0.5, 2.0, 200)
        with pytest.warns(ConstantColumnWarning):
            without = kind(**OPTIONS[kind]).fit(x, sample_weight=weights)
        with pytest.warns(ConstantColumnWarning):
            zero = kind(**OPTIONS[kind]).fit(more, sample_weight=np.r_[weights, 0, 0])
        if kind is EnergyDensity:
            assert [column.kind for column in zero.columns_.modelled] == ["continuous", "discrete", "flags"]
        np.testing.assert_array_equal(zero.score_samples(x), without.score_samples(x))

    @pytest.mark.parametrize("count", [0, 1])
    def test_weights_that_leave_too_few_rows(self, count):
        weights = np.r_[np.ones(count), np.zeros(400 - count)]
        with pytest.raises(ValueError, match="non-zero number|above zero, while a minimum of 2 is required"):
            EnergyDensity(**QUICK).fit(rows(400), sample_weight=weights)

    def test_weights_that_are_no_whole_numbers(self):
        """A Gaussian of weighted rows has their weighted moments."""
        rng = np.random.RandomState(0)
        x, weights = rng.standard_normal((1000, 2)), rng.uniform(0.1, 3.0, 1000)
        weights[x[:, 0] > 0] *= 2.3
        for shuffled in (np.arange(1000), rng.permutation(1000)):
            rows = repeated(x[shuffled], repetitions(x[shuffled], weights[shuffled]))
            np.testing.assert_allclose(rows.mean(0), np.average(x, axis=0, weights=weights), atol=0.01)
            np.testing.assert_allclose(np.cov(rows.T), np.cov(x.T, aweights=weights), atol=0.02)
        density = EnergyDensity(**QUICK, noise="gaussian").fit(x, sample_weight=weights)
        drawn = density.sample(20_000, random_state=0)
        np.testing.assert_allclose(drawn.mean(0), np.average(x, axis=0, weights=weights), atol=0.1)

    def test_values_on_a_lattice_are_spread_over_their_cells(self):
        """A column of tenths: the density times a tenth is a probability, and samples are tenths."""
        rng = np.random.RandomState(0)
        tenths = np.round(0.1 * rng.binomial(6, 0.5, 4000) + 0.3, 1)
        x = np.c_[tenths, rng.standard_normal(4000)]
        density = EnergyDensity(random_state=0).fit(x)
        assert [column.numbers.step for column in density.columns_.modelled] == pytest.approx([0.1, 0.0])
        grid = np.linspace(-6, 6, 241)
        for count in range(7):
            points = np.c_[np.full(241, 0.3 + 0.1 * count), grid]
            found = 0.1 * integrate.trapezoid(np.exp(density.score_samples(points)), grid)
            assert abs(found - stats.binom(6, 0.5).pmf(count)) < 0.03
        drawn = density.sample(500, random_state=1)[:, 0]
        np.testing.assert_allclose(drawn, np.round(drawn, 1), atol=1e-9)

    def test_what_speaks_against_it_is_said(self, monkeypatch):
        """A log Z not to be trusted, and a training given up, are warnings by name."""
        x = rows(300)
        doubtful = Density.normalise

        def doubting(*given, **options):
            density = doubtful(*given, **options)
            density.doubts = ("a test says so",)
            warnings.warn("log Z cannot be believed: a test says so.", WeightsWarning, stacklevel=2)
            return density

        with monkeypatch.context() as patch:
            patch.setattr(Density, "normalise", doubting)
            with pytest.warns(WeightsWarning, match="cannot be believed"):
                density = EnergyDensity(**QUICK).fit(x)
        assert not density.diagnostics_["trusted"]
        with pytest.warns(HealthWarning, match="given up, and the noise alone is the density"):
            density = EnergyDensity(**QUICK | {"lr": 1e30}).fit(x)
        assert np.isfinite(density.score_samples(x)).all()

    def test_saved_and_loaded(self, tmp_path):
        """The density of either estimator is a `Density` like any other: its folder holds numbers, no code."""
        x = rows(200)
        for fitted in (EnergyDensity(**QUICK).fit(x), EnergyOutlierDetector(**SHORT).fit(x)):
            folder = tmp_path / type(fitted).__name__
            fitted.density_.save(folder)
            again = Density.load(folder)
            points = torch.from_numpy(x)
            torch.testing.assert_close(again.log_prob(points), fitted.density_.log_prob(points), rtol=1e-5, atol=1e-5)

    def test_time_is_kept(self):
        density = EnergyDensity(
            random_state=0, noise="gaussian", steps=10**6, patience=10**6, bridges="none", max_time=2.0
        )
        density.fit(rows())
        assert 1 < density.diagnostics_["steps"] < 10**6
        assert density.history_["seconds"][-1] < 2.0
        assert density.diagnostics_["seconds"] < 6.0  # of a busy machine; alone it is 2

    def test_torch_s_own_generator_is_left_alone(self):
        before = torch.get_rng_state()
        EnergyDensity(**QUICK).fit(rows(100))
        EnergyOutlierDetector(**SHORT).fit(rows(100))
        assert torch.equal(before, torch.get_rng_state())

    def test_pieces_of_scikit_learn(self, tmp_path):
        x = rows(300)
        pipeline = make_pipeline(StandardScaler(), EnergyDensity(**QUICK)).fit(x)
        search = GridSearchCV(EnergyDensity(**QUICK), {"noise": ["gaussian", "copula"]}, cv=2).fit(x)
        assert search.best_params_["noise"] in ("gaussian", "copula")
        joblib.dump(pipeline, tmp_path / "a.joblib")
        again = joblib.load(tmp_path / "a.joblib")
        np.testing.assert_array_equal(again.score_samples(x), pipeline.score_samples(x))
        twin = clone(pipeline).fit(x)
        np.testing.assert_allclose(twin.score_samples(x), pipeline.score_samples(x))

    def test_frames_and_categories(self):
        pandas = pytest.importorskip("pandas")
        polars = pytest.importorskip("polars")
        frame = pandas.DataFrame({"a": rows(300)[:, 0], "b": rows(300)[:, 1]})
        density = EnergyDensity(**QUICK).fit(frame)
        assert list(density.feature_names_in_) == ["a", "b"]
        np.testing.assert_array_equal(
            density.score_samples(frame), EnergyDensity(**QUICK).fit(polars.from_pandas(frame)).score_samples(frame)
        )
        with pytest.raises(ValueError, match="feature names"):
            density.score_samples(frame[["b", "a"]])
        frame["c"] = np.where(frame["a"] > 100, "high", "low")
        encode = ColumnTransformer([("c", OneHotEncoder(), ["c"])], remainder="passthrough")
        pipeline = make_pipeline(encode, EnergyDensity(**QUICK)).fit(frame)
        assert np.isfinite(pipeline.score_samples(frame)).all()
        assert pipeline[-1].columns_.modelled[0].kind == "flags"

    @pytest.mark.parametrize("count", [2, 3, 6])
    def test_categories_have_probabilities(self, count):
        """One column of zeros and ones for each category, as a OneHotEncoder writes them."""
        rng = np.random.RandomState(0)
        share = np.arange(count, 0, -1.0) / np.arange(count + 1).sum()
        x = np.eye(count)[rng.choice(count, 2000, p=share)]
        density = EnergyDensity(random_state=0).fit(x)
        found = np.exp(density.score_samples(np.eye(count)))
        assert found == pytest.approx(x.mean(0), abs=0.03)
        drawn = density.sample(500, random_state=0)
        assert (drawn.sum(1) == 1).all()
        assert set(np.unique(drawn)) == {0.0, 1.0}
        assert drawn.mean(0) == pytest.approx(x.mean(0), abs=0.1)
        assert density.score_samples(np.zeros((1, count)))[0] < np.log(found.min()) - 1  # a category that is unseen

    def test_categories_depend_on_numbers(self):
        """p(x, c) = p(c) N(x; mean of c, 1)."""
        rng = np.random.RandomState(0)
        c = rng.choice(3, 4000, p=[0.5, 0.3, 0.2])
        means = np.array([-3.0, 0.0, 3.0])
        x = np.c_[rng.standard_normal(4000) + means[c], np.eye(3)[c]]
        density = EnergyDensity(random_state=0).fit(x[:3000])
        exact = np.log(np.array([0.5, 0.3, 0.2]))[c] + stats.norm(means[c]).logpdf(x[:, 0])
        assert exact[3000:].mean() - density.score(x[3000:]) < 0.1


class TestDetector:
    def test_far_rows_are_found(self):
        rng = np.random.RandomState(0)
        far = rng.standard_normal((10, 4))
        far *= 8 / np.linalg.norm(far, axis=1, keepdims=True)
        x = np.r_[rng.standard_normal((500, 4)), far]
        detector = EnergyOutlierDetector(random_state=0, contamination=10 / 510).fit(x)
        assert (detector.predict(x) == np.r_[np.ones(500), -np.ones(10)]).mean() > 0.995
        np.testing.assert_allclose(detector.decision_function(x), detector.score_samples(x) - detector.offset_)
        assert ((detector.decision_function(x) < 0) == (detector.predict(x) == -1)).all()
        assert np.isfinite(detector.log_density(x)).all()

    def test_the_wildest_row_is_among_the_first(self):
        """One value that is wrong by a factor, in a small table."""
        for seed in range(3):
            x = np.random.RandomState(seed).standard_normal((200, 3))
            x[7, seed] = 1e6
            scores = EnergyOutlierDetector(random_state=0).fit(x).score_samples(x)
            assert (scores < scores[7]).sum() <= 1

    def test_a_group_of_anomalies_is_found(self):
        """They are among the rows it is fitted to, and close to each other."""
        rng = np.random.RandomState(0)
        x = np.r_[rng.standard_normal((500, 4)), 6 + rng.standard_normal((10, 4))]
        scores = EnergyOutlierDetector(random_state=0).fit(x).score_samples(x)
        assert roc_auc_score(np.r_[np.ones(500), np.zeros(10)], scores) > 0.95

    def test_a_broken_dependence_is_found(self):
        """Each value is usual in its column, the pair is not: single columns cannot see it."""
        rng = np.random.RandomState(0)
        z = rng.standard_normal(2000)
        x = np.c_[z, z + 0.05 * rng.standard_normal(2000)]
        detector = EnergyOutlierDetector(random_state=0, contamination=0.02).fit(x)
        assert detector.predict([[1.0, 1.0], [1.0, -1.0]]).tolist() == [1, -1]

    def test_a_constant_that_changes_is_an_anomaly(self):
        """A stuck sensor, then another value: nothing like it was among the rows."""
        x = np.c_[rows(300), np.full(300, 0.3)]
        with pytest.warns(ConstantColumnWarning):
            detector = EnergyOutlierDetector(**SHORT, contamination=0.01).fit(x)
        usual = np.median(x, axis=0)
        others = np.array([usual, usual, usual])
        others[1, 2], others[2, 2] = 0.1 + 0.2, 7.0
        assert detector.predict(others).tolist() == [1, 1, -1]

    def test_networks_see_scaled_columns(self):
        """Folded into the noise's coordinates they are the same functions, also where columns depend on each other."""
        x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x[:, 2] = x[:, 0] + 0.01 * x[:, 2]
        net, whiten = MLP(3, (8,), generator=torch.Generator().manual_seed(1)), committee._wider(x.numpy())
        z = whiten(x)[0]
        torch.testing.assert_close(committee._folded(net, whiten)(z.float()), net(x.float()), rtol=1e-3, atol=1e-3)

    def test_networks_that_diverge_have_no_say(self, monkeypatch):
        x = rows(300)
        monkeypatch.setattr(committee, "LR", 1e30)
        with pytest.warns(HealthWarning, match="2 of 2 networks diverged and have no say: the noise alone"):
            detector = EnergyOutlierDetector(**SHORT).fit(x)
        assert detector.diagnostics_["experts"] == 0
        points = torch.from_numpy(x)
        torch.testing.assert_close(detector.density_.log_prob(points), detector.density_.noise_log_prob(points))
        assert np.isfinite(detector.score_samples(x)).all()

    def test_time_is_kept_and_told(self):
        detector = EnergyOutlierDetector(**SHORT | {"steps": 10**6}, max_time=1.0).fit(rows(300))
        assert 1 < detector.diagnostics_["steps"] < 10**5
        assert detector.history_["step"][-1] == detector.diagnostics_["steps"]
        assert detector.diagnostics_["experts"] == 2
        assert detector.diagnostics_["trusted"]

    def test_a_log_density_in_doubt_says_so(self):
        x = rows(300)
        detector = EnergyOutlierDetector(**SHORT).fit(x)
        detector.density_.doubts = ("a test says so",)
        with pytest.warns(WeightsWarning, match="cannot be believed: a test says so"):
            detector.log_density(x)

    @pytest.mark.parametrize("contamination", [0.01, 0.2, 0.5])
    def test_contamination_is_the_share(self, contamination):
        x = rows(1000)
        found = EnergyOutlierDetector(contamination=contamination, **SHORT).fit(x).predict(x)
        assert abs((found == -1).mean() - contamination) < 0.005

    def test_contamination_of_new_rows(self):
        """More of them are called anomalies, as the docstring says; a quantile of held-out scores gives the share."""
        x = np.random.RandomState(0).standard_normal((6000, 20))
        detector = EnergyOutlierDetector(random_state=0, contamination=0.1).fit(x[:1000])
        assert (detector.predict(x[2000:]) == -1).mean() > 0.13
        scores = detector.score_samples(x[1000:])
        assert abs((scores[1000:] < np.quantile(scores[:1000], 0.1)).mean() - 0.1) < 0.03


BAD = {
    "nan": (np.array([[1.0, np.nan], [2.0, 3.0]]), "Input X contains NaN"),
    "infinity": (np.array([[1.0, np.inf], [2.0, 3.0]]), "Input X contains infinity"),
    "words": (np.array([["a", "b"], ["c", "d"]], dtype=object), "could not convert string to float"),
    "one row": (np.ones((1, 3)), "Found array with 1 sample"),
    "no columns": (np.ones((3, 0)), "0 feature"),
    "one axis": (np.ones(5), "Expected 2D array"),
    "equal rows": (np.ones((50, 3)), "All 3 columns are constant"),
    "an infinite range": (
        np.array([[-1.7e308, 1.0], [1.7e308, 2.0], [0.0, 3.0]]),
        "contains values too large for dtype",
    ),
    "sparse": (scipy.sparse.csr_matrix(np.eye(5)), "Sparse data was passed"),
}


@pytest.mark.parametrize("kind", [EnergyDensity, EnergyOutlierDetector])
class TestBadTables:
    def test_dates_are_refused(self, kind):
        """By name, whatever holds them: numpy would count them in the unit they are stored in, or fail in its words."""
        pandas = pytest.importorskip("pandas")
        polars = pytest.importorskip("polars")
        days = np.datetime64("2024-01-01") + np.arange(50)
        fitted = kind(**OPTIONS[kind]).fit(rows(50))
        for values in (days, days - days[0], pandas.Series(days).dt.tz_localize("UTC")):
            frame = pandas.DataFrame({"a": rows(50)[:, 0], "day": values})
            for table in (frame, frame[["day"]], polars.from_pandas(frame)):
                with pytest.raises(TypeError, match="Column 'day' of X holds dates or times"):
                    kind(**OPTIONS[kind]).fit(table)
            with pytest.raises(TypeError, match="Column 'day' of X holds dates or times"):
                fitted.score_samples(frame)
        with pytest.raises(TypeError, match="X holds dates or times"):
            kind(**OPTIONS[kind]).fit(np.c_[days, days])

    def test_a_lazy_frame_is_refused(self, kind):
        polars = pytest.importorskip("polars")
        frame = polars.DataFrame({"a": rows(50)[:, 0], "b": rows(50)[:, 1]})
        with pytest.raises(TypeError, match=r"X is a LazyFrame.* Pass X\.collect\(\)"):
            kind(**OPTIONS[kind]).fit(frame.lazy())
        fitted = kind(**OPTIONS[kind]).fit(frame)
        with pytest.raises(TypeError, match=r"Pass X\.collect\(\)"):
            fitted.score_samples(frame.lazy())

    @pytest.mark.parametrize("name", BAD)
    def test_refused_in_scikit_learns_words(self, kind, name):
        table, words = BAD[name]
        with pytest.raises((ValueError, TypeError), match=words):
            kind(**OPTIONS[kind]).fit(table)

    @pytest.mark.parametrize(
        "table",
        [
            pytest.param(np.random.RandomState(0).standard_normal((60, 1)), id="one column"),
            pytest.param(np.random.RandomState(0).standard_normal((5, 500)), id="5 rows, 500 columns"),
            pytest.param(1e300 * np.random.RandomState(0).standard_normal((100, 2)), id="1e300"),
            pytest.param(1e-300 * np.random.RandomState(0).standard_normal((100, 2)), id="1e-300"),
            pytest.param(np.repeat(np.random.RandomState(0).standard_normal((5, 3)), 40, axis=0), id="duplicates"),
            pytest.param(np.repeat([[0.0, 1.0], [1.0, 0.0]], 50, axis=0), id="two rows"),
            pytest.param(np.c_[np.arange(100.0), 2 * np.arange(100.0)], id="linear dependence"),
        ],
    )
    def test_that_work(self, kind, table):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstantColumnWarning)
            fitted = kind(**OPTIONS[kind]).fit(table)
        assert np.isfinite(fitted.score_samples(table)).all()
