"""The v recursion, the sequences, and the choice of iterate."""

import math

import pytest
import torch
from torch import nn

from unnorm.errors import InvalidValue
from unnorm.iterates import Iterates, polynomial_weight
from unnorm.optim import NGD, PL, Constant, Cosine, Power, adam, rates, set_rates, sgd


def gradients(n=50):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9, 1.0])
def test_sgd_equals_the_v_recursion(beta):
    theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = sgd([theta], lr=0.03, beta=beta)
    slow, v = torch.zeros(4, dtype=torch.float64), None
    for g in gradients():
        v = g if v is None else (1 - beta) * v + beta * g
        slow = slow - 0.03 * v
        theta.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(theta.detach(), slow, rtol=1e-12, atol=1e-14)


BETAS = [1.0, 0.5, 1.0, 0.5, 0.3] + [0.9, 0.2] * 20  # crosses 1, where torch's momentum of 0 would forget v


def test_sgd_follows_betas_that_cross_one():
    theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = sgd([theta], lr=1.0)
    slow, v = torch.zeros(4, dtype=torch.float64), None
    for beta, g in zip(BETAS, gradients(), strict=False):
        v = g if v is None else (1 - beta) * v + beta * g
        slow = slow - 0.1 * v
        set_rates(optimizer, 0.1, beta)
        theta.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(theta.detach(), slow, rtol=1e-12, atol=1e-14)


def test_adam_follows_a_sequence_of_betas():
    """v corrected by 1 - prod(1 - beta_i): a steady gradient gives steps of exactly the learning rate."""
    theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = adam([theta], lr=1.0)
    slow = v = s = torch.zeros(4, dtype=torch.float64)
    product = 1.0
    for t, (beta, g) in enumerate(zip(BETAS, gradients(), strict=False), start=1):
        v, s, product = (1 - beta) * v + beta * g, 0.999 * s + 0.001 * g**2, product * (1 - beta)
        slow = slow - 0.1 * v / (1 - product) / ((s / (1 - 0.999**t)).sqrt() + 1e-8)
        set_rates(optimizer, 0.1, beta)
        theta.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(theta.detach(), slow, rtol=1e-10, atol=1e-12)


def test_sgd_follows_sequences_of_eta_and_beta():
    sequences = rates("pl", lr=0.5, steps=50, mu=0.7)
    theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = sgd([theta], lr=1.0)
    slow, v, eta_before = torch.zeros(4, dtype=torch.float64), None, None
    eta = 0.5
    for t, g in enumerate(gradients(), start=1):
        eta_before, eta = eta, 1 / (0.35 + math.sqrt(0.35**2 + 1 / eta**2))
        beta = min(1.0, eta_before)
        v = g if v is None else (1 - beta) * v + beta * g
        slow = slow - eta * v
        set_rates(optimizer, sequences.eta(t), sequences.beta(t))
        theta.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(theta.detach(), slow, rtol=1e-12, atol=1e-14)


