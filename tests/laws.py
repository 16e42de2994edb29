"""One list of implementations for each contract; `test_laws.py` holds every one of them to the same laws."""

import copy
import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import distributions as td

from unnorm.data import Logit, Standardize
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
    MaximumLikelihood,
    MCMCLikelihood,
    Minibatch,
    PersistentCD,
    ScoreMatching,
    SlicedScoreMatching,
    StepwiseTelescope,
    Telescope,
    UMax,
)
from unnorm.models import (
    MLP,
    Averaged,
    Bridged,
    Lookback,
    Quadratic,
    ResNet,
    Seen,
    Stepwise,
    Tilted,
    Views,
    WideResNet,
)
from unnorm.noise import (
    Copula,
    Flow,
    Gaussian,
    GaussianMixture,
    ImageFlow,
    Mixture,
    Noise,
    Pushed,
    Smoothed,
    SplineFlow,
    Uniform,
    from_distribution,
)


def _fitted(covariance: str, **options) -> Gaussian:
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mix = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.3], [0.0, 0.0, 0.5]], dtype=torch.float64)
    return Gaussian.fit(x @ mix + 1, covariance, **options)


def _transformed() -> td.Distribution:
    base = td.Normal(torch.zeros(2), torch.ones(2))
    return td.TransformedDistribution(base, [td.AffineTransform(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 2.0]))])


def _crooked(n: int = 400) -> torch.Tensor:
    """Rows of a skewed coordinate and one that depends on it."""
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.stack([x[:, 0].exp(), x[:, 1] + 0.5 * x[:, 0].square()], 1)


@functools.cache
def _trained_flow() -> SplineFlow:
    return SplineFlow.fit(_crooked(), steps=60, transforms=2, hidden=(16,), bins=4)


@functools.cache
def _image_flow(couplings: tuple[int, ...] | str) -> ImageFlow:
    """Of images of four pixels."""
    x = torch.sigmoid(_crooked().repeat_interleave(2, 1) * torch.tensor([1.0, -0.5, 0.3, 0.8])).view(-1, 1, 2, 2)
    return ImageFlow.fit(x, levels=8, steps=30, couplings=couplings, width=8, blocks=1, bins=4, progress=False)


def _zuko_flow() -> Flow:
    import zuko

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Flow(zuko.flows.NSF(2, transforms=1, hidden_features=(8,)), event=2)


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
    "gaussian mixture": lambda: GaussianMixture.fit(_crooked(), 3, "full"),
    "gaussian mixture diagonal": lambda: GaussianMixture.fit(_crooked(), 3, "diagonal"),
    "mixture of noises": lambda: Mixture([Gaussian.fit(_crooked()), Uniform.fit(_crooked())], [3.0, 1.0]),
    "smoothed": lambda: Smoothed.fit(_crooked(150)),
    "pushed": lambda: Pushed(from_distribution(td.Laplace(torch.zeros(2), torch.ones(2))), Standardize.fit(_crooked())),
    "copula": lambda: Copula.fit(_crooked()),
    "copula of integers": lambda: Copula.fit(_crooked().round()),
    "box": lambda: Uniform.fit(_crooked()),
    "spline flow": lambda: copy.deepcopy(_trained_flow()),
    "zuko flow": _zuko_flow,
    "image flow": lambda: copy.deepcopy(_image_flow((2,))),
    "image flow by pixels": lambda: copy.deepcopy(_image_flow("pixels")),
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
    "likelihood": lambda q: MaximumLikelihood(),
}

BRIDGES = 3

# These want a model with a head for each bridge.
TELESCOPES: dict[str, Callable[[Noise], Estimator]] = {
    "telescope": lambda q: Telescope(q, BRIDGES),
    "telescope uncentred": lambda q: Telescope(q, [0.0, 0.3, 0.7, 1.0], centred=False, gamma=0.5),
    "telescope more noise": lambda q: Telescope(q, BRIDGES, tracker=UMax(), n_noise=50),
    "telescope nce": lambda q: Telescope(q, BRIDGES, NCE, nu=2.5),
    "telescope ence": lambda q: Telescope(q, BRIDGES, ENCE),
    "telescope snl": lambda q: Telescope(q, BRIDGES, SNL, n_noise=37),
}

