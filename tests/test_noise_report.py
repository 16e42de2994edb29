"""How a noise stands to a model or to data, against closed forms; and the monitor's rule that comes of it."""

import json
import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm
from torch import distributions as td
from torch import nn

from tests.test_cli import SMALL, points, table, unnorm
from unnorm import MECO, Density, Gaussian, Quadratic, Training, train
from unnorm.data import Standardize
from unnorm.data.rows import Rows
from unnorm.diagnostics import certified_limit, noise_report
from unnorm.errors import HealthWarning, InvalidValue, Unhealthy
from unnorm.estimators import Telescope
from unnorm.health import Health
from unnorm.models import Bridged
from unnorm.noise import Uniform, from_distribution


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(mean, n=4000, d=1, seed=1):
    return mean + torch.randn(n, d, generator=seeded(seed))


def shifted(mean, constant=3.0):
    """N(mean, 1) and a constant that nobody is told."""
    return lambda x: td.Normal(mean, 1.0).log_prob(x).sum(-1) + constant


class TestAgainstAModel:
    @pytest.mark.parametrize("m", [0.0, 0.5, 1.0])
    def test_two_gaussians(self, m):
        """KL = m^2/2 and the effective share 1 / E w^2 = exp(-m^2); w^2 has the relative variance exp(4 m^2) - 1."""
        n = 100_000
        found = noise_report(Gaussian(1), shifted(m), n=n, generator=seeded())
        assert abs(found.kl - m**2 / 2) < 5 * found.kl_stderr + 1e-6
        assert found.kl_stderr < 0.02
        assert abs(found.ess / math.exp(-(m**2)) - 1) < 5 * math.sqrt(math.expm1(4 * m**2) / n) + 1e-5
        assert found.khat < 0.5
        assert found.good
        assert (found.n, found.limit) == (n, math.log(n))

    @pytest.mark.parametrize("s2", [0.5, 1.5])
    def test_two_widths(self, s2):
        """N(0, s^2): KL = (s^2 - 1 - log s^2) / 2, and E w^2 = 1 / (s sqrt(2 - s^2)), finite below s^2 = 2."""
        model = td.Normal(0.0, math.sqrt(s2))
        found = noise_report(Gaussian(1), lambda x: model.log_prob(x).sum(-1), n=100_000, generator=seeded())
        assert abs(found.kl - (s2 - 1 - math.log(s2)) / 2) < 5 * found.kl_stderr
        assert found.ess == pytest.approx(math.sqrt(s2 * (2 - s2)), rel=0.03)

    @pytest.mark.parametrize("k", [0.2, 0.5, 0.9])
    def test_pareto_weights(self, k):
        """For q = Exp(1) and p~ = exp(-(1 - k) x) the weights exp(k x) are Pareto of shape k."""
        q = from_distribution(td.Exponential(torch.ones(1)))
        found = noise_report(q, lambda x: -(1 - k) * x.sum(-1), n=100_000, generator=seeded())
        tail = 3 * math.sqrt(100_000)
        assert abs(found.khat - k) < 4 * (1 + k) / math.sqrt(tail)  # the error of a generalized Pareto's shape
        assert found.good == (k < 0.7)

    def test_its_error_is_its_own(self):
        """The KL's spread over seeds is what each says of itself."""
        found = [noise_report(Gaussian(1), shifted(0.7), n=2000, generator=seeded(k)) for k in range(60)]
        told = np.sqrt(np.mean([each.kl_stderr**2 for each in found]))
        assert 0.5 < np.std([each.kl for each in found]) / told < 2

    def test_with_data_it_is_donsker_and_varadhan(self):
        """mean of log p~/q at the data - log mean of p~/q at the draws, by numpy."""
        x, q = rows(1.3, 300, seed=4), Gaussian(1)
        found = noise_report(q, shifted(1.0), data=x, n=1000, generator=seeded(9))
        z = q.sample(1000, generator=seeded(9)).double().numpy()
        at = {name: norm.logpdf(y, 1.0) + 3 - norm.logpdf(y) for name, y in {"x": x.double().numpy(), "z": z}.items()}
        by_hand = at["x"].mean() - (logsumexp(at["z"]) - math.log(1000))
        assert found.kl == pytest.approx(by_hand, abs=1e-5)
        w = np.exp(at["z"])
        error = math.hypot(at["x"].std(ddof=1) / math.sqrt(300), w.std() / w.mean() / math.sqrt(1000))
        assert found.kl_stderr == pytest.approx(error, rel=1e-4)
        assert found.ess == pytest.approx(w.sum() ** 2 / (w**2).sum() / 1000, rel=1e-4)
        assert "the model at 300 rows" in found.lines()[0]

    def test_with_data_the_error_is_the_spread(self):
        """z-scores of 40 seeds: their squares add up to chi-squared of 40 degrees, within 99.8%."""
        scores = []
        for k in range(40):
            found = noise_report(Gaussian(1), shifted(0.6), data=rows(0.6, 500, seed=k), n=2000, generator=seeded(k))
            scores.append((found.kl - 0.18) / found.kl_stderr)
        assert 17 < np.square(scores).sum() < 74

    def test_another_model_bounds_from_below(self):
        """Any ratio gives a lower bound: of N(1, 1) against N(0, 1), by the model N(b, 1), b - b^2 / 2."""
        x = rows(1.0, 20_000)
        for b in (0.3, 1.0, 1.6):
            found = noise_report(Gaussian(1), shifted(b), data=x, n=100_000, generator=seeded())
            assert abs(found.kl - (b - b**2 / 2)) < 5 * found.kl_stderr

    def test_constants_and_images_do_not_matter(self):
        q, x = Gaussian((1, 2, 2)), rows(0.0, 50, 4).view(-1, 1, 2, 2)
        low, high = (
            noise_report(q, lambda y, c=c: y.flatten(1).sum(-1) / 9 + c, data=x, generator=seeded()) for c in (0, 500)
        )
        assert low.kl == pytest.approx(high.kl, abs=1e-4)
        assert low.ess == pytest.approx(high.ess, rel=1e-4)


