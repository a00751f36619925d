"""Finding 50: bad luck with a process, a shell or a machine. Nobody attacks."""

from __future__ import annotations

import subprocess

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.stage import SHORT, Stage

_LIMIT_S = 240.0
"""The longest time for a command on a busy host."""
_GRACE_S = 20.0
_TRAIN = "run tiny --plain --no-preflight " + " ".join(f"--set {setting}" for setting in SHORT)
_TRAINING = "until grep -qs '\"training\"' runs/*/state.json; do sleep 0.2; done"
_PIDS = "$(pgrep -U $UID -f 'm so_tui ru[n]')"
_PREFLIGHT = "until pgrep -U $UID -f tools.check_input[s]; do sleep 0.2; done"
_LOOP = "ln -s loop loop; export {variable}=$HOME/loop;"
_GONE = "mkdir gone; cd gone; rmdir ../gone;"


def _accident(number: str, title: str, script: str, said: str, *unsaid: str) -> None:
    """Register a script in which ``so_tui`` is the command and ``$?`` is told in the end.

    Args:
        number: Its id.
        title: What goes wrong.
        script: Lines of bash, in the home of the owner. ``$MODEL`` is an export, ``$SMALL`` a file
            system of 60 KiB.
        said: What must be printed, such as the field of the message.
        unsaid: What must not be printed.
    """

    @attack(f"50{number}", title)
    def _(stage: Stage) -> Verdict:
        model = stage.exported("model", stage.owner) if "$M" in script else ""
        small = stage.folder / "small"
        small.mkdir()
        options = f"size=60k,uid={stage.owner.uid},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", small], check=True)
        try:
            prefix = 'so_tui() { "$PY" -P -m so_tui "$@"; }; cd; '
            begun = stage.begin(
                stage.owner,
                *("bash", "-c", f"{prefix}{script}\necho code $?"),
                PY=stage.owner.interpreter,
                MODEL=str(model),
                SMALL=str(small),
            )
            text = begun.end(_LIMIT_S)
            begun.wait(lambda: not stage.processes(stage.owner), _GRACE_S)
            left = [process.pid for process in stage.processes(stage.owner)]
        finally:
            stage.kill_all()
            subprocess.run(["umount", "-l", small], check=True)
        found = [word for word in (*unsaid, "Traceback", "panicked") if word in text]
        wrong = found or left or said not in text or "code " not in text
        return judged(wrong, f"{found} {left} {text}", text)


_accident("a", "the screen without standard input", "so_tui <&-", "needs a terminal")
_accident("b", "a command without standard streams", "so_tui data tiny <&- >&- 2>&-", "code 0")
_accident("c", "an error on a full disk", "so_tui plan nosuch 2>/dev/full", "code 2")
_accident("d", "data in a folder that is gone", f"{_GONE} so_tui data tiny", "working folder")
_accident(
    "e", "presets in a folder that is gone", f"{_GONE} so_tui presets add .", "working folder"
)
for _number, _variable, _command, _said in (
    ("f", "XDG_STATE_HOME", "doctor", "Training packages"),
    ("g", "XDG_STATE_HOME", "run tiny --plain", "--runs-dir"),
    ("h", "XDG_CONFIG_HOME", "settings screen.units=decimal", "XDG_CONFIG_HOME"),
    ("i", "XDG_CACHE_HOME", "data tiny", "XDG_CACHE_HOME ="),
    ("j", "HF_HOME", "data tiny", "code 0"),
):
    _script = f"{_LOOP.format(variable=_variable)} so_tui {_command}"
    _accident(_number, f"{_command}: {_variable} is a link to itself", _script, _said)
_accident(
    "k",
    "the cache is a link that leads nowhere",
    "ln -s /nonexistent/cache away; XDG_CACHE_HOME=$HOME/away so_tui data tiny",
    "XDG_CACHE_HOME =",
    "data.source",
)
_accident("l", "few open files", "ulimit -n 12; so_tui generate $MODEL --prompt a", "ulimit -n")
_accident("m", "little address space", "ulimit -v 500000; so_tui data tiny", "more memory")
_accident("n", "small files", "ulimit -f 1; so_tui data tiny | cat", "XDG_CACHE_HOME =")
_accident("o", "a full cache", "XDG_CACHE_HOME=$SMALL so_tui data tiny", "XDG_CACHE_HOME =")
_accident(
    "p",
    "a prompt in Latin-1",
    "printf 'gr\\374n' | so_tui generate $MODEL --max-tokens 2",
    "valid UTF-8",
)
_accident(
    "q",
    "a folder whose name is not UTF-8",
    "mv $MODEL $'m\\374'; so_tui generate ./$'m\\374' --prompt a",
    "valid UTF-8",
)
_accident("r", "a terminal of 10^8 columns", "COLUMNS=99999999 so_tui plan tiny | wc -L", "1000")
_accident(
    "s",
    "a C locale and a home with an accent",
    "export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0; mkdir é; HOME=$HOME/é so_tui data tiny",
    "code 0",
)
_accident("t", "run: its log is on a full disk", f"so_tui {_TRAIN} >/dev/full", "continues")
_accident(
    "u",
    "run: the reader of its output ends",
    f"set -o pipefail; so_tui {_TRAIN} | head -1; echo ended $?; so_tui runs",
    "4/4",
)
for _number, _title, _happens in (
    ("v", "moved", "mv runs/* moved"),
    ("w", "removed", "rm -rf runs/*"),
):
    _script = f"so_tui {_TRAIN} --set train.steps=9999 --runs-dir runs & {_TRAINING}; {_happens}"
    _script += "; wait $!"
    _accident(_number, f"the folder of a run is {_title} while it trains", _script, "deleted")
_accident(
    "x",
    "the terminal is lost during the checks of a run",
    f"so_tui run tiny --plain & {_PREFLIGHT}; kill -HUP {_PIDS}; wait $!",
    "code 129",
)
_accident(
    "y",
    "an error while the disk of temporary files is full",
    "head -c 60k /dev/zero >$SMALL/a; echo x >a.csv; export TMPDIR=$SMALL;"
    " so_tui data tiny --set data.source=$HOME/a.csv",
    "data.",
)
_accident("z", "a umask of 0777", "umask 0777; so_tui settings screen.units=decimal", "decimal")
