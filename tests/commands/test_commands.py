"""The command line as a user meets it: what is printed, and the exit code."""

from __future__ import annotations

import json
import os
import resource
import shlex
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import msgspec
import pytest

from so_tui.cli import main
from so_tui.commands.parser import build_parser
from so_tui.machine import inspect_machine
from so_tui.runs import MetricsWriter, RunDirectory, create_run, read_state, write_state
from so_tui.runs.liveness import identify
from so_tui.spec import find_preset
from tests.support.commands import problems_of, refusals_of
from tests.support.machines import machine_json
from tests.support.records import step_record


@pytest.fixture
def ended_run(tmp_path: Path) -> RunDirectory:
    """A run that failed for a reason that rich would take for markup, and that so-tui must print
    literally.
    """
    run = create_run(find_preset("tiny").spec, tmp_path / "runs")
    reason = "[/lib/gloo/pair.cc:553] closed [bold] by :x: peer"
    ended = msgspec.structs.replace(read_state(run), state="failed", reason=reason)
    write_state(run, msgspec.structs.replace(ended, attempt=1, exit_code=1))
    return run


def command(
    *argv: str, stdout: IO[str] | int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    called = [sys.executable, "-m", "so_tui", *argv]
    return subprocess.run(
        called,
        env={**os.environ, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("width", "lines"), [("80", 1), ("160", 0)])
def test_in_a_narrow_terminal_reasons_come_below_the_table(
    ended_run: RunDirectory,
    width: str,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Texts of others are printed as they are."""
    monkeypatch.setenv("COLUMNS", width)
    assert main(["runs", "--runs-dir", str(ended_run.path.parent)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"{ended_run.name}: [/lib") for line in printed) == lines
    assert "[/lib/gloo/pair.cc:553] closed [bold] by :x: peer" in " ".join(
        word for line in printed for word in line.split()
    )


@pytest.mark.parametrize(
    ("width", "name"),
    [("50", "tiny-0412-a3"), ("80", 64 * "n"), ("40", 64 * "n"), ("110", 64 * "n")],
)
def test_in_a_narrow_terminal_no_number_of_a_run_is_cut(
    width: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = create_run(find_preset("tiny").spec, tmp_path / "runs", name)
    ended = {"state": "finished", "reason": "", "step": 30, "total_steps": 30}
    write_state(run, msgspec.structs.replace(read_state(run), **ended))
    writer = MetricsWriter(run, 1)
    for step in range(1, 31):
        writer.append(step_record(step, loss=5.5737))
    writer.close()
    monkeypatch.setenv("COLUMNS", width)
    assert main(["runs", "--runs-dir", str(run.path.parent)]) == 0
    printed = capsys.readouterr().out
    assert {"finished", "30/30", "5.5737"} <= set(printed.split())
    names = [line[: int(width) - 28].partition(" ")[0] for line in printed.splitlines()[1:]]
    assert "".join(names) == name


def test_a_problem_of_a_preset_names_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "so-tui" / "presets"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('extends = "tiny"\nname = "mine"\n[offload]\nratoi = 1\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["presets"]) == 0, "the others are listed"
    printed = capsys.readouterr()
    assert "Keys of [offload]" in " ".join(printed.err.split())
    assert "offload" not in printed.out
    assert "qwen3-14b" in printed.out


@pytest.mark.parametrize("argv", [("doctor",), ("run", "tiny", "--dry-run")])
def test_terminal_without_unicode_gets_question_marks(
    argv: tuple[str, ...],
) -> None:
    done = command(*argv, PYTHONIOENCODING="ascii")
    assert (done.returncode in (0, 3), done.stderr) == (True, "")
    assert done.stdout


def test_export_into_a_folder_that_cannot_be_written(ended_run: RunDirectory) -> None:
    assert problems_of("export", str(ended_run.path), "--to", "/proc/nowhere") == [
        ("not-writable", "--to", "/proc/nowhere")
    ]


def test_stopping_an_ended_run(ended_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", str(ended_run.path)]) == 0
    assert "has already ended: failed" in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "code"), [("5", "too-few-gpus"), ("0,7", "no-such-gpu")])
def test_more_gpus_than_there_are(gpus: str, code: str) -> None:
    argv = ("run", "tiny", "--gpus", gpus, "--machine", "gh200-quad-120", "--dry-run")
    assert refusals_of(*argv)[0] == code
    assert main(argv) == 3


def test_all_problems_with_set_are_reported_together() -> None:
    wrong = ("offload.ratio=2", "train.microbatch=4", "train.learning_rate=5")
    options = [word for change in wrong for word in ("--set", change)]
    fields = {field for _, field, _ in problems_of("plan", "tiny", *options)}
    assert fields == {"train.microbatch", "offload.ratio", "train.learning_rate"}
    without = problems_of("plan", "tiny", "--set", "a", "--set", "b")
    assert without == [("no-equals-sign", "--set", "a"), ("no-equals-sign", "--set", "b")]


def test_dry_run_warns_of_missing_files(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", "tiny", "--dry-run", "--set", "data.source=/absent/rows.jsonl"]
    assert main(argv) == 0
    told = "warning: data.source = /absent/rows.jsonl: there is no such file or folder"
    assert told in capsys.readouterr().err
    assert main([*argv, "--machine", "gh200-480", "--gpus", "1"]) == 0
    assert told not in capsys.readouterr().err, "another machine has other files"


def test_machine_file_is_for_planning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before or after the command."""
    file = tmp_path / "machine.json"
    file.write_bytes(machine_json(inspect_machine()).replace(b'"hostname":"', b'"hostname":"far-'))
    option = ["--machine", str(file)]
    for argv in ([*option, "plan", "tiny", "--json"], ["plan", "tiny", "--json", *option]):
        assert main(argv) == 0
    capsys.readouterr()
    computed_s = os.times().children_user
    for argv, code in (
        ([*option, "runs"], "unused-option"),
        (["doctor", "--fix", *option], "not-this-machine"),
        ([*option, "run", "tiny"], "not-this-machine"),
    ):
        assert problems_of(*argv) == [(code, "--machine", str(file))]
    ((_, field, value),) = problems_of("doctor", "nosuch", "--fix")
    assert (field, value) == ("preset", '"nosuch"')
    assert os.times().children_user - computed_s < 5, "nothing is compiled for it"


def test_damaged_run_is_listed(ended_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ended_run.path.parent
    damaged = create_run(find_preset("tiny").spec, folder)
    damaged.state_path.write_text('{"v":1')
    assert main(["runs", "--json", "--runs-dir", str(folder)]) == 0
    listed = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert {name: run["state"] for name, run in listed.items()} == {
        ended_run.name: "failed",
        damaged.name: "lost",
    }
    assert "state.json cannot be read" in listed[damaged.name]["reason"]
    assert problems_of("watch", str(damaged.path))[0][1] == "run"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("--set", "a.b=c"), "preset-needed"),
        (("--gpus", "0,1"), "not-a-count"),
        (("--as-given",), "preset-needed"),
    ],
)
def test_a_table_takes_no_settings_of_a_preset(
    argv: tuple[str, ...], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ((found, field, _),) = problems_of("plan", *argv)
    assert (found, field) == (code, argv[0])
    assert main(["plan", "--gpus", "1"]) == 0
    assert "2 rank" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_doctor_compiles_ahead_and_keeps_its_json_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # DeepSpeed's own takes a minute or more to compile: with a file in its way it fails at once,
    # which must not hide the rest.
    (tmp_path / "extensions").mkdir(mode=0o700)
    (tmp_path / "extensions" / "cpu_adam").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    main(["doctor", "--fix", "--json"])
    out, err = capsys.readouterr()
    assert "findings" in json.loads(out)
    assert "CPU Adam kernel: " in err
    assert "cannot be compiled" in err
    assert list((tmp_path / "cache" / "so-tui" / "kernels").glob("adam-*.so"))


def test_a_preset_that_cannot_be_planned_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "so-tui" / "presets"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(
        'extends = "tiny"\nname = "mine"\n[model.config]\nnum_hidden_layers = 2\n'
    )
    assert main(["plan"]) == 0
    assert "mine is left out" in capsys.readouterr().out
    assert main(["plan", "mine"]) == 2
    assert "model.parameters" in capsys.readouterr().err


def test_other_settings_stay_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the command that it prints carries them."""
    length, ratio = ("--set", "data.sequence_length=128"), ("--set", "offload.ratio=0.5")
    assert main(["plan", "tiny", "--gpus", "1", *length]) == 0
    out = capsys.readouterr().out
    assert "recommended" in out
    assert "--set data.sequence_length=128" in out.splitlines()[-1]
    assert main(["plan", "tiny", "--gpus", "1", *ratio]) == 0
    out = capsys.readouterr().out
    assert "recommended" not in out
    assert "the plan as given" in out


@pytest.mark.parametrize(
    "argv",
    [
        ("plan", "{}"),
        ("presets", "add", "{}"),
        ("plan", "tiny", "--set", "data.source={}"),
        ("plan", "tiny", "--set", "model.tokenizer={}"),
        ("logs", "./{}"),
        ("inspect", "--sysroot", "{}"),
        ("plan", "~nobody-of-this-name/x.toml"),
        ("plan", "tiny", "--set", "data.source=~nobody-of-this-name/rows"),
    ],
)
def test_bad_path_is_reported(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.format(300 * "x") for word in argv]) == 2
    assert capsys.readouterr().err.startswith("so-tui: ")


@pytest.mark.parametrize("preset", [(), ("tiny",)])
@pytest.mark.parametrize("gpus", ["9" * 30, "²", ",", "0,a", "1000", "0", "-1", "0 1", "0, 1 2"])
def test_an_invalid_number_of_gpus_is_reported(
    gpus: str, preset: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *preset, f"--gpus={gpus}"]) == 2
    printed = capsys.readouterr().err
    assert f"gpus = {gpus}: " in printed
    assert "$" not in printed, "no path in an internal structure"


def test_offered_command_plans_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """For another number of GPUs elsewhere."""
    changed = ("--machine", "gh200-quad-120", "--set", "data.sequence_length=128")
    assert main(["plan", "tiny", *changed]) == 0
    printed = capsys.readouterr().out.splitlines()
    (offer,) = [line for line in printed if "so-tui plan tiny --gpus" in line]
    _, *argv = shlex.split(offer[offer.index("so-tui plan") :])
    plan = build_parser().parse_args(argv)
    assert (plan.preset, plan.machine) == ("tiny", "gh200-quad-120")
    assert plan.set == ["data.sequence_length=128"]


def test_two_ways_to_give_the_number_of_gpus_must_agree() -> None:
    contradicting = problems_of("run", "tiny", "--dry-run", "--gpus", "2", "--set", "gpus=1")
    assert contradicting == [("contradicting-options", "--gpus", "2")]
    assert problems_of("plan", "tiny", "--nodes", "0") == [("out-of-range", "nodes", "0")]
    assert problems_of("plan", "--nodes", "0") == [("out-of-range", "nodes", "0")]
    assert problems_of("plan", "--nodes", "many") == [("wrong-type", "nodes", '"many"')]
    assert main(["run", "tiny", "--dry-run", "--gpus", "1", "--set", "gpus=1"]) == 0


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("presets", "tiny", "extra"), ("unused-option", "MODEL", '"extra"')),
        (("presets", "tiny", "--name", "foo"), ("unused-option", "--name", '"foo"')),
        (("presets", "--name", "foo"), ("unused-option", "--name", '"foo"')),
        (("presets", "--trust-remote-code"), ("unused-option", "--trust-remote-code", "")),
        (("presets", "--gpus", "2"), ("preset-needed", "--gpus", '"2"')),
        (("presets", "add"), ("missing", "MODEL", "")),
    ],
)
def test_useless_options_are_refused(argv: tuple[str, ...], problem: tuple[str, str, str]) -> None:
    assert problems_of(*argv) == [problem]


def test_problem_and_refusal_in_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "tiny", "extra"]) == 2
    told = 'MODEL = "extra": has an effect only with `add`. Write so-tui presets add MODEL.'
    assert capsys.readouterr().err == f"so-tui: {told}\n"
    argv = ["run", "llama-3.3-70b", "--dry-run", "--machine", "gh200-480", "--gpus", "1"]
    assert main(argv) == 3
    *refusals, last = capsys.readouterr().err.splitlines()
    assert all(line.startswith("so-tui: refused: ") for line in refusals)
    assert last == "so-tui: --force starts it anyway; the run records that"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_is_reported(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = command("runs", stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "output: cannot be written (No space left on device)" in done.stderr


def test_a_file_on_a_full_disk_is_named(tmp_path: Path) -> None:
    """Not the output: redirecting that would not stop the run."""
    run = create_run(find_preset("tiny").spec, tmp_path / "runs")
    mine = identify(os.getpid(), "supervisor")
    assert mine is not None
    lives = msgspec.structs.replace(read_state(run), state="training", started=1.0, attempt=1)
    here = {"host": socket.gethostname(), "supervisor": mine, "processes": (mine,)}
    write_state(run, msgspec.structs.replace(lives, **here))
    done = subprocess.run(
        [sys.executable, "-m", "so_tui", "stop", str(run.path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"{run.control_dir / 'stop'}: cannot be written (File too large)" in done.stderr


def test_a_reader_that_has_gone_is_no_failure() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as gone:  # noqa: PTH123 - a descriptor
        done = command("presets", stdout=gone)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("grace", ["nan", "inf", "-inf", "-5", "1e9", "9" * 5000, ""])
def test_a_grace_that_is_no_time_is_refused(grace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["stop", f"--grace={grace}"])
    assert caught.value.code == 2
    assert "--grace" in capsys.readouterr().err
