"""How far predicted steps are off, from every report in ``results``: what ``so_tui/plan/rates.py``
holds. No GPU is needed.

python -m benchmarks.planner_errors
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from benchmarks.planner_fit import CHECKED, RESULTS, case_of, predicted
from so_tui.plan import rates
from so_tui.plan.rates import published_speed
from so_tui.trust.decoding import read_json
from so_tui.validation.report import MachineFound, Report, trained

FOLDER = RESULTS.parent
SWEEPS = tuple(sorted(FOLDER.glob("planner-sweep-*.json")))
REPORTS = tuple(sorted(FOLDER.glob("validate-*.json")))
LONG = (*sorted(FOLDER.glob("length-*.json")), FOLDER / "attention-h200-second.json")
MIXTURES = FOLDER / "moe-h200-x2.json"


@dataclass(frozen=True)
class Row:
    """One measured setting."""

    machine: str
    """What rates it was planned with: those of one machine, or the published ones of one file."""
    model: str
    gpu: str
    gpus: int
    setting: str
    """The same where it was measured again."""
    searched: bool
    """Whether a recommendation may be of its mode."""
    checks: bool
    """Whether no constant rests on it."""
    tokens: int
    """Of a step, in any unit that is the same throughout a group."""
    measured_s: float
    calibrated_s: float | None
    """Predicted with the rates that were measured on its machine."""
    published_s: float | None
    """Predicted with the published ones."""

    @property
    def predicted_s(self) -> float:
        """As well as it could be predicted there."""
        return self.calibrated_s or self.published_s or math.nan


def rows() -> list[Row]:
    """Return every setting whose step was measured and is predicted again by today's constants, and
    those of other reports.
    """
    return [*_planned_again(), *_validated(), *_long(), *_mixtures()]


def _planned_again() -> Iterator[Row]:
    for path in (RESULTS, CHECKED, *SWEEPS):
        for row in json.loads(path.read_text()):
            case = case_of(row)
            if not case.measured.figures.step_s:
                continue
            calibrated = bool(row["speed"].get("calibrated"))
            gpu = row["machine"]["gpus"][0]["name"]
            elsewhere = dataclasses.replace(
                case, resources=dataclasses.replace(case.resources, speed=published_speed(gpu))
            )
            yield Row(
                machine=json.dumps(row["speed"]) if calibrated else path.stem,
                model=row["setting"]["size"],
                gpu=gpu,
                gpus=case.spec.ranks,
                setting=json.dumps(row["setting"], sort_keys=True),
                searched=case.spec.offload.mode != "zerooffload",
                checks=path != RESULTS,
                tokens=case.spec.train.micro_batch * case.spec.gradient_accumulation_steps,
                measured_s=case.measured.figures.step_s,
                calibrated_s=predicted(case).step_s if calibrated else None,
                published_s=predicted(elsewhere).step_s,
            )


def _validated() -> Iterator[Row]:
    """Yield the runs of validations as they were planned then, with the rates of the report. Older
    reports do not say for what data.
    """
    for path in REPORTS:
        report = read_json(path, Report)
        described = [
            outcome.result
            for outcome in report.outcomes
            if isinstance(outcome.result, MachineFound)
        ]
        for outcome, found in trained(report.outcomes):
            if (
                found.placed == "bound"
                and found.workload is not None
                and not found.losses_only
                and found.predicted.step_s
            ):
                yield Row(
                    machine=path.stem,
                    model=report.shape,
                    gpu=described[0].gpus[0].name,
                    gpus=found.ranks,
                    setting=outcome.key,
                    searched=True,
                    checks=True,
                    tokens=1,
                    measured_s=found.measured.step_s,
                    calibrated_s=found.predicted.step_s,
                    published_s=None,
                )


def _long() -> Iterator[Row]:
    """Yield steps of long sequences as they were planned when they were measured."""
    for path in LONG:
        for row in json.loads(path.read_text()):
            if row["what"] == "step":
                calibrated = bool((row.get("speed_source") or {}).get("calibrated"))
                yield _then(
                    path.stem,
                    row,
                    row["device"],
                    row.get("gpus", 1),
                    row["step_s"],
                    row["planned_step_s"],
                    calibrated=calibrated,
                )


def _mixtures() -> Iterator[Row]:
    """Yield steps of mixtures of experts as they were planned when they were measured, at published
    rates.
    """
    for row in json.loads(MIXTURES.read_text()):
        measured_s, planned_s = row["measured"]["figures"]["step_s"], row["predicted"]["step_s"]
        yield _then(
            MIXTURES.stem,
            row,
            row["gpus"][0]["name"],
            len(row["gpus"]),
            measured_s,
            planned_s,
            calibrated=False,
        )


def _then(
    machine: str,
    row: dict[str, Any],
    gpu: str,
    gpus: int,
    measured_s: float,
    planned_s: float,
    *,
    calibrated: bool,
) -> Row:
    return Row(
        machine=machine,
        model=row["preset"],
        gpu=gpu,
        gpus=gpus,
        setting=json.dumps(row["set"]),
        searched=False,
        checks=True,
        tokens=1,
        measured_s=measured_s,
        calibrated_s=planned_s if calibrated else None,
        published_s=None if calibrated else planned_s,
    )


def errors(measured: Iterable[Row], *, calibrated: bool) -> list[float]:
    """Return how far the steps of settings on which no constant rests were from their prediction,
    as shares of it, ascending.
    """
    told = (
        (row.calibrated_s if calibrated else row.published_s, row.measured_s)
        for row in measured
        if row.checks
    )
    return sorted(abs(found / expected - 1) for expected, found in told if expected)


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the smallest of the values within which this share of them lies."""
    return ascending[math.ceil(share * len(ascending)) - 1]


