"""Networks that give log p~; any other callable `(n, *event) -> (n,)` works as well, unwrapped."""

from unnorm.models.mlp import MLP
from unnorm.models.quadratic import Quadratic
from unnorm.models.tilted import Tilted

__all__ = ["MLP", "Quadratic", "Tilted"]
