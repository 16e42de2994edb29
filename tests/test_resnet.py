"""The residual network against one written out with plain convolutions, and networks seen through a transform."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, linear, silu

from unnorm import Density, Training, train
from unnorm.architecture import build, describe, is_custom
from unnorm.data import Gaussianize, Identity, Logit, Standardize
from unnorm.errors import InvalidValue
from unnorm.estimators import MECO, ScoreMatching, Telescope
from unnorm.models import MLP, Bridged, ResNet, Seen, Tilted, Views, WideResNet
from unnorm.noise import Gaussian
from unnorm.samplers.base import log_density_and_score


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n, event, seed=0):
    return torch.randn(n, *event, generator=seeded(seed), dtype=torch.float64)


def stirred(net, seed=1):
    """Every parameter away from where it began: no zeros, no identities."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded(seed), dtype=torch.float64).to(parameter)
    return net


def written_out(net, x, blocks):
    """The same network from its numbers alone, in the order in which they are registered."""
    numbers = iter(net.parameters())

    def convolved(x, stride=1):
        return conv2d(x, next(numbers), next(numbers), stride=stride, padding=1)

    x = convolved(x)
    for stage, _ in enumerate(net.widths):
        if stage:
            x = convolved(x, 2)
        for _ in range(blocks):
            x = x + convolved(silu(convolved(silu(x))))
    x = silu(linear(silu(x).flatten(1), next(numbers), next(numbers)))
    x = linear(x, next(numbers), next(numbers))
    assert next(numbers, None) is None
    return x


SHAPES = {
    "even": ((1, 8, 8), (4, 6), 1),
    "odd": ((3, 7, 5), (4, 6, 5), 2),
    "one pixel": ((2, 1, 1), (3, 4), 1),
    "a row": ((1, 1, 9), (3, 4, 5, 6), 1),
    "one stage": ((1, 5, 5), (4,), 2),
}
every_shape = pytest.mark.parametrize(("event", "widths", "blocks"), SHAPES.values(), ids=SHAPES)


