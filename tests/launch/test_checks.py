"""What is refused before anything is written or started."""

from __future__ import annotations

import contextlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from so_tui.launch import helper
from so_tui.launch.checks import preflight, quick_checks
from so_tui.launch.launch import prepare
from so_tui.launch.lifecycle import start
from so_tui.machine import Machine
from so_tui.machine.known import named_machine
from so_tui.machine.types import Software
from so_tui.plan.plan import Launch, Plan
from so_tui.spec import (
    CheckpointSpec,
    DataSource,
    DataSpec,
    InputError,
    ModelSpec,
    Refused,
    RunSpec,
    find_preset,
)
from so_tui.spec.presets import with_absolute_paths
from so_tui.spec.run_spec import TrackingSpec
from tests.support.plans import (
    SOFTWARE,
    TINY,
    cpu_machine,
    launch_with,
    plan_of,
    quad_gh200,
    spec_of,
)
from tests.support.problems import refusal, refused, rejected
from tests.support.python_path import python_path
from tests.support.rank_processes import gone


def checks_of(launch: Launch, runs_dir: Path | None = None) -> tuple[tuple[str, ...], bool]:
    """Return the codes with which the quick checks refuse a launch, and whether it can be
    forced.
    """
    with pytest.raises(Refused) as caught:
        quick_checks(launch, runs_dir=runs_dir)
    return caught.value.codes, caught.value.forceable


def fields_refused(spec: RunSpec) -> list[str]:
    with pytest.raises(InputError) as caught:
        quick_checks(launch_with(plan_of(spec), forced=True))
    return [problem.field for problem in caught.value.problems]


def data(source: str | tuple[DataSource, ...]) -> DataSpec:
    return DataSpec(source=source)


def embedded(**changes: object) -> RunSpec:
    return spec_of(data=data("builtin:tiny/rows.jsonl"), **changes)


def plan_with(plan: Plan, **changes: object) -> Plan:
    return msgspec.structs.replace(plan, **changes)


CUDA = Software(torch="2.13.0+cu130", torch_cuda="13.0", deepspeed="0.19.8", transformers="5.23.0")
ROCM = msgspec.structs.replace(CUDA, torch="2.13.0+rocm7.0", torch_cuda=None, torch_rocm="7.0")
CPU = msgspec.structs.replace(CUDA, torch="2.13.0+cpu", torch_cuda=None)


def without(name: str) -> Machine:
    return cpu_machine(software=msgspec.structs.replace(SOFTWARE, **{name: None}))


def apus(software: Software) -> Machine:
    return msgspec.structs.replace(named_machine("mi300a-4"), software=software)


def checked(machine: Machine | None = None, *, gpus: bool = False, **changes: object) -> Launch:
    return launch_with(plan_of(embedded(**changes), gpus=gpus), machine, forced=True)


