"""A normalizing flow as a noise for images."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unnorm.data.quantiles import Gaussianize
from unnorm.data.rows import RowSource, spread
from unnorm.data.transforms import Compose
from unnorm.errors import DataError, InvalidValue
from unnorm.names import options_of
from unnorm.noise.autoregression import Autoregression
from unnorm.noise.copula import Pushed
from unnorm.noise.couplings import Couplings
from unnorm.noise.gaussian import Gaussian
from unnorm.progress import Progress
from unnorm.randomness import stream

if TYPE_CHECKING:
    from unnorm.device import Machine

__all__ = ["PIXELS", "ImageFlow"]

JUDGED = 1000
PIXELS = "pixels"  # one after the other: so a flow goes, and so do bridges
WIDE = {"width": 96, "blocks": 2, "bins": 8}


class ImageFlow(Pushed):
    """A flow as a noise for images: each pixel to its normal score, then a flow of these to a standard normal.

    Most pixels of a digit are black. By their own distribution functions (`Gaussianize`) these are half of a normal,
    not a spike that the couplings would have to stretch by hundreds.

    Args:
        marginals: of the pixels.
        scores: the flow after these, `Couplings` or an `Autoregression`; its parameters are frozen.

    >>> x = torch.rand(200, 1, 4, 4, generator=torch.Generator().manual_seed(0)) ** 2
    >>> q = ImageFlow.fit(x, levels=4, steps=5, couplings=(1,), width=4, blocks=1, bins=4)
    >>> q.sample(2, generator=torch.Generator().manual_seed(0)).shape, q.log_prob(x).shape
    (torch.Size([2, 1, 4, 4]), torch.Size([200]))
    """

    transform: Compose

    def __init__(self, marginals: Gaussianize, scores: Couplings | Autoregression):
        super().__init__(Gaussian(scores.event, "diagonal"), Compose([marginals, scores]))
        scores.requires_grad_(False)

    @property
    def marginals(self) -> Gaussianize:
        return self.transform.transforms[0]  # type: ignore[return-value]

    @property
    def scores(self) -> Couplings | Autoregression:
        return self.transform.transforms[1]  # type: ignore[return-value]

    @property
    def config(self) -> Mapping[str, Any]:
        return {"marginals": self.marginals, "scores": self.scores}

    @classmethod
    def fit(
        cls,
        data: RowSource,
        *,
        levels: int = 256,
        held_out: RowSource | None = None,
        steps: int = 20_000,
        seconds: float | None = None,
        batch: int = 256,
        lr: float = 1e-3,
        average: float = 0.999,
        couplings: Sequence[int] | str = (6, 6),
        fabric: "Machine | None" = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> "ImageFlow":
        """Count the pixels, and train the flow of their scores by maximum likelihood; an average of weights is kept.

        Args:
            data: images in [0, 1], dequantised anew at each reading (`ImageRows`).
            levels: of a pixel.
            held_out: images that say which of thirty looks was the best; a tenth of the data, at most 1,000, when None.
            steps: at most.
            seconds: after which training ends; the learning rate falls along a cosine to whichever comes first.
            batch, lr: rows of a step, and Adam's step size.
            average: weight of the past in the average of the weights.
            couplings: how many at each level; or "pixels" for an `Autoregression`, of grey images, whose draws go pixel
                by pixel.
            fabric: device and precision; on a GPU the steps are compiled.
            generator: draws weights, rows set aside and batches; seed 0 when None.
            progress: a bar; None shows it on a terminal.
            options: of `Couplings` (width 96, blocks 2 and bins 8 where not given) or of `Autoregression`.
        """
        from unnorm.device import fabric_for  # Lightning takes a second to import: only training waits for it
        from unnorm.noise.image_training import ImageTraining

        generator = generator or stream(0, "flow")
        fabric = fabric or fabric_for("cpu")
        event = tuple(data[torch.zeros(1, dtype=torch.int64)].shape[1:])
        order = torch.randperm(len(data), generator=generator)
        apart = 0 if held_out is not None else min(JUDGED, len(data) // 10)
        if len(data) - apart < 1 or (held_out is None and apart < 1):
            raise DataError(f"A flow needs ten images at least, to set some aside. Got {len(data)}.")
        judge = data[order[:apart]] if held_out is None else held_out[spread(len(held_out), JUDGED)]
        marginals = Gaussianize.fit(data, torch.arange(levels + 1) / levels)
        flow = cls(marginals, _begun(event, couplings, levels, marginals, generator, options))
        training = ImageTraining(flow.to(fabric.device), fabric, judge, steps, seconds, lr, average)
        rows = order[apart:]
        with Progress(steps, enabled=progress, label="flow") as bar:
            training.run(lambda: data[rows[torch.randint(len(rows), (batch,), generator=generator)]], bar)
        return flow.cpu()


def _begun(
    event: tuple[int, ...],
    couplings: Sequence[int] | str,
    levels: int,
    marginals: Gaussianize,
    generator: torch.Generator,
    options: Mapping[str, Any],
) -> Couplings | Autoregression:
    """A flow of the scores, before training."""
    if not isinstance(couplings, str):
        with options_of("Couplings of an ImageFlow"):
            return Couplings(event, couplings, generator=generator, **(WIDE | dict(options)))
    if couplings != PIXELS:
        raise InvalidValue(
            f"The 'couplings' of ImageFlow are numbers, one for each level, or '{PIXELS}'. Got '{couplings}'."
        )
    with options_of("Autoregression of an ImageFlow"):
        return Autoregression(event, levels, generator=generator, **options).look(marginals)
