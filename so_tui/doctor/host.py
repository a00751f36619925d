"""Check the host: which cores and how much memory a run may use, kernel settings that slow it down,
and what other processes leave or do to it.

Codes: cores-far-from-gpu, gpu-memory-taken-for-hbm, fake-numa, few-cores, cpu-quota,
numa-balancing, slow-governor, process-limit, login-node, shm-too-small, shm-tight, shm-small,
locked-memory-limit, swap-on, huge-pages-off, huge-pages-always, memory-limit,
memory-limit-exceeded, orphaned-trainers, orphaned-ranks, killed-at-logout, shm-left-behind,
runs-exchangeable.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
from pathlib import Path

from so_tui.doctor.checks import CheckContext, Findings, finding
from so_tui.folders import known_runs_dirs
from so_tui.machine.host import cpu_quota, cpu_ranges, process_limit
from so_tui.machine.system_files import SystemFiles
from so_tui.trust.folders import SHARE_VARIABLE, WITH_GROUP, exchangeable_in
from so_tui.trust.text import printable_line, quoted
from so_tui.units import GIB, KIB, memory_size, page_size, plural

# Memory: /dev/shm, locked memory, swap, huge pages, and the limit of the control group.


_SMALL_SHM_BYTES = GIB
_TIGHT_SHARE = 0.9
_PAGE_64K_BYTES = 65536
_SMALL_MEMLOCK_BYTES = 64 << 20


def _check_shared_memory(context: CheckContext) -> Findings:
    """Check /dev/shm, which holds NCCL's buffers and the states that DeepSpeed's own engine shares
    with its Adam worker.

    so-tui's engine uses anonymous memory instead.
    """
    free, total = context.machine.shm_free_bytes, context.machine.shm_total_bytes
    if free is None or total is None:
        return
    evidence = f"/dev/shm: {memory_size(free)} free of {memory_size(total)}"
    if context.plan is None:
        if total < _SMALL_SHM_BYTES:
            yield finding("shm-small", evidence)
    elif (needed := context.plan.shm_bytes) > _TIGHT_SHARE * free:
        yield finding(
            "shm-too-small" if needed > free else "shm-tight",
            f"{evidence}; the run needs {memory_size(needed)}",
        )


def _check_memory_settings(context: CheckContext) -> Findings:
    """Check the limit on locked memory on hosts with RDMA cards, which CUDA's pinned memory does
    not count against, swap, and huge pages.
    """
    if not context.nvidia_gpus:
        return
    limits = context.files.text("/proc/self/limits")
    locked = re.search(r"^Max locked memory\s+(\d+)", limits, re.MULTILINE)
    has_rdma = context.files.names("/sys/class/infiniband")
    if locked and has_rdma and int(locked[1]) < _SMALL_MEMLOCK_BYTES:
        yield finding(
            "locked-memory-limit",
            f"/proc/self/limits: max locked memory {memory_size(int(locked[1]))}",
        )
    lines = (line.split() for line in context.files.text("/proc/swaps").splitlines()[1:])
    if swap_kib := sum(int(fields[2]) for fields in lines if len(fields) > 3):
        yield finding("swap-on", f"/proc/swaps: {memory_size(swap_kib * KIB)}")
    file = "/sys/kernel/mm/transparent_hugepage/enabled"
    setting = re.search(r"\[(\w+)\]", context.files.text(file))
    page_bytes = context.machine.page_size_bytes or 0
    wrong = "always" if page_bytes >= _PAGE_64K_BYTES else "never"
    if setting and setting[1] == wrong:
        yield finding(
            "huge-pages-always" if wrong == "always" else "huge-pages-off",
            f"{file}: {wrong}; page size {page_size(page_bytes)}",
        )


def _check_memory_limit(context: CheckContext) -> Findings:
    limit, needed = context.machine.memory_limit_bytes, context.host_bytes_needed
    if limit is None or (context.plan and needed <= _TIGHT_SHARE * limit):
        return
    host = memory_size(context.machine.host_memory_bytes)
    evidence = f"limit {memory_size(limit)}, host memory {host}"
    if needed:
        evidence += f"; the run needs {memory_size(needed)}"
    yield finding(
        "memory-limit-exceeded" if needed > limit else "memory-limit",
        evidence,
        lesser=context.plan is None,
    )


# Processors: which cores may be used, and settings that slow them down.


_FEW_CORES = 8
"""Cores per GPU below which CPU Adam is slow."""
_SLOW_GOVERNORS = ("powersave", "conservative", "userspace")
_SELF_SCALING = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers that scale with load even with their default governor, ``powersave``."""
_FEW_PROCESSES = 4096


