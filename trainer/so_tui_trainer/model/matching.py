"""Match the tensors of a checkpoint with those of the model, by names and shapes, before anything is loaded.

transformers renames and fuses tensors of checkpoints (experts stored one by one become one tensor). Its own conversion table is applied
here: on meta tensors it gives names and shapes, on real tensors the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from so_tui.spec import InputError, ModelSpec, Problem, first_line
from so_tui_trainer.model.stored import Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_NAMED = 4
"""Number of tensors that a message names."""
DEFAULT_ATTENTION = None
"""Lets transformers choose. Without it, what config.json names is used, which may be a kernel on the hub: code of others."""


class Conversion(NamedTuple):
    """How one or more tensors of the model are made."""

    target: str
    """The model's tensor; the first one if there are several."""
    sources: tuple[tuple[str, str], ...]
    """(pattern of the converter, name in the checkpoint) of each part, in order."""
    converter: Any
    """transformers' ``WeightConverter``; None if the stored tensor is the model's, perhaps under another name."""
    shapes: dict[str, tuple[int, ...]]
    """Names and shapes of the tensors that are made."""


class Match(NamedTuple):
    """The result of matching a checkpoint with a model."""

    conversions: tuple[Conversion, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    """Names with both shapes, for people."""


def meta_model(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a causal language model on meta tensors, which take no memory."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = factory.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation=DEFAULT_ATTENTION,
            trust_remote_code=trust_remote_code,
        )
    return model


def decoder_of(causal: PreTrainedModel) -> nn.Module:
    """Return the model without its output projection. Llama 4's ``base_model`` is the whole model."""
    found: nn.Module = causal.base_model
    return causal.get_submodule("model") if found is causal else found


def match(model: PreTrainedModel, index: Mapping[str, Stored]) -> Match:
    """Find out how the checkpoint's tensors become the model's.

    Args:
        model: The model; it may be on meta tensors.
        index: The stored tensors.
    """
    wanted: dict[str, Tensor] = model.state_dict()
    groups, unexpected = _grouped(model, wanted, _of_language(wanted, index))
    conversions: list[Conversion] = []
    mismatched: dict[str, str] = {}
    for target, converter, sources in groups:
        try:
            shapes = _outputs(model, target, converter, sources, index)
        except (
            RuntimeError,
            ValueError,
            AssertionError,
        ) as error:  # The parts do not fit together. Older torch only asserts that.
            mismatched[target] = f"{target} ({first_line(error)})"
            continue
        conversions.append(Conversion(target, tuple(sources), converter, shapes))
        for name, shape in shapes.items():
            if name in wanted and tuple(wanted[name].shape) != shape:
                mismatched[name] = (
                    f"{name} ({_text(shape)}, the model's is {_text(wanted[name].shape)})"
                )
    loaded = {name for conversion in conversions for name in conversion.shapes}
    ties = _ties(model)
    missing = [
        name for name in wanted if not (ties.get(name, {name}) & (loaded | mismatched.keys()))
    ]
    return Match(
        tuple(conversions),
        _without(missing, model._keys_to_ignore_on_load_missing),
        _without(unexpected, {*(model._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS}),
        tuple(mismatched.values()),
    )


_OLD_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers in old checkpoints that models compute today."""


def realised(
    model: PreTrainedModel, conversion: Conversion, read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Run a conversion.

    Args:
        model: The model.
        conversion: The conversion.
        read: Returns a stored tensor by its name.

    Returns:
        The model's tensors by name.
    """
    if conversion.converter is None:
        return {conversion.target: read(conversion.sources[0][1])}
    working = deepcopy(conversion.converter)
    for pattern, name in conversion.sources:
        working.add_tensor(conversion.target, name, pattern, read(name))
    made: dict[str, Any] = working.convert(conversion.target, model=model, config=model.config)
    return {
        name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
    }


def refuse(found: Match, model: ModelSpec) -> None:
    """Refuse a checkpoint that does not match the model.

    Raises:
        InputError: Names how many tensors are missing, unexpected or mismatched, and some of them.
    """
    kinds = (
        ("lacks", found.missing),
        ("has, unlike the model,", found.unexpected),
        ("has in another shape", found.mismatched),
    )
    if parts := [f"{verb} {_some(names)}" for verb, names in kinds if names]:
        message = f"its checkpoint {'; '.join(parts)}"
        remedy = (
            "Check `model.id` and `model.revision`, then download it again with `so-tui fetch`."
        )
        raise InputError(
            [
                Problem(
                    code="weights-mismatch",
                    field="model.id",
                    value=model.id,
                    message=message,
                    remedy=remedy,
                )
            ]
        )


def largest_conversion_bytes(found: Match, index: Mapping[str, Stored]) -> int:
    """Return the bytes of the stored tensors of the largest conversion; 0 if every tensor is stored as the model has it."""
    sizes = (
        sum(index[name].bytes for _, name in conversion.sources)
        for conversion in found.conversions
        if conversion.converter
    )
    return max(sizes, default=0)


def _of_language(wanted: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return by name each stored tensor's own name; those of a multimodal model by their name in its language part, without the others."""
    stored, own = list(names), list(wanted)
    for prefix, replacement in _LANGUAGE_PARTS:
        if any(name.startswith(prefix) for name in stored) and not any(
            name.startswith(prefix) for name in own
        ):
            inside = {
                replacement + name.removeprefix(prefix): name
                for name in stored
                if name.startswith(prefix)
            }
            return inside | {name: name for name in stored if name.startswith("lm_head.")}
    return {name: name for name in stored}


_LANGUAGE_PARTS = (("model.language_model.", "model."), ("language_model.", ""))
"""How names in the language part begin in a checkpoint of a multimodal model, and in that part's own; of the two ways that
transformers has written them."""


def _grouped(
    model: PreTrainedModel, wanted: Mapping[str, Tensor], names: Mapping[str, str]
) -> tuple[list[tuple[str, Any, list[tuple[str, str]]]], list[str]]:
    """Return the stored tensors that make each target, with its converter; also those that the model does not have.

    ``names``: each stored tensor's own name, by the name that the model's conversions know.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    numbers = {
        pattern: number
        for number, converter in enumerate(converters)
        for pattern in converter.source_patterns
    }
    groups: dict[tuple[str, int | None], list[tuple[str, str]]] = {}
    unexpected = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, dict(wanted)
        )
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted:
            number = None if pattern is None else numbers[pattern]
            groups.setdefault((target, number), []).append((pattern or name, names[name]))
        else:
            unexpected.append(names[name])
    joined = [
        (target, None if number is None else converters[number], sources)
        for (target, number), sources in groups.items()
    ]
    return joined, unexpected


def _outputs(
    model: PreTrainedModel,
    target: str,
    converter: Any,
    sources: list[tuple[str, str]],
    index: Mapping[str, Stored],
) -> dict[str, tuple[int, ...]]:
    draft = Conversion(target, tuple(sources), converter, {})
    made = realised(
        model,
        draft,
        lambda name: torch.empty(index[name].shape, dtype=index[name].dtype, device="meta"),
    )
    return {name: tuple(tensor.shape) for name, tensor in made.items()}


def _ties(model: PreTrainedModel) -> dict[str, set[str]]:
    """Return all names of each parameter."""
    by_identity: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), set()).add(name)
    return {name: names for names in by_identity.values() for name in names}


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> tuple[str, ...]:
    ignored = tuple(patterns or ())
    return tuple(name for name in names if not any(re.search(pattern, name) for pattern in ignored))


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({', '.join(names[:_NAMED])}{more})"


def _text(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"
