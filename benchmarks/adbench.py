"""Anomaly detection on the classical tables of ADBench (Han et al. 2022), unsupervised: ours and eleven of PyOD's.

The benchmark's protocol: at most 10,000 rows of a table, 70% of them to fit to without labels, 30% to score, columns
scaled to [0, 1] by the first; AUROC and AUPRC, three seeds. Tables below 1,000 rows are not filled up with copies, as
its authors do: a copy of a row to be scored would be among those fitted to. Constant columns are left out for all. The
defaults of `EnergyOutlierDetector` were chosen on the half of the tables whose names sort first; the other half is
reported by itself. Needs UNNORM_DATA (or --data) and `pip install 'unnorm[pyod]'`.
"""

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import figure
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import MinMaxScaler

from unnorm.ledger import Ledger, key_of
from unnorm.processes import computed

MOST_ROWS = 10_000
OURS = "EnergyOutlierDetector"
QUICK = ("15_Hepatitis", "18_Ionosphere", "21_Lymphography")


def _pyod(module: str, name: str, **options: Any) -> Callable[[int, int], Any]:
    def make(width: int, seed: int) -> Any:
        import importlib

        given = {key: {"seed": seed, "width": width}[value] for key, value in options.items()}
        kind = getattr(importlib.import_module(f"pyod.models.{module}"), name)
        return kind(**given) if module != "deep_svdd" else kind(**given, verbose=0)

    return make


PEERS = {
    "IsolationForest": _pyod("iforest", "IForest", random_state="seed"),
    "LOF": _pyod("lof", "LOF"),
    "OCSVM": _pyod("ocsvm", "OCSVM"),
    "KernelDensity": _pyod("kde", "KDE"),
    "GaussianMixture": _pyod("gmm", "GMM", random_state="seed"),
    "ECOD": _pyod("ecod", "ECOD"),
    "COPOD": _pyod("copod", "COPOD"),
    "KNN": _pyod("knn", "KNN"),
    "PCA": _pyod("pca", "PCA", random_state="seed"),
    "HBOS": _pyod("hbos", "HBOS"),
    "DeepSVDD": _pyod("deep_svdd", "DeepSVDD", n_features="width", random_state="seed"),
}
METHODS = (OURS, *PEERS)


