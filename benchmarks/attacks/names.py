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
from benchmarks.attacks.code import _looked, _own_preset
from benchmarks.attacks.others import last_line
from benchmarks.attacks.stage import Command, Stage

_COMMAND_S = 120.0
_MISSING = ("kernels", "peft", "flash_attn", "apex", "bitsandbytes", "PIL", "soundfile", "av")
"""Optional packages that libraries look for; some of them are installed nowhere."""


def _everybodys(*paths: Path) -> None:
    for above in paths:
        for path in (above, *above.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)


@attack("n1a", "trust: code exchanged between what is shown and the answer yes", race=True)
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.scratch / "own", stage.other, "honest")
    _everybodys(model)
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
    if not victim.wait(lambda: b"configuration_own" in b"".join(shown), _COMMAND_S):
        raise RuntimeError(f"nothing was shown: {b''.join(shown)[-400:]!r}")
    time.sleep(1)
    for path in model.glob("*_own.py"):
        path.write_text(path.read_text().replace("honest", "exchanged"))
    os.write(mine, b"yes\n")
    victim.end(30)
    os.close(mine)
    said = b"".join(shown).decode(errors="replace").strip().splitlines()[-1:]
    verdict = _looked(stage, "exchanged", "data", str(_own_preset(stage, str(model))))
    return verdict._replace(evidence=f"trust said {said}; {verdict.evidence}")


def _allowed(stage: Stage) -> Path:
    """Make a model of the attacker's whose present code the owner allows."""
    model = stage.model(stage.scratch / "own", stage.other, "honest")
    said = stage.so_tui("trust", str(model), "--yes").end(_COMMAND_S)
    if "error" in said:
        raise RuntimeError(said[-300:])
    return model


@attack("n1b", "an allowed model whose auto_map names code in a second folder that changes later")
def _(stage: Stage) -> Verdict:
    second = stage.model(stage.scratch / "second", stage.other, "honest")
    model = stage.model(stage.scratch / "own", stage.other, "honest")
    for name, key, words in (
        ("config.json", "AutoConfig", "configuration_own.OwnConfig"),
        ("tokenizer_config.json", "AutoTokenizer", "tokenization_own.OwnTokenizer"),
    ):
        tree = json.loads((model / name).read_text())
        there = f"{second}--{words}"
        tree["auto_map"] = {key: there if key == "AutoConfig" else [None, there]}
        (model / name).write_text(json.dumps(tree))
    stage.other.give(model)
    stage.so_tui("trust", str(model), "--yes").end(_COMMAND_S)
    for path in second.glob("*_own.py"):
        path.write_text(path.read_text().replace("honest", "exchanged"))
    return _looked(stage, "exchanged", "data", str(_own_preset(stage, str(model))))


@attack("n1c", "code that an allowed model imports from a folder next to it or below it")
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.scratch / "own", stage.other, "honest")
    (model / "deep").mkdir()
    (model / "deep" / "__init__.py").write_text("")
    (model / "deep" / "more.py").write_text(stage.code("honest"))
    for name in ("configuration_own", "tokenization_own"):
        path = model / f"{name}.py"
        path.write_text("from .deep import more\n" + path.read_text())
    stage.other.give(model)
    stage.so_tui("trust", str(model), "--yes").end(_COMMAND_S)
    (model / "deep" / "more.py").write_text(stage.code("exchanged"))
    return _looked(stage, "exchanged", "data", str(_own_preset(stage, str(model))))


@attack("n1d", "custom_generate, added to a model after its code was allowed")
def _(stage: Stage) -> Verdict:
    model = stage.exported(stage.scratch / "model", stage.other)
    tree = json.loads((model / "config.json").read_text())
    stage.model(model, stage.other, "honest", **tree)
    stage.published(model, stage.other)
    stage.so_tui("trust", str(model), "--yes").end(_COMMAND_S)
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(
        stage.code("exchanged") + "def generate(model, *_, **__): raise ValueError\n"
    )
    stage.published(model, stage.other)
    return _looked(stage, "exchanged", "generate", str(model), "--prompt", "hello")


def _planted(stage: Stage, *command: str) -> Verdict:
    """Plant modules in the folder where transformers keeps code, in a shared HF_HOME."""
    home = stage.shared("huggingface", 0o2777)
    for above in (home / "modules", home / "modules" / "transformers_modules"):
        above.mkdir()
        (above / "__init__.py").write_text(stage.code("planted"))
        for name in _MISSING:
            (above / name).mkdir()
            (above / name / "__init__.py").write_text(stage.code("planted"))
    stage.other.give(home / "modules")
    _everybodys(home)
    return _looked(stage, "planted", *command, HF_HOME=str(home))


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
    preset = _own_preset(stage, str(model))
    stage.so_tui("trust", str(model), "--yes").end(_COMMAND_S)
    verdict = _planted(stage, "data", str(preset))
    if not stage.ran("honest"):
        raise RuntimeError(f"the allowed code did not run: {verdict.evidence}")
    return verdict


@attack("n2d", "modules planted in a shared HF_HOME: a run")
def _(stage: Stage) -> Verdict:
    return _planted(stage, "run", "tiny", "--plain", "--set", "train.steps=1")


def _from(stage: Stage, folder: Path, *command: str, **options: str) -> tuple[Command, str]:
    """Run a command of the owner's in a shared folder."""
    victim = stage.so_tui(*command, folder=folder, **options)
    return victim, victim.end(_COMMAND_S)


