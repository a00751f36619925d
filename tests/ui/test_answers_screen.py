"""The answers to the preset's prompts, step by step."""

from __future__ import annotations

from pathlib import Path

from textual.widgets import Button

from so_tui.runs.results import AnsweredPrompt, Asked, add_answers
from so_tui.ui.dashboard.dialogs import AnswersScreen
from tests.support.hostile import HOSTILE, unsafe
from tests.support.make_run import write_run
from tests.support.screen import opened


def asked(step: int, text: str) -> Asked:
    answer = AnsweredPrompt(prompt="What is a NUMA node?", text=text, tokens=4, stopped=True)
    return Asked(attempt=1, time=0.0, step=step, seconds=0.5, answers=(answer,))


async def test_answers_are_gone_through_by_step(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5, seconds_of_samples=2)
    for step, text in ((0, "hehe"), (3, HOSTILE), (5, "Cores and the memory next to them.")):
        add_answers(run, asked(step, text))
    async with opened(runs_dir, (80, 24), open_run=run, shows="training") as ui:
        await ui.press("p")
        await ui.until(lambda: "Cores and the memory next to them." in ui.text())
        assert "after step 5" in ui.text()
        assert "3 of 3" in ui.text()
        for button in ui.screen.query(Button):
            assert str(button.label) in ui.text()
        await ui.press("left")
        await ui.until(lambda: "after step 3" in ui.text())
        assert unsafe(ui.text()) == set()
        await ui.press("home")
        await ui.until(lambda: "before training" in ui.text())
        assert "hehe" in ui.text()
        await ui.press("escape")
        await ui.until(lambda: not isinstance(ui.screen, AnswersScreen))


async def test_a_run_without_prompts_says_how_to_have_some(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5, seconds_of_samples=2)
    async with opened(runs_dir, (80, 24), open_run=run, shows="training") as ui:
        await ui.press("p")
        await ui.until(lambda: "prompts.every_steps=100" in ui.text())
        assert [button.id for button in ui.screen.query(Button) if button.display] == ["close"], (
            "there is nowhere to go"
        )
        add_answers(run, asked(5, "It arrived meanwhile."))
        await ui.until(lambda: "It arrived meanwhile." in ui.text())
