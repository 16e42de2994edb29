"""`unnorm anomalies`: ranked rows, the columns behind them, curves; and PyOD's contract."""

import csv
import json
import re

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
        assert "| AUROC: " in page
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
            (["--labels", "a"], "The labels 'a' must be 0 (usual) and 1 (an anomaly). Row 1 has 10.7641, and 299 more"),
            (["--labels", "frau"], "Did you mean 'fraud'?"),
            (["--columns", "a,x"], "Unknown column 'x'"),
            (
                ["--columns", "a,fraud", "--labels", "fraud"],
                "Column 'fraud' holds the labels, which are not fitted to: leave it out of --columns.",
            ),
            (
                ["--columns", "a,b", "--exclude", "b"],
                "Column 'b' is in --columns and in --exclude: leave it out of one of them.",
            ),
            (["--exclude", "0,1,2,3"], "All columns are excluded."),
            (["--device", "gpu"], "Unknown device 'gpu'. Did you mean 'cpu'? Known: auto, cpu, cuda."),
            (["--seed", "-1"], "The --seed must be an integer from 0 to 2^32 - 1. Got -1."),
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
            np.testing.assert_array_equal([float(row[name]) for name in "abc"], values[int(row["row"]) - 1, :3])
            assert "b (" not in row["because"]

    def test_every_column_of_the_file_comes_through(self, table, tmp_path, capsys):
        """Identifiers that are excluded, constant columns, names that are ours too; each cell as it stood."""
        lines = table.read_text().splitlines()
        path, out = tmp_path / "ids.csv", tmp_path / "out"
        head = ["row,input_row,id,k," + lines[0], ""]
        path.write_text(
            "\n".join(head + [f"r-{n:04d},x,{10**17 + n},3.0,{line}" for n, line in enumerate(lines[1:], 1)]) + "\n"
        )
        arguments = ("anomalies", path, "--exclude", "0,1,id", "--labels", "fraud", "--out", out)
        assert unnorm(*arguments) == 0
        said = capsys.readouterr().out
        for row in ranked(out):
            place = int(row["row"])
            assert row["input_input_row"] == f"r-{place:04d}"
            assert row["input_row"] == "x"
            assert row["id"] == str(10**17 + place)
            assert row["k"] == "3.0"
            assert ",".join(row[name] for name in ("a", "b", "c", "fraud")) == lines[place]
        first = int(ranked(out)[0]["row"])  # a header and an empty line stand above
        assert f"row {first} (line {first + 2})" in said
        assert f"row {first} (line {first + 2}) is the most unusual" in (out / "anomalies.md").read_text()

    def test_the_picture_shows_every_row_and_the_threshold(self, table, tmp_path, monkeypatch):
        drawn = []
        from matplotlib.figure import Figure

        monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
        out = tmp_path / "out"
        assert unnorm("anomalies", table, "--exclude", "fraud", "--contamination", "0.02", "--out", out) == 0
        surprise = [float(row["surprise"]) for row in ranked(out)]
        axis = drawn[0].axes[0]
        assert [sum(bar.get_height() for bar in bars) for bars in axis.containers] == [294, 6]
        assert axis.get_xlim()[1] > surprise[0]
        threshold = axis.lines[0].get_xdata()[0]
        assert surprise[6] <= threshold < surprise[5]

    def test_only_columns_that_matter_are_named_and_with_numbers(self, table, tmp_path, capsys):
        lines = table.read_text().splitlines()
        table.write_text("\n".join(['"a, first",b,c,fraud', *lines[1:]]) + "\n")
        out = tmp_path / "out"
        assert unnorm("anomalies", table, "--exclude", "fraud", "--out", out) == 0
        said = capsys.readouterr().out
        rows = ranked(out)
        for row in rows[:20]:
            worths = [float(part) for part in re.findall(r"\((\d+\.\d\d)\)", row["because"])]
            assert worths
            assert worths == sorted(worths, reverse=True)
            assert worths[-1] > 0.1 * worths[0] - 0.01
            assert worths[-1] > 0.02 * float(row["surprise"]) - 0.01
        assert all(row["because"] == "" for row in rows[20:])
        for row in rows[:5]:
            assert f"because of {row['because']}\n" in said
        assert any("a, first (" in row["because"] for row in rows[:20])

    def test_a_row_between_clusters_has_no_single_column(self, tmp_path, capsys):
        rng = np.random.RandomState(0)
        side = np.r_[-np.ones(150), np.ones(150)][:, None]
        x = np.r_[side * 10 + rng.standard_normal((300, 2)), np.zeros((1, 2))]
        path, out = tmp_path / "two.csv", tmp_path / "out"
        np.savetxt(path, x, delimiter=",", header="a,b", comments="")
        assert unnorm("anomalies", path, "--out", out) == 0
        assert 'Where it says "no single column"' in (out / "anomalies.md").read_text()
        row = next(row for row in ranked(out)[:20] if row["row"] == "301")
        assert row["because"] == "no single column"
        assert f"| {row['rank']} | 301 |" in (out / "anomalies.md").read_text()

    def test_what_was_done_is_in_the_json(self, table, tmp_path, capsys):
        """Also how many rows were dropped; and the page and the terminal say so."""
        lines = table.read_text().splitlines()
        for place in (3, 10):
            lines[place] = "," + lines[place].split(",", 1)[1]
        table.write_text("\n".join(lines) + "\n")
        out = tmp_path / "out"
        arguments = ["anomalies", table, "--exclude", "fraud", "--drop-nonfinite", "--seed", "7", "--out", out]
        assert unnorm(*arguments, "--contamination", "0.05") == 0
        words = "2 rows with NaN or infinity were left out."
        assert words in capsys.readouterr().out
        assert words in (out / "anomalies.md").read_text()
        facts = json.loads((out / "anomalies.json").read_text())
        wanted = {"input": str(table), "seed": 7, "contamination": 0.05, "columns": ["a", "b", "c"], "dropped": 2}
        assert wanted.items() <= facts.items()
        assert unnorm(*arguments, "--force", "--json") == 0
        assert json.loads(capsys.readouterr().out)["dropped"] == 2

    def test_page_and_terminal_have_the_same_numbers(self, table, tmp_path, capsys):
        out = tmp_path / "out"
        assert unnorm("anomalies", table, "--labels", "fraud", "--exclude", "fraud", "--out", out) == 0
        said, page = capsys.readouterr().out, (out / "anomalies.md").read_text()
        table_rows = re.findall(r"\| (AUROC|AUPRC|FPR80|FPR95): ([^|]+) \| ([^|]+) \| ([^|]+) \|", page)
        assert len(table_rows) == 4
        for name, meaning, value, chance in table_rows:
            assert f"{name} {value} (by chance {chance}): {meaning}\n" in said
        assert table_rows[0][3].startswith("0.500 ± ")
        surprise = [float(row["surprise"]) for row in ranked(out)]
        assert f"half of these rows have less than {np.median(surprise):.2f}" in page

    @pytest.mark.parametrize(
        ("head", "words"),
        [
            (
                ",a,b",
                "Column 'column0' has no name in the file. If it only names the rows, leave it out with --exclude",
            ),
            ("Unnamed: 0,a,b", "Column 'Unnamed: 0' looks like the index of a data frame."),
            ("id,a,b", "Column 'id' counts the rows. If it only names the rows, leave it out with --exclude id."),
        ],
    )
    def test_an_index_is_pointed_out(self, tmp_path, capsys, head, words):
        rng = np.random.RandomState(0)
        path = tmp_path / "frame.csv"
        np.savetxt(
            path, np.c_[np.arange(60), rng.standard_normal((60, 2))], delimiter=",", header=head, comments="", fmt="%g"
        )
        assert unnorm("anomalies", path, "--out", tmp_path / "out") == 0
        found = capsys.readouterr()
        assert words in found.err
        assert not re.search(r"(because of|;) +\(", found.out)  # no column without a name
        assert unnorm("anomalies", path, "--exclude", "0", "--out", tmp_path / "without") == 0
        assert words not in capsys.readouterr().err

    def test_positions_are_those_in_the_file(self, table, tmp_path, capsys):
        """Also where the labels stand before the column that is meant."""
        lines = [",".join(line.split(",")[::-1]) for line in table.read_text().splitlines()]  # fraud, c, b, a
        table.write_text("\n".join(lines) + "\n")
        out = tmp_path / "out"
        assert unnorm("anomalies", table, "--labels", "0", "--exclude", "1", "--out", out) == 0
        assert json.loads((out / "anomalies.json").read_text())["columns"] == ["b", "a"]

    def test_constant_columns_are_called_by_name_and_are_no_reason(self, table, tmp_path, capsys):
        values = np.loadtxt(table, delimiter=",", skiprows=1)
        path = tmp_path / "k.csv"
        np.savetxt(path, np.c_[values[:, :2], np.full(300, 3.0)], delimiter=",", header="a,b,k", comments="")
        assert unnorm("anomalies", path, "--out", tmp_path / "out") == 0
        assert "1 of 3 columns is constant and left out: k." in capsys.readouterr().err
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
            (
                "words.csv",
                "a,b\n1,x\n2,y\n",
                "Column 'b' of 'words.csv' is not numeric: line 2 has 'x'. Leave it out with --exclude b.",
            ),
            ("several.csv", 'a,b,"c, d"\n1,x,y\n', "'x'. Leave such columns out with --exclude b,2."),
            ("index.csv", ",a,b\n0,1,x\n1,2,y\n", "'x'. Leave it out with --exclude b."),
            ("all.csv", "a,b\nx,y\n", "No numeric column is left."),
            (
                "empty.csv",
                "a,b,c\n1,2,\n3,4,\n",
                "Column 'c' has no finite value at all. Leave it out with --exclude c.",
            ),
            ("nan.csv", "a,b\n1,2\n3,\n4,5\n", "are NaN or infinite"),
        ):
            (tmp_path / name).write_text(text)
            assert unnorm("anomalies", tmp_path / name, "--out", tmp_path / "out") == 2
            said = capsys.readouterr().err
            assert words in said
            assert len(said.splitlines()) == 1

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
        picture = tmp_path / "picture"
        picture.mkdir()
        (picture / "scores.png").touch()
        capsys.readouterr()
        assert unnorm("anomalies", table, "--columns", "a", "--out", picture, "--force") == 2
        assert f"'{picture / 'scores.png'}' was not written by unnorm: it is not replaced." in capsys.readouterr().err
        assert [path.name for path in picture.iterdir()] == ["scores.png"]

    def test_a_search_cut_short_can_be_made_again(self, table, tmp_path, monkeypatch):
        """Killed after its first file: that one is known as ours."""
        from unnorm.checkpoint import write_atomically

        out = tmp_path / "out"

        def killed_at_the_second(path, content):
            if list(out.iterdir()):
                raise KeyboardInterrupt
            write_atomically(path, content)

        with monkeypatch.context() as patch:
            patch.setattr("unnorm.anomalies.write_atomically", killed_at_the_second)
            assert unnorm("anomalies", table, "--columns", "a", "--out", out) == 130
        assert len(list(out.iterdir())) == 1
        assert unnorm("anomalies", table, "--columns", "a", "--out", out, "--force") == 0

    def test_words_advice_with_columns_chosen(self, tmp_path, capsys):
        (tmp_path / "t.csv").write_text("a,b,c\n1,x,2\n2,y,3\n")
        assert unnorm("anomalies", tmp_path / "t.csv", "--columns", "a,b", "--out", tmp_path / "out") == 2
        assert "Leave it out of --columns." in capsys.readouterr().err

    def test_wrong_labels_are_named(self, table, tmp_path, capsys):
        lines = table.read_text().splitlines()
        for text, words in (
            ("2", "The labels 'fraud' must be 0 (usual) and 1 (an anomaly). Row 5 has 2."),
            (
                "yes",
                "Column 'fraud' of 't.csv' is not numeric: line 6 has 'yes'. Labels are 0 (usual) and 1 (an anomaly).",
            ),
        ):
            changed = [*lines]
            changed[5] = changed[5].rsplit(",", 1)[0] + "," + text
            table.write_text("\n".join(changed) + "\n")
            assert unnorm("anomalies", table, "--labels", "fraud", "--out", tmp_path / "out") == 2
            assert words in capsys.readouterr().err
        table.write_text("\n".join([lines[0], *(line.rsplit(",", 1)[0] + ",0" for line in lines[1:])]) + "\n")
        assert unnorm("anomalies", table, "--labels", "fraud", "--out", tmp_path / "out") == 2
        assert "both 0 (usual) and 1 (an anomaly) must occur. All are 0." in capsys.readouterr().err


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
