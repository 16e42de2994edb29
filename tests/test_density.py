"""log Z, the verdict, and the fitted object: normalised, sampled, saved and loaded."""

import json
import math
import os
import pickle

import numpy as np
import pytest
import torch
from torch import distributions as td
from torch import nn

from unnorm import MLP, Density, Gaussian, Quadratic, Tilted, from_distribution
from unnorm.archive import digest
from unnorm.data import Standardize
from unnorm.diagnostics import effective_sample_size, pareto_khat
from unnorm.errors import BrokenFile, InvalidValue, MixingWarning, WeightsWarning
from unnorm.partition import bounding_box, grid, importance


def quadratic(dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = Quadratic(dim)
    with torch.no_grad():
        model.linear.copy_(0.5 * torch.randn(dim, generator=generator))
        model.log_diagonal.copy_(0.3 * torch.randn(dim, generator=generator))
        model.lower.copy_(0.3 * torch.randn(dim, dim, generator=generator))
    return model


@pytest.fixture
def tilted():
    return Tilted(Gaussian(2), MLP(2, hidden=(16, 16), generator=torch.Generator().manual_seed(0)))


class TestQuadratic:
    def test_log_z_is_torchs(self):
        model = quadratic(4)
        normal = td.MultivariateNormal(model.mean.detach(), precision_matrix=model.precision.detach())
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(model(x) - model.log_z, normal.log_prob(x), rtol=1e-5, atol=1e-5)


class TestImportance:
    @pytest.mark.parametrize("dim", [1, 2, 5])
    def test_within_its_error(self, dim):
        """z-scores over 40 seeds are standard normal: their mean square is chi-squared / 40."""
        model = quadratic(dim)
        draws = td.MultivariateNormal(torch.zeros(dim), precision_matrix=model.precision.detach())
        torch.manual_seed(0)
        q = Gaussian.fit(model.mean.detach() + 1.3 * draws.sample((500,)))
        truth, scores = model.log_z.item(), []
        for seed in range(40):
            found = importance(model, q, 4000, generator=torch.Generator().manual_seed(seed))
            assert found.khat < 0.7
            scores.append((found.value - truth) / found.stderr)
        assert 20 < np.square(scores).sum() < 74  # 99.8% of chi-squared with 40 degrees

    def test_chunks_do_not_matter(self):
        model, q = quadratic(2), Gaussian(2)
        results = [
            importance(model, q, 1000, generator=torch.Generator().manual_seed(0), chunk=c) for c in (1000, 1000)
        ]
        assert results[0] == results[1]
        assert importance(model, q, 1000, chunk=7).n == 1000

    def test_a_noise_far_away_shows_in_khat_or_ess(self):
        narrow = Gaussian(1)
        narrow.scale_tril.mul_(0.3)
        found = importance(Quadratic(1), narrow, 20_000, generator=torch.Generator().manual_seed(0))
        assert found.khat > 0.7

    def test_needs_draws(self):
        with pytest.raises(InvalidValue, match="'n' must be at least 2. Got 1"):
            importance(Quadratic(1), Gaussian(1), 1)


class TestGrid:
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_exact_for_a_gaussian(self, dim):
        model = quadratic(dim).double()
        box = bounding_box(model.mean.detach() + 9 * torch.tensor([[-1.0], [1.0]]).expand(2, dim))
        found = grid(model, box, like=torch.zeros((), dtype=torch.float64))
        assert abs(found.value - model.log_z.item()) < 1e-8
        assert found.stderr < 1e-6
        assert math.isnan(found.khat)

    def test_a_box_that_cuts_the_density_shows_in_the_error(self):
        box = torch.tensor([[-1.0], [8.0]], dtype=torch.float64)
        found = grid(Quadratic(1), box, like=torch.zeros(()))
        missing = Quadratic(1).log_z.item() - found.value
        assert 0.1 < missing < found.stderr

    def test_a_spike_between_the_cells_shows_in_the_error(self):
        box = torch.tensor([[-5.0], [5.0]], dtype=torch.float64)
        found = grid(lambda x: -((x[:, 0] / 0.001) ** 2) / 2, box, like=torch.zeros((), dtype=torch.float64), cells=512)
        assert found.stderr > 0.1

    def test_four_dimensions_are_refused(self):
        box = torch.stack([torch.zeros(4), torch.ones(4)])
        with pytest.raises(InvalidValue, match="1 to 3 dimensions. Got 4"):
            grid(Quadratic(4), box, like=torch.zeros(()), cells=4)


class TestDiagnostics:
    def test_ess_by_definition(self):
        w = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        assert math.isclose(effective_sample_size(w.log()), 100 / 30, rel_tol=1e-12)
        assert math.isclose(effective_sample_size(w.log() + 1e4), 100 / 30, rel_tol=1e-9)

    @pytest.mark.parametrize("k", [0.2, 0.5, 0.9, 1.5])
    def test_khat_of_pareto_weights(self, k):
        """w = U^-k has a Pareto tail of shape k; over 20 seeds the fit is right within 4 standard errors."""
        found = [
            pareto_khat(-k * torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(s)).log())
            for s in range(20)
        ]
        assert abs(np.mean(found) - k) < 4 * np.std(found) / np.sqrt(20) + 0.03

    def test_zero_weights_are_no_tail(self):
        log_w = torch.rand(10_000, generator=torch.Generator().manual_seed(0)).log()
        log_w[::3] = -math.inf
        assert pareto_khat(log_w) < 0

    def test_bounded_weights_have_negative_khat(self):
        assert pareto_khat(torch.rand(10_000, generator=torch.Generator().manual_seed(0)).log()) < 0

    @pytest.mark.parametrize(
        "log_w",
        [
            torch.tensor([math.inf, 0.0] * 50),
            torch.tensor([math.nan, 0.0] * 50),
            torch.full((100,), -math.inf),
            torch.randn(10),
            torch.distributions.Cauchy(0.0, 1.0).icdf(torch.linspace(0.001, 0.999, 999)).double() * 100,
        ],
        ids=["inf", "nan", "all zero", "too few", "cauchy"],
    )
    def test_degenerate_weights_never_look_good(self, log_w):
        assert pareto_khat(log_w) >= 0.7


