"""What a fit leaves for a reader: `density.png` and `report.md`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unnorm.checkpoint import write_atomically
from unnorm.data.rows import RowSource, spread
from unnorm.density import Density
from unnorm.plots import SHOWN, picture

__all__ = ["rows", "write"]


def rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a fit as (name, value) lines, for a table.

    >>> rows({"test_nll": 2.85, "test_stderr": 0.01, "log_z": {}})
    [('test NLL', '2.8500 ± 0.0100 nats')]
    """
    lines = []
    if result.get("test_nll") is not None:
        lines.append(("test NLL", f"{result['test_nll']:.4f} ± {_number(result.get('test_stderr'))} nats"))
    if result.get("truth"):
        truth = result["truth"]
        lines.append(("the truth's NLL (entropy)", f"{truth['entropy']:.4f} nats"))
        lines.append(
            ("above the truth, same points", f"{truth['excess']:.4f} ± {_number(truth['excess_stderr'])} nats")
        )
    for key, name in (("train_nll", "train NLL"), ("noise_nll", "test NLL of the noise alone")):
        if result.get(key) is not None:
            lines.append((name, f"{result[key]:.4f} nats"))
    if result.get("rows", {}).get("dropped"):
        lines.append(("rows left out", f"{result['rows']['dropped']:,} (NaN or infinity)"))
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


def write(out: Path, settings: Mapping[str, Any], points: Any, density: Density, result: Mapping[str, Any]) -> None:
    """Draw `density.png` and write `report.md` into the run folder."""
    name = Path(str(settings["data"])).name
    error = _number(result["test_stderr"], 3)
    title = f"{name}: test NLL {result['test_nll']:.3f} ± {error} nats ({result['verdict_level']})"
    picture(out / "density.png", density, _some(points.train), _some(points.test), points.columns, title)
    write_atomically(out / "report.md", _markdown(out, name, settings, points, result).encode())


def _some(data: RowSource, n: int = 4 * SHOWN) -> torch.Tensor:
    return data[spread(len(data), n)]


def _markdown(out: Path, name: str, settings: Mapping[str, Any], points: Any, result: Mapping[str, Any]) -> str:
    numbers = "\n".join(f"| {key} | {value} |" for key, value in rows(result))
    rungs = "\n".join(f"- {line}" for line in result.get("rungs", []))
    flat = {**settings, **settings["training"]}
    chosen = "\n".join(f"| {key} | {value} |" for key, value in flat.items() if key != "training" and value is not None)
    return f"""# {name}

**{result["verdict"]}**

{"".join(f"{line} " for line in result.get("chosen", {}).values()).strip()}

{len(points.train):,} training rows, {len(points.test):,} test rows, columns {", ".join(points.columns[:12])}.

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
from unnorm import Density
density = Density.load("{out}")
```

## Settings

| setting | value |
| --- | --- |
{chosen}
"""
