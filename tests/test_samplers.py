"""The samplers against closed forms, quadrature and slow obvious versions of themselves."""

import math

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from scipy import integrate, stats
from torch import distributions as td

from unnorm import Gaussian, samplers
from unnorm.diagnostics import chain_ess
from unnorm.draws import by_hmc
from unnorm.errors import InvalidValue
from unnorm.models import MLP
from unnorm.samplers import HMC, MALA, ULA, Chain, Position, ReplayBuffer, leapfrog, log_density_and_score, run
from unnorm.samplers.adaptation import Averaged, dual_average, first_step_size
from unnorm.samplers.hmc import Phase
from unnorm.samplers.langevin import langevin_log_ratio

SAMPLERS = {
    "ula": lambda: ULA(0.1),
    "ula own noise": lambda: ULA(0.1, noise_scale=0.3),
    "ula box": lambda: ULA(0.1, bounds=(-1.0, 2.0)),
    "mala": lambda: MALA(0.3),
    "mala box": lambda: MALA(0.3, bounds=(-1.0, 2.0)),
    "hmc": lambda: HMC(0.4),
    "hmc no jitter": lambda: HMC(0.3, n_leapfrog=3, jitter=0.0),
    "hmc variance": lambda: HMC(0.5, n_leapfrog=2, variance=torch.tensor(0.5)),
    "hmc box": lambda: HMC(0.5, bounds=(-1.0, 2.0)),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())
F64 = torch.float64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small: a second thread costs more than it brings, above all where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed=0, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


def normal(x):
    return -x.flatten(1).square().sum(-1) / 2


def starts(*shape, device="cpu", dtype=torch.float32):
    """Inside every box of the list."""
    return (torch.rand(shape, generator=seeded(1), dtype=F64) - 0.5).to(device=device, dtype=dtype)


def z_scores(features, truth):
    """How many standard errors the means of (n_draws, n_chains, k) are off, each with the ESS of its own chains."""
    values = features.double().flatten(0, 1)
    return (values.mean(0) - torch.as_tensor(truth)) / (values.std(0) / chain_ess(features, method="mean").sqrt())


def moments(x):
    return torch.cat([x, x.square()], -1)


class Counted:
    def __init__(self, log_density):
        self.log_density, self.calls = log_density, 0

    def __call__(self, x):
        self.calls += 1
        return self.log_density(x)


def test_no_sampler_is_left_out():
    found = (getattr(samplers, name) for name in samplers.__all__)
    listed = {c for c in found if isinstance(c, type) and hasattr(c, "step") and c is not samplers.Sampler}
    assert listed == {type(make()) for make in SAMPLERS.values()}


@every_sampler
class TestSampler:
    def test_same_generator_same_bits(self, make, device):
        x = starts(5, 2, device=device)
        before = torch.get_rng_state()
        first, second = (run(make(), normal, x, 4, warmup=9, generator=seeded(3, device)).samples for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(before, torch.get_rng_state())
        assert not torch.equal(first, run(make(), normal, x, 4, warmup=9, generator=seeded(4, device)).samples)

    def test_batch_mates_do_not_matter(self, make, device):
        """Not even those that are not finite."""
        x = starts(8, 2, device=device)
        spoilt = torch.cat([x[:4], torch.full_like(x[:4], torch.nan)])
        ours, theirs = (run(make(), normal, each, 5, generator=seeded(2, device)) for each in (x, spoilt))
        assert torch.equal(ours.samples[:, :4], theirs.samples[:, :4])
        assert torch.equal(ours.acceptance[:4], theirs.acceptance[:4])
        assert (theirs.divergences[:4] == 0).all()

    def test_chains_are_independent(self, make, device, generator):
        end = run(make(), normal, torch.zeros(20_000, 1, device=device), 3, generator=generator).samples[-1, :, 0]
        end = end - end.mean()
        products = end[0::2] * end[1::2]
        assert end.std() > 0.1
        assert products.mean().abs() < 4 * products.std() / len(products) ** 0.5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_keeps_the_precision(self, make, dtype, device, generator):
        chain = run(make(), normal, starts(5, 2, dtype=dtype, device=device), 3, warmup=9, generator=generator)
        assert {chain.samples.dtype, chain.log_p.dtype, chain.acceptance.dtype} == {dtype}

    def test_any_event_shape(self, make, device):
        """Events of (2, 3) are those of 6 in another shape."""
        x = starts(5, 6, device=device)
        flat, shaped = (
            run(make(), normal, each, 4, warmup=9, generator=seeded(3, device)) for each in (x, x.view(5, 2, 3))
        )
        assert shaped.samples.shape == (4, 5, 2, 3)
        assert shaped.r_hat.shape == shaped.ess.shape == (2, 3)
        torch.testing.assert_close(shaped.samples.flatten(2), flat.samples)

    def test_start_is_left_alone_and_no_graph_is_kept(self, make, device, generator):
        x = starts(5, 2, device=device).requires_grad_()
        before = x.detach().clone()
        chain = run(make(), normal, x, 3, warmup=6, generator=generator)
        assert torch.equal(x, before)
        assert x.grad is None
        assert not any(t.requires_grad for t in (chain.samples, chain.log_p, chain.acceptance))

    def test_model_stays_as_trainable_as_it_was(self, make, device, generator):
        model = MLP(3, hidden=(8, 8), generator=seeded()).to(device)
        next(model.parameters()).requires_grad_(False)
        before = [p.requires_grad for p in model.parameters()]
        chain = run(make(), model, starts(5, 3, device=device), 3, warmup=6, generator=generator)
        state, info = make().step(make().init(starts(5, 3, device=device), model), model, generator=generator)
        assert [p.requires_grad for p in model.parameters()] == before
        assert all(p.grad is None for p in model.parameters())
        assert not any(t.requires_grad for t in (chain.samples, state.x, *info))

    def test_model_that_breaks_is_trainable_again(self, make):
        class Broken(MLP):
            def forward(self, x):
                raise ZeroDivisionError

        model = Broken(3, hidden=(8,))
        with pytest.raises(ZeroDivisionError):
            run(make(), model, starts(5, 3), 1)
        assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("sampler", "at_first", "per_step"), [(ULA(0.1), 0, 1), (MALA(0.1), 1, 1), (HMC(0.1, n_leapfrog=5), 1, 5)]
)
def test_model_is_evaluated_only_where_a_step_goes(sampler, at_first, per_step):
    target = Counted(normal)
    run(sampler, target, starts(4, 2), 7)
    assert target.calls == at_first + 7 * per_step


