"""Figures of a live run as a file for node_exporter's textfile collector. Off unless the user's
settings name its folder.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from so_tui.launch.command import log_line
from so_tui.runs.records import RunState, Sample, StepRecord
from so_tui.trust.text import printable_line


def _exposition(
    run: str, host: str, state: RunState, step: StepRecord | None, sample: Sample
) -> str:
    """Return what is known of a run in the text format of Prometheus, version 0.0.4."""
    lines: dict[str, list[str]] = {}
    common = {"run": run, "host": host}
    for name, value, labels in _figures(state, step, sample):
        if value is not None:
            shown = ",".join(
                f'{key}="{_escaped(text)}"' for key, text in {**common, **labels}.items()
            )
            lines.setdefault(name, []).append(f"so_tui_{name}{{{shown}}} {_number(value)}")
    return "".join(
        f"# TYPE so_tui_{name} gauge\n" + "\n".join(rows) + "\n" for name, rows in lines.items()
    )


_OF_STATE = {
    "attempt": "attempt",
    "steps": "step",
    "steps_planned": "total_steps",
    "saved_step": "saved_step",
}
_OF_STEP = {
    "step_time_seconds": "time",
    "loss": "loss",
    "gradient_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "useful_tokens_per_second": "useful_tokens_per_s_total",
    "model_tflops_per_gpu": "model_tflops_per_gpu",
    "mfu_ratio": "mfu",
    "step_seconds": "step_s",
    "gpu_memory_peak_bytes": "gpu_memory_peak_bytes",
    "run_memory_bytes": "host_memory_bytes",
    "redone_steps": "redone_steps",
    "skipped_steps": "skipped_steps",
}
"""Fields of the run's state and of its last step, by the names of their figures."""
_OF_GPU = {
    "gpu_busy_ratio": ("busy_percent", 0.01),
    "gpu_memory_used_bytes": ("memory_used_bytes", 1),
    "gpu_power_watts": ("power_w", 1),
    "gpu_temperature_celsius": ("temperature_c", 1),
    "gpu_clock_hertz": ("clock_mhz", 1e6),
}
"""Fields of a GPU's sample, and what makes one of the figure's unit of them."""


def _figures(
    state: RunState, step: StepRecord | None, sample: Sample
) -> Iterator[tuple[str, float | None, dict[str, str]]]:
    """Yield name, value and labels; a value that is None was not measured."""
    yield "state", 1, {"state": state.state}
    for name, field in _OF_STATE.items():
        yield name, getattr(state, field), {}
    if step is not None:
        for name, field in _OF_STEP.items():
            yield name, getattr(step, field), {}
        for part in ("data", "forward", "backward", "exposed_optimizer", "other"):
            yield "step_part_seconds", getattr(step, f"{part}_s"), {"part": part}
    for node in sample.nodes:
        labels = {"node": str(node.id)}
        busy = sum(node.cores) / (100 * len(node.cores)) if node.cores else None
        yield "node_memory_used_bytes", node.memory_used_bytes, labels
        yield "node_cpu_busy_ratio", busy, labels
    for gpu in sample.gpus:
        for name, (field, unit) in _OF_GPU.items():
            value = getattr(gpu, field)
            yield name, None if value is None else value * unit, {"gpu": str(gpu.index)}


def _escaped(text: str) -> str:
    return printable_line(text).replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


@dataclass
class Textfile:
    """The file of one run on one host, which is replaced with each sample and removed at the
    end.
    """

    _run: str
    _host: str
    _path: Path | None = None
    _error: str = ""

    def publish(
        self, folder: str, state: RunState, step: StepRecord | None, sample: Sample
    ) -> None:
        """Replace the file in a folder, atomically; in none if ``folder`` is empty. A failure is
        logged once.
        """
        path = Path(folder) / f"so-tui-{self._run}-{self._host}.prom" if folder else None
        if path != self._path:
            self.remove()
        if path is None:
            return
        temporary = path.with_name(f".{path.name}.tmp")  # the collector reads *.prom
        try:
            temporary.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o644), "w", encoding="utf-8") as file:
                # The umask of a private run would hide it from the collector, which runs as another
                # user.
                os.fchmod(file.fileno(), 0o644)
                file.write(_exposition(self._run, self._host, state, step, sample))
            temporary.replace(path)
            self._path, self._error = path, ""
        except OSError as error:
            if str(error) != self._error:
                log_line(f"no figures for Prometheus: {error}")
            self._error = str(error)

    def remove(self) -> None:
        """Remove the file: the collector would show its figures for ever."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None
