"""Findings 3 to 6 and 8: code of others by way of caches, models and presets."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.attacks.attack import Verdict, attack, judged, ran
from benchmarks.attacks.stage import (
    COMMAND_S,
    PROJECT,
    SkippedError,
    Stage,
    Word,
    open_to_all,
    write,
)
from so_tui.machine.software import EXTENSIONS, code_folders

_LIBRARY = """
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void run(void) {
    char name[300];
    snprintf(name, sizeof name, "%s/%d-%d-library", MARKS, (int)getuid(), (int)getpid());
    FILE *mark = fopen(name, "w");
    if (mark) { fputs("a library of the attacker", mark); fclose(mark); }
}
"""


def _library(stage: Stage, to: Path) -> None:
    """Compile a library that tells who loaded it."""
    source = stage.folder / "library.c"
    source.write_text(_LIBRARY)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SkippedError("there is no C compiler")
    marks = f'-DMARKS="{stage.marks}"'
    subprocess.run([compiler, "-shared", "-fPIC", marks, "-o", to, source], check=True)


def _exchanged_cache(stage: Stage, exchanged: Path, part: str, **options: Any) -> Verdict:
    """Exchange a folder of compiled code right before ranks load DeepSpeed's CPU Adam from it.

    Args:
        stage: The stage.
        exchanged: The folder in which, or above which, code is.
        part: What it is of a folder of caches.
        options: Of the victim's environment.
    """
    private = {"XDG_CACHE_HOME": str(stage.folder)}  # nobody but root can exchange what is in it
    extensions = Path(code_folders(private)[EXTENSIONS]).relative_to(stage.folder / part)
    bait = stage.scratch / "compiled"
    folder = bait / extensions / "cpu_adam"
    folder.mkdir(parents=True)
    _library(stage, folder / "cpu_adam.so")
    stage.other.give(bait)
    open_to_all(bait)
    lock = folder.relative_to(bait) / "lock"
    attacker = stage.attacks("exchange", stage.rank, bait, exchanged, lock)
    given = ("--set", "offload.engine=deepspeed", "--set", "offload.mode=zerooffload")
    victim = stage.train(*given, **options)
    victim.wait(lambda: stage.ran("library"), COMMAND_S)
    return ran(stage, victim, "library", attacker.text.strip() or "nothing to exchange")


@attack("3a", "compiled code: XDG_CACHE_HOME sticky, with the attacker's so-tui in it", race=True)
def _(stage: Stage) -> Verdict:
    compiled = stage.planted("so-tui") / "compiled"
    cache: dict[str, Any] = {"XDG_CACHE_HOME": stage.scratch}
    return _exchanged_cache(stage, compiled, "so-tui/compiled", **cache)


@attack("3b", "compiled code: ~/.cache that the project can write", race=True)
def _(stage: Stage) -> Verdict:
    cache = stage.owner.home / ".cache"
    (cache / "so-tui").mkdir(parents=True)
    stage.owner.give(cache)
    _project_enters(stage, cache)
    (cache / "so-tui").chmod(0o700)
    return _exchanged_cache(stage, cache / "so-tui", "so-tui")


@attack("4", "compiled code: a shared CCACHE_DIR with the attacker's settings")
def _(stage: Stage) -> Verdict:
    """Objects that the attacker compiled could be in it as well, which takes minutes to show."""
    if shutil.which("ccache", path="/usr/bin:/bin") is None:
        raise SkippedError("there is no ccache")
    program = stage.scratch / "program"
    mark = f"{stage.marks}/$(id -u)-$$-library"
    program.write_text(f'#!/bin/sh\necho a program of the attacker > {mark}\nexec "$@"\n')
    program.chmod(0o755)
    cache = stage.shared("ccache", 0o2777)
    (cache / "ccache.conf").write_text(f"prefix_command = {program}\n")
    stage.other.give(cache / "ccache.conf")
    return looked(stage, "library", "prepare", "tiny", CCACHE_DIR=cache)


def _hub_model(stage: Stage, *, used: bool) -> tuple[Path, Path, dict[str, Any]]:
    """Make a shared cache of the hub with a model whose code the owner trusts, and may have used.

    Returns:
        The model's folder in the cache, a preset of the owner's for it, and the environment.
    """
    home = stage.shared("huggingface")
    model = home / "hub" / "models--people--own"
    stage.model(model / "snapshots" / ("a" * 40), stage.owner, "honest")
    write(model / "refs" / "main", "a" * 40)
    _project_writes(stage, home)
    preset = own_preset(stage, "people/own")
    given: dict[str, Any] = {"HF_HOME": home}
    stage.said("trust", "people/own", "--yes", **given)
    first = stage.said("data", preset, **given) if used else ""
    if used and not stage.ran("honest"):
        raise RuntimeError(f"the owner's own use of the model failed: {first}")
    return model, preset, given


def _project_enters(stage: Stage, folder: Path) -> None:
    """Let members of the project write a folder in the owner's home, which they can enter."""
    for path, mode in ((stage.owner.home, 0o750), (folder, 0o775)):
        os.chown(path, stage.owner.uid, PROJECT)
        path.chmod(mode)


