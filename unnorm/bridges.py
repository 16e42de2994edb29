"""How many bridges, and where: a pilot measures how far apart waymarks are, and places them evenly."""

import math
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unnorm.data.rows import RowSource, spread
from unnorm.device import Machine
from unnorm.errors import HealthWarning, InvalidValue
from unnorm.estimators.base import Contrastive
from unnorm.estimators.meco import MECO
from unnorm.estimators.telescope import Telescope, even_alphas
from unnorm.loop import train
from unnorm.models.tilted import Bridged
from unnorm.noise.base import Noise, event_of
from unnorm.noise.gaussian import Gaussian
from unnorm.randomness import derive_seed, stream
from unnorm.training import Training

__all__ = ["Spacing", "least_bridges", "pilot", "respaced"]

FIRST, MOST = 6, 48  # bridges of the first round that has any; and at most
WIDE = 16  # numbers in an event
DIRECT = 1.5  # nats: what a short training sees less of than this needs no bridge
WANTED = 0.5  # nats between neighbours, as a short training sees them; they grow to 1 or 2 when it is long
ROUNDS = 3
HELD_OUT = 2000
SATURATED = 0.5  # of log n: gaps beyond are larger than what is seen


class Spacing(NamedTuple):
    """Where the waymarks are, and how far the pilot saw neighbours apart.

    Attributes:
        alphas: shares of noise, from 0 to 1.
        gaps: the pilot's KL of each waymark against the next, in nats, for its own last spacing.
        measured: that spacing.
        least: bridges that data of this width get, whatever was seen.

    >>> Spacing((0.0, 0.6, 1.0), (0.9, 1.1), (0.0, 0.6, 1.0)).line()
    '2 bridges: a pilot saw 0.9 to 1.1 nats between neighbours of its 2.'
    """

    alphas: tuple[float, ...]
    gaps: tuple[float, ...]
    measured: tuple[float, ...]
    least: int = 1

    @property
    def bridges(self) -> int:
        return len(self.alphas) - 1

    def line(self) -> str:
        """For a person."""
        low, high = (max(0.0, end) for end in (min(self.gaps), max(self.gaps)))  # less than none is chance
        if self.bridges == 1:
            return f"No bridges: a pilot saw {max(0.0, sum(self.gaps)):.1f} nats between data and noise."
        seen = f"a pilot saw {low:.1f} to {high:.1f} nats between neighbours of its {len(self.gaps)}"
        rule = ", and data so wide have as many at least" if self.bridges == self.least else ""
        return f"{self.bridges} bridges: {seen}{rule}."


def least_bridges(noise: Noise) -> int:
    """Bridges that wide data get whatever a pilot sees: sqrt(d) / 2.5, where the way is a straight one to a Gaussian.

    In many dimensions two hundred steps see nothing of twenty nats, and a bridge too many costs only time.

    >>> [least_bridges(Gaussian(d)) for d in (2, 15, 32, 100, 784)]
    [1, 1, 3, 4, 12]
    """
    size = math.prod(event_of(noise))
    return math.ceil(math.sqrt(size) / 2.5) if isinstance(noise, Gaussian) and size >= WIDE else 1


def respaced(
    alphas: Sequence[float], gaps: Sequence[float], wanted: float = WANTED, least: int = 1
) -> tuple[float, ...]:
    """As many waymarks as bring neighbours `wanted` nats apart, evenly by the length sqrt(2 KL); or the least number.

    For small steps the KL grows with the square of the step, so sqrt(2 KL) adds up along the way.

    >>> respaced((0.0, 1.0), (4.0,), wanted=1.0)                    # twice as near is a quarter of the KL
    (0.0, 0.70710678118654..., 1.0)
    >>> respaced((0.0, 0.5, 1.0), (0.1, 0.1))
    (0.0, 1.0)
    """
    lengths = [math.sqrt(2 * max(gap, 0.0)) for gap in gaps]
    total = sum(lengths)
    if total < least * math.sqrt(2 * wanted) / 2:  # too little was seen to tell where they belong
        return even_alphas(least)
    n = max(least, min(MOST, math.ceil(total / math.sqrt(2 * wanted) - 1e-9)))
    ends = [0.0, *accumulate(lengths)]
    angles = [math.asin(alpha) for alpha in alphas]
    places: list[float] = np.interp(np.linspace(0, total, n + 1)[1:-1], ends, angles).tolist()
    return (0.0, *(math.sin(angle) for angle in places), 1.0)


