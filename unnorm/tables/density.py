"""A density of a table: data frames in, data frames out, log densities in the table's units."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unnorm.archive import DESCRIPTION
from unnorm.data.rows import chunks
from unnorm.data.tables import Table
from unnorm.density import Density
from unnorm.diagnostics import Verdict
from unnorm.draws import Draws
from unnorm.errors import BrokenFile, DataError, InvalidValue, WeightsWarning
from unnorm.folders import read_json, sealed
from unnorm.randomness import stream
from unnorm.tables.bounds import Bounds
from unnorm.tables.columns import Columns, TableColumn
from unnorm.tables.frames import cells_of, matched, restored, table_of
from unnorm.types import History, LogZ

__all__ = ["TABLE", "TableDensity"]

TABLE = "table.json"
CHUNK = 2**14  # points whose density is found at once
MORE, MOST_ROUNDS = 1.1, 50  # times as many draws as should be needed; and rounds of them
MOST_SEED = 2**62


class TableDensity:
    """A normalised density of the rows of a table.

    Make one with `unnorm.fit`, or from a folder with `unnorm.load`. A row's score is its log density in the units of
    the table. Discrete columns and words have probabilities, divided by the step of the values where these are
    numbers. Over all values that occur they add up to one, but for the small probability of values that do not.

    Attributes:
        density: the tensor-level density, of the columns as a model sees them.
        columns: the kinds of the table's columns.
        bounds: how the density keeps to the observed ranges.
        verdict: whether to trust log Z, the fit and the samples.
        result: the numbers of the fit, as plain values.
        history: of training; empty for a density that was loaded.

    >>> import unnorm
    >>> x = np.random.default_rng(0).normal(size=(300, 2))
    >>> density = unnorm.fit(x, steps=25)
    >>> density.score_samples(x).shape, density.sample(5, random_state=0).shape
    ((300,), (5, 2))
    """

    def __init__(
        self,
        density: Density,
        columns: Columns,
        bounds: Bounds,
        *,
        verdict: Verdict,
        result: dict[str, Any],
        history: History | None = None,
        frame: str = "",
        named: bool = False,
    ):
        self.density, self.columns, self.bounds = density, columns, bounds
        self.verdict, self.result = verdict, result
        self.history = History([]) if history is None else history
        self.frame, self.named = frame, named

    def __repr__(self) -> str:
        seen = self.columns.modelled
        kinds = {kind: sum(column.kind == kind for column in seen) for kind in dict.fromkeys(c.kind for c in seen)}
        what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        rows = self.result.get("rows", {}).get("train", 0) + self.result.get("rows", {}).get("validation", 0)
        return f"TableDensity of {rows:,} rows, {len(seen)} columns ({what})\n{self.verdict.text()}"

    @property
    def log_z(self) -> LogZ:
        """log Z of the model within the bounds, with its standard error."""
        found = self.density.log_z
        return found._replace(
            value=found.value + self.bounds.log_mass, stderr=math.hypot(found.stderr, self.bounds.stderr)
        )

    def score_samples(self, table: Any) -> np.ndarray:
        """Return the log density of each row, in nats.

        Columns of a data frame are found by their names, in any order; others are ignored with a warning. A row with a
        missing cell has NaN. A word or number that did not occur in a column of such has a small probability, with the
        other columns as if this one were not known.

        Discrete columns cost time: their cells are averaged over, at 256 points for one such column, 512 for up to
        four, 1,024 for more, the same at each call. This leaves an error of less than 1% in a sum over all cells of two
        columns. With 16 columns of zeros and ones that depend on each other a row's log density was off by 0.1 nats,
        with 30 by 0.5, mostly too low; `log_z.stderr` does not know of it.

        Args:
            table: a data frame, an array, or the name of a file.
        """
        rows, extra = matched(table_of(table), self.columns, self.named, "The table")
        if extra:
            listed = ", ".join(f"'{name}'" for name in extra[:8]) + (", ..." if len(extra) > 8 else "")
            warnings.warn(f"Columns that the model was not fitted on are ignored: {listed}.", UserWarning, stacklevel=2)
        return self.log_prob(rows)

    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        """Return the log density of rows of numbers, of all columns in their order, words as their numbers.

        `score_samples` takes tables as they are.
        """
        codes = self.columns.codes(rows)
        found = np.full(len(codes), np.nan)
        known = ~np.isnan(codes).any(1)
        if np.isinf(codes).any():
            row, place = (int(found[0]) for found in np.nonzero(np.isinf(codes)))
            raise DataError(
                f"Row {row + 1} has an infinite value in column '{self.columns.modelled[place].name}'. "
                "Leave such rows out with --drop-nonfinite, or out of the table."
            )
        if known.any():
            both = np.c_[codes, self._unseen_values(rows, codes)][known]
            distinct, inverse = np.unique(both, axis=0, return_inverse=True)
            found[known] = self._scores(distinct[:, : codes.shape[1]], distinct[:, codes.shape[1] :])[inverse.ravel()]
        return found

    def _unseen_values(self, rows: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return the value of each cell of a discrete column that is unseen; 0 for the others."""
        values = np.zeros_like(codes)
        for place, column in enumerate(self.columns.modelled):
            if column.discrete and not column.words:
                own = np.asarray(rows[:, self.columns.names.index(column.name)], dtype=np.float64)
                values[:, place] = np.where(codes[:, place] < 0, own, 0.0)
        return values

    def _scores(self, codes: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the log density of rows as the model sees them; `values` are those of unseen cells."""
        columns, discrete = self.columns.modelled, self.columns.discrete
        unseen = (codes < 0) & discrete
        levels = np.array([float(column.levels) if column.discrete else 1.0 for column in columns])
        centre = np.where(unseen, (levels - 1) / 2, codes)
        width = np.where(unseen, levels, self.columns.spreads)
        scores = self._averaged(centre, width) + self.bounds.log_weight(centre) - self.bounds.log_mass
        for place, column in enumerate(columns):
            if column.discrete:
                scores -= column.log_step
                scores += self._of_novelty(column, unseen[:, place], values[:, place])
        return scores

    @staticmethod
    def _of_novelty(column: TableColumn, unseen: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the log probability that a value is one that occurs; or that it is not, and is this one."""
        new = math.log(column.unseen) + column.log_unseen(values) + math.log(column.levels)
        return np.where(unseen, new, math.log1p(-column.unseen))

    def _averaged(self, centre: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Return the log of the mean density over a box around each row."""
        if not self.columns.averaged.any():
            return self._log_density(centre)
        shifts = self.columns.shifts()
        parts = []
        for begin in range(0, len(centre), step := max(1, CHUNK // len(shifts))):
            rows, wide = centre[begin : begin + step], width[begin : begin + step]
            points = (rows[:, None] + shifts * wide[:, None]).reshape(-1, centre.shape[1])
            values = self._log_density(points).reshape(len(rows), len(shifts))
            parts.append(np.logaddexp.reduce(values, axis=1) - math.log(len(shifts)))
        return np.concatenate(parts)

    def _log_density(self, points: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(np.ascontiguousarray(points))
        with torch.no_grad():
            return torch.cat([self.density.log_prob(part) for part in chunks(rows, CHUNK)]).numpy()

    def sample(self, n: int = 1, *, random_state: Any = None, generator: torch.Generator | None = None) -> Any:
        """Draw `n` rows, as a data frame where the density was fitted to one, else as an array.

        Args:
            n: how many.
            random_state: a seed, or numpy's RandomState or Generator; other numbers at each call when None.
            generator: torch's, in its place.
        """
        rows, _ = self.draw(n, random_state=random_state, generator=generator)
        if not self.frame and any(column.kind == "category" for column in self.columns.modelled):
            cells = [own.astype(object) for _, own in cells_of(rows, self.columns)]
            return np.stack(cells, axis=1)
        if not self.frame and self.columns.left_out:
            rows = rows[:, [name not in self.columns.left_out for name in self.columns.names]]
        return restored(rows, self.columns, self.frame)

    def draw(
        self, n: int = 1, *, random_state: Any = None, generator: torch.Generator | None = None
    ) -> tuple[np.ndarray, Draws]:
        """Return `n` rows of numbers, of all columns in their order, and how they were made."""
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise InvalidValue(f"The number of draws must be an int of at least 1. Got {n!r}.")
        if generator is not None and random_state is not None:
            raise InvalidValue("A sample takes a random_state or a generator, not both.")
        generator = stream(seed_of(random_state), "samples") if generator is None else generator
        kept, found = np.empty((0, len(self.columns.modelled))), None
        for _ in range(MOST_ROUNDS):
            more = math.ceil(MORE * (n - len(kept)) / math.exp(self.bounds.log_mass)) + 10
            draws = self.density.draws(more, generator=generator, progress=False)
            points = draws.x.numpy()
            chance = torch.rand(len(points), generator=generator, dtype=torch.float64).numpy()
            inside = points[chance < np.exp(self.bounds.log_weight(points))]
            found = draws if found is None else found
            kept = np.concatenate([kept, inside])
            if len(kept) >= n:
                break
        if found is None or len(kept) < n:
            raise DataError("The density cannot be sampled: its draws are not finite or lie outside of all ranges.")
        rows = self.columns.values(kept[:n])
        worth = found.ess * n / len(found.x)
        return rows, found._replace(x=torch.from_numpy(rows), ess=min(float(n), max(worth, 0.0)))

    def save(self, folder: Path | str) -> None:
        """Write the density and `table.json` into a folder."""
        self.density.save(folder)
        about = {
            "unnorm": "table",
            "density": read_description(Path(folder)),
            "columns": self.columns.plain(),
            "bounds": self.bounds.plain(),
            "frame": self.frame,
            "named": self.named,
            "verdict": self.verdict.plain(),
            "result": self.result,
        }
        (Path(folder) / TABLE).write_bytes(sealed(about))

    @classmethod
    def load(cls, folder: Path | str) -> "TableDensity":
        """Read a folder that `save` wrote; nothing in it is executed."""
        path = Path(folder)
        if not path.is_dir() or not (path / TABLE).exists():
            raise BrokenFile(f"There is no density of a table in '{folder}' ('{TABLE}' is missing).")
        density = Density.load(path)
        needed = {"columns", "bounds", "frame", "named", "verdict", "result", "density"}
        facts = read_json(path / TABLE, needed)
        if facts["density"] != read_description(path):
            raise BrokenFile(f"'{path / TABLE}' belongs to another density than the one beside it.")
        try:
            columns, bounds = Columns.from_plain(facts["columns"]), Bounds.from_plain(facts["bounds"])
            verdict = Verdict.from_plain(facts["verdict"])
            if not isinstance(facts["result"], dict):
                raise TypeError("its result is no set of numbers")
        except (BrokenFile, KeyError, TypeError, ValueError) as problem:
            raise BrokenFile(f"'{path / TABLE}' does not describe a density of a table: {problem}") from problem
        frame, named, result = str(facts["frame"]), bool(facts["named"]), dict(facts["result"])
        return cls(density, columns, bounds, verdict=verdict, result=result, frame=frame, named=named)

    def rows_of(self, table: Table, what: str) -> tuple[np.ndarray, list[str]]:
        """Return a table as rows of numbers, and the columns of it that are ignored."""
        return matched(table, self.columns, self.named, what)

    def warn_of_doubts(self) -> None:
        """Warn where log Z cannot be believed."""
        if self.density.doubts:
            warnings.warn(
                f"log Z cannot be believed: {'; '.join(self.density.doubts)}. All log densities may be off by the same "
                "number.",
                WeightsWarning,
                stacklevel=3,
            )


def read_description(folder: Path) -> str:
    """Return the checksum of the tensors that a saved density names: it tells one density from another."""
    return str(json.loads((folder / DESCRIPTION).read_text())["tensors_sha256"])


def seed_of(random_state: Any) -> int:
    """Return the seed that a random state stands for: an integer is one itself.

    >>> seed_of(7), seed_of(np.random.RandomState(0)) == seed_of(np.random.RandomState(0))
    (7, True)
    """
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        if not 0 <= random_state < MOST_SEED:
            raise InvalidValue(f"The random_state must be an integer from 0 to 2^62 - 1. Got {random_state}.")
        return int(random_state)
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31 - 1))
    raise InvalidValue(f"The random_state is a seed, a RandomState or a Generator. Got {random_state!r}.")
