"""Devices by name."""

from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision

from unnorm.errors import InvalidValue
from unnorm.names import unknown

__all__ = ["fabric_for"]

PRECISIONS = ("32", "64", "bf16")


class _Autocast(MixedPrecision):
    """bf16 for what autocast computes in it; points reach a model as they are.

    Fabric's own rounds them first. Of a logit at -5.54, where the first of 256 shades ends, bf16 leaves steps of 0.03:
    a network cannot learn an edge that it is never shown.
    """

    def convert_input(self, data: Any) -> Any:
        return data


def fabric_for(device: str = "auto", precision: str = "32") -> Fabric:
    """A one-process Fabric on "auto", "cpu", "cuda" or "cuda:N", in precision 32, 64 or (mixed) bf16.

    >>> fabric_for("cpu").device
    device(type='cpu')
    >>> fabric_for("gpu")
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: Unknown device 'gpu'. Known: auto, cpu, cuda, cuda:N.
    """
    kind, _, number = device.partition(":")
    if precision not in PRECISIONS:
        raise InvalidValue(unknown("precision", precision, PRECISIONS))
    if kind == "auto" and not number:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu" and not number:
        return _fabric("cpu", 1, precision)
    if kind != "cuda" or (number and not number.isdigit()):
        raise InvalidValue(f"Unknown device '{device}'. Known: auto, cpu, cuda, cuda:N.")
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        raise InvalidValue(f"The device '{device}' is not available: this machine has {count} CUDA devices.")
    return _fabric("cuda", [index], precision)


def _fabric(kind: str, devices: int | list[int], precision: str) -> Fabric:
    if precision == "bf16":
        return Fabric(accelerator=kind, devices=devices, plugins=_Autocast("bf16-mixed", kind))
    return Fabric(accelerator=kind, devices=devices, precision="64-true" if precision == "64" else "32-true")
