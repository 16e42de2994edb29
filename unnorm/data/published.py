"""Files that others publish: found in a folder or fetched, and the very ones by their checksum."""

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from unnorm.errors import DataError, InvalidValue

__all__ = ["Published", "home", "read_bytes", "verified"]


class Published(NamedTuple):
    """A file as it was published: its name, where it is, and its md5."""

    name: str
    source: str
    md5: str

    def read(self, folder: Path, download: bool) -> bytes:
        """Its bytes from the folder, checked; fetched before with `download` where it is missing."""
        if not (folder / self.name).is_file():
            self._fetch(folder, download)
        return verified(read_bytes(folder / self.name), self.name, self.md5)

    def _fetch(self, folder: Path, download: bool) -> None:
        if not download:
            raise DataError(
                f"There is no '{self.name}' in '{folder}'. Fetch it with download=True, or with --download."
            )
        _pooch().retrieve(self.source + self.name, known_hash=f"md5:{self.md5}", fname=self.name, path=folder)


def read_bytes(path: Path) -> bytes:
    """All of a file, or why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise DataError(f"Cannot read '{path}': {problem.strerror}.") from problem


def verified(content: bytes, name: str, md5: str) -> bytes:
    """The content, if it has this md5."""
    if (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise DataError(f"'{name}' is damaged or not the published file: its md5 is {found}, not {md5}.")
    return content


def home(root: Path | str | None, of: str, download: bool = False) -> Path:
    """The folder given, or the one that UNNORM_DATA names; else a cache of the user's, for what is to be fetched."""
    if root is not None:
        return Path(root)
    if folder := os.environ.get("UNNORM_DATA"):
        return Path(folder)
    if download:
        return Path(_pooch().os_cache("unnorm"))
    raise InvalidValue(f"The 'root' of {of} must be given, or --root, where UNNORM_DATA names no folder. Got None.")


def _pooch() -> Any:
    try:
        return importlib.import_module("pooch")
    except ImportError:
        raise InvalidValue("Downloading needs pooch: install unnorm[download].") from None
