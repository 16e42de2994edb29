"""The synthetic study: its cells against single runs, its measures against closed forms, its resuming."""

import base64
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.neighbors import KernelDensity

from unnorm import Training, loop
from unnorm.cli import main
from unnorm.data import toy
from unnorm.errors import HealthWarning, InvalidValue
from unnorm.estimators import (
    ENCE,
    MECO,
    NCE,
    SNL,
    ContrastiveDivergence,
    MaximumLikelihood,
    MCMCLikelihood,
    ScoreMatching,
    Telescope,
)
from unnorm.ledger import Ledger
from unnorm.paper.toy2d import report as toy2d_report
from unnorm.paper.toy2d import stack as toy2d_stack
from unnorm.paper.toy2d import study as toy2d_study
from unnorm.paper.toy2d.peers import peer_records
from unnorm.paper.toy2d.problem import DRAWS, STREAM, Measured, Problem, entropy, picture, plane, sampled
from unnorm.paper.toy2d.results import FILE, read
from unnorm.paper.toy2d.spec import DATA, METHODS, SIZES, TABLES
from unnorm.paper.toy2d.stack import STACKED, Stack, stacks
from unnorm.paper.toy2d.study import Study
from unnorm.progress import Progress

SMOKE = SIZES["smoke"]


WRITTEN_OUT = {  # every method that is not MECO with a gamma
    "nce": lambda q, gamma: NCE(q),
    "nce-ngd": lambda q, gamma: NCE(q),
    "ence-ngd": lambda q, gamma: ENCE(q),
    "mcmc": lambda q, gamma: MCMCLikelihood(q, n_steps=20),
    "sm": lambda q, gamma: ScoreMatching(),
    "cd": lambda q, gamma: ContrastiveDivergence(q, n_steps=10),
    "snl": lambda q, gamma: SNL(q),
    "meco-minibatch": lambda q, gamma: MECO(q, tracker="minibatch"),
    "meco-scent": lambda q, gamma: MECO(q, tracker="scent"),
    "meco-umax": lambda q, gamma: MECO(q, tracker="umax"),
    "meco-bridged": lambda q, gamma: Telescope(q, 4, MECO),
    "flow": lambda q, gamma: MaximumLikelihood(),
}


def all_stacks(size=SMOKE, methods=STACKED):
    return stacks(size, DATA, methods, apart=False)


def lines(folder, kind):
    records = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    Study("smoke").run(folder, command="unnorm reproduce toy2d --size smoke", progress=False)
    return folder


def test_the_smoke_study_has_every_cell_and_its_report(smoke):
    runs = lines(smoke, "run")
    assert len(runs) == Study("smoke").runs == len({run["key"] for run in runs})
    assert {run["data"] for run in runs} == set(DATA)
    found = {(run["method"], run["style"]) for run in runs}
    assert found == {(name, style) for name, method in METHODS.items() for style in method.styles}
    for run in runs:
        assert (run["status"] == "ok") == (run["kl"] is not None)
        if run["status"] == "ok":
            assert run["kl"] > -0.01
    results = read(smoke)
    for table in TABLES.values():
        for method in table.paper:
            for data in DATA:
                assert results.cell(table.metric, (method, table.style), data) is not None
    written = {path.name for path in toy2d_report.write(smoke)}
    assert {"report.html", "report.md", "densities-sgd.png", "densities-adam.png"} <= written
    assert "Nothing was left out" in (smoke / "report.md").read_text()


