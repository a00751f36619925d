"""Findings 13 to 16: helpers that outlive their command, spin, or grow without end."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import pty
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.stage import Command, Stage, Word, changed

_HELPER = "so_tui_trainer.tools."
_FOREVER = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
_PLAIN = "{% for each in messages %}{{ each.content }}{{ eos_token }}{% endfor %}"
_BUSY_S = 8.0
"""CPU seconds: more than a helper's imports take."""
_GRACE_S = 10.0
_LARGEST_BYTES = 4 << 30
_LONGEST_S = 60.0
"""CPU seconds, because the host may be busy."""
_WAIT_S = 300.0
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], "
    "sys.argv[1:])"
)


def _helpers(stage: Stage) -> list[psutil.Process]:
    return stage.processes(stage.owner, _HELPER)


def _used_s(processes: list[psutil.Process]) -> float:
    used = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def _looping(stage: Stage, command: str) -> Sequence[Word]:
    """Return the arguments of a command whose helper renders a template that does not end."""
    asked = f"{{% if messages[-1].content == 'hello' %}}{_FOREVER}{{% endif %}}" + _PLAIN
    template = asked if command == "chat" else _FOREVER
    model = str(stage.exported(template=template))
    tokenizer = ["--set", f"model.tokenizer={model}"]
    return {
        "generate": ["generate", model, "--prompt", "hello"],
        "data": ["data", "tiny", *tokenizer],
        "run": ["run", "tiny", "--plain", *tokenizer],
        "chat": ["chat", model],
    }[command]


def _outlives(number: str, command: str, received: signal.Signals) -> None:
    @attack(number, f"helper of `{command}` continues after {received.name}")
    def _(stage: Stage) -> Verdict:
        victim = stage.so_tui(*_looping(stage, command))
        if not victim.wait(lambda: _used_s(_helpers(stage)) > _BUSY_S, _WAIT_S):
            return judged(False, "", f"it ended by itself; {victim.text}")
        victim.process.send_signal(received)
        deadline = time.monotonic() + _GRACE_S
        while (left := _helpers(stage)) and time.monotonic() < deadline:
            time.sleep(0.2)
        pids = [process.pid for process in left]
        return judged(left, f"{pids} live {_GRACE_S:.0f} s later", "the helper ended")


_outlives("13a", "generate", signal.SIGTERM)
_outlives("13b", "generate", signal.SIGHUP)
_outlives("13c", "generate", signal.SIGKILL)
_outlives("13d", "data", signal.SIGTERM)
_outlives("13e", "data", signal.SIGKILL)
_outlives("13f", "run", signal.SIGKILL)


@contextlib.contextmanager
def on_terminal(
    stage: Stage, *arguments: Word, controls: bool
) -> Iterator[tuple[Command, int, bytearray]]:
    """Start so-tui on a terminal, which may be its controlling one, and yield our end of it and
    what is shown.
    """
    mine, theirs = pty.openpty()
    os.fchown(theirs, stage.owner.uid, -1)
    python = stage.owner.interpreter
    takes = [python, "-I", "-c", _TAKE_TERMINAL] if controls else []
    program = [*takes, python, "-P", "-m", "so_tui", *arguments]
    victim = stage.begin(stage.owner, *program, terminal=theirs, TERM="xterm-256color")
    os.close(theirs)
    shown = bytearray()
    threading.Thread(target=_drain, args=(mine, shown), daemon=True).start()
    try:
        yield victim, mine, shown
    finally:
        with contextlib.suppress(OSError):
            os.close(mine)


def _drain(terminal: int, shown: bytearray) -> None:
    with contextlib.suppress(OSError):
        while text := os.read(terminal, 1 << 16):
            shown += text


