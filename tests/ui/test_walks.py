"""A walk by keyboard and one by mouse alone, in a terminal: from the first start to an export."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, alive, read_spec, read_state
from so_tui.runs.records import StepRecord
from tests.support.launching import log, of_kind
from tests.ui.terminal import Keyboard, Mouse, Terminal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
    pytest.mark.skipif(
        bool(inspect_machine().gpus), reason="the walks begin on a machine without a GPU"
    ),
]
SO_TUI = (sys.executable, "-m", "so_tui")
KEYBOARD_STEPS = 6
MOUSE_STEPS = 10
NewUser = TypeVar("NewUser", bound=Terminal)


def runs_of(user: Terminal) -> list[RunDirectory]:
    """Return the runs in the folder of a user's home where so-tui puts them."""
    return [RunDirectory(path) for path in user.home.glob("state/so-tui/runs/*") if path.is_dir()]


def losses_of(run: RunDirectory) -> list[float]:
    """Return the loss of every step that a run has recorded."""
    return [record.loss for record in of_kind(run, StepRecord)]


@contextmanager
def first_start(user: NewUser) -> Iterator[NewUser]:
    """Open so-tui for somebody who has never run it, until the test is over."""
    assert not any(user.home.iterdir())
    try:
        user.run(*SO_TUI)
        yield user
    finally:  # what a walk that failed leaves behind
        user.close()
        for state in map(read_state, runs_of(user)):
            for process in filter(None, (state.supervisor, *state.processes)):
                if alive(process):
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)


def watched_to_its_end(user: Terminal, steps: int) -> RunDirectory:
    """Follow the only run on the dashboard: what is shown of a step is what the run recorded."""
    shown = user.matched(rf"(\S+) +● training +step ([1-9]\d*) / {steps}\b")
    (run,) = runs_of(user)
    assert run.name == shown[1]
    assert 1 <= int(shown[2]) <= len(losses_of(run))
    user.matched(r"loss[ ─]+now \d+\.\d+")
    user.matched(rf"✓ finished +step {steps} / {steps}\b")
    losses = losses_of(run)
    assert len(losses) == steps, log(run)
    last = float(user.matched(r"loss[ ─]+last (\d+\.\d+)")[1])
    assert last == pytest.approx(losses[-1], abs=0.006)
    state, spec = read_state(run), read_spec(run)
    assert (state.state, spec.name, spec.model.weights) == ("finished", "tiny", "random")
    assert {state.step, state.saved_step, state.total_steps, spec.train.steps} == {steps}
    return run


def check_export(user: Terminal, run: RunDirectory) -> None:
    """Wait until the model has been exported where the user works, and load it."""
    user.matched(r"Wrote")
    (folder,) = user.work.iterdir()
    assert folder.name == f"{run.name}-model"
    config = AutoConfig.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (config.vocab_size, config.hidden_size)
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    assert len(layers) == config.num_hidden_layers
    assert all(torch.isfinite(weight).all() and weight.any() for weight in weights.values())


def test_by_keyboard_alone(tmp_path: Path) -> None:
    with first_start(Keyboard(tmp_path)) as user:
        # The cursor stands on the model that this machine can train.
        user.press("enter", named="enter Configure")
        user.shown("tiny (embedded)   preset tiny")
        user.press("/", named="/ Find")
        user.type("train for")
        user.press("enter", named="enter Go there")
        user.type(str(KEYBOARD_STEPS))
        user.press("esc", named="esc Leave the field")
        user.press("l", named="l/F5 Launch")
        user.press("y", named="Launch  y")
        run = watched_to_its_end(user, KEYBOARD_STEPS)

        user.press("4", named="4 Runs")
        user.press("E", named="E Export")
        user.press("enter", named="Export  enter")
        check_export(user, run)
        user.press("q", named="q Quit")
        user.press("y", named="Quit  y")  # the number of steps was not saved as a preset
        user.ended()


def test_by_mouse_alone(tmp_path: Path) -> None:
    with first_start(Mouse(tmp_path)) as user:
        user.click("enter Configure")
        user.shown("tiny (embedded)   preset tiny")
        user.scroll_to("train for", over="Offload")
        user.click("train for")
        for steps in range(50, MOUSE_STEPS - 1, -10):  # the preset says 60
            user.click("−")
            user.matched(rf"train for +{steps} ")
        user.click("Launch  F5")
        user.click("Launch  y")
        run = watched_to_its_end(user, MOUSE_STEPS)

        user.click("4 Runs")
        user.click("E Export")
        user.click("the model, a folder")
        user.click("Export  enter")
        check_export(user, run)
        user.click("q Quit")
        user.click("Quit  y")  # the number of steps was not saved as a preset
        user.ended()
