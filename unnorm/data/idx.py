"""The idx format, in which MNIST and its kin are written."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unnorm.data.published import read_bytes
from unnorm.errors import DataError

__all__ = ["parsed_idx", "read_idx"]

UNSIGNED_BYTES = 0x08


def read_idx(path: Path | str) -> Tensor:
    """The array of unsigned bytes in an idx file, compressed (`.gz`) or not.

    The file begins with two zero bytes, 8 for unsigned bytes, the number of axes, and each axis' length in four bytes.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "two-idx1-ubyte"
    >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 250]))
    >>> read_idx(path)
    tensor([  5, 250], dtype=torch.uint8)
    """
    path = Path(path)
    return parsed_idx(read_bytes(path), path.name)


def parsed_idx(content: bytes, name: str) -> Tensor:
    """The array in the bytes of such a file; `name` is for messages."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as problem:
            raise DataError(f"'{name}' is not a complete gzip file.") from problem
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"'{name}' is not an idx file: it must begin with two zero bytes.")
    kind, axes = content[2], content[3]
    if kind != UNSIGNED_BYTES:
        raise DataError(f"'{name}' must hold unsigned bytes (type 8). Got type {kind}.")
    start = 4 + 4 * axes
    if axes == 0 or len(content) < start:
        raise DataError(f"'{name}' is not a complete idx file: its header ends early.")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"'{name}' is truncated or too long: {len(content) - start} bytes for an array of shape {shape}."
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy())