@pytest.mark.parametrize("make", [SAMPLERS["mala"], SAMPLERS["hmc"]], ids=["mala", "hmc"])
def test_log_p_is_that_of_the_samples(make, generator):
    chain = run(make(), normal, starts(4, 2), 5, generator=generator)
    torch.testing.assert_close(chain.log_p.flatten(), normal(chain.samples.flatten(0, 1)))


# Stationary moments. Each chain starts away from its target, so that a sampler that stays where it is fails.

EXACT = {"mala": MALA(0.1), "hmc": HMC(0.1), "hmc of three steps": HMC(0.1, n_leapfrog=3, jitter=0.5)}
every_exact = pytest.mark.parametrize("sampler", EXACT.values(), ids=EXACT.keys())


@every_exact
def test_moments_of_a_correlated_gaussian(sampler, generator):
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    covariance = torch.tensor([[1.0, 0.8, -0.2], [0.8, 2.0, 0.3], [-0.2, 0.3, 0.5]], dtype=F64)
    precision = covariance.inverse()
    upper = torch.triu_indices(3, 3)

    def log_p(x):
        return -((x - mean)[:, None] * precision * (x - mean)[:, :, None]).sum((1, 2)) / 2

    x = run(sampler, log_p, torch.zeros(200, 3, dtype=F64), 200, warmup=150, generator=generator).samples
    products = (x - mean)[..., upper[0]] * (x - mean)[..., upper[1]]
    truth = torch.cat([mean, covariance[upper[0], upper[1]]])
    assert z_scores(torch.cat([x, products], -1), truth).abs().max() < 4


@pytest.mark.parametrize("sampler", [MALA(0.15), HMC(0.3, n_leapfrog=5)], ids=["mala", "hmc"])
def test_moments_of_a_lopsided_double_well(sampler, generator):
    """With a short step of its own: a tuned MALA does not come back from the tails of exp(-x^4)."""

    def log_p(x):
        return (-x.pow(4) / 4 + x.square() / 2 + x / 3).sum(-1)

    def integral(power):
        return integrate.quad(lambda x: x**power * math.exp(-(x**4) / 4 + x**2 / 2 + x / 3), -8, 8)[0]

    x = run(sampler, log_p, 1 + starts(200, 1, dtype=F64), 350, generator=generator).samples[100:]
    truth = [integral(1) / integral(0), integral(2) / integral(0)]
    assert z_scores(moments(x), truth).abs().max() < 4


@pytest.mark.parametrize("noise_scale", [None, 0.4])
def test_ula_has_the_variance_of_its_own_stationary_law(noise_scale, generator):
    """x' = (1 - e / s^2) x + sigma xi has v = (1 - e / s^2)^2 v + sigma^2; s^2 / (1 - e / 2 s^2) if sigma^2 = 2 e."""
    e, s = 0.8, 1.3
    truth = s**2 / (1 - e / (2 * s**2)) if noise_scale is None else noise_scale**2 / (1 - (1 - e / s**2) ** 2)
    sampler = ULA(e, noise_scale=noise_scale)
    # (1 - e / s^2)^100 = 1e-28: nothing is left of the start.
    x = run(sampler, lambda x: normal(x / s), torch.zeros(200, 1, dtype=F64), 300, warmup=100, generator=generator)
    assert z_scores(moments(x.samples), [0.0, truth]).abs().max() < 4


