"""Models that answer in a process of their own: what is named, answered for
programs, and refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.commands.models import _given_sampling
from so_tui.commands.parser import build_parser
from so_tui.launch.helper_jobs import ModelProcess, named_model
from so_tui.runs import create_run
from so_tui.spec.generation import Sampling
from tests.support.launching import tiny
from tests.support.problems import refusal, rejected
from tests.support.schemas import valid

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


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
    # The helper works elsewhere.
    assert named_model("model", base="./model").base == str(tmp_path / "model")
    assert refusal(lambda: named_model("./runs")).code == "not-a-model"
    assert refusal(lambda: named_model("model", base="\0")).code == "invalid-path"
    assert refusal(lambda: named_model("no-such-run", tmp_path / "runs")).code == "unknown-run"
    assert _given_sampling(build_parser().parse_args(["generate"])) == Sampling()


def test_answers_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from so_tui_trainer.tools.export import _export_run
    from tests.support.model_checkpoints import run_with_checkpoints

    run, model = run_with_checkpoints(tmp_path / "runs", 5), str(tmp_path / "export")
    list(_export_run({"run": str(run.path), "to": model}))
    capsys.readouterr()  # DeepSpeed logs its accelerator when it is first imported
    argv = ["generate", model, "--device", "cpu", "--json"]
    assert main([*argv, "--max-tokens", "4", "--prompt", "One.", "--prompt", "Two."]) == 0
    found = valid("generate", capsys.readouterr().out)
    assert [answered["prompt"] for answered in found["prompts"]] == ["One.", "Two."]
    answers = [answer for answered in found["prompts"] for answer in answered["answers"]]
    assert [answer["tokens"] for answer in answers] == [4, 4]
    assert found["models"][0]["step"] == 5


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    run = create_run(tiny(), tmp_path)
    process = ModelProcess(named_model(str(run.path)))
    with contextlib.closing(process), rejected("checkpoint-missing"):
        list(process.events())
