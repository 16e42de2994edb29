"""Densities of images: coordinates where a noise is round, a residual network with a head for each bridge, log Z."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unnorm.archive import read_modules, write_modules
from unnorm.data.affine import Identity
from unnorm.data.images import ImageData, ImageRows
from unnorm.data.transforms import Compose, Dequantize, Logit, Standardize, Transform
from unnorm.density import Density
from unnorm.device import Machine, fabric_for
from unnorm.errors import InvalidValue
from unnorm.estimators import MECO, Contrastive, Estimator, StepwiseTelescope, Telescope
from unnorm.iterates import VALIDATED
from unnorm.loop import train
from unnorm.models import Bridged, Lookback, ResNet, Seen, Stepwise, Tilted, Views
from unnorm.names import choose, options_of
from unnorm.noise import Autoregression, Copula, Gaussian, ImageFlow, Noise, Pushed
from unnorm.noise.autoregression import SHOWN
from unnorm.noise.image_flow import PIXELS
from unnorm.randomness import stream
from unnorm.training import Training

__all__ = [
    "COORDINATES",
    "PIXELS",
    "Coordinates",
    "bridged",
    "coordinates",
    "fast",
    "fit_images",
    "looking",
    "scalar",
    "stepwise",
]

T = TypeVar("T", bound=Tilted)
PARTS: Mapping[str, type[nn.Module]] = {"transform": Compose, "noise": Noise, "seen": Transform, "pixels": Transform}
FILE = "coordinates.safetensors"
VERSION = 2  # of what the numbers in it mean
ALPHA = 1e-6  # of the logit, as TRE and the flows before it have it
LOGIT_VIEWS, SCORE_VIEWS = ("shade", "ends"), ("shade", "root")
STEP_VIEWS = ("shade", "root", "ends")  # steep ones too: no chain walks there; the first are those of a flow
BRIDGES = 24
TRAINING = Training(steps=10_000, batch=128, lr=5e-4, schedule="cosine", iterate="ema")
STEPS = Training(
    steps=3000, batch=32, lr=2e-3, beta=0.1, schedule="cosine", iterate="best-ema", validate_every=150
)  # of bridges of one pixel each
JUDGED, FEW_JUDGED = (
    1000,
    200,
)  # validation images that choose an iterate; of those that cost a quadrature for each pixel


@dataclass(frozen=True)
class Coordinates:
    """Where the noise of a set of images is a standard normal, or `by_pixels`, and how a network looks at these places.

    Attributes:
        transform: from bytes to there; it begins with `Dequantize`.
        noise: as it is there.
        seen: from what a network is to see to there.
        pixels: from shades in [0, 1] to what a network is to see; `Identity` where that is not made of pixels.
        views: of the shades, besides (`Views`); none where a network of whole images sees the coordinates as they are,
            because the way back to pixels is none, or too long.
    """

    transform: Compose
    noise: Noise
    seen: Transform
    pixels: Transform
    views: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in PARTS:  # nobody trains them further: a flow would remember every image that went through it
            getattr(self, name).requires_grad_(False)

    def to(self, device: torch.device | str) -> "Coordinates":
        return replace(self, **{name: getattr(self, name).to(device) for name in PARTS})

    @property
    def levels(self) -> int:
        """Of a pixel."""
        first = self.transform.transforms[0]
        assert isinstance(first, Dequantize)
        return first.levels

    def by_pixels(self) -> "Coordinates":
        """The same noise where a network sees the pixels, for models that go from one to the next."""
        if isinstance(self.seen, Identity):
            return self
        way = Compose([self.transform.transforms[0], self.pixels])  # type: ignore[list-item]
        return Coordinates(way, Pushed(self.noise, self.seen), Identity(), self.pixels)

    def rows(
        self,
        images: Tensor,
        device: torch.device | str = "cpu",
        seed: int = 0,
        shift: int = 0,
        purpose: str = "training images",
    ) -> ImageRows:
        """Return bytes as rows there, dequantised (and shifted) anew at each reading.

        The numbers for this come from a stream of their own, which `seed` and `purpose` name.
        """
        return ImageRows(images, self.transform, device, stream(seed, purpose, device=device), shift=shift)

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write them to a file, with what they are of."""
        note = {"about": about, "views": self.views, "version": VERSION}
        write_modules(path, {name: getattr(self, name) for name in PARTS}, note)

    @classmethod
    def load(cls, path: Path, about: Mapping[str, Any]) -> "Coordinates | None":
        """What `save` wrote; None where there is nothing, or they are of something else."""
        if not path.exists():
            return None
        parts, note = read_modules(path, PARTS)
        same = (note.get("about"), note.get("version")) == (about, VERSION)
        return cls(**parts, views=tuple(note.get("views", ()))) if same else None


