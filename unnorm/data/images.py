"""Images from their authors' files: the idx format, and MNIST, which is written in it."""

import gzip
import hashlib
import importlib
import math
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unnorm.errors import DataError, InvalidValue

__all__ = ["LabelledImages", "mnist", "read_idx"]

UNSIGNED_BYTES = 0x08
MNIST_SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


class LabelledImages(NamedTuple):
    """`images`, uint8 of shape (n, channels, height, width), and `labels`, uint8 of shape (n,)."""

    images: Tensor
    labels: Tensor


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
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise DataError(f"Cannot read '{path}': {problem.strerror}.") from problem
    return _parsed(content, path.name)


def mnist(root: Path | str | None = None, *, train: bool = True, download: bool = False) -> LabelledImages:
    """The 60,000 training or the 10,000 test digits (LeCun, Cortes, Burges), images of shape (1, 28, 28).

    Args:
        root: the folder with the four idx files; the folder `mnist` under the one UNNORM_DATA names when None.
            Compressed files must be the published ones, by their md5.
        train: which of the two sets.
        download: fetch what is missing into `root`; needs `unnorm[download]`. Nothing is fetched without it.
    """
    folder = _folder(root)
    prefix, rows = ("train", 60_000) if train else ("t10k", 10_000)
    images = _published(folder, f"{prefix}-images-idx3-ubyte.gz", (rows, 28, 28), download)
    labels = _published(folder, f"{prefix}-labels-idx1-ubyte.gz", (rows,), download)
    return LabelledImages(images[:, None], labels)


def _folder(root: Path | str | None) -> Path:
    if root is not None:
        return Path(root)
    if not (home := os.environ.get("UNNORM_DATA")):
        raise InvalidValue("The 'root' of mnist must be given where UNNORM_DATA names no folder. Got None.")
    return Path(home) / "mnist"


def _published(folder: Path, name: str, shape: tuple[int, ...], download: bool) -> Tensor:
    plain = folder / name.removesuffix(".gz")
    if not (folder / name).is_file() and plain.is_file():
        found = read_idx(plain)
    else:
        if not (folder / name).is_file():
            _fetch(folder, name, download)
        content = (folder / name).read_bytes()
        if (md5 := hashlib.md5(content, usedforsecurity=False).hexdigest()) != MNIST_MD5[name]:
            raise DataError(f"'{name}' is damaged or not the published file: its md5 is {md5}, not {MNIST_MD5[name]}.")
        found = _parsed(content, name)
    if tuple(found.shape) != shape:
        raise DataError(f"'{name}' must hold an array of shape {shape}. Got {tuple(found.shape)}.")
    return found


def _fetch(folder: Path, name: str, download: bool) -> None:
    if not download:
        raise DataError(f"There is no '{name}' in '{folder}'. Fetch it with download=True.")
    try:
        pooch = importlib.import_module("pooch")
    except ImportError:
        raise InvalidValue("Downloading needs pooch: install unnorm[download].") from None
    pooch.retrieve(MNIST_SOURCE + name, known_hash=f"md5:{MNIST_MD5[name]}", fname=name, path=folder)


def _parsed(content: bytes, name: str) -> Tensor:
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
