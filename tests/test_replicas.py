"""Replicas side by side against the same runs one by one."""

import warnings
from inspect import isabstract

import pytest
import torch
from torch import nn

from unnorm import estimators, loop, replicas
from unnorm.errors import HealthWarning, InvalidValue
from unnorm.estimators import (
    ENCE,
    MECO,
    NCE,
    SNL,
    ConditionalNCE,
    ContrastiveDivergence,
    DenoisingScoreMatching,
    Estimator,
    MaximumLikelihood,
    MCMCLikelihood,
    PersistentCD,
    ScoreMatching,
    SlicedScoreMatching,
    Telescope,
)
from unnorm.models import MLP, Bridged, Quadratic, Tilted
from unnorm.noise import Gaussian, SplineFlow, Uniform
from unnorm.replicas import Stacked, StackedNoise
from unnorm.replicas.updates import UPDATES, OneByOne
from unnorm.streams import Streams, choices, integers, normal, uniform
from unnorm.training import Training

R, STEPS, BATCH = 4, 20, 32
LR = [0.1, 0.03, 0.01, 0.003]
BETA = [0.9, 0.8, 0.99, 1.0]
SEEDS = [5, 6, 7, 5]
SETS = [0, 1, 0, 1]
GAMMA = [0.1, 0.01, 0.2, 1.0]

NOISY = {  # estimators that take a noise first
    "meco": lambda q, **o: MECO(q, **o),
    "meco-centred": lambda q, **o: MECO(q, centred=True, n_noise=50, **o),
    "meco-minibatch": lambda q, **o: MECO(q, tracker="minibatch", **o),
    "meco-scent": lambda q, **o: MECO(q, tracker="scent", **o),
    "meco-umax": lambda q, **o: MECO(q, tracker="umax", **o),
    "nce": lambda q, **o: NCE(q, nu=2, **o),
    "ence": lambda q, **o: ENCE(q, **o),
    "snl": lambda q, **o: SNL(q, **o),
    "cd": lambda q, **o: ContrastiveDivergence(q, n_steps=3, **o),
    "cd-plain": lambda q, **o: ContrastiveDivergence(q, n_steps=3, step_size=0.01, regulariser=0.1, **o),
    "pcd": lambda q, **o: PersistentCD(q, n_chains=20, n_steps=3, **o),
    "mcmc": lambda q, **o: MCMCLikelihood(q, n_steps=3, buffer_size=60, **o),
    "sm": lambda q, **o: ScoreMatching(**o),
    "ssm": lambda q, **o: SlicedScoreMatching(n_slices=2, **o),
    "dsm": lambda q, **o: DenoisingScoreMatching(**o),
    "cnce": lambda q, **o: ConditionalNCE(kappa=3, **o),
    "likelihood": lambda q, **o: MaximumLikelihood(**o),
    "bridges": lambda q, **o: Telescope(q, 3, **o),
    "bridges-independent": lambda q, **o: Telescope(q, 3, NCE, coupling="independent", **o),
    "bridges-own": lambda q, **o: Telescope(q, 3, coupling="own", n_noise=50, **o),
}


def test_every_estimator_is_among_them():
    named = [getattr(estimators, name) for name in estimators.__all__]
    concrete = {one for one in named if isinstance(one, type) and issubclass(one, Estimator) and not isabstract(one)}
    alone = {estimators.StepwiseTelescope}  # its models are of images, and are not stacked
    assert concrete - alone == {type(make(Gaussian(2))) for make in NOISY.values()}


def test_seconds_end_it(data):
    """They are the clock's, so that only the order of magnitude of the steps is known; and a record tells where."""
    model = [Quadratic(2), Quadratic(2)]
    estimator = MECO(StackedNoise([Gaussian(2)] * 2), shape=(2,))
    done = replicas.fit(model, estimator, data[0].float(), Training(steps=10**7, seconds=0.2, lr=1e-3))
    assert 1 < int(done.records[-1]["step"]) < 10**6
    assert done.alive.all()


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(100)
    x = torch.randn(2, 200, 2, generator=generator, dtype=torch.float64)
    return x * torch.tensor([[[1.0, 2.0]], [[0.5, 1.5]]]) + torch.tensor([[[0.0, 1.0]], [[-1.0, 0.0]]])