# Reversibility: p(x) k(x'|x) = p(x') k(x|x').

BOX = (-1.2, 1.6)


def mixture(x):
    """0.3 N(-1.5, 0.6^2) + 0.7 N(1, 0.8^2)."""
    near, far = ((x - mean).div(scale).square() / 2 for mean, scale in ((-1.5, 0.6), (1.0, 0.8)))
    return torch.logaddexp(math.log(0.3 / 0.6) - near, math.log(0.7 / 0.8) - far).sum(-1)


def exact_draws(n):
    left = torch.rand(n, 1, generator=seeded(1), dtype=F64) < 0.3
    noise = torch.randn(n, 1, generator=seeded(2), dtype=F64)
    return torch.where(left, -1.5 + 0.6 * noise, 1.0 + 0.8 * noise)


def imbalance(sampler, n=100_000):
    """The largest z-score of E f(x) g(x') - E g(x) f(x') over one step from exact draws; large if not reversible."""
    x = exact_draws(n)
    if sampler.bounds is not None:
        x = x[(x[:, 0] >= BOX[0]) & (x[:, 0] <= BOX[1])]
    state, _ = sampler.step(sampler.init(x, mixture), mixture, generator=seeded())
    before, after = x[:, 0], state.x[:, 0]
    pairs = [
        (torch.ones_like, lambda v: v),
        (torch.ones_like, torch.square),
        (lambda v: v, torch.square),
        (lambda v: (v < 0).to(v), lambda v: v),
        (torch.sin, lambda v: v**3),
    ]
    differences = torch.stack([f(before) * g(after) - g(before) * f(after) for f, g in pairs])
    return (differences.mean(-1) / (differences.std(-1) / len(x) ** 0.5)).abs().max()


@pytest.mark.parametrize(
    "sampler",
    [
        MALA(0.5),
        MALA(0.5, bounds=BOX),
        HMC(0.7, n_leapfrog=3),
        HMC(0.9, n_leapfrog=2, variance=torch.tensor(2.0, dtype=F64), jitter=0.0),
        HMC(0.9, n_leapfrog=2, bounds=BOX),
    ],
    ids=["mala", "mala box", "hmc", "hmc variance", "hmc box"],
)
def test_detailed_balance(sampler):
    assert imbalance(sampler) < 4


def test_detailed_balance_sees_what_is_not_reversible(monkeypatch):
    def euler(phase, log_density, step_size, n_steps, **options):
        x = phase.position.x + step_size * phase.momentum
        return Phase(Position(x, *log_density_and_score(log_density, x)), phase.momentum + step_size * phase[0].score)

    assert imbalance(ULA(0.5)) > 20
    monkeypatch.setattr("unnorm.samplers.langevin.langevin_log_ratio", lambda old, new, e: new.log_p - old.log_p)
    assert imbalance(MALA(0.5)) > 20
    monkeypatch.setattr("unnorm.samplers.hmc.leapfrog", euler)
    assert imbalance(HMC(0.7)) > 20


def anharmonic(x):
    return -(x[:, 0] ** 4) / 4 - x[:, 1] ** 2 / 2 - (x[:, 0] * x[:, 1]).square() / 3 + 0.3 * x[:, 0]


def position(x):
    return Position(x, *log_density_and_score(anharmonic, x))


def kernel(to, at, step_size, scale):
    return td.Normal(at.x + step_size * at.score, scale).log_prob(to.x).sum(-1)


def test_langevin_log_ratio_is_that_of_the_densities():
    old, new = (position(torch.randn(50, 2, generator=seeded(s), dtype=F64)) for s in (0, 1))
    for e in (0.01, 0.5, 3.0):
        forward, backward = kernel(new, old, e, (2 * e) ** 0.5), kernel(old, new, e, (2 * e) ** 0.5)
        expected = new.log_p + backward - old.log_p - forward
        torch.testing.assert_close(langevin_log_ratio(old, new, e), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("noise_scale", [None, 0.2])
def test_ula_tells_the_acceptance_that_mala_would_have_had(noise_scale, generator):
    e = 0.1
    sampler = ULA(e, noise_scale=noise_scale)
    first, _ = sampler.step(sampler.init(starts(50, 2, dtype=F64), anharmonic), anharmonic, generator=generator)
    _, info = sampler.step(first, anharmonic, generator=generator)
    scale = (2 * e) ** 0.5 if noise_scale is None else noise_scale
    old, new = first.behind, position(first.x)
    tempered = 2 * e / scale**2 * (new.log_p - old.log_p)  # with this noise the chain aims at p~^(2 e / sigma^2)
    expected = (tempered + kernel(old, new, e, scale) - kernel(new, old, e, scale)).clamp(max=0).exp()
    torch.testing.assert_close(info.acceptance, expected, rtol=1e-10, atol=1e-10)


# The leapfrog integrator. A phase is a row (x, r) of four numbers.

VARIANCE = torch.tensor([0.3, 2.0], dtype=F64)
ORBITS = {
    "plain": {},
    "variance": {"variance": VARIANCE},
    "bounds": {"bounds": (-1.0, 1.0)},
    "both": {"variance": VARIANCE, "bounds": (-1.0, 1.0)},
}
every_orbit = pytest.mark.parametrize("options", ORBITS.values(), ids=ORBITS.keys())


def phases(n):
    return 1.8 * starts(n, 4, dtype=F64) * torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=F64)


