"""What a user asks for: the typed tree behind presets, spec files and ``--set a.b=value``.

Every field carries its documentation, range and unit in ``Meta``: the reference in ``docs/presets.md``, the checks and the
Configure screen all read them from here. The host plays no part: a RunSpec means the same on every machine.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from so_tui.structs import prepare

OffloadMode = Literal["auto", "superoffload", "zerooffload", "gpu"]
DataFormat = Literal["auto", "alpaca", "sharegpt", "messages", "prompt-completion", "text"]
ActivationCheckpointing = Literal["auto", "full", "selective", "none"]
LossOn = Literal["assistant", "last-turn", "all"]
Schedule = Literal["cosine", "linear", "constant", "wsd"]
TensorKind = Literal["linear", "expert", "embedding", "other"]


class Spec(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every section: immutable, and an unknown key is an error."""


def decays(name: str, dimensions: int) -> bool:
    """Whether weight decay applies to a parameter: to matrices and embeddings; not to norms and sinks (one dimension) and biases."""
    return dimensions > 1 and not name.endswith("bias")


class Tensor(Struct, frozen=True, array_like=True):
    """One row of the generated parameter table; in TOML an array ``[name, shape, decay, kind, tied]``."""

    name: str
    """Name as in the Hugging Face model; ``{i}`` stands for the index of the repeat."""
    shape: tuple[int, ...]
    decay: bool
    """Whether weight decay applies (not to norms and biases)."""
    kind: TensorKind
    """``linear``: multiplied with every token; ``expert``: stacked experts, of which a token meets some; ``embedding``: looked up;
    ``other``: norms, biases, sinks."""
    tied: str = ""
    """The name of the tensor this one shares storage with; a tied tensor has no states of its own."""


class ParameterBlock(Spec, frozen=True):
    """A run of tensors that occurs ``repeat`` times in a row (the layers of the model)."""

    repeat: Annotated[int, Meta(ge=1)] = 1
    first: Annotated[int, Meta(ge=0)] = 0
    tensors: tuple[Tensor, ...] = ()


class ModelSpec(Spec, frozen=True):
    id: Annotated[str, Meta(min_length=1, description="Hub id or local folder of the model.")]
    revision: Annotated[str, Meta(description="Branch, tag or commit on the hub.")] = "main"
    weights: Annotated[
        Literal["pretrained", "random"],
        Meta(
            description="`pretrained` loads the weights of `id`; `random` builds the shape in `[model.config]` (for trials and benchmarks)."
        ),
    ] = "pretrained"
    tokenizer: Annotated[str, Meta(description="Hub id or folder of the tokenizer; empty means that of `id`.")] = ""
    attention: Annotated[
        Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "eager"],
        Meta(description="Attention implementation; `auto` takes the fastest one that is installed and fits the model."),
    ] = "auto"
    activation_checkpointing: Annotated[
        ActivationCheckpointing,
        Meta(
            description="What a layer computes again in the backward pass instead of keeping it: everything (`full`), all but its matrix "
            "products and attention (`selective`), nothing (`none`); `auto` lets the planner choose."
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "plain"],
        Meta(description="`auto` takes fused norms, rotary embedding, gates and experts where they fit the model; `plain` never."),
    ] = "auto"
    leaf_modules: Annotated[tuple[str, ...], Meta(description="Module classes that ZeRO-3 gathers whole (mixture-of-experts blocks).")] = ()
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code that comes with the model. Only for models whose code you have read.")
    ] = False
    config: Annotated[dict[str, Any], Meta(description="Architecture, in the keys of the model's `config.json`.")] = field(
        default_factory=dict
    )
    parameters: Annotated[
        tuple[ParameterBlock, ...], Meta(description="Generated table of the ordered parameter list; do not edit by hand.")
    ] = ()

    @property
    def repeats_whole_layers(self) -> bool:
        """Whether backward runs each layer's whole forward once more; also where no planner has chosen."""
        return self.activation_checkpointing in ("auto", "full")

    @property
    def parameter_count(self) -> int:
        """Parameters with storage of their own, by the table; 0 without a table."""
        return sum(block.repeat * sum(prod(tensor.shape) for tensor in block.tensors if not tensor.tied) for block in self.parameters)


class DataSource(Spec, frozen=True):
    """One source of a mixture; what it leaves out is that of the section."""

    source: Annotated[str, Meta(min_length=1, description="Hub id, file or folder.")]
    weight: Annotated[float, Meta(gt=0, description="Relative share of this source's rows in the mixture.")] = 1.0
    subset: str = ""
    split: str = ""
    format: DataFormat | None = None


