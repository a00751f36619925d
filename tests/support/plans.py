"""Small machines, plans and launches, made without the planner."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from so_tui.launch.launch import launch_of
from so_tui.machine.types import Machine, Software
from so_tui.plan.plan import DeepSpeedBinding, Launch, MemoryPolicy, Plan, RankBinding
from so_tui.spec import find_preset
from so_tui.spec.run_spec import DataSpec, Mode, RunSpec, TrainSpec
from tests.support.machines import superchips, x86

TINY = find_preset("tiny").spec.model
SOFTWARE = Software(
    python="3.12",
    torch="2.13.0",
    torch_cuda="13.0",
    deepspeed="0.19.8",
    transformers="5.23.0",
    numactl="2.0.18",
    numactl_works=True,
    compiler="g++ 13.3.0",
)


def quad_gh200(**changes: object) -> Machine:
    """Four Grace Hopper superchips, 72 cores each."""
    four = superchips(4, node_mib=117 * 1024, hbm_mib=95 * 1024)
    machine = replace(
        four,
        hostname="quad",
        page_size_bytes=65536,
        software=SOFTWARE,
        numa_nodes=four.cpu_nodes,
        gpus=tuple(
            replace(gpu, uuid=f"GPU-0000000{gpu.index}-aaaa", c2c=None) for gpu in four.gpus
        ),
    )
    return replace(machine, **changes)


def cpu_machine(**changes: object) -> Machine:
    return replace(x86(cores=2, memory_mib=16 * 1024), **({"software": SOFTWARE} | changes))


def spec_of(**changes: object) -> RunSpec:
    """Return a spec that trains the embedded model for 20 steps."""
    spec = RunSpec(
        name="trial",
        model=TINY,
        data=DataSpec(source="builtin:tiny/rows.jsonl"),
        train=TrainSpec(steps=20),
    )
    return replace(spec, **changes)


def launch_with(plan: Plan, machine: Machine | None = None, *, forced: bool = False) -> Launch:
    """Return the launch of a plan, by default on the machine of ``cpu_machine``."""
    return launch_of(plan, machine or cpu_machine(), force=forced)


def plan_of(
    spec: RunSpec,
    *,
    mode: Mode = "superoffload",
    cpus: tuple[tuple[int, ...], ...] = ((0,), (1,)),
    gpus: bool = False,
) -> Plan:
    """A plan with one rank per entry of ``cpus``; nine tenths of the cores run Adam."""

    def rank_binding(rank: int, cores: tuple[int, ...]) -> RankBinding:
        apart = mode == "superoffload" and len(cores) > 1
        main = cores[: max(1, len(cores) // 10)] if apart else cores
        return RankBinding(
            rank=rank,
            gpu=rank if gpus else None,
            numa_node=rank if gpus else 0,
            cpus=cores,
            main_cpus=main,
            adam_cpus=cores[len(main) :],
            memory_policy=MemoryPolicy(mode="default"),
            deepspeed=DeepSpeedBinding(
                cpus=cores, numactl=(), omp_num_threads=len(cores), matches=True
            ),
        )

    speeds = ("useful_tokens_per_s_total", "model_tflops_per_gpu")
    unplanned: dict[str, Any] = dict.fromkeys(("gpu_capacity_bytes", "step", "step_s", *speeds))
    unplanned |= dict.fromkeys(("gpu_bytes", "shm_bytes", "disk_bytes", "tokens_per_step"), 0)
    unplanned |= dict.fromkeys(("reasons", "warnings", "breakdown"), ())
    return Plan(
        preset=spec.name,
        gpus=len(cpus) * spec.nodes,
        mode=mode,
        ratio=spec.offload.ratio,
        fits=True,
        verdict="fits",
        host_bytes_per_node={},
        host_capacity_bytes_per_node={},
        binding=tuple(rank_binding(*rank) for rank in enumerate(cpus)),
        spec=spec.changed("offload", mode=mode),  # a plan has decided it
        **unplanned,
    )
