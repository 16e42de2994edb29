"""Markov chains under one `step` contract."""

from unnorm.samplers.base import Info, Position, Sampler, log_density_and_score
from unnorm.samplers.buffer import ReplayBuffer
from unnorm.samplers.hmc import HMC, leapfrog
from unnorm.samplers.langevin import MALA, ULA
from unnorm.samplers.run import Chain, run

__all__ = [
    "HMC",
    "MALA",
    "ULA",
    "Chain",
    "Info",
    "Position",
    "ReplayBuffer",
    "Sampler",
    "leapfrog",
    "log_density_and_score",
    "run",
]
