"""What the commands share: their common options, and how they print."""

import json
import shlex
from typing import Annotated, Any

import typer

__all__ = ["JsonFlag", "Seed", "as_given", "print_json", "was_given"]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]


def print_json(content: Any) -> None:
    """One JSON object; what is not finite becomes null."""
    from unnorm.folders import without_nan

    typer.echo(json.dumps(without_nan(content), allow_nan=False))


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option stood on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def as_given(context: typer.Context) -> str:
    """The options of a command line as they were given, without its arguments."""
    given = [name for name, value in context.params.items() if value not in (None, False) and name != "study"]
    words = {name: context.params[name] for name in given if was_given(context, name)}
    flags = {"as_json": "json"}
    return "".join(
        f" --{flags.get(name, name)}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in words.items()
    )
