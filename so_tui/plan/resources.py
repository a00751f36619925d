"""The part of a machine that a run would use: GPUs, CPU nodes, memory, cores, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec import Struct

from so_tui.machine.host import distance
from so_tui.machine.types import Gpu, Machine, Network, Nodes, version_numbers
from so_tui.model.profile import SINKS, ModelProfile, profile_of
from so_tui.model.shape import Architecture
from so_tui.plan.binding import Gpus, bind_ranks, chosen_gpus, physical_cores, whole_gpus
from so_tui.plan.measured import Calibration, calibration_of, speed_of
from so_tui.plan.notes import (
    Blocker,
    NoSuchGpu,
    NotBindable,
    SequencesNotShareable,
    TooFewCores,
    TooFewGpus,
)
from so_tui.plan.plan import Binding
from so_tui.plan.rates import Speed, assumed_network
from so_tui.spec.attention import (
    FORMER_NAMES,
    MASKED_BACKENDS,
    Chosen,
    Needs,
    Present,
    choose_backend,
    generation_of,
)
from so_tui.spec.check import sharing_problem
from so_tui.spec.errors import InputError
from so_tui.spec.model_table import layer_kinds, mixing_kinds
from so_tui.spec.run_spec import RunSpec

UNROUNDED_PINNING = (2, 13)
"""The first torch that can be configured not to round pinned memory, which the launcher does."""

_RESERVE_SHARE = 0.03
_RESERVE_BYTES = 1_000_000_000


class Supply(Struct, frozen=True):
    """Memory that a run may use, in bytes."""

    gpu_bytes: int | None
    """Of each GPU; None where there is none, or its size is not known."""
    node_bytes: dict[int, int]
    """Of each CPU node that the process may allocate on."""
    shm_bytes: int | None
    limit_bytes: int | None
    """For all ranks together, where a cgroup sets a limit."""
    one_memory: bool = False
    """Whether the memory of the CPU nodes is that of the GPUs too (APUs). ``gpu_bytes`` is None
    then: the nodes have all there is.
    """


@dataclass(frozen=True, kw_only=True)
class Resources:
    machine: Machine
    ranks: int
    has_gpu: bool
    """Whether the machine has GPUs at all; without them ranks run on the CPU."""
    gpu_name: str
    supply: Supply
    nodes: tuple[int, ...]
    """The CPU node on which each rank allocates memory; empty when there is a problem."""
    cores: int
    """Cores of the smallest rank."""
    adam_cores: int
    """Of these, those that run CPU Adam beside the training process."""
    network: Network
    """That of the machine, or an assumed one."""
    speed: Speed | None
    calibration: Calibration | None
    """What was measured of the machine."""
    pinned_rounded: bool
    """Whether torch rounds pinned memory up to powers of two; assumed where its version is not
    known.
    """
    bound: Binding
    """Bindings of the ranks, with cores for an Adam worker."""
    problem: Blocker | None
    """Why the ranks cannot run on this machine."""

    @property
    def gpu_memory_unknown(self) -> bool:
        """Whether no plan can be said to fit."""
        return self.has_gpu and self.supply.gpu_bytes is None and not self.supply.one_memory

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share the fullest node."""
        return max((self.nodes.count(node) for node in set(self.nodes)), default=1)

    def bindings(self, mode: str) -> Binding:
        """Return the bindings of the ranks in an offload mode; empty when there is a problem."""
        if mode == "superoffload":
            return self.bound
        return tuple(rank.without_worker() for rank in self.bound)


def rank_counts(machine: Machine) -> tuple[int, ...]:
    """Return the GPU counts worth planning for: 1, 2, 4, ... and all of them; ranks on a machine
    without GPUs.
    """
    most = len(whole_gpus(machine)) or (1 if machine.gpus else min(2, physical_cores(machine)))
    doubled = tuple(2**power for power in range(most.bit_length()))
    return doubled if doubled[-1] == most else (*doubled, most)


def resources_of(machine: Machine, gpus: Gpus, cpu_adam_cores_fraction: float) -> Resources:
    """Return what a run on these GPUs may use (a count or indices; ranks where the machine has
    none).

    Rates are those calibrated on the machine or one of its kind, else published ones. ``problem``
    says why ranks cannot run.
    """
    known = calibration_of(machine) if machine.gpus else None
    return calibrated_resources(machine, gpus, cpu_adam_cores_fraction, known)


