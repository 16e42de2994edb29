"""Each estimator against its own equation written out, closed forms, and the parameters of a Gaussian."""

import math

import pytest
import torch
from sklearn.metrics import log_loss
from torch import distributions as td

from tests.laws import ESTIMATORS
from unnorm import Gaussian, Quadratic, Tilted, Training, train
from unnorm.errors import InvalidValue
from unnorm.estimators import (
    ENCE,
    MECO,
    NCE,
    SNL,
    ConditionalNCE,
    ContrastiveDivergence,
    DenoisingScoreMatching,
    MCMCLikelihood,
    PersistentCD,
    ScoreMatching,
    SlicedScoreMatching,
    cnce_loss,
    contrast_loss,
    denoising_loss,
    ence_loss,
    meco_surrogate,
    nce_loss,
    score_matching_loss,
    snl_loss,
)
from unnorm.models import MLP
from unnorm.optim import NGD


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def gradient(surrogate, *parameters):
    return torch.autograd.grad(surrogate, parameters)


class TestNCE:
    @pytest.mark.parametrize("nu", [1, 3])
    def test_loss_is_the_cross_entropy_of_a_classifier(self, nu):
        """scikit-learn's log loss of the posterior h = p~ / (p~ + nu Z q), times the 1 + nu points per datum."""
        g_data, g_noise = normal(40), normal(40 * nu, seed=1)
        g = torch.cat([g_data, g_noise])
        h = g.exp() / (g.exp() + nu)
        labels = [1] * 40 + [0] * 40 * nu
        assert nce_loss(g_data, g_noise, nu).item() == pytest.approx((1 + nu) * log_loss(labels, h), rel=1e-12)

    def test_cannot_overflow(self):
        for size in (1e6, -1e6):
            assert torch.isfinite(nce_loss(torch.full((3,), size), torch.full((3,), -size), 1.0))

    def test_learned_log_z_is_the_normaliser(self):
        """With the model fixed at the truth, only log Z is learned: the noise's error bar holds it."""
        model, q = Quadratic(2), Gaussian(2)
        q.loc.fill_(0.5)
        estimator = NCE(q, nu=2)
        optimizer = torch.optim.LBFGS(estimator.parameters(), max_iter=50, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = estimator(model, torch.randn(5000, 2, generator=seeded(1)), generator=seeded(2)).surrogate
            loss.backward()
            return loss

        optimizer.step(closure)
        # The variance of log Z at the optimum of NCE, by the sandwich of 5,000 data and 10,000 noise draws, is at
        # most that of importance sampling: 1/n times chi-squared of p against q.
        chi2 = math.exp(0.5) - 1  # |shift|^2 = 0.5
        assert abs(estimator.log_z.value.item() - model.log_z.item()) < 4 * math.sqrt(
            (1 + chi2) * (1 / 5000 + 1 / 10_000)
        )

    def test_refuses_less_noise_than_data(self):
        with pytest.raises(InvalidValue, match="The 'nu' of NCE must be at least 1. Got 0.5"):
            NCE(Gaussian(2), nu=0.5)


class TestENCE:
    def naive(self, g_data, g_noise):
        return 0.5 * torch.exp(-g_data / 2).mean() + 0.5 * torch.exp(g_noise / 2).mean()

    def test_value_and_gradient_are_the_equation(self):
        g_data, g_noise = normal(30).requires_grad_(), normal(50, seed=1).requires_grad_()
        surrogate, log_loss_found = ence_loss(g_data, g_noise)
        plain = self.naive(g_data, g_noise)
        torch.testing.assert_close(surrogate, plain)
        torch.testing.assert_close(log_loss_found, plain.log().detach())
        for ours, theirs in zip(gradient(surrogate, g_data, g_noise), gradient(plain, g_data, g_noise), strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_far_out_it_keeps_the_direction(self):
        """g = -1000 is e^500, beyond float32: there the direction is that of float64, which still holds it."""
        far = -1000 + 5 * normal(30)
        single, double = far.float().requires_grad_(), far.clone().requires_grad_()
        surrogate, log_found = ence_loss(single, torch.zeros(30))
        plain = self.naive(double, torch.zeros(30, dtype=torch.float64))
        assert log_found.item() == pytest.approx(plain.log().item(), rel=1e-6)
        (ours,), (theirs,) = gradient(surrogate, single), gradient(plain, double)
        theirs = theirs / theirs.abs().max()  # its square overflows even float64
        torch.testing.assert_close((ours / ours.norm()).double(), theirs / theirs.norm(), rtol=1e-3, atol=1e-6)
        assert torch.isfinite(surrogate)

    def test_normalised_steps_do_not_see_the_rescaling(self):
        """One NGD step from a start where the plain loss overflows float32 equals the step in float64."""
        x = 60 + torch.randn(50, 1, generator=seeded())
        steps = []
        for dtype in (torch.float32, torch.float64):
            model, estimator = Quadratic(1).to(dtype), ENCE(Gaussian(1)).to(dtype)
            estimator.noise._sample = lambda n, g, dtype=dtype: torch.randn(n, 1, generator=seeded(3)).to(dtype)
            model.linear.data.fill_(-30.0)
            optimizer = NGD([*model.parameters(), *estimator.parameters()], lr=0.1)
            estimator(model, x.to(dtype), generator=seeded()).surrogate.backward()
            optimizer.step()
            steps.append(model.linear.detach().double().clone())
        torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-5)


class TestSNL:
    def test_is_the_likelihood_at_its_minimum_over_b(self):
        log_p, log_w = normal(30), normal(50, seed=1)
        log_mean_w = log_w.exp().mean().log()
        b = log_mean_w.clone().requires_grad_()
        loss = snl_loss(log_p, log_w, b)
        torch.testing.assert_close(loss.detach(), log_mean_w - log_p.mean())
        assert abs(gradient(loss, b)[0]) < 1e-12
        for shift in (-0.3, 0.3):
            assert snl_loss(log_p, log_w, b + shift) > loss

    def test_gradient_there_is_mecos(self):
        log_p, log_w = normal(30).requires_grad_(), normal(50, seed=1).requires_grad_()
        log_u = log_w.detach().exp().mean().log()
        ours = gradient(snl_loss(log_p, log_w, log_u), log_p, log_w)
        theirs = gradient(meco_surrogate(log_p, log_w, log_u), log_p, log_w)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)

    def test_b_ends_at_log_z(self):
        x = normal(4000, 2).float()
        model, estimator = Quadratic(2), SNL(Gaussian.fit(1.2 * x))
        history = train(model, estimator, x, Training(steps=1500, lr=0.02, schedule="cosine"))
        error = math.sqrt((1 / history["ess"][-1] - 1) / 500)  # of one batch; b averages many
        assert abs(estimator.log_z.value.item() - model.log_z.item()) < error


