"""A preview of training data as styled text. Pure functions from a preview to content."""

from __future__ import annotations

from so_tui.launch.data_preview import DataPreview, Sample, SourceView
from so_tui.ui.text import Content, shorten_path
from so_tui.units import thousands

_SHADES = (("█", "$accent"), ("▓", "$backward"))
"""Documents beside each other in a sequence: they differ without colour as well."""
_MOST_COUNT = 9
"""Cells of a count behind a bar."""


def facts(preview: DataPreview) -> list[Content]:
    """Return a line for each figure: its name, the figure, what it means."""
    rows = preview.facts()
    width = max(len(figure) for _, figure, _ in rows)
    return [
        Content.assemble(
            (f"{name:<10}", "$faint"),
            (
                f"{figure:>{width}}  ",
                "bold $warning" if name in ("truncated", "dropped") and figure != "0" else "bold",
            ),
            (meaning, "$faint"),
        )
        for name, figure, meaning in rows
    ]


def histogram(preview: DataPreview, width: int) -> list[Content]:
    """Return a bar for each range of lengths."""
    label = max(len(entry.label) for entry in preview.histogram)
    cells = preview.histogram_cells(max(8, min(60, width - label - 1 - _MOST_COUNT)))
    return [
        Content.assemble(
            (f"{entry.label:>{label}} ", "$faint"),
            ("▇" * bar, "$accent"),
            f" {thousands(entry.documents)}" if bar else "",
        )
        for entry, bar in zip(preview.histogram, cells, strict=True)
    ]


def packed(preview: DataPreview, width: int) -> list[Content]:
    """Return one sequence as a bar in which neighbouring documents differ, and their lengths."""
    *documents, padding = preview.sequence_cells(width)
    bar = [
        (glyph * cells, style)
        for cells, (glyph, style) in zip(documents, _SHADES * len(documents), strict=False)
    ]
    return [
        Content.assemble(*bar, ("─" * padding, "$rule")),
        Content.styled(preview.sequence_sum(), "$faint"),
    ]


def sources(preview: DataPreview, width: int) -> list[Content]:
    """Return a line for each source of a mixture: its share of an epoch, what became of its rows, its name."""
    return [_source(source, width) for source in preview.sources]


def _source(source: SourceView, width: int) -> Content:
    text = f"  {thousands(source.rows)} rows, {thousands(source.trained_tokens)} trained tokens, each {source.times_an_epoch:.1f} x an epoch"
    lost = ", ".join(
        f"{thousands(count)} {name}"
        for name, count in (("truncated", source.truncated), ("dropped", source.dropped))
        if count
    )
    name = shorten_path(source.source, max(12, width - 7 - len(source.format) - 4))
    return Content.assemble(
        (f"{100 * source.share:3.0f} %  ", "bold"),
        name,
        (f"  {source.format}\n     ", "$faint"),
        (text, "$faint"),
        (f"  {lost}" if lost else "", "$warning"),
    )


def legend(*, marks: bool) -> Content:
    """Return the legend of trained and context text; with ``marks`` they differ by signs instead of colour."""
    return Content.assemble(
        _piece("what is trained", trained=True, marks=marks),
        (" and ", "$faint"),
        ("what is context", "$faint"),
    )


def sample(one: Sample, preview: DataPreview, *, marks: bool) -> Content:
    """Return one document as the model sees it."""
    where = f"row {thousands(one.row)}" + (f" of {one.source}" if len(preview.sources) > 1 else "")
    head = Content.assemble(
        (where, "bold"),
        (f"   {thousands(one.tokens)} tokens, {thousands(one.trained_tokens)} trained", "$faint"),
    )
    return (
        head
        + "\n"
        + Content("").join(
            _piece(text, trained=trained, marks=marks) for text, trained in one.visible
        )
    )


def _piece(text: str, *, trained: bool, marks: bool) -> Content:
    if not trained:
        return Content.styled(text, "$faint")
    return Content.styled(f"«{text}»" if marks else text, "$success on $success 15%")