def flow(z, step_size, n_steps, *, log_density=anharmonic, **options):
    start = Position(z[:, :2], *log_density_and_score(log_density, z[:, :2]))
    end = leapfrog(Phase(start, z[:, 2:]), log_density, step_size, n_steps, **options)
    return torch.cat([end.position.x, end.momentum], -1)


def energy(z, variance=1.0, **_):
    return -anharmonic(z[:, :2]) + (variance * z[:, 2:].square()).sum(-1) / 2


def order(errors):
    """The slope of log error against log step, for steps that halve."""
    return -np.polyfit(np.arange(len(errors)), np.log2(errors), 1)[0]


@every_orbit
def test_leapfrog_is_reversible(options):
    z, turn = phases(100), torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=F64)
    steps = 0.1 + 0.1 * torch.rand(100, 1, generator=seeded(), dtype=F64)  # each chain its own, as with jitter
    there = flow(z, steps, 20, **options)
    assert (there - z).abs().max() > 1
    torch.testing.assert_close(turn * flow(turn * there, steps, 20, **options), z, rtol=0, atol=1e-10)


@every_orbit
def test_leapfrog_preserves_volume(options):
    """Its Jacobian by a difference of fourth order: h^4 and the rounding over h are both near 1e-12."""
    z, h = phases(40), 1e-3
    offsets = torch.tensor([-2.0, -1.0, 1.0, 2.0], dtype=F64) * h
    weights = torch.tensor([1.0, -8.0, 8.0, -1.0], dtype=F64) / (12 * h)
    around = z[:, None, None] + offsets[:, None, None] * torch.eye(4, dtype=F64)  # (points, offsets, inputs, 4)
    images = flow(around.reshape(-1, 4), 0.2, 6, **options).view(around.shape)
    if (
        "bounds" in options
    ):  # no derivative where only some of the points meet a wall: there the map jumps by 2 step |g|
        smooth = (images.amax(1) - images.amin(1) < 0.1).flatten(1).all(-1)
        assert smooth.sum() > 20
        images = images[smooth]
    determinants = torch.linalg.det(torch.einsum("o,poij->pij", weights, images))
    torch.testing.assert_close(determinants, torch.ones_like(determinants), rtol=0, atol=1e-8)


@pytest.mark.parametrize("options", [ORBITS["plain"], ORBITS["variance"]], ids=["plain", "variance"])
def test_leapfrog_follows_hamiltons_equations_to_order_two(options):
    z, time = phases(30), 2.0
    variance = options.get("variance", torch.ones(2, dtype=F64))

    def motion(_, flat):
        now = torch.as_tensor(flat).view(-1, 4)
        _, score = log_density_and_score(anharmonic, now[:, :2])
        return torch.cat([variance * now[:, 2:], score], -1).flatten().numpy()

    truth = integrate.solve_ivp(motion, (0, time), z.flatten().numpy(), method="DOP853", rtol=1e-11, atol=1e-11)
    truth = torch.as_tensor(truth.y[:, -1]).view(-1, 4)
    ends = [flow(z, time / n, n, **options) for n in (20, 40, 80, 160)]
    assert 1.9 < order([(end - truth).square().mean() for end in ends]) / 2 < 2.1
    drifts = [energy(end, **options) - energy(z, **options) for end in ends]
    assert 1.9 < order([drift.square().mean() for drift in drifts]) / 2 < 2.1


def test_reflection_of_a_free_flight_is_a_triangle_wave():
    z = phases(100)
    end = flow(z, 0.7, 9, log_density=lambda x: 0 * x.sum(-1), bounds=(-1.0, 1.0))
    flown = (z[:, :2] + 6.3 * z[:, 2:]).numpy()
    wave = 2 / np.pi * np.arcsin(np.sin(np.pi / 2 * flown))
    np.testing.assert_allclose(end[:, :2], wave, atol=1e-7)  # arcsin loses half the digits at a wall
    np.testing.assert_allclose(end[:, 2:], z[:, 2:].numpy() * np.sign(np.cos(np.pi / 2 * flown)), atol=1e-12)


