"""Bytes against published and worked figures, and what must hold for any model."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.model.profile import (
    ModelProfile,
    profile_of,
)
from so_tui.model.shape import Parameter, StateLayout, architecture
from so_tui.plan.gpu_memory import _all_terms, _phase_bytes, memory_terms
from so_tui.plan.host_memory import _gradient_blocks, _GradientBlocks
from so_tui.plan.placement import Placement
from so_tui.plan.planner import make_plan
from so_tui.plan.terms import MemoryTerm, TermKind
from so_tui.spec import RunSpec, load_catalog, with_values
from tests.support.layouts import layout_of
from tests.support.machines import superchips, x86

PRESETS = load_catalog().presets


def spec_of(name: str, **offload: object) -> RunSpec:
    spec = PRESETS[name].spec
    return replace(spec, offload=replace(spec.offload, **offload))


def state_layout(spec: RunSpec, ranks: int) -> StateLayout:
    return profile_of(spec.model).layout(ranks, spec.offload)


def placed(spec: RunSpec, ranks: int, *, has_gpu: bool = True) -> Placement:
    profile, layout = profile_of(spec.model), state_layout(spec, ranks)
    return Placement(spec=spec, profile=profile, layout=layout, has_gpu=has_gpu, local_ranks=ranks)


def terms_of(spec: RunSpec, ranks: int, *, has_gpu: bool = True) -> tuple[MemoryTerm, ...]:
    return memory_terms(placed(spec, ranks, has_gpu=has_gpu))


def only(terms: tuple[MemoryTerm, ...], kind: TermKind) -> MemoryTerm:
    (term,) = (term for term in terms if term.kind == kind)
    return term


def total(terms: tuple[MemoryTerm, ...], location: str) -> int:
    return sum(term.bytes for term in terms if term.location == location)


@pytest.mark.parametrize(
    ("name", "ranks", "ratio", "sub_groups", "on_gpu", "gb"),
    [  # GB of the host, of shared memory, of weights, of the GPU's states
        ("llama-3.1-8b", 1, 0.8, 18, 3, (124, 53, 16.1, 22.4)),
        ("qwen3-14b", 1, 0.9, 32, 3, (242, 105, 29.5, 26.9)),
        ("gpt-oss-20b", 1, 0.9, 25, 2, (350, 152, 41.8, 31.4)),
        ("qwen3-30b-a3b", 2, 0.9, 33, 3, (254, 111, 30.5, 22.4)),
    ],
)
def test_states_under_deepspeed_are_what_its_own_partition_gives(
    name: str, ranks: int, ratio: float, sub_groups: int, on_gpu: int, gb: tuple[float, ...]
) -> None:
    """Figures worked out from parameter lists built on meta tensors, in one parameter group."""
    size = 800_000_000 if name == "gpt-oss-20b" else 400_000_000
    spec = spec_of(name, mode="superoffload", engine="deepspeed", ratio=ratio, sub_group_size=size)
    layout = state_layout(spec, ranks)
    # Norms and biases are a group of their own here, which adds one small sub-group.
    assert len(layout.sub_groups) == pytest.approx(sub_groups, abs=1)
    assert len(layout.sub_groups) - len(layout.cpu_groups) == on_gpu
    states = 16 * layout.cpu_numel + 2 * layout.numel + 4 * layout.largest_sub_group
    found = (states, 8 * layout.cpu_numel, 2 * layout.numel)
    assert [size / 1e9 for size in found] == pytest.approx(gb[:3], rel=0.01)
    assert 16 * layout.gpu_numel / 1e9 == pytest.approx(gb[3], rel=0.02)
    assert exact_host_bytes(terms_of(spec, ranks)) == states


def exact_host_bytes(terms: tuple[MemoryTerm, ...]) -> int:
    return sum(
        term.bytes for term in terms if term.location == "node" and term.confidence == "exact"
    )


def test_our_engine_needs_fourteen_bytes() -> None:
    ours = spec_of("qwen3-14b", mode="superoffload", ratio=1.0)
    theirs = spec_of("qwen3-14b", mode="superoffload", ratio=1.0, engine="deepspeed")
    parameters = state_layout(ours, 1).numel
    sizes = {term.kind: term.bytes for term in terms_of(ours, 1) if term.location == "node"}
    assert sizes["master-weights"] + sizes["moments"] + sizes["staging-buffer"] == 14 * parameters
    assert total(terms_of(theirs, 1), "node") > total(terms_of(ours, 1), "node")
    assert total(terms_of(ours, 1), "shm") == 0


def test_the_gpu_mode_holds_sixteen_bytes_a_parameter_on_the_gpu() -> None:
    spec = spec_of("llama-3.1-8b", mode="gpu")
    sizes = {term.kind: term.bytes for term in terms_of(spec, 1) if term.location == "gpu"}
    kinds: tuple[TermKind, ...] = ("weights", "master-weights", "moments", "gradients")
    assert sum(sizes[kind] for kind in kinds) == 16 * state_layout(spec, 1).numel


@pytest.mark.parametrize("engine", ["so-tui", "deepspeed"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_more_ratio_moves_bytes_from_the_gpu_to_the_host(engine: str, ranks: int) -> None:
    plans = [
        terms_of(
            spec_of("qwen3-30b-a3b", mode="superoffload", engine=engine, ratio=step / 10), ranks
        )
        for step in range(1, 11)
    ]
    on_gpu = [total(terms, "gpu") for terms in plans]
    on_host = [total(terms, "node") for terms in plans]
    assert on_gpu == sorted(on_gpu, reverse=True)
    assert on_host == sorted(on_host)
    assert on_gpu[0] > on_gpu[-1]


@pytest.mark.parametrize("name", list(PRESETS))
def test_more_ranks_never_need_more_of_each(name: str) -> None:
    one, four = (state_layout(spec_of(name, mode="gpu"), ranks) for ranks in (1, 4))
    assert four.numel < one.numel
    tensors = sum(len(sub_group.names) for sub_group in one.sub_groups)
    assert 0 <= 4 * four.numel - one.numel < 4 * tensors


def test_larger_batches_need_more_activations_only() -> None:
    small, large = (
        terms_of(with_values(spec_of("phi-4", mode="gpu"), {"train.micro_batch": size}), 1)
        for size in ("1", "8")
    )
    assert total(large, "gpu") > total(small, "gpu")
    exact = [
        [term.bytes for term in terms if term.kind in ("weights", "master-weights", "moments")]
        for terms in (small, large)
    ]
    assert exact[0] == exact[1]


def test_without_a_gpu_everything_is_on_the_host() -> None:
    spec = spec_of("tiny", mode="superoffload")
    assert total(terms_of(spec, 2, has_gpu=False), "gpu") == 0
    assert total(terms_of(spec, 2, has_gpu=False), "node") < total(
        terms_of(spec, 2), "node"
    ) + total(terms_of(spec, 2), "gpu")


def test_checkpoint_is_twelve_bytes_and_export_two() -> None:
    """A parameter."""
    once = {"checkpoint.export": "false", "checkpoint.every_steps": "0"}
    kept = {"checkpoint.export": "true", "checkpoint.every_steps": "10", "checkpoint.keep": "2"}
    for changes, each, copies in ((once, 12, 1), (kept, 14, 3)):
        plan = make_plan(with_values(spec_of("qwen3-14b", mode="gpu"), changes), superchips(4))
        assert plan.disk_bytes == each * 14_768_307_200
        assert plan.disk_peak_bytes == copies * plan.disk_bytes


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({"checkpoint.at_end": "false"}, 0),
        ({"checkpoint.at_end": "false", "checkpoint.export": "true"}, 1),
        (
            {"checkpoint.at_end": "false", "checkpoint.every_minutes": "5", "checkpoint.keep": "2"},
            3,
        ),
    ],
)
def test_saving_takes_disk_and_host_memory(changes: dict[str, str], copies: int) -> None:
    plan = make_plan(
        with_values(spec_of("qwen3-14b", mode="superoffload", ratio=0.5), changes), superchips(4)
    )
    assert plan.disk_peak_bytes == copies * plan.disk_bytes
    assert any(term.kind == "saving" for term in plan.breakdown) == bool(copies)


MEASURED = {
    "gpus": "1",
    "model.activation_checkpointing": "full",
    "model.kernels": "plain",
    "offload.ratio": "0.9",
    "offload.sub_group_size": "400000000",
    "offload.speculation": "off",
}


@pytest.mark.parametrize(("mode", "host_gb"), [("superoffload", 52.8), ("zerooffload", 73.5)])
def test_measured_host_memory_is_met(mode: str, host_gb: float) -> None:
    """Qwen3 4B shape, 4 x 4096 tokens on an H200, torch 2.11: the memory of the process tree. What
    GPUs hold: ``test_fit``.
    """
    spec = with_values(PRESETS["qwen3-4b-random"].spec, MEASURED | {"offload.mode": mode})
    host = x86("NVIDIA H200")
    plan = make_plan(spec, replace(host, software=replace(host.software, torch="2.11.0")))
    assert plan.host_bytes_per_node[0] / 1e9 == pytest.approx(host_gb, rel=0.02)


def test_norm_of_deepspeeds_optimizer_takes_a_chunk() -> None:
    """On one H200 torch's memory history shows 2.79 GB on the stream of the reductions: 2 B x 400
    M, and 8 B x 250 M.
    """
    spec = with_values(PRESETS["qwen3-4b-random"].spec, MEASURED | {"offload.mode": "zerooffload"})
    reduced = only(terms_of(spec, 1), "buckets-in-reduction")
    assert reduced.bytes / 1e9 == pytest.approx(2.79, abs=0.03)
    halved = only(terms_of(spec, 2), "buckets-in-reduction")
    assert halved.bytes == 2 * 400_000_000 + 8 * 151_936 * 2560 // 2


def test_newer_torch_rounds_no_pinned_memory() -> None:
    spec = with_values(PRESETS["qwen3-4b-random"].spec, MEASURED | {"offload.mode": "zerooffload"})
    host = x86("NVIDIA H200")
    old, new = (
        make_plan(spec, replace(host, software=replace(host.software, torch=version)))
        for version in ("2.12.1", "2.13.0")
    )
    assert old.host_bytes_per_node[0] > new.host_bytes_per_node[0]
    layout = state_layout(new.spec, 1)
    assert exact_host_bytes(new.breakdown) == 16 * layout.cpu_numel + 2 * layout.numel


@pytest.mark.parametrize(
    ("preset", "gathered_gb"),
    [
        ("qwen3-4b-random", 2 * (0.4 + 2 * 0.389)),
        ("llama-3.3-70b", 2 * (0.856 + 3 * 0.856)),
    ],
)
def test_what_several_gpus_gather_is_bounded(preset: str, gathered_gb: float) -> None:
    """Whatever the mode: the host's run-ahead and, of small layers, the embedding twice; of large
    ones the next two and a copy.
    """
    spec = with_values(PRESETS[preset].spec, {"offload.mode": "superoffload", "gpus": "4"})
    for ranks in (2, 4):
        gathered = only(terms_of(spec, ranks), "gathered-parameters")
        assert gathered.bytes / 1e9 == pytest.approx(gathered_gb, rel=0.01)


def test_only_the_fullest_phase_counts() -> None:
    spec = spec_of("qwen3-14b", mode="superoffload", ratio=0.9)
    peaks = _phase_bytes(_all_terms(placed(spec, 1)), "gpu")
    assert total(terms_of(spec, 1), "gpu") == max(peaks.values())
    assert set(peaks) == {"loss", "backward", "optimizer"}


@pytest.mark.parametrize("name", list(PRESETS))
def test_keeping_more_takes_more(name: str) -> None:
    specs = [
        with_values(spec_of(name, mode="gpu"), {"model.activation_checkpointing": kept})
        for kept in ("full", "selective", "none")
    ]
    full, selective, none = (total(terms_of(spec, 1), "gpu") for spec in specs)
    assert full < selective < none


def test_what_is_kept_of_experts_is_what_a_token_meets_of_them() -> None:
    """Gate and up, and 16 B for its place with each; only the trainer's own path can keep them."""
    shape = architecture(PRESETS["qwen3-30b-a3b"].spec.model.config)
    fused, plain = (
        ModelProfile((), shape, fused, False).stored_bytes("selective") for fused in (True, False)
    )
    assert fused - plain == 2 * 2 * 8 * 768 + 16 * 8


