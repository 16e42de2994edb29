"""Every implementation of a contract obeys the contract's laws."""

import copy
import json

import pytest
import torch

from tests.laws import ESTIMATORS, IMAGE_MODELS, MODELS, NOISES, PAIRS, STEPWISE, TELESCOPES
from unnorm import estimators, models, noise
from unnorm.errors import InvalidValue, NonFiniteObjective
from unnorm.estimators import MECO, DenoisingScoreMatching, Estimator, ScoreMatching, SlicedScoreMatching
from unnorm.loop import step, train
from unnorm.noise import Gaussian, Noise
from unnorm.optim import sgd
from unnorm.training import Training

every_noise = pytest.mark.parametrize("make", NOISES.values(), ids=NOISES.keys())
every_pair = pytest.mark.parametrize(("make", "make_model"), PAIRS.values(), ids=PAIRS.keys())
every_estimator = pytest.mark.parametrize(
    ("make", "make_model"),
    [(make, MODELS["tilted"]) for make in ESTIMATORS.values()]
    + [(make, MODELS["bridged"]) for make in TELESCOPES.values()],
    ids=[*ESTIMATORS, *TELESCOPES],
)


def test_no_implementation_is_left_out():
    def concrete(module, base):
        found = (getattr(module, name) for name in module.__all__)
        return {c for c in found if isinstance(c, type) and issubclass(c, base) and not c.__abstractmethods__}

    q = NOISES["gaussian full"]()
    every = ESTIMATORS | TELESCOPES | STEPWISE
    assert concrete(noise, Noise) == {type(make()) for make in NOISES.values()}
    assert concrete(estimators, Estimator) == {type(make(q)) for make in every.values()}
    for telescopes in (TELESCOPES, STEPWISE):
        bases = {type(make(q).base) for make in telescopes.values()}
        assert bases == concrete(estimators, estimators.Contrastive)
    listed = {c for name in models.__all__ if isinstance(c := getattr(models, name), type)}
    assert listed == {type(make()) for make in (MODELS | IMAGE_MODELS).values()}
    trackers = {type(make(q).tracker) for make in ESTIMATORS.values() if hasattr(make(q), "tracker")}
    assert trackers == set(estimators.TRACKERS.values())


