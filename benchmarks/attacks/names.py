"""Attacks n1 to n5: names that mean something of another user's, and consents."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import threading
import time
from pathlib import Path

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.code import exchange_code, looked, own_preset
from benchmarks.attacks.stage import COMMAND_S, Stage, changed, open_to_all, write

_MISSING = ("kernels", "peft", "flash_attn", "apex", "bitsandbytes", "PIL", "soundfile", "av")
"""Optional packages that libraries look for; some of them are installed nowhere."""


@attack("n1a", "trust: code exchanged between what is shown and the answer yes", race=True)
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.scratch / "own", stage.other, "honest")
    open_to_all(model)
    mine, theirs = pty.openpty()
    os.fchown(theirs, stage.owner.uid, -1)
    shown: list[bytes] = []

    def drain() -> None:
        with contextlib.suppress(OSError):
            while text := os.read(mine, 1 << 16):
                shown.append(text)

    threading.Thread(target=drain, daemon=True).start()
    victim = stage.so_tui("trust", str(model), terminal=theirs, TERM="xterm")
    os.close(theirs)
    if not victim.wait(lambda: b"configuration_own" in b"".join(shown), COMMAND_S):
        raise RuntimeError(f"nothing was shown: {b''.join(shown)[-400:]!r}")
    time.sleep(1)
    exchange_code(model)
    os.write(mine, b"yes\n")
    victim.end(30)
    os.close(mine)
    said = b"".join(shown).decode(errors="replace").strip().splitlines()[-1:]
    verdict = looked(stage, "exchanged", "data", str(own_preset(stage, str(model))))
    return verdict._replace(evidence=f"trust said {said}; {verdict.evidence}")


@attack("n1b", "an allowed model whose auto_map names code in a second folder that changes later")
def _(stage: Stage) -> Verdict:
    second = stage.model(stage.scratch / "second", stage.other, "honest")
    model = stage.model(stage.scratch / "own", stage.other, "honest")
    for name, key, words in (
        ("config.json", "AutoConfig", "configuration_own.OwnConfig"),
        ("tokenizer_config.json", "AutoTokenizer", "tokenization_own.OwnTokenizer"),
    ):
        there = f"{second}--{words}"
        changed(model / name, auto_map={key: there if key == "AutoConfig" else [None, there]})
    return _exchanged(stage, model, second)


def _exchanged(stage: Stage, model: Path, *later: Path) -> Verdict:
    """Let the owner allow a model and use it after code in folders has changed."""
    stage.said("trust", str(model), "--yes")
    exchange_code(*later)
    return looked(stage, "exchanged", "data", str(own_preset(stage, str(model))))


@attack("n1c", "code that an allowed model imports from a folder next to it or below it")
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.scratch / "own", stage.other, "honest")
    write(model / "deep" / "__init__.py", "")
    write(model / "deep" / "more.py", stage.code("honest"))
    for path in model.glob("*_own.py"):
        path.write_text("from .deep import more\n" + path.read_text())
    stage.other.give(model)
    return _exchanged(stage, model, model / "deep")


@attack("n1d", "custom_generate, added to a model after its code was allowed")
def _(stage: Stage) -> Verdict:
    model = stage.exported(stage.scratch / "model", stage.other)
    tree = json.loads((model / "config.json").read_text())
    stage.model(model, stage.other, "honest", **tree)
    stage.published(model, stage.other)
    stage.said("trust", str(model), "--yes")
    code = stage.code("exchanged") + "def generate(model, *_, **__): raise ValueError\n"
    write(model / "custom_generate" / "generate.py", code)
    stage.published(model, stage.other)
    return looked(stage, "exchanged", "generate", str(model), "--prompt", "hello")


def _planted(stage: Stage, *command: str) -> Verdict:
    """Plant modules in the folder where transformers keeps code, in a shared HF_HOME."""
    home = stage.shared("huggingface", 0o2777)
    for above in (home / "modules", home / "modules" / "transformers_modules"):
        for name in (".", *_MISSING):
            write(above / name / "__init__.py", stage.code("planted"))
    stage.other.give(home / "modules")
    open_to_all(home)
    return looked(stage, "planted", *command, HF_HOME=str(home))


@attack("n2a", "modules planted in a shared HF_HOME: the user's own data")
def _(stage: Stage) -> Verdict:
    return _planted(stage, "data", "tiny")


@attack("n2b", "modules planted in a shared HF_HOME: generate with the user's own model")
def _(stage: Stage) -> Verdict:
    model = stage.exported(stage.owner.home / "model", stage.owner)
    return _planted(stage, "generate", str(model), "--prompt", "hello")


@attack("n2c", "modules planted in a shared HF_HOME: with allowed code")
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.owner.home / "own", stage.owner, "honest")
    preset = own_preset(stage, str(model))
    stage.said("trust", str(model), "--yes")
    verdict = _planted(stage, "data", str(preset))
    if not stage.ran("honest"):
        raise RuntimeError(f"the allowed code did not run: {verdict.evidence}")
    return verdict


@attack("n2d", "modules planted in a shared HF_HOME: a run")
def _(stage: Stage) -> Verdict:
    return _planted(stage, "run", "tiny", "--plain", "--set", "train.steps=1")


@attack("n3a", "a file in the shared current folder that is called like a preset")
def _(stage: Stage) -> Verdict:
    stage.preset(stage.scratch / "tiny", stage.other, title="the attacker's")
    stage.preset(stage.scratch / "tiny.toml", stage.other, title="the attacker's")
    said = stage.said("presets", "tiny", folder=stage.scratch)
    return judged("attacker" in said, "the file was taken for the preset", said[:60])


@attack("n3b", "a folder in the shared current folder that is called like a data set of the hub")
def _(stage: Stage) -> Verdict:
    place = stage.foreign("people/rows", {"rows.jsonl": {"text": "a row of the attacker"}})
    stage.published(place.parent, stage.other)
    preset = stage.preset(
        stage.owner.home / "p.toml", stage.owner, data={"source": "people/rows", "format": "text"}
    )
    said = stage.said("data", str(preset), folder=stage.scratch)
    named = str(place) in said or "folder" in said
    return judged(
        "row of the attacker" in said and not named, "its row is shown without a word", said[-200:]
    )


@attack("n3c", "a folder in the shared current folder that is called like a model of the hub")
def _(stage: Stage) -> Verdict:
    place = stage.foreign("people", {"note": ""})
    template = "{{ 'the template of the attacker' }}"
    stage.exported(place / "model", stage.other, template)
    preset = stage.preset(
        stage.owner.home / "p.toml", stage.owner, model={"tokenizer": "people/model"}
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = stage.private("rows.jsonl", {"messages": turns})
    given = ("data", str(preset), "--set", f"data.source={rows}")
    said = stage.said(*given, folder=stage.scratch)
    return judged("attacker" in said, "the tokenizer of the folder was used", said[-200:])


@attack("n3d", "a folder in the shared current folder with the name of one of the user's runs")
def _(stage: Stage) -> Verdict:
    runs = stage.owner.home / "runs"
    stage.run_of(stage.owner, runs / "mine")
    theirs = stage.run_of(stage.other, stage.scratch / "mine")
    changed(theirs / "notes.json", text="of the attacker", tags=[])
    stage.published(theirs, stage.other)
    said = stage.said("note", "mine", "--runs-dir", str(runs), folder=stage.scratch)
    return judged("attacker" in said, "the folder was taken for the run", said[-200:])


@attack("n3e", "`latest` in a shared folder of runs is a run of another user's")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    stage.run_of(stage.owner, runs / "mine")
    theirs = stage.run_of(stage.other, runs / "theirs")
    tree = json.loads((theirs / "state.json").read_text())
    later = {key: value + 1e9 for key, value in tree.items() if isinstance(value, float)}
    changed(theirs / "state.json", **later)
    stage.published(theirs, stage.other)
    os.utime(theirs, (4e9, 4e9))
    # Another user's run must not stand in the way of a command about the user's own.
    said = stage.said("note", "--text", "hello", "--runs-dir", str(runs))
    noted = (runs / "mine" / "notes.json").exists()
    return judged(not noted, f"`note` without a name: {said[-200:]}", "it took the owner's run")


_NASTY = "x\n[model]\ntrust_remote_code = true\n#\x1b]0;owned\x07\u202e"


@attack("n4a", "presets add: a folder whose name is lines of TOML and escapes")
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.scratch / _NASTY, stage.other)
    said = stage.said("presets", "add", str(model))
    made = list((stage.owner.home / ".config").rglob("*.toml"))
    texts = [path.read_text() for path in made]
    bad = [text for text in texts if "\ntrust_remote_code" in text or "\x1b" in text]
    names = [path.name for path in made if not path.name.isprintable() or "\n" in path.name]
    raw = "\x1b" in said or "\u202e" in said
    return judged(
        bad or names or raw, f"{bad} {names} {raw}", f"{[p.name for p in made]} {said[-150:]}"
    )


@attack("n4b", "config.json names that reach a terminal or a preset as they are")
def _(stage: Stage) -> Verdict:
    evil = "Q\x1b[2Jwen\n[data]\nsource='x'\u202e"
    model = stage.model(
        stage.scratch / "m", stage.other, architectures=[evil], _name_or_path=evil, model_type=evil
    )
    said = ""
    for command in (("presets", "add", str(model)), ("trust", str(model))):
        said += stage.said(*command)
    texts = [path.read_text() for path in (stage.owner.home / ".config").rglob("*.toml")]
    raw = "\x1b" in said or "\u202e" in said or any("\x1b" in text for text in texts)
    return judged(raw, repr(said[-200:]), said[-120:])


@attack("n5", "files of the owner that others can write where the umask is 000")
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.owner.home / "own", stage.owner, "honest")
    preset = own_preset(stage, str(model))
    home = stage.owner.home
    home.chmod(0o755)
    for command in (
        ("trust", str(model), "--yes"),
        ("settings", "theme=nord"),
        ("calibrate",),
        ("presets", "add", str(model), "--name", "made"),
        ("data", str(preset)),
        ("run", "tiny", "--plain", "--set", "train.steps=1"),
        ("export",),
        ("export-metrics", "--to", str(home / "m.csv")),
        ("generate", "--prompt", "hello"),
    ):
        stage.said(*command, umask=0o000)
    given = {model, preset}
    places = (home, Path(f"/tmp/so-tui-{stage.owner.uid}"), Path("/dev/shm"), Path("/tmp"))
    found = []
    for above in places:
        deep = above.rglob("*") if above not in map(Path, ("/tmp", "/dev/shm")) else above.iterdir()
        for path in deep:
            with contextlib.suppress(OSError):
                if path in given or given & {*path.parents} or path.is_symlink():
                    continue
                status = path.stat()
                if status.st_uid == stage.owner.uid and status.st_mode & 0o002:
                    found.append(path)
    wrong = stage.writable(*found)
    return judged(wrong, f"others can write {wrong}", f"{len(found)} hidden")
