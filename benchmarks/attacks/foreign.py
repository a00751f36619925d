"""Findings 7, 9 and 12: data, caches, checkpoints and configurations of others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.others import last_line
from benchmarks.attacks.stage import PROJECT, Stage

_SECRET = "the owner's private words"
_COMMAND_S = 120.0
_KERNELS = """
class _Anything:
    def __init__(self, *_, **__): pass
    def __call__(self, *_, **__): return self
    def __getattr__(self, _): return self
    def __or__(self, _): return self
    def __iter__(self): return iter(())
def get_kernel(name, **_):
    pathlib.Path(f"{MARKS}/{os.getuid()}-{os.getpid()}-kernel").write_text(name)
    raise ImportError(f"{name} was asked for")
def use_kernelized_func(*_): return lambda kind: kind
def use_kernel_forward_from_hub(_): return lambda kind: kind
def kernelize(model, **_): return model
def __getattr__(_): return _Anything()
"""
"""Stands for the optional package that downloads kernels, and notes what it is asked for."""


def _private(stage: Stage, name: str, text: str) -> Path:
    path = stage.owner.home / name
    path.write_text(text)
    stage.owner.give(path)
    path.chmod(0o600)
    return path


@attack("7a", "export of a foreign run whose chat template is a link to a private file")
def _(stage: Stage) -> Verdict:
    private = _private(stage, "private.txt", _SECRET)
    tokenizer = stage.model(stage.scratch / "tokenizer", stage.other)
    (tokenizer / "chat_template.jinja").symlink_to(private)
    run = stage.run_of(stage.other, stage.scratch / "run")
    spec = json.loads((run / "spec.json").read_text())
    spec["model"]["tokenizer"] = str(tokenizer)
    (run / "spec.json").write_text(json.dumps(spec))
    out = stage.owner.home / "out"
    victim = stage.so_tui("export", str(run), "--to", str(out))
    victim.end(_COMMAND_S)
    found = [path for path in out.glob("*") if _SECRET in path.read_text(errors="replace")]
    modes = ", ".join(f"{path.name} ({path.stat().st_mode & 0o777:o})" for path in found)
    return judged(found, f"the private text is in {modes}", last_line(victim))


@attack("7b", "an export that others can read")
def _(stage: Stage) -> Verdict:
    run, out = stage.run_of(stage.owner, stage.owner.home / "mine"), stage.owner.home / "out"
    run.chmod(0o700)
    victim = stage.so_tui("export", str(run), "--to", str(out))
    victim.end(_COMMAND_S)
    if not any(out.glob("*")):
        raise RuntimeError(f"nothing was exported: {last_line(victim)}")
    modes = {path: path.stat().st_mode & 0o777 for path in (out, *out.glob("*"))}
    found = [f"{path.name} ({mode:o})" for path, mode in modes.items() if mode & 0o077]
    return judged(found, f"others can read {', '.join(found)}", "no other user can read it")


@attack("7c", "a link in a foreign data folder to a private file")
def _(stage: Stage) -> Verdict:
    rows = json.dumps({"text": _SECRET}) + "\n"
    private = _private(stage, "private.jsonl", rows)
    folder = stage.scratch / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"text": "a row of the attacker"}) + "\n")
    (folder / "b.jsonl").symlink_to(private)
    stage.other.give(folder)
    victim = stage.so_tui("data", "tiny", "--set", f"data.source={folder}")
    said = victim.end(_COMMAND_S)
    return judged(
        "private words" in said, "`data` shows the private text as a row", last_line(victim)
    )


@attack("9a", "prepared rows in a shared HF_HOME that the attacker filled first")
def _(stage: Stage) -> Verdict:
    home, own = stage.shared("huggingface", 0o2777), stage.other.home / "huggingface"
    source = stage.scratch / "rows.jsonl"
    source.write_text(json.dumps({"text": "an honest row of the owner"}) + "\n")
    stage.owner.give(source)
    command = ("data", "tiny", "--set", f"data.source={source}")
    program = (stage.other.interpreter, "-P", "-m", "so_tui")
    first = stage.begin(stage.other, *program, *command, umask=0o077, HF_HOME=str(own))
    first.end(_COMMAND_S)
    shutil.copytree(own, home, dirs_exist_ok=True)
    stage.other.give(home)
    prepared = list(home.rglob("*.arrow"))
    if not prepared:
        raise RuntimeError(f"the attacker prepared nothing: {last_line(first)}")
    for path in (home, *home.rglob("*")):
        path.chmod(0o777)
    for path in prepared:
        path.write_bytes(path.read_bytes().replace(b"honest", b"forged"))
    victim = stage.so_tui(*command, HF_HOME=str(home))
    said = victim.end(_COMMAND_S)
    return judged("forged" in said, "`data` shows the attacker's row", last_line(victim))


def _resumes(number: str, title: str, tamper: Callable[[Stage, Path], None]) -> None:
    """Register an attack on a part of a run that ``resume`` reads."""

    @attack(number, f"resume accepts {title}")
    def _(stage: Stage) -> Verdict:
        run = stage.run_of(stage.owner, stage.owner.home / "runs" / "mine")
        stage.owner.give(run.parent)
        tamper(stage, run)
        given = ("resume", str(run), "--plain", "--set", "train.steps=5")
        victim = stage.so_tui(*given)
        said = victim.end(_COMMAND_S)
        return judged("finished at step 5" in said, "it trained on", last_line(victim))


def _open_to_all(*paths: Path) -> None:
    for path in paths:
        path.chmod(0o777 if path.is_dir() else 0o666)


def _newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def _given_away(stage: Stage, run: Path) -> None:
    path = next(_newest(run).rglob("checkpoint.json"))
    os.chown(path, stage.other.uid, PROJECT)


def _linked(stage: Stage, run: Path) -> None:
    """The checkpoints are in the attacker's folder."""
    theirs = stage.scratch / "checkpoints"
    shutil.move(run / "checkpoints", theirs)
    stage.other.give(theirs)
    _open_to_all(theirs)
    (run / "checkpoints").symlink_to(theirs)
    os.lchown(run / "checkpoints", stage.owner.uid, stage.owner.uid)


