"""Models of one coordinate after the other, and the telescope that trains them: against brute force and quadrature."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from unnorm.data import Compose, Logit, Whiten
from unnorm.data.images import image_data
from unnorm.density import Density
from unnorm.device import fabric_for
from unnorm.errors import BrokenFile, InvalidValue
from unnorm.estimators import ENCE, MECO, NCE, SNL, StepwiseTelescope
from unnorm.estimators.base import Contrast
from unnorm.images import coordinates, fit_images, stepwise
from unnorm.metrics import bits_per_dim
from unnorm.models import MLP, Lookback, Stepwise
from unnorm.noise import Gaussian
from unnorm.partition import ladder
from unnorm.train import fit
from unnorm.training import Training

DIGITS = image_data("digits")


def rough(net, scale=0.5, seed=3):
    """With weights that matter: where it begins all heads are zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if name.endswith(("second.weight", "last.weight")):
            torch.nn.init.normal_(parameter, std=scale, generator=generator)
    return net


def pixels(height, width, levels=8, seed=3):
    """A model of logits of pixels that depend on each other, in float64, and its transform from shades."""
    event = (1, height, width)
    size = height * width
    generator = torch.Generator().manual_seed(seed)
    whiten = Whiten(event)
    lower = torch.randn(size, size, generator=generator, dtype=torch.float64).tril() / size
    whiten.scale_tril.copy_(lower - lower.diagonal().diag() + torch.eye(size, dtype=torch.float64) * 1.3)
    whiten.loc.fill_(-0.7)
    net = Lookback(event, whiten, levels, ("shade", "root", "ends"), width=8, blocks=2, features=8, generator=generator)
    rough(net.double().look(Logit(1e-3)), 1.5)
    return Stepwise(Gaussian(event, "diagonal").double(), net), Compose([Logit(1e-3), whiten])


def within(model, n, seed=0):
    """Points where pixels can be."""
    return model.sample(n, generator=torch.Generator().manual_seed(seed))


