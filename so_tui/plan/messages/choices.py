"""Why settings were chosen, in words."""

from __future__ import annotations

from typing import assert_never

from so_tui.model.activations import Policy
from so_tui.plan.accuracy import ALIKE
from so_tui.plan.facts import choices
from so_tui.plan.facts.memory import Shortage
from so_tui.plan.messages.memory import shortage_text
from so_tui.plan.network_text import network_rate_text
from so_tui.spec.attention import OBSTACLES
from so_tui.units import duration, memory_size, plural, thousands

_WHY_NOTHING_EARLY = {
    "memory": "the host has no memory left for second states",
    "budget": "offload.speculation_gib is less than the second states of one sub-group take",
    "slower": "second states would make no step faster here",
}
_PREFERRED = {"no-offload": "offloads nothing", "given-micro-batch": "keeps the given micro-batch"}
_NOTICEABLE_BYTES = 1 << 29
"""From here on a difference in memory is worth saying."""
_RECOMPUTES: dict[Policy, str] = {
    "none": "all activations fit, so backward recomputes nothing",
    "selective": "results of matrix products and attention are stored, and only what is cheap is recomputed",
    "attention": "attention's results are stored, and everything else is recomputed",
    "full": "storing more than each layer's input would not fit, or cost more time than it saves",
}


def choice_text(fact: choices.Choice) -> str:
    """Return why a setting was chosen."""
    return _recommended(fact) if isinstance(fact, choices.Recommended) else _settled(fact)


def _settled(fact: choices.Settled) -> str:
    match fact:
        case choices.AutoMode():
            return _auto_mode(fact)
        case choices.AutoCheckpointing():
            return (
                f"activation checkpointing auto is {fact.policy} here: {_RECOMPUTES[fact.policy]}"
            )
        case choices.OneMemory():
            return "CPU and GPU have one memory: states count once wherever they are stepped, and offloading frees none"
        case choices.StepsEarly(share=0.0):
            return (
                f"clipping: Adam waits for the gradient norm; {_WHY_NOTHING_EARLY[fact.why_none]}"
            )
        case choices.StepsEarly():
            share = f"{fact.share:.0%}" if fact.share >= 0.01 else "less than 1%"
            much = (
                "Adam does not wait"
                if fact.share == 1
                else f"Adam does not wait for {share} of what is offloaded"
            )
            text = f"clipping: {much} for the gradient norm; second states take {memory_size(fact.bytes)} a rank"
            return (
                f"{text}. Steps above the limit take {fact.held_back_step_s:.2f} s"
                if fact.held_back_step_s
                else text
            )
        case choices.SavesBehind(share=0.0):
            return "checkpoints: training waits while they are written; the host has no memory left for copies of the states"
        case choices.SavesBehind():
            rest = (
                ""
                if fact.share == 1
                else f". Training waits until the other {1 - fact.share:.0%} are written"
            )
            copies = (
                f"copies take {memory_size(fact.bytes)} a rank"
                if fact.bytes
                else "second states hold the copies"
            )
            much = "the states" if fact.share == 1 else f"{fact.share:.0%} of the states"
            return f"checkpoints: {much} are written while training goes on; {copies}{rest}"
        case choices.MlpTiled():
            return f"feed-forward blocks compute {thousands(fact.tile_tokens)} tokens at a time"
        case choices.InputsOnHost():
            return _inputs_on_host(fact)
        case choices.WeightsOnHost():
            times = ""
            if fact.fetched_s is not None and fact.pass_s is not None:
                hidden = ", which hides it" if fact.fetched_s < fact.pass_s else ""
                times = f". Copying them takes {duration(fact.fetched_s)} of the {duration(fact.pass_s)} of each pass{hidden}"
            return f"weights are in host memory: {memory_size(fact.bytes)} a rank{times}"
        case choices.AttentionFallsBack():
            return f"attention runs on {fact.backend}: {fact.fastest} {OBSTACLES[fact.obstacle]}"
        case choices.CheckpointInterval():
            return _checkpoint_interval(fact)
        case choices.AcrossHosts():
            return _across_hosts(fact)
        case choices.TokensReached():
            each = f"{thousands(fact.tokens)}, {thousands(fact.tokens_per_pass)} in each micro-batch of all ranks"
            return f"accumulation {fact.accumulation} comes nearest to {thousands(fact.target)} tokens a step: {each}"
    assert_never(fact)


