"""How a study begins: its ledger is claimed, its provenance is written down, its time is counted."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import unnorm
from unnorm.errors import InvalidValue
from unnorm.ledger import Ledger, alone

__all__ = ["Clock", "claimed", "cores", "hardware", "provenance"]


class Clock:
    """Writes records with the wall seconds since the last ones: a kill loses only the time of what it stopped.

    The start goes before the first of them: a call that finds nothing to compute leaves no trace.
    """

    def __init__(self, ledger: Ledger, start: Mapping[str, Any]):
        self.ledger, self.last = ledger, time.perf_counter()
        self._start = [start]

    def write(self, part: str, records: Sequence[Mapping[str, Any]]) -> None:
        now = time.perf_counter()
        seconds = {"kind": "clock", "part": part, "seconds": round(now - self.last, 3)}
        self.ledger.write([*self._start, *records, seconds])
        self.last, self._start = now, []


def _is_a_study(path: Path) -> bool:
    """By its first line: later ones may be broken, which is for the reader to say."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        first = json.loads(line)
    except ValueError:
        return False
    return isinstance(first, dict) and bool(first.get("study"))


@contextmanager
def claimed(path: Path, about: Mapping[str, Any], force: bool) -> Iterator[Ledger]:
    """The ledger at `path`, for this process alone; its folder is made.

    Raises:
        InvalidValue: the folder cannot be written, another process is at work there, or the ledger is not ours.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InvalidValue(f"The output folder '{path.parent}' cannot be written: {problem.strerror}.") from problem
    with alone(path.parent):
        yield _ledger(path, about, force)


def _ledger(path: Path, about: Mapping[str, Any], force: bool) -> Ledger:
    """The one at `path`, if it is of the study that `about` describes (study, size, seed, ...), or there is none.

    Raises:
        InvalidValue: it is of another one and not to be replaced (`force`), or no study's at all.
    """
    if path.exists() and path.stat().st_size and not _is_a_study(path):
        raise InvalidValue(f"'{path}' was not written by unnorm: it is not replaced. Use another --out.")
    if force:
        path.unlink(missing_ok=True)
    ledger = Ledger(path)
    for start in ledger.of("study"):
        if any(start.get(name, value) != value for name, value in about.items()):
            kind = "" if start.get("study") == about["study"] else f" {start.get('study')}"
            what = f"{kind} of size {start.get('size')} and seed {start.get('seed')}"
            what += f", {start['seconds']:g} s a run," if "seconds" in start else ""
            raise InvalidValue(
                f"'{path.parent}' holds the study{what} on {start.get('device')}. "
                "Use --force to replace it, or another --out."
            )
    return ledger


def provenance(device: str) -> dict[str, Any]:
    """When, on what and with which versions a study runs."""
    versions = {"version": unnorm.__version__, "commit": _commit(), "hardware": hardware(device)}
    versions |= {"python": platform.python_version(), "torch": torch.__version__, "libraries": _libraries()}
    return versions | {"started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware(device: str) -> str:
    """What a study runs on."""
    gpu = f"{torch.cuda.get_device_name()}, " if device == "cuda" else ""
    return f"{gpu}{cores()} CPU cores{_processor()}"


def _processor() -> str:
    """The name of the CPU, where the system has one to give."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = named[0] if named else platform.processor()
    return f" ({name})" if name else ""


def _libraries() -> str:
    """Whose numbers the study's are, beside torch's."""
    return ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "scikit-learn", "zuko") if _there(name))


def _there(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _commit() -> str | None:
    """The commit of the source tree this runs from; the variable UNNORM_COMMIT names it where there is no git."""
    if given := os.environ.get("UNNORM_COMMIT"):
        return given
    try:
        here = Path(__file__).resolve().parent
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
