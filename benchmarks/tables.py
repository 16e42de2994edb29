"""Held-out likelihood and seconds of `unnorm.fit` on tables of many kinds, over five seeded splits.

    python benchmarks/tables.py [--quick] [--tables wine,iris] [--seeds 5] [--out results/tables/now.jsonl]

Each split keeps a fifth of the rows for scoring (at most 5,000). Scores are in nats a row and in the units of the
table: a column of whole numbers has probabilities. The tables of ADBench need UNNORM_DATA; the two large tables are
made here: `housing` has the shape and the faults of the California housing data (20,640 x 9, capped and rounded
columns, heavy tails, two places on a map); `sensors` is 200,000 x 30 (six regimes of few factors, bent and multiplied).

`results/tables/before.jsonl` holds what the two older pipelines reached on the same splits; the last figures say on how
many tables the present one is at least as good as the better of them, within the paired error of the five splits.
"""

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import figure

HERE = Path(__file__).resolve().parents[1]
BEFORE = HERE / "results" / "tables" / "before.jsonl"
SCORED = 5000


def housing() -> np.ndarray:
    """20,640 rows that look like California housing: income, age, rooms, bedrooms, people, occupants, place, value."""
    rng, n = np.random.default_rng(20_640), 20_640
    north = rng.uniform(size=n) < 0.42
    along = rng.normal(size=n) * 0.35
    latitude = np.round(np.where(north, 37.8, 34.0) + 0.55 * along + 0.25 * rng.standard_t(3, n), 2)
    longitude = np.round(np.where(north, -122.0, -118.2) - 0.75 * along + 0.3 * rng.standard_t(3, n), 2)
    income = np.clip(np.round(rng.gamma(4.0, 0.95, n) + 0.5 * (along > 0.2), 4), 0.4999, 15.0001)
    age = np.clip(np.round(rng.normal(29, 12.5, n) - 2 * along), 1, 52)
    rooms = np.exp(0.22 * rng.standard_t(4, n) + 1.4 + 0.09 * income)
    bedrooms = 0.2 * rooms ** np.where(rng.uniform(size=n) < 0.97, 0.1, 1.0) + 0.85 + 0.05 * rng.standard_t(3, n)
    people = np.round(np.exp(rng.normal(7.05, 0.74, n) - 0.008 * age)) + 3
    occupants = np.exp(1.02 + 0.2 * rng.standard_normal(n) + 0.03 * rng.standard_t(2, n))
    place = np.where(north, 0.35, 0.2) - 0.25 * np.abs(along)
    value = np.exp(-0.6 + 0.62 * np.log(income) + place + 0.003 * age + 0.28 * rng.standard_normal(n))
    value = np.where(value > 5.0, 5.00001, np.round(value, 3))
    return np.column_stack([income, age, rooms, bedrooms, people, occupants, latitude, longitude, value])


def sensors() -> np.ndarray:
    """200,000 rows of 30 columns: six regimes of four factors, read by bent, multiplied and clipped sensors."""
    rng, n = np.random.default_rng(30), 200_000
    regime = rng.choice(6, n, p=[0.3, 0.25, 0.2, 0.12, 0.08, 0.05])
    factors = rng.normal(size=(6, 4))[regime] * 1.5 + rng.normal(size=(n, 4)) @ rng.normal(size=(4, 4)) * 0.4
    loads = rng.normal(size=(4, 30)) / 2
    level = factors @ loads
    bent = np.tanh(level[:, :10]) + 0.1 * rng.normal(size=(n, 10))
    multiplied = level[:, 10:20] * (1 + 0.3 * factors[:, :1]) + 0.3 * rng.standard_t(5, (n, 10))
    positive = np.exp(0.5 * level[:, 20:28] + 0.2 * rng.normal(size=(n, 8)))
    counts = rng.poisson(np.exp(0.4 * level[:, 28:29] + 1.0))
    return np.column_stack([bent, multiplied, positive, counts, regime.astype(float)])


def toy_table(name: str) -> np.ndarray:
    """A table of scikit-learn with its class, or its target, as the last column."""
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    return np.column_stack([found.data, found.target]).astype(float)


def adbench(name: str) -> np.ndarray:
    """A table of ADBench, at most 10,000 rows of it; its labels are unused."""
    with np.load(Path(os.environ["UNNORM_DATA"]) / "adbench" / f"{name}.npz") as archive:
        x = archive["X"].astype(float)
    some = np.random.default_rng(0).permutation(len(x))[:10_000]
    return x[np.sort(some)]


