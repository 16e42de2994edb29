"""The fitted object: an unnormalized model with its normaliser, in the user's units."""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from unnorm.architecture import build, describe, is_custom
from unnorm.checkpoint import section, write_atomically
from unnorm.data.transforms import Standardize, Transform
from unnorm.errors import BrokenFile, InvalidValue, WeightsWarning
from unnorm.models.tilted import Tilted
from unnorm.noise.base import Noise
from unnorm.partition.grid import CELLS, Grid, bounding_box, evaluate, summary
from unnorm.partition.importance import importance, log_weights
from unnorm.types import LogZ, log_density

__all__ = ["TENSORS", "Density"]

TENSORS, DESCRIPTION = "model.safetensors", "model.json"
FORMAT = "unnorm-density-1"


class Density(nn.Module):
    """p(x) = p~(T(x)) |det dT/dx| / Z: normalised, in the units of the data.

    Make one with `Density.normalise`, or from a folder with `Density.load`.

    Args:
        model: log p~ in the model's units.
        noise: q in the model's units; importance sampling draws from it.
        transform: T, from the user's units to the model's; None when they are the same.
        log_zs: estimates of log Z by method.

    >>> from unnorm import Gaussian, Quadratic
    >>> density = Density.normalise(Quadratic(2), Gaussian(2), n=1000)
    >>> density.log_prob(torch.zeros(1, 2))
    tensor([-1.8379], ...)
    >>> sorted(density.log_zs)
    ['grid', 'importance']
    >>> density.sample(3).shape
    torch.Size([3, 2])
    """

    def __init__(self, model: nn.Module, noise: Noise, transform: Transform | None, log_zs: Mapping[str, LogZ]):
        super().__init__()
        self.model, self.noise = model, noise
        self.event = tuple(noise.sample(1, generator=_fresh(noise)).shape[1:])
        self.transform = transform if transform is not None else Standardize(self.event)
        self.log_zs = dict(log_zs)
        self._grid: Grid | None = None

    @classmethod
    def normalise(
        cls,
        model: nn.Module,
        noise: Noise,
        transform: Transform | None = None,
        *,
        n: int = 200_000,
        generator: torch.Generator | None = None,
    ) -> "Density":
        """Find log Z: by importance sampling always, and on a grid in one and two dimensions."""
        log_zs = {"importance": importance(model, noise, n, generator=generator)}
        density = cls(model, noise, transform, log_zs)
        if density._has_grid():
            half = evaluate(model, density._box(), CELLS[density.event[0]] // 2, like=density._like())
            density.log_zs["grid"] = summary(density._fine_grid(), half)
        return density

    @property
    def log_z(self) -> LogZ:
        """The estimate with the smaller error."""
        return min(self.log_zs.values(), key=lambda found: found.stderr)

    def _apply(self, fn: Any, recurse: bool = True) -> "Density":
        self._grid = None  # it would stay behind on the old device
        return super()._apply(fn, recurse)

    def log_prob(self, x: Tensor) -> Tensor:
        """The normalised log density at x of shape (n, *event); differentiable in x."""
        if x.shape[1:] != self.event:
            raise InvalidValue(f"This density is over events of shape {self.event}. Got {tuple(x.shape)}.")
        z, log_det = self.transform(x)
        return (log_density(self.model, z.to(self._like())) + log_det - self.log_z.value).to(x.dtype)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """`n` draws.

        In one and two dimensions from the grid's cells, uniform within a cell; above, by importance resampling.
        """
        if n < 1:
            raise InvalidValue(f"The number of draws must be at least 1. Got {n}.")
        with torch.no_grad():
            z = self._sample_grid(n, generator) if self._has_grid() else self._resample(n, generator)
            return self.transform.inverse(z.to(self._like()))

    def _like(self) -> Tensor:
        """A tensor of the dtype and on the device that the model computes with."""
        return next(self.model.parameters(), torch.zeros(()))

    def _has_grid(self) -> bool:
        return len(self.event) == 1 and self.event[0] in CELLS

    def _box(self) -> tuple[Tensor, Tensor]:
        return bounding_box(self.noise.sample(8192, generator=_fresh(self.noise)))

    def _fine_grid(self) -> Grid:
        if self._grid is None:
            self._grid = evaluate(self.model, self._box(), CELLS[self.event[0]], like=self._like())
        return self._grid

    def _sample_grid(self, n: int, generator: torch.Generator | None) -> Tensor:
        grid = self._fine_grid()
        probabilities = torch.softmax(grid.log_p.flatten(), 0)
        cells = torch.multinomial(probabilities, n, replacement=True, generator=generator)
        place = torch.stack(torch.unravel_index(cells, grid.log_p.shape), -1)
        within = torch.rand(place.shape, generator=generator, device=place.device, dtype=torch.float64) - 0.5
        return grid.centres(place + within)

    def _resample(self, n: int, generator: torch.Generator | None) -> Tensor:
        found = self.log_zs["importance"]
        draws = min(max(10_000, math.ceil(4 * n * found.n / max(found.ess, 1.0))), max(1_000_000, 4 * n))
        z, log_w = log_weights(self.model, self.noise, draws, generator=generator, keep=True)
        assert z is not None
        ess = float(torch.exp(2 * torch.logsumexp(log_w, 0) - torch.logsumexp(2 * log_w, 0)))
        if ess < n:
            warnings.warn(
                f"The weights of {draws} noise draws amount to {ess:.0f} independent ones: "
                f"many of the {n} samples repeat. A noise closer to the data would help.",
                WeightsWarning,
                stacklevel=3,
            )
        return z[torch.multinomial(torch.softmax(log_w, 0), n, replacement=True, generator=generator)]

    def save(self, folder: Path | str) -> None:
        """Write `model.safetensors` and `model.json` into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        shared = isinstance(self.model, Tilted) and self.model.noise is self.noise
        parts: dict[str, nn.Module] = {"model": self.model, "transform": self.transform}
        if not shared:
            parts["noise"] = self.noise
        tensors = {
            f"{part}.{name}": value.detach().to("cpu", copy=True).contiguous()
            for part, module in parts.items()
            for name, value in module.state_dict().items()
        }
        content = save_tensors(tensors)
        description = {
            "format": FORMAT,
            "model": describe(self.model),
            "noise": None if shared else describe(self.noise),
            "transform": describe(self.transform),
            "log_z": {method: _to_plain(found) for method, found in self.log_zs.items()},
            "tensors_sha256": hashlib.sha256(content).hexdigest(),
        }
        write_atomically(folder / TENSORS, content)
        text = json.dumps(description | {"digest": _digest(description)}, indent=2, allow_nan=False)
        write_atomically(folder / DESCRIPTION, (text + "\n").encode())

    @classmethod
    def load(cls, folder: Path | str, *, model: nn.Module | None = None, noise: Noise | None = None) -> "Density":
        """Read a folder written by `save`; nothing in it is executed.

        A model or noise of a class that is not this library's must be given, built as it was when saved:
        the file has its numbers, not its code.
        """
        folder = Path(folder)
        description = _read_description(folder / DESCRIPTION)
        tensors = _read_checked(folder / TENSORS, description["tensors_sha256"])
        model = _filled("model", description["model"], tensors, model)
        if description["noise"] is None:
            if not isinstance(model, Tilted):
                raise BrokenFile(f"'{folder / DESCRIPTION}' names no noise.")
            noise = model.noise
        else:
            noise = _filled("noise", description["noise"], tensors, noise)
        transform = _filled("transform", description["transform"], tensors, None)
        log_zs = {method: _from_plain(found) for method, found in description["log_z"].items()}
        if not isinstance(noise, Noise) or not isinstance(transform, Transform) or "importance" not in log_zs:
            raise BrokenFile(f"'{folder / DESCRIPTION}' does not describe a density.")
        return cls(model, noise, transform, log_zs).eval()


def _fresh(noise: Noise) -> torch.Generator:
    """A generator of our own, so that looking at a noise changes nobody's random numbers."""
    device = next((buffer.device for buffer in noise.buffers()), torch.device("cpu"))
    return torch.Generator(device).manual_seed(0)


def _to_plain(found: LogZ) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in found._asdict().items()
    }


