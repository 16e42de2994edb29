"""The toy densities and the readers of tables."""

import numpy as np
import pytest
import torch
from scipy import stats

from unnorm.data import TOYS, Standardize, Transformed, tables, toy
from unnorm.data.rows import Rows, chunks, moments
from unnorm.data.sources import TOY_NAMES
from unnorm.errors import DataError, InvalidValue

every_toy = pytest.mark.parametrize("name", TOYS)


def test_toy_sets_are_known_without_torch():
    assert tuple(TOYS) == TOY_NAMES


@every_toy
class TestToys:
    def test_density_integrates_to_one(self, name):
        density = toy(name)
        cells = 160
        edge = 2 * density.extent / cells
        axis = -density.extent + edge * (torch.arange(cells, dtype=torch.float64) + 0.5)
        mass = density.log_prob(torch.cartesian_prod(axis, axis)).exp().sum() * edge**2
        assert abs(mass - 1) < 1e-6

    def test_samples_follow_the_density(self, name):
        """Histogram of samples against the integral of the density over a coarse grid: chi-squared, 99.9% point."""
        density, n = toy(name), 20_000
        x = density.sample(n, generator=torch.Generator().manual_seed(1)).double().numpy()
        coarse, fine = 12, 240
        edge = 2 * density.extent / fine
        axis = -density.extent + edge * (torch.arange(fine, dtype=torch.float64) + 0.5)
        p = density.log_prob(torch.cartesian_prod(axis, axis)).exp().view(coarse, fine // coarse, coarse, -1)
        expected = n * (p.sum((1, 3)) * edge**2).numpy()
        bounds = np.linspace(-density.extent, density.extent, coarse + 1)
        seen = np.histogram2d(x[:, 0], x[:, 1], bins=[bounds, bounds])[0]
        full = expected > 5
        statistic = ((seen - expected)[full] ** 2 / expected[full]).sum()
        assert statistic < stats.chi2(full.sum() - 1).ppf(0.999)

    def test_shuffled_and_seeded(self, name):
        """A slice is a sample: both halves have the same mean, within their error; and the seed decides."""
        first, second = (toy(name).sample(4000, generator=torch.Generator().manual_seed(0)) for _ in range(2))
        assert torch.equal(first, second)
        halves = first[:2000], first[2000:]
        error = (sum(half.var(0) for half in halves) / 2000).sqrt()
        assert ((halves[0].mean(0) - halves[1].mean(0)).abs() < 4 * error).all()

    def test_any_size_and_shape_checks(self, name):
        assert toy(name).sample(1).shape == (1, 2)
        with pytest.raises(InvalidValue, match="at least 1. Got 0"):
            toy(name).sample(0)
        with pytest.raises(InvalidValue, match=r"shape \(n, 2\). Got \(3, 3\)"):
            toy(name).log_prob(torch.zeros(3, 3))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "2spirals" else n for n in TOYS])
def test_entropy_is_the_mean_of_minus_log_p(name):
    density = toy(name)
    values = -density.log_prob(density.sample(20_000, generator=torch.Generator().manual_seed(0)))
    assert abs(values.mean() - density.entropy) < 4 * values.std() / len(values) ** 0.5 + 1e-6


def test_eight_gaussians_is_a_mixture_of_scipys():
    x = toy("8gaussians").sample(20, generator=torch.Generator().manual_seed(0)).double()
    angles = np.arange(8) * np.pi / 4
    centres = 4 * np.stack([np.cos(angles), np.sin(angles)], -1) / np.sqrt(2)
    p = np.mean([stats.multivariate_normal(c, 0.125 * np.eye(2)).pdf(x.numpy()) for c in centres], axis=0)
    np.testing.assert_allclose(toy("8gaussians").log_prob(x).exp(), p, rtol=1e-12)


def test_spirals_tail_falls_off():
    """Far out the log density falls like a Gaussian's, it does not stop at the smallest positive number."""
    log_p = toy("2spirals").log_prob(torch.tensor([[10.0, 0.0], [30.0, 0.0], [100.0, 0.0]], dtype=torch.float64))
    edge = np.pi + 1 / 6  # the outermost point of an arm, moved by its square
    for found, x in zip(log_p.tolist(), (10.0, 30.0, 100.0), strict=True):
        assert found == pytest.approx(-((x - edge) ** 2) / (2 * 0.1**2), rel=0.01)


