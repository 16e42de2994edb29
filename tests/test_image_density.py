"""Densities of images: coordinates against closed forms, one short fit to the end, and its samples."""

import importlib
import math

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import nn
from typer.testing import CliRunner

from unnorm import Bridged, Density, Gaussian, Training, images
from unnorm.cli import app
from unnorm.data import Dequantize, Identity, image_data
from unnorm.device import fabric_for
from unnorm.draws import by_annealing
from unnorm.errors import InvalidValue, WeightsWarning
from unnorm.images import COORDINATES, Coordinates, bridged, coordinates, fit_images, scalar
from unnorm.metrics import bits_per_dim
from unnorm.models import WideResNet
from unnorm.plots import sheet

ladder = importlib.import_module("unnorm.partition.ladder")
DIGITS = image_data("digits")
SMALL = {"widths": (16,), "blocks": 1, "features": 16}
TRAINING = Training(steps=300, batch=64, lr=2e-3, schedule="cosine", iterate="ema")
EVALUATIONS = 300_000  # with a fifth of it a hundred effective chains were a matter of luck: it had 47 to 67
FLOW = {"steps": 20, "couplings": (1, 1), "width": 8, "blocks": 1, "bins": 4}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", COORDINATES)
class TestCoordinates:
    def found(self, kind):
        return coordinates(DIGITS, kind, **(FLOW if kind == "flow" else {}))

    def test_the_noise_there_is_a_standard_normal(self, kind):
        where = self.found(kind)
        z = torch.randn(5, 1, 8, 8, generator=seeded())
        expected = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum((1, 2, 3))
        torch.testing.assert_close(where.noise.log_prob(z), expected)

    def test_bytes_come_back(self, kind):
        where = self.found(kind)
        images = DIGITS.test.images[:20]
        z, log_det = where.transform(images, generator=seeded())
        assert log_det.shape == (20,)
        np.testing.assert_array_equal(where.transform.inverse(z.double()), images)

    def test_a_network_sees_moderate_numbers(self, kind):
        where = self.found(kind)
        seen = where.seen.inverse(where.rows(DIGITS.train.images)[torch.arange(500)])
        assert seen.shape == (500, 1, 8, 8)
        assert 0.3 < float(seen.std()) < 1.5

    def test_a_network_finds_the_shades(self, kind):
        """Where it sees pixels: the dequantised bytes, whatever coordinates they went through."""
        where = self.found(kind)
        if kind == "flow":
            assert isinstance(where.pixels, Identity)
            return
        images = DIGITS.test.images[:20]
        z, _ = where.transform(images, generator=seeded())
        shades = where.pixels.inverse(where.seen.inverse(z))
        expected = Dequantize(DIGITS.levels)(images, generator=seeded())[0]
        torch.testing.assert_close(shades, expected, rtol=1e-9, atol=1e-9)

    def test_a_file_brings_them_back_and_nothing_trains_them(self, kind, tmp_path):
        where = self.found(kind)
        where.save(tmp_path / "where.safetensors", {"of": kind})
        again = Coordinates.load(tmp_path / "where.safetensors", {"of": kind})
        assert again is not None
        assert Coordinates.load(tmp_path / "where.safetensors", {"of": "others"}) is None
        z, log_det = again.transform(DIGITS.test.images[:5], generator=seeded())
        assert not z.requires_grad  # else the way back through a flow of pixels remembers every one of them
        expected, expected_det = where.transform(DIGITS.test.images[:5], generator=seeded())
        torch.testing.assert_close(z, expected)
        torch.testing.assert_close(log_det, expected_det)

    def test_bridges_begin_as_the_noise(self, kind):
        where = self.found(kind)
        model = bridged(where, DIGITS.event, 3, **SMALL)
        z = where.rows(DIGITS.test.images)[torch.arange(6)]
        torch.testing.assert_close(model(z), where.noise.log_prob(z))
        assert model(z, heads=True).shape == (6, 3)


def test_a_wide_network_for_bridges():
    where = coordinates(DIGITS, "gaussian")
    model = bridged(where, DIGITS.event, 3, net=WideResNet, depth=10, width=1)
    z = where.noise.sample(2, generator=seeded())
    assert model(z, heads=True).shape == (2, 3)
    assert any(isinstance(part, WideResNet) for part in model.modules())


