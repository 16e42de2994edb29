"""An exact Gaussian written as an unnormalized model: the oracle of many tests."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unnorm.types import event_shape

__all__ = ["Quadratic"]


class Quadratic(nn.Module):
    """log p~(x) = h.x - x.P x / 2, with P = L L^T positive definite; its log Z is known.

    With `learn_precision=False` P stays the identity and h is the mean: the model of the paper's case
    study, p_0(x) = exp(theta x - x^2 / 2).

    Args:
        event: the shape of one example; it is flattened.
        learn_precision: whether L is trained.

    >>> model = Quadratic(3)
    >>> torch.isclose(model.log_z, torch.tensor(1.5 * math.log(2 * math.pi)))
    tensor(True)
    """

    def __init__(self, event: int | tuple[int, ...], learn_precision: bool = True):
        super().__init__()
        self.event, self.learn_precision = event_shape(event), learn_precision
        size = math.prod(self.event)
        self.linear = nn.Parameter(torch.zeros(size))
        self.log_diagonal = nn.Parameter(torch.zeros(size), requires_grad=learn_precision)
        self.lower = nn.Parameter(torch.zeros(size, size), requires_grad=learn_precision)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event), "learn_precision": self.learn_precision}

    @property
    def precision_tril(self) -> Tensor:
        """L, the Cholesky factor of the precision."""
        return self.lower.tril(-1) + self.log_diagonal.exp().diag()

    @property
    def precision(self) -> Tensor:
        return self.precision_tril @ self.precision_tril.mT

    @property
    def mean(self) -> Tensor:
        return torch.cholesky_solve(self.linear[:, None], self.precision_tril).squeeze(-1)

    @property
    def log_z(self) -> Tensor:
        """The exact log of the integral of p~."""
        white = torch.linalg.solve_triangular(self.precision_tril, self.linear[:, None], upper=False)
        return 0.5 * white.square().sum() - self.log_diagonal.sum() + 0.5 * len(self.linear) * math.log(2 * math.pi)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return flat @ self.linear - 0.5 * (flat @ self.precision_tril).square().sum(-1)
