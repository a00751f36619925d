"""The command that starts the training processes: an argument list, never a shell line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from so_tui.folders import UNCACHED_COMPILERS, Environment, compiled_folder
from so_tui.machine.gpus import ROCM_VISIBLE_DEVICES
from so_tui.machine.software import code_folders
from so_tui.machine.types import Machine, Software, version_numbers
from so_tui.plan.binding import core_list, uses_numactl
from so_tui.plan.plan import Plan, Variable
from so_tui.runs.directory import LAUNCH_VARIABLE
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.folders import exchangeable_in
from so_tui.trust.text import brief_message, without_credentials

# Lines in a supervisor's own log, which is its stderr.


def log_line(text: str) -> None:
    """Log a line. One that cannot be written, as on a full disk, is left out: the run goes on."""
    with contextlib.suppress(OSError):
        print(brief_message(text), file=sys.stderr, flush=True)


# The user's own command, run for each alert. It cannot harm the run: it is never waited for while
# training goes on, it has a time limit, after which it is killed and not waited for at all, what
# it prints is cut, and its processes do not count as the run's.


ALERT_MARKER = "SO_TUI_ALERT_KIND"
"""In the environment of the command and of all that it starts."""
TEXT_ARGUMENT = "{text}"
"""An argument that is exactly this becomes the alert's sentence. Inside of others it stays, so that
no name becomes part of a script.
"""
_MOST_WAITING = 20
_KEPT_BYTES = 2000
_END_S = 60.0
"""How long a supervisor whose run has ended waits for commands, however many."""


class AlertCommand:
    """Runs one command at a time, in order. For one thread."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """The pid of the running command, if there is one."""
        self._waiting: deque[tuple[Sequence[str], Environment, float]] = deque(maxlen=_MOST_WAITING)
        self._killed: list[subprocess.Popen[bytes]] = []
        """Not collected yet. One that runs as another user may not be killed, and one that waits
        for a disk ends when the disk answers.
        """
        self._over = False
        self._steps = self._run()

    def request(
        self, command: Sequence[str], about: Environment, text: str, timeout_s: float
    ) -> None:
        """Have a command run soon.

        Args:
            command: Its argument list; nothing is run if it is empty.
            about: What the alert is, added to its environment.
            text: The alert's sentence.
            timeout_s: After this time its process group is killed.
        """
        if command:
            argv = [text if argument == TEXT_ARGUMENT else argument for argument in command]
            self._waiting.append((argv, about, timeout_s))
            self.tick()

    def tick(self) -> None:
        """Collect a command that has ended, kill one whose time is over, start the next. Never
        waits.
        """
        self._killed = [process for process in self._killed if process.poll() is None]
        try:
            next(self._steps)
        except BaseException:  # it has ended the steps: later commands need new ones
            self.pid, self._steps = None, self._run()
            raise

    def finish(self) -> None:
        """Wait for the commands that are under way or waiting, at most a minute in all."""
        deadline = time.monotonic() + _END_S
        while self.pid is not None or self._waiting:
            if time.monotonic() > deadline:
                self._waiting.clear()
                self._over = True
            self.tick()
            time.sleep(0.05)

    def _run(self) -> Iterator[None]:
        """Run what waits, and look at the command that is under way once in each step."""
        while True:
            if not self._waiting:
                yield
                continue
            argv, about, timeout_s = self._waiting.popleft()
            try:
                process = subprocess.Popen(
                    argv,
                    env={**os.environ, **about},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                log_line(f"the alert command {argv[0]} was not started: {error}")
                continue
            self.pid, ends_at = process.pid, time.monotonic() + timeout_s
            assert process.stdout is not None
            printed, output, ended = process.stdout.fileno(), b"", False
            os.set_blocking(printed, False)
            while not (ended or self._over or time.monotonic() >= ends_at):
                yield
                output = (output + _beginning(printed))[:_KEPT_BYTES]
                # Not collected yet: until then no other process can get its number, by which its
                # group is ended.
                looks = os.WEXITED | os.WNOHANG | os.WNOWAIT
                ended = os.waitid(os.P_PID, process.pid, looks) is not None
            # Processes that the command left in its group end, too.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            if not ended:
                self._killed.append(process)
            code = process.wait() if ended else None
            self.pid = None
            if code != 0:
                end = f"ended with exit code {code}" if ended else "took too long"
                said = brief_message(output.decode(errors="replace"))
                log_line(f"the alert command {argv[0]} {end}{': ' + said if said else ''}")


def _beginning(descriptor: int) -> bytes:
    """Take what a command has printed, so that it does not wait for a full pipe, and return the
    beginning.
    """
    output = b""
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            block = os.read(descriptor, 1 << 16)
            if not block:
                break
            output = (output + block)[:_KEPT_BYTES]
    return output


# Values of a launch that are not known until a supervisor starts it on its host.
#
# A launch that is shown or confirmed contains them as ``{NAME}``. The supervisor replaces them and
# records the result in ``command.json``.


MEANINGS = {
    "{RUN}": "the run directory",
    "{RUN_ID}": "the run's id",
    "{LAUNCH}": "the hash of this launch and of the run's id",
    "{ATTEMPT}": "the number of the attempt",
    "{RENDEZVOUS}": (
        "where the ranks meet: a file that only you can open, or an address on the first of "
        "several nodes"
    ),
    "{NODE}": "the number of the node",
    "{ADDRESS}": "the address of the first node",
    "{PORT}": "a port of the first node",
    "{HOSTFILE}": "a file that lists the nodes",
    "{DEVICES}": "the GPUs of each node",
}
"""By the text that stands for each value. It is always a whole argument or a whole variable, never
part of one.
"""


def argv(plan: Plan) -> tuple[str, ...]:
    """Return the arguments that start DeepSpeed's launcher with the trainer, with placeholders for
    the host's values.
    """
    if plan.spec.nodes > 1:
        # A supervisor starts it on each node. Launchers over ssh or srun would lose the binding.
        where = [
            *("--hostfile", "{HOSTFILE}", "--include", "{DEVICES}"),
            *("--no_ssh", "--node_rank", "{NODE}"),
            *("--master_addr", "{ADDRESS}", "--master_port", "{PORT}"),
        ]
    else:
        # A path that is never a regular file: a /job/hostfile of the site would otherwise make this
        # a run over ssh.
        where = ["--hostfile", "/dev/null"]
        gpus = ",".join(str(rank.gpu) for rank in plan.binding if rank.gpu is not None)
        where += (
            ["--include", f"localhost:{gpus}"] if gpus else ["--num_gpus", str(len(plan.binding))]
        )
    # Without a working numactl the launcher would fail. The trainer binds itself in any case.
    if uses_numactl(plan.binding):
        where += ["--bind_cores_to_rank", "--bind_core_list", core_list(plan.binding)]
    trainer = ["so_tui_trainer", "--run", "{RUN}", "--attempt", "{ATTEMPT}"]
    if plan.spec.nodes > 1:
        trainer += ["--node", "{NODE}"]
    return (sys.executable, "-m", "deepspeed.launcher.runner", *where, "--module", *trainer)


# Changes to the environment of the training processes, each with its reason. Every other variable
# is inherited unchanged.


RUN_MARKER = "SO_TUI_RUN"
"""Holds the run directory in the environment of every process of a run, so that the supervisor can
recognise them.
"""

ATTEMPT_MARKER = "SO_TUI_ATTEMPT"
RUN_ID_MARKER = "SO_TUI_RUN_ID"
"""Holds the run's id, which distinguishes it from another run at the same path; empty for a run
without one.
"""

NODE_MARKER = "SO_TUI_NODE"
"""Holds the number of the node, of a run on several: the nodes of a test are one host."""

RENDEZVOUS = "SO_TUI_RENDEZVOUS"
"""Tells the ranks where they meet."""

_PINNED_LIMIT_MB = 64


_HERE_ONLY = "all ranks are on this host, so nothing listens on its networks"
_THREADS = "one thread for each Adam core; a site default of 1 would be very slow"


def variables(plan: Plan, machine: Machine, inherited: Environment) -> tuple[Variable, ...]:
    """Return the changes for a plan on a machine, given the inherited environment; values may be
    placeholders.

    The ranks of one host meet in a file of this user and on the loopback interface, where no other
    user can join them. A site's modules often name the cluster's network for NCCL. On one host NCCL
    only introduces its ranks to each other over it, and listens there; the data goes over NVLink or
    shared memory. Ranks of several nodes need that network, and meet at the first node.
    """
    gpus, several = bool(machine.gpus), plan.spec.nodes > 1
    folder, path = str(Path(sys.executable).parent), inherited.get("PATH", "/usr/bin:/bin")
    threads = str(_rank_threads(plan))
    compiled = code_folders(inherited, several_hosts=several)
    above = exchangeable_in(compiled_folder(inherited))
    shared = f", on this host, as others can rename folders in {above}" if above else ""
    given = {
        name: f"; others can open or exchange {inherited[name]}"
        for name in compiled
        if inherited.get(name)
    }
    allocator, options = _allocator(
        machine.software, deepspeed_engine=plan.spec.offload.deepspeed_superoffload
    )
    chosen = bool({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & inherited.keys())
    architectures = inherited.get("TORCH_CUDA_ARCH_LIST", "")
    valid = valid_arch_list(architectures)
    # Whether each is made, its name, value and reason.
    changes: tuple[tuple[object, str, str | None, str], ...] = (
        (True, RUN_MARKER, "{RUN}", "marks the processes of this run"),
        (
            True,
            RUN_ID_MARKER,
            "{RUN_ID}",
            "distinguishes this run from another one at the same path",
        ),
        (True, ATTEMPT_MARKER, "{ATTEMPT}", "marks the processes of this attempt"),
        (True, LAUNCH_VARIABLE, "{LAUNCH}", "the ranks train this launch and no other"),
        (
            ALERT_MARKER in inherited,
            ALERT_MARKER,
            None,
            "marks alert commands; one has started this run",
        ),
        (
            folder not in path.split(":"),
            "PATH",
            f"{folder}:{path}",
            "finds this interpreter's tools (ninja compiles DeepSpeed's kernels)",
        ),
        (
            True,
            "PYTHONSAFEPATH",
            "1",
            "imports modules from the installation, never from the current directory",
        ),
        (several, NODE_MARKER, "{NODE}", "marks the processes of this node"),
        (
            True,
            RENDEZVOUS,
            "{RENDEZVOUS}",
            "an address of the first node, where the ranks meet"
            if several
            else "a file of your own in which the ranks meet",
        ),
        (
            several and gpus,
            "NCCL_DEBUG",
            "INFO",
            "NCCL writes to the log which network it uses between nodes",
        ),
        (
            several and gpus and "NCCL_DEBUG_SUBSYS" not in inherited,
            "NCCL_DEBUG_SUBSYS",
            "INIT",
            "and little else",
        ),
        (not several, "GLOO_SOCKET_IFNAME", "lo", _HERE_ONLY),
        (not several, "NCCL_SOCKET_IFNAME", "lo", _HERE_ONLY),
        (
            True,
            "NCCL_RAS_ENABLE",
            "0",
            "NCCL's status service would answer every user of this host",
        ),
        (
            True,
            "USE_HUB_KERNELS",
            "0",
            "transformers loads no programs of others from the hub",
        ),
        *(
            (
                True,
                name,
                private,
                "compiled code comes from a folder that only you can open"
                f"{shared}{given.get(name, '')}",
            )
            for name, private in compiled.items()
        ),
        *(
            (True, name, value, "compilers take nothing from a cache that others may have filled")
            for name, value in UNCACHED_COMPILERS.items()
        ),
        (True, "OMP_NUM_THREADS", threads, _THREADS),
        (True, "MKL_NUM_THREADS", threads, _THREADS),
        *(
            (
                name in inherited,
                name,
                None,
                "conflicts with the binding; DeepSpeed's launcher does not start with KMP_AFFINITY",
            )
            for name in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY")
        ),
        (
            True,
            "TOKENIZERS_PARALLELISM",
            "false",
            "keeps the tokenizer's thread pool off the bound cores",
        ),
        (not gpus, "DS_ACCELERATOR", "cpu", "this machine has no GPU"),
        (gpus, "CUDA_DEVICE_ORDER", "PCI_BUS_ID", "numbers the GPUs as NVML and the plan do"),
        *(
            (
                gpus and name in inherited,
                name,
                None,
                "the command line names the GPUs, chosen among the visible ones",
            )
            for name in ROCM_VISIBLE_DEVICES
        ),
        (
            gpus and options and not chosen,
            allocator,
            options,
            "less fragmentation of GPU memory; no rounding up of pinned memory",
        ),
        (
            gpus and valid != architectures,
            "TORCH_CUDA_ARCH_LIST",
            valid,
            f"DeepSpeed cannot parse {architectures}",
        ),
        (
            _is_embedded(plan.spec),
            "HF_HUB_OFFLINE",
            "1",
            "everything this run needs is part of so-tui",
        ),
    )
    return tuple(Variable(name, value, reason) for holds, name, value, reason in changes if holds)


def apply(changes: tuple[Variable, ...], inherited: Environment) -> dict[str, str]:
    """Return the inherited environment with the changes applied."""
    changed = {**inherited, **{change.name: change.value for change in changes}}
    return {name: value for name, value in changed.items() if value is not None}


def shown(changes: tuple[Variable, ...]) -> dict[str, str | None]:
    """Return the changes by name for display and for records, without credentials in their
    values.
    """
    return {
        change.name: None if change.value is None else without_credentials(change.value)
        for change in changes
    }


def _rank_threads(plan: Plan) -> int:
    """Return the number of OpenMP threads of a rank: its Adam cores, or those of the smallest rank
    where ranks differ.

    Without an Adam worker all cores of the rank count. DeepSpeed's launcher overwrites the variable
    with all of the rank's cores when it binds, and torchrun-style defaults of 1 would make Adam
    tens of times slower. The trainer sets its own thread counts from the plan.
    """
    return min((len(rank.adam_cpus or rank.cpus) for rank in plan.binding), default=1) or 1


def valid_arch_list(value: str) -> str:
    """Remove the letters from TORCH_CUDA_ARCH_LIST that DeepSpeed cannot parse: ``8.0;9.0a+PTX``
    becomes ``8.0;9.0+PTX``.

    DeepSpeed's op builder parses each entry as ``major.minor`` and fails with
    ``invalid literal for int() with base 10: '0a'``.
    """
    entries = (
        re.sub(r"^(\d+\.\d+)[a-z]+", r"\1", entry) for entry in re.split(r"[;\s]+", value.strip())
    )
    return ";".join(dict.fromkeys(entries))


def _allocator(software: Software, *, deepspeed_engine: bool) -> tuple[str, str]:
    """Return the name and the value of the setting that reduces fragmentation in torch's
    allocators; the value is empty where it would break something.

    torch aborts on an unknown key, so each key is set only for versions that have it:
    ``PYTORCH_ALLOC_CONF`` since 2.10 (the older name still works), limits of the pinned pool since
    2.13. Without those limits, pinned blocks are rounded up to powers of two and never freed, which
    costs tens of GB of host memory for a 20B model. DeepSpeed's own SuperOffload before 0.18.1
    passed GPU tensors by CUDA IPC, which does not work with expandable segments.
    """
    torch, deepspeed = version_numbers(software.torch), version_numbers(software.deepspeed)
    options = [] if deepspeed_engine and deepspeed < (0, 18, 1) else ["expandable_segments:True"]
    if torch >= (2, 13):
        options += [
            f"pinned_max_round_threshold_mb:{_PINNED_LIMIT_MB}",
            f"pinned_max_cached_size_mb:{_PINNED_LIMIT_MB}",
        ]
    name = "PYTORCH_ALLOC_CONF" if torch >= (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
    return name, ",".join(options)


def _is_embedded(spec: RunSpec) -> bool:
    """Return whether a spec's model and data are part of so-tui."""
    named = (
        spec.model.id,
        *(part.source for part in spec.data.sources),
        spec.data.evaluation or "builtin:",
    )
    return all(source.startswith("builtin:") for source in named)