@pytest.mark.parametrize(
    ("method", "style", "n_steps"),
    [(name, style, 20 if method.n_steps else None) for name, method in METHODS.items() if name in STACKED
     for style in method.styles],
)  # fmt: skip
def test_a_cell_is_the_run_it_says(method, style, n_steps):
    """Against `unnorm.train` with the settings of the paper written out anew."""
    size, steps = replace(SMOKE, n_steps=(20,), hidden=(8,)), 8
    (stack,) = [one for one in all_stacks(size) if method in one.methods and one.style == style]
    runs = [run for run in stack.runs(size) if run.method == method and run.data in ("circles", "moons")][-3:]
    done = stack.train(runs, size, steps, "cpu")
    assert {run.n_steps for run in runs} == {n_steps}
    for k, run in enumerate(runs):
        problem = Problem(run.data, run.seed, size)
        usual = {"sgd": 1.0, "adam": 0.1, "own": 0.1}[style]
        meco = method.startswith("meco")
        beta = METHODS[method].beta or (0.9 if meco else usual)
        name = {"sgd": "sgd", "adam": "adam", "own": "adam"}[style]
        if "ngd" in method:
            name = "ngd" if style == "sgd" else "ngd-adam"
        gamma = {"meco-gamma-0.01": 0.01, "meco-gamma-0.2": 0.2}.get(method, 0.1)
        estimator = WRITTEN_OUT.get(method, lambda q, gamma: MECO(q, gamma=gamma))(problem.noise, gamma)
        training = Training(
            steps=steps, batch=size.batch, lr=run.lr, optimizer=name, beta=beta, schedule="cosine",
            seed=problem.number(STREAM),
        )  # fmt: skip
        model = stack.model(run, size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)
            loop.train(model, estimator, problem.train, training, progress=False)
        with torch.no_grad():  # up to a constant, whose gradient is rounding for some, and Adam scales that up
            mine, theirs = (one(problem.test) for one in (done.model.one(k), model))
        torch.testing.assert_close(mine - mine.mean(), theirs - theirs.mean(), rtol=2e-3, atol=5e-4)
        before = stack.model(run, size)(problem.test).detach()
        assert float((before - before.mean() - mine + mine.mean()).abs().max()) > 0.01


def test_the_seeds_of_data_starts_and_noise_are_all_different():
    numbers = [
        Problem(data, seed, SMOKE).number(kind)
        for data in DATA
        for seed in (0, 1, 4, 999, 5_004)
        for kind in (toy2d_stack.START, STREAM, DRAWS)
    ]
    assert len(numbers) == len(set(numbers))
    problem = Problem("moons", 0, SMOKE)
    everything = torch.cat([problem.train, problem.validation, problem.test, problem.fresh])
    assert len(everything.unique(dim=0)) == len(everything)


@pytest.mark.parametrize("name", DATA)
def test_the_plane_holds_the_truth(name):
    where = plane(name, 144)
    truth = toy(name)
    assert float(where.log_truth.exp().sum()) * where.edge**2 == pytest.approx(1, abs=1e-9)
    log_p = where.log_truth.clamp(min=-80) + 7.0
    rows = truth.sample(4_000, generator=torch.Generator().manual_seed(0))
    found = Measured.of(log_p, truth.log_prob(rows) + 7.0, truth.log_prob(rows) + 7.0, where)
    assert found.log_z == pytest.approx(7.0, abs=1e-6)
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    error = float(truth.log_prob(rows).std()) / len(rows) ** 0.5
    assert found.test_nll == pytest.approx(entropy(where), abs=5 * error + 1e-3)
    assert found.outside < 1e-3


def test_the_kl_of_a_gaussian_is_what_samples_say():
    where, truth = plane("8gaussians", 144), toy("8gaussians")
    model = torch.distributions.Normal(0.0, 2.5)

    def log_prob(x):
        return model.log_prob(x.double()).sum(-1)

    rows = truth.sample(40_000, generator=torch.Generator().manual_seed(1))
    found = Measured.of(log_prob(where.centres) + 3, log_prob(rows) + 3, log_prob(rows) + 3, where)
    gaps = truth.log_prob(rows).double() - log_prob(rows)
    assert found.kl == pytest.approx(float(gaps.mean()), abs=4 * float(gaps.std()) / 200 + 1e-3)
    half = -1.5 * truth.extent
    inside = float((model.cdf(torch.tensor(-half)) - model.cdf(torch.tensor(half))) ** 2)
    assert found.log_z == pytest.approx(3 + math.log(inside), abs=1e-4)
    assert Measured.of(log_prob(where.centres), log_prob(rows), log_prob(rows), where, normalised=True).log_z == 0


def test_samples_of_a_plane_have_its_density():
    where = plane("moons", 48)
    n = 50_000
    x = sampled(where.log_truth, where, n, torch.Generator().manual_seed(0))
    cell = ((x + 1.5 * toy("moons").extent) / where.edge).floor().long()
    counts = torch.bincount(cell[:, 0] * 48 + cell[:, 1], minlength=48 * 48).double()
    expected = n * where.log_truth.exp() * where.edge**2
    some = expected > 5
    chi = float(((counts - expected).square() / expected)[some].sum())
    freedom = int(some.sum())
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5
    assert (counts[where.log_truth == -math.inf] == 0).all()


