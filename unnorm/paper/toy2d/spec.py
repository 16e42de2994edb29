"""The paper's synthetic study as data: its methods, its tables with its numbers, and three sizes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unnorm.data.toys import TOYS

__all__ = ["DATA", "METHODS", "PAPER_RATES", "SIZES", "STYLES", "TABLES", "Method", "Size", "Table"]

DATA = tuple(TOYS)  # in the order of the paper's columns
STYLES = {"sgd": "SGD-style", "adam": "Adam-style", "own": "its own way"}
PAPER_RATES = (1e-1, 1e-2, 1e-3, 1e-4)


@dataclass(frozen=True)
class Method:
    """One way to learn a density.

    Attributes:
        title: for a person.
        origin: "paper" (in its tables), "sensitivity" (MECO with another gamma or beta), "beyond", or "instead" (what a
            user would pick in place of an energy-based model).
        estimator: by its name in `toy2d.stack.ESTIMATORS`.
        options: of the estimator, other than gamma.
        gamma, beta: MECO's two rates; None is the default.
        normalised: whether steps have the length of the learning rate (NGD).
        n_steps: Langevin steps to choose from; empty where there are none.
        styles: the optimizers it is run with.
        tuned: where there is no learning rate, what is tuned in its place.
    """

    title: str
    origin: str
    estimator: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gamma: float | None = None
    beta: float | None = None
    normalised: bool = False
    n_steps: tuple[int, ...] = ()
    styles: tuple[str, ...] = ("sgd", "adam")
    tuned: str = "lr"


METHODS: Mapping[str, Method] = {
    "nce": Method("NCE", "paper", "nce"),
    "nce-ngd": Method("NCE (NGD)", "paper", "nce", normalised=True),
    "ence-ngd": Method("eNCE (NGD)", "paper", "ence", normalised=True),
    "mcmc": Method("MCMC", "paper", "mcmc", n_steps=(20, 50, 100)),
    "sm": Method("Score matching", "paper", "sm"),
    "cd": Method("Contrastive divergence", "paper", "cd"),
    "meco": Method("MECO", "paper", "meco"),
    "meco-beta-0.8": Method("MECO, beta 0.8", "sensitivity", "meco", beta=0.8, styles=("sgd",)),
    "meco-beta-0.99": Method("MECO, beta 0.99", "sensitivity", "meco", beta=0.99, styles=("sgd",)),
    "meco-gamma-0.01": Method("MECO, gamma 0.01", "sensitivity", "meco", gamma=0.01, styles=("sgd",)),
    "meco-gamma-0.2": Method("MECO, gamma 0.2", "sensitivity", "meco", gamma=0.2, styles=("sgd",)),
    "snl": Method("SNL", "beyond", "snl"),
    "meco-minibatch": Method("MECO, no memory", "beyond", "meco", {"tracker": "minibatch"}),
    "meco-scent": Method("MECO, tracker SCENT", "beyond", "meco", {"tracker": "scent"}),
    "meco-umax": Method("MECO, tracker u-max", "beyond", "meco", {"tracker": "umax"}),
    "meco-bridged": Method("MECO, 4 bridges", "beyond", "telescope", {"bridges": 4}),
    "flow": Method("Neural spline flow (zuko)", "instead", "flow", styles=("own",)),
    "kde": Method("Kernel density (scikit-learn)", "instead", "kde", styles=("own",), tuned="bandwidth"),
    "gmm": Method("Gaussian mixture (scikit-learn)", "instead", "gmm", styles=("own",), tuned="n_components"),
}


def _cells(text: str) -> dict[str, tuple[float, float]]:
    """One row of a table: mean and deviation of each data set."""
    numbers = [float(word) for word in text.split()]
    return dict(zip(DATA, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


@dataclass(frozen=True)
class Table:
    """A table of the paper: what it measures, for which optimizers, and the paper's mean and deviation of each cell."""

    title: str
    metric: str
    style: str
    paper: Mapping[str, Mapping[str, tuple[float, float]]]


