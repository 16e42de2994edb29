"""Models and noises made to fool the ladder: heavy tails, no integral, a noise that ends, a spike."""

import math

import pytest
import torch
from torch import distributions as td

from unnorm import MLP, Gaussian, Tilted, from_distribution
from unnorm.data.targets import target
from unnorm.errors import InvalidValue
from unnorm.partition import ladder
from unnorm.partition.probes import beyond_support, far_out, tails

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tail_index(log_p, q):
    return tails(log_p, q).least


def student(df, dim):
    """Normalised: log Z is 0."""
    constant = math.lgamma((df + dim) / 2) - math.lgamma(df / 2) - dim / 2 * math.log(df * math.pi)
    return lambda x: constant - (df + dim) / 2 * torch.log1p(x.square().sum(-1) / df)


def student_sample(n, df, dim, seed):
    white, chi = (
        torch.randn(n, size, generator=seeded(seed + k), dtype=F64) for k, size in enumerate((dim, round(df)))
    )
    return white * (df / chi.square().sum(-1, keepdim=True)).sqrt()


@pytest.mark.parametrize("dim", [1, 2, 7])
@pytest.mark.parametrize("df", [0.5, 1.0, 3.0])
def test_tail_index_is_the_degrees_of_freedom(df, dim):
    assert math.isclose(tail_index(student(df, dim), Gaussian(dim).double()), df, rel_tol=1e-3)


@pytest.mark.parametrize("width", [1e-3, 1.0, 1e3])
def test_light_tails_have_no_index(width):
    q = Gaussian(3)
    assert tail_index(lambda x: -(x / width).square().sum(-1) / 2, q) == math.inf
    assert tail_index(lambda x: -(x / width).norm(dim=-1), q) == math.inf
    assert tail_index(lambda x: torch.where(x.norm(dim=-1) < width, 0.0, -math.inf), q) == math.inf


def product(df, heavy, dim):
    """`heavy` independent Student-t coordinates and normal ones; log Z is 0."""
    t = td.StudentT(torch.tensor(df, dtype=F64))
    constant = (dim - heavy) / 2 * math.log(2 * math.pi)
    return lambda x: t.log_prob(x[:, :heavy]).sum(-1) - x[:, heavy:].square().sum(-1) / 2 - constant


@pytest.mark.parametrize("heavy", [1, 3, 10])
@pytest.mark.parametrize("df", [1.0, 2.0, 3.0])
def test_heavy_coordinates_are_seen_among_light_ones(df, heavy):
    q = Gaussian(10).double()
    found = tails(product(df, heavy, 10), q)
    assert math.isclose(found.least, df, rel_tol=1e-3)
    assert found.axes == heavy
    climb = ladder(product(df, heavy, 10), q, evaluations=100_000, generator=seeded())
    assert not climb.trusted
    assert any("no such tails" in line for line in climb.doubts)


def test_models_that_refuse_points_are_not_asked_there():
    """torch's distributions raise on NaN and on a scale of 0: neither is a reason for the ladder to raise."""
    normal = td.Normal

    def thin(x):
        return normal(0.0, 1.0).log_prob(x[:, 0]) + normal(0.0, 0.01).log_prob(x[:, 1] - x[:, 0] ** 2)

    def funnel(x):
        rest = normal(torch.zeros(len(x), 1), torch.exp(x[:, :1] / 2)).log_prob(x[:, 1:]).sum(-1)
        return normal(0.0, 3.0).log_prob(x[:, 0]) + rest

    for model, dim in ((thin, 2), (funnel, 6)):
        climb = ladder(model, Gaussian(dim), evaluations=50_000, generator=seeded())
        assert not climb.trusted or abs(climb.log_z.value) < 4 * climb.log_z.stderr + 0.01


def test_a_heavy_plane_is_seen_among_light_coordinates():
    """In the plane the density falls like r^-(df + 2), along each of its axes the mass like r^-(df + 1)."""
    plane = student(1.5, 2)
    found = tails(lambda x: plane(x[:, 2:4]) - x[:, [0, 1, 4]].square().sum(-1), Gaussian(5).double())
    assert math.isclose(found.around, 1.5, rel_tol=1e-3)
    assert math.isclose(found.along, 2.5, rel_tol=1e-3)
    assert found.axes == 2


def test_many_heavy_coordinates_need_lighter_tails():
    """What the tails of several axes hold adds up: one Student-t with 5 degrees of freedom is no doubt, ten are."""
    q = Gaussian(10).double()
    assert far_out(product(5.0, 1, 10), q, alone=True)[1] is None
    assert far_out(product(5.0, 10, 10), q, alone=True)[1] is not None
    assert far_out(product(5.0, 10, 10), q, alone=False)[1] is None


def test_a_tilted_network_falls_off_and_a_bare_one_does_not():
    q, net = Gaussian(4), MLP(4, hidden=(16,), activation="tanh")
    assert far_out(Tilted(q, net), q, alone=True) == (True, None)
    finite, why = far_out(net, q, alone=True)
    assert not finite
    assert "infinite" in why