def test_adam_style():
    """v with bias correction over the root of a bias-corrected second moment, written out."""
    beta, beta2, lr = 0.9, 0.999, 0.01
    theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = adam([theta], lr=lr, beta=beta, beta2=beta2)
    slow = v = s = torch.zeros(4, dtype=torch.float64)
    for t, g in enumerate(gradients(), start=1):
        v, s = (1 - beta) * v + beta * g, beta2 * s + (1 - beta2) * g**2
        slow = slow - lr * v / (1 - (1 - beta) ** t) / ((s / (1 - beta2**t)).sqrt() + 1e-8)
        theta.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(theta.detach(), slow, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mu", [0.1, 1.0, 7.0])
def test_pl_schedule_solves_theorem_four(mu):
    eta = PL(0.9, mu)
    before = 0.9
    for t in range(1, 2000):
        now = eta(t)
        assert math.isclose(1 - mu * now, now**2 / before**2, rel_tol=1e-9, abs_tol=1e-12)
        assert now <= 2 / (mu * t)
        before = now
    assert math.isclose(eta(1999) * mu * 1999 / 2, 1, rel_tol=0.05)


def test_pl_rates_tie_gamma_and_beta_to_the_step_before():
    found = rates("pl", lr=0.2, steps=10, mu=3.0, factor=0.5)
    for t in range(2, 10):
        assert found.gamma(t) == found.beta(t) == min(1.0, 0.5 * 3.0 * found.eta(t - 1))


class TestNGD:
    def steps(self, optimizer, theta, every):
        for g in every:
            theta.grad = g.clone()
            optimizer.step()
        return theta.detach()

    def test_equals_the_definition_over_all_parameters_together(self):
        one, two = (nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2))
        optimizer = NGD([one, two], lr=0.1)
        slow = torch.zeros(8, dtype=torch.float64)
        for g in gradients().reshape(-1, 8):
            one.grad, two.grad = g[:4].clone(), g[4:].clone()
            optimizer.step()
            slow -= 0.1 * g / g.norm()
        torch.testing.assert_close(torch.cat([one, two]).detach(), slow)

    def test_beta_normalises_the_moving_average(self):
        theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        found = self.steps(NGD([theta], lr=0.1, beta=0.3), theta, gradients())
        slow, v = torch.zeros(4, dtype=torch.float64), None
        for g in gradients():
            v = g if v is None else 0.7 * v + 0.3 * g
            slow = slow - 0.1 * v / v.norm()
        torch.testing.assert_close(found, slow)

    def test_every_step_has_the_same_length(self):
        """From 1e-30 to 1e38, near the ends of float32."""
        for size in (1e-30, 1.0, 1e38):
            theta = nn.Parameter(torch.zeros(4))
            found = self.steps(NGD([theta], lr=0.5), theta, [torch.tensor([1.0, -1.0, 1.0, -1.0]) * size])
            torch.testing.assert_close(found, torch.tensor([-0.25, 0.25, -0.25, 0.25]))

    def test_a_zero_gradient_moves_nothing(self):
        theta = nn.Parameter(torch.ones(4))
        assert torch.equal(self.steps(NGD([theta], lr=0.5), theta, [torch.zeros(4)]), torch.ones(4))

    def test_parameters_without_gradient_are_left_alone(self):
        used, unused = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
        optimizer = NGD([used, unused], lr=0.5)
        optimizer.step()
        used.grad = torch.ones(1)
        optimizer.step()
        assert (used.item(), unused.item()) == (-0.5, 1.0)

    def test_follows_sequences(self):
        theta = nn.Parameter(torch.zeros(1))
        optimizer = NGD([theta], lr=1.0)
        set_rates(optimizer, eta=0.25, beta=0.5)
        theta.grad = torch.ones(1)
        optimizer.step()
        assert theta.item() == -0.25
        assert optimizer.param_groups[0]["beta"] == 0.5

    def test_closure(self):
        theta = nn.Parameter(torch.ones(1))
        optimizer = NGD([theta], lr=0.5)

        def closure():
            loss = theta.square().sum()
            loss.backward()
            return loss.item()

        assert optimizer.step(closure) == 1.0
        assert theta.item() == 0.5


def test_power_meets_theorem_two():
    """Sum of eta diverges, sum of eta^2 converges: for t^-0.6 the tails behave like t^0.4 and t^-0.2."""
    eta = Power(1.0, 0.6)
    first, second = (sum(eta(t) ** k for t in range(10_000, 20_000)) for k in (1, 2))
    assert math.isclose(first, (20_000**0.4 - 10_000**0.4) / 0.4, rel_tol=1e-3)
    assert math.isclose(second, (10_000**-0.2 - 20_000**-0.2) / 0.2, rel_tol=1e-3)


def test_constant_and_cosine():
    assert {Constant(0.3)(t) for t in (1, 5, 100)} == {0.3}
    eta = Cosine(2.0, 10)
    assert eta(1) == 2.0
    assert [eta(t) for t in range(1, 11)] == sorted((eta(t) for t in range(1, 11)), reverse=True)
    assert 0 < eta(10) < 0.1


@pytest.mark.parametrize("make", [sgd, adam, NGD])
@pytest.mark.parametrize("beta", [0.0, 1.1, -1.0, 1e-17])
def test_beta_outside_its_range(make, beta):
    with pytest.raises(InvalidValue, match=r"The 'beta' of MECO must be in \(0, 1\]. Got"):
        make([nn.Parameter(torch.zeros(1))], 0.1, beta=beta)


@pytest.mark.parametrize("lr", [0.0, -1.0, math.inf])
def test_bad_learning_rate(lr):
    with pytest.raises(InvalidValue, match="'lr' must be positive and below 1e38"):
        sgd([nn.Parameter(torch.zeros(1))], lr)


def test_unknown_schedule():
    with pytest.raises(InvalidValue, match="Did you mean 'cosine'"):
        rates("cosin", lr=0.1, steps=3)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))


