"""The paper's case study: its landscapes, its methods, its warnings."""

import json
import math

import matplotlib.image
import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from unnorm import ENCE, MECO, NCE, Bridged, Gaussian, MCMCLikelihood, Telescope, optim, step
from unnorm.cli import main
from unnorm.errors import InvalidValue
from unnorm.paper import gaussian_report, gaussian_study
from unnorm.paper.gaussian_mean import COUPLINGS, MCMC, Bridges, Contrast, Plain, Problem, floor, linear_optimum, train
from unnorm.paper.gaussian_report import FILES, landscape
from unnorm.paper.gaussian_study import METHODS, Study, tuned, warnings_of
from unnorm.randomness import stream

TINY = Study((1.0, 16.0), rows=200, batch=40, small=20, steps=6, seeds=2, bridge_rates=(0.1, 0.3), repeats=1)


def plain(seeds, n_noise):
    return Plain(torch.zeros(seeds), torch.ones(seeds), n_noise)


def rmse(theta, truth):
    return float((theta.double() - truth).square().mean().sqrt())


class TestLandscapes:
    @pytest.mark.parametrize("distance", [4.0, 16.0])
    @pytest.mark.parametrize("share", [0.1, 0.5, 1.0, 1.5])
    def test_equals_scipy_quadrature(self, distance, share):
        theta = share * distance

        def expected(mean, function):
            def integrand(x):
                return stats.norm.pdf(x, mean) * function(theta * x - theta**2 / 2)

            return integrate.quad(
                integrand, -12, 2 * distance + 12, points=[0, distance / 2, theta / 2, theta, distance],
                limit=400, epsabs=0, epsrel=1e-11,
            )[0]  # fmt: skip

        nce = expected(distance, lambda g: np.logaddexp(0, -g)) + expected(0, lambda g: np.logaddexp(0, g))
        ence = (expected(distance, lambda g: np.exp(-g / 2)) + expected(0, lambda g: np.exp(g / 2))) / 2
        found = landscape(np.array([theta]), distance)
        assert found.nce[0] == pytest.approx(nce, rel=1e-8)
        assert found.ence[0] == pytest.approx(ence, rel=1e-8)

    def test_ence_has_its_closed_form(self):
        theta = np.linspace(0, 32, 33)
        exact = (np.exp(-(theta**2) / 8) + np.exp(3 * theta**2 / 8 - 8 * theta)) / 2
        np.testing.assert_allclose(landscape(theta, 16.0).ence, exact, rtol=1e-10)

    def test_proposition_two(self):
        theta = np.linspace(0, 32, 65)
        loss = landscape(theta, 16.0).mle
        np.testing.assert_allclose(loss - loss[32], (theta - 16) ** 2 / 2, atol=1e-9)

    @pytest.mark.parametrize("distance", [2.0, 4.0, 8.0, 16.0])
    def test_proposition_one_holds_near_the_optimum_and_not_far_from_it(self, distance):
        """J(tau) - J(tau*) <= R exp(-R^2/8) |tau - tau*|^2: the paper states no neighbourhood; it needs one."""
        best, bound = landscape(np.array([distance]), distance).nce[0], distance * math.exp(-(distance**2) / 8)

        def excess(theta, error):
            gap = theta - distance, theta**2 / 2 + error - distance**2 / 2
            return landscape(np.array([theta]), distance, error).nce[0] - best, bound * (gap[0] ** 2 + gap[1] ** 2)

        for angle in np.linspace(0, 2 * np.pi, 12, endpoint=False):  # on a small circle around tau*
            theta = distance + 0.5 / distance * math.cos(angle)
            error = distance**2 / 2 + 0.5 / distance * math.sin(angle) - theta**2 / 2
            found, allowed = excess(theta, error)
            assert 0 < found <= allowed
        found, allowed = excess(0.0, 0.0)  # at the noise itself, where every run begins
        assert (found > 1e6 * allowed) == (distance == 16.0)

    def test_refuses_what_its_grid_does_not_cover(self):
        with pytest.raises(InvalidValue, match="theta of a landscape must be within 0 and 2 R = 8.0"):
            landscape(np.array([9.0]), 4.0)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (self.theta * x - x.square() / 2).squeeze(-1)


