"""The conversation: with the real helper process, and what is said to each model."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, get_args

import pytest
from textual.widgets import Input

from so_tui.launch.helper_jobs import named_model
from so_tui.runs import create_run
from so_tui.spec.errors import Problem, reject
from so_tui.spec.generation import (
    Answer,
    Event,
    Loaded,
    LoadModel,
    ModelFacts,
    Progress,
    Prompt,
    Rejected,
    Sampling,
    Side,
)
from so_tui.ui.chat.screen import ChatScreen, _read_sampling, _sampling_text
from so_tui.ui.runs.screen import RunsScreen
from tests.support.launching import tiny
from tests.support.pictured import FixedModel
from tests.support.problems import refusal
from tests.support.python_path import python_path
from tests.support.screen import Driver, burst, opened

SLOW_S = 120
"""A helper process imports transformers, which takes its time on a busy machine."""
GREEDY = Sampling(temperature=0, max_tokens=8)


def test_sampling_can_be_edited_as_text() -> None:
    sampling = Sampling(temperature=0.25, top_p=0.5, max_tokens=9, seed=7)
    assert _read_sampling(_sampling_text(sampling)) == sampling
    assert _read_sampling("seed=3") == Sampling(seed=3)
    for wrong in ("seed", "top-k=3", "temperature=9", "max-tokens=1.5"):
        assert refusal(partial(_read_sampling, wrong)).code == "sampling"


async def talk(ui: Driver, load: LoadModel, system: str = "") -> ChatScreen:
    ui.app.push_screen(screen := ChatScreen(load, GREEDY, system))
    await ui.until(lambda: ui.screen is screen)
    return screen


@pytest.mark.slow
async def test_both_models_answer_side_by_side(runs_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from so_tui_trainer.tools.export import _export_run
    from tests.support.model_checkpoints import run_with_checkpoints

    run = run_with_checkpoints(runs_dir, 5)
    list(_export_run({"run": str(run.path), "to": str(tmp_path / "model")}))
    async with opened(runs_dir, (80, 24)) as ui:
        load = named_model(str(run.path), base=str(tmp_path / "model"), device="cpu")
        screen = await talk(ui, load)
        # Typed while the models are being loaded.
        await ui.type_text("Add 2 and 3.")
        await ui.press("enter")
        await ui.until(lambda: ui.text().count("8 tokens in") == 2, SLOW_S)
        assert ui.text().count("> Add 2 and 3.") == 2
        assert "step 5" in ui.text()
        await ui.press("f2")
        await ui.answer("max-tokens=2000 temperature=0")
        await ui.until(lambda: "max-tokens=2000" in ui.shown("#chat-sampling"))
        await ui.type_text("More.")
        await ui.press("enter")
        await ui.press("escape")
        await ui.until(lambda: ui.text().count("stopped") == 2)
        assert ui.screen is screen, "the first esc stops"
        await ui.press("f3")
        await ui.until(lambda: "Add 2 and 3." not in ui.text())
        await ui.type_text("Again.")
        await ui.press("enter")
        await ui.until(lambda: ui.text().count("> Again.") == 2)
        await ui.press("escape")
        await ui.until(lambda: ui.text().count("stopped") == 2, SLOW_S)
        assert screen._process is not None
        process = screen._process._process
        await ui.press("escape")
        await ui.until(lambda: process.poll() is not None)
        assert ui.screen is not screen


DEAF = """
import json, sys
import msgspec
from so_tui.spec.generation import Loaded, ModelFacts
facts = ModelFacts(side="tuned", name="deaf", parameters=1)
sys.stdin.readline()
loaded = Loaded(models=(facts,), device="CPU", layout="a template that never ends")
print(json.dumps(msgspec.to_builtins(loaded)), flush=True)
sys.stdin.readline()
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: pass
"""


async def test_a_model_that_does_not_stop_is_left(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "so_tui_trainer" / "tools"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "generate.py").write_text(DEAF)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    async with opened(runs_dir) as ui:
        screen = await talk(ui, LoadModel(folder=str(tmp_path)))
        await ui.type_text("Well?")
        await ui.press("enter")
        await ui.until(lambda: screen.writing)
        assert screen._process is not None
        process = screen._process._process
        await ui.press("escape")
        assert ui.screen is screen, "the first esc stops"
        await ui.press("escape")
        await ui.until(lambda: ui.screen is not screen)
        await ui.until(lambda: process.poll() is not None)


class Forgetful(FixedModel):
    """Stands in for a helper process whose base model has no answer to the first question."""

    asked: ClassVar[list[Sequence[Prompt]]] = []

    def ask(self, prompts: Sequence[Prompt], sampling: Sampling) -> int:
        self.asked.append(prompts)
        return super().ask(prompts, sampling)

    def events(self) -> Iterator[Event]:
        models = tuple(ModelFacts(side=side, name=side, parameters=1) for side in get_args(Side))
        yield Loaded(models=models, device="CPU", layout="plain text")
        self._asked.get(timeout=60)
        yield Answer(number=1, side="tuned", text="1", tokens=1, seconds=0.1, ended="stop")
        problem = Problem("prompt-too-long", "prompt", "", "is too long", "Shorten it.")
        yield Rejected(number=1, side="base", problem=problem)
        self._asked.get(timeout=60)


async def test_each_model_goes_on_from_its_own_answers(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("so_tui.launch.helper_jobs.ModelProcess", Forgetful)
    async with opened(runs_dir) as ui:
        screen = await talk(ui, LoadModel(folder="one"), "Be brief.")
        for number, text in enumerate(("One?", "Two?"), 1):
            await ui.until(lambda: not screen.writing)
            await ui.type_text(text)
            await ui.press("enter")
            await ui.until(lambda: len(Forgetful.asked) == number)  # noqa: B023 - called at once
        assert {
            prompt.side: [turn.content for turn in prompt.turns] for prompt in Forgetful.asked[1]
        } == {"tuned": ["Be brief.", "One?", "1", "Two?"], "base": ["Be brief.", "Two?"]}
        assert "too long" in ui.text()


class Slow(FixedModel):
    """Stands in for a helper process that loads until it is told to go on, or to fail."""

    go_on: ClassVar[threading.Event]
    fails: ClassVar[bool]
    asked: ClassVar[list[str]]

    def ask(self, prompts: Sequence[Prompt], sampling: Sampling) -> int:
        self.asked.append(prompts[0].turns[-1].content)
        return super().ask(prompts, sampling)

    def events(self) -> Iterator[Event]:
        yield Progress(message="loading the newest checkpoint")
        assert self.go_on.wait(60)
        if self.fails:
            raise reject("checkpoint-missing", "run", "one", "has no checkpoint yet", "Train it.")
        yield from super().events()


@pytest.fixture
def slow_model(monkeypatch: pytest.MonkeyPatch, runs_dir: Path) -> Iterator[type[Slow]]:
    Slow.go_on, Slow.fails, Slow.asked = threading.Event(), False, []
    monkeypatch.setattr("so_tui.launch.helper_jobs.ModelProcess", Slow)
    create_run(tiny(), runs_dir)
    yield Slow
    Slow.go_on.set()


async def test_what_is_typed_while_a_model_loads_is_asked(
    runs_dir: Path, slow_model: type[Slow]
) -> None:
    async with opened(runs_dir) as ui:
        await ui.until(lambda: ui.app.runs)
        await ui.press("4")
        # `q` leaves so-tui on other screens, `1` shows Presets, `,` opens the settings.
        await burst(ui, "C", into="ChatScreen #question", expected="quick, 1 question?")
        await ui.press("enter")
        await ui.until(lambda: "loading the newest checkpoint" in ui.text())
        await ui.until(lambda: re.search(r"loading .* \d+ s", ui.text()))
        assert slow_model.asked == []
        slow_model.go_on.set()
        await ui.until(lambda: slow_model.asked == ["quick, 1 question?"])
        await ui.until(lambda: "> quick, 1 question?" in ui.text())


async def test_a_question_that_is_still_typed_is_not_asked(
    runs_dir: Path, slow_model: type[Slow]
) -> None:
    async with opened(runs_dir) as ui:
        await ui.until(lambda: ui.app.runs)
        await ui.press("4")
        await burst(ui, "C", into="ChatScreen #question", expected="Why")
        await ui.press("enter")
        await ui.type_text(" q")
        slow_model.go_on.set()
        await ui.until(lambda: ui.screen.query("_Column"))
        assert slow_model.asked == []
        assert ui.find("#question", Input).value == "Why q"
        await ui.press("enter")


async def test_letters_are_no_commands_once_loading_failed(
    runs_dir: Path, slow_model: type[Slow]
) -> None:
    slow_model.fails = True
    async with opened(runs_dir) as ui:
        await ui.until(lambda: ui.app.runs)
        await ui.press("4")
        await burst(ui, "C", into="ChatScreen #question", expected="Why?")
        slow_model.go_on.set()
        await ui.until(lambda: "has no checkpoint yet" in ui.text())
        await ui.press("q", "1", "D")
        assert isinstance(ui.screen, ChatScreen)
        assert ui.find("#question", Input).value == "Why?"
        await ui.press("escape")
        await ui.until(lambda: isinstance(ui.screen, RunsScreen))


async def test_nonsense_is_announced_for_random_weights(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trained(FixedModel):
        steps: int | None = 60

        def events(self) -> Iterator[Event]:
            facts = ModelFacts(side="tuned", name="m", parameters=1, step=self.steps, random=True)
            yield Loaded(models=(facts,), device="CPU", layout="plain text")

    monkeypatch.setattr("so_tui.launch.helper_jobs.ModelProcess", Trained)
    async with opened(runs_dir) as ui:
        await talk(ui, LoadModel(run=str(runs_dir)))
        await ui.until(lambda: "on CPU" in ui.text())
        assert "nonsense" in ui.text()
        Trained.steps = 60_000
        await ui.press("escape")
        await talk(ui, LoadModel(run=str(runs_dir)))
        await ui.until(lambda: "on CPU" in ui.text())
        assert "nonsense" not in ui.text()


async def test_why_a_run_cannot_be_asked_is_shown(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> FixedModel:
        raise reject("checkpoint-missing", "run", "one", "has no checkpoint yet", "Train it.")

    monkeypatch.setattr("so_tui.launch.helper_jobs.ModelProcess", refuse)
    create_run(tiny(), runs_dir)
    async with opened(runs_dir) as ui:
        await ui.until(lambda: ui.app.runs)
        await ui.press("4", "C")
        await ui.until(lambda: "has no checkpoint yet" in ui.text())
        await ui.press("escape")
        await ui.until(lambda: isinstance(ui.screen, RunsScreen))