def _check_numa_nodes(context: CheckContext) -> Findings:
    """Find a CPU mask without any core of a GPU's node (some sites give every task the first cores
    of the host), and nodes that mislead: half of them without CPUs, which DeepSpeed's launcher
    takes for fast CPU memory, or several with the same CPUs (``numa=fake``).
    """
    allowed, nodes = set(context.machine.allowed_cpus), context.machine.numa_nodes
    far = [gpu for gpu in context.nvidia_gpus if gpu.cpus and not allowed & set(gpu.cpus)]
    if far:
        yield finding(
            "cores-far-from-gpu",
            f"GPU {far[0].index} is attached to cores {cpu_ranges(far[0].cpus)}; allowed cores: "
            f"{cpu_ranges(allowed)}",
        )
    bare = [node.id for node in nodes if not node.cpus]
    if context.nvidia_gpus and bare and 2 * len(bare) == len(nodes):
        yield finding(
            "gpu-memory-taken-for-hbm",
            f"{len(nodes)} NUMA nodes, half of them ({cpu_ranges(bare)}) without CPUs",
        )
    cpus = [node.cpus for node in context.machine.cpu_nodes]
    shared = [node.id for node in context.machine.cpu_nodes if cpus.count(node.cpus) > 1]
    if context.is_grace and shared:
        yield finding("fake-numa", f"nodes {cpu_ranges(shared)} list the same CPUs (numa=fake)")


def _check_cores(context: CheckContext) -> Findings:
    gpus, cores = len(context.nvidia_gpus), len(context.machine.allowed_cpus)
    if cores < _FEW_CORES * gpus:
        yield finding("few-cores", f"{plural(cores, 'allowed core')} for {plural(gpus, 'GPU')}")
    quota = cpu_quota(context.files)
    if quota is not None and quota < cores:
        yield finding("cpu-quota", f"CPU time of {quota:g} cores for {cores} allowed cores")
    file = "/proc/sys/kernel/numa_balancing"
    balancing = context.files.text(file).strip()
    if context.several_nodes and gpus and balancing not in ("", "0"):
        yield finding("numa-balancing", f"{file}: {balancing}", lesser=not context.is_grace)
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    governor = context.files.text(f"{folder}/scaling_governor").strip()
    scaling = context.files.text(f"{folder}/scaling_driver").strip()
    if gpus and governor in _SLOW_GOVERNORS and scaling not in _SELF_SCALING:
        yield finding(
            "slow-governor",
            f"{folder}/scaling_governor: {governor} (driver {scaling or 'unknown'})",
            governor=governor,
        )
    limit = process_limit(context.files)
    if limit is not None and limit < min(_FEW_PROCESSES, 100 + 4 * cores):
        yield finding("process-limit", f"pids.max: {limit}, for {plural(cores, 'core')}")


def _check_login_node(context: CheckContext) -> Findings:
    """Find a host with Slurm's commands outside of a job: compute nodes may be different."""
    path = context.environment.get("PATH", "")
    if "SLURM_JOB_ID" not in context.environment and shutil.which("sbatch", path=path):
        yield finding("login-node", "sbatch is on PATH, and SLURM_JOB_ID is not set")


# Processes: what earlier runs left behind, and whether runs survive a logout.


_TRAINER = "so_tui_trainer"
_RUN_VARIABLE = "SO_TUI_RUN"
"""Set in the environment of every process of a run."""
_SHELLS = ("bash", "sh", "dash", "zsh", "fish", "tmux: server", "slurmstepd")
_SESSION = 3
"""Index of the session among the fields after the command name in /proc/PID/stat."""
_SHM = "/dev/shm"
_SEGMENT = re.compile(r"torch_\d+_|psm_|deepspeed_allreduce_buffer_|nccl-")
"""Names of segments of torch, Python, DeepSpeed and NCCL."""
_LEFT_BYTES = 32 << 20
"""Less is not reported."""
_LOGIND_FOLDERS = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")
"""Folders in order of precedence, the last wins."""
_TRUE = ("yes", "true", "1", "on")


