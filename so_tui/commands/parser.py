"""The command line's arguments. ``handler`` of a parsed command names its function as
``module:function`` in this package.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from so_tui.launch import DEFAULT_GRACE_S
from so_tui.units import thousands

# Types for numbers on the command line, which must be finite and within a range.


def _number_from(lowest: float, highest: float) -> Callable[[str], float]:
    """Return a type for argparse: a number within a range, bounds included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest:  # also true for NaN
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a number from {lowest:,g} to {highest:,g}"
            )
        return value

    return parse


def _integer_from(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a type for argparse: an integer within a range, bounds included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also for thousands of digits
            value = lowest - 1
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not an integer from {thousands(lowest)} to {thousands(highest)}"
            )
        return value

    return parse


EXIT_CODES = {
    0: "done",
    1: "the run failed",
    2: "wrong usage or input",
    3: "refused (does not fit or cannot run here)",
    4: "stopped by the user",
    130: "interrupted before anything started",
}
_CODES = [f"{code} {meaning}" for code, meaning in EXIT_CODES.items()]
EPILOG = f"""\
exit codes: {", ".join(_CODES[:4])},
            {", ".join(_CODES[4:])}

first steps: so-tui inspect        what this machine has
             so-tui plan           what it can train
             so-tui run tiny       one minute of real training, anywhere
"""
SORTS = (
    "started",
    "name",
    "model",
    "state",
    "host",
    "step",
    "loss",
    "evaluation",
    "tokens/s",
    "mfu",
    "memory",
)
INTERNAL = ("supervise",)
"""Commands that other commands call, and users do not."""
_COMPLETION_EPILOG = """\
to install it, once:
  bash   echo 'eval "$(so-tui completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(so-tui completion zsh)"' >> ~/.zshrc      # after compinit
  fish   so-tui completion fish > ~/.config/fish/completions/so-tui.fish
"""
_MACHINE = "NAME|FILE"
_MACHINE_HELP = (
    "a name such as gh200-480 (`machines` lists them), or a file that `inspect --json` wrote"
)
_PRESET = "PRESET|FILE"
_PLAIN = "print progress lines instead of opening the dashboard"
_FORCE = "start although the plan says it does not fit"
_ASSUME_DEAD = (
    "the run has ended: its host is down, or restarted. Needed only where its processes cannot be "
    "seen from here"
)
_DETACH = "start, print the run's name and return"


class _Options(NamedTuple):
    """Options that several commands share, as parent parsers."""

    json: argparse.ArgumentParser
    machine: argparse.ArgumentParser
    runs_dir: argparse.ArgumentParser
    changes: argparse.ArgumentParser
    slurm: argparse.ArgumentParser
    output: argparse.ArgumentParser


class _ShowVersion(argparse.Action):
    """Prints the version when it is asked for: finding the commit starts git in a checkout."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from so_tui.version import version_text

        print(version_text())
        parser.exit()


class _Commands:
    """Adds the subcommands of the program."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(title="commands", metavar="COMMAND")
        self.options = _shared_options()

    def add(
        self, name: str, handler: str, text: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        """Add a command with the options of ``parents``, and return its parser."""
        description = f"{text[0].upper()}{text[1:]}."
        command = self._commands.add_parser(
            name, help=text, description=description, parents=[*parents, self.options.output]
        )
        command.set_defaults(handler=handler, takes_machine=self.options.machine in parents)
        return command


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="so-tui",
        description=(
            "Plan, launch and watch full-parameter fine-tuning with DeepSpeed SuperOffload. "
            "Without a command, opens the screen."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="show version and commit, and exit"
    )
    parser.add_argument(
        "--machine", metavar=_MACHINE, help=f"plan for another machine: {_MACHINE_HELP}"
    )
    _add_output_options(parser, default=False)
    parser.set_defaults(handler="run:open_screen", runs_dir=None, takes_machine=True)
    commands = _Commands(parser)
    _add_machine_commands(commands)
    _add_plan(commands)
    _add_preset_commands(commands)
    _add_run(commands)
    _add_run_commands(commands)
    text = "show your settings and where they are kept; with KEY=VALUE, change one"
    settings = commands.add("settings", "settings:settings", text, commands.options.json)
    text = "KEY shows one setting, KEY=VALUE changes it, and KEY= returns to its default"
    settings.add_argument("setting", nargs="?", metavar="KEY[=VALUE]", help=text)
    text = "print the code that makes a shell complete so-tui's commands"
    completion = commands.add("completion", "completion:completion", text)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="bash|zsh|fish")
    completion.formatter_class = argparse.RawDescriptionHelpFormatter
    completion.epilog = _COMPLETION_EPILOG
    return parser


