"""What a user would pick instead, without gradients: scikit-learn's kernel density and Gaussian mixture."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unnorm.ledger import key_of
from unnorm.paper.toy2d.problem import DRAWS, Measured, Problem, picture, plane
from unnorm.paper.toy2d.spec import Size

__all__ = ["PEERS", "peer_keys", "peer_records"]

RTOL = 1e-4  # of a kernel sum
COARSER = 2  # cells for the KL alone, as log Z is known; a sum over all rows for each is slow


def _kde(bandwidth: float, seed: int) -> Any:
    from sklearn.neighbors import KernelDensity

    return KernelDensity(bandwidth=bandwidth, rtol=RTOL)


def _gmm(n_components: int, seed: int) -> Any:
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(n_components, max_iter=200, random_state=seed)


PEERS: Mapping[str, tuple[str, Callable[[Any, int], Any], Callable[[Size], tuple[Any, ...]]]] = {
    "kde": ("bandwidth", _kde, lambda size: size.bandwidths),
    "gmm": ("n_components", _gmm, lambda size: size.components),
}


def peer_keys(method: str, data: str, seed: int, size: Size, common: Mapping[str, Any]) -> dict[Any, str]:
    """The key of each setting's run."""
    name, _, settings = PEERS[method]
    facts = {**common, "method": method, "style": "own", "data": data, "seed": seed}
    return {value: key_of({**facts, "setting": {name: value}}) for value in settings(size)}


def peer_records(method: str, data: str, seed: int, size: Size, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fit every setting to one data set and measure it; MMD, Frechet distance and a picture for all of them."""
    name, make, settings = PEERS[method]
    problem, where = Problem(data, seed, size), plane(data, size.cells // COARSER)
    keys = peer_keys(method, data, seed, size, common)
    records = []
    for value in settings(size):
        began = time.perf_counter()
        fitted = make(value, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of iterations that did not converge: the validation rows judge it
            fitted.fit(problem.train.double().numpy())
        seconds = time.perf_counter() - began

        def log_prob(x: Tensor, fitted: Any = fitted) -> Tensor:
            return torch.from_numpy(np.asarray(fitted.score_samples(x.double().numpy())))

        on_plane = log_prob(where.centres)
        found = Measured.of(on_plane, log_prob(problem.validation), log_prob(problem.test), where, normalised=True)
        drawn = _samples(fitted, size.points, problem.number(DRAWS))
        spec = {"method": method, "style": "own", "data": data, "seed": seed, "lr": None, "n_steps": None}
        facts = {"kind": "run", "key": keys[value], **spec, "setting": {name: value}, "steps": None}
        facts |= {"seconds": seconds, "diverged_at": None, "status": "ok" if found.finite else "diverged"}
        facts |= found._asdict() if found.finite else dict.fromkeys(Measured._fields)
        records.append(facts | problem.discrepancy(drawn))
        if seed == size.first_seed:
            records.append({"kind": "picture", "run": keys[value], **spec, **picture(log_prob, data)})
    return records


def _samples(fitted: Any, n: int, seed: int) -> Tensor:
    if hasattr(fitted, "random_state"):  # a mixture draws by the state it was made with, in the order of components
        fitted.random_state = seed
        return torch.from_numpy(fitted.sample(n)[0]).float()
    return torch.from_numpy(fitted.sample(n, random_state=seed)).float()