class TestLookback:
    def test_a_head_sees_its_pixel_and_those_before_it(self):
        model, _ = pixels(4, 5)
        z = within(model, 3)
        before = model.net(z)
        for place in range(20):
            moved = z.clone().flatten(1)
            moved[:, place] += 0.1
            changed = (model.net(moved.view_as(z)) - before).abs().amax(0) > 1e-12
            assert not changed[:place].any()
            assert changed[place]
            if place < 15:
                assert changed[place + 1 :].any()

    def test_candidates_are_what_replacing_the_pixel_gives(self):
        model, _ = pixels(3, 3)
        z = within(model, 4)
        candidates = z.flatten(1) + 0.3 * torch.randn(2, 4, 9, dtype=torch.float64)
        found = model.net.heads(model.net.context(z), candidates)
        for place in range(9):
            for m in range(2):
                other = z.clone().flatten(1)
                other[:, place] = candidates[m, :, place]
                expected = model.net(other.view_as(z))[:, place]
                torch.testing.assert_close(found[m, :, place], expected)

    @pytest.mark.parametrize("blocks", [0, 1, 3])
    def test_one_place_is_the_same_as_in_the_whole(self, blocks):
        """Of 16 rows, so that the first are out of sight of the last."""
        net = rough(Lookback((1, 16, 4), width=4, blocks=blocks, features=4, generator=torch.Generator())).double()
        z = torch.randn(3, 1, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        whole = net.context(z)
        for place in (0, 5, 21, 47, 63):
            z_before = z.flatten(1).clone()
            z_before[:, place:] = 0
            found = net.context_at(z_before.view_as(z), place)
            torch.testing.assert_close(found.features, whole.features[:, place : place + 1])
            torch.testing.assert_close(found.mean, whole.mean[:, place : place + 1])

    def test_pieces_are_in_order_and_cover_where_pixels_can_be(self):
        model, transform = pixels(2, 2)
        z = within(model, 5)
        context = model.net.context(z)
        pieces, (low, high) = model.net.pieces(context), model.net.bounds(context)
        assert bool((pieces.diff(dim=0) >= 0).all())
        torch.testing.assert_close(pieces[0], low)
        torch.testing.assert_close(pieces[-1], high)
        shades = transform.inverse(z).flatten(1)
        assert bool(((shades >= 0) & (shades <= 1)).all())

    def test_bounds_are_black_and_white(self):
        """The first pixel's neighbours do not matter to it: its bounds are those of the transform."""
        model, transform = pixels(2, 2)
        low, high = model.net.bounds(model.net.context(within(model, 2)))
        for found, shade in ((low, 0.0), (high, 1.0)):
            z, _ = transform(torch.full((2, 1, 2, 2), shade, dtype=torch.float64))
            torch.testing.assert_close(found[:, 0], z.flatten(1)[:, 0], atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"event": (3, 4, 4)}, r"must be \(1, height, width\): grey images. Got \(3, 4, 4\)"),
            ({"event": (4,)}, "grey images"),
            ({"event": (1, 4, 4), "width": 0}, "'width' of Lookback must be an integer of 1 at least. Got 0"),
            ({"event": (1, 4, 4), "blocks": 1.5}, "'blocks' of Lookback must be an integer of 0 at least. Got 1.5"),
            ({"event": (1, 4, 4), "levels": 1}, "'levels' of Lookback must be an integer of 2 at least. Got 1"),
            ({"event": (1, 4, 4), "views": ("shade",)}, "are of shades: it needs 'levels'"),
            ({"event": (1, 4, 4), "levels": 4, "views": ("shape",)}, "Unknown view 'shape'. Did you mean 'shade'"),
        ],
    )
    def test_refuses(self, options, words):
        with pytest.raises(InvalidValue, match=words):
            Lookback(**options)

    def test_refuses_to_see_later_pixels(self):
        whiten = Whiten((1, 1, 2))
        whiten.scale_tril.copy_(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
        with pytest.raises(InvalidValue, match="must be triangular"):
            Lookback((1, 1, 2), whiten)


class TestStepwise:
    def test_each_step_is_normalised(self):
        """Every log Z_k against scipy's adaptive quadrature, of the head with its pixel replaced."""
        model, _ = pixels(1, 3)
        z = within(model, 2)
        context = model.net.context(z)
        log_zs = model.log_zs(context, 12).detach()
        low, high = (bound.numpy() for bound in model.net.bounds(context))
        for row in range(2):
            for place in range(3):

                def density(value, row=row, place=place):
                    other = z[row : row + 1].clone()
                    other[0, 0, 0, place] = value
                    return math.exp(model.net(other)[0, place].item()) * stats.norm.pdf(value)

                cuts = [c for c in model.net.pieces(context)[:, row, place].tolist() if -9 < c < 9]
                ends = max(low[row, place], -9.0), min(high[row, place], 9.0)
                with torch.no_grad():
                    expected, _ = integrate.quad(density, *ends, points=cuts, limit=300)
                assert float(log_zs[row, place]) == pytest.approx(math.log(expected), abs=1e-6)

    def test_the_density_integrates_to_one_in_shades(self):
        """Of two pixels, over the square of their shades: with every Jacobian, no coordinate but the user's own."""
        model, transform = pixels(1, 2)
        n = 400
        middle = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        square = torch.cartesian_prod(middle, middle).view(-1, 1, 1, 2)
        with torch.no_grad():
            z, log_det = transform(square)
            total = torch.logsumexp(model(z) + log_det, 0) - math.log(n * n)
        assert float(total) == pytest.approx(0.0, abs=2e-3)

    def test_there_is_nothing_outside(self):
        model, _ = pixels(1, 2)
        z = within(model, 2)
        z[1, ..., 0] = 40.0
        value = model(z)
        assert torch.isfinite(value[0])
        assert value[1] == -torch.inf

    @pytest.mark.parametrize("kind", ["gaussian", "copula"])
    def test_black_and_white_are_inside(self, kind):
        """To the last bit at the edges, in float32."""
        where = coordinates(DIGITS, kind)
        model = stepwise(where, DIGITS.event, width=4, blocks=1, features=4)
        _, *further = where.transform.transforms
        shades = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, *DIGITS.event)
        z = Compose(further)(shades.double())[0].float()
        with torch.no_grad():
            assert bool(torch.isfinite(model(z)).all())

    def test_samples_have_the_density(self):
        """Counts in a grid of cells against integrals of the density there: a chi-square test."""
        model, transform = pixels(1, 2)
        n, cells, fine = 20_000, 6, 60
        x = transform.inverse(within(model, n)).flatten(1)
        place = (x * cells).long().clamp(0, cells - 1)
        counts = torch.bincount(place[:, 0] * cells + place[:, 1], minlength=cells**2)
        middle = (torch.arange(cells * fine, dtype=torch.float64) + 0.5) / (cells * fine)
        with torch.no_grad():
            z, log_det = transform(torch.cartesian_prod(middle, middle).view(-1, 1, 1, 2))
            p = (model(z) + log_det).exp().view(cells, fine, cells, fine).mean((1, 3)).flatten() / cells**2
        seen = p > 5 / n
        expected = torch.cat([p[seen], p[~seen].sum().clamp_min(1e-9)[None]])
        found = torch.cat([counts[seen], counts[~seen].sum()[None]])
        test = stats.chisquare(found.numpy(), (expected / expected.sum() * n).numpy())
        assert test.pvalue > 1e-3
        assert float(p.max()) > 5 * float(p.min())  # not a uniform one

    @pytest.mark.parametrize("levels", [None, 256])
    def test_draws_follow_the_density_within_a_piece(self, levels):
        """Counts in bins narrower than a cell, against integrals on a fine grid: a chi-square test."""
        generator = torch.Generator().manual_seed(4)
        views = () if levels is None else ("shade", "root")
        net = Lookback((1, 1, 1), None, levels, views, width=4, blocks=0, features=16, generator=generator).double()
        net.look(Logit(1e-3) if levels is not None else None)
        torch.nn.init.normal_(net.last.weight, std=8.0, generator=generator)  # steep: e^40 and more between places
        model, n, bins, fine = Stepwise(Gaussian((1, 1, 1), "diagonal").double(), net), 50_000, 200, 40
        low, high = (-8.0, 8.0) if levels is None else (float(end) for end in net.edges[0, [0, -1]])
        z = within(model, n).flatten()
        counts = torch.histc(z, bins, low, high)
        middle = low + (torch.arange(bins * fine, dtype=torch.float64) + 0.5) * (high - low) / (bins * fine)
        with torch.no_grad():
            log_p = net.heads(net.context(torch.zeros(1, 1, 1, 1, dtype=torch.float64)), middle.view(-1, 1, 1))
        p = torch.softmax(log_p.flatten() - middle.square() / 2, 0).view(bins, fine).sum(1)
        seen = p > 5 / n
        expected = torch.cat([p[seen], p[~seen].sum().clamp_min(1e-9)[None]])
        found = torch.cat([counts[seen], counts[~seen].sum()[None]])
        assert int(found.sum()) == n
        assert stats.chisquare(found.numpy(), (expected / expected.sum() * n).numpy()).pvalue > 1e-3
        assert float(p.max()) > 10 / bins  # most of it in few bins

    def test_many_draws_go_in_parts(self, monkeypatch):
        model, _ = pixels(1, 2)
        monkeypatch.setattr("unnorm.models.stepwise.DRAWN", 4)
        assert within(model, 10).shape == (10, 1, 1, 2)

    def test_the_same_generator_gives_the_same_samples(self):
        model, _ = pixels(2, 2)
        assert torch.equal(within(model, 3, 5), within(model, 3, 5))
        assert not torch.equal(within(model, 3, 5), within(model, 3, 6))

    def test_error_is_that_of_coarse_quadrature(self):
        model, _ = pixels(2, 2)
        z = within(model, 4)
        context = model.net.context(z)
        exact = model.log_zs(context, 40).sum(-1).detach()
        coarse = model.error(z, 1)
        torch.testing.assert_close(coarse, (model.log_zs(context, 1) - model.log_zs(context, 2)).sum(-1).detach())
        off = [(model.log_zs(context, nodes).sum(-1) - exact).abs().max().item() for nodes in (1, 2, 6)]
        assert off[0] > off[1] > 10 * off[2]
        assert off[2] < 1e-3

    def test_the_score_is_the_gradient(self):
        model, _ = pixels(2, 2)
        z = within(model, 1).requires_grad_()
        assert torch.autograd.gradcheck(model, (z,), eps=1e-6, atol=1e-5)

    def test_rows_do_not_know_each_other(self):
        model, _ = pixels(2, 2)
        z = within(model, 130)
        torch.testing.assert_close(model(z)[[3, 70, 129]], model(z[[3, 70, 129]]))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"net": MLP(4)}, "'net' of Stepwise must be a Lookback. Got MLP"),
            ({"net": Lookback((1, 2, 2)), "nodes": 0}, "'nodes' of Stepwise must be an integer of 1 at least. Got 0"),
            ({"net": Lookback((1, 2, 3))}, r"The net of Stepwise is of events \(1, 2, 3\), the noise of \(1, 2, 2\)"),
        ],
    )
    def test_refuses(self, options, words):
        with pytest.raises(InvalidValue, match=words):
            Stepwise(Gaussian((1, 2, 2)), **options)

    @pytest.mark.parametrize(("buffer", "value"), [("loc", 1.0), ("scale", 0.5)])
    def test_refuses_a_noise_that_is_not_a_standard_normal(self, buffer, value):
        noise = Gaussian((1, 2, 2), "diagonal")
        getattr(noise, buffer)[2] = value
        with pytest.raises(InvalidValue, match="'noise' of Stepwise must be a standard normal"):
            Stepwise(noise, Lookback((1, 2, 2)))


