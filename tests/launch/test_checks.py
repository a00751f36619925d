"""What is refused before anything is written or started."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from so_tui.launch import helpers, start
from so_tui.launch.checks import preflight, quick_checks
from so_tui.launch.sources import with_absolute_paths
from so_tui.machine.types import Software
from so_tui.plan.types import Plan
from so_tui.spec import CheckpointSpec, DataSource, DataSpec, InputError, ModelSpec, Refused, RunSpec, find_preset
from so_tui.spec.types import TrackingSpec
from tests.support.plans import SOFTWARE, cpu_machine, plan_of, quad_gh200, spec_of
from tests.support.python_path import python_path


def fields_refused(spec: RunSpec) -> list[str]:
    with pytest.raises(InputError) as caught:
        quick_checks(plan_of(spec), cpu_machine(), force=True)
    return [problem.field for problem in caught.value.problems]


def data(source: str | tuple[DataSource, ...]) -> DataSpec:
    return DataSpec(source=source)


def embedded(**changes: object) -> RunSpec:
    return spec_of(data=data("builtin:tiny/rows.jsonl"), **changes)


def plan_with(plan: Plan, **changes: object) -> Plan:
    return msgspec.structs.replace(plan, **changes)


def test_nothing_wrong() -> None:
    assert quick_checks(plan_of(embedded()), cpu_machine()) == ()


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    spec = spec_of(model=ModelSpec(id="./no-such-model"), data=data("rows.jsonl"))
    assert fields_refused(spec) == ["model.id", "data.source"]
    mixture = data((DataSource(source="owner/name"), DataSource(source=str(tmp_path / "gone"))))
    assert fields_refused(spec_of(data=mixture)) == ["data.source[1].source"]
    assert fields_refused(spec_of(data=data("builtin:nothing")))
    (tmp_path / "rows.jsonl").touch()
    quick_checks(plan_of(spec_of(data=data(str(tmp_path / "rows.jsonl")))), cpu_machine(), force=True)


@pytest.mark.parametrize("missing", ["torch", "deepspeed", "transformers"])
def test_missing_software(missing: str) -> None:
    machine = cpu_machine(software=msgspec.structs.replace(SOFTWARE, **{missing: None}))
    with pytest.raises(Refused, match=f"{missing} is not installed") as caught:
        quick_checks(plan_of(embedded()), machine, force=True)
    assert not caught.value.forceable


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed here")
def test_a_tracker_whose_package_is_missing() -> None:
    with pytest.raises(Refused, match=r"pip install 'so-tui\[wandb\]'"):
        quick_checks(plan_of(embedded(tracking=TrackingSpec(wandb=True))), cpu_machine(), force=True)
    quick_checks(plan_of(embedded(tracking=TrackingSpec(tensorboard=True))), cpu_machine(), force=True)


def test_torch_without_cuda_on_a_gpu_machine() -> None:
    software = Software(torch="2.13.0+cpu", torch_cuda=None, deepspeed="0.19.8", transformers="5.23.0")
    with pytest.raises(Refused, match="without CUDA"):
        quick_checks(plan_of(embedded(), gpus=True), quad_gh200(software=software), force=True)


def test_what_doctor_says_blocks_a_launch() -> None:
    machine = cpu_machine(software=msgspec.structs.replace(SOFTWARE, deepspeed="0.18.0"))
    with pytest.raises(Refused, match=r"DeepSpeed 0.18.0 is not supported .*pip install deepspeed==") as caught:
        preflight(find_preset("tiny").spec, machine)
    assert caught.value.forceable


def test_a_compiler_for_cpu_adam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = cpu_machine(software=msgspec.structs.replace(SOFTWARE, compiler=None))
    with pytest.raises(Refused, match="compiler") as caught:
        quick_checks(plan_of(embedded()), machine)
    assert caught.value.forceable


def test_disk_for_the_checkpoints(tmp_path: Path) -> None:
    spec = embedded(checkpoint=CheckpointSpec(folder=str(tmp_path / "new" / "folder"), every_steps=10, keep=3))
    plan = plan_with(plan_of(spec), disk_bytes=2**60)
    with pytest.raises(Refused, match="4 checkpoints") as caught:
        quick_checks(plan, cpu_machine())
    assert caught.value.forceable
    quick_checks(plan, cpu_machine(), force=True)
    quick_checks(plan_with(plan, disk_bytes=1), cpu_machine())
    quick_checks(plan_with(plan, spec=embedded(checkpoint=CheckpointSpec(at_end=False))), cpu_machine())


@pytest.mark.parametrize("folder", ["/proc/no/such", "/etc/hostname/runs"])
def test_a_folder_that_cannot_be_written(folder: str) -> None:
    with pytest.raises(InputError, match="cannot be written") as caught:
        quick_checks(plan_of(embedded()), cpu_machine(), runs_dir=folder)
    assert [problem.field for problem in caught.value.problems] == ["--runs-dir"]
    with pytest.raises(InputError) as caught:
        quick_checks(plan_of(embedded(checkpoint=CheckpointSpec(folder=folder))), cpu_machine())
    assert [problem.field for problem in caught.value.problems] == ["checkpoint.folder"]


def test_shared_memory() -> None:
    with pytest.raises(Refused, match="/dev/shm"):
        quick_checks(plan_with(plan_of(embedded()), shm_bytes=2**60), cpu_machine())


def test_nothing_is_written_when_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another machine"):
        start(embedded(), quad_gh200(), runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_relative_paths_are_pinned_where_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    spec = spec_of(model=ModelSpec(id="model"), data=data("rows.jsonl"), checkpoint=CheckpointSpec(folder="saved"))
    pinned = with_absolute_paths(spec)
    assert (pinned.model.id, pinned.data.source) == (str(tmp_path / "model"), str(tmp_path / "rows.jsonl"))
    assert pinned.checkpoint.folder == str(tmp_path / "saved")
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
        assert helpers.call_tool("probe", {"lines": ['{"rows": 3}']}) == {"rows": 3}

    def test_stream(self) -> None:
        lines = ['{"done": false}', '{"done": true}']
        assert [event["done"] for event in helpers.stream_tool("probe", {"lines": lines})] == [False, True]

    def test_what_the_user_can_mend(self) -> None:
        request = {"lines": ['{"problems": [{"field": "model.id", "value": "x", "message": "is gated", "remedy": "ask"}]}'], "code": 2}
        with pytest.raises(InputError, match="is gated"):
            helpers.call_tool("probe", request)
        with pytest.raises(InputError, match="is gated"):
            list(helpers.stream_tool("probe", request))

    def test_failure_says_what_the_helper_said(self) -> None:
        with pytest.raises(helpers.ToolError, match=r"exit code 7.*what went wrong"):
            helpers.call_tool("probe", {"lines": [], "code": 7})
        with pytest.raises(helpers.ToolError, match="no JSON"):
            helpers.call_tool("probe", {"lines": ["Downloading..."]})


def test_a_helper_without_the_training_software_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "so_tui_trainer" / "tools"
    tools.mkdir(parents=True)
    for folder in (tools.parent, tools):
        (folder / "__init__.py").touch()
    (tools / "lonely.py").write_text("import no_such_torch\n")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    with pytest.raises(Refused, match=r"no_such_torch is not installed here\. Install the training extra"):
        helpers.call_tool("lonely", {})
    with pytest.raises(Refused, match="no_such_torch"):
        list(helpers.stream_tool("lonely", {}))
