"""The health monitor: it speaks when a run diverges, early and once, and is silent on healthy ones."""

import math
import warnings

import pytest
import torch

from unnorm import MECO, MLP, Bridged, Gaussian, Quadratic, Telescope, Tilted, Training, data, train
from unnorm.errors import HealthWarning, Unhealthy
from unnorm.estimators import ContrastiveDivergence, MCMCLikelihood, PersistentCD
from unnorm.health import EVERY, RULES, Health
from unnorm.partition.grid import bounding_box, grid
from unnorm.settings import ESTIMATORS, Job

HEALTHY = {
    "value": -0.3, "distance": 1.1, "acceptance": 0.6, "step_size": 0.03, "score": 8.0, "ess": 0.4, "log_u": 1.0,
}  # fmt: skip
SICK = {
    "energy-gap": {"value": -475.0},
    "distance": {"distance": 9.0},
    "acceptance": {"acceptance": 0.01},
    "score": {"score": 2000.0},
    "weights": {"ess": 0.002},
    "log-z-jump": {"log_u": 516.0},
    "certified": {"gap": 7.0},  # log 500 is 6.2
    "lag": {"lag": math.log(5.5)},
}


def readings(health, numbers, n, start=0, every=EVERY):
    for k in range(1, n + 1):
        health.look(start + every * k, HEALTHY | numbers)


