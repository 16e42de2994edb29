"""The house rules a machine can check: imports point one way, importing is silent, the README's code runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# From the left to the right of the design page: a module may import only those before it.
ORDER = [
    "errors", "names", "types", "streams", "diagnostics", "device", "progress", "data", "noise", "models",
    "samplers", "estimators", "optim", "iterates", "training", "checkpoint", "health", "train", "replicas", "bridges",
    "partition", "architecture", "archive", "draws", "density", "metrics", "plots", "images", "settings",
    "folders", "ledger", "processes", "points", "groundwork", "report", "jobs", "diagnosis", "paper",
    "tabular", "sklearn", "pyod", "anomalies", "terminal", "studies", "detect", "cli", "__main__",
]  # fmt: skip


def part(path):
    return path.relative_to(ROOT / "unnorm").parts[0].removesuffix(".py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "unnorm":
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from names
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("unnorm."))


def test_imports_point_only_to_the_left():
    wrong = []
    for path in sorted((ROOT / "unnorm").rglob("*.py")):
        if path == ROOT / "unnorm" / "__init__.py":
            continue
        own = ORDER.index(part(path))
        wrong += [f"{path.name} -> {name}" for name in imported(path) if name in ORDER and ORDER.index(name) > own]
    assert wrong == []


def test_every_part_has_its_place():
    assert {part(path) for path in (ROOT / "unnorm").rglob("*.py")} == {*ORDER, "__init__"}


def test_importing_is_silent_and_light():
    code = "import sys, unnorm; sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'pyarrow')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_library_needs_no_optional_dependency():
    code = (
        "import sys; sys.modules.update(pyarrow=None, torchmetrics=None, pooch=None, zuko=None)\n"
        "import unnorm, unnorm.jobs\n"
        "for name in unnorm.__all__: getattr(unnorm, name)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_readme_code_runs(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(re.sub(r"steps=\d+", "steps=30", block), "README.md", "exec"), {})