@every_noise
class TestNoise:
    def test_shapes(self, make, device, generator):
        q = make().to(device)
        x = q.sample(7, generator=generator)
        assert x.shape[0] == 7
        assert x.device.type == device.type
        assert q.log_prob(x).shape == (7,)
        assert not x.requires_grad

    def test_same_generator_same_bits(self, make, device):
        q = make().to(device)
        first, second = (q.sample(5, generator=torch.Generator(device).manual_seed(3)) for _ in range(2))
        assert torch.equal(first, second)

    def test_a_generator_leaves_the_global_state_alone(self, make, generator):
        before = torch.get_rng_state()
        make().sample(5, generator=torch.Generator().manual_seed(3))
        assert torch.equal(before, torch.get_rng_state())

    def test_generator_advances(self, make, device, generator):
        q = make().to(device)
        assert not torch.equal(q.sample(5, generator=generator), q.sample(5, generator=generator))

    def test_integrates_to_one(self, make, device, generator):
        """E_r[q/r] = 1 under a wider r; the error bar is the sample's own."""
        q = make().to(device).double()
        x = q.sample(20_000, generator=generator)
        d = x[0].numel()
        wide = torch.distributions.Independent(torch.distributions.StudentT(3.0, x.mean(0), 2 * x.std(0)), x.ndim - 1)
        torch.manual_seed(0)
        z = wide.sample((200_000,))
        ratio = (q.log_prob(z) - wide.log_prob(z)).exp()
        assert d <= 4
        assert abs(ratio.mean() - 1) < 4 * ratio.std() / len(ratio) ** 0.5

    def test_samples_follow_the_density(self, make, device, generator):
        """The tilt identity: E_q[w] over samples equals the integral of w q, for w = exp(-|x - m|^2 / 2)."""
        q = make().to(device).double()
        x = q.sample(200_000, generator=generator)
        centre = x[:100].mean(0)

        def bump(points):
            return torch.exp(-(points - centre).square().flatten(1).sum(-1) / 2)

        torch.manual_seed(0)
        z = centre + torch.randn(x.shape, dtype=x.dtype, device=x.device)
        normaliser = (2 * torch.pi) ** (x[0].numel() / 2)
        by_quadrature = q.log_prob(z).exp() * normaliser
        by_samples = bump(x)
        error = (by_quadrature.var() / len(z) + by_samples.var() / len(x)).sqrt()
        assert abs(by_quadrature.mean() - by_samples.mean()) < 4 * error

    def test_state_survives(self, make, device):
        q, other = make(), make()
        for buffer in other.buffers():
            buffer.zero_() if buffer.is_floating_point() else None
        other.load_state_dict(q.state_dict())
        x = q.sample(4, generator=torch.Generator().manual_seed(0))
        assert torch.equal(q.log_prob(x), other.log_prob(x))
        assert q.state_dict()

    def test_moves_to_float64(self, make):
        q = make()
        x = q.sample(6, generator=torch.Generator().manual_seed(0))
        single = q.log_prob(x)
        double = q.double().log_prob(x.double())
        assert double.dtype == torch.float64
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)
        assert q.sample(2).dtype == torch.float64

    def test_moves_after_use(self, make):
        """What a distribution derived from its old tensors is forgotten when they move."""
        q = make()
        q.log_prob(q.sample(3))
        moved = q.double()
        assert moved.log_prob(moved.sample(3)).dtype == torch.float64

    def test_full_precision_under_autocast(self, make):
        q = make()
        x = q.sample(50, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under = q.log_prob(x)
        assert torch.equal(under, q.log_prob(x))

    def test_score_is_the_gradient(self, make, device, generator):
        q = make().double().to(device)
        x = q.sample(20, generator=generator).requires_grad_()
        value, score = q.log_prob_and_score(x)
        log_p = q.log_prob(x)
        torch.testing.assert_close(value, log_p.detach(), rtol=1e-10, atol=1e-10)
        assert not value.requires_grad
        assert not score.requires_grad
        expected = torch.zeros_like(x)
        if log_p.requires_grad:
            (found,) = torch.autograd.grad(log_p.sum(), x, allow_unused=True)
            expected = expected if found is None else found
        torch.testing.assert_close(score, expected, rtol=1e-9, atol=1e-9)

    def test_refuses_no_draws(self, make):
        with pytest.raises(InvalidValue, match="at least 1. Got 0"):
            make().sample(0)


def setting(make, make_model, device="cpu", dtype=torch.float32):
    """Twenty points in three coordinates; for an image model these are pixels."""
    event = (1, 1, 3) if make_model in IMAGE_MODELS.values() else (3,)
    model = make_model().to(device=device, dtype=dtype)
    estimator = make(noise_over(event)).to(device=device, dtype=dtype)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(5)).view(20, *event)
    return model, estimator, x.to(device=device, dtype=dtype)


def noise_over(event):
    q = Gaussian(event)
    q.load_state_dict(NOISES["gaussian full"]().state_dict())
    return q


def seeded(device="cpu"):
    return torch.Generator(device).manual_seed(7)


def own_state(estimator):
    """The running state, without the noise, which is somebody else's."""
    state = copy.deepcopy(dict(estimator.named_buffers()))
    return {name: value for name, value in state.items() if not name.startswith(("noise.", "base.noise."))}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@every_pair
