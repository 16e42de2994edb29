"""Where points come from: toy densities, tables in files, and the transforms that carry their Jacobian."""

from unnorm.data.rows import Rows, RowSource, chunks
from unnorm.data.toy import TOYS, Toy, toy
from unnorm.data.transforms import Standardize, Transform, Transformed

__all__ = ["TOYS", "RowSource", "Rows", "Standardize", "Toy", "Transform", "Transformed", "chunks", "toy"]