def gaussians(data):
    return [Gaussian.fit(data[k]).double() for k in SETS]


def networks(name, noises):
    def generator(k):
        return torch.Generator().manual_seed(k)

    if name.startswith("bridges"):
        nets = [MLP(2, hidden=(16, 16), outputs=3, generator=generator(k)) for k in range(R)]
        return [Bridged(noise, net).double() for noise, net in zip(noises, nets, strict=True)]
    return [MLP(2, hidden=(16, 16), generator=generator(k)).double() for k in range(R)]


def one_by_one(name, make, data, optimizer, gamma=None, lr=LR):
    models = networks(name, gaussians(data))
    histories = []
    for k, (model, noise) in enumerate(zip(models, gaussians(data), strict=True)):
        own = {} if gamma is None else {"gamma": gamma[k]}
        training = Training(
            steps=STEPS, batch=BATCH, lr=lr[k], beta=BETA[k], optimizer=optimizer, schedule="cosine", seed=SEEDS[k]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)
            histories.append(loop.train(model, make(noise, **own), data[SETS[k]], training, progress=False))
    return models, histories


def side_by_side(name, make, data, optimizer, gamma=None, lr=LR, **options):
    noises = gaussians(data)
    models = networks(name, noises)
    own = {} if gamma is None else {"gamma": torch.tensor(gamma, dtype=torch.float64)}
    estimator = make(StackedNoise(noises), shape=(R,), **own)
    training = Training(steps=STEPS, batch=BATCH, optimizer=optimizer, schedule="cosine")
    return replicas.fit(models, estimator, data, training, sets=SETS, lr=lr, beta=BETA, seeds=SEEDS, **options)


