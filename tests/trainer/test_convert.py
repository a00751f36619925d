"""Checkpoints of runs converted for DeepSpeed, and DeepSpeed's made into runs that are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.launch.helper_jobs import from_deepspeed
from so_tui.runs import RunDirectory, list_runs, read_state
from so_tui.runs.directory import run_id
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.checkpoint_folder import optimizer_folder
from so_tui_trainer.tools.convert import convert
from tests.support.engine import by_name
from tests.support.launching import tiny
from tests.support.model_checkpoints import run_with_checkpoints
from tests.support.problems import refusal


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
