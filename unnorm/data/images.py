"""Images from their authors' files, as bytes with labels; and as rows that a model reads on its device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from unnorm.data.formats import cifar_archive, cifar_records, folder_of_images, packed, svhn_matrix
from unnorm.data.idx import parsed_idx, read_idx
from unnorm.data.published import Published, home, read_bytes, verified
from unnorm.data.transforms import Dequantize, Transform
from unnorm.errors import DataError, InvalidValue
from unnorm.names import choose
from unnorm.randomness import stream

__all__ = ["SETS", "ImageData", "ImageRows", "LabelledImages", "image_data", "labelled_images", "mnist"]

MNIST_SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
FASHION_SOURCE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
CIFAR_SOURCE = "https://www.cs.toronto.edu/~kriz/"
CIFAR10 = Published("cifar-10-binary.tar.gz", CIFAR_SOURCE, "c32a1d4ab5d03f1284b67883e8d87530")
CIFAR100 = Published("cifar-100-binary.tar.gz", CIFAR_SOURCE, "03b5dce01913d631647c71ecec9e9cb8")
CIFAR10_FILES = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR100_FILES = {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "4499cfba6c016c1be1438163640a0898"}
SVHN_SOURCE = "http://ufldl.stanford.edu/housenumbers/"
SVHN = {
    "train": Published("train_32x32.mat", SVHN_SOURCE, "e26dedcc434d2e4c54c9b2d4a06d8373"),
    "test": Published("test_32x32.mat", SVHN_SOURCE, "eb5a983be6a315427106f1b164d9cef3"),
}
SVHN_PACKED = {"test": "c8c1ced5fe85b69919d8302019191274"}  # of images and labels; a few pixels are not the authors'
DIGITS_TEST = 300
PARTS = ("train", "test")


class LabelledImages(NamedTuple):
    """`images`, uint8 of shape (n, channels, height, width), and `labels`, uint8 of shape (n,)."""

    images: Tensor
    labels: Tensor

    def at(self, index: Tensor) -> "LabelledImages":
        return LabelledImages(self.images[index], self.labels[index])


class ImageRows:
    """Images as rows in a model's coordinates: kept as bytes on the device, dequantised anew at each reading.

    Args:
        images: uint8.
        transform: from bytes to the model's coordinates; it begins with `Dequantize`.
        device: where they are kept and transformed.
        generator: draws the places within the bytes' cells; on the device.
        dtype: of the rows.
        shift: pixels by which an image is moved at most, up or down and left or right, anew at each reading; what
            comes in is 0.

    >>> rows = ImageRows(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), Dequantize(256))
    >>> rows[torch.tensor([0, 2])].shape, bool((rows[torch.tensor([1])] >= 255 / 256).all())
    (torch.Size([2, 1, 2, 2]), True)
    """

    def __init__(
        self,
        images: Tensor,
        transform: Transform,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        shift: int = 0,
    ):
        if shift < 0:
            raise InvalidValue(f"The 'shift' of ImageRows must not be negative. Got {shift}.")
        self.images, self.transform = images.to(device), transform.to(device)
        self.generator, self.dtype, self.shift = generator, dtype, shift

    def __len__(self) -> int:
        return len(self.images)

    @property
    def device(self) -> torch.device:
        return self.images.device

    def __getitem__(self, index: Tensor, /) -> Tensor:
        with torch.no_grad():
            rows = self.images[index.to(self.images.device)]
            if self.shift:
                rows = _shifted(rows, self.shift, self.generator)
            return self.transform(rows, generator=self.generator)[0].to(self.dtype)


def _shifted(images: Tensor, most: int, generator: torch.Generator | None) -> Tensor:
    """Each image by a draw of its own."""
    n, _, height, width = images.shape
    move = torch.randint(2 * most + 1, (2, n, 1), generator=generator, device=images.device)
    down, right = (
        start + torch.arange(side, device=images.device) for start, side in zip(move, (height, width), strict=True)
    )
    place = torch.arange(n, device=images.device)[:, None, None]
    wide = pad(images, (most,) * 4)
    return wide[place, :, down[:, :, None], right[:, None, :]].movedim(-1, 1)


@dataclass(frozen=True)
class ImageData:
    """A set of images, divided: bytes with labels to train on, to choose by, and to test on.

    Attributes:
        name: of the set.
        train, validation, test: each a `LabelledImages`.
        levels: values that a byte may have, from 0.

    >>> digits = image_data("digits")
    >>> digits.event, digits.levels, len(digits.train.images), len(digits.validation.images), len(digits.test.images)
    ((1, 8, 8), 17, 1348, 149, 300)
    >>> rows = digits.rows("train", generator=torch.Generator().manual_seed(0))
    >>> rows[torch.tensor([0, 1])].shape
    torch.Size([2, 1, 8, 8])
    """

    name: str
    train: LabelledImages
    validation: LabelledImages
    test: LabelledImages
    levels: int = 256

    @property
    def event(self) -> tuple[int, ...]:
        return tuple(self.test.images.shape[1:])

    def rows(
        self,
        part: str,
        transform: Transform | None = None,
        *,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> ImageRows:
        """A part as rows; the transform is `Dequantize(levels)` when None, and a longer one begins with that."""
        images = choose("part", part, {name: getattr(self, name) for name in ("train", "validation", "test")}).images
        return ImageRows(images, transform or Dequantize(self.levels), device, generator, dtype)


def image_data(
    name: str, root: Path | str | None = None, *, validation: int | None = None, seed: int = 0, download: bool = False
) -> ImageData:
    """A set by its name, or of a folder of images, with folders `train` and `test` in it or without.

    Args:
        name: one of `SETS`, or a folder; where that is not divided, a tenth of it, always the same, is the test set.
        root: the folder that holds the sets' folders; the one UNNORM_DATA names when None, or a cache of the user's
            where it names none and `download` asks for it.
        validation: images taken from the training ones by a seeded draw; a tenth, at most 5,000, when None.
        seed: of this draw.
        download: fetch what is missing; needs `unnorm[download]`.
    """
    train, test = (labelled_images(name, part, root, download=download) for part in PARTS)
    count = min(5000, len(train.images) // 10) if validation is None else validation
    if not 0 <= count < len(train.images):
        raise InvalidValue(f"The 'validation' must leave some of the {len(train.images)} images. Got {count}.")
    order = torch.randperm(len(train.images), generator=stream(seed, "validation images"))
    held, kept = order[:count].sort().values, order[count:].sort().values
    return ImageData(str(name), train.at(kept), train.at(held), test, 17 if name == "digits" else 256)


def labelled_images(
    name: str, part: str = "train", root: Path | str | None = None, *, download: bool = False
) -> LabelledImages:
    """One part of a set as its authors divided it, "train" or "test"; of a folder, the folder of that name in it, or
    where there are none, a tenth of its images for the test and the others for training."""
    if part not in PARTS:
        raise InvalidValue(f"The 'part' of a set of images is train or test. Got {part!r}.")
    if name not in SETS and Path(name).is_dir():
        return _of_folder(Path(name), part)
    read = choose("set of images", name, SETS)
    return read(part, root, download)


def _of_folder(folder: Path, part: str) -> LabelledImages:
    given = [name for name in PARTS if (folder / name).is_dir()]
    if given and part not in given:
        raise DataError(f"'{folder}' has a folder '{given[0]}' and none for '{part}'.")
    found = LabelledImages(*folder_of_images(folder / part if given else folder))
    if given:
        return found
    n = len(found.images)
    if n < 2:
        raise DataError(f"'{folder}' must hold two images at least, to set some aside. Got {n}.")
    order, apart = torch.randperm(n, generator=stream(0, "test images")), max(1, n // 10)
    return found.at((order[:apart] if part == "test" else order[apart:]).sort().values)


def mnist(root: Path | str | None = None, *, train: bool = True, download: bool = False) -> LabelledImages:
    """The 60,000 training or the 10,000 test digits (LeCun, Cortes, Burges), images of shape (1, 28, 28).

    Args:
        root: the folder with the four idx files; the folder `mnist` under the one UNNORM_DATA names when None.
            Compressed files must be the published ones, by their md5.
        train: which of the two sets.
        download: fetch what is missing into `root`; needs `unnorm[download]`. Nothing is fetched without it.
    """
    folder = home(None, "mnist", download) / "mnist" if root is None else Path(root)
    return _idx(folder, "train" if train else "test", MNIST_SOURCE, MNIST_MD5, download)


def _idx(folder: Path, part: str, source: str, md5: Mapping[str, str], download: bool) -> LabelledImages:
    prefix, rows = ("train", 60_000) if part == "train" else ("t10k", 10_000)
    found = []
    for name, shape in (
        (f"{prefix}-images-idx3-ubyte.gz", (rows, 28, 28)),
        (f"{prefix}-labels-idx1-ubyte.gz", (rows,)),
    ):
        plain = folder / name.removesuffix(".gz")
        if not (folder / name).is_file() and plain.is_file():
            array = read_idx(plain)
        else:
            array = parsed_idx(Published(name, source, md5[name]).read(folder, download), name)
        if tuple(array.shape) != shape:
            raise DataError(f"'{name}' must hold an array of shape {shape}. Got {tuple(array.shape)}.")
        found.append(array)
    return LabelledImages(found[0][:, None], found[1])


def _mnist(part: str, root: Path | str | None, download: bool) -> LabelledImages:
    return _idx(home(root, "mnist", download) / "mnist", part, MNIST_SOURCE, MNIST_MD5, download)


def _fashion(part: str, root: Path | str | None, download: bool) -> LabelledImages:
    return _idx(home(root, "fashion-mnist", download) / "fashion-mnist", part, FASHION_SOURCE, FASHION_MD5, download)


def _cifar10(part: str, root: Path | str | None, download: bool) -> LabelledImages:
    names = [name for name in CIFAR10_FILES if name.startswith("data" if part == "train" else "test")]
    files, within = {name: CIFAR10_FILES[name] for name in names}, "cifar-10-batches-bin"
    folder = home(root, "cifar10", download)
    halves = [
        folder / "packed" / f"cifar10_{name}.npz" for name in (("train_0", "train_1") if part == "train" else ("test",))
    ]
    return _cifar(folder, CIFAR10, within, files, halves, 0, download)


def _cifar100(part: str, root: Path | str | None, download: bool) -> LabelledImages:
    folder, name = home(root, "cifar100", download), f"{part}.bin"
    halves = [folder / "packed" / f"cifar100_{part}.npz"]
    return _cifar(folder, CIFAR100, "cifar-100-binary", {name: CIFAR100_FILES[name]}, halves, 1, download)


def _cifar(
    folder: Path,
    archive: Published,
    within: str,
    files: Mapping[str, str],
    halves: list[Path],
    label: int,
    download: bool,
) -> LabelledImages:
    """Of the records' files, of the archive, or packed; by the md5 of the records in each case. `label` is its byte."""
    if (folder / archive.name).is_file() or not ((folder / within).is_dir() or all(half.is_file() for half in halves)):
        parts = cifar_archive(archive.read(folder, download), [f"{within}/{name}" for name in files])
    elif (folder / within).is_dir():
        parts = [read_bytes(folder / within / name) for name in files]
    else:
        content = b"".join(packed(half).records() for half in halves)
        size = len(content) // len(files)
        parts = [content[size * place : size * (place + 1)] for place in range(len(files))]
    for own, (name, md5) in zip(parts, files.items(), strict=True):
        verified(own, name, md5)
    images, labels = cifar_records(b"".join(parts), label + 1)
    return LabelledImages(images, labels[:, label].contiguous())