def assert_equal_runs(done, models, histories):
    for k, model in enumerate(models):
        mine = done.model.one(k).state_dict()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(mine[key], value, rtol=1e-9, atol=1e-10)
        values = [float(record["value"][k]) for record in done.records]
        torch.testing.assert_close(torch.tensor(values), torch.tensor(histories[k]["value"]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NOISY)
def test_replicas_equal_runs_one_by_one(name, data):
    # Larger rates overflow, in either way; a network has no integral, so that its plain likelihood only grows.
    lr = [rate / {"snl": 30, "likelihood": 1000}.get(name, 1) for rate in LR]
    expected = one_by_one(name, NOISY[name], data, "sgd", lr=lr)
    assert_equal_runs(side_by_side(name, NOISY[name], data, "sgd", lr=lr), *expected)


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize("name", ["dsm", "nce"])  # without and with a learned log Z
def test_each_optimizer_equals_torchs(name, optimizer, data):
    expected = one_by_one(name, NOISY[name], data, optimizer)
    assert_equal_runs(side_by_side(name, NOISY[name], data, optimizer), *expected)


@pytest.mark.parametrize("name", UPDATES)
def test_the_batched_optimizers_of_a_gpu_equal_torchs(name):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(R, 3, 2, generator=generator, dtype=torch.float64), torch.zeros(R, dtype=torch.float64)]
    beta, lr = torch.tensor(BETA, dtype=torch.float64), torch.tensor(LR, dtype=torch.float64)
    batched, singly = [[part.clone() for part in start] for _ in range(2)]
    updates = UPDATES[name](batched, beta), OneByOne(name, singly, beta)
    for t in range(6):
        alive = torch.tensor([True, True, True, t < 3])
        gradients = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in start]
        gradients[0][3] = gradients[0][3] if t < 3 else torch.nan
        for update in updates:
            update.step(gradients, lr / (t + 1), alive)
    for mine, theirs, first in zip(batched, singly, start, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
        assert (mine != first).all()


def test_each_replica_has_a_gamma_of_its_own(data):
    expected = one_by_one("meco", NOISY["meco"], data, "sgd", GAMMA)
    assert_equal_runs(side_by_side("meco", NOISY["meco"], data, "sgd", GAMMA), *expected)


@pytest.mark.parametrize("name", ["meco", "mcmc", "sm"])
def test_a_replica_that_diverges_stands_still_and_spreads_nothing(name, data):
    calm = side_by_side(name, NOISY[name], data, "sgd")
    wild = side_by_side(name, NOISY[name], data, "sgd", lr=[*LR[:2], 1e30, LR[3]])
    assert calm.alive.all()
    assert wild.alive.tolist() == [True, True, False, True]
    assert 1 < int(wild.diverged_at[2]) <= STEPS
    for k in (0, 1, 3):
        for key, value in calm.model.one(k).state_dict().items():
            assert torch.equal(wild.model.one(k).state_dict()[key], value)
    assert all(torch.isfinite(value).all() for value in wild.model.one(2).state_dict().values())


def test_a_last_step_that_leaves_the_numbers_is_noticed(data):
    done = replicas.fit(
        [MLP(2, hidden=(8,)) for _ in range(2)],
        NCE(StackedNoise([Gaussian(2)] * 2), shape=(2,)),
        data[0].float(),
        Training(steps=1, optimizer="sgd"),
        lr=[1e-3, 9e37],
        beta=[1.0, 1.0],
    )
    assert done.diverged_at.tolist() in ([0, 1], [0, 0])
    finite = [all(torch.isfinite(p).all() for p in done.model.one(k).parameters()) for k in (0, 1)]
    assert done.alive.tolist() == finite


def test_a_replica_does_not_depend_on_its_neighbours(data):
    """Also when random numbers are drawn ahead: the streams are its own."""
    done = side_by_side("meco", NOISY["meco"], data, "adam", ahead=7)
    noise = StackedNoise([gaussians(data)[2]])
    alone = replicas.fit(
        [networks("meco", gaussians(data))[2]],
        MECO(noise, shape=(1,)),
        data,
        Training(steps=STEPS, batch=BATCH, optimizer="adam", schedule="cosine"),
        sets=SETS[2:3],
        lr=LR[2:3],
        beta=BETA[2:3],
        seeds=SEEDS[2:3],
        ahead=7,
    )
    for key, value in alone.model.one(0).state_dict().items():
        torch.testing.assert_close(done.model.one(2).state_dict()[key], value, rtol=1e-10, atol=1e-12)


def test_tilted_models_can_be_stacked(data):
    noises = gaussians(data)
    models = [Tilted(noise, MLP(2, hidden=(8,)).double()) for noise in noises]
    x = data[0, : 5 * R]
    expected = torch.cat([model(part) for model, part in zip(models, x.chunk(R), strict=True)])
    torch.testing.assert_close(Stacked(models)(x), expected)


def test_noises_that_are_not_gaussian_draw_as_they_do_alone():
    noises = [Uniform.fit(torch.rand(50, 2) * scale) for scale in (1.0, 3.0)]
    stacked = StackedNoise(noises)
    x = stacked.sample(10, generator=Streams([3, 4]))
    expected = [q.sample(5, generator=torch.Generator().manual_seed(s)) for q, s in zip(noises, (3, 4), strict=True)]
    assert torch.equal(x, torch.cat(expected))
    torch.testing.assert_close(stacked.log_prob(x), torch.cat([q(p) for q, p in zip(noises, expected, strict=True)]))


def test_flows_side_by_side_are_each_their_own():
    """Their numbers are parameters, not buffers."""
    flows = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        flows.append(SplineFlow(2, transforms=1, hidden=(8,)))
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(2))
    expected = torch.cat([flow.log_prob(part) for flow, part in zip(flows, x.chunk(2), strict=True)])
    torch.testing.assert_close(StackedNoise(flows).log_prob(x), expected)
    assert not StackedNoise(flows).by_streams


def test_score_matching_refuses_a_stack_of_piecewise_linear_networks(data):
    models = [MLP(2, hidden=(8,), activation="relu").double() for _ in range(R)]
    with pytest.raises(InvalidValue, match="piecewise linear"):
        replicas.fit(models, ScoreMatching(shape=(R,)), data[0], Training(steps=1))