def _shared_options() -> _Options:
    options = _Options(*(argparse.ArgumentParser(add_help=False) for _ in _Options._fields))
    options.json.add_argument("--json", action="store_true", help="print JSON for programs")
    # Suppressed, because a default would replace a --machine before the command.
    text = f"plan for another machine: {_MACHINE_HELP}"
    options.machine.add_argument(
        "--machine", metavar=_MACHINE, default=argparse.SUPPRESS, help=text
    )
    text = "folder of the runs (default: so-tui/runs in the XDG state folder)"
    options.runs_dir.add_argument("--runs-dir", type=_folder, metavar="DIR", help=text)
    text = "change any key of the preset, e.g. offload.ratio=0.5"
    options.changes.add_argument(
        "--set", metavar="A.B=VALUE", action="append", default=[], help=text
    )
    options.changes.add_argument(
        "--gpus", metavar="N|LIST", help="short for --set gpus=N, or a list such as 0,2"
    )
    options.changes.add_argument(
        "--nodes", metavar="N", help="several nodes of a Slurm partition: short for --set nodes=N"
    )
    options.slurm.add_argument(
        "--partition",
        metavar="NAME",
        help="run on this Slurm partition: short for --set slurm.partition=NAME",
    )
    options.slurm.add_argument(
        "--account", metavar="NAME", help="Slurm account: short for --set slurm.account=NAME"
    )
    options.slurm.add_argument(
        "--time",
        metavar="LIMIT",
        help="time limit of a job, HH:MM:SS: short for --set slurm.time_limit=LIMIT",
    )
    _add_output_options(options.output, default=argparse.SUPPRESS)
    return options


def _add_output_options(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", default=default, help="print results and errors only"
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        default=default,
        help="also print what is decided and called, on stderr",
    )


def _add_machine_commands(commands: _Commands) -> None:
    json, machine, runs_dir, changes, *_ = commands.options
    inspect = commands.add(
        "inspect",
        "machine:inspect",
        "show a machine: NUMA nodes, GPUs, memory, software",
        json,
        machine,
    )
    inspect.add_argument("--sysroot", metavar="DIR", help="read another /sys and /proc")
    inspect.add_argument(
        "--hostname",
        metavar="NAME",
        help="name of the machine of --sysroot, if its files do not contain one",
    )
    text = (
        "check this machine for problems that slow down or stop a run; with a preset, also for the "
        "needs of that run"
    )
    doctor = commands.add("doctor", "machine:doctor", text, json, machine, runs_dir, changes)
    doctor.add_argument("preset", nargs="?", metavar=_PRESET)
    doctor.add_argument(
        "--fix",
        action="store_true",
        help="fix what can be fixed: compile the CPU Adam kernel ahead of time",
    )
    text = (
        "print a script with which root partitions memory bandwidth and cache between main and "
        "Adam cores, and undoes it"
    )
    doctor.add_argument("--mpam", action="store_true", help=text)
    machines = commands.add(
        "machines",
        "machine:machines",
        "list machines to plan for by name; with a name, show that one",
        json,
    )
    machines.add_argument("name", nargs="?", metavar="MACHINE")
    text = "measure this machine's rates in under a minute; later plans use them"
    commands.add("calibrate", "machine:calibrate", text, json)
    text = (
        "measure this machine and training on it beside what plans predict, and write a report; "
        "continues one that was stopped"
    )
    validate = commands.add("validate", "machine:validate", text, json)
    validate.add_argument(
        "--minutes",
        type=_number_from(0.1, 1440),
        default=20.0,
        metavar="N",
        help="how long it may take (default 20)",
    )
    validate.add_argument(
        "--gpus",
        type=_integer_from(1, 64),
        metavar="N",
        help="most GPUs that a run may have (default: all)",
    )
    text = "folder of the report (default: so-tui/validation in the XDG state folder)"
    validate.add_argument("--out", type=_folder, metavar="DIR", help=text)
    validate.add_argument(
        "--share",
        action="store_true",
        help="also write a report that names neither the host, nor you, nor any folder",
    )


