"""Attacks n1 to n5: names that mean something of another user's, and consents."""

from __future__ import annotations

import contextlib
import os
import time
from itertools import chain
from pathlib import Path

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.code import exchange_code, looked, own_preset
from benchmarks.attacks.limits import on_terminal
from benchmarks.attacks.stage import COMMAND_S, Stage, Word, changed, open_to_all, read, write

_MISSING = ("kernels", "peft", "flash_attn", "apex", "bitsandbytes", "PIL", "soundfile", "av")
"""Optional packages that libraries look for; some of them are installed nowhere."""


@attack("n1a", "trust: code exchanged between what is shown and the answer yes", race=True)
def _(stage: Stage) -> Verdict:
    model = stage.model("own", label="honest")
    open_to_all(model)
    with on_terminal(stage, "trust", model, controls=False) as (victim, terminal, shown):
        if not victim.wait(lambda: b"configuration_own" in shown, COMMAND_S):
            raise RuntimeError(f"nothing was shown: {shown!r}")
        time.sleep(1)
        exchange_code(model)
        os.write(terminal, b"yes\n")
        victim.end(30)
    verdict = looked(stage, "exchanged", "data", own_preset(stage, model))
    return verdict._replace(evidence=f"trust said {shown[-100:]!r}; {verdict.evidence}")


@attack("n1b", "an allowed model whose auto_map names code in a second folder that changes later")
def _(stage: Stage) -> Verdict:
    second = stage.model("second", label="honest")
    model = stage.model("own", label="honest")
    for name, key, words in (
        ("config.json", "AutoConfig", "configuration_own.OwnConfig"),
        ("tokenizer_config.json", "AutoTokenizer", "tokenization_own.OwnTokenizer"),
    ):
        there = f"{second}--{words}"
        changed(model / name, auto_map={key: there if key == "AutoConfig" else [None, there]})
    return _exchanged(stage, model, second)


def _exchanged(stage: Stage, model: Path, *later: Path) -> Verdict:
    """Let the owner allow a model and use it after code in folders has changed."""
    stage.said("trust", model, "--yes")
    exchange_code(*later)
    return looked(stage, "exchanged", "data", own_preset(stage, model))


@attack("n1c", "code that an allowed model imports from a folder next to it or below it")
def _(stage: Stage) -> Verdict:
    model = stage.model("own", label="honest")
    write(model / "deep" / "__init__.py", "")
    write(model / "deep" / "more.py", stage.code("honest"))
    for path in model.glob("*_own.py"):
        path.write_text("from .deep import more\n" + path.read_text())
    stage.other.give(model)
    return _exchanged(stage, model, model / "deep")


@attack("n1d", "custom_generate, added to a model after its code was allowed")
def _(stage: Stage) -> Verdict:
    model = stage.exported()
    tree = read(model / "config.json")
    stage.model(model, label="honest", **tree)
    stage.published(model)
    stage.said("trust", model, "--yes")
    code = stage.code("exchanged") + "def generate(model, *_, **__): raise ValueError\n"
    write(model / "custom_generate" / "generate.py", code)
    stage.published(model)
    return looked(stage, "exchanged", "generate", model, "--prompt", "hello")


def _planted(stage: Stage, *command: Word) -> Verdict:
    """Plant modules in the folder where transformers keeps code, in a shared HF_HOME."""
    home = stage.shared("huggingface", 0o2777)
    for above in (home / "modules", home / "modules" / "transformers_modules"):
        for name in (".", *_MISSING):
            write(above / name / "__init__.py", stage.code("planted"))
    stage.other.give(home / "modules")
    open_to_all(home)
    return looked(stage, "planted", *command, HF_HOME=home)


@attack("n2a", "modules planted in a shared HF_HOME: the user's own data")
def _(stage: Stage) -> Verdict:
    return _planted(stage, "data", "tiny")


@attack("n2b", "modules planted in a shared HF_HOME: generate with the user's own model")
def _(stage: Stage) -> Verdict:
    model = stage.exported("model", stage.owner)
    return _planted(stage, "generate", model, "--prompt", "hello")


@attack("n2c", "modules planted in a shared HF_HOME: with allowed code")
def _(stage: Stage) -> Verdict:
    model = stage.model("own", stage.owner, "honest")
    preset = own_preset(stage, model)
    stage.said("trust", model, "--yes")
    verdict = _planted(stage, "data", preset)
    if not stage.ran("honest"):
        raise RuntimeError(f"the allowed code did not run: {verdict.evidence}")
    return verdict


@attack("n2d", "modules planted in a shared HF_HOME: a run")
def _(stage: Stage) -> Verdict:
    return _planted(stage, "run", "tiny", "--plain", "--set", "train.steps=1")


@attack("n3a", "a file in the shared current folder that is called like a preset")
def _(stage: Stage) -> Verdict:
    stage.preset("tiny", title="the attacker's")
    stage.preset("tiny.toml", title="the attacker's")
    said = stage.said("presets", "tiny", folder=stage.scratch)
    return judged("attacker" in said, "the file was taken for the preset", said[:60])


