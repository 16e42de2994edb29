"""The fitted object: an unnormalized model with its normaliser, in the user's units."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unnorm import archive
from unnorm.architecture import describe
from unnorm.data.rows import RowSource, chunks, spread
from unnorm.data.transforms import Standardize, Transform
from unnorm.diagnostics import R_HAT_LIMIT, NoiseReport, believable, noise_report
from unnorm.draws import STARTS, Draws, by_annealing, by_hmc, by_weights
from unnorm.errors import BrokenFile, InvalidValue, MixingWarning, WeightsWarning
from unnorm.models.stepwise import Stepwise
from unnorm.models.tilted import Tilted
from unnorm.noise.base import Noise, event_of, own_generator
from unnorm.partition.annealed import ais
from unnorm.partition.grid import CELLS, Grid, evaluate, fitting_box
from unnorm.partition.ladder import IMAGE, MOST_DATA, Climb, ladder
from unnorm.partition.probes import far_out
from unnorm.types import LogZ, log_density

__all__ = ["Density"]

ANNEALED = 512


class Density(nn.Module):
    """p(x) = p~(T(x)) |det dT/dx| / Z: normalised, in the units of the data.

    Make one with `Density.normalise`, or from a folder with `Density.load`.

    Args:
        model: log p~ in the model's units.
        noise: q in the model's units; importance sampling draws from it.
        transform: T, from the user's units to the model's; None when they are the same.
        log_zs: estimates of log Z by method, the one in use last.
        doubts: what speaks against it.
        unchecked: why no rows of the data were compared, where only these could show missed mass.
        not_ruled_out: the share of mass that the rows which were compared cannot rule out.

    >>> from unnorm import Gaussian, Quadratic
    >>> density = Density.normalise(Quadratic(2), Gaussian(2), n=1000)
    >>> density.log_prob(torch.zeros(1, 2))
    tensor([-1.8379], ...)
    >>> sorted(density.log_zs)
    ['grid', 'importance']
    >>> density.climb.trusted
    True
    >>> density.sample(3).shape
    torch.Size([3, 2])
    """

    box: Tensor

    def __init__(
        self,
        model: nn.Module,
        noise: Noise,
        transform: Transform | None,
        log_zs: Mapping[str, LogZ],
        doubts: Sequence[str] = (),
        unchecked: str = "",
        not_ruled_out: float = 0.0,
    ):
        super().__init__()
        self.model, self.noise = model, noise
        self.event = event_of(noise)
        self.transform = (transform if transform is not None else Standardize(self.event)).requires_grad_(False)
        self.log_zs, self.doubts = dict(log_zs), tuple(doubts)
        self.unchecked, self.not_ruled_out = unchecked, not_ruled_out
        self.climb: Climb | None = None  # how log Z was found; a loaded density knows only what came of it
        corners = 2, self.event[0] if self._has_grid() else 0
        self.register_buffer("box", torch.zeros(corners, dtype=torch.float64))  # of the grid, in the model's units
        self._grid: Grid | None = None

    @classmethod
    def normalise(
        cls,
        model: nn.Module,
        noise: Noise,
        transform: Transform | None = None,
        *,
        data: RowSource | None = None,
        held_out: RowSource | None = None,
        n: int = 200_000,
        stderr: float = 0.02,
        evaluations: int = 1_000_000,
        generator: torch.Generator | None = None,
        progress: bool | None = False,
    ) -> "Density":
        """Find log Z by the ladder (`unnorm.partition.ladder`): the cheapest way that can be believed.

        Args:
            model: log p~ in the model's units.
            noise: q in the model's units.
            transform: T.
            data: rows that were trained on, in the user's units: they show mass that the noise misses, and in one and
                two dimensions the grid covers all of them.
            held_out: rows that were not trained on, in the user's units: they show mass that the noise misses.
            n: draws of the noise at most.
            stderr: the standard error of log Z that is enough.
            evaluations: of the model's score at most, where annealed chains are needed.
            generator: draws everything random.
            progress: a bar for these chains; None shows it on a terminal.
        """
        density = cls(model, noise, transform, {}).to(own_generator(noise).device)
        reach = None
        if density._has_grid():
            reach = density._extremes(data)
            points = torch.cat([noise.sample(8192, generator=own_generator(noise)).double(), reach])
            density.box.copy_(fitting_box(model, points, like=density._like()))
        climb = density.diagnose(
            held_out,
            train=data,
            reach=reach,
            n=n,
            first=n,
            stderr=stderr,
            evaluations=evaluations,
            generator=generator,
            progress=progress,
        )
        density.climb, density.log_zs, density.doubts = climb, climb.log_zs(), climb.doubts
        density.unchecked, density.not_ruled_out = climb.unchecked, climb.mass_not_ruled_out
        if climb.doubts:
            cure = "" if isinstance(model, Stepwise) else " A noise closer to the data would help."
            warnings.warn(
                f"log Z cannot be believed: {'; '.join(climb.doubts)}.{cure}",
                WeightsWarning,
                stacklevel=2,
            )
        return density

    def diagnose(self, held_out: RowSource | None = None, *, train: RowSource | None = None, **options: Any) -> Climb:
        """Climb the ladder anew, with its options; rows that were held out, or trained on, are in the user's units."""
        return ladder(self.model, self.noise, data=self._rows(held_out), train=self._rows(train), **options)

    def noise_report(self, held_out: RowSource | None = None, **options: Any) -> NoiseReport:
        """How its noise stands to it (`unnorm.diagnostics.noise_report`); `held_out` rows are in the user's units."""
        trusted = self.log_z if not self.doubts else None
        return noise_report(self.noise, self.model, data=self._rows(held_out), log_z=trusted, **options)

    def _rows(self, held_out: RowSource | None) -> Tensor | None:
        """Some of them, in the model's units."""
        if held_out is None or len(held_out) < 2:
            return None
        picked = held_out[spread(len(held_out), MOST_DATA)].to(self._like().device).double()
        with torch.no_grad():
            return self.transform(picked, generator=own_generator(self.noise))[0].to(self._like().dtype)

    @property
    def log_z(self) -> LogZ:
        """The estimate in use."""
        return list(self.log_zs.values())[-1]

    def _apply(self, fn: Any, recurse: bool = True) -> "Density":
        self._grid = None  # it would stay behind on the old device
        return super()._apply(fn, recurse)

    def log_prob(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The normalised log density at x of shape (n, *event); differentiable in x.

        A transform that draws (`Dequantize`) takes its numbers from `generator`; the value then is a random lower bound
        of the log probability of integers, in expectation. `metrics.bits_per_dim` has the tighter one.
        """
        if x.shape[1:] != self.event:
            raise InvalidValue(f"This density is over events of shape {self.event}. Got {tuple(x.shape)}.")
        z, log_det = self.transform(x, generator=generator)
        value = log_density(self.model, z.to(self._like())) + log_det - self.log_z.value
        return value.to(x.dtype) if x.is_floating_point() else value

    def noise_log_prob(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The log density of the noise alone at x, in the same units: what the model must beat."""
        z, log_det = self.transform(x, generator=generator)
        value = self.noise.log_prob(z.to(self._like())) + log_det
        return value.to(x.dtype) if x.is_floating_point() else value

    def sample(self, n: int, *, generator: torch.Generator | None = None, progress: bool | None = None) -> Tensor:
        """`n` draws, in float64: the user's units may need it. `draws` also says how good they are."""
        return self.draws(n, generator=generator, progress=progress).x

    def draws(self, n: int, *, generator: torch.Generator | None = None, progress: bool | None = None) -> Draws:
        """`n` draws and how they were made.

        In one and two dimensions they come from the grid's cells, uniform within a cell. Above, they are draws of the
        noise, kept by rejection or chosen by their weights (`draws.by_weights`), however many are wanted. Where the
        weights do not allow that they come from Hamiltonian Monte Carlo, with starts chosen by weights or, where the
        noise is too far for that, annealed to the model: many chains, tuned together, with R-hat and effective sample
        size; chains that did not mix warn with `MixingWarning`. Images far from their
        noise are drawn each by a chain of its own, annealed from the noise (`draws.by_annealing`), with a bar on a
        terminal unless `progress` says otherwise. A `Stepwise` model draws coordinate by coordinate.
        """
        if n < 1:
            raise InvalidValue(f"The number of draws must be at least 1. Got {n}.")
        if self._has_grid():
            with torch.no_grad():
                found = Draws.exact(self._sample_grid(n, generator))
        else:
            found = self._far_from_the_grid(n, generator, progress)
        with torch.no_grad():
            found = found._replace(x=self.transform.inverse(found.x.double()))
        if found.r_hat > R_HAT_LIMIT:
            warnings.warn(
                f"The chains did not mix: R-hat is {found.r_hat:.2f}, above {R_HAT_LIMIT}, and {n} draws are worth "
                f"{found.ess:.0f} independent ones. Groups of samples may have the wrong weights.",
                MixingWarning,
                stacklevel=2,
            )
        return found

    def _like(self) -> Tensor:
        """A tensor of the dtype and on the device that the model computes with."""
        return next(self.model.parameters(), torch.zeros(()))

    def _has_grid(self) -> bool:
        return len(self.event) == 1 and self.event[0] <= 2

    def _extremes(self, data: RowSource | None) -> Tensor:
        """The corners of a box around all of the data, in the model's units."""
        corners = [torch.empty(0, *self.event, dtype=torch.float64, device=self.box.device)]
        for chunk in chunks(data) if data is not None else ():
            z, _ = self.transform(chunk.to(self.box.device).double())
            corners.append(torch.stack([z.amin(0), z.amax(0)]))
        return torch.cat(corners)

    def _fine_grid(self) -> Grid:
        if self._grid is None:
            self._grid = evaluate(self.model, self.box, CELLS[self.event[0]], like=self._like())
        return self._grid

    def mass_by_cells(self) -> tuple[Tensor, Tensor] | None:
        """Return points all over the space, in the user's units, and the share of the mass at each.

        They are the cells of the grid in one and two dimensions; None above.
        """
        if not self._has_grid():
            return None
        grid = self._fine_grid()
        cells = torch.arange(grid.log_p.numel(), device=grid.log_p.device)
        place = torch.stack(torch.unravel_index(cells, grid.log_p.shape), -1)
        with torch.no_grad():
            points = self.transform.inverse(grid.centres(place.double()))
        return points, torch.softmax(grid.log_p.flatten().double(), 0)

    def _sample_grid(self, n: int, generator: torch.Generator | None) -> Tensor:
        grid = self._fine_grid()
        probabilities = torch.softmax(grid.log_p.flatten(), 0)
        cells = torch.multinomial(probabilities, n, replacement=True, generator=generator)
        place = torch.stack(torch.unravel_index(cells, grid.log_p.shape), -1)
        within = torch.rand(place.shape, generator=generator, device=place.device, dtype=torch.float64) - 0.5
        return grid.centres(place + within)

    def _far_from_the_grid(self, n: int, generator: torch.Generator | None, progress: bool | None) -> Draws:
        """Noise draws chosen by their weights, or chains that start from such, or from annealed ones; of a `Stepwise`
        model its own."""
        if isinstance(self.model, Stepwise):
            return Draws.exact(self.model.sample(n, generator=generator, progress=progress), "stepwise")
        found = self.log_zs["importance"]  # the ladder's first rung, always there
        if len(self.event) == IMAGE and not believable(found):
            return by_annealing(self.model, self.noise, n, generator=generator, progress=progress)
        with torch.no_grad():
            near = by_weights(self.model, self.noise, n, expected=found.ess / found.n, generator=generator)
        if isinstance(near, Draws):
            return near
        if near is None:
            try:
                finite, why = far_out(self.model, self.noise, alone=True)
                if not finite:  # its chains would never arrive
                    raise InvalidValue(why or "")
                near = ais(self.model, self.noise, n_chains=ANNEALED, resample=True, generator=generator).x
                near = near[torch.randperm(len(near), generator=generator, device=near.device)]  # kin stand together
            except InvalidValue as refusal:
                warnings.warn(
                    "Draws of the noise amount to too few independent ones of the model, and no annealed chain leads "
                    f"from the noise to the model ({refusal}): the chains start from the noise itself.",
                    WeightsWarning,
                    stacklevel=3,
                )
                near = self.noise.sample(STARTS, generator=generator)
        return by_hmc(self.model, near, n, generator=generator)

    def save(self, folder: Path | str) -> None:
        """Write `model.safetensors` and `model.json` into `folder`."""
        shared = isinstance(self.model, Tilted) and self.model.noise is self.noise
        left_out = "noise." if shared else None
        tensors = {
            name: value
            for name, value in self.state_dict().items()
            if left_out is None or not name.startswith(left_out)
        }
        facts = {
            "model": describe(self.model),
            "noise": None if shared else describe(self.noise),
            "transform": describe(self.transform),
            "log_z": {method: archive.to_plain(found) for method, found in self.log_zs.items()},
            "doubts": list(self.doubts),
            "unchecked": self.unchecked,
            "not_ruled_out": self.not_ruled_out,
        }
        archive.write(Path(folder), tensors, facts)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        model: nn.Module | None = None,
        noise: Noise | None = None,
        transform: Transform | None = None,
    ) -> "Density":
        """Read a folder written by `save`; nothing in it is executed.

        A model, noise or transform of a class that is not this library's must be given, built as it was when saved:
        the file has its numbers, not its code.
        """
        tensors, facts = archive.read(Path(folder))
        model = archive.filled("model", facts["model"], tensors, model)
        if facts["noise"] is not None:
            noise = archive.filled("noise", facts["noise"], tensors, noise)
        elif isinstance(model, Tilted):
            noise = model.noise
        transform = archive.filled("transform", facts["transform"], tensors, transform)
        log_zs = {method: archive.from_plain(found) for method, found in facts["log_z"].items()}
        first = "quadrature" if isinstance(model, Stepwise) else "importance"
        if not isinstance(noise, Noise) or not isinstance(transform, Transform) or first not in log_zs:
            raise BrokenFile(f"'{folder}' does not describe a density.")
        checked = str(facts["unchecked"]), float(facts["not_ruled_out"])
        density = cls(model, noise, transform, log_zs, [str(doubt) for doubt in facts["doubts"]], *checked)
        if tensors["box"].shape != density.box.shape:
            raise BrokenFile(
                f"'{folder}' does not describe a density: its box has shape {tuple(tensors['box'].shape)}."
            )
        density.box.copy_(tensors["box"])
        return density.eval()