class TestRules:
    def test_every_rule_has_a_case(self):
        assert RULES.keys() == SICK.keys()

    @pytest.mark.parametrize("name", SICK)
    def test_speaks_once_within_a_hundred_steps(self, name):
        health = Health(event=2, draws=500)
        readings(health, {}, 10)
        assert health.told == []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            readings(health, SICK[name], 20, start=100)
        assert [w.category for w in caught] == [HealthWarning]
        step = int(health.told[0].split("At step ")[1].split(",")[0])
        assert step <= 200
        assert f", {name}: " in health.told[0]

    @pytest.mark.parametrize("name", SICK)
    def test_strict_raises(self, name):
        health = Health(event=2, draws=500, strict=True)
        readings(health, {}, 10)
        with pytest.raises(Unhealthy, match=name):
            readings(health, SICK[name], 10, start=100)

    @pytest.mark.parametrize("name", SICK)
    def test_says_number_and_cure(self, name):
        health = Health(event=2, draws=500)
        readings(health, {}, 10)
        with pytest.warns(HealthWarning) as caught:
            readings(health, SICK[name], 10, start=100)
        said = str(caught[0].message)
        number = 5.5 if name == "lag" else next(iter(SICK[name].values()))
        assert f"{number:.4g}" in said or f"{number:.2g}" in said
        assert any(word in said for word in ("Leave out", "Lower", "Use more"))

    @pytest.mark.parametrize("name", ["certified", "lag"])
    def test_the_first_steps_are_all_looked_at(self, name):
        health = Health(event=2, draws=500)
        assert all(health.due(t) for t in range(1, 11))
        assert not health.due(11)
        with pytest.warns(HealthWarning, match=name):
            readings(health, SICK[name] | {"ess": 0.9}, 2, every=1)

    def test_an_unlucky_first_batch_is_not_a_learning_rate(self):
        """u is one batch old: where single draws carry the weights, two batches may well be ahead of it."""
        health = Health(event=2, draws=500)
        readings(health, {"lag": 2.0, "ess": 0.05}, 9, every=1)
        assert health.told == []

    def test_one_batch_that_runs_ahead_is_chance(self):
        health = Health(event=2, draws=500)
        for t in range(1, 300):
            health.look(t, HEALTHY | {"lag": 2.0 if t % 20 == 0 else 0.1})
        assert health.told == []

    def test_what_was_told_is_not_repeated(self):
        health = Health(event=2, draws=500, told=["At step 90, energy-gap: ..."])
        readings(health, SICK["energy-gap"], 10, start=100)
        assert len(health.told) == 1

    def test_weights_are_counted_in_draws(self):
        """Half a percent of 50,000 draws is plenty, one percent of 100 is a single one."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            readings(Health(event=2, draws=50_000), {"ess": 0.005}, 10)
        with pytest.warns(HealthWarning, match=r"1\.0 of 100"):
            readings(Health(event=2, draws=100), {"ess": 0.01}, 10)

    def test_collapsed_samples_are_not_where_the_data_are(self):
        with pytest.raises(Unhealthy, match=r"distance: .* lie 0\.1 of the data's spreads"):
            readings(Health(event=2, draws=500, strict=True), {"distance": 0.1}, 1)

    def test_numbers_an_estimator_does_not_have_are_no_reason(self):
        health = Health(event=2, draws=500)
        for t in range(10, 300, 10):
            health.look(t, {"value": -1e6})  # a score matching loss: it may be anything
        assert health.told == []


def eight(n=20_000):
    return data.toy("8gaussians").sample(n, generator=torch.Generator().manual_seed(0))


class TestKnownCases:
    def test_contrastive_divergence_with_large_steps(self):
        """Ten Langevin steps of 0.1 on 8gaussians: peers report a falling loss while log Z runs away."""
        model = MLP(2, generator=torch.Generator().manual_seed(0))
        estimator = ContrastiveDivergence(n_steps=10, step_size=0.1)
        with pytest.raises(Unhealthy, match=r"At step [4-9]0, acceptance: .*Leave out the fixed step size"):
            train(model, estimator, eight(), Training(steps=100, lr=1e-3), strict=True)

    @pytest.mark.slow
    def test_there_the_loss_looks_fine_and_log_z_is_gone(self):
        model = MLP(2, generator=torch.Generator().manual_seed(0))
        estimator = ContrastiveDivergence(n_steps=10, step_size=0.1)
        with pytest.warns(HealthWarning):
            history = train(model, estimator, eight(), Training(steps=200, lr=1e-3))
        assert history["value"][-1] < -100
        assert len(history.warnings) >= 2
        steps = [int(line.split("At step ")[1].split(",")[0]) for line in history.warnings]
        assert min(steps) <= 100
        assert abs(grid(model, bounding_box(eight()), like=torch.zeros(())).value) > 100

    def test_the_same_without_a_fixed_step_is_healthy(self):
        model = MLP(2, hidden=(64, 64), generator=torch.Generator().manual_seed(0))
        history = train(model, ContrastiveDivergence(n_steps=5), eight(), Training(steps=150, lr=1e-3), strict=True)
        assert history.warnings == ()

    def test_a_noise_too_far_away(self):
        """The paper's landscape has the data 16 standard deviations from the noise: no draw carries a weight there."""
        x = 16 + torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
        model = Quadratic(1, learn_precision=False)
        with pytest.raises(Unhealthy, match=r"certified: .*noise closer to the data"):
            train(model, MECO(Gaussian(1)), x, Training(steps=2000, lr=0.05), strict=True)

    @pytest.mark.parametrize("distance", [2.0, 4.0, 8.0, 16.0])
    def test_steps_too_large_are_told_before_the_mean_runs_away(self, distance):
        """The paper's case study at a learning rate of 1: theta is lost within ten steps."""
        x = distance + torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
        training = Training(steps=100, batch=100, optimizer="sgd", lr=1.0)
        free, stopped = (Quadratic(1, learn_precision=False) for _ in range(2))
        with pytest.warns(HealthWarning):
            train(free, MECO(Gaussian(1)), x, training)
        with pytest.raises(Unhealthy, match="certified|lag"):
            train(stopped, MECO(Gaussian(1)), x, training, strict=True)
        assert (stopped.mean - distance).abs() < 2 * distance < (free.mean - distance).abs()

    def test_the_log_z_of_bridges_add_up(self):
        """Sixteen bridges across sixteen deviations: their log Z run to a hundred nats together, and all is well."""
        x = 16 + torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
        q = Gaussian(1)
        model = Bridged(q, MLP(1, hidden=(32, 32), outputs=16, generator=torch.Generator().manual_seed(1)))
        history = train(model, Telescope(q, 16), x, Training(steps=150, lr=1e-2, schedule="cosine"), strict=True)
        assert max(history["log_u"]) - min(history["log_u"]) > 30
        assert history.warnings == ()

    def test_nce_is_told_of_its_own_draws(self):
        health = Health(event=2, draws=500)
        reading = {name: value for name, value in HEALTHY.items() if name != "log_u"} | {"gap": 7.0, "log_z": 1.0}
        with pytest.warns(
            HealthWarning, match=r"500 draws of a step can certify, log\(n_noise\) = 6.2.*log Z is not to"
        ):
            health.look(10, reading)

    def test_warnings_survive_a_resume(self, tmp_path):
        x = 16 + torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
        model = Quadratic(1, learn_precision=False)
        with pytest.warns(HealthWarning):
            first = train(model, MECO(Gaussian(1)), x, Training(steps=400, lr=0.05), folder=tmp_path)
        again = train(model, MECO(Gaussian(1)), x, Training(steps=410, lr=0.05), folder=tmp_path, resume=True)
        assert again.warnings[: len(first.warnings)] == first.warnings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2spirals", "8gaussians", "checkerboard", "circles", "moons", "swissroll"])
@pytest.mark.parametrize("make", [ContrastiveDivergence, PersistentCD, MCMCLikelihood])
def test_silent_and_learning_on_langevin_runs(name, make):
    """Eighteen healthy runs: no tuning, no warning, and a better likelihood than the noise's."""
    _healthy(name, make)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_silent_on_every_method(estimator):
    """And every method with the defaults of the command line."""
    _healthy("moons", lambda q: Job("moons", estimator=estimator).build_estimator(q))


def _healthy(name, make):
    toy, generator = data.toy(name), torch.Generator().manual_seed(0)
    x = toy.sample(20_000, generator=generator)
    x = (x - x.mean(0)) / x.std(0)
    q = Gaussian.fit(x)
    model = Tilted(q, MLP(2, hidden=(128, 128), generator=generator))
    history = train(model, make(q), x, Training(steps=500, schedule="cosine"), strict=True)
    assert history.warnings == ()
    log_z = grid(model, bounding_box(x), like=torch.zeros(())).value
    assert log_z - model(x[:5000]).mean() < -q.log_prob(x[:5000]).mean() - 0.05
