"""The health monitor: never look converged while diverging.

A falling loss is no evidence. `fit` shows the monitor the numbers of the first steps and of every tenth; when they
leave the region of sense it warns once for each cause, by name, with the numbers and the change that usually cures it.
"""

import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from unnorm.diagnostics import certified_limit
from unnorm.errors import HealthWarning, Unhealthy

__all__ = ["EVERY", "RULES", "Health", "Rule"]

EVERY = 10  # steps from one look to the next: reading numbers off a device costs a synchronisation
FIRST = 10  # steps that are all looked at: a learning rate far too large needs no more to ruin everything
MEMORY = 10  # looks that are remembered, a hundred steps

Reading: TypeAlias = Mapping[str, float]
Rule: TypeAlias = Callable[[Sequence[Reading], int, int], str | None]
"""(readings, oldest first; numbers in one event; noise draws in a step) -> what is wrong and the cure, or None."""

LAG = 1.0  # nats
EVEN = 0.5  # effective share of draws that carry nearly the same

SMALLER_STEPS = "Leave out the fixed step size (one is found then), or make it smaller; or lower the learning rate."


def energy_gap(readings: Sequence[Reading], event: int, draws: int) -> str | None:
    """Samples of the model and data should have nearly the same log p~: they are to become the same."""
    now = readings[-1]
    if "distance" not in now or abs(now["value"]) < 20 + 2 * event:
        return None
    return f"log p~ of the model's samples differs from that of the data by {now['value']:.4g} nats. {SMALLER_STEPS}"


def distance(readings: Sequence[Reading], event: int, draws: int) -> str | None:
    """Samples of the model should lie where the data do."""
    far = readings[-1].get("distance", 1.0)
    if 0.2 < far < 5:
        return None
    return f"the model's samples lie {far:.3g} of the data's spreads from the data's mean, not about 1. {SMALLER_STEPS}"


def acceptance(readings: Sequence[Reading], event: int, draws: int) -> str | None:
    """Langevin steps that Metropolis' rule would refuse do not sample the model.

    Where the step size does not change from look to look, nobody refuses them, and half is too few.
    """
    recent = [(now["acceptance"], now["step_size"]) for now in readings[-2:] if "acceptance" in now]
    if len(recent) < 2:
        return None
    (before, size_before), (accepted, step_size) = recent
    too_few = accepted < 0.5 if step_size == size_before else max(before, accepted) < 0.1
    if not too_few:
        return None
    return (
        f"Metropolis' rule accepts {accepted:.2g} of the Langevin steps of size {step_size:.3g}: "
        f"they do not sample the model. {SMALLER_STEPS}"
    )


def score(readings: Sequence[Reading], event: int, draws: int) -> str | None:
    """A density with details a few hundred times finer than the data's spread is fitting single points."""
    size = readings[-1].get("score", 0.0)
    if size < 300:
        return None
    return (
        f"the score is {size:.3g} in units of 1 / the data's spread: the model has details finer than any data show. "
        "Lower the learning rate; repeated or discrete values have no density to match."
    )


def weights(readings: Sequence[Reading], event: int, draws: int) -> str | None:
    """Importance weights carried by a draw or two say nothing about Z."""
    shares = [reading["ess"] for reading in readings if "ess" in reading]
    if len(shares) < 5 or draws < 10 or (share := statistics.median(shares)) * draws > 3:
        return None
    return (
        f"the effective share of the noise draws is {share:.2g} ({share * draws:.1f} of {draws}): "
        "the tracked log Z stands on single draws. Use more noise draws, or a noise closer to the data."
    )


def log_z_jump(readings: Sequence[Reading], event: int, draws: int) -> str | None:
    """The tracked or learned log Z should settle, not run; of bridges, whose log Z add up, that of each."""
    values = [reading[name] for reading in readings for name in ("log_u", "log_z") if name in reading]
    limit = (20 + 2 * event) * readings[-1].get("parts", 1)
    if len(values) < 2 or abs(values[-1] - values[0]) < limit:
        return None
    return (
        f"log Z moved from {values[0]:.4g} to {values[-1]:.4g} within {EVERY * (len(values) - 1)} steps. "
        "Lower the learning rate, use more noise draws, or a noise closer to the data."
    )


