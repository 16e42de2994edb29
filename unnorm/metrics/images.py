"""Frechet Inception Distance and Inception Score, by torchmetrics, with a feature network of the user's.

Nothing is downloaded: the usual Inception weights are for the user to fetch and to wrap in a module. Numbers of
different networks cannot be compared.
"""

import importlib
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unnorm.data.rows import RowSource, chunks
from unnorm.errors import InvalidValue
from unnorm.metrics.discrepancy import compare
from unnorm.metrics.floor import Discrepancy, noise_floor

__all__ = ["InceptionScore", "fid", "inception_score"]


class InceptionScore(NamedTuple):
    """The Inception Score of samples, next to the data's.

    Attributes:
        value: of the samples.
        reference: of the data; no fewer than the samples, where there are, else the score is biased downward.
        floor: root mean square difference between the scores of two disjoint draws of the data.
        n: how many samples, and how many data.
        floor_n: how many images the two draws behind the floor had.
    """

    value: float
    reference: float
    floor: float
    n: tuple[int, int]
    floor_n: tuple[int, int]


def fid(
    samples: RowSource,
    data: RowSource,
    features: nn.Module,
    *,
    again: RowSource | None = None,
    splits: int = 5,
    chunk: int = 256,
    generator: torch.Generator | None = None,
) -> Discrepancy:
    """Frechet Inception Distance, with its noise floor (see `compare`).

    Args:
        samples: (n, channels, height, width), in the units that `features` reads.
        data: images of the same shape.
        features: maps images to (n, k); used in eval mode.
        again: more independent data, for the floor only.
        splits: how many random divisions of the data the floor averages.
        chunk: images at a time.
        generator: draws the divisions.
    """
    module = _torchmetrics("fid")
    seen, true = (_features(images, features, chunk) for images in (samples, data))
    more = None if again is None else _features(again, features, chunk)

    def distance(x: Tensor, y: Tensor) -> float:
        identity = nn.Identity()
        identity.num_features = x.shape[1]  # type: ignore[assignment]  # else torchmetrics tries an image of its own
        metric = module.FrechetInceptionDistance(feature=identity).to(x.device)
        metric.update(x, real=False)
        metric.update(y, real=True)
        return float(metric.compute())

    return compare(seen, true, distance, again=more, splits=splits, generator=generator)._replace(metric="fid")


def inception_score(
    samples: RowSource,
    data: RowSource,
    features: nn.Module,
    *,
    parts: int = 10,
    splits: int = 5,
    chunk: int = 256,
    generator: torch.Generator | None = None,
) -> InceptionScore:
    """Inception Score: exp of the mean KL from p(class | image) to p(class), the mean over `parts` of the images.

    Args:
        samples: (n, channels, height, width), in the units that `features` reads.
        data: images of the same shape, for the reference and the floor.
        features: maps images to the logits of classes, (n, k); used in eval mode.
        parts: the score is computed on so many parts and averaged; 10 is usual.
        splits: how many random divisions of the data the floor averages.
        chunk: images at a time.
        generator: draws parts and divisions, on the CPU.
    """
    module = _torchmetrics("inception")
    seen, true = (_features(images, features, chunk) for images in (samples, data))
    if not 2 <= parts <= min(len(seen), len(true) // 2):
        raise InvalidValue(
            f"The 'parts' of inception_score must be at least 2, and at most the samples or half the data. Got {parts}."
        )

    def score(logits: Tensor) -> float:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.filterwarnings("ignore", message=".*will save all extracted features")
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))  # torchmetrics takes no generator
            metric = module.InceptionScore(feature=nn.Identity(), splits=parts).to(logits.device)
            metric.update(logits)
            return float(metric.compute()[0])

    n = len(seen), len(true)
    floor = noise_floor(lambda x, y: score(x) - score(y), true, n, splits=splits, generator=generator)
    return InceptionScore(score(seen), score(true), floor.rms, n, floor.n)


def _torchmetrics(module: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.image.{module}")
    except ImportError:
        raise InvalidValue("Metrics of images need torchmetrics: install unnorm[images].") from None


@torch.no_grad()
def _features(images: RowSource, network: nn.Module, chunk: int) -> Tensor:
    """The features of all images in float64, found once; the network is left in the mode it was in."""
    if not isinstance(network, nn.Module):
        raise InvalidValue(
            "The 'features' must be a network (nn.Module): a name or a layer's number would download weights. "
            f"Got {network!r}."
        )
    training = network.training
    network.eval()
    try:
        found = torch.cat([network(part).double() for part in chunks(images, chunk)])
    finally:
        network.train(training)
    if found.ndim != 2:
        raise InvalidValue(f"The 'features' must map images to shape (n, k). Got {tuple(found.shape)}.")
    return found
