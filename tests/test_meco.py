"""MECO's mathematics, each against an oracle of its own."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from unnorm.errors import InvalidValue
from unnorm.estimators import EMA, MECO, SCENT, Minibatch, UMax, meco_surrogate
from unnorm.models import MLP, Quadratic, Tilted
from unnorm.noise import Gaussian
from unnorm.optim import rates, set_rates, sgd
from unnorm.types import log_mean_exp


@pytest.fixture
def setting():
    generator = torch.Generator().manual_seed(0)
    model = MLP(2, hidden=(8, 8), generator=generator).double()
    q = Gaussian(2).double()
    x = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    z = q.sample(9, generator=generator)
    return model, q, x, z


def test_surrogate_gradient_is_the_bracket_of_equation_v(setting):
    """-grad p0(z)/p0(z) + (1/u) grad p0(z')/q(z'), by autograd of p0 = exp(log p~) itself."""
    model, q, x, z = setting
    u = torch.tensor(0.37, dtype=torch.float64)
    parameters = list(model.parameters())
    meco_surrogate(model(x), model(z) - q.log_prob(z), u.log()).backward()

    bracket = [torch.zeros_like(p) for p in parameters]
    for point in x:
        p0 = model(point[None]).exp().squeeze()
        for total, grad in zip(bracket, torch.autograd.grad(p0, parameters), strict=True):
            total -= grad / p0.detach() / len(x)
    for point in z:
        p0 = model(point[None]).exp().squeeze()
        for total, grad in zip(bracket, torch.autograd.grad(p0, parameters), strict=True):
            total += grad / q.log_prob(point[None]).exp() / u / len(z)
    for parameter, expected in zip(parameters, bracket, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-12)


def test_forward_uses_the_updated_u_and_reports_the_tracked_nll(setting):
    model, q, x, _ = setting
    estimator = MECO(q, gamma=0.25).double()
    u = None
    states = torch.Generator().manual_seed(2)
    for _ in range(5):
        replay = torch.Generator()
        replay.set_state(states.get_state())
        objective = estimator(model, x, generator=states)
        z = q.sample(len(x), generator=replay)
        w = (model(z) - q.log_prob(z)).exp().mean().detach()
        u = w if u is None else 0.75 * u + 0.25 * w
        expected = u.log() - model(x).mean()
        torch.testing.assert_close(objective.info["log_u"], u.log(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(objective.info["value"], expected.detach(), rtol=1e-12, atol=1e-12)


def test_noise_of_another_width_is_named():
    with pytest.raises(InvalidValue, match=r"events of shape \(2,\), the noise \(3,\)"):
        MECO(Gaussian(3))(Quadratic(2), torch.zeros(4, 2))


def test_one_forward_pass(setting):
    model, q, x, _ = setting
    calls = []
    MECO(q).double()(lambda points: calls.append(len(points)) or model(points), x)
    assert calls == [2 * len(x)]


class TestTrackers:
    def test_ema_equals_the_linear_recursion(self):
        log_w = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        u, log_u = log_w[0].exp(), log_w[0]
        for value in log_w[1:]:
            u, log_u = 0.9 * u + 0.1 * value.exp(), EMA(0.1)(log_u, value)
            torch.testing.assert_close(log_u, u.log(), rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize("level", [1e4, -1e4])
    @pytest.mark.parametrize("tracker", [EMA(0.1), Minibatch(), SCENT(), UMax()])
    def test_shift_of_ten_thousand(self, tracker, level):
        """Log-weights of +-1e4 overflow exp; the tracked value stays between old and new."""
        log_u, new = torch.tensor(level, dtype=torch.float64), torch.tensor(level + 0.5, dtype=torch.float64)
        found = tracker(log_u, new)
        assert level <= found <= level + 0.5

    def test_ema_at_ten_thousand_equals_the_shifted_recursion(self):
        shift = 1e4
        near, far = torch.tensor(0.3, dtype=torch.float64), torch.tensor(1.7, dtype=torch.float64)
        torch.testing.assert_close(EMA(0.2)(near + shift, far + shift) - shift, EMA(0.2)(near, far), rtol=0, atol=1e-10)

    def test_jump_from_minus_to_plus_ten_thousand(self):
        found = EMA(0.1)(torch.tensor(-1e4), torch.tensor(1e4))
        torch.testing.assert_close(found, torch.tensor(1e4 + math.log(0.1)))

    def test_scent_rate(self):
        """u' = (1 - g) u + g w with g = a u / (1 + a u), written out without logs."""
        u, w, a = 0.7, 2.9, 0.3
        g = a * u / (1 + a * u)
        found = SCENT(a)(*torch.tensor([u, w], dtype=torch.float64).log())
        assert math.isclose(found.exp(), (1 - g) * u + g * w, rel_tol=1e-12)

    def test_umax(self):
        tracker = UMax(delta=1.0, eta=0.2)
        behind, close, ahead = (
            tracker(torch.tensor(nu).double(), torch.tensor(2.0).double()) for nu in (0.9, 1.5, 3.0)
        )
        assert behind == 2.0
        assert math.isclose(close, 1.5 + 0.2 * (math.exp(0.5) - 1), rel_tol=1e-12)
        assert math.isclose(ahead, 3.0 + 0.2 * (math.exp(-1.0) - 1), rel_tol=1e-12)

    @pytest.mark.parametrize("tracker", [EMA(0.1), SCENT(0.1), UMax(1.0, 0.1)])
    def test_a_steady_weight_is_a_fixed_point_and_is_found(self, tracker):
        log_u, target = torch.tensor(-3.0).double(), torch.tensor(1.2).double()
        assert math.isclose(tracker(target, target), target, abs_tol=1e-12)
        for _ in range(5000):
            log_u = tracker(log_u, target)
        assert abs(log_u - target) < 1e-3

    @pytest.mark.parametrize("gamma", [0.0, -0.1, 1.5, math.nan])
    def test_gamma_outside_its_range(self, gamma):
        with pytest.raises(InvalidValue, match=r"The 'gamma' of MECO must be in \(0, 1\]. Got"):
            MECO(Gaussian(1), gamma=gamma)

    def test_unknown_tracker(self):
        with pytest.raises(InvalidValue, match="Did you mean 'scent'"):
            MECO(Gaussian(1), tracker="scnt")

    def test_gamma_belongs_to_ema(self):
        with pytest.raises(InvalidValue, match="belongs to the tracker 'ema'"):
            MECO(Gaussian(1), tracker="umax", gamma=0.2)


