"""Bind this rank to the cores and the memory policy of the plan, before torch starts a thread or
allocates a page.

DeepSpeed's launcher may have bound the rank already, or not at all, or to the wrong cores, since it
cannot express every machine. So each rank reads its binding, corrects it, and reports both. What
the kernel forbids (a container's seccomp profile, a cpuset) is reported, not fatal. Imports neither
torch nor anything that imports it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

from so_tui.plan.plan import MemoryPolicy, RankBinding
from so_tui.runs.records import RankBindingReport

# set_mempolicy(2) and get_mempolicy(2) have no wrapper in libc; numbers from asm/unistd_64.h and
# asm-generic/unistd.h.
_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_MODES = {
    0: "default",
    1: "preferred",
    2: "bind",
    3: "interleave",
    4: "local",
    5: "preferred-many",
    6: "weighted-interleave",
}
_MODE_NUMBERS = {"default": 0, "preferred": 1, "bind": 2}
_MASK_WORDS = 16
_WORD_BITS = 64
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when DeepSpeed's launcher dies, however it dies, so that
    no rank is orphaned.

    Raises:
        OSError: The kernel refuses.
    """
    launcher = os.getppid()
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:  # It died between the two calls.
        os.kill(os.getpid(), signal.SIGKILL)


def of_rank(bindings: Iterable[RankBinding], rank: int) -> RankBinding:
    """Return the binding of a rank among those of its host."""
    return next(binding for binding in bindings if binding.rank == rank)


def bind(binding: RankBinding) -> RankBindingReport:
    """Move every thread of this process to the rank's cores and set its memory policy.

    Returns:
        The binding before and after, and what the kernel refused. Nothing is raised for that.
    """
    found_cpus = _affinity()
    found_policy = _memory_policy()
    problems = []
    if found_cpus != binding.cpus:
        problems += _move_threads(binding.cpus)
    if found_policy != _policy_text(binding.memory_policy):
        problems += set_memory_policy(binding.memory_policy)
    cpus, policy = _affinity(), _memory_policy()
    return RankBindingReport(
        rank=binding.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        gpu=binding.gpu,
        found_cpus=found_cpus,
        cpus=cpus,
        main_cpus=binding.main_cpus,
        adam_cpus=binding.adam_cpus,
        found_memory_policy=found_policy,
        memory_policy=policy,
        corrected=(cpus, policy) != (found_cpus, found_policy),
        problem="; ".join(problems),
    )


def apply_main_cores(binding: RankBinding) -> None:
    """Restrict all threads of the training process to the main cores, and size torch's thread pool
    by them.

    To be called after an Adam worker has taken its own cores.
    """
    import torch

    _move_threads(binding.main_cpus)
    torch.set_num_threads(max(1, len(binding.main_cpus)))


def _memory_policy() -> str:
    """Return this thread's memory policy: ``default``, ``bind:0``, ``preferred:1``; ``unknown`` if
    the kernel does not report it.
    """
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return "unknown"
    mode = ctypes.c_int()
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    if (
        _libc.syscall(
            numbers[1],
            ctypes.byref(mode),
            mask,
            ctypes.c_ulong(_MASK_WORDS * _WORD_BITS),
            None,
            ctypes.c_ulong(0),
        )
        != 0
    ):
        return "unknown"
    nodes = [
        word * _WORD_BITS + bit
        for word in range(_MASK_WORDS)
        for bit in range(_WORD_BITS)
        if mask[word] >> bit & 1
    ]
    # The high bits are flags (static or relative nodes).
    name = _MODES.get(mode.value & 0xFF, str(mode.value))
    return f"{name}:{','.join(map(str, nodes))}" if nodes else name


def _affinity() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def _policy_text(policy: MemoryPolicy) -> str:
    return (
        f"{policy.mode}:{','.join(map(str, sorted(policy.nodes)))}" if policy.nodes else policy.mode
    )


def _move_threads(cpus: Iterable[int]) -> list[str]:
    """Move all existing threads, which keep their own masks otherwise; later threads inherit.

    Returns:
        Problems in words.
    """
    wanted = set(cpus)
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), wanted)
        except ProcessLookupError:
            continue
        except OSError as error:
            return [f"cannot run on cores {min(wanted)}-{max(wanted)}: {error.strerror}"]
    return []


def set_memory_policy(policy: MemoryPolicy) -> list[str]:
    """Set the policy of this thread, and of the threads and processes that it starts. Return
    problems in words.
    """
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return [f"no set_mempolicy known for {platform.machine()}"]
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in policy.nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    pointer = mask if policy.nodes else None
    bits = _MASK_WORDS * _WORD_BITS + 1 if policy.nodes else 0
    if (
        _libc.syscall(
            numbers[0], ctypes.c_int(_MODE_NUMBERS[policy.mode]), pointer, ctypes.c_ulong(bits)
        )
        != 0
    ):
        reason = os.strerror(ctypes.get_errno())
        return [f"cannot set the memory policy {_policy_text(policy)}: {reason}"]
    return []
