"""Files of a run that anybody may have written: readers skip what is wrong with them, in bounded
time and memory.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from so_tui.runs import MetricsWriter, RunDirectory, RunReader
from so_tui.runs import state as control
from so_tui.runs.index import index_path, segments
from so_tui.runs.liveness import concluded
from so_tui.runs.records import (
    OutcomeCode,
    RunState,
    StepRecord,
    decode_metric,
    decode_sample,
    is_time,
)
from so_tui.runs.state import read_state
from so_tui.spec import InputError
from so_tui.ui.charts.canvas import fit_scale, spans
from so_tui.ui.charts.series import Axis, StepSeries
from tests.support.hostile_files import link_device, make_pipe, make_sparse
from tests.support.waiting import LIMIT_S

Step = Callable[..., StepRecord]

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


def _segment(run: RunDirectory, step: Step) -> Path:
    """Write 200 steps, and return the segment that has them. It has an index."""
    writer = MetricsWriter(run, 1)
    for number in range(200):
        writer.append(step(number + 1))
    writer.close()
    (segment,) = segments(run.metrics_dir).values()
    return segment


def _read_all(run: RunDirectory) -> RunReader:
    """Read a run after a second segment was begun, so that the index of the first one is used."""
    (run.metrics_dir / "000002.jsonl").write_bytes(b"")
    reader = RunReader(run)
    while reader.poll().more:
        pass
    return reader


@pytest.mark.parametrize("make", [make_pipe, link_device, make_sparse])
def test_a_hostile_segment_or_index_does_not_hold_up_a_reader(
    make: Callable[[Path], None], run: RunDirectory, step: Step
) -> None:
    first = _segment(run, step)
    index_path(first).unlink()
    make(index_path(first))
    make(run.metrics_dir / "000002.jsonl")
    folder = run.samples_dir("host")
    folder.mkdir()
    make(folder / "raw-000001.jsonl")
    begun = time.monotonic()
    reader = RunReader(run)
    while reader.poll().more:
        assert time.monotonic() - begun < LIMIT_S
    reader.poll()
    assert reader.latest is not None
    assert reader.latest.step == 200
    assert (
        concluded(run, RunState(name=run.name, state="training", attempt=1)).code
        is OutcomeCode.UNOBSERVED
    )
    assert time.monotonic() - begun < LIMIT_S


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", 10**9),
        ("rows", -1),
        ("columns", ["first"]),
        ("segment_bytes", -1),
        ("segment_bytes", 2**40),
        ("events", "x"),
    ],
)
def test_an_index_that_lies_is_not_used(
    key: str, value: object, run: RunDirectory, step: Step
) -> None:
    first = _segment(run, step)
    header, _, columns = index_path(first).read_bytes().partition(b"\n")
    changed = {**msgspec.json.decode(header), key: value}
    index_path(first).write_bytes(msgspec.json.encode(changed) + b"\n" + columns)
    reader = _read_all(run)
    assert [record.step for record in reader.recent(2)] == [199, 200]
    assert sum(reader.metrics.blocks(["loss"])["records"]) == 200


def test_columns_of_an_index_that_are_damaged_are_not_used(run: RunDirectory, step: Step) -> None:
    first = _segment(run, step)
    header, _, columns = index_path(first).read_bytes().partition(b"\n")
    index_path(first).write_bytes(header + b"\n" + b"\xff" * len(columns))
    reader = _read_all(run)
    assert [record.step for record in reader.recent(2)] == [199, 200]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0, 1e308, 2.0**60])
@pytest.mark.parametrize(
    "column",
    [
        None,
        "first",
        "records",
        "offset",
        "loss.finite",
        "loss.sum",
        "loss.min",
        "loss.ema90",
        "time.last",
        "time.min",
    ],
)
def test_an_index_with_any_numbers_does_no_harm(
    column: str | None, value: float, run: RunDirectory, step: Step
) -> None:
    """Its checksum is right: an owner may write what they like about their own run."""
    first = _segment(run, step)
    header, _, content = index_path(first).read_bytes().partition(b"\n")
    changed, numbers = msgspec.json.decode(header), array("d", content)
    rows = changed["rows"]
    for at, name in enumerate(changed["columns"]):
        if name == column or (column is None and at > 3):
            numbers[at * rows : (at + 1) * rows] = array("d", [value]) * rows
    changed["crc32"] = zlib.crc32(numbers)
    index_path(first).write_bytes(msgspec.json.encode(changed) + b"\n" + numbers.tobytes())
    reader = _read_all(run)
    assert [record.step for record in reader.recent(2)] == [199, 200]
    series = StepSeries(50, ema=0.9 if column == "loss.ema90" else None)
    series._add_blocks(reader.metrics.blocks((*series.metrics, "time"), weights=(0.9,)))
    line = series.line("loss mean", "main", series.lengths)
    found, _ = spans(line, Axis("step", 0, 200), 40)
    assert fit_scale([found]).high > fit_scale([found]).low or value > 1e300
    assert series.series["loss"].missing(line.length) >= 0
    assert all(is_time(time) for time in (*series.times, series.begin[1]))


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"name":"\xff"}', b"", b"{}", b"9" * 5000])
def test_a_hostile_state_or_request_is_the_usual_error(content: bytes, run: RunDirectory) -> None:
    run.state_path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_state(run)
    assert [problem.code for problem in caught.value.problems] == ["unreadable-state"]
    run.control_dir.mkdir(exist_ok=True)
    (run.control_dir / "stop").write_bytes(content)
    assert control.details(run, "stop") is None


@pytest.mark.parametrize(
    "change", [{"started": 1e300}, {"ended": -1.0}, {"step": -5}, {"total_steps": 2**63}]
)
def test_a_state_with_an_impossible_number_is_the_usual_error(
    change: dict[str, object], run: RunDirectory
) -> None:
    state = msgspec.json.decode(run.state_path.read_bytes())
    run.state_path.write_bytes(msgspec.json.encode({**state, **change}))
    with pytest.raises(InputError):
        read_state(run)


@pytest.mark.parametrize("make", [make_pipe, link_device, make_sparse])
def test_a_state_that_is_no_small_regular_file_is_the_usual_error(
    make: Callable[[Path], None], run: RunDirectory
) -> None:
    run.state_path.unlink(missing_ok=True)
    make(run.state_path)
    with pytest.raises(InputError):
        read_state(run)


@pytest.mark.parametrize("host", ["../../../etc/x", "/etc/passwd", "a\0b"])
def test_a_hosts_name_leads_nowhere_out_of_the_run(host: str, run: RunDirectory) -> None:
    for path in (run.log_path(1, host), run.samples_dir(host)):
        assert run.path in path.parents
        assert ".." not in path.parts
        assert not path.exists()
