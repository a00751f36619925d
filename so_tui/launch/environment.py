"""What is set in, and removed from, the environment of the training processes, each with its reason.

Everything else passes through untouched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from so_tui.machine.types import Machine, Software
from so_tui.plan.types import Plan
from so_tui.runs.log import redact
from so_tui.spec.types import RunSpec

RUN_MARKER = "SO_TUI_RUN"
"""Names the run directory in the environment of every process of the run: how the supervisor knows them again."""

_INHERITED_OF_INTEREST = re.compile(
    r"^(NCCL|CUDA|OMP|MKL|KMP|GOMP|PYTORCH|TORCH|HF|HUGGING|TRANSFORMERS|DS|SLURM|LD_LIBRARY_PATH|FI|UCX|OFI)(_|$)"
)
_PINNED_LIMIT_MB = 64


class Variable(Struct, frozen=True, kw_only=True):
    """One change to the environment; ``value`` None removes the variable."""

    name: str
    value: str | None
    reason: str


def variables(plan: Plan, machine: Machine, inherited: Mapping[str, str], *, run: str, attempt: int) -> tuple[Variable, ...]:
    """The changes for this plan on this machine, given the environment that is inherited."""
    return (
        Variable(name=RUN_MARKER, value=run, reason="marks the processes of this run"),
        Variable(name="SO_TUI_ATTEMPT", value=str(attempt), reason="marks the processes of this attempt"),
        *_python(inherited),
        *_threads(plan, inherited),
        *(_gpu(plan, machine, inherited) if machine.gpus else _cpu_only()),
        *_hub(plan.spec),
    )


def apply(changes: tuple[Variable, ...], inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment with the changes made."""
    environment = dict(inherited)
    for change in changes:
        if change.value is None:
            environment.pop(change.name, None)
        else:
            environment[change.name] = change.value
    return environment


def shown(changes: tuple[Variable, ...]) -> dict[str, str | None]:
    """The changes for people and programs: only what is set (value) or removed (None), nothing that looks like a secret."""
    values = redact({change.name: change.value for change in changes if change.value is not None})
    return {change.name: values.get(change.name) for change in changes}


def inherited_of_interest(inherited: Mapping[str, str]) -> dict[str, str]:
    """Inherited variables that change how training behaves, for the record of the attempt, secrets redacted."""
    return redact({name: inherited[name] for name in sorted(inherited) if _INHERITED_OF_INTEREST.match(name)})


def rank_threads(plan: Plan) -> int:
    """OpenMP threads of a rank: as many as the cores that run CPU Adam, the smallest rank's where they differ.

    Without an Adam worker that is all of the rank's cores. DeepSpeed's launcher overwrites the variable with all cores of the rank
    when it binds, and torchrun-style defaults of 1 would make Adam tens of times slower; the trainer sets its own counts from the plan.
    """
    return min((len(rank.adam_cpus or rank.cpus) for rank in plan.binding), default=1) or 1


def valid_arch_list(value: str) -> str:
    """TORCH_CUDA_ARCH_LIST without the letters that DeepSpeed cannot read: ``8.0;9.0a+PTX`` becomes ``8.0;9.0+PTX``.

    DeepSpeed's op builder parses each entry as ``major.minor`` and dies of ``invalid literal for int() with base 10: '0a'``.
    """
    entries = (re.sub(r"^(\d+\.\d+)[a-z]+", r"\1", entry) for entry in re.split(r"[;\s]+", value.strip()))
    return ";".join(dict.fromkeys(entries))


def allocator_variable(software: Software, *, deepspeed_engine: bool) -> Variable | None:
    """The setting of torch's allocators against fragmentation, or None where it would break something.

    torch aborts on a key that it does not know, so each key is set only from the version that has it: ``PYTORCH_ALLOC_CONF`` since 2.10
    (the older name still works), limits of the pinned pool since 2.13. Pinned blocks are otherwise rounded up to powers of two and kept
    for ever: tens of GB of host memory for a 20B model. DeepSpeed's own SuperOffload before 0.18.1 passed GPU tensors by CUDA IPC,
    which expandable segments break.
    """
    torch, deepspeed = version(software.torch), version(software.deepspeed)
    options = [] if deepspeed_engine and deepspeed < (0, 18, 1) else ["expandable_segments:True"]
    if torch >= (2, 13):
        options += [f"pinned_max_round_threshold_mb:{_PINNED_LIMIT_MB}", f"pinned_max_cached_size_mb:{_PINNED_LIMIT_MB}"]
    if not options:
        return None
    name = "PYTORCH_ALLOC_CONF" if torch >= (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
    return Variable(name=name, value=",".join(options), reason="less fragmented GPU memory, pinned memory that is not rounded up")


def version(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version (``2.13.0+cpu`` is ``(2, 13, 0)``), to be compared; nothing known is ``()``, below every version."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _python(inherited: Mapping[str, str]) -> Iterator[Variable]:
    folder = str(Path(sys.executable).parent)
    path = inherited.get("PATH", "/usr/bin:/bin")
    if folder not in path.split(":"):
        yield Variable(name="PATH", value=f"{folder}:{path}", reason="this interpreter's tools (ninja compiles DeepSpeed's kernels)")
    yield Variable(name="PYTHONSAFEPATH", value="1", reason="modules come from the installation, never from the folder one stands in")


def _threads(plan: Plan, inherited: Mapping[str, str]) -> Iterator[Variable]:
    threads = str(rank_threads(plan))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        yield Variable(name=name, value=threads, reason="one thread a core of CPU Adam; a site default of 1 makes it crawl")
    for name in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY"):
        if name in inherited:
            yield Variable(name=name, value=None, reason="contradicts the binding; DeepSpeed's launcher refuses to start with KMP_AFFINITY")
    yield Variable(name="TOKENIZERS_PARALLELISM", value="false", reason="no thread pool of the tokenizer beside the bound cores")


def _cpu_only() -> Iterator[Variable]:
    yield Variable(name="DS_ACCELERATOR", value="cpu", reason="no GPU on this machine")


def _gpu(plan: Plan, machine: Machine, inherited: Mapping[str, str]) -> Iterator[Variable]:
    yield Variable(name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", reason="numbers GPUs as NVML and the plan do")
    if "CUDA_VISIBLE_DEVICES" in inherited:
        yield Variable(name="CUDA_VISIBLE_DEVICES", value=None, reason="the plan names the GPUs (of the visible ones) on the command line")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & inherited.keys():
        own_engine = plan.mode != "superoffload" or plan.spec.offload.engine == "so-tui"
        allocator = allocator_variable(machine.software, deepspeed_engine=not own_engine)
        if allocator:
            yield allocator
    if (given := inherited.get("TORCH_CUDA_ARCH_LIST")) and (valid := valid_arch_list(given)) != given:
        yield Variable(name="TORCH_CUDA_ARCH_LIST", value=valid, reason=f"DeepSpeed cannot read {given}")


def _hub(spec: RunSpec) -> Iterator[Variable]:
    sources = (part.source for part in spec.data.sources)
    if all(source.startswith("builtin:") for source in (spec.model.id, *sources, spec.data.evaluation or "builtin:")):
        yield Variable(name="HF_HUB_OFFLINE", value="1", reason="everything this run needs came with so-tui")