class DataSpec(Spec, frozen=True):
    source: Annotated[
        str | tuple[DataSource, ...],
        Meta(
            description="Hub id, file (JSON, JSONL, Parquet, CSV, TSV) or folder; or a mixture: a list of `{source, weight}`, each of "
            "which may have its own `subset`, `split` and `format`. Weights are shares of the rows: an epoch meets every row of every "
            "source at least once, and those of a source with a larger share several times."
        ),
    ]
    subset: Annotated[str, Meta(description="Subset (configuration) of a data set on the hub; empty means its only one.")] = ""
    split: Annotated[str, Meta(min_length=1, description="Split of the data set, with the slice syntax of `datasets` (`train[:10%]`).")] = (
        "train"
    )
    format: Annotated[DataFormat, Meta(description="Layout of a row; `auto` recognises it by its columns.")] = "auto"
    loss: Annotated[
        LossOn,
        Meta(
            description="Which tokens are trained: those of every answer of the `assistant`, of the `last-turn` only, or `all`. An "
            "answer's stop token is always trained with it."
        ),
    ] = "assistant"
    sequence_length: Annotated[int, Meta(ge=16, le=1_048_576, description="Tokens in a training sequence.", extra={"unit": "tokens"})] = (
        4096
    )
    held_out: Annotated[
        float,
        Meta(
            ge=0,
            description="Rows to evaluate on instead of training on them, chosen by the seed: a share below 1, or a count.",
            extra={"unit": "rows"},
        ),
    ] = 0.0
    evaluation: Annotated[str, Meta(description="Other data to evaluate on (hub id, file or folder); empty means none.")] = ""
    evaluation_split: Annotated[
        str, Meta(description="Split to evaluate on, of `evaluation` or of `source`; empty means that of `split`.")
    ] = ""
    packing: Annotated[bool, Meta(description="Fill each sequence with several rows that do not see each other.")] = True

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The sources with nothing left out; a single one has weight 1."""
        given = (DataSource(source=self.source),) if isinstance(self.source, str) else self.source
        return tuple(
            DataSource(
                source=part.source,
                weight=part.weight,
                subset=part.subset or self.subset,
                split=part.split or self.split,
                format=part.format or self.format,
            )
            for part in given
        )


class TrainSpec(Spec, frozen=True):
    micro_batch: Annotated[int, Meta(ge=1, le=4096, description="Sequences per rank and micro-step.", extra={"unit": "sequences"})] = 4
    gradient_accumulation: Annotated[
        int,
        Meta(ge=1, le=65536, description="Micro-steps per optimizer step; or give `tokens_per_step`.", extra={"unit": "micro-steps"}),
    ] = 1
    tokens_per_step: Annotated[
        int,
        Meta(
            ge=0,
            description="Sequence positions of an optimizer step, all ranks together: the accumulation that comes nearest is taken; "
            "0 takes `gradient_accumulation`.",
            extra={"unit": "tokens"},
        ),
    ] = 0
    steps: Annotated[
        int, Meta(ge=0, description="Length of the run; give one of `steps`, `epochs`, `tokens`.", extra={"unit": "optimizer steps"})
    ] = 0
    epochs: Annotated[float, Meta(ge=0, description="Length of the run in passes over the data.", extra={"unit": "epochs"})] = 0.0
    tokens: Annotated[int, Meta(ge=0, description="Length of the run in useful (not padding) tokens.", extra={"unit": "tokens"})] = 0
    evaluate_every_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Steps between evaluations, where `data` says on what; 0 evaluates at the end only.",
            extra={"unit": "optimizer steps"},
        ),
    ] = 0
    learning_rate: Annotated[float, Meta(gt=0, le=1, description="Peak learning rate of AdamW.")] = 1e-5
    schedule: Annotated[
        Schedule,
        Meta(description="Shape of the learning rate after warm-up; `wsd` stays at the peak and falls linearly over the last steps."),
    ] = "cosine"
    warmup_ratio: Annotated[float, Meta(ge=0, lt=1, description="Share of the steps in which the learning rate rises from 0.")] = 0.05
    decay_ratio: Annotated[float, Meta(gt=0, le=1, description="Share of the steps in which the learning rate of `wsd` falls.")] = 0.1
    min_learning_rate_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Floor of the falling schedules, as a share of the peak learning rate.")
    ] = 0.0
    weight_decay: Annotated[float, Meta(ge=0, lt=1, description="AdamW weight decay; never on norms and biases.")] = 0.01
    beta1: Annotated[float, Meta(ge=0, lt=1, description="AdamW decay rate of the first moment.")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="AdamW decay rate of the second moment.")] = 0.999
    epsilon: Annotated[float, Meta(gt=0, le=1e-2, description="AdamW term that keeps the division finite.")] = 1e-8
    gradient_clipping: Annotated[
        float, Meta(ge=0, description="Largest global gradient norm; 0 turns clipping off. Always written into the DeepSpeed config.")
    ] = 1.0
    router_loss_coefficient: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Weight of the load-balancing loss in mixture-of-experts models (models are pre-trained with about 0.001); "
            "0 leaves the routers to the data.",
        ),
    ] = 0.0
    log_interval: Annotated[
        int,
        Meta(ge=1, description="Steps between metric records; each record costs one wait for the GPU.", extra={"unit": "optimizer steps"}),
    ] = 1
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1, description="Seed of weights, order of the data and dropout.")] = 42
    deterministic: Annotated[bool, Meta(description="Use deterministic kernels only; slower.")] = False


class OffloadSpec(Spec, frozen=True):
    mode: Annotated[
        OffloadMode,
        Meta(
            description="Where the optimizer works: `superoffload` and `zerooffload` on the CPU, `gpu` on the GPU; "
            "`auto` lets the planner choose."
        ),
    ] = "auto"
    engine: Annotated[Literal["so-tui", "deepspeed"], Meta(description="Whose SuperOffload optimizer runs in `superoffload` mode.")] = (
        "so-tui"
    )
    ratio: Annotated[
        float, Meta(ge=0, le=1, description="Share of the optimizer states that lives in CPU memory, in both offload modes.")
    ] = 0.9
    cpu_adam_cores_fraction: Annotated[
        float, Meta(gt=0, lt=1, description="Share of each rank's cores that runs CPU Adam; the main process keeps the rest.")
    ] = 0.9
    sub_group_size: Annotated[
        int, Meta(ge=1_000, description="Parameters of a rank that are stepped together, at least.", extra={"unit": "parameters"})
    ] = 400_000_000
    parameters: Annotated[Literal["none", "cpu"], Meta(description="Where ZeRO-3 keeps the bf16 weights; only `none` is supported.")] = (
        "none"
    )


class CheckpointSpec(Spec, frozen=True):
    every_steps: Annotated[
        int, Meta(ge=0, description="Steps between checkpoints; 0: not by steps.", extra={"unit": "optimizer steps"})
    ] = 0
    every_minutes: Annotated[
        float, Meta(ge=0, description="Time between checkpoints, by the clock of rank 0; 0: not by time.", extra={"unit": "minutes"})
    ] = 0.0
    at_end: Annotated[bool, Meta(description="Save when the run finishes or is stopped.")] = True
    keep: Annotated[int, Meta(ge=1, description="Newest checkpoints to keep.")] = 2
    folder: Annotated[str, Meta(description="Where checkpoints go; empty means `checkpoints/` in the run directory.")] = ""
    export: Annotated[bool, Meta(description="Also write a Hugging Face folder at the end.")] = False

    @property
    def repeats(self) -> bool:
        """Whether it saves before the end."""
        return bool(self.every_steps or self.every_minutes)

    @property
    def saves(self) -> bool:
        """Whether it saves at all without being asked to; an export rests on a checkpoint of the end."""
        return self.repeats or self.at_end or self.export

    @property
    def most_at_once(self) -> int:
        """Checkpoints that lie on the disk at the same time: the newest is written before the oldest that is kept goes."""
        return self.keep + 1 if self.repeats else int(self.saves)


class TrackingSpec(Spec, frozen=True):
    tensorboard: Annotated[bool, Meta(description="Also write TensorBoard event files, into `tensorboard/` in the run directory.")] = False
    wandb: Annotated[
        bool, Meta(description="Also report to Weights & Biases; account and server come from `wandb login` or `WANDB_*` variables.")
    ] = False
    project: Annotated[str, Meta(min_length=1, description="Project on Weights & Biases.")] = "so-tui"


class BenchmarkSpec(Spec, frozen=True):
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps left out of the summary.", extra={"unit": "optimizer steps"})] = 0
    measured_steps: Annotated[
        int, Meta(ge=0, description="Steps summarised, after which the run ends; 0 is a normal run.", extra={"unit": "optimizer steps"})
    ] = 0


class RunSpec(Spec, frozen=True, kw_only=True):
    """What is trained and how, independent of the host."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64, description="Short name; run names start with it.")]
    title: Annotated[str, Meta(description="Name for people.")] = ""
    gpus: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(description="How many GPUs, or which ones (a list of indices). Ranks on a machine without GPUs."),
    ] = 1
    model: ModelSpec
    data: DataSpec
    train: TrainSpec = TrainSpec()
    offload: OffloadSpec = OffloadSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    benchmark: BenchmarkSpec = BenchmarkSpec()

    @property
    def ranks(self) -> int:
        """Number of ranks: one per GPU."""
        return self.gpus if isinstance(self.gpus, int) else len(self.gpus)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per optimizer step: as given, or the nearest to ``train.tokens_per_step``, at least one."""
        if not self.train.tokens_per_step:
            return self.train.gradient_accumulation
        return max(1, round(self.train.tokens_per_step / (self.train.micro_batch * self.data.sequence_length * self.ranks)))

    @property
    def label(self) -> str:
        return self.title or self.name


prepare(RunSpec)


class Preset(Struct, frozen=True, kw_only=True):
    """A RunSpec with where it came from."""

    spec: RunSpec
    origin: Literal["built-in", "user", "file"]
    path: str
