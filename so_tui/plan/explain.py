"""Why a recommendation is what it is: a line for each choice, and the next best with its price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from so_tui.model.activations import Policy, policy_of
from so_tui.plan.assess import Assessment, assess, in_mode
from so_tui.plan.search import fastest, rate, runner_up, with_micro_batch, with_policy
from so_tui.plan.site import Site
from so_tui.plan.types import Mode
from so_tui.plan.verdict import in_words
from so_tui.spec.types import RunSpec

REPEATS: dict[Policy, str] = {
    "none": "there is room for all activations, so backward repeats nothing",
    "selective": "products and attention are kept, and only what is cheap is repeated",
    "full": "keeping more than each layer's input would not fit or cost more than it saves",
}

_MUCH = 0.3
"""Share of a step that waits for the optimizer, from which on it is worth saying."""
_MORE = 4
_WORTH_SAYING = 1.2


def explained(given: RunSpec, site: Site, chosen: Assessment, tried: Sequence[Assessment]) -> Iterator[str]:
    """``given`` is what the user asked for, ``chosen`` what is recommended of ``tried``."""
    if not site.has_gpu:
        beside = chosen.spec.offload.mode == "superoffload"
        yield (
            "superoffload: on a machine without GPUs the optimizer runs beside the model, on cores of its own"
            if beside
            else "zerooffload: DeepSpeed's SuperOffload needs a GPU; with offload.engine = so-tui the optimizer would have cores of its own"
        )
        return
    if site.problem:
        return
    yield _place(given, site, chosen)
    if site.speed is not None:
        yield _recompute(site, chosen)
    if chosen.spec.train.micro_batch != given.train.micro_batch:
        yield _batch(given, site, chosen)
    yield from _cores(given, site, chosen)
    if site.speed is None:
        yield "no speed is known of this machine, so nothing faster was looked for"
    elif (other := runner_up(chosen, tried)) is not None:
        yield f"next best: {describe(other)}, {slower(chosen, other)}"
    elif not site.gpu_memory_unknown:
        none = "no other" if chosen.verdict == "fits" else "no"
        yield f"next best: none; {none} recomputing or cut of the step keeps the margin"


def larger_steps(given: RunSpec, site: Site, chosen: Assessment) -> Iterator[str]:
    """What more tokens in an optimizer step would gain, where much of a step is waiting for the optimizer. The user's to decide: it
    changes what is trained.
    """
    if chosen.verdict != "fits" or not chosen.step or chosen.step.exposed_optimizer_s < _MUCH * chosen.step.total_s:
        return
    larger, _ = fastest(_with_more_tokens(given), site)
    if larger.verdict != "fits" or not larger.step or rate(larger) < _WORTH_SAYING * rate(chosen):
        return
    tokens = given.data.sequence_length * site.ranks * larger.spec.gradient_accumulation_steps * larger.spec.train.micro_batch
    key = "train.tokens_per_step" if given.train.tokens_per_step else "train.gradient_accumulation"
    value = larger.spec.train.tokens_per_step or given.train.gradient_accumulation * _MORE
    yield (
        f"a step of {chosen.step.total_s:.2f} s waits {chosen.step.exposed_optimizer_s:.2f} s for the optimizer: with {_MORE} times the "
        f"tokens in a step ({tokens:,}; {key} = {value}) {rate(larger) / rate(chosen):.1f} times as many tokens a second would be trained"
    )


def _with_more_tokens(given: RunSpec) -> RunSpec:
    train = given.train
    if train.tokens_per_step:
        return replace(given, train=replace(train, tokens_per_step=_MORE * train.tokens_per_step))
    return replace(given, train=replace(train, gradient_accumulation=_MORE * train.gradient_accumulation))


def slower(chosen: Assessment, other: Assessment) -> str:
    """``3.1% slower``, or that it is about as fast."""
    share = rate(chosen) / rate(other) - 1
    return f"{share:.1%} slower" if share >= 0.005 else "about as fast"


def describe(found: Assessment) -> str:
    """``ratio 0.35, micro-batch 4, selective``."""
    offload = found.spec.offload
    place = "no offload" if offload.mode == "gpu" else f"{offload.mode} at ratio {offload.ratio:.2f}"
    return f"{place}, micro-batch {found.spec.train.micro_batch}, activation checkpointing {found.spec.model.activation_checkpointing}"


def _place(given: RunSpec, site: Site, chosen: Assessment) -> str:
    offload = chosen.spec.offload
    if offload.mode == "gpu":
        return "gpu: everything fits on the GPU, and offloading would only add time"
    if not offload.ratio:
        return "ratio 0.00: everything stays on the GPU; SuperOffload's optimizer needs less of it than mode gpu with its bf16 gradients"
    if site.gpu_memory_unknown:
        return f"ratio {offload.ratio:.2f} takes the least of the GPU, whose memory is not known"
    margin = "keeps a margin on each GPU" if chosen.verdict == "fits" else "each GPU can hold"
    text = f"ratio {offload.ratio:.2f} is the smallest that {margin} with this micro-batch and recomputing"
    if offload.ratio == given.offload.ratio:
        return text
    as_given = assess(in_mode(chosen.spec, "superoffload", given.offload.ratio), site)
    if as_given.verdict == "does not fit":
        return f"{text}; the given {given.offload.ratio:.2f} would not fit: {in_words(as_given.shortages[0])}"
    if as_given.step and chosen.step and as_given.step.total_s >= chosen.step.total_s:
        seconds = f"{as_given.step.total_s:.2f} s a step instead of {chosen.step.total_s:.2f} s"
        return f"{text}; the given {given.offload.ratio:.2f} would take {seconds}"
    return text


def _recompute(site: Site, chosen: Assessment) -> str:
    policy = policy_of(chosen.spec.model)
    text = f"activation checkpointing {policy}: {REPEATS[policy]}"
    full = assess(with_policy(chosen.spec, "full"), site)
    if policy == "full" or not full.step or not chosen.step:
        return text
    return f"{text}; repeating whole layers would take {full.step.total_s:.2f} s a step instead of {chosen.step.total_s:.2f} s"


def _batch(given: RunSpec, site: Site, chosen: Assessment) -> str:
    train = chosen.spec.train
    mode: Mode = "gpu" if chosen.spec.offload.mode == "gpu" else "superoffload"
    before = assess(in_mode(with_micro_batch(chosen.spec, given.train.micro_batch), mode, chosen.spec.offload.ratio), site)
    text = f"micro-batch {train.micro_batch} with accumulation {chosen.spec.gradient_accumulation_steps} keeps the tokens of a step"
    if before.shortages:
        return f"{text}; with micro-batch {given.train.micro_batch} {in_words(before.shortages[0])}"
    return f"{text}; micro-batch {given.train.micro_batch} would be {slower(chosen, before)}" if rate(before) else text


def _cores(given: RunSpec, site: Site, chosen: Assessment) -> Iterator[str]:
    fraction = chosen.spec.offload.cpu_adam_cores_fraction
    if fraction == given.offload.cpu_adam_cores_fraction or not chosen.spec.offload.ratio:
        return
    cores = f"{site.adam_cores} of {site.cores} cores a rank run CPU Adam (fraction {fraction:.2f})"
    if fraction < given.offload.cpu_adam_cores_fraction:
        yield f"{cores}: more would not make it faster, since the node's memory or the GPU is what it waits for"
    else:
        yield f"{cores}: Adam is what a step waits for"