@attack("13g", "chat: Esc twice neither ends a looping helper nor leaves")
def _(stage: Stage) -> Verdict:
    given = _looping(stage, "chat")
    with on_terminal(stage, *given, controls=True) as (victim, terminal, _):
        victim.wait(lambda: _used_s(_helpers(stage)) > 2, _WAIT_S)
        before = -1.0
        while (now := _used_s(_helpers(stage))) != before:  # until it waits for a question
            before = now
            time.sleep(3)
        os.write(terminal, b"hello\r")
        victim.wait(lambda: _used_s(_helpers(stage)) > before + 3, 60)
        loaded = _used_s(_helpers(stage))
        for _ in range(2):
            os.write(terminal, b"\x1b")
            time.sleep(2)
        time.sleep(3)
        began = _used_s(_helpers(stage))
        time.sleep(3)
        still = _used_s(_helpers(stage)) - began
    if loaded <= before + 2:
        raise RuntimeError("the question never reached the helper")
    return judged(still > 0.3, f"it used {still:.1f} s of the next 3 s", "the helper ended")


@attack("14", "chat spins when its terminal is gone without SIGHUP")
def _(stage: Stage) -> Verdict:
    model = stage.exported("model", stage.owner)
    with on_terminal(stage, "chat", model, controls=False) as (victim, terminal, _):
        mine = functools.partial(stage.processes, stage.owner, "so_tui chat")
        victim.wait(lambda: _used_s(mine()) > 1, 60)
        time.sleep(5)
        if victim.process.poll() is not None:
            raise RuntimeError(f"there was no screen: {victim.text}")
        os.close(terminal)
        time.sleep(_GRACE_S)
        before = _used_s(mine())
        time.sleep(5)
        used = _used_s(mine()) - before
    ended = victim.process.poll() is not None
    return judged(used > 0.5, f"it used {used:.1f} s of 5 s", f"ended: {ended}")


def bounded(
    stage: Stage,
    *arguments: Word,
    largest_bytes: int = _LARGEST_BYTES,
    longest_s: float = _LONGEST_S,
) -> Verdict:
    """Run a command, and end it where it has used more than it may."""
    program = (stage.owner.interpreter, "-P", "-m", "so_tui", *arguments)
    victim = stage.begin(stage.owner, "choom", "-n", "1000", "--", *program)
    began, most, used = time.monotonic(), 0, 0.0
    while victim.process.poll() is None and time.monotonic() < began + _WAIT_S:
        living, now = stage.processes(stage.owner), 0
        for process in living:
            with contextlib.suppress(psutil.Error):
                now += process.memory_info().rss
        most, used = max(most, now), max(used, _used_s(living))
        if most > largest_bytes or used > longest_s:
            break
        time.sleep(0.05)
    ended = victim.process.poll() is not None
    stage.kill_all()
    figures = f"{most / 1e9:.1f} GB, {used:.0f} s of processors"
    too_much = most > largest_bytes or used > longest_s or not ended
    return judged(too_much, f"{figures}, ended: {ended}", f"{figures}; {victim.text}")


def _grows(number: str, title: str) -> Callable[[Callable[[Stage], Path]], None]:
    """Register a function that makes a data source."""

    def registered(make: Callable[[Stage], Path]) -> None:
        @attack(number, f"data without bounds: {title}")
        def _(stage: Stage) -> Verdict:
            stage.scratch.joinpath("data").mkdir()
            source = make(stage)
            stage.published(stage.scratch / "data")
            return bounded(stage, "data", "tiny", "--set", f"data.source={source}")

    return registered


@attack("15a", "data without bounds: a chat template that fills memory")
def _(stage: Stage) -> Verdict:
    template = (
        "{% set all = namespace(texts=[]) %}{% for a in range(99999) %}"
        "{% set all.texts = all.texts + ['x' * 9999999 ~ a] %}{% endfor %}"
    )
    model = stage.exported(template=template)
    return bounded(stage, "data", "tiny", "--set", f"model.tokenizer={model}")


@attack("15b", "data without bounds: a tokenizer whose normaliser multiplies")
def _(stage: Stage) -> Verdict:
    model = stage.model("model")
    tenfold = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 10}
    normalizer = {"type": "Sequence", "normalizers": [tenfold] * 8}
    changed(model / "tokenizer.json", normalizer=normalizer)
    return bounded(stage, "data", "tiny", "--set", f"model.tokenizer={model}")


