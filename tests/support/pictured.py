"""What the pictures of the screens show: runs, and what helper processes would answer."""

from __future__ import annotations

import os
import queue
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from so_tui.doctor import Finding
from so_tui.launch.helper_jobs import DataPreview, Progress
from so_tui.launch.supervisor.samples import HostProcess
from so_tui.machine.types import Machine
from so_tui.runs import RunDirectory
from so_tui.runs.listing import RunNotes, write_notes
from so_tui.runs.records import PhaseRecord
from so_tui.runs.state import read_state
from so_tui.spec import RunSpec
from so_tui.spec.generation import Answer, Event, Loaded, Piece, Prompt, Sampling
from so_tui.ui.chart_metrics import HARDWARE, samples_of
from so_tui.ui.charts.series import Axis
from so_tui.ui.machine.host import WINDOW_S
from so_tui.ui.snapshot import CORES, MEMORY, HostView, LoadStore
from so_tui.units import GIB
from so_tui.validation.report import Report
from tests.support.make_run import plan_for, sample, write_run
from tests.support.records import append_records, change_state

NOW = 1_800_000_000.0


_ANSWERS = Path(__file__).parents[1] / "data"
_KNOWN = msgspec.json.decode((_ANSWERS / "pictured.json").read_bytes())
FINDINGS = msgspec.convert(_KNOWN["findings"], tuple[Finding, ...])
DATA = msgspec.json.decode((_ANSWERS / "data_preview.json").read_bytes(), type=DataPreview)


def write_runs(folder: Path, patch: pytest.MonkeyPatch) -> None:
    for name, made in _KNOWN["runs"].items():
        options = {"seconds_of_samples": 60, **made}
        now = NOW - options.pop("ago_s", 5.0)
        patch.setattr("time.time", lambda now=now: now)
        run = write_run(folder, name=name, now=now, **options)
        os.utime(run.spec_path, (now, now))  # the list is sorted by it
        if made["state"] == "finished":
            write_notes(run, RunNotes(note="longer warm-up", tags=("paper",)))
        if not made["steps"]:
            _load(run)


def _load(run: RunDirectory) -> None:
    """Replace what a run recorded by that of one on its way to its first step."""
    state = read_state(run)
    began = NOW - 95
    for path in run.metrics_dir.iterdir():
        path.unlink()
    binding = "[INFO] binding rank 0 to cores 0-71, node 0"
    weights = "Loading weights:  50%|#####     | 3/6"
    run.log_path(state.attempt, state.host).write_text(f"{binding}\n{weights}\n")
    loading = partial(PhaseRecord, attempt=state.attempt, phase="loading")
    stages = (("ranks", 9), ("data", 14), ("weights", 17))
    file = "model-00003-of-00006.safetensors"
    append_records(
        run,
        *(loading(time=began + after_s, stage=stage) for stage, after_s in stages),
        loading(time=began + 70, stage="weights", done=3, total=6, detail=file),
        attempt=state.attempt,
    )
    change_state(run, state="loading", started=began, attempt_started=began, checks_s=4.2)


class FixedMonitor:
    """Stands in for the monitor of this host: the same minutes, whenever it is asked."""

    def __init__(self, machine: Machine) -> None:
        chance = random.Random(5)
        plan = plan_for(machine, "qwen3-14b", len(machine.gpus), 5000)
        store = LoadStore()
        store.want((*samples_of(HARDWARE), CORES, *MEMORY))
        times = [NOW - second for second in range(int(WINDOW_S), -1, -10)]
        for at in times:
            store.append("", newest := sample(chance, 0, at, machine, plan))
        cpus = {node.id: node.cpus for node in machine.numa_nodes}
        axis = Axis("time", times[0], times[-1], times[0])
        view = store.view({"": newest}, cpus)
        self._view = HostView(view, tuple(_processes(machine)), axis)

    def poll(self) -> HostView:
        return self._view

    def close(self) -> None: ...


def _processes(machine: Machine) -> Iterator[HostProcess]:
    for gpu in machine.gpus:
        cores = gpu.cpus
        yield HostProcess(
            4100 + gpu.index,
            "python",
            "ada",
            6.8,
            11 * GIB,
            cores[65:],
            {gpu.index: 78 * GIB},
            ("python", "-m", "so_tui_trainer", "/home/ada/runs/qwen3-14b"),
        )
    for gpu in machine.gpus:
        yield HostProcess(
            4200 + gpu.index,
            "python",
            "ada",
            60.3 + gpu.index,
            84 * GIB,
            gpu.cpus[:65],
            {},
            ("python", "superoffload/worker.py"),
        )
    command = ("rsync", "-a", "/home", "backup:/srv")
    yield HostProcess(917, "rsync", "backup", 0.9, GIB // 8, (), {}, command)


def preview_data(
    _spec: RunSpec, _rows: int, _cancel: object, **_: object
) -> Iterator[Progress | DataPreview]:
    """Answer as the helper process does about the data of ``tiny``."""
    yield Progress("tokenised 355 of 355 rows", 355, 355)
    yield DATA


class FixedModel:
    """Stands in for the helper process that has a model: it answers one question, and ends."""

    def __init__(self, *_: object) -> None:
        self._asked: queue.SimpleQueue[Sequence[Prompt]] = queue.SimpleQueue()

    def ask(self, prompts: Sequence[Prompt], _: Sampling) -> int:
        self._asked.put(prompts)
        return 1

    def events(self) -> Iterator[Event]:
        yield msgspec.convert(_KNOWN["loaded"], Loaded)
        answers = {each.side: each for each in msgspec.convert(_KNOWN["answers"], list[Answer])}
        for prompt in self._asked.get(timeout=60):
            answer = answers[prompt.side]
            yield Piece(number=1, side=prompt.side, text=answer.text)
            yield answer

    def close(self) -> None: ...


def validation_report() -> Report:
    """Return the report of a machine whose validation has come to its last part."""
    content = (_ANSWERS / "validation_report.json").read_bytes()
    return msgspec.json.decode(content, type=Report)