class TestTelescope:
    @pytest.mark.parametrize("base", [MECO, NCE, ENCE, SNL])
    def test_is_the_telescope_of_waymarks_written_out(self, base):
        """Waymark k has k coordinates of the data: head k at waymark k against head k at waymark k - 1."""
        model, _ = pixels(2, 3)
        z, m, d = within(model, 5), 3, 6
        estimator = StepwiseTelescope(model.noise, base, draws=m).double()
        found = estimator(model, z, generator=torch.Generator().manual_seed(1))
        noise = model.noise.sample(m * 5, generator=torch.Generator().manual_seed(1)).view(m, 5, d)
        low, high = model.net.bounds(model.net.context(z))
        at_data, log_w = torch.empty(d, 5, dtype=torch.float64), torch.empty(d, m * 5, dtype=torch.float64)
        for place in range(d):
            for draw in range(m):
                first, second = (
                    torch.cat([z.flatten(1)[:, :k], noise[draw][:, k:]], 1).view_as(z) for k in (place + 1, place)
                )
                at_data[place] = model.net(first)[:, place]
                value = model.net(second)[:, place]
                drawn = noise[draw][:, place]
                outside = (drawn < low[:, place]) | (drawn > high[:, place])
                log_w[place, draw * 5 : (draw + 1) * 5] = torch.where(outside, -torch.inf, value)
        other = type(estimator.base)(model.noise, shape=(d,), **OPTIONS[base](m)).double()
        expected = other.compare(Contrast(at_data, torch.zeros_like(at_data), log_w))
        torch.testing.assert_close(found.surrogate, expected.surrogate.sum())
        log_z = expected.info["value"] + at_data.mean(-1)
        nll = -(at_data.sum(0) - log_z.sum() + model.noise.log_prob(z)).mean()
        torch.testing.assert_close(found.info["value"], nll.detach())
        torch.testing.assert_close(found.info["gap"], expected.info["gap"].max().detach())

    @pytest.mark.parametrize("base", [MECO, NCE])
    def test_learns_a_known_density(self, base):
        """z_2 given z_1 is N(0.8 z_1, 0.6): the likelihood is the entropy's within 0.02 nats."""
        first, second = torch.randn(2, 6000, generator=torch.Generator().manual_seed(2))
        z = torch.stack([first, 0.8 * first + 0.6 * second], 1).view(-1, 1, 1, 2)
        q = Gaussian((1, 1, 2), "diagonal")
        net = Lookback((1, 1, 2), width=16, blocks=1, features=16, generator=torch.Generator().manual_seed(0))
        model = Stepwise(q, net)
        training = Training(steps=500, batch=256, lr=5e-3, beta=0.1, schedule="cosine")
        fit(model, StepwiseTelescope(q, base), z[:5000], training, progress=False)
        with torch.no_grad():
            nll = -model(z[5000:]).mean()
        truth = -stats.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]]).logpdf(z[5000:].flatten(1).numpy()).mean()
        assert truth - 0.01 < float(nll) < truth + 0.02

    @pytest.mark.parametrize("base", [MECO, NCE])
    def test_iterates_are_compared_by_the_models_own_likelihood(self, base):
        """Against scipy's integral of every step; no draw has a say."""
        model, _ = pixels(1, 2)
        z = within(model, 3)
        estimator = StepwiseTelescope(model.noise, base, draws=1).double().eval()
        nll = 0.0
        for row in z:
            for place in range(2):
                before, found = row.flatten().tolist(), row.flatten()[place].item()

                def unnormalised(value, before=before, place=place):
                    point = torch.tensor([*before[:place], value, *[0.0] * (1 - place)], dtype=torch.float64)
                    with torch.no_grad():
                        head = model.net(point.view(1, 1, 1, 2))[0, place].item()
                    return math.exp(head) * stats.norm.pdf(value)

                context = model.net.context(row[None])
                low, high = (end[0, place].item() for end in model.net.bounds(context))
                cuts = [cut for cut in model.net.pieces(context)[:, 0, place].tolist() if low < cut < high]
                whole = integrate.quad(unnormalised, low, high, points=cuts, limit=400)[0]
                nll -= math.log(unnormalised(found) / whole) / 3
        generator = torch.Generator().manual_seed(1)
        found = estimator(model, z, generator=generator)
        assert float(found.info["value"]) == pytest.approx(nll, abs=1e-3)
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())

    @pytest.mark.parametrize(("nodes", "resolved"), [(64, True), (3, False)])
    def test_rare_draws_hide_no_iterate_and_coarse_nodes_gain_nothing(self, nodes, resolved):
        """A truth so narrow that few draws meet it: learned where the quadrature resolves it, and where that does not,
        an iterate is kept that it does resolve. The integral of the kept one on a fine grid is one either way."""
        generator = torch.Generator().manual_seed(2)
        z = (0.03 * torch.randn(3000, generator=generator) + 0.5).view(-1, 1, 1, 1)
        q = Gaussian((1, 1, 1), "diagonal")
        net = Lookback((1, 1, 1), width=8, blocks=0, features=32, generator=generator)
        model = Stepwise(q, net, nodes)
        training = Training(steps=300, batch=256, lr=1e-2, beta=0.1, iterate="best-ema", validate_every=20)
        fit(model, StepwiseTelescope(q, draws=2), z[:2500], training, validation=z[2500:], progress=False)
        fine = torch.linspace(-6, 6, 24_001).view(-1, 1, 1, 1)
        with torch.no_grad():
            integral = float(torch.cat([model(part) for part in fine.split(4000)]).exp().sum() * 12 / 24_000)
            nll = -float(model(z[2500:]).mean())
        assert integral == pytest.approx(1.0, abs=0.02 if resolved else 0.5)
        if resolved:
            assert nll < float(stats.norm(0.5, 0.03).entropy()) + 0.5  # the noise has 1.04, the truth -2.09

    def test_model_of_another_kind(self):
        with pytest.raises(InvalidValue, match="trains a Stepwise model"):
            StepwiseTelescope(Gaussian(2))(MLP(2), torch.zeros(3, 2))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"base": MLP}, "is MECO, NCE, ENCE or SNL"),
            ({"draws": 0}, "'draws' of StepwiseTelescope must be at least 1. Got 0"),
            ({"gama": 0.5}, "gama"),
            ({"n_noise": 5}, "takes 'draws' for each data point and coordinate, no 'n_noise'"),
            ({"base": NCE, "nu": 5}, "no 'nu' of its base"),
        ],
    )
    def test_refuses(self, options, words):
        with pytest.raises(InvalidValue, match=words):
            StepwiseTelescope(Gaussian(2), **options)

    def test_refuses_data_of_another_shape(self):
        model = Stepwise(Gaussian((1, 2, 2), "diagonal"), Lookback((1, 2, 2), width=4, blocks=0, features=4))
        for shape in ((5, 1, 2, 3), (5, 4)):
            with pytest.raises(InvalidValue, match=r"The data have events of shape .*, the noise \(1, 2, 2\)"):
                StepwiseTelescope(model.noise)(model, torch.zeros(shape))

    def test_leaves_the_global_generator_alone(self):
        before = torch.random.get_rng_state()
        StepwiseTelescope(Gaussian((1, 2, 2), "diagonal"))
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_counts_its_draws(self):
        estimator = StepwiseTelescope(Gaussian((1, 2, 3)), draws=5, gamma=0.2)
        assert (estimator.draws(10), estimator.parts, estimator.effective_draws) == (50, 6, 5.0)