def pilot(
    make_net: Callable[[int], nn.Module],
    noise: Noise,
    data: RowSource,
    *,
    base: type[Contrastive] = MECO,
    wanted: float = WANTED,
    steps: int = 200,
    batch: int = 256,
    lr: float = 1e-3,
    held_out: Tensor | None = None,
    least: int | None = None,
    fabric: Machine | None = None,
    seed: int = 0,
    **options: Any,
) -> Spacing:
    """Train bridges for a moment, measure the gaps on held-out rows, respace; at most three times.

    First without bridges: data as near to the noise as that need none, whatever the way between them would be (between
    two mixtures lies something else). Wide data begin with bridges, and have a few at least (`least_bridges`). A short
    training sees less than there is: gaps grow while training goes on.

    Args:
        make_net: K -> a network mapping (n, *event) to (n, K), such as lambda k: MLP(3, outputs=k).
        noise: q.
        data: rows to train on, in the noise's units.
        base, options: what learns each ratio, as for `Telescope`.
        wanted: nats between neighbours.
        steps, batch, lr: of each round's training.
        held_out: rows that were not trained on; some of the data when None.
        least: bridges that there are to be whatever is seen; `least_bridges` of the noise when None.
        fabric: device and precision; the CPU when None.
        seed: of everything random.

    >>> from unnorm import MLP, Gaussian
    >>> x = 4 + torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
    >>> found = pilot(lambda k: MLP(1, hidden=(64,), outputs=k), Gaussian(1), x, steps=200)
    >>> 4 <= found.bridges <= 5                          # a shift of 4 in steps of one: half a nat each
    True
    """
    if steps < 1 or not wanted > 0:
        raise InvalidValue(f"A pilot needs steps and a wanted gap above 0. Got steps {steps}, wanted {wanted}.")
    if held_out is None:
        held_out = data[spread(len(data), HELD_OUT)]
    device = fabric.device if fabric is not None else torch.device("cpu")
    least = least_bridges(noise) if least is None else least
    alphas: tuple[float, ...] = (0.0, 1.0) if least == 1 else even_alphas(FIRST)
    for _ in range(1 + ROUNDS):
        estimator = Telescope(noise, alphas, base, **options)
        model = Bridged(noise, make_net(len(alphas) - 1)).to(device)
        training = Training(steps=steps, batch=batch, lr=lr, schedule="cosine", seed=derive_seed(seed, "pilot"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)  # gaps too large are what it is here to find
            train(model, estimator, data, training, fabric=fabric, progress=False)
        own = stream(seed, "gaps of the pilot", device=device)
        dtype = next(model.parameters()).dtype
        with torch.no_grad():
            rows = held_out[:HELD_OUT].to(device=device, dtype=dtype)
            gaps = estimator.gaps(model, rows, generator=own).tolist()
        if len(gaps) == 1 and gaps[0] < DIRECT:
            return Spacing((0.0, 1.0), tuple(gaps), (0.0, 1.0))
        if len(gaps) == 1:
            alphas = even_alphas(FIRST)
            continue
        found = Spacing(respaced(alphas, gaps, wanted, least), tuple(gaps), tuple(alphas), least)
        seen_all = max(gaps) < SATURATED * math.log(batch)
        if found.bridges == least or (seen_all and found.bridges <= 1.5 * len(gaps)):
            return found
        alphas = found.alphas
    return found