def test_what_does_not_fit_together_is_refused(data):
    models = [Quadratic(2) for _ in range(R)]
    rows = data[0].float()
    with pytest.raises(InvalidValue, match=r"4 replicas need an estimator made with shape=\(4,\). Got \(\)."):
        replicas.fit(models, MECO(Gaussian(2)), rows)
    estimator = MECO(StackedNoise([Gaussian(2)] * R), shape=(R,))
    with pytest.raises(InvalidValue, match="The 'lr' of 4 replicas must be as many. Got 2."):
        replicas.fit(models, estimator, rows, lr=[0.1, 0.2])
    with pytest.raises(InvalidValue, match="The 'sets' say which of the 2 data sets each of 4 replicas learns."):
        replicas.fit(models, estimator, data.float(), sets=[0, 1, 2, 0])
    with pytest.raises(InvalidValue, match="Replicas keep the last iterate"):
        replicas.fit(models, estimator, rows, Training(iterate="averaged"))
    with pytest.raises(InvalidValue, match="one architecture"):
        Stacked([MLP(2, hidden=(8,)), MLP(2, hidden=(9,))])
    with pytest.raises(InvalidValue, match="one architecture"):
        Stacked([MLP(2, hidden=(8,)), MLP(2, hidden=(8,), activation="relu")])
    for others in (Gaussian(3), Gaussian(2, "diagonal"), Uniform.fit(torch.rand(9, 2))):
        with pytest.raises(InvalidValue, match="of one kind, event and structure"):
            StackedNoise([Gaussian(2), others])
    with pytest.raises(InvalidValue, match=r"The 'gamma' of MECO must have the shape \(4,\). Got \(3,\)."):
        MECO(Gaussian(2), gamma=torch.full((3,), 0.1), shape=(R,))
    with pytest.raises(InvalidValue, match="There are no models"):
        Stacked([])


def test_an_estimator_for_replicas_is_refused_by_a_single_run(data):
    with pytest.raises(InvalidValue, match=r"An estimator with shape=\(4,\) is for replicas: train by replicas.fit."):
        loop.train(Quadratic(2), MECO(Gaussian(2), shape=(R,)), data[0].float())


def test_streams_are_generators_side_by_side():
    own = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    both = Streams([1, 2])
    assert torch.equal(normal((4, 3), generator=both), torch.cat([torch.randn(2, 3, generator=g) for g in own]))
    assert torch.equal(uniform((6,), generator=both), torch.cat([torch.rand(3, generator=g) for g in own]))
    found = integers(9, (8,), generator=both)
    assert torch.equal(found, torch.cat([torch.randint(9, (4,), generator=g) for g in own]))
    with pytest.raises(InvalidValue, match="5 draws cannot be divided among 2 streams"):
        normal((5,), generator=both)
    with pytest.raises(InvalidValue, match="at least one seed"):
        Streams([])


def test_streams_ahead_repeat_nothing_and_keep_to_their_seed():
    ahead = Streams([1, 2], ahead=3)
    drawn = torch.stack([normal((2,), generator=ahead) for _ in range(7)])
    assert len(drawn.unique()) == 14
    alone = Streams([2], ahead=3)
    assert torch.equal(torch.stack([normal((1,), generator=alone) for _ in range(7)])[:, 0], drawn[:, 1])


def test_renewed_draws_are_those_that_would_have_come():
    plain, fixed = Streams([1, 2]), Streams([1, 2])
    fixed.fix()
    first = [normal((4,), generator=fixed), uniform((2,), generator=fixed)]
    for _ in range(3):
        expected = [normal((4,), generator=plain), uniform((2,), generator=plain)]
        assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))
        fixed.renew()
        assert normal((4,), generator=fixed) is first[0]
        assert uniform((2,), generator=fixed) is first[1]
    fixed.renew()
    with pytest.raises(InvalidValue, match="A step that repeats another asked for"):
        normal((6,), generator=fixed)


@pytest.mark.parametrize("ahead", [1, 3])
def test_choices_are_uniform_and_different(ahead):
    places = torch.stack([choices(5, 4, generator=Streams([seed, seed + 1000], ahead=ahead)) for seed in range(500)])
    for half, low in ((places[:, :2], 0), (places[:, 2:], 5)):
        assert (half[:, 0] != half[:, 1]).all()
        counts = torch.bincount(half.flatten() - low, minlength=5)
        assert len(counts) == 5
        assert float((counts - 200).abs().max()) < 4.5 * (1000 * 0.2 * 0.8) ** 0.5


def test_one_of_a_stack_is_a_module_of_its_own():
    models = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Flatten(0)) for _ in range(3)]
    stack = Stacked(models)
    x = torch.randn(7, 2)
    assert all(torch.equal(stack.one(k)(x), models[k](x)) for k in range(3))