def test_bits_of_the_gaussian_noise_are_those_of_its_covariance():
    """-log2 of the density of levels under N(mean, cov) of their logits, written out."""
    where = coordinates(DIGITS, "gaussian")
    images = DIGITS.test.images[:50]
    found = bits_per_dim(where.noise, images, where.transform, log_z=None, dtype=torch.float64, generator=seeded(3))
    whiten = where.transform.transforms[2]
    u = (images.double() + torch.rand(images.shape, generator=seeded(3), dtype=torch.float64)) / 17
    p = 1e-6 + (1 - 2e-6) * u
    normal = torch.distributions.MultivariateNormal(whiten.loc, scale_tril=whiten.scale_tril)
    log_p = normal.log_prob((p.log() - (1 - p).log()).flatten(1))
    log_p += ((1 - 2e-6) / (p * (1 - p))).log().flatten(1).sum(1) - 64 * math.log(17)
    assert found.value == pytest.approx(-float(log_p.mean()) / 64 / math.log(2), abs=1e-6)


def test_scalar_is_one_map_for_all_pixels():
    transform = scalar((1, 3, 3), 5.0, 0.5)
    x = torch.randn(2, 1, 3, 3, generator=seeded(), dtype=torch.float64)
    z, log_det = transform(x)
    torch.testing.assert_close(z, 5 + 0.5 * x)
    torch.testing.assert_close(log_det, torch.full((2,), 9 * math.log(0.5), dtype=torch.float64))


def test_unknown_noises_and_options():
    with pytest.raises(InvalidValue, match="Unknown noise for images 'gausian'. Did you mean 'gaussian'"):
        coordinates(DIGITS, "gausian")
    with pytest.raises(InvalidValue, match="noise 'copula' for images"):
        coordinates(DIGITS, "copula", steps=3)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A short fit, whose log Z can be believed."""
    folder = tmp_path_factory.mktemp("digits")
    density = fit_images(
        DIGITS, "copula", TRAINING, bridges=4, folder=folder / "run", evaluations=EVALUATIONS, progress=False, **SMALL
    )
    density.save(folder / "density")
    return density, folder


class TestFit:
    def test_it_is_better_than_its_noise(self, fitted):
        density, _ = fitted
        model = bits_per_dim(density, DIGITS.test.images, generator=seeded())
        noise = bits_per_dim(density.noise, DIGITS.test.images, density.transform, log_z=None, generator=seeded())
        assert model.value < noise.value - 0.005
        assert density.log_z.stderr < 0.2
        assert density.climb.trusted
        assert density.climb.rows >= 100

    def test_a_finished_run_is_resumed_as_it_is(self, fitted):
        density, folder = fitted
        again = fit_images(
            DIGITS,
            "copula",
            TRAINING,
            bridges=4,
            folder=folder / "run",
            resume=True,
            evaluations=EVALUATIONS,
            progress=False,
            **SMALL,
        )
        x = DIGITS.test.images[:9]
        torch.testing.assert_close(again.log_prob(x, generator=seeded()), density.log_prob(x, generator=seeded()))

    def test_the_noise_is_kept_with_the_run(self, fitted, monkeypatch):
        _, folder = fitted
        monkeypatch.setattr(images, "coordinates", None)  # it is not fitted again
        assert images._kept(DIGITS, "copula", fabric_for("cpu"), folder / "run").noise.event == (1, 8, 8)
        assert Coordinates.load(folder / "run" / images.FILE, {"data": "other", "noise": "copula"}) is None

    def test_the_checkpoint_can_be_carried(self, fitted):
        _, folder = fitted
        weights = sum(p.numel() for p in fitted[0].model.net.parameters())
        assert (folder / "run" / "checkpoint.safetensors").stat().st_size < 4 * 4 * weights + 4 * 64**2 * 8 + 50_000

    def test_it_is_saved_and_read(self, fitted):
        density, folder = fitted
        again = Density.load(folder / "density")
        x = DIGITS.test.images[:9]
        torch.testing.assert_close(again.log_prob(x, generator=seeded()), density.log_prob(x, generator=seeded()))


class Narrow(nn.Module):
    """Heads from N(0, I) over N(0, I / 4) to N(0, I / 64)."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([-30.0, -1.5]))

    def forward(self, x):
        return x.flatten(1).square().sum(1, keepdim=True) * self.slopes