def _recommended(fact: choices.Recommended) -> str:
    match fact:
        case choices.SequencesShared():
            return f"{fact.ranks} ranks share each sequence: with train.sequence_parallel = {fact.given} it would not fit"
        case choices.ModeWithoutGpu(mode="superoffload"):
            return "superoffload: on a machine without GPUs the optimizer runs beside the model, on cores of its own"
        case choices.ModeWithoutGpu():
            own = "with offload.engine = so-tui the optimizer would have cores of its own"
            return f"{fact.mode}: DeepSpeed's SuperOffload needs a GPU; {own}"
        case choices.AllOnGpu():
            return "gpu: everything fits on the GPU, and offloading would not make steps noticeably shorter"
        case choices.NothingOffloaded():
            return "ratio 0.00: everything stays on the GPU; SuperOffload needs less of it than mode gpu with its bf16 gradients"
        case choices.LeastGpuMemory():
            return f"ratio {fact.ratio:.2f} takes the least of the GPU, whose memory is not known"
        case choices.SmallestRatio():
            return _smallest_ratio(fact)
        case choices.FasterRatio():
            both = f"{fact.step_s:.2f} s a step instead of {fact.smallest_step_s:.2f} s"
            if fact.alike and fact.more_gpu_bytes > 0:
                alike = f"about as fast as {fact.smallest_ratio:.2f}, which would fit too ({both})"
                return f"ratio {fact.ratio:.2f}: {alike}, and leaves {memory_size(fact.more_gpu_bytes)} more of each GPU"
            return f"ratio {fact.ratio:.2f}: {fact.smallest_ratio:.2f} would fit too, but the GPU would step more itself; {both}"
        case choices.CheckpointingChosen():
            text = f"activation checkpointing {fact.policy}: {_RECOMPUTES[fact.policy]}"
            if fact.step_s is None or fact.full_step_s is None:
                return text
            return f"{text}; recomputing whole layers would take {fact.full_step_s:.2f} s a step instead of {fact.step_s:.2f} s"
        case choices.MicroBatchChosen():
            return _micro_batch(fact)
        case choices.AdamCoresChosen():
            cores = f"{fact.adam_cores} of {fact.cores} cores a rank run CPU Adam (fraction {fact.fraction:.2f})"
            if fact.raised:
                return f"{cores}: a step waits for Adam"
            return f"{cores}: more would not make it faster, because a step waits for the node's memory or the GPU"
        case choices.SpeedUnknown():
            return "the speed of this machine is not known, so settings were not compared"
        case choices.NextBest():
            return _next_best(fact)
        case choices.NoNextBest():
            return f"next best: none; {'no other' if fact.fits else 'no'} checkpointing policy or micro-batch leaves the margin"
    assert_never(fact)


def _inputs_on_host(fact: choices.InputsOnHost) -> str:
    kept = " and ".join(
        name
        for name, size in (
            ("layer inputs", fact.bytes),
            ("attention's results", fact.results_bytes),
        )
        if size
    )
    text = f"{kept} are in host memory between forward and backward: {memory_size(fact.bytes + fact.results_bytes)} a rank"
    if fact.out_s is None or fact.back_s is None:
        return text
    hidden = (
        f"which makes a step {duration(fact.exposed_s)} longer"
        if fact.exposed_s
        else "beside the computation"
    )
    return f"{text}. Copying them takes {duration(fact.out_s)} in forward and {duration(fact.back_s)} in backward, {hidden}"


def _auto_mode(fact: choices.AutoMode) -> str:
    match fact.why:
        case "no-gpu":
            return f"auto is {fact.mode} on a machine without GPUs"
        case "gpu-memory-unknown":
            why = "the GPU's memory is not known"
        case "weights-on-host":
            why = 'offload.parameters = "cpu" needs an optimizer in host memory'
        case "fits-on-gpu":
            why = (
                "everything fits on the GPU, and offloading would not make steps noticeably shorter"
            )
        case "overlaps":
            why = "the CPU steps beside backward, which leaves less of a step to wait for"
        case "less-recomputation":
            why = "the GPU memory that offloading frees saves more recomputation than the offload costs"
        case "offload-does-not-fit":
            why = f"at ratio {fact.ratio:.2f} {_shortage(fact.shortage)}"
        case "gpu-does-not-fit":
            why = f"without offload {_shortage(fact.shortage)}"
    return f"auto is {fact.mode} here: {why}"


