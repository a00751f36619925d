"""Whole checkpoints of an engine of one rank: which are used, verified and removed."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

import superoffload
from so_tui.runs import RunDirectory, state, write_state
from so_tui.runs.records import RunState
from so_tui.spec import RunSpec
from so_tui.spec.run_spec import CheckpointSpec
from so_tui_trainer import checkpoint, checkpoint_folder
from so_tui_trainer.failures import SUPERSEDED, TrainingError
from so_tui_trainer.loop import Control, _refuse_if_superseded
from so_tui_trainer.ranks import Ranks
from tests.support import engine as support
from tests.support.problems import coded, raising


@pytest.fixture(scope="module")
def one_rank() -> Ranks:
    support.ensure_process_group()
    return Ranks(0, 1, torch.device("cpu"), torch.distributed.new_group(backend="gloo"))


def spec(keep: int = 2) -> RunSpec:
    return replace(support.spec("superoffload", 0.5), checkpoint=CheckpointSpec(keep=keep))


def save(made: Any, folder: Path, step: int, ranks: Ranks, run: RunSpec) -> Path:
    manifest = support.manifest(step, run)
    saving = checkpoint.Saving(
        made, manifest, folder, ranks, 1, background=False, due_step=None, check=lambda: None
    )
    return Path(saving.wait().path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(folder: Path) -> checkpoint_folder.Found:
    found = checkpoint_folder.newest(folder)
    assert found is not None
    return found


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_bit(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_damaged_checkpoints_are_named_and_passed_over(tmp_path: Path, one_rank: Ranks) -> None:
    run = spec(keep=7)
    with support.engine(run) as made:
        paths = [save(made, tmp_path, step, one_rank, run) for step in range(5, 40, 5)]
        manifest = checkpoint_folder.read_manifest(paths[6])
        assert checkpoint_folder.newest(tmp_path) == (paths[6], manifest, ())
        optimizer = [path / "optimizer" for path in paths]
        cut_short(optimizer[6] / "rank_00000.states")
        (paths[5] / "checkpoint.json").write_text('{"step":')
        (paths[4] / "random.rank0.msgpack").unlink()
        states = optimizer[3] / "rank_00000.states"
        states.write_bytes(bytes(states.stat().st_size))
        flip_bit(paths[2] / "random.rank0.msgpack", 2000)
        record = optimizer[1] / "rank_00000.json"
        flip_bit(record, record.read_bytes().index(b'"numel": ') + 9)
        found = newest(tmp_path)
        assert (found.path, found.manifest.step) == (paths[0], 5)
        assert [damage.path for damage in found.damaged] == paths[:0:-1]
        for damage, code, file in zip(
            found.damaged,
            ("torn", "unreadable", "unreadable", "checksum", "checksum", "checksum"),
            ("0.states", "checkpoint.json", "0.msgpack", "0.states", "0.msgpack", "00000.json"),
            strict=True,
        ):
            assert damage.code == code
            assert file in damage.reason
        assert checkpoint_folder.set_aside(found.damaged[0].path).name == "step-000035.damaged"
        # Checkpoints set aside are ignored, even if the same step is saved and damaged again.
        cut_short(save(made, tmp_path, 35, one_rank, run) / "checkpoint.json")
        assert checkpoint_folder.set_aside(paths[6]).name == "step-000035.damaged.2"
        cut_short(paths[0] / "checkpoint.json")
        with coded(TrainingError, "checkpoints-unreadable", match="step-000030: "):
            checkpoint_folder.newest(tmp_path)
    assert checkpoint_folder.newest(tmp_path / "nowhere") is None


def test_older_checkpoints_stay_until_a_new_is_verified(tmp_path: Path, one_rank: Ranks) -> None:
    run = spec(keep=1)
    with support.engine(run) as made:
        first = save(made, tmp_path, 1, one_rank, run)
        partial = checkpoint_folder.begin(tmp_path, 2)
        superoffload.save_state(made, checkpoint_folder.optimizer_folder(partial))
        states = checkpoint_folder.optimizer_folder(partial) / "rank_00000.states"
        states.write_bytes(bytes(states.stat().st_size))  # as if the disk had lost the data
        with coded(superoffload.OffloadError, "checksum"):
            checkpoint_folder.complete(partial, support.manifest(2, run))
        assert first.name in names(tmp_path)
        found = newest(tmp_path)
        assert found.path == first
        checkpoint_folder.set_aside(found.damaged[0].path)
        third = save(made, tmp_path, 3, one_rank, run)
        assert names(tmp_path) == ["step-000002.damaged", third.name]


@pytest.mark.slow
def test_a_checkpoint_restores_all_and_leftovers_go(tmp_path: Path, one_rank: Ranks) -> None:
    run = spec()
    data = support.batches(4)
    with support.engine(run) as made:
        support.train(made, data[:2])
        path = save(made, tmp_path, 2, one_rank, run)
        drawn = torch.rand(3)
        losses = support.train(made, data[2:])
        leftover = checkpoint_folder.optimizer_folder(checkpoint_folder.begin(tmp_path, 3))
        (leftover / "rank_00000.states").write_bytes(b"half")
        checkpoint._load(made, path, checkpoint_folder.read_manifest(path), one_rank)
        assert torch.equal(torch.rand(3), drawn)
        assert support.train(made, data[2:]) == losses
        save(made, tmp_path, 4, one_rank, run)
        assert names(tmp_path) == ["step-000002", "step-000004"]


def test_a_checkpoint_without_disk_space_is_refused(tmp_path: Path) -> None:
    with coded(TrainingError, "disk-full", match=r"checkpoint.folder = \S+new: .*1,000,000 TB"):
        checkpoint_folder.make_room(tmp_path / "new", 10**18, "checkpoint.folder")


@pytest.mark.slow
def test_a_checkpoint_replaced_while_read_is_not_damaged(tmp_path: Path, one_rank: Ranks) -> None:
    run = spec(keep=1)
    with support.engine(run) as made:
        model = save(made, tmp_path / "model", 1, one_rank, run)
    folder, end = tmp_path / "run", time.monotonic() + 2
    folder.mkdir()
    shutil.copytree(model, folder / "step-000001")

    def go_on() -> None:
        """Save and remove checkpoints all the time, as a run does."""
        for step in itertools.count(2):
            shutil.copytree(model, folder / "new.partial")
            manifest = replace(checkpoint_folder.read_manifest(model), step=step)
            (folder / "new.partial" / "checkpoint.json").write_bytes(msgspec.json.encode(manifest))
            (folder / "new.partial").rename(folder / f"step-{step:06d}")
            shutil.rmtree((folder / f"step-{step - 1:06d}").rename(folder / "old.partial"))
            if time.monotonic() > end:
                return

    other = threading.Thread(target=go_on)
    other.start()
    while other.is_alive():
        assert not newest(folder).damaged
    other.join()


def polled(watched: Control, times: int) -> list[frozenset[str]]:
    return [watched.poll() for _ in range(times)]


NOTHING: frozenset[str] = frozenset()


def test_the_clock_requests_a_checkpoint_of_the_next_step(
    tmp_path: Path, one_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("so_tui_trainer.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    run = RunDirectory(tmp_path)
    watched = Control(run, one_rank, attempt=1, every_s=20.0)
    now[0] += 300  # the model is loaded, which is no training
    assert polled(watched, 2) == [NOTHING, NOTHING]
    now[0] += 20
    assert polled(watched, 3) == [NOTHING, {"checkpoint"}, NOTHING]
    now[0] += 15
    watched.saved()  # for another reason, which starts a whole new interval
    now[0] += 10
    assert polled(watched, 2) == [NOTHING, NOTHING]
    state.request(run, "checkpoint")
    assert polled(watched, 3) == [NOTHING, {"checkpoint"}, NOTHING]
    watched.close()


@pytest.mark.parametrize("failing", ["stat", "unlink"])
def test_a_file_system_that_is_away_costs_no_training(
    failing: str, tmp_path: Path, one_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    watched = Control(run, one_rank, attempt=1, every_s=0.0)
    state.request(run, "checkpoint")
    away = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, failing, raising(away))
        before = polled(watched, 2)
    assert before == [NOTHING, NOTHING]
    assert polled(watched, 3) == [NOTHING, {"checkpoint"}, NOTHING]
    watched.close()


def test_an_attempt_ends_once_a_newer_one_has_been_started(
    tmp_path: Path, one_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.control_dir.mkdir()
    monkeypatch.setattr("so_tui_trainer.loop._NEWER_CHECK_S", 0.0)
    watched = Control(run, one_rank, attempt=1, every_s=0.0)
    for attempt in (0, 1):
        write_state(run, RunState(name="r", state="training", attempt=attempt))
        assert watched.poll() == NOTHING
    write_state(run, RunState(name="r", state="training", attempt=2))
    with coded(TrainingError, SUPERSEDED):
        watched.poll()
    watched.close()


def test_a_superseded_attempt_makes_no_checkpoint_valid(tmp_path: Path, one_rank: Ranks) -> None:
    """The newer one may be writing the same step: its files stay."""
    directory, run = RunDirectory(tmp_path / "run"), spec()
    directory.path.mkdir()
    folder = tmp_path / "checkpoints"
    write_state(directory, RunState(name="r", state="training", attempt=1))
    with support.engine(run) as made:
        support.train(made, support.batches(1))

        def saving() -> checkpoint.Saving:
            check = partial(_refuse_if_superseded, directory, 1)
            return checkpoint.Saving(
                made,
                support.manifest(1, run),
                folder,
                one_rank,
                1,
                background=True,
                due_step=None,
                check=check,
            )

        first, drawn = saving(), torch.rand(3)
        path = Path(first.wait().path)
        checkpoint._load(made, path, checkpoint_folder.read_manifest(path), one_rank)
        assert torch.equal(torch.rand(3), drawn), "the random state is that of the step"
        shutil.rmtree(folder)
        late = saving()
        write_state(directory, RunState(name="r", state="training", attempt=2))
        with coded(TrainingError, SUPERSEDED):
            late.wait()
    assert names(folder) == ["step-000001.partial"]