def test_reflection_keeps_the_energy_to_order_one():
    """A wall where the score is g costs up to |g v| step: the kicks before and after it should not have been equal."""
    z, time = phases(2000), 2.0
    drifts = [
        (energy(flow(z, time / n, n, **ORBITS["both"]), **ORBITS["both"]) - energy(z, **ORBITS["both"]))
        for n in (40, 80, 160, 320)
    ]
    assert 0.9 < order([drift.square().mean() for drift in drifts]) / 2 < 1.1


# Bounds.


@pytest.mark.parametrize("sampler", [MALA(0.1, bounds=(-0.5, 2.0)), HMC(0.1, bounds=(-0.5, 2.0))], ids=["mala", "hmc"])
def test_bounds_truncate_the_density(sampler, generator):
    x = run(sampler, normal, starts(200, 2, dtype=F64), 200, warmup=150, generator=generator).samples
    truth = stats.truncnorm(-0.5, 2.0)
    assert z_scores(moments(x), [truth.moment(1)] * 2 + [truth.moment(2)] * 2).abs().max() < 4
    assert x.min() >= -0.5
    assert x.max() <= 2


@pytest.mark.parametrize(
    "sampler",
    [ULA(2.0, bounds=(-0.1, 0.3)), MALA(2.0, bounds=(-0.1, 0.3)), HMC(5.0, n_leapfrog=3, bounds=(-0.1, 0.3))],
    ids=["ula", "mala", "hmc"],
)
def test_no_step_leaves_the_box(sampler, generator):
    """In float32, whose 0.3 and 0.1 are not ours, with steps far longer than the box."""
    x = run(sampler, normal, torch.zeros(1000, 2), 20, generator=generator).samples
    low, high = torch.tensor([-0.1, 0.3])
    assert ((x >= low) & (x <= high)).all()


# Adaptation and divergences.


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(("sampler", "wanted"), [(MALA(0.1), 0.574), (HMC(0.1), 0.8)], ids=["mala", "hmc"])
def test_warm_up_finds_the_wanted_acceptance_at_any_scale(sampler, wanted, scale, generator):
    start = scale * torch.randn(50, 3, generator=seeded(1))
    chain = run(sampler, lambda x: normal(x / scale), start, 60, warmup=90, generator=generator)
    assert (chain.acceptance.mean() - wanted).abs() < 0.1  # Hoffman and Gelman's figure 3 has such a scatter
    assert (chain.r_hat < 1.1).all()


def test_warm_up_learns_the_variances(generator):
    spread = torch.tensor([0.1, 1.0, 10.0])
    start = spread * (2 + torch.randn(50, 3, generator=seeded(1)))
    tuned = run(HMC(), lambda x: normal(x / spread), start, 1, warmup=150, generator=generator).sampler
    # 2500 draws of which perhaps every tenth counts: 30% is three errors of a variance
    assert (tuned.variance / spread.square() - 1).abs().max() < 0.3


def test_dual_average_is_hoffman_and_gelmans_sum():
    """Their eq. 6: x_(t+1) = mu - sqrt(t) / gamma / (t + t0) sum H_i, averaged with weights t^-kappa."""
    acceptances = torch.rand(50, generator=seeded(), dtype=F64)
    state = Averaged.start(torch.tensor(0.3, dtype=F64))
    mean = 0.0
    for t, acceptance in enumerate(acceptances, 1):
        state = dual_average(state, acceptance, 0.8)
        trial = math.log(10 * 0.3) - t**0.5 / 0.05 / (t + 10) * (0.8 - acceptances[:t]).sum()
        mean = t**-0.75 * trial + (1 - t**-0.75) * mean
        torch.testing.assert_close(state.log_step, trial)
        torch.testing.assert_close(state.log_step_mean, mean)


@pytest.mark.parametrize("target", [0.3, 0.574, 0.8])
def test_dual_average_settles_where_the_acceptance_is_the_target(target):
    state, t = Averaged.start(torch.tensor(1.0, dtype=F64)), 1000
    for _ in range(t):
        state = dual_average(state, torch.exp(-state.log_step.exp()), target)
    settled = math.log(-math.log(target))
    pull = 0.05 * abs(math.log(10) - settled) / t**0.5  # eq. 6 solved for the mean error: it goes as 1 / sqrt(t)
    assert abs(torch.exp(-state.log_step_mean.exp()) - target) < pull


def test_first_step_size_brackets_an_acceptance_of_one_half():
    start = torch.randn(2000, 2, generator=seeded())
    state = MALA(1.0).init(start, normal)

    def acceptance(step_size):
        return MALA(step_size).step(state, normal, generator=seeded(1))[1].acceptance.mean()

    up, down = (first_step_size(MALA(e), state, normal, generator=seeded()) for e in (1e-6, 1e6))
    assert acceptance(up) < 0.5 < acceptance(up / 2)
    assert acceptance(2 * down) < 0.5 < acceptance(down)