def _add_plan(commands: _Commands) -> None:
    json, machine, _, changes, slurm, _ = commands.options
    plan = commands.add(
        "plan",
        "plan:plan",
        "show what fits here and how fast; with a preset, all figures",
        json,
        machine,
        changes,
        slurm,
    )
    plan.add_argument("preset", nargs="?", metavar=_PRESET)
    plan.add_argument(
        "--probe",
        nargs="?",
        choices=("random", "spec"),
        const="random",
        metavar="DATA",
        help=(
            "train a few real steps here and correct predictions by them: with random weights and "
            "rows made for it (`random`, which downloads nothing), or with the preset's own model "
            "and data (`spec`)"
        ),
    )
    plan.add_argument(
        "--as-given",
        action="store_true",
        help="plan the preset's own settings instead of searching for better ones",
    )


def _add_preset_commands(commands: _Commands) -> None:
    json, _, _, changes, *_ = commands.options
    text = "list the presets; with a name, print that one; `add MODEL` makes a new one"
    presets = commands.add("presets", "presets:presets", text, json, changes)
    presets.add_argument(
        "preset",
        nargs="?",
        metavar=f"{_PRESET}|add",
        help="`add` makes a preset from MODEL, `delete` deletes your own; ./add is a file",
    )
    presets.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=(
            "for `add`: hub id or local folder, no weights are downloaded; for `delete`: the preset"
        ),
    )
    presets.add_argument(
        "--name",
        metavar="NAME",
        help="for `add`: the preset's name (default: made from the model's)",
    )
    presets.add_argument(
        "--revision",
        default="main",
        metavar="REVISION",
        help="for `add`: branch, tag or commit on the hub",
    )
    presets.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="for `add`: run the Python code that comes with the model",
    )
    data = commands.add(
        "data",
        "data:data",
        "show what the model would see: rows, trained tokens, packing",
        json,
        changes,
    )
    data.add_argument("preset", metavar=_PRESET)
    data.add_argument(
        "--rows",
        type=_integer_from(0, 10_000),
        default=3,
        metavar="N",
        help="rows to show (default 3)",
    )
    fetch = commands.add(
        "fetch",
        "data:fetch",
        "download a preset's model, tokenizer and data, with progress",
        changes,
    )
    fetch.add_argument("preset", metavar=_PRESET)
    text = "do now what a first run would do: download, tokenise, convert weights, compile"
    commands.add("prepare", "data:prepare", text, changes).add_argument("preset", metavar=_PRESET)


def _add_run(commands: _Commands) -> None:
    json, machine, runs_dir, changes, slurm, _ = commands.options
    run = commands.add(
        "run",
        "run:run",
        "train: start the run and show it",
        json,
        machine,
        runs_dir,
        changes,
        slurm,
    )
    run.add_argument("preset", metavar=_PRESET)
    how = run.add_mutually_exclusive_group()
    how.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing; print the plan, the binding and the exact command",
    )
    how.add_argument("--detach", action="store_true", help=_DETACH)
    how.add_argument("--plain", action="store_true", help=_PLAIN)
    run.add_argument(
        "--edit",
        action="store_true",
        help="change Slurm's batch script in $EDITOR before it is submitted",
    )
    run.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="submit this batch script, such as one that --edit kept, or edit it first",
    )
    text = (
        "what to call the run, in place of its preset's name; a date and a random part follow "
        "(NAME-0412-a3f09c)"
    )
    run.add_argument("--name", type=_run_name, metavar="NAME", help=text)
    run.add_argument("--force", action="store_true", help=_FORCE)
    run.add_argument(
        "--no-preflight",
        action="store_true",
        help="skip the check of model, tokenizer and data before the start",
    )


