"""The study of images as numbers: from its JSON lines to rows of a table, and to a few sentences."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unnorm.ledger import read_lines
from unnorm.paper.lines import FILE, Run, by_kind, wall_seconds
from unnorm.paper.mnist.spec import METHODS, NOISES, ROWS, Row

__all__ = ["APART", "FILE", "Line", "Results", "Run", "headlines", "is_ours", "read", "summarise"]

RAN_AWAY = 1.0  # bits per dimension between the two sides, beyond which nothing is left to be known
APART = 0.03  # bits per dimension between the two sides of log Z, beyond which a number is not claimed
CAUTIONS = {
    "smoke": "Size smoke shows that everything runs. Its networks are trained for a moment: its numbers mean nothing.",
    "laptop": "Size laptop is a preview on digits of 8 x 8: its numbers have nothing to do with MNIST's.",
    "desktop": "Size desktop is MNIST on a CPU, with small networks and a minute of training unless --seconds says "
    "otherwise. Rows that go pixel by pixel learn enough in that; of the others it is no measure.",
}
NEEDED: Mapping[str, tuple[str, ...]] = {
    "study": ("study", "size", "seeds"),
    "run": ("key", "method", "noise", "seed", "status", "steps", "bridges"),
    "noise": ("noise", "bits"),
    "spacing": ("noise", "alphas"),
    "timing": ("method", "noise", "steps"),
    "classifier": ("accuracy", "confident", "entropy"),
    "clock": ("part", "seconds"),
}
SIDES = ("lower", "joined", "upper")


class Line(NamedTuple):
    """A row of the table.

    Attributes:
        row: method and noise.
        runs: in order of their seeds.
    """

    row: Row
    runs: tuple[Run, ...]

    @property
    def sound(self) -> list[Run]:
        """Those that did not diverge, and whose two sides of log Z are near each other."""
        return [run for run in self.runs if run["status"] == "ok" and apart(run) <= APART]

    @property
    def bits(self) -> float | None:
        """Mean over the seeds, where all of them are sound."""
        return float(np.mean([run["joined"] for run in self.runs])) if len(self.sound) == len(self.runs) else None

    @property
    def deviation(self) -> float | None:
        """Over the seeds."""
        known = self.bits is not None and len(self.runs) > 1
        return float(np.std([run["joined"] for run in self.runs], ddof=1)) if known else None

    @property
    def sides(self) -> tuple[float, float] | None:
        """The least and the greatest of both sides, and of both joined, over the seeds."""
        if self.bits is None:
            return None
        every = [run[side] for run in self.runs for side in SIDES]
        return min(every), max(every)


def apart(run: Run) -> float:
    """Bits per dimension between the two sides of a run.

    >>> round(apart({"lower": 1.20, "upper": 1.21}), 6), apart({})
    (0.01, inf)
    """
    lower, upper = run.get("lower"), run.get("upper")
    return math.inf if lower is None or upper is None else abs(upper - lower)


def fallen(run: Run) -> str | None:
    """Why a run counts as diverged; None where it does not.

    >>> fallen({"status": "ok", "lower": -1.8e11, "upper": -2.3e11})
    'log p~ ran away: the two sides of log Z are 5e+10 bits per dimension apart.'
    >>> fallen({"status": "ok", "lower": 1.2, "upper": 1.3})
    """
    if run["status"] != "ok":
        return str(run.get("why") or "It diverged.")
    far = apart(run)
    return (
        f"log p~ ran away: the two sides of log Z are {far:.2g} bits per dimension apart." if far > RAN_AWAY else None
    )


@dataclass(frozen=True)
class Results:
    """The records of a study; of repeated ones the last."""

    folder: Path
    starts: Sequence[Run]
    runs: Sequence[Run]
    noises: Mapping[str, Run]
    spacings: Mapping[str, Run]
    timings: Sequence[Run]
    classifier: Run | None
    clock: Mapping[str, float]

    @property
    def size(self) -> str:
        return str(self.starts[-1]["size"])

    @property
    def of_mnist(self) -> bool:
        """Whether published numbers can stand beside its own."""
        return bool((self.starts[-1].get("settings") or {}).get("data") == "mnist")

    @property
    def lines(self) -> list[Line]:
        """In the order of the table; rows without a run are left out."""
        found: dict[Row, list[Run]] = defaultdict(list)
        for run in self.runs:
            found[Row(run["method"], run["noise"])].append(run)
        return [Line(row, tuple(sorted(found[row], key=lambda run: run["seed"]))) for row in ROWS if row in found]


def is_ours(folder: Path) -> bool:
    """Whether the folder holds a study of images."""
    path = Path(folder) / FILE
    if not path.exists():
        return False
    return any(isinstance(one, dict) and one.get("study") == "mnist" for _, one in read_lines(path)[:1])


def read(folder: Path) -> Results:
    """The study in `folder`.

    Raises:
        InvalidValue: no such file.
        BrokenFile: with the number of the line.
    """
    found = by_kind(folder, _wrong)
    return Results(
        Path(folder),
        found["study"],
        list({(one["method"], one["noise"], one["seed"]): one for one in found["run"]}.values()),
        {one["noise"]: one for one in found["noise"]},
        {one["noise"]: one for one in found["spacing"]},
        list({(one["method"], one["noise"]): one for one in found["timing"]}.values()),
        found["classifier"][-1] if found["classifier"] else None,
        wall_seconds(found["clock"]),
    )


def _wrong(record: Any) -> str | None:
    """What is wrong with a line, in words."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "it has no 'kind'."
    needed = NEEDED.get(record["kind"])
    if needed is None:
        return f"it is of an unknown kind, '{record['kind']}'."
    if absent := [name for name in needed if record.get(name) is None]:
        return f"a {record['kind']} needs '{absent[0]}'."
    if record["kind"] == "run" and record["status"] == "ok" and any(record.get(side) is None for side in SIDES):
        return "a run that is ok needs 'lower', 'joined' and 'upper'."
    for name, known in (("method", METHODS), ("noise", NOISES)):
        if name in needed and record[name] not in known:
            return f"its {name} '{record[name]}' is unknown."
    return None


