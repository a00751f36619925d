"""What is refused before anything is written or started; helper processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.launch.checks import keeping_what_fits, preflight, quick_checks
from so_tui.launch.helper import ToolError, ToolProcess, _decoded, call_tool, stream_tool
from so_tui.launch.launch import prepare
from so_tui.launch.lifecycle import start
from so_tui.machine import Machine
from so_tui.machine.known import named_machine
from so_tui.machine.types import Software
from so_tui.plan.notes import OneCheckpointKept
from so_tui.plan.plan import Launch
from so_tui.spec import InputError, Refused
from so_tui.spec.presets import with_absolute_paths
from so_tui.spec.run_spec import CheckpointSpec, DataSource, DataSpec, ModelSpec, TrackingSpec
from tests.support import plans
from tests.support.launching import tiny
from tests.support.problems import refused, rejected
from tests.support.python_path import python_path
from tests.support.rank_processes import gone

CUDA = Software(torch="2.13.0+cu130", torch_cuda="13.0", deepspeed="0.19.8", transformers="5.23.0")
ROCM = replace(CUDA, torch="2.13.0+rocm7.0", torch_cuda=None, torch_rocm="7.0")
CPU = replace(CUDA, torch="2.13.0+cpu", torch_cuda=None)
APUS = named_machine("mi300a-4")
EMBEDDED = DataSpec(source="builtin:tiny/rows.jsonl")


def without(name: str) -> Machine:
    return plans.cpu_machine(software=replace(plans.SOFTWARE, **{name: None}))


def checked(
    machine: Machine | None = None,
    *,
    forced: bool = True,
    planned: Mapping[str, int] = {},
    **changes: Any,
) -> Launch:
    """Return the launch of a spec, whose plan has other bytes if ``planned`` names them."""
    spec = plans.spec_of(**{"data": EMBEDDED, **changes})
    plan = plans.plan_of(spec, gpus=bool(machine and machine.gpus))
    return plans.launch_with(replace(plan, **planned), machine, forced=forced)


@pytest.mark.parametrize(
    ("launch", "code", "forceable"),
    [
        (checked(without("torch")), "software-missing", False),
        (checked(without("deepspeed")), "software-missing", False),
        (checked(without("transformers")), "software-missing", False),
        (checked(nodes=2), "several-nodes-here", False),
        (checked(plans.quad_gh200(software=CPU)), "torch-without-cuda", False),
        (checked(replace(APUS, software=CUDA)), "torch-without-rocm", False),
        (checked(without("compiler"), forced=False), "compiler-missing", True),
        (checked(forced=False, planned={"shm_bytes": 2**60}), "shared-memory-too-small", True),
    ],
)
def test_what_is_missing_is_refused(
    launch: Launch, code: str, forceable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no kernel has been compiled
    with refused(code, forceable=forceable):
        quick_checks(launch)


def test_nothing_wrong() -> None:
    assert quick_checks(checked(forced=False)) == ()
    quick_checks(checked(replace(APUS, software=ROCM)))


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    def fields_refused(**changes: Any) -> list[str]:
        with pytest.raises(InputError) as caught:
            quick_checks(checked(**changes))
        return [problem.field for problem in caught.value.problems]

    rows, nowhere = DataSpec(source="rows.jsonl"), replace(plans.TINY, id="./no-such-model")
    assert fields_refused(model=nowhere, data=rows) == ["model.id", "data.source"]
    sources = (DataSource(source="owner/name"), DataSource(source=str(tmp_path / "gone")))
    assert fields_refused(data=DataSpec(source=sources)) == ["data.source[1].source"]
    assert fields_refused(data=DataSpec(source="builtin:nothing"))
    (tmp_path / "rows.jsonl").touch()
    quick_checks(checked(data=DataSpec(source=str(tmp_path / "rows.jsonl"))))


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed here")
def test_a_tracker_whose_package_is_missing() -> None:
    with refused("tracker-missing", forceable=False):
        quick_checks(checked(tracking=TrackingSpec(wandb=True)))
    quick_checks(checked(tracking=TrackingSpec(tensorboard=True)))


def test_what_doctor_says_blocks_a_launch() -> None:
    machine = plans.cpu_machine(software=replace(plans.SOFTWARE, deepspeed="0.18.0"))
    with pytest.raises(Refused) as caught:
        preflight(prepare(tiny(), machine))
    assert ({*caught.value.codes}, caught.value.forceable) == ({"doctor-blocks"}, True)
    assert any("DeepSpeed 0.18.0" in reason for reason in caught.value.reasons)


def test_disk_for_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume needs room for those that are not there yet, and any start room for records."""
    full = tmp_path / "full"
    full.mkdir()

    def found(folder: str) -> SimpleNamespace:
        return SimpleNamespace(total=2**40, free=4096 if Path(folder) == full else 2**30)

    monkeypatch.setattr("so_tui.launch.checks.shutil.disk_usage", found)
    saves = CheckpointSpec(folder=str(tmp_path / "new" / "folder"), every_steps=10, keep=3)

    def launch(disk_bytes: int, *, forced: bool = False, saves_any: bool = True) -> Launch:
        none = CheckpointSpec(at_end=False, every_minutes=0)
        checkpoint = saves if saves_any else none
        planned = {"disk_bytes": disk_bytes}
        kept: Any = ("checkpoint.keep",)
        return checked(forced=forced, checkpoint=checkpoint, planned=planned, fixed=kept)

    for saved in (0, 1):
        with refused("disk-too-small", forceable=True):
            quick_checks(launch(2**29), saved=saved)
        with refused("disk-too-small", forceable=True):
            quick_checks(launch(1), saved=saved, runs_dir=full)
    for saved in (2, 8):
        quick_checks(launch(2**29), saved=saved)
    for enough in (launch(2**60, forced=True), launch(1), launch(2**60, saves_any=False)):
        quick_checks(enough, runs_dir=tmp_path)


