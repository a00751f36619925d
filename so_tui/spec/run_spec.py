"""``[train]``: batches, length and optimizer of a run."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from so_tui.spec.errors import Problem
from so_tui.trust.decoding import prepare
from so_tui.trust.text import brief_line

# What every section of a preset has in common.


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every section: immutable, and unknown keys are errors."""


# Types of several keys: their ranges and units.


_Steps = Annotated[int, Meta(ge=0, extra={"unit": "optimizer steps"})]
_Text = Annotated[str, Meta(min_length=1)]
_BelowOne = Annotated[float, Meta(ge=0, lt=1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Gib = Annotated[float, Meta(ge=0, le=1e6, extra={"unit": "GiB"})]
_Account = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9_.@-]*\Z")]


# ``[benchmark]``: which steps a measurement counts.


class BenchmarkSpec(_Section, frozen=True):
    warmup_steps: Annotated[_Steps, Meta(description="Steps excluded from the summary.")] = 0
    measured_steps: Annotated[
        _Steps,
        Meta(description="Steps in the summary, after which the run ends; 0 for a normal run."),
    ] = 0


# ``[checkpoint]``: when states are saved, and where.


class CheckpointSpec(_Section, frozen=True):
    every_steps: Annotated[
        _Steps, Meta(description="Steps between checkpoints; 0 disables saving by steps.")
    ] = 0
    every_minutes: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "Time between checkpoints, by the clock of rank 0; 0 disables saving by time."
            ),
            extra={"unit": "minutes"},
        ),
    ] = 0.0
    background: Annotated[
        bool,
        Meta(
            description=(
                "Train on while a checkpoint is written, as far as host memory has room for a copy "
                "of the states."
            )
        ),
    ] = True
    copies_gib: Annotated[
        _Gib,
        Meta(
            description="Most host memory per rank for the copies of `background`; 0 sets no limit."
        ),
    ] = 0.0
    at_end: Annotated[
        bool, Meta(description="Save a checkpoint when the run finishes or is stopped.")
    ] = True
    keep: Annotated[int, Meta(ge=1, description="Number of newest checkpoints to keep.")] = 2
    folder: Annotated[
        str,
        Meta(description="Folder for checkpoints; if empty, `checkpoints/` in the run directory."),
    ] = ""
    export: Annotated[bool, Meta(description="Also export a Hugging Face folder at the end.")] = (
        False
    )

    @property
    def repeats(self) -> bool:
        """Whether checkpoints are saved before the end."""
        return bool(self.every_steps or self.every_minutes)

    @property
    def saves(self) -> bool:
        """Whether any checkpoint is saved without a request; an export needs one at the end."""
        return self.repeats or self.at_end or self.export

    @property
    def most_at_once(self) -> int:
        """Largest number of checkpoints on disk at the same time: a new one is written before the
        oldest is deleted.
        """
        return self.keep + 1 if self.repeats else int(self.saves)


# ``[data]``: rows, and how they become sequences.


DataFormat = Literal[
    "auto",
    "alpaca",
    "alpaca-deepspeed",
    "sharegpt",
    "messages",
    "prompt-completion",
    "xlam",
    "glaive",
    "text",
]
LossOn = Literal["assistant", "last-turn", "all", "padded"]


class DataSource(_Section, frozen=True):
    """One source of a mixture. Absent values are those of the section."""

    source: Annotated[_Text, Meta(description="Hub id, file or folder.")]
    weight: Annotated[
        float, Meta(gt=0, description="Relative share of this source's rows in the mixture.")
    ] = 1.0
    subset: str = ""
    split: str = ""
    format: DataFormat | None = None


