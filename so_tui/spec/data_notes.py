"""What of the rows of a data set is not trained as it stands, by kind, and how that is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from so_tui.spec.errors import InputError, reject
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


class Dropped(Struct, frozen=True, array_like=True):
    """Rows that nothing is trained of, for one reason."""

    rows: int
    first: tuple[int, ...]
    """The first rows, from 1."""

    @property
    def named(self) -> str:
        """The first rows in words: ``rows 2, 7, 9 ...``."""
        more = " ..." if self.rows > len(self.first) else ""
        return f"row{'s' if self.rows > 1 else ''} {', '.join(map(thousands, self.first))}{more}"

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(self.rows + other.rows, (*self.first, *other.first)[:NAMED_ROWS])


NAMED_ROWS = 5
"""Dropped rows that are named for each reason."""
DropReason = Literal["no-answer", "prompt-too-long", "nothing-trained", "unproven"]
_DROPPED: dict[DropReason, str] = {
    "no-answer": "there is no answer",
    "prompt-too-long": "the prompt alone fills a sequence",
    "nothing-trained": "no token is trained within a sequence",
    "unproven": "which tokens the model is to write is not certain",
}
Outcome = Literal["trained", "context", "left out", "refused"]
"""What happens to what a kind names."""
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
    "flag-ignored": (
        "questions or results are flagged as trained in {rows}; only answers are trained"
    ),
    "system-replaced": (
        "the system text of {rows} lists the tools; the template's own list takes its place"
    ),
    UNPROVEN: "which tokens the model is to write is not certain in {rows}: {detail}",
}


_OUTCOMES: dict[str, Outcome] = {
    "reasoning-composed": "trained",
    "turns-split": "trained",
    "turns-context": "context",
    "flag-ignored": "context",
    "templated": "trained",
}
"""By kind; all other kinds are left out."""


def outcome(kind: str, unproven: Literal["refuse", "context"]) -> Outcome:
    """Return what happens to what a kind names, with this value of ``data.unproven``."""
    if kind == UNPROVEN:
        return "refused" if unproven == "refuse" else "context"
    return _OUTCOMES.get(kind, "left out")


def dropped_sentences(dropped: Mapping[DropReason, Dropped]) -> list[str]:
    """Return a sentence for each reason, with the first rows."""
    return [
        f"{plural(one.rows, 'row')} dropped, since {_DROPPED[reason]}: {one.named}"
        for reason, one in sorted(dropped.items())
    ]


def row_missing(number: str, most: int) -> InputError:
    """Return the error about a row that data of ``most`` rows do not have."""
    return reject(
        "data-row-missing",
        "row",
        number,
        f"the data have {plural(most, 'row')}",
        "Name a row from 1 to that number.",
    )


def why_dropped(reason: DropReason) -> str:
    """Return a reason in words."""
    return _DROPPED[reason]


def sentences(found: Mapping[str, Found]) -> list[str]:
    """Return a sentence for each kind."""
    return [
        sentence(
            kind, one.detail, f"{plural(one.rows, 'row')} (the first is {thousands(one.first)})"
        )
        for kind, one in sorted(found.items())
    ]


def sentence(kind: str, detail: str, rows: str) -> str:
    """Return what a kind means, said of ``rows``."""
    return _wording(kind).format(rows=rows, detail=detail)


def _wording(kind: str) -> str:
    name, colon, key = kind.partition(":")
    if colon and name == UNKNOWN_KEY:
        shown = printable_line(key).replace("{", "{{").replace("}", "}}")
        return f"turns in {{rows}} have the unknown key `{shown}`"
    return _SENTENCES.get(kind, f"{kind}: {{rows}}")
