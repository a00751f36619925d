"""Match the tensors of a checkpoint with those of the model, by names and shapes, before anything
is loaded.

transformers renames and fuses tensors of checkpoints (experts stored one by one become one tensor).
Its own conversion table is applied here: on meta tensors it gives names and shapes, on real tensors
the weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import superoffload
from so_tui.folders import cache_home
from so_tui.spec import InputError, ModelSpec, first_line, resolve_source
from so_tui.spec.errors import reject
from so_tui.trust.decoding import LARGEST_FILE_BYTES
from so_tui.trust.files import read_bounded
from so_tui.units import plural, thousands
from so_tui_trainer.foreign import own_entry
from so_tui_trainer.model import stored as mxfp4
from so_tui_trainer.model.stored import Stored, read_index
from so_tui_trainer.remote_code import build_arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_NAMED = 4
"""Number of tensors that a message names."""
DEFAULT_ATTENTION = None
"""Lets transformers choose. Without it, what config.json names is used, which may be a kernel on
the hub: code of others.
"""


class _Conversion(NamedTuple):
    """How one or more tensors of the model are made."""

    target: str
    """The model's tensor; the first one if there are several."""
    sources: list[tuple[str, str]]
    """(pattern of the converter, name in the checkpoint) of each part, in order."""
    converter: Any
    """transformers' ``WeightConverter``; None if the stored tensor is the model's, perhaps under
    another name.
    """
    shapes: dict[str, tuple[int, ...]]
    """Names and shapes of the tensors that are made."""


