"""Which attention backend a run uses, and why not a faster one."""

from typing import get_args

import pytest

from so_tui.spec.attention import (
    FORMER_NAMES,
    KERNELS,
    AttentionBackend,
    Needs,
    Present,
    choose_backend,
    generation_of,
    obstacle_to,
)
from so_tui.spec.run_spec import Attention

ALL = frozenset(kernel.package for kernel in KERNELS if kernel.package)
PLAIN = Needs(head_size=128)
OWN_CODE = Needs(head_size=128, plain=False)
SINKS = Needs(head_size=64, sinks=True, plain=False)


@pytest.mark.parametrize(
    ("needs", "generation", "packages", "backend"),
    [
        (PLAIN, 9, ALL, "flash-attn-4"),
        (PLAIN, 8, ALL, "flash-attn-2"),
        (PLAIN, 9, {"flash-attn"}, "flash-attn-2"),
        (PLAIN, 0, ALL, "torch-flash"),
        # Without a GPU attention takes a mask.
        (PLAIN, None, ALL, "sdpa"),
        (SINKS, None, ALL, "eager"),
        # Models that compute something else use their own code.
        (OWN_CODE, 9, ALL, "eager"),
        (SINKS, 9, ALL, "flash-attn-4"),
    ],
)
def test_fastest_backend_that_can_is_taken(
    needs: Needs, generation: int | None, packages: frozenset[str], backend: AttentionBackend
) -> None:
    present = Present(generation=generation, packages=frozenset(packages))
    found = choose_backend(needs, present)
    assert found.backend == backend
    if packages == {"flash-attn"}:
        absent: tuple[AttentionBackend, ...] = ("flash-attn-4", "flash-attn-3")
        assert found.passed_over == tuple((name, "not-installed") for name in absent)
    assert generation is not None or found.passed_over == ()


@pytest.mark.parametrize(
    ("needs", "generation", "backend", "obstacle"),
    [
        (Needs(head_size=80), 9, "flash-attn-4", "head-size"),
        (Needs(head_size=80), 9, "torch-flash", None),
        (Needs(head_size=256), 10, "flash-attn-4", None),
        (Needs(head_size=128, softcap=True), 9, "torch-flash", "softcap"),
        (Needs(head_size=128, sinks=True), 9, "flash-attn-4", None),
        (Needs(head_size=128, sinks=True), 9, "sdpa", "sinks"),
        (PLAIN, 8, "flash-attn-3", "other-gpu"),
        (PLAIN, None, "torch-flash", "no-gpu"),
    ],
)
def test_what_a_backend_lacks(
    needs: Needs, generation: int | None, backend: AttentionBackend, obstacle: str | None
) -> None:
    assert obstacle_to(backend, needs, Present(generation=generation, packages=ALL)) == obstacle


def test_gpus_by_name() -> None:
    names = ("GH200 480GB", "H100 80GB HBM3", "H200", "GB200", "A100-SXM4-80GB")
    assert [generation_of(f"NVIDIA {name}") for name in names] == [9, 9, 9, 10, 8]
    assert generation_of("") == 0


def test_every_backend_can_be_asked_for() -> None:
    assert set(get_args(Attention)) == {"auto", *get_args(AttentionBackend), *FORMER_NAMES}
