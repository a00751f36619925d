"""Models that answer in a process of their own: what is named, asked, cancelled and refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.commands.models import _given_sampling
from so_tui.commands.parser import build_parser
from so_tui.launch.helper_jobs import ModelProcess, named_model
from so_tui.runs import RunDirectory, create_run
from so_tui.spec import InputError
from so_tui.spec.generation import Answer, Event, Loaded, Piece, Prompt, Rejected, Sampling, Turn
from tests.support.launching import tiny
from tests.support.problems import codes, refusal
from tests.support.schemas import valid

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with a checkpoint, exported."""
    from so_tui_trainer.tools.export import _export_run
    from tests.support.model_checkpoints import run_with_checkpoints

    run = run_with_checkpoints(tmp_path_factory.mktemp("runs"), 5)
    list(_export_run({"run": str(run.path), "to": str(run.path / "export")}))
    return run


def test_runs_and_folders_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(tiny(), tmp_path / "runs")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for text in (run.name, "latest", str(run.path), f"runs/{run.name}"):
        assert named_model(text, tmp_path / "runs").run == str(run.path)
    for text in ("model", "./model", str(tmp_path / "model")):
        assert named_model(text, tmp_path / "runs").folder == str(tmp_path / "model")
    assert named_model("model", base="owner/base").compare
    assert refusal(lambda: named_model("./runs")).code == "not-a-model"
    assert refusal(lambda: named_model("model", base="\0")).code == "invalid-path"
    assert refusal(lambda: named_model("no-such-run", tmp_path / "runs")).code == "unknown-run"


def test_the_options_have_the_defaults_of_sampling() -> None:
    assert _given_sampling(build_parser().parse_args(["generate"])) == Sampling()


def test_a_run_answers_beside_its_base_model(trained: RunDirectory) -> None:
    load = named_model(str(trained.path), base=str(trained.path / "export"), device="cpu")
    with contextlib.closing(ModelProcess(load)) as process:
        events = process.events()
        loaded = until(events, Loaded)[-1]
        assert isinstance(loaded, Loaded)
        assert [(model.side, model.step) for model in loaded.models] == [
            ("tuned", 5),
            ("base", None),
        ]
        asked = (Turn("user", "Add 2 and 3."),)
        sampling = Sampling(temperature=0, max_tokens=6)
        number = process.ask([Prompt(turns=asked), Prompt(side="base", turns=asked)], sampling)
        found = [*until(events, Answer), *until(events, Answer)]
        answers = {event.side: event for event in found if isinstance(event, Answer)}
        assert answers["tuned"].text == answers["base"].text, (
            "the base model is an export of the same checkpoint"
        )
        for side, answer in answers.items():
            assert (
                "".join(
                    event.text for event in found if isinstance(event, Piece) and event.side == side
                )
                == answer.text
            )
            assert (answer.number, answer.tokens, answer.ended) == (number, 6, "length")
        sides = [event.side for event in found if isinstance(event, Piece)]
        assert sides[:2] == ["tuned", "base"], "both write at the same time"
        process.ask([Prompt(turns=asked)], Sampling(temperature=0, max_tokens=32_768))
        until(events, Piece)
        process.cancel()
        cancelled = until(events, Answer)[-1]
        assert isinstance(cancelled, Answer)
        assert cancelled.ended == "cancelled"
        process.ask([Prompt(text="word " * 2000)], sampling)
        rejected = until(events, Rejected)[-1]
        assert isinstance(rejected, Rejected)
        assert rejected.problem.code == "prompt-too-long"
        process.ask([Prompt(text="a")], sampling)
        assert isinstance(until(events, Answer)[-1], Answer), "it can be asked again"


def until(events: Iterator[Event], kind: type[Event]) -> list[Event]:
    """Return the events up to the first of a kind."""
    found = []
    for event in events:
        found.append(event)
        if isinstance(event, kind):
            return found
    raise AssertionError(f"no {kind} in {found}")


def test_answers_for_programs(trained: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "generate",
        str(trained.path / "export"),
        "--max-tokens",
        "4",
        "--prompt",
        "One.",
        "--prompt",
        "Two.",
        "--device",
        "cpu",
    ]
    assert main([*argv, "--json"]) == 0
    found = valid("generate", capsys.readouterr().out)
    assert [answered["prompt"] for answered in found["prompts"]] == ["One.", "Two."]
    assert [
        answer["tokens"] for answered in found["prompts"] for answer in answered["answers"]
    ] == [4, 4]
    assert found["models"][0]["step"] == 5


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    run = create_run(tiny(), tmp_path)
    process = ModelProcess(named_model(str(run.path)))
    with contextlib.closing(process), pytest.raises(InputError) as caught:
        list(process.events())
    assert codes(caught) == ["checkpoint-missing"]
