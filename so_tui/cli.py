"""The command line: one parser, and the one place that knows all parts. A command's code is imported when it is called."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui import __version__

if TYPE_CHECKING:
    from so_tui.spec.errors import Problem

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

EPILOG = """\
exit codes: 0 done, 1 the run failed, 2 usage or input wrong, 3 refused (does not fit or cannot run here),
            4 stopped by the user, 130 interrupted before anything started

first steps: so-tui inspect        what this machine has
             so-tui plan           what it can train
             so-tui run tiny       one minute of real training, anywhere
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; ``handler`` of the result names the function as ``module:function``."""
    parser = argparse.ArgumentParser(
        prog="so-tui",
        description="Plan, launch and watch full-parameter fine-tuning with DeepSpeed SuperOffload. Without a command, opens the screen.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"so-tui {__version__}")
    parser.add_argument("--machine", metavar="FILE", help="plan for the machine that `inspect --json` described in FILE")
    parser.set_defaults(handler="screen:open_screen", runs_dir=None, takes_machine=True)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    json_output = argparse.ArgumentParser(add_help=False)
    json_output.add_argument("--json", action="store_true", help="print JSON for programs")
    machine_file = argparse.ArgumentParser(add_help=False)
    # Not to hide one that stands before the command.
    machine_file.add_argument("--machine", metavar="FILE", default=argparse.SUPPRESS, help="plan for the machine described in FILE")
    runs_folder = argparse.ArgumentParser(add_help=False)
    runs_folder.add_argument(
        "--runs-dir", type=_folder, metavar="DIR", help="folder of the runs (default: so-tui/runs in the XDG state folder)"
    )
    changes = argparse.ArgumentParser(add_help=False)
    changes.add_argument(
        "--set", metavar="A.B=VALUE", action="append", default=[], help="change any key of the preset, e.g. offload.ratio=0.5"
    )
    changes.add_argument("--gpus", metavar="N|LIST", help="short for --set gpus=N, or a list such as 0,2")

    def add(name: str, handler: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=list(parents))
        command.set_defaults(handler=handler, takes_machine=machine_file in parents)
        return command

    inspect = add("inspect", "machine:inspect", "show this machine: NUMA nodes, GPUs, memory, software", json_output)
    inspect.add_argument("--sysroot", metavar="DIR", help="read another /sys and /proc")
    inspect.add_argument("--hostname", metavar="NAME", help="what to call the machine of --sysroot where its tree does not say")
    doctor = add(
        "doctor",
        "machine:doctor",
        "check this machine for what slows or stops a run; with a preset, also for what that run needs",
        *(json_output, machine_file, runs_folder, changes),
    )
    doctor.add_argument("preset", nargs="?", metavar="PRESET|FILE")
    doctor.add_argument("--fix", action="store_true", help="mend what can be mended: compile the CPU Adam kernel ahead of time")
    plan = add("plan", "plan:plan", "show what fits here and how fast; with a preset, the arithmetic", json_output, machine_file, changes)
    plan.add_argument("preset", nargs="?", metavar="PRESET|FILE")
    plan.add_argument(
        "--probe",
        nargs="?",
        choices=("random", "spec"),
        const="random",
        metavar="DATA",
        help="train a few real steps of it here and correct predictions by them: on random weights and embedded rows (`random`, which "
        "downloads nothing), or on the preset's own model and data (`spec`)",
    )
    plan.add_argument("--as-given", action="store_true", help="keep the preset's own settings instead of recommending better ones")
    presets = add(
        "presets", "presets:presets", "list the presets; with a name, print that one; `add MODEL` makes a new one", json_output, changes
    )
    presets.add_argument("preset", nargs="?", metavar="PRESET|FILE|add", help="`add` builds a preset from MODEL; ./add is a file")
    presets.add_argument("model", nargs="?", metavar="MODEL", help="for `add`: hub id or local folder; no weights are downloaded")
    presets.add_argument("--name", metavar="NAME", help="for `add`: the preset's name (default: made from the model's)")
    presets.add_argument("--revision", default="main", metavar="REVISION", help="for `add`: branch, tag or commit on the hub")
    presets.add_argument("--trust-remote-code", action="store_true", help="for `add`: run the Python code that comes with the model")
    add("calibrate", "calibrate:calibrate", "measure this machine's rates, in under a minute; plans use them from then on", json_output)
    data = add("data", "data:data", "show what the model would see: rows, trained tokens, packing", json_output, changes)
    data.add_argument("preset", metavar="PRESET|FILE")
    data.add_argument("--rows", type=int, default=3, metavar="N", help="rows to show (default 3)")
    fetch = add("fetch", "data:fetch", "download a preset's model, tokenizer and data with progress", changes)
    fetch.add_argument("preset", metavar="PRESET|FILE")
    prepare = add("prepare", "data:prepare", "do now what a first run would: download, tokenise, convert weights, compile", changes)
    prepare.add_argument("preset", metavar="PRESET|FILE")

    run = add("run", "run:run", "train: start the run and show it", json_output, machine_file, runs_folder, changes)
    run.add_argument("preset", metavar="PRESET|FILE")
    how = run.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="start nothing; print the plan, the binding and the exact command")
    how.add_argument("--detach", action="store_true", help="start, print the run's name and return")
    how.add_argument("--plain", action="store_true", help="print progress lines instead of opening the dashboard")
    run.add_argument("--force", action="store_true", help="start although the plan says it does not fit")
    run.add_argument("--no-preflight", action="store_true", help="skip the look at model, tokenizer and data before the start")

    watch = add("watch", "run:watch", "show a run, live or past, from any host that sees its folder", runs_folder)
    watch.add_argument("run", nargs="?", default="latest", metavar="RUN", help="name, path or `latest`")
    watch.add_argument("--plain", action="store_true", help="print progress lines instead of opening the dashboard")
    add("runs", "runs:runs", "list the runs, newest first", json_output, runs_folder)
    stop = add("stop", "runs:stop", "stop a run after its step, with a checkpoint", runs_folder)
    stop.add_argument("run", nargs="?", default="latest", metavar="RUN")
    stop.add_argument("--grace", type=float, default=600.0, metavar="SECONDS", help="kill it after so long (default 600)")
    resume = add("resume", "run:resume", "go on from a run's last checkpoint, on other GPUs if need be", runs_folder, changes)
    resume.add_argument("run", nargs="?", default="latest", metavar="RUN")
    resume.add_argument("--plain", action="store_true", help="print progress lines instead of opening the dashboard")
    resume.add_argument("--force", action="store_true", help="start although the plan says it does not fit")
    resume.add_argument("--detach", action="store_true", help="start, print the run's name and return")
    logs = add("logs", "runs:logs", "print what a run's processes wrote", runs_folder)
    logs.add_argument("run", nargs="?", default="latest", metavar="RUN")
    logs.add_argument("-n", "--lines", type=int, default=200, help="lines from the end (default 200)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")
    export = add("export", "runs:export", "write a run's last checkpoint as a Hugging Face folder", runs_folder)
    export.add_argument("run", nargs="?", default="latest", metavar="RUN")
    export.add_argument("--to", metavar="DIR", help="folder to write (default: RUN/export)")
    supervise = add("supervise", "run:supervise", "watch over a run's processes (started by `run`, not by hand)")
    supervise.add_argument("run", metavar="RUN")
    supervise.add_argument("--attempt", type=int, required=True)
    return parser


def _folder(text: str) -> Path:
    from so_tui.spec.files import path_fault

    if fault := path_fault(text):
        raise argparse.ArgumentTypeError(fault)
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or a pipe without Unicode gets a question mark instead of a traceback
    arguments = build_parser().parse_args(argv)
    from so_tui.spec.errors import InputError, Problem, Refused, SoTuiError

    module, _, function = arguments.handler.partition(":")
    handler = getattr(importlib.import_module(f"so_tui.commands.{module}"), function)
    try:
        if arguments.machine and not arguments.takes_machine:
            remedy = "Leave it out; `inspect --json` shows what FILE says of that machine"
            raise InputError([Problem(field="--machine", value=arguments.machine, message="is nothing to this command", remedy=remedy)])
        code = int(handler(arguments))
        try:
            print(end="", flush=True)  # a disk that is full is told below, not by Python when it ends; stdout may be closed, too
        except BrokenPipeError:
            _drop_output()
        return code
    except InputError as error:
        for problem in error.problems:
            print(f"so-tui: {problem}", file=sys.stderr)
        return error.exit_code
    except Refused as error:
        for reason in error.reasons:
            print(f"so-tui: refused: {reason}", file=sys.stderr)
        if error.forceable:
            print("so-tui: --force goes on all the same; that is recorded with the run", file=sys.stderr)
        return error.exit_code
    except SoTuiError as error:
        print(f"so-tui: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader (head, say) has gone
        return 0
    except OSError as error:
        mendable = _problem_of(error)
        if mendable is None:
            raise
        if mendable.field == "output":
            _drop_output()
        print(f"so-tui: {mendable}", file=sys.stderr)
        return InputError.exit_code


def _problem_of(error: OSError) -> Problem | None:
    """What is the user's to mend: a name that is too long, and a disk that takes no more. None for everything else."""
    from so_tui.spec.errors import Problem
    from so_tui.spec.wording import shown

    if error.errno == errno.ENAMETOOLONG:
        value = shown(str(error.filename)) if error.filename else ""
        return Problem(field="path", value=value, message="is too long for a file name", remedy="Give a shorter one")
    if error.errno not in _UNWRITABLE:
        return None
    message = f"cannot be written ({error.strerror})"
    if error.filename:
        return Problem(field=str(error.filename), value="", message=message, remedy="Free space there and do it again")
    return Problem(field="output", value="", message=message, remedy="Free space where it goes, or send it elsewhere")


def _drop_output() -> None:
    """Python would complain again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