def _shortage(short: Shortage | None) -> str:
    return shortage_text(short) if short else "it fits"


def _smallest_ratio(fact: choices.SmallestRatio) -> str:
    margin = "leaves a margin on each GPU" if fact.keeps_margin else "each GPU can hold"
    text = f"ratio {fact.ratio:.2f} is the smallest that {margin} with this micro-batch and recomputation"
    if fact.given_shortage is not None:
        return f"{text}; the given {fact.given_ratio:.2f} would not fit: {shortage_text(fact.given_shortage)}"
    if fact.given_step_s is not None:
        return f"{text}; the given {fact.given_ratio:.2f} would take {fact.given_step_s:.2f} s a step instead of {fact.step_s:.2f} s"
    return text


def _micro_batch(fact: choices.MicroBatchChosen) -> str:
    text = f"micro-batch {fact.micro_batch} with accumulation {fact.accumulation} keeps the tokens of a step"
    if fact.given_shortage is not None:
        return f"{text}; with micro-batch {fact.given_micro_batch} {shortage_text(fact.given_shortage)}"
    return (
        text
        if fact.given_slower is None
        else f"{text}; micro-batch {fact.given_micro_batch} would be {_slower(fact.given_slower)}"
    )


def _settings(fact: choices.NextBest) -> str:
    """Return ``superoffload at ratio 0.35, micro-batch 4, activation checkpointing selective``."""
    where = "no offload" if fact.mode == "gpu" else f"{fact.mode} at ratio {fact.ratio:.2f}"
    on_host = " in host memory" if fact.on_host else ""
    return (
        f"{where}, micro-batch {fact.micro_batch}, activation checkpointing {fact.policy}{on_host}"
    )


def _slower(share: float) -> str:
    return f"{share:.1%} slower" if share > ALIKE else "about as fast"


def _next_best(fact: choices.NextBest) -> str:
    """Return ``next best: SETTINGS, 7.2% slower``, or what they are about as fast as and what speaks for those that were chosen."""
    if not fact.alike:
        return f"next best: {_settings(fact)}, {_slower(fact.slower)}"
    difference = f"planned {abs(fact.slower):.1%} {'slower' if fact.slower > 0 else 'faster'}, less than plans are off"
    text = f"about as fast as {_settings(fact)} ({difference})"
    offers = [_PREFERRED[fact.chosen_for]] if fact.chosen_for in _PREFERRED else []
    if abs(fact.more_gpu_bytes) >= _NOTICEABLE_BYTES:
        offers.append(
            f"leaves {memory_size(abs(fact.more_gpu_bytes))} {'more' if fact.more_gpu_bytes > 0 else 'less'} of each GPU"
        )
    return f"{text}: {', '.join(offers)}" if offers else text


def _checkpoint_interval(fact: choices.CheckpointInterval) -> str:
    minutes = max(1, round(fact.minutes))
    held_up = f"each holds training up for about {duration(fact.pause_s)}"
    failures = f"{plural(fact.gpus, 'GPU')} can be expected to fail once in {plural(max(1, round(fact.failure_hours / 24)), 'day')}"
    best = f"checkpoints: one in {duration(60 * minutes)} costs the least time (Young and Daly): {held_up}, and {failures}"
    if fact.given_minutes is None:
        return f"{best}. Nothing is saved before the end; checkpoint.every_minutes={minutes} changes that"
    return f"{best}; these settings save one in {duration(60 * fact.given_minutes)}"


def _across_hosts(fact: choices.AcrossHosts) -> str:
    spread = f"{fact.machines} hosts: weights, gradients and optimizer states are sharded over all {fact.ranks} GPUs"
    moved = f"{fact.bytes_per_step / 1e9:.0f} GB enter and leave each host in a step, over a network of {network_rate_text(fact.network)}"
    if fact.seconds is None or fact.longer_s is None:
        return f"{spread}; {moved}"
    return f"{spread}; {moved}: {fact.seconds:.1f} s, which makes the step {fact.longer_s:.1f} s longer than if the GPUs were in one"
