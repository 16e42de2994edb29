"""The study of MNIST as data: its methods, their noises, the numbers published for them, and sizes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unnorm.estimators import ENCE, MECO, NCE, Contrastive

__all__ = ["METHODS", "NOISES", "OTHERS", "ROWS", "SIZES", "Method", "Row", "Size", "rows"]


@dataclass(frozen=True)
class Method:
    """One way to learn a density of images.

    Attributes:
        title: for a person.
        estimator: what compares data with noise.
        optimizer: by its name in `optim.OPTIMIZERS`.
        way: from the noise to the data: "direct", over "waymarks" in between, or by "pixels", one after the other.
        noises: it is run with.
        lr: of the optimizer; None with bridges, where the size says it.
        beta: of the optimizer.
        paper: the paper's bits per dimension and their deviation; its noise is the third of the paper's three.
        published: bits per dimension of TRE (Rhodes, Xu, Gutmann 2020) by noise, as its paper has them.
    """

    title: str
    estimator: type[Contrastive]
    optimizer: str
    way: str
    noises: tuple[str, ...]
    lr: float | None = None
    beta: float | None = None
    paper: tuple[float, float] | None = None
    published: Mapping[str, float] = field(default_factory=dict)

    @property
    def bridged(self) -> bool:
        """Whether it has a noise's own coordinates, and several ratios to learn."""
        return self.way != "direct"


NOISES = {
    "empirical": "the training images themselves",
    "gaussian": "Gaussian in logit space",
    "smoothed": "training images + Gaussian",
    "copula": "Gaussian copula",
    "flow": "flow",
}
PAPERS = ("empirical", "gaussian", "smoothed")
BRIDGED = ("gaussian", "copula", "flow")
METHODS: Mapping[str, Method] = {
    "nce": Method("NCE", NCE, "adam", "direct", PAPERS, 1e-4, 0.1, (1.457, 0.003)),
    "nce-ngd": Method("NCE (NGD)", NCE, "ngd", "direct", PAPERS, 1e-2, None, (1.618, 0.010)),
    "ence-ngd": Method("eNCE (NGD)", ENCE, "ngd", "direct", PAPERS, 1e-2, None, (1.600, 0.044)),
    "meco": Method("MECO", MECO, "adam", "direct", PAPERS, 1e-4, 0.9, (1.394, 0.007)),
    "bridges-nce": Method(
        "NCE with bridges (TRE)",
        NCE,
        "adam",
        "waymarks",
        BRIDGED,
        beta=0.1,
        published={"gaussian": 1.39, "copula": 1.24, "flow": 1.09},
    ),
    "bridges-meco": Method("MECO with bridges", MECO, "adam", "waymarks", BRIDGED, beta=0.1),
    "pixels-nce": Method("NCE, pixel by pixel", NCE, "adam", "pixels", BRIDGED, beta=0.1),
    "pixels-meco": Method("MECO, pixel by pixel", MECO, "adam", "pixels", BRIDGED, beta=0.1),
}
OTHERS = {"MCMC-OT": (1.441, 0.012), "CF-EBM": (1.864, 0.004), "CoopNets": (1.591, 0.022)}  # in the paper's table only


class Row(NamedTuple):
    """A method with a noise."""

    method: str
    noise: str

    @property
    def title(self) -> str:
        """
        >>> Row("meco", "smoothed").title
        'MECO, training images + Gaussian'
        """
        return f"{METHODS[self.method].title}, {NOISES[self.noise]}"

    @property
    def name(self) -> str:
        return f"{self.method}-{self.noise}"


ROWS = tuple(Row(name, noise) for name, method in METHODS.items() for noise in method.noises)


