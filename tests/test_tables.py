"""Tables: one computation behind three doors, words, values that occur, ranges, verdicts, and files."""

import csv
import datetime
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import unnorm
from tests.test_cli import unnorm as command
from unnorm import MECO, MLP, Density, Gaussian, TableDensity, Tilted, Training
from unnorm.data.columns import column_of
from unnorm.draws import by_weights
from unnorm.errors import BrokenFile, DataError, InvalidValue
from unnorm.sklearn import EnergyDensity
from unnorm.tables.bounds import Bounds
from unnorm.tables.columns import Columns
from unnorm.tables.fit import divide
from unnorm.tables.frames import source_of, table_of
from unnorm.tables.hashing import digest_of_rows, order_of_rows, uniform

pandas = pytest.importorskip("pandas", reason="needs pandas")
QUICK = {"steps": 50, "hidden": (16,), "bridges": "none"}
FLAGS = ["--steps", "50", "--hidden", "16", "--bridges", "none"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unnorm.report.picture", lambda *_: None)  # it takes longer than such a fit


def continuous(n=300, seed=0):
    rng = np.random.default_rng(seed)
    return pandas.DataFrame({"a": rng.gamma(2.0, 50.0, n), "b": rng.normal(7.0, 1e-3, n)})


def discrete(n=300, seed=0):
    rng = np.random.default_rng(seed)
    return pandas.DataFrame({"items": rng.poisson(3.0, n), "kind": rng.integers(0, 3, n), "yes": rng.integers(0, 2, n)})


def mixed(n=300, seed=0):
    rng = np.random.default_rng(seed)
    city = rng.choice(["Oslo", "Rome", "Lima"], n, p=[0.5, 0.3, 0.2])
    amount = rng.gamma(2.0, 50.0, n) + 40.0 * (city == "Rome")
    return pandas.DataFrame({"city": city, "amount": amount, "items": rng.poisson(3.0, n), "member": amount > 100})


TABLES = {"continuous": continuous, "discrete": discrete, "mixed": mixed}


class TestThreeDoors:
    """`unnorm fit`, `unnorm.fit` and `EnergyDensity` are one computation."""

    @pytest.mark.parametrize("name", TABLES)
    def test_equal_scores_and_samples(self, name, capsys):
        frame = TABLES[name]()
        frame.to_csv("t.csv", index=False)
        assert command("fit", "t.csv", *FLAGS, "--test", "0.2", "--seed", "3", "--out", "run") in (0, 3)
        from_file = unnorm.load("run")
        from_frame = unnorm.fit(frame, test=0.2, seed=3, **QUICK)
        estimator = EnergyDensity(test=0.2, random_state=3, **QUICK).fit(frame)
        scores = from_frame.score_samples(frame)
        assert np.isfinite(scores).all()
        np.testing.assert_allclose(from_file.score_samples(frame), scores, rtol=1e-6)
        np.testing.assert_array_equal(estimator.score_samples(frame), scores)
        drawn = from_frame.sample(200, random_state=5)
        pandas.testing.assert_frame_equal(estimator.sample(200, random_state=5), drawn)
        capsys.readouterr()
        assert command("sample", "run", "-n", "200", "--seed", "5", "--out", "s.csv") == 0
        pandas.testing.assert_frame_equal(pandas.read_csv("s.csv"), drawn, check_dtype=False, rtol=1e-6)
        assert from_file.verdict == from_frame.verdict == estimator.diagnostics_["verdict"]

    def test_arrays_give_the_same_as_frames(self):
        frame = continuous()
        of_frame, of_array = unnorm.fit(frame, **QUICK), unnorm.fit(frame.to_numpy(), **QUICK)
        np.testing.assert_array_equal(of_frame.score_samples(frame), of_array.score_samples(frame.to_numpy()))
        assert isinstance(of_array.sample(3, random_state=0), np.ndarray)

    def test_polars_in_polars_out(self):
        polars = pytest.importorskip("polars", reason="needs polars")
        frame = polars.from_pandas(mixed())
        density = unnorm.fit(frame, **QUICK)
        drawn = density.sample(20, random_state=0)
        assert isinstance(drawn, polars.DataFrame)
        assert drawn.columns == frame.columns
        assert set(drawn["city"]) <= {"Oslo", "Rome", "Lima"}
        np.testing.assert_allclose(density.score_samples(frame), unnorm.fit(mixed(), **QUICK).score_samples(mixed()))

    def test_the_order_of_the_rows_does_not_matter(self):
        frame = mixed()
        shuffled = frame.sample(frac=1.0, random_state=1)
        one, two = (unnorm.fit(each, test=0.1, **QUICK) for each in (frame, shuffled))
        np.testing.assert_allclose(one.score_samples(frame), two.score_samples(frame), rtol=1e-9)

    def test_the_training_loop_has_another_name(self):
        q = Gaussian(2)
        model = Tilted(q, MLP(2, hidden=(4,)))
        for arguments in ((model, MECO(q), torch.zeros(5, 2)), (model, MECO(q), torch.zeros(5, 2), Training())):
            with pytest.raises(InvalidValue, match=r"The training loop is unnorm.train\(model, estimator"):
                unnorm.fit(*arguments)
        with pytest.raises(InvalidValue, match=r"unnorm.train"):
            unnorm.fit(model)

    def test_a_readable_repr(self):
        density = unnorm.fit(mixed(), **QUICK)
        text = repr(density)
        assert "4 columns (2 category, 1 continuous, 1 discrete)" in text
        assert "log Z" in text
        assert len(text.splitlines()) == 5


class TestColumns:
    @pytest.mark.parametrize(
        ("values", "kind", "step"),
        [
            (np.arange(20.0) % 4, "discrete", 1.0),
            (1000.0 * (np.arange(20.0) % 4), "discrete", 1000.0),
            (np.arange(500.0) ** 2, "rounded", 1.0),
            (np.round(np.random.RandomState(0).uniform(size=500), 1), "discrete", 0.1),
            (np.round(np.random.RandomState(0).normal(size=500), 1), "rounded", 0.1),
            (np.random.RandomState(0).normal(size=500), "continuous", 0.0),
            (np.full(9, 3.5), "constant", 0.0),
            (np.repeat([0.1, 0.17, 5.3], 30), "discrete", None),
            (np.r_[np.zeros(50), np.random.RandomState(0).exponential(size=50)], "continuous", None),
        ],
    )
    def test_kinds(self, values, kind, step):
        found = column_of(values)
        assert found.kind == kind
        if step is not None:
            assert found.step == pytest.approx(step)

    def test_a_column_of_zeros_and_a_tail_has_a_spike(self):
        values = np.r_[np.zeros(50), np.random.RandomState(0).exponential(size=50)]
        found = column_of(values)
        assert found.spikes.tolist() == [0.0]
        np.testing.assert_array_equal(found.rounded(np.array([0.2 * found.step, -1.4 * found.step, 0.5])), [0, 0, 0.5])

    def test_flags_are_one_category(self):
        rng = np.random.default_rng(0)
        rows = np.c_[np.eye(3)[rng.integers(0, 3, 200)], rng.normal(size=200)]
        found = Columns.of(rows, tuple("abcd"))
        assert [column.kind for column in found.modelled] == ["flags", "continuous"]
        np.testing.assert_array_equal(found.values(found.codes(rows)), rows)
        assert found.codes(np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))[:, 0].tolist() == [-1, -1]

    def test_codes_and_values_are_inverse(self):
        source = source_of(table_of(mixed()))
        columns = Columns.of(source.values, source.names, source.words, source.whole)
        np.testing.assert_array_equal(columns.values(columns.codes(source.values)), source.values)
        again = Columns.from_plain(json.loads(json.dumps(columns.plain())))
        np.testing.assert_array_equal(again.codes(source.values), columns.codes(source.values))

    def test_spread_values_come_back(self):
        source = source_of(table_of(discrete()))
        columns = Columns.of(source.values, source.names, source.words, source.whole)
        codes = columns.codes(source.values)
        spread = columns.spread(codes, np.arange(len(codes)), 0)
        assert np.abs(spread - codes).max() <= 0.5
        assert len(np.unique(spread)) == spread.size
        np.testing.assert_array_equal(columns.values(spread), source.values)

    def test_unseen_numbers_have_probabilities_that_add_up_to_one(self):
        column = Columns.of(np.array([[0.0], [0.0], [1.0], [1.0], [4.0], [4.0], [7.0], [7.0]]), ("a",)).modelled[0]
        unseen = np.setdiff1d(np.arange(-200_000.0, 200_000.0), [0, 1, 4, 7])
        total = np.exp(column.log_unseen(unseen)).sum()
        assert total == pytest.approx(1.0, abs=1e-4)  # the tails go on
        assert column.log_unseen(np.array([2.5]))[0] == -np.inf