class TestAgainstData:
    @pytest.mark.parametrize("m", [0.0, 1.0, 2.0])
    def test_a_bound_near_the_truth(self, m):
        truth = m**2 / 2
        found = noise_report(Gaussian(1), rows(m, 8000), generator=seeded())
        assert truth - 0.1 - 0.1 * truth - 4 * found.kl_stderr < found.kl < truth + 4 * found.kl_stderr
        assert "at 4,000 rows" in found.lines()[0]
        assert "not that one is near" in found.lines()[-1]
        assert found.certified
        assert not found.good

    def test_correlations_are_seen_in_many_dimensions(self):
        """Trees see little of 50 correlated columns; a Gaussian critic the KL, -log det(R) / 2, almost whole."""
        mixing = torch.eye(50) + 0.3 * torch.randn(50, 50, generator=seeded(2))
        covariance = mixing @ mixing.T
        scale = covariance.diagonal().sqrt()
        truth = -float(torch.linalg.slogdet(covariance / scale / scale[:, None]).logabsdet) / 2
        x = rows(0.0, 6000, 50) @ mixing.T / scale
        found = noise_report(Gaussian(50), x, generator=seeded())
        assert truth - 1.5 < found.kl < truth + 3 * found.kl_stderr
        assert "a Gaussian at 3,000 rows" in found.how
        assert not found.certified  # truth is some 20 nats

    def test_groups_are_seen_by_a_mixture(self):
        g = seeded(3)
        x = (
            torch.randn(8000, 8, generator=g) * 0.1
            + torch.randn(4, 8, generator=g)[torch.randint(4, (8000,), generator=g)]
        )
        found = noise_report(Gaussian.fit(x), x, generator=seeded())
        assert found.how.startswith("a mixture of 8 Gaussians")
        assert found.kl > 5

    def test_no_bound_above_log_n_by_draws(self):
        """Data in a corner of a box where no draw came: trees alone would claim any KL."""
        q = Uniform.fit(torch.rand(4000, 2, generator=seeded(5)))
        for seed in range(4):
            x = 0.4 + 0.01 * torch.rand(4000, 2, generator=seeded(seed))
            found = noise_report(q, x, n=10_000, n_noise=1e6, generator=seeded(10 + seed))
            assert 8.5 < found.kl < 9.41  # log(1 / 0.01^2) = 9.21, and the box is a little larger than one
            assert found.certified
        assert noise_report(q, 2 + x, generator=seeded()).lines() == [
            "noise: KL infinite: some rows lie where the noise has no density"
        ]

    def test_rows_that_cannot_be(self):
        with pytest.raises(InvalidValue, match="NaN or infinity"):
            noise_report(Gaussian(2), torch.full((50, 2), math.nan))
        with pytest.raises(InvalidValue, match=r"events of shape \(3,\), the noise \(2,\)"):
            noise_report(Gaussian(2), torch.zeros(50, 3))

    def test_rows_need_be_no_tensor(self):
        """Any RowSource; the same rows give the same report."""
        x = rows(1.0, 400, 2)
        found = [noise_report(Gaussian(2), data, generator=seeded()) for data in (x.double(), Rows(x.numpy()))]
        assert found[0] == found[1]

    def test_far_data_are_not_certified_by_few_draws(self):
        """KL(N(6, 1), N(0, 1)) = 18: a classifier sees what it can, and says so by its limit."""
        found = noise_report(Gaussian(1), rows(6.0), n_noise=100, generator=seeded())
        assert found.limit == math.log(100)
        assert found.kl > found.limit
        assert not found.certified