def _add_run_commands(commands: _Commands) -> None:
    _, _, runs_dir, changes, slurm, _ = commands.options

    def add(
        name: str, handler: str, text: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        command = commands.add(name, handler, text, runs_dir, *parents)
        command.add_argument(
            "run",
            nargs="?",
            default="latest",
            metavar="RUN",
            help="name, path or `latest` (the default)",
        )
        return command

    watch = add(
        "watch", "run:watch", "show a run, live or past, from any host that sees its folder"
    )
    watch.add_argument("--plain", action="store_true", help=_PLAIN)
    _add_records_commands(commands, add)
    stop = add("stop", "runs:stop", "stop a run after its current step, with a checkpoint")
    grace = (
        "kill it after this time (default %(default)g, and as long again after a checkpoint that "
        "was being written)"
    )
    stop.add_argument(
        "--grace",
        type=_number_from(0, 86_400),
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help=grace,
    )
    stop.add_argument("--assume-dead", action="store_true", help=_ASSUME_DEAD)
    resume = add(
        "resume",
        "run:resume",
        "continue from a run's last checkpoint, on other GPUs if necessary",
        changes,
        slurm,
    )
    resume.add_argument("--plain", action="store_true", help=_PLAIN)
    resume.add_argument("--force", action="store_true", help=_FORCE)
    resume.add_argument("--detach", action="store_true", help=_DETACH)
    resume.add_argument("--assume-dead", action="store_true", help=_ASSUME_DEAD)
    resume.add_argument(
        "--start-over",
        action="store_true",
        help="train from step 0, whatever the run saved; old checkpoints are renamed",
    )
    logs = add("logs", "runs:logs", "print what a run's processes wrote")
    logs.add_argument(
        "-n",
        "--lines",
        type=_integer_from(0, 10_000_000),
        default=200,
        help="lines from the end (default 200)",
    )
    logs.add_argument(
        "--attempt",
        type=_integer_from(1, 1_000_000),
        metavar="N",
        help="of an earlier attempt (default: the newest)",
    )
    logs.add_argument("-f", "--follow", action="store_true", help="continue until the run ends")
    export = add("export", "runs:export", "write a run's last checkpoint as a Hugging Face folder")
    export.add_argument("--to", metavar="DIR", help="folder to write (default: RUN/export)")
    _add_convert(commands)
    _add_generate(commands)
    text = "supervise a run's processes (started by `run`, not by hand)"
    supervise = commands.add("supervise", "run:supervise", text)
    supervise.add_argument("run", metavar="RUN")
    supervise.add_argument("--attempt", type=_integer_from(1, 1_000_000), required=True)
    supervise.add_argument(
        "--in-job", action="store_true", help="plan for this node of a scheduler's job first"
    )


def _add_convert(commands: _Commands) -> None:
    _, _, runs_dir, changes, *_ = commands.options
    text = (
        "convert a run's last checkpoint to DeepSpeed's universal format, or a checkpoint of "
        "DeepSpeed's ZeRO-3 to a run to resume"
    )
    convert = commands.add("convert", "data:convert", text, runs_dir, changes)
    convert.add_argument(
        "source",
        metavar="RUN|FOLDER",
        help="a run (with --to), or a folder of DeepSpeed's checkpoints (with --as)",
    )
    which = convert.add_mutually_exclusive_group(required=True)
    which.add_argument("--to", metavar="DIR", help="folder to write, for DeepSpeed")
    which.add_argument(
        "--as",
        dest="preset",
        metavar=_PRESET,
        help="preset of the new run, which has the checkpoint's model",
    )


def _add_generate(commands: _Commands) -> None:
    json, _, runs_dir, *_ = commands.options
    text = (
        "let a run's last checkpoint or an exported folder answer prompts, and its base model "
        "beside it"
    )
    generate = commands.add("generate", "models:generate", text, json, runs_dir)
    _add_model_options(generate)
    text = "what to answer; may be repeated (default: standard input)"
    generate.add_argument("--prompt", action="append", default=[], metavar="TEXT", help=text)
    generate.add_argument(
        "--raw",
        action="store_true",
        help="continue the text as it is, without the layout of a conversation",
    )
    text = (
        "talk to a run's last checkpoint or an exported folder on a screen, with its base model "
        "beside it"
    )
    _add_model_options(commands.add("chat", "models:chat", text, runs_dir))


def _add_model_options(command: argparse.ArgumentParser) -> None:
    """Add which model is asked, and how it answers."""
    text = "a run's name or folder, an exported or other model's folder, or `latest` (the default)"
    command.add_argument("model", nargs="?", default="latest", metavar="RUN|FOLDER", help=text)
    command.add_argument(
        "--compare", action="store_true", help="also ask the model that the training began with"
    )
    command.add_argument(
        "--base",
        default="",
        metavar="MODEL",
        help="folder or hub id of the model to compare with; implies --compare",
    )
    command.add_argument("--system", default="", metavar="TEXT", help="system message")
    text = (
        "what logits are divided by; 0 always takes the most probable token (default %(default)g)"
    )
    command.add_argument(
        "--temperature", type=_number_from(0, 5), default=0.7, metavar="T", help=text
    )
    text = (
        "choose among the most probable tokens that together have this probability (default "
        "%(default)g)"
    )
    command.add_argument(
        "--top-p", type=_number_from(0.001, 1), default=0.95, metavar="P", help=text
    )
    text = "longest answer (default %(default)d)"
    command.add_argument(
        "--max-tokens", type=_integer_from(1, 32_768), default=256, metavar="N", help=text
    )
    text = "the same seed gives the same answers (default %(default)d)"
    command.add_argument(
        "--seed", type=_integer_from(0, 2**32 - 1), default=0, metavar="N", help=text
    )
    text = "where to compute; `auto` takes a GPU that has the memory free (default)"
    command.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help=text)


