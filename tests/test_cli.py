"""The command line as a person uses it, and misuses it."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from unnorm import Density
from unnorm.cli import main
from unnorm.data import toy

SMALL = ["--hidden", "16,16", "--steps", "60", "--n-importance", "2000"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def unnorm(*arguments):
    """Run a command; its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


def importable():
    """The environment of a child process that finds this source tree from anywhere."""
    paths = [str(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def table(path, values, names=("a", "b", "c")):
    names = names[: values.shape[1]]
    np.savetxt(path, values, delimiter=",", header=",".join(names), comments="")
    return path


def points(n=300, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * 10 + 100


@pytest.fixture
def fitted(capsys):
    assert unnorm("fit", table("t.csv", points()), *SMALL, "--out", "run") == 0
    capsys.readouterr()
    return Path("run")


class TestFit:
    @pytest.mark.parametrize("width", [1, 2, 3, 6])
    def test_writes_one_folder(self, width, capsys):
        names = [f"column{k}" for k in range(width)]
        path = table("t.csv", points(d=width), names)
        assert unnorm("fit", path, *SMALL) == 0
        out = capsys.readouterr().out
        for phrase in ("test NLL", "log Z, importance", "Verdict: "):
            assert phrase in out
        assert "log Z, grid" in out or width > 2
        folder = Path("runs/t")
        expected = {
            "model.safetensors",
            "model.json",
            "config.json",
            "history.jsonl",
            "density.png",
            "report.md",
            "result.json",
        }
        assert expected <= {entry.name for entry in folder.iterdir()}
        picture = matplotlib.image.imread(folder / "density.png")
        assert picture.std() > 0.02
        report = (folder / "report.md").read_text()
        assert "density.png" in report
        assert "Verdict" in out
        assert json.loads((folder / "result.json").read_text())["verdict"] in report

    def test_toy_knows_the_truth(self, capsys):
        assert unnorm("fit", "8gaussians", *SMALL, "--n", "2000", "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert abs(result["truth"]["entropy"] - toy("8gaussians").entropy) < 1e-9
        assert result["truth"]["excess"] > 0

    def test_same_seed_same_numbers(self, capsys):
        path = table("t.csv", points())
        results = []
        for name in ("one", "two"):
            assert unnorm("fit", path, *SMALL, "--out", name, "--seed", "3", "--json") == 0
            results.append(json.loads(capsys.readouterr().out))
        for result in results:
            result.pop("folder"), result.pop("fit_seconds")
        assert results[0] == results[1]

    def test_units_of_the_data(self, capsys):
        """Scaling every column by 1000 adds d log 1000 to the NLL and nothing else."""
        values = points(d=2)
        results = []
        for scale in (1, 1000):
            np.save("t.npy", values * scale)
            assert unnorm("fit", "t.npy", *SMALL, "--out", f"run{scale}", "--json") == 0
            results.append(json.loads(capsys.readouterr().out)["test_nll"])
        assert abs(results[1] - results[0] - 2 * np.log(1000)) < 1e-3

    @pytest.mark.parametrize(
        "options",
        [
            ["--model", "mlp", "--noise", "gaussian-diagonal"],
            ["--model", "quadratic", "--noise", "gaussian-low-rank", "--optimizer", "sgd", "--lr", "0.05"],
            ["--tracker", "scent", "--iterate", "averaged", "--schedule", "power"],
            ["--tracker", "umax", "--iterate", "random", "--precision", "64"],
            ["--iterate", "best"],
            ["--schedule", "pl", "--mu", "2", "--n-noise", "100"],
            ["--gamma", "0.5", "--beta", "0.5", "--precision", "bf16"],
            ["--estimator", "nce", "--nu", "2", "--optimizer", "ngd", "--lr", "0.01"],
            ["--estimator", "ence", "--optimizer", "ngd", "--lr", "0.01"],
            ["--estimator", "snl", "--n-noise", "100"],
            ["--estimator", "mcmc", "--n-steps", "2", "--buffer-size", "600", "--restart", "0.1"],
            ["--estimator", "cd", "--n-steps", "2", "--step-size", "0.01", "--noise-scale", "0.1", "--iterate", "best"],
            ["--estimator", "pcd", "--n-steps", "2", "--n-chains", "50", "--precision", "64"],
            ["--estimator", "sm", "--strict"],
            ["--estimator", "ssm", "--n-slices", "2", "--precision", "64"],
            ["--estimator", "dsm", "--sigma", "0.2", "--precision", "bf16"],
            ["--estimator", "cnce", "--sigma", "0.7", "--kappa", "2"],
        ],
    )
    @pytest.mark.filterwarnings("ignore::unnorm.errors.WeightsWarning")  # 60 steps leave a plain network far off
    @pytest.mark.filterwarnings("ignore::unnorm.errors.MixingWarning")
    def test_options(self, options):
        assert unnorm("fit", table("t.csv", points()), *SMALL, *options) == 0

    def test_rows_and_columns_can_be_left_out(self, capsys):
        values = points()
        values[5, 1], values[:, 2] = np.nan, 4.0
        path = table("t.csv", values)
        assert unnorm("fit", path, *SMALL, "--drop-nonfinite", "--drop-constant") == 0
        config = json.loads(Path("runs/t/config.json").read_text())
        assert config["columns"] == ["a", "b"]
        assert sum(config["rows"]) == 299
        assert unnorm("fit", path, *SMALL, "--columns", "a", "--out", "one") == 0
        capsys.readouterr()
        assert unnorm("score", "one", path) == 0
        assert len(capsys.readouterr().out.splitlines()) == 300
        assert unnorm("score", "runs/t", path, "--drop-nonfinite") == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 299
        assert [line.split(",")[0] for line in lines[4:6]] == ["5", "7"]  # row 6 is left out, and one sees it

    def test_resume_equals_running_through(self, capsys):
        path = table("t.csv", points())
        options = [*SMALL[:2], "--n-importance", "2000", "--schedule", "constant"]
        assert unnorm("fit", path, *options, "--steps", "70", "--out", "whole", "--json") == 0
        whole = json.loads(capsys.readouterr().out)
        assert unnorm("fit", path, *options, "--steps", "31", "--out", "part") == 0
        capsys.readouterr()
        assert unnorm("fit", "--resume", "part", "--steps", "70", "--json") == 0
        part = json.loads(capsys.readouterr().out)
        assert part["test_nll"] == whole["test_nll"]
        assert Path("part/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()

    def test_force_replaces_only_our_files(self):
        path = table("t.csv", points())
        Path("run").mkdir()
        Path("run/thesis.txt").write_text("years of work")
        assert unnorm("fit", path, *SMALL, "--out", "run") == 2
        assert unnorm("fit", path, *SMALL, "--out", "run", "--force") == 0
        assert Path("run/thesis.txt").read_text() == "years of work"

    def test_real_table(self, real_data, capsys):
        """200 minutes of household power, a table nobody made up for us."""
        values = np.load(real_data / "uci" / "power.npz")
        name = values.files[0]
        np.save("power.npy", values[name][:2000, :4].astype("float32"))
        assert unnorm("fit", "power.npy", *SMALL, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["test_nll"] < result["noise_nll"]


class TestOthers:
    def test_score(self, fitted, capsys):
        assert unnorm("score", fitted, "t.csv") == 0
        captured = capsys.readouterr()
        values = [float(line) for line in captured.out.splitlines()]
        assert len(values) == 300
        assert "300 rows, NLL" in captured.err
        assert unnorm("score", fitted, "t.csv", "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["log_prob"] == pytest.approx(values, rel=1e-6)
        assert result["nll"] == pytest.approx(-np.mean(values), rel=1e-6)

    def test_score_finds_columns_by_name(self, fitted, capsys):
        values = points()
        table("shuffled.csv", np.column_stack([values[:, 2], np.zeros(300), values[:, 0], values[:, 1]]), "cxab")
        outputs = []
        for name in ("t.csv", "shuffled.csv"):
            assert unnorm("score", fitted, name) == 0
            outputs.append(capsys.readouterr().out)
        assert outputs[0] == outputs[1]

    def test_sample(self, fitted, capsys):
        assert unnorm("sample", fitted, "-n", "20", "--seed", "1") == 0
        first = capsys.readouterr().out
        rows = list(csv.reader(first.splitlines()))
        assert rows[0] == ["a", "b", "c"]
        assert len(rows) == 21
        assert unnorm("sample", fitted, "-n", "20", "--seed", "1") == 0
        assert capsys.readouterr().out == first
        assert unnorm("sample", fitted, "-n", "20", "--seed", "1", "--json") == 0
        assert np.array(json.loads(capsys.readouterr().out)["samples"]).shape == (20, 3)
        for suffix in ("csv", "npy"):
            assert unnorm("sample", fitted, "-n", "5", "--out", f"s.{suffix}") == 0
            assert unnorm("score", fitted, f"s.{suffix}", "--out", f"scores.{suffix}") == 0

    def test_info(self, fitted, capsys):
        assert unnorm("info", fitted, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert {"test_nll", "log_z", "verdict"} <= set(result)
        assert {"value", "stderr", "ess", "khat"} <= set(result["log_z"]["importance"])
        assert unnorm("info", fitted) == 0
        assert "Verdict" in capsys.readouterr().out

    @pytest.mark.parametrize("command", ["fit", "score", "sample", "info"])
    def test_help_has_an_example(self, command, capsys):
        assert unnorm(command, "--help") == 0
        assert f"Example: unnorm {command}" in capsys.readouterr().out

    def test_version(self, capsys):
        assert unnorm("--version") == 0
        assert capsys.readouterr().out.startswith("unnorm 0.")

    def test_help_does_not_wait_for_torch(self):
        code = "import sys, unnorm.cli; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], env=importable(), check=False).returncode == 0


def write(name, text):
    Path(name).write_text(text)


MISTAKES = {
    "no data": (["fit"], "Missing DATA"),
    "unknown set": (["fit", "8gaussian"], "Unknown data set '8gaussian'. Did you mean '8gaussians'?"),
    "option of another": (
        ["fit", "moons", "--estimator", "nce", "--gamma", "0.5"],
        "The estimator 'nce' has no option --gamma. Its options: --nu.",
    ),
    "steps of meco": (
        ["fit", "moons", "--n-steps", "5"],
        "The estimator 'meco' has no option --n-steps. Its options: --gamma, --tracker, --n-noise.",
    ),
    "relu and score matching": (
        ["fit", "moons", "--estimator", "sm", "--activation", "relu"],
        "'sm' needs second derivatives, which the activation 'relu' has not",
    ),
    "pl with another": (["fit", "moons", "--estimator", "cd", "--schedule", "pl"], "'pl' belongs to 'meco'"),
    "nu below one": (["fit", "moons", "--estimator", "nce", "--nu", "0.5"], "'nu' of NCE must be at least 1. Got 0.5"),
    "noise scale alone": (
        ["fit", "moons", "--estimator", "cd", "--noise-scale", "1"],
        "give a --step-size too",
    ),
    "small buffer": (
        ["fit", "moons", "--estimator", "mcmc", "--buffer-size", "100"],
        "The --buffer-size must be at least the --batch, 500. Got 100.",
    ),
    "no such file": (["fit", "nothing.csv"], "There is no file 'nothing.csv'"),
    "empty file": (["fit", "empty.csv"], "'empty.csv' is empty"),
    "one row": (["fit", "one.csv"], "'one.csv' has 1 row"),
    "words": (["fit", "words.csv"], "Column 'b' of 'words.csv' is not numeric: line 3 has 'red'"),
    "nan": (["fit", "nan.csv"], "1 values in 1 rows are NaN or infinite, the first in row 2, column 'b'"),
    "nan flag": (["fit", "nan.csv"], "--drop-nonfinite"),
    "constant": (["fit", "constant.csv"], "Constant columns have no density: 'b'"),
    "unknown estimator": (["fit", "t.csv", "--estimator", "mecho"], "Unknown estimator 'mecho'. Did you mean 'meco'?"),
    "unknown model": (["fit", "t.csv", "--model", "tiled"], "Did you mean 'tilted'?"),
    "unknown noise": (["fit", "t.csv", "--noise", "gausian"], "Did you mean 'gaussian'?"),
    "unknown option": (["fit", "t.csv", "--stepz", "3"], "--steps"),
    "unknown command": (["fti"], "fit"),
    "not a number": (["fit", "t.csv", "--steps", "many"], "--steps"),
    "zero steps": (["fit", "t.csv", "--steps", "0"], "'steps' of Training must be a positive integer. Got 0"),
    "negative batch": (["fit", "t.csv", "--batch", "-3"], "'batch' of Training must be a positive integer. Got -3"),
    "zero noise": (["fit", "t.csv", "--n-noise", "0"], "'n_noise' of MECO must be at least 1"),
    "few toys": (["fit", "moons", "--n", "0"], "'n' must be at least 10. Got 0"),
    "test share": (["fit", "t.csv", "--test", "1.5"], "'test' share must be between 0 and 1. Got 1.5"),
    "gamma": (["fit", "t.csv", "--gamma", "1.5"], "The 'gamma' of MECO must be in (0, 1]. Got 1.5"),
    "beta": (["fit", "t.csv", "--beta", "0"], "The 'beta' of MECO must be in (0, 1]. Got 0.0"),
    "widths": (["fit", "t.csv", "--hidden", "a,b"], "Got 'a,b'"),
    "device": (["fit", "t.csv", "--device", "cuda:99"], "The device 'cuda:99' is not available"),
    "device name": (["fit", "t.csv", "--device", "gpu"], "Unknown device 'gpu'"),
    "output exists": (["fit", "t.csv", "--out", "taken"], "The output folder 'taken' exists. Use --force"),
    "output is a file": (["fit", "t.csv", "--out", "t.csv"], "is a file, not a folder"),
    "output unwritable": (["fit", "t.csv", "--out", "/proc/nowhere/run"], "cannot be written"),
    "column": (["fit", "t.csv", "--columns", "a,z"], "Unknown column 'z'"),
    "no columns": (["fit", "t.csv", "--columns", ""], "Unknown column ''"),
    "resume nothing": (["fit", "--resume", "taken"], "There is no run to resume at 'taken'"),
    "resume and options": (["fit", "t.csv", "--resume", "taken", "--lr", "3"], "leave out data, lr"),
    "seed": (["fit", "t.csv", "--seed", "-1"], "'seed' of Training must be"),
    "pl and gamma": (["fit", "t.csv", "--schedule", "pl", "--gamma", "0.2"], "sets gamma and beta itself"),
    "pl and beta": (["fit", "t.csv", "--schedule", "pl", "--beta", "0.2"], "sets gamma and beta itself"),
    "pl and umax": (["fit", "t.csv", "--schedule", "pl", "--tracker", "umax"], "tracker 'ema'. Got 'umax'"),
    "pl mu": (["fit", "t.csv", "--schedule", "pl", "--mu", "0"], "'mu' must be positive"),
    "huge": (["fit", "huge.csv"], "Column 'b' has size inf"),
    "long name": (["fit", "t.csv", "--out", "x" * 300], "cannot be written"),
    "foreign file": (["fit", "t.csv", "--out", "foreign", "--force"], "report.md' was not written by unnorm"),
    "no model": (["score", "taken", "t.csv"], "There is no saved density at 'taken'"),
    "no model folder": (["info", "nowhere"], "There is no saved density at 'nowhere'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_line_and_exit_code_two(mistake, capsys):
    arguments, message = MISTAKES[mistake]
    table("t.csv", points())
    write("empty.csv", "")
    write("one.csv", "a,b\n1,2\n")
    write("words.csv", "a,b\n1,2\n3,red\n")
    write("nan.csv", "a,b\n1,2\n3,\n" + "5,6\n7,8\n" * 10)
    write("constant.csv", "a,b\n" + "".join(f"{k},5\n" for k in range(20)))
    Path("taken").mkdir()
    write("taken/notes.txt", "mine")
    write("huge.csv", "a,b\n" + "".join(f"{k},{k}e200\n" for k in range(1, 21)))
    Path("foreign").mkdir()
    write("foreign/report.md", "mine")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert unnorm(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "run", "narrow.csv"], "'narrow.csv' has 2 columns; the model was fitted on 3 (a, b, c)"),
        (["score", "run", "renamed.csv"], "'renamed.csv' lacks columns the model was fitted on: a, b, c"),
        (["sample", "run", "-n", "3", "--seed", "-1"], "seed must be an integer from 0"),
        (["sample", "run", "-n", "0"], "at least 1. Got 0"),
        (["sample", "run", "-n", "3", "--out", "t.csv"], "'t.csv' exists. Use --force"),
        (["sample", "run", "-n", "3", "--out", "s.txt"], "must be a .csv or .npy file"),
    ],
)
def test_mistakes_with_a_model(fitted, arguments, message, capsys):
    np.savetxt("narrow.csv", points(d=2), delimiter=",")
    table("renamed.csv", points(), "xyz")
    assert unnorm(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_broken_model_is_one_line(fitted, capsys):
    path = fitted / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert unnorm("info", fitted) == 2
    assert "truncated, edited, or from another model" in capsys.readouterr().err


def test_edited_config_is_one_line(fitted, capsys):
    path = fitted / "config.json"
    path.write_text(path.read_text().replace('"steps"', '"stepz"'))
    assert unnorm("fit", "--resume", fitted) == 2
    assert "edited after it was written" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{nope", "[1]", "{}", ""])
@pytest.mark.parametrize(("file", "command"), [("result.json", ["info"]), ("config.json", ["score", "t.csv"])])
def test_edited_results_are_one_line(fitted, capsys, file, command, content):
    (fitted / file).write_text(content)
    assert unnorm(command[0], fitted, *command[1:]) == 2
    captured = capsys.readouterr()
    assert f"{file}' " in captured.err
    assert captured.err.count("\n") == 1


def test_result_of_another_model_is_not_believed(fitted, capsys):
    path = fitted / "result.json"
    path.write_text(path.read_text().replace('"test_nll": ', '"test_nll": -1'))
    assert unnorm("info", fitted) == 2
    assert "its digest does not match" in capsys.readouterr().err


def test_resume_after_a_kill_before_the_first_checkpoint(fitted, capsys):
    whole = (fitted / "model.safetensors").read_bytes()
    for name in ("checkpoint.safetensors", "history.jsonl", "model.safetensors", "model.json", "result.json"):
        (fitted / name).unlink()
    assert unnorm("fit", "--resume", fitted) == 0
    assert (fitted / "model.safetensors").read_bytes() == whole


def test_a_refused_extension_leaves_the_run_resumable(capsys):
    path = table("t.csv", points())
    assert unnorm("fit", path, *SMALL, "--out", "run") == 0  # cosine: it cannot be extended
    assert unnorm("fit", "--resume", "run", "--steps", "90") == 2
    assert "it cannot resume with 90" in capsys.readouterr().err
    assert unnorm("fit", "--resume", "run") == 0


def test_reordered_columns_of_a_nameless_table(capsys):
    """Columns chosen by place are found again by place, in the file and in our own samples."""
    np.save("t.npy", points(d=2) * np.array([1.0, 1000.0]))
    assert unnorm("fit", "t.npy", *SMALL, "--columns", "1,0", "--out", "run", "--json") == 0
    fitted_nll = json.loads(capsys.readouterr().out)["train_nll"]
    assert unnorm("score", "run", "t.npy", "--json") == 0
    assert abs(json.loads(capsys.readouterr().out)["nll"] - fitted_nll) < 0.5
    for name in ("s.csv", "s.npy"):
        assert unnorm("sample", "run", "-n", "200", "--out", name) == 0
        capsys.readouterr()
        assert unnorm("score", "run", name, "--json") == 0
        assert abs(json.loads(capsys.readouterr().out)["nll"] - fitted_nll) < 0.5


def test_scores_that_are_not_finite_are_mentioned(fitted, capsys):
    table("far.csv", np.array([[100.0, 100.0, 100.0], [1e300, 0.0, 0.0]]))
    assert unnorm("score", fitted, "far.csv") == 0
    assert "1 rows have no finite log density, the first is row 2" in capsys.readouterr().err


def test_few_distinct_values_are_not_trusted(capsys):
    rng = np.random.default_rng(0)
    assert unnorm("fit", table("t.csv", rng.integers(0, 2, (300, 2)).astype(float)), *SMALL) == 0
    assert "2 columns repeat values" in capsys.readouterr().out


def test_too_little_memory_is_one_line(capsys, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000000 bytes")

    monkeypatch.setattr("unnorm.jobs.run", full)
    assert unnorm("fit", "moons") == 2
    assert "Not enough memory: " in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::unnorm.errors.ShrinkageWarning")
def test_a_copied_column_is_not_trusted(capsys):
    x = points(d=2)
    assert unnorm("fit", table("t.csv", np.column_stack([x, x[:, 0]])), *SMALL) == 0
    assert "linear function of the others" in capsys.readouterr().out


def test_extension_is_remembered(capsys):
    path = table("t.csv", points())
    short = [*SMALL[:2], "--n-importance", "2000", "--schedule", "constant", "--steps", "20", "--out", "run"]
    assert unnorm("fit", path, *short) == 0
    assert unnorm("fit", "--resume", "run", "--steps", "40") == 0
    capsys.readouterr()
    assert unnorm("fit", "--resume", "run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 40


def test_samples_of_a_nameless_table_can_be_scored(capsys):
    np.save("t.npy", 1.7e9 + points(d=2))
    assert unnorm("fit", "t.npy", *SMALL, "--out", "run") == 0
    assert unnorm("sample", "run", "-n", "50", "--out", "s.csv") == 0
    capsys.readouterr()
    assert unnorm("score", "run", "s.csv") == 0
    assert len(capsys.readouterr().out.splitlines()) == 50
    assert len(np.unique(np.loadtxt("s.csv", delimiter=",", skiprows=1)[:, 0])) == 50


def test_awkward_names(capsys):
    names = ["$^$", '"a, b"', "[bold]x"]
    np.savetxt("t.csv", points(), delimiter=",", header=",".join(names), comments="")
    assert unnorm("fit", "t.csv", *SMALL, "--out", "r[bold]un") == 0
    assert "r[bold]un" in capsys.readouterr().out
    assert unnorm("sample", "r[bold]un", "-n", "20", "--out", "s.csv") == 0
    assert unnorm("score", "r[bold]un", "s.csv") == 0


def test_improper_density_is_not_trusted(capsys):
    """A plain network after a few steps does not fall off: its integral is infinite, and the verdict says so."""
    assert unnorm("fit", "moons", "--n", "2000", "--model", "mlp", "--activation", "tanh", *SMALL) == 0
    assert "Verdict: DISTRUST" in capsys.readouterr().out


def test_changed_data_cannot_be_resumed(fitted, capsys):
    table("t.csv", points(seed=5))
    assert unnorm("fit", "--resume", fitted) == 2
    assert "The data changed since this run was started" in capsys.readouterr().err


def test_diverging_run_says_so(capsys):
    arguments = ["--lr", "1e20", "--optimizer", "sgd", "--steps", "50", "--schedule", "constant"]
    assert unnorm("fit", table("t.csv", points()), *SMALL[:2], *arguments) == 1
    captured = capsys.readouterr()
    assert "At step" in captured.err
    assert captured.err.count("\n") == 1


def test_ctrl_c_says_how_to_resume(tmp_path):
    """A real process, a real signal, and the command it prints works."""
    import signal
    import time

    table("t.csv", points())
    environment = importable()
    command = [sys.executable, "-m", "unnorm"]
    arguments = ["fit", "t.csv", "--hidden", "16,16", "--steps", "200000", "--schedule", "constant", "--out", "run"]
    process = subprocess.Popen([*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (Path("run/history.jsonl").exists() and Path("run/history.jsonl").stat().st_size > 2000):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Continue with: unnorm fit --resume run" in errors
    assert errors.count("\n") == 1
    records = Path("run/history.jsonl").read_text().splitlines()
    step = json.loads(records[-1])["step"]
    assert unnorm("fit", "--resume", "run", "--steps", step + 50) == 0


DIVERGING = ["fit", "8gaussians", "--estimator", "cd", "--step-size", "0.3", "--model", "mlp", "--steps", "120"]


def test_strict_stops_a_diverging_run(capsys):
    assert unnorm(*DIVERGING, "--hidden", "64,64", "--lr", "0.01", "--strict") == 1
    said = capsys.readouterr().err
    assert "unnorm: error: At step" in said
    assert "Leave out the fixed step size" in said


@pytest.mark.filterwarnings("default::unnorm.errors.HealthWarning")
def test_a_diverging_run_is_not_trusted(capsys):
    """Not told to stop, it goes on, says so once for each cause, and the verdict remembers.

    The rate is the one that `test_strict_stops_a_diverging_run` stops at; at 0.003 a run in three is warned of.
    """
    unnorm(*DIVERGING, "--hidden", "64,64", "--lr", "0.01")
    said = capsys.readouterr().err
    result = json.loads(Path("runs/8gaussians/result.json").read_text())
    assert result["verdict_level"] != "TRUST"
    assert "the health monitor warned in training (at step" in result["verdict"]
    causes = {line.split(", ")[1].split(":")[0] for line in result["warnings"]}
    assert len(result["warnings"]) == len(causes) >= 2
    assert said.count("unnorm: warning: At step") == len(causes)


def test_sample_says_how_good_it_is(capsys):
    unnorm("fit", table("t.csv", points()), *SMALL)
    capsys.readouterr()
    assert unnorm("sample", "runs/t", "-n", "50", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["ess"]) == ("resampled", 50)
    assert unnorm("sample", "runs/t", "-n", "50", "--out", "s.csv") == 0
    assert "50 independent draws of the noise, chosen by their weights" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, which no test changes."""
    home = tmp_path_factory.mktemp("run")
    path = table(home / "t.csv", points(d=4), "abcd")
    assert unnorm("fit", path, *SMALL, "--out", home / "run") == 0
    return home / "run"


class TestDiagnose:
    def test_says_which_rung_and_why(self, run, capsys):
        assert unnorm("diagnose", run) == 0
        out = capsys.readouterr().out
        for phrase in (
            "log Z as saved",
            "the run's own 30 test rows",
            "rung 1: importance",
            "(enough): stderr",
            "log Z by importance, trusted",
            "Verdict: ",
        ):
            assert phrase in out

    def test_json_holds_the_same(self, run, capsys):
        assert unnorm("diagnose", run, "--json", "--seed", "1") == 0
        first = capsys.readouterr().out
        found = json.loads(first)
        assert (found["rung"], found["trusted"], found["doubts"]) == ("importance", True, [])
        assert abs(found["log_z"]["importance"]["value"] - found["saved"]["value"]) < 0.1
        assert unnorm("diagnose", run, "--json", "--seed", "1") == 0
        assert capsys.readouterr().out == first

    def test_rows_of_another_file(self, run, capsys):
        assert unnorm("diagnose", run, "--data", table("new.csv", points(d=4, seed=5), "abcd")) == 0
        assert "300 rows of 'new.csv'" in capsys.readouterr().out

    def test_without_the_data(self, run, capsys):
        shutil.copytree(run, "copy")
        (run.parent / "t.csv").rename(run.parent / "gone.csv")
        try:
            assert unnorm("diagnose", "copy") == 0
        finally:
            (run.parent / "gone.csv").rename(run.parent / "t.csv")
        assert "no data (" in capsys.readouterr().out

    def test_a_log_z_nobody_can_find_is_distrusted(self, run, capsys):
        density = Density.load(run)
        with torch.no_grad():
            next(part for part in density.model.net.modules() if isinstance(part, torch.nn.Linear)).weight.mul_(300)
        density.save("broken")
        assert unnorm("diagnose", "broken", "--evaluations", "20000", "-n", "2000", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["verdict_level"], found["trusted"]) == ("DISTRUST", False)
        assert found["doubts"]

    def test_mistakes_are_one_line(self, run, capsys):
        assert unnorm("diagnose", "nowhere") == 2
        assert unnorm("diagnose", run, "--data", "nowhere.csv") == 2
        assert unnorm("diagnose", run, "--stderr", "0") == 2
        assert unnorm("diagnose", run, "--seed", "-1") == 2
        assert len(capsys.readouterr().err.splitlines()) == 4
