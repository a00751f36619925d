"""Check host memory: /dev/shm, locked memory, swap, huge pages, and the limit of the control group.

Codes: shm-too-small, shm-tight, shm-small, locked-memory-limit, swap-on, huge-pages-off, huge-pages-always, memory-limit,
memory-limit-exceeded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from so_tui.machine.doctor.types import CheckContext, Finding, Severity
from so_tui.units import GIB, memory_size, page_size

_SMALL_SHM_BYTES = GIB
_TIGHT_SHARE = 0.9
_PAGE_64K_BYTES = 65536
_SMALL_MEMLOCK_BYTES = 64 << 20


def check_shared_memory(context: CheckContext) -> Iterator[Finding]:
    """Check /dev/shm, which holds NCCL's buffers and the states that DeepSpeed's own engine shares with its Adam worker.

    so-tui's engine uses anonymous memory instead.
    """
    free, total = context.machine.shm_free_bytes, context.machine.shm_total_bytes
    if free is None or total is None:
        return
    evidence = f"/dev/shm: {memory_size(free)} free of {memory_size(total)}"
    remedy = "As root: `mount -o remount,size=90% /dev/shm`; for a container: `--shm-size` or `--ipc=host`."
    if context.plan and context.plan.shm_bytes > free:
        yield Finding(
            code="shm-too-small",
            severity="blocks",
            title="/dev/shm is too small for this run",
            evidence=f"{evidence}; the run needs {memory_size(context.plan.shm_bytes)}",
            cost="The ranks would fail with a bus error in the first step.",
            remedy=f"{remedy} Alternatively, lower the offload ratio.",
        )
    elif context.plan and context.plan.shm_bytes > _TIGHT_SHARE * free:
        yield Finding(
            code="shm-tight",
            severity="warning",
            title="/dev/shm is nearly too small for this run",
            evidence=f"{evidence}; the run needs {memory_size(context.plan.shm_bytes)}",
            cost="The run fails if another process writes there.",
            remedy=remedy,
        )
    elif context.plan is None and total < _SMALL_SHM_BYTES:
        yield Finding(
            code="shm-small",
            severity="warning",
            title="/dev/shm is very small",
            evidence=evidence,
            cost="NCCL needs tens of megabytes per GPU there, and DeepSpeed's own SuperOffload (offload.engine = deepspeed) 8 bytes "
            "per offloaded parameter. so-tui's engine needs none.",
            remedy=remedy,
        )


def check_locked_memory(context: CheckContext) -> Iterator[Finding]:
    """Check the limit on locked memory on hosts with RDMA cards. CUDA's pinned memory does not count against it."""
    if (
        not context.files
        or not context.nvidia_gpus
        or not context.files.names("/sys/class/infiniband")
    ):
        return
    match = re.search(
        r"^Max locked memory\s+(\d+)", context.text("/proc/self/limits"), re.MULTILINE
    )
    if match and int(match.group(1)) < _SMALL_MEMLOCK_BYTES:
        yield Finding(
            code="locked-memory-limit",
            severity="note",
            title="The limit on locked memory is low",
            evidence=f"/proc/self/limits: max locked memory {memory_size(int(match.group(1)))}",
            cost="None on one node. Runs over several nodes fail when they register buffers with the network cards.",
            remedy="`ulimit -l unlimited`, set by the site or the container (`--ulimit memlock=-1`).",
        )


def check_swap(context: CheckContext) -> Iterator[Finding]:
    sizes = [
        int(fields[2]) * 1024
        for line in context.text("/proc/swaps").splitlines()[1:]
        if len(fields := line.split()) > 3
    ]
    if context.nvidia_gpus and sum(sizes):
        yield Finding(
            code="swap-on",
            severity="note",
            title="Swap is on",
            evidence=f"/proc/swaps: {memory_size(sum(sizes))}",
            cost="A run that exceeds memory becomes very slow instead of failing with a clear error. Pinned memory never swaps.",
            remedy="As root: `swapoff -a`, if this machine is dedicated to training.",
        )


def check_huge_pages(context: CheckContext) -> Iterator[Finding]:
    setting = re.search(r"\[(\w+)\]", context.text("/sys/kernel/mm/transparent_hugepage/enabled"))
    if not setting or not context.nvidia_gpus:
        return
    page_bytes = context.machine.page_size_bytes
    evidence = f"/sys/kernel/mm/transparent_hugepage/enabled: {setting.group(1)}; page size {page_size(page_bytes or 0)}"
    large = page_bytes is not None and page_bytes >= _PAGE_64K_BYTES
    if setting.group(1) == "never" and not large:
        yield Finding(
            code="huge-pages-off",
            severity="note",
            title="Transparent huge pages are off",
            evidence=evidence,
            cost="CPU Adam reads tens of gigabytes in 4 KiB pages: more address translation, and slightly slower steps.",
            remedy="As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`.",
        )
    elif setting.group(1) == "always" and large:
        yield Finding(
            code="huge-pages-always",
            severity="note",
            title="Transparent huge pages are always on, and are 512 MiB each",
            evidence=evidence,
            cost="Many small allocations can take half a gigabyte each: host memory runs out earlier than planned.",
            remedy="As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`. Some sites offer a job option.",
        )


def check_memory_limit(context: CheckContext) -> Iterator[Finding]:
    limit = context.machine.memory_limit_bytes
    if limit is None:
        return
    needed = (
        sum(context.plan.host_bytes_per_node.values()) - context.plan.host_optional_bytes
        if context.plan
        else 0
    )
    if context.plan and needed <= _TIGHT_SHARE * limit:
        return
    exceeded = needed > limit
    severity: Severity = "note" if context.plan is None else "blocks" if exceeded else "warning"
    evidence = (
        f"limit {memory_size(limit)}, host memory {memory_size(context.machine.host_memory_bytes)}"
    )
    yield Finding(
        code="memory-limit-exceeded" if exceeded else "memory-limit",
        severity=severity,
        title="A control group limits memory" + (" below what this run needs" if exceeded else ""),
        evidence=evidence + (f"; the run needs {memory_size(needed)}" if needed else ""),
        cost="The kernel ends a run that exceeds the limit; /dev/shm counts as well.",
        remedy="Request more memory for the job (`--mem=0` requests all of the node) or the container, or offload less.",
    )


CHECKS = (
    check_shared_memory,
    check_locked_memory,
    check_swap,
    check_huge_pages,
    check_memory_limit,
)