class TestResNet:
    @every_shape
    @pytest.mark.parametrize("outputs", [None, 1, 3])
    def test_is_the_one_written_out(self, event, widths, blocks, outputs):
        net = stirred(ResNet(event, widths, blocks, features=7, outputs=outputs, generator=seeded()).double())
        x = images(5, event)
        expected = written_out(net, x, blocks)
        assert net(x).shape == ((5,) if outputs is None else (5, outputs))
        torch.testing.assert_close(net(x), expected[:, 0] if outputs is None else expected, rtol=1e-12, atol=1e-12)

    def test_blocks_begin_as_the_identity(self):
        """Three times the blocks, the same function, where the rest has the same numbers."""
        deep = ResNet((1, 6, 6), (4, 8), blocks=3, features=5, generator=seeded())
        shallow = ResNet((1, 6, 6), (4, 8), blocks=1, features=5, generator=seeded(1))
        same = [(shallow.stages[0], deep.stages[0]), (shallow.stages[2], deep.stages[4])]
        stirred(deep.last)
        for ours, theirs in [*same, (shallow.gather, deep.gather), (shallow.last, deep.last)]:
            ours.load_state_dict(theirs.state_dict())
        x = images(4, (1, 6, 6)).float()
        assert torch.equal(deep(x), shallow(x))
        assert deep(x).std() > 0
        stirred(deep.stages[1])
        assert not torch.equal(deep(x), shallow(x))

    def test_gradient_reaches_every_parameter_but_the_masked_ones(self):
        """Where the last layer is not zero, a block's first convolution has a zero behind it, but for one step."""
        net = ResNet((1, 6, 6), (4, 8), blocks=2, features=5, generator=seeded()).double()
        stirred(net.last)
        x = images(4, (1, 6, 6))
        without = []
        for _ in range(2):
            net.zero_grad()
            net(x).square().sum().backward()
            without.append({name for name, p in net.named_parameters() if not p.grad.abs().sum() > 0})
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.01 * parameter.grad
        masked = {name for name, _ in net.named_parameters() if ".first." in name}
        assert without == [masked, set()]

    @every_shape
    def test_same_generator_same_weights(self, event, widths, blocks):
        nets = [ResNet(event, widths, blocks, features=6, generator=seeded(seed)) for seed in (0, 0, 1)]
        states = [net.state_dict() for net in nets]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert not torch.equal(states[0]["gather.weight"], states[2]["gather.weight"])

    @every_shape
    @pytest.mark.parametrize("outputs", [None, 2])
    def test_is_built_anew_from_its_description(self, event, widths, blocks, outputs):
        net = ResNet(event, widths, blocks, features=6, outputs=outputs)
        described = json.loads(json.dumps(describe(net)))
        assert is_custom(described) is None
        again = build(described).to_empty(device="cpu")
        again.load_state_dict(net.state_dict())
        x = images(3, event).float()
        assert torch.equal(again(x), net(x))
        assert describe(again) == describe(net)

    def test_score_is_the_slope(self):
        """Against central differences along random directions, where activations bend too."""
        net = stirred(ResNet((2, 5, 4), (4, 6), 1, features=8, generator=seeded()).double())
        x, along = images(6, (2, 5, 4)), images(6, (2, 5, 4), seed=1)
        _, score = log_density_and_score(net, x)
        with torch.no_grad():
            slope = (net(x + 1e-5 * along) - net(x - 1e-5 * along)) / 2e-5
        torch.testing.assert_close((score * along).flatten(1).sum(1), slope, rtol=1e-7, atol=1e-8)
        assert score.abs().min() > 0

    def test_is_differentiable_twice(self):
        net = stirred(ResNet((1, 3, 3), (3,), 1, features=4, generator=seeded()).double())
        ScoreMatching()(net, images(4, (1, 3, 3))).surrogate.backward()
        *rest, last = [p.grad for p in net.parameters()]
        assert all(grad.abs().sum() > 0 for grad in rest)
        assert last is None or last.abs().sum() == 0  # the score knows no constant

    def test_starts_at_zero_and_leaves_it(self):
        """A new tilted model is the noise; what the last layer reads has a spread of order one, so that it learns."""
        net = ResNet((1, 12, 12), (8, 16), 2, features=64, outputs=50, generator=seeded())
        x = images(200, (1, 12, 12)).float()
        read = []
        net.last.register_forward_hook(lambda _, given, __: read.append(given[0]))
        assert torch.equal(net(x), torch.zeros(200, 50))
        assert 0.1 < read[0].std(0).mean() < 10

    def test_pooled_does_not_mind_where(self):
        """A spot that three convolutions do not bring to an edge may be anywhere."""
        net = stirred(ResNet((1, 16, 16), (4,), 1, features=6, pooled=True, generator=seeded()).double())
        assert net.gather.in_features == 4
        spot = torch.zeros(2, 1, 16, 16, dtype=torch.float64)
        spot[0, 0, 7, 6], spot[1, 0, 8, 9] = 1.0, 1.0
        values = net(spot)
        torch.testing.assert_close(values[0], values[1], rtol=1e-10, atol=1e-10)

    def test_checkpointing_changes_nothing(self):
        plain, again = (
            stirred(ResNet((1, 6, 6), (4, 8), 2, features=5, checkpointing=flag, generator=seeded()).double())
            for flag in (False, True)
        )
        x = images(4, (1, 6, 6))
        assert torch.equal(plain(x), again(x))
        for net in (plain, again):
            net(x).sum().backward()
        for one, other in zip(plain.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)

    def test_spectral_weights_have_singular_values_of_one_at_most(self):
        """Against the singular values themselves; small weights stay as they are."""
        net = ResNet((1, 6, 6), (4, 8), 1, features=5, spectral=True, generator=seeded()).double()
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if name.endswith("original"):
                    parameter.copy_(3 * images(1, tuple(parameter.shape), seed=len(name))[0])
        for _ in range(200):
            net(images(1, (1, 6, 6)))
        net.eval()
        weights = {name: m.weight.detach() for name, m in net.named_modules() if hasattr(m, "parametrizations")}
        assert len(weights) == 2 + 2 * 2 + 1
        for weight in weights.values():
            assert float(torch.linalg.matrix_norm(weight.flatten(1), 2)) == pytest.approx(1.0, abs=1e-3)
        with torch.no_grad():
            net.gather.parametrizations.weight.original.mul_(1e-3)
        assert torch.equal(net.gather.weight, net.gather.parametrizations.weight.original)
        again = build(json.loads(json.dumps(describe(net)))).to_empty(device="cpu").double()
        again.load_state_dict(net.state_dict())
        x = images(3, (1, 6, 6))
        assert torch.equal(again.eval()(x), net(x))

    def test_gain_multiplies_what_comes_out(self):
        plain, loud = (ResNet((1, 6, 6), (4,), 1, 5, 3, gain=gain, generator=seeded()) for gain in (1.0, 16.0))
        for net in (plain, loud):
            torch.nn.init.normal_(net.last.weight, generator=seeded())
        x = torch.randn(4, 1, 6, 6, generator=seeded())
        torch.testing.assert_close(loud(x), 16 * plain(x))
        assert (loud.config["gain"], "gain" in plain.config) == (16.0, False)
        with pytest.raises(InvalidValue, match="'gain' of ResNet must be positive. Got 0"):
            ResNet((1, 6, 6), gain=0)

    def test_dropout_drops_while_training_only(self):
        net = ResNet((1, 6, 6), (4,), 1, 5, dropout=0.5, generator=seeded())
        with torch.no_grad():
            for parameter in net.parameters():  # all begins at zero where it is added
                parameter.add_(0.3)
        x = torch.randn(3, 1, 6, 6, generator=seeded())
        assert not torch.equal(net(x), net(x))
        net.eval()
        assert torch.equal(net(x), net(x))
        assert net.config["dropout"] == 0.5
        plain = ResNet((1, 6, 6), (4,), 1, 5, generator=seeded())
        plain.load_state_dict(net.state_dict())
        assert torch.equal(plain.eval()(x), net(x))
        assert "dropout" not in plain.config

    def test_a_wide_one_is_as_deep_as_it_says(self):
        """28-10 of the paper: 25 convolutions of its stages and the stem; ours has two more for its strides."""
        net = WideResNet((3, 32, 32), 28, 2)
        convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
        assert len(convolutions) == 25 + 2
        assert [m.out_channels for m in convolutions if m.stride == (2, 2)] == [64, 128]
        for options in ({"depth": 12}, {"depth": 4}, {"width": 0}):
            with pytest.raises(InvalidValue, match="of WideResNet must be"):
                WideResNet((3, 32, 32), **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"event": 784}, r"must be \(channels, height, width\). Got \(784,\)"),
            ({"event": (28, 28)}, r"must be \(channels, height, width\). Got \(28, 28\)"),
            ({"event": (1, 0, 4)}, "shape of positive sizes"),
            ({"widths": ()}, r"needs widths and blocks. Got widths \(\)"),
            ({"widths": (4, 0)}, r"needs widths and blocks. Got widths \(4, 0\)"),
            ({"blocks": 0}, "needs widths and blocks. Got .* blocks 0"),
            ({"outputs": 0}, "'outputs' of ResNet must be positive. Got 512, 0"),
            ({"features": 0}, "'features' and 'outputs' of ResNet must be positive. Got 0, None"),
        ],
    )
    def test_wrong_use(self, options, message):
        with pytest.raises(InvalidValue, match=message):
            ResNet(**{"event": (1, 4, 4), "widths": (2,), **options})

    def test_learns_images_by_bridges(self):
        """Stripes of four pixels, of either sign, against their own diagonal Gaussian: most of the KL is claimed."""
        generator, n, event = seeded(2), 4000, (1, 2, 2)
        stripes = torch.tensor([2.0, -2.0]).repeat(2).view(event)
        signs = torch.randint(2, (n, 1, 1, 1), generator=generator) * 2 - 1
        x = signs * stripes + 0.5 * torch.randn(n, *event, generator=generator)
        q = Gaussian.fit(x, "diagonal")
        model = Bridged(q, ResNet(event, (8,), 1, features=32, outputs=3, generator=seeded()))
        history = train(model, Telescope(q, 3), x, Training(steps=150, batch=200, lr=3e-3), progress=False)
        entropy = math.log(2) + 2 * math.log(2 * math.pi * math.e * 0.25)  # of two Gaussians well apart
        apart = -q.log_prob(x).mean().item() - entropy
        gained = -q.log_prob(x).mean().item() - sum(history["value"][-5:]) / 5
        assert 2.5 < apart < 6
        assert 0.6 * apart < gained < 1.2 * apart


