"""After memory ran out: which changes of a run would need less of it, and how much less by the plan's arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from so_tui.model.architecture import architecture
from so_tui.model.layout import state_layout
from so_tui.plan.memory import memory_terms
from so_tui.plan.types import Place
from so_tui.plan.verdict import gib
from so_tui.spec.errors import InputError
from so_tui.spec.types import RunSpec

SHORTEST = 512
"""Tokens of a sequence below which shortening is no advice."""
_MOST = 3
_LEAST_BYTES = 2**20
"""What saves less is no advice."""


class Relief(Struct, frozen=True):
    """A change of the spec in words, and the bytes it saves: on each GPU, or on the host for each rank."""

    change: str
    saves_bytes: int


def less_gpu_memory(spec: RunSpec) -> str:
    """Advice for a run whose mode is decided and that ran out of GPU memory."""
    changes = (*_smaller_batch(spec), *_more_repeated(spec), *_more_offloaded(spec), *_shorter(spec))
    return _words(_reliefs(spec, "gpu", changes), "on each GPU")


def less_host_memory(spec: RunSpec) -> str:
    """The same for host memory."""
    return _words(_reliefs(spec, "node", (*_less_offloaded(spec), *_accumulated_nowhere(spec))), "of host memory a rank")


def _reliefs(spec: RunSpec, place: Place, changes: tuple[tuple[str, RunSpec], ...]) -> list[Relief]:
    try:
        now = _bytes(spec, place)
        found = [Relief(words, now - _bytes(changed, place)) for words, changed in changes]
    except InputError:  # a model without a parameter table: nothing can be said about its memory
        return []
    return [relief for relief in found if relief.saves_bytes >= _LEAST_BYTES]


def _words(reliefs: list[Relief], where: str) -> str:
    if not reliefs:
        return "Use more GPUs, or a machine with more memory; `so-tui plan` shows what is needed"
    parts = [f"{relief.change} needs {gib(relief.saves_bytes)} less {where}" for relief in reliefs[:_MOST]]
    return f"{'; or '.join(parts)} (predicted). `so-tui plan` shows the rest"


def _bytes(spec: RunSpec, place: Place) -> int:
    layout = state_layout(spec, spec.ranks)
    terms = memory_terms(spec, layout, architecture(spec.model.config), has_gpu=True, local_ranks=spec.ranks)
    return sum(term.bytes for term in terms if term.place == place and term.rank is None)


def _smaller_batch(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    if (smaller := spec.train.micro_batch // 2) < 1:
        return
    accumulation = spec.train.gradient_accumulation * (1 if spec.train.tokens_per_step else 2)
    changed = replace(spec, train=replace(spec.train, micro_batch=smaller, gradient_accumulation=accumulation))
    kept = "" if spec.train.tokens_per_step else f" with train.gradient_accumulation {changed.gradient_accumulation_steps}"
    yield f"train.micro_batch {spec.train.micro_batch} -> {smaller}{kept}", changed


def _more_repeated(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    policy = spec.model.activation_checkpointing
    if policy != "full":
        yield f"model.activation_checkpointing {policy} -> full", replace(spec, model=replace(spec.model, activation_checkpointing="full"))


def _more_offloaded(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    offload = spec.offload
    if offload.mode == "gpu":
        changed = replace(offload, mode="superoffload")
        yield f"offload.mode gpu -> superoffload at offload.ratio {offload.ratio:g}", replace(spec, offload=changed)
    elif offload.ratio < 1:
        ratio = min(1.0, round(offload.ratio + 0.2, 2))
        yield f"offload.ratio {offload.ratio:g} -> {ratio:g}", replace(spec, offload=replace(offload, ratio=ratio))


def _shorter(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    length = spec.data.sequence_length
    if length >= 2 * SHORTEST:
        yield f"data.sequence_length {length} -> {length // 2}", replace(spec, data=replace(spec.data, sequence_length=length // 2))


def _less_offloaded(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    offload = spec.offload
    if offload.mode != "gpu" and offload.ratio > 0:
        ratio = max(0.0, round(offload.ratio - 0.2, 2))
        yield f"offload.ratio {offload.ratio:g} -> {ratio:g}", replace(spec, offload=replace(offload, ratio=ratio))


def _accumulated_nowhere(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """The sum of the gradients over micro-steps lies on the host."""
    if spec.offload.mode != "gpu" and spec.gradient_accumulation_steps > 1:
        changed = replace(spec, train=replace(spec.train, gradient_accumulation=1, tokens_per_step=0))
        yield "train.gradient_accumulation 1", changed
