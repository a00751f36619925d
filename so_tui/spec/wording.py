"""Wording that several error messages share."""

from __future__ import annotations

from typing import Any

_LONGEST = 60


def nearest(word: str, known: tuple[str, ...]) -> str:
    """Return ``Did you mean `...`? `` for a misspelt word, or an empty string if no known word is similar."""
    from difflib import get_close_matches

    found = get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"Did you mean `{found[0]}`? " if found else ""


def shown(value: Any) -> str:
    """Return a value as TOML writes it, shortened to fit in a message."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, dict):
        text = "{" + ", ".join(value) + "}"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
