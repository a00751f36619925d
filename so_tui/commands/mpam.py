"""``doctor --mpam``: what an administrator runs to partition memory bandwidth and cache.

Problem codes:
    no-resctrl: The kernel has no resctrl file system.
    no-adam-cores, no-partitions, too-few-partitions, cores-partitioned: Nothing can be partitioned here.
"""

from __future__ import annotations

from so_tui.launch.supervisor.mpam import mount_script, partition_script
from so_tui.machine.resctrl import read_resctrl
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Machine
from so_tui.plan.partitions import Obstacle, partitions
from so_tui.plan.plan import Plan, RankBinding
from so_tui.spec.errors import InputError, Problem


def print_mpam_script(machine: Machine, plan: Plan | None, files: SystemFiles | None = None) -> int:
    """Print the script for the binding of a plan, or of a run on all GPUs.

    Args:
        machine: This host.
        plan: Of a preset, if one was named.
        files: This host's /sys and /proc, or a copy.

    Raises:
        InputError: Nothing can be partitioned here.
    """
    files = files or SystemFiles()
    found = read_resctrl(files)
    if found is None:
        if "resctrl" not in (files.text("/proc/filesystems") or "").split():
            raise _refused("no-resctrl", machine)
        print(mount_script(machine.label))
        return 0
    wanted = partitions(found, plan.binding if plan is not None else _on_all_gpus(machine))
    if isinstance(wanted, str):
        raise _refused(wanted, machine)
    print(partition_script(machine.label, found, wanted))
    return 0


def _on_all_gpus(machine: Machine) -> tuple[RankBinding, ...]:
    from so_tui.plan.binding import bind_ranks, whole_gpus
    from so_tui.spec.run_spec import OffloadSpec

    gpus = tuple(gpu.index for gpu in whole_gpus(machine)) or 1
    return bind_ranks(
        machine,
        gpus,
        mode="superoffload",
        cpu_adam_cores_fraction=OffloadSpec().cpu_adam_cores_fraction,
    )


def _refused(obstacle: Obstacle | str, machine: Machine) -> InputError:
    def problem(code: str, message: str, remedy: str) -> Problem:
        return Problem(
            code=code, field="--mpam", value=machine.label, message=message, remedy=remedy
        )

    match obstacle:
        case "no-resctrl":
            remedy = "It takes a kernel with MPAM (Arm), RDT (Intel) or QoS (AMD)."
            found = problem("no-resctrl", "the kernel has no resctrl file system", remedy)
        case "no-adam-cores":
            remedy = "Name a preset that trains with superoffload, on two cores or more."
            found = problem("no-adam-cores", "no rank has Adam cores beside its main cores", remedy)
        case "too-few-groups":
            remedy = "Remove groups in /sys/fs/resctrl that are not used."
            found = problem("too-few-partitions", "the hardware has no two partitions left", remedy)
        case "cores-taken":
            remedy = "Remove that group (`rmdir`) first, or keep it."
            found = problem(
                "cores-partitioned",
                "a group in /sys/fs/resctrl has some of the run's cores already",
                remedy,
            )
        case _:
            remedy = "Mount resctrl without `mba_MBps`, if it has that option."
            found = problem(
                "no-partitions",
                "neither memory bandwidth nor the L3 cache can be partitioned by shares",
                remedy,
            )
    return InputError([found])
