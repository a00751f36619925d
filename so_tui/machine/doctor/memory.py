"""Checks of host memory: /dev/shm, locked memory, swap, huge pages, the cgroup's limit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from so_tui.machine.doctor.finding import GIB, Finding, Look, Severity, gib

_SMALL_SHM_BYTES = GIB
_TIGHT_SHARE = 0.9
_PAGE_64K_BYTES = 65536
_SMALL_MEMLOCK_BYTES = 64 << 20


def shared_memory(look: Look) -> Iterator[Finding]:
    """Buffers of NCCL live there, and what rank and Adam worker of DeepSpeed's own engine share; ours has anonymous memory."""
    free, total = look.machine.shm_free_bytes, look.machine.shm_total_bytes
    if free is None or total is None:
        return
    evidence = f"/dev/shm: {gib(free)} free of {gib(total)}"
    remedy = "As root: `mount -o remount,size=90% /dev/shm`; in a container `--shm-size` or `--ipc=host`."
    if look.plan and look.plan.shm_bytes > free:
        yield Finding(
            severity="blocks",
            title="/dev/shm is too small for this run",
            evidence=f"{evidence}; the run needs {gib(look.plan.shm_bytes)}",
            cost="The ranks would die of a bus error in the first step.",
            remedy=f"{remedy} Or a lower offload ratio.",
        )
    elif look.plan and look.plan.shm_bytes > _TIGHT_SHARE * free:
        yield Finding(
            severity="warning",
            title="/dev/shm is nearly too small for this run",
            evidence=f"{evidence}; the run needs {gib(look.plan.shm_bytes)}",
            cost="Anything else that writes there stops the run.",
            remedy=remedy,
        )
    elif look.plan is None and total < _SMALL_SHM_BYTES:
        yield Finding(
            severity="warning",
            title="/dev/shm is very small",
            evidence=evidence,
            cost="Messages between ranks need tens of megabytes a GPU there, DeepSpeed's own SuperOffload (offload.engine = deepspeed) "
            "8 bytes per offloaded parameter; so-tui's engine needs none.",
            remedy=remedy,
        )


def locked_memory(look: Look) -> Iterator[Finding]:
    """Only where there are RDMA cards: CUDA's own pinned memory is not counted against the limit."""
    if not look.tree or not look.nvidia or not look.tree.names("/sys/class/infiniband"):
        return
    match = re.search(r"^Max locked memory\s+(\d+)", look.text("/proc/self/limits"), re.MULTILINE)
    if match and int(match.group(1)) < _SMALL_MEMLOCK_BYTES:
        yield Finding(
            severity="note",
            title="The limit on locked memory is low",
            evidence=f"/proc/self/limits: max locked memory {int(match.group(1)) // 1024} KiB",
            cost="None on one node; runs over several nodes register their buffers with the network cards, and fail.",
            remedy="`ulimit -l unlimited`, set by the site or the container (`--ulimit memlock=-1`).",
        )


def swap(look: Look) -> Iterator[Finding]:
    sizes = [int(fields[2]) * 1024 for line in look.text("/proc/swaps").splitlines()[1:] if len(fields := line.split()) > 3]
    if look.nvidia and sum(sizes):
        yield Finding(
            severity="note",
            title="Swap is on",
            evidence=f"/proc/swaps: {gib(sum(sizes))}",
            cost="A run that outgrows memory becomes very slow instead of ending with a clear error. Pinned states never swap.",
            remedy="As root: `swapoff -a`, if this machine is there to train.",
        )


def huge_pages(look: Look) -> Iterator[Finding]:
    setting = re.search(r"\[(\w+)\]", look.text("/sys/kernel/mm/transparent_hugepage/enabled"))
    if not setting or not look.nvidia:
        return
    evidence = (
        f"/sys/kernel/mm/transparent_hugepage/enabled: {setting.group(1)}; page size {(look.machine.page_size_bytes or 0) // 1024} KiB"
    )
    large = look.machine.page_size_bytes is not None and look.machine.page_size_bytes >= _PAGE_64K_BYTES
    if setting.group(1) == "never" and not large:
        yield Finding(
            severity="note",
            title="Transparent huge pages are off",
            evidence=evidence,
            cost="Adam walks tens of gigabytes in 4 KiB pages: more address translation, somewhat slower steps.",
            remedy="As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`.",
        )
    elif setting.group(1) == "always" and large:
        yield Finding(
            severity="note",
            title="Transparent huge pages are always on, and 512 MiB large here",
            evidence=evidence,
            cost="Many small allocations can each hold half a gigabyte: host memory runs out earlier than planned.",
            remedy="As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`; on some sites a job option.",
        )


def memory_limit(look: Look) -> Iterator[Finding]:
    limit = look.machine.memory_limit_bytes
    if limit is None:
        return
    needed = sum(look.plan.host_bytes_per_node.values()) if look.plan else 0
    if look.plan and needed <= _TIGHT_SHARE * limit:
        return
    severity: Severity = "note" if look.plan is None else "blocks" if needed > limit else "warning"
    yield Finding(
        severity=severity,
        title="A control group limits memory" + (" below what this run needs" if needed > limit else ""),
        evidence=f"limit {gib(limit)}, host memory {gib(look.machine.host_memory_bytes)}" + (f"; needed {gib(needed)}" if needed else ""),
        cost="The kernel ends the run where it goes beyond the limit; /dev/shm counts too.",
        remedy="Ask for more memory when starting the job (`--mem=0` is all of the node's) or container, or offload less.",
    )


CHECKS = (shared_memory, locked_memory, swap, huge_pages, memory_limit)