class TestWords:
    def test_words_come_back_as_words(self):
        frame = mixed(600)
        density = unnorm.fit(frame, **QUICK)
        drawn = density.sample(2000, random_state=0)
        assert list(drawn.columns) == list(frame.columns)
        assert drawn.dtypes["items"] == np.int64
        assert drawn.dtypes["member"].kind == "b"
        shares = drawn["city"].value_counts(normalize=True)
        for city, share in frame["city"].value_counts(normalize=True).items():
            assert abs(shares[city] - share) < 4 * math.sqrt(share * (1 - share) * (1 / 2000 + 1 / 480)) + 0.02

    def test_unseen_words_have_a_small_probability(self):
        frame = mixed(600)
        density = unnorm.fit(frame, **QUICK)
        other = frame.head(50).assign(city="Paris")
        known, new = density.score_samples(frame.head(50)), density.score_samples(other)
        assert np.isfinite(new).all()
        column = density.columns.modelled[0]
        assert column.unseen == pytest.approx(1 / (density.columns.modelled[0].numbers.counts.sum() + 2))
        # Without the city the row has the sum over all cities; a new one has the explicit share of that.
        every = [density.score_samples(frame.head(50).assign(city=city)) for city in ("Oslo", "Rome", "Lima")]
        without = np.logaddexp.reduce(every) - math.log1p(-column.unseen)
        np.testing.assert_allclose(new, without + math.log(column.unseen), atol=0.15)
        assert (new < known).mean() > 0.9

    def test_the_report_lists_the_kinds(self, capsys):
        mixed().to_csv("t.csv", index=False)
        assert command("fit", "t.csv", *FLAGS, "--out", "run") in (0, 3)
        report = Path("run/report.md").read_text()
        for line in ("| city | category, 3 levels |", "| amount | continuous |", "| member | category, 2 levels |"):
            assert line in report

    def test_a_column_that_names_the_rows_is_left_out(self, capsys):
        frame = mixed().assign(id=[f"A{k:04d}" for k in range(300)])
        with pytest.warns(UserWarning, match="Column 'id' is left out: it has .* different words"):
            density = unnorm.fit(frame, **QUICK)
        assert "id" not in density.sample(3, random_state=0).columns
        assert np.isfinite(density.score_samples(frame.assign(id="new"))).all()
        frame.to_csv("t.csv", index=False)
        assert command("fit", "t.csv", *FLAGS, "--out", "run") in (0, 3)
        assert "Column 'id' is left out" in capsys.readouterr().err

    def test_dates_are_refused_by_name(self, capsys):
        days = [(datetime.date(2024, 1, 1) + datetime.timedelta(k)).isoformat() for k in range(300)]
        frame = mixed().assign(day=days)
        frame.to_csv("t.csv", index=False)
        assert command("fit", "t.csv", *FLAGS) == 2
        assert "Column 'day' holds dates or times, which are not modelled yet. Leave it out with --exclude day" in (
            capsys.readouterr().err
        )
        assert command("fit", "t.csv", *FLAGS, "--exclude", "day", "--out", "run") in (0, 3)
        for values in (days, pandas.to_datetime(days)):
            typed = frame.assign(day=values)
            if not isinstance(values, list):
                with pytest.raises(DataError, match=r"Column 'day' .*exclude=\['day'\]"):
                    unnorm.fit(typed, **QUICK)
            assert unnorm.fit(typed, exclude=["day"], **QUICK).columns.names == tuple(mixed().columns)

    def test_a_word_among_numbers_is_a_mistake(self, capsys):
        frame = continuous().astype(object)
        frame.loc[7, "a"] = "oops"
        frame.to_csv("t.csv", index=False)
        assert command("fit", "t.csv", *FLAGS) == 2
        assert "line 9 has 'oops'. Most of its other cells are numbers." in capsys.readouterr().err


