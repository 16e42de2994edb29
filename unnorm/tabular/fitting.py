"""A density of the rows of a table: scaled, noise chosen, tilted by a network as far as held-out rows allow."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import nn

from unnorm import groundwork
from unnorm.data.robust import LogTails, robust_scale
from unnorm.data.transforms import Compose, Transformed
from unnorm.density import Density
from unnorm.errors import HealthWarning, NonFiniteObjective, ShrinkageWarning, WeightsWarning
from unnorm.randomness import stream
from unnorm.settings import Job
from unnorm.train import fit
from unnorm.training import Training
from unnorm.types import History

__all__ = ["FEW_ROWS", "Fitted", "Plan", "fit_rows"]

FEW_ROWS = 40  # fewer are not divided: the noise alone is the density
HELD_OUT, MOST_HELD_OUT = 0.2, 5000
BATCH = 256
EVALUATIONS, EACH_SECOND, LEAST_EVALUATIONS = 100_000, 20_000, 4_000  # of the model for log Z
TRAINING, LEAST_SECONDS = 0.6, 0.05  # share of the seconds that are left when the noise is there


@dataclass(frozen=True)
class Plan:
    """How to fit; what is None follows from the shape of the table.

    Attributes:
        noise, bridges: as of `unnorm fit`; "auto" compares on the held-out rows.
        hidden: widths of the network.
        steps: at most.
        lr: learning rate, falling along a cosine.
        patience: looks at the held-out rows, 25 steps apart, without a new best.
        seconds: for all of it, about.
        n_importance: draws for log Z.
        seed: of everything random.
        progress: a bar while it trains.
    """

    noise: str = "auto"
    bridges: str = "auto"
    hidden: tuple[int, ...] | None = None
    steps: int | None = None
    lr: float = 1e-3
    patience: int = 20
    seconds: float | None = None
    n_importance: int = 50_000
    seed: int = 0
    progress: bool = False

    def job(self, n: int, width: int) -> Job:
        """For n rows to train on."""
        wide = 64 if n < 1000 else 128 if width <= 100 else 256
        training = Training(
            steps=self.steps if self.steps is not None else int(np.clip(n // 4, 500, 3000)),
            batch=min(BATCH, n),
            lr=self.lr,
            schedule="cosine",
            iterate="best",
            patience=self.patience,
            seed=self.seed,
            log_every=25,
        )
        hidden = self.hidden if self.hidden is not None else (wide, wide)
        return Job(
            "table",
            hidden=tuple(hidden),
            noise=self.noise,
            bridges=self.bridges,
            n_importance=self.n_importance,
            training=training,
        )


@dataclass(frozen=True)
class Fitted:
    """What fitting leaves.

    Attributes:
        density: normalised, in the units of the rows.
        history: of training; empty where the noise alone was taken.
        diagnostics: what a person asks first, as plain values.
        said: what the parts warned of that speaks against the result: training given up, a log Z not to be trusted.
    """

    density: Density
    history: History
    diagnostics: dict[str, Any]
    said: tuple[Warning, ...] = ()


def fit_rows(rows: np.ndarray, plan: Plan, fabric: Fabric, same: np.ndarray | None = None) -> Fitted:
    """Fit a density to rows (n, columns) of which no column is constant.

    Rows that are copies of each other have the same number in `same`: all of them are held out, or none.
    """
    began = time.perf_counter()
    data = torch.from_numpy(np.ascontiguousarray(rows))
    validation, train = _divided(data, same, plan.seed)
    transform = Compose([robust_scale(rows), LogTails()])
    job = plan.job(len(train), rows.shape[1])
    with _gathered() as said:
        ground = groundwork.laid(job, train, validation, transform, torch.float32, fabric)
        if plan.seconds is not None:
            left = max(LEAST_SECONDS, plan.seconds - (time.perf_counter() - began))
            job = replace(job, training=replace(job.training, seconds=TRAINING * left))
        model = job.build_model(rows.shape[1], ground.noise, ground.alphas)
        _flatten(model)
        history = History([])
        if validation is not None:
            history = _trained(model, job, ground, train, validation, fabric, plan)
        generator = stream(plan.seed, "log Z", device=fabric.device)
        density = Density.normalise(
            model.to(fabric.device),
            ground.noise.to(fabric.device),
            ground.transform.to(fabric.device),
            data=train,
            held_out=validation,
            n=plan.n_importance,
            evaluations=_affordable(plan.seconds, began),
            generator=generator,
        ).cpu()
    diagnostics = {
        "log_z": density.log_z,
        "trusted": not density.doubts,
        "doubts": list(density.doubts),
        "warnings": list(dict.fromkeys(map(str, said))),
        "chosen": dict(ground.said),
        "bridges": max(1, len(ground.alphas) - 1),
        "steps": int(history["step"][-1]) if len(history) else 0,
        "seconds": time.perf_counter() - began,
    }
    grave = tuple(one for one in said if isinstance(one, HealthWarning | WeightsWarning))
    return Fitted(density.eval(), history, diagnostics, grave)


def _affordable(seconds: float | None, began: float) -> int:
    """Evaluations of the model for log Z."""
    if seconds is None:
        return EVALUATIONS
    left = seconds - (time.perf_counter() - began)
    return int(np.clip(EACH_SECOND * left, LEAST_EVALUATIONS, EVALUATIONS))


def _divided(data: torch.Tensor, same: np.ndarray | None, seed: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Rows held out, None where there are few, and rows to train on."""
    of = torch.arange(len(data)) if same is None else torch.from_numpy(same)
    distinct = int(of.max()) + 1
    if distinct < FEW_ROWS:
        return None, data
    place = torch.randperm(distinct, generator=stream(seed, "validation rows"))[of]
    held = place < min(MOST_HELD_OUT, round(HELD_OUT * distinct))
    return data[held], data[~held]


def _trained(
    model: nn.Module,
    job: Job,
    ground: groundwork.Groundwork,
    train: torch.Tensor,
    validation: torch.Tensor,
    fabric: Fabric,
    plan: Plan,
) -> History:
    """Train in place; where the numbers leave the finite ones, the noise alone is kept."""
    rows, held = (Transformed(part, ground.transform) for part in (train, validation))
    everything = rows[torch.arange(len(train))]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        return fit(
            model,
            job.build_estimator(ground.noise, ground.alphas),
            everything,
            job.training,
            validation=groundwork.reached(held),
            fabric=fabric,
            progress=plan.progress,
        )
    except NonFiniteObjective as problem:
        warnings.warn(
            f"Training was given up, and the noise alone is the density: {problem}", HealthWarning, stacklevel=2
        )
        model.load_state_dict(before)
        return History([])


def _flatten(model: nn.Module) -> None:
    """Begin at the noise: the network's last layer is zero."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)


@contextmanager
def _gathered() -> Iterator[list[Warning]]:
    """What the parts warn of: a person with a table reads it in one place. Others' warnings go on their way."""
    said: list[Warning] = []
    ours = (HealthWarning, ShrinkageWarning, WeightsWarning)
    with warnings.catch_warnings(record=True) as caught:
        for kind in ours:
            warnings.simplefilter("always", kind)
        yield said
    for one in caught:
        if isinstance(one.message, ours):
            said.append(one.message)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