def test_peers_are_scikit_learns():
    size = replace(SMOKE, bandwidths=(0.2,))
    (run, drawn) = peer_records("kde", "circles", 0, size, {})
    problem = Problem("circles", 0, size)
    fitted = KernelDensity(bandwidth=0.2).fit(problem.train.numpy())
    assert run["test_nll"] == pytest.approx(-float(np.mean(fitted.score_samples(problem.test.numpy()))), abs=1e-3)
    assert drawn["kind"] == "picture"
    assert drawn["run"] == run["key"]
    mixtures = [one for one in peer_records("gmm", "moons", 1, SMOKE, {}) if one["kind"] == "run"]
    assert [one["setting"] for one in mixtures] == [{"n_components": 8}, {"n_components": 16}]
    assert all(one["test_nll"] < 4 and one["mmd"] < 0.1 for one in mixtures)


def test_a_stopped_study_goes_on_where_it_stopped(smoke, tmp_path, monkeypatch):
    content = (smoke / FILE).read_text().splitlines(keepends=True)
    runs = [place for place, line in enumerate(content) if json.loads(line)["kind"] == "run"]
    cut = runs[len(runs) // 3 + 2]  # within a stack
    (tmp_path / FILE).write_text("".join(content[:cut]) + content[cut][:40])
    trained = []
    real = Stack.train
    monkeypatch.setattr(Stack, "train", lambda self, runs, *rest: trained.append(runs) or real(self, runs, *rest))
    Study("smoke").run(tmp_path, progress=False)
    before, after = ({run["key"]: run for run in lines(folder, "run")} for folder in (smoke, tmp_path))
    assert before.keys() == after.keys()
    assert len(lines(tmp_path, "run")) == len(before)  # none twice
    there = sum(json.loads(line)["method"] in STACKED for line in content[:cut] if '"kind": "run"' in line)
    networks = sum(run["method"] in STACKED for run in before.values())
    assert sum(len(runs) for runs in trained) == networks - there
    sizes = {len(runs) for runs in trained}
    assert min(sizes) < SMOKE.seeds * len(DATA)  # the stack that was cut is not trained whole
    for key, run in before.items():
        for name in ("kl", "test_nll", "mmd", "steps"):
            same = pytest.approx(run[name], rel=1e-3, abs=1e-5) if run[name] is not None else None
            assert after[key][name] == same, (run["method"], name)
    trained.clear()
    before = (tmp_path / FILE).read_bytes()
    Study("smoke").run(tmp_path, progress=False)
    assert not trained
    assert (tmp_path / FILE).read_bytes() == before  # a call that finds nothing to do leaves no trace


def test_a_cell_is_the_same_whatever_else_is_asked_for(tmp_path):
    """A method that shares its computation with others has the same steps and keys alone as with them."""
    some = {"data": ("moons",)}
    Study("smoke", methods=("meco-beta-0.8",), **some).run(tmp_path, progress=False)
    before = {run["key"] for run in lines(tmp_path, "run")}
    Study("smoke", methods=("meco", "meco-beta-0.8"), **some).run(tmp_path, progress=False)
    runs = lines(tmp_path, "run")
    assert (
        len({run["key"] for run in runs}) == len(runs) == Study("smoke", methods=("meco", "meco-beta-0.8"), **some).runs
    )
    assert {run["key"] for run in runs if run["method"] == "meco-beta-0.8"} == before


@pytest.mark.parametrize("most", [1, 20, 24, 120, 1000])
def test_parts_hold_whole_places(most):
    """Every run once, a data set's settings and seeds together, and no more than asked for, where that can be."""
    size = SIZES["full"]
    for stack in stacks(size, DATA, STACKED, apart=False):
        parts = stack.parts(size, most)
        assert [run for part in parts for run in part] == stack.runs(size)
        places = [{(run.method, run.data) for run in part} for part in parts]
        assert sum(map(len, places)) == len(set.union(*places))
        assert all(len(part) <= most or len(own) == 1 for part, own in zip(parts, places, strict=True))


def test_processes_compute_the_same(tmp_path):
    options = {"methods": ("kde", "nce"), "data": ("moons", "circles")}
    one, many = tmp_path / "one", tmp_path / "many"
    Study("smoke", **options).run(one, progress=False)
    many.mkdir()
    kept = '"kind": "timing"', '"kind": "study"'
    timing = [line for line in (one / FILE).read_text().splitlines(keepends=True) if any(k in line for k in kept)]
    (many / FILE).write_text("".join(timing))  # the same steps, whatever the clock says now
    Study("smoke", jobs=2, **options).run(many, progress=False)
    first, second = ({run["key"]: run["kl"] for run in lines(folder, "run")} for folder in (one, many))
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.slow
def test_a_killed_study_loses_and_repeats_nothing(tmp_path):
    command = [sys.executable, "-m", "unnorm", "reproduce", "toy2d", "--size", "smoke", "--out", str(tmp_path)]
    command += ["--methods", "nce,meco,snl,kde,sm", "--data", "moons,circles"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (tmp_path / FILE).exists() and '"kind": "run"' in (tmp_path / FILE).read_text():
            break
        time.sleep(0.02)
    assert running.poll() is None  # it was at work
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    whole = [line for line in (tmp_path / FILE).read_text().splitlines() if line.endswith("}")]
    there = {record["key"] for record in map(json.loads, whole) if record["kind"] == "run"}
    assert there
    subprocess.run(command, check=True, capture_output=True)
    counts = Counter(run["key"] for run in lines(tmp_path, "run"))
    assert set(counts.values()) == {1}
    assert there <= counts.keys()
    assert len(counts) == Study("smoke", methods=("nce", "meco", "snl", "kde", "sm"), data=("moons", "circles")).runs


@pytest.mark.slow
def test_a_dask_cluster_by_one_flag(tmp_path):
    pytest.importorskip("distributed", reason="needs pip install 'unnorm[dask]'")
    study = Study("smoke", jobs=2, backend="dask", methods=("nce", "kde"), data=("moons",))
    assert len(study.run(tmp_path, progress=False).of("run")) == study.runs


def test_a_gpus_work_is_never_shared_out(monkeypatch, tmp_path):
    """Whatever the backend: all of it at once would not fit."""
    pieces = []
    monkeypatch.setattr(toy2d_study, "computed", lambda work, *rest: pieces.extend(work) or iter(()))
    monkeypatch.setattr(toy2d_study, "_part_records", lambda *a: [])
    study = Study("smoke", device="cuda", jobs=4, backend="threading", methods=("nce", "kde"), data=("moons",))
    clock = toy2d_study.Clock(Ledger(tmp_path / FILE), {"kind": "study"})
    steps = {stack.name: 2 for stack in study.stacks}
    with Progress(study.runs, enabled=False) as bar:
        study._networks(clock, steps, bar)
        assert not pieces
        study._peers(clock, bar)
    assert len(pieces) == SMOKE.seeds


def test_throughput_is_of_the_runs_it_counts(tmp_path):
    """Replica-steps a second of the methods asked for, whatever else the folder holds; written once for each choice."""
    ledger = Ledger(tmp_path / FILE)
    both, one = (Study("smoke", device="cuda", methods=names, data=("moons",)) for names in (("nce", "snl"), ("nce",)))
    steps = {stack.name: 10 for stack in both.stacks}
    for stack in both.stacks:
        facts = {"method": stack.methods[0], "style": stack.style, "n_steps": None, "steps": 10}
        ledger.write([{"kind": "timing", "key": stack.name, "single_seconds": 0.5, **facts}])
        seconds = {"nce": 0.1, "snl": 0.4}[stack.methods[0]]
        for run in stack.runs(both.plan):
            key = run.key(both.common, 10)
            ledger.write([{"kind": "run", "key": key, "method": run.method, "seconds": seconds}])
    clock = toy2d_study.Clock(ledger, {"kind": "study"})
    for study, ratio in ((one, 5 / 0.1), (both, 5 / 0.25), (one, None)):
        before = len(ledger.of("throughput"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(toy2d_study, "hardware", lambda device: "a GPU")
            study._compare(clock, steps)
        found = ledger.of("throughput")[before:]
        assert [record["ratio"] for record in found] == pytest.approx([] if ratio is None else [ratio])


def test_pictures_of_models_that_ran_away():
    """Densities beyond the numbers are drawn by their shape; one that is zero everywhere is black."""
    for height, peak in ((5000.0, math.exp(700)), (2.0, math.exp(2.0)), (-math.inf, math.exp(-700))):
        drawn = picture(lambda x, height=height: height - x.square().sum(-1), "moons")
        levels = np.frombuffer(zlib.decompress(base64.b64decode(drawn["density"])), np.uint8)
        assert drawn["peak"] == pytest.approx(peak, rel=0.05)
        assert levels.max() == (255 if math.isfinite(height) else 0)


def test_the_full_size_on_processors_has_seconds_of_its_own():
    """The share of a run in a GPU's second would be three steps of a CPU."""
    full = SIZES["full"]
    assert Study("full", device="cuda").plan.seconds == full.seconds
    assert Study("full", device="cpu").plan.seconds == full.on_cpu > 100 * full.seconds
    assert Study("laptop", device="cpu").plan.seconds == SIZES["laptop"].seconds


def test_another_study_is_not_mixed_in(smoke, tmp_path):
    with pytest.raises(InvalidValue, match="holds the study of size smoke and seed 0"):
        Study("laptop").run(smoke, progress=False)
    with pytest.raises(InvalidValue, match="holds the study of size smoke and seed 0"):
        Study("smoke", seed=3).run(smoke, progress=False)
    with pytest.raises(InvalidValue, match="holds the study of size smoke and seed 0 on cpu"):
        Study("smoke", device="cuda").run(smoke, progress=False)
    (tmp_path / FILE).write_text('{"somebody": "else"}\n')
    for force in (False, True):
        with pytest.raises(InvalidValue, match="was not written by unnorm"):
            Study("smoke").run(tmp_path, force=force, progress=False)
    (tmp_path / FILE).unlink()
    with pytest.raises(InvalidValue, match="Unknown method 'mecco'. Did you mean 'meco'?"):
        Study("smoke", methods=("mecco",))
    with pytest.raises(InvalidValue, match="Unknown data set 'moon'. Did you mean 'moons'?"):
        Study("smoke", data=("moon",))
    with pytest.raises(InvalidValue, match="joblib cannot use the backend 'nowhere'"):
        Study("smoke", backend="nowhere")
    with pytest.raises(InvalidValue, match="The 'jobs' of the study must be at least 1. Got -3."):
        Study("smoke", jobs=-3)


def test_the_sizes_are_the_protocol():
    full = SIZES["full"]
    assert full.seeds >= 5
    assert full.points == 10_000
    assert full.hidden == (300, 300, 300)
    assert full.n_steps == (20, 50, 100)
    assert set(full.rates["sgd"]) == set(full.rates["adam"]) == {1e-1, 1e-2, 1e-3, 1e-4}
    for size in SIZES.values():
        assert size.cells % 6 == 0
        assert size.cells // 2 % 6 == 0
    laptop = Study("laptop", jobs=2)
    assert {stack.methods[0] for stack in laptop.stacks} == {stack.methods[0] for stack in Study("full").stacks}


class TestCommandLine:
    def unnorm(self, *arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        return end.value.code

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("toy2d", "--size", "tiny"), "Unknown size 'tiny'"),
            (("toy2d", "--quick"), "The study 'toy2d' has no option --quick."),
            (("gaussian-mean", "--size", "smoke"), "The study 'gaussian-mean' has no option --size."),
            (("toy2d", "--methods", "mecco"), "Unknown method 'mecco'. Did you mean 'meco'?"),
            (("toy2d", "--data", "moon"), "Unknown data set 'moon'. Did you mean 'moons'?"),
            (("toy2d", "--device", "gpu"), "Unknown device 'gpu'"),
            (("toy2d", "--seed", "1000"), "The seed of the study must be an integer from 0 to 999."),
            (("toy2d", "--jobs", "0"), "--jobs"),
            (("toy3d",), "Unknown study 'toy3d'. Did you mean 'toy2d'?"),
        ],
    )
    def test_a_wrong_command_is_answered_in_one_line(self, arguments, said, capsys, tmp_path):
        assert self.unnorm("reproduce", *arguments, "--out", tmp_path / "out") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
        assert not (tmp_path / "out").exists()

    def test_the_report_is_made_anew(self, smoke, capsys):
        (smoke / "report.html").unlink(missing_ok=True)
        assert self.unnorm("report", smoke) == 0
        assert "Over all styles, metrics and data sets MECO" in capsys.readouterr().out
        assert (smoke / "report.html").exists()
        assert self.unnorm("report", smoke, "--json") == 0
        assert "report.md" in json.loads(capsys.readouterr().out)["files"]

    def test_a_folder_without_a_study_is_named(self, tmp_path, capsys):
        assert self.unnorm("report", tmp_path) == 2
        assert "holds no study" in capsys.readouterr().err
        (tmp_path / FILE).write_text("not JSON\n{}\n")
        assert self.unnorm("report", tmp_path) == 2
        assert "Line 1 of" in capsys.readouterr().err