def test_circles_by_averaging_over_the_angle():
    x = toy("circles").sample(10, generator=torch.Generator().manual_seed(0)).double()
    angle = torch.arange(2000, dtype=torch.float64) * 2 * torch.pi / 2000
    unit = torch.stack([angle.cos(), angle.sin()], -1)
    p = torch.zeros(10, dtype=torch.float64)
    for radius in (3.0, 1.5):
        square = torch.cdist(x, radius * unit) ** 2
        p += (torch.exp(-square / (2 * 0.24**2)) / (2 * torch.pi * 0.24**2)).mean(-1) / 2
    torch.testing.assert_close(toy("circles").log_prob(x), p.log(), rtol=1e-9, atol=1e-9)


def test_standardize_carries_its_jacobian():
    x = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1, 1e-3, 1e5]
    )
    transform = Standardize.fit(x)
    z, log_det = transform(x)
    jacobian = torch.autograd.functional.jacobian(lambda row: transform(row[None])[0][0], x[0])
    torch.testing.assert_close(log_det[0], torch.linalg.slogdet(jacobian).logabsdet)
    torch.testing.assert_close(transform.inverse(z), x)
    torch.testing.assert_close(z.std(0, correction=0), torch.ones(3, dtype=torch.float64))


def test_standardize_keeps_precision_far_from_zero():
    """Time stamps near 1.7e9 differ by less than float32 can see before they are centred."""
    x = 1.7e9 + np.random.default_rng(0).normal(size=(500, 1))
    z = Transformed(Rows(x), Standardize.fit(Rows(x)))[torch.arange(500)]
    np.testing.assert_allclose(z.numpy(), (x - x.mean()) / x.std(), atol=1e-5)


