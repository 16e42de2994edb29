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
from unnorm.folders import read_json, sealed

SMALL = ["--hidden", "16,16", "--steps", "60", "--n-importance", "2000"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def unnorm(*arguments):
    """Run a command; its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


def fits(*arguments, folder=Path("runs/t")):
    """Fit; check that the exit code is what the verdict says, and return what the run's folder holds."""
    code = unnorm("fit", *arguments)
    result = json.loads((folder / "result.json").read_text())
    assert code == (3 if result["verdict_level"] == "DISTRUST" else 0)
    return result


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
        result = fits(path, *SMALL)
        out = capsys.readouterr().out
        for phrase in ("test NLL", "log Z, importance"):
            assert phrase in out
        assert "log Z, grid" in out or width > 2
        folder = Path("runs/t")
        expected = {
            "model.safetensors",
            "model.json",
            "table.json",
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
        assert f"Verdict: {result['verdict_level']}\n" in out
        assert f"**{result['verdict_level']}**" in report
        assert set(result["verdict"]) == {"level", "log Z", "Fit", "Samples"}
        lines = out.split("Verdict: ")[1].splitlines()[1:]
        for part, line in zip(("log Z", "Fit", "Samples"), lines, strict=True):
            level, text = result["verdict"][part]
            assert line.split(maxsplit=len(part.split())) == [*part.split(), f"{level:<9} {text}."]
            assert f"- **{part}: {level}.** {text}." in report

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
            result.pop("folder"), result.pop("fit_seconds"), result.pop("seconds")
        assert results[0] == results[1]

    def test_units_of_the_data(self, capsys, monkeypatch):
        """Scaling every column by 1000 adds d log 1000 to the NLL and nothing else.

        The content of a row decides whether it is a test row: here the rows keep their places, scaled or not.
        """
        monkeypatch.setattr("unnorm.tables.fit.order_of_rows", lambda x, *_: (np.arange(len(x)), np.ones(len(x), bool)))
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
        fits(table("t.csv", points()), *SMALL, *options)

    def test_rows_and_columns_are_left_out(self, capsys):
        """Rows with a missing cell and constant columns, each with a line; rows with infinity where that is asked."""
        values = points()
        values[5, 1], values[:, 2] = np.nan, 4.0
        path = table("t.csv", values)
        rows = fits(path, *SMALL)["rows"]
        captured = capsys.readouterr()
        assert captured.err.splitlines() == [
            "unnorm: 1 row with a missing cell is left out of 300.",
            "unnorm: 1 of 3 columns is constant and left out: c.",
        ]
        assert "rows left out                1 (a missing cell)" in captured.out
        assert (rows["train"] + rows["validation"] + rows["test"], rows["dropped"]) == (299, 1)
        assert json.loads(Path("runs/t/config.json").read_text())["rows"] == 299
        values[7, 0] = np.inf
        table("t.csv", values)
        assert unnorm("fit", path, *SMALL, "--out", "two") == 2
        assert "Row 8 has an infinite value in column 'a'. Leave such rows out with --drop" in capsys.readouterr().err
        rows = fits(path, *SMALL, "--drop-nonfinite", "--out", "two", folder=Path("two"))["rows"]
        assert (rows["train"] + rows["validation"] + rows["test"], rows["dropped"]) == (298, 2)

    def test_scores_of_rows_with_missing_cells(self, capsys):
        """One line for each row of the file, nan where a cell is missing; what is said counts the others."""
        values = points()
        fits(table("t.csv", values), *SMALL, "--columns", "a,b")
        capsys.readouterr()
        assert unnorm("score", "runs/t", "t.csv") == 0
        whole = [float(line) for line in capsys.readouterr().out.splitlines()]
        values[5, 1], values[8, 2] = np.nan, np.nan
        table("new.csv", values)
        assert unnorm("score", "runs/t", "new.csv") == 0
        captured = capsys.readouterr()
        found = [float(line) for line in captured.out.splitlines()]
        assert np.flatnonzero(np.isnan(found)).tolist() == [5]
        np.testing.assert_array_equal(np.delete(found, 5), np.delete(whole, 5))
        assert "unnorm: 1 of 300 rows has a missing cell: its log density is nan." in captured.err
        assert f"299 rows, NLL {-np.nanmean(found):.4f}" in captured.err
        assert unnorm("score", "runs/t", "new.csv", "--json") == 0
        plain = json.loads(capsys.readouterr().out)
        assert (plain["n"], plain["missing"], plain["log_prob"][5]) == (299, 1, None)
        values[7, 0] = -np.inf
        table("new.csv", values)
        assert unnorm("score", "runs/t", "new.csv") == 2
        assert "Row 8 has an infinite value in column 'a'" in capsys.readouterr().err
        assert unnorm("score", "runs/t", "new.csv", "--drop-nonfinite", "--out", "o.csv") == 0
        assert "2 of 300 rows have a missing cell" in capsys.readouterr().err
        assert np.flatnonzero(np.isnan(np.genfromtxt("o.csv", skip_header=1))).tolist() == [5, 7]

    def test_columns_can_be_chosen_or_excluded(self):
        """To the last bit the same."""
        path = table("t.csv", points())
        found = []
        for place, choice in enumerate((("--columns", "a,c"), ("--exclude", "b"), ("--exclude", "1"))):
            folder = Path(f"run{place}")
            fits(path, *SMALL, *choice, "--out", folder, folder=folder)
            found.append((folder / "model.safetensors").read_bytes())
        assert found[1:] == found[:1] * 2

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
        assert unnorm("fit", "power.npy", "--hidden", "32,32", "--noise", "gaussian", "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["noise_nll"] - result["test_nll"] > 2 * result["gain_stderr"]


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
        outputs, said = [], []
        for name in ("t.csv", "shuffled.csv"):
            assert unnorm("score", fitted, name) == 0
            captured = capsys.readouterr()
            outputs.append(captured.out), said.append(captured.err.splitlines())
        assert outputs[0] == outputs[1]
        assert said[1] == ["unnorm: columns that the model was not fitted on are ignored: x.", *said[0]]

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
    "a word among numbers": (
        ["fit", "words.csv"],
        "Column 'b' of 'words.csv' is not numeric: line 3 has 'red'. Most of its other cells are numbers. "
        "Leave it out with --exclude b",
    ),
    "decimal commas": (["fit", "commas.csv"], "Decimal commas are not read: write 1.5 for 1,5. Leave it out with"),
    "dates": (
        ["fit", "dates.csv"],
        "Column 'day' holds dates or times, which are not modelled yet. Leave it out with --exclude day",
    ),
    "infinity": (["fit", "infinite.csv"], "Row 2 has an infinite value in column 'b'. Leave such rows out with --drop"),
    "missing everywhere": (["fit", "missing.csv"], "Every row has a missing cell: nothing is left to fit"),
    "empty column": (["fit", "hollow.csv"], "Column 'b' has no value at all. Leave it out with --exclude b"),
    "few rows are left": (["fit", "holes.csv"], "'holes.csv' has 6 rows; fitting and testing a density takes at least"),
    "constant": (["fit", "constant.csv"], "No column of the 2 varies: there is no density to fit"),
    "an option that is gone": (["fit", "t.csv", "--drop-constant"], "--drop-constant"),
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
    "test share": (["fit", "t.csv", "--test", "1.5"], "'test' share must be at least 0 and below 1. Got 1.5"),
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
    "excluded": (["fit", "t.csv", "--exclude", "a,z"], "Unknown column 'z'"),
    "all excluded": (["fit", "t.csv", "--exclude", "a,b,c"], "All columns are excluded."),
    "resume nothing": (["fit", "--resume", "taken"], "There is no run to resume at 'taken'"),
    "resume and options": (["fit", "t.csv", "--resume", "taken", "--lr", "3"], "leave out data, lr"),
    "seed": (["fit", "t.csv", "--seed", "-1"], "'seed' of Training must be"),
    "pl and gamma": (["fit", "t.csv", "--schedule", "pl", "--gamma", "0.2"], "sets gamma and beta itself"),
    "pl and beta": (["fit", "t.csv", "--schedule", "pl", "--beta", "0.2"], "sets gamma and beta itself"),
    "pl and umax": (["fit", "t.csv", "--schedule", "pl", "--tracker", "umax"], "tracker 'ema'. Got 'umax'"),
    "pl mu": (["fit", "t.csv", "--schedule", "pl", "--mu", "0"], "'mu' must be positive"),
    "huge": (["fit", "huge.csv"], "Column 'b' reaches from -1.19e+308 to 1.2e+308: rescale it toward 1."),
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
    write("words.csv", "a,b\n1,2\n3,red\n" + "5,6\n7,8\n" * 10)
    write("commas.csv", "a;b\n" + "1,5;2\n2,5;3\n" * 10)
    write("dates.csv", "a,day\n" + "".join(f"{k},2024-01-{k}\n" for k in range(10, 30)))
    write("infinite.csv", "a,b\n1,2\n3,inf\n" + "5,6\n7,8\n" * 10)
    write("missing.csv", "a,b\n" + "1,\n,2\n" * 10)
    write("hollow.csv", "a,b\n" + "1,\n2,\n" * 10)
    write("holes.csv", "a,b\n" + "1,\n" * 20 + "1,2\n2,3\n" * 3)
    write("constant.csv", "a,b\n" + "5,red\n" * 20)
    Path("taken").mkdir()
    write("taken/notes.txt", "mine")
    write("huge.csv", "a,b\n" + "".join(f"{k},{(-1) ** k * (1 + k / 100)}e308\n" for k in range(1, 21)))
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
        (["score", "run", "wide.csv"], "'wide.csv' has 4 columns; the model was fitted on 3 (a, b, c)"),
        (["score", "run", "renamed.csv"], "'renamed.csv' lacks columns that the model was fitted on: 'a', 'c'."),
        (
            ["score", "run", "infinite.csv"],
            "Row 2 has an infinite value in column 'c'. Leave such rows out with --drop",
        ),
        (["score", "run", "words.csv"], "Column 'b' of 'words.csv' is not numeric: line 2 has 'red'. The model was"),
        (["sample", "run", "-n", "3", "--seed", "-1"], "seed must be an integer from 0"),
        (["sample", "run", "-n", "0"], "at least 1. Got 0"),
        (["sample", "run", "-n", "3", "--out", "t.csv"], "'t.csv' exists. Use --force"),
        (["sample", "run", "-n", "3", "--out", "s.txt"], "must be a .csv or .npy file"),
    ],
)
def test_mistakes_with_a_model(fitted, arguments, message, capsys):
    np.savetxt("narrow.csv", points(d=2), delimiter=",")
    np.savetxt("wide.csv", points(d=4), delimiter=",")
    table("renamed.csv", points(), "xby")
    write("infinite.csv", "a,b,c\n1,2,3\n1,2,-inf\n")
    write("words.csv", "a,b,c\n1,red,3\n1,2,3\n")
    assert unnorm(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
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
@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("result.json", ["info", "run"]),
        ("config.json", ["fit", "--resume", "run"]),
        ("table.json", ["score", "run", "t.csv"]),
        ("table.json", ["sample", "run"]),
        ("table.json", ["diagnose", "run"]),
    ],
)
def test_damaged_files_are_one_line(fitted, capsys, file, command, content):
    (fitted / file).write_text(content)
    assert unnorm(*command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{file}' " in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [[1]], {"level": "TRUST"}], ids=str)
@pytest.mark.parametrize("field", ["columns", "bounds", "verdict", "result", "density"])
def test_a_forged_table_is_one_line(fitted, capsys, field, value):
    """Of the right form and with a digest that is right, but of nonsense."""
    facts = read_json(fitted / "table.json", set())
    (fitted / "table.json").write_bytes(sealed(facts | {field: value}))
    codes = {unnorm("score", fitted, "t.csv"), unnorm("sample", fitted, "-n", "5")}
    if field == "result" and isinstance(value, dict):  # numbers for a person, which neither command needs
        assert codes == {0}
        return
    assert codes == {2}
    captured = capsys.readouterr()
    assert "table.json' " in captured.err
    assert captured.err.count("\n") == 2


def test_a_damaged_configuration_hides_only_the_rows(fitted, capsys):
    (fitted / "config.json").write_text("{}")
    assert unnorm("diagnose", fitted) == 0
    assert "checked with no rows of the data ('run/config.json' was edited" in capsys.readouterr().out


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
    before = Path("run/config.json").read_bytes()
    capsys.readouterr()
    assert unnorm("fit", "--resume", "run", "--steps", "90") == 2
    assert "it cannot resume with 90" in capsys.readouterr().err
    assert Path("run/config.json").read_bytes() == before
    assert unnorm("fit", "--resume", "run") == 0


@pytest.mark.parametrize(
    ("width", "choice"),
    [
        (2, ["--columns", "1,0"]),
        (3, ["--columns", "1,0"]),
        (3, ["--columns", "2,0"]),
        (3, ["--exclude", "2"]),
        (3, ["--exclude", "0"]),
    ],
)
def test_columns_of_a_nameless_table(width, choice, capsys):
    """Columns chosen by place are found again by place, in the file and in our own samples."""
    np.save("t.npy", points(d=width) * 1000.0 ** np.arange(width))
    assert unnorm("fit", "t.npy", *SMALL, *choice, "--out", "run", "--json") == 0
    fitted_nll = json.loads(capsys.readouterr().out)["train_nll"]
    assert unnorm("score", "run", "t.npy", "--json") == 0
    assert abs(json.loads(capsys.readouterr().out)["nll"] - fitted_nll) < 0.5
    for name in ("s.csv", "s.npy"):
        assert unnorm("sample", "run", "-n", "200", "--out", name) == 0
        capsys.readouterr()
        assert unnorm("score", "run", name, "--json") == 0
        assert abs(json.loads(capsys.readouterr().out)["nll"] - fitted_nll) < 0.5


def test_scores_that_are_not_finite_are_mentioned(capsys):
    """Between the integers of a column that has nothing else the density is zero."""
    values = points(d=2)
    values[:, 1] = np.arange(300) % 7
    fits(table("t.csv", values), *SMALL)
    table("new.csv", np.array([[100.0, 3.0], [100.0, 2.5], [100.0, 12.0]]))
    capsys.readouterr()
    assert unnorm("score", "runs/t", "new.csv") == 0
    captured = capsys.readouterr()
    found = [float(line) for line in captured.out.splitlines()]
    assert np.isfinite(found).tolist() == [True, False, True]
    assert "unnorm: warning: 1 row has no finite log density, row 2." in captured.err
    assert f"2 rows, NLL {-(found[0] + found[2]) / 2:.4f}" in captured.err


def test_far_rows_have_a_density(fitted, capsys):
    table("far.csv", np.array([[100.0, 100.0, 100.0], [1e300, 0.0, 0.0]]))
    assert unnorm("score", fitted, "far.csv") == 0
    near, far = map(float, capsys.readouterr().out.splitlines())
    assert -np.inf < far < near - 1000


@pytest.mark.parametrize("scale", [1e-300, 1e200])
def test_numbers_of_any_size(scale, capsys):
    result = fits(table("t.csv", scale * points(d=1)), *SMALL)
    normal = 0.5 * np.log(2 * np.pi * np.e) + np.log((points(d=1) / 100).std()) + np.log(100 * scale)
    assert abs(result["test_nll"] - normal) < 4 * result["test_stderr"] + 0.05


def test_few_distinct_values_have_probabilities(capsys):
    """Four kinds of rows: copies go to all parts, and the probabilities are the shares, with their own error."""
    rows = np.random.default_rng(0).integers(0, 2, (300, 2)).astype(float)
    result = fits(table("t.csv", rows), *SMALL)
    kinds = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    table("kinds.csv", kinds)
    capsys.readouterr()
    assert unnorm("score", "runs/t", "kinds.csv") == 0
    found = np.exp([float(line) for line in capsys.readouterr().out.splitlines()])
    shares = np.array([(rows == kind).all(1).mean() for kind in kinds])
    assert found.sum() == pytest.approx(1, abs=0.02)  # one row in 302 for values that did not occur, in each column
    assert (np.abs(found - shares) < 4 * np.sqrt(shares * (1 - shares) / 300) + 0.01).all()
    assert abs(result["test_nll"] - 2 * np.log(2)) < 4 * result["test_stderr"] + 0.05


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
    assert unnorm("fit", "moons", "--n", "2000", "--model", "mlp", "--activation", "tanh", *SMALL) == 3
    out = capsys.readouterr().out
    assert "Verdict: DISTRUST" in out
    assert "log Z    DISTRUST" in out


def test_changed_data_cannot_be_resumed(fitted, capsys):
    table("t.csv", points(seed=5))
    assert unnorm("fit", "--resume", fitted) == 2
    assert "The data changed since this run was started" in capsys.readouterr().err


DIVERGED = ["--lr", "1e20", "--optimizer", "sgd", "--steps", "50", "--schedule", "constant"]


def test_a_run_that_diverged_keeps_the_noise(capsys):
    """Its density is the noise alone, which the verdict and the exit code say, also when they are asked later."""
    result = fits(table("t.csv", points()), *SMALL[:2], *DIVERGED)
    level, text = result["verdict"]["Fit"]
    assert level == "DISTRUST"
    assert text.startswith("training was given up, and the noise alone is the density: At step ")
    assert not text.endswith(".")
    assert (result["test_nll"], result["steps"]) == (pytest.approx(result["noise_nll"], abs=1e-6), 0)
    assert result["verdict"]["log Z"][0] == "TRUST"
    assert unnorm("diagnose", "runs/t") == 3
    assert unnorm("info", "runs/t") == 0
    assert capsys.readouterr().out.count("Fit      DISTRUST  training was given up") == 3


@pytest.mark.parametrize("option", [["--strict"], ["--model", "mlp"]])
def test_a_diverging_run_says_so(option, capsys):
    """Where it is told to stop, and where there is no noise to fall back on."""
    assert unnorm("fit", table("t.csv", points()), *SMALL[:2], *DIVERGED, *option) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unnorm: error: At step" in captured.err
    assert captured.err.count("\n") == 1
    assert not Path("runs/t/table.json").exists()


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


@pytest.mark.parametrize("iterate", ["last", "best"])
def test_a_diverging_run_is_not_trusted(iterate, capsys):
    """Not told to stop, it goes on, says so once for each cause, and the verdict remembers.

    What was said after the step that is kept does not count: of the best iterate, here the one before all training.
    The rate is the one that `test_strict_stops_a_diverging_run` stops at; at 0.003 a run in three is warned of.
    """
    assert unnorm(*DIVERGING, "--hidden", "64,64", "--lr", "0.01", "--iterate", iterate) == 3
    said = capsys.readouterr().err
    result = json.loads(Path("runs/8gaussians/result.json").read_text())
    assert result["verdict"]["Fit"][0] == "DISTRUST"
    causes = [line.split(":")[0] for line in result["health"]]
    assert len(causes) == len({cause.split(", ")[1] for cause in causes}) >= 2
    for cause in causes:
        assert said.count(f"unnorm: {cause}: ") == (iterate == "last")
        assert (f"the health monitor warned ({cause.lower()})" in result["verdict"]["Fit"][1]) == (iterate == "last")


def test_sample_says_how_good_it_is(capsys):
    fits(table("t.csv", points()), *SMALL)
    capsys.readouterr()
    assert unnorm("sample", "runs/t", "-n", "50", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["ess"], found["r_hat"]) == ("rejection", 50, None)
    assert unnorm("sample", "runs/t", "-n", "50", "--out", "s.csv") == 0
    assert "50 independent draws, draws of the noise kept by rejection" in capsys.readouterr().err


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
            "the run's own 84 held-out and 216 training rows",
            "rung 1: importance",
            "(enough): stderr",
            "log Z by importance, trusted",
            "Verdict: TRUST",
        ):
            assert phrase in out
        assert "no rows" not in out

    def test_the_verdict_has_the_runs_own_fit_and_samples(self, run, capsys):
        assert unnorm("diagnose", run, "--json") == 0
        found, before = json.loads(capsys.readouterr().out), json.loads((run / "result.json").read_text())
        for part in ("Fit", "Samples"):
            assert found["verdict"][part] == before["verdict"][part]
        assert found["verdict"]["log Z"][0] == "TRUST"
        assert "known to" in found["verdict"]["log Z"][1]

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
        out = capsys.readouterr().out
        assert "checked with no rows of the data (There is no file '" in out
        assert "log Z    CARE" in out
        assert "rows of the data would settle it" in out
        assert "own" not in out.split("Verdict")[0]

    def test_a_log_z_nobody_can_find_is_distrusted(self, run, capsys):
        density = Density.load(run)
        with torch.no_grad():
            for part in density.model.net.modules():  # of a run that keeps the noise the last layer is zero
                if isinstance(part, torch.nn.Linear):
                    part.weight.copy_(30 * torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(0)))
        density.save("broken")
        assert unnorm("diagnose", "broken", "--evaluations", "20000", "-n", "2000", "--json") == 3
        found = json.loads(capsys.readouterr().out)
        assert (found["verdict_level"], found["trusted"]) == ("DISTRUST", False)
        assert found["doubts"]
        assert unnorm("diagnose", "broken", "--evaluations", "20000", "-n", "2000") == 3
        assert "log Z    DISTRUST  cannot be believed: " in capsys.readouterr().out

    def test_mistakes_are_one_line(self, run, capsys):
        assert unnorm("diagnose", "nowhere") == 2
        assert unnorm("diagnose", run, "--data", "nowhere.csv") == 2
        assert unnorm("diagnose", run, "--stderr", "0") == 2
        assert unnorm("diagnose", run, "--seed", "-1") == 2
        assert len(capsys.readouterr().err.splitlines()) == 4
