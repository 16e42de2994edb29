"""Fitting a Gaussian to awkward data, and wrapping torch's distributions."""

import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.covariance import oas
from torch import distributions as td

from unnorm.data.rows import Rows
from unnorm.errors import DataError, InvalidValue, ShrinkageWarning
from unnorm.noise import Gaussian, from_distribution


def rows(n, d, seed=0):
    mix = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) @ mix + 3


def covariance_of(q):
    if q.covariance == "full":
        return q.scale_tril @ q.scale_tril.mT
    diagonal = q.scale.square().diag()
    return diagonal if q.covariance == "diagonal" else q.factor @ q.factor.mT + diagonal


def test_full_fit_is_numpy_mean_and_cov():
    x = rows(300, 4)
    q = Gaussian.fit(x).double()
    np.testing.assert_allclose(q.loc, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(covariance_of(q), np.cov(x.numpy(), rowvar=False, bias=True), rtol=1e-5)


def test_diagonal_fit():
    x = rows(300, 4)
    np.testing.assert_allclose(Gaussian.fit(x, "diagonal").scale, x.std(0, correction=0), rtol=1e-6)


def test_low_rank_finds_a_low_rank_structure():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    x = torch.randn(20_000, 2, generator=generator, dtype=torch.float64) @ factor.mT
    x += 0.3 * torch.randn(20_000, 12, generator=generator, dtype=torch.float64)
    truth = factor @ factor.mT + 0.09 * torch.eye(12, dtype=torch.float64)
    found = covariance_of(Gaussian.fit(x, "low-rank", rank=2).double())
    assert (found - truth).norm() / truth.norm() < 0.05
    np.testing.assert_allclose(found.diagonal(), x.var(0, correction=0), rtol=1e-3)


@pytest.mark.parametrize("options", [("full",), ("diagonal",), ("low-rank", 2)])
def test_log_prob_is_scipys(options):
    q = Gaussian.fit(rows(500, 5), *options).double()
    x = rows(7, 5, seed=3)
    expected = stats.multivariate_normal(q.loc.numpy(), covariance_of(q).numpy()).logpdf(x.numpy())
    np.testing.assert_allclose(q.log_prob(x), expected, rtol=1e-9)


@pytest.mark.parametrize("options", [("full",), ("diagonal",), ("low-rank", 2)])
def test_samples_have_the_moments(options):
    q = Gaussian.fit(rows(500, 4), *options).double()
    x = q.sample(200_000, generator=torch.Generator().manual_seed(0))
    truth = covariance_of(q)
    spread = truth.diagonal()
    assert ((x.mean(0) - q.loc).abs() < 4 * (spread / len(x)).sqrt()).all()
    error = ((spread[:, None] * spread + truth**2) / len(x)).sqrt()
    assert ((x.T.cov() - truth).abs() < 4.5 * error).all()


def test_any_event_shape():
    x = rows(50, 12).view(50, 3, 2, 2)
    q = Gaussian.fit(x, "diagonal")
    assert q.sample(5).shape == (5, 3, 2, 2)
    torch.testing.assert_close(
        q.log_prob(x.float()), Gaussian.fit(x.flatten(1), "diagonal").log_prob(x.flatten(1).float())
    )


def test_fewer_rows_than_columns_is_shrunk_and_says_so():
    with pytest.warns(ShrinkageWarning, match=r"covariance of 10 rows in 30 coordinates is singular: shrunk by \S+"):
        q = Gaussian.fit(rows(10, 30))
    assert torch.linalg.eigvalsh(covariance_of(q.double())).min() > 0
    assert torch.isfinite(q.log_prob(q.sample(5))).all()


def test_shrinkage_is_scikit_learns_oas():
    x = rows(10, 30)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    expected, _ = oas(z.numpy(), assume_centered=True)
    with pytest.warns(ShrinkageWarning):
        q = Gaussian.fit(z)
    np.testing.assert_allclose(covariance_of(q.double()), expected, atol=2e-5)


@pytest.mark.parametrize("covariance", ["full", "diagonal", "low-rank"])
def test_constant_column_is_not_singular_and_says_so(covariance):
    x = rows(100, 4)
    x[:, 2] = 7.0
    with pytest.warns(ShrinkageWarning, match=r"1 of 4 coordinates are constant \(2\)"):
        q = Gaussian.fit(x, covariance)
    assert torch.isfinite(q.log_prob(q.sample(5))).all()
    assert covariance_of(q.double())[2, 2] > 0


@pytest.mark.parametrize("n", [3, 5, 12, 40, 200])
def test_low_rank_of_few_rows_does_not_believe_its_directions(n):
    """Independent columns: what a few rows seem to share is chance. Held-out rows lose little against the diagonal."""
    x, apart = (torch.randn(k, 300, generator=torch.Generator().manual_seed(s)) for k, s in ((n, 0), (200, 1)))
    low, diagonal = (Gaussian.fit(x, kind).log_prob(apart).mean() for kind in ("low-rank", "diagonal"))
    assert low > diagonal - 15 - 0.1 * abs(diagonal)


def test_low_rank_of_determined_coordinates_says_so():
    z = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    with pytest.warns(ShrinkageWarning, match="30 of 30 coordinates are all but determined by 10 directions"):
        q = Gaussian.fit(z @ torch.randn(2, 30, generator=torch.Generator().manual_seed(1)), "low-rank", rank=10)
    assert torch.isfinite(q.log_prob(q.sample(5))).all()


def test_outside_the_support_is_minus_infinity():
    q = from_distribution(td.Exponential(torch.ones(2)))
    found = q.log_prob(torch.tensor([[1.0, 2.0], [-1.0, 2.0]]))
    assert found.tolist() == [-3.0, -float("inf")]


def test_duplicated_column_is_shrunk():
    x = rows(100, 3)
    with pytest.warns(ShrinkageWarning, match="singular"):
        q = Gaussian.fit(torch.cat([x, x[:, :1]], 1))
    assert torch.isfinite(q.log_prob(q.sample(5))).all()


def test_healthy_data_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gaussian.fit(rows(200, 5) * torch.tensor([1e-6, 1.0, 1e6, 1.0, 1.0]))


def test_fit_reads_rows_in_chunks_as_a_tensor(monkeypatch):
    x = rows(1000, 3)
    monkeypatch.setattr("unnorm.data.rows.ELEMENTS", 100)
    torch.testing.assert_close(Gaussian.fit(Rows(x.numpy())).scale_tril, Gaussian.fit(x).scale_tril)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"event": 0}, "'event' must be a positive size"),
        ({"event": 2, "covariance": "ful"}, "Did you mean 'full'"),
        ({"event": 2, "covariance": "low-rank", "rank": 3}, "between 1 and the 2 coordinates. Got 3"),
        ({"event": 2, "rank": 1}, "belongs to covariance='low-rank'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InvalidValue, match=message):
        Gaussian(**arguments)


def test_from_distribution_equals_the_distribution():
    inner = td.MultivariateNormal(torch.ones(2), torch.tensor([[2.0, 0.6], [0.6, 1.0]]))
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(from_distribution(inner).log_prob(x), inner.log_prob(x))


def test_from_distribution_owns_its_numbers():
    loc = torch.zeros(2, requires_grad=True)
    q = from_distribution(td.Normal(loc * 2, torch.ones(2)))
    before = q.log_prob(torch.ones(1, 2))
    with torch.no_grad():
        loc.fill_(5.0)
    assert torch.equal(q.log_prob(torch.ones(1, 2)), before)
    assert not before.requires_grad


def test_wrong_arguments_are_named():
    with pytest.raises(InvalidValue, match="takes a torch.distributions object. Got int"):
        from_distribution(3)
    with pytest.raises(DataError, match="contain NaN or infinity"):
        Gaussian.fit(torch.tensor([[1.0], [float("nan")]]))


def test_batch_axes_become_the_event():
    q = from_distribution(td.Normal(torch.zeros(3, 4), torch.ones(3, 4)))
    assert q.sample(2).shape == (2, 3, 4)
    assert q.log_prob(torch.zeros(2, 3, 4)).shape == (2,)
