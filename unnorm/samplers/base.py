"""The sampler contract."""

from typing import Protocol, TypeVar

import torch

from unnorm.types import LogDensity

__all__ = ["Sampler"]

State = TypeVar("State")
Info = TypeVar("Info", covariant=True)


class Sampler(Protocol[State, Info]):
    """One transition of a Markov chain: State is what the next step needs, Info what only a person needs.

    A random walk, accepted by Metropolis' rule, in four lines:

    >>> class RandomWalk:
    ...     def step(self, state, log_density, *, generator=None):
    ...         proposal = state + torch.randn(state.shape, generator=generator)
    ...         accept = torch.rand(len(state), generator=generator).log() < log_density(proposal) - log_density(state)
    ...         return torch.where(accept[:, None], proposal, state), accept
    >>> sampler: Sampler = RandomWalk()
    >>> state, info = sampler.step(torch.zeros(3, 1), lambda x: -x.square().sum(-1), generator=torch.Generator())
    >>> state.shape, info.shape
    (torch.Size([3, 1]), torch.Size([3]))
    """

    def step(
        self, state: State, log_density: LogDensity, *, generator: torch.Generator | None = None
    ) -> tuple[State, Info]: ...