def _svhn(part: str, root: Path | str | None, download: bool) -> LabelledImages:
    folder = home(root, "svhn", download)
    half = folder / "packed" / f"svhn_{part}.npz"
    if part in SVHN_PACKED and half.is_file() and not (folder / "svhn" / SVHN[part].name).is_file():
        found = packed(half)
        images, labels = found.images, found.labels["labels"]
        verified(images.numpy().tobytes() + labels.numpy().tobytes(), half.name, SVHN_PACKED[part])
        return LabelledImages(images, labels)
    return LabelledImages(*svhn_matrix(SVHN[part].read(folder / "svhn", download), SVHN[part].name))


def _digits(part: str, root: Path | str | None, download: bool) -> LabelledImages:
    """The 1,797 digits of 8 x 8 that come with scikit-learn; 300 of them, by a fixed draw, are the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    everything = LabelledImages(
        torch.from_numpy(found.images.astype(np.uint8))[:, None], torch.from_numpy(found.target.astype(np.uint8))
    )
    order = torch.randperm(len(everything.images), generator=stream(0, "test images"))
    index = order[DIGITS_TEST:] if part == "train" else order[:DIGITS_TEST]
    return everything.at(index.sort().values)


SETS: Mapping[str, Callable[[str, Path | str | None, bool], LabelledImages]] = {
    "digits": _digits,
    "mnist": _mnist,
    "fashion-mnist": _fashion,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
}