class TestEstimator:
    def test_objective(self, make, make_model, device):
        model, estimator, x = setting(make, make_model, device)
        surrogate, info = estimator(model, x, generator=seeded(device))
        assert surrogate.shape == ()
        assert surrogate.requires_grad
        assert info["value"].shape == ()
        assert not any(number.requires_grad for number in info.values())

    def test_eval_is_pure(self, make, make_model):
        model, estimator, x = setting(make, make_model)
        estimator(model, x, generator=seeded())
        estimator.eval()
        before = copy.deepcopy(estimator.state_dict())
        estimator(model, x + 1, generator=seeded())
        assert equal(before, estimator.state_dict())

    def test_running_state_is_in_buffers(self, make, make_model):
        """What training changes is in the buffers, and nothing else is: a second object with them goes on alike."""
        model, estimator, x = setting(make, make_model)
        before = own_state(estimator)
        attributes = set(vars(estimator))
        estimator(model, x, generator=seeded())
        assert equal(before, own_state(estimator)) == (not before)
        assert set(vars(estimator)) == attributes

    def test_state_survives(self, make, make_model):
        model, estimator, x = setting(make, make_model)
        estimator(model, x, generator=seeded())
        other = make(noise_over(x.shape[1:]))
        other.load_state_dict(estimator.state_dict())
        ours, theirs = (each(model, x, generator=seeded()) for each in (estimator, other))
        assert torch.equal(ours.surrogate, theirs.surrogate)
        assert equal(ours.info, theirs.info)

    def test_same_generator_same_bits(self, make, make_model):
        values = []
        for _ in range(2):
            model, estimator, x = setting(make, make_model)
            before = torch.get_rng_state()
            values.append(estimator(model, x, generator=seeded()).surrogate)
            assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(*values)

    def test_gradient_reaches_every_parameter(self, make, make_model):
        model, estimator, x = setting(make, make_model)
        estimator(model, x, generator=seeded())  # a learned log Z begins where its own gradient is zero
        estimator(model, x, generator=torch.Generator().manual_seed(8)).surrogate.backward()
        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        ends = {f".{name}".rpartition(".layers.")[0]: name for name in linear if ".layers." in f".{name}"}
        offsets = {f"{name}.bias" for name in [*linear[-1:], *ends.values()]}  # log p~ + c is the same density
        for name, parameter in [*model.named_parameters(), *estimator.named_parameters()]:
            if name not in offsets:
                assert parameter.grad is not None, name
                assert parameter.grad.abs().sum() > 0, name

    def test_parameters_stay_trainable(self, make, make_model):
        model, estimator, x = setting(make, make_model)
        before = [parameter.requires_grad for parameter in model.parameters()]
        estimator(model, x, generator=seeded())
        assert [parameter.requires_grad for parameter in model.parameters()] == before

    def test_float64_agrees_with_float32(self, make, make_model, monkeypatch):
        model, estimator, x = setting(make, make_model)
        double = [copy.deepcopy(part).double() for part in (model, estimator)]
        # What is random is drawn in float32 and cast, so that both see the same numbers.
        for name in ("randn", "rand"):
            draw = getattr(torch, name)
            monkeypatch.setattr(
                torch,
                name,
                lambda *shape, dtype=torch.float32, draw=draw, **options: draw(
                    *shape, dtype=torch.float32, **options
                ).to(dtype),
            )
        results = [e(m, data, generator=seeded()) for m, e, data in ((model, estimator, x), (*double, x.double()))]
        assert results[1].surrogate.dtype == torch.float64
        torch.testing.assert_close(results[0].surrogate.double(), results[1].surrogate, rtol=1e-4, atol=1e-4)

    def test_non_finite_raises_before_any_update(self, make, make_model):
        model, estimator, x = setting(make, make_model)
        x[3] = torch.nan
        estimator(model, x[:3], generator=seeded())
        before = copy.deepcopy(model.state_dict() | estimator.state_dict())
        with pytest.raises(NonFiniteObjective, match="not finite .*Lower the learning rate"):
            step(model, estimator, sgd(model.parameters(), 0.1), x, generator=seeded())
        assert equal(before, model.state_dict() | estimator.state_dict())

    def test_refuses_a_model_of_the_wrong_shape(self, make, make_model):
        _, estimator, x = setting(make, make_model)
        with pytest.raises(InvalidValue, match=r"must map \(.+\) to (Heads of )?\(.+\)\. Got .*\(\d+, 4\)\.$"):
            estimator(lambda points, heads=False, draws=None: points.flatten(1)[:, [0, 0, 1, 2]], x)

    def test_settings_are_plain(self, make, make_model):
        """They go into a checkpoint as JSON and come back the same."""
        settings = setting(make, make_model)[1].settings
        assert json.loads(json.dumps(settings)) == settings
        assert settings["estimator"] == type(make(NOISES["gaussian full"]())).__name__