@dataclass(frozen=True)
class Pair:
    """Two settings of one model on one machine, as logarithms of the ratio of their times for as
    many tokens.
    """

    predicted: float
    """Not negative: the first setting is the one that is planned to be slower."""
    measured: float

    @property
    def error(self) -> float:
        return abs(self.measured - self.predicted)


def pairs(measured: Iterable[Row]) -> list[list[Pair]]:
    """Return the pairs of settings that a search might compare, for each machine with each model on
    as many GPUs.
    """
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in measured:
        if row.searched:
            groups.setdefault((row.machine, row.model, row.gpus), []).append(row)
    found = (
        [_pair(one, other) for one, other in combinations(group, 2) if one.setting != other.setting]
        for group in groups.values()
    )
    return [group for group in found if group]


def _pair(one: Row, other: Row) -> Pair:
    expected = math.log(one.predicted_s / one.tokens) - math.log(other.predicted_s / other.tokens)
    ratio = math.log(one.measured_s / one.tokens) - math.log(other.measured_s / other.tokens)
    return Pair(expected, ratio) if expected >= 0 else Pair(-expected, -ratio)


def ratio_error(groups: Iterable[Sequence[Pair]]) -> float:
    """Return the usual error of a predicted ratio: the median of the groups' medians, so that large
    groups do not decide.
    """
    return median(median(pair.error for pair in group) for group in groups)


def table(measured: Sequence[Row]) -> str:
    """Return the errors of steps as docs/planner.md has them."""
    lines = [
        "| rates | settings | half within | four of five within | nine of ten within | shown |",
        "|---|---|---|---|---|---|",
    ]
    for name, calibrated, kept in (
        ("measured by `so-tui calibrate` on that machine", True, rates.CALIBRATED),
        ("published for the GPU", False, rates.PUBLISHED),
    ):
        found = errors(measured, calibrated=calibrated)
        cells = [f"{100 * quantile(found, share):.1f} %" for share in (0.5, rates.WITHIN, 0.9)]
        lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} | ±{kept:.0%} |")
    return "\n".join(lines)


def order_table(groups: Sequence[Sequence[Pair]]) -> str:
    """Return how often the setting that was planned to be the faster one was."""
    lines = ["| planned difference | pairs | the faster one was faster |", "|---|---|---|"]
    bounds = (0.0, 0.02, rates.ALIKE, 0.1, 0.2, math.inf)
    for least, most in pairwise(bounds):
        found = [
            pair.measured > 0
            for group in groups
            for pair in group
            if pair.predicted and least <= pair.predicted < most
        ]
        name = (
            f"up to {100 * most:.0f} %"
            if not least
            else f"over {100 * least:.0f} %"
            if most == math.inf
            else ""
        )
        lines.append(
            f"| {name or f'{100 * least:.0f} to {100 * most:.0f} %'} | {len(found):,} | "
            f"{100 * sum(found) / len(found):.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    measured = rows()
    groups = pairs(measured)
    print(table(measured))
    print(
        f"\nUsual error of a ratio: {100 * ratio_error(groups):.1f} %, of "
        f"{sum(map(len, groups)):,} pairs in {len(groups)} groups.\n"
    )
    print(order_table(groups))


if __name__ == "__main__":
    main()