@pytest.mark.parametrize("sampler", [MALA(0.05), HMC(0.2, n_leapfrog=5)], ids=["mala", "hmc"])
def test_nan_outside_the_support_is_refused_and_flagged(sampler, generator):
    """log(1 - x^2) is NaN beyond 1; the density is that of 2 Beta(2, 2) - 1."""
    chain = run(
        sampler, lambda x: torch.log(1 - x.square()).sum(-1), starts(400, 1, dtype=F64), 400, generator=generator
    )
    truth = stats.beta(2, 2, loc=-1, scale=2)
    assert z_scores(moments(chain.samples[50:]), [truth.moment(1), truth.moment(2)]).abs().max() < 4
    assert chain.samples.abs().max() < 1
    assert torch.isfinite(chain.log_p).all()
    assert chain.divergences.sum() > 100


@pytest.mark.parametrize(("sampler", "flagged"), [(MALA(0.3), False), (HMC(0.4, n_leapfrog=4), True)])
def test_no_density_outside_the_support_is_refused(sampler, flagged, generator):
    """Of MALA a proposal to where p~ = 0 is no accident; of HMC a trajectory that ends there lost its energy."""

    def log_p(x):
        return torch.where((x > 0) & (x < 2), -x, -torch.inf).sum(-1)

    chain = run(sampler, log_p, 1 + starts(400, 1, dtype=F64), 300, generator=generator)
    truth = stats.truncexpon(2.0)
    assert z_scores(moments(chain.samples[50:]), [truth.moment(1), truth.moment(2)]).abs().max() < 4
    assert ((chain.samples > 0) & (chain.samples < 2)).all()
    assert (chain.divergences.sum() > 0) == flagged


@pytest.mark.parametrize("sampler", [MALA(1e30), HMC(1e3), HMC(50.0, n_leapfrog=64)])
def test_steps_to_infinity_are_refused_and_flagged(sampler, generator):
    x = 1 + starts(10, 2)
    chain = run(sampler, normal, x, 5, generator=generator)
    assert torch.equal(chain.samples, x.expand(5, 10, 2))
    assert (chain.divergences == 5).all()
    assert (chain.acceptance == 0).all()


def test_ula_that_explodes_is_flagged(generator):
    chain = run(ULA(10.0), normal, starts(10, 2), 60, generator=generator)
    assert (chain.divergences > 0).all()
    assert (chain.acceptance < 0.5).all()


# What a run leaves behind.


def test_ess_and_r_hat_are_arvizs(generator):
    chain = run(MALA(0.5), normal, starts(6, 2, 2), 80, generator=generator)
    for i in range(2):
        for j in range(2):
            values = chain.samples[..., i, j].mT.double().numpy()
            assert chain.ess[i, j] == pytest.approx(array_stats.ess(values, chain_axis=0, draw_axis=1, method="bulk"))
            assert chain.r_hat[i, j] == pytest.approx(array_stats.rhat(values, chain_axis=0, draw_axis=1))


def test_ess_is_that_of_an_autoregression(generator):
    """ULA of a Gaussian has the autocorrelations a^k, a = 1 - e: n draws are worth n (1 - a) / (1 + a)."""
    chain = run(ULA(0.3), normal, torch.zeros(64, 1, dtype=F64), 1000, warmup=100, generator=generator)
    found = torch.stack([chain_ess(group, method="mean") for group in chain.samples.split(4, 1)])
    expected = 4000 * 0.3 / 1.7
    assert abs(found.mean() - expected) < 4 * found.std() / len(found) ** 0.5


def test_r_hat_sees_chains_stuck_in_far_modes(generator):
    def log_p(x):
        return torch.logsumexp(torch.stack([normal(x - 20), normal(x + 20)]), 0)

    start = torch.tensor([[-20.0], [-20.0], [20.0], [20.0]])
    assert run(HMC(0.3), log_p, start, 100, generator=generator).r_hat > 1.5
    assert run(HMC(0.3), normal, torch.zeros(4, 1), 100, generator=generator).r_hat < 1.05


@every_sampler
def test_thin_keeps_every_kth(make):
    whole, thinned = (run(make(), normal, starts(4, 2), 11, thin=k, generator=seeded()) for k in (1, 3))
    assert torch.equal(thinned.samples, whole.samples[2::3])
    assert torch.equal(thinned.log_p, whole.log_p[2::3])
    assert torch.equal(thinned.acceptance, whole.acceptance)
    assert torch.equal(thinned.divergences, whole.divergences)


def test_acceptance_is_the_share_of_accepted_steps(generator):
    chain = run(MALA(1.5), normal, starts(400, 1), 200, generator=generator)
    moved = (chain.samples[1:] != chain.samples[:-1]).double().mean((0, 2))
    difference = moved - chain.acceptance.double()
    assert 0.2 < chain.acceptance.mean() < 0.8
    assert difference.mean().abs() < 4 * difference.std() / len(difference) ** 0.5


