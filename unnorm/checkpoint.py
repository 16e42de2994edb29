"""Files of tensors and plain JSON, replaced atomically; nothing is ever unpickled."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from unnorm.errors import BrokenFile

__all__ = [
    "CHECKPOINT",
    "HISTORY",
    "flatten_optimizer",
    "read_tensors",
    "restore_optimizer",
    "section",
    "write_atomically",
    "write_tensors",
]

CHECKPOINT, HISTORY = "checkpoint.safetensors", "history.jsonl"  # the files of a training run

FORMAT = "unnorm-1"


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` as a whole: a reader, or a power cut, sees the old content or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.partial")  # one name, so that a killed write leaves at most one file
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """One safetensors file; `note`, plain JSON values, travels in its header."""
    owned = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    text = json.dumps(note)
    header = {"format": FORMAT, "note": text, "sha256": _checksum(owned, text)}
    write_atomically(path, save(owned, metadata=header))


def _checksum(tensors: Mapping[str, Tensor], note: str) -> str:
    found = hashlib.sha256(note.encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the note of a file written by `write_tensors`."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise BrokenFile(
                    f"'{path}' was not written by unnorm (format {header.get('format')!r}, not {FORMAT!r})."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if header.get("sha256") != _checksum(tensors, header["note"]):
                raise BrokenFile(f"'{path}' was edited or damaged after it was written: its checksum does not match.")
            return tensors, json.loads(header["note"])
    except FileNotFoundError:
        raise BrokenFile(f"There is no file '{path}'.") from None
    except (SafetensorError, OSError, KeyError, ValueError) as problem:
        if isinstance(problem, BrokenFile):
            raise
        raise BrokenFile(
            f"'{path}' is not a complete safetensors file: truncated, edited, or foreign ({problem})."
        ) from problem


def section(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix.`, without it."""
    return {
        name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")
    }


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as named tensors and plain JSON."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for place, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{place}.{name}"] = value
            else:
                plain.setdefault(str(place), {})[name] = value
    return tensors, {"state": plain, "param_groups": state["param_groups"]}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    """The inverse of `flatten_optimizer`."""
    state: dict[int, dict[str, Any]] = {int(place): dict(values) for place, values in plain["state"].items()}
    for name, tensor in tensors.items():
        place, key = name.split(".", 1)
        state.setdefault(int(place), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": plain["param_groups"]})
