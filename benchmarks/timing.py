"""What the speed benchmarks share: calls timed in turn, so that whatever slows the machine slows them all."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Once = Callable[[], object]


def medians(calls: Mapping[str, Once], rounds: int, *, warmup: int = 20, device: str = "cpu") -> dict[str, float]:
    """Median milliseconds of each, one call of each in turn; a GPU is waited for."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + rounds):
        for name, once in calls.items():
            began = time.perf_counter()
            once()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn >= warmup:
                times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}