class TestMissing:
    def test_rows_with_missing_cells_are_left_out_and_counted(self, capsys):
        frame = mixed()
        frame.loc[[3, 5], "amount"] = np.nan
        frame.loc[9, "city"] = None
        with pytest.warns(UserWarning, match="3 rows with a missing cell are left out of 300"):
            density = unnorm.fit(frame, **QUICK)
        complete = unnorm.fit(frame.dropna(), **QUICK)
        scores = density.score_samples(frame)
        assert np.isnan(scores).sum() == 3
        np.testing.assert_array_equal(scores[~np.isnan(scores)], complete.score_samples(frame.dropna()))
        frame.to_csv("t.csv", index=False)
        assert command("fit", "t.csv", *FLAGS, "--out", "run") in (0, 3)
        assert "3 rows with a missing cell are left out of 300." in capsys.readouterr().err
        assert command("score", "run", "t.csv") == 0
        captured = capsys.readouterr()
        assert captured.out.split().count("nan") == 3
        assert "3 of 300 rows have a missing cell" in captured.err
        with pytest.raises(ValueError, match="Input X contains NaN"):
            EnergyDensity(**QUICK).fit(frame)

    def test_infinity_is_refused(self):
        frame = continuous()
        frame.loc[4, "a"] = np.inf
        with pytest.raises(DataError, match="Row 5 has an infinite value in column 'a'"):
            unnorm.fit(frame, **QUICK)


