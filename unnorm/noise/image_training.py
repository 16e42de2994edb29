"""The training of a flow for images, by maximum likelihood."""

import copy
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unnorm.device import Machine
from unnorm.errors import DataError
from unnorm.noise.autoregression import Autoregression
from unnorm.noise.couplings import Couplings
from unnorm.progress import Progress

if TYPE_CHECKING:
    from unnorm.noise.image_flow import ImageFlow

__all__ = ["ImageTraining"]

LOOKS = 30
TOGETHER = 100  # images that are looked at in one go
WARM_UP = 200  # steps in which the learning rate rises
CLIP = 500.0


class ImageTraining:
    """Training of the flow of the scores; an average of its weights, the best on the images set aside, is kept.

    Args:
        flow: whose `scores` become that average.
        fabric: device and precision; on a GPU the steps are compiled.
        judge: images set aside.
        steps: at most.
        seconds: after which training ends; the learning rate falls along a cosine to whichever comes first.
        lr: Adam's step size.
        average: weight of the past in the average of the weights.
    """

    def __init__(
        self,
        flow: "ImageFlow",
        fabric: Machine,
        judge: Tensor,
        steps: int,
        seconds: float | None,
        lr: float,
        average: float,
    ):
        self.flow, self.fabric, self.steps, self.seconds = flow, fabric, steps, seconds
        self.lr, self.average = lr, average
        self.judge = judge.to(fabric.device)
        self.trained = copy.deepcopy(flow.scores).requires_grad_(True)
        self.optimizer = torch.optim.Adam(self.trained.parameters(), lr)
        self.kept, self.best = copy.deepcopy(flow.scores.state_dict()), math.inf
        self.began = time.perf_counter()

    def run(self, draw: Callable[[], Tensor], bar: Progress) -> None:
        """Train on batches as `draw` gives them."""
        self.trained.initialise(self._scores(draw())[0])
        self.flow.scores.load_state_dict(self.trained.state_dict())
        if self.fabric.device.type == "cuda":
            self.trained.compile_steps()
        looked = 0.0
        for t in range(1, self.steps + 1):
            done = self._done(t)
            loss = self._step(t, done, *self._scores(draw()))
            if done - looked >= 1 / LOOKS or done >= 1:
                looked = done
                self._look()
            if bar.due():
                bar.show(t, {"value": float(loss)})
            if done >= 1:
                break
        if not math.isfinite(self.best):
            raise DataError("The flow has no finite likelihood on any look: take a smaller 'lr'.")
        self.flow.scores.load_state_dict(self.kept)

    def _done(self, t: int) -> float:
        by_time = 0.0 if self.seconds is None else (time.perf_counter() - self.began) / self.seconds
        return max(t / self.steps, by_time)

    def _scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normal scores of the pixels, and the log determinant that goes with them."""
        with torch.no_grad():
            z, log_det = self.flow.marginals(x.to(self.fabric.device))
        return z.float(), log_det.float()

    def _step(self, t: int, done: float, z: Tensor, log_det: Tensor) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done))) * min(1.0, t / WARM_UP)
        with self.fabric.autocast():
            loss = -self._log_prob(self.trained, z, log_det).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained.parameters(), CLIP)
        self.optimizer.step()
        with torch.no_grad():
            averaged: list[Tensor] = list(self.flow.scores.parameters())
            ours: list[Tensor] = list(self.trained.parameters())
            torch._foreach_lerp_(averaged, ours, 1 - min(self.average, t / (t + 10)))
        return loss.detach()

    def _look(self) -> None:
        """Keep the averaged weights where they are the best so far on the images set aside."""
        with torch.no_grad():
            parts = [self._log_prob(self.flow.scores, *self._scores(part)) for part in self.judge.split(TOGETHER)]
            value = -float(torch.cat(parts).double().mean())
        if value < self.best:
            self.best, self.kept = value, copy.deepcopy(self.flow.scores.state_dict())

    def _log_prob(self, scores: Couplings | Autoregression, z: Tensor, log_det: Tensor) -> Tensor:
        own, more = scores(z)
        return self.flow.base.log_prob(own) + more + log_det
