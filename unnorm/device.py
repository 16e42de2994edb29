"""Devices by name, and what training asks of the machine it runs on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.names import unknown

__all__ = ["Machine", "OneProcess", "fabric_for"]

PRECISIONS = ("32", "64", "bf16")


class Machine(Protocol):
    """The machine as training sees it: Lightning's `Fabric` is one, and so is `OneProcess`."""

    @property
    def device(self) -> torch.device: ...
    @property
    def world_size(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def setup(self) -> Callable[..., Any]: ...
    @property
    def backward(self) -> Callable[..., Any]: ...
    @property
    def autocast(self) -> Callable[..., AbstractContextManager[Any]]: ...
    @property
    def all_reduce(self) -> Callable[..., Any]: ...
    @property
    def all_gather(self) -> Callable[..., Any]: ...


class OneProcess:
    """One process on the CPU, in the precision of the model.

    It does what a `Fabric` does there. Importing Lightning takes longer than the fit of a small table.

    >>> OneProcess().device, OneProcess().world_size
    (device(type='cpu'), 1)
    """

    device, world_size, global_rank, is_global_zero = torch.device("cpu"), 1, 0, True

    def setup(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        return (module, *optimizers)

    def backward(self, tensor: Tensor) -> None:
        tensor.backward()

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def all_reduce(self, data: Any, reduce_op: str = "mean") -> Any:
        return data

    def all_gather(self, data: Any) -> Any:
        return data


def fabric_for(device: str = "auto", precision: str = "32") -> Machine:
    """Return one process on "auto", "cpu", "cuda" or "cuda:N", in precision 32, 64 or (mixed) bf16.

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
        return OneProcess() if precision == "32" else _fabric("cpu", 1, precision)
    if kind != "cuda" or (number and not number.isdigit()):
        raise InvalidValue(f"Unknown device '{device}'. Known: auto, cpu, cuda, cuda:N.")
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        raise InvalidValue(f"The device '{device}' is not available: this machine has {count} CUDA devices.")
    return _fabric("cuda", [index], precision)


def _fabric(kind: str, devices: int | list[int], precision: str) -> Machine:
    from lightning_fabric import Fabric

    if precision == "bf16":
        from unnorm.autocast import Autocast

        return Fabric(accelerator=kind, devices=devices, plugins=Autocast("bf16-mixed", kind))
    return Fabric(accelerator=kind, devices=devices, precision="64-true" if precision == "64" else "32-true")
