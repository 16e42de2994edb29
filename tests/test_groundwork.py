"""The noise, its coordinates and the bridges of a run: settled once, saved exactly, and said."""

import copy
import functools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tests.test_cli import SMALL, points, table, unnorm
from unnorm import Density, Gaussian, TableDensity, Training, groundwork
from unnorm.bridges import Spacing
from unnorm.checkpoint import read_tensors, write_tensors
from unnorm.data import Compose, Standardize
from unnorm.data.transforms import Transformed
from unnorm.device import fabric_for
from unnorm.errors import BrokenFile, DataError, InvalidValue
from unnorm.estimators import MECO, NCE, Telescope, even_alphas
from unnorm.folders import GROUNDWORK
from unnorm.groundwork import Groundwork, laid, load, save
from unnorm.models import MLP, Bridged, Quadratic, Tilted
from unnorm.noise import SplineFlow
from unnorm.noise import fit as fit_noise
from unnorm.settings import ESTIMATORS, Job
from unnorm.tables.fit import divide
from unnorm.tables.frames import source_of, table_of

KINDS = ["gaussian", "gaussian-diagonal", "gaussian-low-rank", "copula", "mixture", "smoothed", "uniform"]
FAST = ["--hidden", "16,16", "--steps", "40", "--n-importance", "2000"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unnorm.report.picture", lambda *_: None)  # it takes longer than such a fit


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def crooked(n=300, d=2, seed=0):
    """Two skewed groups, far from any one Gaussian."""
    rng = np.random.default_rng(seed)
    return np.exp(0.4 * rng.normal(size=(n, d))) + 6.0 * rng.integers(0, 2, (n, 1))


@functools.cache
def noise_of(kind):
    x = torch.from_numpy(crooked())
    if kind == "flow":
        return SplineFlow.fit(x, steps=20, transforms=1, hidden=(8,), bins=4)
    return fit_noise(x, kind)


def same(first, second):
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(
        torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype for name in one
    )


def numbers(out):
    return json.loads(out)


class TestFile:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("own", [False, True], ids=["as it is", "its coordinates"])
    @pytest.mark.parametrize("kind", [*KINDS, "flow"])
    def test_round_trip(self, kind, own, dtype):
        """To the last bit: tensors, densities, draws and maps; alphas that are no short decimals; what was said."""
        noise, transform = copy.deepcopy(noise_of(kind)).to(dtype), Standardize.fit(torch.from_numpy(crooked(seed=3)))
        if own:
            way, noise = noise.coordinates()
            transform = Compose([transform, way])
        before = Groundwork(
            noise, transform, (0.0, 1 / 3, math.sqrt(0.5), 1.0), {"noise": "Picked ± …", "bridges": "2"}
        )
        save(Path(), before)
        after = load(Path())
        assert type(after.noise) is type(noise)
        assert same(after.noise, noise)
        assert same(after.transform, transform)
        assert (after.alphas, after.said) == (before.alphas, before.said)
        x = torch.from_numpy(crooked(50, seed=7))
        with torch.no_grad():
            for found, expected in zip(after.transform(x), transform(x), strict=True):
                assert torch.equal(found, expected)
            z = noise.sample(40, generator=seeded())
            assert torch.equal(after.noise.sample(40, generator=seeded()), z)
            assert torch.equal(after.noise.log_prob(z), noise.log_prob(z))
            assert torch.equal(after.transform.inverse(z), transform.inverse(z))

    def test_none_yet(self):
        assert load(Path()) is None

    def test_no_bridges(self):
        save(Path(), Groundwork(Gaussian(1), Standardize(1), (), {}))
        assert (load(Path()).alphas, load(Path()).said) == ((), {})

    @pytest.mark.parametrize("content", [b"", b"not safetensors", "half", "a bit"])
    def test_damaged(self, content):
        save(Path(), Groundwork(Gaussian(2), Standardize(2), (), {}))
        whole = Path(GROUNDWORK).read_bytes()
        changed = {"half": whole[: len(whole) // 2], "a bit": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]}
        Path(GROUNDWORK).write_bytes(changed.get(content, content))
        with pytest.raises(BrokenFile, match=GROUNDWORK):
            load(Path())

    @pytest.mark.parametrize(
        "change",
        [
            {"noise": None},
            {"noise": {"kind": "custom", "class": "evil.Noise"}},
            {"noise": {"kind": "gaussian", "event": [3], "covariance": "full"}},
            {"noise": {"kind": "gaussian", "event": -1}},
            {"noise": {"kind": "standardize", "event": [2]}},
            {"transform": {"kind": "gaussian", "event": [2], "covariance": "full", "rank": None}},
            {"alphas": 3},
            {"alphas": None},
            {"said": "nothing"},
            {"said": None},
            "without noise",
            "without tensors",
        ],
        ids=str,
    )
    def test_foreign(self, change):
        """A file of ours in all but its content."""
        save(Path(), Groundwork(Gaussian(2), Standardize(2), (), {}))
        tensors, note = read_tensors(Path(GROUNDWORK))
        if change == "without noise":
            note.pop("noise")
        elif change == "without tensors":
            tensors = {"a": torch.zeros(1)}
        else:
            note |= change
        write_tensors(Path(GROUNDWORK), tensors, note)
        with pytest.raises(BrokenFile):
            load(Path())


class TestSettings:
    @pytest.mark.parametrize("bridges", ["0", "-1", "2.5", "many", "", "²"])
    def test_bad_numbers(self, bridges):
        with pytest.raises(InvalidValue, match=f"--bridges are auto, none, or how many. Got {bridges}"):
            Job("t.csv", bridges=bridges)

    @pytest.mark.parametrize(("bridges", "count"), [("auto", None), ("none", 1), ("1", 1), ("3", 3)])
    def test_counts(self, bridges, count):
        assert Job("t.csv", bridges=bridges).count_of_bridges == count

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_who_may_have_them(self, estimator):
        """Those that learn a ratio of data to noise; for others `auto` means none."""
        able = estimator in ("meco", "nce", "ence", "snl")
        assert Job("t.csv", estimator=estimator).count_of_bridges == (None if able else 1)
        assert Job("t.csv", estimator=estimator, bridges="none").count_of_bridges == 1
        if able:
            assert isinstance(
                Job("t.csv", estimator=estimator, bridges="2").build_estimator(Gaussian(2), even_alphas(2)), Telescope
            )
        else:
            with pytest.raises(InvalidValue, match="Bridges belong to --model tilted and the estimators meco, nce"):
                Job("t.csv", estimator=estimator, bridges="2")

    @pytest.mark.parametrize("model", ["mlp", "quadratic"])
    def test_only_a_tilted_noise(self, model):
        assert Job("t.csv", model=model).count_of_bridges == 1
        with pytest.raises(InvalidValue, match=f"Bridges belong to --model tilted .* Got '{model}' and 'meco'"):
            Job("t.csv", model=model, bridges="2")

    def test_the_papers_schedule_has_none_unless_asked(self):
        assert Job("t.csv", training=Training(schedule="pl")).count_of_bridges == 1
        assert Job("t.csv", training=Training(schedule="pl"), bridges="4").count_of_bridges == 4

    def test_parts(self):
        job, q = Job("t.csv", hidden=(8,), gamma=0.3), Gaussian(2)
        plain, bridged = job.build_model(2, q), job.build_model(2, q, even_alphas(3))
        assert type(plain) is Tilted
        assert type(bridged) is Bridged
        assert bridged(torch.zeros(4, 2), heads=True).shape == (4, 3)
        estimator = job.build_estimator(q, even_alphas(3))
        assert (type(estimator.base), estimator.effective_draws) == (MECO, 1 / 0.3)
        assert type(Job("t.csv", estimator="nce").build_estimator(q, even_alphas(3)).base) is NCE
        assert isinstance(job.build_estimator(q), MECO)
        assert isinstance(Job("t.csv", model="quadratic").build_model(2, q), Quadratic)
        assert isinstance(Job("t.csv", model="mlp").build_model(2, q), MLP)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--bridges", "2", "--estimator", "cd"], "Bridges belong to --model tilted and the estimators meco, nce"),
            (["--bridges", "2", "--model", "mlp"], "Bridges belong to --model tilted"),
            (["--bridges", "two"], "--bridges are auto, none, or how many. Got two."),
            (["--noise", "kopula"], "Did you mean 'copula'?"),
        ],
    )
    def test_refused_before_any_data_are_read(self, options, message, monkeypatch, capsys):
        def read(*_):
            raise AssertionError("the data were read")

        Path("t.csv").write_text("not a table")
        monkeypatch.setattr("unnorm.jobs.read_source", read)
        assert unnorm("fit", "t.csv", *options) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1
        assert not Path("runs").exists()


class TestLaid:
    def lay(self, dtype=torch.float32, validation=True, n=600, **options):
        x = torch.from_numpy(crooked(n))
        job = Job("t.csv", hidden=(16,), **options)
        held_out = torch.from_numpy(crooked(200, seed=1)) if validation else None
        return laid(job, x, held_out, Standardize.fit(x), dtype, fabric_for("cpu", "32"))

    def test_the_noise_is_the_same_in_its_coordinates(self):
        """log q in the user's units, whether the model is tilted (own coordinates) or not (the noise's)."""
        x = torch.from_numpy(crooked(50, seed=5))
        values = []
        for model in ("tilted", "mlp"):
            ground = self.lay(torch.float64, noise="copula", bridges="none", model=model)
            z, log_det = ground.transform(x)
            values.append(ground.noise.log_prob(z) + log_det)
        torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=1e-9)
        assert isinstance(self.lay(noise="copula", bridges="none").noise, Gaussian)

    def test_what_is_said(self, monkeypatch):
        """Of what was chosen only: nothing of what the user asked for."""
        chosen = Spacing((0.0, 0.3, 1.0), (0.4, 0.7), even_alphas(2))
        monkeypatch.setattr(groundwork, "pilot", lambda *_, **__: chosen)
        said = self.lay().said
        assert said["noise"].startswith("Picked mixture: by the log density ")
        assert said["bridges"] == "2 bridges: a pilot saw 0.4 to 0.7 nats between neighbours of its 2."
        assert self.lay().alphas == (0.0, 0.3, 1.0)
        assert self.lay(noise="gaussian", bridges="3").said == {}

    def test_one_bridge_is_none(self, monkeypatch):
        monkeypatch.setattr(groundwork, "pilot", lambda *_, **__: Spacing((0.0, 1.0), (0.1,), (0.0, 1.0)))
        ground = self.lay(noise="gaussian")
        assert ground.alphas == ()
        assert ground.said == {"bridges": "No bridges: a pilot saw 0.1 nats between data and noise."}
        for bridges in ("none", "1"):
            assert self.lay(noise="gaussian", bridges=bridges).alphas == ()
        assert self.lay(noise="gaussian", bridges="3").alphas == even_alphas(3)

    def test_the_pilot_is_asked_as_the_run_will_train(self, monkeypatch):
        asked = {}

        def pilot(make_net, noise, data, **options):
            asked.update(options, net=make_net(3), noise=noise, rows=len(data))
            return Spacing((0.0, 1.0), (0.1,), (0.0, 1.0))

        monkeypatch.setattr(groundwork, "pilot", pilot)
        self.lay(noise="gaussian", estimator="nce", nu=2, training=Training(steps=400, batch=100, seed=5))
        assert (asked["base"], asked["nu"], asked["seed"], asked["steps"], asked["batch"]) == (NCE, 2, 5, 80, 100)
        assert (len(asked["held_out"]), asked["rows"]) == (200, 600)
        assert asked["net"](torch.zeros(4, 2)).shape == (4, 3)
        z = asked["held_out"]
        assert float(z.mean().abs()) < 0.3  # in the noise's units
        assert float((z.std() - 1).abs()) < 0.3

    def test_a_real_pilot_sees_groups_a_gaussian_misses(self):
        """Width 0.05 at the corners of a square: 2 (log(1 / 0.05) - log 2) = 4.6 nats from a Gaussian, 0 from four."""
        x = torch.randint(2, (3000, 2), generator=seeded()) * 2.0 - 1
        x += 0.05 * torch.randn(3000, 2, generator=seeded(1))
        counts = []
        for noise in ("gaussian", "mixture"):
            job = Job("t.csv", hidden=(128, 128), noise=noise, training=Training(steps=1000))
            ground = laid(job, x, None, Standardize.fit(x), torch.float32, fabric_for("cpu", "32"))
            counts.append(max(1, len(ground.alphas) - 1))
        assert counts[0] > counts[1] == 1

    def test_rows_outside_the_noise_have_no_say(self):
        """A box ends; rows beyond it are -inf to every model, and they say so instead of spoiling the pilot."""
        x = torch.from_numpy(crooked(600))
        held_out = torch.from_numpy(crooked(50, seed=1)).clamp(x.amin(0), x.amax(0))
        held_out[:7] += 1000
        job = Job("t.csv", hidden=(16,), noise="uniform", training=Training(steps=100))
        ground = laid(job, x, held_out, Standardize.fit(x), torch.float32, fabric_for("cpu", "32"))
        assert ground.said["validation"] == "7 of 50 validation rows lie outside the noise and have no say."
        rows = Transformed(held_out, ground.transform)
        assert torch.equal(groundwork.reached(rows), rows[torch.arange(7, 50)])
        with pytest.raises(DataError, match="No validation row lies where the noise does"):
            groundwork.reached(Transformed(held_out[:7], ground.transform))


