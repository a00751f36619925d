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
GPU = GpuSample(index=0, busy_percent=40, clock_mhz=1980)
KNOWN = (
    RunState(name="r", state="training", step=3, total_steps=9),
    step_record(3, loss=float("nan")),
    Sample(attempt=1, time=1.0, interval_s=1.0, nodes=(NODE,), gpus=(GPU,)),
)
LINE = re.compile(r'[a-z_]+\{([a-z_]+="(\\["\\]|[^"\\\n])*",?)+\} (-?[0-9.e+-]+|NaN|[+-]Inf)')


@pytest.mark.parametrize("planted", [False, True])
def test_the_collector_reads_the_file_which_goes_at_the_end(planted: bool, tmp_path: Path) -> None:
    """A link with its name is not followed."""
    other, folder = tmp_path / "other", tmp_path / "figures"
    other.write_text("kept")
    folder.mkdir()
    names = ("so-tui-r-h.prom", ".so-tui-r-h.prom.tmp") if planted else ()
    for name in names:
        (folder / name).symlink_to(other)
    file = Textfile("r", "h")
    before = os.umask(0o077)
    try:
        for _ in range(2):
            file.publish(str(folder), *KNOWN)
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert path.name == "so-tui-r-h.prom"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o644
    assert path.read_text() == _exposition("r", "h", *KNOWN)
    assert other.read_text() == "kept"
    file.publish("", *KNOWN)
    assert list(folder.iterdir()) == []


def test_missing_folder_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default there is none, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    file = Textfile("r", "h")
    file.publish(Settings().prometheus.folder, *KNOWN)
    assert (list(tmp_path.iterdir()), capsys.readouterr().err) == ([], "")
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
    for name, value in (
        ("so_tui_loss{", " NaN"),
        ("so_tui_run_memory_bytes{", f" {1 << 30}"),
        ("so_tui_node_cpu_busy_ratio{", " 0.75"),
        ("so_tui_gpu_clock_hertz{", " 1980000000.0"),
    ):
        assert [line for line in lines if line.startswith(name) and line.endswith(value)], name
