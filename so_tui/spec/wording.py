"""Wording that several error messages share."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

from so_tui.trust.printable import printable_line, quoted
from so_tui.trust.secrets import without_credentials

_LONGEST = 60
_LONGEST_SEARCHED = 2000
_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxlong = _repr.maxstring = (
    _repr.maxother
) = 2 * _LONGEST


def nearest(word: str, known: tuple[str, ...]) -> str:
    """Return ``Did you mean `...`? `` for a misspelt word, or an empty string if no known word is similar."""
    if len(word) > _LONGEST:  # comparing takes time that is quadratic in the length
        return ""
    from difflib import get_close_matches

    found = get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"Did you mean `{found[0]}`? " if found else ""


def some(names: Iterable[str], most: int = 40) -> str:
    """Return names, separated by commas; only the first ones of many."""
    first = list(islice(names, most + 1))
    return ", ".join(name[: _LONGEST + 1] for name in first[:most]) + (
        ", ..." if len(first) > most else ""
    )


def set_option(key: str, value: str) -> str:
    """Return the option that sets a key to a value, quoted for a shell."""
    return quoted("--set", f"{key}={value}")


def shown(value: Any) -> str:
    """Return a value as TOML writes it, on one line that is safe to show, without credentials, and shortened to fit in a message."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, dict):
        text = "{" + some(map(str, value), _LONGEST) + "}"
    elif isinstance(value, list | tuple | int):
        text = _repr.repr(
            value
        )  # str() of all of it may take long, and fails for integers of thousands of digits
    else:
        text = str(value)
    # Bounded before the search, which is not linear; credentials are hidden before the end of their URL is cut off.
    text = printable_line(without_credentials(text[:_LONGEST_SEARCHED])[: _LONGEST + 1])
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