def _add_records_commands(commands: _Commands, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands that look at runs side by side, and take them elsewhere."""
    json, _, runs_dir, *_ = commands.options
    runs = commands.add("runs", "runs:runs", "list the runs, newest first", json, runs_dir)
    runs.add_argument(
        "--sort",
        choices=SORTS,
        metavar="KEY",
        help=f"sort by {', '.join(SORTS)} (default: `runs.sort` of your settings)",
    )
    runs.add_argument("--tag", metavar="TAG", help="only runs with this tag")
    text = "compare runs: the settings that differ, and what came of them"
    compare = commands.add("compare", "runs:compare", text, json, runs_dir)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="names, paths or `latest`")
    note = add("note", "runs:edit_note", "show a run's note and tags, or change them", json)
    note.add_argument("--text", metavar="TEXT", help="replace the note; empty removes it")
    note.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="add a tag; may be repeated"
    )
    note.add_argument(
        "--untag", action="append", default=[], metavar="TAG", help="remove a tag; may be repeated"
    )
    metrics = add(
        "export-metrics",
        "runs:export_run_metrics",
        "write a run's steps as CSV, or as Parquet if pyarrow is installed",
    )
    metrics.add_argument(
        "--to",
        metavar="FILE",
        help="file to write, .csv or .parquet (default: RUN.csv in the current folder)",
    )


def _run_name(text: str) -> str:
    from so_tui.runs.listing import checked_name
    from so_tui.spec.errors import InputError

    try:
        return checked_name(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _folder(text: str) -> Path:
    from so_tui.spec.check import path_fault

    if fault := path_fault(text):
        raise argparse.ArgumentTypeError(fault)
    return Path(text)
