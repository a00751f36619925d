"""What commands give of a plan: plain values for JSON, and the command that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from so_tui.plan.constants import SpeedSource
from so_tui.plan.facts import Fact
from so_tui.plan.messages import message
from so_tui.plan.messages.memory import pool_name
from so_tui.plan.resources import Gpus
from so_tui.plan.speed_text import speed_source_text
from so_tui.plan.types import Plan
from so_tui.spec.types import RunSpec
from so_tui.trust.printable import so_tui_command


def plans_json(plans: Iterable[Plan]) -> dict[str, Any]:
    """Return what ``plan --json`` prints: plain values; of the spec only what a plan chooses."""
    rows = []
    for plan in plans:
        row = plan_tree(plan)
        del row["spec"]
        row["settings"] = settings_of(plan.spec)
        rows.append(row)
    return {"plans": rows}


def plan_tree(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values.

    ``reasons``, ``remedies``, ``warnings`` and ``speed_source`` are texts. ``facts`` and ``speed`` have the same as values: each fact with
    its ``role``, ``code``, values and ``message``.
    """
    row: dict[str, Any] = msgspec.to_builtins(plan, str_keys=True)
    row["facts"] = [
        {"role": role, **msgspec.to_builtins(fact), "message": message(fact)}
        for role, fact in _roles(plan)
        if not isinstance(fact, str)
    ]
    row |= {
        "reasons": plan.reason_texts,
        "remedies": plan.remedy_texts,
        "warnings": plan.warning_texts,
    }
    row["speed_source"] = speed_source_text(plan.speed_source or "", plan.mode)
    row["speed"] = (
        msgspec.to_builtins(plan.speed_source)
        if isinstance(plan.speed_source, SpeedSource)
        else None
    )
    if plan.shortage is not None:
        row["shortage"]["place"] = pool_name(plan.shortage)
    return row


def _roles(plan: Plan) -> Iterator[tuple[str, Fact | str]]:
    for reason in plan.reasons:
        yield "remedy" if reason in plan.remedies else "reason", reason
    for warning in plan.warnings:
        yield "warning", warning


def settings_of(spec: RunSpec) -> dict[str, str | int | float]:
    """Return what a plan chooses, by the keys that set it."""
    return {
        "offload.mode": spec.offload.mode,
        "offload.ratio": spec.offload.ratio,
        "offload.cpu_adam_cores_fraction": spec.offload.cpu_adam_cores_fraction,
        "offload.parameters": spec.offload.parameters,
        "model.activation_checkpointing": spec.model.activation_checkpointing,
        "model.activation_offload": spec.model.activation_offload,
        "model.tiled_mlp": spec.model.tiled_mlp,
        "train.micro_batch": spec.train.micro_batch,
        "train.sequence_parallel": spec.train.sequence_parallel,
        "train.gradient_accumulation": spec.gradient_accumulation_steps,
    }


def command_of(
    plan: Plan, given: RunSpec, preset: str, gpus: Gpus, changes: Mapping[str, str] | None = None
) -> str:
    """Return the command that runs a plan, quoted for a shell.

    Args:
        plan: With settings that need not be those of the preset.
        given: The preset's spec.
        preset: Its name.
        gpus: As the user named them: a mere count may be other GPUs by the time it runs.
        changes: Other keys that the user set.
    """
    before, after = settings_of(given), settings_of(plan.spec)
    if plan.spec.train.tokens_per_step:
        del after["train.gradient_accumulation"]  # follows from the target
    if plan.mode == "gpu":
        del after["offload.ratio"], after["offload.cpu_adam_cores_fraction"]
    wanted = (
        str(gpus)
        if isinstance(gpus, int)
        else ",".join(map(str, gpus)) + ("," if len(gpus) == 1 else "")
    )
    options = [] if gpus == given.gpus else ["--gpus", wanted]
    for key, value in {
        **{key: value for key, value in after.items() if before[key] != value},
        **(changes or {}),
    }.items():
        options += ["--set", f"{key}={value}"]
    return so_tui_command("run", preset, *options)
