"""What the pictures of the screens show: runs, and what helper processes would answer."""

from __future__ import annotations

import os
import queue
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.helper_jobs import DataPreview, Progress
from so_tui.launch.supervisor.samples import HostProcess
from so_tui.machine.doctor import Finding
from so_tui.machine.types import Machine
from so_tui.runs import RunDirectory
from so_tui.runs.listing import RunNotes, write_notes
from so_tui.runs.records import PhaseRecord
from so_tui.runs.state import read_state
from so_tui.spec import RunSpec
from so_tui.spec.generation import (
    Answer,
    Ended,
    Event,
    Loaded,
    ModelFacts,
    Piece,
    Prompt,
    Sampling,
    Side,
)
from so_tui.ui.chart_metrics import HARDWARE, samples_of
from so_tui.ui.charts.series import Axis
from so_tui.ui.machine.host import WINDOW_S
from so_tui.ui.snapshot import CORES, MEMORY, HostView, LoadStore
from so_tui.validation.report import Report
from tests.support.make_run import GIB, plan_for, sample, write_run
from tests.support.records import append_records, change_state

NOW = 1_800_000_000.0
HOUR_S = 3600.0


LLAMA: dict[str, Any] = {"preset": "llama-3.1-8b", "total": 900}
PHI: dict[str, Any] = {"preset": "phi-4", "total": 3000}
RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "qwen3-14b-a": (5 / HOUR_S, {"state": "training", "steps": 1240, "seconds_of_samples": 600}),
    "phi-4-a": (30 / HOUR_S, {"state": "loading", "steps": 0, "seconds_of_samples": 12, **PHI}),
    "qwen3-14b-b": (2, {"state": "failed", "steps": 1240, "seconds_of_samples": 300, "seed": 8}),
    "llama-3.1-8b-long": (9, {"state": "finished", "steps": 900, "seed": 9, **LLAMA}),
    "phi-4-lost": (26, {"state": "lost", "steps": 430, "seed": 10, **PHI}),
    "llama-3.1-8b-short": (50, {"state": "stopped", "steps": 210, "seed": 11, **LLAMA}),
}
"""By name, newest first: hours since the last step, and how the run is made from records."""
NOTE = RunNotes(note="longer warm-up", tags=("paper",))


def write_runs(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Write every run of ``RUNS``, each at its time."""
    for name, (ago_h, made) in RUNS.items():
        now = NOW - ago_h * HOUR_S
        patch.setattr("time.time", lambda now=now: now)
        plain: dict[str, Any] = {"total": 5000, "seconds_of_samples": 60, "seed": 7}
        run = write_run(folder, name=name, now=now, **(plain | made))
        os.utime(run.spec_path, (now, now))  # the list is sorted by it
        if made["state"] == "finished":
            write_notes(run, NOTE)
        if not made["steps"]:
            _load(run)


def _load(run: RunDirectory) -> None:
    """Replace what a run recorded by that of one on its way to its first step."""
    state, began = read_state(run), NOW - 95
    for path in run.metrics_dir.iterdir():
        path.unlink()
    log = "[INFO] binding rank 0 to cores 0-71, node 0\nLoading weights:  50%|#####     | 3/6\n"
    run.log_path(state.attempt, state.host).write_text(log)
    half = {"done": 3, "total": 6, "detail": "model-00003-of-00006.safetensors"}
    for stage, after_s, more in (
        ("ranks", 9, {}),
        ("data", 14, {}),
        ("weights", 17, {}),
        ("weights", 70, half),
    ):
        phase = PhaseRecord(
            attempt=state.attempt, time=began + after_s, phase="loading", stage=stage
        )
        append_records(run, replace(phase, **more), attempt=state.attempt)
    change_state(run, state="loading", started=began, attempt_started=began, checks_s=4.2)


_ANSWERS = Path(__file__).parents[1] / "data"
FINDINGS = msgspec.json.decode((_ANSWERS / "findings.json").read_bytes(), type=tuple[Finding, ...])


class FixedMonitor:
    """Stands in for the monitor of this host: the same minutes, whenever it is asked."""

    def __init__(self, machine: Machine) -> None:
        self._view = host_view(machine)

    def poll(self) -> HostView:
        """Return what is known."""
        return self._view

    def close(self) -> None:
        """End."""


def host_view(machine: Machine) -> HostView:
    """Return what four superchips did in the last ten minutes."""
    chance = random.Random(5)
    plan = plan_for(machine, "qwen3-14b", len(machine.gpus), 5000)
    store = LoadStore()
    store.want((*samples_of(HARDWARE), CORES, *MEMORY))
    times = [NOW - second for second in range(int(WINDOW_S), -1, -10)]
    for at in times:
        store.append("", newest := sample(chance, 0, at, machine, plan))
    cpus = {node.id: node.cpus for node in machine.numa_nodes}
    axis = Axis("time", times[0], times[-1], times[0])
    return HostView(store.view({"": newest}, cpus), tuple(_processes(machine)), axis)


def _processes(machine: Machine) -> Iterator[HostProcess]:
    for gpu in machine.gpus:
        used = {gpu.index: 78 * GIB}
        yield HostProcess(4100 + gpu.index, "python", "ada", 6.8, 11 * GIB, gpu.cpus[65:], used)
    for gpu in machine.gpus:
        load, cpus = 60.3 + gpu.index, gpu.cpus[:65]
        yield HostProcess(4200 + gpu.index, "python", "ada", load, 84 * GIB, cpus, {})
    yield HostProcess(917, "rsync", "backup", 0.9, GIB // 8, (), {})


DATA = msgspec.json.decode((_ANSWERS / "data_preview.json").read_bytes(), type=DataPreview)


def preview_data(_spec: RunSpec, _rows: int, _cancel: object) -> Iterator[Progress | DataPreview]:
    """Answer as the helper process does about the data of ``tiny``."""
    yield Progress("tokenised 355 of 355 rows", 355, 355)
    yield DATA


class FixedModel:
    """Stands in for the helper process that has a model: it answers one question, and ends."""

    ANSWERS: ClassVar[dict[Side, tuple[str, Ended]]] = {
        "tuned": (
            "git fetch only downloads new commits. git pull also merges them into the current "
            "branch.",
            "stop",
        ),
        "base": (
            "The difference between git fetch and git pull is that they are both commands. The "
            "difference between",
            "length",
        ),
    }

    def __init__(self, *_: object) -> None:
        self._asked: queue.SimpleQueue[Sequence[Prompt]] = queue.SimpleQueue()

    def ask(self, prompts: Sequence[Prompt], _: Sampling) -> int:
        """Ask."""
        self._asked.put(prompts)
        return 1

    def events(self) -> Iterator[Event]:
        """Yield what happens."""
        base = ModelFacts(side="base", name="meta-llama/Llama-3.1-8B", parameters=8_030_261_248)
        tuned = replace(base, side="tuned", name="llama-3.1-8b-long", step=800)
        layout = "the chat template of the tokenizer"
        yield Loaded(models=(tuned, base), device="NVIDIA GH200 120GB", layout=layout)
        for prompt in self._asked.get(timeout=60):
            text, ended = self.ANSWERS[prompt.side]
            yield Piece(number=1, side=prompt.side, text=text)
            yield Answer(number=1, side=prompt.side, text=text, tokens=24, seconds=0.6, ended=ended)

    def close(self) -> None:
        """End."""


def validation_report() -> Report:
    """Return the report of a machine whose validation has come to its last part."""
    content = (_ANSWERS / "validation_report.json").read_bytes()
    return msgspec.json.decode(content, type=Report)
