"""The JSON lines of a study, as its report reads them: by kind, each checked."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from unnorm.errors import BrokenFile, InvalidValue
from unnorm.ledger import read_lines

__all__ = ["FILE", "Run", "by_kind", "wall_seconds"]

FILE = "results.jsonl"
Run: TypeAlias = Mapping[str, Any]


def by_kind(folder: Path, wrong: Callable[[Any], str | None]) -> dict[str, list[Run]]:
    """The lines of the study in `folder`; `wrong` says what is wrong with one, in words.

    Raises:
        InvalidValue: no such file.
        BrokenFile: with the number of the line; a last line cut short, as a kill leaves it, is passed over.
    """
    path = Path(folder) / FILE
    if not path.exists():
        raise InvalidValue(f"The folder '{folder}' holds no study: there is no '{path}'.")
    found: dict[str, list[Run]] = defaultdict(list)
    for number, record in read_lines(path):
        if problem := wrong(record):
            raise BrokenFile(f"Line {number} of '{path}' is not of this study: {problem}")
        found[record["kind"]].append(record)
    for kind in ("study", "run"):
        if not found[kind]:
            raise BrokenFile(f"'{path}' holds no line of kind '{kind}': there is nothing to report.")
    return found


def wall_seconds(lines: Iterable[Run]) -> dict[str, float]:
    """By part of the study, of all its starts together.

    >>> wall_seconds([{"part": "runs", "seconds": 2.0}, {"part": "runs", "seconds": 1.0}])
    {'runs': 3.0}
    """
    total: dict[str, float] = defaultdict(float)
    for one in lines:
        total[one["part"]] += one["seconds"]
    return dict(total)