TABLES: Mapping[str, Table] = {
    "mmd-sgd": Table(
        "Table 2: MMD, SGD-style",
        "mmd",
        "sgd",
        {
            "nce": _cells("3.253 0.284 0.153 0.095 1.956 0.469 1.223 0.154 5.178 0.341 2.715 0.249"),
            "nce-ngd": _cells("3.445 0.287 0.177 0.102 1.963 0.488 1.270 0.292 5.010 0.349 2.585 0.201"),
            "ence-ngd": _cells("3.328 0.332 0.257 0.144 1.810 0.218 1.183 0.188 4.728 0.399 2.975 0.398"),
            "mcmc": _cells("3.060 0.780 0.150 0.035 1.654 0.217 1.154 0.294 4.722 0.633 2.764 0.670"),
            "sm": _cells("3.268 0.846 0.250 0.076 2.167 0.703 1.302 0.272 4.826 0.153 2.660 0.513"),
            "cd": _cells("3.245 0.426 0.182 0.085 1.987 0.470 1.161 0.410 4.716 0.658 2.623 0.203"),
            "meco": _cells("3.040 0.199 0.132 0.098 1.645 0.251 1.075 0.169 4.673 0.519 2.566 0.274"),
        },
    ),
    "frechet-sgd": Table(
        "Table 3: Frechet distance, SGD-style",
        "frechet",
        "sgd",
        {
            "nce": _cells("0.103 0.038 0.118 0.026 0.178 0.026 0.096 0.018 0.114 0.020 0.181 0.041"),
            "nce-ngd": _cells("0.078 0.024 0.143 0.048 0.169 0.023 0.103 0.024 0.099 0.029 0.171 0.023"),
            "ence-ngd": _cells("0.083 0.040 0.128 0.033 0.112 0.029 0.085 0.045 0.096 0.015 0.212 0.040"),
            "mcmc": _cells("0.072 0.052 0.115 0.038 0.125 0.036 0.075 0.042 0.109 0.042 0.174 0.028"),
            "sm": _cells("0.109 0.044 0.178 0.086 0.166 0.069 0.099 0.026 0.117 0.024 0.178 0.062"),
            "cd": _cells("0.089 0.037 0.142 0.051 0.121 0.029 0.105 0.039 0.110 0.017 0.180 0.025"),
            "meco": _cells("0.061 0.032 0.104 0.025 0.111 0.024 0.065 0.030 0.094 0.131 0.163 0.039"),
        },
    ),
    "mmd-adam": Table(
        "Appendix: MMD, Adam-style",
        "mmd",
        "adam",
        {
            "nce": _cells("3.230 0.460 0.130 0.055 1.710 0.190 1.045 0.208 4.588 0.688 1.510 0.498"),
            "nce-ngd": _cells("2.533 0.716 0.128 0.020 1.807 0.451 0.947 0.265 4.202 0.474 1.576 0.589"),
            "ence-ngd": _cells("2.585 0.841 0.146 0.082 1.690 0.264 0.968 0.342 3.852 0.957 1.604 0.490"),
            "mcmc": _cells("2.342 0.658 0.178 0.105 1.710 0.394 0.937 0.387 3.680 0.916 1.438 0.375"),
            "sm": _cells("2.727 0.579 0.135 0.071 3.130 0.497 1.706 0.309 5.296 0.221 2.874 0.688"),
            "cd": _cells("2.516 0.984 0.173 0.066 1.683 0.904 0.927 0.432 3.904 0.914 1.498 0.368"),
            "meco": _cells("2.488 0.356 0.117 0.086 1.651 0.166 0.886 0.129 3.644 0.490 1.338 0.131"),
        },
    ),
    "frechet-adam": Table(
        "Appendix: Frechet distance, Adam-style",
        "frechet",
        "adam",
        {
            "nce": _cells("0.053 0.030 0.096 0.042 0.156 0.121 0.068 0.028 0.046 0.031 0.159 0.069"),
            "nce-ngd": _cells("0.067 0.315 0.104 0.038 0.167 0.091 0.061 0.030 0.029 0.017 0.171 0.065"),
            "ence-ngd": _cells("0.072 0.053 0.127 0.085 0.102 0.081 0.066 0.046 0.038 0.032 0.205 0.035"),
            "mcmc": _cells("0.047 0.025 0.107 0.073 0.097 0.084 0.049 0.028 0.052 0.021 0.161 0.088"),
            "sm": _cells("0.070 0.024 0.087 0.050 0.231 0.110 0.086 0.034 0.037 0.018 0.190 0.148"),
            "cd": _cells("0.064 0.025 0.092 0.034 0.093 0.034 0.076 0.038 0.062 0.022 0.148 0.029"),
            "meco": _cells("0.040 0.026 0.067 0.030 0.086 0.101 0.040 0.035 0.028 0.037 0.144 0.078"),
        },
    ),
    "beta": Table(
        "Appendix: MMD by beta (gamma 0.1), SGD-style",
        "mmd",
        "sgd",
        {
            "meco-beta-0.8": _cells("3.355 0.781 0.168 0.098 1.889 0.506 1.355 0.164 4.762 0.192 2.784 0.618"),
            "meco": _cells("3.040 0.199 0.132 0.098 1.645 0.251 1.075 0.169 4.673 0.519 2.566 0.274"),
            "meco-beta-0.99": _cells("3.038 0.395 0.150 0.078 1.603 0.258 1.120 0.211 4.816 0.292 2.528 0.371"),
        },
    ),
    "gamma": Table(
        "Appendix: MMD by gamma (beta 0.9), SGD-style",
        "mmd",
        "sgd",
        {
            "meco-gamma-0.01": _cells("2.982 0.304 0.141 0.106 1.730 0.716 1.345 0.198 4.650 0.302 2.595 0.493"),
            "meco": _cells("3.040 0.199 0.132 0.098 1.645 0.251 1.075 0.169 4.673 0.519 2.566 0.274"),
            "meco-gamma-0.2": _cells("3.168 0.360 0.145 0.052 1.718 0.418 1.152 0.109 4.772 0.651 2.648 0.601"),
        },
    ),
}