# And these one with a head for each coordinate.
STEPWISE: dict[str, Callable[[Noise], Estimator]] = {
    "stepwise": lambda q: StepwiseTelescope(q),
    "stepwise one draw": lambda q: StepwiseTelescope(q, draws=1, tracker=UMax()),
    "stepwise nce": lambda q: StepwiseTelescope(q, NCE, draws=3),
    "stepwise ence": lambda q: StepwiseTelescope(q, ENCE, draws=2),
    "stepwise snl": lambda q: StepwiseTelescope(q, SNL),
}


Net = TypeVar("Net", ResNet, Lookback)


def _mlp(outputs: int | None = None) -> MLP:
    return MLP(3, hidden=(16,), outputs=outputs, generator=torch.Generator().manual_seed(2))


def _resnet(outputs: int | None = None) -> ResNet:
    """Of images of one row of three pixels."""
    generator = torch.Generator().manual_seed(2)
    return _left(ResNet((1, 1, 3), widths=(4,), blocks=1, features=8, outputs=outputs, generator=generator), generator)


def _views() -> Views:
    generator = torch.Generator().manual_seed(2)
    return Views(
        Logit(1e-3), ("shade", "ends"), 8, _left(ResNet((4, 1, 3), (4,), 1, 8, generator=generator), generator)
    )


def _wide() -> WideResNet:
    generator = torch.Generator().manual_seed(2)
    return _left(WideResNet((1, 1, 3), depth=10, width=1, generator=generator), generator)


def _lookback() -> Lookback:
    generator = torch.Generator().manual_seed(2)
    return _left(Lookback((1, 1, 3), width=4, blocks=2, features=8, generator=generator), generator)


def _left(net: Net, generator: torch.Generator) -> Net:
    """Where it begins the blocks are the identity and the last layer is zero: half of the gradient is zero there."""
    for name, parameter in net.named_parameters():
        if name.endswith(("second.weight", "last.weight")):
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return net


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": lambda: MLP(3, hidden=(16, 16), generator=torch.Generator().manual_seed(2)),
    "quadratic": lambda: Quadratic(3),
    "tilted": lambda: Tilted(_fitted("full"), _mlp()),
    "bridged": lambda: Bridged(_fitted("full"), _mlp(BRIDGES)),
    "averaged": lambda: Averaged([_mlp(), MLP(3, hidden=(16, 16), generator=torch.Generator().manual_seed(3))]),
    "seen": lambda: Seen(Standardize.fit(1 + 2 * torch.arange(12.0).view(4, 3)), _mlp()),
}

# These see images only.
IMAGE_MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "resnet": _resnet,
    "wide resnet": _wide,
    "views": _views,
    "bridged resnet": lambda: Bridged(_fitted("full"), _resnet(BRIDGES)),
    "lookback": _lookback,
    "stepwise": lambda: Stepwise(Gaussian((1, 1, 3), "diagonal"), _lookback()),
}

# Every estimator with every model that it can train.
PAIRS: dict[str, tuple[Callable[[Noise], Estimator], Callable[[], torch.nn.Module]]] = {
    f"{name}, {model}": (makers[name], models[model])
    for makers, models in (
        (ESTIMATORS, MODELS),
        (ESTIMATORS, {"resnet": IMAGE_MODELS["resnet"]}),
        (TELESCOPES, {"bridged": MODELS["bridged"], "bridged resnet": IMAGE_MODELS["bridged resnet"]}),
        (STEPWISE, {"stepwise": IMAGE_MODELS["stepwise"]}),
    )
    for name in makers
    for model in models
}
