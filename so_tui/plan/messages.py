"""The words of a plan: the one place where facts become text, for command line, screen and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, assert_never

from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.types import Machine, Network
from so_tui.model.activations import Policy
from so_tui.plan import facts
from so_tui.plan.facts import Blocker, Caution, Change, Choice, Fact, MemoryAdvice, NodeNeed, Remedy, Shortage
from so_tui.plan.network import assumed_network
from so_tui.spec.attention import MASKED_BACKENDS, OBSTACLES
from so_tui.trust.printable import printable_line
from so_tui.units import duration, memory_size, plural, thousands

if TYPE_CHECKING:
    from so_tui.plan.types import DeepSpeedBinding

_COMMIT = re.compile("[0-9a-f]{40}")
_WHY_NOTHING_EARLY = {
    "memory": "the host has no memory left for second states",
    "budget": "offload.speculation_gib is less than the second states of one sub-group take",
    "slower": "second states would make no step faster here",
}
_RECOMPUTES: dict[Policy, str] = {
    "none": "all activations fit, so backward recomputes nothing",
    "selective": "results of matrix products and attention are stored, and only what is cheap is recomputed",
    "attention": "attention's results are stored, and everything else is recomputed",
    "full": "storing more than each layer's input would not fit, or cost more time than it saves",
}


def message(fact: Fact | str) -> str:
    """Return a fact in words. A text from an older plan is returned as it is."""
    if isinstance(fact, str):
        return fact
    if isinstance(fact, Shortage):
        return shortage_text(fact)
    if isinstance(fact, facts.MemoryNeeded):
        return _memory_needed(fact)
    if isinstance(fact, MemoryAdvice):
        return _memory_advice(fact)
    if isinstance(fact, Blocker):
        return _blocker(fact)
    if isinstance(fact, Remedy):
        return _remedy(fact)
    if isinstance(fact, Choice):
        return _choice(fact)
    return _caution(fact)


def messages(found: Iterable[Fact | str]) -> tuple[str, ...]:
    """Return facts in words, in order."""
    return tuple(map(message, found))


def _blocker(fact: Blocker) -> str:
    match fact:
        case facts.AmdGpu():
            return f"GPU {fact.gpu} ({fact.name}) is an AMD GPU, and of these so-tui plans for MI300A only. Use a machine with NVIDIA GPUs"
        case facts.ModeNeedsGpu():
            return f"offload.mode = gpu needs a GPU, and {fact.machine} has none. Use offload.mode = auto"
        case facts.EngineNeedsGpu():
            return "DeepSpeed's SuperOffload needs a CUDA GPU, and this machine has none. Use offload.engine = so-tui"
        case facts.TooFewGpus():
            most = "1" if fact.present == 1 else f"{fact.present} or fewer"
            return f"gpus = {fact.asked}: {_has(fact.machine, fact.present)}. Ask for {most}"
        case facts.NoSuchGpu():
            there = _has(fact.machine, len(fact.present))
            return f"gpus = {list(fact.asked)}: there is no GPU {fact.missing}, {there}. Choose from {list(fact.present)}"
        case facts.SequencesNotShareable() if fact.backend in MASKED_BACKENDS:
            return (
                f"train.sequence_parallel = {fact.ranks} needs attention that takes document boundaries, and {fact.backend} takes a mask. "
                "Set it to 1, or run on GPUs with another backend"
            )
        case facts.SequencesNotShareable():
            heads = f"{fact.heads} heads and {fact.key_heads} key heads"
            return f"train.sequence_parallel = {fact.ranks} cannot divide the model's {heads}. Choose a divisor of both"
        case facts.NotBindable():
            return "; ".join(f"{found.message}. {found.remedy}" for found in fact.problems)
    assert_never(fact)


def _has(machine: str, gpus: int) -> str:
    return f"{machine} has {gpus} GPU" + ("s" if gpus > 1 else "")


def shortage_text(short: Shortage) -> str:
    """Return ``host node 0 needs 226 GiB, has 105 GiB``."""
    if short.fatal:
        return f"{pool_name(short)} needs {memory_size(short.needs)}, has {memory_size(short.has)}"
    return (
        f"{pool_name(short)} needs {memory_size(short.needs)} of {memory_size(short.has)}: little is left for what is not predicted exactly"
    )


def pool_name(short: Shortage) -> str:
    """Return the memory that is short: ``each GPU``, ``host node 0``, ``/dev/shm``."""
    match short.pool:
        case "gpu":
            return "each GPU"
        case "node":
            return _nodes(short.nodes)
        case "limit":
            return "the host, within its memory limit,"
        case "shm":
            return "/dev/shm"
        case "unknown":
            return "the machine"
    assert_never(short.pool)


def _nodes(nodes: Sequence[int]) -> str:
    return f"host node {nodes[0]}" if len(nodes) == 1 else f"each of host nodes {', '.join(map(str, nodes))}"


def _memory_needed(fact: facts.MemoryNeeded) -> str:
    parts = []
    if fact.gpu_bytes:
        of = f" of {memory_size(fact.gpu_capacity_bytes)}" if fact.gpu_capacity_bytes else ""
        parts.append(f"{memory_size(fact.gpu_bytes)}{of} on each GPU")
    # The number of a node comes last: before an amount it would read as a part of it.
    parts += [_host_needed(host) for host in fact.hosts]
    return "needs " + "; ".join(parts)


def _host_needed(host: NodeNeed) -> str:
    return f"{memory_size(host.needs)} of {memory_size(host.has)} on {_nodes(host.nodes)}"


def _remedy(fact: Remedy) -> str:
    match fact:
        case facts.FitsHere():
            return " with ".join(f"{change.key} = {_setting(change)}" for change in fact.changes) + " fits here"
        case facts.CompactStatesFit():
            return (
                f'offload.states = "{fact.states}" fits here: {memory_size(fact.saved_bytes)} less host memory, for moments that are '
                "rounded, so losses differ slightly"
            )
        case facts.MoreGpusFit():
            return f"{fact.gpus} GPUs of this machine fit the run{_with_micro_batch(fact.micro_batch)}"
        case facts.LargerHostFits():
            parts = f"{fact.gpus} x GH200 with {fact.host_bytes / 1e9:.0f} GB of host memory each"
            return f"{parts} would fit the run{_with_micro_batch(fact.micro_batch)} ({memory_size(fact.needs_bytes)} needed per node)"
        case facts.MoreMachinesFit():
            machines = f"{fact.machines} hosts like this one ({fact.gpus} GPUs)"
            return f"{machines} would fit the run{_with_micro_batch(fact.micro_batch)}; --nodes {fact.machines} plans for them"
        case facts.OtherMachineNeeded():
            return "use a machine with a GPU, a smaller model, or fewer ranks"
    assert_never(fact)


def _setting(change: Change) -> str:
    return f"{change.after:.2f}" if isinstance(change.after, float) else str(change.after)


def _with_micro_batch(micro_batch: int | None) -> str:
    return "" if micro_batch is None else f" with train.micro_batch = {micro_batch}"


def _memory_advice(fact: MemoryAdvice) -> str:
    if not fact.savings:
        return "Use more GPUs, or a machine with more memory; `so-tui plan` shows what is needed"
    where = "on each GPU" if fact.pool == "gpu" else "of host memory a rank"
    parts = [f"{_changed(saving.changes)} needs {memory_size(saving.saves_bytes)} less {where}" for saving in fact.savings]
    return f"{'; or '.join(parts)} (predicted). `so-tui plan` shows the rest"


def _changed(changes: Sequence[Change]) -> str:
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


def _choice(fact: Choice) -> str:
    match fact:
        case facts.AutoMode():
            return _auto_mode(fact)
        case facts.AutoCheckpointing():
            return f"activation checkpointing auto is {fact.policy} here: {_RECOMPUTES[fact.policy]}"
        case facts.OneMemory():
            return "CPU and GPU have one memory: states count once wherever they are stepped, and offloading frees none"
        case facts.StepsEarly(share=0.0):
            return f"clipping: Adam waits for the gradient norm; {_WHY_NOTHING_EARLY[fact.why_none]}"
        case facts.StepsEarly():
            share = f"{fact.share:.0%}" if fact.share >= 0.01 else "less than 1%"
            much = "Adam does not wait" if fact.share == 1 else f"Adam does not wait for {share} of what is offloaded"
            text = f"clipping: {much} for the gradient norm; second states take {memory_size(fact.bytes)} a rank"
            return f"{text}. Steps above the limit take {fact.held_back_step_s:.2f} s" if fact.held_back_step_s else text
        case facts.SavesBehind(share=0.0):
            return "checkpoints: training waits while they are written; the host has no memory left for copies of the states"
        case facts.SavesBehind():
            rest = "" if fact.share == 1 else f". Training waits until the other {1 - fact.share:.0%} are written"
            copies = f"copies take {memory_size(fact.bytes)} a rank" if fact.bytes else "second states hold the copies"
            much = "the states" if fact.share == 1 else f"{fact.share:.0%} of the states"
            return f"checkpoints: {much} are written while training goes on; {copies}{rest}"
        case facts.SequencesShared():
            return f"{fact.ranks} ranks share each sequence: with train.sequence_parallel = {fact.given} it would not fit"
        case facts.MlpTiled():
            return f"feed-forward blocks compute {thousands(fact.tile_tokens)} tokens at a time"
        case facts.InputsOnHost():
            return f"layer inputs are in host memory between forward and backward: {memory_size(fact.bytes)} a rank"
        case facts.AttentionFallsBack():
            return f"attention runs on {fact.backend}: {fact.fastest} {OBSTACLES[fact.obstacle]}"
        case facts.CheckpointInterval():
            return _checkpoint_interval(fact)
        case facts.AcrossHosts():
            return _across_hosts(fact)
        case facts.TokensReached():
            each = f"{thousands(fact.tokens)}, {thousands(fact.tokens_per_pass)} in each micro-batch of all ranks"
            return f"accumulation {fact.accumulation} comes nearest to {thousands(fact.target)} tokens a step: {each}"
        case facts.ModeWithoutGpu(mode="superoffload"):
            return "superoffload: on a machine without GPUs the optimizer runs beside the model, on cores of its own"
        case facts.ModeWithoutGpu():
            own = "with offload.engine = so-tui the optimizer would have cores of its own"
            return f"{fact.mode}: DeepSpeed's SuperOffload needs a GPU; {own}"
        case facts.AllOnGpu():
            return "gpu: everything fits on the GPU, and offloading would only add time"
        case facts.NothingOffloaded():
            return "ratio 0.00: everything stays on the GPU; SuperOffload needs less of it than mode gpu with its bf16 gradients"
        case facts.LeastGpuMemory():
            return f"ratio {fact.ratio:.2f} takes the least of the GPU, whose memory is not known"
        case facts.SmallestRatio():
            return _smallest_ratio(fact)
        case facts.FasterRatio():
            both = f"{fact.step_s:.2f} s a step instead of {fact.smallest_step_s:.2f} s"
            return f"ratio {fact.ratio:.2f}: {fact.smallest_ratio:.2f} would fit too, but the GPU would step more itself; {both}"
        case facts.CheckpointingChosen():
            text = f"activation checkpointing {fact.policy}: {_RECOMPUTES[fact.policy]}"
            if fact.step_s is None or fact.full_step_s is None:
                return text
            return f"{text}; recomputing whole layers would take {fact.full_step_s:.2f} s a step instead of {fact.step_s:.2f} s"
        case facts.MicroBatchChosen():
            return _micro_batch(fact)
        case facts.AdamCoresChosen():
            cores = f"{fact.adam_cores} of {fact.cores} cores a rank run CPU Adam (fraction {fact.fraction:.2f})"
            if fact.raised:
                return f"{cores}: a step waits for Adam"
            return f"{cores}: more would not make it faster, because a step waits for the node's memory or the GPU"
        case facts.SpeedUnknown():
            return "the speed of this machine is not known, so settings were not compared"
        case facts.NextBest():
            return f"next best: {_settings(fact)}, {_slower(fact.slower)}"
        case facts.NoNextBest():
            return f"next best: none; {'no other' if fact.fits else 'no'} checkpointing policy or micro-batch leaves the margin"
    assert_never(fact)


def _auto_mode(fact: facts.AutoMode) -> str:
    match fact.why:
        case "no-gpu":
            return f"auto is {fact.mode} on a machine without GPUs"
        case "gpu-memory-unknown":
            why = "the GPU's memory is not known"
        case "fits-on-gpu":
            why = "everything fits on the GPU, and offloading would only add time"
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


def _smallest_ratio(fact: facts.SmallestRatio) -> str:
    margin = "leaves a margin on each GPU" if fact.keeps_margin else "each GPU can hold"
    text = f"ratio {fact.ratio:.2f} is the smallest that {margin} with this micro-batch and recomputation"
    if fact.given_shortage is not None:
        return f"{text}; the given {fact.given_ratio:.2f} would not fit: {shortage_text(fact.given_shortage)}"
    if fact.given_step_s is not None:
        return f"{text}; the given {fact.given_ratio:.2f} would take {fact.given_step_s:.2f} s a step instead of {fact.step_s:.2f} s"
    return text


def _micro_batch(fact: facts.MicroBatchChosen) -> str:
    text = f"micro-batch {fact.micro_batch} with accumulation {fact.accumulation} keeps the tokens of a step"
    if fact.given_shortage is not None:
        return f"{text}; with micro-batch {fact.given_micro_batch} {shortage_text(fact.given_shortage)}"
    return text if fact.given_slower is None else f"{text}; micro-batch {fact.given_micro_batch} would be {_slower(fact.given_slower)}"


def _settings(fact: facts.NextBest) -> str:
    """Return ``superoffload at ratio 0.35, micro-batch 4, activation checkpointing selective``."""
    where = "no offload" if fact.mode == "gpu" else f"{fact.mode} at ratio {fact.ratio:.2f}"
    return f"{where}, micro-batch {fact.micro_batch}, activation checkpointing {fact.policy}"


def _slower(share: float) -> str:
    return f"{share:.1%} slower" if share >= 0.005 else "about as fast"


def _remote_code(fact: facts.RemoteCode) -> str:
    model = printable_line(fact.model)
    where = f"{model}, revision {printable_line(fact.revision)}," if fact.revision else f"the folder {model}"
    text = f"model.trust_remote_code is on: Python code of {where} runs with your rights; launch it only if you have read that code"
    pinned = not fact.revision or _COMMIT.fullmatch(fact.revision)
    return text if pinned else f"{text}. Set model.revision to a commit: a branch or tag can change"


def _packing_off(fact: facts.PackingOff) -> str:
    why = f", since layers of {', '.join(map(printable_line, fact.mixing))} would mix the documents" if fact.mixing else ""
    share = "padding" if fact.padding_share is None else f"padding, up to {fact.padding_share:.0%} of all positions with these data,"
    return f"packing is off{why}: {share} is computed but counts for nothing"


def _caution(fact: Caution) -> str:
    match fact:
        case facts.NeverRun():
            known = "speeds follow from publications, and memory from runs on NVIDIA GPUs"
            return f"planned, never run: so-tui has not run on {fact.name} yet; {known}"
        case facts.DeepSpeedNvidiaOnly():
            return "DeepSpeed says of its SuperOffload that it supports NVIDIA GPUs only; offload.engine = so-tui makes no such demand"
        case facts.ClippingWaits():
            text = "gradient_clipping above 0 makes DeepSpeed's SuperOffload wait for the norm: nothing overlaps with backward"
            text += "" if fact.seconds is None else f" (about {fact.seconds:.1f} s a step)"
            return f"{text}. offload.engine = so-tui clips exactly"
        case facts.FasterOffload():
            what = "offload.mode = gpu" if fact.mode == "gpu" else f"offload.ratio = {fact.ratio:.2f}"
            return f"{what} fits too and would take {fact.step_s:.2f} s a step instead of {fact.given_step_s:.2f} s"
        case facts.BeyondPositions():
            longest = f"documents of more than {thousands(fact.positions)} tokens are longer than the model was made for"
            remedy = "its rotary positions are not scaled for them, so quality may suffer; model.rope_scaling = yarn scales them"
            return f"data.sequence_length = {thousands(fact.sequence_length)}: {longest}; {remedy}"
        case facts.FasterAttention():
            steps = f"{fact.step_s:.2f} s a step instead of {fact.given_step_s:.2f} s (predicted)"
            return f"attention runs on {fact.used}; with {fact.backend} installed it would take {steps}"
        case facts.PcieOffload():
            return "the GPU is connected by PCIe: offloading gains less than over NVLink-C2C"
        case facts.GpuMemoryUnknown():
            return "the GPU's memory size is not known, nor whether the run fits there"
        case facts.SlowWithoutGpu():
            return f"{fact.parameters / 1e9:.1f} B parameters without a GPU: one step may take hours"
        case facts.PackingOff():
            return _packing_off(fact)
        case facts.RemoteCode():
            return _remote_code(fact)
        case facts.Note():
            return fact.text
        case facts.LargerSteps():
            waits = f"a step of {fact.step_s:.2f} s waits {fact.exposed_optimizer_s:.2f} s for the optimizer"
            larger = f"{fact.times} times the tokens in a step ({thousands(fact.tokens)}; {fact.key} = {fact.value})"
            return f"{waits}: with {larger} {fact.faster:.1f} times as many tokens a second would be trained"
        case facts.MoreGpusKeepMargin():
            return f"{fact.gpus} GPUs of this machine leave the margin"
    assert_never(fact)


def _checkpoint_interval(fact: facts.CheckpointInterval) -> str:
    minutes = max(1, round(fact.minutes))
    held_up = f"each holds training up for about {duration(fact.pause_s)}"
    failures = f"{plural(fact.gpus, 'GPU')} can be expected to fail once in {plural(max(1, round(fact.failure_hours / 24)), 'day')}"
    best = f"checkpoints: one in {duration(60 * minutes)} costs the least time (Young and Daly): {held_up}, and {failures}"
    if fact.given_minutes is None:
        return f"{best}. Nothing is saved before the end; checkpoint.every_minutes={minutes} changes that"
    return f"{best}; these settings save one in {duration(60 * fact.given_minutes)}"


def network_text(machine: Machine) -> str:
    """Return how fast a host's network is, and who says so."""
    return f"network of {_network(machine.network or assumed_network(len(machine.gpus)))} each"


def _network(network: Network) -> str:
    return f"{network.gbit_per_s:g} Gb/s ({network.source or 'assumed: 200 for each GPU'})"


def _across_hosts(fact: facts.AcrossHosts) -> str:
    spread = f"{fact.machines} hosts: weights, gradients and optimizer states are sharded over all {fact.ranks} GPUs"
    moved = f"{fact.bytes_per_step / 1e9:.0f} GB enter and leave each host in a step, over a network of {_network(fact.network)}"
    if fact.seconds is None or fact.longer_s is None:
        return f"{spread}; {moved}"
    return f"{spread}; {moved}: {fact.seconds:.1f} s, which makes the step {fact.longer_s:.1f} s longer than if the GPUs were in one"


def deepspeed_text(binding: DeepSpeedBinding) -> str:
    """Return what DeepSpeed's launcher does, for a table: ``the same``, the numactl prefix, or why it fails."""
    if binding.error:
        return f"fails: {binding.error}"
    return "the same" if binding.matches else " ".join(binding.numactl) or f"unbound, cores {cpu_ranges(binding.cpus)}"
