"""The transforms: their Jacobians by autograd, their inverses, and that they survive a file."""

import gzip
import itertools
import json
import math
import struct
import sys
import types

import numpy as np
import pytest
import torch
from scipy import stats

from unnorm import Density, Gaussian, Quadratic
from unnorm.architecture import build, describe, is_custom
from unnorm.data import (
    Compose,
    Dequantize,
    Gaussianize,
    Logit,
    Standardize,
    Transform,
    Transformed,
    chunks,
    images,
    mnist,
    quantiles,
    read_idx,
)
from unnorm.data.robust import LogTails, robust_scale
from unnorm.errors import BrokenFile, DataError, InvalidValue

EVENTS = [(3,), (1, 28, 28)]
MAKE = {
    "standardize": lambda x: Standardize.fit(x),
    "logit": lambda x: Logit(1e-3),
    "log-tails": lambda x: LogTails(0.2),
    "gaussianize": lambda x: Gaussianize.fit(x, 8),
    "gaussianize-levels": lambda x: Gaussianize.fit(x, torch.arange(11) / 10),
    "dequantize": lambda x: Dequantize(10),
    "compose": lambda x: Compose([Dequantize(10), Logit(1e-3), Standardize.fit(x)]),
    "nested": lambda x: Compose([Dequantize(10), Compose([Gaussianize.fit(x, 8), Standardize.fit(3 * x)])]),
}
BEGINS_WITH_INTEGERS = {"dequantize", "compose", "nested"}
every_transform = pytest.mark.parametrize("name", MAKE)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def fitted(name, event, n=200):
    """A transform of this name and rows that it can read."""
    x = torch.rand(n, *event, generator=seeded(), dtype=torch.float64) ** 2
    transform = MAKE[name](x)
    return transform, (10 * x).floor() if name in BEGINS_WITH_INTEGERS else x


