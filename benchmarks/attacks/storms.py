"""Findings 1, 2, 3, 5, 7 and 9 as storms: the attacker exchanges something all the time, and the
victim passes the border 200 times, slowly.

The other attacks exchange once, at the moment that counts, and take minutes for a try.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.attacks.attack import Verdict, attack
from benchmarks.attacks.stage import Stage, Word, read

_TRIES = 200
_LIMIT_S = 300.0
_SLOWLY = f"""
import json, random, sys, time
from collections import Counter
from pathlib import Path
from typing import Any

def slow(event, _):
    if event in ("open", "os.listdir", "os.scandir") and tried:
        time.sleep(random.random() / 1000)

tried, seen, arguments = [], Counter(), sys.argv[1:]
sys.addaudithook(slow)

def passes(border):
    for _ in range({_TRIES}):
        tried.append(1)
        try:
            seen[border()] += 1
        except Exception as error:
            problems = getattr(error, "problems", ())
            code = problems[0].code if problems else getattr(error, "code", "")
            seen[code or type(error).__name__] += 1
    print(json.dumps(seen))
"""
"""The victim waits up to a millisecond before everything that is opened or listed."""
_BORDERS = {
    "own_run": """
from so_tui.runs.directory import RunDirectory, launch_digest, own_launch, own_run
from so_tui.runs.state import read_spec
run, digest = RunDirectory(Path(arguments[0])), arguments[1]

def border():
    with own_run(run) as own:
        content = own_launch(own, 1, digest=digest)
        return "EVIL" if b"EVIL" in content or read_spec(own).model.id == "EVIL" else "mine"

passes(border)
""",
    "read_spec": """
from so_tui.runs.directory import RunDirectory
from so_tui.runs.state import read_spec
run = RunDirectory(Path(arguments[0]))

def border():
    model = read_spec(run).model
    if model.id != "EVIL":
        return "mine"
    return "EVIL" if model.trust_remote_code else "theirs, as data"

passes(border)
""",
    "private_folder": """
import os
from so_tui.trust.folders import private_folder
path = Path(arguments[0])

def border():
    private_folder(path)
    found = path.lstat()
    path.rmdir()
    return "mine" if (found.st_uid, found.st_mode & 0o7777) == (os.geteuid(), 0o700) else "EVIL"

passes(border)
""",
    "loadable": """
import os
from so_tui.machine.software import code_folders
os.environ |= code_folders(os.environ)  # as a helper gets it
from so_tui.spec import find_preset
from so_tui.spec.consents import allow
from so_tui_trainer.remote_code import copied_code, load_arguments
model = find_preset("tiny").spec.changed("model", id=arguments[0], trust_remote_code=True).model
code = copied_code(model.id, "main", "model.id")
while "EVIL" in Path(code.folder, "own.py").read_text():
    code = copied_code(model.id, "main", "model.id")
allow(code)

def border():
    folder = Path(load_arguments(model, "model.id")["pretrained_model_name_or_path"])
    return "EVIL" if "EVIL" in (folder / "own.py").read_text() else "mine"

passes(border)
""",
    "private_copy": """
import os
from so_tui.machine.software import code_folders
os.environ |= code_folders(os.environ)  # as a helper gets it
from so_tui_trainer.foreign import private_copy

def border():
    copy, _ = private_copy(arguments[0], "main", "model.tokenizer")
    return "EVIL" if "EVIL" in (copy / "chat_template.jinja").read_text() else "theirs"

passes(border)
""",
    "own_checkpoint": """
from so_tui_trainer.checkpoint_folder import own_checkpoint
path = Path(arguments[0])

def border():
    with own_checkpoint(path) as at:
        return "EVIL" if "EVIL" in (at / "checkpoint.json").read_text() else "mine"

