"""The study of images as a run: what its ledger lacks is computed, and written down at once."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unnorm.device import fabric_for
from unnorm.errors import InvalidValue
from unnorm.ledger import Ledger, key_of
from unnorm.names import choose, unknown
from unnorm.paper.mnist.judge import Judge, nearest, trained
from unnorm.paper.mnist.problem import Problem
from unnorm.paper.mnist.results import FILE
from unnorm.paper.mnist.runs import bits_of_noise, forget, outcome, spacing, step_seconds
from unnorm.paper.mnist.spec import METHODS, NOISES, SIZES, Row, Size, rows
from unnorm.paper.start import Clock, claimed, provenance
from unnorm.progress import Progress

__all__ = ["FILE", "Study"]


@dataclass(frozen=True)
class Study:
    """What is run, and where.

    Attributes:
        size: smoke, laptop, desktop or full.
        seed: the first of the seeds.
        device: cpu or cuda.
        methods, noises: some of them only; all when empty.
        root: the folder of the data sets; UNNORM_DATA's when None.
        seconds: of training, the same for every run; the size's when None.
        seeds: of every row; as many as the size has when None.
        download: fetch the data where they are missing.

    >>> len(Study("smoke").rows)
    24
    >>> Study("smoke", methods=("mecho",))
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: Unknown method 'mecho'. Did you mean 'meco'? Known: nce, nce-ngd, ...
    """

    size: str = "laptop"
    seed: int = 0
    device: str = "cpu"
    methods: tuple[str, ...] = ()
    noises: tuple[str, ...] = ()
    root: Path | None = None
    seconds: float | None = None
    seeds: int | None = None
    download: bool = False

    def __post_init__(self) -> None:
        choose("size", self.size, SIZES)
        for what, given, known in (("method", self.methods, METHODS), ("noise", self.noises, NOISES)):
            for name in given:
                if name not in known:
                    raise InvalidValue(unknown(what, name, known))
        if not self.rows:
            raise InvalidValue("None of these methods is run with any of these noises.")
        if not 0 <= self.seed < 1000:
            raise InvalidValue(f"The seed of the study must be an integer from 0 to 999. Got {self.seed}.")
        for name in ("seconds", "seeds"):
            if (given := getattr(self, name)) is not None and not 0 < given < math.inf:
                raise InvalidValue(f"The {name} of the study must be positive. Got {given}.")

    @property
    def plan(self) -> Size:
        size = SIZES[self.size]
        return replace(size, first_seed=self.seed, seconds=self.seconds or size.seconds, seeds=self.seeds or size.seeds)

    @property
    def rows(self) -> list[Row]:
        return rows(self.methods, self.noises)

    @property
    def cells(self) -> list[tuple[Row, int]]:
        """First every row once, then the other seeds."""
        seeds = range(self.seed, self.seed + self.plan.seeds)
        return [(row, seed) for seed in seeds for row in reversed(self.rows)]

    @property
    def common(self) -> dict[str, Any]:
        """What all keys hold: a cell of another size is another cell."""
        free = ("seeds", "first_seed")
        return {"study": "mnist", **{name: value for name, value in asdict(self.plan).items() if name not in free}}

    def key(self, **what: Any) -> str:
        return key_of({**self.common, **what})

    def run(self, folder: Path, *, command: str = "", force: bool = False, progress: bool | None = None) -> Ledger:
        """Compute what the folder does not hold yet; its lines are finished cells, never computed twice."""
        about = {"study": "mnist", "size": self.size, "seed": self.seed, "device": self.device}
        about["seconds"] = self.plan.seconds
        before = torch.get_float32_matmul_precision()
        with claimed(folder / FILE, about, force) as ledger:
            if force:
                _forget(folder)
            if self.device == "cuda":
                torch.set_float32_matmul_precision("high")
            try:
                _Work(self, folder, ledger, command, progress).all()
            finally:
                torch.set_float32_matmul_precision(before)
        return ledger

    def start(self, command: str) -> dict[str, Any]:
        facts = {"kind": "study", "study": "mnist", "size": self.size, "seed": self.seed, "seeds": self.plan.seeds}
        facts["seconds"] = self.plan.seconds
        facts |= {"command": command, **provenance(self.device), "settings": asdict(self.plan)}
        return facts | {"rows": [list(row) for row in self.rows], "device": self.device}


def _forget(folder: Path) -> None:
    """What an earlier study keeps beside its ledger."""
    for pattern in ("noise-*.safetensors", "classifier.safetensors", "samples-*.png", "nearest-*.png", "run-*/*"):
        for path in folder.glob(pattern):
            path.unlink()
    for left in folder.glob("run-*"):
        left.rmdir()


class _Work:
    """The study at work in a folder."""

    def __init__(self, study: Study, folder: Path, ledger: Ledger, command: str, progress: bool | None):
        self.study, self.folder, self.ledger, self.progress = study, folder, ledger, progress
        self.clock = Clock(ledger, study.start(command))
        fabric = fabric_for(study.device, "bf16" if study.device == "cuda" else study.plan.precision)
        self.problem = Problem(study.plan, folder, fabric, study.root, study.download)
        self._judge: Judge | None = None

    def all(self) -> None:
        study = self.study
        keys = {cell: study.key(run=list(cell[0]), seed=cell[1]) for cell in study.cells}
        done = len(keys) - len(self.ledger.missing(keys.values()))
        with Progress(len(keys), done, enabled=self.progress, label="study", lines=True) as bar:
            for (row, seed), key in keys.items():
                if key in self.ledger.keys:
                    continue
                bar.show(done, {}, f"{row.title}, seed {seed}")
                self.noise_alone(row)
                self.one(row, seed, key)
                done += 1
                bar.show(done, {}, row.title)

    def one(self, row: Row, seed: int, key: str) -> None:
        alphas = tuple(self.waymarks(row.noise)) if METHODS[row.method].way == "waymarks" else (0.0, 1.0)
        steps = self.steps(row, alphas)
        facts = {"kind": "run", "key": key, "method": row.method, "noise": row.noise, "seed": seed}
        found = outcome(self.problem, row, seed, steps, alphas, self.judge, self.folder, more=seed == self.study.seed)
        self.clock.write("runs", [facts | found])
        forget(self.folder, row, seed)

    def noise_alone(self, row: Row) -> None:
        """Of the row's noise, if that has a density, and of what is beneath its network."""
        beneath = row.noise if METHODS[row.method].bridged else "gaussian"
        for noise in dict.fromkeys(name for name in (beneath, row.noise) if name != "empirical"):
            key = self.study.key(alone=noise)
            if key not in self.ledger.keys:
                facts = {"kind": "noise", "key": key, "noise": noise}
                self.clock.write("noises", [facts | bits_of_noise(self.problem, noise)])

    def waymarks(self, noise: str) -> list[float]:
        key = self.study.key(spacing=noise)
        if key not in self.ledger.keys:
            self.problem.where(noise)
            self.clock.write("noises", [])
            facts = {"kind": "spacing", "key": key, "noise": noise}
            self.clock.write("trials", [facts | spacing(self.problem, noise)])
        found = [one for one in self.ledger.of("spacing") if one["key"] == key]
        return list(found[-1]["alphas"])

    def steps(self, row: Row, alphas: tuple[float, ...]) -> int:
        """As many as fit into the seconds of a run."""
        plan = self.study.plan
        key = self.study.key(timing=list(row), bridges=len(alphas) - 1)
        if key not in self.ledger.keys:
            seconds = step_seconds(self.problem, row, alphas)
            facts = {"kind": "timing", "key": key, "method": row.method, "noise": row.noise, "step_seconds": seconds}
            self.clock.write("trials", [facts | {"steps": max(2, math.floor(plan.seconds / seconds))}])
        found = [one for one in self.ledger.of("timing") if one["key"] == key]
        return int(found[-1]["steps"])

    @property
    def judge(self) -> Judge:
        """Trained when it is first needed; what it says of real images is a line."""
        if self._judge is None:
            self._judge = trained(self.problem, self.folder / "classifier.safetensors")
            data, key = self.problem.data, self.study.key(classifier=True)
            if key not in self.ledger.keys:
                near = nearest(data.test.images[:1000], data.train.images, data.levels).distance
                facts = {"kind": "classifier", "key": key, "accuracy": self._judge.accuracy}
                facts |= {"steps": self._judge.steps, "nearest": float(near.median())}
                self.clock.write("trials", [facts | self._judge.verdict(data.test.images)._asdict()])
        return self._judge
