"""Check the host's processors and scheduling: which cores may be used, and kernel settings that
slow a run down.

Codes: cores-far-from-gpu, gpu-memory-taken-for-hbm, fake-numa, few-cores, cpu-quota,
numa-balancing, slow-governor, process-limit, login-node.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat

from so_tui.machine import host
from so_tui.machine.doctor.checks import CheckContext, Finding, Findings, Severity
from so_tui.machine.host import cpu_ranges
from so_tui.machine.system_files import SystemFiles
from so_tui.trust.text import printable_line, quoted
from so_tui.units import GIB, memory_size, page_size, plural

_FEW_CORES = 8
"""Cores per GPU below which CPU Adam is slow."""
_SLOW_GOVERNORS = ("powersave", "conservative", "userspace")
_SELF_SCALING = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers that scale with load even with their default governor, ``powersave``."""
_FEW_PROCESSES = 4096


def _check_cores_near_gpus(context: CheckContext) -> Findings:
    """Find a CPU mask without any core of a GPU's node: some sites give every task the first cores
    of the host.
    """
    allowed = set(context.machine.allowed_cpus)
    far = [gpu for gpu in context.nvidia_gpus if gpu.cpus and not allowed & set(gpu.cpus)]
    if far:
        yield Finding(
            "cores-far-from-gpu",
            "warning",
            "No allowed core is on the GPU's NUMA node",
            evidence=(
                f"GPU {far[0].index} is attached to cores {cpu_ranges(far[0].cpus)}; allowed "
                f"cores: {cpu_ranges(allowed)}"
            ),
            cost="Every copy crosses sockets, and CPU Adam uses another chip's memory.",
            remedy=(
                "Request the cores of the GPU from the scheduler: `--cpus-per-task=72` with "
                "`--gpus-per-task=1`, or a whole node."
            ),
        )


def _check_nodes_without_cpus(context: CheckContext) -> Findings:
    """Find hosts where half of the NUMA nodes have no CPUs: DeepSpeed's launcher takes those for
    fast CPU memory and prefers them.
    """
    nodes = context.machine.numa_nodes
    bare = [node.id for node in nodes if not node.cpus]
    if context.nvidia_gpus and bare and 2 * len(bare) == len(nodes):
        yield Finding(
            "gpu-memory-taken-for-hbm",
            "note",
            "DeepSpeed's launcher mistakes GPU memory for CPU memory",
            evidence=f"{len(nodes)} NUMA nodes, half of them ({cpu_ranges(bare)}) without CPUs",
            cost=(
                "None for so-tui, whose ranks bind themselves. In other trainers the optimizer "
                "states may be allocated in GPU memory."
            ),
            remedy=(
                "No action needed. For other trainers: `numactl -m` with the CPU nodes, without "
                "`--bind_cores_to_rank`."
            ),
        )


def _check_fake_nodes(context: CheckContext) -> Findings:
    """Find NUMA nodes that list the same CPUs: a kernel started with ``numa=fake``."""
    nodes = context.machine.cpu_nodes
    shared = [node.id for node in nodes if sum(other.cpus == node.cpus for other in nodes) > 1]
    if context.is_grace and shared:
        yield Finding(
            "fake-numa",
            "note",
            "The kernel splits memory into fake NUMA nodes",
            evidence=f"nodes {cpu_ranges(shared)} list the same CPUs (numa=fake)",
            cost=(
                "None for training: ranks are bound to all of these nodes. Older kernels may mix "
                "GPU memory into one of them."
            ),
            remedy=(
                "No action needed. Without the kernel argument `numa=fake` the NUMA map is simpler."
            ),
        )


def _check_core_count(context: CheckContext) -> Findings:
    gpus, cores = len(context.nvidia_gpus), len(context.machine.allowed_cpus)
    if gpus and cores < _FEW_CORES * gpus:
        yield Finding(
            "few-cores",
            "warning",
            "Few cores for CPU Adam",
            evidence=f"{plural(cores, 'allowed core')} for {plural(gpus, 'GPU')}",
            cost=(
                "CPU Adam is too slow to overlap with the GPU's work: steps take several times "
                "longer."
            ),
            remedy=(
                "Request more cores per GPU from the scheduler (a whole Grace has 72), or offload "
                "less."
            ),
        )