class TestSeen:
    event = (1, 4, 3)

    @pytest.fixture
    def transform(self):
        return Standardize.fit(3 + 5 * images(50, self.event, seed=4))

    @pytest.mark.parametrize("outputs", [None, 2])
    def test_is_the_network_at_the_inverse(self, transform, outputs):
        net = stirred(ResNet(self.event, (3,), 1, features=6, outputs=outputs, generator=seeded()).double())
        x = 3 + 5 * images(6, self.event)
        z = (x - transform.loc) / transform.scale
        torch.testing.assert_close(Seen(transform, net)(z), net(x), rtol=1e-10, atol=1e-10)

    def test_score_has_the_chain_rule_s_factor(self, transform):
        net = stirred(ResNet(self.event, (3,), 1, features=6, generator=seeded()).double())
        x = 3 + 5 * images(6, self.event)
        _, seen = log_density_and_score(Seen(transform, net), transform(x)[0])
        _, plain = log_density_and_score(net, x)
        torch.testing.assert_close(seen, plain * transform.scale, rtol=1e-9, atol=1e-9)

    def test_trains_the_network_alone(self, transform):
        net = ResNet(self.event, (3,), 1, features=6, outputs=2, generator=seeded())
        q = Gaussian(self.event)
        model = Bridged(q, Seen(transform, net))
        before = [buffer.clone() for buffer in transform.buffers()]
        assert {id(p) for p in model.parameters()} == {id(p) for p in net.parameters()}
        x = images(30, self.event).float()
        train(model, Telescope(q, 2), x, Training(steps=2, batch=10), progress=False)
        assert all(torch.equal(old, new) for old, new in zip(before, transform.buffers(), strict=True))

    def test_survives_a_file(self, transform, tmp_path):
        q = Gaussian(self.event, "diagonal")
        model = Tilted(q, Seen(transform, ResNet(self.event, (3,), 1, features=6, generator=seeded())))
        density = Density.normalise(model, q, transform, n=2000, generator=seeded())
        density.save(tmp_path)
        again = Density.load(tmp_path)
        x = (3 + 5 * images(6, self.event)).float()
        assert torch.equal(again.log_prob(x), density.log_prob(x))
        z, log_det = transform(x)
        expected = q.log_prob(z) + model.net.net(x) + log_det - density.log_z.value
        torch.testing.assert_close(again.log_prob(x), expected, rtol=1e-4, atol=1e-4)

    def test_is_built_anew_from_its_description(self, transform):
        model = Seen(transform, MLP(self.event, hidden=(4,), outputs=3))
        again = build(json.loads(json.dumps(describe(model)))).to_empty(device="cpu")
        again.load_state_dict(model.state_dict())
        z = images(3, self.event).float()
        assert torch.equal(again(z), model(z))

    def test_meco_sees_through_it(self, transform):
        """Trained in z or in x, the same likelihood up to the Jacobian: q_x(x) = q(T(x)) |det T'|."""
        net = stirred(ResNet(self.event, (3,), 1, features=6, generator=seeded()).double())
        q, x = Gaussian(self.event).double(), 3 + 5 * images(8, self.event)
        z, log_det = transform(x)
        in_z = MECO(q).double()(Seen(transform, net), z, generator=seeded(3)).info
        moved = Gaussian(self.event, "diagonal").double()
        moved.loc.copy_(transform.loc.flatten())
        moved.scale.copy_(transform.scale.flatten())
        in_x = MECO(moved).double()(net, x, generator=seeded(3)).info
        torch.testing.assert_close(in_z["value"], in_x["value"] + log_det[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(in_z["gap"], in_x["gap"], rtol=1e-9, atol=1e-9)


class TestViews:
    event = (2, 4, 3)

    def net(self):
        return stirred(ResNet((8, 4, 3), (3,), 1, features=6, generator=seeded()).double())

    def test_is_the_network_at_the_four_views(self):
        """Logits of shades, written out with numpy."""
        net, alpha, levels = self.net(), 0.01, 16
        x = images(6, self.event)
        shade = (1 / (1 + np.exp(-x.numpy())) - alpha) / (1 - 2 * alpha)
        shade = shade.clip(0, 1)
        first, last = np.tanh(2 * (levels * shade - 1)), np.tanh(2 * (levels * (1 - shade) - 1))
        channels = np.concatenate([x.numpy(), 2 * shade - 1, first, last], 1)
        torch.testing.assert_close(
            Views(Logit(alpha), ("shade", "ends"), levels, net)(x), net(torch.from_numpy(channels))
        )

    def test_the_cut_at_the_end_of_the_first_shade_is_in_plain_sight(self):
        """A twentieth of a logit on both sides of the cut: one view moves by more than a hundredth of its range."""
        seen = []
        views = Views(Logit(1e-6), ("shade", "ends"), 256, nn.Module())
        views.net.forward = lambda channels: seen.append(channels) or channels[:, 0, 0, 0]
        cut = math.log(1 / 255)
        views(torch.tensor([cut - 0.05, cut + 0.05]).view(2, 1, 1, 1).double())
        moved = (seen[0][1] - seen[0][0]).abs().flatten()
        assert moved[2] > 0.15
        assert moved[[1, 3]].max() < 1e-3

    @pytest.mark.parametrize("views", [("shade", "ends"), ("shade", "root", "root")])
    def test_the_score_is_that_of_finite_differences(self, views):
        model = Views(Logit(0.01), views, 16, self.net())
        x = images(3, self.event)
        _, score = log_density_and_score(model, x)
        step = torch.zeros_like(x)
        step[:, 1, 2, 1] = 1e-6
        by_hand = (model(x + step) - model(x - step)) / 2e-6
        torch.testing.assert_close(score[:, 1, 2, 1], by_hand, rtol=1e-6, atol=1e-8)

    def test_survives_a_file(self):
        model = Views(
            Gaussianize.fit(torch.rand(50, *self.event, generator=seeded())), ("ends", "root"), 16, self.net().float()
        )
        again = build(json.loads(json.dumps(describe(model)))).to_empty(device="cpu")
        again.load_state_dict(model.state_dict())
        x = images(3, self.event).float()
        assert torch.equal(again(x), model(x))

    def test_refuses_levels_that_are_none(self):
        with pytest.raises(InvalidValue, match="'levels' of Views must be an integer of 2 at least. Got 1."):
            Views(Logit(), ("shade",), 1, self.net())

    def test_refuses_views_that_are_none(self):
        with pytest.raises(InvalidValue, match="Unknown view 'ros'. Did you mean 'root'"):
            Views(Logit(), ("ros",), 2, self.net())

    def test_the_root_is_a_line_in_the_first_shade(self):
        seen = []
        views = Views(Identity(), ("root",), 4, nn.Module())
        views.net.forward = lambda channels: seen.append(channels[:, 1].flatten())
        shades = torch.tensor([-0.25, 0.0, 0.125, 0.25, 0.64, 1.0])
        views(shades.view(6, 1, 1, 1))
        torch.testing.assert_close(seen[0], torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.6, 1.0]))