@every_estimator
class TestEstimatorAlone:
    def test_any_event_shape(self, make, make_model):
        """Events of shape (1, 3) instead of (3,): the same numbers."""
        model, _, x = setting(make, make_model)

        class Shaped(Noise):
            def __init__(self, flat, *event):
                super().__init__()
                self.flat, self.event = flat, event

            def _sample(self, n, generator):
                return self.flat.sample(n, generator=generator).view(n, *self.event)

            def _log_prob(self, points):
                return self.flat.log_prob(points.flatten(1))

        flat, shaped = (
            make(Shaped(NOISES["gaussian full"](), *event))(model, x.view(20, *event), generator=seeded())
            for event in ((3,), (1, 3))
        )
        torch.testing.assert_close(flat.surrogate, shaped.surrogate)
        torch.testing.assert_close(flat.info, shaped.info)

    def test_any_callable_is_a_model(self, make, make_model):
        _, estimator, x = setting(make, make_model)
        theta = torch.tensor(1.5, requires_grad=True)

        def model(points, heads=False):
            each = -theta * points.square()
            return each if heads else each.sum(-1)

        estimator(model, x, generator=seeded()).surrogate.backward()
        assert theta.grad.abs() > 0

    def test_compiled_model(self, make, make_model):
        """The same numbers from a compiled model, or a plain refusal where it would have to be differentiated twice."""
        model, estimator, x = setting(make, make_model)
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        if isinstance(estimator, (ScoreMatching, SlicedScoreMatching, DenoisingScoreMatching)):
            with pytest.raises(InvalidValue, match="torch.compile cannot"):
                estimator(compiled, x, generator=seeded())
            return
        plain = estimator(model, x, generator=seeded()).surrogate
        other = make(estimator.noise if hasattr(estimator, "noise") and estimator.noise else None)
        found = other(compiled, x, generator=seeded()).surrogate
        torch.testing.assert_close(plain, found)
        found.backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_resumes_bit_for_bit(self, make, make_model, tmp_path):
        """Six steps are the same as three, a new process's objects, and three more."""

        def pieces():
            model, estimator, _ = setting(make, make_model)
            return model, estimator

        rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
        whole, halves = pieces(), pieces()
        options = {"batch": 20, "checkpoint_every": 3, "log_every": 1}
        full = train(*whole, rows, Training(steps=6, **options), progress=False)
        train(*halves, rows, Training(steps=3, **options), folder=tmp_path, progress=False)
        halves = pieces()
        resumed = train(*halves, rows, Training(steps=6, **options), folder=tmp_path, resume=True, progress=False)
        for one, other in zip(whole, halves, strict=True):
            assert equal(one.state_dict(), other.state_dict())
        assert full["value"] == resumed["value"]

    def test_refuses_to_resume_as_another(self, make, make_model, tmp_path):
        model, estimator, _ = setting(make, make_model)
        rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
        train(model, estimator, rows, Training(steps=2, batch=20), folder=tmp_path, progress=False)
        other = MECO(NOISES["gaussian full"](), n_noise=11)
        with pytest.raises(InvalidValue, match="cannot resume with"):
            train(model, other, rows, Training(steps=4, batch=20), folder=tmp_path, resume=True, progress=False)
