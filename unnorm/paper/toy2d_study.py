"""The synthetic study as a run: what is missing is computed, side by side or in processes, and written down at once."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed, parallel_config

import unnorm
from unnorm.errors import InvalidValue
from unnorm.ledger import Ledger, key_of
from unnorm.names import choose, unknown
from unnorm.paper.toy2d import DATA, METHODS, SIZES, Size
from unnorm.paper.toy2d_peers import PEERS, peer_keys, peer_records
from unnorm.paper.toy2d_problem import Problem, entropy, picture, plane
from unnorm.paper.toy2d_results import FILE
from unnorm.paper.toy2d_stack import MOST_STEPS, STACKED, Stack, stacks
from unnorm.progress import Progress

__all__ = ["Study", "cores"]

TOGETHER = {"cpu": 24, "cuda": 600}  # replicas in one computation at most
FLOORS = 5  # pairs of samples of the truth


@dataclass(frozen=True)
class Study:
    """What is run, and where.

    Attributes:
        size: smoke, laptop or full.
        seed: the first of the seeds.
        device: cpu or cuda.
        jobs: processes; on a GPU only the methods without a network are shared out.
        backend: of joblib: "loky" for local processes, or "dask", "ray" or any other that is registered.
        methods, data: some of them only; all when empty.

    >>> Study("smoke").runs
    396
    >>> Study("tiny")
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: Unknown size 'tiny'. Known: smoke, laptop, full.
    """

    size: str = "laptop"
    seed: int = 0
    device: str = "cpu"
    jobs: int = 1
    backend: str = "loky"
    methods: tuple[str, ...] = ()
    data: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choose("size", self.size, SIZES)
        for what, given, known in (("method", self.methods, METHODS), ("data set", self.data, DATA)):
            for name in given:
                if name not in known:
                    raise InvalidValue(unknown(what, name, known))
        if not 0 <= self.seed < 1000:
            raise InvalidValue(f"The seed of the study must be an integer from 0 to 999. Got {self.seed}.")

    @property
    def plan(self) -> Size:
        return replace(SIZES[self.size], first_seed=self.seed)

    @property
    def common(self) -> dict[str, Any]:
        """What all keys hold: a cell of another size is another cell."""
        spec = ("seeds", "first_seed", "rates", "n_steps", "bandwidths", "components")
        return {"study": "toy2d", **{name: value for name, value in asdict(self.plan).items() if name not in spec}}

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.methods or tuple(METHODS)

    @property
    def sets(self) -> tuple[str, ...]:
        return self.data or DATA

    @property
    def stacks(self) -> list[Stack]:
        names = [name for name in self.chosen if name in STACKED]
        return stacks(self.plan, self.sets, names, apart=self.device == "cpu" and self.size != "smoke")

    @property
    def runs(self) -> int:
        """How many there will be."""
        peers = sum(len(PEERS[name][2](self.plan)) for name in self.chosen if name in PEERS)
        return sum(len(stack.runs(self.plan)) for stack in self.stacks) + peers * len(self.sets) * self.plan.seeds

    def run(self, folder: Path, *, command: str = "", force: bool = False, progress: bool | None = None) -> Ledger:
        """Compute what the folder does not hold yet; its lines are finished cells, never computed twice."""
        ledger = _claimed(folder, self, force)
        ledger.write([self._start(command)])
        with Progress(self.runs, len(ledger.of("run")), enabled=progress, label="study") as bar:
            with _clocked(ledger, "truths"):
                self._truths(ledger)
            with _clocked(ledger, "trials of step times"):
                steps = self._steps(ledger)
            with _clocked(ledger, "networks"):
                self._networks(ledger, steps, bar)
            self._compare(ledger)
            with _clocked(ledger, "without networks"):
                self._peers(ledger, bar)
        return ledger

    def _start(self, command: str) -> dict[str, Any]:
        size = asdict(self.plan)
        facts = {"kind": "study", "study": "toy2d", "size": self.size, "seed": self.seed, "seeds": self.plan.seeds}
        facts |= {"command": command, "version": unnorm.__version__, "commit": _commit(), "hardware": _hardware(self)}
        facts |= {"python": platform.python_version(), "torch": torch.__version__, "settings": size}
        facts |= {"methods": list(self.chosen), "data": list(self.sets)}
        return facts | {"started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}

    def _truths(self, ledger: Ledger) -> None:
        """The noise floor of the metrics, and a picture, of each data set."""
        for name in self.sets:
            key = key_of({**self.common, "floor": name})
            if not ledger.missing([key]):
                continue
            pairs = [Problem(name, 5_000 + k, self.plan).floor() for k in range(FLOORS)]
            facts: dict[str, Any] = {"kind": "floor", "key": key, "data": name, "n": FLOORS}
            for metric in ("mmd", "frechet"):
                values = [pair[metric] for pair in pairs]
                facts |= {metric: float(np.mean(values)), f"{metric}_sd": float(np.std(values, ddof=1))}
            truth = Problem(name, 0, self.plan).truth
            drawn = {
                "kind": "picture",
                "method": "truth",
                "data": name,
                "seed": self.seed,
                **picture(truth.log_prob, name),
            }
            ledger.write([facts | {"entropy": entropy(plane(name, self.plan.cells))}, drawn])

    def _steps(self, ledger: Ledger) -> dict[str, int]:
        """How many steps each stack takes: as many as fit into the seconds that a run has."""
        known = {record["key"]: record["steps"] for record in ledger.of("timing")}
        steps = dict[str, int]()
        for stack in self.stacks:
            if stack.name in steps:
                continue
            key = key_of({**self.common, "timing": stack.name, "device": self.device})
            if key not in known:
                record = self._timing(stack) | {"key": key}
                ledger.write([record])
                known[key] = record["steps"]
            steps[stack.name] = known[key]
        return steps

    def _timing(self, stack: Stack) -> dict[str, Any]:
        with _Threads(self.jobs):
            seconds, replicas = stack.step_seconds(self.plan, self.device)
            single = stack.single_seconds(self.plan, self.device) if self.device == "cuda" else None
        steps = max(2, min(MOST_STEPS, round(self.plan.seconds / seconds)))
        facts = {"kind": "timing", "method": stack.methods[0], "style": stack.style, "n_steps": stack.n_steps}
        return facts | {"replicas": replicas, "step_seconds": seconds, "single_seconds": single, "steps": steps}

    def _networks(self, ledger: Ledger, steps: Mapping[str, int], bar: Progress) -> None:
        work = []
        for stack in self.stacks:
            keys = [run.key(self.common, steps[stack.name]) for run in stack.runs(self.plan)]
            if ledger.missing(keys):
                work.append((_stack_records, (stack, self.plan, steps[stack.name], self.device, self.common)))
        self._write_all(ledger, work, bar, jobs=1 if self.device == "cuda" else self.jobs)

    def _peers(self, ledger: Ledger, bar: Progress) -> None:
        work = []
        for method in (name for name in self.chosen if name in PEERS):
            for data in self.sets:
                for seed in range(self.seed, self.seed + self.plan.seeds):
                    if ledger.missing(peer_keys(method, data, seed, self.plan, self.common).values()):
                        work.append((peer_records, (method, data, seed, self.plan, self.common)))
        self._write_all(ledger, work, bar, jobs=self.jobs)

    def _write_all(
        self, ledger: Ledger, work: Sequence[tuple[Callable[..., Any], Any]], bar: Progress, jobs: int
    ) -> None:
        done = len({record["key"] for record in ledger.of("run")})
        for records in _computed(work, jobs, self.backend):
            ledger.write(records)
            done += sum(record["kind"] == "run" for record in records)
            bar.show(min(done, self.runs), {})

    def _compare(self, ledger: Ledger) -> None:
        """Replica-steps per second: side by side as they were trained, and one by one as they were tried."""
        timings = [record for record in ledger.of("timing") if record["single_seconds"]]
        if not timings or ledger.of("throughput"):
            return
        counts = {stack.name: len(stack.runs(self.plan)) for stack in self.stacks}
        names = {(stack.methods[0], stack.style, stack.n_steps): stack.name for stack in self.stacks}
        work = [(one, counts[names[one["method"], one["style"], one["n_steps"]]] * one["steps"]) for one in timings]
        seconds = sum(record["seconds"] or 0 for record in ledger.of("run") if record["method"] in STACKED)
        singly = sum(steps * one["single_seconds"] for one, steps in work)
        total = sum(steps for _, steps in work)
        facts = {"kind": "throughput", "device": _hardware(self), "replicas": sum(counts.values())}
        facts |= {"stacked_per_second": total / seconds, "single_per_second": total / singly, "ratio": singly / seconds}
        ledger.write([facts])


@contextmanager
def _clocked(ledger: Ledger, part: str) -> Iterator[None]:
    """Note how long a part of the study took, also when it is interrupted."""
    began = time.perf_counter()
    try:
        yield
    finally:
        ledger.write([{"kind": "clock", "part": part, "seconds": round(time.perf_counter() - began, 2)}])


def _stack_records(
    stack: Stack, size: Size, steps: int, device: str, common: Mapping[str, Any]
) -> list[dict[str, Any]]:
    return list(stack.records(size, steps, device, common, TOGETHER[device]))


def _alone(function: Callable[..., Any], arguments: Any) -> Any:
    """One piece of work in a process of its own: one thread, as there is one process for each core."""
    torch.set_num_threads(1)
    return function(*arguments)


def _computed(work: Sequence[tuple[Callable[..., Any], Any]], jobs: int, backend: str) -> Iterator[Any]:
    """The results of all pieces of work, each as soon as it is there."""
    if jobs == 1 and backend == "loky":
        yield from (function(*arguments) for function, arguments in work)
        return
    with _ready(backend), parallel_config(backend=backend, n_jobs=jobs):
        if backend == "ray":  # it hands back all results at once: a round at a time, so that a kill loses one at most
            for start in range(0, len(work), 2 * jobs):
                yield from Parallel()(delayed(_alone)(*piece) for piece in work[start : start + 2 * jobs])
            return
        yield from Parallel(return_as="generator_unordered")(delayed(_alone)(*piece) for piece in work)


@contextmanager
def _ready(backend: str) -> Iterator[None]:
    """Make joblib's backend ready. Where a cluster is, Dask and Ray know from DASK_SCHEDULER_ADDRESS and RAY_ADDRESS;
    without these both make one of this machine's cores."""
    with ExitStack() as stack:
        try:
            if backend == "dask":
                from distributed import Client

                stack.enter_context(Client())
            elif backend == "ray":
                from ray.util.joblib import register_ray

                register_ray()
            with parallel_config(backend=backend):
                pass
        except (ValueError, ImportError) as problem:
            raise InvalidValue(f"joblib cannot use the backend '{backend}': {problem}") from problem
        yield


class _Threads:
    """As many threads for torch as a process of the study has."""

    def __init__(self, jobs: int):
        self.jobs = jobs

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        if self.jobs > 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


def _claimed(folder: Path, study: Study, force: bool) -> Ledger:
    """The folder's ledger, if it is this study's or there is none yet."""
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if force:
            path.unlink(missing_ok=True)
    except OSError as problem:
        raise InvalidValue(f"The output folder '{folder}' cannot be written: {problem.strerror}.") from problem
    ledger = Ledger(path)
    for start in ledger.of("study"):
        if (start.get("size"), start.get("seed")) != (study.size, study.seed):
            raise InvalidValue(
                f"'{folder}' holds the study of size {start.get('size')} and seed {start.get('seed')}. "
                "Use --force to replace it, or another --out."
            )
    return ledger


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hardware(study: Study) -> str:
    device = f"{torch.cuda.get_device_name()}, " if study.device == "cuda" else ""
    return f"{device}{cores()} CPU cores"


def _commit() -> str | None:
    """The commit of the source tree this runs from; the variable UNNORM_COMMIT names it where there is no git."""
    if given := os.environ.get("UNNORM_COMMIT"):
        return given
    try:
        here = Path(__file__).resolve().parent
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
