"""From a spec and a machine to arguments, environment and DeepSpeed's config."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch import command
from so_tui.launch.ds_config import _published_config, ds_config
from so_tui.launch.launch import launch_of, prepare, read_launch, visible_machine
from so_tui.machine import Machine
from so_tui.machine.known import named_machine
from so_tui.machine.types import Software, version_numbers
from so_tui.plan.planner import make_plan
from so_tui.spec import Refused, RunSpec, find_preset, with_values
from so_tui.spec.presets import as_published
from so_tui.spec.run_spec import DataSpec, Mode, ModelSpec, OffloadSpec, TrainSpec
from tests.support.launching import prepared_run
from tests.support.plans import cpu_machine, launch_with, plan_of, quad_gh200, spec_of
from tests.support.problems import refused

QUAD, CPU = quad_gh200(), cpu_machine()
TINY, BIG = find_preset("tiny").spec, find_preset("qwen3-14b").spec


def with_gpus(gpus: int | tuple[int, ...], spec: RunSpec = TINY) -> RunSpec:
    return replace(spec, gpus=gpus, fixed=("gpus", "offload.states"))


@pytest.mark.parametrize(
    ("gpus", "machine", "options"),
    [
        (2, QUAD, {"--include": "localhost:0,1", "--bind_core_list": "0-143"}),
        ((3, 1), QUAD, {"--include": "localhost:1,3", "--bind_core_list": "72-143,216-287"}),
        (2, CPU, {"--num_gpus": "2", "--include": None}),
    ],
)
def test_launcher_gets_devices_and_cores(
    gpus: int | tuple[int, ...], machine: Machine, options: dict[str, str | None]
) -> None:
    """And never reads a hostfile of the site."""
    argv = prepare(with_gpus(gpus), machine).argv
    assert argv[:3] == (sys.executable, "-m", "deepspeed.launcher.runner")
    assert "--bind_cores_to_rank" in argv
    for name, value in {**options, "--hostfile": "/dev/null"}.items():
        assert (argv[argv.index(name) + 1] if name in argv else None) == value


def test_without_numactl_the_launcher_does_not_bind() -> None:
    given: dict[str, str] = {
        "{RUN}": "/runs/a",
        "{RUN_ID}": "",
        "{LAUNCH}": "",
    }
    given |= {"{ATTEMPT}": "2", "{RENDEZVOUS}": "file:///tmp/meeting/store"}
    resolved = launch_with(plan_of(spec_of())).resolved(given)
    argv = resolved.argv
    assert "--bind_cores_to_rank" not in argv
    assert argv[-6:] == ("--module", "so_tui_trainer", "--run", "/runs/a", "--attempt", "2")
    values = {variable.name: variable.value for variable in resolved.environment}
    assert values["SO_TUI_RENDEZVOUS"] == "file:///tmp/meeting/store"
    assert not [text for text in (*argv, *values.values()) if text and text.startswith("{")]


DEEPSPEED = {"offload.mode": "superoffload", "offload.engine": "deepspeed"}


def test_what_cannot_run_here_is_refused() -> None:
    with refused("too-few-gpus", forceable=False):
        prepare(with_gpus(8), QUAD, force=True)
    for changes, code in (({"offload.mode": "gpu"}, "mode"), (DEEPSPEED, "engine")):
        with refused(f"{code}-needs-gpu", forceable=False):
            prepare(with_values(TINY, changes), CPU, force=True)
    with pytest.raises(Refused) as caught:
        prepare(with_gpus(1, BIG), QUAD)
    assert (caught.value.codes[0], caught.value.forceable) == ("shortage", True)
    assert not prepare(with_gpus(1, BIG), QUAD, force=True).plan.fits


def test_only_visible_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (
        ("2,3", [2, 3]),
        ("GPU-00000001", [1]),
        ("", []),
        ("1,7,0", [1]),  # as in CUDA, the list ends at the first unknown entry
    ):
        machine = visible_machine(QUAD, {"CUDA_VISIBLE_DEVICES": value})
        assert [gpu.index for gpu in machine.gpus] == wanted
    assert visible_machine(QUAD, {}) is QUAD
    with refused("mig-instance"):
        visible_machine(QUAD, {"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    here, plan = replace(QUAD, hostname=socket.gethostname()), plan_of(spec_of(), gpus=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch_of(plan, here).machine.gpus == here.gpus[:2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with refused("gpu-not-visible", forceable=False):
        launch_of(plan, here)


def test_launch_is_read_back_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile file is a damaged one, and a pipe is not waited for."""
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    launch = replace(prepare(with_gpus(2), QUAD, force=True), changes={"gpus": "2"})
    run = prepared_run(launch, tmp_path)
    assert read_launch(run, 1) == launch
    for content in (b"[" * 100_000, b'{"argv":["\xff"],"v":1}', b'{"argv":' + b"9" * 5000 + b"}"):
        run.launch_path(1).write_bytes(content)
        with pytest.raises(msgspec.DecodeError):
            read_launch(run, 1)
    run.launch_path(1).unlink()
    os.mkfifo(run.launch_path(1))
    with pytest.raises(OSError, match="wrong-kind"):
        read_launch(run, 1)