def test_tails_as_heavy_as_the_noises_are_no_doubt():
    q = from_distribution(td.StudentT(torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64)))
    model = student(1.0, 1)
    assert far_out(model, q, alone=True) == (True, None)
    assert far_out(model, Gaussian(1).double(), alone=True)[1] is not None
    climb = ladder(model, q, generator=seeded())
    assert climb.log_zs()["importance"].value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("given", [False, True], ids=["alone", "data"])
def test_heavy_tails_under_a_light_noise_are_not_trusted(dim, given):
    for seed in range(2):
        data = student_sample(1000, 1, dim, seed) if given else None
        climb = ladder(
            student(1.0, dim), Gaussian(dim).double(), data=data, evaluations=100_000, generator=seeded(seed)
        )
        assert not climb.trusted
        assert any("no such tails" in line for line in climb.doubts)
        assert not any(rung.enough for rung in climb.rungs)


@pytest.mark.parametrize(
    "log_p",
    [
        lambda x: -x.shape[1] * torch.log1p(x.norm(dim=-1)),
        lambda x: torch.zeros(len(x), dtype=x.dtype),
        lambda x: x.abs().sum(-1),
    ],
    ids=["as slowly as space grows", "flat", "growing"],
)
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_an_infinite_integral_is_named(log_p, dim):
    climb = ladder(log_p, Gaussian(dim).double(), generator=seeded())
    assert not climb.trusted
    assert "infinite" in climb.doubts[0]


def box_noise(dim, half=1.0):
    ends = half * torch.ones(dim, dtype=F64)
    return from_distribution(td.Independent(td.Uniform(-ends, ends), 1))


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_a_noise_that_ends_too_soon(dim):
    def normal(x):
        return -x.square().sum(-1) / 2

    climb = ladder(normal, box_noise(dim), evaluations=100_000, generator=seeded())
    assert "the noise is zero" in climb.rungs[0].why
    assert climb.trusted == (dim <= 3)
    if climb.trusted:  # the grid goes on where the noise ends
        assert climb.log_z.value == pytest.approx(dim / 2 * math.log(2 * math.pi), abs=1e-3)


def test_a_noise_that_ends_where_the_model_does():
    def square(x):
        return torch.where((x.abs() <= 1).all(-1), 0.0, -math.inf)

    assert beyond_support(square, box_noise(5)) is None
    climb = ladder(square, box_noise(5), generator=seeded())
    assert climb.doubts == ()
    assert (climb.trusted, bool(climb.unchecked)) == (False, True)  # no rows were compared
    rows = 2 * torch.rand(500, 5, generator=seeded(1), dtype=F64) - 1
    assert ladder(square, box_noise(5), data=rows, generator=seeded()).trusted
    assert climb.log_z.value == pytest.approx(5 * math.log(2), abs=1e-9)


def test_a_spike_that_the_grid_saw_and_the_chains_did_not():
    """Half of the mass, a hundredth wide: the true log Z is 0, and all chains say log 1/2."""

    def spike(x):
        narrow = -((x - 1) / 0.01).square().sum(-1) / 2 - 2 * math.log(0.01)
        return torch.logaddexp(-x.square().sum(-1) / 2, narrow) - math.log(4 * math.pi)

    climbs = [ladder(spike, Gaussian(2).double(), generator=seeded(seed)) for seed in range(10)]
    alarmed = [climb for climb in climbs if not climb.rungs[0].sound]  # else no draw came near the spike
    assert len(alarmed) >= 2
    assert not any(climb.trusted and abs(climb.log_z.value) > 4 * climb.log_z.stderr for climb in alarmed)


def test_draws_that_no_chain_confirms():
    """A spike in three dimensions, far from where the chains go and hit by a draw now and then."""

    def spike(x):
        narrow = -((x - 1) / 0.1).square().sum(-1) / 2 - 5 * math.log(0.1)
        return torch.logaddexp(-x.square().sum(-1) / 2, narrow + math.log(9.0)) - 2.5 * math.log(2 * math.pi)

    for seed in range(5):
        climb = ladder(spike, Gaussian(5).double(), evaluations=100_000, generator=seeded(seed))
        assert not climb.trusted or abs(climb.log_z.value - math.log(10)) < 4 * climb.log_z.stderr


@pytest.mark.slow
def test_coverage_from_a_noise_that_was_not_fitted():
    """The Gaussian-visible machine from a standard normal: the errors of those without doubts cover."""
    aim, covered, sound = target("rbm"), 0, 0
    for seed in range(40):
        climb = ladder(aim.log_density, Gaussian(10).double(), evaluations=1_000_000, generator=seeded(seed))
        sound += not climb.doubts
        covered += not climb.doubts and abs(climb.log_z.value - aim.log_z) < 1.96 * climb.log_z.stderr
    assert sound >= 20
    assert covered >= 0.85 * sound


@pytest.mark.parametrize(
    "data", [torch.zeros(0, 3), torch.zeros(5, 2), torch.zeros(5, 1, 3), torch.full((5, 3), math.nan)]
)
def test_rows_of_another_shape_are_refused(data):
    with pytest.raises(InvalidValue, match="The ladder's data"):
        ladder(Gaussian(3), Gaussian(3), data=data)
