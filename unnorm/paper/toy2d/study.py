"""The synthetic study as a run: what is missing is computed, side by side or in processes, and written down at once."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unnorm.data.toys import toy
from unnorm.errors import InvalidValue
from unnorm.ledger import Ledger, key_of
from unnorm.names import choose, unknown
from unnorm.paper.start import Clock, claimed, hardware, provenance
from unnorm.paper.toy2d.peers import PEERS, peer_keys, peer_records
from unnorm.paper.toy2d.problem import Problem, entropy, picture, plane
from unnorm.paper.toy2d.results import FILE
from unnorm.paper.toy2d.spec import DATA, METHODS, SIZES, Size
from unnorm.paper.toy2d.stack import MOST_STEPS, STACKED, Run, Stack, stacks
from unnorm.processes import Work, check_backend, computed
from unnorm.progress import Progress

__all__ = ["Study"]

TOGETHER = {"cpu": 24, "cuda": 120}  # replicas in one computation at most: as many as their steps are tried with
FLOORS = 20  # pairs of samples of the truth


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
        if self.jobs < 1:
            raise InvalidValue(f"The 'jobs' of the study must be at least 1. Got {self.jobs}.")
        check_backend(self.backend)
        if not 0 <= self.seed < 1000:
            raise InvalidValue(f"The seed of the study must be an integer from 0 to 999. Got {self.seed}.")

    @property
    def plan(self) -> Size:
        size = SIZES[self.size]
        seconds = size.on_cpu if self.device == "cpu" and size.on_cpu is not None else size.seconds
        return replace(size, first_seed=self.seed, seconds=seconds)

    @property
    def common(self) -> dict[str, Any]:
        """What all keys hold: a cell of another size is another cell."""
        spec = ("seeds", "first_seed", "on_cpu", "rates", "n_steps", "bandwidths", "components")
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
        about = {"study": "toy2d", "size": self.size, "seed": self.seed, "device": self.device}
        shown: dict[str, Any] = {"enabled": progress, "label": "study", "lines": True}
        with claimed(folder / FILE, about, force) as ledger, Progress(self.runs, len(ledger.of("run")), **shown) as bar:
            clock = Clock(ledger, self._start(command))
            self._truths(clock, bar)
            steps = self._steps(clock, bar)
            self._networks(clock, steps, bar)
            self._compare(clock, steps)
            self._peers(clock, bar)
        return ledger

    def _start(self, command: str) -> dict[str, Any]:
        facts = {"kind": "study", "study": "toy2d", "size": self.size, "seed": self.seed, "seeds": self.plan.seeds}
        facts |= {"command": command, **provenance(self.device), "settings": asdict(self.plan)}
        return facts | {"methods": list(self.chosen), "data": list(self.sets), "device": self.device}

    def _truths(self, clock: "Clock", bar: Progress) -> None:
        """The noise floor of the metrics, and a picture, of each data set."""
        keys = {name: key_of({**self.common, "floor": name}) for name in self.sets}
        missing = [name for name in self.sets if keys[name] not in clock.ledger.keys]
        work = [(_truth_records, (name, self.plan, self.device, keys[name])) for name in missing]
        self._write_all(clock, "truths", work, bar, here=self.device == "cuda")

    def _steps(self, clock: "Clock", bar: Progress) -> dict[str, int]:
        """How many steps each stack takes: as many as fit into the seconds that a run has.

        Tried as they will be trained, so many processes at once: they share caches and memory.
        """
        first = {stack.name: stack for stack in reversed(self.stacks)}
        keys = {name: key_of({**self.common, "timing": name, "device": self.device}) for name in first}
        missing = [name for name in reversed(first) if keys[name] not in clock.ledger.keys]
        work = [(_timing, (first[name], self.plan, self.device, keys[name])) for name in missing]
        self._write_all(clock, "trials of step times", work, bar, here=self.device == "cuda")
        known = {record["key"]: record["steps"] for record in clock.ledger.of("timing")}
        return {name: known[key] for name, key in keys.items()}

    def _networks(self, clock: "Clock", steps: Mapping[str, int], bar: Progress) -> None:
        there = {record["key"]: record for record in clock.ledger.of("run")}
        work = []
        for stack in self.stacks:
            for part in stack.parts(self.plan, TOGETHER[self.device]):
                keys = [run.key(self.common, steps[stack.name]) for run in part]
                if clock.ledger.missing(keys):
                    known = [there[key] for key in keys if key in there]
                    rest = (self.plan, steps[stack.name], self.device, self.common, known)
                    work.append((_part_records, (stack, part, *rest)))
        self._write_all(clock, "networks", work, bar, here=self.device == "cuda")

    def _peers(self, clock: "Clock", bar: Progress) -> None:
        work = []
        for method in (name for name in self.chosen if name in PEERS):
            for data in self.sets:
                for seed in range(self.seed, self.seed + self.plan.seeds):
                    if clock.ledger.missing(peer_keys(method, data, seed, self.plan, self.common).values()):
                        work.append((peer_records, (method, data, seed, self.plan, self.common)))
        self._write_all(clock, "without networks", work, bar, here=False)

    def _write_all(self, clock: "Clock", part: str, work: Sequence[Work], bar: Progress, here: bool) -> None:
        """Compute pieces of work, here or shared out; write only what is not there yet."""
        pieces = (function(*arguments) for function, arguments in work) if here else None
        for records in pieces or computed(work, self.jobs, self.backend):
            clock.write(part, [one for one in records if one["kind"] != "run" or one["key"] not in clock.ledger.keys])
            bar.show(min(len({record["key"] for record in clock.ledger.of("run")}), self.runs), {}, part)

    def _compare(self, clock: "Clock", steps: Mapping[str, int]) -> None:
        """Replica-steps per second: side by side as they were trained, and one by one as they were tried."""
        ledger = clock.ledger
        replicas = {(stack.kin, stack.style, stack.n_steps): len(stack.runs(self.plan)) for stack in self.stacks}
        keys = {run.key(self.common, steps[stack.name]) for stack in self.stacks for run in stack.runs(self.plan)}
        key = key_of({**self.common, "throughput": sorted(keys)})
        timings = {(one["method"], one["style"], one["n_steps"]): one for one in ledger.of("timing")}
        if (
            not replicas.keys() <= {name for name, one in timings.items() if one["single_seconds"]}
            or key in ledger.keys
        ):
            return
        runs = {record["key"]: record for record in ledger.of("run") if record["key"] in keys}
        seconds = sum(record["seconds"] for record in runs.values())
        singly = sum(
            count * timings[name]["steps"] * timings[name]["single_seconds"] for name, count in replicas.items()
        )
        total = sum(count * timings[name]["steps"] for name, count in replicas.items())
        facts = {"kind": "throughput", "key": key, "device": hardware(self.device), "replicas": sum(replicas.values())}
        facts |= {"stacked_per_second": total / seconds, "single_per_second": total / singly, "ratio": singly / seconds}
        clock.write("networks", [facts])


def _truth_records(data: str, size: Size, device: str, key: str) -> list[dict[str, Any]]:
    """What samples of the truth get from the metrics, what its density gets on the test rows, and how it looks."""
    pairs = [Problem(data, 5_000 + k, size).floor(device) for k in range(FLOORS)]
    facts: dict[str, Any] = {"kind": "floor", "key": key, "data": data, "n": FLOORS, "seeds": size.seeds}
    found = {metric: [pair[metric] for pair in pairs] for metric in ("mmd", "frechet")}
    seeds = range(size.first_seed, size.first_seed + size.seeds)
    truth = toy(data)
    found["test_nll"] = [-float(truth.log_prob(Problem(data, seed, size).test).mean()) for seed in seeds]
    for metric, values in found.items():
        facts |= {metric: float(np.mean(values)), f"{metric}_sd": float(np.std(values, ddof=1))}
    drawn = {"kind": "picture", "method": "truth", "data": data, "seed": size.first_seed}
    return [
        facts | {"entropy": entropy(plane(data, size.cells))},
        drawn | picture(truth.log_prob, data),
    ]


def _timing(stack: Stack, size: Size, device: str, key: str) -> list[dict[str, Any]]:
    seconds, replicas = stack.step_seconds(size, device)
    single = stack.single_seconds(size, device) if device == "cuda" else None
    steps = max(2, min(MOST_STEPS, round(size.seconds / seconds)))
    facts = {"kind": "timing", "key": key, "method": stack.kin, "style": stack.style, "n_steps": stack.n_steps}
    return [facts | {"replicas": replicas, "step_seconds": seconds, "single_seconds": single, "steps": steps}]


def _part_records(stack: Stack, part: Sequence[Run], *rest: Any) -> list[dict[str, Any]]:
    return list(stack.records(part, *rest))
