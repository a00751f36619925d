"""The interpreter of a site's jobs, beside the nodes that they get.

Problem codes:
    foreign-interpreter: It is built for another architecture than the nodes have.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

from so_tui.launch.executors.slurm.site import Site
from so_tui.machine.interpreter import architecture_of
from so_tui.machine.types import Machine
from so_tui.spec import Problem


def interpreter_of(site: Site) -> str:
    """Return the interpreter that jobs use: the profile's, else this one."""
    return site.python or sys.executable


def interpreter_architecture(site: Site) -> str:
    """Return what the interpreter of jobs is built for, as ``uname -m`` names it; empty if unknown, such as in a container."""
    return "" if site.step_options else architecture_of(interpreter_of(site))


def foreign_interpreter(nodes: Machine, site: Site, partition: str) -> Iterator[Problem]:
    """Yield that the nodes of a partition cannot execute the interpreter, if the architectures of both are known."""
    here = nodes.hostname == socket.gethostname()  # it stands for nodes that no job has seen
    architecture = interpreter_architecture(site)
    if architecture and not here and architecture != nodes.architecture:
        message = f"is built for {architecture}, and the nodes of partition {partition} are {nodes.architecture}"
        remedy = "Install so-tui with its training packages for them, and name that interpreter in the site profile (python = ...)."
        yield Problem(
            code="foreign-interpreter",
            field="slurm.site",
            value=interpreter_of(site),
            message=message,
            remedy=remedy,
        )
