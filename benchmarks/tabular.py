"""`EnergyDensity` at its defaults: seconds of a fit, rows scored a second, and held-out likelihood beside its peers.

Likelihood: 70% of at most 10,000 rows of each of ADBench's tables (labels unused) to fit to, the rest to score, scaled
to deviations of one; the peers are scikit-learn's KernelDensity (bandwidth by 3-fold cross-validation) and
GaussianMixture (components by BIC), and a zuko neural spline flow trained for as long as EnergyDensity took. Constant
columns are left out for all, and every method gets the same rows, the values of discrete columns spread over their
cells as EnergyDensity does it: otherwise whoever makes the narrowest spikes wins. KernelDensity is scored on 2,000 rows
at most. Needs UNNORM_DATA or --data.
"""

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import figure
from scipy import stats
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KernelDensity

from unnorm.data.columns import columns_of
from unnorm.noise import Flow
from unnorm.processes import computed
from unnorm.sklearn import EnergyDensity

NOISE = "its noise alone"
MOST = 20.0  # nats: a method that fails on a table does not decide the mean
METHODS = ("EnergyDensity", NOISE, "KernelDensity", "GaussianMixture", "spline flow")
FIRST, MORE = 10, 60  # steps of a flow in trials that tell how long one takes
SMALL = ("21_Lymphography", "18_Ionosphere")


def speed(quick: bool) -> None:
    """Fit 10,000 x 20; score 100,000 rows, against KernelDensity on the same rows."""
    rng = np.random.RandomState(0)
    n = 2000 if quick else 10_000
    x = rng.standard_normal((n, 20)) @ rng.standard_normal((20, 20)) + rng.exponential(size=(n, 20))
    began = time.perf_counter()
    density = EnergyDensity(random_state=0).fit(x)
    figure(f"tabular_fit_seconds_{n}x20", time.perf_counter() - began, goal=60.0)
    some = rng.standard_normal((2000, 20))
    many = rng.standard_normal((10_000 if quick else 100_000, 20))
    kernel = KernelDensity(bandwidth=1.0).fit(x)
    began = time.perf_counter()
    kernel.score_samples(some)
    theirs = len(some) / (time.perf_counter() - began)
    began = time.perf_counter()
    density.score_samples(many)
    ours = len(many) / (time.perf_counter() - began)
    print(f"score_samples: {ours:,.0f} rows a second; KernelDensity {theirs:,.0f}")
    figure("tabular_score_rows_over_kernel_density", ours / theirs, goal=10.0, at_least=True)


