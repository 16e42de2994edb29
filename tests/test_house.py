"""The house rules a machine can check: imports point one way, importing is silent, the code of README and docs runs."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the left to the right of the design page: a module may import only those before it.
ORDER = [
    "errors", "names", "trend", "types", "randomness", "streams", "diagnostics", "device", "progress", "data", "noise",
    "models", "samplers", "estimators", "optim", "iterates", "training", "checkpoint", "health", "loop", "replicas", "bridges",
    "partition", "architecture", "archive", "draws", "density", "metrics", "settings", "folders", "groundwork",
    "tables", "plots", "images", "ledger", "processes", "points", "report", "jobs", "diagnosis", "paper",
    "sklearn", "pyod", "anomalies", "terminal", "studies", "detect", "cli", "__main__",
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


def test_page_on_tables_runs(tmp_path, monkeypatch):
    """Its blocks one after the other, as a reader would: commands find the file that the first one writes."""
    pytest.importorskip("pandas", reason="needs pandas")
    from unnorm.cli import main

    text = (ROOT / "docs" / "tables.md").read_text()
    blocks = re.findall(r"```(python|sh)\n(.*?)```", text, flags=re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    monkeypatch.chdir(tmp_path)
    space = {}
    for kind, block in blocks:
        if kind == "python":
            exec(compile(re.sub(r"steps=\d+", "steps=30", block), "tables.md", "exec"), space)
            continue
        for line in block.splitlines():
            with pytest.raises(SystemExit) as ended:
                main(shlex.split(line)[1:])
            assert ended.value.code == 0


@pytest.mark.parametrize("page", ["README.md", "docs/tables.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in link or (ROOT / page).parent.joinpath(link).exists(), link