@lru_cache(maxsize=256)
def calibrated_resources(
    machine: Machine, gpus: Gpus, cpu_adam_cores_fraction: float, calibration: Calibration | None
) -> Resources:
    """Return ``resources_of`` a machine of which this was measured."""
    # A table plans every model on the same few GPU counts, and binding ranks to cores is most of a
    # plan's time.
    problem, bound = _bound(machine, gpus, cpu_adam_cores_fraction)
    chosen = chosen_gpus(machine, gpus)
    name = chosen[0].name if chosen else ""
    fallback = machine.cpu_nodes[0].id if machine.cpu_nodes else 0
    return Resources(
        machine=machine,
        ranks=gpus if isinstance(gpus, int) else len(gpus),
        has_gpu=bool(machine.gpus),
        gpu_name=name,
        supply=_supply_of(machine, chosen),
        nodes=tuple(
            _memory_node(machine, rank.numa_node if rank.numa_node is not None else fallback)
            for rank in bound
        ),
        cores=min((len(rank.cpus) for rank in bound), default=1) or 1,
        adam_cores=min((len(rank.adam_cpus) for rank in bound), default=1) or 1,
        network=machine.network or assumed_network(len(machine.gpus)),
        speed=speed_of(machine, name, calibration),
        calibration=calibration,
        pinned_rounded=bool(machine.gpus)
        and version_numbers(machine.software.torch) < UNROUNDED_PINNING,
        bound=bound,
        problem=problem,
    )


def _bound(
    machine: Machine, gpus: Gpus, cpu_adam_cores_fraction: float
) -> tuple[Blocker | None, Binding]:
    whole = tuple(gpu.index for gpu in whole_gpus(machine))
    split, name = tuple(gpu.index for gpu in machine.gpus if gpu.mig), machine.label
    if machine.gpus and isinstance(gpus, int) and gpus > len(whole):
        return TooFewGpus(machine=name, asked=gpus, present=len(whole), split=split), ()
    asked = () if isinstance(gpus, int) else gpus
    missing = [index for index in asked if index not in whole]
    if machine.gpus and missing:
        first = missing[0]
        return NoSuchGpu(machine=name, asked=asked, missing=first, present=whole, split=split), ()
    ranks = gpus if isinstance(gpus, int) else len(gpus)
    if not machine.gpus and 0 < (cores := physical_cores(machine)) < ranks:
        return TooFewCores(machine=name, asked=ranks, cores=cores), ()
    try:
        return None, bind_ranks(machine, gpus, cpu_adam_cores_fraction=cpu_adam_cores_fraction)
    except InputError as error:
        return NotBindable(problems=error.problems), ()


def _supply_of(machine: Machine, gpus: Sequence[Gpu]) -> Supply:
    """Return the memory of these GPUs and of the CPU nodes, less what the operating system needs:
    totals, not what is free now.
    """
    sizes = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes is not None]
    one_memory = any(gpu.shares_memory for gpu in gpus)
    return Supply(
        gpu_bytes=None if one_memory else min(sizes, default=None),
        node_bytes={
            node.id: usable_bytes(node.memory_total_bytes) for node in _memory_nodes(machine)
        },
        shm_bytes=machine.shm_total_bytes,
        limit_bytes=machine.memory_limit_bytes,
        one_memory=one_memory,
    )


def _memory_nodes(machine: Machine) -> Nodes:
    """Return the CPU nodes on which a run may allocate. The cpuset of a job on a part of a node may
    leave some out.
    """
    allowed = machine.allowed_memory_nodes
    mine = tuple(node for node in machine.cpu_nodes if allowed is None or node.id in allowed)
    return mine or machine.cpu_nodes


def _memory_node(machine: Machine, node_id: int) -> int:
    """Return where the kernel allocates for a rank on this node's cores: there, else on the nearest
    node that is allowed.
    """
    nodes = _memory_nodes(machine)
    if not nodes or any(node.id == node_id for node in nodes):
        return node_id
    home = machine.node(node_id)
    far = max(home.distances, default=0) + 1
    return min(
        nodes, key=lambda node: (distance(machine.numa_nodes, home, node.id) or far, node.id)
    ).id


