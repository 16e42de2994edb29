"""A normalizing flow as a noise for images, and its training."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from unnorm.data.quantiles import Gaussianize
from unnorm.data.rows import RowSource, spread
from unnorm.data.transforms import Compose
from unnorm.device import fabric_for
from unnorm.errors import DataError
from unnorm.noise.copula import Pushed
from unnorm.noise.couplings import Couplings, compiled_step
from unnorm.noise.gaussian import Gaussian
from unnorm.progress import Progress

__all__ = ["ImageFlow"]

JUDGED = 5000
LOOKS = 30
WARM_UP = 200  # steps in which the learning rate rises
CLIP = 500.0


class ImageFlow(Pushed):
    """A flow as a noise for images: each pixel to its normal score, then `Couplings` to a standard normal.

    Most pixels of a digit are black. By their own distribution functions (`Gaussianize`) these are half of a normal,
    not a spike that the couplings would have to stretch by hundreds.

    Args:
        marginals: of the pixels.
        couplings: after these; their parameters are frozen.

    >>> x = torch.rand(200, 1, 4, 4, generator=torch.Generator().manual_seed(0)) ** 2
    >>> q = ImageFlow.fit(x, levels=4, steps=5, couplings=(1,), width=4, blocks=1, bins=4)
    >>> q.sample(2, generator=torch.Generator().manual_seed(0)).shape, q.log_prob(x).shape
    (torch.Size([2, 1, 4, 4]), torch.Size([200]))
    """

    transform: Compose

    def __init__(self, marginals: Gaussianize, couplings: Couplings):
        super().__init__(Gaussian(couplings.event, "diagonal"), Compose([marginals, couplings]))
        couplings.requires_grad_(False)

    @property
    def marginals(self) -> Gaussianize:
        return self.transform.transforms[0]  # type: ignore[return-value]

    @property
    def couplings(self) -> Couplings:
        return self.transform.transforms[1]  # type: ignore[return-value]

    @property
    def config(self) -> Mapping[str, Any]:
        return {"marginals": self.marginals, "couplings": self.couplings}

    @classmethod
    def fit(
        cls,
        data: RowSource,
        *,
        levels: int = 256,
        held_out: RowSource | None = None,
        steps: int = 20_000,
        seconds: float | None = None,
        batch: int = 256,
        lr: float = 1e-3,
        average: float = 0.999,
        couplings: Sequence[int] = (6, 6),
        width: int = 96,
        blocks: int = 2,
        bins: int = 8,
        fabric: Fabric | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> "ImageFlow":
        """Count the pixels, and train the couplings by maximum likelihood; an average of the weights is kept.

        Args:
            data: images in [0, 1], dequantised anew at each reading (`ImageRows`).
            levels: of a pixel.
            held_out: images that say which of thirty looks was the best; a tenth of the data, at most 5,000, when None.
            steps: at most.
            seconds: after which training ends; the learning rate falls along a cosine to whichever comes first.
            batch, lr: rows of a step, and Adam's step size.
            average: weight of the past in the average of the weights.
            couplings: how many at each level; `width`, `blocks` and `bins` as of `Couplings`.
            fabric: device and precision; on a GPU the steps are compiled.
            generator: draws weights, rows set aside and batches; seed 0 when None.
            progress: a bar; None shows it on a terminal.
        """
        generator = generator or torch.Generator().manual_seed(0)
        fabric = fabric or fabric_for("cpu")
        event = tuple(data[torch.zeros(1, dtype=torch.int64)].shape[1:])
        order = torch.randperm(len(data), generator=generator)
        apart = 0 if held_out is not None else min(JUDGED, len(data) // 10)
        if len(data) - apart < 1 or (held_out is None and apart < 1):
            raise DataError(f"A flow needs ten images at least, to set some aside. Got {len(data)}.")
        judge = data[order[:apart]] if held_out is None else held_out[spread(len(held_out), JUDGED)]
        marginals = Gaussianize.fit(data, torch.arange(levels + 1) / levels)
        flow = cls(marginals, Couplings(event, couplings, width, blocks, bins, generator=generator))
        run = _Run(flow.to(fabric.device), fabric, judge, steps, seconds, lr, average)
        rows = order[apart:]
        with Progress(steps, enabled=progress, label="flow") as bar:
            run.train(lambda: data[rows[torch.randint(len(rows), (batch,), generator=generator)]], bar)
        return flow.cpu()


class _Run:
    """Training of the couplings of a flow."""

    def __init__(
        self,
        flow: ImageFlow,
        fabric: Fabric,
        judge: Tensor,
        steps: int,
        seconds: float | None,
        lr: float,
        average: float,
    ):
        self.flow, self.fabric, self.steps, self.seconds = flow, fabric, steps, seconds
        self.lr, self.average = lr, average
        self.judge = judge.to(fabric.device)
        self.trained = copy.deepcopy(flow.couplings).requires_grad_(True)
        self.optimizer = torch.optim.Adam(self.trained.parameters(), lr)
        self.kept, self.best = copy.deepcopy(flow.couplings.state_dict()), math.inf
        self.began = time.perf_counter()

    def train(self, draw: Callable[[], Tensor], bar: Progress) -> None:
        self.trained.initialise(self._scores(draw())[0])
        self.flow.couplings.load_state_dict(self.trained.state_dict())
        if self.fabric.device.type == "cuda":
            self.trained.step = compiled_step()
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
        self.flow.couplings.load_state_dict(self.kept)

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
            averaged: list[Tensor] = list(self.flow.couplings.parameters())
            ours: list[Tensor] = list(self.trained.parameters())
            torch._foreach_lerp_(averaged, ours, 1 - min(self.average, t / (t + 10)))
        return loss.detach()

    def _look(self) -> None:
        """Keep the averaged weights where they are the best so far on the images set aside."""
        with torch.no_grad():
            parts = [self._log_prob(self.flow.couplings, *self._scores(part)) for part in self.judge.split(500)]
            value = -float(torch.cat(parts).double().mean())
        if value < self.best:
            self.best, self.kept = value, copy.deepcopy(self.flow.couplings.state_dict())

    def _log_prob(self, couplings: Couplings, z: Tensor, log_det: Tensor) -> Tensor:
        own, more = couplings(z)
        return self.flow.base.log_prob(own) + more + log_det
