"""One list of implementations for each contract; `test_laws.py` holds every one of them to the same laws."""

from collections.abc import Callable

import torch
from torch import distributions as td

from unnorm.estimators import (
    EMA,
    ENCE,
    MECO,
    NCE,
    SCENT,
    SNL,
    ConditionalNCE,
    ContrastiveDivergence,
    DenoisingScoreMatching,
    Estimator,
    MCMCLikelihood,
    Minibatch,
    PersistentCD,
    ScoreMatching,
    SlicedScoreMatching,
    UMax,
)
from unnorm.models import MLP, Quadratic, Tilted
from unnorm.noise import Gaussian, Noise, from_distribution


def _fitted(covariance: str, **options) -> Gaussian:
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mix = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.3], [0.0, 0.0, 0.5]], dtype=torch.float64)
    return Gaussian.fit(x @ mix + 1, covariance, **options)


def _transformed() -> td.Distribution:
    base = td.Normal(torch.zeros(2), torch.ones(2))
    return td.TransformedDistribution(base, [td.AffineTransform(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 2.0]))])


NOISES: dict[str, Callable[[], Noise]] = {
    "gaussian full": lambda: _fitted("full"),
    "gaussian diagonal": lambda: _fitted("diagonal"),
    "gaussian low-rank": lambda: _fitted("low-rank", rank=1),
    "laplace": lambda: from_distribution(td.Laplace(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.5]))),
    "multivariate normal": lambda: from_distribution(
        td.MultivariateNormal(torch.ones(2), torch.tensor([[2.0, 0.6], [0.6, 1.0]]))
    ),
    "student t": lambda: from_distribution(td.StudentT(torch.tensor([5.0]), torch.zeros(1), torch.ones(1))),
    "mixture": lambda: from_distribution(
        td.MixtureSameFamily(
            td.Categorical(torch.tensor([0.3, 0.7])),
            td.Independent(td.Normal(torch.tensor([[-2.0, 0.0], [2.0, 1.0]]), torch.ones(2, 2)), 1),
        )
    ),
    "uniform": lambda: from_distribution(td.Uniform(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0]))),
    "gamma": lambda: from_distribution(td.Gamma(torch.tensor([2.0]), torch.tensor([1.0]))),
    "scalar": lambda: from_distribution(td.Normal(0.0, 1.0)),
    "mixture by logits": lambda: from_distribution(
        td.MixtureSameFamily(td.Categorical(logits=torch.tensor([0.3, 0.7])), td.Normal(torch.zeros(2), torch.ones(2)))
    ),
    "transformed": lambda: from_distribution(_transformed()),
}

ESTIMATORS: dict[str, Callable[[Noise], Estimator]] = {
    "meco ema": lambda q: MECO(q),
    "meco minibatch": lambda q: MECO(q, tracker=Minibatch()),
    "meco scent": lambda q: MECO(q, tracker=SCENT()),
    "meco umax": lambda q: MECO(q, tracker=UMax()),
    "meco more noise": lambda q: MECO(q, n_noise=37, tracker=EMA(0.5)),
    "nce": lambda q: NCE(q),
    "nce more noise": lambda q: NCE(q, nu=2.5),
    "ence": lambda q: ENCE(q, nu=2),
    "snl": lambda q: SNL(q),
    "mcmc": lambda q: MCMCLikelihood(q, n_steps=3, buffer_size=50, restart=0.2),
    "mcmc unadjusted": lambda q: MCMCLikelihood(q, n_steps=3, buffer_size=50, step_size=0.01, noise_scale=0.05),
    "cd": lambda q: ContrastiveDivergence(q, n_steps=2),
    "cd one step, no judge": lambda q: ContrastiveDivergence(n_steps=1, step_size=0.05, regulariser=0.01),
    "pcd": lambda q: PersistentCD(q, n_chains=30, n_steps=2, bounds=(-6.0, 6.0)),
    "sm": lambda q: ScoreMatching(),
    "ssm": lambda q: SlicedScoreMatching(n_slices=2),
    "dsm": lambda q: DenoisingScoreMatching(sigma=0.3),
    "cnce": lambda q: ConditionalNCE(sigma=0.7, kappa=3),
}

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": lambda: MLP(3, hidden=(16, 16), generator=torch.Generator().manual_seed(2)),
    "quadratic": lambda: Quadratic(3),
    "tilted": lambda: Tilted(_fitted("full"), MLP(3, hidden=(16,), generator=torch.Generator().manual_seed(2))),
}