def watched(rule, values, seed=0):
    model, generator = Counter(), torch.Generator().manual_seed(seed)
    kept = Iterates(rule, model)
    for value in values:
        model.weight.data.fill_(value)
        kept.observe(model, generator=generator)
    model.weight.data.fill_(-1.0)
    kept.restore(model)
    return model.weight.item()


def test_last_iterate_is_left_alone():
    assert watched("last", range(5)) == -1.0


def test_random_iterate_is_uniform():
    """Each of 10 iterates is kept with probability 1/10: chi-squared over 2,000 seeds, 99.9% point at 9 degrees."""
    counts = torch.zeros(10)
    for seed in range(2000):
        counts[int(watched("random", range(10), seed))] += 1
    assert ((counts - 200) ** 2 / 200).sum() < 27.88


def test_random_iterate_keeps_its_own_buffers():
    """Batch norm's running mean belongs to the iterate that is kept, not to the last one."""
    model = nn.BatchNorm1d(1)
    for seed in range(20):
        kept, generator = Iterates("random", model), torch.Generator().manual_seed(seed)
        for value in range(6):
            model.weight.data.fill_(value)
            model.running_mean.fill_(value)
            kept.observe(model, generator=generator)
        kept.restore(model)
        assert model.weight.item() == model.running_mean.item()


def test_averaged_iterate_has_polynomial_weights():
    """Shamir and Zhang's weights for decay 3: proportional to (t)(t+1)(t+2) from the second on."""
    values = [3.0, -1.0, 4.0, 1.0, 5.0]
    average = values[0]
    for n, value in enumerate(values[1:], start=1):
        weight = 4 / (n + 4)
        average = (1 - weight) * average + weight * value
    assert math.isclose(watched("averaged", values), average, rel_tol=1e-12)


def test_exponential_iterate_is_the_recursion():
    """Its memory grows with the iterates to a thousand: written out, and against a constant that it must keep."""
    values = [3.0, -1.0, 4.0, 1.0, 5.0]
    average = values[0]
    for n, value in enumerate(values[1:], start=1):
        past = min(0.999, (1 + n) / (10 + n))
        average = past * average + (1 - past) * value
    assert math.isclose(watched("ema", values), average, rel_tol=1e-6)
    assert math.isclose(watched("ema", [7.0] * 50), 7.0, rel_tol=1e-6)


def test_plain_mean_is_decay_zero():
    average = torch.tensor(2.0)
    for n, value in enumerate([4.0, 9.0], start=1):
        average = average + polynomial_weight(n, decay=0.0) * (torch.tensor(value) - average)
    assert math.isclose(average, 5.0, rel_tol=1e-6)


def test_best_iterate_is_the_one_with_the_least_value():
    model = Counter()
    kept = Iterates("best", model)
    for weight, value in ((1.0, 0.5), (2.0, 0.2), (3.0, 0.3)):
        model.weight.data.fill_(weight)
        kept.observe(model, generator=torch.Generator())
        kept.consider(model, value)
    kept.restore(model)
    assert model.weight.item() == 2.0


def test_best_average_is_the_one_with_the_least_value():
    """Values speak of the averages, and the chosen one does not move on."""
    model = Counter()
    kept = Iterates("best-ema", model)
    assert kept.candidate(model) is model  # before anything was seen
    averages = []
    for weight, value in ((1.0, 0.5), (5.0, 0.2), (9.0, 0.3)):
        model.weight.data.fill_(weight)
        kept.observe(model, generator=torch.Generator())
        looked_at = kept.candidate(model)
        averages.append(looked_at.weight.item())
        kept.consider(looked_at, value)
    past = 2 / 11  # (1 + 1) / (10 + 1): one iterate was in the average
    assert averages[1] == pytest.approx(past * 1.0 + (1 - past) * 5.0)
    state = kept.state_dict()
    again = Iterates("best-ema", Counter())
    again.load_state_dict(state)
    for found in (kept, again):
        found.restore(model)
        assert model.weight.item() == pytest.approx(averages[1])


def test_without_a_value_the_average_is_kept():
    model = Counter()
    kept = Iterates("best-ema", model)
    model.weight.data.fill_(3.0)
    kept.observe(model, generator=torch.Generator())
    model.weight.data.fill_(8.0)
    kept.restore(model)
    assert model.weight.item() == 3.0


def test_unknown_iterate():
    with pytest.raises(InvalidValue, match="Did you mean 'averaged'"):
        Iterates("average", Counter())
