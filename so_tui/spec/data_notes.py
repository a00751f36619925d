"""What of the rows of a data set is not trained as it stands, by kind, and how that is said."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from so_tui.trust.text import printable_line
from so_tui.units import plural, thousands


class Found(Struct, frozen=True, array_like=True):
    """How often a kind was found."""

    rows: int
    first: int
    """The first row, from 1."""
    detail: str = ""
    """What is special about it."""

    def __add__(self, other: Found) -> Found:
        first = min(self, other, key=lambda found: found.first)
        return Found(self.rows + other.rows, first.first, first.detail)


UNPROVEN = "unproven"
"""Kind of a row with an answer whose tokens are not certain."""
UNKNOWN_KEY = "unknown-key"
"""Prefix of the kind of a row with an unknown key; a colon and the key follow."""
_SENTENCES = {
    "system-dropped": "the template leaves out the system's or developer's text of {rows}",
    "tools-dropped": "the template leaves out the descriptions of tools of {rows}",
    "results-dropped": "the template leaves out results of tools of {rows}",
    "calls-dropped": "the template leaves out earlier calls of tools of {rows}",
    "text-dropped": "the template leaves out what is said beside a call of a tool in {rows}",
    "reasoning-dropped": "the template leaves out the reasoning of answers in {rows}",
    "reasoning-composed": (
        "the template leaves out the reasoning of answers in {rows}; it is trained in the form in "
        "which the model writes it"
    ),
    "turns-split": (
        "the template writes earlier answers of {rows} in another form than the model does; each "
        "is trained in a document of its own (`data.split_turns`)"
    ),
    "turns-context": (
        "the template writes earlier answers of {rows} in another form than the model does; they "
        "are context, not trained (`data.split_turns=true` trains them)"
    ),
    "templated": (
        "the prompt of {rows} has the chat template already; these rows are trained as they are"
    ),
    "system-replaced": (
        "the system text of {rows} lists the tools; the template's own list takes its place"
    ),
    UNPROVEN: "which tokens the model is to write is not certain in {rows}: {detail}",
}


def sentences(found: Mapping[str, Found]) -> list[str]:
    """Return a sentence for each kind."""
    return [
        _sentence(kind).format(
            rows=f"{plural(one.rows, 'row')} (the first is {thousands(one.first)})",
            detail=one.detail,
        )
        for kind, one in sorted(found.items())
    ]


def _sentence(kind: str) -> str:
    name, colon, key = kind.partition(":")
    if colon and name == UNKNOWN_KEY:
        shown = printable_line(key).replace("{", "{{").replace("}", "}}")
        return f"turns in {{rows}} have the unknown key `{shown}`"
    return _SENTENCES.get(kind, f"{kind}: {{rows}}")
