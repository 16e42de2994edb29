"""The way over the waymarks: an oracle with known waymark densities, and what every route must keep."""

import math

import pytest
import torch
from torch import nn

from unnorm import Bridged, Gaussian, Quadratic, Tilted
from unnorm.errors import InvalidValue
from unnorm.partition import ais, bracket, plan, reverse_ais
from unnorm.partition.path import _pilot
from unnorm.partition.routes import Geometric, PartlyBridged, Waymarks, picked, route
from unnorm.samplers import HMC

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Shrinking(nn.Module):
    """Heads that take N(0, I) over N(0, v_k I) to N(0, v_0 I): head k is log p_k / p_{k+1} plus a constant."""

    def __init__(self, variances=(0.01, 0.05, 0.2, 0.6, 1.0), constants=(0.3, -1.0, 2.0, 0.5)):
        super().__init__()
        v = torch.tensor(variances, dtype=F64)
        self.slopes = nn.Parameter(0.5 * (1 / v[1:] - 1 / v[:-1]))
        self.register_buffer("constants", torch.tensor(constants, dtype=F64))
        self.variances = variances

    def forward(self, x):
        squares = x.flatten(1).square().sum(1, keepdim=True)
        return squares * self.slopes + self.constants

    def log_z(self, d):
        return float(self.constants.sum()) + 0.5 * d * math.log(self.variances[0])


def shrinking(event=(3,)):
    q = Gaussian(event).double()
    return Bridged(q, Shrinking()), q


class TestWaymarks:
    @pytest.mark.parametrize(
        ("beta", "shares"),
        [(0, [0, 0, 0, 0]), (0.25, [0, 0, 0, 1]), (0.4, [0, 0, 0.6, 1]), (0.875, [0.5, 1, 1, 1]), (1, [1, 1, 1, 1])],
    )
    def test_the_heads_next_to_the_noise_come_first(self, beta, shares):
        model, q = shrinking()
        assert Waymarks(model, q).shares(beta).tolist() == pytest.approx(shares)

    @pytest.mark.parametrize(("k", "variance"), [(1, 0.6), (2, 0.2), (3, 0.05), (4, 0.01)])
    def test_at_a_waymark_it_is_its_density(self, k, variance):
        model, q = shrinking()
        x = torch.randn(7, 3, dtype=F64, generator=seeded())
        here = Waymarks(model, q).at(k / 4)
        log_p = -x.square().sum(1) / 2 / variance
        torch.testing.assert_close(here(x) - here(x)[0], log_p - log_p[0])
        torch.testing.assert_close(here.position(x).score, -x / variance)
        torch.testing.assert_close(here.position(x).log_p, here(x).detach())

    @pytest.mark.parametrize("event", [(3,), (1, 2, 2)])
    @pytest.mark.parametrize(("low", "high"), [(0.0, 0.1), (0.3, 0.7), (0.9, 0.2)])
    def test_moving_keeps_the_point_and_gains_what_it_says(self, event, low, high):
        model, q = shrinking(event)
        x = torch.randn(5, *event, dtype=F64, generator=seeded())
        for way in (Waymarks(model, q), Geometric(model, q)):
            before, after = way.at(low).position(x), way.at(high).position(x)
            torch.testing.assert_close(way.gain(before, low, high), after.log_p - before.log_p)
            moved = way.move(before, low, high)
            for found, expected in zip(moved, after, strict=True):
                torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(("beta", "stop"), [(0.0, 0.25), (0.25, 0.5), (0.6, 0.75), (0.75, 1.0), (0.99, 1.0)])
    def test_no_step_passes_a_waymark(self, beta, stop):
        model, q = shrinking()
        assert Waymarks(model, q).stop(beta) == stop
        assert Geometric(model, q).stop(beta) == 1.0

    def test_chains_carry_their_heads(self):
        model, q = shrinking((1, 2, 2))
        density = Waymarks(model, q).at(0.6)
        state = density.position(torch.randn(50, 1, 2, 2, dtype=F64, generator=seeded()))
        after, _ = HMC(0.55, 3).step(state, density, generator=seeded(1))
        assert 0 < float((after.x != state.x).flatten(1).any(1).double().mean()) < 1  # some moved, some did not
        for found, expected in zip(after, density.position(after.x), strict=True):
            torch.testing.assert_close(found, expected)
        assert torch.equal(picked(after, torch.tensor([4, 4])).heads, after.heads[[4, 4]])

    def test_only_for_bridges_and_their_noise(self):
        model, q = shrinking()
        for wrong in (Tilted(q, Quadratic(3)), Bridged(Gaussian(3).double(), Shrinking())):
            with pytest.raises(InvalidValue, match="The path 'bridges' is for a Bridged model and the noise"):
                route("bridges", wrong, q)
        with pytest.raises(InvalidValue, match="Unknown path 'bridge'. Did you mean 'bridges'"):
            ais(model, q, path="bridge")

    def test_looking_at_a_route_draws_nothing(self):
        model, q = shrinking()
        before = torch.get_rng_state()
        assert Waymarks(model, q).bridges == 4
        assert torch.equal(torch.get_rng_state(), before)


