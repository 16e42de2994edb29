"""What a fit leaves for a reader: `density.png` and `report.md`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unnorm.checkpoint import write_atomically
from unnorm.plots import SHOWN, picture
from unnorm.tables.fit import EncodedRows, Finished

__all__ = ["rows", "write"]


def rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a fit as (name, value) lines, for a table.

    >>> rows({"test_nll": 2.85, "test_stderr": 0.01, "log_z": {}})
    [('test NLL', '2.8500 ± 0.0100 nats')]
    """
    lines = []
    others = {"validation": "validation NLL", "test and validation": "held-out NLL"}
    held = others.get(str(result.get("judged_on")), "test NLL")
    if result.get("test_nll") is not None:
        lines.append((held, f"{result['test_nll']:.4f} ± {_number(result.get('test_stderr'))} nats"))
    if result.get("truth"):
        truth = result["truth"]
        lines.append(("the truth's NLL (entropy)", f"{truth['entropy']:.4f} nats"))
        lines.append(
            ("above the truth, same points", f"{truth['excess']:.4f} ± {_number(truth['excess_stderr'])} nats")
        )
    for key, name in (("train_nll", "train NLL"), ("noise_nll", f"{held} of the noise alone")):
        if result.get(key) is not None:
            lines.append((name, f"{result[key]:.4f} nats"))
    if result.get("rows", {}).get("dropped"):
        lines.append(("rows left out", f"{result['rows']['dropped']:,} (a missing cell)"))
    for method, found in result["log_z"].items():
        text = f"{_number(found['value'])} ± {_number(found['stderr'])}"
        if method in ("importance", "ais"):
            text += f"  (ESS {found['ess'] or 0:,.0f} of {found['n']:,}, Pareto k {_number(found['khat'], 2)})"
        if method == "bracket":
            text += f"  (annealed from both ends, {found['ess'] or 0:,.0f} of {found['n']:,} chains meet)"
        lines.append((f"log Z, {method}", text))
    for key, name in (
        ("training_log_u", "log u, tracked in training"),
        ("training_log_z", "log Z, learned in training"),
    ):
        if result.get(key) is not None:
            doubt = "" if result.get("certified", True) else "  (not to be trusted)"
            lines.append((name, f"{result[key]:.4f}{doubt}"))
    if result.get("bridges", 1) > 1:
        lines.append(("bridges", f"{result['bridges']}"))
    if result.get("fit_seconds") is not None:
        lines.append(("fit time", f"{result['fit_seconds']:.1f} s, {result['steps']:,} steps"))
    return lines


def _number(value: float | None, digits: int = 4) -> str:
    return "unknown" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def write(out: Path, settings: Mapping[str, Any], finished: Finished, result: Mapping[str, Any]) -> None:
    """Draw `density.png` and write `report.md` into the run folder."""
    name = Path(str(settings["data"])).name
    title = name
    if result.get("test_nll") is not None:
        error = _number(result["test_stderr"], 3)
        title += f": test NLL {result['test_nll']:.3f} ± {error} nats"
    parts = finished.parts
    held = parts.test if parts.test is not None else parts.validation
    test = None if held is None else _some(held)
    picture(out / "density.png", finished.density, _some(parts.train), test, f"{title} ({result['verdict_level']})")
    write_atomically(out / "report.md", _markdown(out, name, settings, finished, result).encode())


def _some(rows: EncodedRows, n: int = 4 * SHOWN) -> np.ndarray:
    """Return some of the rows as numbers of the table; they are in a random order."""
    return EncodedRows(rows.values, rows.columns, rows.order, rows.at[:n], rows.seed).rows()


def _markdown(out: Path, name: str, settings: Mapping[str, Any], finished: Finished, result: Mapping[str, Any]) -> str:
    counts, density = result["rows"], finished.density
    kinds = "\n".join(f"| {column} | {kind} |" for column, kind in density.columns.kinds())
    verdict = "\n".join(f"- **{name}: {part.level}.** {part.text}." for name, part in density.verdict.parts().items())
    numbers = "\n".join(f"| {key} | {value} |" for key, value in rows(result))
    rungs = "\n".join(f"- {line}" for line in result.get("rungs", []))
    flat = {**settings, **settings["training"]}
    chosen = "\n".join(f"| {key} | {value} |" for key, value in flat.items() if key != "training" and value is not None)
    return f"""# {name}

**{result["verdict_level"]}**

{verdict}

{"".join(f"{line} " for line in result.get("chosen", {}).values()).strip()}

{counts["train"]:,} training rows, {counts["validation"]:,} validation rows, {counts["test"]:,} test rows.

| number | value |
| --- | --- |
{numbers}

NLL is the mean of -log p(x) in nats per row, in the units of the data. The ± is one standard error; of the test NLL,
that of the rows and that of log Z together.

![data, density and samples](density.png)

## How log Z was found

{rungs}

## Use it

    unnorm score {out} OTHER.csv
    unnorm sample {out} -n 1000

```python
import unnorm
density = unnorm.load("{out}")
density.score_samples("OTHER.csv"), density.sample(5)
```

## Columns

| column | kind |
| --- | --- |
{kinds}

## Settings

| setting | value |
| --- | --- |
{chosen}
"""
