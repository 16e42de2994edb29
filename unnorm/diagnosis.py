"""A saved density looked at anew: log Z by the ladder, rows that were not trained on, and the verdict."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from unnorm.data.rows import RowSource, spread
from unnorm.data.tables import find, read
from unnorm.density import Density
from unnorm.diagnostics import Verdict, judge_log_z
from unnorm.errors import DataError, UnnormError
from unnorm.folders import CONFIG
from unnorm.jobs import held_out_rows
from unnorm.models.stepwise import Stepwise
from unnorm.points import plain_rows
from unnorm.tables.density import TABLE, TableDensity

__all__ = ["diagnosis"]

NOISE_DRAWS = 50_000
FEW = 500


class Rows(NamedTuple):
    """Rows of the data, as the model sees them, and what to call them."""

    held_out: RowSource | None
    train: RowSource | None
    name: str


def diagnosis(folder: Path, density: Density, data: str | None, **options: Any) -> dict[str, Any]:
    """Climb the ladder for a saved density; return what was found, as lines for a person and as numbers.

    Args:
        folder: where it was saved.
        density: as loaded from there.
        data: a file of rows that were not trained on; when None the run's own rows are used.
        options: of `Density.diagnose`.
    """
    table = TableDensity.load(folder) if (folder / TABLE).exists() else None
    rows = _rows(folder, table, data)
    climb = density.diagnose(rows.held_out, train=rows.train, first=min(50_000, options["n"]), **options)
    stepwise = isinstance(density.model, Stepwise)  # whose every row costs a quadrature for each coordinate
    some = rows.held_out
    if some is not None and stepwise:
        some = some[spread(len(some), FEW)]
    draws = min(FEW if stepwise else NOISE_DRAWS, options["n"])
    noise = density.noise_report(some, n=draws, generator=options.get("generator"))
    before, now = density.log_z, climb.log_z
    log_z = judge_log_z(climb.log_zs(), climb.doubts, climb.unchecked, climb.mass_not_ruled_out)
    verdict = Verdict(log_z) if table is None else Verdict(log_z, table.verdict.fit, table.verdict.samples)
    lines = [
        f"log Z as saved: {before.value:.4f} ± {before.stderr:.4f} by {before.method}",
        f"checked with {rows.name}; wanted: a standard error of {climb.wanted:g} nats",
        *(f"  rung {place}: {line}" for place, line in enumerate(climb.lines()[:-1], 1)),
        climb.lines()[-1],
        *noise.lines(),
    ]
    error = (before.stderr**2 + now.stderr**2) ** 0.5
    if not climb.doubts and abs(now.value - before.value) > 3 * error + 1e-3:
        lines.append(f"This differs from the saved log Z by {now.value - before.value:.4f}: likelihoods shift by that.")
    return {
        "log_z": {method: found._asdict() for method, found in climb.log_zs().items()},
        "rung": now.method,
        "why": climb.rungs[-1].why,
        "wanted": climb.wanted,
        "trusted": climb.trusted,
        "doubts": list(climb.doubts),
        "unchecked": climb.unchecked,
        "interval": list(climb.interval),
        "noise": noise._asdict() | {"certified": noise.certified},
        "saved": before._asdict(),
        "held_out": rows.name,
        "lines": lines,
        "verdict": verdict.plain(),
        "verdict_level": verdict.level,
    }


def _rows(folder: Path, table: TableDensity | None, data: str | None) -> Rows:
    """Return rows of the data to compare the draws with."""
    if data is not None:
        found = _of_file(table, data)
        return Rows(found, None, f"{len(found):,} rows of '{Path(data).name}'")
    advice = "Give --data: only rows of the data show mass that the noise misses"
    if table is None or not (folder / CONFIG).exists():
        return Rows(None, None, f"no rows of the data ({advice})")
    try:
        parts = held_out_rows(folder)
    except UnnormError as problem:
        return Rows(None, None, f"no rows of the data ({problem} {advice})")
    held = 0 if parts.held_out is None else len(parts.held_out)
    return Rows(parts.held_out, parts.train, f"the run's own {held:,} held-out and {len(parts.train):,} training rows")


def _of_file(table: TableDensity | None, data: str) -> torch.Tensor:
    """Return the rows of a file as the model sees them; those with a missing or unseen cell are left out."""
    if table is None:
        return plain_rows(data, key=None)
    rows, _ = table.rows_of(read(find(data)), f"'{data}'")
    codes = table.columns.codes(rows)
    unseen = ((codes < 0) & table.columns.discrete).any(1)
    known = codes[np.isfinite(codes).all(1) & ~unseen]
    if not len(known):
        raise DataError(f"'{data}' has no row without a missing or unseen cell.")
    return torch.from_numpy(table.columns.spread(known, np.arange(len(known)), 0))