class DataSpec(_Section, frozen=True):
    source: Annotated[
        str | tuple[DataSource, ...],
        Meta(
            description=(
                "Hub id, file (JSON, JSONL, Parquet, CSV, TSV) or folder; or a mixture: a list of "
                "`{source, weight}`, each with an optional `subset`, `split` and `format`. Weights "
                "are shares of the rows: an epoch includes every row of every source at least "
                "once, and rows of a source with a larger share several times."
            )
        ),
    ]
    subset: Annotated[
        str,
        Meta(
            description="Subset (configuration) of a data set on the hub; if empty, its only one."
        ),
    ] = ""
    split: Annotated[
        _Text,
        Meta(
            description=(
                "Split of the data set, with the slice syntax of `datasets` (`train[:10%]`)."
            )
        ),
    ] = "train"
    format: Annotated[
        DataFormat,
        Meta(
            description=(
                "Format of the rows; `auto` detects it from the columns. `alpaca-deepspeed` reads "
                "Alpaca rows as the plain text that DeepSpeed's SuperOffload example makes of them."
            )
        ),
    ] = "auto"
    loss: Annotated[
        LossOn,
        Meta(
            description=(
                "Tokens that carry loss: those of all answers of the `assistant`, of the "
                "`last-turn` only, or `all`. The stop token of an answer is included. `padded`: "
                "each row is filled up to the sequence length with the tokenizer's padding token, "
                "or its end token, and all of these tokens carry loss, as in DeepSpeed's "
                "SuperOffload example."
            )
        ),
    ] = "assistant"
    split_turns: Annotated[
        bool,
        Meta(
            description=(
                "Train each answer that the chat template changes once later turns follow (it "
                "drops the reasoning, say) in a document of its own; otherwise such answers are "
                "context."
            )
        ),
    ] = True
    unproven: Annotated[
        Literal["refuse", "context"],
        Meta(
            description=(
                "What to do if so-tui cannot prove which tokens of an answer the model would "
                "write: `refuse` the data, or keep such answers as `context`, which is not "
                "trained."
            )
        ),
    ] = "refuse"
    sequence_length: Annotated[
        int,
        Meta(
            ge=16,
            le=1_048_576,
            description="Tokens in a training sequence.",
            extra={"unit": "tokens"},
        ),
    ] = 4096
    held_out: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "Rows to evaluate on instead of training on them, selected with the seed: a share "
                "below 1, or a number."
            ),
            extra={"unit": "rows"},
        ),
    ] = 0.0
    evaluation: Annotated[
        str,
        Meta(description="Separate data to evaluate on (hub id, file or folder); empty for none."),
    ] = ""
    evaluation_split: Annotated[
        str,
        Meta(
            description=(
                "Split of `evaluation` or `source` to evaluate on; if empty, that of `split`."
            )
        ),
    ] = ""
    packing: Annotated[
        bool,
        Meta(description="Fill each sequence with several rows; attention does not cross rows."),
    ] = True

    @property
    def evaluates(self) -> bool:
        """Whether there is data to evaluate on."""
        return bool(self.held_out or self.evaluation or self.evaluation_split)

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """Sources with all values filled in; a single source has weight 1."""
        given = (DataSource(source=self.source),) if isinstance(self.source, str) else self.source
        return tuple(
            replace(
                part,
                subset=part.subset or self.subset,
                split=part.split or self.split,
                format=part.format or self.format,
            )
            for part in given
        )


# ``[[model.parameters]]``: the generated table of a model's parameters.


TensorKind = Literal["linear", "expert", "embedding", "other"]


