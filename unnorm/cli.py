"""The command line: `unnorm fit | score | sample | diagnose | info | anomalies | reproduce | report`."""

import csv
import logging
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from unnorm import __version__
from unnorm.detect import anomalies
from unnorm.errors import Interrupted, InvalidValue, UnnormError
from unnorm.studies import report, reproduce
from unnorm.terminal import JsonFlag, Seed, print_json, was_given

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Learn unnormalized statistical models; get a normalised density with an error bar.",
)

LEARNING_RATES = {"ngd": 0.1}  # else Training's own
PATIENCE = 30  # looks at the validation rows, of 25 steps each, where these choose the iterate
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A folder written by 'unnorm fit'.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"unnorm {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Learn unnormalized statistical models; get a normalised density with an error bar."""


@app.command(epilog="Example: unnorm fit 8gaussians    or: unnorm fit table.csv --steps 5000 --out runs/mine")
def fit(
    context: typer.Context,
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
    noise: Annotated[
        str,
        typer.Option(
            help="auto (held-out rows choose), gaussian, gaussian-diagonal, gaussian-low-rank, copula, mixture, "
            "smoothed, uniform, or flow (needs zuko)."
        ),
    ] = "auto",
    bridges: Annotated[
        str, typer.Option(help="Between data and noise: auto (a pilot chooses), none, or how many.")
    ] = "auto",
    estimator: Annotated[str, typer.Option(help="meco, nce, ence, snl, mcmc, cd, pcd, sm, ssm, dsm or cnce.")] = "meco",
    gamma: Annotated[float | None, typer.Option(help="MECO's tracker rate, in (0, 1]. [default: 0.1]")] = None,
    beta: Annotated[
        float | None, typer.Option(help="Weight of the new gradient, in (0, 1]. [default: 0.9; ngd: 1]")
    ] = None,
    tracker: Annotated[
        str | None, typer.Option(help="MECO's: ema (the paper), minibatch, scent or umax. [default: ema]")
    ] = None,
    n_noise: Annotated[int | None, typer.Option(help="meco, snl: noise draws per step. [default: the batch]")] = None,
    nu: Annotated[float | None, typer.Option(help="nce, ence: noise draws per data point. [default: 1]")] = None,
    n_steps: Annotated[
        int | None, typer.Option(help="mcmc, cd, pcd: Langevin steps. [default: 20 for mcmc, else 10]")
    ] = None,
    step_size: Annotated[
        float | None, typer.Option(help="mcmc, cd, pcd: of plain Langevin steps. [default: adjusted steps, tuned]")
    ] = None,
    noise_scale: Annotated[
        float | None, typer.Option(help="With --step-size: the noise of a Langevin step. [default: sqrt(2 step size)]")
    ] = None,
    n_chains: Annotated[int | None, typer.Option(help="pcd: how many chains. [default: the batch]")] = None,
    buffer_size: Annotated[int | None, typer.Option(help="mcmc: points in the replay buffer. [default: 10000]")] = None,
    restart: Annotated[float | None, typer.Option(help="mcmc: share of chains begun anew. [default: 0.05]")] = None,
    n_slices: Annotated[int | None, typer.Option(help="ssm: random directions per point. [default: 1]")] = None,
    sigma: Annotated[
        float | None, typer.Option(help="dsm, cnce: noise around each point, in spreads. [default: 0.1, 0.5]")
    ] = None,
    kappa: Annotated[int | None, typer.Option(help="cnce: noise points per data point. [default: 1]")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimization steps. [default: 2500]")] = None,
    batch: Annotated[int, typer.Option(help="Data points per step.")] = 500,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate; of ngd the length of a step. [default: 0.001; ngd: 0.1]")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adam, sgd, ngd (normalised gradients) or ngd-adam.")] = "adam",
    schedule: Annotated[
        str, typer.Option(help="Of the learning rate: constant, power, cosine, or pl (Theorem 4).")
    ] = "cosine",
    mu: Annotated[float, typer.Option(help="PL constant for --schedule pl.")] = 1.0,
    iterate: Annotated[
        str | None,
        typer.Option(
            help="Which iterate to keep: last, random (the paper), averaged, ema, or best (validated). [default: best "
            "for a table, last for a toy set]"
        ),
    ] = None,
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="32, 64 or bf16 (mixed).")] = "32",
    strict: Annotated[bool, typer.Option("--strict", help="Stop where the health monitor would only warn.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fit a density to points; write a folder with the model, its numbers, a picture and a report."""
    from unnorm.folders import CONFIG
    from unnorm.jobs import Job, load_job, run
    from unnorm.training import Training

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its hints are for its own users
    if resume is not None:
        given = [name for name in context.params if was_given(context, name)]
        if others := [name for name in sorted(given) if name not in ("resume", "steps", "as_json")]:
            raise InvalidValue(f"With --resume the folder knows all but --steps: leave out {', '.join(others)}.")
        job, folder = load_job(resume, steps), resume
    elif data is None:
        raise InvalidValue("Missing DATA: the name of a toy set or a file. Example: unnorm fit 8gaussians.")
    else:
        if schedule == "pl" and beta is not None:
            raise InvalidValue("The schedule 'pl' sets gamma and beta itself (Theorem 4): give neither.")
        training = Training(
            steps=Training.steps if steps is None else steps,
            batch=batch,
            lr=LEARNING_RATES.get(optimizer, Training.lr) if lr is None else lr,
            optimizer=optimizer,
            beta=beta,
            schedule=schedule,
            mu=mu,
            iterate=iterate or _default_iterate(data, estimator),
            patience=PATIENCE if iterate is None else None,
            seed=seed,
        )
        job = Job(
            data=data,
            key=key,
            columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
            drop_nonfinite=drop_nonfinite,
            drop_constant=drop_constant,
            n=n,
            test=test,
            model=model,
            hidden=_widths(hidden),
            activation=activation,
            noise=noise,
            bridges=bridges,
            estimator=estimator,
            gamma=gamma,
            tracker=tracker,
            n_noise=n_noise,
            nu=nu,
            n_steps=n_steps,
            step_size=step_size,
            noise_scale=noise_scale,
            n_chains=n_chains,
            buffer_size=buffer_size,
            restart=restart,
            n_slices=n_slices,
            sigma=sigma,
            kappa=kappa,
            strict=strict,
            n_importance=n_importance,
            device=device,
            precision=precision,
            training=training,
        )
        folder = out or Path("runs") / Path(data).stem
    try:
        result = run(job, folder, resume=resume is not None, force=force)
    except (KeyboardInterrupt, Interrupted) as problem:
        said = str(problem) or "Stopped."
        hint = f" Continue with: unnorm fit --resume {shlex.quote(str(folder))}" if (folder / CONFIG).exists() else ""
        raise Interrupted(said + hint) from None
    if as_json:
        print_json({"folder": str(folder), **result})
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
    import numpy as np

    from unnorm.density import Density
    from unnorm.metrics import log_probs, nll
    from unnorm.points import points_for_scoring

    density = Density.load(model)
    points, kept = points_for_scoring(model, data, key=key, drop_nonfinite=drop_nonfinite)
    values = log_probs(density.log_prob, points)
    found = nll(values, log_z_stderr=density.log_z.stderr)
    if (broken := np.flatnonzero(~np.isfinite(values.numpy()))).size:
        place = broken[0] if kept is None else kept[broken[0]]
        _say(f"warning: {broken.size} rows have no finite log density, the first is row {place + 1}.")
    if as_json:
        summary: dict[str, Any] = {
            "n": found.n,
            "nll": found.value,
            "stderr": found.stderr,
            "log_prob": values.tolist(),
        }
        if kept is not None:
            summary["rows"] = (kept + 1).tolist()
        print_json(summary)
    table = values.numpy()[:, None]
    names = ["log_prob"]
    if kept is not None:  # some rows are missing: say which these are, counted from 1
        table, names = np.column_stack([kept + 1, table]), ["row", "log_prob"]
    if out is not None:
        _write_table(out, table, names, force)
    elif not as_json:
        typer.echo("\n".join(_line(row) for row in table))
    if not as_json:
        typer.echo(f"{found.n} rows, NLL {found.value:.4f} ± {found.stderr:.4f} nats", err=True)


@app.command(epilog="Example: unnorm sample runs/8gaussians -n 1000 --out samples.csv")
def sample(
    model: ModelFolder,
    n: Annotated[int, typer.Option("-n", "--n", help="How many points.")] = 1000,
    out: Annotated[
        Path | None, typer.Option(help="Write the points to this .csv or .npy file; images also to a .png sheet.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    seed: Seed = 0,
    as_json: JsonFlag = False,
) -> None:
    """Draw points from a fitted density, in the units of its data."""
    from unnorm.density import Density
    from unnorm.folders import CONFIG, read_json
    from unnorm.randomness import stream

    density = Density.load(model)
    if not 0 <= seed < 2**62:
        raise InvalidValue(f"The seed must be an integer from 0 to 2^62 - 1. Got {seed}.")
    _check_output(out, force, (".csv", ".npy", ".png") if len(density.event) == 3 else (".csv", ".npy"))
    draws = density.draws(n, generator=stream(seed, "samples"), progress=False if as_json else None)
    points = draws.x.flatten(1).numpy()
    config = model / CONFIG
    names = [f"column{place}" for place in range(points.shape[1])]
    order = list(range(points.shape[1]))
    if config.exists():
        facts = read_json(config, {"columns", "places", "width"})
        names = facts["columns"]
        # A nameless .npy is matched by place when scored: there the columns stand where the fitted file had them.
        if len(names) == facts["width"]:
            order = sorted(range(len(names)), key=facts["places"].__getitem__)
    if as_json:
        facts = {"method": draws.method, "r_hat": draws.r_hat, "ess": draws.ess, "acceptance": draws.acceptance}
        print_json({"n": n, "columns": names, **facts, "samples": points.tolist()})
    elif out is None:
        _write_csv(sys.stdout, points, names)
    if out is not None and out.suffix == ".png":
        _write_sheet(out, density, draws.x)
    elif out is not None:
        _write_table(out, points[:, order] if out.suffix == ".npy" else points, names, force)
    if not as_json:
        typer.echo(draws.line(), err=True)


@app.command(epilog="Example: unnorm diagnose runs/8gaussians    or: unnorm diagnose runs/table --data new.csv")
def diagnose(
    model: ModelFolder,
    data: Annotated[
        str | None,
        typer.Option(
            help="Rows that were not trained on, in a file. [default: the run's own test rows, if still there]"
        ),
    ] = None,
    stderr: Annotated[float, typer.Option(help="Standard error of log Z that is enough, in nats.")] = 0.02,
    n: Annotated[int, typer.Option("--n", "-n", help="Draws of the noise at most.")] = 200_000,
    evaluations: Annotated[int, typer.Option(help="Evaluations of the model by annealed chains at most.")] = 4_000_000,
    seed: Seed = 0,
    as_json: JsonFlag = False,
) -> None:
    """Find log Z anew, by the cheapest way that can be believed, and say whether to trust the density."""
    from unnorm.density import Density
    from unnorm.diagnosis import diagnosis
    from unnorm.randomness import stream

    if not 0 <= seed < 2**62:
        raise InvalidValue(f"The seed must be an integer from 0 to 2^62 - 1. Got {seed}.")
    density = Density.load(model)
    found = diagnosis(
        model,
        density,
        data,
        stderr=stderr,
        n=n,
        evaluations=evaluations,
        generator=stream(seed, "log Z"),
        progress=False if as_json else None,
    )
    if as_json:
        print_json(found)
        return
    for line in found["lines"]:
        typer.echo(line)
    _print_verdict(found)


@app.command(epilog="Example: unnorm info runs/8gaussians --json")
def info(model: ModelFolder, as_json: JsonFlag = False) -> None:
    """Show what a saved model is, how good it is, and whether to trust it."""
    from unnorm.architecture import describe
    from unnorm.density import Density
    from unnorm.diagnostics import verdict
    from unnorm.folders import RESULT, read_json

    density = Density.load(model)
    result: dict[str, Any] = {"test_nll": None}
    if (model / RESULT).exists():
        result |= read_json(model / RESULT, {"test_nll", "verdict", "verdict_level"})
    result["log_z"] = {method: found._asdict() for method, found in density.log_zs.items()}
    if "verdict" not in result:
        judged = verdict(density.log_zs, doubts=density.doubts)
        result |= {"verdict": judged.line(), "verdict_level": judged.level}
    parameters = sum(p.numel() for p in density.model.parameters())
    result |= {"model": describe(density.model), "parameters": parameters, "event": list(density.event)}
    if as_json:
        print_json(result)
    else:
        _print_result(result, f"{result['model']['kind']}, {parameters:,} parameters, events of shape {density.event}")


app.command(epilog="Example: unnorm anomalies table.csv    or: unnorm anomalies table.csv --labels fraud")(anomalies)
app.command(epilog="Example: unnorm reproduce toy2d --size laptop    or: unnorm reproduce gaussian-mean")(reproduce)
app.command(epilog="Example: unnorm report results/toy2d")(report)


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise InvalidValue(
            f"The hidden widths are integers with commas between, as in 300,300,300. Got '{text}'."
        ) from None


def _print_result(result: dict[str, Any], footer: str) -> None:
    from rich.console import Console

    from unnorm.report import rows

    console = Console(highlight=False, soft_wrap=True, markup=False)
    lines = rows(result)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        console.print(f"{name:<{width}}  {value}")
    for line in result.get("chosen", {}).values():
        console.print(line)
    console.print(footer)
    _print_verdict(result)


def _print_verdict(result: dict[str, Any]) -> None:
    from rich.console import Console

    colour = {"TRUST": "green", "CARE": "yellow"}.get(result["verdict_level"], "red")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"Verdict: {result['verdict']}", style=colour)


def _line(row: Any) -> str:
    return ",".join(f"{value:.15g}" for value in row)


def _write_csv(file: Any, values: Any, columns: list[str]) -> None:
    csv.writer(file, lineterminator="\n").writerow(columns)
    file.writelines(_line(row) + "\n" for row in values)


def _default_iterate(data: str, estimator: str) -> str:
    """Rows run out and can be fitted too well; a toy set's do not, and score matching cannot tell which is best."""
    from unnorm.data.toy import TOYS

    return "last" if data in TOYS or estimator in ("sm", "ssm", "dsm", "cnce") else "best"


def _check_output(path: Path | None, force: bool, kinds: tuple[str, ...]) -> None:
    if path is not None and path.exists() and not force:
        raise InvalidValue(f"'{path}' exists. Use --force to replace it.")
    if path is not None and path.suffix not in kinds:
        raise InvalidValue(f"The output must be a {', '.join(kinds[:-1])} or {kinds[-1]} file. Got '{path}'.")


def _write_sheet(path: Path, density: Any, images: Any) -> None:
    from unnorm.data.transforms import levels_of
    from unnorm.plots import sheet

    try:
        sheet(path, images, levels=levels_of(density.transform) or 256)
    except OSError as problem:
        raise InvalidValue(f"'{path}' cannot be written: {problem.strerror}.") from problem


def _write_table(path: Path, values: Any, columns: list[str], force: bool) -> None:
    import numpy as np

    _check_output(path, force, (".csv", ".npy"))
    try:
        if path.suffix == ".npy":
            np.save(path, values)
        else:
            with path.open("w", newline="") as file:
                _write_csv(file, values, columns)
    except OSError as problem:
        raise InvalidValue(f"'{path}' cannot be written: {problem.strerror}.") from problem


def _say(line: str) -> None:
    typer.echo(f"unnorm: {' '.join(line.split())}", err=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: one line and exit code 2 for a user's mistake, a traceback only for a bug of ours."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
            code = app(arguments, standalone_mode=False)
            if code == 130:  # Ctrl-C outside of training
                _say("stopped.")
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
        if hasattr(problem, "format_message"):
            _say(f"error: {problem.format_message()}")
        elif isinstance(problem, MemoryError) or "allocate memory" in str(problem) or "out of memory" in str(problem):
            _say(f"error: Not enough memory: {str(problem)[-120:]}")
        else:
            raise
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
