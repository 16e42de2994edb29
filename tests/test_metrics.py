"""The metrics, against slow obvious re-implementations, closed forms, scipy, and cases worked by hand."""

import math
import statistics
import sys
from functools import partial

import numpy as np
import pytest
import torch
from scipy import linalg, stats
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

from unnorm.data import Compose, Dequantize, Gaussianize, Logit, Standardize, Transformed, chunks, mnist
from unnorm.density import Density
from unnorm.errors import DataError, InvalidValue
from unnorm.metrics import (
    Discrepancy,
    bits_per_dim,
    compare,
    detect,
    discrepancy,
    fid,
    fpr_at_tpr,
    frechet,
    inception_score,
    median_bandwidth,
    mmd,
    nll,
    noise_floor,
    score_histogram,
    sliced_wasserstein,
)
from unnorm.models import Quadratic
from unnorm.noise import Gaussian
from unnorm.types import LogZ


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def slow_mmd(x, y, widths):
    """The definition, pair by pair."""

    def k(a, b):
        return sum(math.exp(-sum((s - t) ** 2 for s, t in zip(a, b, strict=True)) / (2 * h * h)) for h in widths) / len(
            widths
        )

    x, y = x.flatten(1).tolist(), y.flatten(1).tolist()
    n, m = len(x), len(y)
    within_x = sum(k(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    within_y = sum(k(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return within_x + within_y - 2 * sum(k(a, b) for a in x for b in y) / (n * m)


class TestMMD:
    @pytest.mark.parametrize("event", [(3,), (1, 2, 2)])
    @pytest.mark.parametrize("block", [1, 37, 10**6])
    def test_pair_by_pair(self, event, block, monkeypatch):
        """Unequal sizes, one or several bandwidths, whatever the blocks."""
        monkeypatch.setattr(discrepancy, "BLOCK", block)
        x, y = normal(13, *event), 1.3 * normal(9, *event, seed=1) + 0.5
        for widths in ((0.7,), (0.5, 1.0, 4.0)):
            assert mmd(x, y, bandwidths=widths) == pytest.approx(slow_mmd(x, y, widths), rel=1e-12)
        assert mmd(x, y, bandwidths=2) == mmd(x, y, bandwidths=[2.0])

    def test_bandwidths_in_any_form(self):
        x, y = normal(13, 3), normal(9, 3, seed=1)
        for one in (2, 2.0, np.float32(2), np.array(2.0), torch.tensor(2.0), np.array([2.0]), torch.tensor([2.0])):
            assert mmd(x, y, bandwidths=one) == mmd(x, y, bandwidths=[2.0])
        for several in ((0.5, 2.0), np.array([0.5, 2.0]), torch.tensor([0.5, 2.0]), [np.float32(0.5), torch.tensor(2)]):
            assert mmd(x, y, bandwidths=several) == mmd(x, y, bandwidths=[0.5, 2.0])

    def test_two_gaussians(self):
        """E k of differences N(a, s) is (1 + s / h^2)^(-d/2) exp(-a^2 / 2 (h^2 + s)); over seeds, with its error."""
        d, n, m, h, shift, scale = 2, 60, 40, 1.5, 0.8, 1.4

        def expected_k(variance, square):
            return (h**2 / (h**2 + variance)) ** (d / 2) * math.exp(-square / (2 * (h**2 + variance)))

        truth = expected_k(2, 0) + expected_k(2 * scale**2, 0) - 2 * expected_k(1 + scale**2, d * shift**2)
        found = torch.tensor(
            [
                mmd(normal(n, d, seed=2 * s), shift + scale * normal(m, d, seed=2 * s + 1), bandwidths=h)
                for s in range(600)
            ]
        )
        error = found.std() / len(found) ** 0.5
        assert abs(found.mean() - truth) < 4 * error
        assert error < 0.02 * truth

    def test_unbiased_where_there_is_no_difference(self):
        found = torch.tensor([mmd(normal(30, 2, seed=2 * s), normal(30, 2, seed=2 * s + 1)) for s in range(300)])
        assert abs(found.mean()) < 4 * found.std() / len(found) ** 0.5
        assert 0.3 < (found < 0).double().mean() < 0.8

    def test_far_from_zero(self):
        """Points near 1e6: squares of 1e12 would leave nothing of distances near one."""
        x, y = normal(20, 2), normal(20, 2, seed=1) + 1
        assert mmd(x + 1e6, y + 1e6, bandwidths=1.0) == pytest.approx(slow_mmd(x, y, (1.0,)), rel=1e-6)

    def test_median_bandwidth_is_scipys(self, monkeypatch):
        from scipy.spatial.distance import pdist

        x, y = normal(30, 4), 2 * normal(21, 4, seed=1)
        assert median_bandwidth(x, y) == pytest.approx(np.median(pdist(torch.cat([x, y]).numpy())), rel=1e-12)
        assert mmd(x, y) == mmd(x, y, bandwidths=median_bandwidth(x, y))
        monkeypatch.setattr(discrepancy, "LOOKED_AT", 3)
        few = torch.cat([x[[0, 14, 29]], y[[0, 10, 20]]])
        assert median_bandwidth(x, y) == pytest.approx(np.median(pdist(few.numpy())), rel=1e-12)

    def test_refusals(self):
        x = normal(5, 2)
        for bad in (0.0, [1.0, -1.0], [], math.nan, torch.tensor(-1.0), np.float32(0)):
            with pytest.raises(InvalidValue, match="The 'bandwidths' of mmd must be positive. Got"):
                mmd(x, x, bandwidths=bad)
        with pytest.raises(DataError, match="More than half of the points coincide"):
            mmd(torch.zeros(5, 1), torch.zeros(5, 1))


class TestFrechet:
    @pytest.mark.parametrize("sizes", [(50, 40), (7, 6)])
    def test_against_scipys_matrix_root(self, sizes):
        x, y = normal(sizes[0], 5) @ normal(5, 5, seed=2), normal(sizes[1], 5, seed=1) + 1
        a, b = np.cov(x.T), np.cov(y.T)
        root = linalg.sqrtm(a @ b).real
        expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a + b - 2 * root)
        assert frechet(x, y) == pytest.approx(float(expected), rel=1e-6)

    def test_diagonal_gaussians_with_exact_moments(self):
        """Coordinates at +-s in all combinations are uncorrelated: d^2 = sum of (m - m')^2 + (s - s')^2."""
        cube = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3) * math.sqrt(7 / 8)
        scale, other = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([4.0, 0.5, 3.0])
        found = frechet(cube * scale, cube * other + 2)
        assert found == pytest.approx(3 * 4 + 9 + 2.25 + 9, rel=1e-12)

    def test_fewer_points_than_coordinates(self):
        """Through the roots of the Gram matrices' product: the nonzero eigenvalues of S_x S_y are those of C C^T."""
        x, y = normal(6, 40), normal(9, 40, seed=1) + 0.3
        a, b = ((p - p.mean(0)).numpy() / math.sqrt(len(p) - 1) for p in (x, y))
        eigenvalues = np.linalg.eigvals(a @ b.T @ b @ a.T).real.clip(0)
        expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + (a**2).sum() + (b**2).sum() - 2 * np.sqrt(eigenvalues).sum()
        assert frechet(x, y) == pytest.approx(float(expected), rel=1e-6)

    def test_of_a_set_with_itself_and_moved(self):
        x = normal(4, 30).float()
        assert frechet(x, x) < 1e-12
        assert frechet(x, x + 2) == pytest.approx(30 * 4, rel=1e-6)

    def test_its_bias_is_as_documented(self):
        """d^2 / 2n, here with the mean's and the diagonal's part: d (d + 5) / 2n."""
        d, n = 10, 1000
        found = torch.tensor([frechet(normal(n, d, seed=2 * s), normal(n, d, seed=2 * s + 1)) for s in range(20)])
        assert float(found.mean()) == pytest.approx(d * (d + 5) / (2 * n), rel=0.1)

    def test_features(self):
        x, y = normal(20, 1, 2, 2), normal(30, 1, 2, 2, seed=1)
        weight = normal(4, 3, seed=2)
        found = frechet(x, y, features=lambda z: z.flatten(1) @ weight)
        assert found == pytest.approx(frechet(x.flatten(1) @ weight, y.flatten(1) @ weight))


class TestSlicedWasserstein:
    @pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
    @pytest.mark.parametrize(("n", "m"), [(12, 12), (12, 8), (5, 7)])
    def test_one_dimension_by_repeating_points(self, p, n, m):
        """With n m copies of each both sets are equally large, and W_p pairs them in order."""
        x, y = normal(n, 1), 2 * normal(m, 1, seed=1) + 1
        a, b = np.sort(np.repeat(x.numpy(), m)), np.sort(np.repeat(y.numpy(), n))
        expected = (np.abs(a - b) ** p).mean() ** (1 / p)
        assert sliced_wasserstein(x, y, p=p, n_projections=3) == pytest.approx(expected, rel=1e-12)
        if p == 1:
            assert expected == pytest.approx(stats.wasserstein_distance(x[:, 0].numpy(), y[:, 0].numpy()), rel=1e-12)

    def test_directions_one_by_one(self, monkeypatch):
        """The mean of W_2^2 over the directions that the generator draws, each by scipy-free sorting."""
        monkeypatch.setattr(discrepancy, "DIRECTIONS", 3)
        x, y = normal(25, 3), normal(25, 3, seed=1) * torch.tensor([1.0, 2.0, 3.0])
        directions = torch.randn(3, 10, generator=seeded(4), dtype=torch.float64).T
        squares = []
        for direction in directions.numpy():
            unit = direction / np.linalg.norm(direction)
            squares.append(((np.sort(x.numpy() @ unit) - np.sort(y.numpy() @ unit)) ** 2).mean())
        found = sliced_wasserstein(x, y, n_projections=10, generator=seeded(4))
        assert found == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-12)

    def test_a_shift(self):
        """Projected on a random unit vector a shift of length a has mean square a^2 / d."""
        x = normal(10, 4)
        found = sliced_wasserstein(x, x + 3, n_projections=4000, generator=seeded())
        assert found == pytest.approx(3.0, rel=0.05)  # a^2 = 4 * 9

    def test_refusals(self):
        x = normal(4, 2)
        with pytest.raises(InvalidValue, match="'n_projections' of sliced_wasserstein must be at least 1. Got 0"):
            sliced_wasserstein(x, x, n_projections=0)
        with pytest.raises(InvalidValue, match="'p' of sliced_wasserstein must be finite and at least 1. Got 0.5"):
            sliced_wasserstein(x, x, p=0.5)


@pytest.mark.parametrize("metric", [mmd, frechet, sliced_wasserstein])
def test_points_are_checked(metric):
    good = normal(5, 2)
    with pytest.raises(InvalidValue, match=r"shapes \(n, \*event\) and \(m, \*event\). Got \(5, 2\), \(5, 3\)"):
        metric(good, normal(5, 3))
    with pytest.raises(InvalidValue, match=r"Got \(5,\), \(5,\)"):
        metric(good[:, 0], good[:, 0])
    with pytest.raises(DataError, match="must have at least 2. Got 1"):
        metric(good, good[:1])
    with pytest.raises(DataError, match="NaN or infinity"):
        metric(good, good / torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("metric", [mmd, frechet, partial(sliced_wasserstein, generator=None, n_projections=1)])
def test_numpy_points(metric):
    """Also read-only, reversed, of the other byte order, or of integers; in one dimension one direction says all."""
    x, y = normal(20, 1).numpy(), normal(25, 1, seed=1).numpy()
    expected = metric(torch.tensor(x), torch.tensor(y))
    swapped, fixed = x.astype(">f8"), y.copy()
    fixed.flags.writeable = False
    for pair in ((x, y), (torch.tensor(x), y), (swapped, fixed), (x[::-1], y)):
        assert metric(*pair) == pytest.approx(expected, rel=1e-12)
    whole = np.arange(20)[:, None]
    assert metric(whole, y) == pytest.approx(metric(torch.arange(20.0)[:, None], torch.tensor(y)), rel=1e-12)


@pytest.mark.parametrize("metric", ["mmd", "frechet", "sliced-wasserstein"])
class TestCompare:
    def test_says_what_is_resolvable(self, metric):
        x, y = normal(200, 2), normal(200, 2, seed=1)
        same = compare(x, y, metric, generator=seeded())
        moved = compare(x + 1, y, metric, generator=seeded())
        assert (same.resolved, moved.resolved) == (False, True)
        assert same.metric == metric
        assert same.n == (200, 200)
        assert same.floor_n == (100, 100)
        assert "show no difference" in same.line()
        assert "is resolved" in moved.line()

    def test_the_floor_is_what_independent_draws_show(self, metric):
        """Over 60 pairs of sets of one distribution: their root mean square, whose own error is some 15%.

        With the data divided the floor is that of half the points: higher by 2 for what falls like 1/n, by the root of
        2 for the sliced distance. And values above twice the floor are rare.
        """
        found, divided = [], []
        for s in range(60):
            x, y, again = (normal(50, 2, seed=3 * s + k) for k in range(3))
            found.append(compare(x, y, metric, again=again, generator=seeded(s)))
            divided.append(compare(x, y, metric, generator=seeded(s)))

        def rms(values):
            return math.sqrt(np.mean(np.square(values)))

        whole, halves = (rms([one.floor for one in each]) for each in (found, divided))
        assert {one.floor_n for one in found} == {(50, 50)}
        assert {one.floor_n for one in divided} == {(25, 25)}
        assert whole == pytest.approx(rms([one.value for one in found]), rel=0.5)
        assert halves / whole == pytest.approx(math.sqrt(2) if metric == "sliced-wasserstein" else 2, rel=0.25)
        assert sum(one.resolved for one in found) <= 12
        assert sum(one.resolved for one in divided) <= 2

    def test_the_generator_decides(self, metric):
        x, y = normal(30, 2), normal(30, 2, seed=1)
        assert compare(x, y, metric, generator=seeded(1)) == compare(x, y, metric, generator=seeded(1))
        assert compare(x, y, metric, generator=seeded(1)).floor != compare(x, y, metric, generator=seeded(2)).floor

    def test_images(self, metric):
        x, y = normal(20, 1, 3, 3), normal(20, 1, 3, 3, seed=1)
        flat = compare(x.flatten(1), y.flatten(1), metric, generator=seeded())
        assert compare(x, y, metric, generator=seeded()) == flat
        assert compare(x.numpy(), y, metric, generator=seeded()) == flat
        assert compare(x.numpy(), y.numpy(), metric, again=x.numpy(), generator=seeded()).floor_n == (20, 20)

    def test_unknown_options(self, metric):
        x = normal(20, 2)
        with pytest.raises(InvalidValue, match=f"Unknown option of {metric} 'q'. Known: "):
            compare(x, x, metric, q=1)


class TestCompareOptions:
    """The value and the floor are those of the metric with these options, by the same divisions."""

    def floor(self, metric, y, generator):
        return noise_floor(metric, y, (40, 40), generator=generator)

    @pytest.mark.parametrize("widths", [3.0, [0.3, 3.0], torch.tensor(3.0), np.float32(3.0)])
    def test_bandwidths(self, widths):
        x, y = normal(40, 2) + 1, normal(40, 2, seed=1)
        own = partial(mmd, bandwidths=widths)
        found = compare(x, y, "mmd", bandwidths=widths, generator=seeded())
        floor = self.floor(own, y, seeded())
        assert found == ("mmd", own(x, y), floor.rms, (40, 40), (20, 20), floor.chance)
        assert found.value != compare(x, y, "mmd").value
        assert compare(x, y, mmd, bandwidths=widths, generator=seeded()) == found
        assert compare(x, y, own, generator=seeded()) == found

    def test_features(self):
        x, y = normal(40, 1, 2, 2) + 1, normal(40, 1, 2, 2, seed=1)
        own = partial(frechet, features=lambda z: z.flatten(1)[:, :3])
        found = compare(x, y, "frechet", features=own.keywords["features"], generator=seeded())
        floor = self.floor(own, y, seeded())
        assert found == ("frechet", own(x, y), floor.rms, (40, 40), (20, 20), floor.chance)
        assert found.value != compare(x, y, "frechet").value
        assert compare(x.numpy(), y.numpy(), "frechet", generator=seeded(), **own.keywords) == found

    def test_directions(self):
        """In one dimension the direction does not matter, the power does."""
        x, y = normal(40, 1) + 1, normal(40, 1, seed=1)
        own = partial(sliced_wasserstein, n_projections=1, p=1.0)
        found = compare(x, y, "sliced-wasserstein", n_projections=1, p=1.0, generator=seeded())
        assert found.value == pytest.approx(own(x, y), rel=1e-12)
        generator = seeded()
        torch.randn(1, 1, generator=generator, dtype=torch.float64)  # the direction comes first
        assert found.floor == pytest.approx(self.floor(own, y, generator)[0], rel=1e-12)
        with pytest.raises(InvalidValue, match="'n_projections' of sliced_wasserstein must be at least 1. Got 0"):
            compare(x, y, "sliced-wasserstein", n_projections=0)


class TestNoiseFloor:
    def test_three_deviations_above_the_mean_are_resolved(self):
        found = Discrepancy("mmd", 4.1, 1.5, (5, 5), (5, 5), (1.0, 1.0))
        assert found.resolved
        assert not found._replace(value=3.9).resolved

    @pytest.mark.parametrize("metric", ["mmd", "frechet", "sliced-wasserstein"])
    def test_power_and_false_alarms(self, metric):
        """Two fifths more spread are resolved nearly always, a second draw of the same hardly ever."""

        def resolved(scale, seed):
            x, y = scale * normal(500, 2, seed=seed), normal(500, 2, seed=1000 + seed)
            return compare(x, y, metric, generator=seeded(seed)).resolved

        assert sum(resolved(1.4, seed) for seed in range(8)) >= 7
        assert sum(resolved(1.0, seed) for seed in range(20)) <= 1

    def test_parts_are_disjoint_and_of_the_sizes_asked_for(self):
        data = torch.arange(20.0)[:, None]
        seen = []

        def metric(x, y):
            seen.append((set(x[:, 0].tolist()), set(y[:, 0].tolist())))
            return 3.0 if len(seen) % 2 else -4.0

        floor, n, chance = noise_floor(metric, data, (6, 9), splits=4, generator=seeded())
        assert floor == pytest.approx(math.sqrt((9 + 16) / 2))
        assert chance == pytest.approx((-0.5, statistics.stdev([3, -4, 3, -4])))
        assert n == (6, 9)
        assert len({frozenset(x) for x, _ in seen}) == 4
        for x, y in seen:
            assert (len(x), len(y), len(x & y)) == (6, 9, 0)

    @pytest.mark.parametrize(
        ("wanted", "got"), [((100, 20), (10, 10)), ((3, 20), (3, 17)), ((10, 5), (10, 5)), ((15, 5), (10, 5))]
    )
    def test_sizes_never_exceed_those_compared(self, wanted, got):
        assert noise_floor(lambda x, y: 0.0, torch.zeros(20, 1), wanted).n == got

    def test_a_name_is_no_bandwidth(self):
        with pytest.raises(InvalidValue, match="one number or several; None is the median. Got 'median'"):
            mmd(normal(5, 2), normal(5, 2), bandwidths="median")

    def test_the_same_bandwidth_for_value_and_floor(self, monkeypatch):
        used = []
        monkeypatch.setattr(discrepancy, "mmd", lambda x, y, bandwidths: used.append(bandwidths) or 0.0)
        x, y = normal(20, 2), 5 * normal(20, 2, seed=1)
        compare(x, y, generator=seeded())
        assert set(used) == {median_bandwidth(x, y)}

    def test_a_metric_of_ones_own_sees_the_events(self):
        def shape(x, y):
            return float(x.ndim)

        found = compare(normal(6, 1, 2, 2), normal(6, 1, 2, 2), shape)
        assert (found.metric, found.value, found.floor) == ("shape", 4.0, 4.0)

    def test_refusals(self):
        x = normal(6, 2)
        with pytest.raises(InvalidValue, match="Unknown metric 'mdm'. Did you mean 'mmd'"):
            compare(x, x, "mdm")
        with pytest.raises(InvalidValue, match="Unknown option of mmd 'bandwidth'. Did you mean 'bandwidths'"):
            compare(x, x, bandwidth=1.0)
        with pytest.raises(InvalidValue, match="'splits' of a noise floor must be at least 2. Got 1"):
            compare(x, x, splits=1)
        with pytest.raises(DataError, match="A noise floor needs at least 4 data. Got 3"):
            compare(x, x[:3], "frechet")
        with pytest.raises(InvalidValue, match=r"Got \(6, 3\), \(6, 2\)"):
            compare(x, x, again=normal(6, 3))


class TestDetection:
    def test_by_hand_with_ties(self):
        """Inliers 3 2 2 1, outliers 2 0 0 -inf, pair by pair:
        AUROC = (4 + 3.5 + 3.5 + 3) / 16. Inliers positive, from above: 3 | 2 2 2 | 1: precisions 1, 3/4, 4/5 at
        recalls 1/4, 3/4, 1. Outliers positive, from below: -inf | 0 0 | 1 | 2 2 2: 1, 1, then 4/7 for the last quarter.
        """
        found = detect([3.0, 2.0, 2.0, 1.0], [2.0, 0.0, 0.0, -math.inf])
        assert found.auroc == pytest.approx(14 / 16)
        assert found.aupr_in == pytest.approx(1 / 4 + 3 / 4 / 2 + 4 / 5 / 4)
        assert found.aupr_out == pytest.approx(3 / 4 + 4 / 7 / 4)
        assert (found.fpr80, found.fpr95) == (0.25, 0.25)
        assert (found.n_in, found.n_out) == (4, 4)
        # DeLong: placements 1, 7/8, 7/8, 3/4 and 1 - (1/2, 1, 1, 1).
        assert found.stderr == pytest.approx(math.sqrt((1 / 32 / 3) / 4 + (3 / 16 / 3) / 4))
        assert found.floor == pytest.approx(math.sqrt(9 / (12 * 16)))

    @pytest.mark.parametrize(
        ("tpr", "expected"), [(0.01, 0.0), (0.25, 0.0), (0.26, 0.5), (0.75, 0.5), (0.76, 0.75), (1.0, 0.75)]
    )
    def test_false_positives_at_any_rate(self, tpr, expected):
        """Inliers 5 3 3 1, outliers 3 3 2 0: thresholds 5 (1/4, 0), 3 (3/4, 1/2), 2 (3/4, 3/4), 1 (1, 3/4)."""
        assert fpr_at_tpr([5.0, 3.0, 3.0, 1.0], [3.0, 3.0, 2.0, 0.0], tpr) == expected

    def test_nothing_but_ties(self):
        found = detect(torch.zeros(3), torch.zeros(6))
        assert (found.auroc, found.fpr80, found.fpr95) == (0.5, 1.0, 1.0)
        assert (found.aupr_in, found.aupr_out) == pytest.approx((1 / 3, 2 / 3))

    def test_eighty_and_ninety_five(self):
        """Inliers 1 ... 100; the outliers lie between, so that the two rates differ."""
        inliers = torch.arange(1.0, 101.0)
        outliers = torch.tensor([0.5, 5.5, 5.5, 20.5, 20.5, 20.5, 20.5, 21.5, 30.5, 99.5])
        found = detect(inliers, outliers)
        assert (found.fpr80, found.fpr95) == (0.3, 0.7)  # above 21 and above 6

    def test_as_scikit_learn_has_it_without_ties(self):
        inliers, outliers = normal(40) + 1, normal(60, seed=1)
        found = detect(inliers, outliers.numpy())
        scores = torch.cat([inliers, outliers])
        labels = np.repeat([1, 0], [40, 60])
        assert found.auroc == pytest.approx(roc_auc_score(labels, scores))
        assert found.aupr_in == pytest.approx(average_precision_score(labels, scores))
        assert found.aupr_out == pytest.approx(average_precision_score(1 - labels, -scores))

    def test_standard_error_and_floor_are_those_of_many_draws(self):
        """150 pairs of sets: the spread of the AUROC, with a shift and without."""
        for shift, field in ((1.0, "stderr"), (0.0, "floor")):
            found = [detect(normal(30, seed=2 * s) + shift, normal(50, seed=2 * s + 1)) for s in range(150)]
            spread = np.std([one.auroc for one in found], ddof=1)
            claimed = np.sqrt(np.mean([getattr(one, field) ** 2 for one in found]))
            assert claimed == pytest.approx(spread, rel=4 / math.sqrt(2 * 150))

    def test_infinite_scores_are_the_ends(self):
        finite = detect([5.0, 1.0, 0.0], [0.0, 0.0, 3.0])
        assert detect([math.inf, 1.0, -math.inf], [-math.inf, -math.inf, 3.0]) == finite

    def test_one_score_has_no_error(self):
        assert math.isnan(detect([1.0], [0.0, 0.5]).stderr)

    def test_refusals(self):
        good = torch.zeros(3)
        with pytest.raises(DataError, match="1 of 2 scores of the outliers are NaN"):
            detect(good, torch.tensor([math.nan, 1.0]))
        with pytest.raises(DataError, match="2 of 2 scores of the inliers are NaN"):
            fpr_at_tpr(torch.tensor([math.nan, math.nan]), good, 0.5)
        with pytest.raises(DataError, match=r"the inliers must have shape \(n,\), n at least 1. Got \(0,\)"):
            detect([], good)
        with pytest.raises(DataError, match=r"the outliers must have shape .* Got \(3, 1\)"):
            detect(good, good[:, None])
        for tpr in (0.0, 1.1):
            with pytest.raises(InvalidValue, match=f"'tpr' of fpr_at_tpr must be above 0 and at most 1. Got {tpr}"):
                fpr_at_tpr(good, good, tpr)

    def test_histogram(self, tmp_path, monkeypatch):
        """Shares of the whole set, also where a part of it is at -inf and cannot be shown."""
        drawn = []
        from matplotlib.figure import Figure

        save = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
        low = torch.cat([normal(60) - 5, torch.full((40,), -math.inf)])
        score_histogram(tmp_path / "h.png", {"data": normal(100), "other, 5$": low}, "scores of 5$")
        assert (tmp_path / "h.png").read_bytes()[:4] == b"\x89PNG"
        axis = drawn[0].axes[0]
        assert [text.get_text() for text in axis.get_legend().get_texts()] == [
            "data (100)",
            r"other, 5\$ (100, 40 at -inf)",
        ]
        shares = [sum(bar.get_height() for bar in bars) for bars in axis.containers]
        assert shares[0] == pytest.approx(1, abs=0.02)
        assert shares[1] == pytest.approx(0.6, abs=0.02)
        score_histogram(tmp_path / "empty.png", {"none": torch.full((3,), -math.inf)}, "")
        with pytest.raises(InvalidValue, match="'cut' of score_histogram must be at least 0 and below 0.5. Got 0.5"):
            score_histogram(tmp_path / "h.png", {"data": normal(100)}, cut=0.5)

    @pytest.mark.parametrize("cut", [0.0, 0.005])
    def test_histogram_leaves_out_nothing(self, tmp_path, monkeypatch, cut):
        """One score of a thousand, far out: it has a bar of its own, or the last bar holds it and the axis says so."""
        drawn = []
        from matplotlib.figure import Figure

        monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
        scores = {"usual": np.linspace(0, 1, 999), "odd": [50.0]}
        score_histogram(tmp_path / "h.png", scores, cut=cut, counts=True, marks={"above": 0.9})
        axis = drawn[0].axes[0]
        assert [sum(bar.get_height() for bar in bars) for bars in axis.containers] == [999, 1]
        last = next(bar for bar in axis.containers[1] if bar.get_height())
        assert last.get_x() + last.get_width() == pytest.approx(50 if cut == 0 else 1, abs=0.01)
        assert ("bar hold" in axis.get_xlabel()) == (cut > 0)
        assert axis.get_yscale() == "log"
        assert axis.get_ylim()[0] < 1
        assert [line.get_xdata()[0] for line in axis.lines] == [0.9]
        assert "above 0.9" in [text.get_text() for text in axis.get_legend().get_texts()]

    def test_histogram_of_what_was_detected(self, tmp_path):
        """One mapping serves both, whatever its scores are."""
        scores = {"inliers": normal(20).numpy(), "outliers": [0.0, -1.0, -math.inf]}
        assert detect(**scores).n_out == 3
        score_histogram(str(tmp_path / "h.png"), scores)
        assert (tmp_path / "h.png").read_bytes()[:4] == b"\x89PNG"


class TestNLL:
    def test_the_errors_add_in_squares(self):
        x = normal(50)
        found = nll(x, log_z_stderr=0.3)
        assert found.value == pytest.approx(-float(x.mean()))
        assert found.stderr == pytest.approx(math.hypot(stats.sem(x), 0.3))
        assert nll(x) == (found.value, pytest.approx(stats.sem(x)), 50)

    def test_refusals(self):
        for shape in ((0,), (), (3, 1)):
            with pytest.raises(InvalidValue, match=r"must have shape \(n,\), n at least 1. Got \("):
                nll(torch.zeros(shape))
        with pytest.raises(InvalidValue, match="'log_z_stderr' of nll must not be negative. Got -0.1"):
            nll(torch.zeros(3), log_z_stderr=-0.1)


class TestBitsPerDim:
    def test_a_fair_coin_and_a_loaded_one(self):
        """Probabilities 3/4, 1/4 as a density on the unit interval: the entropy in bits, whatever the draws."""
        density = torch.tensor([1.5, 0.5])

        def loaded(z):
            return density[(2 * z[:, 0]).long()].log()

        x = torch.tensor([[0], [0], [0], [1]])
        expected = -0.75 * math.log2(0.75) - 0.25 * math.log2(0.25)
        found = bits_per_dim(loaded, x, Dequantize(2), log_z=None, generator=seeded())
        assert found.value == pytest.approx(expected, rel=1e-6)
        assert found.stderr == pytest.approx(np.std(np.log2([0.75] * 3 + [0.25]), ddof=1) / 2, rel=1e-6)
        assert found[2:] == (4, 1, 1)

    def test_units_do_not_matter(self):
        """A uniform density seen through logit and standardisation: every Jacobian has to be there, or it is not 3."""
        x = torch.randint(8, (50, 1, 2, 2), generator=seeded())
        first = Compose([Dequantize(8), Logit(1e-4)])
        scale = Standardize.fit(first(x, generator=seeded())[0])
        transform = Compose([first, scale])

        def uniform(z):
            """The density of z where the dequantised pixels are uniform: derivative of the inverse map."""
            y = torch.sigmoid(z * scale.scale + scale.loc)
            return (torch.log(y * (1 - y) / (1 - 2e-4)) + scale.scale.log()).flatten(1).sum(-1)

        found = bits_per_dim(uniform, x.to(torch.uint8), transform, log_z=None, dtype=torch.float64, chunk=7)
        assert found.value == pytest.approx(3.0, rel=1e-9)
        assert found.dims == 4
        assert found.stderr < 1e-9

    def test_more_draws_tighten_the_bound(self):
        """Toward the exact mass of each level under a normal density, from above."""
        x = torch.randint(4, (500, 1), generator=seeded())

        def log_p(z):
            return stats_normal.log_prob(z[:, 0])

        stats_normal = torch.distributions.Normal(0.3, 0.1)
        edges = stats.norm(0.3, 0.1).cdf(np.arange(5) / 4)
        exact = -np.log2(np.diff(edges)[x[:, 0]]).mean()
        one, many = (bits_per_dim(log_p, x, Dequantize(4), log_z=None, n_draws=k, generator=seeded()) for k in (1, 400))
        assert one.value > exact + 1
        assert many.value == pytest.approx(exact, rel=0.02)
        assert many.n_draws == 400

    def test_a_normaliser_and_its_error(self):
        """The same model, unnormalised by 3 nats: the value stays, the error grows by that of log Z."""
        x = torch.randint(4, (100, 2), generator=seeded())
        transform = Compose([Dequantize(4), Standardize(2)])
        q = Gaussian(2)
        plain = bits_per_dim(q.log_prob, x, transform, log_z=None, generator=seeded())
        log_z = LogZ(3.0, 0.5, 9.0, 0.1, "importance", 10)
        shifted = bits_per_dim(lambda z: q.log_prob(z) + 3, x, transform, log_z=log_z, generator=seeded())
        assert shifted.value == pytest.approx(plain.value, rel=1e-6)
        unit = 2 * math.log(2)
        assert shifted.stderr == pytest.approx(math.hypot(plain.stderr, 0.5 / unit), rel=1e-6)

    def test_of_a_density(self):
        """Through the parts of a fitted object: a quadratic model whose log Z is known in closed form."""
        x = torch.randint(4, (200, 2), generator=seeded())
        transform = Compose([Dequantize(4), Standardize(2)])
        density = Density.normalise(Quadratic(2), Gaussian(2), transform, n=1000, generator=seeded())
        found = bits_per_dim(density.model, x, density.transform, log_z=density.log_z, generator=seeded())
        exact = bits_per_dim(Gaussian(2), x, transform, log_z=None, generator=seeded())
        assert found.value == pytest.approx(exact.value, abs=4 * density.log_z.stderr + 1e-4)
        assert bits_per_dim(density, x, generator=seeded()) == found
        assert bits_per_dim(density, x, density.transform, log_z=density.log_z, generator=seeded()) == found
        assert bits_per_dim(density, x.numpy(), generator=seeded()) == found
        # In the precision of its model.
        other = bits_per_dim(Density(Quadratic(2).double(), Gaussian(2), transform, density.log_zs), x)
        assert other.value == pytest.approx(found.value, abs=4 * math.hypot(found.stderr, other.stderr))

    def test_of_a_density_refusals(self):
        x = torch.zeros(3, 1)
        log_z = LogZ(3.0, 0.5, 9.0, 0.1, "importance", 10)
        density = Density(Quadratic(1), Gaussian(1), Dequantize(4), {"importance": log_z})
        with pytest.raises(InvalidValue, match="takes its own 'transform': leave it out, .* Got another Dequantize"):
            bits_per_dim(density, x, Dequantize(4))
        for bad in (None, log_z._replace(value=2.0)):
            with pytest.raises(InvalidValue, match="takes its own 'log_z': leave it out, .* Got (None|LogZ)"):
                bits_per_dim(density, x, log_z=bad)
        for method in (density.log_prob, density.noise_log_prob):
            with pytest.raises(InvalidValue, match=rf"call bits_per_dim\(density, data\).* density.{method.__name__}"):
                bits_per_dim(method, x, density.transform, log_z=None)
        with pytest.raises(InvalidValue, match="must begin with Dequantize: bits are of integers. Got Standardize"):
            bits_per_dim(Density(Quadratic(1), Gaussian(1), None, {"importance": log_z}), x)

    def test_nothing_is_left_out_silently(self):
        x = torch.zeros(3, 1)
        with pytest.raises(InvalidValue, match="needs 'log_z': .* None where log_prob is normalised .* Got nothing"):
            bits_per_dim(Gaussian(1), x, Dequantize())
        with pytest.raises(InvalidValue, match="needs 'log_z': the LogZ of log_prob, .* Got 0.3"):
            bits_per_dim(Gaussian(1), x, Dequantize(), log_z=0.3)
        with pytest.raises(InvalidValue, match="needs a 'transform' that begins with Dequantize; only a Density has"):
            bits_per_dim(Gaussian(1), x, log_z=None)

    def test_refusals(self):
        x = torch.zeros(3, 1)
        for transform in (Standardize(1), Compose([Logit(), Dequantize()])):
            with pytest.raises(InvalidValue, match="The 'transform' of bits_per_dim must begin with Dequantize"):
                bits_per_dim(Gaussian(1), x, transform, log_z=None)
        with pytest.raises(DataError, match="Dequantize needs integers from 0 to 255. Got 0.5"):
            bits_per_dim(Gaussian(1), x + 0.5, Dequantize(), log_z=None)
        with pytest.raises(InvalidValue, match="'n_draws' of bits_per_dim must be at least 1. Got 0"):
            bits_per_dim(Gaussian(1), x, Dequantize(), log_z=None, n_draws=0)
        with pytest.raises(InvalidValue, match="must have at least one row"):
            bits_per_dim(Gaussian(1), x[:0], Dequantize(), log_z=None)
        with pytest.raises(InvalidValue, match=r"A model must map \(n, \*event\) to \(n,\)"):
            bits_per_dim(lambda z: z, x, Dequantize(), log_z=None)


@pytest.mark.parametrize("name", ["logit", "copula"])
def test_mnist_book_keeping(real_data, name):
    """The published figures, 2.01 and 1.45 bits per dimension, on all 60,000 + 10,000 images."""
    if not (real_data / "mnist").is_dir():
        pytest.skip("UNNORM_DATA has no folder mnist")
    generator = seeded()

    def rows(transform, data):
        return torch.cat(list(chunks(Transformed(data, transform, generator=generator), 2000)))

    train, test = mnist().images, mnist(train=False).images
    if name == "logit":
        expected, second = 2.01, Logit(1e-6)
    else:
        expected, second = 1.45, Gaussianize.fit(rows(Dequantize(256), train), torch.arange(257) / 256)
    transform = Compose([Dequantize(256), second])
    found = bits_per_dim(Gaussian.fit(rows(transform, train)), test, transform, log_z=None, generator=generator)
    assert found.value == pytest.approx(expected, abs=0.01)
    assert (found.n, found.dims) == (10_000, 784)
    assert 0.002 < found.stderr < 0.004


class Pixels(nn.Module):
    """A feature network that drops out in training, so that its mode shows."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x.flatten(1)[:, :3])


class TestImages:
    def test_fid_is_the_frechet_distance_of_the_features(self):
        pytest.importorskip("torchmetrics")
        x, y, again = (normal(n, 1, 2, 2, seed=n).float() for n in (40, 50, 60))
        network = Pixels().train()
        found = fid(x + 1, y, network, generator=seeded(), chunk=7)
        assert found.value == pytest.approx(frechet(x.flatten(1)[:, :3] + 1, y.flatten(1)[:, :3]), rel=1e-6)
        assert found.metric == "fid"
        assert (found.n, found.floor_n) == ((40, 50), (25, 25))
        assert found.resolved
        assert network.training
        assert fid(x, y, network, again=again, generator=seeded()).floor_n == (40, 50)
        expected = compare(x[:, 0].flatten(1)[:, :3], y.flatten(1)[:, :3], frechet, splits=5, generator=seeded())
        assert fid(x, y, network, generator=seeded()).floor == pytest.approx(expected.floor, rel=1e-6)

    def test_inception_score_by_hand(self):
        """Certain and evenly spread over k classes: k. The same class always, or no idea at all: 1."""
        pytest.importorskip("torchmetrics")
        sure = 50 * torch.eye(3).repeat(200, 1)[:, :, None, None]
        vague = torch.zeros(100, 3, 1, 1)
        network = nn.Flatten()
        found = inception_score(vague, sure, network, parts=2, generator=seeded())
        assert found.value == pytest.approx(1, abs=1e-6)
        assert found.reference == pytest.approx(3, rel=0.02)
        assert (found.n, found.floor_n) == ((100, 600), (100, 500))
        assert 0 < found.floor < 0.2

    def test_inception_score_against_its_definition(self):
        """torchmetrics draws the parts: the value lies among those of many random ones, which differ little."""
        pytest.importorskip("torchmetrics")
        logits = normal(30, 4).float()
        p = torch.softmax(logits.double(), 1)
        found = inception_score(logits, logits.repeat(2, 1), nn.Identity(), parts=2, generator=seeded())

        def score(part):
            return float(torch.exp((part * (part.log() - part.mean(0).log())).sum(1).mean()))

        orders = [torch.randperm(30, generator=seeded(s)) for s in range(500)]
        several = [np.mean([score(half) for half in p[order].chunk(2)]) for order in orders]
        assert min(several) < found.value < max(several)
        assert max(several) - min(several) < 0.05

    def test_global_randomness_is_left_alone(self):
        pytest.importorskip("torchmetrics")
        x = normal(20, 3)
        state = torch.random.get_rng_state()
        one, two = (inception_score(x, x, nn.Identity(), parts=2, generator=seeded()) for _ in range(2))
        fid(x, x, nn.Identity(), generator=seeded())
        assert one == two
        assert torch.equal(state, torch.random.get_rng_state())

    @pytest.mark.parametrize("features", [2048, "inception", None])
    def test_weights_are_never_downloaded(self, features):
        pytest.importorskip("torchmetrics")
        x = normal(20, 3)
        for metric in (fid, inception_score):
            with pytest.raises(InvalidValue, match=f"must be a network .* would download weights. Got {features!r}"):
                metric(x, x, features)

    def test_refusals(self, monkeypatch):
        pytest.importorskip("torchmetrics")
        x = normal(20, 3, 1, 1)
        with pytest.raises(
            InvalidValue, match=r"The 'features' must map images to shape \(n, k\). Got \(20, 3, 1, 1\)"
        ):
            fid(x, x, nn.Identity())
        for parts in (1, 11):
            with pytest.raises(InvalidValue, match=f"'parts' of inception_score must be at least 2.* Got {parts}"):
                inception_score(x, x, nn.Flatten(), parts=parts)
        monkeypatch.setitem(sys.modules, "torchmetrics.image.fid", None)
        with pytest.raises(InvalidValue, match=r"install unnorm\[images\]"):
            fid(x, x, nn.Flatten())
