"""Findings 7, 9 and 12: data, caches, checkpoints and configurations of others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.stage import PROJECT, Stage, changed, open_to_all, write

SECRET = "private words"
"""The content of a file that only the owner can read."""
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


def exports(stage: Stage, run: Path, **options: Any) -> Verdict:
    """Tell whether an export of a run has what only the owner can read."""
    out = stage.owner.home / "out"
    said = stage.said("export", run, "--to", out, **options)
    found = [path.name for path in out.glob("*") if SECRET in path.read_text(errors="replace")]
    return judged(found, f"the private words are in {found}", said)


@attack("7a", "export of a foreign run whose chat template is a link to a private file")
def _(stage: Stage) -> Verdict:
    tokenizer = stage.model("tokenizer")
    write(tokenizer / "chat_template.jinja", stage.private("private.txt", SECRET))
    return exports(stage, stage.run_of(stage.other, "run", tokenizer=tokenizer))


@attack("7b", "an export that others can read")
def _(stage: Stage) -> Verdict:
    run, out = stage.run_of(stage.owner, "mine"), stage.owner.home / "out"
    run.chmod(0o700)
    said = stage.said("export", run, "--to", out)
    if not any(out.glob("*")):
        raise RuntimeError(f"nothing was exported: {said}")
    found = [path.name for path in (out, *out.glob("*")) if path.stat().st_mode & 0o077]
    return judged(found, f"others can read {found}", "no other user can read it")


@attack("7c", "a link in a foreign data folder to a private file")
def _(stage: Stage) -> Verdict:
    private = stage.private("private.jsonl", {"text": SECRET})
    folder = stage.foreign("data", {"a.jsonl": {"text": "a row"}, "b.jsonl": private})
    said = stage.said("data", "tiny", "--set", f"data.source={folder}")
    return judged(SECRET in said, "`data` shows the private text as a row", said)


@attack("9a", "prepared rows in a shared HF_HOME that the attacker filled first")
def _(stage: Stage) -> Verdict:
    home, own = stage.shared("huggingface", 0o2777), stage.other.home / "huggingface"
    source = (
        stage.foreign("data", {"rows.jsonl": {"text": "an honest row"}}, stage.owner) / "rows.jsonl"
    )
    command = ("data", "tiny", "--set", f"data.source={source}")
    program = (stage.other.interpreter, "-P", "-m", "so_tui")
    first = stage.begin(stage.other, *program, *command, umask=0o077, HF_HOME=own)
    first.end()
    shutil.copytree(own, home, dirs_exist_ok=True)
    stage.other.give(home)
    prepared = list(home.rglob("*.arrow"))
    if not prepared:
        raise RuntimeError(f"the attacker prepared nothing: {first.text}")
    open_to_all(home)
    for path in prepared:
        path.write_bytes(path.read_bytes().replace(b"honest", b"forged"))
    said = stage.said(*command, HF_HOME=home)
    return judged("forged" in said, "`data` shows the attacker's row", said)


def resumed(stage: Stage, run: Path) -> Verdict:
    """Tell whether a run of four steps is resumed."""
    said = stage.said("resume", run, "--plain", "--set", "train.steps=5")
    return judged("finished at step 5" in said, "it trained on", said)


def _resumes(number: str, title: str, tamper: Callable[[Stage, Path], None]) -> None:
    """Register an attack on a part of a run that ``resume`` reads."""

    @attack(number, f"resume accepts {title}")
    def _(stage: Stage) -> Verdict:
        run = stage.run_of(stage.owner, "runs/mine")
        tamper(stage, run)
        return resumed(stage, run)


def _given_away(stage: Stage, run: Path) -> None:
    for path in run.glob("checkpoints/**/checkpoint.json"):
        os.chown(path, stage.other.uid, PROJECT)


def _linked(stage: Stage, run: Path) -> None:
    """The checkpoints are in the attacker's folder."""
    theirs = stage.scratch / "checkpoints"
    shutil.move(run / "checkpoints", theirs)
    stage.other.give(theirs)
    open_to_all(theirs)
    (run / "checkpoints").symlink_to(theirs)
    os.lchown(run / "checkpoints", stage.owner.uid, stage.owner.uid)


for _number, _title, _pattern in (
    ("9b", "checkpoints", "checkpoints"),
    ("9c", "a checkpoint", "checkpoints/step-*4"),
    ("9d", "an earlier attempt", "attempts/001"),
    ("9e", "a launch", "attempts/001/launch.json"),
    ("9f", "metrics", "metrics/*"),
):

    def _opened(_: Stage, run: Path, pattern: str = _pattern) -> None:
        open_to_all(*run.glob(pattern))

    _resumes(_number, f"{_title} that others can write", _opened)
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
    about = "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"
    write(packages / "kernels-0.18.2.dist-info" / "METADATA", about)
    stub = f"import os, pathlib\nMARKS = {str(stage.marks)!r}\n{_KERNELS}"
    write(packages / "kernels.py", stub)
    asked, said = [], ""
    for number, name in enumerate(_NAMES):
        model = stage.exported(f"model{number}")
        changed(model / "config.json", _attn_implementation=name)
        answer = ("--prompt", "hello", "--max-tokens", "2")
        path = f"{packages}:{stage.owner.python_path}"
        said = stage.said("generate", model, *answer, PYTHONPATH=path)
        for mark in stage.marks.iterdir():
            asked.append(mark.read_text())
            mark.unlink()
    return judged(asked, f"asked for {asked}", said)