NODE = tuple(range(72))
APUS = named_machine("mi300a-4")
OLD = quad_gh200(software=replace(QUAD.software, torch="2.9.0", deepspeed="0.18.0"))
TOOLS = str(Path(sys.executable).parent)
SPEC = spec_of()
OTHER_ENGINE = spec_of(offload=OffloadSpec(engine="deepspeed"))
HUB = spec_of(model=ModelSpec(id="org/model"), data=DataSpec(source="builtin:tiny/rows.jsonl"))
MARKED = {
    "SO_TUI_RUN": "{RUN}",
    "SO_TUI_RUN_ID": "{RUN_ID}",
    "SO_TUI_ATTEMPT": "{ATTEMPT}",
    "SO_TUI_LAUNCH": "{LAUNCH}",
    "PYTHONSAFEPATH": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
}
LOOPBACK = {
    "SO_TUI_RENDEZVOUS": "{RENDEZVOUS}",
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
        (OLD, {}, OTHER_ENGINE, {}, {"PYTORCH_CUDA_ALLOC_CONF"}),
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


LIMITS = "pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"


@pytest.mark.parametrize(
    ("torch", "deepspeed", "own", "expected"),
    [
        ("2.13.0+cu130", "0.19.8", True, ("PYTORCH_ALLOC_CONF", f"{EXPANDABLE},{LIMITS}")),
        ("2.12.1", "0.19.8", True, ("PYTORCH_ALLOC_CONF", EXPANDABLE)),
        ("2.9.1", "0.18.0", True, ("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)),
        ("2.9.1", "0.18.0", False, ("PYTORCH_CUDA_ALLOC_CONF", "")),
        ("2.13.0", "0.18.0", False, ("PYTORCH_ALLOC_CONF", LIMITS)),
    ],
)
def test_allocator_setting_by_version(
    torch: str, deepspeed: str, own: bool, expected: tuple[str, str]
) -> None:
    software = Software(torch=torch, deepspeed=deepspeed)
    assert command._allocator(software, deepspeed_engine=not own) == expected


def test_architectures_and_versions() -> None:
    given = ("8.0;9.0a+PTX", "9.0 9.0a", "10.0f;9.0", "Hopper")
    valid = ["8.0;9.0+PTX", "9.0", "10.0;9.0", "Hopper"]
    assert list(map(command.valid_arch_list, given)) == valid
    texts = ("2.13.0+cpu", "0.18", None, "unknown")
    assert list(map(version_numbers, texts)) == [(2, 13, 0), (0, 18), (), ()]


PINNED = {"device": "cpu", "pin_memory": True}
SUPER = PINNED | {"super_offload": True}


def test_superoffload_with_our_engine() -> None:
    offload = OffloadSpec(ratio=0.7, sub_group_size=1_000_000, cpu_adam_cores_fraction=0.8)
    accumulating = TrainSpec(micro_batch=2, gradient_accumulation=8)
    spec = spec_of(offload=offload, train=accumulating)
    config = _published_config(plan_of(spec, cpus=((0,),)))
    assert config == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1_000_000,
            "reduce_bucket_size": 1_000_000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {**SUPER, "ratio": 0.7, "cpuadam_cores_perc": 0.8},
        },
        "wall_clock_breakdown": False,
        "zero_force_ds_cpu_optimizer": False,
    }
    json.dumps(config)
    assert "data_types" not in _published_config(plan_of(spec_of()))


def test_deepspeeds_own_engine_reads_the_users_values() -> None:
    spec = spec_of(offload=OffloadSpec(engine="deepspeed", cpu_adam_cores_fraction=0.8))
    zero = ds_config(plan_of(spec))["zero_optimization"]
    section = zero["offload_optimizer"]
    assert (section["ratio"], section["cpuadam_cores_perc"]) == (0.9, 0.8)
    assert zero["overlap_comm"] is False
    zero_offload = ds_config(plan_of(spec, mode="zerooffload"))["zero_optimization"]
    assert zero_offload["offload_optimizer"] == PINNED | {"ratio": 0.9}


def test_as_published_reads_the_examples_block() -> None:
    spec = as_published(replace(find_preset("llama-3.1-8b").spec, gpus=2))
    plan = make_plan(spec, QUAD)
    assert plan.spec.train.micro_batch == 2
    assert ds_config(plan) == {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 400_000_000,
            "sub_group_size": 400_000_000,
            "offload_optimizer": {**SUPER, "ratio": 0.8, "cpuadam_cores_perc": 0.9},
        },
        "wall_clock_breakdown": True,
    }