def _check_cpu_quota(context: CheckContext) -> Findings:
    quota = host.cpu_quota(context.files) if context.files else None
    if quota is not None and quota < len(context.machine.allowed_cpus):
        yield Finding(
            "cpu-quota",
            "warning",
            "A control group limits CPU time below the allowed cores",
            evidence=(
                f"CPU time of {quota:g} cores for {len(context.machine.allowed_cpus)} allowed cores"
            ),
            cost=(
                "Threads bound to a core are paused during part of every 100 ms; the slowest "
                "thread determines the step time."
            ),
            remedy=(
                "Give the container whole cores (`--cpuset-cpus`) instead of a share of CPU time "
                "(`--cpus`)."
            ),
        )


def _check_numa_balancing(context: CheckContext) -> Findings:
    several = sum(node.memory_total_bytes > 0 for node in context.machine.numa_nodes) > 1
    setting = context.text("/proc/sys/kernel/numa_balancing").strip()
    if several and context.nvidia_gpus and setting not in ("", "0"):
        yield Finding(
            "numa-balancing",
            "warning" if context.is_grace else "note",
            "Automatic NUMA balancing is on",
            evidence=f"/proc/sys/kernel/numa_balancing: {setting}",
            cost=(
                "The kernel unmaps and moves pages to follow their users, which slows memory down "
                "for ranks that are already bound."
            ),
            remedy=(
                "As root: `echo 0 > /proc/sys/kernel/numa_balancing` (NVIDIA recommends it for "
                "Grace Hopper)."
            ),
        )


def _check_governor(context: CheckContext) -> Findings:
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    name = context.text(f"{folder}/scaling_governor").strip()
    scaling = context.text(f"{folder}/scaling_driver").strip()
    if context.nvidia_gpus and name in _SLOW_GOVERNORS and scaling not in _SELF_SCALING:
        yield Finding(
            "slow-governor",
            "warning",
            f"The CPU frequency governor is {name}",
            evidence=f"{folder}/scaling_governor: {name} (driver {scaling or 'unknown'})",
            cost="Cores stay at a low frequency, which slows down CPU Adam.",
            remedy="As root: `cpupower frequency-set -g performance`.",
        )


def _check_process_limit(context: CheckContext) -> Findings:
    limit = host.process_limit(context.files) if context.files else None
    if (
        limit is not None
        and limit < _FEW_PROCESSES
        and limit < 100 + 4 * len(context.machine.allowed_cpus)
    ):
        yield Finding(
            "process-limit",
            "warning",
            "A control group limits the number of threads",
            evidence=f"pids.max: {limit}, for {plural(len(context.machine.allowed_cpus), 'core')}",
            cost="Each rank starts a few threads per core; exceeding the limit ends the run.",
            remedy="Start the container with a higher limit (`--pids-limit`).",
        )


def _check_login_node(context: CheckContext) -> Findings:
    """Find a host with Slurm's commands outside of a job: compute nodes may be different."""
    if "SLURM_JOB_ID" not in context.environment and shutil.which(
        "sbatch", path=context.environment.get("PATH", "")
    ):
        yield Finding(
            "login-node",
            "note",
            "This may be the login node of a cluster",
            evidence="sbatch is on PATH, and SLURM_JOB_ID is not set",
            cost="Compute nodes may have other GPUs, memory and cores than this host.",
            remedy=(
                "In a job: `so-tui inspect --json > node.json`. Then here: `so-tui plan --machine "
                "node.json`."
            ),
        )


CHECKS = (
    _check_cores_near_gpus,
    _check_nodes_without_cpus,
    _check_fake_nodes,
    _check_core_count,
    _check_cpu_quota,
    _check_numa_balancing,
    _check_governor,
    _check_process_limit,
    _check_login_node,
)


