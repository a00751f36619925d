"""Findings 1 and 2: runs that another user exchanges between a check and a use."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.stage import PROJECT, Command, Stage

_RUN_S = 120.0
_RUN = r"--run\0([^\0]+)\0--attempt"
"""In the command lines of DeepSpeed's launcher and of the ranks."""
_SPACES = " " * 15_000_000
"""Behind a JSON document, they take a reader long enough for an exchange."""


def _bait(stage: Stage, folder: Path) -> Path:
    """Let the attacker prepare a run that loads a model with code, in a folder of theirs."""
    evil = stage.model(stage.scratch / "evil", stage.other, "exchanged")
    changes = {"id": str(evil), "weights": "pretrained", "trust_remote_code": True}
    folder.mkdir(exist_ok=True)
    stage.other.give(folder)
    made = stage.attacks("bait", folder, json.dumps(changes))
    said = made.end(60)
    if made.process.returncode:
        raise RuntimeError(f"the attacker's run could not be made: {said[-500:]}")
    return Path(said.strip())


def _exchanged(stage: Stage, bait: Path, victim: Command, attacker: Command) -> Verdict:
    """Tell whether code of the bait ran before the victim's command ended."""
    victim.wait(lambda: stage.ran("exchanged"), _RUN_S)
    said = attacker.text.strip()
    if "exchanged" not in said:
        raise RuntimeError(f"the attacker exchanged nothing: {said[-200:]} {victim.text[-500:]}")
    return judged(
        stage.ran("exchanged"), stage.ran("exchanged"), f"{said}; {_last(victim)}"
    )


def _last(command: Command) -> str:
    lines = command.text.strip().splitlines()
    return f"the command said: {lines[-1][:200] if lines else 'nothing'}"


@attack("1a", "run exchanged in a setgid folder of the project, before its ranks read it", race=True)
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    bait = _bait(stage, runs / "bait")
    attacker = stage.attacks("exchange", _RUN, bait)
    return _exchanged(stage, bait, stage.train("--runs-dir", str(runs)), attacker)


@attack("1b", "run exchanged in so-tui's own folder, made with umask 002", race=True)
def _(stage: Stage) -> Verdict:
    home = stage.owner.home
    os.chown(home, stage.owner.uid, PROJECT)
    home.chmod(0o750)
    bait = _bait(stage, stage.scratch / "bait")
    attacker = stage.attacks("exchange", _RUN, bait)
    return _exchanged(stage, bait, stage.train(umask=0o002, group=PROJECT), attacker)


@attack("1c", "run exchanged below a folder that the attacker made in a sticky one", race=True)
def _(stage: Stage) -> Verdict:
    above = stage.scratch / "so-tui"
    above.mkdir()
    stage.other.give(above)
    above.chmod(0o777)
    bait = _bait(stage, stage.scratch / "bait")
    attacker = stage.attacks("exchange", _RUN, bait)
    return _exchanged(stage, bait, stage.train(XDG_STATE_HOME=str(stage.scratch)), attacker)


@attack("1d", "run exchanged while it is resumed", race=True)
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    mine = stage.run_of(stage.owner, runs / "mine")
    bait = _bait(stage, runs / "bait")
    attacker = stage.attacks("exchange", _RUN, bait)
    resume = ("resume", "mine", "--runs-dir", str(runs), "--plain", "--set", "train.steps=6")
    del mine
    return _exchanged(stage, bait, stage.so_tui(*resume), attacker)