@_grows("15c", "a Parquet file of one text, five million times")
def _(stage: Stage) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = stage.scratch / "data/rows.parquet"
    rows = pa.DictionaryArray.from_arrays(pa.array([0]).take([0] * 5_000_000), ["x" * 1000])
    writing: Any = {"store_schema": False, "compression": "zstd", "row_group_size": 5_000_000}
    pq.write_table(pa.table({"text": rows}), path, **writing)
    return path


def _gzipped(path: Path, head: bytes, block: bytes, total_bytes: int) -> Path:
    """Write a file of repeated blocks, each of which is a member of its own."""
    part = gzip.compress(block)
    with path.open("wb") as file:
        file.write(gzip.compress(head))
        for _ in range(total_bytes // len(block)):
            file.write(part)
    return path


_MEGABYTE = 1 << 20


@_grows("15d", "4 GB of CSV in a gzip file of 4 MB")
def _(stage: Stage) -> Path:
    block = (b"x" * 1023 + b"\n") * 16_000
    return _gzipped(stage.scratch / "data/rows.csv.gz", b"text\n", block, 4000 * _MEGABYTE)


@_grows("15e", "5 GB of JSON Lines in a gzip file of 5 MB")
def _(stage: Stage) -> Path:
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    return _gzipped(stage.scratch / "data/rows.jsonl.gz", line, line * 16_000, 5000 * _MEGABYTE)


@_grows("15f", "4 GB of line ends in a gzip file")
def _(stage: Stage) -> Path:
    line = json.dumps({"text": "a row"}).encode() + b"\n"
    path = stage.scratch / "data/rows.jsonl.gz"
    return _gzipped(path, line, b"\n" * 16 * _MEGABYTE, 4000 * _MEGABYTE)


@_grows("15g", "300,000 columns of CSV")
def _(stage: Stage) -> Path:
    names = [f"c{number}" for number in range(300_000)]
    rows = [",".join(["text", *names]), ",".join(["a row", *"1" * len(names)])]
    path = stage.scratch / "data/rows.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


@_grows("15h", "300,000 keys in each row of JSON")
def _(stage: Stage) -> Path:
    path = stage.scratch / "data/rows.jsonl"
    keys = {f"k{number}": number for number in range(300_000)}
    path.write_text((json.dumps({"text": "a row"} | keys) + "\n") * 4)
    return path


@_grows("15i", "40,000 files")
def _(stage: Stage) -> Path:
    folder = stage.scratch / "data"
    for number in range(40_000):
        (folder / f"{number}.jsonl").write_text('{"text": "a row"}\n')
    return folder


@attack("15j", "generate without bounds: a configuration of a million layers")
def _(stage: Stage) -> Verdict:
    model = stage.exported()
    changed(model / "config.json", num_hidden_layers=10**6, layer_types=None)
    return bounded(stage, "generate", model, "--prompt", "hello")


_WRONG = {
    "16a": ("a template's MemoryError", "{{ 'x' * 99999999999999 }}"),
    "16b": ("a template's RecursionError", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    "16c": ("a template's OverflowError", "{{ 'x' * 999999999999999999999999 }}"),
}


def _told(stage: Stage, model: Path) -> Verdict:
    said = stage.said("data", "tiny", "--set", f"model.tokenizer={model}", limit_s=_WAIT_S)
    trace = 'File "' in said or "Traceback" in said or "panicked" in said
    return judged(trace, f"`data` says: {said}", said)


for _number, (_title, _template) in _WRONG.items():

    @attack(_number, f"{_title} causes a traceback")
    def _(stage: Stage, template: str = _template) -> Verdict:
        return _told(stage, stage.exported(template=template))


@attack("16d", "a panic in a tokenizer's Rust causes a traceback")
def _(stage: Stage) -> Verdict:
    model = stage.model("model")
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    changed(model / "tokenizer.json", normalizer=normalizer)
    return _told(stage, model)