@pytest.mark.parametrize(
    ("launch", "code", "forceable"),
    [
        (checked(without("torch")), "software-missing", False),
        (checked(without("deepspeed")), "software-missing", False),
        (checked(without("transformers")), "software-missing", False),
        (checked(nodes=2), "several-nodes-here", False),
        (checked(quad_gh200(software=CPU), gpus=True), "torch-without-cuda", False),
        (checked(apus(CUDA), gpus=True), "torch-without-rocm", False),
        (launch_with(plan_of(embedded()), without("compiler")), "compiler-missing", True),
        (
            launch_with(plan_with(plan_of(embedded()), shm_bytes=2**60)),
            "shared-memory-too-small",
            True,
        ),
    ],
)
def test_what_is_missing_is_refused(
    launch: Launch, code: str, forceable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no kernel has been compiled
    with refused(code, forceable=forceable):
        quick_checks(launch)


def test_nothing_wrong() -> None:
    assert quick_checks(launch_with(plan_of(embedded()))) == ()
    quick_checks(checked(apus(ROCM), gpus=True))


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    spec = spec_of(
        model=msgspec.structs.replace(TINY, id="./no-such-model"), data=data("rows.jsonl")
    )
    assert fields_refused(spec) == ["model.id", "data.source"]
    mixture = data((DataSource(source="owner/name"), DataSource(source=str(tmp_path / "gone"))))
    assert fields_refused(spec_of(data=mixture)) == ["data.source[1].source"]
    assert fields_refused(spec_of(data=data("builtin:nothing")))
    (tmp_path / "rows.jsonl").touch()
    quick_checks(
        launch_with(plan_of(spec_of(data=data(str(tmp_path / "rows.jsonl")))), forced=True)
    )


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed here")
def test_a_tracker_whose_package_is_missing() -> None:
    launch = launch_with(plan_of(embedded(tracking=TrackingSpec(wandb=True))), forced=True)
    assert checks_of(launch) == (("tracker-missing",), False)
    quick_checks(
        launch_with(plan_of(embedded(tracking=TrackingSpec(tensorboard=True))), forced=True)
    )


def test_what_doctor_says_blocks_a_launch() -> None:
    machine = cpu_machine(software=msgspec.structs.replace(SOFTWARE, deepspeed="0.18.0"))
    launch = prepare(find_preset("tiny").spec, machine)
    with pytest.raises(Refused) as caught:
        preflight(launch)
    assert (set(caught.value.codes), caught.value.forceable) == ({"doctor-blocks"}, True)
    assert any("DeepSpeed 0.18.0" in reason for reason in caught.value.reasons)


def test_disk_for_the_checkpoints(tmp_path: Path) -> None:
    spec = embedded(
        checkpoint=CheckpointSpec(folder=str(tmp_path / "new" / "folder"), every_steps=10, keep=3)
    )
    plan = plan_with(plan_of(spec), disk_bytes=2**60)
    with refused("disk-too-small", forceable=True):
        quick_checks(launch_with(plan))
    quick_checks(launch_with(plan, forced=True))
    quick_checks(launch_with(plan_with(plan, disk_bytes=1)))
    quick_checks(
        launch_with(plan_with(plan, spec=embedded(checkpoint=CheckpointSpec(at_end=False))))
    )


def test_resume_needs_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "so_tui.launch.checks.shutil.disk_usage", lambda _: SimpleNamespace(total=2**40, free=2**30)
    )
    spec = embedded(checkpoint=CheckpointSpec(folder=str(tmp_path), every_steps=10, keep=3))
    launch = launch_with(plan_with(plan_of(spec), disk_bytes=2**29))
    for saved in (2, 3, 8):
        quick_checks(launch, saved=saved)
    for saved in (0, 1):
        with pytest.raises(Refused):
            quick_checks(launch, saved=saved)


def test_full_records_disk_refuses_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.mkdir()

    def found(folder: str) -> SimpleNamespace:
        return SimpleNamespace(total=2**40, free=4096 if Path(folder) == full else 2**39)

    monkeypatch.setattr("so_tui.launch.checks.shutil.disk_usage", found)
    launch = launch_with(plan_of(embedded(checkpoint=CheckpointSpec(folder=str(tmp_path)))))
    assert checks_of(launch, full) == (("disk-too-small",), True)
    with pytest.raises(Refused):
        quick_checks(launch, saved=1, runs_dir=full)
    quick_checks(launch, runs_dir=tmp_path)


@pytest.mark.parametrize("folder", ["/proc/no/such", "/etc/hostname/runs"])
def test_a_folder_that_cannot_be_written(folder: str) -> None:
    with rejected("not-writable", field="--runs-dir"):
        quick_checks(launch_with(plan_of(embedded())), runs_dir=Path(folder))
    with rejected("not-writable", field="checkpoint.folder"):
        quick_checks(launch_with(plan_of(embedded(checkpoint=CheckpointSpec(folder=folder)))))


