"""Markov chains under one `step` contract."""

from unnorm.samplers.base import Sampler

__all__ = ["Sampler"]
