"""Which of the processes that lead a run was lost first: the cause of what follows, and of what the run's end is told."""

from __future__ import annotations

from so_tui.launch.processes import ProcessTree
from so_tui.runs.records import Process


class Losses:
    """Remembers the first loss among runner, launcher and ranks."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self.first: Process | None = None
        self.unprompted = False
        """It came before anything of the run was told to end."""

    def notice(self, before: set[int], *, told: bool) -> list[Process]:
        """Those that lead the run and that the tree's last look found gone.

        ``before``: what lived before that look. ``told``: the run's processes have been told to end.
        """
        present = {process.role for process in self._tree.alive} - {"rank"}
        leading = {"runner", "launcher", "rank"} - present
        lost = [process for process in self._tree.gone if process.pid in before and process.role in leading]
        if self.first is None and lost:
            self.first = min(lost, key=self._blame)
            self.unprompted = not told
        return lost

    @property
    def first_code(self) -> int | None:
        """The exit code of the first (below 0: a signal's number), where it could be seen."""
        return self._tree.exit_code(self.first) if self.first else None

    def _blame(self, process: Process) -> tuple[int, bool]:
        """Sorts what one look found gone: the cause first, then its victims.

        The launcher's death takes its ranks along (parent-death signal) faster than we look, and a rank that was killed those that waited
        for it, which leave by themselves.
        """
        code = self._tree.exit_code(process)
        return ("launcher", "runner", "rank").index(process.role), code is None or code >= 0