def _check_orphans(context: CheckContext) -> Findings:
    """Find training processes of this user without a supervisor. The run may still be fine: its
    supervisor may have died.
    """
    files = context.files
    ours: dict[int, str] = {}
    others: list[int] = []
    for pid in sorted(int(name) for name in files.names("/proc") if name.isdigit()):
        if not _own_and_alive(files, pid):
            continue
        arguments, run = _strings(files, pid, "cmdline"), run_of(files, pid)
        # Adam workers are spawned by multiprocessing: only their environment shows which run they
        # belong to.
        if run is not None or any(_TRAINER in argument for argument in arguments):
            if _is_unsupervised(files, pid):
                ours[pid] = run or ""
        elif _adopted(files, pid) and _is_rank(files, pid, arguments):
            others.append(pid)
    if ours:
        runs = ", ".join(sorted({run for run in ours.values() if run})) or "unknown"
        processes = " ".join(map(str, ours))
        yield finding(
            "orphaned-trainers",
            f"process {processes}, no supervisor among its parents; run: {runs}",
            processes=processes,
        )
    if others:
        processes = " ".join(map(str, others))
        yield finding(
            "orphaned-ranks",
            f"process {processes}, parent ended: DeepSpeed's launcher leaves ranks and Adam "
            "workers behind when it is killed",
            processes=processes,
        )


def run_of(files: SystemFiles, pid: int) -> str | None:
    """Return the run directory that a process of so-tui belongs to; None for any other process."""
    variables = (text.partition("=") for text in _strings(files, pid, "environ"))
    return next((value for name, _, value in variables if name == _RUN_VARIABLE), None)


def _is_rank(files: SystemFiles, pid: int, arguments: list[str]) -> bool:
    """Return whether a process is a rank, a child of one, or DeepSpeed's launcher, judging by the
    variables that torch launchers set.
    """
    names = {text.partition("=")[0] for text in _strings(files, pid, "environ")}
    return {"LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} <= names or any(
        "deepspeed.launcher" in argument for argument in arguments
    )


def _own_and_alive(files: SystemFiles, pid: int) -> bool:
    """Return whether a process belongs to this user and has not ended."""
    try:
        own = files.path(f"/proc/{pid}").stat().st_uid == os.getuid()
    except OSError:
        return False
    return own and _stat(files, pid)[0] not in "ZX"


