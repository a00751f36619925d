"""Checkpoints of runs converted for DeepSpeed, and DeepSpeed's made into runs that are resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.launch.helper_jobs import from_deepspeed
from so_tui.runs import RunDirectory, list_runs, read_state
from so_tui.runs.directory import run_id
from so_tui.runs.records import StepRecord
from so_tui.spec import InputError
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.tools.convert import convert
from tests.support.engine import by_name
from tests.support.launching import log, of_kind, start, tiny
from tests.support.model_checkpoints import run_with_checkpoints
from tests.support.problems import refusal
from tests.support.shared_run import TWELVE_STEPS


def silent(_message: str) -> None:
    return None


def test_a_converted_run_keeps_states_and_place_in_the_data(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path / "runs", 5)
    *_, answer = convert({"run": str(run.path), "to": str(tmp_path / "theirs")})
    assert answer["step"] == 5
    where = f"{tmp_path / 'theirs'} --runs-dir {tmp_path / 'back'}"
    assert main(f"convert {where} --as tiny --set train.steps=9".split()) == 0
    (back,) = list_runs(tmp_path / "back")
    state = read_state(back)
    assert (state.state, state.step, state.saved_step, state.total_steps) == ("stopped", 5, 5, 9)
    before, after = (
        checkpoint_folder.newest(made.checkpoints_dir, run_id(made)) for made in (run, back)
    )
    assert before is not None
    assert after is not None
    assert (after.manifest.step, after.manifest.consumed_sequences, after.manifest.data) == (
        5,
        10,
        before.manifest.data,
    )
    ours, theirs = (
        by_name(checkpoint_folder.optimizer_folder(found.path)) for found in (before, after)
    )
    assert {name: states for name, (_, states) in ours.items()} == {
        name: states for name, (_, states) in theirs.items()
    }


def test_what_is_there_is_refused_and_stays(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path / "runs", 5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "weights").write_text("mine")
    assert (
        refusal(lambda: list(convert({"run": str(run.path), "to": str(tmp_path / "mine")}))).code
        == "export-would-overwrite"
    )
    assert (tmp_path / "mine" / "weights").read_text() == "mine"


def test_a_checkpoint_of_another_model_leaves_no_run_behind(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path / "runs", 5)
    list(convert({"run": str(run.path), "to": str(tmp_path / "theirs")}))
    with pytest.raises(InputError) as caught:
        from_deepspeed(tmp_path / "runs", tiny(), tmp_path / "back", silent)
    assert caught.value.problems[0].code == "not-deepspeeds"
    assert list_runs(tmp_path / "back") == ()
    where = f"{tmp_path / 'theirs'} --runs-dir {tmp_path / 'back'}"
    assert main(f"convert {where} --as qwen3-14b".split()) == 2
    assert list_runs(tmp_path / "back") == ()


@pytest.mark.slow
def test_converted_runs_resume_elsewhere(finished_run: RunDirectory, tmp_path: Path) -> None:
    """SuperOffload trained to step 10; ZeRO-Offload continues from what DeepSpeed would read."""
    run = RunDirectory(tmp_path / finished_run.name)
    shutil.copytree(finished_run.path, run.path)
    shutil.rmtree(run.checkpoints_dir / "step-000012")
    list(convert({"run": str(run.path), "to": str(tmp_path / "theirs")}))
    spec = tiny(**TWELVE_STEPS, offload__mode="zerooffload", checkpoint__at_end="false")
    made = from_deepspeed(tmp_path / "theirs", spec, tmp_path / "back", silent)
    assert start(made, spec).wait(timeout=400) == 0, log(made)
    before, after = (
        {record.step: record.loss for record in of_kind(one, StepRecord)}
        for one in (finished_run, made)
    )
    assert sorted(after) == [11, 12]
    for step, loss in after.items():
        assert loss == pytest.approx(before[step], rel=1e-3)
