"""The folder of a run: which files are ours, JSON that notices edits, and never replacing what is not ours."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unnorm import archive
from unnorm.checkpoint import CHECKPOINT, HISTORY, write_atomically
from unnorm.errors import BrokenFile, InvalidValue

__all__ = ["CONFIG", "GROUNDWORK", "RESULT", "claim", "read_json", "sealed", "without_nan"]

CONFIG, RESULT, GROUNDWORK = "config.json", "result.json", "groundwork.safetensors"
OWN_FILES = (
    CONFIG,
    RESULT,
    GROUNDWORK,
    CHECKPOINT,
    HISTORY,
    archive.TENSORS,
    archive.DESCRIPTION,
    "density.png",
    "report.md",
    "table.json",
    *(f"{stage}/{name}" for stage in ("plain", "bridges") for name in (CHECKPOINT, HISTORY, "chosen")),
)


def claim(out: Path, force: bool, config: bytes) -> None:
    """Make the output folder ours, or say why not; only files of a run of ours are ever replaced."""
    try:
        _may_replace(out, force)
        out.mkdir(parents=True, exist_ok=True)
        for name in OWN_FILES:
            (out / name).unlink(missing_ok=True)
        write_atomically(out / CONFIG, config)
    except OSError as problem:
        raise InvalidValue(f"The output folder '{out}' cannot be written: {problem.strerror}.") from problem


def _may_replace(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidValue(f"The output '{out}' is a file, not a folder.")
    if out.exists() and any(out.iterdir()):
        if not force:
            resumable = f", --resume {out} to continue it" if (out / CHECKPOINT).exists() else ""
            raise InvalidValue(
                f"The output folder '{out}' exists. Use --force to replace its run{resumable}, or another --out."
            )
        if foreign := _not_ours(out):
            raise InvalidValue(f"'{out / foreign}' was not written by unnorm: it is not replaced. Use another --out.")


def _not_ours(out: Path) -> str | None:
    """A file that stands where one of ours would, in a folder that holds no run of ours."""
    try:
        ours = "unnorm" in read_json(out / CONFIG, set())
    except BrokenFile:
        ours = False
    return None if ours else next((name for name in OWN_FILES if (out / name).exists()), None)


def sealed(content: Mapping[str, Any]) -> bytes:
    """JSON with a digest of itself, which `read_json` checks."""
    plain = json.loads(json.dumps(without_nan(content), allow_nan=False))
    return (json.dumps(plain | {"digest": archive.digest(plain)}, indent=2) + "\n").encode()


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, needed: set[str]) -> dict[str, Any]:
    """A JSON object of ours with the `needed` keys, or a clear error."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as problem:
        raise BrokenFile(f"'{path}' is truncated, edited, or not a run's: {problem}") from problem
    if not isinstance(content, dict) or content.pop("digest", None) != archive.digest(content):
        raise BrokenFile(f"'{path}' was edited after it was written, or is not a run's: its digest does not match.")
    if not needed <= content.keys():
        raise BrokenFile(f"'{path}' does not hold {', '.join(sorted(needed - content.keys()))}.")
    return content
