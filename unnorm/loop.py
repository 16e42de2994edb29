"""The training loop: `step`, and `fit`, which repeats it, records it, and can be killed and resumed at any moment.

Device, precision and processes are the machine's business: one process on the CPU, or a configured Lightning `Fabric`.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unnorm.checkpoint import (
    CHECKPOINT,
    HISTORY,
    flatten_optimizer,
    read_tensors,
    restore_optimizer,
    section,
    write_atomically,
    write_tensors,
)
from unnorm.data.rows import Rows, RowSource
from unnorm.device import Machine, OneProcess
from unnorm.diagnostics import certified_limit
from unnorm.errors import BrokenFile, Interrupted, InvalidValue, NonFiniteObjective
from unnorm.estimators.base import Estimator
from unnorm.health import Health
from unnorm.iterates import VALIDATED, Iterates
from unnorm.optim import Rates, set_rates
from unnorm.progress import Progress
from unnorm.randomness import TRAINING, stream
from unnorm.training import Training
from unnorm.trend import Looks
from unnorm.types import History, LogDensity, log_density

__all__ = ["CHECKPOINT", "HISTORY", "check_resumable", "step", "train"]

LEAST_EFFECTIVE = 30  # draws behind a validated value


def step(
    model: LogDensity,
    estimator: Estimator,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    *,
    generator: torch.Generator | None = None,
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
    inspect: Callable[[dict[str, Tensor]], Any] | None = None,
) -> dict[str, Tensor]:
    """One step of optimization on the batch `x`; returns the objective's `info`.

    A non-finite objective raises before anything is updated. Of a finite one `inspect` sees the `info` first, and may
    raise too.

    >>> from unnorm import MECO, Gaussian, Quadratic, optim
    >>> model, estimator = Quadratic(1), MECO(Gaussian(1))
    >>> optimizer = optim.sgd(model.parameters(), lr=0.1)
    >>> sorted(step(model, estimator, optimizer, torch.ones(4, 1)))
    ['ess', 'gap', 'lag', 'log_u', 'value']
    """
    objective = estimator(model, x, generator=generator)
    finite = _Answer(torch.isfinite(objective.surrogate + objective.info["value"]))
    if inspect is not None and finite.given():
        inspect(objective.info)
    optimizer.zero_grad()
    backward(objective.surrogate)
    if not finite.given():
        optimizer.zero_grad()
        numbers = ", ".join(f"{name} = {float(value):.4g}" for name, value in objective.info.items())
        raise NonFiniteObjective(
            f"the objective is not finite (surrogate = {objective.surrogate.item():.4g}, {numbers}). "
            "Lower the learning rate, bring the noise closer to the data, or check the model's output on this batch."
        )
    optimizer.step()
    return objective.info


class _Answer:
    """A yes or no that a GPU is still to find: asked for later, while the work after it is under way already."""

    def __init__(self, value: Tensor):
        self._value = value.to("cpu", non_blocking=True)
        self._ready = torch.cuda.current_stream(value.device).record_event() if value.is_cuda else None

    def given(self) -> bool:
        if self._ready is not None:
            self._ready.synchronize()
        return bool(self._value)


def train(
    model: nn.Module,
    estimator: Estimator,
    data: RowSource,
    training: Training | None = None,
    *,
    validation: Tensor | None = None,
    rates: Rates | None = None,
    generator: torch.Generator | None = None,
    fabric: Machine | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    strict: bool = False,
    watch: bool = False,
    progress: bool | None = None,
) -> History:
    """Train `model` in place and return the history.

    Args:
        model: any module mapping (n, *event) to (n,).
        estimator: the objective; trained too where it has Parameters.
        data: a tensor of shape (n, *event), or any RowSource.
        training: how to train.
        validation: rows kept out of training; their objective goes into the history and decides for iterate="best"
            and "best-ema".
        rates: sequences for eta, beta and gamma in place of those `training.schedule` names. A checkpoint holds
            neither these nor `validation`: to resume, give the same again.
        generator: draws batches and noise, on the fabric's device; seeded with `training.seed` when None.
        fabric: device, precision and processes; one process on the CPU when None.
        folder: where to write the history and checkpoints; nothing is written when None.
        resume: continue from the folder's checkpoint, bit for bit as if never interrupted; but for what rows
            (`ImageRows`) or layers (dropout) draw for themselves.
        strict: raise `Unhealthy` where the health monitor (`unnorm.health`) would warn.
        watch: compare the looks at the validation rows row by row, so that the history's `trend` can say whether
            training was still improving. Costs one more evaluation of the model at each look.
        progress: show a progress bar; when None, only if standard error is a terminal.

    Ctrl-C ends the current step, saves, and raises `Interrupted`.

    >>> from unnorm import MECO, Gaussian, Quadratic
    >>> x = 1.0 + torch.randn(1000, 1, generator=torch.Generator().manual_seed(0))
    >>> model = Quadratic(1)
    >>> history = train(model, MECO(Gaussian.fit(x)), x, Training(steps=300, lr=0.03, schedule="cosine"))
    >>> bool((model.mean - x.mean()).abs() < 0.05), history["step"][-1]
    (True, 300)
    """
    training = training or Training()
    fabric = fabric or OneProcess()
    run = _Run(model, estimator, data, training, validation, rates, generator, fabric, Path(folder) if folder else None)
    run.health.strict = strict
    run.looks = Looks() if watch and validation is not None else None
    if resume:
        run.load()
    elif run.folder is not None and (run.folder / CHECKPOINT).exists():
        raise InvalidValue(f"'{run.folder}' holds a run already: continue it with resume=True, or give another folder.")
    else:
        run.save()
    shown = progress if fabric.is_global_zero else False
    with Progress(training.steps, run.t, enabled=shown) as bar, _ctrl_c() as stopped:
        run.first_look()
        while run.t < training.steps and not stopped.is_set() and not run.ended:
            run.advance(bar)
    return run.finish()


class _Run:
    """The state of one training run: everything a checkpoint holds."""

    def __init__(
        self,
        model: nn.Module,
        estimator: Estimator,
        data: RowSource,
        training: Training,
        validation: Tensor | None,
        rates: Rates | None,
        generator: torch.Generator | None,
        fabric: Machine,
        folder: Path | None,
    ):
        parameters = [p for module in (model, estimator) for p in module.parameters() if p.requires_grad]
        if len(data) == 0:
            raise InvalidValue("There are no data to train on.")
        if estimator.shape:
            raise InvalidValue(f"An estimator with shape={estimator.shape} is for replicas: train by replicas.fit.")
        if not any(p.requires_grad for p in model.parameters()):
            raise InvalidValue("The model has no parameters to train.")
        if training.iterate in VALIDATED and validation is None:
            raise InvalidValue(
                f"The iterate '{training.iterate}' is chosen on validation data: give train(..., validation=rows)."
            )
        if training.iterate in VALIDATED and not estimator.comparable:
            raise InvalidValue(
                f"The iterate '{training.iterate}' needs a value that can be compared between models, and "
                f"{type(estimator).__name__} has none without a noise to judge by: give it one."
            )
        if fabric.world_size > 1 and estimator.one_process:
            raise InvalidValue(
                f"The chains of {type(estimator).__name__} live in one process. Got {fabric.world_size}."
            )
        self.training, self.fabric, self.folder = training, fabric, folder
        self.rates = rates or training.rates()
        self.model, self.estimator = model.train(), estimator.train()
        self.settings = estimator.settings
        self.optimizer = training.make_optimizer(parameters)
        self.wrapped, self.wrapped_optimizer = fabric.setup(model, self.optimizer)
        self.dtype = parameters[0].dtype
        self.estimator.to(device=fabric.device, dtype=self.dtype)
        rows = Rows(data) if isinstance(data, np.ndarray) else data
        self.data = rows.to(fabric.device) if isinstance(rows, Tensor) else rows
        self.validation = None if validation is None else validation.to(device=fabric.device, dtype=self.dtype)
        self.generator = self._generator(generator)
        self.iterates = Iterates(training.iterate, model)
        self.health = Health(
            self.data[torch.zeros(1, dtype=torch.int64)].numel(),
            estimator.draws(training.batch),
            parts=estimator.parts,
            memory=estimator.effective_draws,
        )
        self.t, self.seconds, self.learned = 0, 0.0, 0.0
        self.kept_step: int | None = None
        self.looks: Looks | None = None
        self.records: list[dict[str, float]] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def _generator(self, given: torch.Generator | None) -> torch.Generator:
        device = self.fabric.device
        if given is None:
            return stream(self.training.seed, TRAINING, self.fabric.global_rank, device=device)
        if given.device.type != device.type:
            raise InvalidValue(f"The generator lives on '{given.device}', the training on '{device}'.")
        return given

    def _batch(self) -> Tensor:
        """Rows drawn uniformly, with replacement, as Algorithm 1 draws them."""
        shape, device = (self.training.batch,), self.generator.device
        index = torch.randint(len(self.data), shape, generator=self.generator, device=device)
        rows = self.data[index.to(getattr(self.data, "device", "cpu"))]
        return rows.to(device=self.fabric.device, dtype=self.dtype)

    def advance(self, bar: Progress) -> None:
        """One step, and whatever is due after it."""
        t, began = self.t + 1, time.perf_counter()
        eta = self.rates.eta(t)
        set_rates(self.optimizer, eta, self.rates.beta(t) if self.rates.beta else None)
        if self.rates.gamma:
            self.estimator.set_gamma(self.rates.gamma(t))
        self.iterates.observe(self.model, generator=self.generator)
        x = self._batch()
        try:
            with _default_dtype(self.dtype):
                info = step(
                    self.wrapped,
                    self.estimator,
                    self.wrapped_optimizer,
                    x,
                    generator=self.generator,
                    backward=self._backward,
                    inspect=(lambda info: self.health.look(t, _floats(info))) if self.health.due(t) else None,
                )
        except NonFiniteObjective as problem:
            raise NonFiniteObjective(f"At step {t} of {self.training.steps} {problem}") from None
        self.t, self.seconds = t, self.seconds + time.perf_counter() - began
        self.learned += eta
        last = t == self.training.steps
        validating = self.validation is not None and t % self.training.validate_every == 0
        logging = last or validating or t == 1 or t % self.training.log_every == 0
        if logging or bar.due():
            waited = time.perf_counter()
            numbers = _floats(info)
            self.seconds += time.perf_counter() - waited  # a GPU was still at work on the steps before
            bar.show(t, numbers)
            if validating:
                numbers["validation"] = self._validate()
                if self.training.iterate in VALIDATED:
                    numbers["best"] = float(self.iterates.least)
            if logging:
                self._record({"step": t, **numbers, "lr": eta, "seconds": round(self.seconds, 3)})
        if t % self.training.checkpoint_every == 0:
            self.save()

    def first_look(self) -> None:
        """The model before training is an iterate too: the best one, where there is nothing to learn."""
        if self.t == 0 and self.validation is not None:
            self._validate()

    @property
    def ended(self) -> bool:
        """Whether its seconds are over, or validation has seen nothing better for as long as patience lasts."""
        return self._out_of_patience or (self.training.seconds is not None and self.seconds > self.training.seconds)

    @property
    def _out_of_patience(self) -> bool:
        looks = [record["validation"] for record in self.records if "validation" in record]
        patience = self.training.patience
        return patience is not None and len(looks) > patience and min(looks) not in looks[-patience:]

    @torch.no_grad()
    def _validate(self) -> float:
        """The objective on the validation rows, always with the same noise draws, so that iterates can be compared."""
        assert self.validation is not None
        generator = stream(self.training.seed, "validation", device=self.fabric.device)
        self.model.eval(), self.estimator.eval()
        looked_at = self.iterates.candidate(self.model)
        info = self.estimator(looked_at, self.validation, generator=generator).info
        value = float(info["value"])
        if self.looks is not None:
            log_p = log_density(looked_at, self.validation)
            self.looks.add(self.t, self.learned, value + log_p.mean() - log_p)
        self.model.train(), self.estimator.train()
        if self._certain(info):
            if value < self.iterates.least:
                self.kept_step = self.t
            self.iterates.consider(looked_at, value)
        return value

    def _certain(self, info: Mapping[str, Tensor]) -> bool:
        """Whether the noise draws bear the value: weights on a few of them make the worst iterate look best."""
        assert self.validation is not None
        draws = self.estimator.draws(len(self.validation))
        few = float(info.get("ess", torch.tensor(1.0))) * draws < min(LEAST_EFFECTIVE, draws / 2)
        return not few and float(info.get("gap", torch.tensor(0.0))) <= certified_limit(draws)

    def _backward(self, surrogate: Tensor) -> None:
        self.fabric.backward(surrogate)
        if self.fabric.world_size > 1:  # the model's gradients are averaged by its wrapper, the estimator's here
            for parameter in self.estimator.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(_tensor(self.fabric.all_reduce(parameter.grad, reduce_op="mean")))

    def _record(self, record: dict[str, float]) -> None:
        self.records.append(record)
        if self.folder is not None and self.fabric.is_global_zero:
            with (self.folder / HISTORY).open("a") as file:
                file.write(json.dumps(record) + "\n")

    def save(self) -> None:
        """Replace the folder's checkpoint by the present state, unless that is broken."""
        self._check_parameters()
        if self.folder is None:
            return
        generators = self.generator.get_state()[None]
        if self.fabric.world_size > 1:
            generators = _tensor(self.fabric.all_gather(generators[0].to(self.fabric.device))).cpu()
        if not self.fabric.is_global_zero:
            return
        optimizer, plain = flatten_optimizer(self.optimizer)
        parts = {
            "model": self.model.state_dict(),
            "estimator": self.estimator.state_dict(),
            "iterates": self.iterates.state_dict(),
            "optimizer": optimizer,
            "looks": {} if self.looks is None else self.looks.tensors(),
        }
        tensors = {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}
        note = {"step": self.t, "seconds": self.seconds, "training": asdict(self.training), "optimizer": plain}
        note |= {"settings": self.settings, "warnings": self.health.told, "warned_at": self.health.steps}
        note |= {"learned": self.learned, "kept_step": self.kept_step}
        write_tensors(self.folder / CHECKPOINT, {**tensors, "generators": generators}, note)
        if self.t == 0:
            (self.folder / HISTORY).write_text("")

    def _check_parameters(self) -> None:
        if not all(torch.isfinite(parameter).all() for parameter in self.model.parameters()):
            raise NonFiniteObjective(f"After step {self.t} the parameters are not finite. Lower the learning rate.")

    def load(self) -> None:
        """Continue from the folder's checkpoint."""
        if self.folder is None:
            raise InvalidValue("To resume, give the folder that holds the checkpoint.")
        path = self.folder / CHECKPOINT
        tensors, note = read_tensors(path)
        check_resumable(note, self.training, self.settings)
        try:
            self.model.load_state_dict(section(tensors, "model"))
            self.estimator.load_state_dict(section(tensors, "estimator"))
            self.iterates.load_state_dict(section(tensors, "iterates"))
            restore_optimizer(self.optimizer, section(tensors, "optimizer"), note["optimizer"])
            # A copy, because set_state reads from the start of a slice's storage.
            self.generator.set_state(tensors["generators"][self.fabric.global_rank].clone())
        except (RuntimeError, KeyError, IndexError, ValueError) as problem:
            raise BrokenFile(f"'{path}' does not belong to this model and estimator: {problem}") from problem
        self.t, self.seconds, self.learned = note["step"], note["seconds"], note["learned"]
        self.kept_step = note["kept_step"]
        if self.looks is not None:
            self.looks = Looks.of(section(tensors, "looks"))
        before = self.health
        self.health = Health(
            before.event,
            before.draws,
            parts=before.parts,
            memory=before.memory,
            strict=before.strict,
            told=note["warnings"],
            steps=note["warned_at"],
        )
        self.records = _read_history(self.folder / HISTORY, self.t)
        if self.fabric.is_global_zero:
            lines = "".join(json.dumps(record) + "\n" for record in self.records)
            write_atomically(self.folder / HISTORY, lines.encode())

    def finish(self) -> History:
        """Save, and hand back the chosen iterate; after Ctrl-C, save and say so."""
        if self.t % self.training.checkpoint_every or self.t == 0:
            self.save()
        if self.t < self.training.steps and not self.ended:
            kept = f"Saved in '{self.folder}'" if self.folder else "Nothing was saved"
            raise Interrupted(f"Stopped after step {self.t} of {self.training.steps}. {kept}.")
        self.estimator.set_gamma(None)
        self.iterates.restore(self.model)
        self.model.eval(), self.estimator.eval()
        step = self.kept_step if self.training.iterate in VALIDATED else None
        trend = None
        if self.looks is not None:
            trend = self.looks.trend(self.t if step is None else step, self._out_of_patience)
        return History(self.records, tuple(self.health.told), tuple(self.health.steps), step, trend)