class TestDensity:
    def test_integrates_to_one_in_the_users_units(self, tilted):
        transform = Standardize(2)
        transform.loc.copy_(torch.tensor([100.0, -3.0]))
        transform.scale.copy_(torch.tensor([10.0, 0.2]))
        density = Density.normalise(tilted, tilted.noise, transform, generator=torch.Generator().manual_seed(0))
        x, y = torch.linspace(20, 180, 400).double(), torch.linspace(-5, -1, 400).double()
        with torch.no_grad():
            mass = density.log_prob(torch.cartesian_prod(x, y)).exp().sum() * (x[1] - x[0]) * (y[1] - y[0])
        assert abs(mass - 1) < 1e-3

    def test_importance_and_grid_agree(self, tilted):
        density = Density.normalise(tilted, tilted.noise, generator=torch.Generator().manual_seed(0))
        by, of = density.log_zs["importance"], density.log_zs["grid"]
        assert abs(by.value - of.value) < 4 * math.hypot(by.stderr, of.stderr)

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_samples_have_the_models_moments(self, dim):
        model = quadratic(dim)
        wide = Gaussian.fit(
            model.mean.detach() + 2 * torch.randn(2000, dim, generator=torch.Generator().manual_seed(0))
        )
        density = Density.normalise(model, wide, generator=torch.Generator().manual_seed(0))
        x = density.sample(20_000, generator=torch.Generator().manual_seed(1))
        truth = torch.linalg.inv(model.precision).detach()
        spread = truth.diagonal()
        # Resampling repeats draws: at least four noise draws' worth of ESS stand behind each sample.
        error = (spread * 1.25 / len(x)).sqrt()
        assert ((x.mean(0) - model.mean.detach()).abs() < 4 * error).all()
        assert ((x.T.cov().view(dim, dim) - truth).abs() < 5 * (2 * spread.max() ** 2 / len(x)) ** 0.5).all()

    def test_same_generator_same_samples(self, tilted):
        density = Density.normalise(tilted, tilted.noise, n=1000)
        first, second = (density.sample(5, generator=torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(first, second)

    def test_a_noise_too_far_to_choose_from(self):
        far = Gaussian(6)
        far.loc.fill_(6.0)
        density = Density.normalise(Quadratic(6), far, n=1000, generator=torch.Generator().manual_seed(0))
        assert density.log_z.method in ("ais", "bracket")
        assert abs(density.log_z.value - 3 * math.log(2 * math.pi)) < 4 * density.log_z.stderr
        found = density.draws(500, generator=torch.Generator().manual_seed(0))
        # Annealed chains left the noise for the model, N(0, I): the error bar is their own.
        assert found.method == "hmc"
        assert found.r_hat < 1.05
        assert (found.x.mean(0).abs() < 4 / found.ess**0.5).all()

    def test_annealed_starts_find_both_modes(self):
        """Six standard deviations to either side of the noise, weights 1 to 3: no draw is there, the chains are."""

        class Two(nn.Module):
            def forward(self, x):
                left, right = (-((x - side).square().sum(-1)) / 2 for side in (-4.0, 4.0))
                return torch.logaddexp(left, right + math.log(3))

        density = Density.normalise(Two(), Gaussian(5), n=1000, generator=torch.Generator().manual_seed(0))
        with pytest.warns(MixingWarning):  # no chain goes from one to the other
            x = density.draws(2000, generator=torch.Generator().manual_seed(1)).x
        assert 0.44 < (x[:, 0] > 0).double().mean() < 0.98  # 32 chains: four errors of 0.08

    def test_chosen_draws_follow_the_model(self):
        """Weights that are light enough choose from the noise's own draws: moments of the tilted Gaussian."""

        class Shift(nn.Module):
            def forward(self, x):
                return 0.7 * x[:, 0] - 0.3 * x[:, 1].square()

        q = Gaussian(3)
        density = Density.normalise(Tilted(q, Shift()), q, generator=torch.Generator().manual_seed(0))
        found = density.draws(4000, generator=torch.Generator().manual_seed(1))
        assert (found.method, found.ess) == ("rejection", 4000)
        assert len(found.x.unique(dim=0)) == 4000
        error = 4 / 4000**0.5
        assert (found.x.mean(0) - torch.tensor([0.7, 0.0, 0.0])).abs().max() < error
        assert (found.x.var(0) - torch.tensor([1.0, 1 / 1.6, 1.0])).abs().max() < 1.5 * error

    def test_held_out_rows_show_what_the_noise_misses(self):
        """Two modes, a noise on one of them: alone it looks perfect, with rows of both it does not."""
        far = torch.zeros(4)
        far[0] = 30.0

        class Two(nn.Module):
            def forward(self, x):
                return torch.logaddexp(-(x.square().sum(-1)) / 2, -((x - far).square().sum(-1)) / 2)

        noise, generator = Gaussian(4), torch.Generator().manual_seed(0)
        noise.scale_tril.mul_(1.2)
        rows = torch.randn(1000, 4, generator=generator) + far * (torch.arange(1000) % 2)[:, None]
        truth = 2 * math.log(2 * math.pi) + math.log(2)
        blind = Density.normalise(Two(), noise, n=20_000, generator=generator)
        assert abs(blind.log_z.value - (truth - math.log(2))) < 4 * blind.log_z.stderr
        assert blind.unchecked
        assert not blind.climb.trusted
        with pytest.warns(WeightsWarning, match="log Z cannot be believed"):
            seeing = Density.normalise(Two(), noise, held_out=rows, n=20_000, generator=generator)
        assert seeing.doubts

    def test_log_prob_is_differentiable(self, tilted):
        density = Density.normalise(tilted, tilted.noise, n=1000)
        x = torch.zeros(2, 2, requires_grad=True)
        (score,) = torch.autograd.grad(density.log_prob(x).sum(), x)
        (direct,) = torch.autograd.grad(tilted(x).sum(), x)
        torch.testing.assert_close(score, direct)

    def test_far_data_are_on_the_grid(self):
        """A hundredth of the mass far outside the noise is found, sampled, and counted, when the data are given."""
        two = td.MixtureSameFamily(
            td.Categorical(torch.tensor([0.99, 0.01])), td.Normal(torch.tensor([0.0, 30.0]), torch.tensor([1.0, 1.0]))
        )

        class Two(nn.Module):
            def forward(self, x):
                return two.log_prob(x[:, 0]) + 0.7

        density = Density.normalise(Two(), Gaussian(1), data=torch.tensor([[0.0], [30.0]]), n=1000)
        assert density.log_z.method == "grid"
        assert abs(density.log_z.value - 0.7) < 1e-5
        far = (density.sample(20_000, generator=torch.Generator().manual_seed(0)) > 15).sum()
        assert abs(far - 200) < 4 * 200**0.5

    def test_samples_keep_the_users_precision(self, tilted):
        transform = Standardize(2)
        transform.loc.fill_(1.7e9)
        density = Density.normalise(tilted, tilted.noise, transform, n=1000)
        x = density.sample(1000, generator=torch.Generator().manual_seed(0))
        assert len(x.unique(dim=0)) == 1000
        assert (x - 1.7e9).abs().max() < 10

    def test_refuses_other_widths(self, tilted):
        density = Density.normalise(tilted, tilted.noise, n=1000)
        with pytest.raises(InvalidValue, match=r"events of shape \(2,\). Got \(5, 3\)"):
            density.log_prob(torch.zeros(5, 3))
        with pytest.raises(InvalidValue, match="at least 1. Got 0"):
            density.sample(0)


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return -x.square().sum(-1) + self.layer(x).squeeze(-1).tanh()


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


class TestFiles:
    @pytest.fixture
    def folder(self, tilted, tmp_path):
        Density.normalise(tilted, tilted.noise, n=1000, generator=torch.Generator().manual_seed(0)).save(tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        ("make", "noise"),
        [
            (lambda q: Tilted(q, MLP(3, hidden=(8,), generator=torch.Generator().manual_seed(0))), Gaussian(3)),
            (
                lambda q: MLP(3, hidden=(8,), activation="relu", generator=torch.Generator().manual_seed(0)),
                Gaussian(3, "low-rank", 2),
            ),
            (lambda q: quadratic(3), Gaussian(3, "diagonal")),
        ],
    )
    @pytest.mark.filterwarnings("ignore::unnorm.errors.WeightsWarning")  # an untrained network under a narrow noise
    @pytest.mark.filterwarnings("ignore::unnorm.errors.MixingWarning")  # whose density has no finite integral
    def test_round_trip(self, tmp_path, make, noise):
        density = Density.normalise(make(noise), noise, n=1000, evaluations=100_000)
        density.save(tmp_path)
        loaded = Density.load(tmp_path)
        x = torch.randn(5, 3)
        assert torch.equal(density.log_prob(x), loaded.log_prob(x))
        assert repr((loaded.log_z, loaded.doubts)) == repr((density.log_z, density.doubts))  # a grid's ESS is NaN
        generators = [torch.Generator().manual_seed(0) for _ in range(2)]
        drawn = [each.sample(10, generator=g) for each, g in zip((density, loaded), generators, strict=True)]
        assert torch.equal(*drawn)

    def test_a_bad_verdict_survives_the_files(self, tilted, tmp_path):
        density = Density.normalise(tilted, tilted.noise, n=1000)
        density.log_zs = {"importance": density.log_zs["importance"]._replace(khat=math.inf)}
        density.save(tmp_path)
        assert Density.load(tmp_path).log_zs["importance"].khat == math.inf

    def test_what_rows_said_survives_the_files(self, tilted, tmp_path):
        density = Density.normalise(tilted, tilted.noise, n=1000)
        density.unchecked, density.not_ruled_out = "no rows were given", 0.03
        density.save(tmp_path)
        loaded = Density.load(tmp_path)
        assert (loaded.unchecked, loaded.not_ruled_out) == ("no rows were given", 0.03)

    def test_a_foreign_module_is_given_at_load(self, tmp_path):
        model, q = Foreign(), from_distribution(td.Normal(torch.zeros(3), torch.ones(3)))
        density = Density.normalise(model, q, n=1000)
        density.save(tmp_path)
        with pytest.raises(InvalidValue, match=r"contains a .*Foreign, which a file cannot bring: load with model="):
            Density.load(tmp_path)
        other = from_distribution(td.Normal(torch.ones(3), torch.ones(3)))
        loaded = Density.load(tmp_path, model=Foreign(), noise=other)
        x = torch.randn(5, 3)
        assert torch.equal(density.log_prob(x), loaded.log_prob(x))
        assert torch.equal(q.log_prob(x), loaded.noise.log_prob(x))

    def test_nothing_there(self, tmp_path):
        with pytest.raises(BrokenFile, match="There is no saved density at"):
            Density.load(tmp_path / "nowhere")

    @pytest.mark.parametrize("keep", [0, 7, 100, -1])
    def test_truncated_tensors(self, folder, keep):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(BrokenFile, match="truncated, edited, or from another model"):
            Density.load(folder)

    @pytest.mark.parametrize("keep", [0, 20, -3])
    def test_truncated_description(self, folder, keep):
        path = folder / "model.json"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(BrokenFile, match="truncated, edited, or foreign"):
            Density.load(folder)

    def test_edited_description(self, folder):
        path = folder / "model.json"
        path.write_text(path.read_text().replace('"value": ', '"value": 1'))
        with pytest.raises(BrokenFile, match="edited or damaged"):
            Density.load(folder)

    @pytest.mark.parametrize("content", ["[]", '{"format": "other"}', "null", "3"])
    def test_foreign_description(self, folder, content):
        (folder / "model.json").write_text(content)
        with pytest.raises(BrokenFile, match="was not written by unnorm"):
            Density.load(folder)

    @staticmethod
    def forge(folder, **changes):
        """Edit the description and mend its digest, as somebody who means harm would."""
        path = folder / "model.json"
        description = json.loads(path.read_text())
        description.pop("digest")
        description |= changes
        path.write_text(json.dumps(description | {"digest": digest(description)}))

    def test_malicious_pickle_renamed(self, folder, monkeypatch, tmp_path):
        import hashlib

        monkeypatch.chdir(tmp_path)
        content = pickle.dumps(Bomb())
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(BrokenFile, match="checksum does not match"):
            Density.load(folder)
        self.forge(folder, tensors_sha256=hashlib.sha256(content).hexdigest())
        with pytest.raises(BrokenFile, match="not a safetensors file"):
            Density.load(folder)
        assert not (tmp_path / "exploded").exists()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": {"kind": "os.system"}}, "describes something unknown"),
            ({"model": {"kind": []}}, "describes something unknown"),
            ({"model": {"kind": "mlp", "event": [2], "hidden": [10**9, 10**9], "activation": "silu"}}, "does not fit"),
            ({"model": {"kind": "mlp", "event": [2], "spam": 1}}, "description of a 'mlp' is not valid"),
            ({"model": {"kind": "mlp", "event": "x" * 9}}, "description of a 'mlp' is not valid"),
            ({"noise": {"kind": "mlp", "event": [2]}}, "does not fit"),
            ({"log_z": {"importance": {"value": "high"}}}, "log Z is not valid"),
            ({"log_z": {}}, "does not describe a density"),
            ({"extra": 1}, "does not describe a density"),
        ],
    )
    def test_forged_description(self, folder, changes, message):
        self.forge(folder, **changes)
        with pytest.raises(BrokenFile, match=message):
            Density.load(folder)