def _project_writes(stage: Stage, above: Path) -> None:
    """Let members of the project write a folder of the owner's, with all that is in it."""
    for path in (above, *above.rglob("*")):
        os.chown(path, stage.owner.uid, PROJECT)
        path.chmod(0o2770 if path.is_dir() else 0o660)


def exchange_code(*folders: Path) -> None:
    """Change the code of models after it was read."""
    for folder in folders:
        for path in folder.rglob("*.py"):
            path.write_text(path.read_text().replace("honest", "exchanged"))


def _with_code(source: str) -> dict[str, object]:
    return {"id": source, "weights": "pretrained", "trust_remote_code": True}


def own_preset(stage: Stage, source: Word) -> Path:
    path = stage.owner.home / "mine.toml"
    return stage.preset(path, stage.owner, model=_with_code(str(source)))


def looked(stage: Stage, label: str, *command: Word, **options: Any) -> Verdict:
    """Tell whether a command ran the attacker's code."""
    victim = stage.so_tui(*command, **options)
    victim.wait(lambda: stage.ran(label), COMMAND_S)
    return ran(stage, victim, label)


@attack("5a", "a trusted model's code changed in a shared HF_HOME after it was read")
def _(stage: Stage) -> Verdict:
    model, preset, given = _hub_model(stage, used=False)
    exchange_code(model)
    return looked(stage, "exchanged", "data", preset, **given)


@attack("5b", "refs/main in a shared HF_HOME moved to another commit after its first use")
def _(stage: Stage) -> Verdict:
    model, preset, given = _hub_model(stage, used=True)
    stage.model(model / "snapshots" / ("b" * 40), label="exchanged")
    (model / "refs" / "main").write_text("b" * 40)
    return looked(stage, "exchanged", "data", preset, **given)


@attack("5c", "a trusted folder's code changed while it is loaded", race=True)
def _(stage: Stage) -> Verdict:
    shared = stage.shared("models")
    model = stage.model(shared / "own", stage.owner, "honest")
    preset = own_preset(stage, model)
    files = [model / "configuration_own.py", model / "tokenization_own.py"]
    _project_writes(stage, model)
    stage.said("trust", model, "--yes")
    stage.attacks("rewrite", "honest", "exchanged", *files).ready()
    return looked(stage, "exchanged", "data", preset)


def _foreign_preset(stage: Stage, path: Path | None = None) -> Path:
    evil = stage.model("evil", label="foreign")
    path = path or stage.scratch / "theirs" / "preset.toml"
    return stage.preset(path, name="foreign", model=_with_code(str(evil)))


def _looks_at(number: str, title: str, *command: Word) -> None:
    @attack(number, f"a foreign preset with trust_remote_code: {title}")
    def _(stage: Stage) -> Verdict:
        preset = str(_foreign_preset(stage))
        words = [preset if word == "PRESET" else word for word in command]
        return looked(stage, "foreign", *words)


_looks_at("6a", "data", "data", "PRESET")
_looks_at("6b", "fetch", "fetch", "PRESET")
_looks_at("6c", "prepare", "prepare", "PRESET")
_looks_at("6d", "preflight of run --plain", "run", "PRESET", "--plain")
_looks_at("6e", "preflight of run --detach", "run", "PRESET", "--detach")


@attack("6f", "a preset exchanged in ~/.config that the project can write")
def _(stage: Stage) -> Verdict:
    presets = stage.owner.home / ".config" / "so-tui" / "presets"
    stage.preset(presets / "mine.toml", stage.owner, name="mine")
    config = stage.owner.home / ".config"
    stage.owner.give(config)
    _project_enters(stage, config)
    bait = stage.scratch / "config"
    evil = _foreign_preset(stage, bait / "presets" / "mine.toml")
    evil.write_text(evil.read_text().replace('"foreign"', '"mine"'))
    stage.other.give(bait)
    mine = config / "so-tui"
    moved = stage.begin(stage.other, "sh", "-ec", f"mv {mine} {mine}.taken; mv {bait} {mine}")
    if said := moved.end(20):
        raise RuntimeError(f"the attacker exchanged nothing: {said}")
    return looked(stage, "foreign", "data", "mine")


_OPTIONS = (
    "--container-image=evil",
    "--container-mounts=/home:/home",
    "--environment=evil",
    "--uenv=evil",
    "--bbf=evil",
    "--nodelist=evil",
    "--mail-user=evil",
)


@attack("8", "options of sbatch in a foreign preset")
def _(stage: Stage) -> Verdict:
    path, record = stage.slurm()
    preset = stage.preset(
        stage.scratch / "theirs" / "preset.toml",
        stage.other,
        slurm={"partition": "p", "options": _OPTIONS},
    )
    last = stage.said("run", preset, "--detach", "--no-preflight", PATH=path)
    script = record.read_text() if record.exists() else ""
    found = [option for option in _OPTIONS if option in script]
    return judged(found, f"the script has {found}", last)
