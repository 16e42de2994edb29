"""What all runs of the study of images share: the set, the coordinates of each noise, the paper's three noises."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from unnorm.data.images import ImageData, LabelledImages, image_data
from unnorm.device import Machine
from unnorm.images import Coordinates, bridged, coordinates, fast, looking, stepwise
from unnorm.ledger import key_of
from unnorm.models import Tilted
from unnorm.noise import Noise, Smoothed
from unnorm.paper.mnist.spec import METHODS, Row, Size

__all__ = ["Empirical", "Problem"]

PLAIN = "gaussian"  # the coordinates of runs without bridges


class Empirical(Noise):
    """The training images themselves, the first of the paper's noises. It has no density: `log_prob` is the log of a
    row's share, wherever it is asked, which is what the paper's objective would divide by."""

    rows: Tensor

    def __init__(self, rows: Tensor):
        super().__init__()
        self.register_buffer("rows", rows)
        self.event = tuple(rows.shape[1:])

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return self.rows[torch.randint(len(self.rows), (n,), generator=generator, device=self.rows.device)]

    def _log_prob(self, x: Tensor) -> Tensor:
        return x.new_full((len(x),), -math.log(len(self.rows)))


@dataclass
class Problem:
    """The images, on the device; noises are fitted when they are first asked for, and kept in the folder.

    Attributes:
        size: of the study.
        folder: where fitted noises are kept.
        fabric: device and precision.
        root: the folder of the sets; UNNORM_DATA's when None.
        download: fetch what is missing there.
    """

    size: Size
    folder: Path
    fabric: Machine
    root: Path | None = None
    download: bool = False
    _where: dict[str, Coordinates] = field(default_factory=dict)

    @cached_property
    def data(self) -> ImageData:
        found = image_data(self.size.data, self.root, download=self.download)
        if self.size.test is None:
            return found
        some = slice(0, self.size.test)
        return ImageData(
            found.name,
            found.train,
            found.validation,
            LabelledImages(found.test.images[some], found.test.labels[some]),
            found.levels,
        )

    @property
    def dims(self) -> int:
        return math.prod(self.data.event)

    def where(self, noise: str) -> Coordinates:
        """The coordinates of a noise with some of its own; those of the Gaussian for the others."""
        kind = noise if noise in ("gaussian", "copula", "flow") else PLAIN
        if kind not in self._where:
            path, options = self.folder / f"noise-{kind}.safetensors", dict(self.size.flow if kind == "flow" else {})
            about = {"of": key_of({"data": self.size.data, "options": options})}
            found = Coordinates.load(path, about)
            if found is None:
                found = coordinates(self.data, kind, fabric=self.fabric, **options)
                found.save(path, about)
            self._where[kind] = found.to(self.fabric.device)
        return self._where[kind]

    def where_of(self, row: Row) -> Coordinates:
        """The coordinates of a row: those of its noise, or where the pixels are, if it goes from pixel to pixel."""
        where = self.where(row.noise)
        return where.by_pixels() if METHODS[row.method].way == "pixels" else where

    def training_noise(self, noise: str) -> Noise:
        """What a run without bridges draws from, in the Gaussian's coordinates."""
        where = self.where(noise)
        if noise == "gaussian":
            return where.noise
        if noise not in self._noises:
            rows = where.rows(self.data.train.images, self.fabric.device, purpose="images of the noise")
            everything = torch.cat([rows[part] for part in torch.arange(len(rows)).split(5000)])
            found = Empirical(everything) if noise == "empirical" else Smoothed.fit(everything.cpu(), "loo")
            self._noises[noise] = found.to(self.fabric.device)
        return self._noises[noise]

    @cached_property
    def _noises(self) -> dict[str, Noise]:
        return {}

    def model(self, row: Row, bridges: int, seed: int) -> nn.Module:
        """Fresh, on the device: the noise of its coordinates, tilted by a network that begins at zero.

        The paper's log p~ is the network alone. Of a network that grows in some direction that has no integral; with
        the Gaussian beneath it every model here has one.
        """
        where, net, way = self.where_of(row), dict(self.size.net), METHODS[row.method].way
        if way == "pixels":
            return stepwise(where, self.data.event, seed=seed, **self.size.lookback).to(self.fabric.device)
        if way == "waymarks":
            net["gain"] = self.size.gain
            return fast(bridged(where, self.data.event, bridges, seed=seed, **net), self.fabric.device)
        return fast(Tilted(where.noise, looking(where, self.data.event, seed=seed, **net)), self.fabric.device)

    def held_out(self, row: Row, n: int) -> Tensor:
        """Validation images in the coordinates of a row, on the device."""
        rows = self.where_of(row).rows(self.data.validation.images[:n], self.fabric.device, purpose="validation images")
        return rows[torch.arange(len(rows))]
