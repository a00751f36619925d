"""Changes to the environment of the training processes, each with its reason. Every other variable is inherited unchanged."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.launch.alert_command import MARKER as ALERT_MARKER
from so_tui.launch.placeholders import Placeholder, resolve
from so_tui.machine.code_folders import code_folders
from so_tui.machine.gpus import ROCM_VISIBLE_DEVICES
from so_tui.machine.types import Machine, Software, version_numbers
from so_tui.plan.types import Plan
from so_tui.spec.types import RunSpec
from so_tui.trust.secrets import without_credentials

RUN_MARKER = "SO_TUI_RUN"
"""Holds the run directory in the environment of every process of a run, so that the supervisor can recognise them."""

ATTEMPT_MARKER = "SO_TUI_ATTEMPT"
RUN_ID_MARKER = "SO_TUI_RUN_ID"
"""Holds the run's id, which distinguishes it from another run at the same path; empty for a run without one."""

NODE_MARKER = "SO_TUI_NODE"
"""Holds the number of the node, of a run on several: the nodes of a test are one host."""

RENDEZVOUS = "SO_TUI_RENDEZVOUS"
"""Tells the ranks where they meet."""

_PINNED_LIMIT_MB = 64


class Variable(Struct, frozen=True, kw_only=True):
    """One change to the environment. A value of None removes the variable."""

    name: str
    value: str | None
    reason: str


def variables(plan: Plan, machine: Machine, inherited: Mapping[str, str]) -> tuple[Variable, ...]:
    """Return the changes for a plan on a machine, given the inherited environment; values may be placeholders."""
    return (
        Variable(
            name=RUN_MARKER, value=Placeholder.RUN.value, reason="marks the processes of this run"
        ),
        Variable(
            name=RUN_ID_MARKER,
            value=Placeholder.RUN_ID.value,
            reason="distinguishes this run from another one at the same path",
        ),
        Variable(
            name=ATTEMPT_MARKER,
            value=Placeholder.ATTEMPT.value,
            reason="marks the processes of this attempt",
        ),
        *_alert(inherited),
        *_python(inherited),
        *_network(plan, machine, inherited),
        *_code_folders(plan.spec, inherited),
        *_threads(plan, inherited),
        *(_gpu(plan, machine, inherited) if machine.gpus else _cpu_only()),
        *_hub(plan.spec),
    )


def resolved(
    changes: tuple[Variable, ...], values: Mapping[Placeholder, str]
) -> tuple[Variable, ...]:
    """Return the changes with the host's values in place of the placeholders."""
    return tuple(
        change
        if change.value is None
        else msgspec.structs.replace(change, value=resolve(change.value, values))
        for change in changes
    )


