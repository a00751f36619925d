"""Findings 10, 11, 17 and 18: runs of others that are only looked at, and two faults."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.limits import bounded
from benchmarks.attacks.stage import COMMAND_S, PROJECT, Stage, Word
from so_tui.runs import RunDirectory, read_state
from so_tui.runs.results import MOST_S

_LOOKS_BYTES = 512 << 20
"""What a command that only looks at runs may use of memory."""
_SILENCE_S = 45.0


def _foreign_run(stage: Stage, name: str = "theirs") -> Path:
    """Give the attacker a run without checkpoints."""
    run = stage.run_of(stage.other, f"runs/{name}")
    shutil.rmtree(run / "checkpoints")
    return run


@attack("10a", "files of a foreign run that are links to themselves")
def _(stage: Stage) -> Verdict:
    run = _foreign_run(stage)
    files = [path for path in run.rglob("*") if path.suffix in (".json", ".jsonl", ".log")]
    folders = [path for path in run.iterdir() if path.is_dir()]
    found = []
    for path in (*files, *folders):
        path.rename(aside := stage.folder / "aside")
        path.symlink_to(path)
        given: list[tuple[Word, ...]] = [
            ("logs", run),
            ("watch", run, "--plain"),
            ("compare", run, run),
            ("export-metrics", run, "--to", stage.owner.home / "out.csv"),
            ("runs",),
        ]
        for (name, *_), _, said in stage.each(given, "--runs-dir", run.parent):
            if "Traceback" in said:
                found.append(f"{name}: {path.name}")
        path.unlink()
        aside.rename(path)
    return judged(found, f"tracebacks of {found}", "no traceback")


@attack("10b", "the group cannot read a run with SO_TUI_SHARE=group in a setgid folder")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    victim = stage.train("--runs-dir", runs, SO_TUI_SHARE="group")
    victim.wait(lambda: any(runs.glob("*/attempts/001/launch.json")), 60)
    files = [path for path in runs.rglob("*") if path != runs]
    if not files:
        raise RuntimeError(f"there is no run: {victim.text}")
    wrong = [path.name for path in files if path.stat().st_gid != PROJECT]
    return judged(wrong, f"not of the group: {wrong}", f"{len(files)} files are")


def _looks(stage: Stage, longest_s: float = 8.0) -> Verdict:
    given = ("runs", "--runs-dir", stage.scratch / "runs")
    return bounded(stage, *given, longest_s=longest_s, largest_bytes=_LOOKS_BYTES)


@attack("11a", "runs: four foreign runs with a segment of line ends")
def _(stage: Stage) -> Verdict:
    for number in range(4):
        run = _foreign_run(stage, f"run{number}")
        (run / "metrics" / "000002.jsonl").write_bytes(b"\n" * (100 << 20))
    stage.published(stage.scratch / "runs")
    return _looks(stage)


@attack("11b", "runs: a foreign run of 100,000 segments")
def _(stage: Stage) -> Verdict:
    run = _foreign_run(stage)
    line = (run / "metrics" / "000001.jsonl").read_bytes().splitlines(keepends=True)[-1]
    for number in range(2, 100_000):
        (run / "metrics" / f"{number:06d}.jsonl").write_bytes(line)
    stage.published(stage.scratch / "runs")
    return _looks(stage)


@attack("11c", "runs: 20,000 foreign runs")
def _(stage: Stage) -> Verdict:
    run = _foreign_run(stage)
    for number in range(20_000):
        folder = run.with_name(f"run-{number}")
        (folder / "metrics").mkdir(parents=True)
        for name in ("run.json", "spec.json", "state.json", "metrics/000001.jsonl"):
            os.link(run / name, folder / name)
    stage.published(stage.scratch / "runs")
    return _looks(stage, MOST_S + 5)


@attack("17", "the message about a damaged last checkpoint names no remedy that works")
def _(stage: Stage) -> Verdict:
    run = stage.run_of(stage.owner, "runs/mine")
    oldest, newest = sorted((run / "checkpoints").glob("step-*"))
    shutil.rmtree(oldest)
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    said = stage.said("resume", run, "--plain", "--set", "train.steps=6")
    if "finished at step 6" in said:
        raise RuntimeError("the checkpoint was not damaged")
    wrong = "elsewhere to start anew" in said or "--start-over" not in said
    return judged(wrong, said)


@attack("18", "stop is silent while the supervisor is stopped by SIGSTOP")
def _(stage: Stage) -> Verdict:
    runs = stage.owner.home / "runs"
    given = ("--set", "train.steps=4000", "--runs-dir", runs)
    stage.train(*given, how="--detach").end()
    run = RunDirectory(next(iter(runs.glob("*/spec.json"))).parent)
    deadline = time.monotonic() + COMMAND_S
    while (state := read_state(run)).state != "training":
        if time.monotonic() > deadline:
            raise RuntimeError(f"it does not train: {state.state}")
        time.sleep(0.5)
    for process in stage.processes(stage.owner, "so_tui supervise"):
        process.send_signal(signal.SIGSTOP)
    victim = stage.so_tui("stop", run.path)

    def told() -> bool:
        return victim.code is not None or len(victim.text.splitlines()) > 1

    victim.wait(told, _SILENCE_S)
    return judged(not told(), f"{_SILENCE_S:.0f} s after {victim.text!r}", victim.text)