class TestScoreMatching:
    def exact_trace(self, model, x):
        return torch.stack(
            [torch.autograd.functional.hessian(lambda row: model(row[None])[0], row).trace() for row in x]
        )

    def test_loss_is_hyvarinens(self):
        model, x = MLP(3, hidden=(8, 8)).double(), normal(6, 3)
        score = torch.autograd.functional.jacobian(lambda points: model(points).sum(), x)
        direct = (score.square().sum(-1) / 2 + self.exact_trace(model, x)).mean()
        torch.testing.assert_close(ScoreMatching()(model, x).surrogate, direct)
        torch.testing.assert_close(score_matching_loss(score, self.exact_trace(model, x)), direct)

    def test_gaussian_closed_form(self):
        """On a Gaussian model score matching is exact: the sample's mean and inverse covariance (Hyvarinen 2005)."""
        x = normal(500, 3) @ normal(3, 3, seed=1) + 2
        model = Quadratic(3).double()
        optimizer = torch.optim.LBFGS(
            model.parameters(),
            max_iter=500,
            tolerance_grad=1e-12,
            tolerance_change=1e-15,
            line_search_fn="strong_wolfe",
        )

        def closure():
            optimizer.zero_grad()
            loss = ScoreMatching()(model, x).surrogate
            loss.backward()
            return loss

        optimizer.step(closure)
        torch.testing.assert_close(model.mean.detach(), x.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            model.precision.detach(), torch.linalg.inv(x.T.cov(correction=0)), rtol=1e-5, atol=1e-6
        )

    def test_slices_are_unbiased(self):
        model, x = MLP(4, hidden=(8,)).double(), normal(3, 4)
        exact = ScoreMatching()(model, x).surrogate
        found = torch.stack(
            [SlicedScoreMatching()(model, x, generator=seeded(seed)).surrogate.detach() for seed in range(400)]
        )
        assert abs(found.mean() - exact) < 4 * found.std() / len(found) ** 0.5
        many = SlicedScoreMatching(n_slices=400)(model, x, generator=seeded()).surrogate
        assert abs(many - exact) < 4 * found.std() / 400**0.5

    def test_denoising_is_vincents(self):
        """The target is the score of the kernel N(x, sigma^2) at the noisy point."""
        model, x, sigma = MLP(2, hidden=(8,)).double(), normal(20, 2), 0.4
        noise = torch.randn(x.shape, generator=seeded(3), dtype=x.dtype)
        noisy = (x + sigma * noise).requires_grad_()
        kernel = td.Normal(x, sigma).log_prob(noisy).sum()
        (target,) = torch.autograd.grad(kernel, noisy)
        (score,) = torch.autograd.grad(model(noisy).sum(), noisy)
        direct = sigma**2 * (score - target).square().sum(-1).mean() / 2
        found = DenoisingScoreMatching(sigma=sigma)(model, x, generator=seeded(3)).surrogate
        torch.testing.assert_close(found, direct)
        torch.testing.assert_close(denoising_loss(score, noise, sigma), direct)

    def test_a_piecewise_linear_network_is_refused(self):
        for estimator in (ScoreMatching(), SlicedScoreMatching()):
            with pytest.raises(InvalidValue, match="second derivatives, which a piecewise linear network"):
                estimator(MLP(2, hidden=(8,), activation="relu"), torch.randn(5, 2))
            with pytest.raises(InvalidValue, match="second derivatives"):
                estimator(Tilted(Gaussian(2), MLP(2, hidden=(8,), activation="leaky-relu")), torch.randn(5, 2))

    @pytest.mark.parametrize("make", [ScoreMatching, SlicedScoreMatching, DenoisingScoreMatching])
    def test_a_compiled_model_is_refused_in_fit_too(self, make):
        compiled = torch.compile(MLP(2, hidden=(8,)), backend="aot_eager")
        with pytest.raises(InvalidValue, match="which torch.compile cannot"):
            train(compiled, make(), torch.randn(50, 2), Training(steps=2, batch=10))

    def test_a_constant_has_no_score(self):
        with pytest.raises(InvalidValue, match="does not depend on x"):
            ScoreMatching()(lambda x: torch.zeros(len(x)), torch.randn(5, 2))


