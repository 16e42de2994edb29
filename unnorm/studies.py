"""The commands of the paper's studies: `unnorm reproduce | report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from unnorm.errors import Interrupted, InvalidValue
from unnorm.terminal import JsonFlag, Seed, as_given, print_json, was_given

if TYPE_CHECKING:
    from unnorm.paper.mnist.study import Study as Images
    from unnorm.paper.toy2d.study import Study

__all__ = ["report", "reproduce"]

STUDIES = {
    "toy2d": ("size", "device", "jobs", "backend", "methods", "data"),
    "mnist": ("size", "device", "methods", "noises", "root", "download", "seconds", "seeds"),
    "gaussian-mean": ("quick",),
}


def reproduce(
    context: typer.Context,
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="toy2d: the six synthetic sets. mnist: digits, MNIST itself at size desktop and full. gaussian-mean: "
            "the case study.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Output folder; runs/STUDY when not given.")] = None,
    size: Annotated[
        str,
        typer.Option(
            help="toy2d, mnist: smoke (to try it; its numbers mean nothing), laptop (15 minutes; mnist: digits of "
            "8 x 8 that need no file), desktop (mnist on a CPU, 90 minutes) or full (a GPU)."
        ),
    ] = "laptop",
    device: Annotated[str, typer.Option(help="toy2d, mnist: auto, cpu or cuda.")] = "auto",
    jobs: Annotated[int | None, typer.Option(min=1, help="toy2d: processes. [default: the cores; smoke: 1]")] = None,
    backend: Annotated[
        str, typer.Option(help="toy2d: joblib's, for --jobs: loky (local processes), dask, ray, ...")
    ] = "loky",
    methods: Annotated[str | None, typer.Option(help="toy2d, mnist: some methods only, as in meco,nce.")] = None,
    data: Annotated[str | None, typer.Option(help="toy2d: some data sets only, as in moons,circles.")] = None,
    noises: Annotated[str | None, typer.Option(help="mnist: some noises only, as in gaussian,copula.")] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            help="mnist: the folder of the data sets. [default: what UNNORM_DATA names; with --download a cache]"
        ),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="mnist: fetch it where it is missing; needs the extra 'download'.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="mnist: of training, each run. [default: the size's]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="mnist: runs of every row. [default: the size's]")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="gaussian-mean: fewer seeds, distances and rows: looser numbers.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a study that is already in the folder.")] = False,
    seed: Seed = 0,
    as_json: JsonFlag = False,
) -> None:
    """Run a study of the paper; write its numbers, its tables and its figures.

    A toy2d or mnist that was stopped goes on where it stopped when it is called again.
    """
    from unnorm.names import unknown

    if study not in STUDIES:
        raise InvalidValue(unknown("study", study, STUDIES))
    every = dict.fromkeys(name for names in STUDIES.values() for name in names)
    foreign = [name for name in every if name not in STUDIES[study] and was_given(context, name)]
    if foreign:
        raise InvalidValue(f"The study '{study}' has no option {', '.join(f'--{name}' for name in foreign)}.")
    folder = out or Path("runs") / study
    if study == "gaussian-mean":
        _reproduce_gaussian_mean(folder, quick, seed, force, as_json)
        return
    from unnorm.device import fabric_for

    kind, command = fabric_for(device).device.type, f"unnorm reproduce {study}" + as_given(context)
    if study == "mnist":
        from unnorm.paper.mnist.study import Study as Images

        images = Images(size, seed, kind, _names(methods), _names(noises), root, seconds, seeds, download)
        _run(images, folder, command, force, as_json)
        return
    from unnorm.paper.start import cores
    from unnorm.paper.toy2d.study import Study

    processes = jobs or (1 if size == "smoke" else cores())
    chosen = Study(size, seed, kind, processes, backend, _names(methods), _names(data))
    _run(chosen, folder, command, force, as_json)


def _run(study: "Study | Images", folder: Path, command: str, force: bool, as_json: bool) -> None:
    try:
        study.run(folder, command=command, force=force, progress=False if as_json else None)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(f"Stopped. What is finished is in '{folder}': the same command goes on from there.") from None
    _report(folder, as_json)


def _reproduce_gaussian_mean(folder: Path, quick: bool, seed: int, force: bool, as_json: bool) -> None:
    from unnorm.paper import gaussian_report, gaussian_study

    study = gaussian_study.quick(seed) if quick else gaussian_study.Study(seed=seed)
    records = gaussian_report.reproduce(folder, study, force=force, progress=False if as_json else None)
    if as_json:
        print_json({"folder": str(folder), "records": records})
    else:
        typer.echo((folder / "table.md").read_text())
        typer.echo(f"Written to {folder}: {', '.join(gaussian_report.FILES)}")


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of 'unnorm reproduce'.")],
    as_json: JsonFlag = False,
) -> None:
    """Make the report of a study anew from its results.jsonl: report.html, report.md and figures."""
    from unnorm.paper.gaussian_report import wrote

    if wrote(folder):
        raise InvalidValue(
            f"'{folder}' holds the study gaussian-mean, whose report is its table.md: 'unnorm reproduce gaussian-mean' "
            "writes it with its numbers. This command is for toy2d and mnist."
        )
    _report(folder, as_json)


def _report(folder: Path, as_json: bool) -> None:
    """Write the report of the study in the folder, and print its first lines."""
    from unnorm.paper.mnist.results import is_ours

    found = (_of_mnist if is_ours(folder) else _of_toy2d)(folder)
    if as_json:
        print_json({"folder": str(folder), "files": [path.name for path in found.files], "summary": found.summary})
        return
    for line in found.headlines:
        typer.echo(f"- {line}")
    typer.echo(f"The whole report is {folder / 'report.html'}; beside it are report.md, its figures and results.jsonl.")


class _Reported(NamedTuple):
    """The files of a report, and a study in few words and in more."""

    files: list[Path]
    headlines: list[str]
    summary: list[str]


def _of_toy2d(folder: Path) -> _Reported:
    from unnorm.paper.toy2d.report import write
    from unnorm.paper.toy2d.results import read
    from unnorm.paper.toy2d.summary import headlines, summarise

    files, results = write(folder), read(folder)
    return _Reported(files, headlines(results), summarise(results))


def _of_mnist(folder: Path) -> _Reported:
    from unnorm.paper.mnist.report import write
    from unnorm.paper.mnist.results import headlines, read, summarise

    files, results = write(folder), read(folder)
    return _Reported(files, headlines(results), summarise(results))


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))
