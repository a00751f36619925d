"""Which attention backend a run uses, and why not a faster one."""

from typing import get_args

import pytest

from so_tui.spec.attention import (
    FORMER_NAMES,
    KERNELS,
    AttentionBackend,
    Needs,
    Present,
    _PassedOver,
    choose_backend,
    generation_of,
    obstacle_to,
)
from so_tui.spec.run_spec import Attention

ALL = frozenset(kernel.package for kernel in KERNELS if kernel.package)
PLAIN = Needs(head_size=128)


def test_fastest_installed_backend_is_taken() -> None:
    assert choose_backend(PLAIN, Present(generation=9, packages=ALL)).backend == "flash-attn-4"
    assert choose_backend(PLAIN, Present(generation=10, packages=ALL)).backend == "flash-attn-4"
    assert choose_backend(PLAIN, Present(generation=8, packages=ALL)).backend == "flash-attn-2"
    found = choose_backend(PLAIN, Present(generation=9, packages=frozenset({"flash-attn"})))
    assert found.backend == "flash-attn-2"
    assert found.passed_over == (
        _PassedOver("flash-attn-4", "not-installed"),
        _PassedOver("flash-attn-3", "not-installed"),
    )
    assert choose_backend(PLAIN, Present(generation=9)).backend == "torch-flash"
    assert choose_backend(PLAIN, Present(generation=0, packages=ALL)).backend == "torch-flash"


def test_without_a_gpu_attention_takes_a_mask() -> None:
    nothing = Present(generation=None, packages=ALL)
    assert choose_backend(PLAIN, nothing).backend == "sdpa"
    assert choose_backend(Needs(head_size=64, sinks=True, plain=False), nothing).backend == "eager"
    assert choose_backend(Needs(head_size=64, softcap=True), nothing).backend == "eager"
    assert choose_backend(PLAIN, nothing).passed_over == ()


@pytest.mark.parametrize(
    ("needs", "generation", "backend", "obstacle"),
    [
        (Needs(head_size=320), 9, "flash-attn-4", "head-size"),
        (Needs(head_size=100), 9, "flash-attn-2", "head-size"),
        (Needs(head_size=80), 9, "flash-attn-4", "head-size"),
        (Needs(head_size=80), 9, "torch-flash", None),
        (Needs(head_size=256), 10, "flash-attn-4", None),
        (Needs(head_size=128, softcap=True), 9, "torch-flash", "softcap"),
        (Needs(head_size=128, softcap=True), 9, "flash-attn-4", None),
        (Needs(head_size=128, sinks=True), 9, "flash-attn-4", None),
        (Needs(head_size=128, sinks=True), 9, "sdpa", "sinks"),
        (Needs(head_size=128, deterministic=True), 9, "flash-attn-4", None),
        (PLAIN, 8, "flash-attn-3", "other-gpu"),
        (PLAIN, 7, "torch-flash", "other-gpu"),
        (PLAIN, None, "torch-flash", "no-gpu"),
    ],
)
def test_what_a_backend_lacks(
    needs: Needs, generation: int | None, backend: AttentionBackend, obstacle: str | None
) -> None:
    assert obstacle_to(backend, needs, Present(generation=generation, packages=ALL)) == obstacle


def test_models_that_compute_something_else_use_their_own_code() -> None:
    assert (
        choose_backend(
            Needs(head_size=128, plain=False), Present(generation=9, packages=ALL)
        ).backend
        == "eager"
    )
    assert (
        choose_backend(
            Needs(head_size=64, sinks=True, plain=False), Present(generation=9, packages=ALL)
        ).backend
        == "flash-attn-4"
    )


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("NVIDIA GH200 480GB", 9),
        ("NVIDIA H100 80GB HBM3", 9),
        ("NVIDIA H200", 9),
        ("NVIDIA GB200", 10),
        ("NVIDIA A100-SXM4-80GB", 8),
        ("", 0),
    ],
)
def test_gpus_by_name(name: str, generation: int) -> None:
    assert generation_of(name) == generation


def test_every_backend_can_be_asked_for() -> None:
    assert set(get_args(Attention)) == {"auto", *get_args(AttentionBackend), *FORMER_NAMES}
