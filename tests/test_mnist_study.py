"""The study of images at smoke size: everything runs, nothing twice; its numbers against their own definitions."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

from unnorm.cli import app
from unnorm.device import fabric_for
from unnorm.errors import BrokenFile, InvalidValue
from unnorm.ledger import Ledger
from unnorm.paper.mnist import runs as mnist_runs
from unnorm.paper.mnist.judge import Judge, nearest, trained
from unnorm.paper.mnist.problem import Empirical, Problem
from unnorm.paper.mnist.results import APART, FILE, Line, headlines, is_ours, read, summarise
from unnorm.paper.mnist.spec import METHODS, ROWS, SIZES, Row, rows
from unnorm.paper.mnist.study import Study

FEW = {"methods": ("bridges-meco", "meco"), "noises": ("gaussian",)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All 24 rows, by the command line."""
    folder = tmp_path_factory.mktemp("mnist") / "study"
    done = CliRunner().invoke(app, ["reproduce", "mnist", "--size", "smoke", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder, done.output


class TestStudy:
    def test_every_row_of_the_table_is_there(self, whole):
        folder, output = whole
        found = read(folder)
        assert [line.row for line in found.lines] == list(ROWS)
        assert len(ROWS) == 4 * 3 + 4 * 3
        assert set(found.noises) == {"gaussian", "smoothed", "copula", "flow"}
        assert "numbers mean nothing" in output

    def test_bits_are_the_raw_ones_and_log_z(self, whole):
        """Pixel by pixel log Z is zero, and its sides are the wider of the quadrature's and the draws'."""
        for run in read(whole[0]).runs:
            last, pixels = run["sides"][-1], METHODS[run["method"]].way == "pixels"
            sides = {name: last[name] for name in ("lower", "joined", "upper")}
            if pixels:
                nodes = run["sides"][-2]
                assert (nodes["nodes"], last["draws"]) == (SIZES["smoke"].nodes[-1], SIZES["smoke"].chains)
                assert last["lower"] <= last["joined"] <= last["upper"]
                assert abs(last["joined"]) < 5 * last["joined_stderr"] + nodes["upper"] + 1e-3
                sides = {"joined": 0.0}
                sides |= {"lower": min(nodes["lower"], last["lower"]), "upper": max(nodes["upper"], last["upper"])}
            for side, log_z in sides.items():
                assert run[side] == pytest.approx(run["raw_bits"] + log_z / 64 / math.log(2), abs=1e-9)

    def test_a_moment_of_training_leaves_nearly_the_noise(self, whole):
        """An oracle for all the book-keeping: heads begin at zero, and thirty steps change little."""
        found = read(whole[0])
        for line in found.lines:
            beneath = line.row.noise if METHODS[line.row.method].bridged else "gaussian"
            learned = found.noises[beneath]["bits"] - line.runs[0]["joined"]
            most = 0.2 if METHODS[line.row.method].way == "pixels" else 0.03  # these learn at once
            assert -0.03 < learned < most

    def test_temperatures_of_the_first_seed_show_convergence(self, whole):
        for run in read(whole[0]).runs:
            kind = "nodes" if METHODS[run["method"]].way == "pixels" else "betas"
            assert [side[kind] for side in run["sides"] if kind in side] == list(getattr(SIZES["smoke"], kind))

    def test_sheets_are_pictures_of_samples(self, whole):
        folder, _ = whole
        for run in read(folder).runs:
            assert imread(folder / run["sheet"]).std() > 0.1
            assert imread(folder / run["nearest_sheet"]).std() > 0.1

    def test_no_run_is_left_behind(self, whole):
        assert not list(whole[0].glob("run-*"))

    def test_a_finished_study_computes_nothing(self, whole):
        folder, _ = whole
        before = (folder / FILE).read_bytes()
        Study("smoke").run(folder, progress=False)
        assert (folder / FILE).read_bytes() == before

    def test_another_study_is_not_mixed_in(self, whole):
        with pytest.raises(InvalidValue, match="holds the study of size smoke and seed 0, 0.3 s a run, on cpu"):
            Study("smoke", seed=1).run(whole[0])
        with pytest.raises(InvalidValue, match="0.3 s a run"):
            Study("smoke", seconds=0.4).run(whole[0])
        done = CliRunner().invoke(app, ["reproduce", "toy2d", "--size", "smoke", "--out", str(whole[0])])
        assert isinstance(done.exception, InvalidValue)
        assert "holds the study mnist of size smoke" in str(done.exception)

    def test_the_report_reads_the_lines_alone(self, whole, tmp_path):
        folder, _ = whole
        (tmp_path / FILE).write_bytes((folder / FILE).read_bytes())
        done = CliRunner().invoke(app, ["report", str(tmp_path)])
        assert done.exit_code == 0, done.output
        page = (tmp_path / "report.md").read_text()
        assert "MECO with bridges" in page
        assert "samples-" not in page  # no sheets here
        assert "samples-" in (folder / "report.md").read_text()
        assert (tmp_path / "convergence.png").exists()

    def test_json(self, whole):
        done = CliRunner().invoke(app, ["report", str(whole[0]), "--json"])
        assert json.loads(done.stdout)["summary"] == summarise(read(whole[0]))

    def test_digits_are_not_compared_with_published_numbers(self, whole):
        assert "1.394" not in (whole[0] / "report.md").read_text()


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    study = Study("smoke", **FEW)
    monkeypatch.setattr(mnist_runs, "_normalised", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        study.run(tmp_path, progress=False)
    assert not Ledger(tmp_path / FILE).of("run")
    kept = list(tmp_path.glob("run-*/checkpoint.safetensors"))
    assert len(kept) == 1
    monkeypatch.undo()
    resumed = []
    fit = mnist_runs.train
    monkeypatch.setattr(mnist_runs, "train", lambda *a, **k: resumed.append(k["resume"]) or fit(*a, **k))
    study.run(tmp_path, progress=False)
    assert resumed[0] is True
    assert len(Ledger(tmp_path / FILE).of("run")) == 2


def test_a_model_that_ran_away_is_shown_as_diverged(tmp_path, monkeypatch):
    class Wild(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.tensor(1e6))

        def forward(self, x):
            return self.slope * torch.sin(40 * x.flatten(1)).sum(1)

    study = Study("smoke", methods=("meco",), noises=("gaussian",))
    monkeypatch.setattr(mnist_runs, "_fit", _trained_to(Wild()))
    study.run(tmp_path, progress=False)
    found = read(tmp_path)
    (run,) = found.runs
    assert run["status"] == "diverged"
    assert "Annealed chains do not reach the model" in run["why"]
    assert found.lines[0].bits is None
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "diverged" in (tmp_path / "report.md").read_text()


def test_a_model_that_is_not_finite_somewhere_is_shown_as_diverged(tmp_path, monkeypatch):
    class Hole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.depth = torch.nn.Parameter(torch.tensor(0.0))

        def forward(self, x):
            return torch.where(x.flatten(1)[:, 0].abs() > 1, -torch.inf, self.depth * x.flatten(1).sum(1))

    monkeypatch.setattr(mnist_runs, "_fit", _trained_to(Hole()))
    Study("smoke", methods=("meco",), noises=("gaussian",)).run(tmp_path, progress=False)
    (run,) = read(tmp_path).runs
    assert run["status"] == "diverged"
    assert "not finite at some of the samples" in run["why"]
    assert not list(tmp_path.glob("run-*"))


def test_a_classifier_of_other_settings_is_not_used(tmp_path):
    problem = Problem(SIZES["smoke"], tmp_path, fabric_for("cpu"))
    path = tmp_path / "classifier.safetensors"
    first = trained(problem, path)
    assert trained(problem, path).accuracy == first.accuracy > 0.9
    problem.size = replace(SIZES["smoke"], classifier=1)
    assert trained(problem, path).accuracy < 0.5
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BrokenFile, match=r"classifier\.safetensors"):
        trained(problem, path)


def test_force_replaces_a_study_with_a_broken_line(tmp_path):
    (tmp_path / FILE).write_text('{"kind": "study", "study": "mnist", "size": "smoke"}\nbroken\n{}\n')
    study = Study("smoke", methods=("meco",), noises=("gaussian",))
    with pytest.raises(BrokenFile, match="Line 2"):
        study.run(tmp_path, progress=False)
    study.run(tmp_path, force=True, progress=False)
    assert len(read(tmp_path).runs) == 1


def test_the_benchmark_of_images_runs():
    script = Path(__file__).parents[1] / "benchmarks" / "images.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, timeout=300, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["metric"] for one in found][:1] == ["bridged step over a plain forward and backward"]
    assert all(one["value"] > 0 for one in found)


def _trained_to(net):
    """Training, short, that ends at this network."""
    own = mnist_runs._fit

    def fit(problem, row, model, estimator, steps, seed, folder, **options):
        history = own(problem, row, model, estimator, steps, seed, folder, **options)
        model.net = net
        return history

    return fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "tiny"}, "Unknown size 'tiny'"),
        ({"methods": ("mecoo",)}, "Unknown method 'mecoo'. Did you mean 'meco'"),
        ({"noises": ("flo",)}, "Unknown noise 'flo'. Did you mean 'flow'"),
        ({"methods": ("meco",), "noises": ("copula",)}, "None of these methods is run with any of these noises"),
        ({"seed": -1}, "must be an integer from 0 to 999"),
        ({"seconds": 0.0}, "The seconds of the study must be positive. Got 0.0"),
        ({"seeds": -2}, "The seeds of the study must be positive. Got -2"),
    ],
)
def test_wrong_studies(options, message):
    with pytest.raises(InvalidValue, match=message):
        Study(**options)