@pytest.fixture(scope="module")
def bridged(tmp_path_factory):
    """The folder of a run with three bridges, which no test changes."""
    home = tmp_path_factory.mktemp("bridged")
    path = table(home / "t.csv", points())
    assert unnorm("fit", path, *SMALL, "--noise", "copula", "--bridges", "3", "--out", home / "run") == 0
    return home / "run"


class TestRun:
    def test_a_bridged_model_is_saved_and_loaded(self, bridged):
        density, ground = Density.load(bridged), load(bridged)
        assert type(density.model) is Bridged
        assert density.model(torch.zeros(5, 3), heads=True).shape == (5, 3)
        assert ground.alphas == even_alphas(3)
        x = torch.from_numpy(points(20, seed=0))
        torch.testing.assert_close(density.transform(x), ground.transform(x), rtol=0, atol=0)
        result = numbers((bridged / "result.json").read_text())
        assert (result["bridges"], result["certified"], result["chosen"]) == (3, True, {})

    def test_score_sample_diagnose_info(self, bridged, capsys):
        path = bridged.parent / "t.csv"
        assert unnorm("score", bridged, path, "--json") == 0
        values = numbers(capsys.readouterr().out)["log_prob"]
        table = TableDensity.load(bridged)
        density = table.density
        with torch.no_grad():  # by hand: noise and heads in the model's units, the volume change, log Z
            z, log_det = density.transform(torch.from_numpy(points()))
            heads = density.model.net(z.float()).sum(-1)
            by_hand = density.noise.log_prob(z.float()) + heads + log_det - table.log_z.value
            by_hand += torch.from_numpy(table.bounds.log_weight(points()))
        assert values == pytest.approx(by_hand.tolist(), abs=1e-4)
        assert unnorm("sample", bridged, "-n", "500", "--json") == 0
        samples = np.array(numbers(capsys.readouterr().out)["samples"])
        spread = points().std(0)
        assert (np.abs(samples.mean(0) - points().mean(0)) < 0.4 * spread).all()
        assert (np.abs(samples.std(0) / spread - 1) < 0.3).all()
        assert unnorm("diagnose", bridged, "--json") == 0
        found = numbers(capsys.readouterr().out)
        assert found["trusted"]
        assert found["noise"]["certified"]
        assert abs(found["log_z"][found["rung"]]["value"] - found["saved"]["value"]) < 0.1
        assert unnorm("info", bridged) == 0
        out = capsys.readouterr().out
        assert any(line.startswith("bridged, ") for line in out.splitlines())
        assert any(line.split() == ["bridges", "3"] for line in out.splitlines())

    def test_config_and_report(self, bridged):
        job = numbers((bridged / "config.json").read_text())["job"]
        assert (job["noise"], job["bridges"]) == ("copula", "3")
        report = (bridged / "report.md").read_text()
        for row in ("| bridges | 3 |", "| noise | copula |", "| test NLL | "):
            assert row in report

    @pytest.mark.parametrize("bridges", ["none", "1"])
    def test_without(self, bridges, capsys):
        assert unnorm("fit", table("t.csv", points()), *FAST, "--noise", "gaussian", "--bridges", bridges) == 0
        assert type(Density.load("runs/t").model) is Tilted
        out = capsys.readouterr().out
        assert "bridges" not in out
        assert "Picked" not in out

    def test_auto_says_what_it_chose(self, capsys):
        """On the terminal, in the report and in the result; Gaussian rows need neither another noise nor bridges."""
        assert unnorm("fit", table("t.csv", points()), *FAST) == 0
        out, report = capsys.readouterr().out, Path("runs/t/report.md").read_text()
        result = numbers(Path("runs/t/result.json").read_text())
        assert result["bridges"] == 1
        assert set(result["chosen"]) == {"noise", "bridges"}
        assert result["chosen"]["noise"].startswith("Picked gaussian: by the log density ")
        assert result["chosen"]["bridges"].startswith("No bridges: a pilot saw ")
        for line in result["chosen"].values():
            assert line in out
            assert line in report
        assert "| noise | auto |" in report
        assert "| bridges | auto |" in report

    @pytest.mark.parametrize("estimator", ["nce", "ence", "snl"])
    def test_every_base(self, estimator):
        options = ["--estimator", estimator, "--bridges", "2", "--noise", "gaussian"]
        assert unnorm("fit", table("t.csv", points()), *FAST, *options) == 0
        assert type(Density.load("runs/t").model) is Bridged