# Check host memory: /dev/shm, locked memory, swap, huge pages, and the limit of the control group.
#
# Codes: shm-too-small, shm-tight, shm-small, locked-memory-limit, swap-on, huge-pages-off, huge-
# pages-always, memory-limit, memory-limit-exceeded.


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
    remedy = (
        "As root: `mount -o remount,size=90% /dev/shm`; for a container: `--shm-size` or "
        "`--ipc=host`."
    )
    if context.plan and context.plan.shm_bytes > free:
        yield Finding(
            "shm-too-small",
            "blocks",
            "/dev/shm is too small for this run",
            evidence=f"{evidence}; the run needs {memory_size(context.plan.shm_bytes)}",
            cost="The ranks would fail with a bus error in the first step.",
            remedy=f"{remedy} Alternatively, lower the offload ratio.",
        )
    elif context.plan and context.plan.shm_bytes > _TIGHT_SHARE * free:
        yield Finding(
            "shm-tight",
            "warning",
            "/dev/shm is nearly too small for this run",
            evidence=f"{evidence}; the run needs {memory_size(context.plan.shm_bytes)}",
            cost="The run fails if another process writes there.",
            remedy=remedy,
        )
    elif context.plan is None and total < _SMALL_SHM_BYTES:
        yield Finding(
            "shm-small",
            "warning",
            "/dev/shm is very small",
            evidence=evidence,
            cost=(
                "NCCL needs tens of megabytes per GPU there, and DeepSpeed's own SuperOffload "
                "(offload.engine = deepspeed) 8 bytes per offloaded parameter. so-tui's engine "
                "needs none."
            ),
            remedy=remedy,
        )


def _check_locked_memory(context: CheckContext) -> Findings:
    """Check the limit on locked memory on hosts with RDMA cards. CUDA's pinned memory does not
    count against it.
    """
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
            "locked-memory-limit",
            "note",
            "The limit on locked memory is low",
            evidence=f"/proc/self/limits: max locked memory {memory_size(int(match.group(1)))}",
            cost=(
                "None on one node. Runs over several nodes fail when they register buffers with "
                "the network cards."
            ),
            remedy=(
                "`ulimit -l unlimited`, set by the site or the container (`--ulimit memlock=-1`)."
            ),
        )


def _check_swap(context: CheckContext) -> Findings:
    sizes = [
        int(fields[2]) * 1024
        for line in context.text("/proc/swaps").splitlines()[1:]
        if len(fields := line.split()) > 3
    ]
    if context.nvidia_gpus and sum(sizes):
        yield Finding(
            "swap-on",
            "note",
            "Swap is on",
            evidence=f"/proc/swaps: {memory_size(sum(sizes))}",
            cost=(
                "A run that exceeds memory becomes very slow instead of failing with a clear "
                "error. Pinned memory never swaps."
            ),
            remedy="As root: `swapoff -a`, if this machine is dedicated to training.",
        )


def _check_huge_pages(context: CheckContext) -> Findings:
    setting = re.search(r"\[(\w+)\]", context.text("/sys/kernel/mm/transparent_hugepage/enabled"))
    if not setting or not context.nvidia_gpus:
        return
    page_bytes = context.machine.page_size_bytes
    evidence = (
        f"/sys/kernel/mm/transparent_hugepage/enabled: {setting.group(1)}; page size "
        f"{page_size(page_bytes or 0)}"
    )
    large = page_bytes is not None and page_bytes >= _PAGE_64K_BYTES
    if setting.group(1) == "never" and not large:
        yield Finding(
            "huge-pages-off",
            "note",
            "Transparent huge pages are off",
            evidence=evidence,
            cost=(
                "CPU Adam reads tens of gigabytes in 4 KiB pages: more address translation, and "
                "slightly slower steps."
            ),
            remedy="As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`.",
        )
    elif setting.group(1) == "always" and large:
        yield Finding(
            "huge-pages-always",
            "note",
            "Transparent huge pages are always on, and are 512 MiB each",
            evidence=evidence,
            cost=(
                "Many small allocations can take half a gigabyte each: host memory runs out "
                "earlier than planned."
            ),
            remedy=(
                "As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`. Some sites "
                "offer a job option."
            ),
        )


def _check_memory_limit(context: CheckContext) -> Findings:
    limit = context.machine.memory_limit_bytes
    if limit is None:
        return
    needed = context.host_bytes_needed
    if context.plan and needed <= _TIGHT_SHARE * limit:
        return
    exceeded = needed > limit
    severity: Severity = "note" if context.plan is None else "blocks" if exceeded else "warning"
    evidence = (
        f"limit {memory_size(limit)}, host memory {memory_size(context.machine.host_memory_bytes)}"
    )
    yield Finding(
        "memory-limit-exceeded" if exceeded else "memory-limit",
        severity,
        "A control group limits memory" + (" below what this run needs" if exceeded else ""),
        evidence=evidence + (f"; the run needs {memory_size(needed)}" if needed else ""),
        cost="The kernel ends a run that exceeds the limit; /dev/shm counts as well.",
        remedy=(
            "Request more memory for the job (`--mem=0` requests all of the node) or the "
            "container, or offload less."
        ),
    )


