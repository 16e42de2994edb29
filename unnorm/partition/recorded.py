"""A function of tensors, recorded on a GPU: chains ask the same question thousands of times."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Function", "Recorded"]

WARM_UP = 3  # calls before a CUDA graph is captured, as torch asks for

Function = Callable[..., tuple[Tensor, ...]]


class Recorded:
    """Calls a function; on a GPU as a CUDA graph, one for each shape of its arguments.

    A small batch keeps a GPU waiting for Python. What cannot be recorded (a function that reads numbers back) is
    called as it is.

    Args:
        function: of tensors, to a tuple of tensors; it must not draw random numbers.

    >>> double = Recorded(lambda x: (2 * x,))
    >>> double(torch.ones(2))
    (tensor([2., 2.]),)
    """

    def __init__(self, function: Function):
        self.function = function
        self._recordings: dict[object, _Recording | None] = {}

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        if not arguments[0].is_cuda:
            return self.function(*arguments)
        key = tuple((given.shape, given.dtype, given.device) for given in arguments)
        if key not in self._recordings:
            self._recordings[key] = _recorded(self.function, arguments)
        found = self._recordings[key]
        return self.function(*arguments) if found is None else found(*arguments)


class _Recording:
    def __init__(self, function: Function, arguments: tuple[Tensor, ...]):
        self.arguments = tuple(given.detach().clone() for given in arguments)
        stream = torch.cuda.Stream(arguments[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                function(*self.arguments)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = function(*self.arguments)

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        for own, given in zip(self.arguments, arguments, strict=True):
            own.copy_(given)
        self.graph.replay()
        return tuple(result.clone() for result in self.results)


def _recorded(function: Function, arguments: tuple[Tensor, ...]) -> _Recording | None:
    try:
        return _Recording(function, arguments)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