def test_nothing_is_written_when_the_start_is_refused(tmp_path: Path) -> None:
    with rejected("not-this-machine"):
        start(
            prepare(find_preset("tiny").spec, quad_gh200(), force=True), runs_dir=tmp_path / "runs"
        )
    assert not (tmp_path / "runs").exists()


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    spec = spec_of(
        model=ModelSpec(id="model"),
        data=data("rows.jsonl"),
        checkpoint=CheckpointSpec(folder="saved"),
    )
    absolute = with_absolute_paths(spec)
    assert (absolute.model.id, absolute.data.source) == (
        str(tmp_path / "model"),
        str(tmp_path / "rows.jsonl"),
    )
    assert absolute.checkpoint.folder == str(tmp_path / "saved")
    hub = spec_of(model=ModelSpec(id="owner/name"), data=data("builtin:tiny/rows.jsonl"))
    assert with_absolute_paths(hub) == hub


class TestHelpers:
    """Helper processes, with a module that stands in for a tool of the trainer."""

    @pytest.fixture(autouse=True)
    def tool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "so_tui_trainer" / "tools"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
        (folder / "probe.py").write_text(
            "import json, sys\n"
            "request = json.load(sys.stdin)\n"
            "for line in request['lines']: print(line, flush=True)\n"
            "print('what went wrong', file=sys.stderr)\n"
            "sys.exit(request.get('code', 0))\n"
        )
        monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))

    def test_answer(self) -> None:
        assert helper.call_tool("probe", {"lines": ['{"rows": 3}']}) == {"rows": 3}

    def test_stream(self) -> None:
        lines = ['{"done": false}', '{"done": true}']
        assert [event["done"] for event in helper.stream_tool("probe", {"lines": lines})] == [
            False,
            True,
        ]

    def test_what_the_user_can_mend(self) -> None:
        gated = {
            "code": "hub-access-denied",
            "field": "model.id",
            "value": "x",
            "message": "is gated",
            "remedy": "ask",
        }
        request = {"lines": [json.dumps({"problems": [gated]})], "code": 2}
        for call in (
            lambda: helper.call_tool("probe", request),
            lambda: list(helper.stream_tool("probe", request)),
        ):
            problem = refusal(call)
            assert (problem.code, problem.field, problem.value) == (
                "hub-access-denied",
                "model.id",
                "x",
            )

    def test_failure_says_what_the_helper_said(self) -> None:
        with pytest.raises(helper.ToolError, match=r"exit code 7.*what went wrong"):
            helper.call_tool("probe", {"lines": [], "code": 7})
        with pytest.raises(helper.ToolError, match="no JSON"):
            helper.call_tool("probe", {"lines": ["Downloading..."]})
        with pytest.raises(helper.ToolError, match="without an answer"):
            helper.call_tool("probe", {"lines": []})

    def test_requests_do_not_depend_on_the_locale(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONIOENCODING", "ascii")
        answer = json.dumps({"text": "ünd 😀"})
        with contextlib.closing(helper.ToolProcess("probe")) as process:
            process.send({"lines": [answer], "note": "ünd 😀"})
            process.end_requests()
            assert list(process.answers()) == [{"text": "ünd 😀"}]

    def test_a_request_to_a_helper_that_was_closed_is_not_sent(self) -> None:
        process = helper.ToolProcess("probe")
        process.close()
        process.send({"lines": []})

    def test_hanging_helper_is_ended_with_its_children(self, tmp_path: Path) -> None:
        (tmp_path / "so_tui_trainer" / "tools" / "hangs.py").write_text(
            "import json, signal, subprocess\n"
            "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
            "print(json.dumps({'child': child.pid}), flush=True)\n"
            "signal.pause()\n"
        )
        answers: list[dict[str, int]] = []
        for timeout_s in (3.0, 12.0, 48.0):  # a busy machine may take longer to begin
            with pytest.raises(helper.ToolError, match="no answer within"):
                answers.extend(helper.stream_tool("hangs", {}, timeout_s=timeout_s))
            if answers:
                break
        (answer,) = answers
        assert gone([answer["child"]])


def test_helper_without_torch_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "so_tui_trainer" / "tools"
    tools.mkdir(parents=True)
    for folder in (tools.parent, tools):
        (folder / "__init__.py").touch()
    (tools / "lonely.py").write_text("import no_such_torch\n")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    for call in (
        lambda: helper.call_tool("lonely", {}),
        lambda: list(helper.stream_tool("lonely", {})),
    ):
        with refused("software-missing"):
            call()
