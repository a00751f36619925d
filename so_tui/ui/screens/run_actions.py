"""What can be done to a run, the same on the Dashboard and in the list of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import work
from textual.screen import Screen

from so_tui.runs import RunDirectory, control, read_spec, state_with_truth
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.spec import InputError, SoTuiError
from so_tui.ui import messages
from so_tui.ui.text import plural
from so_tui.units import thousands

if TYPE_CHECKING:
    from so_tui.ui.app import SoTuiApp

RESUMABLE = frozenset({"stopped", "failed", "lost"})


class RunActions(Screen[None]):
    """For screens that show a run: they say which one is meant."""

    @property
    def chosen_run(self) -> RunDirectory | None:
        """The run that a key is about; None when there is none."""
        raise NotImplementedError

    def _state_of(self, run: RunDirectory) -> RunState | None:
        """None, and a word on it, where that cannot be read: its folder may have been deleted since it was listed."""
        try:
            return state_with_truth(run)
        except InputError as error:
            self.app.post_message(messages.Failed(f"The state of {run.name} cannot be read", tuple(map(str, error.problems))))
            return None

    def action_stop(self) -> None:
        run = self.chosen_run
        if run is None:
            return
        from so_tui.ui.screens.dialogs import Question

        state = self._state_of(run)
        if state is None:
            return
        if state.state in FINAL_STATES:
            self.notify(f"{run.name} has already ended: {state.state}", markup=False)
            return
        lines = [
            f"It is at step {thousands(state.step)} of {thousands(state.total_steps)}.",
            "It finishes the step it is in and ends; unless the preset says otherwise, it saves a checkpoint to resume from.",
        ]

        def answered(yes: bool | None) -> None:
            if yes:
                self.ask_run(run, "stop", "Stopping after this step")

        self.app.push_screen(Question(f"Stop {run.name}?", lines, yes="Stop", no="No, go on"), answered)

    def action_checkpoint(self) -> None:
        run = self.chosen_run
        if run is not None:
            self.ask_run(run, "checkpoint", "A checkpoint follows this step")

    @work(thread=True, group="ask", name="ask the run", exit_on_error=False)
    def ask_run(self, run: RunDirectory, action: control.Action, words: str) -> None:
        """Leave a request in the run's folder; rank 0 looks for it between steps."""
        from so_tui.launch import ensure_supervised

        try:
            control.request(run, action, reason="asked on the screen")
        except OSError as error:
            self.app.post_message(messages.Failed(f"{run.name} could not be asked", (f"{run.control_dir}: {error.strerror}",)))
            return
        ensure_supervised(run)
        self.app.call_from_thread(self.notify, words, markup=False)

    def action_resume(self) -> None:
        run = self.chosen_run
        if run is None:
            return
        from so_tui.ui.screens.dialogs import Question

        state = self._state_of(run)
        if state is None:
            return
        if state.state not in FINAL_STATES:
            self.notify(f"{run.name} is live: {state.state}", markup=False)
            return
        saved = f"step {thousands(state.saved_step)}" if state.saved_step is not None else "the beginning: nothing was saved"

        def answered(yes: bool | None) -> None:
            if yes:
                self.resume_run(run)

        self.app.push_screen(
            Question(f"Resume {run.name}?", [f"It goes on from {saved}, on this machine."], yes="Resume", default_yes=True), answered
        )

    def resume_run(self, run: RunDirectory) -> None:
        """Start another attempt unless something else is being started."""
        app: SoTuiApp = self.app  # type: ignore[assignment]
        if app.may_start():
            app.starting = run.name
            self._resume(run)

    @work(thread=True, group="launch", name="resume", exit_on_error=False)
    def _resume(self, run: RunDirectory) -> None:
        from so_tui.launch import prepare_resume, resume
        from so_tui.machine import inspect_machine

        try:
            resume(run, prepare_resume(run, inspect_machine()))
        except SoTuiError as error:
            self.app.post_message(messages.Failed(f"{run.name} was not resumed", tuple(str(error).splitlines())))
        else:
            self.app.post_message(messages.Launched(run))

    def action_differences(self) -> None:
        run = self.chosen_run
        if run is not None:
            self.show_settings(run)

    def show_settings(self, run: RunDirectory) -> None:
        """Every setting of a run that is not the default."""
        from so_tui.spec import spec_tree
        from so_tui.ui.form import flat, text_of
        from so_tui.ui.screens.dialogs import Notice

        try:
            spec = read_spec(run)
        except InputError as error:
            self.app.post_message(messages.Failed(f"The settings of {run.name} cannot be read", tuple(map(str, error.problems))))
            return
        lines = [f"{path} = {text_of(value)}" for path, value in flat(spec_tree(spec, full=False))]
        self.app.push_screen(Notice(f"{run.name}: {plural(len(lines), 'setting')} that are not the default", ["\n".join(lines)], bad=False))

    def action_copy(self) -> None:
        run = self.chosen_run
        if run is not None:
            self.app.copy_to_clipboard(str(run.path))
            self.notify(f"Copied {run.path}", markup=False)