def usable_bytes(total: int) -> int:
    """Return how much of a node's memory a run may use: the operating system and its page tables
    need the rest.
    """
    return max(0, total - max(_RESERVE_BYTES, int(_RESERVE_SHARE * total)))


# Which attention backend a planned run uses.


def attention_of(spec: RunSpec, profile: ModelProfile, resources: Resources) -> Chosen:
    """Return the backend of a run: the one that was asked for, else the fastest that its GPUs and
    installed packages allow.
    """
    asked = FORMER_NAMES.get(spec.model.attention) or spec.model.attention
    if asked != "auto":
        return Chosen(asked)  # type: ignore[arg-type]
    shape, config = profile.architecture, spec.model.config
    needs = Needs(
        head_size=shape.head_dim,
        sinks=shape.model_type in SINKS,
        softcap=bool(config.get("attn_logit_softcapping")),
        rows=bool(mixing_kinds(layer_kinds(config))),
    )
    present = Present(
        generation=generation_of(resources.gpu_name) if resources.has_gpu else None,
        packages=resources.machine.software.attention_packages,
    )
    return choose_backend(needs, present)


# A config of DeepSpeed's SuperOffload examples without a clipping key, as DeepSpeed reads it.


_CLIPS_BY_DEFAULT = (0, 19, 8)
"""The DeepSpeed version since which a missing ``gradient_clipping`` means 1.0; before, it
meant 0.
"""


def as_read(spec: RunSpec, machine: Machine) -> RunSpec:
    """Return the spec as DeepSpeed reads its config: with its defaults where the clipping key is
    left out, or for ZeRO-Offload the ratio.

    Args:
        spec: What to run.
        machine: Where; without DeepSpeed there, the newest that is supported counts.
    """
    if spec.offload.config != "so-tui" and spec.offload.mode == "zerooffload":
        spec = spec.changed("offload", ratio=1.0)
    if spec.offload.config != "published":
        return spec
    found = machine.software.deepspeed
    clipping = 0.0 if found and version_numbers(found) < _CLIPS_BY_DEFAULT else 1.0
    return spec.changed("train", gradient_clipping=clipping)


# Sequence parallelism in plans: who can share sequences, what travels between the ranks that do,
# and what more sharing would be.


def not_shareable(spec: RunSpec, resources: Resources) -> SequencesNotShareable | None:
    """Return why the ranks of a spec cannot share sequences as it asks; None if they can, or it
    does not ask.
    """
    ranks = spec.train.sequence_parallel
    if ranks == 1:
        return None
    profile = profile_of(spec.model)
    shape, backend = profile.architecture, attention_of(spec, profile, resources).backend
    if backend not in MASKED_BACKENDS and _divides_heads(ranks, shape):
        return None
    return SequencesNotShareable(
        ranks=ranks, backend=backend, heads=shape.heads, key_heads=shape.kv_heads
    )


def more_sharing(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield the spec with more ranks for each sequence, and the same sequences in a step."""
    train, shape, hosts = spec.train, profile_of(spec.model).architecture, spec.ranks_per_host
    ranks = 2 * train.sequence_parallel
    if train.router_loss_coefficient or sharing_problem(layer_kinds(spec.model.config), ranks):
        return
    while ranks <= hosts:
        divides = not (hosts % ranks or spec.data.sequence_length % ranks)
        if divides and _divides_heads(ranks, shape):
            # With a target of tokens, accumulation follows from it.
            times = 1 if train.tokens_per_step else ranks // train.sequence_parallel
            accumulation = times * train.gradient_accumulation
            yield spec.changed("train", sequence_parallel=ranks, gradient_accumulation=accumulation)
        ranks *= 2


def exchanged_bytes(shape: Architecture, ranks: int) -> float:
    """Return what a rank sends, and receives, for one token of its part in one layer's forward
    pass: queries, keys, values and results.
    """
    copies = max(1, ranks // shape.kv_heads)
    return 4.0 * (shape.query_width + copies * shape.key_value_width) * (ranks - 1) / ranks


def _divides_heads(ranks: int, shape: Architecture) -> bool:
    return shape.heads % ranks == 0 and (shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0)
