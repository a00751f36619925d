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

SPEC = tiny(checkpoint__keep="9")


class Warnings(list[str]):
    """The codes of the warnings."""

    def __call__(self, code: str, message: str, suggestion: str) -> None:
        assert message
        self.append(code)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(SPEC, tmp_path / "runs")


def saved(run: RunDirectory, *steps: int) -> list[Path]:
    """Write checkpoints, of which the run knows the last."""
    folder = claim(run, SPEC)
    paths = [written(folder, step, run_id(run), SPEC) for step in steps]
    change_state(run, saved_step=steps[-1])
    return paths


def test_a_new_run_has_nothing_to_resume_from(run: RunDirectory) -> None:
    told = Warnings()
    assert checkpoint.newest_to_resume(run, SPEC, told, start_over=False) is None
    assert told == []


def test_the_newest_readable_checkpoint_is_taken(run: RunDirectory) -> None:
    paths, told = saved(run, 1, 2, 3), Warnings()
    found = checkpoint.newest_to_resume(run, SPEC, told, start_over=False)
    assert found is not None
    assert (found.path, told) == (paths[2], [])
    (paths[2] / "checkpoint.json").write_text("{")
    found = checkpoint.newest_to_resume(run, SPEC, told, start_over=False)
    assert found is not None
    assert (found.path, told) == (paths[1], ["checkpoint-damaged"])
    assert not paths[2].exists()
    assert (paths[2].parent / "step-000003.damaged").exists()


READ = (
    "checkpoints",
    "step-000003/checkpoint.json",
    "step-000003/optimizer/rank_00000.json",
    "rank_00000.states",
)
"""How the paths end that are read."""


class Away:
    """A file system that refuses to open files of a name, or list folders, for some tries."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, code: int, tries: int) -> None:
        self.left = tries
        patch.setattr(checkpoint_folder, "_PAUSES_S", (0.0, 0.0))
        for function in ("open", "scandir"):
            patch.setattr(os, function, self._refusing(getattr(os, function), name, code))

    def _refusing(self, real: Callable[..., Any], name: str, code: int) -> Callable[..., Any]:
        def refuse(path: Any, *rest: Any, **named: Any) -> Any:
            if str(path).endswith(name) and self.left:
                self.left -= 1
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *rest, **named)

        return refuse


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.EACCES])
@pytest.mark.parametrize("name", READ)
def test_one_that_cannot_be_read_for_a_moment_is_taken(
    name: str, code: int, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, told = saved(run, 1, 3), Warnings()
    Away(monkeypatch, name, code, tries=1)
    found = checkpoint.newest_to_resume(run, SPEC, told, start_over=False)
    assert found is not None
    assert (found.path, told) == (paths[1], [])


@pytest.mark.parametrize("name", READ)
def test_a_checkpoint_unreadable_for_long_ends_the_run(
    name: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That says nothing about what is in it, and an older one would lose training."""
    paths, told = saved(run, 1, 3), Warnings()
    with monkeypatch.context() as patch:
        Away(patch, name, errno.EIO, tries=100)
        with pytest.raises(TrainingError) as caught:
            checkpoint.newest_to_resume(run, SPEC, told, start_over=False)
    assert (caught.value.code, told) == ("checkpoint-read-failed", [])
    assert all(path.exists() for path in paths)


def test_one_of_another_run_is_named_and_left(run: RunDirectory) -> None:
    paths, told = saved(run, 1), Warnings()
    other = written(paths[0].parent, 2, "another", SPEC)
    found = checkpoint.newest_to_resume(run, SPEC, told, start_over=False)
    assert found is not None
    assert (found.path, told) == (paths[0], ["checkpoint-not-used"])
    assert other.exists()


def test_missing_checkpoints_are_warned_of_or_an_error(run: RunDirectory) -> None:
    paths, told = saved(run, 1, 2), Warnings()
    paths[1].rename(paths[1].with_name("elsewhere"))
    found = checkpoint.newest_to_resume(run, SPEC, told, start_over=False)
    assert found is not None
    assert (found.manifest.step, told) == (1, ["checkpoint-missing"])
    paths[0].rename(paths[0].with_name("elsewhere, too"))
    with coded(TrainingError, "checkpoint-missing"):
        checkpoint.newest_to_resume(run, SPEC, told, start_over=False)


@pytest.mark.parametrize(
    ("weights", "codes"), [((1.0, 2.0), []), ((2.0, 4.0), []), ((2.0, 1.0), ["data-changed"])]
)
def test_other_shares_of_a_mixture_are_another_order(
    weights: tuple[float, float],
    codes: list[str],
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mixture(*weights: float) -> RunSpec:
        sources = tuple(
            DataSource(source=f"part-{number}", weight=weight)
            for number, weight in enumerate(weights)
        )
        return replace(SPEC, data=replace(SPEC.data, source=sources))

    monkeypatch.setattr(checkpoint, "_load", lambda *unused: Rounded(0, 0))
    path = written(claim(run, SPEC), 1, run_id(run), mixture(1.0, 2.0))
    found, told = Found(path, checkpoint_folder._verify(path), ()), Warnings()
    checkpoint.restore(
        found,
        None,
        mixture(*weights),
        found.manifest.data,
        Ranks(0, 1, torch.device("cpu"), None),  # type: ignore[arg-type]
        told,
    )
    assert told == codes


def test_starting_over_sets_them_all_aside(run: RunDirectory) -> None:
    paths, told = saved(run, 1, 2), Warnings()
    assert checkpoint.newest_to_resume(run, SPEC, told, start_over=True) is None
    assert told == []
    assert sorted(path.name for path in paths[0].parent.glob("step-*")) == [
        "step-000001.superseded",
        "step-000002.superseded",
    ]


NONE, BOTH = Rounded(blocks=0, numel=0), Rounded(blocks=3, numel=2_000_000)


def codes(before: dict[str, str], now: dict[str, str], rounded: Rounded) -> list[str]:
    ours = {"offload__mode": "superoffload"}
    saved = support.manifest(5, spec_of("tiny", **{**ours, **before}), ranks=2)
    found: list[str] = []
    spec = spec_of("tiny", **{**ours, **now})
    _warn_of_rounding(saved, spec, rounded, lambda code, message, suggestion: found.append(code))
    return found


@pytest.mark.parametrize("states", ["bf16-moments", "int8-moments"])
def test_another_format_and_the_same_one(states: str) -> None:
    compact = {"offload__states": states}
    assert codes({}, {}, NONE) == codes(compact, compact, NONE) == []
    assert codes({}, compact, BOTH) == codes(compact, {}, NONE) == ["states-format-changed"]
    assert codes(compact, compact, BOTH) == ["moments-rounded", "blocks-rounded-again"]


def test_without_offload_moments_are_fp32_whatever_the_spec_says() -> None:
    compact = {"offload__states": "int8-moments"}
    assert codes(compact | {"offload__mode": "gpu"}, compact, BOTH) == ["states-format-changed"]
    assert codes(compact | {"offload__mode": "gpu"}, {}, NONE) == []


def test_moments_that_begin_anew_are_all_there_is_to_say() -> None:
    assert codes({"offload__engine": "deepspeed"}, {}, Rounded(blocks=0, numel=0, restarted=5)) == [
        "moments-restarted"
    ]
