"""How far predicted steps are off. Figures of measurements: ``benchmarks/planner_errors.py`` derives them, and a test holds them to it."""

from __future__ import annotations

from functools import cache

from msgspec import Struct

from so_tui.plan.constants import Speed, published_speed

WITHIN = 0.8
"""Share of the measured steps that were within the error of their prediction."""
CALIBRATED = 0.12
"""Error of a step that is predicted with the rates of its machine, as a share of the prediction."""
PUBLISHED = 0.15
"""The same with rates that are published for the GPU."""
ALIKE = 0.04
"""Settings of one run whose predicted speeds differ by less count as equally fast: half of the ratios between measured settings of a model
on one machine were off by more. It is less than the error of a step, since whatever all settings share cancels out."""
SURE = 0.10
"""Share from which on a planned difference is worth a price. Where 10 to 20 % were planned, the setting that was planned to be faster was
faster in nine of ten pairs; where 4 to 10 % were, in three of four."""
CHECKED_GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
"""On which steps were measured beside their plans."""


class StepError(Struct, frozen=True, kw_only=True):
    """How far a predicted step can be expected to be off."""

    share: float
    """Of the prediction: four of five measured steps were within it (``WITHIN``)."""
    alike: float = ALIKE
    """Settings whose predicted speeds differ by less than this share count as equally fast."""
    checked: bool
    """Whether plans were held to measurements on GPUs of this kind, on one host. Elsewhere the error may be larger."""


def step_error(speed: Speed, gpu_name: str, hosts: int) -> StepError:
    """Return the error of a step that is predicted with these rates for so many hosts with this GPU."""
    return StepError(
        share=CALIBRATED if speed.calibrated else PUBLISHED,
        checked=hosts == 1 and _is_checked(gpu_name),
    )


@cache
def _is_checked(gpu_name: str) -> bool:
    kind = published_speed(gpu_name)
    return kind is not None and kind in map(published_speed, CHECKED_GPUS)


def about_as_fast(rate: float, other: float) -> bool:
    """Return whether the predicted speeds of two settings of one run differ by less than their ratio may be off."""
    return abs(rate - other) <= ALIKE * max(rate, other)


def clearly_faster(rate: float, other: float) -> bool:
    """Return whether the first of two predicted speeds is higher by more than that."""
    return rate > other and not about_as_fast(rate, other)


def surely_faster(rate: float, other: float) -> bool:
    """Return whether the first of two predicted speeds is higher by so much that it may be worth a price."""
    return rate >= (1 + SURE) * other
