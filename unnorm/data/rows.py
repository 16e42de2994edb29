"""Rows on disk or in memory, read a batch at a time; and their moments, a chunk at a time."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from unnorm.errors import DataError

__all__ = ["Moments", "RowSource", "Rows", "chunks", "moments", "spread"]

ELEMENTS = 2**17  # numbers held at once while passing over the data: 1 MB in float64


class RowSource(Protocol):
    """What training and fitting read from: a tensor, or anything indexed by a tensor like one.

    The index is on the CPU, or where the source's attribute `device` says that it keeps its rows.

    >>> rows: RowSource = torch.arange(6.0).view(3, 2)
    >>> rows[torch.tensor([2])]
    tensor([[4., 5.]])
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor: ...


class Rows:
    """Rows `index` of a (memory-mapped) array, as tensors of `dtype`; nothing is read before it is asked for.

    >>> rows = Rows(np.arange(8.0).reshape(4, 2), index=np.array([1, 3]))
    >>> len(rows), rows[torch.tensor([1])]
    (2, tensor([[6., 7.]], dtype=torch.float64))
    """

    def __init__(self, values: np.ndarray, index: np.ndarray | None = None, dtype: torch.dtype = torch.float64):
        self.values, self.index, self.dtype = values, index, dtype

    def __len__(self) -> int:
        return len(self.values) if self.index is None else len(self.index)

    def __getitem__(self, index: Tensor, /) -> Tensor:
        place = index.numpy()
        rows = self.values[place if self.index is None else self.index[place]]
        return torch.from_numpy(np.asarray(rows, dtype=np.float64)).to(self.dtype)  # whatever its kind and byte order


def chunks(data: RowSource, size: int | None = None) -> Iterator[Tensor]:
    """All rows in order, at most `size` at a time (by default as many as hold 2^17 numbers)."""
    if isinstance(data, np.ndarray):
        data = Rows(data)
    if size is None and len(data) > 0:
        size = max(1, ELEMENTS // data[torch.zeros(1, dtype=torch.int64)].numel())
    for start in range(0, len(data), size or 1):
        yield data[torch.arange(start, min(start + (size or 1), len(data)))]


def spread(n: int, count: int) -> Tensor:
    """At most `count` positions, evenly spread over n rows.

    >>> spread(9, 3)
    tensor([0, 4, 8])
    """
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).long()


class Moments(NamedTuple):
    """Float64 moments of the rows; `constant` marks coordinates with one value only."""

    n: int
    mean: Tensor
    variance: Tensor
    constant: Tensor


def moments(data: RowSource) -> Moments:
    """Mean and (population) variance of each coordinate, in two passes over chunks.

    >>> moments(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))[1:]
    (tensor([2., 5.], dtype=torch.float64), tensor([1., 0.], dtype=torch.float64), tensor([False,  True]))
    """
    n = len(data)
    if n == 0:
        raise DataError("The data have no rows.")
    first = next(chunks(data, 1))[0].double().cpu()
    # Shifting by the first row keeps an exactly constant coordinate exactly constant.
    shift = torch.zeros_like(first)
    for chunk in chunks(data):
        shift += (chunk.double().cpu() - first).sum(0) / n
    constant = torch.ones_like(first, dtype=torch.bool)
    variance = torch.zeros_like(first)
    for chunk in chunks(data):
        centred = chunk.double().cpu() - first
        constant &= (centred == 0).all(0)
        variance += (centred - shift).square().sum(0)
    if not torch.isfinite(shift).all() and torch.isfinite(first).all():
        raise DataError("The data contain NaN or infinity, or numbers too large to add up.")
    return Moments(n, first + shift, variance / n, constant)