class TestAlongTheWaymarks:
    def test_log_z_from_both_ends(self):
        model, q = shrinking((20,))
        run = ais(model, q, n_chains=400, path="bridges", generator=seeded())
        assert run.schedule.path == "bridges"
        truth = model.net.log_z(20)
        assert abs(run.log_z.value - truth) < 4 * run.log_z.stderr
        assert run.log_z.stderr < 0.2
        x = 0.1 * torch.randn(400, 20, dtype=F64, generator=seeded(1))
        back = reverse_ais(model, q, x, schedule=run.schedule, generator=seeded(2))
        assert abs(back.log_z.value - truth) < 4 * back.log_z.stderr
        assert float(run.x.square().mean()) == pytest.approx(0.01, rel=0.1)  # samples of the model
        assert float(back.x.square().mean()) == pytest.approx(1.0, rel=0.1)  # and of the noise

    def test_populations_that_resample(self):
        model, q = shrinking((20,))
        run = ais(model, q, n_chains=640, path="bridges", resample=True, generator=seeded())
        assert abs(run.log_z.value - model.net.log_z(20)) < 4 * run.log_z.stderr

    def test_waymarks_are_among_the_temperatures_of_the_pilot(self):
        model, q = shrinking()
        given = plan(model, q, path="bridges", betas=(0.0, 0.25, 0.5, 0.75, 1.0), generator=seeded())
        assert len(given) == 4
        assert given.spread(9).path == "bridges"
        assert given.evaluations == 4 + sum(sampler.leapfrog_steps for sampler in given.samplers)
        found = _pilot(Waymarks(model, q), None, "hmc", 200, 100, seeded())
        assert {0.25, 0.5, 0.75, 1.0} <= set(found.betas)
        assert len(found) > 4
        # The integral of the deviation of a head over the way from one waymark to the next, as a Riemann sum.
        v = torch.tensor(model.net.variances, dtype=F64)
        precisions = [
            torch.linspace(1 / float(a), 1 / float(b), 2001, dtype=F64) for a, b in zip(v[1:], v, strict=False)
        ]
        length = sum(float((torch.trapezoid((3 / 2) ** 0.5 / p, p)).abs()) for p in precisions)
        assert plan(model, q, path="bridges", n_chains=4000, generator=seeded()).length == pytest.approx(
            length, rel=0.1
        )

    def test_bracket_takes_the_path(self):
        model, q = shrinking((5,))
        found = bracket(model, q, n_chains=64, path="bridges", generator=seeded())
        assert abs(found.log_z.value - model.net.log_z(5)) < 4 * found.log_z.stderr + 0.05

    def test_part_of_the_heads(self):
        model, q = shrinking()
        x = torch.randn(4, 3, dtype=F64, generator=seeded())
        none = PartlyBridged(model, torch.zeros(4))
        torch.testing.assert_close(none(x), q.log_prob(x))
