import sys
from pathlib import Path

import msgspec
import pytest

from so_tui.launch import command
from so_tui.launch.command import Placeholder
from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine, Software, version_numbers
from so_tui.spec.run_spec import DataSpec, ModelSpec, OffloadSpec, RunSpec
from tests.support.plans import cpu_machine, plan_of, quad_gh200, spec_of

ALLOCATOR_2_13 = (
    "expandable_segments:True,pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"
)
NODE = tuple(range(72))


def changes(
    machine: Machine, inherited: dict[str, str], spec: RunSpec | None = None
) -> dict[str, str | None]:
    plan = plan_of(spec or spec_of(), cpus=(NODE,), gpus=bool(machine.gpus))
    return command.shown(command.variables(plan, machine, inherited))


TOOLS = str(Path(sys.executable).parent)
MARKED = {
    "SO_TUI_RUN": Placeholder.RUN,
    "SO_TUI_RUN_ID": Placeholder.RUN_ID,
    "SO_TUI_ATTEMPT": Placeholder.ATTEMPT,
    "PYTHONSAFEPATH": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
}
LOOPBACK = {
    "SO_TUI_RENDEZVOUS": Placeholder.RENDEZVOUS,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",
}
HUB = spec_of(model=ModelSpec(id="org/model"), data=DataSpec(source="builtin:tiny/rows.jsonl"))


@pytest.mark.parametrize(
    ("machine", "inherited", "spec", "wanted", "absent"),
    [
        (cpu_machine(), {}, None, MARKED, {"PYTORCH_ALLOC_CONF"}),
        (cpu_machine(), {}, HUB, {}, {"HF_HUB_OFFLINE"}),
        (cpu_machine(), {"PATH": "/bin"}, None, {"PATH": f"{TOOLS}:/bin"}, set()),
        (cpu_machine(), {"PATH": f"/bin:{TOOLS}"}, None, {}, {"PATH"}),
        (
            quad_gh200(),
            {"NCCL_SOCKET_IFNAME": "hsn0", "NCCL_RAS_ENABLE": "1"},
            None,
            LOOPBACK,
            {"DS_ACCELERATOR"},
        ),
        (
            quad_gh200(),
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
            None,
            {},
            {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"},
        ),
        (
            quad_gh200(),
            {"TORCH_CUDA_ARCH_LIST": "9.0a"},
            None,
            {"TORCH_CUDA_ARCH_LIST": "9.0"},
            set(),
        ),
        (quad_gh200(), {"TORCH_CUDA_ARCH_LIST": "9.0"}, None, {}, {"TORCH_CUDA_ARCH_LIST"}),
    ],
)
def test_variables_are_set_and_left_alone(
    machine: Machine,
    inherited: dict[str, str],
    spec: RunSpec | None,
    wanted: dict[str, str],
    absent: set[str],
) -> None:
    shown = changes(machine, inherited, spec)
    assert wanted.items() <= shown.items()
    assert not absent & shown.keys()


def test_threads_are_the_adam_share_of_the_rank() -> None:
    shown = changes(quad_gh200(), {"OMP_NUM_THREADS": "1"})
    assert shown["OMP_NUM_THREADS"] == shown["MKL_NUM_THREADS"] == "65"
    assert command._rank_threads(plan_of(spec_of(), mode="zerooffload", cpus=(NODE,))) == 72


def test_run_of_an_alert_command_is_no_part_of_it() -> None:
    inherited = {"SO_TUI_ALERT_KIND": "failed", "HOME": "/home/me"}
    variables = command.variables(plan_of(spec_of(), cpus=(NODE,)), cpu_machine(), inherited)
    applied = command.apply(variables, inherited)
    assert "SO_TUI_ALERT_KIND" not in applied
    assert applied["HOME"] == "/home/me"


def test_affinity_settings_are_removed_only_where_set() -> None:
    """Those that fight the binding."""
    inherited = {"KMP_AFFINITY": "compact", "NCCL_DEBUG": "INFO"}
    variables = command.variables(plan_of(spec_of()), quad_gh200(), inherited)
    shown = command.shown(variables)
    assert shown["KMP_AFFINITY"] is None
    assert "GOMP_CPU_AFFINITY" not in shown
    applied = command.apply(variables, inherited)
    assert "KMP_AFFINITY" not in applied
    assert applied["NCCL_DEBUG"] == "INFO"


def test_gpus_are_numbered_as_in_the_plan() -> None:
    shown = changes(
        quad_gh200(), {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    )
    assert shown["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert shown["CUDA_VISIBLE_DEVICES"] is None
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in shown
    shown = changes(
        named_machine("mi300a-4"), {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0"}
    )
    assert shown["ROCR_VISIBLE_DEVICES"] is shown["HIP_VISIBLE_DEVICES"] is None


@pytest.mark.parametrize(
    ("torch", "deepspeed", "own", "expected"),
    [
        ("2.13.0+cu130", "0.19.8", True, ("PYTORCH_ALLOC_CONF", ALLOCATOR_2_13)),
        ("2.12.1", "0.19.8", True, ("PYTORCH_ALLOC_CONF", "expandable_segments:True")),
        ("2.11.0a0+git1234", "0.19.8", True, ("PYTORCH_ALLOC_CONF", "expandable_segments:True")),
        ("2.9.1", "0.19.8", True, ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")),
        ("2.9.1", "0.18.0", True, ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")),
        ("2.9.1", "0.18.0", False, None),
        (
            "2.13.0",
            "0.18.0",
            False,
            ("PYTORCH_ALLOC_CONF", ALLOCATOR_2_13.removeprefix("expandable_segments:True,")),
        ),
    ],
)
def test_allocator_setting_by_version(
    torch: str, deepspeed: str, own: bool, expected: tuple[str, str] | None
) -> None:
    variable = command._allocator_variable(
        Software(torch=torch, deepspeed=deepspeed), deepspeed_engine=not own
    )
    assert (variable and (variable.name, variable.value)) == expected


def test_engine_decides_about_expandable_segments() -> None:
    old = quad_gh200(
        software=msgspec.structs.replace(quad_gh200().software, torch="2.9.0", deepspeed="0.18.0")
    )
    assert changes(old, {})["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in changes(
        old, {}, spec_of(offload=OffloadSpec(engine="deepspeed"))
    )


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ("9.0a", "9.0"),
        ("8.0;9.0a+PTX", "8.0;9.0+PTX"),
        ("9.0 9.0a", "9.0"),
        ("10.0f;9.0", "10.0;9.0"),
        ("Hopper", "Hopper"),
    ],
)
def test_arch_list(given: str, valid: str) -> None:
    assert command.valid_arch_list(given) == valid


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("0.18", (0, 18)), (None, ()), ("unknown", ())],
)
def test_version(text: str | None, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers
