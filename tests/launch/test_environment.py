import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch import command
from so_tui.launch.command import Placeholder
from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine, Software, version_numbers
from so_tui.spec.run_spec import DataSpec, ModelSpec, OffloadSpec, RunSpec
from tests.support.plans import cpu_machine, plan_of, quad_gh200, spec_of

NODE = tuple(range(72))
CPU, QUAD, APUS = cpu_machine(), quad_gh200(), named_machine("mi300a-4")
OLD = quad_gh200(software=replace(QUAD.software, torch="2.9.0", deepspeed="0.18.0"))
TOOLS = str(Path(sys.executable).parent)
SPEC = spec_of()
DEEPSPEED = spec_of(offload=OffloadSpec(engine="deepspeed"))
HUB = spec_of(model=ModelSpec(id="org/model"), data=DataSpec(source="builtin:tiny/rows.jsonl"))
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
SITES_NCCL = {"NCCL_SOCKET_IFNAME": "hsn0", "NCCL_RAS_ENABLE": "1", "NCCL_DEBUG": "INFO"}
THREADS = {"OMP_NUM_THREADS": "65", "MKL_NUM_THREADS": "65"}  # the Adam share of the rank
IN_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": None}
MASKED = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
UNMASKED = dict.fromkeys(("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
OWN_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("machine", "inherited", "spec", "wanted", "absent"),
    [
        (CPU, {}, SPEC, MARKED, {"PYTORCH_ALLOC_CONF"}),
        (CPU, {}, HUB, {}, {"HF_HUB_OFFLINE"}),
        (CPU, {"PATH": "/bin"}, SPEC, {"PATH": f"{TOOLS}:/bin"}, set()),
        (CPU, {"PATH": f"/bin:{TOOLS}"}, SPEC, {}, {"PATH"}),
        (QUAD, SITES_NCCL, SPEC, LOOPBACK, {"DS_ACCELERATOR", "NCCL_DEBUG"}),
        (QUAD, OWN_ALLOCATOR, SPEC, {}, {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}),
        (QUAD, {"TORCH_CUDA_ARCH_LIST": "9.0a"}, SPEC, {"TORCH_CUDA_ARCH_LIST": "9.0"}, set()),
        (QUAD, {"TORCH_CUDA_ARCH_LIST": "9.0"}, SPEC, {}, {"TORCH_CUDA_ARCH_LIST"}),
        (QUAD, {"OMP_NUM_THREADS": "1"}, SPEC, THREADS, set()),
        # GPUs are numbered as in the plan.
        (QUAD, MASKED, SPEC, IN_ORDER, {"CUDA_DEVICE_MAX_CONNECTIONS"}),
        (APUS, dict.fromkeys(UNMASKED, "2"), SPEC, UNMASKED, set()),
        # What fights the binding is removed only if it is set.
        (QUAD, {"KMP_AFFINITY": "compact"}, SPEC, {"KMP_AFFINITY": None}, {"GOMP_CPU_AFFINITY"}),
        # A run of an alert command is no part of it.
        (CPU, {"SO_TUI_ALERT_KIND": "failed"}, SPEC, {"SO_TUI_ALERT_KIND": None}, {"HOME"}),
        # The engine decides about expandable segments.
        (OLD, {}, SPEC, {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, set()),
        (OLD, {}, DEEPSPEED, {}, {"PYTORCH_CUDA_ALLOC_CONF"}),
    ],
)
def test_variables_are_set_removed_and_left_alone(
    machine: Machine,
    inherited: dict[str, str],
    spec: RunSpec,
    wanted: dict[str, str | None],
    absent: set[str],
) -> None:
    inherited = {"HOME": "/home/me", **inherited}
    variables = command.variables(
        plan_of(spec, cpus=(NODE,), gpus=bool(machine.gpus)), machine, inherited
    )
    shown = command.shown(variables)
    assert {name: shown.get(name, "unchanged") for name in wanted} == wanted
    assert not absent & shown.keys()
    applied = command.apply(variables, inherited)
    assert {name: applied.get(name) for name in wanted} == wanted
    assert all(applied.get(name) == inherited.get(name) for name in absent)


def test_without_adam_beside_it_a_rank_has_all_threads() -> None:
    assert command._rank_threads(plan_of(SPEC, mode="zerooffload", cpus=(NODE,))) == 72


PINNED = "pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"


@pytest.mark.parametrize(
    ("torch", "deepspeed", "own", "expected"),
    [
        ("2.13.0+cu130", "0.19.8", True, ("PYTORCH_ALLOC_CONF", f"{EXPANDABLE},{PINNED}")),
        ("2.12.1", "0.19.8", True, ("PYTORCH_ALLOC_CONF", EXPANDABLE)),
        ("2.11.0a0+git1234", "0.19.8", True, ("PYTORCH_ALLOC_CONF", EXPANDABLE)),
        ("2.9.1", "0.18.0", True, ("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)),
        ("2.9.1", "0.18.0", False, None),
        ("2.13.0", "0.18.0", False, ("PYTORCH_ALLOC_CONF", PINNED)),
    ],
)
def test_allocator_setting_by_version(
    torch: str, deepspeed: str, own: bool, expected: tuple[str, str] | None
) -> None:
    software = Software(torch=torch, deepspeed=deepspeed)
    variable = command._allocator_variable(software, deepspeed_engine=not own)
    assert (variable and (variable.name, variable.value)) == expected


def test_architectures_and_versions() -> None:
    given = ("8.0;9.0a+PTX", "9.0 9.0a", "10.0f;9.0", "Hopper")
    valid = ["8.0;9.0+PTX", "9.0", "10.0;9.0", "Hopper"]
    assert list(map(command.valid_arch_list, given)) == valid
    texts = ("2.13.0+cpu", "0.18", None, "unknown")
    assert list(map(version_numbers, texts)) == [(2, 13, 0), (0, 18), (), ()]
