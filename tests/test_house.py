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
    "errors", "names", "trend", "types", "randomness", "streams", "diagnostics", "autocast", "device", "progress",
    "data", "noise", "models", "samplers", "estimators", "optim", "iterates", "training", "checkpoint", "health",
    "loop", "replicas", "bridges", "partition", "architecture", "archive", "draws", "density", "metrics",
    "settings", "folders", "groundwork", "tables", "plots", "images", "ledger", "processes", "points", "report",
    "jobs", "diagnosis", "paper", "sklearn", "pyod", "anomalies", "terminal", "studies", "detect", "cli",
    "__main__",
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


TRAINING = {
    "lightning_fabric", "unnorm.loop", "unnorm.training", "unnorm.estimators", "unnorm.health", "unnorm.replicas",
    "unnorm.tables.fit", "unnorm.tables.committee",
}  # fmt: skip
HEAVY = {"arviz_stats", "matplotlib", "numba", "sympy", "torch._dynamo", "torch._inductor", "torchmetrics", "zuko"}
SAY = "import sys; print(*sys.modules, file=open(sys.argv[1], 'w'))"


def modules_of(code, tmp_path, expected=0):
    """Return what a fresh process has imported when it has run the code, and its standard error."""
    ended = f"code = 0\ntry:\n    {code}\nexcept SystemExit as end:\n    code = end.code\n{SAY}; sys.exit(code)"
    command = [sys.executable, "-c", ended, str(tmp_path / "modules.txt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == expected, done.stderr
    return set((tmp_path / "modules.txt").read_text().split()), done.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A fitted table and estimators, saved as users save them, and rows to score."""
    import joblib
    import numpy as np

    import unnorm

    folder = tmp_path_factory.mktemp("saved")
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(size=(200, 2)), rng.gamma(2.0, size=200), rng.integers(0, 3, 200)])
    unnorm.fit(x, steps=25).save(folder / "table")
    joblib.dump(unnorm.EnergyDensity(random_state=0, steps=25).fit(x), folder / "density.joblib")
    joblib.dump(unnorm.EnergyOutlierDetector(random_state=0, steps=25).fit(x), folder / "detector.joblib")
    np.save(folder / "rows.npy", x[:5])
    return folder


def test_what_scores_imports_nothing_that_trains(saved, tmp_path):
    """Beyond torch and scikit-learn, which may bring compilers of their own; the command needs no scikit-learn."""
    before, _ = modules_of("import torch, sklearn", tmp_path)
    forbidden = TRAINING | (HEAVY - before)
    rows, load = f"np.load({str(saved / 'rows.npy')!r})", "import joblib, numpy as np; joblib.load"
    ways = {
        "import": "import unnorm.sklearn",
        "density": f"{load}({str(saved / 'density.joblib')!r}).score_samples({rows})",
        "detector": f"{load}({str(saved / 'detector.joblib')!r}).predict({rows})",
        "table": f"import numpy as np, unnorm; unnorm.load({str(saved / 'table')!r}).score_samples({rows})",
        "command": "from unnorm.cli import main; "
        f"main(['score', {str(saved / 'table')!r}, {str(saved / 'rows.npy')!r}])",
    }
    found = {way: modules_of(code, tmp_path)[0] for way, code in ways.items()}
    assert all("torch" in modules for modules in found.values())
    assert {way: wrong for way, modules in found.items() if (wrong := sorted(modules & forbidden))} == {}
    assert "sklearn" not in found["command"]


def test_what_describes_a_table_is_built_without_a_compiler(tmp_path):
    """Torch's own way to tensors without numbers, on which a description is built, would import one."""
    import torch

    from unnorm import MLP, Bridged, noise
    from unnorm.architecture import describe
    from unnorm.data import Compose, Whiten
    from unnorm.data.robust import LogTails, robust_scale
    from unnorm.models import Averaged, Seen

    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    q = noise.Mixture([noise.fit(x, kind) for kind in ("gaussian", "gaussian-low-rank", "mixture", "smoothed")])
    parts = [q, noise.fit(x, "copula"), noise.fit(x, "uniform"), Bridged(q, MLP(3, (8,), outputs=2))]
    parts += [Averaged([MLP(3, (8,))]), Seen(Whiten(3), MLP(3, (8,)))]
    parts += [Compose([robust_scale(x.double().numpy()), LogTails(), Whiten(3)])]
    specs = [describe(part) for part in parts]
    assert "custom" not in str(specs)
    code = f"import torch, sklearn; from unnorm.architecture import build; [build(spec) for spec in {specs!r}]"
    before, _ = modules_of("import torch, sklearn", tmp_path)
    modules, _ = modules_of(code, tmp_path)
    assert (modules - before) & HEAVY == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], ""),
        (["fit", "--help"], ""),
        (["fit", "nosuch.csv"], "unnorm: error: There is no file 'nosuch.csv'.\n"),
        (["fit", "moon"], "unnorm: error: Unknown data set 'moon'. Did you mean 'moons'?"),
        (["anomalies", "nosuch.csv"], "unnorm: error: There is no file 'nosuch.csv'.\n"),
    ],
)
def test_help_and_a_wrong_name_wait_for_no_torch(arguments, said, tmp_path):
    code = f"from unnorm.cli import main; main({arguments!r})"
    modules, error = modules_of(code, tmp_path, expected=2 if said else 0)
    assert "torch" not in modules
    assert error.startswith(said)
    assert error.count("\n") == bool(said)


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
