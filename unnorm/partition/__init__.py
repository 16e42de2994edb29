"""The log partition function, always with its error."""

from unnorm.partition.annealed import Annealing, ais, reverse_ais
from unnorm.partition.bridge import Bracket, bennett, bracket
from unnorm.partition.climb import Climb, Rung, mass_not_ruled_out
from unnorm.partition.grid import Grid, bounding_box, fitting_box, grid
from unnorm.partition.importance import importance, log_weights
from unnorm.partition.ladder import ladder
from unnorm.partition.path import Schedule, geometric, plan

__all__ = [
    "Annealing",
    "Bracket",
    "Climb",
    "Grid",
    "Rung",
    "Schedule",
    "ais",
    "bennett",
    "bounding_box",
    "bracket",
    "fitting_box",
    "geometric",
    "grid",
    "importance",
    "ladder",
    "log_weights",
    "mass_not_ruled_out",
    "plan",
    "reverse_ais",
]