@every_transform
class TestEveryTransform:
    @pytest.mark.parametrize("event", EVENTS)
    def test_log_det_is_that_of_the_jacobian(self, name, event):
        transform, x = fitted(name, event)
        rows = x[:3] if event == (3,) else x[:1]
        z, log_det = transform(rows, generator=seeded())
        assert z.shape == rows.shape
        assert log_det.shape == rows.shape[:1]

        def alone(row):
            """One row, with the draws it had among the others."""
            moved = torch.cat([rows[:place], row[None], rows[place + 1 :]])
            return transform(moved, generator=seeded())[0][place].flatten()

        for place, row in enumerate(rows):
            jacobian = torch.autograd.functional.jacobian(alone, row, vectorize=True).reshape(row.numel(), -1)
            expected = torch.linalg.slogdet(jacobian).logabsdet
            torch.testing.assert_close(log_det[place], expected, rtol=1e-10, atol=1e-9)

    @pytest.mark.parametrize("event", EVENTS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_inverse(self, name, event, dtype):
        transform, x = fitted(name, event)
        z, log_det = transform(x.to(dtype), generator=seeded())
        assert z.dtype == log_det.dtype == dtype
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(transform.inverse(z), x.to(dtype), rtol=0, atol=tolerance)

    def test_the_generator_decides(self, name):
        transform, x = fitted(name, (3,))
        first, second = (transform(x, generator=seeded(5))[0] for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(first, transform(x, generator=seeded(6))[0]) == (name not in BEGINS_WITH_INTEGERS)

    def test_through_a_description_and_back(self, name):
        """As a file has it: plain JSON, and tensors."""
        transform, x = fitted(name, (3,))
        spec = json.loads(json.dumps(describe(transform)))
        assert is_custom(spec) is None
        built = build(spec)
        built.load_state_dict(transform.state_dict(), assign=True)
        for found, expected in zip(built(x, generator=seeded()), transform(x, generator=seeded()), strict=True):
            assert torch.equal(found, expected)


class TestDequantize:
    def test_uniform_within_each_level(self):
        x = torch.arange(4).repeat_interleave(5000)[:, None]
        z, log_det = Dequantize(4)(x, generator=seeded())
        assert (log_det + math.log(4)).abs().max() < 1e-12
        for level in range(4):
            within = 4 * z[5000 * level : 5000 * (level + 1), 0] - level
            assert stats.kstest(within.numpy(), "uniform").pvalue > 0.01

    def test_the_offset_counts_every_coordinate(self):
        _, log_det = Dequantize()(torch.zeros(2, 1, 28, 28, dtype=torch.uint8))
        assert log_det.tolist() == pytest.approx([-784 * math.log(256)] * 2)
        assert log_det.dtype == torch.float64

    @pytest.mark.parametrize("levels", [10, 256, 65536])
    def test_float32_never_rounds_to_the_next_level(self, levels, monkeypatch):
        """At both ends of what a generator can draw."""
        x = torch.arange(levels, dtype=torch.float32)[:, None]
        for u in (0.0, 1 - 2**-53):
            monkeypatch.setattr(torch, "rand", lambda shape, u=u, **_: torch.full(shape, u, dtype=torch.float64))
            z, _ = Dequantize(levels)(x)
            assert z.dtype == torch.float32
            assert ((z >= 0) & (z <= 1)).all()
            assert torch.equal(Dequantize(levels).inverse(z), x)

    def test_inverse_stays_in_range(self):
        assert Dequantize(4).inverse(torch.tensor([[-0.3, 1.0, 7.0]])).tolist() == [[0, 3, 3]]

    @pytest.mark.parametrize("bad", [0.5, -1.0, 256.0, math.nan, math.inf])
    def test_refuses_what_is_no_level(self, bad):
        with pytest.raises(DataError, match=f"Dequantize needs integers from 0 to 255. Got {bad:g}"):
            Dequantize(256)(torch.tensor([[0.0, bad]]))

    @pytest.mark.parametrize("levels", [1, 2.5, 2**16 + 1])
    def test_refuses_levels(self, levels):
        with pytest.raises(InvalidValue, match="The 'levels' of Dequantize must be an integer from 2 to 65536. Got"):
            Dequantize(levels)


class TestLogit:
    def test_float32_is_careful_at_both_ends(self):
        """The same float32 points in float64: 1 - y, formed from a rounded y, would be off in the fourth digit."""
        ends = torch.tensor([0.0, 1e-9, 1e-6, 0.3, 0.5])
        x = torch.cat([ends, 1 - torch.tensor([0.0, 2.0**-24, 2.0**-20, 1e-3])])[:, None]
        found, expected = Logit(1e-6)(x), Logit(1e-6)(x.double())
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=5e-7, atol=5e-7)

    def test_against_scipy(self):
        from scipy.special import logit

        x = torch.rand(50, 2, generator=seeded(), dtype=torch.float64)
        np.testing.assert_allclose(Logit(0.05)(x)[0], logit(0.05 + 0.9 * x.numpy()), rtol=1e-12)

    def test_inverse_beyond_the_image_is_the_end(self):
        assert Logit(0.01).inverse(torch.tensor([[-50.0, 50.0]])).tolist() == [[0, 1]]

    @pytest.mark.parametrize("bad", [-1e-3, 1.001, math.nan])
    def test_refuses_values_outside(self, bad):
        with pytest.raises(DataError, match=f"Logit needs values from 0 to 1. Got {bad:g}"):
            Logit(0.1)(torch.tensor([[0.5, bad]]))

    @pytest.mark.parametrize("alpha", [0.0, 0.5, math.nan])
    def test_refuses_alpha(self, alpha):
        with pytest.raises(InvalidValue, match="The 'alpha' of Logit must be above 0 and below 0.5. Got"):
            Logit(alpha)


class TestGaussianize:
    def test_levels_keep_their_frequencies(self):
        """A hand count: the density of x under a standard normal z is mass / width of its piece."""
        x = torch.tensor([0, 0, 0, 2])[:, None]
        dequantized = torch.cat(list(chunks(Transformed(x, Dequantize(3), torch.float64, generator=seeded()))))
        transform = Gaussianize.fit(dequantized, torch.arange(4) / 3, pseudo_count=0.5)
        total = 4 + 5 * 0.5  # three levels and two tails
        points = torch.tensor([[1 / 6], [1 / 2], [5 / 6]], dtype=torch.float64)
        z, log_det = transform(points)
        density = stats.norm.pdf(z[:, 0]) * log_det.exp().numpy()
        np.testing.assert_allclose(density, [3 * 3.5 / total, 3 * 0.5 / total, 3 * 1.5 / total], rtol=1e-6)
        np.testing.assert_allclose(stats.norm.cdf(z[0, 0]), (0.5 + 3.5 / 2) / total, rtol=1e-6)

    @pytest.mark.parametrize("pieces", [5, 64])
    def test_density_integrates_to_one(self, pieces):
        x = torch.randn(500, 1, generator=seeded(), dtype=torch.float64).exp()
        transform = Gaussianize.fit(x, pieces)
        knots = transform.knots[0]
        span = knots[-1] - knots[0]
        ends = torch.cat([knots[:1] - 3 * span, knots, knots[-1:] + 3 * span])
        mass = 0.0
        for low, high in itertools.pairwise(ends):  # between knots it is smooth
            node, weight = np.polynomial.legendre.leggauss(60)
            at = (low + high) / 2 + (high - low) / 2 * torch.from_numpy(node)
            z, log_det = transform(at[:, None])
            mass += float((high - low) / 2 * (weight * stats.norm.pdf(z[:, 0]) * log_det.exp().numpy()).sum())
        assert mass == pytest.approx(1, abs=1e-9)

    def test_normal_scores_of_fresh_points(self):
        draw = stats.gamma(2.0)
        train, test = (torch.from_numpy(draw.rvs((n, 1), random_state=s)) for n, s in ((20_000, 0), (2000, 1)))
        z, _ = Gaussianize.fit(train)(test)
        assert stats.kstest(z[:, 0].numpy(), "norm").pvalue > 0.01

    def test_monotone_and_invertible_far_outside(self):
        transform = Gaussianize.fit(torch.rand(100, 1, generator=seeded(), dtype=torch.float64))
        x = torch.linspace(-5, 6, 3001, dtype=torch.float64)[:, None]
        z, _ = transform(x)
        assert (z.diff(dim=0) > 0).all()
        torch.testing.assert_close(transform.inverse(z), x, rtol=1e-9, atol=1e-9)
        beyond = torch.tensor([[-9.0], [9.0]], dtype=torch.float64)
        torch.testing.assert_close(transform(transform.inverse(beyond))[0], beyond)

    def test_tails_have_the_slope_of_the_chord(self):
        """Of Gaussian data that is one over the standard deviation, roughly."""
        transform = Gaussianize.fit(5 * torch.randn(20_000, 1, generator=seeded(), dtype=torch.float64))
        z, log_det = transform(torch.tensor([[100.0], [-100.0]], dtype=torch.float64))
        first, last = transform.knots[0, [0, -1]]
        ends, _ = transform(torch.stack([first, last])[:, None])
        chord = float((ends[1] - ends[0]) / (last - first))
        np.testing.assert_allclose(log_det.exp(), chord, rtol=1e-12)
        expected = torch.cat([ends[1] + chord * (100 - last), ends[0] - chord * (100 + first)])
        torch.testing.assert_close(z[:, 0], expected)
        assert chord == pytest.approx(1 / 5, rel=0.1)

    def test_columns_with_few_or_equal_values(self):
        """Words made numbers, a constant, and a column that is mostly zero: all finite, and the mass where it is."""
        g = seeded()
        few = torch.randint(3, (1000, 1), generator=g).double()
        mostly = torch.randn(1000, 1, generator=g, dtype=torch.float64).clamp_min(1.0)
        x = torch.cat([few, torch.full((1000, 1), 7.0, dtype=torch.float64), mostly], 1)
        transform = Gaussianize.fit(x, 16)
        assert transform.knots.shape == (3, 17)
        assert (transform.knots.diff() > 0).all()
        assert (transform.cdf.diff() > 0).all()
        z, log_det = transform(x)
        assert torch.isfinite(z).all()
        assert torch.isfinite(log_det).all()
        share = (few == 0).double().mean()
        low, high = stats.norm.cdf(transform(torch.tensor([[-0.499, 7, 1], [0.499, 7, 1]]))[0][:, 0])
        assert high - low == pytest.approx(float(share), abs=0.01)
        assert z[:, 1].abs().max() < 0.05  # a constant sits in the middle

    @pytest.mark.parametrize("step", [2.0**-52, 2.0**-45])
    @pytest.mark.parametrize("pieces", [4, 64])
    def test_values_that_only_rounding_tells_apart(self, step, pieces):
        x = 1 + step * torch.arange(9, dtype=torch.float64)[:, None]
        for rows in (x, torch.cat([x, 0 * x + 3])):
            transform = Gaussianize.fit(rows, pieces)
            assert (transform.knots.diff() > 0).all()
            assert torch.isfinite(torch.stack([part.flatten() for part in transform(rows)])).all()

    def test_all_zeros(self):
        assert Gaussianize.fit(torch.zeros(5, 1))(torch.zeros(1, 1))[0] == 0

    def test_all_rows_count_also_when_few_choose_the_knots(self, monkeypatch):
        x = torch.rand(2000, 1, generator=seeded(), dtype=torch.float64)
        whole = Gaussianize.fit(x, torch.tensor([0.2, 0.6]), pseudo_count=1e-6)
        monkeypatch.setattr(quantiles, "LOOKED_AT", 5)
        monkeypatch.setattr("unnorm.data.rows.ELEMENTS", 7)
        part = Gaussianize.fit(x, torch.tensor([0.2, 0.6]), pseudo_count=1e-6)
        shares = [(x < 0.2).double().mean(), (x < 0.6).double().mean()]
        np.testing.assert_allclose(whole.cdf[0], shares, atol=1e-8)
        assert torch.equal(whole.cdf, part.cdf)

    def test_a_knot_belongs_to_the_piece_on_its_right(self):
        x = torch.tensor([0.0, 0.0, 0.0, 0.5])[:, None]
        found = Gaussianize.fit(x, torch.tensor([0.0, 0.5, 1.0]), pseudo_count=1e-9).cdf[0]
        np.testing.assert_allclose(found, [0, 0.75, 1], atol=1e-8)

    def test_unfitted_is_the_identity_at_its_knots(self):
        knots = torch.linspace(-4, 4, 65, dtype=torch.float64)[:, None]
        torch.testing.assert_close(Gaussianize(1)(knots)[0], knots)

    def test_refusals(self):
        x = torch.rand(10, 1)
        with pytest.raises(InvalidValue, match="'pieces' of Gaussianize must be at least 1. Got 0"):
            Gaussianize.fit(x, 0)
        with pytest.raises(InvalidValue, match="'pseudo_count' of Gaussianize must be positive. Got 0"):
            Gaussianize.fit(x, pseudo_count=0)
        with pytest.raises(InvalidValue, match="knots of Gaussianize must be two or more increasing numbers"):
            Gaussianize.fit(x, torch.tensor([0.0, 0.0, 1.0]))
        for bad in (torch.empty(0, 1), torch.full((3, 1), math.nan)):
            with pytest.raises(DataError, match="Gaussianize needs rows of finite numbers"):
                Gaussianize.fit(bad)


class TestCompose:
    def test_every_part_gets_the_generator(self):
        x = torch.tensor([[0.0], [1.0]])
        late = Compose([Standardize(1), Dequantize(2)])
        assert torch.equal(late(x, generator=seeded())[0], Dequantize(2)(x, generator=seeded())[0])

    def test_one_after_the_other(self):
        x = torch.tensor([[0.2], [0.9]], dtype=torch.float64)
        first, second = Logit(0.1), Standardize.fit(x)
        z, log_det = Compose([first, second])(x)
        middle, one = first(x)
        expected, two = second(middle)
        assert torch.equal(z, expected)
        assert torch.equal(log_det, one + two)

    def test_refusals(self):
        with pytest.raises(InvalidValue, match="'transforms' of Compose must be at least one. Got none"):
            Compose([])
        with pytest.raises(InvalidValue, match="'transforms' of Compose must be transforms. Got ReLU"):
            Compose([torch.nn.ReLU()])
        with pytest.raises(BrokenFile, match="'compose' is not valid"):
            build({"kind": "compose", "transforms": []})
        with pytest.raises(BrokenFile, match="describes something unknown"):
            build({"kind": "compose", "transforms": [{"kind": "os.system"}]})

    def test_a_foreign_part_is_found(self):
        class Shift(Transform):
            def forward(self, x, *, generator=None):
                return x + 1, x.new_zeros(len(x))

            def inverse(self, z):
                return z - 1

        assert is_custom(describe(Compose([Dequantize(), Compose([Logit(), Shift()])]))).endswith("Shift")

    def test_in_a_saved_density(self, tmp_path):
        x = torch.rand(50, 2, generator=seeded(), dtype=torch.float64)
        transform = Compose([Logit(0.1), Gaussianize.fit(Logit(0.1)(x)[0], 8)])
        density = Density.normalise(Quadratic(2), Gaussian(2), transform, n=500, generator=seeded())
        density.save(tmp_path)
        assert torch.equal(Density.load(tmp_path).log_prob(x), density.log_prob(x))


def test_integers_are_not_cut_to_integers():
    x = torch.tensor([[0], [1], [2]], dtype=torch.uint8)
    for transform in (Standardize.fit(x), Gaussianize.fit(x)):
        z, log_det = transform(x)
        assert z.dtype == log_det.dtype == torch.float64
        assert float(z[0]) == pytest.approx(-float(z[2]))
        assert 0.5 < float(z[2]) < 1.5


def test_transformed_draws_from_its_generator():
    x = torch.zeros(4, 1)
    one, two = (Transformed(x, Dequantize(), generator=seeded())[torch.arange(4)] for _ in range(2))
    assert torch.equal(one, two)
    rows = Transformed(x, Dequantize(), generator=seeded())
    assert not torch.equal(rows[torch.arange(4)], rows[torch.arange(4)])


def idx(array, kind=8):
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


class TestIdx:
    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    def test_reads_plain_and_compressed(self, tmp_path, pack):
        array = np.random.default_rng(0).integers(256, size=(2, 3, 4), dtype=np.uint8)
        (tmp_path / "a").write_bytes(pack(idx(array)))
        np.testing.assert_array_equal(read_idx(tmp_path / "a"), array)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "'a' is not an idx file"),
            (b"\1\2\3\4\5", "'a' is not an idx file"),
            (b"\0\0\x0d\1\0\0\0\0", "must hold unsigned bytes .type 8.. Got type 13"),
            (b"\0\0\x08\2\0\0\0\1", "its header ends early"),
            (b"\0\0\x08\0", "its header ends early"),
            (idx(np.zeros(5, np.uint8))[:-1], r"truncated or too long: 4 bytes for an array of shape \(5,\)"),
            (idx(np.zeros(5, np.uint8)) + b"x", "truncated or too long: 6 bytes"),
            (gzip.compress(idx(np.zeros(500, np.uint8)), mtime=0)[:-9], "'a' is not a complete gzip file"),
            (b"\x1f\x8b nonsense", "'a' is not a complete gzip file"),
        ],
    )
    def test_broken_files(self, tmp_path, content, message):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_idx(tmp_path / "a")

    def test_no_file(self, tmp_path):
        with pytest.raises(DataError, match="Cannot read .*: No such file"):
            read_idx(tmp_path / "nothing")