MEMORY_CHECKS = (
    _check_shared_memory,
    _check_locked_memory,
    _check_swap,
    _check_huge_pages,
    _check_memory_limit,
)


# Check processes: what earlier runs left behind, and whether runs survive a logout.
#
# Codes: orphaned-trainers, orphaned-ranks, killed-at-logout, shm-left-behind.


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
    if not (files := context.files):
        return
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
        yield Finding(
            "orphaned-trainers",
            "warning",
            "Training processes without a supervisor",
            evidence=f"process {processes}, no supervisor among its parents; run: {runs}",
            cost="They hold cores, memory and GPUs.",
            remedy=(
                "`so-tui runs` shows whether the run is alive, and then starts a supervisor again. "
                f"If it is not: `kill {processes}`."
            ),
        )
    if others:
        processes = " ".join(map(str, others))
        yield Finding(
            "orphaned-ranks",
            "warning",
            "Processes of another distributed run without a launcher",
            evidence=(
                f"process {processes}, parent ended: DeepSpeed's launcher leaves ranks and Adam "
                "workers behind when it is killed"
            ),
            cost="They hold cores, memory and GPUs.",
            remedy=f"`kill {processes}`, if that run has ended.",
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
    fields = (files.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
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
    return (files.text(f"/proc/{pid}/{name}") or "").split("\0")


def _check_logout(context: CheckContext) -> Findings:
    """Find login sessions whose processes end at logout. Those of the user's service manager
    outlive it if the user lingers.
    """
    if not context.files or "/session-" not in context.text("/proc/self/cgroup"):
        return
    where, settings = _logind_settings(context.files)
    user = pwd.getpwuid(os.getuid()).pw_name
    if (
        settings.get("KillUserProcesses", "no").lower() in _TRUE
        and user not in settings.get("KillExcludeUsers", "root").split()
    ):
        lingers = context.files.exists(f"/var/lib/systemd/linger/{user}")
        first = "" if lingers else "`loginctl enable-linger` once, then "
        yield Finding(
            "killed-at-logout",
            "warning",
            "Runs end when you log out",
            evidence=(
                f"{where}: KillUserProcesses=yes; login session of {user}, lingering is "
                f"{'on' if lingers else 'off'}"
            ),
            cost=(
                "systemd kills every process of a session when it ends, including tmux and "
                "detached runs."
            ),
            remedy=(
                f"{first}start so-tui with `systemd-run --user --scope so-tui`. Alternatively, run "
                "in a job of the scheduler."
            ),
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
        found = dict(re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", files.text(file) or "", re.MULTILINE))
        where = file if "KillUserProcesses" in found else where
        settings |= found
    return where, settings


def _check_shared_memory_left(context: CheckContext) -> Findings:
    """Find segments in /dev/shm that no process has open: they take memory until they are
    removed.
    """
    if not (files := context.files):
        return
    found = {
        name: size
        for name in files.names(_SHM)
        if _SEGMENT.match(name) and (size := _own_size(files, f"{_SHM}/{name}"))
    }
    if found:
        open_now = _open_segments(files)
        found = {name: size for name, size in found.items() if name not in open_now}
    if (left := sum(found.values())) < _LEFT_BYTES:
        return
    names = sorted(found, key=lambda name: -found[name])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    largest = printable_line(", ".join(name.rpartition("/")[2] for name in names[:3]))
    removes = quoted("rm", *(f"{_SHM}/{name}" for name in names[:8]))
    again = ", then run doctor again" if len(names) > 8 else ""
    yield Finding(
        "shm-left-behind",
        "warning" if left > (context.machine.shm_total_bytes or 0) // 10 else "note",
        "Ended processes left shared memory behind",
        evidence=f"{memory_size(left)} in {_SHM}: {largest}{more}",
        cost="It takes memory until it is removed or the machine restarts.",
        remedy=f"`{removes}`{again}. None of your processes has them open.",
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
        for name in mapped.findall(files.text(f"/proc/{pid}/maps") or "")
    }


PROCESS_CHECKS = (_check_orphans, _check_shared_memory_left, _check_logout)