def apply(changes: tuple[Variable, ...], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited environment with the changes applied."""
    environment = dict(inherited)
    for change in changes:
        if change.value is None:
            environment.pop(change.name, None)
        else:
            environment[change.name] = change.value
    return environment


def shown(changes: tuple[Variable, ...]) -> dict[str, str | None]:
    """Return the changes by name for display and for records, without credentials in their values."""
    return {
        change.name: None if change.value is None else without_credentials(change.value)
        for change in changes
    }


def rank_threads(plan: Plan) -> int:
    """Return the number of OpenMP threads of a rank: its Adam cores, or those of the smallest rank where ranks differ.

    Without an Adam worker all cores of the rank count. DeepSpeed's launcher overwrites the variable with all of the rank's cores when it
    binds, and torchrun-style defaults of 1 would make Adam tens of times slower. The trainer sets its own thread counts from the plan.
    """
    return min((len(rank.adam_cpus or rank.cpus) for rank in plan.binding), default=1) or 1


def valid_arch_list(value: str) -> str:
    """Remove the letters from TORCH_CUDA_ARCH_LIST that DeepSpeed cannot parse: ``8.0;9.0a+PTX`` becomes ``8.0;9.0+PTX``.

    DeepSpeed's op builder parses each entry as ``major.minor`` and fails with ``invalid literal for int() with base 10: '0a'``.
    """
    entries = (
        re.sub(r"^(\d+\.\d+)[a-z]+", r"\1", entry) for entry in re.split(r"[;\s]+", value.strip())
    )
    return ";".join(dict.fromkeys(entries))


def allocator_variable(software: Software, *, deepspeed_engine: bool) -> Variable | None:
    """Return the setting that reduces fragmentation in torch's allocators, or None where it would break something.

    torch aborts on an unknown key, so each key is set only for versions that have it: ``PYTORCH_ALLOC_CONF`` since 2.10 (the older name
    still works), limits of the pinned pool since 2.13. Without those limits, pinned blocks are rounded up to powers of two and never
    freed, which costs tens of GB of host memory for a 20B model. DeepSpeed's own SuperOffload before 0.18.1 passed GPU tensors by CUDA
    IPC, which does not work with expandable segments.
    """
    torch, deepspeed = version_numbers(software.torch), version_numbers(software.deepspeed)
    options = [] if deepspeed_engine and deepspeed < (0, 18, 1) else ["expandable_segments:True"]
    if torch >= (2, 13):
        options += [
            f"pinned_max_round_threshold_mb:{_PINNED_LIMIT_MB}",
            f"pinned_max_cached_size_mb:{_PINNED_LIMIT_MB}",
        ]
    if not options:
        return None
    name = "PYTORCH_ALLOC_CONF" if torch >= (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
    return Variable(
        name=name,
        value=",".join(options),
        reason="less fragmentation of GPU memory; no rounding up of pinned memory",
    )


def _alert(inherited: Mapping[str, str]) -> Iterator[Variable]:
    if ALERT_MARKER in inherited:
        yield Variable(
            name=ALERT_MARKER, value=None, reason="marks alert commands; one has started this run"
        )


def _python(inherited: Mapping[str, str]) -> Iterator[Variable]:
    folder = str(Path(sys.executable).parent)
    path = inherited.get("PATH", "/usr/bin:/bin")
    if folder not in path.split(":"):
        yield Variable(
            name="PATH",
            value=f"{folder}:{path}",
            reason="finds this interpreter's tools (ninja compiles DeepSpeed's kernels)",
        )
    yield Variable(
        name="PYTHONSAFEPATH",
        value="1",
        reason="imports modules from the installation, never from the current directory",
    )


def _network(plan: Plan, machine: Machine, inherited: Mapping[str, str]) -> Iterator[Variable]:
    """Let the ranks of one host meet in a file of this user and on the loopback interface, where no other user can join them.

    A site's modules often name the cluster's network for NCCL. On one host NCCL only introduces its ranks to each other over it, and
    listens there; the data goes over NVLink or shared memory. Ranks of several nodes need that network, and meet at the first node.
    """
    if plan.spec.nodes > 1:
        yield Variable(
            name=NODE_MARKER,
            value=Placeholder.NODE.value,
            reason="marks the processes of this node",
        )
        yield Variable(
            name=RENDEZVOUS,
            value=Placeholder.RENDEZVOUS.value,
            reason="an address of the first node, where the ranks meet",
        )
        if machine.gpus:
            yield Variable(
                name="NCCL_DEBUG",
                value="INFO",
                reason="NCCL writes to the log which network it uses between nodes",
            )
            if "NCCL_DEBUG_SUBSYS" not in inherited:
                yield Variable(name="NCCL_DEBUG_SUBSYS", value="INIT", reason="and little else")
    else:
        yield Variable(
            name=RENDEZVOUS,
            value=Placeholder.RENDEZVOUS.value,
            reason="a file of your own in which the ranks meet",
        )
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            yield Variable(
                name=name,
                value="lo",
                reason="all ranks are on this host, so nothing listens on its networks",
            )
    yield Variable(
        name="NCCL_RAS_ENABLE",
        value="0",
        reason="NCCL's status service would answer every user of this host",
    )


def _code_folders(spec: RunSpec, inherited: Mapping[str, str]) -> Iterator[Variable]:
    for name, folder in code_folders(inherited, several_hosts=spec.nodes > 1).items():
        given = f"; others can open {inherited[name]}" if inherited.get(name) else ""
        yield Variable(
            name=name,
            value=folder,
            reason=f"compiled code comes from a folder that only you can open{given}",
        )


def _threads(plan: Plan, inherited: Mapping[str, str]) -> Iterator[Variable]:
    threads = str(rank_threads(plan))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        yield Variable(
            name=name,
            value=threads,
            reason="one thread for each Adam core; a site default of 1 would be very slow",
        )
    for name in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY"):
        if name in inherited:
            yield Variable(
                name=name,
                value=None,
                reason="conflicts with the binding; DeepSpeed's launcher does not start with KMP_AFFINITY",
            )
    yield Variable(
        name="TOKENIZERS_PARALLELISM",
        value="false",
        reason="keeps the tokenizer's thread pool off the bound cores",
    )


def _cpu_only() -> Iterator[Variable]:
    yield Variable(name="DS_ACCELERATOR", value="cpu", reason="this machine has no GPU")


def _gpu(plan: Plan, machine: Machine, inherited: Mapping[str, str]) -> Iterator[Variable]:
    yield Variable(
        name="CUDA_DEVICE_ORDER",
        value="PCI_BUS_ID",
        reason="numbers the GPUs as NVML and the plan do",
    )
    for name in ROCM_VISIBLE_DEVICES:
        if name in inherited:
            yield Variable(
                name=name,
                value=None,
                reason="the command line names the GPUs, chosen among the visible ones",
            )
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & inherited.keys():
        own_engine = plan.mode != "superoffload" or plan.spec.offload.engine == "so-tui"
        allocator = allocator_variable(machine.software, deepspeed_engine=not own_engine)
        if allocator:
            yield allocator
    if (given := inherited.get("TORCH_CUDA_ARCH_LIST")) and (
        valid := valid_arch_list(given)
    ) != given:
        yield Variable(
            name="TORCH_CUDA_ARCH_LIST", value=valid, reason=f"DeepSpeed cannot parse {given}"
        )


def _hub(spec: RunSpec) -> Iterator[Variable]:
    sources = (part.source for part in spec.data.sources)
    if all(
        source.startswith("builtin:")
        for source in (spec.model.id, *sources, spec.data.evaluation or "builtin:")
    ):
        yield Variable(
            name="HF_HUB_OFFLINE", value="1", reason="everything this run needs is part of so-tui"
        )