def headlines(results: Results) -> list[str]:
    """What a newcomer reads first."""
    lines = [CAUTIONS.get(results.size, "")]
    known = [line for line in results.lines if line.bits is not None]
    if known:
        best = min(known, key=lambda line: line.bits or math.inf)
        lines.append(
            f"The best likelihood is that of {best.row.title}: {_bits(best)} bits per dimension; its noise alone has "
            f"{_alone(results, best.row.noise)}."
        )
    for line in known:
        if METHODS[line.row.method].bridged and line is not best:
            lines.append(f"{line.row.title}: {_bits(line)}; its noise alone {_alone(results, line.row.noise)}.")
    plain = [line for line in results.lines if not METHODS[line.row.method].bridged]
    if plain:
        lost = [line for line in plain if line.bits is None]
        better = [line for line in plain if line.bits is not None and _gain(results, line) > 0]
        beyond = (
            f", and {len(better)} are better than the Gaussian beneath them" if "gaussian" in results.noises else ""
        )
        lines.append(f"Of {len(plain)} rows without bridges {len(lost)} diverged or have no known log Z{beyond}.")
    if results.classifier is not None:
        one = results.classifier
        lines.append(
            f"The classifier that judges samples is right on {one['accuracy']:.2%} of the test images; it gives "
            f"{one['confident']:.1%} of these a class of probability above 0.9."
        )
    return [line for line in lines if line]


def summarise(results: Results) -> list[str]:
    """The headlines, and what is missing."""
    seeds = int(results.starts[-1]["seeds"])
    absent = [row.title for row in ROWS if row not in {line.row for line in results.lines}]
    few = [line.row.title for line in results.lines if len(line.runs) < seeds]
    lines = [*headlines(results)]
    lines += [f"Not run: {'; '.join(absent)}."] if absent else []
    lines += [f"With fewer than {seeds} seeds: {'; '.join(few)}."] if few else []
    return lines


def _bits(line: Line) -> str:
    if line.bits is None or line.sides is None:
        return "unknown"
    error = f" ± {line.deviation:.4f}" if line.deviation is not None else ""
    low, high = line.sides
    return f"{line.bits:.4f}{error} (between {low:.4f} and {high:.4f})"


def _alone(results: Results, noise: str) -> str:
    found = results.noises.get(noise)
    return "an unknown number" if found is None else f"{found['bits']:.4f}"


def _gain(results: Results, line: Line) -> float:
    beneath = results.noises.get("gaussian")
    return math.nan if beneath is None or line.bits is None else float(beneath["bits"]) - line.bits