class TestScore:
    def test_columns_are_found_by_name(self, capsys):
        frame = mixed()
        density = unnorm.fit(frame, **QUICK)
        scores = density.score_samples(frame)
        other = frame[["items", "member", "city", "amount"]].assign(more=1.0)
        with pytest.warns(UserWarning, match="Columns that the model was not fitted on are ignored: 'more'"):
            np.testing.assert_array_equal(density.score_samples(other), scores)
        with pytest.raises(DataError, match="The table lacks columns that the model was fitted on: 'city', 'items'"):
            density.score_samples(frame[["amount", "member"]])
        frame.to_csv("t.csv", index=False)
        assert command("fit", "t.csv", *FLAGS, "--out", "run") in (0, 3)
        other.to_csv("o.csv", index=False)
        frame[["amount"]].to_csv("less.csv", index=False)
        capsys.readouterr()
        assert command("score", "run", "o.csv") == 0
        assert "columns that the model was not fitted on are ignored: more" in capsys.readouterr().err
        assert command("score", "run", "less.csv") == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_table_of_other_width_is_refused(self):
        density = unnorm.fit(continuous().to_numpy(), **QUICK)
        with pytest.raises(DataError, match="The table has 3 columns; the model was fitted on 2"):
            density.score_samples(np.zeros((4, 3)))

    @pytest.mark.parametrize("seed", range(2))
    def test_discrete_scores_add_up_to_one(self, seed):
        """Over the values that occur, but for the share that is kept for others."""
        frame = discrete(1000, seed)[["items", "kind"]]
        density = unnorm.fit(frame, seed=seed)
        values = [np.sort(frame[name].unique()) for name in frame]
        cells = pandas.DataFrame(list(itertools.product(*values)), columns=list(frame))
        kept = np.prod([1 - column.unseen for column in density.columns.modelled])
        assert np.exp(density.score_samples(cells)).sum() == pytest.approx(kept, abs=0.01)

    def test_probabilities_are_the_tables(self):
        rng = np.random.default_rng(0)
        x = np.c_[rng.binomial(1, 0.3, 4000), rng.binomial(6, 0.5, 4000)].astype(float)
        density = unnorm.fit(x)
        pairs = np.array([[a, b] for a in range(2) for b in range(7)], dtype=float)
        exact = stats.binom(1, 0.3).pmf(pairs[:, 0]) * stats.binom(6, 0.5).pmf(pairs[:, 1])
        assert np.abs(np.exp(density.score_samples(pairs)) - exact).max() < 0.03


