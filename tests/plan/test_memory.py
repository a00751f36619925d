"""Bytes against published and worked figures, and what must hold for any model."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.model.profile import ModelProfile, StateLayout, profile_of
from so_tui.model.shape import architecture
from so_tui.plan.gpu_memory import memory_terms
from so_tui.plan.placement import Placement
from so_tui.plan.terms import MemoryTerm
from so_tui.spec import RunSpec
from tests.support.planning import CATALOG, H200, QUAD, bytes_of, planned, spec_of

GPU = {"offload__mode": "gpu"}
OURS = {"offload__mode": "superoffload"}
THEIRS = OURS | {"offload__engine": "deepspeed"}


def state_layout(spec: RunSpec, ranks: int) -> StateLayout:
    return profile_of(spec.model).layout(ranks, spec.offload)


def terms_of(spec: RunSpec, ranks: int) -> tuple[MemoryTerm, ...]:
    profile, layout = profile_of(spec.model), state_layout(spec, ranks)
    return memory_terms(
        Placement(spec=spec, profile=profile, layout=layout, has_gpu=True, local_ranks=ranks)
    )


def sizes(spec: RunSpec, ranks: int, location: str) -> dict[str, int]:
    return {term.kind: term.bytes for term in terms_of(spec, ranks) if term.location == location}


def total(terms: tuple[MemoryTerm, ...], location: str) -> int:
    return sum(term.bytes for term in terms if term.location == location)


def exact_host_bytes(terms: tuple[MemoryTerm, ...]) -> int:
    return total(tuple(term for term in terms if term.confidence == "exact"), "node")


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
    size = "800000000" if name == "gpt-oss-20b" else "400000000"
    given = THEIRS | {"offload__ratio": str(ratio), "offload__sub_group_size": size}
    spec = spec_of(name, **given)
    layout = state_layout(spec, ranks)
    # Norms and biases are a group of their own here, which adds one small sub-group.
    assert len(layout.sub_groups) == pytest.approx(sub_groups, abs=1)
    assert len(layout.sub_groups) - len(layout.cpu_groups) == on_gpu
    states = 16 * layout.cpu_numel + 2 * layout.numel + 4 * layout.largest_sub_group
    found = (states, 8 * layout.cpu_numel, 2 * layout.numel)
    assert [size / 1e9 for size in found] == pytest.approx(gb[:3], rel=0.01)
    assert 16 * layout.gpu_numel / 1e9 == pytest.approx(gb[3], rel=0.02)
    assert exact_host_bytes(terms_of(spec, ranks)) == states


def test_states_take_fourteen_bytes_on_the_host_or_sixteen_on_the_gpu() -> None:
    ours, theirs, gpu = (
        spec_of("qwen3-14b", offload__ratio="1", **mode) for mode in (OURS, THEIRS, GPU)
    )
    parameters, host = state_layout(ours, 1).numel, sizes(ours, 1, "node")
    assert host["master-weights"] + host["moments"] + host["staging-buffer"] == 14 * parameters
    assert total(terms_of(theirs, 1), "node") > sum(host.values())
    assert not sizes(ours, 1, "shm")
    on_gpu = sizes(gpu, 1, "gpu")
    kinds = ("weights", "master-weights", "moments", "gradients")
    assert sum(on_gpu[kind] for kind in kinds) == 16 * parameters


@pytest.mark.parametrize("name", list(CATALOG.presets))
def test_more_ranks_take_less_and_keeping_more_takes_more(name: str) -> None:
    spec = spec_of(name, **GPU)
    one, four = (state_layout(spec, ranks) for ranks in (1, 4))
    assert four.numel < one.numel
    tensors = sum(len(sub_group.names) for sub_group in one.sub_groups)
    assert 0 <= 4 * four.numel - one.numel < 4 * tensors
    full, selective, none = (
        total(terms_of(spec_of(name, model__activation_checkpointing=kept, **GPU), 1), "gpu")
        for kept in ("full", "selective", "none")
    )
    assert full < selective < none


@pytest.mark.parametrize(
    ("changes", "each", "copies"),
    [
        ({}, 12, 3),
        ({"export": "false", "every_minutes": "0"}, 12, 1),
        ({"export": "true", "every_steps": "10", "keep": "2"}, 14, 3),
        ({"at_end": "false", "every_minutes": "0"}, 12, 0),
        ({"at_end": "false", "export": "true", "every_minutes": "0"}, 14, 1),
        ({"at_end": "false", "every_minutes": "5", "keep": "2"}, 12, 3),
    ],
)
def test_saving_takes_disk_and_host_memory(changes: dict[str, str], each: int, copies: int) -> None:
    """A checkpoint is twelve bytes per parameter, and an export two."""
    given = {f"checkpoint__{key}": value for key, value in changes.items()} | OURS
    plan = planned("qwen3-14b", QUAD, **{"checkpoint__export": "false"} | given)
    assert plan.disk_bytes == each * 14_768_307_200
    assert plan.disk_peak_bytes == copies * plan.disk_bytes
    assert bool(bytes_of(plan, "saving")) == bool(copies)


def test_newer_torch_rounds_no_pinned_memory() -> None:
    old, new = (
        planned("qwen3-4b-random", machine, gpus="1", offload__mode="zerooffload")
        for version in ("2.12.1", "2.13.0")
        for machine in [replace(H200, software=replace(H200.software, torch=version))]
    )
    assert old.host_bytes_per_node[0] > new.host_bytes_per_node[0]
    layout = state_layout(new.spec, 1)
    assert exact_host_bytes(new.breakdown) == 16 * layout.cpu_numel + 2 * layout.numel


@pytest.mark.parametrize(
    ("preset", "gathered_gb"),
    [("qwen3-4b-random", 2 * (0.4 + 2 * 0.389)), ("llama-3.3-70b", 2 * (0.856 + 3 * 0.856))],
)
def test_what_several_gpus_gather_is_bounded(preset: str, gathered_gb: float) -> None:
    """Whatever the mode: the host's run-ahead and, of small layers, the embedding twice; of large
    ones the next two and a copy.
    """
    spec = spec_of(preset, gpus="4", **OURS)
    for ranks in (2, 4):
        gathered = sizes(spec, ranks, "gpu")["gathered-parameters"]
        assert gathered / 1e9 == pytest.approx(gathered_gb, rel=0.01)


@pytest.mark.parametrize(("name", "width"), [("qwen3-30b-a3b", 8), ("gpt-oss-20b", 14)])
def test_the_rows_of_experts_are_counted_as_torch_holds_them(name: str, width: int) -> None:
    """Per token, k experts of width f, hidden h: what torch's memory profiler found of
    transformers' grouped path, forward and backward, and of the trainer's forward.
    """
    shape = architecture(CATALOG.presets[name].spec.model.config)
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
    if name == "qwen3-30b-a3b":
        # Gate and up, and 16 B for its place with each; only the trainer's own path can keep them.
        without, kept = (profile.stored_bytes("selective") for profile in profiles)
        assert kept - without == 2 * 2 * 8 * 768 + 16 * 8


def test_deepspeeds_ranks_have_workers_with_contexts() -> None:
    spec = spec_of("qwen3-4b-random", **THEIRS)
    one, four = (
        sum(term.bytes for term in terms_of(spec, ranks) if term.kind == "worker-context")
        for ranks in (1, 4)
    )
    assert four == 4 * one > 0
