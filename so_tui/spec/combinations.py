"""Find values of a plain tree that do not go together. What is wrong with single keys is found in ``check``.

Problem codes:
    several-lengths, no-length: More than one of ``train.steps``, ``epochs`` and ``tokens`` is set, or none.
    several-step-sizes: Both ``gradient_accumulation`` and ``tokens_per_step`` are set.
    missing-architecture: Random weights without ``[model.config]``.
    rope-factor: ``model.rope_factor`` without ``model.rope_scaling``, or the reverse.
    no-experts: A router loss for a model without experts.
    sequence-parallel-gpus, sequence-parallel-length: ``train.sequence_parallel`` does not divide the GPUs, or the sequence length.
    sequence-parallel-layers: A layer of the model is not attention that can be divided among ranks.
    sequence-parallel-router: Ranks that share sequences cannot compute a router loss.
    nothing-to-offload: ``model.activation_offload`` where no layer keeps what it moves.
    nothing-to-tile: ``model.tiled_mlp = "on"`` where no dense feed-forward block is recomputed.
    published-config: ``offload.config`` of DeepSpeed's own SuperOffload with another engine.
    parameter-offload: ``offload.parameters = "cpu"`` with an optimizer that keeps the weights on the GPU.
    states-format: ``offload.states`` other than ``"fp32"`` with an optimizer that has no other.
    several-evaluations: Both ``held_out`` and other evaluation data are set.
    no-evaluation-data: An evaluation interval without data to evaluate on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from so_tui.spec.errors import Problem
from so_tui.spec.layers import layer_kinds, packing_problem
from so_tui.spec.sharing import sharing_problems
from so_tui.spec.table import table_problems
from so_tui.spec.wording import shown

LENGTHS = ("steps", "epochs", "tokens")
"""Alternative keys of ``[train]`` for the length of the run."""
STEP_SIZES = ("gradient_accumulation", "tokens_per_step")
"""Alternative keys of ``[train]`` for the gradient accumulation steps."""

_EXPERTS = frozenset({"num_experts", "num_local_experts"})
"""Keys of models with experts in ``[model.config]``."""


def combination_problems(tree: dict[str, Any]) -> Iterator[Problem]:
    """Yield problems of combinations of keys. Single keys may be wrong too, so nothing is assumed about their types."""
    model, data, train = (_section(tree, name) for name in ("model", "data", "train"))
    yield from _length_problems(train, _section(tree, "benchmark"))
    yield from _model_problems(model, train)
    if data.get("packing", True) is True and (
        problem := packing_problem(layer_kinds(_section(model, "config")))
    ):
        yield problem
    yield from table_problems(model)
    yield from _offload_problems(_section(tree, "offload"))
    yield from _evaluation_problems(data, train)
    yield from sharing_problems(model, data, train, tree.get("gpus", 1))


def _length_problems(train: dict[str, Any], benchmark: dict[str, Any]) -> Iterator[Problem]:
    given = [key for key in LENGTHS if isinstance(train.get(key), int | float) and train[key]]
    if len(given) > 1:
        values = ", ".join(f"{key} = {shown(train[key])}" for key in given)
        yield Problem(
            code="several-lengths",
            field=f"train.{given[-1]}",
            value=shown(train[given[-1]]),
            message=f"is one of several lengths of the run ({values})",
            remedy="Keep one of train.steps, train.epochs and train.tokens and set the others to 0.",
        )
    elif not any(train.get(key) for key in LENGTHS) and not benchmark.get("measured_steps"):
        yield Problem(
            code="no-length",
            field="train.steps",
            value="",
            message="the run has no length",
            remedy="Give one of train.steps, train.epochs and train.tokens (or benchmark.measured_steps) a value above 0.",
        )
    accumulation, target = train.get("gradient_accumulation"), train.get("tokens_per_step")
    if target and isinstance(accumulation, int) and accumulation > 1:
        yield Problem(
            code="several-step-sizes",
            field="train.tokens_per_step",
            value=shown(target),
            message=f"determines the gradient accumulation steps, and so does train.gradient_accumulation = {accumulation}",
            remedy="Keep one of the two: set train.tokens_per_step to 0, or leave train.gradient_accumulation at 1.",
        )


def _nothing_to_offload(offload: Any, policy: Any) -> Iterator[Problem]:
    if offload in ("on", "inputs") and policy == "none":
        yield Problem(
            code="nothing-to-offload",
            field="model.activation_offload",
            value=shown(offload),
            message='moves the inputs of checkpointed layers, and with activation_checkpointing = "none" there are none',
            remedy='Set model.activation_checkpointing to "full", "attention" or "selective", or leave model.activation_offload at "auto".',
        )
    if offload == "attention" and policy not in ("auto", "attention"):
        yield Problem(
            code="nothing-to-offload",
            field="model.activation_offload",
            value=shown(offload),
            message='moves what activation_checkpointing = "attention" keeps of attention, and that is not set',
            remedy='Set model.activation_checkpointing to "attention", or model.activation_offload to "inputs" or "auto".',
        )


def _model_problems(model: dict[str, Any], train: dict[str, Any]) -> Iterator[Problem]:
    config = _section(model, "config")
    if model.get("weights") == "random" and not config.get("model_type"):
        yield Problem(
            code="missing-architecture",
            field="model.config",
            value="",
            message='weights = "random" needs the architecture of the model',
            remedy='Write [model.config] with `model_type` and the keys of the model\'s config.json, or use weights = "pretrained".',
        )
    yield from _nothing_to_offload(
        model.get("activation_offload"), model.get("activation_checkpointing", "auto")
    )
    if model.get("tiled_mlp") == "on" and (
        model.get("activation_checkpointing") in ("selective", "none") or _EXPERTS & config.keys()
    ):
        yield Problem(
            code="nothing-to-tile",
            field="model.tiled_mlp",
            value='"on"',
            message="cuts dense feed-forward blocks that are recomputed, and this model has none",
            remedy='Leave it at "auto". It needs model.activation_checkpointing = "full" or "attention", and a model without experts.',
        )
    scaling, factor = model.get("rope_scaling", "model"), model.get("rope_factor", 1)
    if (scaling != "model") != (factor != 1):
        yield Problem(
            code="rope-factor",
            field="model.rope_factor",
            value=shown(factor),
            message=f'does not go with model.rope_scaling = "{scaling}"',
            remedy='Set both: "yarn" or "linear", and a factor above 1; or neither.',
        )
    if train.get("router_loss_coefficient") and config and not _EXPERTS & config.keys():
        yield Problem(
            code="no-experts",
            field="train.router_loss_coefficient",
            value=shown(train["router_loss_coefficient"]),
            message="the model has no experts",
            remedy="Set it to 0; it balances the load of the experts in a mixture-of-experts model.",
        )


def _offload_problems(offload: dict[str, Any]) -> Iterator[Problem]:
    mode, engine, states = offload.get("mode"), offload.get("engine"), offload.get("states", "fp32")
    if states != "fp32" and (mode == "zerooffload" or engine == "deepspeed"):
        yield Problem(
            code="states-format",
            field="offload.states",
            value=shown(states),
            message="is not supported by DeepSpeed's optimizers, which have fp32 moments",
            remedy='Use "fp32", or offload.mode = "superoffload" with offload.engine = "so-tui".',
        )
    if offload.get("config", "so-tui") != "so-tui" and engine != "deepspeed":
        yield Problem(
            code="published-config",
            field="offload.config",
            value=shown(offload["config"]),
            message="is a config of DeepSpeed's own SuperOffload",
            remedy='Set offload.mode = "superoffload" and offload.engine = "deepspeed" too, or name PRESET:as-published.',
        )
    if offload.get("parameters") == "cpu" and (
        mode == "gpu" or (engine == "deepspeed" and mode != "zerooffload")
    ):
        optimizer = "without offload" if mode == "gpu" else "with DeepSpeed's own SuperOffload"
        yield Problem(
            code="parameter-offload",
            field="offload.parameters",
            value='"cpu"',
            message=f"is not supported {optimizer}, where the weights stay on the GPU",
            remedy='Use "none", or offload.mode = "superoffload" with offload.engine = "so-tui", or offload.mode = "zerooffload".',
        )


def _evaluation_problems(data: dict[str, Any], train: dict[str, Any]) -> Iterator[Problem]:
    if data.get("held_out") and (data.get("evaluation") or data.get("evaluation_split")):
        yield Problem(
            code="several-evaluations",
            field="data.held_out",
            value=shown(data["held_out"]),
            message="and data.evaluation both choose the evaluation data",
            remedy="Keep one of them: hold out a part of the data, or name other data.",
        )
    if train.get("evaluate_every_steps") and not any(
        data.get(key) for key in ("held_out", "evaluation", "evaluation_split")
    ):
        yield Problem(
            code="no-evaluation-data",
            field="train.evaluate_every_steps",
            value=shown(train["evaluate_every_steps"]),
            message="there is nothing to evaluate on",
            remedy="Set data.held_out (0.01 holds out one document in a hundred), or data.evaluation.",
        )


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}