class TestConditionalNCE:
    def test_loss_is_the_equation(self):
        """2 log(1 + exp(-G)) with G from the two joint densities p~(x) k(y|x) and p~(y) k(x|y)."""
        model, x, sigma = MLP(2, hidden=(8,)).double(), normal(20, 2), 0.6
        noise = torch.randn((3, *x.shape), generator=seeded(4), dtype=x.dtype)
        y = x + sigma * noise
        k_forward = td.Normal(x, sigma).log_prob(y).sum(-1)
        k_back = td.Normal(y, sigma).log_prob(x).sum(-1)
        log_p_y = model(y.reshape(-1, 2)).reshape(3, -1)
        ratio = (model(x) + k_forward) - (log_p_y + k_back)
        direct = 2 * torch.log(1 + torch.exp(-ratio)).mean()
        found = ConditionalNCE(sigma=sigma, kappa=3)(model, x, generator=seeded(4)).surrogate
        torch.testing.assert_close(found, direct)
        torch.testing.assert_close(cnce_loss(model(x), log_p_y), direct)


def gradients_at_the_truth(estimator, draws, n=2000):
    """Gradients of the surrogate in h and the diagonal of L, at the parameters that made the data, batch by batch."""
    found = []
    model = Quadratic(2).double()
    estimator = estimator.double()
    for seed in range(draws):
        x = torch.randn(n, 2, generator=seeded(1000 + seed), dtype=torch.float64)
        surrogate = estimator(model, x, generator=seeded(seed)).surrogate
        found.append(torch.cat([part.flatten() for part in gradient(surrogate, model.linear, model.log_diagonal)]))
    return torch.stack(found)


