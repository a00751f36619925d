"""``[offload]``: where optimizer states live, and what steps them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from so_tui.spec.sections.section import Section

StatesFormat = Literal["fp32", "bf16-moments", "int8-moments"]
OffloadMode = Literal["auto", "superoffload", "zerooffload", "gpu"]
Mode = Literal["superoffload", "zerooffload", "gpu"]
"""Offload modes once ``auto`` is decided."""


class OffloadSpec(Section, frozen=True):
    mode: Annotated[
        OffloadMode,
        Meta(
            description="Where the optimizer runs: on the CPU (`superoffload`, `zerooffload`) or on the GPU (`gpu`); "
            "`auto` lets the planner choose."
        ),
    ] = "auto"
    engine: Annotated[
        Literal["so-tui", "deepspeed"],
        Meta(description="Implementation of SuperOffload in `superoffload` mode."),
    ] = "so-tui"
    config: Annotated[
        Literal["so-tui", "published", "published-clipping"],
        Meta(
            description='DeepSpeed config of `engine = "deepspeed"`: ours, or exactly the block that DeepSpeed\'s SuperOffload examples '
            "publish: without a clipping key, so that DeepSpeed's default applies, or with `train.gradient_clipping`."
        ),
    ] = "so-tui"
    ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the optimizer states in host memory, in both offload modes.",
        ),
    ] = 0.9
    cpu_adam_cores_fraction: Annotated[
        float,
        Meta(
            gt=0,
            lt=1,
            description="Share of each rank's cores for CPU Adam; the training process uses the rest.",
        ),
    ] = 0.9
    sub_group_size: Annotated[
        int,
        Meta(
            ge=1_000,
            description="Minimum number of a rank's parameters whose optimizer states are stepped together: the smaller, the less is left "
            "to step when backward is over.",
            extra={"unit": "parameters"},
        ),
    ] = 100_000_000
    states: Annotated[
        StatesFormat,
        Meta(
            description="Adam's moments in host memory, with our engine. `bf16-moments` and `int8-moments` take 4 and 6 bytes less per "
            "parameter than `fp32`; they are rounded stochastically, so losses differ slightly."
        ),
    ] = "fp32"
    speculation: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="With gradient clipping: step sub-groups before the gradient norm is known, and again if it exceeds the limit. "
            "Results are the same. It takes as much host memory as the states; `auto` uses what the run leaves, where that makes steps "
            "faster."
        ),
    ] = "auto"
    speculation_gib: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Most host memory per rank for `speculation`; 0 sets no limit.",
            extra={"unit": "GiB"},
        ),
    ] = 0.0
    parameters: Annotated[
        Literal["auto", "none", "cpu"],
        Meta(
            description="`cpu` keeps the bf16 weights whose optimizer states are in host memory there, too, and copies each layer to the "
            "GPU when it is needed. Results are the same. `auto` does so where the run would not fit on the GPU otherwise."
        ),
    ] = "auto"