def test_weights_stay_bounded_by_n_noise_over_gamma():
    """Whatever the weights, exp(log_w - log_u) <= n / gamma after the update: the surrogate cannot overflow."""
    generator = torch.Generator().manual_seed(0)
    log_u = torch.tensor(-50.0)
    for _ in range(20):
        log_w = 1e3 * torch.randn(16, generator=generator)
        log_u = EMA(0.1)(log_u, log_mean_exp(log_w))
        assert (log_w - log_u).exp().max() <= 160 * (1 + 1e-4)


def test_estimator_works_at_log_weights_of_ten_thousand():
    q = Gaussian(2).double()
    offset = torch.nn.Parameter(torch.tensor(1e4, dtype=torch.float64))
    model = lambda x: q.log_prob(x) + offset  # noqa: E731
    estimator = MECO(q).double()
    x = q.sample(10)
    objective = estimator(model, x)
    objective.surrogate.backward()
    assert math.isclose(objective.info["log_u"], 1e4, rel_tol=1e-12)
    assert abs(offset.grad) < 1e-9


class TestLemmaOne:
    """q = p. The value estimator p0/q has no variance. The gradient estimator grad p0 / q = Z grad log p0 has none
    only if q is differentiated along with p (then p0/q = Z for every theta); with q held fixed, as Algorithm 1
    holds it, its variance is Z^2 times the Fisher information. The paper's Lemma claims zero for both and proves
    the first."""

    @pytest.fixture
    def at_noise(self):
        model = Quadratic(1, learn_precision=False).double()
        with torch.no_grad():
            model.linear.fill_(0.8)
        z = 0.8 + torch.randn(4000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return model, z

    @staticmethod
    def log_q(z, mean):
        return -0.5 * (z[:, 0] - mean) ** 2 - 0.5 * math.log(2 * math.pi)

    def test_value(self, at_noise):
        model, z = at_noise
        w = (model(z) - self.log_q(z, 0.8)).exp()
        torch.testing.assert_close(w, model.log_z.exp().expand_as(w), rtol=1e-12, atol=0)

    def test_gradient_with_q_moving_along(self, at_noise):
        model, z = at_noise
        theta = model.linear
        grads = torch.stack(
            [
                torch.autograd.grad((model(p[None]) - self.log_q(p[None], theta[0])).exp().sum(), theta)[0]
                for p in z[:50]
            ]
        )
        assert grads.var() < 1e-20

    def test_gradient_with_q_fixed_has_the_fisher_variance(self, at_noise):
        model, z = at_noise
        w = (model(z) - self.log_q(z, 0.8)).exp().detach()
        grads = w * z[:, 0]  # grad log p0 = x
        expected = (model.log_z.exp() ** 2).item()  # Fisher information of a unit-variance mean is 1
        error = expected * math.sqrt(2 / len(z))
        assert abs(grads.var().item() - expected) < 4 * error


class TestPropositionTwo:
    """L(theta) - L(theta*) = c (theta - theta*)^2: the text says c = 1/2, the last line of the proof says 1."""

    @staticmethod
    def loss(theta, star):
        def p0(x):
            return math.exp(theta * x - x * x / 2)

        data = integrate.quad(lambda x: (-theta * x + x * x / 2) * math.exp(-((x - star) ** 2) / 2), -12, 20)[0]
        return data / math.sqrt(2 * math.pi) + math.log(integrate.quad(p0, -12, 20)[0])

    @pytest.mark.parametrize("theta", [-1.0, 0.0, 1.5, 3.0, 5.0])
    def test_the_constant_is_one_half(self, theta):
        star = 2.0
        gap = self.loss(theta, star) - self.loss(star, star)
        assert math.isclose(gap, 0.5 * (theta - star) ** 2, rel_tol=1e-7)

    def test_our_model_is_the_paper_model(self):
        model = Quadratic(1, learn_precision=False).double()
        with torch.no_grad():
            model.linear.fill_(1.3)
        x = torch.linspace(-3, 3, 7, dtype=torch.float64)[:, None]
        torch.testing.assert_close(model(x), 1.3 * x[:, 0] - x[:, 0] ** 2 / 2)
        assert math.isclose(model.log_z.item(), 1.3**2 / 2 + math.log(math.sqrt(2 * math.pi)), rel_tol=1e-12)


def replicated_mean_estimation(steps, replicas, *, star=0.5, lr=1.0, factor=2.0, batch=4, marks=()):
    """`replicas` independent runs of Algorithm 1 on the 1-D Gaussian mean with noise N(0, 1), as one tensor.

    The estimator's pure functions, the optimizer and the Theorem 4 rates are the library's own.
    """
    generator = torch.Generator().manual_seed(0)
    theta = torch.nn.Parameter(torch.full((replicas,), 2.0, dtype=torch.float64))
    optimizer = sgd([theta], lr)
    sequences = rates("pl", lr=lr, steps=steps, mu=1.0, factor=factor)
    log_u, excess = None, {}
    for t in range(1, steps + 1):
        x = star + torch.randn(replicas, batch, generator=generator, dtype=torch.float64)
        z = torch.randn(replicas, batch, generator=generator, dtype=torch.float64)
        log_w = theta[:, None] * z - z**2 / 2 + z**2 / 2 + 0.5 * math.log(2 * math.pi)
        log_mean_w = log_mean_exp(log_w.detach())
        log_u = log_mean_w if log_u is None else EMA(sequences.gamma(t))(log_u, log_mean_w)
        surrogate = meco_surrogate(theta[:, None] * x - x**2 / 2, log_w, log_u)
        set_rates(optimizer, sequences.eta(t), sequences.beta(t))
        optimizer.zero_grad()
        surrogate.sum().backward()
        optimizer.step()
        if t in marks:
            excess[t] = float((0.5 * (theta.detach() - star) ** 2).mean())
    return excess


def test_convergence_rate_of_theorem_four():
    """E[L - L*] falls like 1/T (Proposition 3) over two decades of T."""
    marks = [100, 200, 500, 1000, 2000, 5000, 10_000]
    excess = replicated_mean_estimation(10_000, 400, marks=marks)
    slope = np.polyfit(np.log(marks), np.log([excess[t] for t in marks]), 1)[0]
    assert -1.2 < slope < -0.8, excess


def test_tilted_weight_is_the_network(setting):
    model, q, _, z = setting
    torch.testing.assert_close(Tilted(q, model)(z) - q.log_prob(z), model(z), rtol=1e-12, atol=1e-12)