TRUTHFUL = {
    "meco": lambda q: MECO(q, gamma=0.01),
    "nce": lambda q: _with_log_z(NCE(q)),
    "ence": lambda q: _with_log_z(ENCE(q)),
    "snl": lambda q: _with_log_z(SNL(q)),
    "sm": lambda q: ScoreMatching(),
    "ssm": lambda q: SlicedScoreMatching(),
    "cnce": lambda q: ConditionalNCE(),
    "cd": lambda q: ContrastiveDivergence(n_steps=5),
    "cd one step": lambda q: ContrastiveDivergence(n_steps=1),
    "pcd": lambda q: PersistentCD(Gaussian(2), n_chains=2000, n_steps=2),
    "mcmc": lambda q: MCMCLikelihood(Gaussian(2), n_steps=2),
}


def _with_log_z(estimator):
    estimator.log_z.value.data.fill_(math.log(2 * math.pi))
    estimator.log_z.started.fill_(True)
    return estimator


class TestConsistency:
    @pytest.mark.parametrize("name", TRUTHFUL)
    def test_the_truth_is_stationary(self, name):
        """At the data's own parameters the expected gradient is zero; the error bar is that of the batches."""
        q = Gaussian(2)
        q.scale_tril.mul_(1.3)
        found = gradients_at_the_truth(TRUTHFUL[name](q), 40)
        z = found.mean(0).abs() / (found.std(0) / len(found) ** 0.5)
        assert (z < 4.5).all()

    def test_denoising_is_stationary_at_the_noisy_truth(self):
        """It learns the data plus noise: N(0, (1 + sigma^2) I)."""
        sigma, model = 0.7, Quadratic(2).double()
        model.log_diagonal.data.fill_(-0.5 * math.log(1 + sigma**2))
        found = []
        for seed in range(40):
            x = torch.randn(2000, 2, generator=seeded(1000 + seed), dtype=torch.float64)
            surrogate = DenoisingScoreMatching(sigma=sigma)(model, x, generator=seeded(seed)).surrogate
            found.append(gradient(surrogate, model.log_diagonal)[0])
        found = torch.stack(found)
        assert (found.mean(0).abs() < 4.5 * found.std(0) / len(found) ** 0.5).all()

    def test_large_unadjusted_steps_are_not(self):
        """The power of the test above: ULA with a large step samples another density, and the gradient shows it."""
        found = gradients_at_the_truth(ContrastiveDivergence(n_steps=5, step_size=0.5), 40)
        z = found.mean(0).abs() / (found.std(0) / len(found) ** 0.5)
        assert z.max() > 10

    def test_langevin_gradient_is_data_against_samples(self):
        log_data, log_model = normal(30).requires_grad_(), normal(50, seed=1).requires_grad_()
        ours = gradient(contrast_loss(log_data, log_model), log_data, log_model)
        torch.testing.assert_close(ours[0], torch.full((30,), -1 / 30, dtype=torch.float64))
        torch.testing.assert_close(ours[1], torch.full((50,), 1 / 50, dtype=torch.float64))


RECOVERING = {
    "nce": lambda q: NCE(q),
    "ence": lambda q: ENCE(q),
    "snl": lambda q: SNL(q),
    "mcmc": lambda q: MCMCLikelihood(q, n_steps=10, buffer_size=2000),
    "cd": lambda q: ContrastiveDivergence(n_steps=5),
    "pcd": lambda q: PersistentCD(q, n_steps=5),
    "sm": lambda q: ScoreMatching(),
    "ssm": lambda q: SlicedScoreMatching(),
    "dsm": lambda q: DenoisingScoreMatching(sigma=0.2),
    "cnce": lambda q: ConditionalNCE(sigma=1.0, kappa=4),
}


