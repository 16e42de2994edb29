"""The flow of images: its determinant against the Jacobian, its inverse, and what it learns of real digits."""

import json
import math

import pytest
import torch

from unnorm.architecture import build, describe
from unnorm.data import Dequantize, ImageRows, image_data
from unnorm.errors import DataError, InvalidValue
from unnorm.noise import Autoregression, Copula, Couplings, ImageFlow


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def stirred(event=(1, 4, 4), steps=(2, 1), **options):
    """Couplings away from the identity, in double precision."""
    flow = Couplings(event, steps, width=8, blocks=1, bins=4, **options).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=seeded(1), dtype=torch.float64)
    return flow


class TestCouplings:
    @pytest.mark.parametrize(("event", "steps"), [((1, 4, 4), (2, 1)), ((3, 2, 4), (3,)), ((1, 8, 8), (1, 1, 1))])
    def test_log_det_is_the_jacobians(self, event, steps):
        flow = stirred(event, steps)
        x = 2 * torch.randn(2, *event, generator=seeded(), dtype=torch.float64)
        _, log_det = flow(x)
        for one, value in zip(x, log_det, strict=True):
            jacobian = torch.autograd.functional.jacobian(
                lambda row: flow(row.view(1, *event))[0].flatten(), one.flatten()
            )
            assert float(torch.linalg.slogdet(jacobian)[1]) == pytest.approx(float(value.detach()), abs=1e-9)

    def test_inverse_leads_back_from_everywhere(self):
        """Also where the splines end; far out the networks stretch by thousands, and rounding with them."""
        flow = stirred()
        for scale in (0.1, 1.0, 3.0):
            x = scale * torch.randn(50, 1, 4, 4, generator=seeded(), dtype=torch.float64)
            torch.testing.assert_close(flow.inverse(flow(x)[0]), x, rtol=1e-8, atol=1e-8)

    def test_initialised_channels_have_deviations_of_one(self):
        flow = Couplings((1, 8, 8), (1,), width=4, blocks=1, bins=4)
        x = 7 + 3 * torch.randn(500, 1, 8, 8, generator=seeded())
        flow.initialise(x)
        with torch.no_grad():
            z, _ = flow(x)
        assert z.mean().abs() < 0.01
        assert float(z.std()) == pytest.approx(1, abs=0.01)

    def test_under_autocast_only_the_networks_are_rounded(self):
        """Where these are zero, as at the start, nothing is."""
        flow = Couplings((1, 4, 4), (2, 1), width=8, blocks=1, bins=4)
        x = torch.randn(20, 1, 4, 4, generator=seeded())
        with torch.no_grad():
            plain = flow(x)
            with torch.autocast("cpu", torch.bfloat16):
                rounded = flow(x)
        for one, other in zip(plain, rounded, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize("event", [(1, 6, 6), (4, 4), 16])
    def test_sides_that_cannot_be_halved(self, event):
        with pytest.raises(InvalidValue, match="levels of Couplings need images|shape"):
            Couplings(event if isinstance(event, tuple) else (event,), (1, 1))

    def test_numbers_that_make_no_flow(self):
        for options in ({"steps": ()}, {"steps": (0,)}, {"width": 0}, {"blocks": 0}, {"bins": 1}):
            with pytest.raises(InvalidValue, match="Couplings need"):
                Couplings((1, 4, 4), **{"steps": (1,), **options})


def bent(event=(1, 3, 4), blocks=2, by=0.2):
    """An autoregression away from the identity, in double precision."""
    flow = Autoregression(event, levels=8, width=8, blocks=blocks, features=8, bins=4).double()
    flow.edges.copy_(torch.linspace(-3, 3, 9).expand(len(flow.edges), -1))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += by * torch.randn(parameter.shape, generator=seeded(1), dtype=torch.float64)
    return flow


class TestAutoregression:
    def test_log_det_is_the_jacobians_and_that_is_triangular(self):
        flow = bent()
        y = torch.randn(2, 1, 3, 4, generator=seeded(), dtype=torch.float64)
        _, log_det = flow(y)
        for one, value in zip(y, log_det, strict=True):
            jacobian = torch.autograd.functional.jacobian(
                lambda row: flow(row.view(1, 1, 3, 4))[0].flatten(), one.flatten()
            )
            assert float(jacobian.triu(1).abs().max()) == 0
            assert int((jacobian.tril(-1) != 0).sum()) > 40  # of 66: nearly all that come before matter
            assert float(torch.linalg.slogdet(jacobian)[1]) == pytest.approx(float(value.detach()), abs=1e-9)

    @pytest.mark.parametrize(("event", "blocks"), [((1, 3, 4), 2), ((1, 16, 3), 3)])  # the second: rows out of sight
    def test_inverse_leads_back_from_everywhere(self, event, blocks):
        flow = bent(event, blocks, by=0.1)
        for scale in (0.1, 1.0, 3.0):
            y = scale * torch.randn(20, *event, generator=seeded(), dtype=torch.float64)
            with torch.no_grad():
                torch.testing.assert_close(flow.inverse(flow(y)[0]), y, rtol=1e-7, atol=1e-7)

    def test_shades_are_those_of_the_marginals(self, digits):
        flow = Autoregression((1, 8, 8), levels=17, width=4, blocks=1, features=4)
        rows = ImageRows(digits.train.images, Dequantize(17), generator=seeded())
        marginals = ImageFlow.fit(rows, levels=17, steps=1, couplings="pixels", width=4, blocks=1).marginals
        flow.look(marginals)
        x = torch.rand(50, 1, 8, 8, generator=seeded(), dtype=torch.float64)
        y, _ = marginals(x)
        cell = torch.searchsorted(flow.edges.double().contiguous(), y.flatten(1).mT.contiguous()) - 1
        right = cell.mT == (17 * x.flatten(1)).long()
        assert float(right.double().mean()) > 0.999  # all but where rounding to float32 meets an edge

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"event": (3, 4, 4)}, r"must be \(1, height, width\): grey images. Got \(3, 4, 4\)"),
            ({"event": (1, 4, 4), "bins": 1}, "'bins' of Autoregression must be an integer of 2 at least. Got 1"),
            ({"event": (1, 4, 4), "width": 0}, "'width' of Autoregression must be an integer of 1 at least. Got 0"),
        ],
    )
    def test_refuses(self, options, words):
        with pytest.raises(InvalidValue, match=words):
            Autoregression(**options)