@attack("n3b", "a folder in the shared current folder that is called like a data set of the hub")
def _(stage: Stage) -> Verdict:
    place = stage.foreign("people/rows", {"rows.jsonl": {"text": "a row of the attacker"}})
    stage.published(place.parent)
    preset = stage.preset("p.toml", stage.owner, data={"source": "people/rows", "format": "text"})
    said = stage.said("data", preset, folder=stage.scratch)
    return judged("row of the attacker" in said, "its row is shown", said)


@attack("n3c", "a folder in the shared current folder that is called like a model of the hub")
def _(stage: Stage) -> Verdict:
    place = stage.foreign("people", {"note": ""})
    template = "{{ 'the template of the attacker' }}"
    stage.exported(place / "model", template=template)
    preset = stage.preset("p.toml", stage.owner, model={"tokenizer": "people/model"})
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = stage.private("rows.jsonl", {"messages": turns})
    given = ("data", preset, "--set", f"data.source={rows}")
    said = stage.said(*given, folder=stage.scratch)
    return judged("attacker" in said, "the tokenizer of the folder was used", said)


@attack("n3d", "a folder in the shared current folder with the name of one of the user's runs")
def _(stage: Stage) -> Verdict:
    runs = stage.owner.home / "runs"
    stage.run_of(stage.owner, runs / "mine")
    theirs = stage.run_of(stage.other, "mine")
    changed(theirs / "notes.json", text="of the attacker", tags=[])
    stage.published(theirs)
    said = stage.said("note", "mine", "--runs-dir", runs, folder=stage.scratch)
    return judged("attacker" in said, "the folder was taken for the run", said)


@attack("n3e", "`latest` in a shared folder of runs is a run of another user's")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    stage.run_of(stage.owner, runs / "mine")
    theirs = stage.run_of(stage.other, runs / "theirs")
    tree = read(theirs / "state.json")
    later = {key: value + 1e9 for key, value in tree.items() if isinstance(value, float)}
    changed(theirs / "state.json", **later)
    stage.published(theirs)
    os.utime(theirs, (4e9, 4e9))
    # Another user's run must not stand in the way of a command about the user's own.
    said = stage.said("note", "--text", "hello", "--runs-dir", runs)
    noted = (runs / "mine" / "notes.json").exists()
    return judged(not noted, f"`note` without a name: {said}", "it took the owner's run")


_NASTY = "x\n[model]\ntrust_remote_code = true\n#\x1b]0;owned\x07\u202e"


@attack("n4a", "presets add: a folder whose name is lines of TOML and escapes")
def _(stage: Stage) -> Verdict:
    model = stage.model(_NASTY)
    said = stage.said("presets", "add", model)
    made = list((stage.owner.home / ".config").rglob("*.toml"))
    texts = [path.read_text() for path in made]
    bad = [text for text in texts if "\ntrust_remote_code" in text or "\x1b" in text]
    names = [path.name for path in made if not path.name.isprintable() or "\n" in path.name]
    raw = "\x1b" in said or "\u202e" in said
    return judged(bad or names or raw, f"{bad} {names} {raw}", f"{[p.name for p in made]} {said}")


@attack("n4b", "config.json names that reach a terminal or a preset as they are")
def _(stage: Stage) -> Verdict:
    evil = "Q\x1b[2Jwen\n[data]\nsource='x'\u202e"
    model = stage.model("m", architectures=[evil], _name_or_path=evil, model_type=evil)
    said = ""
    for command in (("presets", "add", model), ("trust", model)):
        said += stage.said(*command)
    texts = [path.read_text() for path in (stage.owner.home / ".config").rglob("*.toml")]
    raw = "\x1b" in said or "\u202e" in said or any("\x1b" in text for text in texts)
    return judged(raw, repr(said[-200:]), said)


_EVERYTHING = """
trust {model} --yes
settings theme=nord
calibrate
presets add {model} --name made
data {preset}
run tiny --plain --set train.steps=1
export
export-metrics --to {home}/m.csv
generate --prompt hello
"""
"""Commands that write files."""
_COMMON = ("/tmp", "/dev/shm")


@attack("n5", "files of the owner that others can write where the umask is 000")
def _(stage: Stage) -> Verdict:
    model = stage.model("own", stage.owner, "honest")
    preset = own_preset(stage, model)
    home = stage.owner.home
    home.chmod(0o755)
    for command in _EVERYTHING.strip().splitlines():
        words = command.format(model=model, preset=preset, home=home).split()
        stage.said(*words, umask=0o000)
    private = Path(f"/tmp/so-tui-{stage.owner.uid}").rglob("*")
    found = []
    for path in chain(home.rglob("*"), private, *(Path(each).iterdir() for each in _COMMON)):
        with contextlib.suppress(OSError):
            status = path.lstat()
            own = status.st_uid == stage.owner.uid and not path.is_symlink()
            if own and status.st_mode & 0o002 and not path.is_relative_to(model):
                found.append(path)
    wrong = stage.writable(*found)
    return judged(wrong, f"others can write {wrong}", f"{len(found)} hidden")