def divided(path: Path, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows to fit to, rows to score, and the labels of these."""
    with np.load(path) as archive:
        x, y = archive["X"].astype(float), archive["y"].astype(int)
    if len(x) > MOST_ROWS:
        some = np.random.default_rng(seed).choice(len(x), MOST_ROWS, replace=False)
        x, y = x[some], y[some]
    fitted, scored, _, labels = train_test_split(x, y, test_size=0.3, stratify=y, random_state=seed)
    varying = (fitted != fitted[0]).any(0)
    scale = MinMaxScaler().fit(fitted[:, varying])
    return scale.transform(fitted[:, varying]), scale.transform(scored[:, varying]), labels


def measured(path: Path, seed: int, method: str, key: str) -> dict[str, Any]:
    """One method on one table; one that fails has the scores of chance, and says why."""
    import torch

    torch.set_num_threads(1)
    fitted, scored, labels = divided(path, seed)
    facts = {"kind": "run", "key": key, "table": path.stem, "seed": seed, "method": method}
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if method == OURS:
                from unnorm.sklearn import EnergyOutlierDetector

                scores = -EnergyOutlierDetector(random_state=seed).fit(fitted).score_samples(scored)
            else:
                scores = PEERS[method](fitted.shape[1], seed).fit(fitted).decision_function(scored)
        facts |= {"auroc": roc_auc_score(labels, scores), "auprc": average_precision_score(labels, scores)}
    except Exception as problem:  # whatever a library raises on a table
        facts |= {"auroc": 0.5, "auprc": float(labels.mean()), "error": f"{type(problem).__name__}: {problem}"[:200]}
    return facts | {"seconds": time.perf_counter() - began}


def tables(folder: Path, quick: bool) -> list[Path]:
    found = sorted(folder.glob("*.npz"), key=lambda path: path.name)
    return [path for path in found if not quick or path.stem in QUICK]


def means(records: Iterable[dict[str, Any]], metric: str, names: Sequence[str]) -> np.ndarray:
    """(tables, methods), the mean over seeds."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        values[record["table"], record["method"]].append(record[metric])
    return np.array([[np.mean(values[name, method]) for method in METHODS] for name in names])


def critical(count: int, sets: int) -> float:
    """The Nemenyi test's difference of mean ranks at 5%."""
    q = float(stats.studentized_range.ppf(0.95, count, math.inf)) / math.sqrt(2)
    return q * math.sqrt(count * (count + 1) / (6 * sets))


def summary(records: Sequence[dict[str, Any]], names: Sequence[str], title: str) -> dict[str, float]:
    """Print a table of methods; return the mean ranks by AUROC."""
    ranks = {}
    for metric in ("auroc", "auprc"):
        found = means(records, metric, names)
        ranks[metric] = np.array([stats.rankdata(-row) for row in found]).mean(0)
    values, seconds = means(records, "auroc", names).mean(0), means(records, "seconds", names).mean(0)
    print(f"\n### {title} ({len(names)} tables; critical difference {critical(len(METHODS), len(names)):.2f})\n")
    print("| method | mean AUROC | mean AUPRC | mean rank, AUROC | mean rank, AUPRC | seconds a table |")
    print("| --- | --- | --- | --- | --- | --- |")
    precision = means(records, "auprc", names).mean(0)
    for place in np.argsort(ranks["auroc"]):
        cells = (values[place], precision[place], ranks["auroc"][place], ranks["auprc"][place], seconds[place])
        print(f"| {METHODS[place]} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return dict(zip(METHODS, map(float, ranks["auroc"]), strict=True))


def picture(ranks: dict[str, float], sets: int, path: Path, title: str) -> None:
    """Mean ranks on a line, and the critical difference as a bar from the best."""
    order = sorted(ranks, key=lambda name: ranks[name])
    drawing = Figure(figsize=(8, 0.6 + 0.3 * len(order)), layout="constrained")
    axis = drawing.subplots()
    best, width = ranks[order[0]], critical(len(order), sets)
    axis.axvspan(
        best, best + width, color="#1b8ac4", alpha=0.12, label=f"critical difference {width:.2f} (Nemenyi, 5%)"
    )
    for place, name in enumerate(order):
        axis.plot(ranks[name], place, "o", color="#d1495b" if name == OURS else "#7a808a")
    axis.set_yticks(range(len(order)), order)
    axis.invert_yaxis()
    axis.set(xlabel="mean rank by AUROC, less is better", title=title)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="upper right")
    FigureCanvasAgg(drawing).print_png(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three small tables, one seed")
    parser.add_argument(
        "--data", type=Path, help="the folder of ADBench's .npz files; $UNNORM_DATA/adbench if not given"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/adbench"))
    arguments = parser.parse_args()
    folder = arguments.data or Path(os.environ.get("UNNORM_DATA", ".")) / "adbench"
    paths = tables(folder, arguments.quick)
    if not paths:
        parser.error(f"There are no .npz files of ADBench in '{folder}'. Set UNNORM_DATA, or use --data.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(arguments.out / "results.jsonl")
    work, keys = [], set()
    for method in METHODS:
        for seed in range(1 if arguments.quick else 3):
            for path in paths:
                key = key_of({"table": path.stem, "seed": seed, "method": method, "code": version(method)})
                keys.add(key)
                if ledger.missing([key]):
                    work.append((measured, (path, seed, method, key)))
    for record in computed(work, arguments.jobs):
        ledger.write([record])
    everything = [path.stem for path in tables(folder, False)]
    tuned = {path.stem for path in paths} & set(everything[: len(everything) // 2])
    records = [record for record in ledger.of("run") if record["key"] in keys]
    report(records, [path.stem for path in paths], tuned, arguments.out)


def version(method: str) -> str:
    """Of the code behind ours, so that a folder of an older detector is not taken for this one's; of PyOD its own."""
    if method != OURS:
        return importlib.metadata.version("pyod")
    import unnorm.sklearn

    home = Path(unnorm.sklearn.__file__).parent
    files = [home / "sklearn.py", home / "data" / "robust.py", *sorted((home / "tabular").glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def report(records: Sequence[dict[str, Any]], names: Sequence[str], tuned: Collection[str], out: Path) -> None:
    """All tables, those of the half that the defaults were chosen on, and the others."""
    failed = [record for record in records if "error" in record]
    print(f"{len(records)} runs, {len(failed)} failed", *(json.dumps(one) for one in failed[:5]), sep="\n")
    parts = {"all": names, "tuned": [n for n in names if n in tuned], "held out": [n for n in names if n not in tuned]}
    for title, some in parts.items():
        if not some:
            continue
        ranks = summary(records, some, title)
        picture(ranks, len(some), out / f"ranks-{title.replace(' ', '-')}.png", f"ADBench, {title}: {len(some)} tables")
        best = min(value for name, value in ranks.items() if name != OURS)
        figure(f"adbench_rank_over_best_peer_{title.replace(' ', '_')}", ranks[OURS] / best, goal=1.0)


if __name__ == "__main__":
    main()
