"""Kinds of rows that are not trained as they stand, and the sentences about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from so_tui.spec.errors import InputError, reject
from so_tui.trust.text import printable_line
from so_tui.units import plural, thousands


class Found(Struct, frozen=True, omit_defaults=True):
    """How often a kind was found."""

    rows: int
    first: int
    """The first row, from 1."""
    detail: str = ""
    """What is special about it."""
    source: str = ""
    """Where that row is; empty where there is one source only."""

    def __add__(self, other: Found) -> Found:
        same = self.source == other.source
        first = other if same and other.first < self.first else self
        return replace(first, rows=self.rows + other.rows)


class Dropped(Struct, frozen=True, omit_defaults=True):
    """Rows that nothing is trained of, for one reason."""

    rows: int
    first: tuple[int, ...]
    """The first rows, from 1."""
    source: str = ""
    """Where those rows are; empty where there is one source only."""

    @property
    def named(self) -> str:
        """The first rows in words: ``rows 2, 7, 9 ...``."""
        more = " ..." if self.rows > len(self.first) else ""
        numbers = ", ".join(map(thousands, self.first))
        return f"row{'s' if len(self.first) > 1 else ''} {numbers}{_of(self.source)}{more}"

    def __add__(self, other: Dropped) -> Dropped:
        more = other.first if self.source == other.source else ()
        first = (*self.first, *more)[:NAMED_ROWS]
        return replace(self, rows=self.rows + other.rows, first=first)


_LIST_ALL = "`so-tui data PRESET --check` lists all"
NAMED_ROWS = 5
"""Dropped rows that are named for each reason."""
DropReason = Literal["no-answer", "prompt-too-long", "nothing-trained", "unproven"]
_DROPPED: dict[DropReason, str] = {
    "no-answer": "there is no answer",
    "prompt-too-long": "the prompt alone fills a sequence",
    "nothing-trained": "no token is trained within a sequence",
    "unproven": "none of the answers is proven",
}
Outcome = Literal["trained", "context", "left out", "refused"]
"""What happens to what a kind names."""
UNPROVEN = "unproven"
"""Kind of a row with an answer that is not proven."""
UNKNOWN_KEY = "unknown-key"
"""Prefix of the kind of a row with an unknown key; a colon and the key follow."""
_SENTENCES = {
    "system-dropped": "the template leaves out the system or developer message of {rows}",
    "tools-dropped": "the template leaves out the tool descriptions of {rows}",
    "results-dropped": "the template leaves out tool results of {rows}",
    "calls-dropped": "the template leaves out earlier tool calls of {rows}",
    "text-dropped": "the template leaves out the text beside a tool call in {rows}",
    "reasoning-dropped": "the template leaves out the reasoning of answers in {rows}",
    "reasoning-composed": (
        "the template leaves out the reasoning of answers in {rows}; so-tui adds it as the model "
        "writes it, and trains it"
    ),
    "turns-split": (
        "in {rows}, the template changes an answer once later turns follow; each such answer is "
        "trained in a document of its own (`data.split_turns`)"
    ),
    "turns-context": (
        "in {rows}, the template changes an answer once later turns follow; such answers are "
        "context, not trained (`data.split_turns=true` trains them)"
    ),
    "templated": (
        "in {rows}, the prompt already contains the chat template and is not wrapped in it again"
    ),
    "flag-ignored": (
        "questions or results are flagged as trained in {rows}; only answers are trained"
    ),
    "system-replaced": (
        "the system message of {rows} lists the tools; the template's own list replaces it"
    ),
    UNPROVEN: "in {rows}, so-tui cannot prove which tokens the model would write: {detail}",
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
    """Return a sentence for each reason, with the first rows, and how to list all of them."""
    return [
        f"{plural(one.rows, 'row')} dropped, since {_DROPPED[reason]}: {one.named}"
        + (f" ({_LIST_ALL})" if one.rows > len(one.first) else "")
        for reason, one in sorted(dropped.items())
    ]


def row_missing(number: str, most: int) -> InputError:
    """Return the error about a row that data of ``most`` rows do not have."""
    return reject(
        "data-row-missing",
        "row",
        number,
        f"the data have {plural(most, 'row')}",
        f"Give a number from 1 to {thousands(most)}.",
    )


def why_dropped(reason: DropReason) -> str:
    """Return a reason in words."""
    return _DROPPED[reason]


def sentences(found: Mapping[str, Found]) -> list[str]:
    """Return a sentence for each kind."""
    return [
        sentence(
            kind,
            one.detail,
            f"{plural(one.rows, 'row')} (first: row {thousands(one.first)}{_of(one.source)})",
        )
        for kind, one in sorted(found.items())
    ]


def _of(source: str) -> str:
    return f" of {printable_line(source)}" if source else ""


def sentence(kind: str, detail: str, rows: str) -> str:
    """Return what a kind means, said of ``rows``."""
    return _wording(kind).format(rows=rows, detail=detail)


def _wording(kind: str) -> str:
    name, colon, key = kind.partition(":")
    if colon and name == UNKNOWN_KEY:
        shown = printable_line(key).replace("{", "{{").replace("}", "}}")
        return (
            f"turns in {{rows}} have the key `{shown}`, which neither so-tui nor the template reads"
        )
    return _SENTENCES.get(kind, f"{kind}: {{rows}}")
