"""What ``squeue --json`` prints, as far as a queue needs it. In the form of Slurm 24.11 (data parser v0.0.42)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from so_tui.launch.executors.slurm.job import Job, word
from so_tui.trust.decoding import decode_json

FIRST_VERSION = (24, 11)
"""The oldest version whose JSON was seen to hold only the jobs that were asked for. That of 22.05 has those of all users.

``sinfo --json`` is not used: it does not mark the default partition, and names the features of one node of several.
"""


class _Number(Struct, frozen=True):
    set: bool = False
    number: float = 0


class _Job(Struct, frozen=True):
    job_id: Annotated[int, Meta(ge=0)]
    job_state: Annotated[tuple[str, ...], Meta(min_length=1)]
    state_reason: str = ""
    start_time: _Number = _Number()
    nodes: str = ""
    current_working_directory: str = ""


class _Queue(Struct, frozen=True):
    jobs: tuple[_Job, ...]


def parse_queue_json(printed: str) -> tuple[Job, ...]:
    """Return the jobs that ``squeue --json`` printed. Raises msgspec.DecodeError."""
    return tuple(map(_job, decode_json(printed.encode(), _Queue).jobs))


def _job(found: _Job) -> Job:
    return Job(
        id=str(found.job_id),
        # The state, and then what modifies it, such as CONFIGURING or COMPLETING: as text, squeue prints only that.
        state="COMPLETING" if "COMPLETING" in found.job_state else found.job_state[-1],
        reason=word(found.state_reason),
        start=found.start_time.number or None,
        nodes=word(found.nodes),
        folder=found.current_working_directory,
    )