def check_resumable(note: Mapping[str, Any], training: Training, settings: Mapping[str, Any]) -> None:
    """Refuse to resume a checkpoint with other settings; only what leaves the past untouched may change."""
    free = {"log_every", "checkpoint_every"}
    if training.schedule != "cosine":
        free.add("steps")
    before, now = note["training"] | note["settings"], asdict(training) | dict(settings)
    for name in sorted((before.keys() | now.keys()) - free):
        if (old := before.get(name)) != (new := now.get(name)):
            raise InvalidValue(f"This run was started with {name} = {old}; it cannot resume with {new}.")
    if note["step"] > training.steps:
        raise InvalidValue(f"This run has done {note['step']} steps already; it cannot resume to {training.steps}.")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Fabric casts a module's output to torch's default type: for a float64 model that must be float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _floats(info: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in info.items()}


def _tensor(value: Any) -> Tensor:
    """Fabric's collectives take and return any collection of tensors; ours are single ones."""
    assert isinstance(value, Tensor)
    return value


def _read_history(path: Path, last: int) -> list[dict[str, float]]:
    """The records up to step `last`; a killed run may have written later ones, and half a line."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            if record["step"] <= last:
                records.append(record)
        except (ValueError, KeyError, TypeError):
            break
    return records


@contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event that is looked at between steps; a second one interrupts as usual."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
