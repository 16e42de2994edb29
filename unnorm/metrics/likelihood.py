"""Likelihoods with their error, read off a data source a chunk at a time."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.data.rows import RowSource, chunks
from unnorm.data.transforms import Compose, Dequantize, Transform
from unnorm.errors import InvalidValue
from unnorm.types import LogDensity, LogZ, log_density, log_mean_exp

__all__ = ["NLL", "BitsPerDim", "bits_per_dim", "log_probs", "nll"]


class NLL(NamedTuple):
    """Mean negative log-likelihood in nats per row, and its standard error over rows."""

    value: float
    stderr: float
    n: int


class BitsPerDim(NamedTuple):
    """An upper bound of -log2 P(x) / dims, the mean over rows of integers x with `dims` coordinates.

    Attributes:
        value: bits per dimension.
        stderr: its standard error over rows (and their dequantisations), and of log Z where that was given.
        n: rows.
        dims: coordinates of a row.
        n_draws: dequantisations averaged for each row.
    """

    value: float
    stderr: float
    n: int
    dims: int
    n_draws: int


@torch.no_grad()
def log_probs(log_prob: LogDensity, data: RowSource, *, chunk: int = 4096) -> Tensor:
    """log p of every row, float64, on the CPU.

    >>> log_probs(lambda x: x.sum(-1), torch.ones(3, 2))
    tensor([2., 2., 2.], dtype=torch.float64)
    """
    values = torch.empty(len(data), dtype=torch.float64)
    for place, part in zip(values.split(chunk), chunks(data, chunk), strict=True):
        place.copy_(log_prob(part))
    return values


def nll(log_prob: Tensor, log_z: LogZ | None = None) -> NLL:
    """The mean of -log p over rows, from their `log_probs`; its error includes that of the normaliser, where given.

    >>> nll(torch.tensor([1.0, 3.0], dtype=torch.float64))
    NLL(value=-2.0, stderr=1.0, n=2)
    """
    spread = float(log_prob.std()) if len(log_prob) > 1 else math.nan
    stderr = math.hypot(spread / math.sqrt(len(log_prob)), log_z.stderr if log_z is not None else 0.0)
    return NLL(-float(log_prob.mean()), stderr, len(log_prob))


@torch.no_grad()
def bits_per_dim(
    log_prob: LogDensity,
    data: RowSource,
    transform: Transform,
    *,
    log_z: LogZ | None = None,
    n_draws: int = 1,
    dtype: torch.dtype = torch.float32,
    chunk: int = 1024,
    generator: torch.Generator | None = None,
) -> BitsPerDim:
    """Bits per dimension of integer data; the transforms hand over their Jacobians and the offset of the levels.

    For each row the bound is log mean_k exp(log p(z_k) + log|det dz_k/dx|) over `n_draws` dequantisations: with one
    the usual bound, with more a tighter one (Hoogeboom, Cohen, Tomczak 2020).

    Args:
        log_prob: log density of z, in the model's units; unnormalised where `log_z` is given. Of a `Density`, its
            `model`, with its `transform` and its `log_z`.
        data: the integers themselves, as read from the file.
        transform: from these to z; `Dequantize`, or a `Compose` that begins with it.
        log_z: the normaliser of `log_prob`, where it has one; its error is included.
        n_draws: dequantisations of each row.
        dtype: what `log_prob` computes with; the transforms compute in float64.
        chunk: rows at a time.
        generator: draws the dequantisations.

    >>> from unnorm.data import Logit
    >>> uniform = lambda z: torch.zeros(len(z))          # on the unit cube: each of 256 levels is as likely
    >>> bits_per_dim(uniform, torch.tensor([[0, 255], [7, 7]]), Dequantize(256)).value
    8.0
    >>> bits_per_dim(uniform, torch.tensor([[0.1]]), Logit(1e-6))
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: The 'transform' of bits_per_dim must begin with Dequantize: bits are of integers. ...
    """
    if not _dequantizes(transform):
        raise InvalidValue(
            "The 'transform' of bits_per_dim must begin with Dequantize: bits are of integers. "
            f"Got {type(transform).__name__}."
        )
    if n_draws < 1:
        raise InvalidValue(f"The 'n_draws' of bits_per_dim must be at least 1. Got {n_draws}.")
    rows, dims = [], 0
    for part in chunks(data, chunk):
        part = part.double()
        dims = math.prod(part.shape[1:])
        draws = []
        for _ in range(n_draws):
            z, log_det = transform(part, generator=generator)
            draws.append(log_density(log_prob, z.to(dtype)).double() + log_det)
        rows.append(log_mean_exp(torch.stack(draws, -1)).cpu())
    if not rows:
        raise InvalidValue("The 'data' of bits_per_dim must have at least one row. Got none.")
    found = nll(torch.cat(rows) - (log_z.value if log_z is not None else 0.0), log_z)
    nats = dims * math.log(2)
    return BitsPerDim(found.value / nats, found.stderr / nats, found.n, dims, n_draws)


def _dequantizes(transform: Transform) -> bool:
    """Whether the first thing that happens to x is its dequantisation."""
    while isinstance(transform, Compose):
        transform = transform.transforms[0]  # type: ignore[assignment]
    return isinstance(transform, Dequantize)