SMALL = ("iris", "wine", "breast_cancer", "diabetes")
LABELLED = ("39_vertebral", "29_Pima", "47_yeast", "27_PageBlocks", "28_pendigits")
TABLES: Mapping[str, Callable[[], np.ndarray]] = {
    **{name: (lambda name=name: toy_table(name)) for name in SMALL},  # type: ignore[misc]
    **{name: (lambda name=name: adbench(name)) for name in LABELLED},  # type: ignore[misc]
    "housing": housing,
    "sensors": sensors,
}


def split(x: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fit to and a fifth, at most 5,000, to score."""
    order = np.random.default_rng(1000 + seed).permutation(len(x))
    kept = min(SCORED, len(x) // 5)
    return x[order[kept:]], x[order[:kept]]


def measured(name: str, x: np.ndarray, seed: int) -> dict[str, Any]:
    """Fit to one split and score its other rows."""
    import unnorm

    fitted, scored = split(x, seed)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        density = unnorm.fit(fitted, test=0.0, seed=seed)
    seconds = time.perf_counter() - began
    scores = density.score_samples(scored)
    parts = {part: judged.level for part, judged in density.verdict.parts().items()}
    facts = {"table": name, "seed": seed, "pipeline": "unnorm.fit", "rows": len(fitted), "columns": x.shape[1]}
    facts |= {"nats": float(scores.mean()), "stderr": float(scores.std() / math.sqrt(len(scores)))}
    return facts | {"seconds": seconds, "level": density.verdict.level, "parts": parts}


def compared(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Print the means over the splits beside the older pipelines', and on how many tables nothing was lost."""
    tables = list(dict.fromkeys(record["table"] for record in now))
    older = sorted({record["pipeline"] for record in before})
    print(
        "| table | rows x columns | " + " | ".join(f"{name}: nats, s" for name in (*older, "unnorm.fit")) + " | gain |"
    )
    print("| --- |" + " --- |" * (len(older) + 3))
    kept = compared_tables = 0
    for table in tables:
        own = {record["seed"]: record for record in now if record["table"] == table}
        first = next(iter(own.values()))
        cells, means = [], {}
        for name in older:
            theirs = {r["seed"]: r for r in before if (r["table"], r["pipeline"]) == (table, name) and r["seed"] in own}
            if theirs:
                means[name] = {seed: record["nats"] for seed, record in theirs.items()}
                cells.append(_cell(list(theirs.values())))
            else:
                cells.append("")
        cells.append(_cell(list(own.values())))
        gain = ""
        if means:
            best = max(means, key=lambda name: float(np.mean(list(means[name].values()))))
            gaps = np.array([own[seed]["nats"] - nats for seed, nats in means[best].items()])
            error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
            gain = f"{gaps.mean():+.3f} ± {error:.3f} ({len(gaps)})"
            compared_tables += 1
            kept += bool(gaps.mean() >= -2 * error) if len(gaps) > 1 else bool(gaps.mean() >= 0)
        print(f"| {table} | {first['rows']:,} x {first['columns']} | " + " | ".join(cells) + f" | {gain} |")
    if compared_tables:
        figure("tables_at_least_as_good_share", kept / compared_tables, goal=1.0, at_least=True)
    for table in ("wine", "breast_cancer"):
        seconds = [record["seconds"] for record in now if record["table"] == table]
        if seconds:
            figure(f"{table}_fit_seconds", float(np.median(seconds)), goal=2.0)


def _cell(records: list[dict[str, Any]]) -> str:
    nats, seconds = (np.mean([record[key] for record in records]) for key in ("nats", "seconds"))
    return f"{nats:.3f}, {seconds:.1f}"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the four small tables, two splits")
    parser.add_argument("--tables", help="some of them, with commas between")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for one JSON line a split; it goes on from there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.tables.split(",") if options.tables else list(SMALL if options.quick else TABLES)
    now = read(options.out) if options.out else []
    done = {(record["table"], record["seed"]) for record in now}
    for name in names:
        if name in LABELLED and "UNNORM_DATA" not in os.environ:
            print(f"{name} is left out: UNNORM_DATA names no folder.")
            continue
        x = TABLES[name]()
        for seed in range(2 if options.quick else options.seeds):
            if (name, seed) in done:
                continue
            now.append(measured(name, x, seed))
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(now[-1]) + "\n")
    compared([record for record in now if record["table"] in names], read(BEFORE))


if __name__ == "__main__":
    main()