class Tensor(Struct, frozen=True, array_like=True):
    """One row of the generated parameter table, in TOML an array
    ``[name, shape, decay, kind, tied]``.
    """

    name: Annotated[str, Meta(max_length=512)]
    """Name in the Hugging Face model; ``{i}`` stands for the index of the repetition."""
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=8)]
    decay: bool
    """Whether weight decay applies."""
    kind: TensorKind
    """``linear``: used by every token; ``expert``: stacked, a token uses some; ``embedding``:
    looked up; ``other``: norms, biases.
    """
    tied: str = ""
    """Tensor that this one shares storage with. A tied tensor has no optimizer states."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


class ParameterBlock(_Section, frozen=True, kw_only=True):
    """Consecutive tensors that occur ``repeat`` times in a row, such as the layers of a model."""

    repeat: Annotated[int, Meta(ge=1, le=10_000)] = 1
    first: Annotated[int, Meta(ge=0, le=10_000)] = 0
    tensors: Annotated[tuple[Tensor, ...], Meta(min_length=1)]


def is_matrix(name: str, dimensions: int) -> bool:
    """Return whether a parameter is a matrix or an embedding, and not a bias, norm or sink (one
    dimension).
    """
    return dimensions > 1 and not name.endswith("bias")


def is_indexer(name: str) -> bool:
    """Return whether a parameter belongs to an indexer of sparse attention, by its name in
    transformers.

    An indexer chooses the tokens that attention reads. No gradient of a loss passes through that
    choice.
    """
    return ".indexer." in f".{name}"


def decays(name: str, dimensions: int) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, except those that get no
    gradient, which it would only shrink.
    """
    return is_matrix(name, dimensions) and not is_indexer(name)


# ``[model]``: the architecture, and how it is computed.


Policy = Literal["full", "attention", "selective", "none"]
"""What backward recomputes: every block; a block except its attention; norms, rotary positions and
activation functions; nothing.
"""
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