class _Match(NamedTuple):
    """The result of matching a checkpoint with a model."""

    conversions: tuple[_Conversion, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    """Names with both shapes, for people."""


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """Build a causal language model on meta tensors, which take no memory."""
    with torch.device("meta"):
        return constructed(config)


def constructed(
    config: PretrainedConfig, implementation: str | None = DEFAULT_ATTENTION
) -> PreTrainedModel:
    """Call the constructor of a causal language model in bf16, but for some buffers."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    result: PreTrainedModel = factory.from_config(
        config,
        dtype=torch.bfloat16,
        attn_implementation=implementation,
        **build_arguments(config),
    )
    _keep_exact(result)
    return result


_EXACT = "e_score_correction_bias"
"""Suffix of the names of tensors that stay in fp32, even if transformers does not ask for that or
only constructs the model: biases of routers, which decide between nearly equal experts.
"""


def _keep_exact(causal: PreTrainedModel) -> None:
    """Make buffers fp32 that decide more than bf16 can tell apart."""
    names = re.compile("|".join((_EXACT, *(causal._keep_in_fp32_modules_strict or ()))))
    for prefix, module in causal.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and names.search(f"{prefix}.{name}"):
                setattr(module, name, buffer.float())


def decoder_of(causal: PreTrainedModel) -> nn.Module:
    """Return the model without its output projection. Llama 4's ``base_model`` is the whole
    model.
    """
    found: nn.Module = causal.base_model
    return causal.get_submodule("model") if found is causal else found


def match_weights(model: PreTrainedModel, index: Mapping[str, Stored]) -> _Match:
    """Find out how the checkpoint's tensors become the model's.

    Args:
        model: The model; it may be on meta tensors.
        index: The stored tensors.
    """
    wanted: dict[str, Tensor] = model.state_dict()

    def on_meta(name: str) -> Tensor:
        return torch.empty(index[name].shape, dtype=index[name].dtype, device="meta")

    drafts, unexpected = _grouped(model, wanted, _of_language(wanted, index))
    conversions: list[_Conversion] = []
    mismatched: dict[str, str] = {}
    for draft in drafts:
        try:
            made = _realised(model, draft, on_meta)
        # The parts do not fit together. Older torch only asserts that.
        except (RuntimeError, ValueError, AssertionError) as error:
            mismatched[draft.target] = f"{draft.target} ({first_line(error)})"
            continue
        shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
        conversions.append(draft._replace(shapes=shapes))
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
    return _Match(
        tuple(conversions),
        _without(missing, model._keys_to_ignore_on_load_missing),
        _without(unexpected, {*(model._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS}),
        tuple(mismatched.values()),
    )


_OLD_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers in old checkpoints that models compute today."""


def _realised(
    model: PreTrainedModel, conversion: _Conversion, read: Callable[[str], Tensor]
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


def refuse_mismatch(found: _Match, model: ModelSpec) -> None:
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
        raise reject(
            "weights-mismatch",
            "model.id",
            model.id,
            f"its checkpoint {'; '.join(parts)}",
            "Check `model.id` and `model.revision`, then download it again with `so-tui fetch`.",
        )


@torch.no_grad()
def refuse_untied(
    meta: PreTrainedModel, found: _Match, index: Mapping[str, Stored], model: ModelSpec
) -> None:
    """Refuse a checkpoint whose tensors differ although the configuration makes them one, such as
    a head and the embedding: one of them would be lost.

    Args:
        meta: The model on meta tensors.
        found: How the stored tensors become the model's.
        index: The stored tensors.
        model: Where they came from.

    Raises:
        InputError: There are such tensors (``weights-untied``).
    """
    loaded = {
        name: conversion.sources[0][1]
        for conversion in found.conversions
        if conversion.converter is None
        for name in conversion.shapes
    }
    heads = meta._tied_weights_keys or ()
    for names in {frozenset(names) for names in _ties(meta).values()}:
        ordered = sorted(names & loaded.keys(), key=lambda name: (name in heads, name))
        stored = [loaded[name] for name in ordered]
        for embedding, head in product(stored[:1], stored[1:]):
            if _differ(index[embedding], index[head], meta.dtype):
                raise reject(
                    "weights-untied",
                    "model.id",
                    model.id,
                    f"its config.json says that {head} is {embedding} (tie_word_embeddings), but "
                    f"{index[head].path.name} has another {head}, which would be lost",
                    "To train it, set `tie_word_embeddings` to false in the config.json of a local "
                    "copy, and add that with `so-tui presets add`. To train without it, remove it "
                    "from that copy.",
                )


def _differ(one: Stored, other: Stored, dtype: torch.dtype) -> bool:
    """Return whether two stored tensors differ in the type that is trained. Reads them in
    pieces.
    """
    step = PIECE_BYTES // max(one.dtype.itemsize, other.dtype.itemsize)
    for start in range(0, one.numel, step):
        stop = min(start + step, one.numel)
        first, second = (each.elements(start, stop).to(dtype) for each in (one, other))
        same = torch.equal(first, second) or torch.allclose(first, second, 0, 0, equal_nan=True)
        if not same:
            return True
    return False


def _of_language(wanted: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return by name each stored tensor's own name; those of a multimodal model by their name in
    its language part, without the others.
    """
    stored, own = list(names), list(wanted)
    for prefix, replacement in _LANGUAGE_PARTS:
        inside = {
            replacement + name.removeprefix(prefix): name
            for name in stored
            if name.startswith(prefix)
        }
        if inside and not any(name.startswith(prefix) for name in own):
            return inside | {name: name for name in stored if name.startswith("lm_head.")}
    return {name: name for name in stored}


_LANGUAGE_PARTS = (("model.language_model.", "model."), ("language_model.", ""))
"""How names in the language part begin in a checkpoint of a multimodal model, and in that part's
own; of the two ways that transformers has written them.
"""


def _grouped(
    model: PreTrainedModel, wanted: dict[str, Tensor], names: Mapping[str, str]
) -> tuple[list[_Conversion], list[str]]:
    """Return the conversions, as yet without shapes, and the stored tensors that the model does not
    have.

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
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    found: dict[tuple[str, int], _Conversion] = {}
    unexpected = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, wanted
        )
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted:
            converter = None if pattern is None else by_pattern[pattern]
            draft = found.setdefault(
                (target, id(converter)), _Conversion(target, [], converter, {})
            )
            draft.sources.append((pattern or name, names[name]))
        else:
            unexpected.append(names[name])
    return list(found.values()), unexpected


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
    more = f" and {thousands(len(names) - _NAMED)} more" if len(names) > _NAMED else ""
    return f"{plural(len(names), 'tensor')} ({', '.join(names[:_NAMED])}{more})"


def _text(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


# Locate a pretrained model's weights: its folder, the hub's cache, or the converted bf16 folder of
# MXFP4 weights.


def weights_folder(model: ModelSpec) -> Path:
    """Return a folder with the model's weights in a form that can be trained, after downloading and
    converting them if needed.

    The first process does the work; others (ranks, `so-tui prepare`) wait for it.

    Raises:
        InputError: The weights cannot be downloaded, are quantised in an unsupported way, or do not
            fit on the disk.
    """
    for line in prepare_weights(model):
        print(line, flush=True)
    return trainable_folder(downloaded(model))


def prepare_weights(model: ModelSpec) -> Iterator[str]:
    """Do the work of ``weights_folder``.

    Yields:
        A line of progress before each part.
    """
    source = downloaded(model)
    target = trainable_folder(source)
    if target == source or own_entry(target.parent, target.name).is_dir():
        return
    with target.with_name(target.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # which the kernel releases when the process ends
        yield from mxfp4.convert(source, target)


def trainable_folder(source: Path) -> Path:
    """Return where the trainable weights of a model's folder are, or will be: the folder itself
    unless they are in MXFP4.

    Raises:
        InputError: They are quantised in another way, or config.json cannot be read.
    """
    try:
        quantisation: dict[str, Any] = (
            json.loads(read_bounded(source / "config.json", LARGEST_FILE_BYTES)).get(
                "quantization_config"
            )
            or {}
        )
    except (OSError, ValueError) as error:
        raise reject(
            "model-config-unreadable",
            "model.id",
            str(source),
            f"has no readable config.json ({error})",
            "Name the folder of a complete model.",
        ) from error
    method = quantisation.get("quant_method")
    if not quantisation:
        return source
    if method != "mxfp4":
        raise reject(
            "weights-quantised",
            "model.id",
            str(source),
            f"its weights are quantised ({method}), which cannot be trained",
            "Choose a checkpoint in bf16.",
        )
    return _converted_folder(source)


def _converted_folder(source: Path) -> Path:
    """Return the cache folder for the bf16 weights of an MXFP4 folder, named by the content of that
    folder.
    """
    content = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(source.glob("*.safetensors"))
    ]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return cache_home() / "models" / key


def downloaded(model: ModelSpec, *, local_files_only: bool = False) -> Path:
    """Return the model's own folder, after downloading what is not on this machine.

    Raises:
        InputError: It cannot be downloaded, or is not here and must be (``local_files_only``).
    """
    given = Path(resolve_source(model.id)).expanduser()
    if given.is_dir():
        return given
    from huggingface_hub import snapshot_download

    from so_tui_trainer.hub import UNWANTED, WANTED

    download: Any = snapshot_download
    wanted = {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    try:
        return Path(
            download(model.id, revision=model.revision, local_files_only=local_files_only, **wanted)
        )
    except (OSError, ValueError) as error:
        raise reject(
            "model-unavailable",
            "model.id",
            model.id,
            f"cannot be downloaded ({first_line(error)})",
            "Check the name and the network, or download it with `so-tui fetch` where there is a "
            "network.",
        ) from error


# Tensors that belong to a model's weights although nothing trains them: buffers, and parameters
# that the model itself has frozen.
#
# They are biases of routers (buffers in DeepSeek-V3, parameters in ERNIE 4.5), or a layer's scale.
#
# Checkpoints of runs hold trained weights only. These tensors stay what they were when training
# began.


@torch.no_grad()
def untrained(meta: PreTrainedModel, model: ModelSpec) -> dict[str, Tensor]:
    """Return a model's stored tensors that nothing trains, by name: those of the pretrained
    weights, else as transformers initialises them.

    Args:
        meta: The model on meta tensors.
        model: Where its weights came from.

    Raises:
        InputError: The pretrained weights are no longer here.
    """
    from transformers.initialization import no_init_weights

    names = meta.state_dict().keys() - trained_shapes(meta, remove_duplicate=False).keys()
    if not names:
        return {}
    found = {name: tensor for name, tensor in _initial(meta).items() if name in names}
    # What the constructor says is final (Apertus' activation). The weights that it makes are never
    # touched, and take no memory.
    if unknown := {name for name, tensor in found.items() if tensor.isnan().all()}:
        with no_init_weights():
            causal = constructed(meta.config)
        found |= {name: tensor for name, tensor in causal.named_buffers() if name in unknown}
    if model.weights == "pretrained":
        index = read_index(weights_folder(model))
        for conversion in match_weights(meta, index).conversions:
            if here := names & conversion.shapes.keys():
                made = _realised(meta, conversion, lambda name: index[name].read())
                found |= {name: made[name] for name in here}
    return found


def trained_shapes(
    model: PreTrainedModel, *, remove_duplicate: bool = True
) -> dict[str, torch.Size]:
    """Return the shapes of the parameters that are trained, by name."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return {name: parameter.shape for name, parameter in named if parameter.requires_grad}


def _initial(meta: PreTrainedModel) -> dict[str, Tensor]:
    """Give each module that has such tensors real ones, and let transformers fill them; trained
    weights stay on meta tensors.

    Buffers that transformers leaves alone are not numbers.
    """
    owner: Any = meta
    for module in meta.modules():
        frozen = [
            (name, tensor)
            for name, tensor in module.named_parameters(recurse=False)
            if not tensor.requires_grad
        ]
        buffers = [*module.named_buffers(recurse=False)]
        for name, buffer in buffers:
            unknown = torch.nan if buffer.is_floating_point() else 0
            setattr(module, name, torch.full_like(buffer, unknown, device="cpu"))
        for name, parameter in frozen:
            zeros = torch.zeros_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
        if buffers or frozen:
            owner._init_weights(module)
    frozen_now = {
        name: tensor.detach()
        for name, tensor in meta.named_parameters()
        if not tensor.requires_grad
    }
    return dict(meta.named_buffers()) | frozen_now


# Load weights into a model that ZeRO-3 has sharded: every rank reads its own shard, one tensor
# after the other.
#
# No rank holds the whole model, and none waits for another. A tensor that is stored as the model
# has it is read in pieces. One that has to be assembled (experts stored one by one) is assembled
# as a whole on each rank, and freed afterwards. Besides its weights a
# rank needs a piece of a file, or the largest conversion, whose parts exist both stacked and joined
# while it runs.


PIECE_BYTES = 64 << 20
"""Bytes of a file that are read together."""
OnFiles = Callable[[int, int], None]
"""Called with a number of files that have been read, and that of all files."""


def empty_model(
    config: PretrainedConfig,
    meta: PreTrainedModel,
    implementation: str,
    ds_config: dict[str, Any],
) -> PreTrainedModel:
    """Build the model in bf16, sharded, with uninitialised weights and computed buffers.

    Args:
        config: The model's configuration.
        meta: The same model on meta tensors.
        implementation: Attention implementation.
        ds_config: DeepSpeed's configuration.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights(), superoffload.shard(ds_config):
        causal = constructed(config, implementation)
    causal.tie_weights()
    _compute_buffers(causal, meta)
    for name, parameter in causal.named_parameters():
        if not parameter.requires_grad and name.endswith(_EXACT):
            sharded: Any = parameter  # ZeRO-3 gathers each in the type of its parts
            sharded.data, sharded.ds_tensor.data = parameter.float(), sharded.ds_tensor.float()
    return causal


@torch.no_grad()
def load(
    causal: PreTrainedModel,
    meta: PreTrainedModel,
    found: _Match,
    index: Mapping[str, Stored],
    on_files: OnFiles,
) -> None:
    """Fill the model's weights and stored buffers from a checkpoint that matches it.

    Numbers are checked as they are read, by the rank whose part they are in.

    Args:
        causal: The sharded model.
        meta: The same model on meta tensors.
        found: How the stored tensors become the model's.
        index: The stored tensors.
        on_files: Called before the first file, and after the last conversion that needs one.

    Raises:
        InputError: A number is infinite or none at all (``weights-not-finite``).
        OSError: A file cannot be read.
    """
    left = Counter(path for conversion in found.conversions for path in _files(conversion, index))
    files, read = len(left), 0
    on_files(read, files)
    tensors: dict[str, Any] = dict(causal.named_parameters(remove_duplicate=False)) | dict(
        causal.named_buffers()
    )
    done: set[int] = set()
    for conversion in found.conversions:
        wanted = {
            name: tensors[name]
            for name in conversion.shapes
            if name in tensors and id(tensors[name]) not in done
        }
        done |= {id(tensor) for tensor in wanted.values()}
        if conversion.converter is None:
            for tensor in wanted.values():
                _fill_from_file(tensor, conversion.sources[0][1], index)
        elif wanted:
            made = _realised(meta, conversion, lambda name: index[name].read())
            for name, tensor in wanted.items():
                part, start = _local_shard(tensor)
                part.copy_(made[name].flatten()[start : start + len(part)])
                if not _is_finite(part):
                    raise _not_finite(*_culprit(conversion, index))
        paths = _files(conversion, index)
        left.subtract(paths)
        if completed := sum(not left[path] for path in paths):
            read += completed
            on_files(read, files)


def _files(conversion: _Conversion, index: Mapping[str, Stored]) -> set[Path]:
    return {index[name].path for _, name in conversion.sources}


def _fill_from_file(tensor: Tensor, name: str, index: Mapping[str, Stored]) -> None:
    stored = index[name]
    part, start = _local_shard(tensor)
    step = PIECE_BYTES // stored.dtype.itemsize
    for begin in range(0, len(part), step):
        piece = part[begin : begin + step]
        piece.copy_(stored.elements(start + begin, start + begin + len(piece)))
        if not _is_finite(piece):
            raise _not_finite(name, stored)


def _is_finite(part: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite.

    Their extremes are not if any of them is not, and take one pass without a copy.
    """
    if not part.is_floating_point() or not part.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(part))).all())


def _culprit(conversion: _Conversion, index: Mapping[str, Stored]) -> tuple[str, Stored]:
    """Return the first of a conversion's stored tensors that is not finite; the first one if the
    conversion made them so.
    """
    names = [name for _, name in conversion.sources]
    first = next((name for name in names if not _is_finite(index[name].read())), names[0])
    return first, index[first]


def _not_finite(name: str, stored: Stored) -> InputError:
    return reject(
        "weights-not-finite",
        "model.id",
        str(stored.path),
        f"{name} holds NaN or infinity, so the model cannot be trained",
        "Download it again with `so-tui fetch`, or choose another checkpoint.",
    )


def _local_shard(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's flat shard of a tensor, and its start in the flattened tensor. Buffers are
    whole on every rank.
    """
    return (
        superoffload.local_shard(tensor)
        if isinstance(tensor, nn.Parameter)
        else (tensor.data.view(-1), 0)
    )


def _compute_buffers(causal: PreTrainedModel, meta: PreTrainedModel) -> None:
    """Give buffers the type that they have without ZeRO-3, which creates them in the weights', and
    compute those of modules without weights again: rotary frequencies in bf16 would be inaccurate.
    """
    for module, plain in zip(causal.modules(), meta.modules(), strict=True):
        buffers = dict(plain.named_buffers(recurse=False))
        for key, like in buffers.items():
            have = getattr(module, key)
            if have.dtype != like.dtype:
                setattr(module, key, torch.empty_like(like, device=have.device).copy_(have))
        if buffers and next(module.parameters(recurse=False), None) is None:
            owner: Any = causal
            owner._init_weights(module)
