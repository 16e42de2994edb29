"""The command of people with a table: `unnorm anomalies`."""

from pathlib import Path
from typing import Annotated

import typer

from unnorm.terminal import JsonFlag, Seed, print_json

__all__ = ["anomalies"]

SHOWN = 5


def anomalies(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A .csv, .npy, .npz or .parquet file of numbers.")],
    contamination: Annotated[
        float | None,
        typer.Option(help="The share of rows to call anomalies. [default: 0.1, or that of the labels]"),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="A column (or an array of an .npz) of 0 and 1: curves and metrics; it is not fitted to."),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Some columns only, as in a,b,c.")] = None,
    exclude: Annotated[
        str | None, typer.Option(help="Columns not to fit, as in id,date; anomalies.csv still has them.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The array of an .npz file.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows whose columns are explained.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Output folder; runs/NAME-anomalies when not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier search wrote there.")] = False,
    drop_nonfinite: Annotated[
        bool, typer.Option("--drop-nonfinite", help="Leave out rows with NaN or infinity.")
    ] = False,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Rank the rows of a table by how unusual they are, and say which columns make them so."""
    import warnings

    from unnorm.data.tables import find

    path = find(data)  # before torch is imported, which takes seconds

    from unnorm.anomalies import claim, hints, labelled, measured, search, words, write
    from unnorm.errors import ConstantColumnWarning, HealthWarning, WeightsWarning

    chosen, left_out = ([name.strip() for name in given.split(",")] if given else [] for given in (columns, exclude))
    given = labelled(path, key, chosen, labels, exclude=left_out, drop=drop_nonfinite)
    folder = out or Path("runs") / f"{path.stem}-anomalies"
    claim(folder, force, look=True)
    for hint in hints(given):
        typer.echo(f"unnorm: warning: {hint}", err=True)
    with warnings.catch_warnings(record=True) as said:
        for kind in (spoken := (ConstantColumnWarning, HealthWarning, WeightsWarning)):
            warnings.simplefilter("always", kind)
        found = search(given, contamination=contamination, drop=drop_nonfinite, top=top, seed=seed, device=device)
    for warning in said:
        if issubclass(warning.category, spoken):
            typer.echo(f"unnorm: warning: {warning.message}", err=True)
    files = write(found, folder, path.name, force, {"input": data, "key": key, "labels": labels})
    if as_json:
        metrics = None if found.detection is None else found.detection._asdict()
        facts = {"folder": str(folder), "files": files, "rows": len(found.surprise), "dropped": found.dropped}
        facts |= {"metrics": metrics, "anomalies": found.places[found.order[: int(found.flagged.sum())]].tolist()}
        print_json(facts)
        return
    if found.left_out:
        typer.echo(found.left_out)
    typer.echo(f"{len(found.surprise):,} rows, {int(found.flagged.sum()):,} called anomalies. The most unusual:")
    for rank, place in enumerate(found.order[:SHOWN], 1):
        because = words(found, rank)
        typer.echo(
            f"  {found.where(place)}: surprise {found.surprise[place]:.2f}{because and ', because of ' + because}"
        )
    if found.detection is not None:
        typer.echo(f"{found.detection.n_out:,} rows are labelled anomalies, {found.detection.n_in:,} are not:")
        for number in measured(found.detection):
            chance = f"by chance {number.chance:.3f} ± {number.spread:.3f}"
            typer.echo(f"  {number.name} {number.text} ({chance}): {number.meaning}")
    typer.echo(f"Written to {folder}: {', '.join(files)}")
