"""What the synthetic study compares with: a flow, whose density is normalised already."""

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.paper.toy2d.problem import START, Problem

__all__ = ["SplineDensity"]


class SplineDensity(nn.Module):
    """zuko's neural spline flow (Durkan et al. 2019) of the standardised rows: a density that is normalised already."""

    loc: Tensor
    scale: Tensor

    def __init__(self, problem: Problem):
        super().__init__()
        try:
            import zuko
        except ImportError as missing:
            raise InvalidValue("The flow of the study needs the package zuko: pip install 'unnorm[flow]'.") from missing
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(problem.number(START))
            self.flow = zuko.flows.NSF(2, transforms=3, hidden_features=(128, 128))
        self.register_buffer("loc", problem.train.mean(0))
        self.register_buffer("scale", problem.train.std(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.flow().log_prob((x - self.loc) / self.scale) - self.scale.log().sum()

    @torch.no_grad()
    def sample(self, n: int, seed: int) -> Tensor:
        """Draws of zuko's own, which knows torch's global generator only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.loc + self.scale * self.flow().sample((n,))
