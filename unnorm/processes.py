"""Pieces of work in processes of this machine, or on a cluster, by joblib."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from joblib import Parallel, delayed, parallel_config

from unnorm.errors import InvalidValue

__all__ = ["Work", "check_backend", "computed"]

Work: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments; both travel to other processes."""


def _alone(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """One piece of work in a process of its own: one thread, as there is one process for each core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(before)


def computed(work: Sequence[Work], jobs: int, backend: str = "loky") -> Iterator[Any]:
    """The results of all pieces of work, each as soon as it is there."""
    if jobs == 1 and backend == "loky":
        yield from (function(*arguments) for function, arguments in work)
        return
    with _ready(backend), parallel_config(backend=backend, n_jobs=jobs):
        if backend == "ray":  # it hands back all results at once: a round at a time, so that a kill loses one at most
            for start in range(0, len(work), 2 * jobs):
                yield from Parallel()(delayed(_alone)(*piece) for piece in work[start : start + 2 * jobs])
            return
        yield from Parallel(return_as="generator_unordered")(delayed(_alone)(*piece) for piece in work)


def check_backend(backend: str) -> None:
    """Refuse a backend that joblib does not know here.

    >>> check_backend("nowhere")
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: joblib cannot use the backend 'nowhere': Invalid backend: nowhere, expected one of ...
    """
    package = {"dask": "distributed", "ray": "ray"}.get(backend)
    if package is not None and find_spec(package) is None:
        raise InvalidValue(f"The backend '{backend}' needs the package {package}: pip install 'unnorm[{backend}]'.")
    if package is None:
        try:
            with parallel_config(backend=backend):
                pass
        except ValueError as problem:
            raise InvalidValue(f"joblib cannot use the backend '{backend}': {problem}") from problem


@contextmanager
def _ready(backend: str) -> Iterator[None]:
    """Make joblib's backend ready. Where a cluster is, Dask and Ray know from DASK_SCHEDULER_ADDRESS and RAY_ADDRESS;
    without these both make one of this machine's cores."""
    with ExitStack() as stack:
        if backend == "dask":
            from distributed import Client

            stack.enter_context(Client())
        elif backend == "ray":
            from ray.util.joblib import register_ray

            register_ray()
        yield