def test_chain_says_its_numbers(generator):
    chain = run(MALA(0.5), normal, starts(6, 2), 50, generator=generator)
    numbers = (chain.acceptance.mean(), chain.r_hat.max(), chain.ess.min())
    assert isinstance(chain, Chain)
    expected = "Chain(50 draws x 6 chains, acceptance {:.2f}, 0 divergences, R-hat {:.3f}, ESS {:.0f})"
    assert repr(chain) == expected.format(*numbers)


# The replay buffer.


def filled_buffer(size, restart, value=99.0):
    buffer = ReplayBuffer((2, 1), size=size, restart=restart)
    buffer.put(torch.arange(size), torch.full((size, 2, 1), value))
    return buffer


class Ones(Gaussian):
    """Noise that can be told from what is stored."""

    def sample(self, n, *, generator=None):
        return torch.ones(n, 2, 1)


def test_buffer_survives_its_state_dict(generator):
    buffer, other = ReplayBuffer(2, size=30), ReplayBuffer(2, size=30)
    x, places = buffer.draw(10, Gaussian(2), generator=generator)
    buffer.put(places, x)
    other.load_state_dict(buffer.state_dict())
    ours, theirs = (each.draw(20, Gaussian(2), generator=seeded(1)) for each in (buffer, other))
    assert other.filled.sum() == 10
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_buffer_hands_out_distinct_places(generator):
    _, places = ReplayBuffer(2, size=50).draw(50, Gaussian(2), generator=generator)
    assert sorted(places.tolist()) == list(range(50))


def test_buffer_restarts_its_share(generator):
    n, share = 20_000, 0.05
    x, _ = filled_buffer(n, share).draw(n, Ones((2, 1)), generator=generator)
    fresh = (x == 1).flatten(1).all(-1)
    assert (fresh | (x == 99).flatten(1).all(-1)).all()
    assert abs(fresh.double().mean() - share) < 4 * (share * (1 - share) / n) ** 0.5


def test_buffer_places_never_filled_come_from_the_noise(generator):
    buffer = ReplayBuffer((2, 1), size=40, restart=0.0)
    stored = torch.arange(10)
    buffer.put(stored, torch.full((10, 2, 1), 99.0))
    x, places = buffer.draw(40, Ones((2, 1)), generator=generator)
    expected = torch.where(places < 10, 99.0, 1.0)
    assert torch.equal(x, expected[:, None, None].expand(40, 2, 1))


def test_buffer_does_not_store_what_is_not_finite():
    buffer = filled_buffer(3, 0.0)
    buffer.put(torch.tensor([2, 0]), torch.tensor([[[1.0], [torch.inf]], [[2.0], [3.0]]]))
    assert buffer.points.flatten(1).tolist() == [[2.0, 3.0], [99.0, 99.0], [99.0, 99.0]]
    empty = ReplayBuffer(1, size=2)
    empty.put(torch.tensor([0, 1]), torch.tensor([[torch.nan], [5.0]]))
    assert empty.filled.tolist() == [False, True]


# Draws of a density.


def test_draws_by_hmc_of_a_nearly_singular_gaussian(generator):
    """Condition number 1e4; the starts are off by a standard deviation and half as wide again."""
    turn = torch.linalg.qr(torch.randn(4, 4, generator=seeded(1), dtype=F64))[0]
    factor = turn * torch.tensor([100.0, 20.0, 5.0, 1.0], dtype=F64)
    covariance, precision = factor @ factor.mT, (factor @ factor.mT).inverse()
    mean = torch.tensor([3.0, -50.0, 0.0, 10.0], dtype=F64)
    near = mean + (1 + 1.5 * torch.randn(2000, 4, generator=seeded(2), dtype=F64)) @ factor.mT

    found = by_hmc(lambda x: -((x - mean) @ precision * (x - mean)).sum(-1) / 2, near, 4000, generator=generator)
    variances = covariance.diagonal()
    errors = ((variances[:, None] * variances + covariance**2) / found.ess).sqrt()
    assert found.x.shape == (4000, 4)
    assert 1000 < found.ess <= 4000
    assert found.r_hat < 1.05
    assert ((found.x.mean(0) - mean).abs() < 4 * (variances / found.ess).sqrt()).all()
    # The ESS is of the coordinates; of their squares, half as many draws count where the chains turn far (x -> -x).
    assert ((found.x.mT.cov() - covariance).abs() < 4 * 2**0.5 * errors).all()


def test_draws_by_hmc_of_far_modes_say_that_they_did_not_mix(generator):
    def log_p(x):
        return torch.logsumexp(torch.stack([normal(x - 5) + math.log(0.9), normal(x + 5) + math.log(0.1)]), 0)

    sides = torch.tensor([5.0, -5.0]).repeat(100)[:, None]
    found = by_hmc(log_p, sides + torch.randn(200, 2, generator=seeded(1)), 500, generator=generator)
    assert found.r_hat > 1.05


