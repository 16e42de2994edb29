"""Devices by name."""

from collections.abc import Mapping
from typing import Literal

import torch
from lightning_fabric import Fabric

from unnorm.errors import InvalidValue
from unnorm.names import choose

__all__ = ["fabric_for"]

PRECISIONS: Mapping[str, Literal["32-true", "64-true", "bf16-mixed"]] = {
    "32": "32-true",
    "64": "64-true",
    "bf16": "bf16-mixed",
}


def fabric_for(device: str = "auto", precision: str = "32") -> Fabric:
    """A one-process Fabric on "auto", "cpu", "cuda" or "cuda:N", in precision 32, 64 or (mixed) bf16.

    >>> fabric_for("cpu").device
    device(type='cpu')
    >>> fabric_for("gpu")
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: Unknown device 'gpu'. Known: auto, cpu, cuda, cuda:N.
    """
    kind, _, number = device.partition(":")
    chosen = choose("precision", precision, PRECISIONS)
    if kind == "auto" and not number:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu" and not number:
        return Fabric(accelerator="cpu", devices=1, precision=chosen)
    if kind != "cuda" or (number and not number.isdigit()):
        raise InvalidValue(f"Unknown device '{device}'. Known: auto, cpu, cuda, cuda:N.")
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        raise InvalidValue(f"The device '{device}' is not available: this machine has {count} CUDA devices.")
    return Fabric(accelerator="cuda", devices=[index], precision=chosen)
