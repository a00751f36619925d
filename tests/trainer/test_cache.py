"""Tokenised once: by whom, into what, and what happens when it is disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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


def spec_of(path: Path, **changes: str) -> RunSpec:
    return tiny(**({"data__source": str(path), "data__format": "auto"} | changes))


def rows_file(
    folder: Path, count: int = 3, name: str = "rows.jsonl", output: str = "Answer"
) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "\n".join(
            json.dumps({"instruction": f"Ask {n}.", "output": f"{output} {n}."})
            for n in range(count)
        )
    )
    return path


def test_equal_content_is_tokenised_once_whatever_it_is_called(tmp_path: Path) -> None:
    folder = prepare(spec_of(rows_file(tmp_path)), tmp_path / "cache")
    written = folder.stat().st_mtime_ns
    assert prepare(spec_of(rows_file(tmp_path, name="again.jsonl")), tmp_path / "cache") == folder
    assert folder.stat().st_mtime_ns == written


def test_plans_are_told_what_the_data_are(tmp_path: Path) -> None:
    spec = spec_of(rows_file(tmp_path))
    documents = read(prepare(spec, tmp_path / "cache"), spec.data)
    found = seen(spec)
    assert found is not None
    lengths = documents.lengths
    assert found.workload.attended_tokens == pytest.approx(
        float((lengths**2).sum() / lengths.sum())
    )
    assert found.workload.trained_share == pytest.approx(documents.trained.mean())
    assert found.workload.useful_share == 1.0
    rows_file(tmp_path, output="A longer answer to question")
    prepare(spec, tmp_path / "cache")
    changed = seen(spec)
    assert changed is not None
    assert changed.workload.attended_tokens > found.workload.attended_tokens, (
        "other rows under the same name"
    )
    alone = spec_of(rows_file(tmp_path), data__packing="false")
    prepare(alone, tmp_path / "cache")
    unpacked = seen(alone)
    assert unpacked is not None
    assert unpacked.workload.useful_share == pytest.approx(
        lengths.mean() / alone.data.sequence_length
    )
    assert not found.workload.row_shares


@pytest.mark.parametrize("micro_batch", ["1", "4"])
def test_the_width_of_rows_is_foretold(micro_batch: str, tmp_path: Path) -> None:
    spec = spec_of(
        rows_file(tmp_path),
        data__packing="false",
        train__micro_batch=micro_batch,
        data__sequence_length="64",
    )
    lengths = np.random.default_rng(1).integers(3, 64, 400)
    shares = dict(_row_shares(lengths, 64))
    drawn = np.random.default_rng(2).choice(lengths, (4_000, int(micro_batch)))
    widths = [_width(each, spec, end_to_end=False) for each in drawn]
    assert shares[int(micro_batch)] == pytest.approx(np.mean(widths) / 64, rel=0.02)


@pytest.mark.parametrize(
    "change",
    [
        {"data__loss": "all"},
        {"data__sequence_length": "64"},
        {"data__split": "train[:2]"},
        {"rows": "Other"},
    ],
)
def test_other_data_or_options_are_another_entry(tmp_path: Path, change: dict[str, str]) -> None:
    folder = prepare(spec_of(rows_file(tmp_path)), tmp_path / "cache")
    path = rows_file(tmp_path, output=change.pop("rows", "Answer"))
    assert prepare(spec_of(path, **change), tmp_path / "cache") != folder


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"instruction": "Ask.", "output": "Yes."}, {"output": "Ask.", "instruction": "Yes."}),
        ({"text": "Trained.", "title": "Not."}, {"title": "Trained.", "text": "Not."}),
        (
            {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]},
            {"conversations": [{"from": role, "value": "a"} for role in ("user", "assistant")]},
        ),
    ],
)
def test_the_same_values_under_other_names_are_another_entry(
    one: dict[str, object], other: dict[str, object], tmp_path: Path
) -> None:
    folders = set()
    for number, row in enumerate((one, other)):
        (path := tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
        folders.add(prepare(spec_of(path), tmp_path / "cache"))
    assert len(folders) == 2


def test_a_file_that_changed_and_kept_its_time_is_read_again(tmp_path: Path) -> None:
    folders = set()
    for output in ("One", "Two"):
        for source in (
            rows_file(tmp_path, output=output),
            rows_file(tmp_path, name="more/rows.jsonl", output=output).parent,
        ):
            for file in source.rglob("*") if source.is_dir() else [source]:
                os.utime(file, (1_700_000_000,) * 2)
            folders.add(prepare(spec_of(source), tmp_path / "cache"))
    assert len(folders) == 2  # file and folder have the same rows


def test_another_chat_template_is_another_entry(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny().model)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    folders = set()
    for name, tokenizer.chat_template in (("templated", template), ("plain", None)):
        tokenizer.save_pretrained(tmp_path / name)
        spec = spec_of(rows_file(tmp_path), model__tokenizer=str(tmp_path / name))
        folders.add(prepare(spec, tmp_path / "cache"))
    assert len(folders) == 2


def cut_off(folder: Path) -> None:
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(5)


def flip(folder: Path) -> None:
    with (folder / "trained.bin").open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut off": cut_off,
    "changed": flip,
    "file gone": lambda folder: (folder / "offsets.bin").unlink(),
    "no info": lambda folder: (folder / "info.json").unlink(),
    "half an info": lambda folder: (folder / "info.json").write_text('{"tallies": ['),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    spec = spec_of(rows_file(tmp_path))
    folder = prepare(spec, tmp_path / "cache")
    before = np.array(read(folder, spec.data).tokens)
    DAMAGES[damage](folder)
    assert not intact(folder)
    assert prepare(spec, tmp_path / "cache") == folder
    assert intact(folder)
    assert read(folder, spec.data).tokens.tolist() == before.tolist()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


@pytest.mark.slow
def test_runs_that_start_at_once_share_one_entry(tmp_path: Path) -> None:
    path = rows_file(tmp_path, 500)
    code = (
        "import sys; from pathlib import Path; from so_tui.spec import find_preset, with_values;"
        "from so_tui_trainer.data.tokens import prepare;"
        "spec = with_values(find_preset('tiny').spec, {'data.source': sys.argv[1]});"
        "print('ready', flush=True); sys.stdin.readline(); print(prepare(spec, Path(sys.argv[2])))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(tmp_path / "cache")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "HF_HOME": str(tmp_path / "hub")},
        )
        for _ in range(2)
    ]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
    for run in runs:
        assert run.stdin is not None
        run.stdin.write(b"go\n")
        run.stdin.flush()
    answers = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    (folder,) = (tmp_path / "cache").iterdir()
    assert answers == {f"{folder}\n".encode()}
    assert intact(folder)


@pytest.mark.slow
def test_several_processes_agree_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(rows_file(tmp_path, 500))
    alone = prepare(spec, tmp_path / "alone")
    monkeypatch.setattr(tokens, "_TASK_ROWS", 70)
    monkeypatch.setattr(tokens, "_processes_for", lambda rows: 2)
    told: list[tuple[int, int]] = []
    shared = prepare(spec, tmp_path / "shared", lambda rows, total: told.append((rows, total)))
    for name in ("tokens", "trained", "offsets", "rows"):
        assert (alone / f"{name}.bin").read_bytes() == (shared / f"{name}.bin").read_bytes()
    assert told[0] == (70, 500)
    assert told[-1] == (500, 500)


@pytest.mark.slow
def test_a_bad_row_in_another_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    good, bad = (
        {"messages": [{"role": role, "content": "a"}]} for role in ("assistant", "narrator")
    )
    path.write_text("\n".join(json.dumps(row) for row in [*[good] * 25, bad]))
    monkeypatch.setattr(tokens, "_TASK_ROWS", 10)
    monkeypatch.setattr(tokens, "_processes_for", lambda rows: 2)
    problem = refusal(lambda: prepare(spec_of(path), tmp_path / "cache"))
    assert (problem.code, problem.value) == ("data-row-unreadable", f"{path}, row 26")
    assert not list((tmp_path / "cache").iterdir())


def test_processes_follow_cores_and_rows() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert tokens._processes_for(100) == 1
    assert tokens._processes_for(10_000_000) == min(allowed, 32)


def test_what_killed_processes_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    old, new = tmp_path / "cache" / "abc.partial-1", tmp_path / "cache" / "abc.partial-2"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 100_000,) * 2)
    prepare(spec_of(rows_file(tmp_path)), tmp_path / "cache")
    assert new.is_dir()
    assert not old.exists()


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = refusal(lambda: prepare(spec_of(rows_file(tmp_path)), tmp_path / "file"))
    assert (problem.code, problem.field) == ("cache-unwritable", "XDG_CACHE_HOME")


def test_a_rank_that_does_not_see_the_first_ones_cache_says_so(
    tmp_path: Path, single_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "so_tui_trainer.data.tokens.prepare", lambda *_, **__: tmp_path / "on-another-host"
    )
    with coded(TrainingError, "cache-not-shared"):
        session._read_training_data(tiny(), single_rank, Recorder(None, 1))
