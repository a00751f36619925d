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
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.checkpoint_folder import optimizer_folder
from so_tui_trainer.tools.convert import convert
from tests.support.engine import by_name
from tests.support.launching import log, of_kind, start, tiny
from tests.support.model_checkpoints import run_with_checkpoints
from tests.support.problems import refusal
from tests.support.shared_run import TWELVE_STEPS


def silent(_message: str) -> None:
    return None


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return run_with_checkpoints(tmp_path / "runs", 5)


def converted(run: RunDirectory, folder: Path, step: int = 5) -> str:
    """Convert a run for DeepSpeed; return the arguments that make a run of it in ``back``."""
    *_, answer = convert({"run": str(run.path), "to": str(folder / "theirs")})
    assert answer["step"] == step
    return f"convert {folder / 'theirs'} --runs-dir {folder / 'back'}"


def test_a_converted_run_keeps_states_and_place_in_the_data(
    run: RunDirectory, tmp_path: Path
) -> None:
    back_again = converted(run, tmp_path)
    assert main(f"{back_again} --as tiny --set train.steps=9".split()) == 0
    (back,) = list_runs(tmp_path / "back")
    state = read_state(back)
    assert (state.state, state.step, state.saved_step, state.total_steps) == ("stopped", 5, 5, 9)
    before, after = (
        checkpoint_folder.newest(made.checkpoints_dir, run_id(made)) for made in (run, back)
    )
    assert before is not None
    assert after is not None
    assert (after.manifest.step, after.manifest.consumed_sequences) == (5, 10)
    assert after.manifest.data == before.manifest.data
    ours, theirs = (
        {name: states for name, (_, states) in by_name(optimizer_folder(found.path)).items()}
        for found in (before, after)
    )
    assert ours == theirs


def test_what_is_there_is_refused_and_stays(run: RunDirectory, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "weights").write_text("mine")
    assert refusal(lambda: converted(run, tmp_path)).code == "export-would-overwrite"
    assert (theirs / "weights").read_text() == "mine"


def test_a_checkpoint_of_another_model_leaves_no_run_behind(
    run: RunDirectory, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    problem = refusal(lambda: from_deepspeed(tmp_path / "runs", tiny(), back, silent))
    assert problem.code == "not-deepspeeds"
    assert list_runs(back) == ()
    assert main(f"{converted(run, tmp_path)} --as qwen3-14b".split()) == 2
    assert list_runs(back) == ()


@pytest.mark.slow
def test_converted_runs_resume_elsewhere(finished_run: RunDirectory, tmp_path: Path) -> None:
    """SuperOffload trained to step 10; ZeRO-Offload continues from what DeepSpeed would read."""
    run = RunDirectory(tmp_path / finished_run.name)
    shutil.copytree(finished_run.path, run.path)
    shutil.rmtree(run.checkpoints_dir / "step-000012")
    converted(run, tmp_path, step=10)
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