class TestSamples:
    def test_classes_of_wine(self):
        """The class column had -1 and 4 before, and shares .22/.50/.28 for .33/.40/.27."""
        from sklearn.datasets import load_wine

        found = load_wine()
        x = np.c_[found.data, found.target]
        density = unnorm.fit(x)
        drawn = density.sample(20_000, random_state=0)
        assert set(drawn[:, -1]) == {0.0, 1.0, 2.0}
        shares = np.bincount(drawn[:, -1].astype(int)) / 20_000
        true = np.bincount(found.target) / len(x)
        assert np.abs(shares - true).max() < 3 * np.sqrt(0.25 / len(x))
        worth = density.draw(20_000, random_state=0)[1].ess
        assert worth == 20_000

    @pytest.mark.parametrize("n", [200, 2000])
    @pytest.mark.parametrize("name", ["normal", "gamma", "cauchy"])
    def test_continuous_columns_keep_to_their_range(self, name, n):
        rng = np.random.default_rng(n)
        draw = {"normal": rng.standard_normal, "gamma": lambda s: rng.gamma(1.5, 2.0, s), "cauchy": rng.standard_cauchy}
        x = draw[name]((n, 3))
        drawn = unnorm.fit(x, steps=200).sample(20_000, random_state=0)
        outside = ((drawn < x.min(0)) | (drawn > x.max(0))).mean(0)
        assert (outside <= 2 / (n + 1) + 0.003).all(), outside

    def test_values_that_occur(self):
        frame = discrete(500)
        frame["tenths"] = np.round(0.1 * np.random.default_rng(1).binomial(6, 0.5, 500), 1)
        drawn = unnorm.fit(frame, **QUICK).sample(5000, random_state=0)
        for name in frame:
            assert set(np.round(drawn[name], 9)) <= set(np.round(frame[name], 9))

    def test_every_sample_takes_a_state_or_a_generator(self):
        density = unnorm.fit(continuous(), **QUICK)
        one = density.sample(10, random_state=3)
        pandas.testing.assert_frame_equal(one, density.sample(10, random_state=3))
        generator = torch.Generator().manual_seed(7)
        two = density.sample(10, generator=generator)
        pandas.testing.assert_frame_equal(two, density.sample(10, generator=torch.Generator().manual_seed(7)))
        assert not density.sample(10).equals(density.sample(10))
        state = np.random.RandomState(0)
        assert not density.sample(10, random_state=state).equals(density.sample(10, random_state=state))
        with pytest.raises(InvalidValue, match="a random_state or a generator, not both"):
            density.sample(10, random_state=0, generator=generator)
        for count in (0, -1, 1.5, True):
            with pytest.raises(InvalidValue, match="must be an int of at least 1"):
                density.sample(count)
        for wrong in (-1, "seven", 1.5):
            with pytest.raises(InvalidValue, match="random_state"):
                density.sample(3, random_state=wrong)

    @pytest.mark.parametrize("n", [10, 3000, 40_000])
    def test_draws_by_weights_are_the_models(self, n):
        """For any number: moments of N(0.5, 0.8^2) from N(0, 1), with their own errors."""
        noise, generator = Gaussian(3).double(), torch.Generator().manual_seed(0)
        found = by_weights(
            lambda x: -0.5 * ((x - 0.5) / 0.8).square().sum(-1), noise, n, expected=0.3, generator=generator
        )
        assert found.method == "rejection"
        assert found.ess == len(found.x) == n
        error = 0.8 / math.sqrt(3 * n)
        assert abs(float(found.x.mean()) - 0.5) < 4.5 * error
        if n >= 3000:
            assert stats.kstest(found.x.flatten().numpy(), stats.norm(0.5, 0.8).cdf).pvalue > 1e-4

    def test_heavier_weights_are_chosen_from(self):
        """A narrow model under a wide noise: a few percent of the draws count."""
        noise, generator = Gaussian(4).double(), torch.Generator().manual_seed(0)
        found = by_weights(
            lambda x: -0.5 * (x / 0.4).square().sum(-1), noise, 20_000, expected=0.02, generator=generator
        )
        assert found.method in ("rejection", "resampled")
        assert abs(float(found.x.std()) / 0.4 - 1) < 0.02

    def test_a_noise_too_far_gives_starts_or_nothing(self):
        noise, generator = Gaussian(6).double(), torch.Generator().manual_seed(0)
        far = by_weights(
            lambda x: -0.5 * ((x - 6) / 0.3).square().sum(-1), noise, 100, expected=1e-9, generator=generator
        )
        assert not hasattr(far, "method")