class ModelSpec(_Section, frozen=True):
    id: Annotated[_Text, Meta(description="Hub id or local folder of the model.")]
    revision: Annotated[str, Meta(description="Branch, tag or commit on the hub.")] = "main"
    weights: Annotated[
        Literal["pretrained", "random"],
        Meta(
            description=(
                "`pretrained` loads the weights of `id`; `random` initialises the architecture in "
                "`[model.config]`, for trials and benchmarks."
            )
        ),
    ] = "pretrained"
    tokenizer: Annotated[
        str, Meta(description="Hub id or folder of the tokenizer; if empty, that of `id`.")
    ] = ""
    attention: Annotated[
        Attention,
        Meta(
            description=(
                "Attention backend; `auto` takes the first of these that is installed and suits "
                "model and GPU. `torch-flash` comes with torch; `sdpa` and `eager` also run on the "
                "CPU. `flash_attention_2` and `flash_attention_3` are former names."
            )
        ),
    ] = "auto"
    activation_checkpointing: Annotated[
        Literal["auto", "full", "attention", "selective", "none"],
        Meta(
            description=(
                "What a layer recomputes in the backward pass instead of storing it: everything "
                "(`full`), everything except attention (`attention`), or except attention and "
                "matrix products (`selective`), or nothing (`none`); `auto` lets the planner "
                "choose."
            )
        ),
    ] = "auto"
    activation_offload: Annotated[
        Literal["auto", "on", "inputs", "attention", "off"],
        Meta(
            description=(
                "What checkpointed layers keep in host memory between forward and backward: their "
                "`inputs`, or what the policy `attention` keeps of attention (`attention`), or "
                "both (`on`). Results are the same. `auto` does so where the run would not fit on "
                "the GPU otherwise, or would take longer."
            )
        ),
    ] = "auto"
    tiled_mlp: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description=(
                "Compute dense feed-forward blocks of checkpointed layers, and norms that are not "
                "one kernel, 8,192 tokens at a time, which takes less GPU memory for long "
                "sequences. `auto` does so where the run would not fit on the GPU otherwise."
            )
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "plain"],
        Meta(
            description=(
                "`auto` uses fused norms, rotary embedding, gates and experts if they support the "
                "model; `plain` never does."
            )
        ),
    ] = "auto"
    rope_scaling: Annotated[
        Literal["model", "linear", "yarn"],
        Meta(
            description=(
                "How rotary positions reach documents longer than the model was made for: as the "
                "`model` says, or with all frequencies divided by `rope_factor` (`linear`), or "
                "only the low ones (`yarn`). An export carries it."
            )
        ),
    ] = "model"
    rope_factor: Annotated[
        float,
        Meta(
            ge=1,
            le=1024,
            description=(
                "How many times as long documents may be with `rope_scaling` as the model was made "
                "for."
            ),
        ),
    ] = 1.0
    leaf_modules: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Module classes that ZeRO-3 all-gathers as a whole (mixture-of-experts blocks)."
            )
        ),
    ] = ()
    trust_remote_code: Annotated[
        bool,
        Meta(
            description=(
                "Run Python code of the model repository, once you have allowed it with `so-tui "
                "trust`. Counts only in files that others cannot write."
            )
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
        """Tokens of the longest document that the model was made for, or that its rotary positions
        are scaled to; 0 if it does not say.
        """
        own = self.config.get("max_position_embeddings")
        return round(own * self.rope_factor) if isinstance(own, int) and own > 0 else 0

    @property
    def policy(self) -> Policy:
        """What the backward pass recomputes: everything, if the planner has not chosen yet."""
        chosen = self.activation_checkpointing
        return "full" if chosen == "auto" else chosen

    @property
    def repeats_products(self) -> bool:
        """Whether the backward pass recomputes matmuls."""
        return self.policy in ("full", "attention")

    @property
    def offloads_inputs(self) -> bool:
        """Whether layer inputs are in host memory between forward and backward; ``auto`` counts as
        not.
        """
        return self.activation_offload in ("on", "inputs") and self.policy != "none"

    @property
    def offloads_results(self) -> bool:
        """Whether attention's results are in host memory between forward and backward; ``auto``
        counts as not.
        """
        return self.activation_offload in ("on", "attention") and self.policy == "attention"

    @property
    def tiles_mlp(self) -> bool:
        """Whether dense feed-forward blocks compute some tokens at a time, which they can if a
        block keeps nothing but its input; ``auto`` counts as not.
        """
        return self.tiled_mlp == "on" and self.repeats_products

    @property
    def parameter_count(self) -> int:
        """Number of parameters with storage of their own, from the table; 0 without a table."""
        return sum(
            block.repeat * sum(tensor.numel for tensor in block.tensors if not tensor.tied)
            for block in self.parameters
        )


# ``[offload]``: where optimizer states live, and what steps them.


StatesFormat = Literal["fp32", "bf16-moments", "int8-moments"]
Mode = Literal["superoffload", "zerooffload", "gpu"]
"""Offload modes once ``auto`` is decided."""


class OffloadSpec(_Section, frozen=True):
    mode: Annotated[
        Literal["auto", "superoffload", "zerooffload", "gpu"],
        Meta(
            description=(
                "Where the optimizer runs: on the CPU (`superoffload`, `zerooffload`) or on the "
                "GPU (`gpu`); `auto` lets the planner choose."
            )
        ),
    ] = "auto"
    engine: Annotated[
        Literal["so-tui", "deepspeed"],
        Meta(description="Implementation of SuperOffload in `superoffload` mode."),
    ] = "so-tui"
    config: Annotated[
        Literal["so-tui", "published", "published-clipping"],
        Meta(
            description=(
                'DeepSpeed config of `engine = "deepspeed"`: ours, or exactly the block that '
                "DeepSpeed's SuperOffload examples publish for the mode (`superoffload` or "
                "`zerooffload`): without a clipping key, so that DeepSpeed's default applies, or "
                "with `train.gradient_clipping`."
            )
        ),
    ] = "so-tui"
    ratio: Annotated[
        _Share,
        Meta(description="Share of the optimizer states in host memory, in both offload modes."),
    ] = 0.9
    cpu_adam_cores_fraction: Annotated[
        float,
        Meta(
            gt=0,
            lt=1,
            description=(
                "Share of each rank's cores for CPU Adam; the training process uses the rest."
            ),
        ),
    ] = 0.9
    sub_group_size: Annotated[
        int,
        Meta(
            ge=1_000,
            description=(
                "Minimum number of a rank's parameters whose optimizer states are stepped "
                "together: the smaller, the less is left to step when backward is over."
            ),
            extra={"unit": "parameters"},
        ),
    ] = 100_000_000
    states: Annotated[
        StatesFormat,
        Meta(
            description=(
                "Adam's moments in host memory, with our engine. `bf16-moments` and `int8-moments` "
                "take 4 and 6 bytes less per parameter than `fp32`; they are rounded "
                "stochastically, so losses differ slightly."
            )
        ),
    ] = "fp32"
    speculation: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description=(
                "With gradient clipping: step sub-groups before the gradient norm is known, and "
                "again if it exceeds the limit. Results are the same. It takes as much host memory "
                "as the states; `auto` uses what the run leaves, where that makes steps faster."
            )
        ),
    ] = "auto"
    speculation_gib: Annotated[
        _Gib, Meta(description="Most host memory per rank for `speculation`; 0 sets no limit.")
    ] = 0.0
    parameters: Annotated[
        Literal["auto", "none", "cpu"],
        Meta(
            description=(
                "`cpu` keeps the bf16 weights whose optimizer states are in host memory there, "
                "too, and copies each layer to the GPU when it is needed. Results are the same. "
                "`auto` does so where the run would not fit on the GPU otherwise."
            )
        ),
    ] = "auto"

    @property
    def own_engine(self) -> bool:
        """Whether the project's own SuperOffload runs, rather than one of DeepSpeed's CPU
        optimizers.
        """
        return self.mode == "superoffload" and self.engine == "so-tui"

    @property
    def deepspeed_superoffload(self) -> bool:
        """Whether DeepSpeed's own SuperOffload runs."""
        return self.mode == "superoffload" and self.engine == "deepspeed"

    @property
    def keeps_weights_on_host(self) -> bool:
        """Whether weights are in host memory, and copied to the GPU layer by layer; ``auto`` counts
        as not.
        """
        return self.parameters == "cpu" and self.mode != "gpu"