class TestReplicas:
    """The batched methods are the library's own, step by step."""

    def against_the_library(self, method, model, estimator, make, lr, read):
        problem, steps, batch = Problem(2.0, seeds=1, n=500), 15, 100
        run = train(method, problem, (lr / 3, lr), steps=steps, batch=batch, seed=5)
        generator, decay = stream(5, "training"), optim.Cosine(lr, steps)  # the numbers that `train` draws
        optimizer = make([*model.parameters(), *estimator.parameters()], lr)
        seen = [read(model)]
        for t in range(1, steps + 1):
            x = problem.rows.gather(1, torch.randint(500, (1, batch), generator=generator))
            optim.set_rates(optimizer, decay(t), None)
            info = step(model, estimator, optimizer, x.view(-1, 1), generator=generator)
            seen.append(read(model))
            if "gap" in info and not isinstance(estimator, NCE | ENCE):
                torch.testing.assert_close(run.gap[t - 1, 1, 0], info["gap"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(run.theta[:, 1, 0], torch.tensor(seen), rtol=1e-4, atol=1e-5)
        assert max(seen) > 0.5  # it went somewhere

    def test_plain_meco(self):
        estimator = MECO(Gaussian(1), gamma=0.1)
        self.against_the_library(plain(1, 100), Mean(), estimator, optim.sgd, 0.3, lambda model: model.theta.item())

    @pytest.mark.parametrize("exponential", [False, True])
    @pytest.mark.parametrize("normalised", [False, True])
    def test_nce_and_ence(self, exponential, normalised):
        estimator = (ENCE if exponential else NCE)(Gaussian(1))
        make = optim.NGD if normalised else lambda parameters, lr: optim.sgd(parameters, lr, beta=1.0)
        method = Contrast(exponential, normalised)
        self.against_the_library(method, Mean(), estimator, make, 0.5, lambda model: model.theta.item())

    def test_mcmc(self):
        estimator = MCMCLikelihood(Gaussian(1), step_size=0.1)
        self.against_the_library(
            MCMC(), Mean(), estimator, lambda p, lr: optim.sgd(p, lr, beta=1.0), 0.3, lambda model: model.theta.item()
        )

    @pytest.mark.parametrize("coupling", COUPLINGS)
    def test_bridges_are_a_telescope(self, coupling):
        net = nn.Linear(1, 6, bias=False)
        nn.init.zeros_(net.weight)
        model = Bridged(Gaussian(1), net)
        estimator = Telescope(model.noise, 6, gamma=0.1, coupling=coupling)
        self.against_the_library(
            Bridges(6, "linear", coupling), model, estimator, optim.sgd, 0.3, lambda model: net.weight.sum().item()
        )


class TestBridges:
    def test_the_floor_of_linear_heads_is_the_formulas(self):
        """Exact optimum on each of 200 data sets: its error is (m - R) + (R/3)(1 - s^2), its size sqrt(1 + 2R^2/9)."""
        distance, n, seeds = 16.0, 1000, 200
        problem = Problem(distance, seeds, n)
        rows = problem.rows.double()
        theta = linear_optimum(rows, 64)
        predicted = rows.mean(-1) + distance / 3 * (1 - rows.var(-1))
        assert rmse(theta, predicted) < 0.25 * rmse(theta, distance)
        error = 1 / math.sqrt(2 * seeds)  # relative, of a root mean square of normals
        assert rmse(theta, distance) * math.sqrt(n) == pytest.approx(floor(distance), rel=4 * error)

    def test_training_arrives_at_the_exact_optimum_and_not_at_the_mle(self):
        problem = Problem(16.0, seeds=8, n=100)  # few rows: the floor is far above the error of the draws
        run = train(Bridges(32, "linear"), problem, (0.5,), steps=100, batch=800)
        optimum = linear_optimum(problem.rows, 32)
        away = rmse(optimum, problem.mle)
        assert away > 0.4
        assert rmse(run.theta[-1, 0], optimum) < 0.2 * away

    def test_the_coefficients_of_one_gaussian_are_its_waymarks_ratios(self):
        method = Bridges(5, "gaussian")
        parameters = torch.tensor([1.5, 0.1], dtype=torch.float64)[:, None, None]
        theta, variance = (float(number) for number in method._gaussian(parameters))
        assert theta != 1.5
        assert abs(variance - 1) > 0.1
        assert float(method.estimate(parameters)) == theta
        w, s = method.coefficients(parameters)
        x = np.array([-1.0, 0.3, 2.0])
        c = method.c[:, 0, 0].numpy()
        log_p = np.stack([stats.norm.logpdf(x, share * theta, math.sqrt(1 + share**2 * (variance - 1))) for share in c])
        found = w[:, 0].numpy() * x + s[:, 0].numpy() * x**2
        expected = log_p[:-1] - log_p[1:]
        np.testing.assert_allclose(found - found[:, :1], expected - expected[:, :1], atol=1e-6)

    def test_free_quadratic_heads_report_the_mean_of_their_density(self):
        method = Bridges(2, "quadratic")
        x = torch.full((1, 4), 3.0)
        parameters = method.begin(x, (1, 1))
        parameters[:, 0, 0] = torch.tensor([0.5, 1.0, 0.2, -0.4])
        mu, grid = method.mu[:, 0].double(), torch.linspace(-20, 20, 40_001, dtype=torch.float64)
        y = grid - mu[:, None]
        heads = torch.tensor([[0.5], [1.0]]) * y + torch.tensor([[0.2], [-0.4]]) / 2**0.5 * y**2
        p = torch.softmax(heads.sum(0) - grid**2 / 2, 0)
        assert method.estimate(parameters).item() == pytest.approx(float((p * grid).sum()), abs=1e-4)
        parameters[2:] = 1.0  # e^(s x^2) beats the noise: no density
        assert math.isnan(method.estimate(parameters).item())

    @pytest.mark.parametrize("heads", ["linear", "gaussian"])
    def test_converges_at_sixteen_from_a_fixed_noise(self, heads):
        problem = Problem(16.0, seeds=6, n=2000)
        run = train(Bridges(32, heads), problem, (0.3,), steps=100, batch=500)
        assert rmse(run.theta[-1, 0], 16.0) < 10 * rmse(problem.mle, 16.0)

    def test_refuses_unknown_names(self):
        with pytest.raises(
            InvalidValue, match="'heads' of Bridges must be one of linear, quadratic, gaussian. Got 'c'"
        ):
            Bridges(4, "c")
        with pytest.raises(InvalidValue, match="'coupling' of Bridges must be one of own, .*. Got 'none'"):
            Bridges(4, coupling="none")


class TestWarnings:
    @pytest.mark.parametrize("distance", [8.0, 16.0])
    @pytest.mark.parametrize("batch", [100, 1000])
    def test_come_before_theta_runs_away(self, distance, batch):
        method = plain(8, batch)
        run = train(method, Problem(distance, seeds=8), (1.0,), steps=100, batch=batch)
        found = warnings_of(run.theta[:, 0], run.gap[:, 0], run.lag[:, 0], distance=distance, limit=method.limit)
        assert (found.ran, found.over_first) == (8, 8)

    def test_stay_silent_where_it_converges(self):
        method = plain(8, 1000)
        run = train(method, Problem(1.0, seeds=8), (0.3,), steps=100, batch=1000)
        found = warnings_of(run.theta[:, 0], run.gap[:, 0], run.lag[:, 0], distance=1.0, limit=method.limit)
        assert (found.over, found.behind, found.ran) == (0, 0, 0)
        assert rmse(run.theta[-1, 0], 1.0) < 0.05

    def test_the_lag_tells_of_a_tracker_too_slow_where_the_gap_is_silent(self):
        """R = 2, lr = 1.2: log Z moves by 2.9 nats in the first step, u follows by a tenth of the new weights.

        Every one of 100 seeds runs away. At lr = 1 the first step ends at R, and a seed in forty comes back.
        """
        method = plain(100, 1000)
        run = train(method, Problem(2.0, seeds=100), (1.2,), steps=40, batch=1000)
        found = warnings_of(run.theta[:, 0], run.gap[:, 0], run.lag[:, 0], distance=2.0, limit=method.limit)
        assert (found.ran, found.over, found.behind_first) == (100, 0, 100)

    def test_a_gap_above_the_limit_means_that_no_draw_was_where_the_data_are(self):
        """gap <= log(n / gamma) + theta (mean of the data - largest draw), for theta > 0."""
        method, generator = plain(3, 50), torch.Generator().manual_seed(0)
        theta = torch.tensor([[[0.5, 2.0, 7.0]]])
        x = 4 + torch.randn(3, 50, generator=generator)
        for t in range(5):
            state = generator.get_state()
            gap = method.loss(theta, x, t / 5, generator).gap
            generator.set_state(state)
            z = torch.randn(3, 50, generator=generator)
            assert (gap <= method.limit + theta[0] * (x.mean(-1) - z.amax(-1)) + 1e-4).all()

    def test_medians_and_order(self):
        theta = torch.tensor([[0.0, 0.0, 0.0], [1.0, 9.0, 0.0], [9.0, 9.0, 0.0], [9.0, 9.0, 0.0]])
        gap = torch.tensor([[0.0, 0.0, 0.0], [7.0, 0.0, 7.0], [7.0, 7.0, 7.0]])
        lag = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        found = warnings_of(theta, gap, lag, distance=2.0, limit=5.0)  # the second runs away first; the third stays
        assert (found.over, found.over_at, found.over_theta) == (3, 2.0, 1.0)
        assert (found.ran, found.ran_at, found.over_first) == (2, 2.5, 1)
        assert (found.behind, found.behind_at, found.behind_first) == (1, 1.0, 1)
        assert found.unwarned == 0
        assert warnings_of(theta, gap, 0 * lag, distance=2.0, limit=5.0).unwarned == 1


def test_tuning_takes_the_least_error_and_never_a_nan():
    problem = Problem(1.0, seeds=2, n=10)
    run = train(plain(2, 10), problem, (0.1, 0.2, 0.3), steps=1, batch=10)
    theta = run.theta.clone()
    theta[-1] = torch.tensor([[math.nan, 1.0], [1.5, 1.0], [1.2, 1.1]])
    assert tuned(run._replace(theta=theta), 1.0) == 2


class TestUnit:
    """Errors are multiples of 1 / sqrt(rows), the MLE's standard error, whatever its error on the study's rows is."""

    def test_the_exact_mle_has_the_chi_squares_scatter_and_not_always_one(self):
        """n (MLE - R)^2 is chi-square with one degree of freedom for each seed: their mean is the squared ratio."""
        seeds = 5
        studies = [Study((1.0,), rows=50, seeds=seeds, seed=seed) for seed in range(300)]
        ratios = np.array([study._errors("mle", study.problem(1.0))["ratio"] for study in studies])
        assert stats.kstest(seeds * ratios**2, stats.chi2(seeds).cdf).pvalue > 0.01

    def test_every_record_of_a_study_has_this_unit(self):
        """By hand, from the estimates themselves; the MLE's own error on these rows is half of its standard error."""
        problem, root = TINY.problem(16.0), math.sqrt(TINY.rows)
        assert not 0.8 < rmse(problem.mle, 16.0) * root < 1.25  # so that the two units can be told apart
        records = list(TINY.records())
        for one in (record for record in records if record["kind"] == "error"):
            assert one["ratio"] == pytest.approx(one["rmse"] * root, rel=1e-12)
            assert one["rmse"] == pytest.approx(math.sqrt(one["mse"][-1]), rel=1e-4)
            if "lr" in one and one["lr"] == one.get("paper_lr"):
                assert one["paper_ratio"] == one["ratio"]
            if "warnings" in one:  # the first is that of the tuned rate
                assert one["warnings"][0]["ratio"] == one["ratio"]
        for one in (record for record in records if record["kind"] == "coupling"):
            method, rates = Bridges(one["bridges"], one["heads"], one["coupling"]), TINY.bridge_rates
            run = train(method, problem, rates, steps=TINY.steps, batch=TINY.batch, seed=TINY.seed)
            assert one["ratio"] == pytest.approx(rmse(run.theta[-1, rates.index(one["lr"])], 16.0) * root, rel=1e-6)
        (bound,) = (record for record in records if record["kind"] == "floor")
        for k, ratio in bound["exact"].items():
            assert ratio == pytest.approx(rmse(linear_optimum(problem.rows, k), 16.0) * root, rel=1e-6)
        found = f"{rmse(problem.mle, 16.0) * root:.3g}"
        assert gaussian_report.table(TINY, records).count(f"| exact MLE | {found} | {found} |") == 2


class TestCommand:
    @pytest.fixture(autouse=True)
    def tiny(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(gaussian_study, "quick", lambda seed=0: TINY)

    def unnorm(self, *arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        return stopped.value.code

    def test_writes_numbers_tables_and_figures(self, tmp_path, capsys):
        assert self.unnorm("reproduce", "gaussian-mean", "--quick") == 0
        out = tmp_path / "runs" / "gaussian-mean"
        assert {path.name for path in out.iterdir()} == set(FILES)
        said = capsys.readouterr().out
        assert (out / "table.md").read_text() in said
        assert said.rstrip().endswith("results.jsonl, table.md, landscapes.png, errors.png")
        records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        assert len(records) == TINY.size
        errors = [record for record in records if record["kind"] == "error"]
        assert [(one["method"], one["R"]) for one in errors] == [(name, r) for r in (1.0, 16.0) for name in METHODS]
        assert all(len(one["mse"]) == TINY.steps + 1 for one in errors)
        for name in ("landscapes.png", "errors.png"):
            assert matplotlib.image.imread(out / name).std() > 0.05

    def test_replaces_only_when_told(self, tmp_path, capsys, monkeypatch):
        (tmp_path / "table.md").write_text("mine")
        arguments = "reproduce", "gaussian-mean", "--quick", "--json", "--out", tmp_path
        assert self.unnorm(*arguments) == 2
        assert "exists. Use --force to replace it" in capsys.readouterr().err
        monkeypatch.setattr(Study, "records", lambda self: iter(()))
        monkeypatch.setattr(gaussian_report, "table", lambda study, records: "ours")
        monkeypatch.setattr(gaussian_report, "_landscapes", lambda *_: None)
        monkeypatch.setattr(gaussian_report, "_errors", lambda *_: None)
        assert self.unnorm(*arguments, "--force") == 0
        assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path), "records": []}
        assert (tmp_path / "table.md").read_text() == "ours"

    def test_mistakes(self, tmp_path, capsys):
        assert self.unnorm("reproduce", "gausian-mean") == 2
        assert "Unknown study 'gausian-mean'. Did you mean 'gaussian-mean'?" in capsys.readouterr().err
        (tmp_path / "file").write_text("")
        assert self.unnorm("reproduce", "gaussian-mean", "--out", tmp_path / "file") == 2
        assert "is a file, not a folder" in capsys.readouterr().err
        assert self.unnorm("reproduce", "gaussian-mean", "--seed", "-1") == 2
        assert "The seed must be an integer from 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rows", "batch", "small", "steps", "seeds", "repeats"])
def test_a_study_refuses_too_little(name):
    with pytest.raises(InvalidValue, match=rf"The '{name}' of a Study must be at least \d\. Got 0."):
        Study(**{name: 0})


@pytest.mark.slow
def test_the_quick_study_shows_what_the_full_one_does():
    records = list(gaussian_study.quick().records())
    ratio = {(one["method"], one["R"]): one["ratio"] for one in records if one["kind"] == "error"}
    assert ratio["bridges-gaussian", 16.0] < 10
    assert ratio["meco", 16.0] > 50