@pytest.mark.parametrize("option", [["--jobs", "2"], ["--quick"], ["--data", "moons"]])
def test_options_of_other_studies(option):
    done = CliRunner().invoke(app, ["reproduce", "mnist", *option])
    assert isinstance(done.exception, InvalidValue)
    assert f"The study 'mnist' has no option {option[0]}" in str(done.exception)


RUN = {"kind": "run", "key": "a", "method": "meco", "noise": "gaussian", "seed": 0, "status": "ok"}
RUN |= {"steps": 3, "bridges": 0, "lower": 1.0, "joined": None, "upper": 1.0}


class TestResults:
    def line(self, **sides):
        runs = [{"seed": k, "status": "ok", **one} for k, one in enumerate(zip_sides(sides))]
        return Line(Row("bridges-meco", "copula"), tuple(runs))

    def test_means_and_sides(self):
        line = self.line(lower=(1.20, 1.19), joined=(1.21, 1.20), upper=(1.22, 1.21))
        assert line.bits == pytest.approx(1.205)
        assert line.deviation == pytest.approx(np.std([1.21, 1.20], ddof=1))
        assert line.sides == (1.19, 1.22)
        crossed = self.line(lower=(1.22,), joined=(1.225,), upper=(1.21,))
        assert crossed.sides == (1.21, 1.225)

    def test_sides_too_far_apart_are_no_number(self):
        line = self.line(lower=(1.20, 1.15), joined=(1.21, 1.20), upper=(1.21, 1.15 + APART + 1e-6))
        assert (line.bits, line.deviation, line.sides) == (None, None, None)

    def test_one_seed_has_no_deviation(self):
        assert self.line(lower=(1.2,), joined=(1.2,), upper=(1.2,)).deviation is None

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{}\n{}\n", "Line 1 .* has no 'kind'"),
            ('{"kind": "run", "key": "a", "method": "meco"}\n{}\n', "a run needs 'noise'"),
            (json.dumps(RUN) + "\n{}\n", "a run that is ok needs 'lower', 'joined' and 'upper'"),
            ('{"kind": "other"}\n{}\n', "unknown kind, 'other'"),
            ('{"kind": "noise", "noise": "pink", "bits": 2}\n{}\n', "its noise 'pink' is unknown"),
            ('{"kind": "study", "study": "mnist", "size": "full", "seeds": 3}\n', "no line of kind 'run'"),
        ],
    )
    def test_broken_files(self, tmp_path, text, message):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(BrokenFile, match=message):
            read(tmp_path)

    def test_nothing_there(self, tmp_path):
        assert not is_ours(tmp_path)
        with pytest.raises(InvalidValue, match="holds no study"):
            read(tmp_path)

    def test_headlines_name_the_best(self, whole):
        lines = headlines(read(whole[0]))
        assert any("The best likelihood is that of" in line and "copula" in line for line in lines)