def test_moments_in_chunks(monkeypatch):
    x = torch.randn(101, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e6
    monkeypatch.setattr("unnorm.data.rows.ELEMENTS", 40)
    found = moments(x)
    torch.testing.assert_close(found.mean, x.mean(0))
    torch.testing.assert_close(found.variance, x.var(0, correction=0), rtol=1e-9, atol=0)
    assert [len(part) for part in chunks(x)] == [10] * 10 + [1]


class TestTables:
    @pytest.fixture
    def numbers(self):
        return np.random.default_rng(0).normal(size=(6, 3))

    def test_csv_with_a_header(self, tmp_path, numbers):
        path = tmp_path / "t.csv"
        np.savetxt(path, numbers, delimiter=",", header="a,b,c", comments="")
        table = tables.read(path)
        assert table.columns == ("a", "b", "c")
        np.testing.assert_allclose(table.values, numbers)

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_csv_without_a_header(self, tmp_path, numbers, delimiter):
        path = tmp_path / "t.csv"
        np.savetxt(path, numbers, delimiter=delimiter)
        table = tables.read(path)
        assert not table.named
        np.testing.assert_allclose(table.values, numbers)

    def test_csv_as_spreadsheets_write_it(self, tmp_path):
        path = tmp_path / "t.csv"
        path.write_bytes('\ufeff"height, cm",weight\r\n"1.5",2\r\n\r\n3,\r\nNA,4\r\n'.encode())
        table = tables.read(path)
        assert table.columns == ("height, cm", "weight")
        np.testing.assert_array_equal(table.values, [[1.5, 2], [3, np.nan], [np.nan, 4]])

    def test_npy_is_memory_mapped(self, tmp_path, numbers):
        np.save(tmp_path / "t.npy", numbers)
        table = tables.read(tmp_path / "t.npy")
        assert isinstance(table.values, np.memmap)
        np.testing.assert_array_equal(table.values, numbers)

    def test_one_dimensional_array_is_one_column(self, tmp_path):
        np.save(tmp_path / "t.npy", np.arange(5))
        assert tables.read(tmp_path / "t.npy").values.shape == (5, 1)

    def test_npz_takes_x_or_the_key(self, tmp_path, numbers):
        np.savez(tmp_path / "t.npz", X=numbers, y=np.arange(6))
        np.testing.assert_array_equal(tables.read(tmp_path / "t.npz").values, numbers)
        assert tables.read(tmp_path / "t.npz", key="y").values.shape == (6, 1)
        np.savez(tmp_path / "u.npz", one=numbers, two=numbers)
        with pytest.raises(DataError, match=r"several arrays \(one, two\): choose one with --key"):
            tables.read(tmp_path / "u.npz")
        with pytest.raises(DataError, match="Did you mean 'two'"):
            tables.read(tmp_path / "u.npz", key="twoo")

    def test_parquet(self, tmp_path, numbers):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = {"a": numbers[:, 0], "b": numbers[:, 1].astype("float32"), "c": [1, 2, None, 4, 5, 6]}
        pq.write_table(pa.table(columns), tmp_path / "t.parquet")
        table = tables.read(tmp_path / "t.parquet")
        assert table.columns == ("a", "b", "c")
        assert np.isnan(table.values[2, 2])
        pq.write_table(pa.table({"a": [1.0], "name": ["x"]}), tmp_path / "u.parquet")
        mixed = tables.read(tmp_path / "u.parquet")
        with pytest.raises(DataError, match="Column 'name' of 'u.parquet' is not numeric"):
            tables.finite(mixed, drop=False)
        assert tables.finite(tables.select(mixed, ["a"]), drop=False).values.tolist() == [[1.0]]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("t.csv", b"", "'t.csv' is empty"),
            ("t.csv", b"\n\n", "'t.csv' is empty"),
            ("t.csv", b"a,b\n", "has a header but no rows"),
            ("t.csv", b"a,a\n1,2\n", "several columns called 'a'"),
            ("t.csv", b'a,b\n1,"' + b"x" * 200_000, "not a well-formed .csv file"),
            ("t.csv", b"1,2\n3\n", "Line 2 of 't.csv' has 1 cells; the first line has 2"),
            ("t.csv", b"a,b\n1,\xff\n", "not a text file in UTF-8"),
            ("t.npy", b"not numpy", "not a complete .npy file"),
            ("t.npz", b"PK not a zip", "not a complete .npz file"),
            ("t.parquet", b"PAR1", "not a complete .parquet file"),
            ("t.xlsx", b"x", "tables are .csv, .npy, .npz, .parquet files"),
        ],
    )
    def test_broken_files(self, tmp_path, name, content, message):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            tables.read(path)

    def test_words_are_refused_only_where_they_are_used(self, tmp_path):
        (tmp_path / "t.csv").write_text("\n\nname,a,b\nred,1,2\n  \nblue,3,True\n")
        table = tables.read(tmp_path / "t.csv")
        with pytest.raises(DataError, match="Column 'name' of 't.csv' is not numeric: line 4 has 'red'"):
            tables.finite(table, drop=True)
        chosen = tables.finite(tables.select(table, ["a", "b"]), drop=False)
        assert chosen.values.tolist() == [[1, 2], [3, 1]]

    def test_an_empty_column_is_named(self, tmp_path):
        (tmp_path / "t.csv").write_text("a,b,\n1,2,\n3,4,\n")
        with pytest.raises(DataError, match="Column 'column2' has no finite value at all. Choose others"):
            tables.finite(tables.read(tmp_path / "t.csv"), drop=False)

    def test_columns_without_a_name_are_called_by_their_place(self, tmp_path):
        (tmp_path / "t.csv").write_text(",a,,column0\n0,1,5,2\n1,3,6,4\n")
        table = tables.read(tmp_path / "t.csv")
        assert table.columns == ("column0_", "a", "column2", "column0")
        assert table.unnamed == ("column0_", "column2")
        assert tables.select(table, ["column2"]).values.tolist() == [[5], [6]]

    def test_columns_without_a_name_in_parquet(self, tmp_path):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"": [1.0, 2.0], "name": ["x", None]}), tmp_path / "t.parquet")
        table = tables.read(tmp_path / "t.parquet")
        assert table.columns == ("column0", "name")
        assert table.unnamed == ("column0",)
        found = tables.cells(tmp_path / "t.parquet")
        assert found.columns == table.columns
        assert [found.texts(place) for place in (0, 1)] == [["1.0", "x"], ["2.0", ""]]

    def test_cells_are_as_they_stand_in_the_file(self, tmp_path):
        """Leading zeros, more digits than a float has, words; rows and lines are those of `read`."""
        (tmp_path / "t.csv").write_text('\nid,zip,name\n12345678901234567,007,"a, b"\n\n2,,x\n')
        found, table = tables.cells(tmp_path / "t.csv"), tables.read(tmp_path / "t.csv")
        assert found.columns == table.columns
        assert len(found.rows) == table.rows == 2
        assert [found.texts(place) for place in (0, 1)] == [["12345678901234567", "007", "a, b"], ["2", "", "x"]]
        assert found.lines == [3, 5]
        (tmp_path / "u.csv").write_text("1,2\n3,4\n")
        assert tables.cells(tmp_path / "u.csv").columns == tables.read(tmp_path / "u.csv").columns
        np.savez(tmp_path / "t.npz", X=np.array([[1, 12345678901234567]]), y=np.zeros(1))
        assert tables.cells(tmp_path / "t.npz").texts(0) == ["1", "12345678901234567"]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("a;b\n1,5;2\n2,5;3\n", "Column 'a' of 't.csv' is not numeric: line 2 has '1,5'"),
            ("1,5;2,25\n2,5;3,0\n", "line 2 has '2,5'"),
            ("1,5\t-,5\n2,5\t3,0\n", "line 2 has '2,5'"),
        ],
    )
    def test_decimal_commas_are_named(self, tmp_path, text, words):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(DataError, match=rf"{words}.* Decimal commas are not read: write 1.5 for 1,5\."):
            tables.finite(tables.read(tmp_path / "t.csv"), drop=False)

    def test_advice_on_columns_of_words(self, tmp_path):
        (tmp_path / "t.csv").write_text("a,b,c\nx,1,\ny,2,\n")
        table = tables.read(tmp_path / "t.csv")
        with pytest.raises(DataError, match="line 2 has 'x'. Not a.$"):
            tables.finite(table, drop=False, advice=lambda names: f"Not {','.join(names)}.")
        with pytest.raises(DataError, match="Column 'c' has no finite value at all. Not c.$"):
            tables.finite(tables.select(table, ["b", "c"]), drop=False, advice=lambda names: f"Not {','.join(names)}.")

    @pytest.mark.parametrize("kind", [">f4", "<i2", "longdouble", "bool", ">u2"])
    def test_any_kind_of_number(self, tmp_path, kind):
        np.save(tmp_path / "t.npy", np.array([[0, 1], [1, 0]]).astype(kind))
        assert Rows(tables.read(tmp_path / "t.npy").values)[torch.tensor([1])].tolist() == [[1.0, 0.0]]

    def test_key_belongs_to_npz(self, tmp_path, numbers):
        np.save(tmp_path / "t.npy", numbers)
        with pytest.raises(InvalidValue, match="A key chooses an array of an .npz file"):
            tables.read(tmp_path / "t.npy", key="X")

    def test_truncated_npy(self, tmp_path, numbers):
        np.save(tmp_path / "t.npy", numbers)
        content = (tmp_path / "t.npy").read_bytes()
        (tmp_path / "t.npy").write_bytes(content[:-20])
        with pytest.raises(DataError, match="not a complete .npy file"):
            tables.read(tmp_path / "t.npy")

    def test_pickled_objects_are_refused(self, tmp_path):
        np.save(tmp_path / "t.npy", np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
        with pytest.raises(DataError, match="not a complete .npy file of numbers"):
            tables.read(tmp_path / "t.npy")

    @pytest.mark.parametrize(("shape", "message"), [((2, 2, 2), "rows by columns"), ((0, 3), "has no rows")])
    def test_not_a_table(self, tmp_path, shape, message):
        np.save(tmp_path / "t.npy", np.zeros(shape))
        with pytest.raises(DataError, match=message):
            tables.read(tmp_path / "t.npy")

    def test_non_finite_values_are_counted_and_placed(self, numbers):
        numbers[2, 1], numbers[4, 0], numbers[4, 2] = np.nan, np.inf, -np.inf
        table = tables.Table(numbers, ("a", "b", "c"), True)
        with pytest.raises(DataError, match="3 values in 2 rows .* first in row 3, column 'b'.*--drop-nonfinite"):
            tables.finite(table, drop=False)
        assert tables.finite(table, drop=True).kept.tolist() == [0, 1, 3, 5]

    def test_columns_by_name_and_position(self, numbers):
        table = tables.select(tables.Table(numbers, ("a", "b", "c"), True), ["c", "0"])
        assert table.columns == ("c", "a")
        np.testing.assert_array_equal(table.values, numbers[:, [2, 0]])
        with pytest.raises(InvalidValue, match="Unknown column 'd'"):
            tables.select(table, ["d"])
        with pytest.raises(InvalidValue, match="Each column can be chosen once. Got c, 0"):
            tables.select(table, ["c", "0"])

    def test_found_under_unnorm_data(self, tmp_path, monkeypatch):
        (tmp_path / "t.csv").write_text("1\n2\n")
        monkeypatch.setenv("UNNORM_DATA", str(tmp_path))
        assert tables.find("t.csv") == tmp_path / "t.csv"
        with pytest.raises(DataError, match="There is no file 'nothing.csv'"):
            tables.find("nothing.csv")
