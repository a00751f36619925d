"""What is worth knowing of a plan that may run, in words."""

from __future__ import annotations

import re
from typing import assert_never

from so_tui.plan.facts import cautions
from so_tui.plan.messages.states import price_of
from so_tui.trust.printable import printable_line
from so_tui.units import thousands

_COMMIT = re.compile("[0-9a-f]{40}")


def caution_text(fact: cautions.Caution) -> str:
    """Return what is worth knowing, with a remedy where there is one."""
    match fact:
        case cautions.NeverRun():
            known = "speeds follow from publications, and memory from runs on NVIDIA GPUs"
            return f"planned, never run: so-tui has not run on {fact.name} yet; {known}"
        case cautions.DeepSpeedNvidiaOnly():
            return "DeepSpeed says of its SuperOffload that it supports NVIDIA GPUs only; offload.engine = so-tui makes no such demand"
        case cautions.ClippingWaits():
            text = "gradient_clipping above 0 makes DeepSpeed's SuperOffload wait for the norm: nothing overlaps with backward"
            text += "" if fact.seconds is None else f" (about {fact.seconds:.1f} s a step)"
            return f"{text}. offload.engine = so-tui clips exactly"
        case cautions.FasterOffload():
            what = (
                "offload.mode = gpu" if fact.mode == "gpu" else f"offload.ratio = {fact.ratio:.2f}"
            )
            return f"{what} fits too and would take {fact.step_s:.2f} s a step instead of {fact.given_step_s:.2f} s"
        case cautions.BeyondPositions():
            longest = f"documents of more than {thousands(fact.positions)} tokens are longer than the model was made for"
            remedy = "its rotary positions are not scaled for them, so quality may suffer; model.rope_scaling = yarn scales them"
            return f"sequences of {thousands(fact.sequence_length)} tokens: {longest}; {remedy}"
        case cautions.IndexersUntrained():
            size = f"{fact.parameters / 1e6:.1f} M parameters of the indexers, which choose what attention reads"
            return f"{size}, get no gradient: they stay as they are, without weight decay, and are exported so"
        case cautions.FasterAttention():
            steps = f"{fact.step_s:.2f} s a step instead of {fact.given_step_s:.2f} s (predicted)"
            return f"attention runs on {fact.used}; with {fact.backend} installed it would take {steps}"
        case cautions.FasterStates():
            return _faster_states(fact)
        case cautions.PcieOffload():
            return "the GPU is connected by PCIe: offloading gains less than over NVLink-C2C"
        case cautions.GpuMemoryUnknown():
            return "the GPU's memory size is not known, nor whether the run fits there"
        case cautions.SlowWithoutGpu():
            return (
                f"{fact.parameters / 1e9:.1f} B parameters without a GPU: one step may take hours"
            )
        case cautions.PackingOff():
            return _packing_off(fact)
        case cautions.RemoteCode():
            return _remote_code(fact)
        case cautions.Note():
            return fact.text
        case cautions.LargerSteps():
            waits = f"a step of {fact.step_s:.2f} s waits {fact.exposed_optimizer_s:.2f} s for the optimizer"
            larger = f"{fact.times} times the tokens in a step ({thousands(fact.tokens)}; {fact.key} = {fact.value})"
            return f"{waits}: with {larger} {fact.faster:.1f} times as many tokens a second would be trained"
        case cautions.MoreGpusKeepMargin():
            return f"{fact.gpus} GPUs of this machine leave the margin"
    assert_never(fact)


def _faster_states(fact: cautions.FasterStates) -> str:
    steps = f"{fact.step_s:.2f} s a step instead of {fact.given_step_s:.2f} s (predicted)"
    early = f"{fact.early_share:.0%} of what is offloaded, not {fact.given_early_share:.0%}, is stepped before the gradient norm is known"
    return f'offload.states = "{fact.states}" would take {steps}, since {early}; its price: {price_of(fact.states)}'


def _remote_code(fact: cautions.RemoteCode) -> str:
    model = printable_line(fact.model)
    where = (
        f"{model}, revision {printable_line(fact.revision)},"
        if fact.revision
        else f"the folder {model}"
    )
    text = f"model.trust_remote_code is on: Python code of {where} runs with your rights; launch it only if you have read that code"
    pinned = not fact.revision or _COMMIT.fullmatch(fact.revision)
    return text if pinned else f"{text}. Set model.revision to a commit: a branch or tag can change"


def _packing_off(fact: cautions.PackingOff) -> str:
    why = (
        f", since layers of {', '.join(map(printable_line, fact.mixing))} would mix the documents"
        if fact.mixing
        else ""
    )
    share = (
        "padding"
        if fact.padding_share is None
        else f"padding, up to {fact.padding_share:.0%} of all positions with these data,"
    )
    return f"packing is off{why}: {share} is computed but counts for nothing"