@pytest.mark.parametrize("name", RECOVERING)
def test_recovers_a_gaussian(name):
    """Mean and covariance of 5-D data within 6 maximum-likelihood standard errors of the sample's.

    `benchmarks/efficiency.py` measures how many each needs over 30 seeds; denoising learns the data plus its noise.
    """
    mix = torch.randn(5, 5, generator=seeded(1)) * 0.2 + torch.eye(5)
    x = torch.randn(4000, 5, generator=seeded(2)) @ mix + 0.5
    model = Quadratic(5)
    estimator = RECOVERING[name](Gaussian.fit(1.1 * (x - x.mean(0)) + x.mean(0)))
    train(model, estimator, x, Training(steps=600, lr=0.03, schedule="cosine"))
    covariance, spread = torch.linalg.inv(model.precision).detach(), x.T.cov()
    if name == "dsm":
        covariance = covariance - 0.04 * torch.eye(5)
    error = (spread.diagonal() / len(x)).sqrt()
    scale = ((spread.diagonal()[:, None] * spread.diagonal() + spread**2) / len(x)).sqrt()
    assert ((model.mean.detach() - x.mean(0)).abs() < 6 * error).all()
    assert ((covariance - spread).abs() < 6 * scale).all()


class TestLangevinFamily:
    def test_starts(self):
        """Where the chains begin: with no step to speak of they are still there."""
        q, x = Gaussian(2), 7 + torch.randn(40, 2, generator=seeded())
        still = {"n_steps": 1, "step_size": 1e-12, "noise_scale": 0.0}
        model = Quadratic(2)
        at_data = ContrastiveDivergence(**still)(model, x, generator=seeded()).info
        assert at_data["distance"].item() == pytest.approx(1, abs=1e-4)
        persistent = PersistentCD(q, n_chains=30, **still)
        persistent(model, x, generator=seeded())
        first = persistent.chains.clone()
        persistent(model, x, generator=seeded(1))
        torch.testing.assert_close(persistent.chains, first)
        buffered = MCMCLikelihood(q, buffer_size=100, restart=0.0, **still)
        buffered(model, x, generator=seeded())
        assert int(buffered.buffer.filled.sum()) == 40

    def test_step_size_follows_the_acceptance(self):
        """A target ten times narrower needs a hundred times smaller steps: the rule finds them."""
        sizes = []
        for scale in (1.0, 0.1):
            model, x = Quadratic(2), scale * torch.randn(500, 2, generator=seeded())
            model.log_diagonal.data.fill_(-math.log(scale))
            estimator = ContrastiveDivergence(n_steps=5)
            for seed in range(150):
                info = estimator(model, x, generator=seeded(seed)).info
            assert info["acceptance"].item() == pytest.approx(0.574, abs=0.05)
            sizes.append(info["step_size"].item())
        assert sizes[0] / sizes[1] == pytest.approx(100, rel=0.1)

    def test_a_fixed_step_size_stays(self):
        estimator = ContrastiveDivergence(n_steps=2, step_size=0.05)
        for seed in range(5):
            info = estimator(Quadratic(2), torch.randn(50, 2), generator=seeded(seed)).info
        assert info["step_size"].item() == pytest.approx(0.05)

    def test_regulariser_is_an_option(self):
        model, x = Quadratic(2).double(), normal(30, 2)
        plain, regular = (ContrastiveDivergence(n_steps=1, regulariser=r).double() for r in (0.0, 0.3))
        with_it, without = (e(model, x, generator=seeded()) for e in (regular, plain))
        assert with_it.info["value"] == without.info["value"]
        assert with_it.surrogate > without.surrogate

    def test_eval_is_the_likelihood_by_the_noise(self):
        x = torch.randn(4000, 2, generator=seeded())
        estimator = PersistentCD(Gaussian(2)).eval()
        found = estimator(Quadratic(2), x, generator=seeded(1)).info["value"].item()
        assert found == pytest.approx(-td.Normal(0, 1).log_prob(x).sum(-1).mean().item(), abs=1e-5)  # q = p: no error

    def test_best_needs_something_to_compare(self):
        x = torch.randn(50, 2, generator=seeded())
        with pytest.raises(InvalidValue, match="needs a value that can be compared .* ContrastiveDivergence has none"):
            train(Quadratic(2), ContrastiveDivergence(), x, Training(steps=3, iterate="best"), validation=x)
        train(Quadratic(2), ContrastiveDivergence(Gaussian(2)), x, Training(steps=3, iterate="best"), validation=x)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: ContrastiveDivergence(n_steps=0), "'n_steps' of ContrastiveDivergence must be at least 1. Got 0"),
            (lambda: ContrastiveDivergence(step_size=0), "'step_size' of ContrastiveDivergence must be positive"),
            (lambda: ContrastiveDivergence(noise_scale=0.1), "'noise_scale' .* belongs to a fixed 'step_size'"),
            (lambda: ContrastiveDivergence(bounds=(1, 0)), "'bounds' must be"),
            (lambda: ContrastiveDivergence(regulariser=-1), "'regulariser' .* at least 0"),
            (lambda: PersistentCD(Gaussian(2), n_chains=0), "'n_chains' of PersistentCD must be at least 1"),
            (lambda: MCMCLikelihood(Gaussian(2), restart=2), "'restart' of ReplayBuffer must be in"),
            (lambda: DenoisingScoreMatching(sigma=0), "'sigma' of DenoisingScoreMatching must be positive"),
            (lambda: SlicedScoreMatching(n_slices=0), "'n_slices' of SlicedScoreMatching must be at least 1"),
            (lambda: ConditionalNCE(sigma=-1), "'sigma' of ConditionalNCE must be positive"),
            (lambda: ConditionalNCE(kappa=0), "'kappa' of ConditionalNCE must be at least 1"),
            (lambda: SNL(Gaussian(2), n_noise=0), "'n_noise' of SNL must be at least 1"),
        ],
    )
    def test_refuses(self, make, message):
        with pytest.raises(InvalidValue, match=message):
            make()

    def test_refuses_chains_of_another_shape(self):
        with pytest.raises(InvalidValue, match=r"events of shape \(2,\), the chains \(3,\)"):
            PersistentCD(Gaussian(3))(Quadratic(2), torch.randn(5, 2))


