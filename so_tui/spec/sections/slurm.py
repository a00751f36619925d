"""``[slurm]``: the job that a run is submitted as."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from so_tui.spec.sections.section import Section


class SlurmSpec(Section, frozen=True):
    partition: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.-]*\Z",
            max_length=64,
            description="Partition to run on; if empty, the run starts on this machine.",
        ),
    ] = ""
    account: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9_.@-]*\Z", max_length=64, description="Account that is charged."),
    ] = ""
    qos: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_.@-]*\Z", max_length=64, description="Quality of service.")
    ] = ""
    time_limit: Annotated[
        str,
        Meta(
            pattern=r"^(\d{1,6}|\d{1,4}:\d\d|\d{1,4}:\d\d:\d\d|\d{1,3}-\d\d?(:\d\d){0,2})?\Z",
            description="Longest time of one job: minutes, `HH:MM:SS` or `D-HH`; if empty, the site profile's or the partition's.",
        ),
    ] = ""
    constraint: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.,:&|*()\[\]-]*\Z",
            max_length=200,
            description="Features that the node must have.",
        ),
    ] = ""
    options: Annotated[
        tuple[
            Annotated[
                str,
                Meta(
                    pattern=r"^--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:;@%+/&|*()\[\]-]+)?\Z",
                    max_length=200,
                ),
            ],
            ...,
        ],
        Meta(
            max_length=32, description="Further options of `sbatch`, such as `--reservation=NAME`."
        ),
    ] = ()
    site: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9-]*\Z",
            max_length=64,
            description="Site profile; if empty, the one that names this cluster, else `generic`.",
        ),
    ] = ""
    continues: Annotated[
        bool,
        Meta(
            description="When a job's time limit is near, save a checkpoint and submit a job that continues, until the run has finished."
        ),
    ] = True
