"""How many bridges and where: closed forms of Gaussian waymarks, and what a pilot makes of data near, far and wide."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from unnorm.bridges import DIRECT, MOST, Spacing, least_bridges, pilot, respaced
from unnorm.errors import InvalidValue
from unnorm.estimators import NCE, even_alphas
from unnorm.models import MLP
from unnorm.noise import Copula, Gaussian, GaussianMixture


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(mean, n=4000, d=1, seed=1):
    return mean + torch.randn(n, d, generator=seeded(seed))


def kept(alphas):
    """The data's share at each waymark; of N(m, I) and N(0, I) the waymark is N(kept m, I)."""
    return [math.sqrt(1 - alpha**2) for alpha in alphas]


def shift_gaps(m, alphas):
    """KL(N(a m, 1), N(b m, 1)) = m^2 (a - b)^2 / 2 of neighbours."""
    return [m**2 * (a - b) ** 2 / 2 for a, b in pairwise(kept(alphas))]


class Lines(nn.Module):
    """K linear functions, which log-ratios of shifted Gaussians are."""

    def __init__(self, d, heads):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d, heads))

    def forward(self, x):
        return x @ self.weight


class TestRespaced:
    @pytest.mark.parametrize("m", [1.0, 4.0, 10.0, 23.5])
    @pytest.mark.parametrize("wanted", [0.125, 0.5, 2.0])
    def test_a_shift_of_known_gaps(self, m, wanted):
        """Lengths are m (kept_k - kept_{k+1}): evenly spaced, kept is 1 - k/n, and n the least with gaps <= wanted."""
        fine = even_alphas(2000)
        found = respaced(fine, shift_gaps(m, fine), wanted)
        n = min(MOST, math.ceil(m / math.sqrt(2 * wanted) - 1e-3))
        assert len(found) == n + 1
        np.testing.assert_allclose(kept(found), np.linspace(1, 0, n + 1), atol=2e-3)
        if n < MOST:
            assert max(shift_gaps(m, found)) < 1.01 * wanted

    def test_on_the_measured_waymarks_it_is_exact(self):
        """Four even steps of a quarter nat are two of a nat: the middle waymark stays."""
        alphas = [math.sqrt(1 - share**2) for share in (1, 0.75, 0.5, 0.25, 0)]
        found = respaced(alphas, [0.25] * 4, wanted=1.0)
        assert found == pytest.approx((0.0, math.sqrt(0.75), 1.0), abs=1e-12)

    def test_units_do_not_matter(self):
        """Gaps and the wanted one times 4: lengths double, and so does what is wanted."""
        alphas, gaps = even_alphas(5), (0.3, 2.0, 0.7, 1.1, 0.2)
        assert respaced(alphas, gaps, 0.5) == pytest.approx(respaced(alphas, [4 * gap for gap in gaps], 2.0), abs=1e-14)

    @pytest.mark.parametrize("gaps", [(1e6,), (0.0, 3e4, 1e5), (9.0,) * 200])
    def test_at_most(self, gaps):
        found = respaced(even_alphas(len(gaps)), gaps)
        assert len(found) == MOST + 1
        assert all(a < b for a, b in pairwise(found))

    def test_at_least(self):
        """Where too little is seen they are at even angles; else the lengths still say where."""
        alphas = even_alphas(2)
        assert respaced(alphas, (0.0, 0.0), least=4) == even_alphas(4)
        assert respaced(alphas, (-0.2, 0.1), 0.5, least=3) == even_alphas(3)  # 0.45 of the 1.5 that tell
        found = respaced(alphas, (8.0, 0.5), 2.0, least=4)  # 5 long: a fifth of it after the middle
        angles = [math.asin(alpha) / math.pi for alpha in found]
        assert angles == pytest.approx([0, 0.25 * 1.25 / 4, 0.25 * 2.5 / 4, 0.25 * 3.75 / 4, 0.5], abs=1e-9)

    def test_nothing_between_is_one_bridge(self):
        assert respaced(even_alphas(6), [0.0] * 6) == (0.0, 1.0)
        assert respaced((0.0, 1.0), (-3.0,)) == (0.0, 1.0)

    def test_ends_and_order(self):
        """Any gaps, noisy ones below zero too: from 0 to 1, strictly increasing."""
        rng = np.random.default_rng(0)
        for _ in range(100):
            k = int(rng.integers(1, 9))
            found = respaced(even_alphas(k), rng.normal(0.5, 1.0, k), least=int(rng.integers(1, 5)))
            assert (found[0], found[-1]) == (0.0, 1.0)
            assert all(a < b for a, b in pairwise(found))


class TestLeast:
    @pytest.mark.parametrize("d", [1, 15, 16, 25, 26, 100, 784])
    def test_of_a_gaussian(self, d):
        """The least n with n >= sqrt(d) / 2.5, that is 25 n^2 >= 4 d; one for fewer than 16 numbers."""
        n = next(n for n in range(1, 100) if 25 * n**2 >= 4 * d) if d >= 16 else 1
        assert least_bridges(Gaussian(d)) == n

    def test_of_an_image_and_of_others(self):
        assert least_bridges(Gaussian((1, 10, 10), "diagonal")) == 4
        assert least_bridges(Copula(100)) == 1
        assert least_bridges(GaussianMixture(100, 2, "diagonal")) == 1