def prepared(path: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as archive:
        x = archive["X"].astype(float)
    if len(x) > 10_000:
        x = x[np.random.default_rng(seed).choice(len(x), 10_000, replace=False)]
    fitted, scored = train_test_split(x, test_size=0.3, random_state=seed)
    columns = columns_of(fitted)
    kept = [place for place, column in enumerate(columns) if column.kind != "constant"]
    widths = np.array([columns[place].spread for place in kept])
    rng = np.random.default_rng(seed)
    fitted, scored = (
        part[:, kept] + widths * rng.uniform(-0.5, 0.5, (len(part), len(kept))) for part in (fitted, scored)
    )
    scale = fitted.std(0)
    return (fitted - fitted.mean(0)) / scale, (scored - fitted.mean(0)) / scale


def flow_for(x: np.ndarray, y: np.ndarray, seconds: float, seed: int) -> tuple[float, float]:
    """The log-likelihood of a flow trained for about so many seconds, if it gains by that; and the seconds it took."""
    rows, generator = torch.from_numpy(x).float(), torch.Generator().manual_seed(seed)
    trials = []
    for steps in (FIRST, FIRST, FIRST + MORE):  # the first is not warm
        began = time.perf_counter()
        Flow.fit(rows, steps=steps, generator=generator, patience=10**9, held_out=rows[:2])
        trials.append(time.perf_counter() - began)
    each = max(1e-4, (trials[2] - trials[1]) / MORE)
    began = time.perf_counter()
    flow = Flow.fit(rows, steps=max(FIRST, int((seconds - trials[1]) / each)), generator=generator)
    took = time.perf_counter() - began
    with torch.no_grad():
        return float(flow.log_prob(torch.from_numpy(y).float()).double().mean()), took


def likelihoods(path: Path, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    x, y = prepared(path, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        density = EnergyDensity(random_state=seed).fit(x)
        seconds = time.perf_counter() - began
        found = {"table": path.stem, "rows": len(x), "columns": x.shape[1], "seconds": seconds}
        found |= {"EnergyDensity": density.score(y), "trusted": density.diagnostics_["trusted"]}
        with torch.no_grad():
            noise = density.density_.noise_log_prob(torch.from_numpy(y))
        found[NOISE] = float(noise.mean())
        some = x[:2000]
        search = GridSearchCV(KernelDensity(), {"bandwidth": np.geomspace(0.05, 2.0, 8)}, cv=3).fit(some)
        found["KernelDensity"] = float(KernelDensity(**search.best_params_).fit(x).score_samples(y[:2000]).mean())
        counts = [k for k in (1, 2, 4, 8, 16, 32) if k * 2 <= len(x)]
        mixtures = [GaussianMixture(k, random_state=seed, reg_covar=1e-5).fit(x) for k in counts]
        found["GaussianMixture"] = float(min(mixtures, key=lambda one: one.bic(x)).score(y))
        found["spline flow"], found["flow seconds"] = flow_for(x, y, seconds, seed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--data", type=Path, help="the folder of ADBench's .npz files; $UNNORM_DATA/adbench if not given"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for one JSON line a table")
    parser.add_argument("--most-columns", type=int, default=64, help="wider tables are left out")
    arguments = parser.parse_args()
    speed(arguments.quick)
    folder = arguments.data or Path(os.environ.get("UNNORM_DATA", ".")) / "adbench"
    paths = [path for path in sorted(folder.glob("*.npz")) if not arguments.quick or path.stem in SMALL]
    narrow = []
    for path in paths:
        with np.load(path) as archive:
            narrow += [path] if archive["X"].shape[1] <= arguments.most_columns else []
    if not narrow:
        print(f"No tables in '{folder}': set UNNORM_DATA, or use --data. No likelihoods.")
        return
    rows = list(computed([(likelihoods, (path, 0)) for path in narrow], arguments.jobs))
    rows.sort(key=lambda one: str(one["table"]))
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    """Nats of a held-out row; the noise is ours and has no rank."""
    print("| table | " + " | ".join(METHODS) + " | seconds | of the flow |")
    print("| --- |" + " --- |" * (len(METHODS) + 2))
    for row in rows:
        cells = [f"{row[name]:.3f}" for name in METHODS]
        print(f"| {row['table']} | " + " | ".join(cells) + f" | {row['seconds']:.1f} | {row['flow seconds']:.1f} |")
    ranked = [name for name in METHODS if name != NOISE]
    ranks = dict(
        zip(ranked, np.mean([stats.rankdata([-row[name] for name in ranked]) for row in rows], axis=0), strict=True)
    )
    middle = {name: np.median([row[name] for row in rows]) for name in METHODS}
    below = {
        name: np.mean([min(MOST, max(row[other] for other in METHODS) - row[name]) for row in rows]) for name in METHODS
    }
    print("| mean rank | " + " | ".join(f"{ranks[name]:.2f}" if name in ranks else "" for name in METHODS) + " | | |")
    print("| median | " + " | ".join(f"{middle[name]:.3f}" for name in METHODS) + " | | |")
    print(
        f"| mean below the best, at most {MOST:.0f} a table | "
        + " | ".join(f"{below[name]:.3f}" for name in METHODS)
        + " | | |"
    )
    best = min(rank for name, rank in ranks.items() if name != METHODS[0])
    figure("tabular_likelihood_rank_over_best_peer", float(ranks[METHODS[0]] / best), goal=1.0)


if __name__ == "__main__":
    main()
