"""Which checkpoint an attempt resumes from, and what it tells about the others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from so_tui.runs import RunDirectory, create_run
from so_tui.runs.directory import run_id
from so_tui.spec import DataSource, RunSpec
from so_tui_trainer import checkpoint, checkpoint_folder
from so_tui_trainer.checkpoint import _warn_of_rounding
from so_tui_trainer.checkpoint_folder import Found, claim
from so_tui_trainer.failures import TrainingError
from so_tui_trainer.ranks import Ranks
from superoffload.checkpoint import Rounded
from tests.support import engine as support
from tests.support.checkpoints import written
from tests.support.launching import tiny
from tests.support.planning import spec_of
from tests.support.problems import coded
from tests.support.records import change_state
from tests.support.shared_run import SUPEROFFLOAD

SPEC = tiny(checkpoint__keep="9")


def resumed(run: RunDirectory, *, start_over: bool = False) -> tuple[Path | None, list[str]]:
    """Return what an attempt resumes from, and the codes of its warnings."""
    told: list[str] = []

    def warn(code: str, message: str, suggestion: str) -> None:
        assert message
        told.append(code)

    found = checkpoint.newest_to_resume(run, SPEC, warn, start_over=start_over)
    return found.path if found else None, told


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(SPEC, tmp_path / "runs")


def saved(run: RunDirectory, *steps: int) -> list[Path]:
    """Write checkpoints, of which the run knows the last."""
    folder = claim(run, SPEC)
    paths = [written(folder, step, run_id(run), SPEC) for step in steps]
    change_state(run, saved_step=steps[-1])
    return paths


def test_the_newest_readable_checkpoint_is_taken(run: RunDirectory) -> None:
    assert resumed(run) == (None, [])
    paths = saved(run, 1, 2, 3)
    assert resumed(run) == (paths[2], [])
    (paths[2] / "checkpoint.json").write_text("{")
    assert resumed(run) == (paths[1], ["checkpoint-damaged"])
    assert not paths[2].exists()
    assert paths[2].with_name("step-000003.damaged").exists()


def test_only_damaged_ones_name_a_remedy_that_works(run: RunDirectory) -> None:
    (path,) = saved(run, 4)
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(TrainingError) as caught:
        resumed(run)
    assert caught.value.code == "checkpoints-unreadable"
    assert f"`so-tui resume {run.name} --start-over`" in caught.value.suggestion
    assert resumed(run, start_over=True) == (None, [])
    assert path.with_name("step-000004.superseded").exists()
    change_state(run, saved_step=None)  # as the supervisor does then
    assert resumed(run) == (None, [])


READ = (
    "checkpoints",
    "checkpoint.json",
    "rank_00000.json",
    "rank_00000.states",
)
"""How the paths end that are read."""


def take_away(patch: pytest.MonkeyPatch, name: str, code: int, tries: int) -> None:
    """Have files of a name not opened, and folders not listed, for some tries."""
    left = [OSError(code, os.strerror(code), name)] * tries
    patch.setattr(checkpoint_folder, "_PAUSES_S", (0.0, 0.0))

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *rest: Any, **named: Any) -> Any:
            if str(path).endswith(name) and left:
                raise left.pop()
            return real(path, *rest, **named)

        return refuse

    for function in ("open", "listdir"):
        patch.setattr(os, function, refusing(getattr(os, function)))


@pytest.mark.parametrize("name", READ)
def test_a_checkpoint_unreadable_for_long_ends_the_run(
    name: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That says nothing about what is in it, and an older one would lose training. One that cannot
    be read for a moment is taken.
    """
    paths = saved(run, 1, 3)
    for code in (errno.EIO, errno.ETIMEDOUT, errno.EACCES):
        with monkeypatch.context() as patch:
            take_away(patch, name, code, tries=1)
            assert resumed(run) == (paths[1], [])
    with monkeypatch.context() as patch:
        take_away(patch, name, errno.EIO, tries=100)
        with coded(TrainingError, "checkpoint-read-failed"):
            resumed(run)
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize(
    "part", [".", "checkpoint.json", "optimizer", "optimizer/rank_00000.states"]
)
def test_only_ones_own_checkpoint_is_resumed(run: RunDirectory, part: str) -> None:
    """Otherwise those who can write it would decide what is trained."""
    *_, newest = saved(run, 1, 2)
    (newest / part).chmod((newest / part).stat().st_mode | 0o002)
    with coded(TrainingError, "checkpoint-not-own", f"{newest}"):
        resumed(run)
    if os.geteuid() == 0:
        (newest / part).chmod(0o700)
        os.chown(newest / part, 61_000, 61_000)
        with coded(TrainingError, "checkpoint-not-own", "other-owner"):
            resumed(run)
    assert newest.exists(), "it is neither damaged nor moved"