class TestMnist:
    @pytest.fixture
    def folder(self, tmp_path):
        """The test set's shapes in plain files."""
        (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.full((10_000, 28, 28), 3, np.uint8)))
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.arange(10_000).astype(np.uint8)))
        return tmp_path

    def test_plain_files(self, folder):
        found = mnist(folder, train=False)
        assert found.images.shape == (10_000, 1, 28, 28)
        assert found.images.dtype == found.labels.dtype == torch.uint8
        assert found.labels[:3].tolist() == [0, 1, 2]

    def test_wrong_shape(self, folder):
        (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(9, np.uint8)))
        with pytest.raises(DataError, match=r"must hold an array of shape \(10000,\). Got \(9,\)"):
            mnist(folder, train=False)

    def test_compressed_files_are_checked(self, folder):
        (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros((10_000, 28, 28), np.uint8))))
        with pytest.raises(
            DataError, match="'t10k-images-idx3-ubyte.gz' is damaged or not the published file: its md5"
        ):
            mnist(folder, train=False)

    def test_nothing_is_fetched_unasked(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "pooch", None)
        with pytest.raises(DataError, match="There is no 'train-images-idx3-ubyte.gz' in .*download=True"):
            mnist(tmp_path)
        with pytest.raises(InvalidValue, match=r"install unnorm\[download\]"):
            mnist(tmp_path, download=True)
        monkeypatch.delenv("UNNORM_DATA", raising=False)
        with pytest.raises(InvalidValue, match="The 'root' of mnist must be given"):
            mnist()

    def test_asked_it_is_fetched_and_checked(self, tmp_path, monkeypatch):
        asked = []

        def retrieve(url, known_hash, fname, path):
            asked.append((url, known_hash))
            (path / fname).write_bytes(b"not what was asked for")

        monkeypatch.setitem(sys.modules, "pooch", types.SimpleNamespace(retrieve=retrieve))
        with pytest.raises(DataError, match="is damaged or not the published file"):
            mnist(tmp_path, train=False, download=True)
        name = "t10k-images-idx3-ubyte.gz"
        assert asked == [(images.MNIST_SOURCE + name, "md5:9fb629c4189551a2d022fa330f9573f3")]

    def test_asked_without_a_folder_it_goes_into_a_cache(self, tmp_path, monkeypatch):
        asked = []

        def retrieve(url, known_hash, fname, path):
            asked.append(path)
            path.mkdir(parents=True)
            (path / fname).write_bytes(b"not what was asked for")

        pooch = types.SimpleNamespace(retrieve=retrieve, os_cache=lambda name: tmp_path / name)
        monkeypatch.setitem(sys.modules, "pooch", pooch)
        monkeypatch.delenv("UNNORM_DATA", raising=False)
        with pytest.raises(DataError, match="is damaged or not the published file"):
            mnist(download=True)
        assert asked == [tmp_path / "unnorm" / "mnist"]

    def test_the_real_files(self, real_data):
        """The first labels, as everybody knows them, and the mean pixel of the training set."""
        if not (real_data / "mnist").is_dir():
            pytest.skip("UNNORM_DATA has no folder mnist")
        found = mnist()
        assert found.labels[:6].tolist() == [5, 0, 4, 1, 9, 2]
        assert float(found.images.double().mean() / 255) == pytest.approx(0.1307, abs=1e-4)
        assert mnist(train=False).labels[:6].tolist() == [7, 2, 1, 0, 4, 1]


