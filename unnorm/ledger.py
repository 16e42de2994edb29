"""What a study has finished, as JSON lines: a killed study goes on from there."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unnorm.archive import digest
from unnorm.errors import BrokenFile, InvalidValue
from unnorm.folders import without_nan

__all__ = ["Ledger", "alone", "key_of", "read_lines"]


def key_of(spec: Mapping[str, Any]) -> str:
    """A name for a cell of a study: a hash of what it is, the same on every machine.

    >>> key_of({"seed": 0, "lr": 0.1}) == key_of({"lr": 0.1, "seed": 0}) != key_of({"lr": 0.1, "seed": 1})
    True
    """
    return digest(json.loads(json.dumps(spec)))[:16]


def read_lines(path: Path) -> list[tuple[int, Any]]:
    """The records of a file with the numbers of their lines; a last line cut short, as a kill leaves it, is left out.

    Raises:
        InvalidValue: the file cannot be read.
        BrokenFile: another line is not JSON.
    """
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise InvalidValue(f"'{path}' cannot be read: {problem.strerror}.") from problem
    filled = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    records = []
    for number, line in filled:
        try:
            records.append((number, json.loads(line, parse_constant=lambda _: None)))
        except (ValueError, RecursionError) as problem:
            if number == filled[-1][0]:
                break
            raise BrokenFile(f"Line {number} of '{path}' is not JSON: {problem}") from problem
    return records


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process at work in the folder meanwhile; the system lets go of it when this one ends, however it ends.

    Where there are no such locks (Windows, some network disks) nothing is checked.

    Raises:
        InvalidValue: there is one.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidValue(
                    f"Another process is at work in '{folder}'. Wait for it, or use another --out."
                ) from None
        yield
    finally:
        os.close(handle)


class Ledger:
    """An append-only file of records, each under a key; what is in it is never computed again.

    Args:
        path: of the file, made when first written to.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = Ledger(Path(folder.name) / "results.jsonl")
    >>> ledger.write([{"kind": "run", "key": "a", "nll": 2.5}])
    >>> ledger.missing(["a", "b"]), Ledger(ledger.path).records[0]["nll"]
    (['b'], 2.5)
    >>> folder.cleanup()
    """

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path.exists():
            self.records = [record for _, record in read_lines(path) if isinstance(record, dict)]
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                self._cut()
        self.keys = {record["key"] for record in self.records if "key" in record}

    def _cut(self) -> None:
        """Take away half a line, so that the next one does not begin behind it; a whole one only lacks its end."""
        content = self.path.read_bytes()
        start = content.rfind(b"\n") + 1
        try:
            json.loads(content[start:])
        except ValueError:
            os.truncate(self.path, start)
        else:
            with self.path.open("ab") as file:
                file.write(b"\n")

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self.keys]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("kind") == kind]

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records in one piece; they are on the disk when it returns."""
        plain = [without_nan(dict(record)) for record in records]
        lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in plain)
        before = self.path.stat().st_size if self.path.exists() else None
        try:
            with self.path.open("a") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            if before is not None:  # a disk that is full leaves half a line
                os.truncate(self.path, before)
            raise InvalidValue(f"'{self.path}' cannot be written: {problem.strerror}.") from problem
        self.records += plain
        self.keys |= {record["key"] for record in plain if "key" in record}
