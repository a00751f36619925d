"""Published figures beside ours, for the terminal and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from so_tui.plan.published import Compared

_HEADINGS = ("published", "figure", "ours", "difference")
_NOT_PREDICTED = "—"


def render(found: Sequence[Compared]) -> RenderableType:
    """Render a table with the reasons below each figure that differs."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for heading in _HEADINGS:
        table.add_column(
            heading, justify="left" if heading == "published" else "right", overflow="fold"
        )
    for one in found:
        text = Text.assemble(
            one.published.claim,
            ("\n" + one.published.source, "dim"),
            ("\n" + one.reason if one.reason else "", "italic"),
        )
        table.add_row(text, *_figures(one))
    note = "Ours are predictions for the published settings by published rates; so-tui has not run on a Grace machine."
    return Group(table, Text(), Text(note, style="dim"))


def page(found: Sequence[Compared]) -> str:
    """Return the table, the settings and the reasons as Markdown."""
    lines = ["| " + " | ".join((*_HEADINGS, "source")) + " |", "|---|---|---|---|---|"]
    lines += [
        " | ".join(("| " + one.published.claim, *_figures(one), one.published.source + " |"))
        for one in found
    ]
    lines += [
        "",
        "## Why they differ",
        "",
        *(line for one in found if one.reason for line in _reason(one)),
    ]
    lines += [
        "## Settings",
        "",
        *(line for one in found if one.settings for line in _settings(one)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _figures(one: Compared) -> tuple[str, str, str]:
    unit = one.published.unit
    if one.published.quantity == "fits":
        return "fits", "fits" if one.predicted else "does not fit", ""
    predicted = _NOT_PREDICTED if one.predicted is None else _number(one.predicted, unit)
    value = _number(one.published.value, unit) if one.published.value else ""
    return value, predicted, "" if one.difference is None else f"{100 * one.difference:+.0f} %"


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".strip()


def _reason(one: Compared) -> Iterator[str]:
    yield f"- **{one.published.claim}**: {one.reason}"
    yield ""


def _settings(one: Compared) -> Iterator[str]:
    figure = one.published
    against = f", over those of `{figure.against}`" if figure.against else ""
    changes = " ".join(
        f"--set {key}={value}" for key, value in one.settings.items() if key != "gpus"
    )
    yield f"- {figure.claim}{against}: `so-tui plan {figure.preset} --machine {figure.machine} --as-given --gpus {figure.gpus} {changes}`"