OPTIONS = {
    MECO: lambda m: {"centred": True},
    NCE: lambda m: {"nu": m},
    ENCE: lambda m: {"nu": m},
    SNL: lambda m: {},
}


@pytest.fixture(scope="module")
def fitted():
    few = Training(steps=150, batch=32, lr=3e-3, beta=0.1, schedule="cosine", iterate="ema")
    return fit_images(DIGITS, "copula", few, bridges="pixels", width=16, blocks=2, features=16)


class TestImages:
    @pytest.mark.parametrize("kind", ["gaussian", "copula"])
    def test_begins_as_its_noise_where_pixels_can_be(self, kind):
        """Heads are zero: the density is the noise's, divided by its mass between black and white."""
        where = coordinates(DIGITS, kind)
        model = stepwise(where, DIGITS.event, width=8, blocks=1, features=8)
        z, _ = where.transform(DIGITS.test.images[:20], generator=torch.Generator().manual_seed(0))
        context = model.net.context(z.float())
        low, high = (bound.double().numpy() for bound in model.net.bounds(context))
        mass = np.log(stats.norm.cdf(high) - stats.norm.cdf(low)).sum(1)
        with torch.no_grad():
            found = (model(z.float()) - where.noise.log_prob(z.float())).double().numpy()
        np.testing.assert_allclose(found, -mass, atol=2e-3)

    def test_log_z_is_known(self, fitted):
        assert (fitted.log_z.method, fitted.log_z.value) == ("quadrature", 0.0)
        assert fitted.log_z.stderr < 0.02
        assert fitted.climb.trusted
        assert "quadrature" in fitted.climb.lines()[0]

    def test_is_better_than_its_noise(self, fitted):
        images = DIGITS.test.images
        bits = bits_per_dim(fitted, images, generator=torch.Generator().manual_seed(0))
        noise = fitted.noise_log_prob(images, generator=torch.Generator().manual_seed(0)).mean()
        alone = -float(noise) / 64 / math.log(2)
        assert bits.value + 5 * bits.stderr < alone

    def test_samples(self, fitted):
        found = fitted.draws(30, generator=torch.Generator().manual_seed(0), progress=False)
        assert found.method == "stepwise"
        assert found.line() == "30 independent draws, coordinate by coordinate"
        assert found.x.shape == (30, 1, 8, 8)
        assert 0 <= float(found.x.min()) < float(found.x.max()) <= 16
        mean = DIGITS.train.images.double().mean(0)
        assert float((found.x.double().mean(0) - mean).abs().mean()) < 2.0

    def test_survives_a_file(self, fitted, tmp_path):
        fitted.save(tmp_path)
        other = Density.load(tmp_path)
        images = DIGITS.test.images[:5]
        one, two = (d.log_prob(images, generator=torch.Generator().manual_seed(1)) for d in (fitted, other))
        assert torch.equal(one, two)
        assert other.log_z.method == "quadrature"

    def test_a_file_without_its_log_z_is_broken(self, fitted, tmp_path):
        broken = Density(fitted.model, fitted.noise, fitted.transform, {"importance": fitted.log_z})
        broken.save(tmp_path)
        with pytest.raises(BrokenFile, match="does not describe a density"):
            Density.load(tmp_path)

    def test_a_coarse_quadrature_is_doubted(self):
        model, _ = pixels(6, 6)
        rough(model.net, 30.0)
        model.nodes = 1
        climb = ladder(model, model.noise, generator=torch.Generator().manual_seed(0))
        assert not climb.trusted
        assert "use more 'nodes'" in climb.doubts[0]

    def test_other_bridges_are_refused(self):
        with pytest.raises(InvalidValue, match="are a number, or 'pixels'. Got 'pixel'"):
            fit_images(DIGITS, "gaussian", Training(steps=1), bridges="pixel")

    def test_of_the_coordinates_of_a_flow(self):
        """No shades there: between -12 and 12."""
        where = coordinates(DIGITS, "flow", steps=5, couplings=(1,), width=8, blocks=1, bins=4)
        model = stepwise(where, DIGITS.event, width=8, blocks=1, features=8)
        z, _ = where.transform(DIGITS.test.images[:5], generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(model(z.float()), where.noise.log_prob(z.float()), atol=1e-3, rtol=1e-4)


def test_points_are_not_rounded_in_mixed_precision():
    """Of a logit at -5.54, where the first of 256 shades ends, bf16 would leave steps of 0.03."""
    seen = []

    class Watching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 1)

        def forward(self, x):
            out = self.inner(x)
            seen.append((x.clone(), out.dtype))
            return out.squeeze(-1).float()

    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    fit(Watching(), MECO(Gaussian(3)), x, Training(steps=1, batch=50), fabric=fabric_for("cpu", "bf16"), progress=False)
    points, computed = seen[0]
    assert points.dtype == torch.float32
    assert computed == torch.bfloat16
    assert all(any(torch.equal(row, one) for one in x) for row in points[:50])
