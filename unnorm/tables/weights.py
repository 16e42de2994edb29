"""Weighted rows as rows that are repeated."""

import numpy as np

__all__ = ["repeated", "repetitions"]

MOST_REPEATED = 20  # times as many rows as there are, at most, to stand for weights
FINER = 4  # times as many, where weights are no multiples of one of them
WHOLE = 1e-9


def repetitions(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return how often each row stands for its weight, so that a weight of two is the row twice.

    Whole numbers are taken as they are, and so are multiples of the least weight. Others are rounded so that their sum
    over the first rows, in an order that the rows' values decide, is right to half a row of four times as many.

    >>> repetitions(np.array([[2.0], [1.0], [3.0]]), np.array([0.5, 1.5, 1.0])).tolist()
    [1, 3, 2]
    """
    order = np.lexsort(rows.T[::-1])
    counts = np.empty(len(rows), dtype=np.int64)
    counts[order] = _counts(weights[order])
    return counts


def _counts(weights: np.ndarray) -> np.ndarray:
    """Return the counts of weights in a fixed order.

    >>> _counts(np.array([0.5, 1.5, 0.0])).tolist(), _counts(np.array([0.7, 1.0, 1.3])).tolist()
    ([1, 3, 0], [3, 4, 5])
    """
    positive = weights > 0
    for multiples in (weights, weights / weights[positive].min()):
        whole = np.round(multiples)
        near = np.abs(multiples - whole).max() < WHOLE and multiples[positive].min() > 0.5
        if near and whole.sum() <= MOST_REPEATED * len(weights):
            return whole.astype(np.int64)
    ends = np.round(weights.cumsum() * (FINER * len(weights) / weights.sum()))
    return np.diff(ends, prepend=0.0).astype(np.int64)


def repeated(rows: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """Return the rows in an order that their values decide, each as often as it counts.

    >>> repeated(np.array([[2.0], [1.0], [3.0]]), np.array([2, 1, 0])).ravel().tolist()
    [1.0, 2.0, 2.0]
    """
    order = np.lexsort(rows.T[::-1])
    return rows[order] if counts is None else np.repeat(rows[order], counts[order], axis=0)
