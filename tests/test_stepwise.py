"""Models of one coordinate after the other, and the telescope that trains them: against brute force and quadrature."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats

from unnorm.data import Compose, Logit, Whiten
from unnorm.data.images import image_data
from unnorm.density import Density
from unnorm.device import fabric_for
from unnorm.errors import BrokenFile, InvalidValue
from unnorm.estimators import ENCE, MECO, NCE, SNL, StepwiseTelescope
from unnorm.estimators.base import Contrast
from unnorm.images import coordinates, fit_images, stepwise
from unnorm.loop import train
from unnorm.metrics import bits_per_dim
from unnorm.models import MLP, Lookback, Stepwise
from unnorm.noise import Autoregression, Gaussian, Pushed, Uniform
from unnorm.partition import ladder
from unnorm.training import Training

DIGITS = image_data("digits")


def rough(net, scale=0.5, seed=3):
    """With weights that matter: where it begins all heads are zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if name.endswith(("second.weight", "last.weight")):
            torch.nn.init.normal_(parameter, std=scale, generator=generator)
    return net


def pixels(height, width, levels=8, seed=3, kind="line"):
    """A model of logits of pixels that depend on each other, in float64, and its transform from shades."""
    event = (1, height, width)
    size = height * width
    generator = torch.Generator().manual_seed(seed)
    if kind == "line":
        way = Whiten(event)
        lower = torch.randn(size, size, generator=generator, dtype=torch.float64).tril() / size
        way.scale_tril.copy_(lower - lower.diagonal().diag() + torch.eye(size, dtype=torch.float64) * 1.3)
        way.loc.fill_(-0.7)
    else:
        way = Autoregression(event, levels, width=8, blocks=1, features=8, bins=4, generator=generator).double()
        for parameter in (way.last.weight, way.last.bias):
            torch.nn.init.normal_(parameter, std=0.4, generator=generator)
        way.look(Logit(1e-3))
    net = Lookback(event, levels, ("shade", "root", "ends"), width=8, blocks=2, features=8, generator=generator)
    rough(net.double().look(Logit(1e-3)), 1.5)
    return Stepwise(Pushed(Gaussian(event, "diagonal").double(), way), net), Logit(1e-3)


def within(model, n, seed=0):
    """Points where pixels can be."""
    return model.sample(n, generator=torch.Generator().manual_seed(seed))


def heads(model, y):
    """f_k at y itself, (n, pixels)."""
    return model.net(y, model.steps.all(y))


def replaced(model, y, place, z):
    """y with one pixel that the noise makes of the standard normal numbers z, given those before it.

    By the noise's own transform, whole: the place is found by Brent's method, no step of ours.
    """
    found, way = y.clone(), model.noise.transform

    def off(value, row):
        point = y[row : row + 1].clone()
        point.view(-1)[place] = value
        return float(way(point)[0].view(-1)[place]) - float(z[row])

    with torch.no_grad():
        for row in range(len(y)):
            found[row].view(-1)[place] = optimize.brentq(off, -300, 300, args=(row,), xtol=1e-13)
    return found


def off_centre():
    noise = Gaussian((1, 2, 2), "diagonal")
    noise.loc[1] = 0.5
    return noise


KINDS = pytest.mark.parametrize("kind", ["line", "bend"])