def _stat(files: SystemFiles, pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: the state, the parent, and so on."""
    # The name in parentheses may contain spaces and parentheses: the fields follow the last one.
    fields = files.text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > 1 else ["Z", "0"]


def _is_unsupervised(files: SystemFiles, pid: int) -> bool:
    """Return whether a process has no supervisor among its parents, and its run's topmost process
    lost its parent or session leader.

    Which process adopts orphans depends on the machine. A run that a user's script started still
    has the script's session.
    """
    top = pid
    while pid > 1:
        if "supervise" in _strings(files, pid, "cmdline"):
            return False
        if run_of(files, pid) is not None:
            top = pid
        pid = int(_stat(files, pid)[1])
    session = _stat(files, top)[_SESSION:][:1]
    leaderless = any(not files.exists(f"/proc/{leader}") for leader in session)
    return leaderless or _adopted(files, top)


def _adopted(files: SystemFiles, pid: int) -> bool:
    """Return whether the parent is process 1 or the user's service manager, which usually adopt
    orphans.

    In a container, process 1 may be the user's shell.
    """
    parent = _stat(files, pid)[1]
    name = files.text(f"/proc/{parent}/comm")
    return name not in _SHELLS if parent == "1" else name == "systemd"


def _strings(files: SystemFiles, pid: int, name: str) -> list[str]:
    """Return the NUL-separated strings of a file in /proc/PID."""
    return files.text(f"/proc/{pid}/{name}").split("\0")


def _check_logout(context: CheckContext) -> Findings:
    """Find login sessions whose processes end at logout. Those of the user's service manager
    outlive it if the user lingers.
    """
    if "/session-" not in context.files.text("/proc/self/cgroup"):
        return
    where, settings = _logind_settings(context.files)
    user = pwd.getpwuid(os.getuid()).pw_name
    kills = settings.get("KillUserProcesses", "no").lower() in _TRUE
    if kills and user not in settings.get("KillExcludeUsers", "root").split():
        lingers = context.files.exists(f"/var/lib/systemd/linger/{user}")
        yield finding(
            "killed-at-logout",
            f"{where}: KillUserProcesses=yes; login session of {user}, lingering is "
            f"{'on' if lingers else 'off'}",
            first="" if lingers else "`loginctl enable-linger` once, then ",
        )


def _logind_settings(files: SystemFiles) -> tuple[str, dict[str, str]]:
    """Return the file that sets KillUserProcesses, and all settings. Drop-ins are read after the
    main files, in name order.
    """
    drop_ins = {
        name: f"{folder}/logind.conf.d/{name}"
        for folder in _LOGIND_FOLDERS
        for name in files.names(f"{folder}/logind.conf.d")
        if name.endswith(".conf")
    }
    main = [f"{folder}/logind.conf" for folder in _LOGIND_FOLDERS]
    where, settings = "", dict[str, str]()
    for file in main + [drop_ins[name] for name in sorted(drop_ins)]:
        found = dict(re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", files.text(file), re.MULTILINE))
        where = file if "KillUserProcesses" in found else where
        settings |= found
    return where, settings


def _check_shared_memory_left(context: CheckContext) -> Findings:
    """Find segments in /dev/shm that no process has open: they take memory until they are
    removed.
    """
    files = context.files
    sizes = {
        name: size
        for name in files.names(_SHM)
        if _SEGMENT.match(name) and (size := _own_size(files, f"{_SHM}/{name}"))
    }
    open_now = _open_segments(files) if sizes else set()
    names = sorted(sizes.keys() - open_now, key=lambda name: (-sizes[name], name))
    if (left := sum(sizes[name] for name in names)) < _LEFT_BYTES:
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    largest = printable_line(", ".join(name.rpartition("/")[2] for name in names[:3]))
    yield finding(
        "shm-left-behind",
        f"{memory_size(left)} in {_SHM}: {largest}{more}",
        lesser=left <= (context.machine.shm_total_bytes or 0) // 10,
        removes=quoted("rm", *(f"{_SHM}/{name}" for name in names[:8])),
        again=", then run doctor again" if len(names) > 8 else "",
    )


def _own_size(files: SystemFiles, path: str) -> int:
    """Return the size of a regular file in bytes if it belongs to this user, otherwise 0. Another
    user's link to one is not this user's.
    """
    try:
        found = files.path(path).lstat()
    except OSError:
        return 0
    return found.st_size if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode) else 0


def _open_segments(files: SystemFiles) -> set[str]:
    """Return the names in /dev/shm that a process has mapped, as far as this user may see."""
    mapped = re.compile(rf"{_SHM}/(.+?)(?: \(deleted\))?$", re.MULTILINE)
    # The kernel writes the end of a line as ``\012``.
    return {
        name.replace("\\012", "\n")
        for pid in files.names("/proc")
        if pid.isdigit()
        for name in mapped.findall(files.text(f"/proc/{pid}/maps"))
    }


# Folders of runs: who can exchange a run for another one.


def _check_folders_of_runs(context: CheckContext) -> Findings:
    """Find folders in or above those of runs in which others can rename what is this user's. There
    is nothing wrong with that in a project's folder, and a run whose folder is exchanged ends.
    """
    if not (context.is_this_host and context.files.live):
        return
    found = {exchangeable_in(Path(os.path.realpath(path), "run")) for path in known_runs_dirs()}
    if where := sorted(map(str, found - {None})):
        shared = context.environment.get(SHARE_VARIABLE) == WITH_GROUP
        yield finding(
            "runs-exchangeable-shared" if shared else "runs-exchangeable",
            f"other users can rename folders in {printable_line(', '.join(where))}",
            sticky=quoted("chmod", "+t", *where),
        )


CHECKS = (
    _check_folders_of_runs,
    _check_shared_memory,
    _check_memory_settings,
    _check_memory_limit,
    _check_numa_nodes,
    _check_cores,
    _check_login_node,
    _check_orphans,
    _check_shared_memory_left,
    _check_logout,
)