passes(border)
""",
}
"""Each prints how often it returned what; EVIL is what the attacker wants."""


def _passed(stage: Stage, border: str, attacker: tuple[Any, ...], *given: Word) -> Verdict:
    """Let the victim pass a border while the attacker exchanges."""
    storm = stage.attacks(*attacker).ready()
    code = _SLOWLY + _BORDERS[border]
    victim = stage.python(stage.owner, code, *given)
    said = victim.end(_LIMIT_S)
    if storm.process.poll() is not None or victim.code:
        raise RuntimeError(f"{storm.text} {said}")
    seen = json.loads(said.splitlines()[-1])
    if len(seen) < 2:
        raise RuntimeError(f"nothing was exchanged in time: {seen}")
    evil = seen.pop("EVIL", 0)
    told = ", ".join(f"{count} {name}" for name, count in sorted(seen.items()))
    return Verdict("SUCCEEDED" if evil else "HELD", f"{evil} of {_TRIES} evil; {told}")


def _runs(stage: Stage) -> tuple[Path, Path, str]:
    """Make a run of each user in a folder of the project, and return the hash of the launch of the
    owner's.
    """
    runs = stage.shared("runs")
    mine = stage.run_of(stage.owner, runs / "mine")
    theirs = stage.run_of(stage.owner, runs / "theirs")
    for path in (theirs / "spec.json", *theirs.glob("attempts/*/launch.json")):
        path.write_text(_evil(path))
    stage.other.give(theirs)
    code = (
        "import sys; from pathlib import Path; from so_tui.runs.directory import *; "
        "run = RunDirectory(Path(sys.argv[1])); "
        "print(launch_digest(run, run.launch_path(1).read_bytes()))"
    )
    began = stage.python(stage.owner, code, mine)
    return mine, theirs, began.end(60).strip()


def _evil(path: Path) -> str:
    tree = read(path)
    spec = tree["plan"]["spec"] if "plan" in tree else tree
    spec["model"] |= {"id": "EVIL", "trust_remote_code": True}
    return json.dumps(tree)


@attack("1g", f"own_run, {_TRIES} times, while the run is exchanged all the time")
def _(stage: Stage) -> Verdict:
    mine, theirs, digest = _runs(stage)
    return _passed(stage, "own_run", ("storm", mine, theirs), mine, digest)


@attack("2c", f"a run's spec, {_TRIES} times, while a link turns from one run to another")
def _(stage: Stage) -> Verdict:
    mine, theirs, _ = _runs(stage)
    links = [stage.scratch / name for name in ("latest", "other")]
    for link, target in zip(links, (mine, theirs), strict=True):
        link.symlink_to(target)
        stage.other.give(link)
    stage.published(theirs)
    return _passed(stage, "read_spec", ("storm", *links), links[0])


@attack("3c", f"a private folder, {_TRIES} times, whose name the attacker takes all the time")
def _(stage: Stage) -> Verdict:
    path = stage.scratch / "private"
    return _passed(stage, "private_folder", ("squat", path), path)


@attack("5d", f"allowed code, {_TRIES} times, while the model's file is exchanged all the time")
def _(stage: Stage) -> Verdict:
    folder = stage.model("model")
    for name, content in {"own.py": "good = 1\n" * 9_999, "evil.txt": "EVIL = 1\n" * 9_999}.items():
        (folder / name).write_text(content)
    stage.published(folder)
    return _passed(stage, "loadable", ("storm", folder / "own.py", folder / "evil.txt"), folder)


@attack("7d", f"copies for an export, {_TRIES} times, while a file turns into a link")
def _(stage: Stage) -> Verdict:
    secret = stage.private("secret", "EVIL")
    folder = stage.model("model")
    (folder / "chat_template.jinja").write_text("template")
    (folder / "link").symlink_to(secret)
    folder.chmod(0o755)
    stage.other.give(folder)
    exchanged = (folder / "chat_template.jinja", folder / "link")
    return _passed(stage, "private_copy", ("storm", *exchanged), folder)


@attack("9i", f"a checkpoint, {_TRIES} times, while it is exchanged all the time")
def _(stage: Stage) -> Verdict:
    mine, theirs, _ = _runs(stage)
    folder = stage.shared("checkpoints")
    for run, user, name in ((mine, stage.owner, "step-000001"), (theirs, stage.other, "theirs")):
        shutil.copytree(next(run.glob("checkpoints/step-*")), folder / name)
        user.give(folder / name)
    manifest = folder / "theirs" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace("{", '{"by": "EVIL", ', 1))
    exchanged = (folder / "step-000001", folder / "theirs")
    return _passed(stage, "own_checkpoint", ("storm", *exchanged), exchanged[0])