class TestBounds:
    def test_weights_make_the_shares(self):
        """Two dependent columns with a tenth outside: after the weights a fiftieth of a hundredth is, in each."""
        rng = np.random.default_rng(0)
        rows = np.clip(rng.normal(size=(1999, 2)), -1.5, 1.5)
        columns = Columns.of(rows, ("a", "b"))
        z = rng.normal(size=(200_000, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
        bounds = Bounds.of(columns, 1999, z)
        weights = np.exp(bounds.log_weight(z))
        outside = (z < bounds.low) | (z > bounds.high)
        shares = (outside * weights[:, None]).sum(0) / weights.sum()
        np.testing.assert_allclose(shares, 2 / 2000, rtol=1e-3)
        assert bounds.log_mass == pytest.approx(math.log(weights.mean()))
        plain = Bounds.from_plain(json.loads(json.dumps(bounds.plain())))
        np.testing.assert_array_equal(plain.log_weight(z[:100]), bounds.log_weight(z[:100]))

    def test_what_is_not_too_wide_is_left(self):
        rng = np.random.default_rng(0)
        columns = Columns.of(rng.normal(size=(1000, 1)) * 3, ("a",))
        bounds = Bounds.of(columns, 1000, rng.normal(size=(5000, 1)))
        assert max(abs(bounds.log_mass), bounds.stderr) < 1e-6
        assert (bounds.log_weights == 0).all()

    def test_the_density_integrates_to_one(self):
        """Also with the weights: by Monte Carlo over a box much wider than the rows."""
        rng = np.random.default_rng(0)
        x = rng.uniform(-1, 1, size=(500, 2)) ** 3
        density = unnorm.fit(x, steps=200)
        points = rng.uniform(-3, 3, size=(400_000, 2))
        p = 36 * np.exp(density.score_samples(points))
        assert abs(p.mean() - 1) < 4 * p.std() / math.sqrt(len(p)) + 0.01


class TestFiles:
    @pytest.mark.parametrize("name", TABLES)
    def test_saved_and_loaded(self, name):
        frame = TABLES[name]()
        density = unnorm.fit(frame, **QUICK)
        density.save("kept")
        loaded = unnorm.load("kept")
        assert isinstance(loaded, TableDensity)
        np.testing.assert_array_equal(loaded.score_samples(frame), density.score_samples(frame))
        pandas.testing.assert_frame_equal(loaded.sample(9, random_state=1), density.sample(9, random_state=1))
        assert loaded.verdict == density.verdict
        assert repr(loaded) == repr(density)
        assert isinstance(loaded.density, Density)

    @pytest.mark.parametrize("content", ["", "{nope", "{}", "[1]"])
    def test_a_damaged_file_is_one_line(self, content, capsys):
        unnorm.fit(continuous(), **QUICK).save("kept")
        Path("kept/table.json").write_text(content)
        with pytest.raises(BrokenFile):
            unnorm.load("kept")
        Path("t.csv").write_text("a,b\n1,2\n")
        assert command("score", "kept", "t.csv") == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_parts_of_two_densities_are_noticed(self):
        for seed in (0, 1):
            unnorm.fit(continuous(), seed=seed, **QUICK).save(f"kept{seed}")
        for name in ("model.json", "model.safetensors"):
            Path(f"kept1/{name}").replace(f"kept0/{name}")
        with pytest.raises(BrokenFile, match="belongs to another density"):
            unnorm.load("kept0")

    def test_words_are_quoted_in_a_csv_file(self, capsys):
        frame = mixed().replace({"city": {"Oslo": 'Os"lo, N', "Rome": "Ro\nme"}})
        unnorm.fit(frame, **QUICK).save("kept")
        assert command("sample", "kept", "-n", "50", "--out", "s.csv") == 0
        with open("s.csv", newline="") as file:
            cities = {row["city"] for row in csv.DictReader(file)}
        assert cities <= set(frame["city"])
        assert command("sample", "kept", "-n", "50", "--out", "s.npy") == 2
        assert "An .npy file holds numbers, and column 'city' has words" in capsys.readouterr().err


class TestDivision:
    def test_copies_stay_together(self):
        rng = np.random.default_rng(0)
        rows = np.repeat(rng.normal(size=(100, 2)), rng.integers(1, 3, 100), axis=0)
        parts, _ = divide(source_of(table_of(rows)), 0.2, 0)
        groups = [set(map(tuple, part.rows())) for part in (parts.train, parts.validation, parts.test)]
        assert not groups[0] & groups[1] | groups[0] & groups[2] | groups[1] & groups[2]
        assert sum(len(part) for part in (parts.train, parts.validation, parts.test)) == len(rows)

    def test_the_content_decides(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(500, 3))
        shuffled = x[rng.permutation(500)]
        one, two = (divide(source_of(table_of(each)), 0.1, 7)[0] for each in (x, shuffled))
        for name in ("train", "validation", "test"):
            np.testing.assert_array_equal(getattr(one, name).rows(), getattr(two, name).rows())
        other = divide(source_of(table_of(x)), 0.1, 8)[0]
        assert set(map(tuple, other.test.rows())) != set(map(tuple, one.test.rows()))
        assert digest_of_rows(x) == digest_of_rows(shuffled) != digest_of_rows(x + 1)

    def test_test_rows_have_no_part_in_the_kinds(self):
        """A value that only test rows have is an unseen one."""
        x = np.r_[np.zeros(400), np.ones(400), [7.0]][:, None]
        for seed in range(60):
            parts, columns = divide(source_of(table_of(np.c_[x, np.arange(801.0) + 0.5])), 0.3, seed)
            alone = 7.0 in parts.test.rows()[:, 0]
            assert (7.0 in columns.modelled[0].numbers.values) != alone

    def test_the_hash_is_uniform(self):
        x = uniform(np.arange(100_000), 3, 5)
        assert stats.kstest(x, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(x, uniform(np.arange(100_000), 4, 5))[0, 1]) < 0.015
        order, first = order_of_rows(np.arange(10_000.0)[:, None], None, 1)
        assert first.all()
        assert abs(stats.spearmanr(order, np.arange(10_000)).statistic) < 0.05


class TestVerdict:
    def test_a_network_stopped_too_early_is_not_trusted(self):
        """On moons log Z was known, and the network, which had hardly begun to learn, was trusted."""
        x = unnorm.data.toy("moons").sample(4000, generator=torch.Generator().manual_seed(0)).numpy()
        early = unnorm.fit(x, noise="gaussian", bridges="none", steps=100, lr=3e-4)
        assert early.verdict.log_z.level == "TRUST"
        assert early.verdict.fit.level == "CARE"
        assert "still improving" in early.verdict.fit.text
        assert early.verdict.level == "CARE"

    def test_a_noise_that_fits_is_trusted(self):
        rng = np.random.default_rng(0)
        density = unnorm.fit(rng.multivariate_normal([0, 0], [[1.0, 0.5], [0.5, 1.0]], 2000), noise="gaussian")
        assert density.verdict.fit.level == "TRUST", density.verdict.text()
        assert density.verdict.level == "TRUST"

    def test_training_that_diverges_is_distrusted(self, capsys):
        continuous().to_csv("t.csv", index=False)
        assert command("fit", "t.csv", "--lr", "1e20", "--optimizer", "sgd", "--steps", "50", "--out", "run") == 3
        out = capsys.readouterr().out
        assert "Verdict: DISTRUST" in out
        assert "training was given up, and the noise alone is the density" in out

    def test_diagnose_says_one_thing_about_rows(self, capsys):
        continuous(60).to_csv("t.csv", index=False)
        assert command("fit", "t.csv", *FLAGS, "--out", "run") in (0, 3)
        capsys.readouterr()
        assert command("diagnose", "run") in (0, 3)
        out = capsys.readouterr().out
        assert "checked with the run's own" in out
        assert "no rows" not in out

    def test_small_tables_can_earn_trust(self):
        """178 rows: the rows that are trained on show missed mass as well."""
        rng = np.random.default_rng(0)
        density = unnorm.fit(rng.normal(size=(178, 3)) @ rng.normal(size=(3, 3)))
        assert density.verdict.log_z.level == "TRUST", density.verdict.text()
