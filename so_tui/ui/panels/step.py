"""The dashboard's view of one step: how its time divides into data, forward, backward, exposed optimizer and the rest."""

from __future__ import annotations

from so_tui.ui.glyphs import shows_ascii
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.widgets import run_lines
from so_tui.ui.widgets.styled_lines import StyledLines


class StepPanel(StyledLines):
    """Means over the newest steps, as a bar with its legend; before the first step, the timeline of the start."""

    def show(self, snapshot: Snapshot, now: float, width: int) -> None:
        """Show the newest steps of ``snapshot``, or the way to the first one, in lines of ``width`` cells."""
        self.update(run_lines.anatomy_lines(snapshot, now, width, plain=shows_ascii(self.app)))
