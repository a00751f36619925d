"""The command line as a user meets it: what is printed, and the exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shlex
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.runs import MetricsWriter, RunDirectory, create_run, read_state
from so_tui.runs.liveness import identify
from so_tui.spec import InputError, Problem, find_preset
from tests.support.commands import Call, in_a_process, problems_of
from tests.support.hostile import IN_A_NAME, unsafe
from tests.support.machines import machine_json, superchips
from tests.support.make_run import write_run
from tests.support.records import change_state, named_run, step_record


@pytest.mark.parametrize("width", [80, 160])
def test_reasons_come_below_the_table_of_runs(
    failed_run: RunDirectory, width: int, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """Texts of others are printed as they are."""
    monkeypatch.setenv("COLUMNS", str(width))
    printed = call("runs --runs-dir", failed_run.path.parent).out
    assert ("started" in printed.splitlines()[0]) == (width >= 110)
    assert sum(line.startswith(f"{failed_run.name}: [/") for line in printed.splitlines()) == 1
    assert "[/lib/gloo/pair.cc:553] closed [bold] by :x: peer" in " ".join(printed.split())


@pytest.mark.parametrize(("width", "name"), [("50", "tiny-0412-a3"), ("40", 64 * "n")])
def test_in_a_narrow_terminal_no_number_of_a_run_is_cut(
    width: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    run = named_run(find_preset("tiny").spec, tmp_path / "runs", name)
    change_state(run, state="finished", reason="", step=30, total_steps=30)
    writer = MetricsWriter(run, 1)
    for step in range(1, 31):
        writer.append(step_record(step, loss=5.5737))
    writer.close()
    monkeypatch.setenv("COLUMNS", width)
    printed = call("runs --runs-dir", run.path.parent).out
    assert {"finished", "30/30", "5.5737"} <= set(printed.split())
    names = [line[: int(width) - 28].partition(" ")[0] for line in printed.splitlines()[1:]]
    assert "".join(names) == name


def test_unknown_arguments_lead_to_the_usage_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for line, command in ((["note", "run", "words"], "so-tui note"), (["--what"], "so-tui")):
        with pytest.raises(SystemExit, match="2"):
            main(line)
        said = capsys.readouterr().err
        assert said.startswith(f"usage: {command} [")
        assert said.endswith(f"{command}: error: unrecognized arguments: {line[-1]}\n")


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("tiny --steps 10", "--steps is set with --set train.steps=10"),
        ("tiny --lr=1e-4", "--lr is set with --set train.learning_rate=1e-4"),
        ("--steps 10 tiny", "--steps is set with --set train.steps=VALUE"),
        ("tiny --epochs -v", "--epochs is set with --set train.epochs=VALUE"),
        ("tiny --dataset='my rows'", "--dataset is set with --set 'data.source=my rows'"),
    ],
)
def test_an_option_of_another_tool_is_said_with_its_value(
    capsys: pytest.CaptureFixture[str], words: str, setting: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *shlex.split(words)])
    assert capsys.readouterr().err.endswith(f"\n{setting}\n")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train tiny", "so-tui run"),
        ("-q ls", "so-tui runs"),
        ("--machine gh200-120 estimate", "so-tui plan"),
        ("docter", "doctor"),
        ("tiny", "so-tui run tiny"),
        ("phi-4 --gpus 1", "so-tui run phi-4"),
    ],
)
def test_a_word_that_is_no_command_leads_to_the_one_that_is_meant(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(line))
    said = capsys.readouterr().err
    assert f"`{meant}`" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ("--steps 10", "train.steps"),
        ("--lr=1e-4", "train.learning_rate"),
        ("--batch-size 4", "train.micro_batch"),
        ("--micro_batch 4", "train.micro_batch"),
        ("--output-dir there", "checkpoint.folder"),
    ],
)
def test_an_option_of_other_tools_leads_to_its_key(
    options: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("run tiny", "plan tiny", "resume latest"):
        with pytest.raises(SystemExit, match="2"):
            main(shlex.split(f"{command} {options}"))
        assert f" --set {key}=" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # a command without settings
        main(shlex.split(f"logs latest {options}"))
    assert "--set" not in capsys.readouterr().err


def test_a_model_in_place_of_a_preset_leads_to_one() -> None:
    for model, remedy in (
        ("Qwen/Qwen3-14B", "qwen3-14b"),
        ("some/model", "presets add some/model"),
    ):
        with pytest.raises(InputError) as caught:
            find_preset(model)
        (problem,) = caught.value.problems
        assert (problem.code, problem.field, problem.value) == (
            "model-not-preset",
            "preset",
            f'"{model}"',
        )
        assert remedy in problem.remedy


def test_a_run_is_stopped_or_resumed_by_its_name_or_after_a_question(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3, name="live")
    for command in ("stop", "resume"):
        assert problems_of(command, "--runs-dir", str(tmp_path)) == [("run-not-named", "run", "")]
    change_state(write_run(tmp_path, steps=3, name="ended"), state="failed")
    os.utime(run.spec_path, (1e9, 1e9))  # the other is the newer
    ended, said = _stop_on_a_terminal(tmp_path)
    assert ended == InputError.exit_code
    assert "stop live (training, step 3)? [y/N]" in said
    assert "was not asked" in said
    assert read_state(run).state == "training"


def test_nobody_is_asked_about_stopping_a_run_that_has_ended(tmp_path: Path) -> None:
    change_state(write_run(tmp_path, steps=3, name="ended"), state="failed")
    ended, said = _stop_on_a_terminal(tmp_path)
    assert (ended, said.strip()) == (0, "ended has already ended: failed")


def _stop_on_a_terminal(runs_dir: Path) -> tuple[int, str]:
    """Return the exit code of ``so-tui stop``, to which the user says no, and what it said."""
    terminal, its_end = pty.openpty()
    os.write(terminal, b"n\n")
    line = [sys.executable, "-P", "-m", "so_tui", "stop", "--runs-dir", str(runs_dir)]
    ended = subprocess.run(line, stdin=its_end, stdout=its_end, stderr=its_end, check=False)
    said = os.read(terminal, 10_000).decode()
    return ended.returncode, said.removeprefix("n\r\n")


def test_metrics_replace_a_file_only_by_force(tmp_path: Path, call: Call) -> None:
    run, table = write_run(tmp_path, steps=3), tmp_path / "table.csv"
    table.write_text("mine")
    line = f"export-metrics {run.path} --to {table}"
    ((code, field, _),) = problems_of(*line.split())
    assert (code, field) == ("file-exists", "--to")
    assert table.read_text() == "mine"
    assert call(f"{line} --force").code == 0
    assert len(table.read_text().splitlines()) == 4


def test_lines_in_a_file_stay_whole(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for command, whole in (("machines", "gh200-120"), ("data tiny", "rows as the model sees them")):
        lines = call(command).out.splitlines()
        assert 90 < max(map(len, lines)) < 300
        assert all(line == line.rstrip() for line in lines)
        assert sum(whole in line for line in lines) == 1


def test_a_wrong_preset_is_named_and_the_others_are_listed(own_presets: Path, call: Call) -> None:
    mine = 'extends = "tiny"\nname = "mine"\n'
    (own_presets / "mine.toml").write_text(mine + "[offload]\nratoi = 1\n")
    code, out, err = call("presets")
    assert (code, "offload" in out, "qwen3-14b" in out) == (0, False, True)
    assert "Keys of [offload]" in " ".join(err.split())
    (own_presets / "mine.toml").write_text(mine + "[model.config]\nnum_hidden_layers = 2\n")
    code, out, _ = call("plan")
    assert (code, "mine is left out" in out) == (0, True), "no plan can be made of it"
    assert [field for _, field, _ in problems_of("plan", "mine")] == ["model.parameters"]


@pytest.mark.parametrize("line", ["doctor", "run tiny --dry-run"])
def test_terminal_without_unicode_gets_question_marks(line: str) -> None:
    done = in_a_process(*line.split(), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode in (0, 3), done.stderr, bool(done.stdout)) == (True, "", True)


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        (
            "plan tiny --set offload.ratio=2 --set train.microbatch=4 --set train.learning_rate=5",
            'unknown-key train.microbatch "4", out-of-range train.learning_rate 5, '
            "out-of-range offload.ratio 2",
        ),
        ("plan tiny --set a --set b", "no-equals-sign --set a, no-equals-sign --set b"),
        ("plan tiny --nodes 0", "out-of-range nodes 0"),
        ("plan --nodes many", 'wrong-type nodes "many"'),
        ("plan --set a.b=c", "preset-needed --set "),
        ("plan --gpus 0,1", "not-a-count --gpus 0,1"),
        ("run tiny --dry-run --gpus 2 --set gpus=1", "contradicting-options --gpus 2"),
        ("run tiny --partition gh --dry-run --edit", "unused-option --edit "),
        ("--machine gh200-480 run tiny", "not-this-machine --machine gh200-480"),
        ("--machine gh200-480 runs", "unused-option --machine gh200-480"),
        ("doctor --fix --machine gh200-480", "not-this-machine --machine gh200-480"),
        ("doctor nosuch --fix", 'unknown-preset preset "nosuch"'),
        ("inspect --hostname here", "unused-option --hostname here"),
        ("inspect --machine gh200-480 --hostname here", "unused-option --machine gh200-480"),
        ("presets tiny --name foo", 'unused-option --name "foo"'),
        ("presets --trust-remote-code", "unused-option --trust-remote-code "),
        ("presets --gpus 2", 'preset-needed --gpus "2"'),
        ("presets add", "missing MODEL "),
        ("export latest --to /proc/nowhere", "not-writable --to /proc/nowhere"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_done(line: str, problems: str) -> None:
    create_run(find_preset("tiny").spec)
    children_s = os.times().children_user
    assert ", ".join(map(" ".join, problems_of(*line.split()))) == problems
    assert os.times().children_user - children_s < 5, "nothing is compiled for it"


def test_dry_run_warns_of_missing_files(call: Call) -> None:
    line = "run tiny --dry-run --set data.source=/absent/rows.jsonl"
    told = "warning: data.source = /absent/rows.jsonl: there is no such file or folder"
    code, _, err = call(line)
    assert (code, told in err) == (0, True)
    code, _, err = call(f"{line} --machine gh200-480 --gpus 1 --set gpus=1")  # they agree
    assert (code, told in err) == (0, False), "another machine has other files"


def test_ended_run_is_not_stopped_and_damaged_one_is_listed(
    failed_run: RunDirectory, call: Call
) -> None:
    code, out, _ = call("stop", failed_run.path)
    assert (code, "has already ended: failed" in out) == (0, True)
    damaged = create_run(find_preset("tiny").spec, failed_run.path.parent)
    damaged.state_path.write_text('{"v":1')
    listed = json.loads(call("runs --json --runs-dir", failed_run.path.parent).out)["runs"]
    states = {run["name"]: run["state"] for run in listed}
    assert states == {failed_run.name: "failed", damaged.name: "lost"}
    assert any("state.json cannot be read" in run["reason"] for run in listed)
    assert problems_of("watch", str(damaged.path))[0][1] == "run"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_doctor_compiles_ahead_and_keeps_its_json_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # DeepSpeed's own takes a minute or more to compile: with a file in its way it fails at once,
    # which must not hide the rest.
    (tmp_path / "extensions").mkdir(mode=0o700)
    (tmp_path / "extensions" / "cpu_adam").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    _, out, err = call("doctor --fix --json")
    assert "findings" in json.loads(out)
    assert "CPU Adam kernel: " in err
    assert "cannot be compiled" in err
    assert list((tmp_path / "cache" / "so-tui" / "kernels").glob("adam-*.so"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", ["run", "tiny"]),
        ("--machine gh200-quad-120", ["run", "tiny"]),
        ("--gpus 1 --set offload.ratio=0.5", ["run", "tiny", "offload.ratio=0.5", "--gpus", "1"]),
    ],
)
def test_a_plan_ends_with_the_command_that_trains_just_that(
    options: str, words: list[str], call: Call
) -> None:
    """With what the user set, and nothing else."""
    *_, offer = call(f"plan tiny {options}").out.splitlines()
    _, *argv = shlex.split(offer[offer.index("so-tui run") :])
    assert [word for word in argv if word != "--set"] == words


@pytest.mark.parametrize(
    "line",
    [
        "plan {}",
        "presets add {}",
        "plan tiny --set data.source={}",
        "plan tiny --set model.tokenizer={}",
        "logs ./{}",
        "inspect --sysroot {}",
        "plan ~nobody-of-this-name/x.toml",
        "plan tiny --set data.source=~nobody-of-this-name/rows",
    ],
)
def test_bad_path_is_reported(line: str, call: Call) -> None:
    code, _, err = call(line.format(300 * "x"))
    assert (code, err.startswith("so-tui: ")) == (2, True)


@pytest.mark.parametrize("gpus", ["9" * 30, "²", ",", "0,a", "02", "1000", "0", "-1", "0, 1 2"])
def test_an_invalid_number_of_gpus_is_reported(gpus: str, call: Call) -> None:
    for line in ("plan", "plan tiny"):
        code, _, err = call(line, f"--gpus={gpus}")
        assert (code, f"gpus = {gpus}: " in err) == (2, True)
        assert "$" not in err, "no path in an internal structure"


def test_problem_and_refusal_in_print(call: Call) -> None:
    told = 'MODEL = "extra": has an effect only with `add`. Write so-tui presets add MODEL.'
    assert call("presets tiny extra") == (2, "", f"so-tui: {told}\n")
    code, _, err = call("run llama-3.3-70b --dry-run --machine gh200-480 --gpus 1")
    *refusals, last = err.splitlines()
    assert code == 3
    assert all(line.startswith("so-tui: refused: ") for line in refusals)
    assert last == "so-tui: --force starts it anyway; the run records that"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_is_reported(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = in_a_process("runs", stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "output: cannot be written (No space left on device)" in done.stderr


def test_a_file_on_a_full_disk_is_named(tmp_path: Path) -> None:
    """Not the output: redirecting that would not stop the run."""
    run = create_run(find_preset("tiny").spec, tmp_path / "runs")
    mine = identify(os.getpid(), "supervisor")
    assert mine is not None
    here = {"host": socket.gethostname(), "supervisor": mine, "processes": (mine,)}
    change_state(run, state="training", started=1.0, attempt=1, **here)
    done = in_a_process(
        *("stop", str(run.path)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert done.returncode == 2
    assert f"{run.control_dir / 'stop'}: cannot be written (File too large)" in done.stderr


def test_a_reader_that_has_gone_is_no_failure() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as gone:  # noqa: PTH123 - a descriptor
        done = in_a_process("presets", stdout=gone)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("grace", ["nan", "inf", "-inf", "-5", "1e9", "9" * 5000, ""])
def test_a_grace_that_is_no_time_is_refused(grace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["stop", f"--grace={grace}"])
    assert "--grace" in capsys.readouterr().err


# ``--quiet``, ``--verbose`` and NO_COLOR: what is printed, and where.

COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


def test_quiet_leaves_the_result_and_errors(tmp_path: Path, call: Call) -> None:
    whole = call("plan tiny").out
    for line in ("plan tiny --quiet", "--quiet plan tiny"):
        assert whole.removeprefix(call(line).out).startswith("\nto run it: so-tui run tiny")
    run = write_run(tmp_path, steps=3, state="failed")
    full, quiet = (call(f"watch {run.path} --plain {option}") for option in ("", "-q"))
    assert (full.code, quiet.code, "step 3/" in full.out) == (1, 1, True)
    assert quiet.out.splitlines() == full.out.splitlines()[-2:], "how it ended, and what to do next"
    code, _, err = call("plan no-such-preset --quiet")
    assert (code, "no-such-preset" in err) == (2, True)
    done = in_a_process("fetch", "tiny", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "helpers say nothing"


def test_verbose_tells_on_stderr_what_is_decided_and_called(tmp_path: Path) -> None:
    file = tmp_path / f"{IN_A_NAME}.json"
    file.write_bytes(machine_json(superchips(2)))
    argv = ("plan", "tiny", "--machine", os.fspath(file))
    silent, verbose, refused = (
        in_a_process(*argv, env={**os.environ, "PYTHONUTF8": "1"})
        for argv in (argv, (*argv, "-v"), ("-v", "presets", "add", str(tmp_path / "absent")))
    )
    assert (silent.stdout, silent.stderr) == (verbose.stdout, "")
    said = dict(line.split(": ", 1) for line in verbose.stderr.splitlines())
    assert said["so_tui.machine.known"].startswith(f"machine file {tmp_path}")
    assert said["so_tui.commands.common"].startswith("preset tiny: built-in, ")
    assert unsafe(verbose.stderr) == set()
    assert refused.returncode == 2
    assert "-m so_tui_trainer.tools.describe_model" in refused.stderr


@pytest.mark.parametrize(
    "line", ["plan", "plan tiny", "run tiny --dry-run", "doctor", "inspect", "presets", "runs"]
)
def test_no_color_is_honoured(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(tmp_path))
    write_run(tmp_path, steps=3, state="failed")
    coloured = call(line).out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = call(line).out
    assert plain
    assert not COLOUR.search(plain)
    assert COLOUR.search(coloured) or not line.startswith(("plan", "run "))


def test_what_is_copied_is_not_wrapped(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    line = "run tiny --dry-run --partition gh"
    launch, shown = json.loads(call(f"{line} --json").out), call(line).out
    assert launch["batch_script"] in shown
    assert shlex.join(launch["argv"]) in shown


def test_checks_are_said_as_they_begin_beside_what_scripts_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    said = []

    def answer(*_: object, **__: object) -> dict[str, object]:
        said.append(capsys.readouterr())
        raise InputError([Problem("gated", "model.id", "x", "m", "Ask.")])

    monkeypatch.setattr("so_tui.launch.checks.call_tool", answer)
    monkeypatch.setattr("so_tui.launch.checks.findings", lambda *_: ())
    for option in ("", "-q"):
        assert call(f"run tiny --plain {option}")[:2] == (2, "")
    told, quiet = ([line for line in err.splitlines() if "checking" in line] for _, err in said)
    assert ([out for out, _ in said], len(told), quiet) == (["", ""], 3, [])
    assert ("files" in told[0], "model" in told[-1]) == (True, True)