@attack("n3a", "a file in the shared current folder that is called like a preset")
def _(stage: Stage) -> Verdict:
    stage.preset(stage.scratch / "tiny", stage.other, title="the attacker's")
    stage.preset(stage.scratch / "tiny.toml", stage.other, title="the attacker's")
    _, said = _from(stage, stage.scratch, "presets", "tiny")
    return judged("attacker" in said, "the file was taken for the preset", said[:60])


@attack("n3b", "a folder in the shared current folder that is called like a data set of the hub")
def _(stage: Stage) -> Verdict:
    place = stage.scratch / "people" / "rows"
    place.mkdir(parents=True)
    (place / "rows.jsonl").write_text(json.dumps({"text": "a row of the attacker"}) + "\n")
    stage.published(place.parent, stage.other)
    preset = stage.preset(
        stage.owner.home / "p.toml", stage.owner, data={"source": "people/rows", "format": "text"}
    )
    _, said = _from(stage, stage.scratch, "data", str(preset))
    named = str(place) in said or "folder" in said
    return judged(
        "row of the attacker" in said and not named, "its row is shown without a word", said[-200:]
    )


@attack("n3c", "a folder in the shared current folder that is called like a model of the hub")
def _(stage: Stage) -> Verdict:
    stage.exported(stage.scratch / "model", stage.other)
    (stage.scratch / "people").mkdir()
    (stage.scratch / "model").rename(stage.scratch / "people" / "model")
    path = stage.scratch / "people" / "model" / "chat_template.jinja"
    path.write_text("{{ 'the template of the attacker' }}")
    stage.published(stage.scratch / "people", stage.other)
    preset = stage.preset(
        stage.owner.home / "p.toml", stage.owner, model={"tokenizer": "people/model"}
    )
    rows = stage.owner.home / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    stage.owner.give(rows)
    _, said = _from(stage, stage.scratch, "data", str(preset), "--set", f"data.source={rows}")
    return judged("attacker" in said, "the tokenizer of the folder was used", said[-200:])


@attack("n3d", "a folder in the shared current folder with the name of one of the user's runs")
def _(stage: Stage) -> Verdict:
    runs = stage.owner.home / "runs"
    stage.run_of(stage.owner, runs / "mine")
    stage.owner.give(runs)
    theirs = stage.run_of(stage.other, stage.scratch / "mine")
    (theirs / "notes.json").write_text(json.dumps({"text": "of the attacker", "tags": []}))
    stage.published(theirs, stage.other)
    _, said = _from(stage, stage.scratch, "note", "mine", "--runs-dir", str(runs))
    return judged("attacker" in said, "the folder was taken for the run", said[-200:])


@attack("n3e", "`latest` in a shared folder of runs is a run of another user's")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    stage.run_of(stage.owner, runs / "mine")
    theirs = stage.run_of(stage.other, runs / "theirs")
    tree = json.loads((theirs / "state.json").read_text())
    for key, value in tree.items():
        if isinstance(value, float) and value > 1e9:
            tree[key] = value + 1e9
    (theirs / "state.json").write_text(json.dumps(tree))
    stage.published(theirs, stage.other)
    os.utime(theirs, (4e9, 4e9))
    # Another user's run must not stand in the way of a command about the user's own.
    _, said = _from(stage, Path("/"), "note", "--text", "hello", "--runs-dir", str(runs))
    noted = (runs / "mine" / "notes.json").exists()
    return judged(not noted, f"`note` without a name: {said[-200:]}", "it took the owner's run")


_NASTY = "x\n[model]\ntrust_remote_code = true\n#\x1b]0;owned\x07\u202e"


@attack("n4a", "presets add: a folder whose name is lines of TOML and escapes")
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.scratch / _NASTY, stage.other)
    victim = stage.so_tui("presets", "add", str(model))
    said = victim.end(_COMMAND_S)
    made = list((stage.owner.home / ".config").rglob("*.toml"))
    texts = [path.read_text() for path in made]
    bad = [text for text in texts if "\ntrust_remote_code" in text or "\x1b" in text]
    names = [path.name for path in made if not path.name.isprintable() or "\n" in path.name]
    raw = "\x1b" in said or "\u202e" in said
    return judged(
        bad or names or raw, f"{bad} {names} {raw}", f"{[p.name for p in made]} {last_line(victim)}"
    )


@attack("n4b", "config.json names that reach a terminal or a preset as they are")
def _(stage: Stage) -> Verdict:
    evil = "Q\x1b[2Jwen\n[data]\nsource='x'\u202e"
    model = stage.model(
        stage.scratch / "m", stage.other, architectures=[evil], _name_or_path=evil, model_type=evil
    )
    said = ""
    for command in (("presets", "add", str(model)), ("trust", str(model))):
        said += stage.so_tui(*command).end(_COMMAND_S)
    texts = [path.read_text() for path in (stage.owner.home / ".config").rglob("*.toml")]
    raw = "\x1b" in said or "\u202e" in said or any("\x1b" in text for text in texts)
    return judged(raw, repr(said[-200:]), said[-120:])


@attack("n5", "files of the owner that others can write where the umask is 000")
def _(stage: Stage) -> Verdict:
    model = stage.model(stage.owner.home / "own", stage.owner, "honest")
    preset = _own_preset(stage, str(model))
    home = stage.owner.home
    home.chmod(0o755)
    done = ""
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
        done += stage.so_tui(*command, umask=0o000).end(_COMMAND_S)[-80:]
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
    done = stage.other.python(
        "import os,sys; print([p for p in sys.argv[1:] if os.access(p, os.W_OK)])",
        *map(str, found),
    ).stdout.strip()
    return judged(done not in ("[]", ""), f"others can write {done[:280]}", f"{len(found)} hidden")
