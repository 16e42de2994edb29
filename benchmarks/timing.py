"""What the speed benchmarks share: calls timed in turn, so that whatever slows the machine slows them all."""

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from unnorm.errors import UnnormError

Once = Callable[[], object]


def medians(calls: Mapping[str, Once], rounds: int, *, warmup: int = 20, device: str = "cpu") -> dict[str, float]:
    """Median milliseconds of each, one call of each in turn; a GPU is waited for.

    What diverges is told, takes no further part, and has the median NaN.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    alive = dict(calls)
    for turn in range(warmup + rounds):
        for name, once in tuple(alive.items()):
            began = time.perf_counter()
            try:
                once()
            except UnnormError as problem:
                print(f"  {name} diverged: {problem}")
                del alive[name]
                times[name] = [math.nan]
                continue
            if device != "cpu":
                torch.cuda.synchronize()
            if turn >= warmup:
                times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}