def test_zerooffload_as_published_reads_the_examples_block() -> None:
    spec = find_preset("qwen3-14b:as-published").spec
    plan = make_plan(with_values(spec, {"offload.mode": "zerooffload"}), QUAD)
    assert plan.ratio == 1.0
    assert ds_config(plan) == {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 400_000_000,
            "sub_group_size": 400_000_000,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "wall_clock_breakdown": True,
    }


@pytest.mark.parametrize(("deepspeed", "clipping"), [("0.19.8", 1.0), ("0.19.7", 0.0), (None, 1.0)])
def test_default_clipping_is_deepspeeds(deepspeed: str | None, clipping: float) -> None:
    machine = replace(QUAD, software=replace(QUAD.software, deepspeed=deepspeed))
    spec = find_preset("qwen3-14b:as-published").spec
    assert make_plan(spec, machine).spec.train.gradient_clipping == clipping
    own = {"offload.config": "published-clipping", "train.gradient_clipping": "0.5"}
    assert ds_config(make_plan(with_values(spec, own), machine))["gradient_clipping"] == 0.5


@pytest.mark.parametrize("mode", ["superoffload", "zerooffload", "gpu"])
def test_gradient_clipping_is_always_written(mode: Mode) -> None:
    for clipping in (0.0, 0.25):
        config = ds_config(plan_of(spec_of(train=TrainSpec(gradient_clipping=clipping)), mode=mode))
        assert config["gradient_clipping"] == clipping
        assert ("offload_optimizer" in config["zero_optimization"]) == (mode != "gpu")


def test_deepspeed_writes_as_much_to_the_log_as_was_asked_for() -> None:
    spec = find_preset("qwen3-14b:as-published").spec
    asked = with_values(spec, {"train.log_level": "debug"})
    usual, more = (ds_config(make_plan(one, QUAD)) for one in (spec, asked))
    assert more == usual | {"log_level": "debug"}


def test_several_gpus_gather_the_next_layer_while_one_computes() -> None:
    spec = find_preset("llama-3.1-8b").spec
    zero = ds_config(plan_of(spec))["zero_optimization"]
    layer, live = 218_112_000, 436_224_000
    assert zero["stage3_prefetch_bucket_size"] == layer
    assert zero["stage3_max_live_parameters"] == live