class TestRobustScaling:
    def test_a_few_wild_values_change_little(self):
        x = np.random.RandomState(0).standard_normal((1000, 2)) * [1.0, 100.0] + [5.0, 0.0]
        wild = x.copy()
        wild[:10] = 1e12
        plain, robust = robust_scale(x), robust_scale(wild)
        assert torch.allclose(plain.scale, torch.tensor([1.0, 100.0], dtype=torch.float64), rtol=0.1)
        assert torch.allclose(plain.scale, robust.scale, rtol=0.05)
        assert float((plain.loc - robust.loc).abs().div(plain.scale).max()) < 0.05

    @pytest.mark.parametrize("size", [1e300, 1e-300, 1.0])
    def test_any_size_of_numbers(self, size):
        x = np.random.RandomState(0).standard_normal((100, 1))
        z, log_det = robust_scale(size * x)(torch.from_numpy(size * x))
        assert torch.allclose(z, robust_scale(x)(torch.from_numpy(x))[0])
        assert torch.isfinite(log_det).all()

    def test_columns_whose_quartiles_coincide(self):
        x = np.zeros((1000, 3))
        x[:80, 0], x[:5, 1] = 1.0, 1.0
        found = robust_scale(x)
        assert found.scale.tolist() == pytest.approx([1 / (2 * stats.norm.ppf(0.95)), x[:, 1].std(), 1.0])

    @pytest.mark.parametrize("edge", [0.0, -1.0, math.nan])
    def test_log_tails_need_an_edge(self, edge):
        with pytest.raises(InvalidValue, match="The 'edge' of LogTails must be positive"):
            LogTails(edge)