def certified(readings: Sequence[Reading], event: int, draws: int) -> str | None:
    """n draws cannot certify a KL above about log n (McAllester and Stratos 2020): a larger gap is an artefact."""
    now = readings[-1]
    gap, limit = now.get("gap", 0.0), now.get("limit", math.inf)
    if gap <= limit:
        return None
    tracked = "log_u" in now
    draws_of, formula = ("that log u remembers", "log(n_noise / gamma)") if tracked else ("of a step", "log(n_noise)")
    return (
        f"the data seem {gap:.3g} nats from the noise, more than the {math.exp(limit):.3g} draws {draws_of} can "
        f"certify, {formula} = {limit:.1f}: it is an artefact, and {'log u' if tracked else 'log Z'} is not to be "
        "trusted. Use more noise draws, a noise closer to the data, or (more) bridges."
    )


def lag(readings: Sequence[Reading], event: int, draws: int) -> str | None:
    """u should be the mean weight: a log Z that moves faster than u can is multiplied into the step.

    One batch may be ahead by chance, two looks in a row are not. In the first steps, where u is a batch or two old, the
    weights must have been nearly even a step before.
    """
    recent = [now for now in readings[-2:] if "lag" in now]
    if len(recent) < 2 or recent[-1]["lag"] <= LAG:
        return None
    before, now = recent
    first = now["step"] == before["step"] + 1  # u is a batch or two old, and one of these may have been unlucky
    if (before.get("ess", 0.0) < EVEN) if first else (before["lag"] <= LAG):
        return None
    return (
        f"the mean weight of the noise draws is {math.exp(now['lag']):.2g} times the tracked u: log Z runs ahead of u. "
        "Lower the learning rate, raise gamma, or use more noise draws."
    )


RULES: Mapping[str, Rule] = {
    "energy-gap": energy_gap,
    "distance": distance,
    "acceptance": acceptance,
    "score": score,
    "weights": weights,
    "log-z-jump": log_z_jump,
    "certified": certified,
    "lag": lag,
}
AT_ONCE = ("certified", "lag")  # rules that need no history, and judge the first steps too


class Health:
    """Looks at the numbers of training steps and says, once for each rule, when they leave the region of sense.

    Args:
        event: how many numbers one event has.
        draws: how many noise draws a step has.
        strict: raise `Unhealthy` instead of warning.
        parts: of how many bridges the log Z is the sum.
        memory: by what factor the estimator's memory multiplies the draws, in what it knows of log Z.
        told, steps: warnings of an earlier part of the same run, and when they came; these are not repeated.

    >>> health = Health(event=2, draws=500, strict=True)
    >>> health.look(10, {"value": -0.3, "distance": 1.0, "score": 4.0})
    >>> health.look(20, {"value": -475.0, "distance": 1.0, "score": 90.0})
    Traceback (most recent call last):
    unnorm.errors.Unhealthy: At step 20, energy-gap: log p~ of the model's samples differs ... by -475 nats. ...
    """

    def __init__(
        self,
        event: int,
        draws: int,
        *,
        parts: int = 1,
        memory: float = 1.0,
        strict: bool = False,
        told: Sequence[str] = (),
        steps: Sequence[int] = (),
    ):
        self.event, self.draws, self.parts, self.memory, self.strict = event, draws, parts, memory, strict
        self.told = list(told)
        self.steps = list(steps)
        self._names = {name for name in RULES for line in told if f", {name}: " in line}
        self._readings: deque[Reading] = deque(maxlen=MEMORY + 1)
        self._first: deque[Reading] = deque(maxlen=2)

    def due(self, t: int) -> bool:
        return t <= FIRST or t % EVERY == 0

    def look(self, t: int, numbers: Reading) -> None:
        """Judge the numbers of step `t`; best before its update, which they may speak against."""
        regular = t % EVERY == 0
        limit = certified_limit(max(self.draws, 1), 1 / self.memory)
        reading = {**numbers, "step": t, "limit": limit, "parts": self.parts}
        kept = self._readings if regular else self._first
        kept.append(reading)
        for name, rule in RULES.items():
            if name in self._names or not (regular or name in AT_ONCE):
                continue
            if found := rule(tuple(kept), self.event, self.draws):
                line = f"At step {t}, {name}: {found}"
                self._names.add(name)
                self.told.append(line)
                self.steps.append(t)
                if self.strict:
                    raise Unhealthy(line)
                warnings.warn(line, HealthWarning, stacklevel=2)
