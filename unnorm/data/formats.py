"""The formats of image sets: CIFAR's records, SVHN's matrices, folders of pictures, and arrays packed without loss."""

import io
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unnorm.errors import DataError, InvalidValue

__all__ = ["Packed", "cifar_archive", "cifar_records", "folder_of_images", "packed", "svhn_matrix"]

SIDE, CHANNELS = 32, 3
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def cifar_archive(content: bytes, names: Sequence[str]) -> list[bytes]:
    """Files of a .tar.gz, read where they are: nothing is unpacked to the disk."""
    found = []
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for name in names:
                member = archive.extractfile(name)
                if member is None:
                    raise DataError(f"'{name}' is no file of the archive.")
                found.append(member.read())
    except (tarfile.TarError, EOFError, OSError, zlib.error, KeyError) as problem:
        raise DataError(f"The archive cannot be read: {problem}") from problem
    return found


def cifar_records(content: bytes, labels: int) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) and labels (n, labels) of records: so many bytes of labels, then three planes.

    >>> images, labels = cifar_records(bytes([7]) + bytes(range(256)) * 12, 1)
    >>> images.shape, labels.tolist()
    (torch.Size([1, 3, 32, 32]), [[7]])
    """
    size = labels + CHANNELS * SIDE * SIDE
    if not content or len(content) % size:
        raise DataError(f"Records of CIFAR have {size:,} bytes each. Got {len(content):,} bytes.")
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, size).copy())
    return records[:, labels:].reshape(-1, CHANNELS, SIDE, SIDE).contiguous(), records[:, :labels].contiguous()


def svhn_matrix(content: bytes, name: str) -> tuple[Tensor, Tensor]:
    """Images and labels of a .mat file: X (height, width, channels, n) and y, in which 10 is the digit 0."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        found = loadmat(io.BytesIO(content), variable_names=["X", "y"])
        images, labels = np.asarray(found["X"]), np.asarray(found["y"]).ravel()
    except (MatReadError, ValueError, TypeError, KeyError, OSError, EOFError, zlib.error) as problem:
        raise DataError(f"'{name}' is not a file of SVHN's digits: {problem}") from problem
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != len(labels):
        raise DataError(f"'{name}' must hold bytes X of shape (height, width, channels, n) and n labels y.")
    first = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    return torch.from_numpy(first), torch.from_numpy((labels % 10).astype(np.uint8))


def folder_of_images(folder: Path, size: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Images of a folder and the folders in it, in the order of their names; a label for each inner folder.

    Args:
        folder: with pictures; those of one channel stay so if all have one, otherwise all are RGB.
        size: height and width to scale to; by default they must be equal.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as problem:
        raise InvalidValue("Folders of images need Pillow: pip install pillow.") from problem
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise DataError(f"There are no images in '{folder}'.")
    grey, arrays = True, []
    for path in paths:
        try:
            with Image.open(path) as picture:
                grey &= picture.mode in ("L", "1", "I;16")
                colours = picture.convert("RGB")
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as problem:
            raise DataError(f"'{path}' is no image that can be read: {problem}") from problem
        if size is not None:
            colours = colours.resize((size[1], size[0]), Image.Resampling.BICUBIC)
        arrays.append(np.asarray(colours))
        if arrays[-1].shape != arrays[0].shape:
            sizes = f"{arrays[0].shape[:2]} and {arrays[-1].shape[:2]}"
            raise DataError(f"The images of '{folder}' differ in size ({sizes}): give a size to scale them to.")
    stack = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
    stack = stack[:, :1] if grey else stack
    kinds = {name: place for place, name in enumerate(sorted({str(path.parent) for path in paths}))}
    labels = torch.tensor([kinds[str(path.parent)] for path in paths])
    return stack.contiguous(), labels.to(torch.uint8 if len(kinds) <= 256 else torch.int64)


class Packed(NamedTuple):
    """Images (n, channels, height, width) and their arrays of labels by name."""

    images: Tensor
    labels: dict[str, Tensor]

    def records(self) -> bytes:
        """As CIFAR has them: coarse labels first, where there are such."""
        names = [name for name in ("coarse", "labels") if name in self.labels]
        columns = [self.labels[name].to(torch.uint8)[:, None] for name in names]
        return torch.cat([*columns, self.images.flatten(1)], 1).numpy().tobytes()


def packed(path: Path) -> Packed:
    """An .npz of colour images as residuals `res` (channels, n, height, width) of the median-edge predictor (JPEG-LS).

    Colours were changed reversibly before, (R, G, B) to (G, R - G + 128, B - G + 128), all modulo 256.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        residuals = arrays.pop("res")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise DataError(f"'{path.name}' is not a file of packed images: {problem}") from problem
    if residuals.dtype != np.uint8 or residuals.ndim != 4 or residuals.shape[0] != CHANNELS:
        raise DataError(f"'{path.name}' must hold bytes 'res' of shape (3, n, height, width).")
    values = np.ascontiguousarray(residuals.transpose(2, 3, 0, 1)).astype(np.int16)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            values[row, column] = (values[row, column] + _predicted(values, row, column)) & 255
    green = values[:, :, 0]
    red, blue = ((values[:, :, place] + green - 128) & 255 for place in (1, 2))
    images = np.stack([red, green, blue]).astype(np.uint8).transpose(3, 0, 1, 2)
    labels = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Packed(torch.from_numpy(np.ascontiguousarray(images)), labels)


def _predicted(values: np.ndarray, row: int, column: int) -> np.ndarray | int:
    """From the left, the upper and the corner neighbour: their plane, held between left and upper."""
    if row == 0 and column == 0:
        return 128
    if row == 0 or column == 0:
        return np.asarray(values[row, column - 1] if row == 0 else values[row - 1, column])
    left, upper, corner = values[row, column - 1], values[row - 1, column], values[row - 1, column - 1]
    return np.clip(left + upper - corner, np.minimum(left, upper), np.maximum(left, upper))
