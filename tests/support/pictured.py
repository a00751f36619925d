"""What the pictures of the screens show: runs, and what helper processes would answer."""

from __future__ import annotations

import os
import queue
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.helper_jobs import DataPreview, Progress
from so_tui.launch.supervisor.samples import HostProcess
from so_tui.machine.doctor import Finding
from so_tui.machine.types import Machine
from so_tui.runs import MetricsWriter, RunDirectory, write_state
from so_tui.runs.listing import RunNotes, write_notes
from so_tui.runs.records import PhaseRecord, State
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

NOW = 1_800_000_000.0
HOUR_S = 3600.0


@dataclass(frozen=True)
class Run:
    """A run that is made from records."""

    state: State
    steps: int
    ago_s: float = 5.0
    """Seconds since its last step."""
    preset: str = "qwen3-14b"
    total: int = 5000
    samples_s: int = 60
    seed: int = 7


RUNS = {
    "qwen3-14b-a": Run("training", 1240, samples_s=600),
    "phi-4-a": Run("loading", 0, 30.0, preset="phi-4", total=3000, samples_s=12),
    "qwen3-14b-b": Run("failed", 1240, 2 * HOUR_S, samples_s=300, seed=8),
    "llama-3.1-8b-long": Run("finished", 900, 9 * HOUR_S, preset="llama-3.1-8b", total=900, seed=9),
    "phi-4-lost": Run("lost", 430, 26 * HOUR_S, preset="phi-4", total=3000, seed=10),
    "llama-3.1-8b-short": Run(
        "stopped", 210, 50 * HOUR_S, preset="llama-3.1-8b", total=900, seed=11
    ),
}
"""By name, newest first."""
NOTE = RunNotes(note="longer warm-up", tags=("paper",))


def write_runs(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Write every run of ``RUNS``, each at its time."""
    for name, made in RUNS.items():
        now = NOW - made.ago_s
        patch.setattr("time.time", lambda now=now: now)
        run = write_run(
            folder,
            name=name,
            preset=made.preset,
            state=made.state,
            steps=made.steps,
            total=made.total,
            seconds_of_samples=made.samples_s,
            seed=made.seed,
            now=now,
        )
        os.utime(run.spec_path, (now, now))  # the list is sorted by it
        if made.state == "finished":
            write_notes(run, NOTE)
        if not made.steps:
            _load(run)


def _load(run: RunDirectory) -> None:
    """Replace what a run recorded by that of one on its way to its first step."""
    state = read_state(run)
    began = NOW - 95
    for path in run.metrics_dir.iterdir():
        path.unlink()
    lines = (
        "[INFO] binding rank 0 to cores 0-71, node 0",
        "Loading weights:  50%|#####     | 3/6",
        "",
    )
    run.log_path(state.attempt, state.host).write_text("\n".join(lines))
    metrics = MetricsWriter(run, state.attempt)
    for stage, after_s in (("ranks", 9), ("data", 14), ("weights", 17)):
        metrics.append(
            PhaseRecord(attempt=state.attempt, time=began + after_s, phase="loading", stage=stage)
        )
    file = "model-00003-of-00006.safetensors"
    metrics.append(
        PhaseRecord(
            attempt=state.attempt,
            time=began + 70,
            phase="loading",
            stage="weights",
            done=3,
            total=6,
            detail=file,
        )
    )
    metrics.close()
    write_state(
        run, replace(state, state="loading", started=began, attempt_started=began, checks_s=4.2)
    )


FINDINGS = (
    Finding(
        code="no-compiler",
        severity="blocks",
        title="no C++ compiler was found",
        evidence="neither c++ nor g++ nor clang++ is in PATH",
        cost="the Adam kernel cannot be built, and no run that offloads starts",
        remedy="Install g++, or load the module of a compiler.",
    ),
    Finding(
        code="numa-balancing",
        severity="warning",
        title="the kernel moves memory between NUMA nodes by itself",
        evidence="/proc/sys/kernel/numa_balancing is 1",
        cost="pages of optimizer states may move to the GPU's memory while Adam reads them",
        remedy="Ask the administrator for `sysctl kernel.numa_balancing=0`.",
    ),
    Finding(
        code="mpam-off",
        severity="note",
        title="cache and memory bandwidth cannot be partitioned",
        evidence="no /sys/fs/resctrl",
        cost="main and Adam cores share both",
        remedy="Mount resctrl on a kernel with MPAM.",
    ),
)


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
        cores = gpu.cpus
        yield HostProcess(
            4100 + gpu.index,
            "python",
            "ada",
            6.8,
            11 * GIB,
            cores[65:],
            {gpu.index: 78 * GIB},
        )
    for gpu in machine.gpus:
        yield HostProcess(
            4200 + gpu.index, "python", "ada", 60.3 + gpu.index, 84 * GIB, gpu.cpus[:65], {}
        )
    yield HostProcess(917, "rsync", "backup", 0.9, GIB // 8, (), {})


_ANSWERS = Path(__file__).parents[1] / "data"
DATA = msgspec.json.decode((_ANSWERS / "data_preview.json").read_bytes(), type=DataPreview)


def preview_data(_spec: RunSpec, _rows: int, _cancel: object) -> Iterator[Progress | DataPreview]:
    """Answer as the helper process does about the data of ``tiny``."""
    yield Progress("tokenised 355 of 355 rows", 355, 355)
    yield DATA


class FixedModel:
    """Stands in for the helper process that has a model: it answers one question, and ends."""

    ANSWERS: ClassVar[dict[Side, tuple[str, Ended]]] = {
        "tuned": (
            (
                "git fetch only downloads new commits. git pull also merges them into the current "
                "branch."
            ),
            "stop",
        ),
        "base": (
            (
                "The difference between git fetch and git pull is that they are both commands. The "
                "difference between"
            ),
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
        models = (
            ModelFacts(side="tuned", name="llama-3.1-8b-long", step=800, parameters=8_030_261_248),
            ModelFacts(side="base", name="meta-llama/Llama-3.1-8B", parameters=8_030_261_248),
        )
        yield Loaded(
            models=models, device="NVIDIA GH200 120GB", layout="the chat template of the tokenizer"
        )
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