class TestSpacing:
    def test_lines(self):
        assert Spacing((0.0, 1.0), (0.25,), (0.0, 1.0)).line() == (
            "No bridges: a pilot saw 0.2 nats between data and noise."
        )
        found = Spacing(even_alphas(3), (0.5, 2.0), even_alphas(2))
        assert found.bridges == 3
        assert found.line() == "3 bridges: a pilot saw 0.5 to 2.0 nats between neighbours of its 2."


class TestPilot:
    @pytest.mark.parametrize(("m", "d"), [(4.0, 1), (8.0, 1), (2.5, 4)])
    def test_a_shift(self, m, d):
        """Gaps are the KLs of the waymarks N(kept m, I), and the new spacing is even: about one unit a step."""
        shift = m * math.sqrt(d)
        found = pilot(lambda k: Lines(d, k), Gaussian(d), rows(m, d=d), steps=200, lr=0.02)
        for gap, truth in zip(found.gaps, shift_gaps(shift, found.measured), strict=True):
            error = math.sqrt((2 * truth + math.expm1(2 * truth)) / 2000)  # of a mean and of a log mean weight
            assert abs(gap - truth) < 4 * error + 0.05 * truth
        lengths = [math.sqrt(2 * gap) for gap in shift_gaps(shift, found.alphas)]
        assert abs(np.mean(lengths) - 1) < 0.25
        assert max(lengths) < 1.5
        assert min(lengths) > 0.6

    def test_wanted(self):
        """Gaps of 2 nats are steps of two units: half as many."""
        found = pilot(lambda k: Lines(1, k), Gaussian(1), rows(8.0), steps=200, lr=0.02, wanted=2.0)
        assert found.bridges in (4, 5)

    @pytest.mark.parametrize("d", [1, 3])
    def test_data_that_follow_the_noise(self, d):
        found = pilot(lambda k: MLP(d, (32,), outputs=k, generator=seeded()), Gaussian(d), rows(0.0, d=d))
        assert found.alphas == (0.0, 1.0)
        assert abs(found.gaps[0]) < 0.1
        assert found.line().startswith("No bridges: a pilot saw ")

    def test_a_mixture_that_is_the_data(self):
        """No bridges, although half way lie 4 modes: the KL of data and middle, by quadrature, is above the limit."""
        q = GaussianMixture(1, 2, "diagonal")
        q.loc.copy_(torch.tensor([[-8.0], [8.0]]))
        x = np.linspace(-30, 30, 60_001)
        data = (norm.pdf(x, -8) + norm.pdf(x, 8)) / 2
        half = 8 * math.sqrt(2)
        middle = (norm.pdf(x, -half) + 2 * norm.pdf(x) + norm.pdf(x, half)) / 4
        inside = data > 1e-300
        kl = np.sum(data[inside] * np.log(data[inside] / middle[inside])) * (x[1] - x[0])
        assert kl > 2 * DIRECT
        found = pilot(lambda k: MLP(1, (32,), outputs=k, generator=seeded()), q, q.sample(3000, generator=seeded(5)))
        assert found.alphas == (0.0, 1.0)

    @pytest.mark.parametrize(("d", "least"), [(16, 2), (49, 3)])
    def test_wide_data_have_some(self, d, least):
        """Though there is nothing to learn; a noise of another kind gets none."""
        options = {"steps": 30, "batch": 64}

        def net(k):
            return MLP(d, (16,), outputs=k, generator=seeded())

        found = pilot(net, Gaussian(d), rows(0.0, 1000, d), **options)
        assert (found.bridges, len(found.measured)) == (least, 7)
        assert pilot(net, Copula(d), rows(0.0, 1000, d), **options).alphas == (0.0, 1.0)

    def test_seeds(self):
        def once(seed):
            return pilot(lambda k: Lines(1, k), Gaussian(1), rows(3.0), steps=40, lr=0.05, batch=64, seed=seed)

        assert once(3) == once(3)
        assert once(3).gaps != once(4).gaps

    def test_it_leaves_no_trace(self):
        """Neither the noise nor torch's own generator is changed."""
        q, x = Gaussian(2), rows(1.0, 500, 2)
        before, state = {name: value.clone() for name, value in q.state_dict().items()}, torch.get_rng_state()
        pilot(lambda k: Lines(2, k), q, x, steps=5, batch=32)
        assert all(torch.equal(value, before[name]) for name, value in q.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)

    def test_held_out_rows_are_what_is_measured(self):
        """Trained on N(3, 1), held to rows of the noise: the model's claim there is negative."""
        found = pilot(lambda k: Lines(1, k), Gaussian(1), rows(3.0), held_out=rows(0.0), steps=100, lr=0.05)
        assert found.gaps[0] < -1
        assert found.alphas == (0.0, 1.0)

    def test_another_base(self):
        """Published TRE learns by NCE, with its own options."""
        found = pilot(lambda k: Lines(1, k), Gaussian(1), rows(4.0), base=NCE, steps=200, lr=0.05, nu=2)
        assert 3 <= found.bridges <= 6

    @pytest.mark.parametrize("options", [{"steps": 0}, {"steps": -1}, {"wanted": 0}, {"wanted": math.nan}])
    def test_bad_arguments(self, options):
        with pytest.raises(InvalidValue, match="A pilot needs steps and a wanted gap above 0"):
            pilot(lambda k: Lines(1, k), Gaussian(1), rows(0.0), **options)

    def test_a_network_without_heads(self):
        with pytest.raises(InvalidValue, match="must map"):
            pilot(lambda k: MLP(1, (4,)), Gaussian(1), rows(0.0), steps=1)
