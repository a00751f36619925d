"""Tokenised once: by whom, into what, and what happens when it is disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from so_tui.plan.workload import seen
from so_tui.spec import RunSpec
from so_tui_trainer import session
from so_tui_trainer.data import tokens
from so_tui_trainer.data.batches import _width
from so_tui_trainer.data.documents import intact, read
from so_tui_trainer.data.tokens import _row_shares, load_tokenizer, prepare
from so_tui_trainer.failures import TrainingError
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.recorder import Recorder
from tests.support.launching import tiny
from tests.support.problems import coded, refusal
from tests.support.rows import alpaca, lines, spec_of, turns


def rows_file(
    folder: Path, count: int = 3, name: str = "rows.jsonl", output: str = "Answer"
) -> Path:
    return lines(folder, alpaca(*(f"{output} {n}." for n in range(count))), name)


def folders_of(folder: Path, *specs: RunSpec) -> set[Path]:
    return {prepare(spec, folder / "cache") for spec in specs}


def test_equal_content_is_tokenised_once_whatever_it_is_called(tmp_path: Path) -> None:
    (folder,) = folders_of(tmp_path, spec_of(rows_file(tmp_path)))
    written = folder.stat().st_mtime_ns
    again = spec_of(rows_file(tmp_path, name="again.jsonl"))
    assert folders_of(tmp_path, again) == {folder}
    assert folder.stat().st_mtime_ns == written


def test_plans_are_told_what_the_data_are(tmp_path: Path) -> None:
    def workload(spec: RunSpec) -> Any:
        prepare(spec, tmp_path / "cache")
        found = seen(spec)
        assert found is not None
        return found.workload

    spec = spec_of(rows_file(tmp_path))
    found = workload(spec)
    documents = read(prepare(spec, tmp_path / "cache"), spec.data)
    lengths = documents.lengths
    mean = float((lengths**2).sum() / lengths.sum())
    assert found.attended_tokens == pytest.approx(mean)
    assert found.trained_share == pytest.approx(documents.trained.mean())
    assert (found.useful_share, found.row_shares) == (1.0, ())
    rows_file(tmp_path, output="A longer answer to question")  # other rows under the same name
    assert workload(spec).attended_tokens > mean
    alone = workload(spec_of(rows_file(tmp_path), data__packing="false"))
    assert alone.useful_share == pytest.approx(lengths.mean() / spec.data.sequence_length)


@pytest.mark.parametrize("micro_batch", ["1", "4"])
def test_the_width_of_rows_is_foretold(micro_batch: str) -> None:
    spec = tiny(data__packing="false", train__micro_batch=micro_batch, data__sequence_length="64")
    lengths = np.random.default_rng(1).integers(3, 64, 400)
    shares = dict(_row_shares(lengths, 64))
    drawn = np.random.default_rng(2).choice(lengths, (4_000, int(micro_batch)))
    widths = [_width(each, spec, end_to_end=False) for each in drawn]
    assert shares[int(micro_batch)] == pytest.approx(np.mean(widths) / 64, rel=0.02)


def test_other_data_names_or_options_are_another_entry(tmp_path: Path) -> None:
    path = rows_file(tmp_path)
    options = {"data__loss": "all", "data__sequence_length": "64", "data__split": "train[:2]"}
    specs = [spec_of(path), *(spec_of(path, **{name: options[name]}) for name in options)]
    specs.append(spec_of(rows_file(tmp_path, name="other.jsonl", output="Other")))
    rows = {"text": "Trained.", "title": "Not."}, {"title": "Trained.", "text": "Not."}
    specs += [spec_of(lines(tmp_path, [row], f"{n}.jsonl")) for n, row in enumerate(rows)]
    assert len(folders_of(tmp_path, *specs)) == 7


def test_a_file_that_changed_and_kept_its_time_is_read_again(tmp_path: Path) -> None:
    folders = set()
    for output in ("One", "Two"):
        file = rows_file(tmp_path, output=output)
        folder = rows_file(tmp_path / "more", output=output).parent
        for path in (file, folder / "rows.jsonl"):
            os.utime(path, (1_700_000_000,) * 2)
        folders |= folders_of(tmp_path, spec_of(file), spec_of(folder))
    assert len(folders) == 2  # file and folder have the same rows


def test_another_chat_template_is_another_entry(tmp_path: Path) -> None:
    tokenizer, specs = load_tokenizer(tiny().model), []
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    for name, tokenizer.chat_template in (("templated", template), ("plain", None)):
        tokenizer.save_pretrained(tmp_path / name)
        specs.append(spec_of(rows_file(tmp_path), model__tokenizer=str(tmp_path / name)))
    assert len(folders_of(tmp_path, *specs)) == 2


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda folder: os.truncate(folder / "tokens.bin", 5),
    "changed": lambda folder: flip(folder / "trained.bin"),
    "file gone": lambda folder: (folder / "offsets.bin").unlink(),
    "no info": lambda folder: (folder / "info.json").unlink(),
    "half an info": lambda folder: (folder / "info.json").write_text('{"tallies": ['),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    spec = spec_of(rows_file(tmp_path))
    folder = prepare(spec, tmp_path / "cache")
    before = read(folder, spec.data).tokens.tolist()
    DAMAGES[damage](folder)
    assert not intact(folder)
    assert prepare(spec, tmp_path / "cache") == folder
    assert intact(folder)
    assert read(folder, spec.data).tokens.tolist() == before
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


@pytest.mark.slow
def test_runs_that_start_at_once_share_one_entry(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.support.rows import spec_of\n"
        "from so_tui_trainer.data.tokens import prepare\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(prepare(spec_of(sys.argv[1]), Path(sys.argv[2])))"
    )
    argv = [sys.executable, "-c", code, str(rows_file(tmp_path, 500)), str(tmp_path / "cache")]
    own, pipe = os.environ | {"HF_HOME": str(tmp_path / "hub")}, subprocess.PIPE
    runs = [subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=own, text=True) for _ in range(2)]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    answers = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    (folder,) = (tmp_path / "cache").iterdir()
    assert answers == {f"{folder}\n"}
    assert intact(folder)


@pytest.fixture
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_TASK_ROWS", 70)
    monkeypatch.setattr(tokens, "_processes_for", lambda rows: 2)


@pytest.mark.slow
def test_several_processes_agree_with_one(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    spec = spec_of(rows_file(tmp_path, 500))
    alone = prepare(spec, tmp_path / "alone")
    request.getfixturevalue("_two_processes")
    told: list[tuple[int, int]] = []
    shared = prepare(spec, tmp_path / "shared", lambda rows, total: told.append((rows, total)))
    for name in ("tokens", "trained", "offsets", "rows"):
        assert (alone / f"{name}.bin").read_bytes() == (shared / f"{name}.bin").read_bytes()
    assert (told[0], told[-1]) == ((70, 500), (500, 500))


@pytest.mark.slow
@pytest.mark.usefixtures("_two_processes")
def test_a_bad_row_in_another_process_is_named(tmp_path: Path) -> None:
    good, bad = ({"messages": turns("a", roles=f"{role} x")} for role in ("assistant", "narrator"))
    path = lines(tmp_path, [*[good] * 85, bad])
    problem = refusal(lambda: prepare(spec_of(path), tmp_path / "cache"))
    assert (problem.code, problem.value) == ("data-row-unreadable", f"{path}, row 86")
    assert not list((tmp_path / "cache").iterdir())


def test_what_killed_processes_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    old, new = tmp_path / "cache" / "abc.partial-1", tmp_path / "cache" / "abc.partial-2"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 100_000,) * 2)
    prepare(spec_of(rows_file(tmp_path)), tmp_path / "cache")
    assert (new.is_dir(), old.exists()) == (True, False)


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = refusal(lambda: prepare(spec_of(rows_file(tmp_path)), tmp_path / "file"))
    assert (problem.code, problem.field) == ("cache-unwritable", "XDG_CACHE_HOME")


def test_a_full_disk_of_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised = tokens._tokenised

    def full(*given: Any) -> Any:
        (given[2] / "0-0.tokens").symlink_to("/dev/full")
        return tokenised(*given)

    monkeypatch.setattr(tokens, "_tokenised", full)
    problem = refusal(lambda: prepare(spec_of(rows_file(tmp_path)), tmp_path / "cache"))
    assert (problem.code, problem.field) == ("cache-unwritable", "XDG_CACHE_HOME")


def test_a_rank_that_does_not_see_the_first_ones_cache_says_so(
    tmp_path: Path, single_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "prepare", lambda *_, **__: tmp_path / "on-another-host")
    with coded(TrainingError, "cache-not-shared"):
        session._read_training_data(tiny(), single_rank, Recorder(None, 1))
