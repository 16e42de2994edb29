"""A progress bar on standard error; where that is not a terminal, nothing, or for long work a line now and then."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "summary"]

LINES = 30.0  # seconds between two lines where there is no terminal
PERIOD = 0.1  # seconds between two redraws: reading numbers off a device costs a synchronisation


class Progress:
    """Shows the step, the numbers worth watching, and the time left.

    Args:
        total: steps in all.
        done: steps done before.
        enabled: None for a bar on a terminal only.
        label: what is under way.
        lines: whether a file or a pipe in place of a terminal gets plain lines, one in half a minute.

    >>> with Progress(10, enabled=False) as bar:
    ...     bar.due()
    False
    """

    def __init__(
        self, total: int, done: int = 0, *, enabled: bool | None = None, label: str = "fit", lines: bool = False
    ):
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._lines = lines and enabled is None and not self._enabled
        self._began = time.monotonic()
        self._last = self._began if self._lines else 0.0
        self._label, self._total = label, total
        if self._enabled:
            self._bar = _bar(label)
            self._task = self._bar.add_task(label, total=total, completed=done, numbers="")

    def __enter__(self) -> "Progress":
        if self._enabled:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._bar.stop()

    def due(self) -> bool:
        """Whether it is time to redraw."""
        return self._enabled and time.monotonic() - self._last > PERIOD

    def show(self, step: int, numbers: Mapping[str, float], part: str = "") -> None:
        """Redraw with the numbers of this step, and the part of the work it belongs to."""
        if self._lines and time.monotonic() - self._last > LINES:
            self._last = time.monotonic()
            where = f" ({part})" if part else ""
            seconds = self._last - self._began
            print(f"{self._label}: {step:,} of {self._total:,}{where}, {seconds:.0f} s", file=sys.stderr, flush=True)
        if not self._enabled:
            return
        self._last = time.monotonic()
        self._bar.update(self._task, completed=step, numbers=part or summary(numbers))


def _bar(label: str) -> "Bar":
    """Return rich's bar with our columns."""
    from rich.console import Console  # only who shows a bar waits for it
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn(label),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def summary(numbers: Mapping[str, float]) -> str:
    """The numbers worth watching, in a few words; `value` is a likelihood only where there is a log Z.

    >>> summary({"value": 2.8412, "log_u": 0.41, "ess": 0.18}), summary({"value": -0.1, "acceptance": 0.57})
    ('nll 2.841  log u 0.410  ess 0.180', 'value -0.100  acceptance 0.570')
    """
    normalised = "log_u" in numbers or "log_z" in numbers
    names = {"value": "nll" if normalised else "value", "log_u": "log u", "log_z": "log Z"}
    shown = ("value", "log_u", "log_z", "ess", "acceptance")
    return "  ".join(f"{names.get(key, key)} {numbers[key]:.3f}" for key in shown if key in numbers)
