"""Where points come from: toy densities, tables, images, and the transforms that carry their Jacobian."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unnorm.data.affine import Identity, Probit, Whiten
    from unnorm.data.idx import read_idx
    from unnorm.data.images import ImageData, ImageRows, LabelledImages, image_data, labelled_images, mnist
    from unnorm.data.quantiles import Gaussianize
    from unnorm.data.rows import Rows, RowSource, chunks
    from unnorm.data.targets import TARGETS, Target, target
    from unnorm.data.toys import TOYS, Toy, toy
    from unnorm.data.transforms import Compose, Dequantize, Logit, Standardize, Transform, Transformed

__all__ = [
    "TARGETS",
    "TOYS",
    "Compose",
    "Dequantize",
    "Gaussianize",
    "Identity",
    "ImageData",
    "ImageRows",
    "LabelledImages",
    "Logit",
    "Probit",
    "RowSource",
    "Rows",
    "Standardize",
    "Target",
    "Toy",
    "Transform",
    "Transformed",
    "Whiten",
    "chunks",
    "image_data",
    "labelled_images",
    "mnist",
    "read_idx",
    "target",
    "toy",
]

_HOME = {
    "TARGETS": "targets",
    "TOYS": "toys",
    "Compose": "transforms",
    "Dequantize": "transforms",
    "Gaussianize": "quantiles",
    "Identity": "affine",
    "ImageData": "images",
    "ImageRows": "images",
    "LabelledImages": "images",
    "Logit": "transforms",
    "Probit": "affine",
    "RowSource": "rows",
    "Rows": "rows",
    "Standardize": "transforms",
    "Target": "targets",
    "Toy": "toys",
    "Transform": "transforms",
    "Transformed": "transforms",
    "Whiten": "affine",
    "chunks": "rows",
    "image_data": "images",
    "labelled_images": "images",
    "mnist": "images",
    "read_idx": "idx",
    "target": "targets",
    "toy": "toys",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # A table is looked for and read without torch, which takes a second to import: names are found when first used.
    if name in _HOME:
        return getattr(importlib.import_module(f"unnorm.data.{_HOME[name]}"), name)
    if name in _HOME.values():
        return importlib.import_module(f"unnorm.data.{name}")
    raise AttributeError(f"module 'unnorm.data' has no attribute '{name}'")