class TestLimit:
    @pytest.mark.parametrize(("n", "gamma"), [(1, 1.0), (500, 0.1), (1e6, 0.5)])
    def test_formula(self, n, gamma):
        assert certified_limit(n, gamma) == pytest.approx(math.log(n) - math.log(gamma))
        if n >= 100:
            found = noise_report(Gaussian(1), shifted(0.0), n=100, n_noise=n, gamma=gamma, generator=seeded())
            assert found.limit == certified_limit(n, gamma)
            assert found.n_noise == n / gamma
            assert f"{n / gamma:,.0f} draws certify up to log n = {found.limit:.1f}" in found.lines()[0]

    def test_a_claim_beyond_it(self):
        """A model that puts the data 200 nats away: so many draws can certify log n, and the lines say so."""
        found = noise_report(Gaussian(1), shifted(20.0), data=rows(20.0), n=1000, generator=seeded())
        assert found.kl > 100 > math.log(1000) == found.limit
        assert not found.certified
        assert not found.good
        assert "too far for so many draws: a log u they track is an artefact" in found.lines()[-1]

    def test_the_same_claim_within_it(self):
        """3 nats: certified by 1000 draws, not by ten."""
        for n_noise, certified in ((1000, True), (10, False)):
            x = rows(math.sqrt(6))
            found = noise_report(Gaussian(1), shifted(math.sqrt(6)), data=x, n_noise=n_noise, generator=seeded())
            assert abs(found.kl - 3) < 5 * found.kl_stderr
            assert found.certified == certified

    def test_few_effective_draws(self):
        """Certified but heavy: Pareto k = 0.9."""
        q = from_distribution(td.Exponential(torch.ones(1)))
        found = noise_report(q, lambda x: -0.1 * x.sum(-1), n=20_000, generator=seeded())
        assert found.certified
        assert not found.good
        assert "rest on few draws" in found.lines()[-1]
        assert len(noise_report(q, lambda x: -x.sum(-1), generator=seeded()).lines()) == 2  # all is well

    @pytest.mark.parametrize(("n", "gamma"), [(0, 1.0), (0.5, 1.0), (math.nan, 1.0), (10, 0.0), (10, 1.5), (10, -1)])
    def test_bad_arguments(self, n, gamma):
        with pytest.raises(InvalidValue, match=r"n_noise of at least 1 and gamma in \(0, 1\]"):
            certified_limit(n, gamma)
        with pytest.raises(InvalidValue, match=r"n_noise of at least 1 and gamma in \(0, 1\]"):
            noise_report(Gaussian(1), shifted(0.0), n_noise=n, gamma=gamma)

    def test_few_draws_and_few_rows(self):
        with pytest.raises(InvalidValue, match="at least 100 draws. Got 99"):
            noise_report(Gaussian(1), shifted(0.0), n=99)
        with pytest.raises(InvalidValue, match="at least 20 rows. Got 19"):
            noise_report(Gaussian(1), rows(0.0, 19))
        with pytest.raises(InvalidValue, match=r"must map \(n, \*event\) to \(n,\)"):
            noise_report(Gaussian(1), lambda x: x)


