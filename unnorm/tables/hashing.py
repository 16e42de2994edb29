"""Numbers that depend on the content of a row alone: an order of the rows that does not depend on theirs.

A split by such numbers keeps copies of a row together, and a table with its rows in another order is the same table.
"""

import numpy as np

from unnorm.randomness import derive_seed

__all__ = ["digest_of_rows", "order_of_rows", "uniform"]

CHUNK_NUMBERS = 2**18  # looked at together
ONE = np.uint64(1)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit integers (the finalizer of SplitMix64, Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


def _start(seed: int, purpose: str) -> np.uint64:
    high, low = (np.uint64(derive_seed(seed, purpose, half)) for half in (0, 1))
    return np.uint64((high << np.uint64(32)) | low)


def order_of_rows(values: np.ndarray, kept: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the rows in a random order that their content and the seed decide; and which begin a group.

    Copies of a row stand beside each other. The second array says of each row in that order whether it is the first
    of its copies.

    Args:
        values: (n, columns).
        kept: places of the rows that count; all when None.
        seed: of the order.

    >>> order, first = order_of_rows(np.array([[1.0], [2.0], [1.0]]), None, 0)
    >>> sorted(order.tolist()), int(first.sum())
    ([0, 1, 2], 2)
    """
    found = _hashes(values, kept, seed)
    n = len(found)
    order = np.argsort(found, kind="stable")
    in_order = found[order]
    first = np.ones(n, dtype=bool)
    first[1:] = in_order[1:] != in_order[:-1]
    return (order if kept is None else kept[order]).astype(np.int64 if n >= 2**31 else np.int32), first


def _hashes(values: np.ndarray, kept: np.ndarray | None, seed: int) -> np.ndarray:
    """Return a 64-bit number for the content of each row, a chunk at a time."""
    n = len(values) if kept is None else len(kept)
    found = np.empty(n, dtype=np.uint64)
    size = max(1, CHUNK_NUMBERS // max(1, values.shape[1]))
    for begin in range(0, n, size):
        part = slice(begin, begin + size)
        rows = np.ascontiguousarray(values[part] if kept is None else values[kept[part]], dtype=np.float64) + 0.0
        bits, own = rows.view(np.uint64), np.full(len(rows), _start(seed, "order of the rows"))
        for column in bits.T:
            own = _mixed(own ^ _mixed(column))
        found[part] = own
    return found


def digest_of_rows(values: np.ndarray, kept: np.ndarray | None = None) -> str:
    """Return a number that tells one table from another, whatever the order of its rows.

    >>> digest_of_rows(np.array([[1.0], [2.0]])) == digest_of_rows(np.array([[2.0], [1.0]]))
    True
    """
    with np.errstate(over="ignore"):
        return f"{int(_hashes(values, kept, 0).sum(dtype=np.uint64)):016x}"


def uniform(positions: np.ndarray, column: int, seed: int) -> np.ndarray:
    """Return a number in [0, 1) for each position, of a stream that the column and the seed have to themselves.

    >>> x = uniform(np.arange(10_000), 0, 0)
    >>> bool(abs(x.mean() - 0.5) < 0.02), bool((x == uniform(np.arange(10_000), 0, 0)).all())
    (True, True)
    """
    start = _mixed(np.asarray([_start(seed, "places in cells") + np.uint64(column)], dtype=np.uint64))[0]
    with np.errstate(over="ignore"):
        numbers = _mixed(start + _mixed(positions.astype(np.uint64) + ONE))
    return np.asarray((numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53)