def _from_plain(plain: Any) -> LogZ:
    try:
        found = LogZ(**plain)
        value, stderr, ess, khat = (math.nan if number is None else float(number) for number in found[:4])
        return LogZ(value, stderr, ess, khat, str(found.method), int(found.n))
    except (TypeError, ValueError) as problem:
        raise BrokenFile(f"The file's log Z is not valid: {problem}") from problem


def _digest(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(path.read_text())
    except FileNotFoundError:
        raise BrokenFile(f"There is no saved density at '{path.parent}' ('{path.name}' is missing).") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise BrokenFile(f"'{path}' is not readable JSON: truncated, edited, or foreign ({problem}).") from problem
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise BrokenFile(f"'{path}' was not written by unnorm, or by another version (its format is not '{FORMAT}').")
    digest = description.pop("digest", None)
    if digest != _digest(description):
        raise BrokenFile(f"'{path}' was edited or damaged after it was written: its digest does not match.")
    expected = {"format", "model", "noise", "transform", "log_z", "tensors_sha256"}
    if set(description) != expected or not isinstance(description["log_z"], dict):
        raise BrokenFile(f"'{path}' does not describe a density.")
    return description


def _read_checked(path: Path, sha256: str) -> dict[str, Tensor]:
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise BrokenFile(f"Cannot read '{path}': {problem.strerror}.") from problem
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BrokenFile(f"'{path}' is truncated, edited, or from another model: its checksum does not match.")
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError) as problem:
        raise BrokenFile(f"'{path}' is not a safetensors file ({problem}).") from problem


def _filled(part: str, spec: Any, tensors: Mapping[str, Tensor], given: Any) -> Any:
    """The module a description asks for (or the one given), with its tensors."""
    own = section(tensors, part)
    if given is None and isinstance(spec, Mapping) and (name := is_custom(spec)):
        raise InvalidValue(
            f"The {part} contains a {name}, which a file cannot bring: load with {part}=... built as when saved."
        )
    module = build(spec) if given is None else given
    try:
        module.load_state_dict(own, assign=given is None)
    except RuntimeError as problem:
        detail = " ".join(str(problem).split())
        raise BrokenFile(f"The saved {part} does not fit its description: {detail}") from problem
    return module
