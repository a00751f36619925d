"""Batch scripts, as profiles make them and users change them, and site profiles."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.launch.slurm.script import (
    Site,
    _seconds_of,
    _user_sites,
    _warning_s,
    batch_script,
    edited,
    for_run,
    load_site,
)
from so_tui.spec import SoTuiError, problems_in, spec_tree
from tests.launch.slurm.conftest import Install
from tests.support.launching import tiny
from tests.support.plans import plan_of
from tests.support.problems import refusal, rejected

SITE = Site(title="A site", python="/venv/bin/python")


def script(site: Site = SITE, run: str = "/runs/one", **changes: str) -> str:
    spec = tiny(**{"slurm__partition": "gh", **changes})
    return batch_script(plan_of(spec, cpus=((0,),) * 4, gpus=True), site, Path(run), 3)


def options(text: str) -> set[str]:
    found = (line for line in text.splitlines() if line.startswith("#SBATCH "))
    return {line.removeprefix("#SBATCH ") for line in found}


def test_the_spec_and_the_profile_become_options() -> None:
    site = replace(
        SITE, cores_per_gpu=72, memory_per_gpu_gib=100, node_option="", options=("--licenses=x",)
    )
    given = script(
        site,
        slurm__account="abc",
        slurm__qos="high",
        slurm__time_limit="1:00:00",
        slurm__constraint="a&b",
    )
    wanted = """
        --partition=gh --account=abc --qos=high --time=1:00:00 --constraint="a&b" --nodes=1
        --gpus-per-node=4 --cpus-per-task=288 --mem=400G --licenses=x --no-requeue
    """
    assert set(wanted.split()) <= options(given)
    assert "--exclusive" not in options(given)
    assert "--exclusive" in options(script())
    assert "--requeue" in options(script(replace(SITE, requeue=True)))
    braces = replace(SITE, gpu_option="--gres=gpu:{type}:{gpus}{gpus.real}{0}")
    assert "--gres=gpu:{type}:4{gpus.real}{0}" in options(script(braces))


def test_each_node_gets_a_supervisor_and_the_network() -> None:
    site = replace(SITE, interface="hsn0", network="AWS Libfabric")
    text = script(site, nodes="3")
    assert {"--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=4"} <= options(text)
    lines = text.splitlines()
    assert "srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --cpu-bind=none" in lines[-1]
    exports = {"export GLOO_SOCKET_IFNAME=hsn0", "export SO_TUI_NETWORK='AWS Libfabric'"}
    assert exports <= set(lines)
    assert "hsn0" not in script(site)


def executed(text: str, uname: str, install: Install) -> subprocess.CompletedProcess[str]:
    """Execute a script on a node that says it is a ``uname``; srun executes nothing."""
    install("uname", f"echo {uname}")
    install("srun", 'echo "srun $*"')
    env = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        ["bash", "-s"], input=text, env=env, capture_output=True, text=True, check=False, timeout=60
    )


def test_job_ends_where_it_cannot_run(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.launch.slurm.script.architecture_of", lambda _: "aarch64")
    text = script(replace(SITE, python="/it's/python"), run="/run")
    ended = executed(text, "x86_64", install)
    assert (ended.returncode, ended.stdout) == (69, "")
    for part in ("/it's/python", "aarch64", "x86_64", "site profile"):
        assert part in ended.stderr
    ran = executed(text, "aarch64", install)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "so_tui supervise /run --attempt 3 --in-job" in ran.stdout.splitlines()[-1]


def test_partition_limits_the_time_unless_given() -> None:
    assert "--time=48:00:00" in options(script(load_site("vista")))
    assert "--time=30" in options(script(load_site("vista"), slurm__time_limit="30"))


def test_time_limits_are_read_as_slurm_reads_them() -> None:
    limits = ("90", "90:30", "1:30:00", "2-12", "1-00:30", "1-01:00:05")
    assert [*map(_seconds_of, limits)] == [5400, 5430, 5400, 216_000, 88_200, 90_005]


def test_a_job_is_warned_early_enough_for_its_checkpoint() -> None:
    def lead_s(gigabytes: int, checkpoint_s: float | None, background: str = "false") -> int:
        plan = plan_of(tiny(checkpoint__every_steps="5", checkpoint__background=background))
        return _warning_s(replace(plan, disk_bytes=gigabytes * 10**9), SITE, checkpoint_s)

    assert lead_s(1, None) == lead_s(200, 5.0) == SITE.warning_s
    assert lead_s(200, None) > 200
    assert lead_s(1, 400.0) > 400 > SITE.warning_s
    assert lead_s(1, 400.0, "true") > lead_s(1, 400.0) + 400


def test_a_folder_with_any_name_stays_one_argument() -> None:
    folder = "/runs/it's $(here); #1"
    lines = script(run=folder).splitlines()
    (line,) = (line for line in lines if line.startswith("so_tui_run="))
    assert shlex.split(line) == [f"so_tui_run={folder}"]
    assert '"$so_tui_run"' in lines[-1]


@pytest.mark.parametrize("folder", ["/runs/50%j", "/runs/back\\slash", "/runs/two\nlines"])
def test_a_folder_whose_name_slurm_would_change_is_refused(folder: str) -> None:
    with rejected("path-unfit-for-slurm"):
        script(run=folder)


def test_a_script_that_was_kept_is_submitted_for_another_run() -> None:
    kept = script(run="/runs/one").replace("--nodes=1", "--nodes=1 --hold") + "# mine\n"
    generated = script(run="/runs/two &")
    hashed = generated.replace("two &'\n", "two &'\nexport SO_TUI_LAUNCH=22\n")
    for earlier in (kept, kept.replace("/one\n", "/one\nexport SO_TUI_LAUNCH=11\n")):
        moved = for_run(earlier, hashed)
        assert "so_tui_run='/runs/two &'\nexport SO_TUI_LAUNCH=22\nexec " in moved
        assert "SO_TUI_LAUNCH=11" not in moved
    named = kept.replace("--job-name=one", "--job-name=mine")
    assert for_run(kept, generated) == kept.replace(
        "so_tui_run=/runs/one", "so_tui_run='/runs/two &'"
    ).replace("--job-name=one", "--job-name=two__")
    assert "--job-name=mine\n" in for_run(named, generated), "the user's own name stays"
    with rejected("script-without-run"):
        for_run("#!/bin/sh\ntrue\n", generated)


def test_environment_and_setup_come_before_the_start() -> None:
    setup = ("module load cuda",)
    lines = script(
        replace(SITE, environment={"A": "x y"}, setup=setup, step_options=("--x=1",))
    ).splitlines()
    begun = next(at for at, line in enumerate(lines) if line.startswith("srun"))
    assert lines.index("export A='x y'") < lines.index("module load cuda") < begun
    step = shlex.split(lines[-1])
    assert (step[-9], "--x=1" in step) == ("/venv/bin/python", True)


@pytest.mark.parametrize(
    ("site", "changes", "code"),
    [
        ("vista", {"slurm__options": '["--gres=gpu:1"]'}, "option-refused"),
        ("generic", {"slurm__options": '["--output=/etc/x"]'}, "option-reserved"),
        ("generic", {"slurm__options": '["--outpu=/etc/x"]'}, "option-reserved"),
        ("generic", {"slurm__options": '["--clusters=other"]'}, "option-reserved"),
        ("alps", {}, "account-missing"),
        ("generic", {"slurm__time_limit": "10"}, "time-limit-too-short"),
    ],
)
def test_site_refusals_come_before(site: str, changes: dict[str, Any], code: str) -> None:
    with rejected(code):
        script(load_site(site), **changes)


@pytest.mark.parametrize(
    "values",
    [
        {"partition": "a b"},
        {"partition": "x\n#SBATCH --uid=0"},
        {"constraint": 'a" --uid="0'},
        {"options": ["--comment=a b"]},
        {"options": ["-A"]},
        {"account": "--uid=0 x"},
        {"time_limit": "soon"},
        {"site": "../x"},
    ],
)
def test_hostile_values_are_no_part_of_a_script(values: dict[str, object]) -> None:
    tree = spec_tree(tiny())
    tree["slurm"] = values
    assert [problem.field for problem in problems_in(tree)] == [f"slurm.{next(iter(values))}"]


def test_other_options_of_sbatch_are_passed_on() -> None:
    given = [
        *("--time-min=1:00:00", "--nodelist=n1", "--mem=8G", "--gpus=1"),
        *("--exclude=n2", "--hold", "--no-kill"),
    ]
    assert set(given) <= options(script(slurm__options=str(given).replace("'", '"')))


def test_a_users_profile_wins_and_must_be_their_own() -> None:
    _user_sites().mkdir(parents=True)
    own = _user_sites() / "vista.toml"
    own.write_text('title = "mine"\n')
    assert load_site("vista").title == "mine"
    own.chmod(0o666)
    with rejected("invalid-site"):
        load_site("vista")


@pytest.mark.parametrize(
    "content",
    [
        'title = "x"\nunknown = 1',
        'title = "a\\nb"',
        "no toml",
        'title = "x"\nnode_option = "--x=a\\nb"',
        'title = "x"\ngpu_option = "id"',
        'title = "x"\nsetup = ["a\\nb"]',
    ],
)
def test_a_wrong_profile_is_named(content: str) -> None:
    _user_sites().mkdir(parents=True)
    (_user_sites() / "mine.toml").write_text(content)
    problem = refusal(lambda: load_site("mine"))
    assert (problem.code, problem.value) == ("invalid-site", "mine")


@pytest.mark.parametrize(
    ("editor", "saved"),
    [
        ("sed -i 's/one hour/two hours/'", "#!/bin/bash\n# two hours\n"),
        # In vi, Ctrl-C ends typing. The terminal sends it to so-tui too.
        ("sh -c 'kill -INT $PPID; echo typed > \"$0\"'", "typed\n"),
    ],
)
def test_edits_are_returned(editor: str, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "false")
    monkeypatch.setenv("VISUAL", editor)
    assert edited("#!/bin/bash\n# one hour\n") == saved


@pytest.mark.parametrize("editor", ["false", "truncate -s 0", "/nowhere/editor", "'unbalanced"])
def test_failing_editor_ends_the_start(editor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", editor)
    with pytest.raises(SoTuiError, match="editor"):
        edited("#!/bin/bash\n")


def test_a_run_on_this_machine_has_no_script_to_edit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny", "--edit"]) == 2
    assert "--partition" in capsys.readouterr().err
