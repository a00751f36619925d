"""A console of rich's that sends only its own styling and printable characters to the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Span, Text

from so_tui.trust.text import printable


class PrintableConsole(Console):
    """Text is made printable before it is laid out, so that columns stay in line, and every segment
    is checked once more.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return the segments of a renderable. Control segments are rich's own, and pass."""
        if isinstance(renderable, Text):
            renderable = _printable_text(renderable)
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control or segment.text.isprintable()
                else segment._replace(text=printable(segment.text))
            )

    def render_str(self, text: str, **options: Any) -> Text:
        """Return plain text for layout, as wide as it will be shown."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Raise instead of exiting with 1, as rich would: a reader that stops early is not a
        failure.
        """
        raise BrokenPipeError


def _printable_text(text: Text) -> Text:
    """Return styled text with unsafe characters spelled out as ``printable`` does, each in its own
    style.
    """
    if printable(text.plain) == text.plain:
        return text
    starts = [0, *accumulate(len(printable(character)) for character in text.plain)]
    safe = text.blank_copy(printable(text.plain))
    safe.spans = [
        Span(starts[span.start], starts[min(span.end, len(text))], span.style)
        for span in text.spans
        if span.start < len(text)
    ]
    return safe
