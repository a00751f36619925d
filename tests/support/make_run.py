"""A run directory with plausible numbers, written with the real writers."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from so_tui.folders import state_home
from so_tui.launch.launch import write_launch
from so_tui.machine.types import Machine, Mpam
from so_tui.plan.plan import Launch, Plan, RankBinding
from so_tui.plan.planner import make_plan
from so_tui.runs import RunDirectory, create_run, new_attempt, write_state
from so_tui.runs.records import (
    BindingRecord,
    CheckpointRecord,
    EndRecord,
    GpuSample,
    MetricRecord,
    NodeSample,
    PhaseRecord,
    RankBindingReport,
    RankPlacement,
    RunState,
    Sample,
    StartRecord,
    State,
    StepRecord,
)
from so_tui.spec import find_preset, with_values
from so_tui.units import GIB
from tests.support import records
from tests.support.machines import superchips
from tests.support.plans import SOFTWARE

STEP_S = 3.1
SAVE_EVERY = 400
"""Steps from one checkpoint to the next."""
REASONS = {
    "failed": (
        "rank 2 ran out of GPU memory in the backward pass of step 1241",
        "micro-batch 4 -> 2 needs 11 GiB less",
    ),
    "lost": (
        "every process of the run on quad-gh200 has ended, and the trainer recorded no result",
        "Read the end of its log; `so-tui resume` continues from the last checkpoint.",
    ),
}
"""Why a run ended and what to do next, by its state."""
EXIT_CODES = {"finished": 0, "stopped": 4, "failed": 1}
_plans: dict[bytes, Plan] = {}
"""Plans that were made, by what was asked."""


def quad_machine(nodes: int = 4, cores: int = 72) -> Machine:
    """A host like four GH200: a CPU node and a GPU with its own memory node each."""
    chips = superchips(nodes, node_mib=117 * 1024, hbm_mib=95 * 1024, cores=cores)
    return replace(
        chips,
        hostname="quad-gh200",
        page_size_bytes=65536,
        shm_total_bytes=234 * GIB,
        shm_free_bytes=234 * GIB,
        mpam=Mpam(state="off", evidence="no /sys/fs/resctrl"),
        software=replace(SOFTWARE, python="3.11", torch="2.11.0", compiler=None),
        numa_nodes=(
            *(replace(node, distances=(10,) * (2 * nodes)) for node in chips.cpu_nodes),
            *(replace(node, id=4 + 8 * chip) for chip, node in enumerate(chips.numa_nodes[nodes:])),
        ),
        gpus=tuple(
            replace(gpu, memory_node=4 + 8 * gpu.index, memory_used_bytes=0, compute_mode="Default")
            for gpu in chips.gpus
        ),
        live=False,
    )


def plan_for(machine: Machine, preset: str, gpus: int, steps: int) -> Plan:
    """Return the plan of a preset, made once unless the state folder has what plans may read."""
    if any(state_home().rglob("*.json")):
        return _plan_for(machine, preset, gpus, steps)
    asked = msgspec.msgpack.encode((machine, preset, gpus, steps))
    if asked not in _plans:
        _plans[asked] = _plan_for(machine, preset, gpus, steps)
    return _plans[asked]


def _plan_for(machine: Machine, preset: str, gpus: int, steps: int) -> Plan:
    changes = {"train.steps": str(steps), "gpus": str(gpus)}
    if machine.gpus:
        changes |= {"offload.mode": "superoffload", "offload.ratio": "0.15"}
    return make_plan(with_values(find_preset(preset).spec, changes), machine)


def write_run(
    runs_dir: Path,
    *,
    machine: Machine | None = None,
    preset: str = "qwen3-14b",
    gpus: int = 4,
    steps: int = 1240,
    total: int = 5000,
    state: State = "training",
    nan_steps: range = range(0),
    seconds_of_samples: int = 2,
    seed: int = 7,
    now: float | None = None,
    name: str | None = None,
) -> RunDirectory:
    """Write a run that has done ``steps`` of ``total``, in ``state``, which may be an end state.

    Args:
        nan_steps: Steps whose loss is not a number.
        seconds_of_samples: How much of the run's end the host samples cover.
        now: When the run did its last step, in Unix seconds; the present unless given.
    """
    chance = random.Random(seed)
    machine = machine or quad_machine()
    plan, host = plan_for(machine, preset, gpus, total), machine.hostname
    run = records.named_run(plan.spec, runs_dir, name) if name else create_run(plan.spec, runs_dir)
    attempt = new_attempt(run)
    now = time.time() if now is None else now
    began = now - steps * STEP_S - 42
    launch = Launch(plan=plan, machine=machine, ds_config={}, argv=(), environment=())
    write_launch(run, attempt, launch)

    found = _start(attempt, machine, plan, began)
    if steps:
        found.append(PhaseRecord(attempt=attempt, time=began + 41, phase="training"))
    for step in range(1, steps + 1):
        at = began + 42 + step * STEP_S
        found.append(step_record(chance, attempt, at, step, total, nan_steps))
        if step % SAVE_EVERY == 0:
            path = str(run.checkpoints_dir / f"step-{step}")
            saved = CheckpointRecord(
                attempt=attempt, time=at, step=step, path=path, bytes=207_000_000_000, seconds=61.0
            )
            found.append(saved)
    reason, suggestion = REASONS.get(state, ("", ""))
    if state in EXIT_CODES:
        end = EndRecord(attempt=attempt, time=now, state=state, step=steps, reason=reason)  # type: ignore[arg-type]
        found.append(replace(end, suggestion=suggestion))
    records.append_records(run, *found, attempt=attempt)

    samples = []
    for second in range(seconds_of_samples, 0, -1):
        placement = tuple(map(_place, plan.binding)) if second % 10 == 1 else ()
        made = sample(chance, attempt, now - second, machine, plan)
        samples.append(replace(made, placement=placement))
    records.append_samples(run, host, *samples)
    _write_log(run, attempt, host, steps, total, began)
    saved_step = steps // SAVE_EVERY * SAVE_EVERY
    write_state(
        run,
        RunState(
            name=run.name,
            state=state,
            attempt=attempt,
            host=host,
            step=steps,
            total_steps=total,
            loss=_loss(steps) if steps else None,
            reason=reason,
            suggestion=suggestion,
            started=began,
            ended=now if state in EXIT_CODES else None,
            heartbeat=1,
            exit_code=EXIT_CODES.get(state),
            saved_step=saved_step or None,
            saved_at=began + 42 + saved_step * STEP_S if saved_step else None,
        ),
    )
    return run


def _start(attempt: int, machine: Machine, plan: Plan, began: float) -> list[MetricRecord]:
    host = machine.hostname
    return [
        PhaseRecord(
            attempt=attempt,
            time=began,
            phase="loading",
            detail="loading the model",
            stage="weights",
            done=3,
            total=8,
        ),
        StartRecord(
            attempt=attempt,
            time=began + 40,
            model=plan.spec.model.id,
            mode=plan.mode,
            ranks=plan.gpus,
            total_steps=plan.spec.train.steps,
            parameters=14_768_307_200,
            hostnames=(host,),
            device_name=machine.gpus[0].name if machine.gpus else "",
            peak_tflops_per_gpu=989.0,
        ),
        BindingRecord(
            attempt=attempt,
            time=began + 40,
            ranks=tuple(_report(rank, host) for rank in plan.binding),
        ),
    ]


def _report(rank: RankBinding, host: str) -> RankBindingReport:
    values: dict[str, Any] = dict.fromkeys(("found_memory_policy", "memory_policy"), "bind")
    for name in ("rank", "gpu", "cpus", "main_cpus", "adam_cpus"):
        values[name] = getattr(rank, name)
    pid = 4000 + rank.rank
    return RankBindingReport(**values, host=host, pid=pid, found_cpus=rank.cpus, corrected=False)


def _loss(step: int) -> float:
    return 1.42 + 1.05 * math.exp(-step / 260)


def step_record(
    chance: random.Random, attempt: int, at: float, step: int, total: int, nan_steps: range
) -> StepRecord:
    loss = _loss(step) + chance.gauss(0, 0.055)
    wobble = chance.gauss(0, 0.012) + (0.5 if step < 4 else 0)
    step_s = STEP_S * (1 + wobble)
    tokens = int(49_600 * (1 + chance.gauss(0, 0.01)))
    parts = {"data_s": 0.02, "forward_s": 0.84, "backward_s": 2.11, "exposed_optimizer_s": 0.09}
    return records.step_record(
        step,
        attempt=attempt,
        time=at,
        loss=math.nan if step in nan_steps else loss,
        learning_rate=1e-5 * min(1, step / 60) * (0.5 + 0.5 * math.cos(math.pi * step / total)),
        gradient_norm=0.8 + chance.random() * 0.4,
        useful_tokens=tokens,
        trained_tokens=tokens // 2,
        useful_tokens_per_s_total=tokens / step_s,
        model_tflops_per_gpu=431 / (1 + wobble),
        hw_tflops_per_gpu=560 / (1 + wobble),
        seed_tflops_total=2200 / (1 + wobble),
        mfu=0.436 / (1 + wobble),
        step_s=step_s,
        **parts,
        other_s=step_s - 0.02 - 0.84 - 2.11 - 0.09,
        gpu_memory_peak_bytes=78 * GIB,
        host_memory_bytes=340 * GIB,
        slowest_rank=2,
        adam_busy_s=1.2,
        adam_bytes_per_s=212e9,
        kept_steps=step - step // 40,
        redone_steps=step // 40,
    )


def sample(chance: random.Random, attempt: int, at: float, machine: Machine, plan: Plan) -> Sample:
    wave = 0.5 + 0.5 * math.sin(at / 9)
    adam = {cpu for rank in plan.binding for cpu in rank.adam_cpus}
    main = {cpu for rank in plan.binding for cpu in rank.main_cpus}

    def load(cpu: int) -> int:
        level = 78 + 20 * wave if cpu in adam else 30 + 25 * wave if cpu in main else 2
        return int(min(100, max(0, chance.gauss(level, 7))))

    nodes = tuple(
        NodeSample(
            id=node.id,
            cores=tuple(load(cpu) for cpu in node.cpus),
            memory_used_bytes=int((84 + 4 * wave) * GIB * node.memory_total_bytes / (117 * GIB)),
            memory_total_bytes=node.memory_total_bytes,
            file_cache_bytes=4 * GIB,
        )
        for node in machine.numa_nodes
    )
    gpus = tuple(
        GpuSample(
            index=gpu.index,
            busy_percent=int(min(100, 94 + 6 * wave)),
            memory_used_bytes=78 * GIB,
            memory_total_bytes=gpu.memory_total_bytes,
            power_w=580 + 60 * wave,
            power_limit_w=700.0,
            clock_mhz=1755 if wave < 0.98 else 1620,
            temperature_c=58,
            throttling=("power",) if wave >= 0.98 else (),
            module_power_w=760 + 80 * wave,
            module_power_limit_w=900.0,
            pcie_to_gpu_bytes_per_s=1.5e9 * wave,
            pcie_to_host_bytes_per_s=0.5e9,
            c2c_to_gpu_bytes_per_s=208e9 * wave,
            c2c_to_host_bytes_per_s=212e9 * wave,
        )
        for gpu in machine.gpus
    )
    return Sample(
        attempt=attempt,
        time=at,
        interval_s=1.0,
        nodes=nodes,
        gpus=gpus,
        run_cpu_s=190.0,
        run_memory_peak_bytes=352 * GIB,
        supervisor_cpu_s=0.004,
    )


def _place(rank: RankBinding) -> RankPlacement:
    node = rank.numa_node or 0
    return RankPlacement(
        rank=rank.rank,
        cpus=rank.main_cpus,
        adam_cpus=rank.adam_cpus,
        node_bytes={node: 84 * GIB, node + 4: GIB // 2},
    )


def _write_log(
    run: RunDirectory, attempt: int, host: str, steps: int, total: int, began: float
) -> None:
    lines = [
        "[INFO] binding rank 0 to cores 0-71, node 0",
        "Loading weights: 100%|##########| 8/8",
        "[INFO] SuperOffload: 64 sub-groups, 12 on the GPU",
    ]
    for step in range(max(1, steps - 200), steps + 1):
        when = time.strftime("%H:%M:%S", time.localtime(began + 42 + step * STEP_S))
        done = f"step {step:,}/{total:,}  loss {_loss(step):.4f}  gradient norm 1  3.100 s"
        lines.append(f"{when} rank 0  {done}")
    run.log_path(attempt, host).write_text("\n".join(lines) + "\n")
