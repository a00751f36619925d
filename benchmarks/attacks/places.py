"""Attacks n13 to n20: places that several users reach, locks, links, requests and moments."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import struct
import threading
import time
from pathlib import Path
from typing import ClassVar

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.code import _looked, _own_preset
from benchmarks.attacks.foreign import _private
from benchmarks.attacks.others import last_line
from benchmarks.attacks.stage import PROJECT, Stage

_COMMAND_S = 120.0
_OWNER, _USER, _GROUP, _MASK, _OTHER = 1, 2, 4, 16, 32
_NOBODY = 0xFFFFFFFF


def _allow(path: Path, user: int, owner: int = 7, *, default: bool = False) -> None:
    """Let a user write by an access control list; mode bits show that as a right of the group."""
    entries = (
        (_OWNER, owner, _NOBODY),
        (_USER, 7, user),
        (_GROUP, 0, _NOBODY),
        (_MASK, 7, _NOBODY),
        (_OTHER, 0, _NOBODY),
    )
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, f"system.posix_acl_{'default' if default else 'access'}", value)


@attack("n13a", "settings in a folder that a list, and not its mode, lets another user write")
def _(stage: Stage) -> Verdict:
    home = stage.owner.home
    model = stage.model(stage.scratch / "own", stage.other, "listed")
    preset = _own_preset(stage, str(model))
    preset.chmod(0o660)
    _allow(preset, stage.other.uid)
    stage.so_tui("trust", str(model), "--yes").end(_COMMAND_S)
    done = stage.other.python("import os,sys; print(os.access(sys.argv[1], os.W_OK))", str(preset))
    home.chmod(0o755)
    done = stage.other.python("import os,sys; print(os.access(sys.argv[1], os.W_OK))", str(preset))
    if "True" not in done.stdout:
        raise RuntimeError("the list has no effect")
    return _looked(stage, "listed", "data", str(preset))


@attack("n13b", "a run that a list lets another user write is resumed")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    run = stage.run_of(stage.owner, runs / "mine")
    for path in (run, *run.rglob("*")):
        _allow(path, stage.other.uid)
    done = stage.other.python(
        "import os,sys; print(os.access(sys.argv[1], os.W_OK))", str(run / "spec.json")
    )
    if "True" not in done.stdout:
        raise RuntimeError("the list has no effect")
    given = ("resume", str(run), "--plain", "--set", "train.steps=5")
    victim = stage.so_tui(*given)
    said = victim.end(_COMMAND_S)
    return judged("finished at step 5" in said, "it trained on", last_line(victim))


def _below_a_default_list(stage: Stage, mode: str, **variables: str) -> str:
    """Let the owner train in a folder whose default list lets the other user write. Return what of
    the run the other user may open so (``R_OK`` or ``W_OK``); empty if nothing.
    """
    runs = stage.owner.home / "runs"
    runs.mkdir()
    stage.owner.give(runs)
    stage.owner.home.chmod(0o711)
    _allow(runs, stage.other.uid, default=True)
    runs.chmod(0o711)
    stage.train("--runs-dir", str(runs), **variables).end(_COMMAND_S)
    if not list(runs.rglob("spec.json")):
        raise RuntimeError("there is no run")
    found = stage.other.python(
        f"import os,sys; print(*[p for p in sys.argv[1:] if os.access(p, os.{mode})])",
        *map(str, runs.rglob("*")),
    )
    return found.stdout.strip()


@attack("n13c", "a run made below a folder whose default list lets another user write")
def _(stage: Stage) -> Verdict:
    found = _below_a_default_list(stage, "R_OK")
    return judged(found, f"others read {found[:200]}", "no other user reads or writes it")


@attack("n13d", "the same with SO_TUI_SHARE=group: who is on the list writes")
def _(stage: Stage) -> Verdict:
    found = _below_a_default_list(stage, "W_OK", SO_TUI_SHARE="group")
    return judged(found, f"others write {found[:200]}", "no other user writes it")


_HOLD = """
import fcntl, os, sys, time
held = []
for path in sys.argv[1:]:
    try:
        file = os.open(path, os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(path)
    except OSError as error:
        print(error, flush=True)
print("held", held, flush=True)
time.sleep(600)
"""


@attack("n14a", "a member of the group that reads a run locks its files: resume, stop")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    stage.train("--runs-dir", str(runs), SO_TUI_SHARE="group", group=PROJECT).end(400)
    run = next(path.parent for path in runs.glob("*/spec.json"))
    files = [str(path) for path in run.rglob("*") if path.is_file()]
    files += [str(path) for path in (run, *run.rglob("*")) if path.is_dir()]
    holder = stage.begin(stage.other, stage.other.interpreter, "-c", _HOLD, *files)
    holder.wait(lambda: "held [" in holder.text, 20)
    held = holder.text.rpartition("held")[2]
    began = time.monotonic()
    victim = stage.so_tui("resume", str(run), "--plain", "--set", "train.steps=6")
    said = victim.end(90)
    took = time.monotonic() - began
    names = [Path(word.strip(" '[]\n")).name for word in held.split(",")]
    return judged(
        "finished at step 6" not in said,
        f"{took:.0f} s, {len(names)} held, {'supervisor.lock' in names}: {last_line(victim)}",
        f"it trained on; held {names[:5]}",
    )


@attack("n14b", "locks of a shared HF_HOME held for ever: data, run")
def _(stage: Stage) -> Verdict:
    home = stage.shared("huggingface", 0o2777)
    preset = stage.preset(stage.owner.home / "p.toml", stage.owner)
    given = {"HF_HOME": str(home)}
    rows = stage.owner.home / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a row"}) + "\n")
    stage.owner.give(rows)
    command = ("data", str(preset), "--set", f"data.source={rows}")
    first = stage.so_tui(*command, umask=0o002, **given)
    first.end(_COMMAND_S)
    files = [str(path) for path in home.rglob("*") if path.is_file()]
    shutil.rmtree(stage.owner.home / ".cache", ignore_errors=True)
    holder = stage.begin(stage.other, stage.other.interpreter, "-c", _HOLD, *files)
    holder.wait(lambda: "held" in holder.text, 20)
    began = time.monotonic()
    victim = stage.so_tui(*command, **given)
    said = victim.end(60)
    took = time.monotonic() - began
    return judged(took > 55, f"it hung for {took:.0f} s: {said[-100:]}", f"{took:.0f} s; {files}")


def _copied(stage: Stage, state: str) -> tuple[Path, Path, str]:
    """Let the owner copy a run of the attacker's that says it is in the queue, or trains."""
    theirs = stage.run_of(stage.other, stage.scratch / "theirs")
    path, _ = stage.slurm()
    record = stage.scratch / "cancelled"
    bin_folder = Path(path.partition(":")[0])
    lines = f'#!/bin/sh\necho "$0 $@" >> {record}\n'
    (bin_folder / "scancel").write_text(lines)
    for name in ("squeue", "sacct"):
        (bin_folder / name).write_text(
            f'#!/bin/sh\necho "$0 $@" >> {record}\necho "7|RUNNING|mine|n1|None|/x"\n'
        )
    tree = json.loads((theirs / "state.json").read_text())
    tree |= {"state": state, "ended": None, "host": ""}
    (theirs / "state.json").write_text(json.dumps(tree))
    submission = {"v": 1, "job": "7", "cluster": "here", "partition": "p", "time": time.time()}
    submission |= {"job_id": "7", "submitted": time.time()}
    (theirs / "attempts" / "001" / "submission.json").write_text(json.dumps(submission))
    stage.published(theirs, stage.other)
    mine = stage.owner.home / "runs" / "copied"
    stage.owner.python(
        "import shutil,sys; shutil.copytree(sys.argv[1], sys.argv[2])", str(theirs), str(mine)
    )
    return mine, record, path


@attack("n15a", "a run in a queue, copied from another user, names a job of the owner's: stop")
def _(stage: Stage) -> Verdict:
    mine, record, path = _copied(stage, "queued")
    victim = stage.so_tui("stop", str(mine), "--grace", "3", PATH=path)
    victim.end(60)
    said = record.read_text() if record.exists() else ""
    return judged(
        "scancel" in said, f"{said.splitlines()[-1:]}", f"{said[-200:]} {last_line(victim)}"
    )


def _planted(
    stage: Stage, target: Path, *command: str, folder: Path = Path("/"), text: str = "precious"
) -> Verdict:
    """Run a command that writes where the attacker has put a link to a file of the owner's."""
    before = text
    victim = stage.so_tui(*command, folder=folder)
    said = victim.end(_COMMAND_S)
    after = (
        target.read_text(errors="replace")
        if target.is_file()
        else sorted(each.name for each in target.iterdir())
    )
    wanted = before if target.is_file() else []
    return judged(
        after != wanted, f"the owner's {target.name} now has {str(after)[:80]}", said[-150:]
    )


@attack("n16a", "export-metrics --to FILE, which is a link of others to a private file")
def _(stage: Stage) -> Verdict:
    shared, target = stage.shared("project"), _private(stage, ".bashrc", "precious")
    stage.run_of(stage.owner, stage.owner.home / "mine")
    (shared / "m.csv").symlink_to(target)
    os.chown(shared / "m.csv", stage.other.uid, PROJECT, follow_symlinks=False)
    given = (str(stage.owner.home / "mine"), "--to", str(shared / "m.csv"))
    return _planted(stage, target, "export-metrics", *given)


@attack("n16b", "export-metrics in a shared current folder, where RUN.csv is a link")
def _(stage: Stage) -> Verdict:
    shared, target = stage.shared("project"), _private(stage, ".bashrc", "precious")
    stage.run_of(stage.owner, stage.owner.home / "mine")
    (shared / "mine.csv").symlink_to(target)
    os.chown(shared / "mine.csv", stage.other.uid, PROJECT, follow_symlinks=False)
    return _planted(stage, target, "export-metrics", str(stage.owner.home / "mine"), folder=shared)


def _writes_folder(number: str, title: str, *command: str) -> None:
    @attack(number, f"{title}, which is a link of others to an empty folder of the owner's")
    def _(stage: Stage) -> Verdict:
        shared, target = stage.shared("project"), stage.owner.home / "target"
        target.mkdir()
        stage.owner.give(target)
        run = stage.run_of(stage.owner, stage.owner.home / "mine")
        (shared / "out").symlink_to(target)
        os.chown(shared / "out", stage.other.uid, PROJECT, follow_symlinks=False)
        words = [word.format(run=run, out=shared / "out") for word in command]
        return _planted(stage, target, *words)


_writes_folder("n16c", "export --to DIR", "export", "{run}", "--to", "{out}")
_writes_folder("n16d", "convert --to DIR", "convert", "{run}", "--to", "{out}")


_SWAP = """
import os, sys, time
folder, watched, target = sys.argv[1:]
end = time.time() + 150
print("ready", flush=True)
while time.time() < end:
    for name in os.listdir(folder):
        if name.startswith(watched) and os.path.isdir(os.path.join(folder, name)):
            place = os.path.join(folder, name)
            if os.path.islink(place):
                continue
            try:
                os.rename(place, os.path.join(folder, "taken-" + name))
                os.symlink(target, place)
                print("exchanged", place, flush=True)
            except OSError as error:
                print(error, flush=True)
    time.sleep(0.0005)
"""


@attack("n16h", "export: its folder is exchanged with a link while it is written", race=True)
def _(stage: Stage) -> Verdict:
    shared, target = stage.shared("project"), stage.owner.home / "target"
    target.mkdir()
    stage.owner.give(target)
    run = stage.run_of(stage.owner, stage.owner.home / "mine")
    attacker = stage.begin(
        stage.other, stage.other.interpreter, "-c", _SWAP, str(shared), "out", str(target)
    )
    attacker.wait(lambda: "ready" in attacker.text, 20)
    attacker2 = stage.begin(
        stage.other, stage.other.interpreter, "-c", _SWAP, str(shared), ".", str(target)
    )
    victim = stage.so_tui("export", str(run), "--to", str(shared / "out"))
    said = victim.end(_COMMAND_S)
    found = sorted(each.name for each in target.iterdir())
    moved = attacker.text + attacker2.text
    return judged(
        found, f"written into the owner's folder: {found}", f"{moved[-150:]} {said[-150:]}"
    )


_DELETE = """
import sys, pathlib, os
from so_tui.runs import find_run
from so_tui.runs.listing import delete_run
print("start", flush=True)
try:
    delete_run(find_run(sys.argv[1]))
    print("deleted", flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""
_TURN = """
import os, sys, time, ctypes
libc = ctypes.CDLL(None)
a, b, mode = sys.argv[1:]
print("ready", flush=True)
end = time.time() + 60
while time.time() < end:
    libc.renameat2(-100, a.encode(), -100, b.encode(), 2)
    time.sleep(0.0003)
"""


@attack("n17", "two runs of the owner's change names while one is deleted", race=True)
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    worst = ""
    attempts = 0
    stage.run_of(stage.owner, stage.owner.home / "first")
    for _attempt in range(20):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(runs)
        runs = stage.shared("runs")
        for name in ("a", "b"):
            run = stage.run_of(stage.owner, runs / name)
            tree = json.loads((run / "run.json").read_text()) | {"name": name}
            (run / "run.json").write_text(json.dumps(tree))
            (run / f"who-{name}").write_text("")
            for path in (run, *run.rglob("*")):
                path.chmod(0o700 if path.is_dir() else 0o600)
            stage.owner.give(run)
        attacker = stage.begin(
            stage.other, stage.other.interpreter, "-c", _TURN, str(runs / "a"), str(runs / "b")
        )
        attacker.wait(lambda: "ready" in attacker.text, 10)  # noqa: B023
        victim = stage.begin(
            stage.owner, stage.owner.interpreter, "-P", "-c", _DELETE, str(runs / "a")
        )
        said = victim.end(30)
        attacker.process.kill()
        attacker.process.wait()
        attempts += 1
        left = {
            path.name: sorted(each.name for each in path.glob("who-*")) for path in runs.iterdir()
        }
        files = sum(1 for path in runs.rglob("*"))
        whole = {path.name: len(list(path.rglob("*"))) for path in runs.iterdir()}
        if len(set(whole.values())) > 1 or len(whole) not in (1, 2):
            worst = f"{whole} {left} {files}: {said[-150:]}"
    return judged(worst, worst, f"{attempts} tries; the last one said {said[-120:]}")


class _Server(http.server.BaseHTTPRequestHandler):
    seen: ClassVar[list[str]] = []

    def _any(self) -> None:
        self.seen.append(f"{self.command} {self.path} {dict(self.headers)}")
        self.send_response(404)
        self.end_headers()

    do_GET = do_HEAD = do_POST = _any  # noqa: N815 - the names that the server calls

    def log_message(self, *_: object) -> None:
        pass


@attack("n18", "addresses in a preset of others: the token of the hub, and what is asked for")
def _(stage: Stage) -> Verdict:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    _Server.seen.clear()
    private = _private(stage, "private.jsonl", json.dumps({"text": "private words"}) + "\n")
    said = ""
    addresses = (
        f"http://127.0.0.1:{port}/rows.jsonl",
        f"hf://datasets/x/y@http://127.0.0.1:{port}",
        f"simplecache::http://127.0.0.1:{port}/rows.jsonl",
        f"file://{private}",
        f"local://{private}",
        f"zip://rows.jsonl::http://127.0.0.1:{port}/a.zip",
        f"reference://::http://127.0.0.1:{port}/a.json",
        f"//127.0.0.1:{port}/a",
    )
    where = {"HF_TOKEN": "hf_secretsecret", "HF_HUB_OFFLINE": "0"}
    for number, address in enumerate(addresses):
        for changes in ({"data": {"source": address}}, {"model": {"tokenizer": address}}):
            path = stage.preset(stage.scratch / f"p{number}.toml", stage.other, **changes)
            options = {key: value for key, value in where.items() if key != "HF_HUB_OFFLINE"}
            said += stage.so_tui("data", str(path), **options).end(60)[-100:]
    server.shutdown()
    bad = [line for line in _Server.seen if "hf_secret" in line]
    return judged(
        bad or _Server.seen,
        f"{len(bad)} with the token; {_Server.seen[:2]}",
        f"nothing was asked; {said[-100:]}",
    )


@attack("n19a", "a weight file that its author cuts while it is read (SIGBUS): generate", race=True)
def _(stage: Stage) -> Verdict:
    model = stage.exported(stage.scratch / "model", stage.other)
    weights = next(model.glob("*.safetensors"))
    attacker = stage.begin(
        stage.other,
        stage.other.interpreter,
        "-c",
        "import os,sys,time\nwhile True:\n"
        " for p in os.listdir('/proc'):\n"
        "  pass\n"
        " for p in sys.argv[1:]:\n"
        "  s = os.stat(p)\n"
        "  if s.st_atime_ns > s.st_mtime_ns + 10**9: pass\n"
        " time.sleep(0.2)\n",
        str(weights),
    )
    victim = stage.so_tui("generate", str(model), "--prompt", "hello")

    def mapped() -> bool:
        for process in stage.processes(stage.owner):
            with contextlib.suppress(Exception):
                if any(str(weights) in each.path for each in process.memory_maps()):
                    return True
        return False

    if victim.wait(mapped, 60):
        os.truncate(weights, 4096)
    said = victim.end(_COMMAND_S)
    attacker.process.kill()
    lines = said.strip().splitlines()
    bad = "Traceback" in said or not lines or victim.process.returncode < 0
    return judged(bad, f"{victim.process.returncode}: {said[-200:]}", said[-200:])


@attack("n19b", "weight files that end early, or whose header says that they do: generate")
def _(stage: Stage) -> Verdict:
    bad = []
    for number in range(5):
        model = stage.exported(stage.scratch / f"model{number}", stage.other)
        weights = next(model.glob("*.safetensors"))
        data = weights.read_bytes()
        size = int.from_bytes(data[:8], "little")
        if number == 0:
            os.truncate(weights, len(data) // 2)
        elif number == 1:
            weights.write_bytes(struct.pack("<Q", 1 << 62) + data[8:])
        elif number == 2:
            os.truncate(weights, 1 << 42)
        elif number == 3:
            weights.unlink()
            os.mkfifo(weights)
        else:
            tree = json.loads(data[8 : 8 + size])
            for each in tree.values():
                if "shape" in each:
                    each["shape"] = [1 << 40, *each["shape"][1:]]
            head = json.dumps(tree).encode()
            weights.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])
        stage.published(model, stage.other)
        victim = stage.so_tui("generate", str(model), "--prompt", "hello")
        began = time.monotonic()
        said = victim.end(60)
        if "Traceback" in said or victim.process.returncode < 0 or time.monotonic() - began > 55:
            bad.append(f"{number}: {victim.process.returncode} {said[-200:]}")
    return judged(bad, " / ".join(bad), "each is refused")


@attack("n20a", "generation_config.json of others asks for endless work: generate")
def _(stage: Stage) -> Verdict:
    bad = []
    given: tuple[dict[str, object], ...] = (
        {"num_beams": 100_000},
        {"num_return_sequences": 100_000, "do_sample": True},
        {"max_new_tokens": 10**12},
        {"min_length": 10**9},
        {"penalty_alpha": 0.6, "top_k": 9},
        {"assistant_early_exit": 2},
        {"cache_implementation": "quantized"},
        {"stop_strings": ["a" * 10_000] * 1000},
        {"bad_words_ids": [[1] * 1000] * 10_000},
        {"suppress_tokens": [10**9]},
        {"prompt_lookup_num_tokens": 10**9},
        {"compile_config": {"backend": "inductor"}},
        {"eos_token_id": [-1]},
        {"sequence_bias": [[[1], 1e308]]},
        {"constraints": ["x"]},
        {"guidance_scale": 1e9},
        {"custom_generate": str(stage.scratch)},
        {"cache_implementation": "static"},
    )
    for number, changes in enumerate(given):
        model = stage.exported(stage.scratch / f"model{number}", stage.other)
        path = model / "generation_config.json"
        tree = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(tree | changes))
        stage.published(model, stage.other)
        began = time.monotonic()
        victim = stage.so_tui("generate", str(model), "--prompt", "hello")
        said = victim.end(60)
        took = time.monotonic() - began
        if "Traceback" in said or took > 55 or victim.process.returncode < 0:
            bad.append(f"{changes} {took:.0f} s: {said[-150:]}")
    return judged(bad, f"{len(bad)}: {bad[:2]}", "each is ignored or refused")


@attack("n20b", "adapter_config.json of others names a private model: generate")
def _(stage: Stage) -> Verdict:
    private = stage.exported(stage.owner.home / "private", stage.owner)
    model = stage.exported(stage.scratch / "model", stage.other)
    for path in model.glob("*.safetensors"):
        path.unlink()
    tree = {"base_model_name_or_path": str(private), "peft_type": "LORA"}
    (model / "adapter_config.json").write_text(json.dumps(tree))
    stage.published(model, stage.other)
    victim = stage.so_tui("generate", str(model), "--prompt", "hello")
    said = victim.end(_COMMAND_S)
    return judged(not victim.process.returncode, "the private model answered", said[-150:])


@attack("n20c", "raw bytes of terminal control in what a run's processes wrote: logs, watch")
def _(stage: Stage) -> Verdict:
    run = stage.run_of(stage.other, stage.scratch / "run")
    log = next(run.glob("attempts/001/output.*"))
    with log.open("ab") as file:
        for lead in (
            b"\x9b2J",
            b"\xc2\x9b2J",
            b"\x1bP$q",
            b"\x1b]52;c;aGk=\x07",
            b"\xe2\x80",
            b"\xae\xe2\x80\xae",
            b"\xf3\xa0\x81\x81",
            b"\x00\x08\x7f",
            b"\r\x1b[1A",
        ):
            file.write(lead + b" words\n")
    stage.published(run, stage.other)
    said = b""
    for command in (("logs", str(run)), ("watch", str(run), "--plain")):
        victim = stage.so_tui(*command)
        victim.end(30)
        said += victim.output.read_bytes()
    raw = [
        byte
        for byte in (
            b"\x1b",
            b"\x9b",
            b"\xc2\x9b",
            b"\xe2\x80\xae",
            b"\x00",
            b"\x7f",
            b"\r",
            b"\xf3\xa0\x81\x81",
        )
        if byte in said
    ]
    if b"words" not in said:
        raise RuntimeError("the log was not shown")
    return judged(raw, f"{raw} reached the terminal", "all is spelled out")