class TestSamples:
    def test_annealed_draws_have_the_models_law(self):
        q = Gaussian((1, 4, 4), "diagonal")
        found = by_annealing(Bridged(q, Narrow()), q, 700, generator=seeded())  # more than fit into one turn
        assert found.x.shape == (700, 1, 4, 4)
        # 700 x 16 squares of N(0, 1/64): their mean has the relative error sqrt(2 / 11,200) = 0.013.
        assert float(found.x.square().mean()) == pytest.approx(1 / 64, rel=0.06)
        assert abs(float(found.x.mean())) < 4 / 8 / math.sqrt(700 * 16)
        assert 0.5 < found.acceptance <= 1
        assert 1 < found.ess <= 700
        assert "annealed from the noise" in found.line()

    def test_one_draw(self):
        q = Gaussian((1, 4, 4), "diagonal")
        found = by_annealing(Bridged(q, Narrow()), q, 1, generator=seeded())
        assert found.x.shape == (1, 1, 4, 4)
        assert 0 < found.acceptance <= 1

    def test_a_far_density_of_images_goes_over_its_bridges(self, monkeypatch):
        q = Gaussian((1, 8, 8), "diagonal")
        paths = []
        plan = ladder.plan
        monkeypatch.setattr(ladder, "plan", lambda *a, **k: paths.append(k["path"]) or plan(*a, **k))
        with pytest.warns(WeightsWarning):
            density = Density.normalise(Bridged(q, Narrow()), q, n=1000, evaluations=20_000, generator=seeded())
        assert paths == ["bridges"]
        draws = density.draws(40, generator=seeded())
        assert (draws.method, draws.x.shape) == ("annealed", (40, 1, 8, 8))
        assert float(draws.x.square().mean()) == pytest.approx(1 / 64, rel=0.1)

    def test_lucky_weights_do_not_count(self):
        """A hundred effective draws mean nothing where Pareto k is above 0.7: the images are annealed all the same."""
        q = Gaussian((1, 8, 8), "diagonal")
        with pytest.warns(WeightsWarning):
            density = Density.normalise(Bridged(q, Narrow()), q, n=1000, evaluations=20_000, generator=seeded())
        density.log_zs["importance"] = density.log_zs["importance"]._replace(ess=150.0, khat=0.9)
        assert density.draws(40, generator=seeded()).method == "annealed"

    def test_samples_of_digits_are_levels(self, fitted):
        density, _ = fitted
        found = density.sample(5, generator=seeded())
        assert found.shape == (5, 1, 8, 8)
        assert torch.equal(found, found.round())
        assert 0 <= float(found.min()) <= float(found.max()) <= 16

    def test_a_sheet_from_the_command_line(self, fitted, tmp_path):
        _, folder = fitted
        out = tmp_path / "sheet.png"
        done = CliRunner().invoke(app, ["sample", str(folder / "density"), "-n", "12", "--out", str(out)])
        assert done.exit_code == 0, done.output
        picture = imread(out)
        assert picture.shape[0] < picture.shape[1]  # two rows of ten
        assert picture.std() > 0.1


class TestSheet:
    def test_images_stand_in_rows(self, tmp_path):
        images = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
        images[1] = 255
        sheet(tmp_path / "a.png", images, columns=2, gap=1)
        picture = imread(tmp_path / "a.png")[:, :, 0]
        scale = picture.shape[1] // 5
        assert picture.shape == (5 * scale, 5 * scale)
        assert picture[scale, scale] == 0  # the first
        assert picture[scale, 4 * scale] == 1  # the second
        assert picture[4 * scale, scale] == 0  # the third, in the next row
        assert 0 < picture[4 * scale, 4 * scale] < 1  # nothing there

    def test_colours_and_levels(self, tmp_path):
        images = torch.zeros(1, 3, 2, 2)
        images[0, 1] = 16
        sheet(tmp_path / "a.png", images, columns=1, levels=17)
        assert imread(tmp_path / "a.png")[0, 0, :3].tolist() == [0.0, 1.0, 0.0]

    @pytest.mark.parametrize("shape", [(0, 1, 2, 2), (3, 2, 2, 2), (3, 4)])
    def test_only_images(self, tmp_path, shape):
        with pytest.raises(InvalidValue, match="A sheet shows images"):
            sheet(tmp_path / "a.png", torch.zeros(shape))
