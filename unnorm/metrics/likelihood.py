"""Likelihoods with their error, read off a data source a chunk at a time."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.data.rows import RowSource, chunks
from unnorm.types import LogDensity, LogZ

__all__ = ["NLL", "log_probs", "nll"]


class NLL(NamedTuple):
    """Mean negative log-likelihood in nats per row, and its standard error over rows."""

    value: float
    stderr: float
    n: int


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
