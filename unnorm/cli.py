"""The command line: `unnorm fit | score | sample | info`."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from unnorm.errors import InvalidValue, UnnormError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Learn unnormalized statistical models; get a normalised density with an error bar.",
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A folder written by 'unnorm fit'.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]


@app.command(epilog="Example: unnorm fit 8gaussians    or: unnorm fit table.csv --steps 5000 --out runs/mine")
def fit(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="2spirals, 8gaussians, checkerboard, circles, moons, swissroll; or a .csv, .npy, .npz, .parquet file.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; runs/NAME when not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is already in the output folder.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Continue the run in this folder.")] = None,
    model: Annotated[str, typer.Option(help="tilted (noise times exp of an MLP), mlp, or quadratic.")] = "tilted",
    hidden: Annotated[str, typer.Option(help="Widths of the hidden layers.")] = "300,300,300",
    activation: Annotated[str, typer.Option(help="silu, relu, leaky-relu, elu, gelu, softplus or tanh.")] = "silu",
    noise: Annotated[str, typer.Option(help="gaussian, gaussian-diagonal or gaussian-low-rank.")] = "gaussian",
    estimator: Annotated[str, typer.Option(help="meco.")] = "meco",
    gamma: Annotated[float | None, typer.Option(help="MECO's tracker rate, in (0, 1]. [default: 0.1]")] = None,
    beta: Annotated[float, typer.Option(help="MECO's gradient momentum: weight of the new gradient, in (0, 1].")] = 0.9,
    tracker: Annotated[str, typer.Option(help="ema (the paper), minibatch, scent or umax.")] = "ema",
    n_noise: Annotated[int | None, typer.Option(help="Noise draws per step. [default: the batch]")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimization steps. [default: 2500]")] = None,
    batch: Annotated[int, typer.Option(help="Data points per step.")] = 500,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    optimizer: Annotated[str, typer.Option(help="adam or sgd.")] = "adam",
    schedule: Annotated[
        str, typer.Option(help="Of the learning rate: constant, power, cosine, or pl (Theorem 4).")
    ] = "cosine",
    mu: Annotated[float, typer.Option(help="PL constant for --schedule pl.")] = 1.0,
    iterate: Annotated[
        str, typer.Option(help="Which iterate to keep: last, random (the paper), averaged, or best (validated).")
    ] = "last",
    n: Annotated[int, typer.Option(help="Training points to draw of a toy set.")] = 50_000,
    test: Annotated[float, typer.Option(help="Share of the rows kept for testing.")] = 0.1,
    columns: Annotated[str | None, typer.Option(help="Columns to use, by name or position: a,b,c.")] = None,
    key: Annotated[str | None, typer.Option(help="Which array of an .npz file.")] = None,
    drop_nonfinite: Annotated[
        bool, typer.Option("--drop-nonfinite", help="Leave out rows with NaN or infinity.")
    ] = False,
    drop_constant: Annotated[bool, typer.Option("--drop-constant", help="Leave out constant columns.")] = False,
    n_importance: Annotated[int, typer.Option(help="Noise draws for log Z.")] = 200_000,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="32, 64 or bf16 (mixed).")] = "32",
    as_json: JsonFlag = False,
) -> None:
    """Fit a density to points; write a folder with the model, its numbers, a picture and a report."""
    from unnorm.jobs import Job, load_job, run
    from unnorm.train import Training

    if resume is not None:
        if data is not None or out is not None:
            raise InvalidValue("With --resume give neither DATA nor --out: the folder knows both.")
        job, folder = load_job(resume, steps), resume
    elif data is None:
        raise InvalidValue("Missing DATA: the name of a toy set or a file. Example: unnorm fit 8gaussians.")
    else:
        training = Training(
            steps=Training.steps if steps is None else steps,
            batch=batch,
            lr=lr,
            optimizer=optimizer,
            beta=beta,
            schedule=schedule,
            mu=mu,
            iterate=iterate,
            seed=seed,
        )
        job = Job(
            data=data,
            key=key,
            columns=tuple(columns.split(",")) if columns else None,
            drop_nonfinite=drop_nonfinite,
            drop_constant=drop_constant,
            n=n,
            test=test,
            model=model,
            hidden=_widths(hidden),
            activation=activation,
            noise=noise,
            estimator=estimator,
            gamma=gamma,
            tracker=tracker,
            n_noise=n_noise,
            n_importance=n_importance,
            device=device,
            precision=precision,
            training=training,
        )
        folder = out or Path("runs") / Path(data).stem
    try:
        result = run(job, folder, resume=resume is not None, force=force)
    except UnnormError as problem:
        if problem.exit_code == 130:
            problem.args = (f"{problem} Continue with: unnorm fit --resume {folder}",)
        raise
    if as_json:
        _print_json({"folder": str(folder), **result})
    else:
        _print_result(result, f"Written to {folder}: model.safetensors, density.png, report.md")


@app.command(epilog="Example: unnorm score runs/8gaussians new.csv --out scores.csv")
def score(
    model: ModelFolder,
    data: Annotated[str, typer.Argument(metavar="DATA", help="A .csv, .npy, .npz or .parquet file.")],
    out: Annotated[Path | None, typer.Option(help="Write the scores to this .csv or .npy file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    key: Annotated[str | None, typer.Option(help="Which array of an .npz file.")] = None,
    drop_nonfinite: Annotated[
        bool, typer.Option("--drop-nonfinite", help="Leave out rows with NaN or infinity.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print log p(x) of every row: one number a line, in the order of the file."""
    from unnorm.density import Density
    from unnorm.jobs import points_for_scoring
    from unnorm.metrics import log_probs

    density = Density.load(model)
    points, kept = points_for_scoring(model, data, key=key, drop_nonfinite=drop_nonfinite)
    values = log_probs(density.log_prob, points).numpy()
    mean, stderr = -values.mean(), values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    if as_json:
        summary: dict[str, Any] = {"n": len(values), "nll": mean, "stderr": stderr, "log_prob": values.tolist()}
        if kept is not None:
            summary["rows"] = kept.tolist()
        _print_json(summary)
    elif out is None:
        typer.echo("\n".join(f"{value:.9g}" for value in values))
    if out is not None:
        _write_table(out, values[:, None], ("log_prob",), force)
    if not as_json:
        typer.echo(f"{len(values)} rows, NLL {mean:.4f} ± {stderr:.4f} nats", err=True)