def test_one_of_another_run_is_named_and_left(run: RunDirectory) -> None:
    paths = saved(run, 1)
    other = written(paths[0].parent, 2, "another", SPEC)
    assert resumed(run) == (paths[0], ["checkpoint-not-used"])
    assert other.exists()


def test_missing_checkpoints_are_warned_of_or_an_error(run: RunDirectory) -> None:
    paths = saved(run, 1, 2)
    paths[1].rename(paths[1].with_name("elsewhere"))
    assert resumed(run) == (paths[0], ["checkpoint-missing"])
    paths[0].rename(paths[0].with_name("elsewhere, too"))
    with coded(TrainingError, "checkpoint-missing"):
        resumed(run)


def test_other_shares_of_a_mixture_are_another_order(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixture(one: float, other: float) -> RunSpec:
        sources = DataSource(source="a", weight=one), DataSource(source="b", weight=other)
        return replace(SPEC, data=replace(SPEC.data, source=sources))

    monkeypatch.setattr(checkpoint, "_load", lambda *unused: Rounded(0, 0))
    path = written(claim(run, SPEC), 1, run_id(run), mixture(1.0, 2.0))
    found, told = Found(path, checkpoint_folder._verify(path), ()), list[str]()
    alone = Ranks(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    for spec, codes in ((mixture(2.0, 4.0), []), (mixture(2.0, 1.0), ["data-changed"])):
        checkpoint.restore(
            found, None, spec, found.manifest.data, alone, lambda code, *_: told.append(code)
        )
        assert told == codes


def test_starting_over_sets_them_all_aside(run: RunDirectory) -> None:
    paths = saved(run, 1, 2)
    assert resumed(run, start_over=True) == (None, [])
    left = sorted(path.name for path in paths[0].parent.glob("step-*"))
    assert left == ["step-000001.superseded", "step-000002.superseded"]


NONE, BOTH = Rounded(blocks=0, numel=0), Rounded(blocks=3, numel=2_000_000)
RESTARTED = NONE._replace(restarted=5)
FP32: dict[str, str] = {}
BF16, INT8 = ({"offload__states": f"{kind}-moments"} for kind in ("bf16", "int8"))
ON_GPU = INT8 | {"offload__mode": "gpu"}  # moments are fp32 there, whatever the spec says
CHANGED = "states-format-changed"


@pytest.mark.parametrize(
    ("before", "now", "rounded", "codes"),
    [
        (FP32, FP32, NONE, []),
        (FP32, BF16, BOTH, [CHANGED]),
        (INT8, FP32, NONE, [CHANGED]),
        (INT8, INT8, BOTH, ["moments-rounded", "blocks-rounded-again"]),
        (ON_GPU, INT8, BOTH, [CHANGED]),
        (ON_GPU, FP32, NONE, []),
        ({"offload__engine": "deepspeed"}, FP32, RESTARTED, ["moments-restarted"]),
    ],
)
def test_another_format_of_the_moments_is_told(
    before: dict[str, str], now: dict[str, str], rounded: Rounded, codes: list[str]
) -> None:
    saved, spec = (spec_of("tiny", **SUPEROFFLOAD | changes) for changes in (before, now))
    found: list[str] = []
    manifest = support.manifest(5, saved, ranks=2)
    _warn_of_rounding(manifest, spec, rounded, lambda code, *_: found.append(code))
    assert found == codes
