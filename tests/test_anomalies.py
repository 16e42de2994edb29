"""`unnorm anomalies`: ranked rows, the columns behind them, curves; and PyOD's contract."""

import csv
import json

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score

from unnorm.cli import main


def unnorm(*arguments):
    try:
        main([str(one) for one in arguments])
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.fixture
def table(tmp_path):
    """300 rows of three columns and labels; in 6 of them one column is far off, each time another."""
    rng = np.random.RandomState(0)
    x = rng.standard_normal((300, 3)) * [1.0, 10.0, 0.1] + [0.0, 100.0, 5.0]
    y = np.zeros(300)
    for k in range(6):
        x[k * 40, k % 3] += 9 * [1.0, 10.0, 0.1][k % 3]
        y[k * 40] = 1
    path = tmp_path / "t.csv"
    np.savetxt(path, np.c_[x, y], delimiter=",", header="a,b,c,fraud", comments="")
    return path


def ranked(folder):
    with (folder / "anomalies.csv").open() as file:
        return list(csv.DictReader(file))


def width(path):
    with Image.open(path) as image:
        return image.size[0]


class TestCommand:
    def test_ranks_rows_and_names_columns(self, table, tmp_path, capsys):
        out = tmp_path / "out"
        assert unnorm("anomalies", table, "--columns", "a,b,c", "--contamination", "0.02", "--out", out) == 0
        assert "300 rows, 6 called anomalies" in capsys.readouterr().out
        rows = ranked(out)
        assert [row["rank"] for row in rows] == [str(k) for k in range(1, 301)]
        far = {1 + 40 * k: "abc"[k % 3] for k in range(6)}
        assert far.keys() <= {int(row["row"]) for row in rows[:10]}
        for row in rows[:10]:
            if int(row["row"]) in far:
                assert row["because"].split(" ")[0] == far[int(row["row"])]
        assert [row["anomaly"] for row in rows] == ["1"] * 6 + ["0"] * 294
        surprise = [float(row["surprise"]) for row in rows]
        assert surprise == sorted(surprise, reverse=True)
        assert not (out / "curves.png").exists()
        assert width(out / "scores.png") > 300

    def test_labels_are_measured_and_not_fitted_to(self, table, tmp_path, capsys):
        out = tmp_path / "out"
        assert unnorm("anomalies", table, "--labels", "fraud", "--out", out, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        rows = ranked(out)
        labels, scores = ([float(row[name]) for row in rows] for name in ("label", "surprise"))
        assert found["metrics"]["auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-3)
        assert found["metrics"]["aupr_out"] == pytest.approx(average_precision_score(labels, scores), abs=1e-3)
        assert len(found["anomalies"]) == 6  # as many as the labels have
        assert width(out / "curves.png") > 300
        page = (out / "anomalies.md").read_text()
        assert "| AUROC | " in page
        assert "fraud" not in page.split("## The most unusual rows")[1]
        alone = tmp_path / "alone"
        assert unnorm("anomalies", table, "--columns", "a,b,c", "--out", alone) == 0
        assert [row["surprise"] for row in ranked(alone)] == [row["surprise"] for row in rows]

    def test_labels_of_an_archive(self, table, tmp_path):
        values = np.loadtxt(table, delimiter=",", skiprows=1)
        np.savez(tmp_path / "t.npz", X=values[:, :3], y=values[:, 3])
        assert unnorm("anomalies", tmp_path / "t.npz", "--labels", "y", "--out", tmp_path / "out") == 0
        assert (tmp_path / "out" / "curves.png").exists()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--contamination", "0.7"], "The --contamination must be above 0 and at most 0.5. Got 0.7."),
            (["--labels", "a"], "The labels 'a' must be 0 (usual) and 1 (an anomaly), and both must occur."),
            (["--labels", "frau"], "Did you mean 'fraud'?"),
            (["--columns", "a,x"], "Unknown column 'x'"),
        ],
    )
    def test_wrong_options_are_answered_in_one_line(self, table, tmp_path, capsys, arguments, words):
        assert unnorm("anomalies", table, *arguments, "--out", tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert words in said
        assert len(said.strip().splitlines()) == 1

    def test_values_stand_beside_the_ranks(self, table, tmp_path):
        values = np.loadtxt(table, delimiter=",", skiprows=1)
        assert unnorm("anomalies", table, "--exclude", "fraud,b", "--out", tmp_path / "out") == 0
        for row in ranked(tmp_path / "out"):
            np.testing.assert_allclose([float(row["a"]), float(row["c"])], values[int(row["row"]) - 1, [0, 2]])
            assert "b" not in row

    def test_constant_columns_are_called_by_name_and_are_no_reason(self, table, tmp_path, capsys):
        values = np.loadtxt(table, delimiter=",", skiprows=1)
        path = tmp_path / "k.csv"
        np.savetxt(path, np.c_[values[:, :2], np.full(300, 3.0)], delimiter=",", header="a,b,k", comments="")
        assert unnorm("anomalies", path, "--out", tmp_path / "out") == 0
        assert "1 of 3 columns are constant and are left out: k." in capsys.readouterr().err
        assert not any("k (" in row["because"] for row in ranked(tmp_path / "out"))

    def test_rows_without_a_label_can_be_left_out(self, table, tmp_path, capsys):
        lines = table.read_text().splitlines()
        lines[5] = lines[5].rsplit(",", 1)[0] + ","
        table.write_text("\n".join(lines) + "\n")
        assert unnorm("anomalies", table, "--labels", "fraud", "--out", tmp_path / "out") == 2
        assert "--drop-nonfinite" in capsys.readouterr().err
        assert unnorm("anomalies", table, "--labels", "fraud", "--drop-nonfinite", "--out", tmp_path / "out") == 0
        assert len(ranked(tmp_path / "out")) == 299

    def test_bad_tables(self, tmp_path, capsys):
        for name, text, words in (
            ("equal.csv", "a,b\n" + "1,2\n" * 20, "All 2 columns are constant"),
            ("words.csv", "a,b\n1,x\n2,y\n", "Column 'b' of 'words.csv' is not numeric"),
            ("nan.csv", "a,b\n1,2\n3,\n4,5\n", "are NaN or infinite"),
        ):
            (tmp_path / name).write_text(text)
            assert unnorm("anomalies", tmp_path / name, "--out", tmp_path / "out") == 2
            assert words in capsys.readouterr().err

    def test_nothing_of_others_is_replaced(self, table, tmp_path, capsys):
        out = tmp_path / "out"
        assert unnorm("anomalies", table, "--columns", "a", "--out", out) == 0
        assert unnorm("anomalies", table, "--columns", "a", "--out", out) == 2
        assert "Use --force" in capsys.readouterr().err
        assert unnorm("anomalies", table, "--columns", "a", "--out", out, "--force") == 0
        other = tmp_path / "other"
        other.mkdir()
        (other / "anomalies.csv").write_text("mine")
        assert unnorm("anomalies", table, "--columns", "a", "--out", other, "--force") == 2
        assert (other / "anomalies.csv").read_text() == "mine"


def test_pyods_contract(table):
    pytest.importorskip("pyod", reason="needs pip install 'unnorm[pyod]'")
    from unnorm.pyod import EnergyOD

    values = np.loadtxt(table, delimiter=",", skiprows=1)
    x, y = values[:, :3], values[:, 3]
    detector = EnergyOD(contamination=0.02, random_state=0).fit(x)
    assert detector.decision_scores_.shape == (300,)
    assert detector.labels_.sum() == 6
    assert roc_auc_score(y, detector.decision_scores_) > 0.98
    assert ((detector.decision_scores_ > detector.threshold_) == (detector.labels_ == 1)).all()
    np.testing.assert_allclose(detector.decision_function(x), detector.decision_scores_)
    probability = detector.predict_proba(x)
    np.testing.assert_allclose(probability.sum(1), 1.0)
    assert roc_auc_score(y, probability[:, 1]) > 0.98
    assert (detector.predict(x) == detector.labels_).all()


def test_pyods_contract_before_fitting():
    pytest.importorskip("pyod", reason="needs pip install 'unnorm[pyod]'")
    from sklearn.exceptions import NotFittedError

    from unnorm.pyod import EnergyOD

    with pytest.raises(NotFittedError):
        EnergyOD(verbose=False).decision_function(np.zeros((3, 2)))
