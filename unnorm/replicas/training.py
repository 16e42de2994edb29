"""Train replicas: what `unnorm.loop.train` does for one run, for many at once."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unnorm.errors import InvalidValue
from unnorm.estimators.base import Estimator
from unnorm.names import choose, unknown
from unnorm.noise.stacked import StackedNoise
from unnorm.optim import Schedule, rates
from unnorm.progress import Progress
from unnorm.randomness import TRAINING, derive_seed
from unnorm.replicas.stacked import Stacked
from unnorm.replicas.updates import UPDATES, make_update
from unnorm.streams import Streams, integers
from unnorm.training import Training

__all__ = ["Replicas", "fit", "matmul_precision"]

WAIT = 20  # steps between two looks at how far a CUDA device is, where seconds are counted
WARM_UP = 3  # steps before a CUDA graph is captured, as torch asks for


@dataclass(frozen=True)
class Replicas:
    """What training many replicas leaves.

    Attributes:
        model: all of them; `model.one(k)` is one. A diverged one stands as it was when its
            objective or its gradient was found not to be finite; its parameters may be so too.
        diverged_at: the step at which each left the finite numbers; 0 for those that did not.
        records: at each logged step `step`, `value` (R,) and what else the estimator reports.
        seconds: of training, for all together.
    """

    model: Stacked
    estimator: Estimator
    diverged_at: Tensor
    records: list[dict[str, Tensor]]
    seconds: float

    @property
    def alive(self) -> Tensor:
        """Which replicas ended with finite numbers, (R,)."""
        return self.diverged_at == 0


def fit(
    models: Sequence[nn.Module] | Stacked,
    estimator: Estimator,
    data: Tensor,
    training: Training | None = None,
    *,
    sets: Sequence[int] | None = None,
    lr: Sequence[float] | None = None,
    beta: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    ahead: int = 1,
    graph: bool | None = None,
    compiled: bool = False,
    matmul: str = "highest",
    progress: bool | None = False,
) -> Replicas:
    """Train R replicas as one batched computation: the same mathematics as R calls of `unnorm.loop.train`.

    Every replica has its parameters, data, learning rate, beta, random numbers and running state to itself: what it
    becomes does not depend on its neighbours. One whose objective or gradient is not finite stands still from there on.

    Args:
        models: R modules of one architecture.
        estimator: made with shape=(R,); noises in a `StackedNoise`; MECO's gamma may be a tensor (R,).
        data: rows to train on, (n, *event) for all, or (sets, n, *event).
        training: how to train; `lr`, `beta` and `seed` are those of replicas for which nothing else is given.
        sets: which of the data sets each replica learns.
        lr: of each replica.
        beta: weight of each replica's new gradient.
        seeds: of each replica's batches and noise; training.seed, + 1, ... when None.
        device: where to train.
        ahead: of `Streams`. 1 gives each replica the numbers it would have in a run of its own.
        graph: replay each step as a CUDA graph; by default on a CUDA device, where the noise draws by `Streams`.
        compiled: compile the model with torch.compile. Score matching cannot be.
        matmul: precision of float32 matrix products, as torch.set_float32_matmul_precision has it: "high" is nearly
            twice as fast on a GPU with tensor cores.
        progress: show a progress bar; when None, only if standard error is a terminal.

    >>> from unnorm import MECO, Gaussian, Quadratic
    >>> from unnorm.replicas import StackedNoise
    >>> x = torch.randn(1000, 1, generator=torch.Generator().manual_seed(0)) + torch.tensor([[[1.0]], [[2.0]]])
    >>> estimator = MECO(StackedNoise([Gaussian.fit(own) for own in x]), shape=(2,))
    >>> done = fit([Quadratic(1), Quadratic(1)], estimator, x, Training(steps=300, lr=0.03, schedule="cosine"),
    ...            sets=[0, 1])
    >>> [round(done.model.one(k).mean.item(), 1) for k in (0, 1)], done.alive
    ([1.0, 1.9], tensor([True, True]))
    """
    model = models if isinstance(models, Stacked) else Stacked(models)
    run = _Run(model, estimator, data, training or Training(), sets, lr, beta, seeds, torch.device(device), ahead)
    if compiled:
        run.compile()
    began = time.perf_counter()
    with matmul_precision(matmul), Progress(run.training.steps, enabled=progress) as bar:
        run.train(run.may_be_a_graph if graph is None else graph, bar)
    found = run.ended().cpu()  # waits for the device
    model.eval(), estimator.eval()
    return Replicas(model, estimator, found, run.records, time.perf_counter() - began)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """torch.set_float32_matmul_precision for a while."""
    if precision not in ("highest", "high", "medium"):
        raise InvalidValue(unknown("matmul", precision, ("highest", "high", "medium")))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Run:
    def __init__(
        self,
        model: Stacked,
        estimator: Estimator,
        data: Tensor,
        training: Training,
        sets: Sequence[int] | None,
        lr: Sequence[float] | None,
        beta: Sequence[float] | None,
        seeds: Sequence[int] | None,
        device: torch.device,
        ahead: int,
    ):
        self.n, self.training, self.device = model.n, training, device
        self._check(estimator, data, sets)
        dtype = next(model.parameters()).dtype
        self.model, self.estimator = model.to(device).train(), estimator.to(device=device, dtype=dtype).train()
        update = choose("optimizer", training.optimizer, UPDATES)
        trained = [p for part in (model, estimator) for p in part.parameters() if p.requires_grad]
        default = update.default_beta if training.beta is None else training.beta
        self.update = make_update(training.optimizer, trained, self._numbers("beta", beta, default))
        self.lr = self._numbers("lr", lr, training.lr)
        self.eta = self.lr.clone()
        self.shape: Schedule = rates(training.schedule, lr=1.0, steps=training.steps).eta
        own = seeds if seeds is not None else range(training.seed, training.seed + self.n)
        self._numbers("seeds", own, 0)
        self.streams = Streams([derive_seed(int(seed), TRAINING, 0) for seed in own], device, ahead)
        self.data = data.to(device=device, dtype=dtype).reshape(-1, *data.shape[1 if sets is None else 2 :])
        self.rows = len(data) if sets is None else data.shape[1]
        first = torch.zeros(self.n, dtype=torch.int64) if sets is None else torch.tensor(list(sets)) * self.rows
        self.offset = first.to(device).repeat_interleave(training.batch)
        self.diverged_at = torch.zeros(self.n, dtype=torch.int64, device=device)
        self.t = torch.zeros((), dtype=torch.int64, device=device)
        self.target: nn.Module = self.model
        self.records: list[dict[str, Tensor]] = []
        self.info: dict[str, Tensor] = {}

    def _check(self, estimator: Estimator, data: Tensor, sets: Sequence[int] | None) -> None:
        if estimator.shape != (self.n,):
            raise InvalidValue(
                f"{self.n} replicas need an estimator made with shape=({self.n},). Got {estimator.shape}."
            )
        if self.training.schedule == "pl" or self.training.iterate != "last":
            raise InvalidValue(
                "Replicas keep the last iterate and cannot follow the schedule 'pl': train such runs one by one. "
                f"Got '{self.training.iterate}' and '{self.training.schedule}'."
            )
        if sets is not None and (len(sets) != self.n or not all(0 <= place < len(data) for place in sets)):
            raise InvalidValue(f"The 'sets' say which of the {len(data)} data sets each of {self.n} replicas learns.")

    def _numbers(self, name: str, given: Sequence[float] | None, default: float) -> Tensor:
        values = [default] * self.n if given is None else list(given)
        if len(values) != self.n:
            raise InvalidValue(f"The '{name}' of {self.n} replicas must be as many. Got {len(values)}.")
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    @property
    def may_be_a_graph(self) -> bool:
        noise = getattr(self.estimator, "noise", None)
        return self.device.type == "cuda" and (not isinstance(noise, StackedNoise) or noise.by_streams)

    @torch.no_grad()
    def ended(self) -> Tensor:
        """The step at which each diverged; also those whose last step left parameters that are not finite."""
        whole = torch.ones(self.n, dtype=torch.bool, device=self.device)
        for parameter in self.update.parameters:
            whole &= torch.isfinite(parameter.reshape(self.n, -1)).all(1)
        return torch.where(~whole & (self.diverged_at == 0), self.training.steps, self.diverged_at)

    def compile(self) -> None:
        self.target = torch.compile(self.model)  # type: ignore[assignment]

    def train(self, graph: bool, bar: Progress) -> None:
        steps, every = self.training.steps, self.training.log_every
        replay, began = None, time.perf_counter()
        for t in range(1, steps + 1):
            self.eta.copy_(self.lr * self.shape(t))
            if graph and t == WARM_UP:
                self.streams.fix()
            if graph and t == WARM_UP + 1:
                replay = self._captured()
            if replay is None:
                self._step()
            else:
                self.streams.renew()
                replay.replay()
            over = self._over(t, began)
            if t == 1 or t == steps or t % every == 0 or over:
                self.records.append({"step": torch.tensor(t), **{k: v.clone() for k, v in self.info.items()}})
            if bar.due():
                bar.show(t, {key: float(value.mean()) for key, value in self.info.items()})
            if over:
                break

    def _over(self, t: int, began: float) -> bool:
        """Whether the training's seconds have passed; a device works behind, and is waited for now and then."""
        if self.training.seconds is None:
            return False
        if self.device.type == "cuda" and t % WAIT == 0:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began > self.training.seconds

    def _captured(self) -> torch.cuda.CUDAGraph:
        """One step as a graph; capturing computes nothing."""
        graph = torch.cuda.CUDAGraph()
        self.streams.repeat()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _step(self) -> None:
        """One step of all replicas; nothing is read back from the device."""
        self.t += 1
        index = integers(self.rows, (self.n * self.training.batch,), generator=self.streams)
        x = self.data[index + self.offset]
        objective = self.estimator(self.target, x, generator=self.streams)
        gradients = torch.autograd.grad(objective.surrogate.sum(), self.update.parameters, materialize_grads=True)
        with torch.no_grad():
            finite = torch.isfinite(objective.surrogate + objective.info["value"])
            for gradient in gradients:
                finite &= torch.isfinite(gradient.reshape(len(gradient), -1).sum(1))
            fell = ~finite & (self.diverged_at == 0)
            self.diverged_at.copy_(torch.where(fell, self.t, self.diverged_at))
            self.update.step(gradients, self.eta, self.diverged_at == 0)
        self.info = objective.info