@pytest.mark.parametrize(("name", "width"), [("qwen3-30b-a3b", 8), ("gpt-oss-20b", 14)])
def test_the_rows_of_experts_are_counted_as_torch_holds_them(name: str, width: int) -> None:
    """Per token, k experts of width f, hidden h: what torch's memory profiler found of
    transformers' grouped path, forward and backward, and of the trainer's forward.
    """
    shape = architecture(PRESETS[name].spec.model.config)
    rows, f = shape.experts_per_token * shape.hidden, shape.active_intermediate
    router = 8 * shape.experts
    profiles = [ModelProfile((), shape, fused, False) for fused in (False, True)]
    plain, fused = (profile._expert_stored_bytes for profile in profiles)
    plain_peak, fused_peak = (profile._expert_peak_bytes for profile in profiles)
    assert plain == 4 * rows + width * f + router
    assert plain_peak == plain + 6 * rows
    assert fused == 2 * rows + 6 * f + router
    assert fused < fused_peak < plain_peak
    # Backward of a layer holds what the layer keeps, and more.
    assert profiles[1].block_bytes > profiles[1].stored_bytes("none")


GRADIENTS = 1_000_000
"""Of a sub-group: 4 MB, which is no power of two."""


def blocks_of(
    numels: list[int], on_gpu: int, partition: int, *, rounded: bool = True
) -> _GradientBlocks:
    parameters = [Parameter(f"{index}", numel, True) for index, numel in enumerate(numels)]
    layout = layout_of(parameters, 1, GRADIENTS, 1.0)
    groups = tuple(
        replace(group, device="gpu" if group.index < on_gpu else "cpu")
        for group in layout.sub_groups
    )
    return _gradient_blocks(replace(layout, sub_groups=groups), partition, rounded)


