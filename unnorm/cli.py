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
DISTRUSTED = 3  # exit code where the verdict is DISTRUST
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
    hidden: Annotated[
        str | None, typer.Option(help="Widths of the hidden layers, as in 300,300. [default: by the size of the table]")
    ] = None,
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
    steps: Annotated[
        int | None, typer.Option(help="Optimization steps at most. [default: a quarter of the rows, 500 to 3000]")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Data points per step. [default: 256 or 500]")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate; of ngd the length of a step. [default: 0.001; ngd: 0.1]")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adam, sgd, ngd (normalised gradients) or ngd-adam.")] = "adam",
    schedule: Annotated[
        str | None,
        typer.Option(help="Of the learning rate: constant, power, cosine, or pl (Theorem 4). [default: cosine]"),
    ] = None,
    mu: Annotated[float, typer.Option(help="PL constant for --schedule pl.")] = 1.0,
    iterate: Annotated[
        str | None,
        typer.Option(
            help="Which iterate to keep: last, random (the paper), averaged, ema, or best (validated). [default: best; "
            "last for sm, ssm, dsm and cnce]"
        ),
    ] = None,
    n: Annotated[int, typer.Option(help="Training points to draw of a toy set.")] = 50_000,
    test: Annotated[float, typer.Option(help="Share of the rows kept for testing.")] = 0.1,
    columns: Annotated[str | None, typer.Option(help="Columns to use, by name or position: a,b,c.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Columns to leave out, as in id,date.")] = None,
    key: Annotated[str | None, typer.Option(help="Which array of an .npz file.")] = None,
    drop_nonfinite: Annotated[
        bool, typer.Option("--drop-nonfinite", help="Leave out rows with infinity too, not only with missing cells.")
    ] = False,
    n_importance: Annotated[
        int | None, typer.Option(help="Noise draws for log Z at most. [default: 50,000, or 200,000 for many rows]")
    ] = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="32, 64 or bf16 (mixed).")] = "32",
    strict: Annotated[bool, typer.Option("--strict", help="Stop where the health monitor would only warn.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fit a density to points; write a folder with the model, its numbers, a picture and a report."""
    from unnorm.data.sources import locate

    if resume is None:
        if data is None:
            raise InvalidValue("Missing DATA: the name of a toy set or a file. Example: unnorm fit 8gaussians.")
        locate(data)  # before torch is imported, which takes seconds

    from unnorm.folders import CONFIG
    from unnorm.jobs import Job, load_job, run
    from unnorm.settings import AUTOMATIC
    from unnorm.training import Training

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its hints are for its own users
    if resume is not None:
        given = [name for name in context.params if was_given(context, name)]
        if others := [name for name in sorted(given) if name not in ("resume", "steps", "as_json")]:
            raise InvalidValue(f"With --resume the folder knows all but --steps: leave out {', '.join(others)}.")
        job, folder = load_job(resume, steps), resume
    else:
        assert data is not None
        if schedule == "pl" and beta is not None:
            raise InvalidValue("The schedule 'pl' sets gamma and beta itself (Theorem 4): give neither.")
        asked: dict[str, Any] = {"steps": steps, "batch": batch, "schedule": schedule, "iterate": iterate}
        chosen = {name: value for name, value in asked.items() if value is not None}
        training = Training(
            lr=LEARNING_RATES.get(optimizer, Training.lr) if lr is None else lr,
            optimizer=optimizer,
            beta=beta,
            mu=mu,
            seed=seed,
            log_every=25,
            **chosen,
        )
        automatic = [name for name in AUTOMATIC if name not in chosen]
        if iterate is not None:
            automatic.remove("patience")
        job = Job(
            data=data,
            key=key,
            columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
            exclude=() if exclude is None else tuple(name.strip() for name in exclude.split(",")),
            drop_nonfinite=drop_nonfinite,
            n=n,
            test=test,
            model=model,
            hidden=None if hidden is None else _widths(hidden),
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
            automatic=tuple(automatic),
        )
        folder = out or Path("runs") / Path(data).stem
    try:
        result = run(job, folder, resume=resume is not None, force=force)
        for message in result["messages"]:
            _say(message)
    except (KeyboardInterrupt, Interrupted) as problem:
        said = str(problem) or "Stopped."
        hint = f" Continue with: unnorm fit --resume {shlex.quote(str(folder))}" if (folder / CONFIG).exists() else ""
        raise Interrupted(said + hint) from None
    if as_json:
        print_json({"folder": str(folder), **result})
    else:
        _print_result(result, f"Written to {folder}: model.safetensors, density.png, report.md")
    _exit_with(result["verdict_level"])


@app.command(epilog="Example: unnorm score runs/8gaussians new.csv --out scores.csv")
def score(
    model: ModelFolder,
    data: Annotated[str, typer.Argument(metavar="DATA", help="A .csv, .npy, .npz or .parquet file.")],
    out: Annotated[Path | None, typer.Option(help="Write the scores to this .csv or .npy file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    key: Annotated[str | None, typer.Option(help="Which array of an .npz file.")] = None,
    drop_nonfinite: Annotated[
        bool,
        typer.Option("--drop-nonfinite", help="Print nan for rows with infinity too."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print log p(x) of every row: one number a line, in the order of the file; nan for a row with a missing cell."""
    import numpy as np

    from unnorm.data.tables import find, read
    from unnorm.tables.density import TABLE, TableDensity

    if (model / TABLE).exists():
        table = TableDensity.load(model)
        rows, extra = table.rows_of(read(find(data), key=key), f"'{data}'")
        if extra:
            _say(f"columns that the model was not fitted on are ignored: {', '.join(extra[:8])}.")
        if drop_nonfinite:
            rows = np.where(np.isinf(rows), np.nan, rows)
        values, error = table.log_prob(rows), table.log_z.stderr
    else:
        from unnorm.density import Density
        from unnorm.metrics import log_probs  # with scikit-learn's, which take a second to import
        from unnorm.points import plain_rows

        density = Density.load(model)
        values, error = log_probs(density.log_prob, plain_rows(data, key=key)).numpy(), density.log_z.stderr
    missing, finite = int(np.isnan(values).sum()), values[np.isfinite(values)]
    if missing:
        verb, whose = ("has", "its") if missing == 1 else ("have", "their")
        _say(f"{missing:,} of {len(values):,} rows {verb} a missing cell: {whose} log density is nan.")
    if broken := len(values) - missing - len(finite):
        place = int(np.flatnonzero(~np.isfinite(values) & ~np.isnan(values))[0])
        which = f"1 row has no finite log density, row {place + 1}"
        if broken > 1:
            which = f"{broken:,} rows have no finite log density, the first is row {place + 1}"
        _say(f"warning: {which}.")
    nll = -float(finite.mean()) if len(finite) else float("nan")
    spread = float(finite.std(ddof=1) / len(finite) ** 0.5) if len(finite) > 1 else None
    stderr = None if spread is None else (spread**2 + error**2) ** 0.5
    if as_json:
        plain = [float(value) if np.isfinite(value) else None for value in values]
        print_json({"n": len(finite), "missing": missing, "nll": nll, "stderr": stderr, "log_prob": plain})
    if out is not None:
        _write_table(out, values[:, None], ["log_prob"], force)
    elif not as_json:
        typer.echo("\n".join(_line([value]) for value in values))
    if not as_json:
        known = "" if stderr is None else f" ± {stderr:.4f}"
        typer.echo(f"{len(finite)} {'row' if len(finite) == 1 else 'rows'}, NLL {nll:.4f}{known} nats", err=True)


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
    from unnorm.randomness import stream
    from unnorm.tables.density import TABLE, TableDensity

    if not 0 <= seed < 2**62:
        raise InvalidValue(f"The seed must be an integer from 0 to 2^62 - 1. Got {seed}.")
    if n < 1:
        raise InvalidValue(f"The number of draws must be at least 1. Got {n}.")
    if (model / TABLE).exists():
        _sample_table(TableDensity.load(model), n, out, force, seed, as_json)
        return
    density = Density.load(model)
    _check_output(out, force, (".csv", ".npy", ".png") if len(density.event) == 3 else (".csv", ".npy"))
    draws = density.draws(n, generator=stream(seed, "samples"), progress=False if as_json else None)
    points = draws.x.flatten(1).numpy()
    names = [f"column{place}" for place in range(points.shape[1])]
    if as_json:
        print_json({"n": n, "columns": names, **_facts_of(draws), "samples": points.tolist()})
    elif out is None:
        _write_csv(sys.stdout, points, names)
    if out is not None and out.suffix == ".png":
        _write_sheet(out, density, draws.x)
    elif out is not None:
        _write_table(out, points, names, force)
    if not as_json:
        typer.echo(draws.line(), err=True)


def _sample_table(table: Any, n: int, out: Path | None, force: bool, seed: int, as_json: bool) -> None:
    """Draw rows of a table; words are written as words."""
    import numpy as np

    from unnorm.tables.frames import cells_of

    _check_output(out, force, (".csv", ".npy"))
    rows, draws = table.draw(n, random_state=seed)
    cells = cells_of(rows, table.columns)
    names = [name for name, _ in cells]
    if as_json:
        samples = [list(row) for row in zip(*(own.tolist() for _, own in cells), strict=True)]
        print_json({"n": n, "columns": names, **_facts_of(draws), "samples": samples})
    elif out is None or out.suffix == ".csv":
        _write_cells(out, names, [own.tolist() for _, own in cells])
    if out is not None and out.suffix == ".npy":
        if words := [name for name, own in cells if own.dtype == object]:
            raise InvalidValue(f"An .npy file holds numbers, and column '{words[0]}' has words. Use a .csv file.")
        # Such a file is scored by the places of its columns, which may be the names of ours.
        places = [f"column{place}" for place in range(len(names))]
        order = [names.index(place) for place in places] if set(places) == set(names) else list(range(len(names)))
        numbers = np.column_stack([np.asarray(cells[at][1], dtype=np.float64) for at in order])
        _write_table(out, numbers, names, force)
    if not as_json:
        typer.echo(draws.line(), err=True)


def _facts_of(draws: Any) -> dict[str, Any]:
    return {"method": draws.method, "r_hat": draws.r_hat, "ess": draws.ess, "acceptance": draws.acceptance}


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
        _exit_with(found["verdict_level"])
        return
    for line in found["lines"]:
        typer.echo(line)
    _print_verdict(found)
    _exit_with(found["verdict_level"])


@app.command(epilog="Example: unnorm info runs/8gaussians --json")
def info(model: ModelFolder, as_json: JsonFlag = False) -> None:
    """Show what a saved model is, how good it is, and whether to trust it."""
    from unnorm.architecture import describe
    from unnorm.density import Density
    from unnorm.diagnostics import Verdict, judge_log_z
    from unnorm.folders import RESULT, read_json

    density = Density.load(model)
    result: dict[str, Any] = {"test_nll": None}
    if (model / RESULT).exists():
        result |= read_json(model / RESULT, {"test_nll", "verdict", "verdict_level"})
    result["log_z"] = {method: found._asdict() for method, found in density.log_zs.items()}
    if "verdict" not in result:
        part = judge_log_z(density.log_zs, density.doubts, density.unchecked, density.not_ruled_out)
        result |= {"verdict": Verdict(part).plain(), "verdict_level": part.level}
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

    from unnorm.diagnostics import Verdict

    colours = {"TRUST": "green", "CARE": "yellow", "DISTRUST": "red"}
    console = Console(highlight=False, soft_wrap=True, markup=False)
    verdict = Verdict.from_plain(result["verdict"])
    console.print(f"Verdict: {verdict.level}", style=colours[verdict.level])
    for line, part in zip(verdict.lines(), verdict.parts().values(), strict=True):
        console.print(f"  {line}", style=colours[part.level])


def _exit_with(level: str) -> None:
    """End with a code of its own where the density is not to be trusted."""
    if level == "DISTRUST":
        raise typer.Exit(DISTRUSTED)


def _line(row: Any) -> str:
    return ",".join(f"{value:.15g}" for value in row)


def _write_csv(file: Any, values: Any, columns: list[str]) -> None:
    csv.writer(file, lineterminator="\n").writerow(columns)
    file.writelines(_line(row) + "\n" for row in values)


def _write_cells(path: Path | None, names: list[str], columns: list[list[Any]]) -> None:
    """Write rows of numbers and words to a .csv file, or to the terminal."""
    from contextlib import nullcontext

    try:
        with nullcontext(sys.stdout) if path is None else path.open("w", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(names)
            for row in zip(*columns, strict=True):
                lines.writerow([f"{cell:.15g}" if isinstance(cell, float) else cell for cell in row])
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):
            raise
        raise InvalidValue(f"'{path}' cannot be written: {problem.strerror}.") from problem


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