@pytest.fixture(scope="module")
def digits():
    return image_data("digits")


@pytest.fixture(scope="module", params=[{"couplings": (3,), "width": 24}, {"couplings": "pixels", "width": 16}])
def flow(digits, request):
    rows = digits.rows("train", generator=seeded(1), dtype=torch.float64)
    return ImageFlow.fit(rows, levels=17, steps=150, batch=128, lr=3e-3, progress=False, **request.param)


class TestImageFlow:
    def test_learns_more_than_every_pixels_frequencies(self, digits, flow):
        """On test digits; so does the Gaussian copula."""
        rows = digits.rows("train", generator=seeded(1), dtype=torch.float64)
        everything = rows[torch.arange(len(rows))]
        test = digits.rows("test", generator=seeded(2), dtype=torch.float64)[torch.arange(300)]
        edges = torch.arange(18) / 17
        alone = Copula.fit(everything, edges, covariance="diagonal").log_prob(test).mean()
        copula = Copula.fit(everything, edges).log_prob(test).mean()
        with torch.no_grad():
            ours = flow.log_prob(test).mean()
        assert copula > alone + 5
        assert ours > alone + 5

    def test_samples_are_pixels(self, flow):
        """Drawn through the inverse: nearly all in [0, 1], and each with the density that the flow says."""
        x = flow.sample(200, generator=seeded())
        assert x.shape == (200, 1, 8, 8)
        assert ((x > -0.01) & (x < 1.01)).double().mean() > 0.99
        way, noise = flow.coordinates()
        z, log_det = way(x)
        torch.testing.assert_close(noise.log_prob(z) + log_det, flow.log_prob(x), rtol=1e-4, atol=1e-2)

    def test_is_built_anew_from_its_description(self, flow):
        again = build(json.loads(json.dumps(describe(flow)))).to_empty(device="cpu")
        again.load_state_dict(flow.state_dict())
        x = flow.sample(5, generator=seeded())
        with torch.no_grad():
            assert torch.equal(again.log_prob(x), flow.log_prob(x))

    def test_same_generator_same_flow(self, digits):
        flows = [
            ImageFlow.fit(
                digits.rows("train", generator=seeded(1)),
                levels=17,
                steps=3,
                couplings=(1,),
                width=4,
                generator=seeded(seed),
                progress=False,
            )
            for seed in (0, 0, 1)
        ]
        x = flows[0].sample(4, generator=seeded())
        with torch.no_grad():
            first, second, third = (one.log_prob(x) for one in flows)
        assert torch.equal(first, second)
        assert not torch.equal(first, third)

    def test_seconds_end_it(self, digits):
        rows = digits.rows("train", generator=seeded(1))
        flow = ImageFlow.fit(rows, levels=17, steps=10**9, seconds=1.0, couplings=(1,), width=4, progress=False)
        assert math.isfinite(flow.log_prob(rows[torch.arange(10)]).mean())

    def test_pixel_by_pixel_it_learns_more_than_the_copula(self, digits):
        """On test digits."""
        rows = digits.rows("train", generator=seeded(1), dtype=torch.float64)
        test = digits.rows("test", generator=seeded(2), dtype=torch.float64)[torch.arange(300)]
        copula = Copula.fit(rows[torch.arange(len(rows))], torch.arange(18) / 17).log_prob(test).mean()
        flow = ImageFlow.fit(
            rows, levels=17, steps=400, batch=64, lr=5e-3, couplings="pixels", width=16, progress=False
        )
        assert flow.log_prob(test).mean() > copula + 5

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (
                {"couplings": "pixel"},
                "'couplings' of ImageFlow are numbers, one for each level, or 'pixels'. Got 'pixel'",
            ),
            ({"couplings": "pixels", "depth": 3}, "Autoregression of an ImageFlow has no such option"),
            ({"couplings": (1,), "features": 3}, "Couplings of an ImageFlow has no such option"),
        ],
    )
    def test_refuses(self, digits, options, words):
        with pytest.raises(InvalidValue, match=words):
            ImageFlow.fit(digits.rows("train", generator=seeded(1)), levels=17, **options)

    def test_too_few_images(self):
        rows = ImageRows(torch.zeros(5, 1, 4, 4, dtype=torch.uint8), Dequantize(256))
        with pytest.raises(DataError, match="needs ten images at least"):
            ImageFlow.fit(rows, couplings=(1,))
