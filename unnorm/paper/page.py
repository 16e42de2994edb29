"""A page of headings, sentences, tables and pictures, as Markdown and as one HTML file; it knows no study."""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import NamedTuple, TypeAlias

from unnorm.checkpoint import write_atomically

__all__ = ["Block", "Entry", "Grid", "Heading", "Lines", "Picture", "as_html", "as_markdown", "label", "written"]

TEMPLATE = "page.html"


class Entry(NamedTuple):
    """A cell of a table as it is shown.

    Attributes:
        text: its first line; bold where it is the `best`.
        key: what it sorts by; None comes last.
        note: below the text, smaller; bold where `note_best`.
        words: whether it is read rather than compared: set to the left, and broken into lines.
    """

    text: str
    key: float | str | None = None
    best: bool = False
    note: str = ""
    note_best: bool = False
    words: bool = False


class Heading(NamedTuple):
    level: int
    text: str


class Lines(NamedTuple):
    """Sentences; more than one is a list."""

    lines: Sequence[str]


class Grid(NamedTuple):
    """A table; its first column names the rows, its foot stays below when it is sorted."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    foot: Sequence[Sequence[Entry]] = ()


class Picture(NamedTuple):
    """A figure: the file it is for Markdown, its words, and its content, a PNG."""

    file: str
    alt: str
    content: bytes


Block: TypeAlias = Heading | Lines | Grid | Picture


def label(text: str) -> Entry:
    """A cell of words, sorted by them."""
    return Entry(text, text, words=True)


def written(folder: Path, blocks: Sequence[Block]) -> list[Path]:
    """Write a page into the folder, as `report.md` and `report.html`, with its pictures; return the files.

    Tables without rows are left out.
    """
    shown = [block for block in blocks if not isinstance(block, Grid) or block.rows]
    files = {one.file: one.content for one in shown if isinstance(one, Picture)}
    files |= {"report.md": as_markdown(shown).encode(), "report.html": as_html(shown).encode()}
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def as_markdown(blocks: Iterable[Block]) -> str:
    """
    >>> print(as_markdown([Heading(2, "A | B"), Lines(["One.", "Two."])]), end="")
    ## A \\| B
    <BLANKLINE>
    - One.
    - Two.
    """
    parts = []
    for block in blocks:
        match block:
            case Heading(level, text):
                parts.append(f"{'#' * level} {_md(text)}")
            case Lines(lines):
                parts.append(_md(lines[0]) if len(lines) == 1 else "\n".join(f"- {_md(line)}" for line in lines))
            case Grid(caption, head, rows, foot):
                table = [[_md(one) for one in head], ["---"] * len(head)]
                table += [[_md_entry(entry) for entry in row] for row in (*rows, *foot)]
                parts += [f"**{_md(caption)}**", "\n".join(f"| {' | '.join(row)} |" for row in table)]
            case Picture(file, alt, _):
                parts.append(f"![{_md(alt)}]({file})")
    return "\n\n".join(parts) + "\n"


def _md(text: str) -> str:
    text = escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", text)


def _md_entry(entry: Entry) -> str:
    text, note = (f"**{_md(part)}**" if strong and part else _md(part) for part, strong in _parts(entry))
    return f"{text}<br>{note}" if note else text


def _parts(entry: Entry) -> tuple[tuple[str, bool], tuple[str, bool]]:
    return (entry.text, entry.best), (entry.note, entry.note_best)


def as_html(blocks: Sequence[Block]) -> str:
    """One file that needs no other; the first block is its title, headings of level 2 are its contents."""
    headings = [block for block in blocks if isinstance(block, Heading)]
    contents = "".join(
        f'<li><a href="#{_slug(text)}">{escape(text)}</a></li>' for level, text in headings if level == 2
    )
    template = Template(resources.files("unnorm.paper").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    body = "\n".join(_html(block, place) for place, block in enumerate(blocks[1:]))
    return template.substitute(title=escape(headings[0].text), contents=contents, body=body)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _html(block: Block, place: int) -> str:
    match block:
        case Heading(level, text):
            return f'<h{level} id="{_slug(text)}">{escape(text)}</h{level}>'
        case Lines([line]):
            return f"<p>{escape(line)}</p>"
        case Lines(lines):
            return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
        case Picture(_, alt, content):
            source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
            return _figure(f'<img src="{source}" alt="{escape(alt)}">', alt, place)
        case Grid():
            return _figure(_table(block, place), block.caption, place)


def _table(grid: Grid, place: int) -> str:
    words = [entry.words for entry in grid.rows[0]]
    top = "".join(
        f'<th scope="col"{" class=words" if left else ""}>{escape(one)}</th>'
        for one, left in zip(grid.head, words, strict=True)
    )
    body = "".join(map(_tr, grid.rows))
    bottom = f"<tfoot>{''.join(map(_tr, grid.foot))}</tfoot>" if grid.foot else ""
    return f'<table aria-labelledby="c{place}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody>{bottom}</table>'


def _figure(content: str, caption: str, place: int) -> str:
    return (
        f'<figure><figcaption id="c{place}">{escape(caption)}</figcaption>'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="c{place}">{content}</div></figure>'
    )


def _tr(row: Sequence[Entry]) -> str:
    cells = []
    for place, entry in enumerate(row):
        key = "" if entry.key is None else f' data-key="{escape(str(entry.key))}"'
        text, note = (f"<strong>{escape(part)}</strong>" if strong else escape(part) for part, strong in _parts(entry))
        small = f"<small>{note}</small>" if entry.note else ""
        kind = ' class="words"' if entry.words else ""
        cells.append(f'<th scope="row"{key}>{text}</th>' if place == 0 else f"<td{kind}{key}>{text}{small}</td>")
    return f"<tr>{''.join(cells)}</tr>"
