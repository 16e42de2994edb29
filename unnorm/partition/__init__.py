"""The log partition function, always with its error."""

from unnorm.partition.grid import Grid, bounding_box, grid
from unnorm.partition.importance import importance, log_weights

__all__ = ["Grid", "bounding_box", "grid", "importance", "log_weights"]
