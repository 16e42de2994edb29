"""What a plain classifier and the nearest training images say of samples."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unnorm.checkpoint import read_tensors, write_tensors
from unnorm.ledger import key_of
from unnorm.models import ResNet
from unnorm.paper.mnist.problem import Problem
from unnorm.randomness import stream

__all__ = ["Judge", "Nearest", "Verdict", "nearest", "trained"]

CLASSES = 10
CONFIDENT = 0.9
BATCH = 128


class Verdict(NamedTuple):
    """What a classifier says of images.

    Attributes:
        confident: the share with a class of probability above 0.9.
        entropy: of the histogram of classes, in nats; log 10 = 2.303 where all are as frequent.
        n: how many.
    """

    confident: float
    entropy: float
    n: int


@dataclass
class Judge:
    """A trained classifier.

    Attributes:
        net: from shades in [0, 1] to logits.
        levels: of a pixel.
        accuracy: on the test images.
        steps: of its training.
    """

    net: nn.Module
    levels: int
    accuracy: float
    steps: int

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        like = next(self.net.parameters())
        return torch.cat([self.net(part.to(like) / (self.levels - 1)) for part in images.split(1000)])

    def verdict(self, images: Tensor) -> Verdict:
        """
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 10))
        >>> round(Judge(net, 17, 0.0, 0).verdict(torch.zeros(5, 1, 2, 2)).entropy, 6)   # all of one class
        0.0
        """
        chances = torch.softmax(self.logits(images).double(), -1)
        best, place = chances.max(-1)
        shares = torch.bincount(place, minlength=CLASSES).double() / len(images)
        entropy = -torch.special.xlogy(shares, shares).sum()
        return Verdict(float((best > CONFIDENT).double().mean()), float(entropy) + 0.0, len(images))


def trained(problem: Problem, path: Path) -> Judge:
    """The classifier of the study; read from `path` where it was trained before."""
    data, device, steps = problem.data, problem.fabric.device, problem.size.classifier
    widths = (16, 32) if data.event[1] < 16 else (32, 64, 64)
    net = ResNet(data.event, widths, 2, 128, CLASSES, generator=stream(0, "weights")).to(device)
    judge = Judge(net, data.levels, 0.0, steps)
    note = {"classifier": key_of({"data": problem.size.data, "steps": steps})}
    tensors, found = read_tensors(path) if path.exists() else ({}, {})
    if found == note:
        net.load_state_dict(tensors)
    else:
        _train(judge, data.train.images.to(device), data.train.labels.to(device).long())
        write_tensors(path, net.state_dict(), note)
    net.eval()
    hits = judge.logits(data.test.images).argmax(-1).cpu() == data.test.labels.long()
    judge.accuracy = float(hits.double().mean())
    return judge


def _train(judge: Judge, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.AdamW(judge.net.parameters(), 2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, judge.steps)
    generator = stream(0, "training", device=images.device)
    for _ in range(judge.steps):
        index = torch.randint(len(images), (BATCH,), generator=generator, device=images.device)
        shades = _shifted(images[index].float() / (judge.levels - 1), generator)
        loss = cross_entropy(judge.net(shades), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def _shifted(shades: Tensor, generator: torch.Generator) -> Tensor:
    """All of a batch by at most a fourteenth of a side: digits are digits wherever they stand."""
    most = shades.shape[-1] // 14
    if most == 0:
        return shades
    down, right = (torch.randint(-most, most + 1, (2,), generator=generator, device=shades.device)).tolist()
    return torch.roll(shades, (down, right), (2, 3))


class Nearest(NamedTuple):
    """Of each image the nearest training image, by the root mean square difference of shades.

    Attributes:
        images: the training images.
        distance: to them, (n,).
    """

    images: Tensor
    distance: Tensor


def nearest(images: Tensor, train: Tensor, levels: int) -> Nearest:
    """
    >>> train = torch.tensor([0, 8, 16]).view(3, 1, 1, 1)
    >>> nearest(torch.tensor([9, 2]).view(2, 1, 1, 1), train, 17).images.flatten()
    tensor([8, 0])
    """
    flat = train.flatten(1).float() / (levels - 1)
    asked = images.to(train.device).flatten(1).float() / (levels - 1)
    found = [torch.cdist(part, flat).min(-1) for part in asked.split(64)]
    place = torch.cat([one.indices for one in found])
    distance = torch.cat([one.values for one in found]) / asked.shape[1] ** 0.5
    return Nearest(train[place], distance)
