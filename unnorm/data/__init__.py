"""Where points come from: toy densities, tables, images, and the transforms that carry their Jacobian."""

from unnorm.data.affine import Identity, Probit, Whiten
from unnorm.data.idx import read_idx
from unnorm.data.images import ImageData, ImageRows, LabelledImages, image_data, labelled_images, mnist
from unnorm.data.quantiles import Gaussianize
from unnorm.data.rows import Rows, RowSource, chunks
from unnorm.data.targets import TARGETS, Target, target
from unnorm.data.toy import TOYS, Toy, toy
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
