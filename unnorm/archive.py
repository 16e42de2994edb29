"""The two files of a saved density: tensors and plain JSON, each checked against the other before anything is built.

And modules of this library in a single file.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from unnorm.architecture import build, describe, is_custom
from unnorm.checkpoint import read_tensors, section, write_atomically, write_tensors
from unnorm.errors import BrokenFile, InvalidValue
from unnorm.types import LogZ

__all__ = [
    "DESCRIPTION",
    "TENSORS",
    "digest",
    "filled",
    "from_plain",
    "read",
    "read_modules",
    "to_plain",
    "write",
    "write_modules",
]

TENSORS, DESCRIPTION = "model.safetensors", "model.json"
FORMAT = "unnorm-density-2"
FIELDS = {"format", "model", "noise", "transform", "log_z", "doubts", "unchecked", "not_ruled_out", "tensors_sha256"}


def write(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write both files; the JSON holds the checksum of the tensors and a digest of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    owned = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    content = save_tensors(owned)
    description = {"format": FORMAT, **facts, "tensors_sha256": hashlib.sha256(content).hexdigest()}
    write_atomically(folder / TENSORS, content)
    text = json.dumps(description | {"digest": digest(description)}, indent=2, allow_nan=False)
    write_atomically(folder / DESCRIPTION, (text + "\n").encode())


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Both files, or a clear error; nothing is unpickled and nothing is executed."""
    if folder.is_file():
        raise BrokenFile(f"'{folder}' is a file; a saved density is a folder.")
    description = _read_description(folder / DESCRIPTION)
    return _read_checked(folder / TENSORS, description["tensors_sha256"]), description


def to_plain(found: LogZ) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they are written as words.

    >>> to_plain(LogZ(0.0, 0.1, 5.0, math.inf, "importance", 9))["khat"]
    'inf'
    """
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in found._asdict().items()
    }


def from_plain(plain: Any) -> LogZ:
    """The inverse of `to_plain`."""
    try:
        found = LogZ(**plain)
        value, stderr, ess, khat = (float(number) for number in found[:4])
        return LogZ(value, stderr, ess, khat, str(found.method), int(found.n))
    except (TypeError, ValueError) as problem:
        raise BrokenFile(f"The file's log Z is not valid: {problem}") from problem


def digest(description: Mapping[str, Any]) -> str:
    """A checksum of plain JSON values, whatever the order of their keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
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
    written = description.pop("digest", None)
    if written != digest(description):
        raise BrokenFile(f"'{path}' was edited or damaged after it was written: its digest does not match.")
    lists = isinstance(description["doubts"], list)
    if set(description) != FIELDS or not isinstance(description["log_z"], dict) or not lists:
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


def filled(part: str, spec: Any, tensors: Mapping[str, Tensor], given: Any) -> Any:
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


def write_modules(path: Path, modules: Mapping[str, nn.Module], note: Mapping[str, Any]) -> None:
    """Modules of this library, by name, in one file; `note` is kept beside their descriptions."""
    tensors = {f"{part}.{name}": value for part, own in modules.items() for name, value in own.state_dict().items()}
    write_tensors(path, tensors, {**{part: describe(own) for part, own in modules.items()}, **note})


def read_modules(path: Path, kinds: Mapping[str, type[nn.Module]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `write_modules` wrote: the modules of these names, each of its kind, and the note.

    Raises:
        BrokenFile: it is not such a file.
    """
    tensors, note = read_tensors(path)
    modules: dict[str, Any] = {}
    try:
        for name, kind in kinds.items():
            modules[name] = build(note.pop(name))
            modules[name].load_state_dict(section(tensors, name), assign=True)
            if not isinstance(modules[name], kind):
                raise TypeError(f"its '{name}' is a {type(modules[name]).__name__}.")
    except (KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise BrokenFile(f"'{path}' is not what was written there: {problem}") from problem
    return modules, note
