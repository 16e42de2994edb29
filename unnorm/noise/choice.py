"""What `noise.fit` picked, and by how much."""

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Choice"]


class Choice(NamedTuple):
    """Which noise was fitted, and what the others would have been worth.

    Attributes:
        kind: the one that was picked.
        scores: of each kind that was tried, its mean log density of the rows set aside, less their constant columns;
            empty if none was.
        stderr: of each other kind, the standard error of its difference to the one that was picked, row by row.
        left_out: of each kind that was not tried or failed, why.
        n: how many rows were set aside.

    >>> Choice("copula", {"gaussian": -2.5, "copula": -2.25}, {"gaussian": 0.02}, {"flow": "never tried"}, 500).line()
    'Picked copula: by the log density of 500 held-out rows; gaussian 0.250 ± 0.020 nats lower. Not tried: flow
    (never tried).'
    """

    kind: str
    scores: Mapping[str, float] = {}
    stderr: Mapping[str, float] = {}
    left_out: Mapping[str, str] = {}
    n: int = 0

    def line(self) -> str:
        """One sentence or two for a person."""
        said = f"Picked {self.kind}"
        others = [kind for kind in self.scores if kind != self.kind]
        if others:
            said += f": by the log density of {self.n} held-out rows; " + ", ".join(map(self._compared, others))
        said += "."
        if self.left_out:
            said += f" Not tried: {', '.join(f'{kind} ({why})' for kind, why in self.left_out.items())}."
        return said

    def _compared(self, kind: str) -> str:
        gap = self.scores[self.kind] - self.scores[kind]
        word = "lower" if gap >= 0 else "higher"
        return f"{kind} {abs(gap):.3f} ± {self.stderr[kind]:.3f} nats {word}"
