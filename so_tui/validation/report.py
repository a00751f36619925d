"""The report of a validation: typed, written after each measurement, and read back to continue."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from so_tui.machine.types import Machine, Software
from so_tui.plan.measured import Figures, Rates
from so_tui.plan.workload import Workload
from so_tui.spec.check import write_atomic
from so_tui.spec.errors import reject
from so_tui.trust.decoding import prepare, read_json
from so_tui.trust.folders import make_folders

if TYPE_CHECKING:
    from so_tui.doctor import Finding

SCHEMA = 1
FILE = "report.json"

State = Literal["pending", "measured", "failed", "timed-out", "left-out"]
FAILURES: tuple[State, ...] = ("failed", "timed-out")
Placed = Literal["bound", "unbound", "wrong-node"]


class Node(Struct, frozen=True, kw_only=True):
    id: int
    cores: int
    memory_bytes: int


class ReportedGpu(Struct, frozen=True, kw_only=True):
    index: int
    name: str
    memory_total_bytes: int | None = field(name="memory_bytes")
    numa_node: int | None
    c2c: bool | None


class Found(Struct, frozen=True):
    """A finding of ``so-tui doctor``."""

    code: str
    severity: str
    title: str
    """Empty in a shared report."""


class MachineFound(Struct, frozen=True, kw_only=True, tag="machine"):
    """What ``inspect`` and ``doctor`` say."""

    cpu: str
    architecture: str
    page_size_bytes: int | None
    cores: int
    """That this process may use; hardware threads count."""
    nodes: tuple[Node, ...]
    gpus: tuple[ReportedGpu, ...]
    software: Software
    findings: tuple[Found, ...]


class RatesFound(Struct, frozen=True, kw_only=True, tag="rates"):
    """What ``calibrate`` measured. Plans of this machine use it from then on."""

    rates: Rates


class CopyRates(Struct, frozen=True, kw_only=True):
    """Copies between one GPU and memory of one NUMA node, bytes per second."""

    node: int
    gpu: int
    all_at_once: bool
    """Whether all GPUs copied at the same time."""
    pinned_d2h: float
    pinned_h2d: float
    pageable_d2h: float
    pageable_h2d: float


class CopiesFound(Struct, frozen=True, kw_only=True, tag="copies"):
    copies: tuple[CopyRates, ...]


class TrainingFound(Struct, frozen=True, kw_only=True, tag="training"):
    """A short run of one setting, and what was predicted for it without any probe."""

    settings: dict[str, str]
    """Keys that differ from the shape's preset."""
    ranks: int
    placed: Placed
    clipping: float
    steps: int
    """Those that the figures are of, after the warm-up."""
    held_back_steps: int | None = None
    """Those of them without a speculative step that was final, all where nothing speculates. None
    in reports of older versions.
    """
    measured: Figures
    predicted: Figures
    workload: Workload | None = None
    """What the data did to a step, from which it can be predicted again."""
    useful_tokens_per_s: float
    model_tflops_per_gpu: float
    example_tflops: float
    """By the formula of DeepSpeed's example script, summed over GPUs."""
    losses: tuple[float | None, ...]
    """Of all steps, warm-up included; None where it is not finite."""
    losses_only: bool = False
    """Whether it was trained for its losses: many steps of a model so small that its speed says
    nothing.
    """


Result = MachineFound | RatesFound | CopiesFound | TrainingFound


class Outcome(Struct, frozen=True, kw_only=True):
    """One measurement of a report."""

    key: str
    title: str
    estimate_s: float
    state: State = "pending"
    seconds: float | None = None
    """How long it took."""
    reason: str = ""
    """Why it failed, or was left out. Empty in a shared report."""
    result: Result | None = None


class LossAgreement(Struct, frozen=True, kw_only=True):
    """How far a run's losses are from those of another one, which trained the same batches with the
    same clipping.
    """

    key: str
    reference: str
    """Key of the other one: the first of those that can be compared."""
    by_step: tuple[float | None, ...]
    """|loss / reference loss - 1| at each step; None where a loss is not finite."""
    largest: float | None
    """None if a loss is not finite."""


