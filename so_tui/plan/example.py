"""What DeepSpeed's SuperOffload examples do that a plan has to know: their TFLOPS, and a config without a clipping key."""

from __future__ import annotations

from msgspec.structs import replace

from so_tui.machine.types import Machine, version_numbers
from so_tui.model.architecture import architecture
from so_tui.model.flops import seed_tflops_total
from so_tui.plan.types import Plan
from so_tui.spec.types import RunSpec

_CLIPS_BY_DEFAULT = (0, 19, 8)
"""The DeepSpeed version since which a missing ``gradient_clipping`` means 1.0; before, it meant 0."""


def example_tflops(plan: Plan, step_s: float | None = None) -> float | None:
    """Return TFLOPS of a plan by the formula of DeepSpeed's example script, summed over GPUs; None without a prediction of time.

    Args:
        plan: The plan.
        step_s: Seconds of a step; by default those of the plan.
    """
    seconds = step_s or plan.step_s
    if seconds is None:
        return None
    spec = plan.spec
    sequences = plan.tokens_per_step // spec.data.sequence_length
    return seed_tflops_total(
        spec.model.parameter_count,
        architecture(spec.model.config),
        spec.data.sequence_length,
        sequences,
        seconds,
        checkpointing=spec.model.repeats_products,
    )


def as_read(spec: RunSpec, machine: Machine) -> RunSpec:
    """Return the spec as DeepSpeed reads its config: with its default where the clipping key is left out.

    Args:
        spec: What to run.
        machine: Where; without DeepSpeed there, the newest that is supported counts.
    """
    if spec.offload.config != "published":
        return spec
    found = machine.software.deepspeed
    clipping = 0.0 if found and version_numbers(found) < _CLIPS_BY_DEFAULT else 1.0
    return replace(spec, train=replace(spec.train, gradient_clipping=clipping))
