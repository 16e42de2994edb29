"""Look things up by name; an unknown name is answered with the nearest known one."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from unnorm.errors import InvalidValue

T = TypeVar("T")

__all__ = ["choose", "options_of", "unknown"]


def choose(what: str, name: str, options: Mapping[str, T]) -> T:
    """The option called `name`, or an error that suggests the nearest one.

    >>> choose("colour", "red", {"red": 1, "blue": 2})
    1
    >>> choose("colour", "rde", {"red": 1, "blue": 2})
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: Unknown colour 'rde'. Did you mean 'red'? Known: red, blue.
    """
    if name in options:
        return options[name]
    raise InvalidValue(unknown(what, name, options))


@contextmanager
def options_of(what: str) -> Iterator[None]:
    """An option that the call inside does not have is a mistake of the user's, not of the program.

    >>> with options_of("number"):
    ...     int("7", bass=8)
    Traceback (most recent call last):
    unnorm.errors.InvalidValue: The number has no such option: ...
    """
    try:
        yield
    except TypeError as problem:
        if not any(sign in str(problem) for sign in ("unexpected keyword", "invalid keyword", "multiple values")):
            raise
        raise InvalidValue(f"The {what} has no such option: {problem}.") from None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The one-line message for a name that is not among the `known` ones."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"Unknown {what} '{name}'.{hint} Known: {', '.join(names)}."