class Report(Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    so_tui: str
    """Version."""
    begun: str
    """ISO 8601, UTC."""
    host: str
    """Empty in a shared report."""
    gpus: int
    """Most GPUs that a run had."""
    shape: str
    """Preset and number of layers of the model that was trained; its weights are random."""
    outcomes: tuple[Outcome, ...]
    agreement: tuple[LossAgreement, ...] = ()
    """Of every training part that can be compared with an earlier one."""

    def with_outcome(self, outcome: Outcome) -> Report:
        """Return the report with an outcome in place of the one of the same key."""
        outcomes = tuple(outcome if old.key == outcome.key else old for old in self.outcomes)
        return replace(self, outcomes=outcomes, agreement=_agreement_of(outcomes))


prepare(Report)


def trained(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, TrainingFound]]:
    """Return the training parts that were measured."""
    return [
        (outcome, outcome.result)
        for outcome in outcomes
        if isinstance(outcome.result, TrainingFound)
    ]


def _agreement_of(outcomes: Sequence[Outcome]) -> tuple[LossAgreement, ...]:
    """Return how the losses of each training part agree with the first one of the same steps that
    clips as it does.
    """
    firsts: dict[tuple[bool, float], tuple[Outcome, TrainingFound]] = {}
    found = []
    for outcome, result in trained(outcomes):
        first, other = firsts.setdefault((result.losses_only, result.clipping), (outcome, result))
        if first is not outcome:
            by_step = tuple(
                abs(mine / theirs - 1) if mine is not None and theirs else None
                for mine, theirs in zip(result.losses, other.losses, strict=False)
            )
            finite = [distance for distance in by_step if distance is not None]
            largest = max(finite, default=None) if len(finite) == len(by_step) else None
            found.append(
                LossAgreement(
                    key=outcome.key, reference=first.key, by_step=by_step, largest=largest
                )
            )
    return tuple(found)


def machine_found(machine: Machine, findings: Sequence[Finding]) -> MachineFound:
    """Return the part of a machine that a report has: nothing that names it."""
    allowed = set(machine.allowed_cpus)
    return MachineFound(
        cpu=machine.cpu_name,
        architecture=machine.architecture,
        page_size_bytes=machine.page_size_bytes,
        cores=len(machine.allowed_cpus),
        nodes=tuple(
            Node(
                id=node.id,
                cores=len(allowed.intersection(node.cpus)),
                memory_bytes=node.memory_total_bytes,
            )
            for node in machine.cpu_nodes
        ),
        gpus=msgspec.convert(machine.gpus, tuple[ReportedGpu, ...], from_attributes=True),
        software=machine.software,
        findings=msgspec.convert(findings, tuple[Found, ...], from_attributes=True),
    )


def read(folder: Path) -> Report | None:
    """Return the report of a folder; None where there is none.

    Raises:
        InputError: It cannot be read (code ``not-a-report``).
    """
    path = folder / FILE
    try:
        return read_json(path, Report)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise reject(
            "not-a-report",
            "--out",
            str(path),
            f"is no report of this version of so-tui: {error}",
            "Choose another folder with --out.",
        ) from error


def write(folder: Path, report: Report) -> None:
    """Replace the report of a folder. Raises OSError."""
    make_folders(folder)
    content = msgspec.json.format(msgspec.json.encode(report), indent=1)
    write_atomic(folder / FILE, content + b"\n")


# The form of a report that names neither the host, nor its user, nor any path.


_VERSION = re.compile(r"(?:\d+(?:\.\d+)*)?")
"""What is shared of a version: what follows may name who built it."""


def shared(report: Report) -> Report:
    """Return a report that can be given to anybody: without any text that others have a part in,
    other than the names of processors and GPUs.
    """
    outcomes = tuple(
        replace(outcome, reason="", result=_shared_result(outcome.result))
        for outcome in report.outcomes
    )
    return replace(report, host="", outcomes=outcomes)


def _shared_result(result: Result | None) -> Result | None:
    if not isinstance(result, MachineFound):
        return result
    versions = {
        name: numbers[0] or None
        for name, value in asdict(result.software).items()
        if isinstance(value, str) and (numbers := _VERSION.match(value))
    }
    return replace(
        result,
        software=replace(result.software, **versions),
        findings=tuple(replace(found, title="") for found in result.findings),
    )
