"""What to say about a plan: why it does not fit and what would, and what is worth knowing when it does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from msgspec.structs import replace

from so_tui.machine.types import Machine
from so_tui.plan.assess import Assessment, assess, best
from so_tui.plan.site import Site, other_site, rank_counts
from so_tui.plan.verdict import EACH_GPU, gib, usable
from so_tui.spec.types import RunSpec

LARGE_GRACE_BYTES = 480_000_000_000
"""Host memory of the larger GH200 part."""
MOST_HOSTS = 16
SHORTEST = 512
"""Tokens of a sequence below which shortening it is no advice."""

_SLOW_LINK_BYTES_PER_S = 100e9
_SLOW_ON_CPU = 1_000_000_000


def impossible(spec: RunSpec, machine: Machine) -> Iterator[str]:
    """Why ``spec`` can never run on this machine, whatever the memory; nothing when it can."""
    offload = spec.offload
    if amd := next((gpu for gpu in machine.gpus if gpu.vendor == "amd"), None):
        yield f"GPU {amd.index} ({amd.name}) is an AMD GPU; the optimizer is written for CUDA. Use a machine with NVIDIA GPUs"
    if not machine.gpus and offload.mode == "gpu":
        yield f"offload.mode = gpu needs a GPU, and {machine.label} has none. Use offload.mode = auto"
    if not machine.gpus and offload.mode == "superoffload" and offload.engine == "deepspeed":
        yield "DeepSpeed's SuperOffload needs a CUDA GPU, and this machine has none. Use offload.engine = so-tui"


def remedies(spec: RunSpec, site: Site, *, searched: bool = False) -> Iterator[str]:
    """What would make a run fit that does not, least painful first. ``spec`` is as the user gave it; ``searched``: no other setting of it
    fits here, as a search for the fastest has found.
    """
    if not searched and (mended := _mended_here(spec, site)):
        yield mended
    elif not site.has_gpu:
        yield "use a machine with a GPU, a smaller model, or fewer ranks"
    elif more := _more_gpus(spec, site):
        yield more
    else:
        yield from _shorter(spec, site)
        yield from _other_machines(spec, site)


def _mended_here(spec: RunSpec, site: Site) -> str:
    """A key to change with which it fits on the same GPUs; empty where there is none."""
    if (here := best(spec, site)).verdict != "does not fit":
        mode, ratio = here.spec.offload.mode, here.spec.offload.ratio
        return (
            "offload.mode = gpu fits here" if mode == "gpu" else f"offload.mode = superoffload with offload.ratio = {ratio:.2f} fits here"
        )
    if spec.model.activation_checkpointing in ("selective", "none") and best(_repeating(spec), site).verdict != "does not fit":
        return "model.activation_checkpointing = full fits here"
    if (smaller := halved_batch(_repeating(spec), site)) is not None:
        micro_batch, gradient_accumulation_steps = smaller.spec.train.micro_batch, smaller.spec.gradient_accumulation_steps
        return f"train.micro_batch = {micro_batch} with train.gradient_accumulation = {gradient_accumulation_steps} fits here"
    return ""


def _repeating(spec: RunSpec) -> RunSpec:
    """With the recomputing that takes the least memory."""
    return replace(spec, model=replace(spec.model, activation_checkpointing="full"))


def _shorter(spec: RunSpec, site: Site) -> Iterator[str]:
    """The longest sequences that would fit, where it is activations that do not."""
    length = spec.data.sequence_length // 2
    while length >= SHORTEST:
        found = best(replace(_repeating(spec), data=replace(spec.data, sequence_length=length)), site)
        if found.verdict != "does not fit":
            yield f"data.sequence_length = {length} fits here"
            return
        if found.shortages and found.shortages[0].place != EACH_GPU:
            return  # sequences take no host memory
        length //= 2


def halved_batch(spec: RunSpec, site: Site, *, ranks: int | None = None) -> Assessment | None:
    """The largest smaller micro-batch that fits with the same tokens per optimizer step, or is tight where none fits; None when none is."""
    train, tight = spec.train, None
    while train.micro_batch % 2 == 0:
        accumulation = train.gradient_accumulation if train.tokens_per_step else 2 * train.gradient_accumulation
        train = replace(train, micro_batch=train.micro_batch // 2, gradient_accumulation=accumulation)
        found = best(replace(spec, train=train), site, ranks=ranks)
        if found.verdict == "fits":
            return found
        if found.verdict == "tight":
            tight = tight or found
    return tight


def _holds(spec: RunSpec, site: Site, ranks: int | None = None) -> str | None:
    """How a site would hold ``spec``: as it is (an empty string), with a smaller micro-batch (in words), or not at all (None)."""
    if best(spec, site, ranks=ranks).verdict != "does not fit":
        return ""
    smaller = halved_batch(spec, site, ranks=ranks)
    return None if smaller is None else f" with train.micro_batch = {smaller.spec.train.micro_batch}"


def _larger_sites(spec: RunSpec, site: Site) -> Iterator[Site]:
    """More GPUs of the machine, up to all of them."""
    if site.has_gpu:
        for ranks in rank_counts(site.machine):
            if ranks > site.ranks:
                yield other_site(site, ranks, spec.offload.cpu_adam_cores_fraction)


def _more_gpus(spec: RunSpec, site: Site) -> str:
    for larger in _larger_sites(spec, site):
        if (how := _holds(spec, larger)) is not None:
            return f"{larger.ranks} GPUs of this machine hold it{how}"
    return ""


def roomier(spec: RunSpec, site: Site) -> Iterator[str]:
    """The fewest GPUs of the machine on which what is tight here keeps the margin."""
    for larger in _larger_sites(spec, site):
        if best(spec, larger).verdict == "fits":
            yield f"{larger.ranks} GPUs of this machine keep the margin"
            return


def _other_machines(spec: RunSpec, site: Site) -> Iterator[str]:
    whole = other_site(site, max(rank_counts(site.machine)), spec.offload.cpu_adam_cores_fraction)
    if "GH200" in site.gpu_name and min(whole.supply.node_bytes.values(), default=0) < LARGE_GRACE_BYTES / 2:
        yield from _larger_parts(spec, whole)
    counts = range(2, MOST_HOSTS + 1)
    # The more machines share a model, the less each of them holds, so the fewest that do can be found by halving.
    found = bisect_left(counts, True, key=lambda hosts: _holds(spec, whole, hosts * whole.ranks) is not None)
    if found < len(counts):
        ranks = counts[found] * whole.ranks
        yield (
            f"{counts[found]} machines like this one ({ranks} GPUs) would hold it{_holds(spec, whole, ranks)}; "
            "so-tui itself trains on one machine so far"
        )


def _larger_parts(spec: RunSpec, whole: Site) -> Iterator[str]:
    roomy = replace(whole.supply, node_bytes=dict.fromkeys(whole.supply.node_bytes, usable(LARGE_GRACE_BYTES)))
    larger = replace(whole, supply=roomy)
    how = _holds(spec, larger)
    if how is not None:
        needs = max(best(spec, larger).demand.node_bytes.values(), default=0)
        yield f"{whole.ranks} x GH200 with 480 GB of host memory each would hold it{how} ({gib(needs)} needed per node)"


def warnings(spec: RunSpec, site: Site, found: Assessment, *, searched: bool = False) -> Iterator[str]:
    """What costs time or cannot be foreseen, in a plan that may run. ``found.spec`` has its mode decided; ``searched``: as the fastest."""
    offload = found.spec.offload
    if offload.mode == "superoffload" and offload.engine == "deepspeed" and spec.train.gradient_clipping > 0:
        yield _clipping(found, site)
    if offload.mode != "gpu" and site.has_gpu:
        if not searched:
            yield from _ratio(spec, site, found)
        if offload.ratio and site.speed is not None and site.speed.d2h_bytes_per_s < _SLOW_LINK_BYTES_PER_S:
            yield "the GPU hangs off PCIe: offloading gains less than over NVLink-C2C"
    if site.gpu_memory_unknown:
        yield "the GPU's memory size is not known: whether it fits there cannot be said"
    if not site.has_gpu and found.layout.parameters > _SLOW_ON_CPU:
        yield f"{found.layout.parameters / 1e9:.1f} B parameters without a GPU: one step may take hours"
    if not spec.data.packing:
        yield "packing is off: padding is computed but counts for nothing"
    yield from site.machine.notes


def _clipping(found: Assessment, site: Site) -> str:
    text = "gradient_clipping above 0 makes DeepSpeed's SuperOffload wait for the norm: nothing overlaps with backward"
    unclipped = assess(replace(found.spec, train=replace(found.spec.train, gradient_clipping=0.0)), site)
    if found.step and unclipped.step:
        text += f" (about {found.step.total_s - unclipped.step.total_s:.1f} s a step)"
    return f"{text}. offload.engine = so-tui clips exactly"


def _ratio(spec: RunSpec, site: Site, found: Assessment) -> Iterator[str]:
    """A ratio larger than needed keeps work on the CPU that the GPU has room for."""
    smaller = best(found.spec, site)
    if found.verdict == "does not fit" or smaller.verdict != "fits" or not smaller.step or not found.step:
        return
    saved = found.step.total_s - smaller.step.total_s
    if saved > 0.03 * found.step.total_s:
        what = "offload.mode = gpu" if smaller.spec.offload.mode == "gpu" else f"offload.ratio = {smaller.spec.offload.ratio:.2f}"
        yield f"{what} fits too and would take {smaller.step.total_s:.2f} s a step instead of {found.step.total_s:.2f} s"