def test_pure_cores_take_replicas():
    """A leading axis of replicas gives the same numbers as one replica at a time."""
    data, noise, scalar = normal(3, 5), normal(3, 7, seed=1), normal(3, seed=2)
    cores = {
        "nce": lambda a, b, c: nce_loss(a, b, 2.0),
        "ence": lambda a, b, c: ence_loss(a, b)[0],
        "snl": snl_loss,
        "meco": meco_surrogate,
        "contrast": lambda a, b, c: contrast_loss(a, b),
        "sm": lambda a, b, c: score_matching_loss(a.unsqueeze(-1), a),
        "dsm": lambda a, b, c: denoising_loss(a.unsqueeze(-1), a.unsqueeze(-1), 0.5),
        "cnce": lambda a, b, c: cnce_loss(a, torch.stack([a, 2 * a], -2)),
    }
    for core in cores.values():
        together = core(data, noise, scalar)
        assert together.shape == (3,)
        torch.testing.assert_close(together, torch.stack([core(data[i], noise[i], scalar[i]) for i in range(3)]))


def test_every_estimator_works_with_a_tilted_model_in_fit():
    """One step of `fit` through Fabric's wrapper for each: double backward, frozen parameters and all."""
    x = torch.randn(100, 3, generator=seeded())
    q = Gaussian.fit(x)
    for make in ESTIMATORS.values():
        model = Tilted(q, MLP(3, hidden=(8,), generator=seeded()))
        before = [p.detach().clone() for p in model.parameters()]
        train(model, make(q), x, Training(steps=2, batch=20))
        assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