def coordinates(
    data: ImageData,
    kind: str = "copula",
    *,
    fabric: Machine | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Coordinates:
    """Fit a noise to the training images, and go to its own coordinates.

    Args:
        data: the set.
        kind: "gaussian", of full covariance in the space of logits (alpha 1e-6); "copula", Gaussian, of pixels with the
            distribution functions they have; or "flow" (`ImageFlow`).
        fabric: where a flow is trained; the CPU when None.
        generator: draws the places within the bytes' cells, for a flow its weights and batches (the places are then
            drawn anew at each reading, from seed 0); seed 0 when None.
        options: of the flow's `fit`.

    >>> from unnorm.data import image_data
    >>> found = coordinates(image_data("digits"), "gaussian")
    >>> z = found.transform(image_data("digits").test.images)[0]
    >>> z.shape, bool((z.std() - 1).abs() < 0.1)
    (torch.Size([300, 1, 8, 8]), True)
    """
    make = choose("noise for images", kind, COORDINATES)
    generator = generator or stream(0, "coordinates")
    with options_of(f"noise '{kind}' for images"):
        return make(data, fabric, generator, **options)


def _gaussian(data: ImageData, fabric: Machine | None, generator: torch.Generator) -> Coordinates:
    logits = Compose([Dequantize(data.levels), Logit(ALPHA)])
    rows = data.rows("train", logits, generator=generator, dtype=torch.float64)
    fitted = Gaussian.fit(rows)
    whiten, noise = fitted.coordinates()
    some = rows[torch.arange(0, len(rows), max(1, len(rows) // 1000))]
    mean, spread = float(some.mean()), float(some.std())
    seen = Compose([scalar(data.event, mean, spread), whiten])
    pixels = Compose([Logit(ALPHA), scalar(data.event, -mean / spread, 1 / spread)])
    return Coordinates(Compose([Dequantize(data.levels), Logit(ALPHA), whiten]), noise, seen, pixels, LOGIT_VIEWS)


def _copula(data: ImageData, fabric: Machine | None, generator: torch.Generator) -> Coordinates:
    rows = data.rows("train", generator=generator, dtype=torch.float64)
    fitted = Copula.fit(rows[torch.arange(len(rows))], torch.arange(data.levels + 1) / data.levels)
    whiten, noise = fitted.base.coordinates()
    pixels = fitted.transform
    return Coordinates(Compose([Dequantize(data.levels), pixels, whiten]), noise, whiten, pixels, SCORE_VIEWS)


def _flow(data: ImageData, fabric: Machine | None, generator: torch.Generator, **options: Any) -> Coordinates:
    device = fabric.device if fabric is not None else torch.device("cpu")
    own = stream(0, "dequantisation for the flow", device=device)
    train, held_out = (data.rows(part, device=device, generator=own) for part in ("train", "validation"))
    fitted = ImageFlow.fit(train, levels=data.levels, held_out=held_out, fabric=fabric, generator=generator, **options)
    way, noise = fitted.coordinates()
    whole = Compose([Dequantize(data.levels), way])
    if isinstance(fitted.scores, Autoregression):  # no pixel depends on a later one
        return Coordinates(whole, noise, fitted.scores, fitted.marginals)
    return Coordinates(whole, noise, Identity(), Identity())


COORDINATES: Mapping[str, Callable[..., Coordinates]] = {"gaussian": _gaussian, "copula": _copula, "flow": _flow}


def scalar(event: Sequence[int], loc: float, scale: float) -> Standardize:
    """z = loc + scale x, the same for all pixels: convolutions see all places alike.

    >>> scalar((1, 2, 2), 3.0, 2.0)(torch.ones(1, 1, 2, 2))[0].mean()
    tensor(5.)
    """
    found = Standardize(tuple(event))
    found.loc.fill_(-loc / scale)
    found.scale.fill_(1 / scale)
    return found


def bridged(
    where: Coordinates, event: Sequence[int], bridges: int = BRIDGES, *, seed: int = 0, **options: Any
) -> Bridged:
    """The noise, tilted by a residual network with a head for each bridge.

    Args:
        where: the coordinates it lives in.
        event: the shape of one image.
        bridges: how many.
        seed: of the weights.
        options: of `looking`: `net`, and what that takes.
    """
    return Bridged(where.noise, looking(where, event, outputs=bridges, seed=seed, **options))


def looking(
    where: Coordinates,
    event: Sequence[int],
    *,
    seed: int = 0,
    net: type[ResNet] = ResNet,
    **options: Any,
) -> nn.Module:
    """A residual network that sees the images behind coordinates, each pixel in several ways (`Views`).

    Args:
        where: the coordinates.
        event: the shape of one image.
        seed: of the weights.
        net: `ResNet`, or `WideResNet`, for colour images of 32 x 32.
        options: of that.
    """
    channels, *sides = event
    shape = (Views.channels(where.views) * channels, *sides)
    plain = net(shape, generator=stream(seed, "weights"), **options)
    if not where.views:
        return plain
    whole = Views(where.pixels, where.views, where.levels, plain)
    return whole if isinstance(where.seen, Identity) else Seen(where.seen, whole)


def stepwise(where: Coordinates, event: Sequence[int], *, seed: int = 0, **options: Any) -> Stepwise:
    """The noise, tilted one pixel after the other: a normalised density of grey images.

    Args:
        where: the coordinates it lives in: those of `Coordinates.by_pixels`.
        event: the shape of one image, (1, height, width).
        seed: of the weights.
        options: of `Lookback`.
    """
    if not isinstance(where.seen, Identity):
        raise InvalidValue("The 'where' of stepwise must be where the pixels are: Coordinates.by_pixels().")
    of_shades = not isinstance(where.pixels, Identity)
    shades: dict[str, Any] = {"levels": where.levels, "views": STEP_VIEWS} if of_shades else {}
    net = Lookback(event, **shades, generator=stream(seed, "weights"), **options)
    flow = getattr(where.noise, "transform", None)
    if isinstance(flow, Autoregression) and (flow.width, flow.blocks) == (net.width, net.blocks):
        net.trunk.begin_as(flow.trunk, shared=SHOWN)  # what it knows of images is not learnt anew
    return Stepwise(where.noise, net.to(next(where.noise.buffers()).device).look(where.pixels))


def fast(model: T, device: torch.device) -> T:
    """On a GPU: channels last, and the network compiled; elsewhere as it is.

    What was compiled before is forgotten: torch asks whether it fits at each call, and after eight of a kind gives up.
    """
    model = model.to(device)
    if device.type == "cuda":
        torch.compiler.reset()
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.net.compile()
    return model


def _kept(data: ImageData, noise: str, fabric: Machine, folder: Path | str | None, **options: Any) -> Coordinates:
    """The coordinates that are in the folder; fitted, and put there, where it has none."""
    about = {"data": data.name, "noise": noise, **options}
    path = None if folder is None else Path(folder) / FILE
    found = None if path is None else Coordinates.load(path, about)
    if found is None:
        found = coordinates(data, noise, fabric=fabric, **options)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path, about)
    return found


def _judges(data: ImageData, where: Coordinates, device: torch.device, n: int) -> Tensor:
    """Some validation images, dequantised once."""
    rows = where.rows(data.validation.images[:n], device, purpose="validation images")
    return rows[torch.arange(len(rows))]


def fit_images(
    data: ImageData,
    noise: str | Coordinates = "copula",
    training: Training | None = None,
    *,
    bridges: int | str = BRIDGES,
    base: type[Contrastive] = MECO,
    fabric: Machine | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    progress: bool | None = None,
    evaluations: int = 1_000_000,
    **options: Any,
) -> Density:
    """A normalised density of images: bridges from a noise, and log Z by annealed chains from both ends, or pixel by
    pixel, where it is known.

    Args:
        data: the set; the chains back from the data begin at its validation images.
        noise: as of `coordinates`, or coordinates that were found before. Pixel by pixel a "flow" is one that goes so.
        training: how to train; `TRAINING` when None, pixel by pixel `STEPS`. Where it asks for the best iterate, some
            validation images judge.
        bridges: how many; or "pixels", one for each pixel, of grey images only: log Z is then known and samples need
            no chains. On MNIST that had the better likelihoods (`results/mnist-pixels`).
        base: what learns each ratio.
        fabric: device and precision; the CPU when None.
        folder, resume, progress: as of `fit`: a killed run goes on from its checkpoint, with the noise it began with.
        evaluations: of the model's score at most, to find log Z; pixel by pixel none are needed.
        options: of `looking`: `net`, and what that takes (of `ResNet` widths, blocks, features, ...); with
            bridges="pixels", of `Lookback`.

    >>> from unnorm.data import image_data
    >>> few = Training(steps=3, batch=16)
    >>> found = fit_images(image_data("digits"), "gaussian", few, bridges=2, widths=(4,), blocks=1, features=4,
    ...                    evaluations=20_000)
    >>> found.log_prob(image_data("digits").test.images[:5], generator=torch.Generator().manual_seed(0)).shape
    torch.Size([5])
    """
    fabric = fabric or fabric_for("cpu")
    if isinstance(bridges, str) and bridges != PIXELS:
        raise InvalidValue(f"The 'bridges' of images are a number, or '{PIXELS}'. Got '{bridges}'.")
    if bridges == PIXELS and data.event[0] != 1:
        raise InvalidValue(f"Bridges of one pixel each are for grey images. Got images of shape {data.event}.")
    if training is None:
        training = STEPS if bridges == PIXELS else TRAINING
    if isinstance(noise, str):
        own = {"couplings": PIXELS} if (noise, bridges) == ("flow", PIXELS) else {}  # or its heads would see no pixel
        noise = _kept(data, noise, fabric, folder, **own)
    where = noise.to(fabric.device)
    model: Bridged | Stepwise
    estimator: Estimator
    if isinstance(bridges, str):
        where = where.by_pixels()
        model = stepwise(where, data.event, seed=training.seed, **options).to(fabric.device)
        estimator = StepwiseTelescope(where.noise, base)
    else:
        model = fast(bridged(where, data.event, bridges, seed=training.seed, **options), fabric.device)
        estimator = Telescope(where.noise, bridges, base)
    judged = FEW_JUDGED if bridges == PIXELS else JUDGED
    train(
        model,
        estimator,
        where.rows(data.train.images, fabric.device, training.seed),
        training,
        validation=_judges(data, where, fabric.device, judged) if training.iterate in VALIDATED else None,
        fabric=fabric,
        folder=folder,
        resume=resume,
        progress=progress,
    )
    return Density.normalise(
        model,
        where.noise,
        where.transform,
        held_out=data.validation.images,
        evaluations=evaluations,
        generator=stream(training.seed, "log Z", device=fabric.device),
        progress=progress,
    )