def zip_sides(sides):
    return [dict(zip(sides, values, strict=True)) for values in zip(*sides.values(), strict=True)]


class TestProblem:
    def problem(self, tmp_path):
        return Problem(SIZES["smoke"], tmp_path, fabric_for("cpu"))

    def test_a_noise_is_fitted_once(self, tmp_path):
        first = self.problem(tmp_path).where("copula")
        second = self.problem(tmp_path).where("copula")
        images = self.problem(tmp_path).data.test.images[:5]
        own = [where.transform(images, generator=torch.Generator().manual_seed(0))[0] for where in (first, second)]
        torch.testing.assert_close(*own)

    def test_a_broken_noise_is_named(self, tmp_path):
        (tmp_path / "noise-copula.safetensors").write_bytes(b"nothing")
        with pytest.raises(BrokenFile, match=r"noise-copula\.safetensors"):
            self.problem(tmp_path).where("copula")

    def test_the_papers_three_noises(self, tmp_path):
        problem = self.problem(tmp_path)
        empirical, gaussian, smoothed = (problem.training_noise(name) for name in ("empirical", "gaussian", "smoothed"))
        assert isinstance(empirical, Empirical)
        draws = empirical.sample(50, generator=torch.Generator().manual_seed(0))
        assert bool((draws[:, None] == empirical.rows[None]).flatten(2).all(-1).any(-1).all())
        assert float(empirical.log_prob(draws)[0]) == pytest.approx(-math.log(len(problem.data.train.images)))
        assert gaussian is problem.where("gaussian").noise
        assert len(smoothed.white) == len(problem.data.train.images)

    def test_without_bridges_the_gaussian_is_beneath(self, tmp_path):
        problem = self.problem(tmp_path)
        model = problem.model(Row("meco", "empirical"), 1, 0)
        z = problem.held_out(Row("meco", "empirical"), 7)
        torch.testing.assert_close(model(z), problem.where("gaussian").noise.log_prob(z))


