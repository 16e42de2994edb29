"""A saved density looked at anew: log Z by the ladder, rows that were not trained on, and the verdict."""

from pathlib import Path
from typing import Any

from unnorm.data.rows import RowSource, spread
from unnorm.density import Density
from unnorm.diagnostics import verdict
from unnorm.errors import UnnormError
from unnorm.folders import CONFIG, RESULT, read_json
from unnorm.jobs import load_job
from unnorm.models.stepwise import Stepwise
from unnorm.points import points_for_scoring, prepare

__all__ = ["diagnosis"]

NOISE_DRAWS = 50_000
FEW = 500
NUMBERS = (
    "test_nll",
    "test_stderr",
    "test_rows",
    "train_nll",
    "noise_nll",
    "gain_stderr",
    "discrete",
    "singular",
    "best_kept",
)


def diagnosis(folder: Path, density: Density, data: str | None, **options: Any) -> dict[str, Any]:
    """Climb the ladder for a saved density; what was found, as lines for a person and as numbers.

    Args:
        folder: where it was saved.
        density: as loaded from there.
        data: a file of rows that were not trained on; when None the run's own test rows are used.
        options: of `Density.diagnose`.
    """
    rows, which = _held_out(folder, data)
    climb = density.diagnose(rows, first=min(50_000, options["n"]), **options)
    stepwise = isinstance(density.model, Stepwise)  # whose every row costs a quadrature for each coordinate
    some = rows if rows is None or not stepwise else rows[spread(len(rows), FEW)]
    draws = min(FEW if stepwise else NOISE_DRAWS, options["n"])
    noise = density.noise_report(some, n=draws, generator=options.get("generator"))
    before, now = density.log_z, climb.log_z
    said = read_json(folder / RESULT, set()) if (folder / RESULT).exists() else {}
    numbers = {name: said[name] for name in NUMBERS if said.get(name) is not None}
    judged = verdict(climb.log_zs(), numbers, said.get("warnings", ()), climb.doubts, checked=not climb.unchecked)
    lines = [
        f"log Z as saved: {before.value:.4f} ± {before.stderr:.4f} by {before.method}",
        f"checked with {which}; wanted: a standard error of {climb.wanted:g} nats",
        *(f"  rung {place}: {line}" for place, line in enumerate(climb.lines()[:-1], 1)),
        climb.lines()[-1],
        *noise.lines(),
    ]
    error = (before.stderr**2 + now.stderr**2) ** 0.5
    if climb.trusted and abs(now.value - before.value) > 3 * error + 1e-3:
        lines.append(f"This differs from the saved log Z by {now.value - before.value:.4f}: likelihoods shift by that.")
    return {
        "log_z": {method: found._asdict() for method, found in climb.log_zs().items()},
        "rung": now.method,
        "why": climb.rungs[-1].why,
        "wanted": climb.wanted,
        "trusted": climb.trusted,
        "doubts": list(climb.doubts),
        "noise": noise._asdict() | {"certified": noise.certified},
        "saved": before._asdict(),
        "held_out": which,
        "lines": lines,
        "verdict": judged.line(),
        "verdict_level": judged.level,
    }


def _held_out(folder: Path, data: str | None) -> tuple[RowSource | None, str]:
    """Rows that were not trained on, and what to call them."""
    if data is not None:
        rows, _ = points_for_scoring(folder, data, key=None, drop_nonfinite=False)
        return rows, f"{len(rows):,} rows of '{Path(data).name}'"
    if not (folder / CONFIG).exists():
        return None, "no data (give --data: only data show mass that the noise misses)"
    try:
        test = prepare(load_job(folder)).test
    except UnnormError as problem:
        return None, f"no data ({problem} Give --data: only data show mass that the noise misses)"
    return test, f"the run's own {len(test):,} test rows"
