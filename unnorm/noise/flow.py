"""Normalizing flows as noise: zuko's (an optional extra), or any object that samples and evaluates."""

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from unnorm.data.rows import RowSource, moments, spread
from unnorm.data.transforms import Transform, floating
from unnorm.errors import DataError, InvalidValue
from unnorm.noise.base import Noise
from unnorm.noise.gaussian import Gaussian, scales
from unnorm.randomness import fork_global_generators, stream
from unnorm.types import event_shape

__all__ = ["Flow", "FlowTransform", "SplineFlow"]

LEAST_ROWS = 4
MOST_NUMBERS = 2**26  # weights of a spline flow: a file may not ask for more


class Flow(Noise):
    """A flow made elsewhere, as a noise; its parameters are frozen as they are. `fit` trains one.

    Args:
        flow: a zuko flow; or an object with `log_prob(x) -> (n,)` and `sample`, which is called with the shape (n,) if
            it is a `torch.distributions` object, otherwise with n. It works on rows of flattened events.
        event: the shape of one example.

    `torch` draws such things from its global generators; with `generator=` a seeded fork of them is used. Only a
    `SplineFlow` can be saved by itself: a file of any other names its class, and loading wants the object.

    >>> q = Flow(torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2)), event=2)
    >>> q.log_prob(torch.zeros(1, 2))
    tensor([-1.8379])
    """

    loc: Tensor
    scale: Tensor

    def __init__(self, flow: Any, event: int | tuple[int, ...]):
        super().__init__()
        self.event = event_shape(event)
        self.flow = flow
        if isinstance(flow, nn.Module):
            flow.requires_grad_(False)
        whole = self._whole()
        if not hasattr(whole, "sample") or not hasattr(whole, "log_prob"):
            raise InvalidValue(f"The 'flow' of Flow must have 'sample' and 'log_prob'. Got {type(flow).__name__}.")
        size = math.prod(self.event)
        self.register_buffer("loc", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    @classmethod
    def fit(cls, data: RowSource, flow: Any = None, **options: Any) -> "Flow":
        """Train a flow by maximum likelihood, stopped early.

        Args:
            data: rows.
            flow: one that gives its distribution when called, such as any of zuko's, over as many numbers as a row has;
                trained in place, on standardised rows. A neural spline flow, with its options, when None.
            options: `held_out`, rows that say when to stop (a tenth of the data, at most 5,000, by default); `steps` at
                most (3000); rows of a `batch` (256); Adam's step size `lr` at the beginning (2e-3), which falls to zero
                along a cosine; `patience`, how many looks (each after 1/60 of the steps) without improvement end it
                (10); `generator`, which draws the rows set aside and the batches (seed 0).

        The best look is kept. A constant coordinate is given some width, and a ShrinkageWarning says so.
        """
        if flow is None:
            return SplineFlow.fit(data, **options)
        if not isinstance(flow, nn.Module) or not any(True for _ in flow.parameters()):
            raise InvalidValue(f"The 'flow' to train must be a module with parameters. Got {type(flow).__name__}.")
        event = tuple(data[torch.zeros(1, dtype=torch.int64)].shape[1:])
        try:
            noise = Flow(flow, event)
            with torch.no_grad():
                noise.log_prob(torch.zeros(1, *event, dtype=next(flow.parameters()).dtype))
        except (RuntimeError, TypeError, ValueError) as problem:
            raise InvalidValue(f"The 'flow' must be one over events of shape {event}: {problem}") from None
        noise.to(next(flow.parameters()).dtype)
        _fit_into(noise, data, **options)
        return noise

    def coordinates(self) -> tuple[Transform, Noise]:
        """To z = f((x - loc) / scale), for zuko's flows with a standard normal base; else x itself."""
        base = getattr(self._whole(), "base", None)
        at, scale = (getattr(getattr(base, "base_dist", base), name, None) for name in ("loc", "scale"))
        normal = isinstance(at, Tensor) and isinstance(scale, Tensor) and not at.any() and bool((scale == 1).all())
        if not normal or not hasattr(getattr(self._whole(), "transform", None), "call_and_ladj"):
            return super().coordinates()
        return FlowTransform(self), Gaussian(self.event, "diagonal").to(self.loc)

    def _whole(self) -> Any:
        """The distribution; zuko's flows make it when they are called."""
        return self.flow if hasattr(self.flow, "log_prob") or not callable(self.flow) else self.flow()

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        whole = self._whole()
        with fork_global_generators(generator, self.loc.device):
            z = whole.sample((n,) if isinstance(whole, Distribution) else n)
        return (z.view(n, -1) * self.scale + self.loc).view(n, *self.event)

    def _log_prob(self, x: Tensor) -> Tensor:
        z = (x.flatten(1) - self.loc) / self.scale
        return self._whole().log_prob(z) - self.scale.log().sum()


class SplineFlow(Flow):
    """A masked autoregressive flow of rational-quadratic splines: zuko's NSF (Durkan et al. 2019).

    Needs zuko: `pip install 'unnorm[flow]'`.

    Args:
        event: the shape of one example; the flow is over its flattened coordinates, standardised.
        transforms: how many autoregressive layers.
        hidden: widths of the hidden layers of each.
        bins: pieces of each spline.
        generator: draws the initial weights.
    """

    def __init__(
        self,
        event: int | tuple[int, ...],
        transforms: int = 3,
        hidden: Sequence[int] = (64, 64),
        bins: int = 8,
        *,
        generator: torch.Generator | None = None,
    ):
        numbers = (transforms, *hidden, bins)
        if not all(isinstance(number, int) and number >= 1 for number in numbers) or bins < 2:
            raise InvalidValue(f"A SplineFlow needs positive whole numbers, and 2 bins at least. Got {numbers}.")
        size = math.prod(event_shape(event))
        wide = (size, *hidden, size * (3 * bins - 1))
        if transforms * sum(a * b for a, b in itertools.pairwise(wide)) > MOST_NUMBERS:
            raise InvalidValue(
                f"A SplineFlow of {size} coordinates with {numbers} is too large: make 'hidden' smaller."
            )
        zuko = _zuko()
        # zuko cannot be built on the meta device.
        with torch.device("cpu"), fork_global_generators(generator or stream(0, "flow"), torch.device("cpu")):
            flow = zuko.flows.NSF(size, transforms=transforms, hidden_features=tuple(hidden), bins=bins)
        super().__init__(flow, event)
        self._options = {"transforms": transforms, "hidden": list(hidden), "bins": bins}

    @property
    def config(self) -> Mapping[str, Any]:
        return {"event": list(self.event), **self._options}

    @classmethod
    def fit(  # type: ignore[override]
        cls,
        data: RowSource,
        *,
        generator: torch.Generator | None = None,
        transforms: int = 3,
        hidden: Sequence[int] = (64, 64),
        bins: int = 8,
        **training: Any,
    ) -> "SplineFlow":
        """Maximum likelihood by Adam, stopped early.

        Args:
            data: rows.
            generator: draws the initial weights, the rows set aside and the batches; seed 0 when None.
            transforms, hidden, bins: of the flow.
            training: as for `Flow.fit`.
        """
        generator = generator or stream(0, "flow")
        event = tuple(data[torch.zeros(1, dtype=torch.int64)].shape[1:]) if len(data) else ()
        noise = cls(event, transforms, hidden, bins, generator=generator)
        _fit_into(noise, data, generator=generator, **training)
        return noise


def _fit_into(
    noise: Flow,
    data: RowSource,
    *,
    held_out: RowSource | None = None,
    steps: int = 3000,
    batch: int = 256,
    lr: float = 2e-3,
    patience: int = 10,
    generator: torch.Generator | None = None,
) -> None:
    """Standardise, and train the flow that the noise holds."""
    generator = generator or stream(0, "flow")
    found = moments(data)
    noise.loc.copy_(found.mean.flatten())
    noise.scale.copy_(scales(found))
    order = torch.randperm(len(data), generator=generator, device=generator.device).cpu()
    if held_out is None:
        if len(data) < LEAST_ROWS:
            raise DataError(f"A flow needs {LEAST_ROWS} rows at least, to set some aside. Got {len(data)}.")
        apart = min(5000, max(2, len(data) // 10))
        judge, order = data[order[:apart].sort().values], order[apart:]
    else:
        judge = held_out[spread(len(held_out), 5000)]
    constant = found.constant.flatten()

    def rows(x: Tensor) -> Tensor:
        """Standardised; a constant coordinate is noise, as wide as the scale it was given."""
        z = ((x.double().cpu().flatten(1) - found.mean.flatten()) / noise.scale.double()).to(noise.scale)
        fresh = torch.randn(z.shape, generator=generator, device=generator.device, dtype=z.dtype).cpu()
        return torch.where(constant, fresh, z)

    noise.flow = _trained(
        noise.flow, lambda: rows(data[order[_some(len(order), batch, generator)]]), rows(judge), steps, lr, patience
    )
    noise.flow.requires_grad_(False)


def _some(n: int, batch: int, generator: torch.Generator) -> Tensor:
    return torch.randint(n, (min(n, batch),), generator=generator, device=generator.device).cpu()


def _trained(flow: Any, draw: Any, judge: Tensor, steps: int, lr: float, patience: int) -> Any:
    """The flow at the look with the highest likelihood of `judge`."""
    flow.requires_grad_(True)
    optimizer = torch.optim.Adam(flow.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    every, best, kept, waited = max(1, steps // 60), -math.inf, copy.deepcopy(flow.state_dict()), 0
    for step in range(1, steps + 1):
        with torch.enable_grad():
            loss = -flow().log_prob(draw()).mean()
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == steps:
            with torch.no_grad():
                value = float(flow().log_prob(judge).mean())
            if value > best:
                best, kept, waited = value, copy.deepcopy(flow.state_dict()), 0
            elif (waited := waited + 1) >= patience:
                break
    if best == -math.inf:
        raise DataError("The flow has no finite likelihood on any look: standardise the data, or take a smaller 'lr'.")
    flow.load_state_dict(kept)
    return flow


class FlowTransform(Transform):
    """The map of a zuko flow to its base: z = f((x - loc) / scale)."""

    def __init__(self, flow: Flow):
        super().__init__()
        self.flow = flow

    @property
    def config(self) -> Mapping[str, Any]:
        return {"flow": self.flow}

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        own = self.flow
        z, log_det = own._whole().transform.call_and_ladj((x.flatten(1).to(own.loc.dtype) - own.loc) / own.scale)
        dtype = floating(x)
        return z.view(x.shape).to(dtype), (log_det - own.scale.log().sum()).to(dtype)

    def inverse(self, z: Tensor) -> Tensor:
        own = self.flow
        x = own._whole().transform.inv(z.flatten(1).to(own.loc.dtype)) * own.scale + own.loc
        return x.view(z.shape).to(z.dtype)


def _zuko() -> Any:
    try:
        import zuko
    except ImportError as problem:
        raise InvalidValue("A SplineFlow needs the package zuko: pip install 'unnorm[flow]'.") from problem
    return zuko