class TestResume:
    options = ("--hidden", "16,16", "--n-importance", "2000", "--schedule", "constant")

    @pytest.fixture
    def settled(self, monkeypatch):
        """From here on nobody may fit a noise or fly a pilot."""

        def settle():
            def again(*_, **__):
                raise AssertionError("it was settled already")

            monkeypatch.setattr(groundwork, "fit_noise", again)
            monkeypatch.setattr(groundwork, "pilot", again)

        return settle

    @pytest.mark.parametrize("choice", [("--noise", "copula", "--bridges", "3"), ()], ids=["asked", "auto"])
    def test_equals_running_through(self, choice, settled, capsys):
        """A pilot has a fifth of the steps, ten at least: here both runs have the same one."""
        path, half, whole = table("t.csv", points()), 31, 50
        assert unnorm("fit", path, *self.options, *choice, "--steps", whole, "--out", "whole", "--json") == 0
        expected = numbers(capsys.readouterr().out)
        assert unnorm("fit", path, *self.options, *choice, "--steps", half, "--out", "part") == 0
        ground = Path("part", GROUNDWORK).read_bytes()
        one, two = load(Path("part")), load(Path("whole"))
        assert same(one.noise, two.noise)
        assert same(one.transform, two.transform)
        assert one[2:] == two[2:]
        capsys.readouterr()
        settled()
        assert unnorm("fit", "--resume", "part", "--steps", whole, "--json") == 0
        found = numbers(capsys.readouterr().out)
        for name in ("test_nll", "bridges", "chosen", "certified", "verdict", "steps"):
            assert found[name] == expected[name]
        assert Path("part/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
        assert Path("part", GROUNDWORK).read_bytes() == ground

    def test_killed_between_groundwork_and_checkpoint(self, bridged, settled):
        shutil.copytree(bridged, "run")
        for name in ("checkpoint.safetensors", "history.jsonl", "model.safetensors", "model.json", "result.json"):
            Path("run", name).unlink()
        settled()
        assert unnorm("fit", "--resume", "run") == 0
        assert Path("run/model.safetensors").read_bytes() == (bridged / "model.safetensors").read_bytes()

    def test_killed_before_the_groundwork(self, bridged):
        """Then nothing is known but what was asked; of a run that trained, too much would be guessed."""
        shutil.copytree(bridged, "run")
        Path("run", GROUNDWORK).unlink()
        assert unnorm("fit", "--resume", "run") == 2
        Path("run/checkpoint.safetensors").unlink()
        assert unnorm("fit", "--resume", "run") == 0
        assert Path("run/model.safetensors").read_bytes() == (bridged / "model.safetensors").read_bytes()

    @pytest.mark.parametrize("stage", ["plain", "bridges"])
    def test_killed_in_one_of_two_trials_without_its_groundwork(self, bridged, stage, capsys):
        """A run that tries both trains in folders of their own: their checkpoints tell of training too."""
        shutil.copytree(bridged, "run")
        Path("run", GROUNDWORK).unlink()
        Path("run", stage).mkdir()
        Path("run/checkpoint.safetensors").rename(Path("run", stage, "checkpoint.safetensors"))
        assert unnorm("fit", "--resume", "run") == 2
        assert f"'run/{GROUNDWORK}' is missing" in capsys.readouterr().err

    def test_force_forgets_the_old_groundwork(self, bridged, monkeypatch, capsys):
        """Killed while the new noise is fitted and resumed: the noise is the new one, not what the old run left."""
        shutil.copytree(bridged, "run")

        def killed(*_, **__):
            raise KeyboardInterrupt

        path = bridged.parent / "t.csv"
        with monkeypatch.context() as patch:
            patch.setattr(groundwork, "fit_noise", killed)
            options = ["--noise", "gaussian-diagonal", "--bridges", "none", "--out", "run", "--force"]
            assert unnorm("fit", path, *FAST, *options) == 130
        assert "Continue with: unnorm fit --resume run" in capsys.readouterr().err
        assert unnorm("fit", "--resume", "run") == 0
        assert type(Density.load("run").model) is Tilted
        assert load(Path("run")).alphas == ()

    @pytest.mark.parametrize("broken", ["damaged", "of fewer columns"])
    def test_a_broken_groundwork_is_one_line(self, bridged, broken, capsys):
        shutil.copytree(bridged, "run")
        path = Path("run", GROUNDWORK)
        if broken == "damaged":
            path.write_bytes(path.read_bytes()[:-9])
        else:
            save(Path("run"), Groundwork(Gaussian(2), Standardize(2), even_alphas(3), {}))
        before = {file: file.read_bytes() for file in Path("run").iterdir()}
        assert unnorm("fit", "--resume", "run") == 2
        captured = capsys.readouterr()
        assert GROUNDWORK in captured.err
        assert captured.err.count("\n") == 1
        assert {file: file.read_bytes() for file in Path("run").iterdir()} == before


class TestDivision:
    """Which rows are trained on, where rows are copies of others or have weights."""

    def parts(self, rows, seed, weights=None, test=0.1):
        return divide(source_of(table_of(rows)), test, seed, weights)[0]

    def test_copies_of_a_discrete_table_go_to_all_parts(self):
        """Each part is a sample of the four values: chi-squared of each, summed over seeds, at its 99.9% point."""
        rows = np.random.default_rng(0).choice(4, (1000, 1), p=[0.4, 0.3, 0.2, 0.1]).astype(float)
        shares = np.bincount(rows[:, 0].astype(int)) / len(rows)
        statistics = {"train": 0.0, "validation": 0.0, "test": 0.0}
        for seed in range(10):
            parts = self.parts(rows, seed)
            assert [len(parts.train), len(parts.validation), len(parts.test)] == [720, 180, 100]
            for name in statistics:
                found = getattr(parts, name).rows()[:, 0].astype(int)
                expected = len(found) * shares
                spread = ((np.bincount(found, minlength=4) - expected) ** 2 / expected).sum()
                statistics[name] += spread / (1 - len(found) / len(rows))  # drawn without replacement
        assert max(statistics.values()) < stats.chi2(3 * 10).ppf(0.999)

    def test_no_row_is_lost_or_made(self):
        rows = np.random.default_rng(1).integers(0, 3, (500, 2)).astype(float)
        parts = self.parts(rows, 3)
        together = np.concatenate([part.rows() for part in (parts.train, parts.validation, parts.test)])
        np.testing.assert_array_equal(together[np.lexsort(together.T)], rows[np.lexsort(rows.T)])

    def test_rows_that_count_as_none(self):
        """Wherever they stand, also at the end, the others are divided as if they were not there."""
        rows = np.random.default_rng(2).normal(size=(50, 2))
        counts = np.full(50, 2)
        counts[0] = 0
        for seed in range(100):
            found, expected = self.parts(rows, seed, counts, 0.0), self.parts(rows[1:], seed, counts[1:], 0.0)
            for name in ("train", "validation"):
                np.testing.assert_array_equal(getattr(found, name).rows(), getattr(expected, name).rows())


class TestNormalised:
    """Whatever the noise, the density integrates to one, in the user's units."""

    def density(self, kind, width, *options):
        path = table("t.csv", 100 + 10 * crooked(400, width))
        assert unnorm("fit", path, *FAST, "--noise", kind, *options, "--out", "run") == 0
        return TableDensity.load("run")

    def mass(self, density, n):
        """Midpoints of n cells a side, over all the noise that float64 knows."""
        width = density.density.event[0]
        sides = [np.linspace(100 - 80, 100 + 160, n + 1)] * width
        axes = [torch.from_numpy((side[1:] + side[:-1]) / 2) for side in sides]
        x = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, width)
        return float(np.exp(density.log_prob(x.numpy())).sum()) * (240 / n) ** width

    @pytest.mark.parametrize(
        ("kind", "bridges"),
        [
            ("gaussian", "2"),
            ("gaussian-diagonal", "none"),
            ("copula", "2"),
            ("mixture", "2"),
            ("smoothed", "2"),
            ("uniform", "2"),
            ("uniform", "none"),
        ],
    )
    def test_one_column(self, kind, bridges):
        assert self.mass(self.density(kind, 1, "--bridges", bridges), 20_000) == pytest.approx(1, abs=2e-3)

    @pytest.mark.parametrize(
        "kind",
        [
            "auto",
            "copula",
            "gaussian-low-rank",
            "mixture",
            "uniform",
            pytest.param("smoothed", marks=pytest.mark.slow),
        ],
    )
    def test_two_columns(self, kind):
        assert self.mass(self.density(kind, 2), 300) == pytest.approx(1, abs=5e-3)

    @pytest.mark.parametrize("bridges", ["none", "2"])
    def test_outside_the_box(self, bridges, capsys):
        """-inf, not NaN; and the command says which row it is."""
        density = self.density("uniform", 2, "--bridges", bridges)
        x = torch.tensor([[120.0, 120.0], [120.0, 1e4], [-1e4, -1e4]], dtype=torch.float64)
        found = density.log_prob(x.numpy())
        assert math.isfinite(found[0])
        assert found[1:].tolist() == [-math.inf, -math.inf]
        table("far.csv", x.numpy())
        capsys.readouterr()
        assert unnorm("score", "run", "far.csv") == 0
        captured = capsys.readouterr()
        assert captured.out.splitlines()[1:] == ["-inf", "-inf"]
        assert "2 rows have no finite log density, the first is row 2" in captured.err
