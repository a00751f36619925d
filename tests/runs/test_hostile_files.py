"""Readers skip what is wrong with files of a run, in bounded time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.runs import RunDirectory, RunReader, log_readers, new_attempt, read_spec
from so_tui.runs import state as control
from so_tui.runs.liveness import concluded
from so_tui.runs.records import OutcomeCode, RunState, decode_metric, decode_sample
from so_tui.runs.segments import segments
from so_tui.runs.state import read_state
from tests.support.hostile_files import link_device, make_sparse
from tests.support.problems import rejected
from tests.support.records import append_records, step_record
from tests.support.waiting import LIMIT_S

WARNING = b'{"kind":"warning","attempt":1,"time":1.0,"message":"m"%s}'


@pytest.mark.parametrize(
    "line",
    [
        WARNING % (b',"x":' + b"[" * 100_000 + b"]" * 100_000),
        WARNING.replace(b'"m"', b'"\xff"') % b"",
        WARNING.replace(b"1.0", b"1e300") % b"",
        WARNING.replace(b"1.0", b"-1") % b"",
        WARNING.replace(b"1.0", b'"nan"') % b"",
        WARNING.replace(b':1,"time', b":" + b"9" * 5000 + b',"time') % b"",
        b'{"kind":"resumed_from_step","attempt":1,"time":1,"step":-5}',
        b'{"kind":"resumed_from_step","attempt":1,"time":1,"step":9223372036854775808}',
        b"\0" * 100,
    ],
)
def test_a_hostile_record_is_skipped(line: bytes) -> None:
    assert decode_metric(WARNING % b"") is not None
    assert decode_metric(line) is None
    assert decode_sample(line) is None


@pytest.mark.parametrize("make", [os.mkfifo, link_device, make_sparse])
def test_hostile_file_holds_up_no_reader(make: Callable[[Path], None], run: RunDirectory) -> None:
    append_records(run, *map(step_record, range(1, 201)))
    make(run.metrics_dir / "000002.jsonl")
    run.samples_dir("host").mkdir()
    make(run.samples_dir("host") / "raw-000001.jsonl")
    make(run.log_path(new_attempt(run), "host"))
    begun = time.monotonic()
    reader = RunReader(run)
    while reader.poll().more:
        assert time.monotonic() - begun < LIMIT_S
    reader.poll()
    assert reader.metrics.latest == step_record(200)
    log_readers(run)[0].tail(10)
    unwatched = RunState(name=run.name, state="training", attempt=1)
    assert concluded(run, unwatched).code is OutcomeCode.UNOBSERVED
    run.state_path.unlink()
    make(run.state_path)
    with rejected("unreadable-state"):
        read_state(run)
    assert main(["runs"]) == 0
    assert time.monotonic() - begun < LIMIT_S


STATE = b'{"name":"r","state":"training",%s}'


@pytest.mark.parametrize(
    "content",
    [
        *(b"[" * 100_000, b'{"name":"\xff"}', b"", b"{", b"{}", b"9" * 5000),
        *(STATE % b'"started":1e300', STATE % b'"ended":-1.0', STATE % b'"step":-5'),
        STATE % b'"total_steps":9223372036854775808',
    ],
)
def test_a_hostile_file_of_a_run_is_the_usual_error(content: bytes, run: RunDirectory) -> None:
    run.state_path.write_bytes(STATE % b'"step":5')
    assert read_state(run).step == 5
    run.state_path.write_bytes(content)
    with rejected("unreadable-state"):
        read_state(run)
    (run.control_dir / "stop").write_bytes(content)
    assert control.details(run, "stop") is None
    run.spec_path.write_bytes(content)
    with rejected("unreadable-spec"):
        read_spec(run)


def test_odd_names_of_attempts_and_segments_are_skipped(run: RunDirectory) -> None:
    for name in ("²", "٣", "-1", "1" * 200):
        (run.attempts_dir / name).mkdir()
        (run.metrics_dir / f"{name}.jsonl").touch()
    assert segments(run.metrics_dir) == {}
    assert main(["runs"]) == 0


@pytest.mark.parametrize("host", ["../../../etc/x", "/etc/passwd", "a\0b"])
def test_a_hosts_name_leads_nowhere_out_of_the_run(host: str, run: RunDirectory) -> None:
    for path in (run.log_path(1, host), run.samples_dir(host)):
        assert run.path in path.parents
        assert ".." not in path.parts
        assert not path.exists()
