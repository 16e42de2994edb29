"""The range of a table's columns: a density that keeps to it, as far as the rows can tell."""

import math
from typing import Any, NamedTuple

import numpy as np

from unnorm.tables.columns import Columns

__all__ = ["Bounds"]

ROUNDS, CLOSE, DAMPING = 100, 1e-6, 0.7
LEAST_MASS = 0.02  # within the ranges


class Bounds(NamedTuple):
    """Weights of the regions beyond the observed ranges, and the normaliser that they change.

    A learned density spreads a little beyond the values that occur. The next row of a continuous column lies outside
    the range of n rows with probability 2 / (n + 1), whatever its distribution. Where the density has more than that
    outside, it is multiplied by a weight there, so that just this much is left; of a discrete column nothing is left
    outside. Among all densities with these shares it is the nearest in KL divergence (Csiszar 1975), and iterative
    proportional fitting finds it.

    Attributes:
        low, high: the observed range of each column that a model sees, cells included.
        log_weights: the logarithm of the weight outside; 0 where nothing is changed.
        log_mass: the logarithm of what is left of the mass.
        stderr: its standard error.

    >>> rng = np.random.default_rng(0)
    >>> columns = Columns.of(rng.uniform(-1, 1, size=(999, 1)), ("a",))
    >>> found = Bounds.of(columns, 999, 1.25 * rng.uniform(-1, 1, size=(20_000, 1)))
    >>> bool(abs(np.exp(found.log_mass) - 0.8 * 1.002) < 0.01)
    True
    """

    low: np.ndarray
    high: np.ndarray
    log_weights: np.ndarray
    log_mass: float
    stderr: float

    @classmethod
    def of(
        cls,
        columns: Columns,
        n: int,
        drawn: np.ndarray,
        shares: np.ndarray | None = None,
        worth: float | None = None,
    ) -> "Bounds":
        """Find the weights from draws of the density.

        Args:
            columns: of the table.
            n: rows that the columns were observed in.
            drawn: draws of the density, as the model sees them.
            shares: of the mass that each of them stands for; equal ones when None.
            worth: how many independent draws they amount to; all of them when None.
        """
        shares = np.full(len(drawn), 1 / len(drawn)) if shares is None else shares
        worth = len(drawn) if worth is None else max(worth, 1.0)
        low, high = (np.array(ends) for ends in zip(*(column.range for column in columns.modelled), strict=True))
        outside = (drawn < low) | (drawn > high)
        log_weights = np.where(columns.discrete, -np.inf, 0.0)
        least = 2.0 / (n + 1)
        for _ in range(ROUNDS):
            weights = shares * np.exp(_summed(outside, log_weights))
            now = weights @ outside / max(weights.sum(), 1e-300)
            wanted = np.minimum(log_weights + DAMPING * (_log_odds(least) - _log_odds(now)), 0.0)
            change = np.where(columns.discrete, 0.0, wanted - np.where(columns.discrete, 0.0, log_weights))
            log_weights = log_weights + change
            if np.abs(change).max() < CLOSE:
                break
        weights = np.exp(_summed(outside, log_weights))
        mass = float(shares @ weights)
        if not mass > LEAST_MASS:  # a density that lies elsewhere is left as it is, and not to be trusted
            return cls(low, high, np.zeros(len(low)), 0.0, math.inf)
        error = math.sqrt(max(float(shares @ weights**2) - mass**2, 0.0) / worth) / mass
        return cls(low, high, log_weights, math.log(mass), error)

    def log_weight(self, points: np.ndarray) -> np.ndarray:
        """Return the logarithm of the weight at points, as the model sees them, (n,)."""
        return _summed((points < self.low) | (points > self.high), self.log_weights)

    def plain(self) -> dict[str, Any]:
        """Return them as plain JSON values."""
        weights = ["-inf" if weight == -np.inf else weight for weight in self.log_weights.tolist()]
        facts = {"low": self.low.tolist(), "high": self.high.tolist(), "log_weights": weights}
        return {**facts, "log_mass": self.log_mass, "stderr": self.stderr}

    @classmethod
    def from_plain(cls, plain: Any) -> "Bounds":
        """Return the bounds that `plain` describes."""
        low, high, weights = (np.array(plain[key], dtype=float) for key in ("low", "high", "log_weights"))
        return cls(low, high, weights, float(plain["log_mass"]), float(plain["stderr"]))


def _summed(outside: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    return np.where(outside, log_weights, 0.0).sum(1)


def _log_odds(share: Any) -> Any:
    clipped = np.clip(share, 1e-12, 1 - 1e-12)
    return np.log(clipped) - np.log1p(-clipped)