@app.command(epilog="Example: unnorm sample runs/8gaussians -n 1000 --out samples.csv")
def sample(
    model: ModelFolder,
    n: Annotated[int, typer.Option("-n", "--n", help="How many points.")] = 1000,
    out: Annotated[Path | None, typer.Option(help="Write the points to this .csv or .npy file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    seed: Seed = 0,
    as_json: JsonFlag = False,
) -> None:
    """Draw points from a fitted density, in the units of its data."""
    import torch

    from unnorm.density import Density
    from unnorm.jobs import CONFIG

    density = Density.load(model)
    points = density.sample(n, generator=torch.Generator().manual_seed(seed)).double().numpy()
    config = model / CONFIG
    names = json.loads(config.read_text())["columns"] if config.exists() else [str(k) for k in range(points.shape[1])]
    if as_json:
        _print_json({"n": n, "columns": names, "samples": points.tolist()})
    elif out is None:
        typer.echo(",".join(names))
        typer.echo("\n".join(",".join(f"{value:.9g}" for value in row) for row in points))
    if out is not None:
        _write_table(out, points, names, force)


@app.command(epilog="Example: unnorm info runs/8gaussians --json")
def info(model: ModelFolder, as_json: JsonFlag = False) -> None:
    """Show what a saved model is, how good it is, and whether to trust it."""
    from unnorm.architecture import describe
    from unnorm.density import Density
    from unnorm.diagnostics import verdict
    from unnorm.jobs import RESULT

    density = Density.load(model)
    result: dict[str, Any] = {"test_nll": None}
    if (model / RESULT).exists():
        result |= json.loads((model / RESULT).read_text())
    result["log_z"] = {method: found._asdict() for method, found in density.log_zs.items()}
    if "verdict" not in result:
        judged = verdict(density.log_zs)
        result |= {"verdict": judged.line(), "verdict_level": judged.level}
    parameters = sum(p.numel() for p in density.model.parameters())
    result |= {"model": describe(density.model), "parameters": parameters, "event": list(density.event)}
    if as_json:
        _print_json(result)
    else:
        _print_result(result, f"{result['model']['kind']}, {parameters:,} parameters, events of shape {density.event}")


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise InvalidValue(
            f"The hidden widths are integers with commas between, as in 300,300,300. Got '{text}'."
        ) from None


def _print_json(content: Any) -> None:
    from unnorm.jobs import without_nan

    typer.echo(json.dumps(without_nan(content), allow_nan=False))


def _print_result(result: dict[str, Any], footer: str) -> None:
    from rich.console import Console

    from unnorm.report import rows

    console = Console(highlight=False, soft_wrap=True)
    lines = rows(result)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        console.print(f"{name:<{width}}  {value}")
    console.print(footer)
    colour = {"TRUST": "green", "CARE": "yellow"}.get(result["verdict_level"], "red")
    console.print(f"Verdict: {result['verdict']}", style=colour)


def _write_table(path: Path, values: Any, columns: Any, force: bool) -> None:
    import numpy as np

    if path.exists() and not force:
        raise InvalidValue(f"'{path}' exists. Use --force to replace it.")
    if path.suffix not in (".csv", ".npy"):
        raise InvalidValue(f"The output must be a .csv or .npy file. Got '{path}'.")
    try:
        if path.suffix == ".npy":
            np.save(path, values)
        else:
            np.savetxt(path, values, delimiter=",", header=",".join(columns), comments="", fmt="%.9g")
    except OSError as problem:
        raise InvalidValue(f"'{path}' cannot be written: {problem.strerror}.") from problem


def _say(line: str) -> None:
    typer.echo(f"unnorm: {' '.join(line.split())}", err=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: one line and exit code 2 for a user's mistake, a traceback only for a bug of ours."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its hints are for its own users
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
            code = app(arguments, standalone_mode=False)
    except UnnormError as problem:
        _say(f"error: {problem}")
        code = problem.exit_code
    except (typer.Abort, KeyboardInterrupt):
        _say("stopped.")
        code = 130
    except typer.Exit as problem:
        code = problem.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    except Exception as problem:
        if not hasattr(problem, "format_message"):
            raise
        _say(f"error: {problem.format_message()}")
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
