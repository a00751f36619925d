"""``[train]``: batches, length and optimizer of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from so_tui.spec.sections.section import Section

Schedule = Literal["cosine", "linear", "constant", "wsd"]
LogLevel = Literal["debug", "info", "warning", "error"]


class TrainSpec(Section, frozen=True):
    micro_batch: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Sequences per rank in one forward and backward pass.",
            extra={"unit": "sequences"},
        ),
    ] = 4
    gradient_accumulation: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Micro-batches per optimizer step; alternatively set `tokens_per_step`.",
            extra={"unit": "micro-batches"},
        ),
    ] = 1
    tokens_per_step: Annotated[
        int,
        Meta(
            ge=0,
            le=10**12,
            description="Sequence positions per optimizer step on all ranks, from which the nearest number of gradient accumulation steps "
            "follows; 0 uses `gradient_accumulation`.",
            extra={"unit": "tokens"},
        ),
    ] = 0
    sequence_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="Ranks of a host that share each sequence: every one computes a part of the tokens, and in attention a part of the "
            "heads.",
            extra={"unit": "ranks"},
        ),
    ] = 1
    steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Length of the run; set one of `steps`, `epochs` and `tokens`.",
            extra={"unit": "optimizer steps"},
        ),
    ] = 0
    epochs: Annotated[
        float,
        Meta(
            ge=0, description="Length of the run in passes over the data.", extra={"unit": "epochs"}
        ),
    ] = 0.0
    tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Length of the run in useful tokens (without padding).",
            extra={"unit": "tokens"},
        ),
    ] = 0
    evaluate_every_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Steps between evaluations, if `data` defines evaluation data; 0 evaluates only at the end. Pretrained weights are "
            "evaluated before the first step as well.",
            extra={"unit": "optimizer steps"},
        ),
    ] = 0
    learning_rate: Annotated[
        float, Meta(gt=0, le=1, description="Peak learning rate of AdamW.")
    ] = 1e-5
    schedule: Annotated[
        Schedule,
        Meta(
            description="Learning rate schedule after warm-up; `wsd` stays at the peak and decays linearly over the last steps."
        ),
    ] = "cosine"
    warmup_ratio: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Share of the steps during which the learning rate rises from 0.",
        ),
    ] = 0.05
    decay_ratio: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the steps during which the learning rate of `wsd` decays.",
        ),
    ] = 0.1
    min_learning_rate_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Final learning rate of decaying schedules, as a share of the peak.",
        ),
    ] = 0.0
    weight_decay: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="AdamW weight decay; not applied to norms, biases and sparse attention's indexers.",
        ),
    ] = 0.01
    beta1: Annotated[
        float, Meta(ge=0, lt=1, description="AdamW decay rate of the first moment.")
    ] = 0.9
    beta2: Annotated[
        float, Meta(ge=0, lt=1, description="AdamW decay rate of the second moment.")
    ] = 0.999
    epsilon: Annotated[
        float,
        Meta(
            gt=0,
            le=1e-2,
            description="AdamW term added to the denominator for numerical stability.",
        ),
    ] = 1e-8
    gradient_clipping: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum global gradient norm; 0 disables clipping. Always written to the DeepSpeed config.",
        ),
    ] = 1.0
    router_loss_coefficient: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Weight of the load-balancing loss in mixture-of-experts models (pre-training typically uses 0.001); "
            "0 disables it.",
        ),
    ] = 0.0
    max_skipped_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Steps in a row that are skipped because their gradients are not finite; one more ends the run. Needs gradient "
            "clipping and so-tui's engine; other runs end at the first.",
            extra={"unit": "optimizer steps"},
        ),
    ] = 3
    log_interval: Annotated[
        int,
        Meta(
            ge=1,
            description="Steps between metric records; each record synchronizes with the GPU once.",
            extra={"unit": "optimizer steps"},
        ),
    ] = 1
    log_level: Annotated[
        LogLevel,
        Meta(description="The least severe messages that DeepSpeed writes to the log of the run."),
    ] = "warning"
    seed: Annotated[
        int, Meta(ge=0, le=2**32 - 1, description="Seed for weights, data order and dropout.")
    ] = 42
    deterministic: Annotated[
        bool, Meta(description="Use only deterministic kernels, which are slower.")
    ] = False