# ``[prompts]``: what the model is asked during training.


class PromptsSpec(_Section, frozen=True):
    texts: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=8000)], ...],
        Meta(
            max_length=8,
            description=(
                "Questions that the model answers before the first step, during training and at "
                "the end."
            ),
        ),
    ] = ()
    every_steps: Annotated[
        _Steps, Meta(description="Steps between answers to `texts`; 0 asks only at both ends.")
    ] = 0
    max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=512,
            description="Longest answer. Each token takes a forward pass of all ranks.",
            extra={"unit": "tokens"},
        ),
    ] = 48
    temperature: Annotated[
        float,
        Meta(
            ge=0, le=5, description="What logits are divided by; 0 takes the most probable token."
        ),
    ] = 0.0


# ``[slurm]``: the job that a run is submitted as.


class SlurmSpec(_Section, frozen=True):
    partition: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.-]*\Z",
            max_length=64,
            description="Partition to run on; if empty, the run starts on this machine.",
        ),
    ] = ""
    account: Annotated[_Account, Meta(description="Account that is charged.")] = ""
    qos: Annotated[_Account, Meta(description="Quality of service.")] = ""
    time_limit: Annotated[
        str,
        Meta(
            pattern=r"^(\d{1,6}|\d{1,4}:\d\d|\d{1,4}:\d\d:\d\d|\d{1,3}-\d\d?(:\d\d){0,2})?\Z",
            description=(
                "Longest time of one job: minutes, `HH:MM:SS` or `D-HH`; if empty, the site "
                "profile's or the partition's."
            ),
        ),
    ] = ""
    constraint: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.,:&|*()\[\]-]*\Z",
            max_length=200,
            description="Features that the node must have.",
        ),
    ] = ""
    options: Annotated[
        tuple[
            Annotated[
                str,
                Meta(
                    pattern=r"^--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:;@%+/&|*()\[\]-]+)?\Z",
                    max_length=200,
                ),
            ],
            ...,
        ],
        Meta(
            max_length=32, description="Further options of `sbatch`, such as `--reservation=NAME`."
        ),
    ] = ()
    site: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9-]*\Z",
            max_length=64,
            description="Site profile; if empty, the one that names this cluster, else `generic`.",
        ),
    ] = ""
    continues: Annotated[
        bool,
        Meta(
            description=(
                "When a job's time limit is near, save a checkpoint and submit a job that "
                "continues, until the run has finished."
            )
        ),
    ] = True


