"""Types of presets, spec files and ``--set a.b=value``: a run, made of the ``sections``, and where it comes from.

Each field has its documentation, range and unit in ``Meta``, from which the reference in ``docs/presets.md``, the checks and the Configure
screen are made. A RunSpec is independent of the machine.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from so_tui.spec.sections.benchmark import BenchmarkSpec
from so_tui.spec.sections.checkpoint import CheckpointSpec
from so_tui.spec.sections.data import DataSpec
from so_tui.spec.sections.model import ModelSpec
from so_tui.spec.sections.offload import OffloadSpec
from so_tui.spec.sections.prompts import PromptsSpec
from so_tui.spec.sections.section import Section
from so_tui.spec.sections.slurm import SlurmSpec
from so_tui.spec.sections.tracking import TrackingSpec
from so_tui.spec.sections.train import TrainSpec
from so_tui.structs import prepare
from so_tui.trust.printable import brief_line


class RunSpec(Section, frozen=True, kw_only=True):
    """What to train and how, independent of the machine."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9][a-z0-9._-]*\Z",
            max_length=64,
            description="Short name, which names of runs start with.",
        ),
    ]
    title: Annotated[str, Meta(description="Display name.")] = ""
    gpus: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(
            description="Number of GPUs, or a list of their indices; of each node. The number of ranks on a machine without GPUs."
        ),
    ] = 1
    nodes: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Number of nodes (hosts) of a Slurm partition that train together, each with `gpus` GPUs.",
        ),
    ] = 1
    model: ModelSpec
    data: DataSpec
    train: TrainSpec = TrainSpec()
    offload: OffloadSpec = OffloadSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    prompts: PromptsSpec = PromptsSpec()
    benchmark: BenchmarkSpec = BenchmarkSpec()
    slurm: SlurmSpec = SlurmSpec()

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host, one per GPU."""
        return self.gpus if isinstance(self.gpus, int) else len(self.gpus)

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.nodes * self.ranks_per_host

    @property
    def replicas(self) -> int:
        """Number of ranks, or of groups of ranks that share sequences, which train on different sequences."""
        return self.ranks // self.train.sequence_parallel

    @property
    def micro_batch_tokens(self) -> int:
        """Positions of a micro-batch on one rank, padding included: ranks that share sequences have a part each."""
        return self.train.micro_batch * self.data.sequence_length // self.train.sequence_parallel

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step: as given, or nearest to ``train.tokens_per_step``, at least 1."""
        if not self.train.tokens_per_step:
            return self.train.gradient_accumulation
        return max(
            1,
            round(
                self.train.tokens_per_step
                / (self.train.micro_batch * self.data.sequence_length * self.replicas)
            ),
        )

    @property
    def label(self) -> str:
        return brief_line(self.title or self.name)


prepare(RunSpec)


class Preset(Struct, frozen=True, kw_only=True):
    """A RunSpec and where it comes from."""

    spec: RunSpec
    origin: Literal["built-in", "user", "file"]
    path: str