def test_both_sides_of_log_z_by_weighted_draws():
    """log w ~ N(m, s^2) under r: below by m, above by m + s^2, and log E[w] = m + s^2 / 2 between them."""
    m, s, n = -0.3, 0.5, 200_000
    found = mnist_runs._drawn(m + s * torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert found["lower"] == pytest.approx(m, abs=5 * s / n**0.5)
    assert found["joined"] == pytest.approx(m + s**2 / 2, abs=5 * found["joined_stderr"])
    assert found["upper"] == pytest.approx(m + s**2, abs=0.02)
    assert found["joined_stderr"] == pytest.approx((math.exp(s**2) - 1) ** 0.5 / n**0.5, rel=0.05)


class Fixed(torch.nn.Module):
    """Class = the first shade times ten, certain where the second is one."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(100.0))

    def forward(self, x):
        x = x.flatten(1)
        return self.scale * torch.nn.functional.one_hot((x[:, 0] * 10).round().long(), 10) * x[:, 1:2]


class TestJudge:
    def test_verdict_by_hand(self):
        images = torch.tensor([[0, 10], [0, 10], [3, 10], [5, 0]]).view(4, 1, 1, 2)
        found = Judge(Fixed(), 11, 0.0, 0).verdict(images)
        assert found.confident == 0.75
        shares = np.array([3, 1]) / 4  # the last is of no class: the first, by torch's argmax
        assert found.entropy == pytest.approx(-(shares * np.log(shares)).sum())
        assert found.n == 4

    def test_the_nearest_by_brute_force(self):
        generator = torch.Generator().manual_seed(0)
        train = torch.randint(17, (40, 1, 3, 3), generator=generator)
        images = torch.randint(17, (70, 1, 3, 3), generator=generator)
        found = nearest(images, train, 17)
        every = ((images[:, None] - train[None]).double() / 16).square().mean((2, 3, 4)).sqrt()
        torch.testing.assert_close(found.distance.double(), every.min(1).values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            every.gather(1, every.argmin(1)[:, None])[:, 0],
            ((images - found.images).double() / 16).square().mean((1, 2, 3)).sqrt(),
        )


def test_rows_can_be_chosen():
    assert rows(("meco",)) == [Row("meco", noise) for noise in ("empirical", "gaussian", "smoothed")]
    to_the_flow = ("bridges-nce", "bridges-meco", "pixels-nce", "pixels-meco")
    assert rows((), ("flow",)) == [Row(method, "flow") for method in to_the_flow]
