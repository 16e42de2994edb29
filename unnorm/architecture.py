"""Modules as plain JSON and back: a saved file names what to build, it never brings code."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unnorm.data.affine import Identity, Probit, Whiten
from unnorm.data.quantiles import Gaussianize
from unnorm.data.robust import LogTails
from unnorm.data.transforms import Compose, Dequantize, Logit, Standardize
from unnorm.errors import BrokenFile, UnnormError
from unnorm.models import (
    MLP,
    Averaged,
    Bridged,
    Lookback,
    Quadratic,
    ResNet,
    Seen,
    Stepwise,
    Tilted,
    Views,
    WideResNet,
)
from unnorm.noise import (
    Autoregression,
    Copula,
    Couplings,
    FlowTransform,
    Gaussian,
    GaussianMixture,
    ImageFlow,
    Mixture,
    Pushed,
    Smoothed,
    SplineFlow,
    Uniform,
)

__all__ = ["build", "describe", "is_custom"]

KINDS: Mapping[str, type[nn.Module]] = {
    "autoregression": Autoregression,
    "averaged": Averaged,
    "bridged": Bridged,
    "compose": Compose,
    "copula": Copula,
    "couplings": Couplings,
    "dequantize": Dequantize,
    "flow-transform": FlowTransform,
    "gaussian": Gaussian,
    "gaussian-mixture": GaussianMixture,
    "gaussianize": Gaussianize,
    "identity": Identity,
    "image-flow": ImageFlow,
    "log-tails": LogTails,
    "logit": Logit,
    "lookback": Lookback,
    "mixture": Mixture,
    "mlp": MLP,
    "probit": Probit,
    "pushed": Pushed,
    "quadratic": Quadratic,
    "resnet": ResNet,
    "seen": Seen,
    "smoothed": Smoothed,
    "spline-flow": SplineFlow,
    "standardize": Standardize,
    "stepwise": Stepwise,
    "tilted": Tilted,
    "uniform": Uniform,
    "views": Views,
    "whiten": Whiten,
    "wide-resnet": WideResNet,
}
CUSTOM = "custom"


def describe(module: nn.Module) -> dict[str, Any]:
    """What `build` needs to make such a module anew; of a foreign class only its name is noted.

    >>> describe(Quadratic(2))
    {'kind': 'quadratic', 'event': [2], 'learn_precision': True}
    >>> describe(nn.ReLU())
    {'kind': 'custom', 'class': 'torch.nn.modules.activation.ReLU'}
    """
    for kind, cls in KINDS.items():
        if type(module) is cls:
            settings = module.config.items()  # type: ignore[union-attr,operator]
            return {"kind": kind} | {key: _each(describe, nn.Module, value) for key, value in settings}
    cls = type(module)
    return {"kind": CUSTOM, "class": f"{cls.__module__}.{cls.__qualname__}"}


def is_custom(spec: Mapping[str, Any]) -> str | None:
    """The class that `build` cannot make, if there is one in the description."""
    if spec.get("kind") == CUSTOM:
        return str(spec.get("class"))
    parts = [part for value in spec.values() for part in (value if isinstance(value, list) else [value])]
    return next((name for part in parts if isinstance(part, Mapping) and (name := is_custom(part))), None)


def build(spec: Any) -> nn.Module:
    """The described module on the meta device: shapes only, so that a file cannot ask for memory it does not fill.

    >>> build({"kind": "quadratic", "event": [2], "learn_precision": True}).linear.is_meta
    True
    """
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str) or spec["kind"] not in KINDS:
        raise BrokenFile(f"The file describes something unknown: {str(spec)[:80]}.")
    settings = {key: _each(build, Mapping, value) for key, value in spec.items() if key != "kind"}
    try:
        with torch.device("meta"), _Shapes():
            return KINDS[spec["kind"]](**settings)
    except (UnnormError, TypeError, ValueError, RuntimeError, AttributeError) as problem:
        raise BrokenFile(f"The file's description of a '{spec['kind']}' is not valid: {problem}") from problem


class _Shapes(TorchFunctionMode):
    """Give tensors of the meta device their shapes by `SHAPES`: torch itself would import its compilers for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return SHAPES.get(func, func)(*args, **(kwargs or {}))


def _repeated(x: Tensor, *times: int) -> Tensor:
    sizes = (1,) * (len(times) - x.ndim) + tuple(x.shape)
    return x.new_empty([size * count for size, count in zip(sizes, times, strict=True)])


def _each(act: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """`act` on a value of this kind, or on each such value of a list; any other is left as it is."""
    if isinstance(value, list):
        return [_each(act, kind, part) for part in value]
    return act(value) if isinstance(value, kind) else value


# Tensors of the meta device have no numbers: what would fill one only says its shape.
SHAPES: Mapping[Any, Callable[..., Tensor]] = {
    Tensor.normal_: lambda x, *_, **__: x,
    Tensor.uniform_: lambda x, *_, **__: x,
    Tensor.repeat: _repeated,
    torch.eye: lambda n, *, dtype=None: torch.empty(n, n, dtype=dtype),
    torch.linspace: lambda start, end, steps, *, dtype=None: torch.empty(steps, dtype=dtype),
    torch.ones_like: lambda x: x.new_empty(x.shape),
    torch.special.ndtr: lambda x: x.new_empty(x.shape),
}