@dataclass(frozen=True)
class Size:
    """How much of the study is run.

    Attributes:
        seeds: data sets, starts and random numbers of each cell.
        rates: learning rates to choose from, by style.
        n_steps: Langevin steps to choose from, as far as a method has them.
        seconds: of training for each run, the same for all methods: who is slower takes fewer steps. On a GPU it is the
            share of a run in the time of all that are trained side by side.
        on_cpu: the seconds where there is no GPU, if these are others.
        batch: data points in a step.
        train, validation, test: rows of each data set.
        points: of model and truth for MMD and Frechet distance.
        cells: of the grid for log Z and KL, on each side; multiples of 6 cut no square of the checkerboard.
        hidden: of the networks.
        matmul: precision of matrix products in training, as torch.set_float32_matmul_precision has it.
        first_seed: of the seeds.
        bandwidths, components: for kernel density and Gaussian mixture to choose from.
    """

    seeds: int
    rates: Mapping[str, tuple[float, ...]] = field(hash=False)
    n_steps: tuple[int, ...]
    seconds: float
    on_cpu: float | None = None
    batch: int = 500
    train: int = 20_000
    validation: int = 5_000
    test: int = 10_000
    points: int = 10_000
    cells: int = 360
    hidden: tuple[int, ...] = (300, 300, 300)
    matmul: str = "highest"
    first_seed: int = 0
    bandwidths: tuple[float, ...] = (0.03, 0.05, 0.08, 0.12, 0.18, 0.27, 0.4)
    components: tuple[int, ...] = (8, 16, 32, 64, 128)


SIZES: Mapping[str, Size] = {
    "smoke": Size(
        seeds=2,
        rates={"sgd": (1e-1,), "adam": (1e-2,), "own": (1e-2,)},
        n_steps=(20,),
        seconds=0.02,
        batch=32,
        train=500,
        validation=200,
        test=200,
        points=200,
        cells=96,
        hidden=(32, 32),
        bandwidths=(0.1, 0.3),
        components=(8, 16),
    ),
    "laptop": Size(
        seeds=3,
        rates={"sgd": (1e-1, 1e-2), "adam": (1e-2, 1e-3), "own": (1e-2, 1e-3)},
        n_steps=(20,),
        seconds=0.6,
        batch=128,
        train=5_000,
        validation=1_000,
        test=4_000,
        points=4_000,
        cells=120,
        components=(8, 16, 32, 64),
    ),
    "full": Size(
        seeds=5,
        rates=dict.fromkeys(("sgd", "adam", "own"), PAPER_RATES),
        n_steps=(20, 50, 100),
        seconds=0.08,
        on_cpu=60.0,
        matmul="high",
    ),
}