# Errors.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ULA(0.0), "The 'step_size' of ULA must be positive. Got 0.0."),
        (lambda: MALA(-1.0), "The 'step_size' of MALA must be positive. Got -1.0."),
        (lambda: HMC(math.nan), "The 'step_size' of HMC must be positive. Got nan."),
        (lambda: ULA(0.1, noise_scale=-0.5), "The 'noise_scale' of ULA must not be negative. Got -0.5."),
        (
            lambda: ULA(0.1, bounds=(1.0, -1.0)),
            r"The 'bounds' must be \(low, high\) with low < high. Got \(1.0, -1.0\)",
        ),
        (lambda: MALA(0.1, bounds=(1.0, 1.0)), r"The 'bounds' must be \(low, high\) with low < high. Got \(1.0, 1.0\)"),
        (lambda: HMC(0.1, bounds=(1.0,)), r"The 'bounds' must be \(low, high\) with low < high. Got \(1.0,\)"),
        (lambda: HMC(n_leapfrog=0), "The 'n_leapfrog' of HMC must be at least 1. Got 0."),
        (lambda: HMC(jitter=1), r"The 'jitter' of HMC must be in \[0, 1\). Got 1."),
        (lambda: HMC(variance=0.0), "The 'variance' of HMC must be positive. Got 0.0."),
        (lambda: run(ULA(0.1), normal, torch.zeros(2, 1), 0), "n_steps >= thin >= 1 .* Got n_steps 0, thin 1"),
        (lambda: run(ULA(0.1), normal, torch.zeros(2, 1), 3, thin=4), "n_steps >= thin >= 1 .* Got n_steps 3, thin 4"),
        (lambda: run(ULA(0.1), normal, torch.zeros(2, 1), 3, thin=0), "n_steps >= thin >= 1 .* Got n_steps 3, thin 0"),
        (lambda: run(ULA(0.1), normal, torch.zeros(2, 1), 3, warmup=-1), "warmup >= 0. Got .* warmup -1"),
        (lambda: ReplayBuffer(2, size=0), "The 'size' of ReplayBuffer must be at least 1. Got 0."),
        (lambda: ReplayBuffer(2, restart=1.5), r"The 'restart' of ReplayBuffer must be in \[0, 1\]. Got 1.5."),
        (
            lambda: ReplayBuffer(2, size=5).draw(6, Gaussian(2)),
            "The ReplayBuffer holds 5 points. Got a request for 6.",
        ),
    ],
)
def test_invalid_values_are_named(make, message):
    with pytest.raises(InvalidValue, match=message):
        make()


@every_sampler
def test_refuses_a_model_without_a_score(make):
    with pytest.raises(InvalidValue, match="does not depend on x: it has no score"):
        run(make(), lambda x: torch.zeros(len(x)), starts(4, 2), 1)


@every_sampler
def test_refuses_a_model_of_the_wrong_shape(make):
    with pytest.raises(InvalidValue, match=r"must map \(n, \*event\) to \(n,\). Got \(4, 2\) -> \(4, 2\)"):
        run(make(), lambda x: x, starts(4, 2), 1)


def test_walk_is_the_same_as_steps():
    sampler, x = ULA(0.1), starts(5, 2)
    chain = run(sampler, normal, x, 7, generator=seeded())
    assert torch.equal(sampler.walk(x, normal, 7, generator=seeded()), chain.samples[-1])


def test_a_start_outside_the_bounds_is_refused():
    with pytest.raises(InvalidValue, match="must start within the bounds"):
        run(MALA(0.5, bounds=(0.0, 1.0)), normal, torch.full((2, 1), -5.0), 3)


def test_a_nan_start_is_called_divergent_within_bounds_too():
    chain = run(MALA(0.3, bounds=(-1.0, 2.0)), normal, torch.full((2, 1), torch.nan), 5)
    assert chain.divergences.tolist() == [5, 5]


def test_a_chain_leaves_the_region_of_no_density():
    """From -0.5, where p~ = 0, to the exponential's side."""

    def half(x):
        return torch.where(x > 0, -x, -torch.inf).squeeze(-1)

    chain = run(MALA(0.5), half, torch.full((50, 1), -0.5), 100, generator=seeded())
    assert (chain.samples[-1] > 0).all()


def test_small_scales_keep_their_variances():
    """Shrinking toward an absolute number would make a target of scale 1e-3 thirteen times wider than it is."""
    chain = run(HMC(), lambda x: -(1e3 * x).square().sum(-1) / 2, torch.zeros(8, 3), 50, warmup=150, generator=seeded())
    ratio = chain.sampler.variance / 1e-6
    assert ((ratio > 0.5) & (ratio < 2)).all()
