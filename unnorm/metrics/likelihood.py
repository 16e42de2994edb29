"""Likelihoods with their error, read off a data source a chunk at a time."""

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import NamedTuple, overload

import torch
from torch import Tensor

from unnorm.data.rows import RowSource, chunks
from unnorm.data.transforms import Transform, levels_of
from unnorm.density import Density
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


def nll(log_prob: Tensor | Sequence[float], *, log_z_stderr: float = 0.0) -> NLL:
    """The mean of -log p over rows, and its standard error.

    Args:
        log_prob: (n,), the rows' `log_probs`, normalised already.
        log_z_stderr: the standard error of the normaliser that is in them; all rows share it.

    >>> nll(torch.tensor([1.0, 3.0], dtype=torch.float64))
    NLL(value=-2.0, stderr=1.0, n=2)
    """
    log_prob = torch.as_tensor(log_prob)
    if log_prob.ndim != 1 or len(log_prob) == 0:
        raise InvalidValue(f"The log densities of nll must have shape (n,), n at least 1. Got {tuple(log_prob.shape)}.")
    if log_z_stderr < 0:
        raise InvalidValue(f"The 'log_z_stderr' of nll must not be negative. Got {log_z_stderr}.")
    spread = float(log_prob.std()) if len(log_prob) > 1 else math.nan
    stderr = math.hypot(spread / math.sqrt(len(log_prob)), log_z_stderr)
    return NLL(-float(log_prob.mean()), stderr, len(log_prob))


@overload
def bits_per_dim(
    log_prob: Density,
    data: RowSource,
    transform: Transform | None = None,
    *,
    log_z: LogZ | EllipsisType = ...,
    n_draws: int = 1,
    dtype: torch.dtype | None = None,
    chunk: int = 1024,
    generator: torch.Generator | None = None,
) -> BitsPerDim: ...


@overload
def bits_per_dim(
    log_prob: LogDensity,
    data: RowSource,
    transform: Transform,
    *,
    log_z: LogZ | None,
    n_draws: int = 1,
    dtype: torch.dtype | None = None,
    chunk: int = 1024,
    generator: torch.Generator | None = None,
) -> BitsPerDim: ...


@torch.no_grad()
def bits_per_dim(
    log_prob: LogDensity | Density,
    data: RowSource,
    transform: Transform | None = None,
    *,
    log_z: LogZ | EllipsisType | None = ...,
    n_draws: int = 1,
    dtype: torch.dtype | None = None,
    chunk: int = 1024,
    generator: torch.Generator | None = None,
) -> BitsPerDim:
    """Bits per dimension of integer data; the transforms hand over their Jacobians and the offset of the levels.

    For each row the bound is log mean_k exp(log p(z_k) + log|det dz_k/dx|) over `n_draws` dequantisations: with one
    the usual bound, with more a tighter one (Hoogeboom, Cohen, Tomczak 2020).

    Args:
        log_prob: a `Density`, which brings its own `transform` and `log_z`; or any log density of z, in the model's
            units, which needs both.
        data: the integers themselves, as read from the file.
        transform: from these to z; `Dequantize`, or a `Compose` that begins with it.
        log_z: the normaliser of `log_prob`, whose error is included; None where `log_prob` is normalised already.
        n_draws: dequantisations of each row.
        dtype: what `log_prob` computes with; when None that of a `Density`'s model, else float32. The transforms
            compute in float64.
        chunk: rows at a time.
        generator: draws the dequantisations.

    >>> from unnorm.data import Dequantize, Logit
    >>> uniform = lambda z: torch.zeros(len(z))          # on the unit cube: each of 256 levels is as likely
    >>> bits_per_dim(uniform, torch.tensor([[0, 255], [7, 7]]), Dequantize(256), log_z=None).value
    8.0
    >>> bits_per_dim(uniform, torch.tensor([[0.1]]), Logit(1e-6), log_z=None)
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: The 'transform' of bits_per_dim must begin with Dequantize: bits are of integers. ...
    """
    device = None  # where the rows are
    if isinstance(log_prob, Density):
        dtype, device = dtype or next((p.dtype for p in log_prob.model.parameters()), None), log_prob.box.device
        log_prob, transform, log_z = _parts(log_prob, transform, log_z)
    elif isinstance(getattr(log_prob, "__self__", None), Density):
        raise InvalidValue(
            "A method of a Density is in the units of the data: call bits_per_dim(density, data), or for its noise "
            f"bits_per_dim(density.noise, data, density.transform, log_z=None). Got density.{log_prob.__name__}."
        )
    if transform is None:
        raise InvalidValue("bits_per_dim needs a 'transform' that begins with Dequantize; only a Density has its own.")
    if not isinstance(log_z, LogZ | None):
        raise InvalidValue(
            "bits_per_dim needs 'log_z': the LogZ of log_prob, or None where log_prob is normalised already. "
            f"Got {'nothing' if log_z is ... else repr(log_z)}."
        )
    if levels_of(transform) is None:
        raise InvalidValue(
            "The 'transform' of bits_per_dim must begin with Dequantize: bits are of integers. "
            f"Got {type(transform).__name__}."
        )
    if n_draws < 1:
        raise InvalidValue(f"The 'n_draws' of bits_per_dim must be at least 1. Got {n_draws}.")
    rows, dims = [], 0
    for part in chunks(data, chunk):
        part = part.to(device=device, dtype=torch.float64)
        dims = math.prod(part.shape[1:])
        draws = []
        for _ in range(n_draws):
            z, log_det = transform(part, generator=generator)
            draws.append(log_density(log_prob, z.to(dtype or torch.float32)).double() + log_det)
        rows.append(log_mean_exp(torch.stack(draws, -1)).cpu())
    if not rows:
        raise InvalidValue("The 'data' of bits_per_dim must have at least one row. Got none.")
    value, stderr = (0.0, 0.0) if log_z is None else (log_z.value, log_z.stderr)
    found = nll(torch.cat(rows) - value, log_z_stderr=stderr)
    nats = dims * math.log(2)
    return BitsPerDim(found.value / nats, found.stderr / nats, found.n, dims, n_draws)


def _parts(
    density: Density, transform: Transform | None, log_z: LogZ | EllipsisType | None
) -> tuple[LogDensity, Transform, LogZ]:
    """What a density is made of; anything else given beside it would be left out, so it is refused."""
    if transform is not None and transform is not density.transform:
        raise InvalidValue(
            "With a Density bits_per_dim takes its own 'transform': leave it out, or give density.model instead. "
            f"Got another {type(transform).__name__}."
        )
    if log_z is not ... and log_z != density.log_z:
        raise InvalidValue(
            "With a Density bits_per_dim takes its own 'log_z': leave it out, or give density.model instead. "
            f"Got {log_z}."
        )
    return density.model, density.transform, density.log_z