class TestLookback:
    @KINDS
    def test_a_head_sees_its_pixel_and_those_before_it(self, kind):
        model, _ = pixels(4, 5, kind=kind)
        z = within(model, 3)
        before = heads(model, z)
        for place in range(20):
            moved = z.clone().flatten(1)
            moved[:, place] += 0.1
            changed = (heads(model, moved.view_as(z)) - before).abs().amax(0) > 1e-12
            assert not changed[:place].any()
            assert changed[place]
            if place < 15:
                assert changed[place + 1 :].any()

    @KINDS
    def test_candidates_are_what_replacing_the_pixel_gives(self, kind):
        model, _ = pixels(3, 3, kind=kind)
        y = within(model, 4)
        candidates = torch.randn(2, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        found = model.net.heads(model.context(y), candidates)
        for place in range(9):
            for m in range(2):
                expected = heads(model, replaced(model, y, place, candidates[m, :, place]))[:, place]
                torch.testing.assert_close(found[m, :, place], expected, atol=1e-6, rtol=1e-6)

    @KINDS
    @pytest.mark.parametrize("blocks", [0, 1, 3])
    def test_one_place_is_the_same_as_in_the_whole(self, blocks, kind):
        """Of 16 rows, so that the first are out of sight of the last."""
        model, _ = pixels(16, 4, kind=kind)
        net = Lookback((1, 16, 4), width=4, blocks=blocks, features=4, generator=torch.Generator())
        model = Stepwise(model.noise, rough(net).double())
        y = torch.randn(3, 1, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        whole, points = model.context(y), torch.linspace(-3, 3, 5, dtype=torch.float64).view(-1, 1, 1)
        for place in (0, 5, 21, 47, 63):
            before = y.flatten(1).clone()
            before[:, place:] = 0
            step = model.steps.at(before.view_as(y), place)
            found = model.net.context_at(before.view_as(y), step, place)
            torch.testing.assert_close(found.features, whole.features[:, place : place + 1])
            expected = whole.step.inverse(points.expand(5, 3, 64))[..., place : place + 1]
            torch.testing.assert_close(step.inverse(points.expand(5, 3, 1)), expected)
            torch.testing.assert_close(step(expected)[0], points.expand(5, 3, 1))

    @KINDS
    def test_pieces_are_in_order_and_cover_where_pixels_can_be(self, kind):
        model, transform = pixels(2, 2, kind=kind)
        z = within(model, 5)
        context = model.context(z)
        pieces, (low, high) = model.net.pieces(context), model.net.bounds(context)
        assert bool((pieces.diff(dim=0) >= 0).all())
        torch.testing.assert_close(pieces[0], low)
        torch.testing.assert_close(pieces[-1], high)
        shades = transform.inverse(z).flatten(1)
        assert bool(((shades >= 0) & (shades <= 1)).all())

    @KINDS
    def test_bounds_are_black_and_white(self, kind):
        """By the noise's own transform of an image whose pixel is black, or white."""
        model, transform = pixels(2, 2, kind=kind)
        y = within(model, 3)
        for found, shade in zip(model.net.bounds(model.context(y)), (0.0, 1.0), strict=True):
            edge = float(transform(torch.tensor([shade], dtype=torch.float64).view(1, 1))[0])
            for place in range(4):
                point = y.clone().flatten(1)
                point[:, place] = edge
                z = model.noise.transform(point.view_as(y))[0].flatten(1)
                torch.testing.assert_close(found[:, place], z[:, place], atol=1e-6, rtol=1e-6)

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


class TestStepwise:
    @KINDS
    def test_each_step_is_normalised(self, kind):
        """Every log Z_k against scipy's adaptive quadrature over the pixel itself, by the noise's own density.

        q(y_k | before) e^f_k, with the ratio of the noise's whole density to that with the pixel somewhere else: what
        does not depend on the pixel cancels in the ratio to the same integral without the head.
        """
        model, transform = pixels(1, 3, kind=kind)
        y = within(model, 2)
        context = model.context(y)
        log_zs = model.log_zs(context, 12).detach()
        ends = transform(torch.arange(9, dtype=torch.float64).view(-1, 1) / 8)[0].flatten().tolist()
        last = 2
        for row in range(2):

            def density(value, tilted, row=row):
                other = y[row : row + 1].clone()
                other[0, 0, 0, last] = value
                with torch.no_grad():
                    head = heads(model, other)[0, last].item() if tilted else 0.0
                    return math.exp(head + model.noise.log_prob(other).item())

            whole, _ = integrate.quad(density, ends[0], ends[-1], args=(True,), points=ends[1:-1], limit=300)
            noise, _ = integrate.quad(density, -200, 200, args=(False,), points=ends, limit=500)
            assert float(log_zs[row, last]) == pytest.approx(math.log(whole / noise), abs=2e-5)

    @KINDS
    def test_the_density_integrates_to_one_in_shades(self, kind):
        """Of two pixels, over the square of their shades: with every Jacobian, no coordinate but the user's own."""
        model, transform = pixels(1, 2, kind=kind)
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
        z[1, ..., 0] = 80.0
        value = model(z)
        assert torch.isfinite(value[0])
        assert value[1] == -torch.inf

    @pytest.mark.parametrize("kind", ["gaussian", "copula"])
    def test_black_and_white_are_inside(self, kind):
        """To the last bit at the edges, in float32."""
        where = coordinates(DIGITS, kind).by_pixels()
        model = stepwise(where, DIGITS.event, width=4, blocks=1, features=4)
        _, *further = where.transform.transforms
        shades = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, *DIGITS.event)
        z = Compose(further)(shades.double())[0].float()
        with torch.no_grad():
            assert bool(torch.isfinite(model(z)).all())

    @KINDS
    def test_samples_have_the_density(self, kind):
        """Counts in a grid of cells against integrals of the density there: a chi-square test."""
        model, transform = pixels(1, 2, kind=kind)
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
        net = Lookback((1, 1, 1), levels, views, width=4, blocks=0, features=16, generator=generator).double()
        net.look(Logit(1e-3))
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

    def test_no_draws_are_refused(self):
        with pytest.raises(InvalidValue, match="number of draws must be at least 1. Got 0"):
            within(pixels(1, 2)[0], 0)

    @KINDS
    def test_log_p_is_the_noise_and_the_tilt(self, kind):
        model, _ = pixels(2, 2, kind=kind)
        y = within(model, 5)
        with torch.no_grad():
            log_q = model.noise.log_prob(y)
            torch.testing.assert_close(model(y), log_q + model.tilt(y))
            torch.testing.assert_close(model(y, draws=torch.zeros(1, 5, 4, dtype=y.dtype)).log_q, log_q)

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
        context = model.context(z)
        exact = model.log_zs(context, 40).sum(-1).detach()
        coarse = model.error(z, 1)
        torch.testing.assert_close(coarse, (model.log_zs(context, 1) - model.log_zs(context, 2)).sum(-1).detach())
        off = [(model.log_zs(context, nodes).sum(-1) - exact).abs().max().item() for nodes in (1, 2, 6)]
        assert off[0] > off[1] > 10 * off[2]
        assert off[2] < 1e-3

    @KINDS
    def test_the_score_is_the_gradient(self, kind):
        model, _ = pixels(2, 2, kind=kind)
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

    @pytest.mark.parametrize("covariance", ["full", "diagonal"])
    def test_any_gaussian_goes_step_by_step(self, covariance):
        """Heads of zero: the noise itself, correlated, off centre; and samples of it."""
        y = 2 + torch.randn(400, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cumsum(1)
        q = Gaussian.fit(y.view(-1, 1, 2, 2), covariance)
        model = Stepwise(q, Lookback((1, 2, 2), width=4, blocks=0, features=4)).double()
        with torch.no_grad():
            torch.testing.assert_close(model(y[:9].view(-1, 1, 2, 2)), q.log_prob(y[:9].view(-1, 1, 2, 2)))
        found = within(model, 4000).flatten(1)
        torch.testing.assert_close(found.mean(0), y.mean(0), atol=0.15, rtol=0)
        if covariance == "full":
            torch.testing.assert_close(found.mT.cov(), y.mT.cov(), atol=0.4, rtol=0.1)

    @pytest.mark.parametrize(
        "noise",
        [
            Uniform((1, 2, 2)),
            Pushed(off_centre(), Autoregression((1, 2, 2), 4, width=4, blocks=1)),
        ],
    )
    def test_refuses_a_noise_that_does_not_go_step_by_step(self, noise):
        with pytest.raises(InvalidValue, match="that goes one coordinate after the other is a Gaussian, .* Got "):
            Stepwise(noise, Lookback((1, 2, 2)))

    @KINDS
    def test_weights_know_the_density_of_the_draws(self, kind):
        """E_r[p / r] is the integral of p, one, and w is what draws lack to be p's."""
        model, _ = pixels(2, 2, kind=kind)
        y, log_w = model.weighted(4000, generator=torch.Generator().manual_seed(0))
        assert torch.equal(y, model.sample(4000, generator=torch.Generator().manual_seed(0)))
        w = log_w.exp()
        assert float(w.mean()) == pytest.approx(1.0, abs=5 * float(w.std()) / 4000**0.5 + 1e-6)
        assert 0 < float(w.std()) < 0.2

    def test_weights_see_what_the_quadrature_does_not(self):
        """With one node p's integral is not one: draws, whose density has no quadrature, say by how much."""
        model, transform = pixels(1, 1)
        rough(model.net, 40.0)
        model.nodes = 1
        n = 10_000
        middle = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        with torch.no_grad():
            y, log_det = transform(middle.view(-1, 1, 1, 1))
            total = float(torch.logsumexp(model(y) + log_det, 0)) - math.log(n)
        w = model.weighted(20_000, generator=torch.Generator().manual_seed(0))[1].exp()
        assert abs(total) > 0.05
        assert math.log(float(w.mean())) == pytest.approx(
            total, abs=5 * float(w.std() / w.mean()) / 20_000**0.5 + 0.005
        )


class TestTelescope:
    @KINDS
    @pytest.mark.parametrize("base", [MECO, NCE, ENCE, SNL])
    def test_is_the_telescope_of_waymarks_written_out(self, base, kind):
        """Waymark k has k coordinates of the data: head k at waymark k against head k at waymark k - 1."""
        model, _ = pixels(2, 3, kind=kind)
        y, m, d = within(model, 5), 3, 6
        estimator = StepwiseTelescope(model.noise, base, draws=m).double()
        found = estimator(model, y, generator=torch.Generator().manual_seed(1))
        draws = torch.randn(m, 5, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        way = model.noise.transform
        low, high = (float(model.net.edges[0, end]) for end in (0, -1))
        at_data, log_w = torch.empty(d, 5, dtype=torch.float64), torch.empty(d, m * 5, dtype=torch.float64)
        for place in range(d):
            for draw in range(m):
                first, second = (  # the noise goes on from the data's coordinates
                    way.inverse(torch.cat([way(y)[0].flatten(1)[:, :k], draws[draw][:, k:]], 1).view_as(y))
                    for k in (place + 1, place)
                )
                at_data[place] = heads(model, first)[:, place]
                value, drawn = heads(model, second)[:, place], second.flatten(1)[:, place]
                outside = (drawn < low) | (drawn > high)
                log_w[place, draw * 5 : (draw + 1) * 5] = torch.where(outside, -torch.inf, value)
        other = type(estimator.base)(model.noise, shape=(d,), **OPTIONS[base](m)).double()
        expected = other.compare(Contrast(at_data, torch.zeros_like(at_data), log_w))
        torch.testing.assert_close(found.surrogate, expected.surrogate.sum())
        log_z = expected.info["value"] + at_data.mean(-1)
        nll = -(at_data.sum(0) - log_z.sum() + model.noise.log_prob(y)).mean()
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
        train(model, StepwiseTelescope(q, base), z[:5000], training, progress=False)
        with torch.no_grad():
            nll = -model(z[5000:]).mean()
        truth = -stats.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]]).logpdf(z[5000:].flatten(1).numpy()).mean()
        assert truth - 0.01 < float(nll) < truth + 0.02

    @pytest.mark.parametrize("base", [MECO, NCE])
    def test_iterates_are_compared_by_the_models_own_likelihood(self, base):
        """Against sums over a fine grid of shades, of the noise's density times e^f; no draw has a say."""
        model, transform = pixels(1, 2)
        y = within(model, 3)
        estimator = StepwiseTelescope(model.noise, base, draws=1).double().eval()
        n = 4000
        middle = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        fine, log_det = (part.flatten() for part in transform(middle.view(-1, 1)))
        nll = 0.0
        with torch.no_grad():
            for row in y:
                total = heads(model, row[None]).sum() + model.noise.log_prob(row[None])[0]
                for place in range(2):
                    points = row.flatten().repeat(n, 1)
                    points[:, place] = fine
                    points = points.view(-1, 1, 1, 2)
                    z, log_slope = (part.flatten(1) for part in model.steps.all(points)(points.flatten(1)))
                    log_q = stats.norm.logpdf(z[:, place]) + log_slope[:, place].numpy() + log_det.numpy()
                    total -= float(special.logsumexp(heads(model, points)[:, place].numpy() + log_q)) - math.log(n)
                nll -= float(total) / 3
        generator = torch.Generator().manual_seed(1)
        found = estimator(model, y, generator=generator)
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
        train(model, StepwiseTelescope(q, draws=2), z[:2500], training, validation=z[2500:], progress=False)
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
        where = coordinates(DIGITS, kind).by_pixels()
        model = stepwise(where, DIGITS.event, width=8, blocks=1, features=8)
        z, _ = where.transform(DIGITS.test.images[:20], generator=torch.Generator().manual_seed(0))
        context = model.context(z.float())
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
        """Of couplings no pixel comes first: it goes through their coordinates, between -12 and 12."""
        where = coordinates(DIGITS, "flow", steps=5, couplings=(1,), width=8, blocks=1, bins=4).by_pixels()
        model = stepwise(where, DIGITS.event, width=8, blocks=1, features=8)
        z, _ = where.transform(DIGITS.test.images[:5], generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(model(z.float()), where.noise.log_prob(z.float()), atol=1e-3, rtol=1e-4)


@pytest.fixture(scope="module")
def where():
    flow = {"couplings": "pixels", "width": 16, "blocks": 2, "features": 16, "bins": 6}
    return coordinates(DIGITS, "flow", steps=150, batch=64, lr=3e-3, **flow)


class TestOverAFlow:
    """An autoregressive flow goes from pixel to pixel as well: heads see the pixels, not its coordinates."""

    def test_begins_as_the_flow(self, where):
        """The density of bytes is the flow's, in its own coordinates or the pixels', but for what lies outside."""
        near, images = where.by_pixels(), DIGITS.test.images[:50]
        model = stepwise(near, DIGITS.event, width=16, blocks=2, features=8)
        (z, far_det), (y, near_det) = (
            place.transform(images, generator=torch.Generator().manual_seed(0)) for place in (where, near)
        )
        with torch.no_grad():
            flow = where.noise.log_prob(z.float()) + far_det
            found = model(y.float()) + near_det
        torch.testing.assert_close(near.noise.log_prob(y.float()) + near_det, flow, atol=1e-2, rtol=1e-4)
        gained = found - flow  # no mass is beyond black and white
        assert bool((gained > -1e-2).all())
        assert float(gained.mean()) < 8

    def test_begins_with_what_the_flow_knows(self, where):
        near = where.by_pixels()
        model = stepwise(near, DIGITS.event, width=16, blocks=2, features=8)
        flow, y = near.noise.transform, near.noise.sample(3, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            shown = torch.cat([y, *(part.view_as(y) for part in model.net._shown(y.flatten(1), slice(0, 64)))], 1)
            torch.testing.assert_close(shown[:, :3], flow._shown(y, 0))
            torch.testing.assert_close(model.net.trunk(shown), flow.trunk(flow._shown(y, 0)))
        assert all(parameter.requires_grad for parameter in model.net.parameters())
        assert not any(parameter.requires_grad for parameter in model.noise.parameters())
        before = flow.trunk.first.weight.clone()
        with torch.no_grad():
            model.net.trunk.first.weight.add_(1)
        assert torch.equal(flow.trunk.first.weight, before)
        other = stepwise(near, DIGITS.event, width=12, blocks=2, features=8)  # as wide as it is told to be
        assert other.net.width == 12

    def test_pixels_are_asked_for(self, where):
        for raw in (where, coordinates(DIGITS, "copula")):
            with pytest.raises(InvalidValue, match="must be where the pixels are: Coordinates.by_pixels"):
                stepwise(raw, DIGITS.event)
        near = where.by_pixels()
        assert near.by_pixels() is near

    def test_a_flow_by_its_name_goes_from_pixel_to_pixel(self, where, monkeypatch):
        """Couplings would hide the pixels from the heads."""
        asked = []

        def found(data, kind, *, fabric=None, **options):
            asked.append((kind, options))
            return where

        monkeypatch.setattr("unnorm.images.coordinates", found)
        few = Training(steps=1, batch=4)
        density = fit_images(DIGITS, "flow", few, bridges="pixels", width=4, blocks=1, features=4)
        assert asked == [("flow", {"couplings": "pixels"})]
        assert density.model.net.levels == DIGITS.levels

    def test_is_better_than_the_flow(self, where, tmp_path):
        few = Training(steps=150, batch=32, lr=3e-3, beta=0.1, schedule="cosine", iterate="ema")
        found = fit_images(DIGITS, where, few, bridges="pixels", width=16, blocks=2, features=16)
        images = DIGITS.test.images
        bits = bits_per_dim(found, images, generator=torch.Generator().manual_seed(0))
        noise = -found.noise_log_prob(images, generator=torch.Generator().manual_seed(0)) / 64 / math.log(2)
        assert bits.value + 0.01 < float(noise.mean())
        found.save(tmp_path)
        other = Density.load(tmp_path)
        one, two = (d.log_prob(images[:5], generator=torch.Generator().manual_seed(1)) for d in (found, other))
        assert torch.equal(one, two)
        assert not any(parameter.requires_grad for parameter in other.noise.parameters())
        drawn = other.sample(3, generator=torch.Generator().manual_seed(0))
        assert bool(((drawn >= 0) & (drawn <= 16)).all())


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
    train(
        Watching(), MECO(Gaussian(3)), x, Training(steps=1, batch=50), fabric=fabric_for("cpu", "bf16"), progress=False
    )
    points, computed = seen[0]
    assert points.dtype == torch.float32
    assert computed == torch.bfloat16
    assert all(any(torch.equal(row, one) for one in x) for row in points[:50])