def with_free(
    free_bytes: int, monkeypatch: pytest.MonkeyPatch, each: int = 10**9, **checkpoint: Any
) -> Launch:
    """Return a launch that saves checkpoints of ``each`` bytes to a disk with so many free."""
    usage = SimpleNamespace(total=2**60, free=free_bytes)
    monkeypatch.setattr("so_tui.launch.checks.shutil.disk_usage", lambda _: usage)
    fixed: Any = ("checkpoint.keep",) if "keep" in checkpoint else ()
    planned = {"disk_bytes": each, "disk_peak_bytes": 3 * each}
    spec = CheckpointSpec(**checkpoint)
    return checked(forced=False, checkpoint=spec, planned=planned, fixed=fixed)


def test_one_checkpoint_is_kept_where_two_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one being written needs room too. The plan says so, and what it occupies."""
    roomy = with_free(3 * 10**9, monkeypatch)
    assert keeping_what_fits(roomy, runs_dir=tmp_path) is roomy
    launch = with_free(3 * 10**9 - 1, monkeypatch)
    assert quick_checks(launch, runs_dir=tmp_path) == ()
    kept = keeping_what_fits(launch, runs_dir=tmp_path)
    assert (kept.spec.checkpoint.keep, kept.plan.disk_peak_bytes) == (1, 2 * 10**9)
    (warning,) = set(kept.plan.warnings) - set(launch.plan.warnings)
    assert warning == OneCheckpointKept(
        folder=str(tmp_path), free_bytes=3 * 10**9 - 1, needed_bytes=3 * 10**9, kept=2
    )
    assert keeping_what_fits(kept, runs_dir=tmp_path) == kept
    # One that is there already has its room, and is removed for the second new one.
    assert keeping_what_fits(launch, saved=1, runs_dir=tmp_path) is launch


def test_what_a_person_keeps_is_refused_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = with_free(3 * 10**9, monkeypatch, keep=4)
    assert keeping_what_fits(launch, runs_dir=tmp_path) is launch
    with refused("disk-too-small", forceable=True) as caught:
        quick_checks(launch, runs_dir=tmp_path)
    (reason,) = caught.value.reasons
    assert "5 checkpoints of 1.0 GB need 5.0 GB" in reason
    assert all(
        remedy in reason
        for remedy in ("checkpoint.folder", "checkpoint.keep=2", "checkpoint.every_minutes=0")
    )
    with refused("disk-too-small") as caught:  # nothing is freed before one has been written
        quick_checks(with_free(10**8, monkeypatch, keep=4), saved=3, runs_dir=tmp_path)
    assert caught.value.reasons[0].endswith("Free space")


@pytest.mark.parametrize(
    ("free", "checkpoint", "remedies"),
    [
        (15 * 10**8, {}, ["checkpoint.folder", "checkpoint.every_minutes=0"]),
        (15 * 10**8, {"at_end": False}, ["checkpoint.folder"]),
        (5 * 10**8, {}, ["checkpoint.folder"]),
        (5 * 10**8, {"every_minutes": 0}, ["checkpoint.folder"]),
    ],
)
def test_a_disk_without_room_for_two_refuses_with_what_helps(
    free: int,
    checkpoint: dict[str, Any],
    remedies: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with refused("disk-too-small", forceable=True) as caught:
        quick_checks(with_free(free, monkeypatch, **checkpoint), runs_dir=tmp_path)
    (reason,) = caught.value.reasons
    assert [
        key
        for key in ("checkpoint.folder", "checkpoint.keep", "checkpoint.every_minutes=0")
        if key in reason
    ] == remedies


@pytest.mark.parametrize("folder", ["/proc/no/such", "/etc/hostname/runs"])
def test_a_folder_that_cannot_be_written(folder: str) -> None:
    with rejected("not-writable", field="--runs-dir"):
        quick_checks(checked(forced=False), runs_dir=Path(folder))
    with rejected("not-writable", field="checkpoint.folder"):
        quick_checks(checked(forced=False, checkpoint=CheckpointSpec(folder=folder)))


def test_nothing_is_written_when_the_start_is_refused(tmp_path: Path) -> None:
    with rejected("not-this-machine"):
        start(prepare(tiny(), plans.quad_gh200(), force=True), runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()

    model, rows = ModelSpec(id="model"), DataSpec(source="rows.jsonl")
    spec = plans.spec_of(model=model, data=rows, checkpoint=CheckpointSpec(folder="saved"))
    absolute = with_absolute_paths(spec)
    found = (absolute.model.id, absolute.data.source, absolute.checkpoint.folder)
    assert found == tuple(str(tmp_path / name) for name in ("model", "rows.jsonl", "saved"))
    hub = plans.spec_of(model=ModelSpec(id="owner/name"), data=EMBEDDED)
    assert with_absolute_paths(hub) == hub


PROBE = """
import json, sys
request = json.load(sys.stdin)
for line in request['lines']: print(line, flush=True)
print('what went wrong', file=sys.stderr)
sys.exit(request.get('code', 0))
"""
HANGS = """
import json, signal, subprocess
child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)
print(json.dumps({'child': child.pid}), flush=True)
signal.pause()
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that stand in for tools of the trainer."""
    folder = tmp_path / "so_tui_trainer" / "tools"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    programs = {"probe": PROBE, "hangs": HANGS, "lonely": "import no_such_torch\n"}
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))


@pytest.mark.usefixtures("tools")
def test_helper_answers_once_or_in_lines() -> None:
    assert call_tool("probe", {"lines": ['{"rows": 3}']}) == {"rows": 3}
    lines = ['{"done": false}', '{"done": true}']
    assert [event["done"] for event in stream_tool("probe", {"lines": lines})] == [False, True]


@pytest.mark.usefixtures("tools")
def test_helper_says_what_the_user_can_mend() -> None:
    gated = {"code": "hub-access-denied", "field": "model.id", "value": "x"}
    problems = [gated | {"message": "is gated", "remedy": "ask"}]
    request = {"lines": [json.dumps({"problems": problems})], "code": 2}
    for call in (call_tool, lambda *asked: list(stream_tool(*asked))):
        with rejected("hub-access-denied", field="model.id"):
            call("probe", request)
        with refused("software-missing"):
            call("lonely", {})


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"lines": [], "code": 7}, r"exit code 7.*what went wrong"),
        ({"lines": ["Downloading..."]}, "no JSON"),
        ({"lines": []}, "without an answer"),
    ],
)
def test_failed_helper_is_quoted(request_: dict[str, object], said: str) -> None:
    with pytest.raises(ToolError, match=said):
        call_tool("probe", request_)


@pytest.mark.parametrize("answer", ["[" * 100_000, '{"rows":' + "9" * 5000 + "}", "", "7"])
def test_a_hostile_answer_of_a_helper_is_an_error_of_the_helper(answer: str) -> None:
    with pytest.raises(ToolError):
        _decoded("data", answer)


@pytest.mark.usefixtures("tools")
def test_requests_do_not_depend_on_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are not sent to a helper that was closed."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    answer = json.dumps({"text": "ünd 😀"})
    with contextlib.closing(ToolProcess("probe")) as process:
        process.send({"lines": [answer], "note": "ünd 😀"})
        process.end_requests()
        assert list(process.answers()) == [{"text": "ünd 😀"}]
    process.send({"lines": []})


@pytest.mark.usefixtures("tools")
def test_hanging_helper_is_ended_with_its_children() -> None:
    answers: list[dict[str, int]] = []
    for timeout_s in (3.0, 12.0, 48.0):  # a busy machine may take longer to begin
        with pytest.raises(ToolError, match="no answer within"):
            answers.extend(stream_tool("hangs", {}, timeout_s=timeout_s))
        if answers:
            break
    (answer,) = answers
    assert gone([answer["child"]])
