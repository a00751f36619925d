"""What would fit, and what would need less memory, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from so_tui.plan.facts import remedies
from so_tui.plan.messages.states import price_of
from so_tui.units import memory_size


def remedy_text(fact: remedies.Remedy) -> str:
    """Return what would fit: settings, GPUs, other hosts."""
    match fact:
        case remedies.FitsHere():
            return (
                " with ".join(f"{change.key} = {_setting(change)}" for change in fact.changes)
                + " fits here"
            )
        case remedies.CompactStatesFit():
            saved = f"{memory_size(fact.saved_bytes)} less host memory"
            return f'offload.states = "{fact.states}" fits here: {saved}; its price: {price_of(fact.states)}'
        case remedies.MoreGpusFit():
            return (
                f"{fact.gpus} GPUs of this machine fit the run{_with_micro_batch(fact.micro_batch)}"
            )
        case remedies.LargerHostFits():
            parts = f"{fact.gpus} x GH200 with {fact.host_bytes / 1e9:.0f} GB of host memory each"
            return f"{parts} would fit the run{_with_micro_batch(fact.micro_batch)} ({memory_size(fact.needs_bytes)} needed per node)"
        case remedies.MoreMachinesFit():
            machines = f"{fact.machines} hosts like this one ({fact.gpus} GPUs)"
            return f"{machines} would fit the run{_with_micro_batch(fact.micro_batch)}; --nodes {fact.machines} plans for them"
        case remedies.OtherMachineNeeded():
            return "use a machine with a GPU, a smaller model, or fewer ranks"
    assert_never(fact)


def _setting(change: remedies.Change) -> str:
    return f"{change.after:.2f}" if isinstance(change.after, float) else str(change.after)


def _with_micro_batch(micro_batch: int | None) -> str:
    return "" if micro_batch is None else f" with train.micro_batch = {micro_batch}"


def advice_text(fact: remedies.MemoryAdvice) -> str:
    """Return what would need less memory after it ran out."""
    if not fact.savings:
        return "Use more GPUs, or a machine with more memory; `so-tui plan` shows what is needed"
    where = "on each GPU" if fact.pool == "gpu" else "of host memory a rank"
    parts = [
        f"{_changed(saving.changes)} needs {memory_size(saving.saves_bytes)} less {where}"
        for saving in fact.savings
    ]
    return f"{'; or '.join(parts)} (predicted). `so-tui plan` shows the rest"


def _changed(changes: Sequence[remedies.Change]) -> str:
    """Return ``train.micro_batch 4 -> 2 with train.gradient_accumulation 2``."""
    first, *others = changes
    if first.key == "train.gradient_accumulation":
        return f"{first.key} {first.after}"
    if first.key == "offload.mode":
        ratio = next(change.after for change in others if change.key == "offload.ratio")
        return f"{first.key} {first.before} -> {first.after} at offload.ratio {ratio:g}"
    text = f"{first.key} {_general(first.before)} -> {_general(first.after)}"
    return text + "".join(f" with {change.key} {_general(change.after)}" for change in others)


def _general(value: str | int | float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