def beside_mb(numels: list[int], on_gpu: int, partition: int, *, rounded: bool = True) -> float:
    return blocks_of(numels, on_gpu, partition, rounded=rounded).allocating / 1e6


def test_making_deepspeeds_gradients_takes_two_buffers() -> None:
    """In MB: sub-groups of 4, in pinned blocks of 4.19."""
    assert beside_mb([GRADIENTS], 0, 2_000_000, rounded=False) == pytest.approx(
        4 + 4 - 2
    )  # the partition is not there yet
    assert beside_mb([GRADIENTS] * 9, 0, 18_000_000, rounded=False) == pytest.approx(18)
    assert beside_mb([GRADIENTS], 0, 2_000_000) == pytest.approx(4 + 4 - 2**21 / 1e6)
    # What goes on to the GPU leaves its block to the next of its size, the partition at last.
    assert beside_mb([GRADIENTS] * 2, 2, 4_000_000) == pytest.approx(4 + 4)
    assert beside_mb([GRADIENTS, GRADIENTS, GRADIENTS // 4], 2, 4_000_000) == pytest.approx(
        4 + 4 - 2**20 / 1e6
    )


def test_a_block_stays_pinned_where_no_other_of_its_size_follows() -> None:
    """Seen on an H200: 1.7 billion parameters, `zerooffload` 0.3, 2.15 GB more of the host while
    training than without that block.
    """
    assert blocks_of([GRADIENTS, GRADIENTS // 4], 1, 2_000_000).unused == 2**22
    assert blocks_of([GRADIENTS, GRADIENTS], 1, 2_000_000).unused == 0
    assert blocks_of([GRADIENTS, GRADIENTS // 4], 1, 2_000_000, rounded=False).unused == 0, (
        "not known of newer torch"
    )


def test_deepspeeds_ranks_have_workers_with_contexts() -> None:
    spec = spec_of("qwen3-4b-random", mode="superoffload", engine="deepspeed")
    sizes = [only(terms_of(spec, ranks), "worker-context").bytes for ranks in (1, 4)]
    assert sizes[1] == 4 * sizes[0] > 0


def test_weights_pass_through_the_host_unless_hidden() -> None:
    spec = with_values(PRESETS["llama-3.1-8b"].spec, {"offload.mode": "gpu", "gpus": "4"})
    plan = make_plan(spec, superchips(4))
    assert len({plan.host_bytes_per_node[node] for node in (1, 2, 3)}) == 1
    loading = only(plan.breakdown, "loading")
    assert loading.bytes == pytest.approx(2 * state_layout(plan.spec, 4).numel, rel=0.05)
    offloaded = make_plan(with_values(spec, {"offload.mode": "superoffload"}), superchips(4))
    assert all(term.kind != "loading" for term in offloaded.breakdown)


def test_terms_add_up_to_the_plan() -> None:
    spec = with_values(PRESETS["qwen3-14b"].spec, {"gpus": "2", "offload.ratio": "0.6"})
    plan = make_plan(spec, superchips(4))
    assert total(plan.breakdown, "gpu") == plan.gpu_bytes
    every_rank = tuple(term for term in plan.breakdown if term.rank is None)
    assert total(every_rank, "node") == plan.host_bytes_per_node[1]