# ``[tracking]``: where metrics are also reported to.


class TrackingSpec(_Section, frozen=True):
    tensorboard: Annotated[
        bool,
        Meta(
            description="Also write TensorBoard event files to `tensorboard/` in the run directory."
        ),
    ] = False
    wandb: Annotated[
        bool,
        Meta(
            description=(
                "Also report to Weights & Biases; account and server come from `wandb login` or "
                "`WANDB_*` variables."
            )
        ),
    ] = False
    project: Annotated[_Text, Meta(description="Project on Weights & Biases.")] = "so-tui"


class TrainSpec(_Section, frozen=True):
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
            description=(
                "Sequence positions per optimizer step on all ranks, from which the nearest number "
                "of gradient accumulation steps follows; 0 uses `gradient_accumulation`."
            ),
            extra={"unit": "tokens"},
        ),
    ] = 0
    sequence_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description=(
                "Ranks of a host that share each sequence: every one computes a part of the "
                "tokens, and in attention a part of the heads."
            ),
            extra={"unit": "ranks"},
        ),
    ] = 1
    steps: Annotated[
        _Steps, Meta(description="Length of the run; set one of `steps`, `epochs` and `tokens`.")
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
        _Steps,
        Meta(
            description=(
                "Steps between evaluations, if `data` defines evaluation data; 0 evaluates only at "
                "the end. Pretrained weights are evaluated before the first step as well."
            )
        ),
    ] = 0
    learning_rate: Annotated[
        float, Meta(gt=0, le=1, description="Peak learning rate of AdamW.")
    ] = 1e-5
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "wsd"],
        Meta(
            description=(
                "Learning rate schedule after warm-up; `wsd` stays at the peak and decays linearly "
                "over the last steps."
            )
        ),
    ] = "cosine"
    warmup_ratio: Annotated[
        _BelowOne,
        Meta(description="Share of the steps during which the learning rate rises from 0."),
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
        _Share,
        Meta(description="Final learning rate of decaying schedules, as a share of the peak."),
    ] = 0.0
    weight_decay: Annotated[
        _BelowOne,
        Meta(
            description=(
                "AdamW weight decay; not applied to norms, biases and sparse attention's indexers."
            )
        ),
    ] = 0.01
    beta1: Annotated[_BelowOne, Meta(description="AdamW decay rate of the first moment.")] = 0.9
    beta2: Annotated[_BelowOne, Meta(description="AdamW decay rate of the second moment.")] = 0.999
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
            description=(
                "Maximum global gradient norm; 0 disables clipping. Always written to the "
                "DeepSpeed config."
            ),
        ),
    ] = 1.0
    router_loss_coefficient: Annotated[
        _Share,
        Meta(
            description=(
                "Weight of the load-balancing loss in mixture-of-experts models (pre-training "
                "typically uses 0.001); 0 disables it."
            )
        ),
    ] = 0.0
    max_skipped_steps: Annotated[
        _Steps,
        Meta(
            description=(
                "Steps in a row that are skipped because their gradients are not finite; one more "
                "ends the run. Needs gradient clipping and so-tui's engine; other runs end at the "
                "first."
            )
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
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least severe messages that DeepSpeed writes to the log of the run."),
    ] = "warning"
    seed: Annotated[
        int, Meta(ge=0, le=2**32 - 1, description="Seed for weights and the order of the data.")
    ] = 42
    deterministic: Annotated[
        bool, Meta(description="Use only deterministic kernels, which are slower.")
    ] = False


# Types of presets, spec files and ``--set a.b=value``: a run, made of the ``sections``, and where
# it comes from.
#
# Each field has its documentation, range and unit in ``Meta``, from which the reference in
# ``docs/presets.md``, the checks and the Configure screen are made. A RunSpec is independent of
# the machine.


MachineDecided = Literal[
    "gpus",
    "offload.mode",
    "offload.ratio",
    "offload.cpu_adam_cores_fraction",
    "offload.states",
    "offload.speculation",
    "offload.parameters",
    "model.activation_checkpointing",
    "model.activation_offload",
    "model.tiled_mlp",
    "train.micro_batch",
    "train.gradient_accumulation",
    "train.sequence_parallel",
    "checkpoint.every_minutes",
    "checkpoint.keep",
]
MACHINE_DECIDES: tuple[MachineDecided, ...] = get_args(MachineDecided)
"""Keys that are chosen for the machine, unless a person set them."""
SPLIT: tuple[MachineDecided, ...] = ("train.micro_batch", "train.gradient_accumulation")
"""How the sequences of a step are divided: setting one of them fixes both."""


class RunSpec(_Section, frozen=True, kw_only=True):
    """What to train and how, independent of the machine."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9][a-z0-9._-]*\Z",
            max_length=64,
            description="Short name, which names of runs start with.",
        ),
    ]
    title: Annotated[str, Meta(description="Display name.")] = ""
    gpus: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(
            description=(
                "Number of GPUs, or a list of their indices; of each node. The number of ranks on "
                "a machine without GPUs."
            )
        ),
    ] = 1
    nodes: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description=(
                "Number of nodes (hosts) of a Slurm partition that train together, each with "
                "`gpus` GPUs."
            ),
        ),
    ] = 1
    fixed: Annotated[
        tuple[MachineDecided, ...],
        Meta(
            description=(
                "Keys that stay as they are, of those that are otherwise chosen for the machine. "
                "Those that stand in your own preset, in `--set` or in an option count without "
                "being named here; the value `auto` leaves one to the machine again."
            )
        ),
    ] = ()
    model: ModelSpec
    data: DataSpec
    train: TrainSpec = TrainSpec()
    offload: OffloadSpec = OffloadSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    prompts: PromptsSpec = PromptsSpec()
    benchmark: BenchmarkSpec = BenchmarkSpec()
    slurm: SlurmSpec = SlurmSpec()

    def changed(self, section: str, **values: Any) -> RunSpec:
        """Return the spec with other values of one section."""
        return replace(self, **{section: replace(getattr(self, section), **values)})

    def fixes(self, *keys: MachineDecided) -> bool:
        """Return whether a person set one of these keys."""
        return not set(keys).isdisjoint(self.fixed)

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host, one per GPU."""
        return self.gpus if isinstance(self.gpus, int) else len(self.gpus)

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.nodes * self.ranks_per_host

    @property
    def replicas(self) -> int:
        """Number of ranks, or of groups of ranks that share sequences, which train on different
        sequences.
        """
        return self.ranks // self.train.sequence_parallel

    @property
    def micro_batch_tokens(self) -> int:
        """Positions of a micro-batch on one rank, padding included: ranks that share sequences have
        a part each.
        """
        return self.train.micro_batch * self.data.sequence_length // self.train.sequence_parallel

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step: as given, or nearest to ``train.tokens_per_step``, at
        least 1.
        """
        if not self.train.tokens_per_step:
            return self.train.gradient_accumulation
        return max(
            1,
            round(
                self.train.tokens_per_step
                / (self.train.micro_batch * self.data.sequence_length * self.replicas)
            ),
        )

    @property
    def label(self) -> str:
        return brief_line(self.title or self.name)


prepare(RunSpec)


class Preset(Struct, frozen=True, kw_only=True):
    """A RunSpec and where it comes from."""

    spec: RunSpec
    origin: Literal["built-in", "user", "file"]
    path: str
    problems: tuple[Problem, ...] = ()
    """What of it does not count, since others can write its file or one that it extends."""
