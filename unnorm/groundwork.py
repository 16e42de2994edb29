"""What a run settles before it trains, once: the noise, its coordinates and the bridges."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.archive import read_modules, write_modules
from unnorm.bridges import pilot
from unnorm.data.affine import Identity
from unnorm.data.rows import RowSource, chunks
from unnorm.data.transforms import Compose, Transform, Transformed
from unnorm.device import Machine
from unnorm.errors import BrokenFile, DataError
from unnorm.estimators import even_alphas
from unnorm.folders import GROUNDWORK
from unnorm.noise import Noise
from unnorm.noise import fit as fit_noise
from unnorm.randomness import stream
from unnorm.settings import Job

__all__ = ["Groundwork", "laid", "load", "reached", "save"]

PILOT_STEPS, PILOT_BATCH = 200, 256
MANY_ROWS = 2000  # from which there may be more nats in wide data than a pilot can see


class Groundwork(NamedTuple):
    """What training begins with.

    Attributes:
        noise: in the model's units.
        transform: from the user's units to the model's.
        alphas: of the waymarks; () for none.
        said: what was chosen and why, for a person.
    """

    noise: Noise
    transform: Transform
    alphas: tuple[float, ...]
    said: dict[str, str]


def laid(
    job: Job, train: RowSource, validation: RowSource | None, transform: Transform, dtype: torch.dtype, fabric: Machine
) -> Groundwork:
    """Fit the noise, go to its own coordinates where the model is a tilted noise, and choose the bridges."""
    rows = Transformed(train, transform, dtype)
    held_out = None if validation is None else Transformed(validation, transform, dtype)
    generator = stream(job.training.seed, "choice of the noise")
    noise = fit_noise(rows, job.noise, held_out=held_out, generator=generator)
    said = {"noise": noise.choice.line()} if job.noise == "auto" and noise.choice is not None else {}
    if job.model == "tilted":
        way, noise = noise.coordinates()
        if not isinstance(way, Identity):
            transform = Compose([transform, way])
    noise = noise.to(dtype)
    seen = None if validation is None else reached(Transformed(validation, transform, dtype))
    if validation is not None and seen is not None and len(seen) < len(validation):
        apart = len(validation) - len(seen)
        said["validation"] = f"{apart} of {len(validation)} validation rows lie outside the noise and have no say."
    alphas: tuple[float, ...] = ()
    if (count := job.count_of_bridges) is None:
        found = pilot(
            lambda k: job.build_net(_width(rows), k).to(dtype),
            noise.to(fabric.device),
            Transformed(train, transform, dtype),
            base=job.base,
            steps=min(PILOT_STEPS, max(10, job.training.steps // 5)),
            batch=min(PILOT_BATCH, job.training.batch),
            held_out=seen,
            least=1 if len(train) < MANY_ROWS else None,
            fabric=fabric,
            seed=job.training.seed,
            **job.given,
        )
        said["bridges"] = found.line()
        alphas = found.alphas if found.bridges > 1 else ()
    elif count > 1:
        alphas = even_alphas(count)
    return Groundwork(noise.cpu(), transform, alphas, said)


def _width(rows: RowSource) -> int:
    return rows[torch.zeros(1, dtype=torch.int64)].shape[1]


def reached(rows: RowSource) -> Tensor:
    """Those that the noise reaches: a row outside its box is infinite in its coordinates, and -inf to every model."""
    found = torch.cat(list(chunks(rows)))
    found = found[torch.isfinite(found).flatten(1).all(-1)]
    if len(found) == 0:
        raise DataError("No validation row lies where the noise does: use another --noise, or --iterate last.")
    return found


def save(folder: Path, ground: Groundwork) -> None:
    """Write it beside the run's checkpoints."""
    note = {"alphas": list(ground.alphas), "said": ground.said}
    write_modules(folder / GROUNDWORK, {"noise": ground.noise, "transform": ground.transform}, note)


def load(folder: Path) -> Groundwork | None:
    """What an earlier part of the run settled; None where it did not get that far."""
    path = folder / GROUNDWORK
    if not path.exists():
        return None
    parts, note = read_modules(path, {"noise": Noise, "transform": Transform})
    try:
        return Groundwork(**parts, alphas=tuple(note["alphas"]), said=dict(note["said"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise BrokenFile(f"'{path}' is not what a run writes: {problem}") from problem
