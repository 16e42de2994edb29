"""The result of the ladder: estimates of log Z in the order of their cost, and what can be said for the one in use."""

import math
from typing import NamedTuple

from scipy.special import betaincinv

from unnorm.types import LogZ

__all__ = ["Climb", "Rung", "mass_not_ruled_out", "nats"]

EXACT = ("grid", "quadrature")  # methods that need no draw to find the mass
LEVEL = 0.95


class Rung(NamedTuple):
    """One estimate on the way.

    Attributes:
        log_z: the estimate.
        sound: whether it can be believed.
        enough: whether it was enough to stop.
        why: the reason why it was enough, or why not.
        rows: how many rows from the data it was compared with.
        missed: how many of these lie where the estimate has found no mass, and are left out of it.
    """

    log_z: LogZ
    sound: bool
    enough: bool
    why: str
    rows: int = 0
    missed: int = 0


class Climb(NamedTuple):
    """The rungs in the order of their cost.

    `doubts` and `unchecked` are two different things. With doubts something speaks against the estimate. An estimate
    that is only `unchecked` has nothing against it, but nobody looked for mass that all draws and chains have missed.
    Neither is trusted.

    Attributes:
        rungs: the estimates.
        wanted: the standard error asked for.
        doubts: why none of them is to be trusted; empty where one is.
        unchecked: why no rows from the data had a say, where only these could show missed mass; empty where they had,
            and where a grid or a quadrature answers, which need none.

    >>> found = LogZ(1.0, 0.005, 900.0, 0.2, "importance", 1000)
    >>> climb = Climb((Rung(found, True, True, "stderr 0.005 is within 0.01", rows=200),), 0.01, ())
    >>> print(climb.lines()[0])
    importance: 1.0000 ± 0.0050 (enough): stderr 0.005 is within 0.01
    >>> climb.trusted, [round(end, 4) for end in climb.interval]      # 1 -+ 1.96 x 0.005, and 3 / 200 above
    (True, [0.9902, 1.0248])
    """

    rungs: tuple[Rung, ...]
    wanted: float
    doubts: tuple[str, ...]
    unchecked: str = ""

    @property
    def rung(self) -> Rung:
        """The one in use: the last where it was enough, else the most exact of those that can be believed.

        A bracket is made of the annealed run before it, and takes its place.
        """
        sound = {rung.log_z.method: rung for rung in self.rungs if rung.sound}
        if "bracket" in sound:
            sound.pop("ais", None)
        if self.rungs[-1].enough or not sound:
            return self.rungs[-1]
        return min(sound.values(), key=lambda rung: rung.log_z.stderr)

    @property
    def log_z(self) -> LogZ:
        """The estimate in use."""
        return self.rung.log_z

    @property
    def trusted(self) -> bool:
        """Whether it can be believed, with its interval: nothing speaks against it, and rows from the data were
        compared, or a grid or a quadrature answers. Whether its error is the wanted one, `reached` says."""
        return not self.doubts and not self.unchecked

    @property
    def reached(self) -> bool:
        return self.trusted and self.log_z.stderr <= self.wanted

    @property
    def rows(self) -> int:
        """How many rows from the data the estimate in use was compared with."""
        return self.rung.rows

    @property
    def mass_not_ruled_out(self) -> float:
        """The share of the mass that may have been missed for all that the rows can say, at 95%.

        It is 0 for a grid and a quadrature, and 1 without rows.
        """
        return 0.0 if self.log_z.method in EXACT else mass_not_ruled_out(self.rung.rows, self.rung.missed)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of log Z: 1.96 standard errors on each side, and above these the mass that the rows cannot
        rule out.

        Where a share m of the mass is missed, log Z is too low by -log(1 - m). Without rows nothing bounds m, and the
        upper end is infinite.
        """
        low, high = self.log_z.interval()
        share = self.mass_not_ruled_out
        return low, high - math.log1p(-share) if share < 1 else math.inf

    def log_zs(self) -> dict[str, LogZ]:
        """The estimates by method, the one in use last."""
        found = {rung.log_z.method: rung.log_z for rung in self.rungs}
        found[self.log_z.method] = found.pop(self.log_z.method)
        return found

    def lines(self) -> list[str]:
        """Which rungs were climbed and why, and the verdict, for a person."""
        lines = [
            f"{z.method}: {nats(z.value)} ± {nats(z.stderr)} ({'enough' if enough else 'not enough'}): {why}"
            for z, _, enough, why, *_ in self.rungs
        ]
        return [*lines, f"log Z by {self.log_z.method}, {self._verdict()}"]

    def _verdict(self) -> str:
        if self.doubts:
            return "NOT to be trusted: " + "; ".join(self.doubts)
        if self.unchecked:
            return f"not checked: {self.unchecked}. Rows of the data, held out or trained on, would settle it"
        known = "trusted" if self.reached else f"trusted, but known only to {self.log_z.stderr:.2g} nats"
        low, high = self.interval
        allowed = f", including the {self.mass_not_ruled_out:.2%} of the mass that {self.rows} rows cannot rule out"
        return f"{known}: {nats(low)} to {nats(high)} at 95%{allowed if self.rows else ''}"


def mass_not_ruled_out(rows: int, missed: int = 0) -> float:
    """Return the share of mass that may lie where nothing was found, at 95%, after so many rows were compared.

    Where none of n independent rows lies there, the share is at most 1 - 0.05^(1/n), about 3/n (the rule of three);
    where some do, it is at most the upper end of Clopper and Pearson's one-sided interval.

    Args:
        rows: how many rows were compared.
        missed: how many of these lie where nothing was found.

    >>> round(mass_not_ruled_out(100), 4), round(mass_not_ruled_out(100, missed=2), 4), mass_not_ruled_out(0)
    (0.0295, 0.0616, 1.0)
    """
    return float(betaincinv(missed + 1, rows - missed, LEVEL)) if missed < rows else 1.0


def nats(value: float) -> str:
    """Four digits after the point, or, of numbers that mean nothing any more, three in all.

    >>> nats(1.23456), nats(1e200)
    ('1.2346', '1e+200')
    """
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"
