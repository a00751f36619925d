"""Figures for Prometheus: off by default, one file of a run, and names stay in labels."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from so_tui.launch.supervisor.prometheus import Textfile, _exposition
from so_tui.runs.records import GpuSample, NodeSample, RunState, Sample
from so_tui.settings import Settings
from tests.support.records import step_record

NODE = NodeSample(
    id=0, cores=(50, 100), memory_used_bytes=7, memory_total_bytes=9, file_cache_bytes=0
)
KNOWN = (
    RunState(name="r", state="training", step=3, total_steps=9),
    step_record(3, loss=float("nan")),
    Sample(
        attempt=1,
        time=1.0,
        interval_s=1.0,
        nodes=(NODE,),
        gpus=(GpuSample(index=0, busy_percent=40, clock_mhz=1980),),
    ),
)
LINE = re.compile(r'[a-z_]+\{([a-z_]+="(\\["\\]|[^"\\\n])*",?)+\} (-?[0-9.e+-]+|NaN|[+-]Inf)')


def test_nothing_is_written_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Textfile("r", "h").publish(Settings().prometheus.folder, *KNOWN)
    assert list(tmp_path.iterdir()) == []


def test_the_collector_reads_the_file_which_goes_at_the_end(tmp_path: Path) -> None:
    file = Textfile("r", "h")
    before = os.umask(0o077)
    try:
        for _ in range(2):
            file.publish(str(tmp_path), *KNOWN)
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.name == "so-tui-r-h.prom"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.read_text() == _exposition("r", "h", *KNOWN)
    file.publish("", *KNOWN)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in ("so-tui-r-h.prom", ".so-tui-r-h.prom.tmp"):
        (folder / name).symlink_to(other)
    Textfile("r", "h").publish(str(folder), *KNOWN)
    assert other.read_text() == "kept"
    assert (folder / "so-tui-r-h.prom").read_text() == _exposition("r", "h", *KNOWN)


def test_missing_folder_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Textfile("r", "h")
    for _ in range(3):
        file.publish(str(tmp_path / "away"), *KNOWN)
    file.remove()
    assert capsys.readouterr().err.count("no figures for Prometheus") == 1


def test_names_stay_in_their_labels() -> None:
    lines = _exposition('a"\\\n\x1b{}', "h", *KNOWN).splitlines()
    assert len(lines) > 20
    for line in lines:
        assert line.startswith("# TYPE so_tui_") or LINE.fullmatch(line), line
        assert line.isprintable()
    assert any(line.startswith("so_tui_loss{") and line.endswith(" NaN") for line in lines)
    assert any("node_cpu_busy_ratio" in line and line.endswith(" 0.75") for line in lines)
    assert any("gpu_clock_hertz" in line and line.endswith(" 1980000000.0") for line in lines)
