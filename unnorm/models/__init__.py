"""Networks that give log p~; any other callable `(n, *event) -> (n,)` works as well, unwrapped."""

from unnorm.models.averaged import Averaged
from unnorm.models.lookback import Lookback
from unnorm.models.mlp import MLP
from unnorm.models.quadratic import Quadratic
from unnorm.models.resnet import ResNet, WideResNet
from unnorm.models.seen import Seen, Views
from unnorm.models.stepwise import Stepwise
from unnorm.models.tilted import Bridged, Tilted

__all__ = [
    "MLP",
    "Averaged",
    "Bridged",
    "Lookback",
    "Quadratic",
    "ResNet",
    "Seen",
    "Stepwise",
    "Tilted",
    "Views",
    "WideResNet",
]