class TestDensity:
    def test_rows_are_in_the_users_units(self):
        model, x = Quadratic(2, learn_precision=False), rows(0.8, 500, 2)
        with torch.no_grad():
            model.linear.fill_(0.8)
        transform = Standardize(2)
        transform.loc.fill_(100.0), transform.scale.fill_(7.0)
        density = Density.normalise(model, Gaussian(2), transform, n=2000, generator=seeded())
        found = density.noise_report(100 + 7 * x.double(), n=5000, generator=seeded())
        plain = noise_report(Gaussian(2), model, data=x, log_z=density.log_z, n=5000, generator=seeded())
        assert found[:7] == pytest.approx(plain[:7], rel=1e-4)
        assert found.how == plain.how
        assert abs(found.kl - 0.64) < 5 * found.kl_stderr
        assert density.noise_report(generator=seeded()).how == "the model"

    def test_diagnose(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        fitted = ["fit", table("t.csv", points(d=4), "abcd"), *SMALL, "--noise", "gaussian", "--bridges", "none"]
        assert unnorm(*fitted, "--out", "run") == 0
        capsys.readouterr()
        assert unnorm("diagnose", "run", "--json", "-n", "4000") == 0
        found = json.loads(capsys.readouterr().out)["noise"]
        assert found["limit"] == pytest.approx(math.log(4000))
        assert (found["n"], found["certified"]) == (4000, True)
        assert found["how"] == "the model at 84 rows"
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        gain = result["noise_nll"] - result["test_nll"]  # the same KL, with the run's own log Z
        assert abs(found["kl"] - gain) < 0.05
        assert unnorm("diagnose", "run") == 0
        assert "draws certify up to log n" in capsys.readouterr().out


class TestMonitor:
    """The rule `certified`: plain MECO, the data 8 and 16 standard deviations from the noise."""

    @pytest.mark.parametrize(("lr", "steps"), [(0.01, 300), (0.1, 800)])
    @pytest.mark.parametrize("m", [8.0, 16.0])
    def test_warns_before_the_model_is_lost(self, m, lr, steps):
        """By that name, and before |theta - theta*| is twice what it was at the start, m; with large steps it will be.

        log u stays behind and theta runs past the data, without end.
        """
        thetas, model = [], Quadratic(1, learn_precision=False)
        model.register_forward_pre_hook(lambda module, _: thetas.append(module.linear.item()))
        with pytest.warns(HealthWarning) as caught:
            history = train(model, MECO(Gaussian(1)), rows(m), Training(steps=steps, lr=lr))
        assert not history.certified
        own = [str(w.message) for w in caught if ", certified: " in str(w.message)]
        assert len(own) == 1
        step = int(own[0].split("At step ")[1].split(",")[0])
        assert max(abs(theta - m) for theta in thetas[:step]) < 2 * m
        assert (abs(thetas[-1] - m) > 2 * m) == (lr == 0.1)
        assert f"log(n_noise / gamma) = {math.log(500 / 0.1):.1f}" in own[0]

    @pytest.mark.parametrize("m", [8.0, 16.0])
    def test_strict_stops_there(self, m):
        model = Quadratic(1, learn_precision=False)
        with pytest.raises(Unhealthy, match=r", certified: .*(more noise draws|bridges)"):
            train(model, MECO(Gaussian(1)), rows(m), Training(steps=2000, lr=0.05), strict=True)
        assert abs(model.linear.item() - m) < 2 * m

    @pytest.mark.parametrize("lr", [0.01, 0.1])
    @pytest.mark.parametrize("m", [0.0, 1.0, 2.0])
    def test_a_near_noise_never_warns(self, m, lr):
        history = train(
            Quadratic(1, learn_precision=False), MECO(Gaussian(1)), rows(m), Training(steps=300, lr=lr), strict=True
        )
        assert history.warnings == ()
        assert history.certified

    def test_draws_and_gamma_move_the_limit(self):
        """A gap of 6 nats: log 400 = 5.99 is too little, log 410 = 6.02 enough, and 41 remembered for ten steps."""
        for draws, memory, warned in ((400, 1.0, True), (410, 1.0, False), (41, 10.0, False), (40, 10.0, True)):
            health = Health(1, draws, memory=memory)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                health.look(10, {"value": 1.0, "gap": 6.0})
            assert bool(health.told) == warned

    def test_a_telescopes_limit_is_for_each_bridge(self):
        """N(16, 1) is 128 nats away, log 5000 = 8.5; with twelve bridges the farthest neighbours are 2.2."""

        class Lines(nn.Module):
            """log p_k / p_{k+1} of N(c_k, 1) and N(c_{k+1}, 1), exactly."""

            def __init__(self, centres):
                super().__init__()
                self.slope = nn.Parameter(torch.tensor([a - b for a, b in pairwise(centres)]))
                self.register_buffer("rest", torch.tensor([(b**2 - a**2) / 2 for a, b in pairwise(centres)]))

            def forward(self, x):
                return x * self.slope + self.rest

        q, x, certified = Gaussian(1), rows(16.0), {}
        for bridges in (1, 12):
            estimator = Telescope(q, bridges)
            centres = [16 * math.sqrt(1 - min(float(a), 1.0) ** 2) for a in estimator.alphas]
            largest = max((a - b) ** 2 / 2 for a, b in pairwise(centres))
            found = estimator.gaps(Bridged(q, Lines(centres)), x, generator=seeded())
            if bridges == 12:
                assert float(found.max()) == pytest.approx(largest, rel=0.3)
                assert float(found.sum()) > math.log(5000)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HealthWarning)
                history = train(Bridged(q, Lines(centres)), estimator, x, Training(steps=100, lr=1e-4))
            certified[bridges] = history.certified
        assert certified == {1: False, 12: True}


@pytest.mark.parametrize(
    ("shift", "n", "certified"), [(1.0, 10_000, True), (6.0, 10_000, False), (100.0, 10_000, False)]
)
def test_a_model_too_far_for_its_own_weights(shift, n, certified):
    """The self-normalised KL is at most log n: that few draws carry it is what tells."""
    report = noise_report(
        Gaussian(1), lambda x: -(x[:, 0] - shift).square() / 2, n=10_000, generator=torch.Generator().manual_seed(0)
    )
    assert report.kl <= math.log(10_000) + 1e-9
    assert report.certified == certified
    assert certified != any("artefact" in line for line in report.lines())