def rows(methods: tuple[str, ...] = (), noises: tuple[str, ...] = ()) -> list[Row]:
    """Those of some methods and noises; all where there is nothing to choose by."""
    return [row for row in ROWS if (not methods or row.method in methods) and (not noises or row.noise in noises)]


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes:
        data: the set of images.
        seconds: of training, the same for every run.
        seeds: of every row.
        net: of the `ResNet`.
        waymark_lr, gain: of rows that go over waymarks, and of their heads (`ResNet`).
        pixel_lr: of rows that go pixel by pixel, by noise: far from it weights are large, and a rate must be small.
        lookback: of the `Lookback`, of rows that go pixel by pixel.
        batch: images in a step; of bridges, at each waymark.
        few: images in a step that goes pixel by pixel.
        draws: of the noise for each of these images, for each pixel.
        nodes: of the quadrature: the last number is claimed, those before show how it converges.
        shift: pixels by which training images are moved at most.
        n_noise: draws of the noise in a step without bridges.
        trial: steps of a trial with even bridges, which says where they belong, and of each further one with bridges
            where the last has put them.
        rounds: trials in all: what is near the data is seen only when there are bridges near enough.
        even: bridges of the first trial.
        wanted: nats between neighbours.
        betas: temperatures of the annealed chains: the last number is claimed, those before show how it converges.
        chains: in each direction.
        pilot: chains that find the temperatures.
        judged: validation images that choose among the averages of the weights.
        settle: transitions of the model that validation images make before the journey back, and samples at the end.
        stages: of the pilot at most, beyond which a model is given up as diverged.
        test: images of the test set; all when None.
        precision: of training on a CPU; on a GPU it is bf16.
        flow: of `ImageFlow.fit`.
        classifier: steps of the network that judges samples.
    """

    data: str
    seconds: float
    seeds: int
    net: Mapping[str, Any]
    lookback: Mapping[str, Any]
    batch: int
    few: int
    draws: int
    n_noise: int
    trial: int
    rounds: int
    even: int
    wanted: float
    betas: tuple[int, ...]
    nodes: tuple[int, ...]
    chains: int
    pilot: int
    settle: int
    stages: int
    judged: int
    flow: Mapping[str, Any]
    classifier: int
    shift: int = 0
    test: int | None = None
    precision: str = "32"
    waymark_lr: float = 1e-3
    pixel_lr: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(BRIDGED, 3e-3))
    gain: float = 1.0
    first_seed: int = 0


SIZES: Mapping[str, Size] = {
    "smoke": Size(
        data="digits",
        seconds=0.3,
        seeds=1,
        net={"widths": (8, 8), "blocks": 1, "features": 16},
        lookback={"width": 8, "blocks": 1, "features": 8},
        batch=32,
        few=8,
        draws=2,
        n_noise=32,
        trial=20,
        rounds=2,
        even=4,
        wanted=0.5,
        betas=(8, 16),
        nodes=(2, 4),
        chains=16,
        pilot=16,
        settle=2,
        stages=40,
        judged=100,
        flow={"steps": 20, "couplings": "pixels", "width": 8, "blocks": 1, "features": 8, "bins": 4},
        classifier=60,
        test=100,
    ),
    "laptop": Size(
        data="digits",
        seconds=10.0,
        seeds=1,
        net={"widths": (16, 32), "blocks": 2, "features": 64},
        lookback={"width": 32, "blocks": 3, "features": 32},
        batch=64,
        few=32,
        draws=8,
        n_noise=256,
        trial=150,
        rounds=2,
        even=8,
        wanted=0.3,
        betas=(30, 60),
        nodes=(3, 6),
        chains=64,
        pilot=128,
        settle=20,
        stages=120,
        judged=149,
        flow={"steps": 1500, "couplings": "pixels", "width": 32, "blocks": 3, "bins": 8, "batch": 64, "seconds": 60.0},
        classifier=600,
    ),
    "desktop": Size(
        data="mnist",
        seconds=60.0,
        seeds=1,
        net={"widths": (16, 32, 32), "blocks": 1, "features": 64},
        lookback={"width": 48, "blocks": 6, "features": 32},
        batch=32,
        few=32,
        draws=2,
        n_noise=128,
        trial=100,
        rounds=1,
        even=12,
        wanted=1.0,
        betas=(15, 30),
        nodes=(2, 3, 6),
        chains=100,
        pilot=48,
        settle=10,
        stages=100,
        judged=200,
        flow={"steps": 20_000, "seconds": 240.0, "couplings": "pixels", "batch": 32, "lr": 3e-3},
        classifier=1200,
        precision="bf16",
        pixel_lr={"gaussian": 3e-3, "copula": 6e-3, "flow": 6e-3},
    ),
    "full": Size(
        data="mnist",
        seconds=120.0,
        seeds=3,
        net={"widths": (64, 128, 128, 128), "blocks": 2, "features": 256},
        lookback={"width": 128, "blocks": 10, "features": 64},
        batch=96,
        few=64,
        draws=8,
        n_noise=1536,
        trial=800,
        rounds=2,
        even=24,
        wanted=0.4,
        betas=(75, 150, 300),
        nodes=(3, 6, 12),
        chains=128,
        pilot=256,
        settle=20,
        stages=150,
        judged=1000,
        flow={"steps": 20_000, "seconds": 210.0, "couplings": "pixels", "width": 128, "blocks": 10, "batch": 64},
        classifier=2000,
        waymark_lr=1e-4,
        gain=16.0,
    ),
}