_resumes(
    "9b", "checkpoints that others can write", lambda _, run: _open_to_all(run / "checkpoints")
)
_resumes("9c", "a checkpoint that others can write", lambda _, run: _open_to_all(_newest(run)))
_resumes(
    "9d",
    "an earlier attempt that others can write",
    lambda _, run: _open_to_all(run / "attempts/001"),
)
_resumes(
    "9e",
    "a launch that others can write",
    lambda _, run: _open_to_all(run / "attempts/001/launch.json"),
)
_resumes(
    "9f", "metrics that others can write", lambda _, run: _open_to_all(*(run / "metrics").iterdir())
)
_resumes("9g", "another user's manifest of a checkpoint", _given_away)
_resumes("9h", "checkpoints as a link to another user's", _linked)

_NAMES = (
    "evil/kernel",
    "paged|evil/kernel",
    "kernels-community/flash-attn2",
    "flash_attention_2",
)


@attack("12", "a foreign config.json that makes transformers ask for a kernel on the hub")
def _(stage: Stage) -> Verdict:
    packages = stage.folder / "packages"
    about = packages / "kernels-0.18.2.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    stub = f"import os, pathlib\nMARKS = {str(stage.marks)!r}\n{_KERNELS}"
    (packages / "kernels.py").write_text(stub)
    path = f"{packages}:{stage.owner.python_path}"
    asked, said = [], ""
    for number, name in enumerate(_NAMES):
        model = stage.exported(stage.scratch / f"model{number}", stage.other)
        config = json.loads((model / "config.json").read_text()) | {"_attn_implementation": name}
        (model / "config.json").write_text(json.dumps(config))
        answer = ("--prompt", "hello", "--max-tokens", "2")
        victim = stage.so_tui("generate", str(model), *answer, PYTHONPATH=path)
        victim.end(_COMMAND_S)
        said = last_line(victim)
        asked += [mark.read_text() for mark in stage.marks.iterdir()]
        for mark in stage.marks.iterdir():
            mark.unlink()
    return judged(asked, f"asked for {', '.join(asked)}", said)
