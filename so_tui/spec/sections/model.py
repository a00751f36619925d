"""``[model]``: the architecture, and how it is computed."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from so_tui.spec.sections.parameters import ParameterBlock
from so_tui.spec.sections.section import Section

ActivationCheckpointing = Literal["auto", "full", "attention", "selective", "none"]
Attention = Literal[
    "auto",
    "flash-attn-4",
    "flash-attn-3",
    "flash-attn-2",
    "torch-flash",
    "sdpa",
    "eager",
    "flash_attention_2",
    "flash_attention_3",
]


class ModelSpec(Section, frozen=True):
    id: Annotated[str, Meta(min_length=1, description="Hub id or local folder of the model.")]
    revision: Annotated[str, Meta(description="Branch, tag or commit on the hub.")] = "main"
    weights: Annotated[
        Literal["pretrained", "random"],
        Meta(
            description="`pretrained` loads the weights of `id`; `random` initialises the architecture in `[model.config]`, for trials and "
            "benchmarks."
        ),
    ] = "pretrained"
    tokenizer: Annotated[
        str, Meta(description="Hub id or folder of the tokenizer; if empty, that of `id`.")
    ] = ""
    attention: Annotated[
        Attention,
        Meta(
            description="Attention backend; `auto` takes the first of these that is installed and suits model and GPU. `torch-flash` comes "
            "with torch; `sdpa` and `eager` also run on the CPU. `flash_attention_2` and `flash_attention_3` are former names."
        ),
    ] = "auto"
    activation_checkpointing: Annotated[
        ActivationCheckpointing,
        Meta(
            description="What a layer recomputes in the backward pass instead of storing it: everything (`full`), everything except "
            "attention (`attention`), or except attention and matrix products (`selective`), or nothing (`none`); `auto` lets the planner "
            "choose."
        ),
    ] = "auto"
    activation_offload: Annotated[
        Literal["auto", "on", "inputs", "attention", "off"],
        Meta(
            description="What checkpointed layers keep in host memory between forward and backward: their `inputs`, or what the policy "
            "`attention` keeps of attention (`attention`), or both (`on`). Results are the same. `auto` does so where the run would not "
            "fit on the GPU otherwise, or would take longer."
        ),
    ] = "auto"
    tiled_mlp: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Compute dense feed-forward blocks of checkpointed layers, and norms that are not one kernel, 8,192 tokens at a "
            "time, which takes less GPU memory for long sequences. `auto` does so where the run would not fit on the GPU otherwise."
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "plain"],
        Meta(
            description="`auto` uses fused norms, rotary embedding, gates and experts if they support the model; `plain` never does."
        ),
    ] = "auto"
    rope_scaling: Annotated[
        Literal["model", "linear", "yarn"],
        Meta(
            description="How rotary positions reach documents longer than the model was made for: as the `model` says, or with all "
            "frequencies divided by `rope_factor` (`linear`), or only the low ones (`yarn`). An export carries it."
        ),
    ] = "model"
    rope_factor: Annotated[
        float,
        Meta(
            ge=1,
            le=1024,
            description="How many times as long documents may be with `rope_scaling` as the model was made for.",
        ),
    ] = 1.0
    leaf_modules: Annotated[
        tuple[str, ...],
        Meta(
            description="Module classes that ZeRO-3 all-gathers as a whole (mixture-of-experts blocks)."
        ),
    ] = ()
    trust_remote_code: Annotated[
        bool,
        Meta(
            description="Run Python code of the model repository. Only for models whose code you have read."
        ),
    ] = False
    config: Annotated[
        dict[str, Any],
        Meta(description="Architecture, with the keys of the model's `config.json`."),
    ] = field(default_factory=dict)
    parameters: Annotated[
        tuple[ParameterBlock, ...],
        Meta(description="Generated table of all parameters in order; do not edit by hand."),
    ] = ()

    @property
    def positions(self) -> int:
        """Tokens of the longest document that the model was made for, or that its rotary positions are scaled to; 0 if it does not say."""
        own = self.config.get("max_position_embeddings")
        return round(own * self.rope_factor) if isinstance(own, int) and own > 0 else 0

    @property
    def repeats_products(self) -> bool:
        """Whether the backward pass recomputes matrix products; assumed if the planner has not chosen yet."""
        return self.activation_checkpointing in ("auto", "full", "attention")

    @property
    def repeats_attention(self) -> bool:
        """Whether the backward pass recomputes attention; assumed if the planner has not chosen yet."""
        return self.activation_checkpointing in ("auto", "full")

    @property
    def parameter_count(self) -> int:
        """Number of parameters with storage of their own, from the table; 0 without a table."""
        return sum(
            block.repeat * sum(prod(tensor.shape) for tensor in block.tensors if not tensor.tied)
            for block in self.parameters
        )
