"""Likelihoods with their error, read off a data source a chunk at a time."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.data.rows import RowSource, chunks
from unnorm.types import LogDensity

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


def nll(log_prob: LogDensity, data: RowSource) -> NLL:
    """The mean of -log p over the rows.

    >>> nll(lambda x: x.sum(-1), torch.tensor([[1.0], [3.0]]))
    NLL(value=-2.0, stderr=1.0, n=2)
    """
    values = -log_probs(log_prob, data)
    spread = float(values.std()) if len(values) > 1 else math.nan
    return NLL(float(values.mean()), spread / math.sqrt(len(values)), len(values))
