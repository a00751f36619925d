"""Generate the parameter table of presets from the model itself, built on meta tensors: shapes, order, ties; no memory, no download.

    python -m so_tui_trainer.tools.presets [--check] FILE...

Rewrites ``[[model.parameters]]`` at the end of each preset file; ``--check`` only says whether it is current (exit code 1 when not).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from so_tui.spec import InputError, ModelSpec, ParameterBlock, Problem, Tensor, decays, find_preset, resolve_source
from so_tui.spec.table import MARKER, table_text
from so_tui.spec.types import TensorKind
from so_tui_trainer.model.matching import meta_model

_LAYER = re.compile(r"\b((?:layers|blocks|h)\.)(\d+)(?=\.)")
"""A layer's number in a parameter's name, by the names that models give their list of layers."""


def model_config(model: ModelSpec) -> PretrainedConfig:
    """The transformers config of a spec: from its ``[model.config]``, or from the hub or folder where that is empty."""
    shape = dict(model.config)
    if not shape:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            resolve_source(model.id), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        return config
    built: PretrainedConfig = AutoConfig.for_model(shape.pop("model_type"), **shape)
    return built


def ordered_tensors(model: PreTrainedModel) -> Iterator[Tensor]:
    """All parameters in the order of ``named_parameters``, tied ones named with what they share."""
    embeddings = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield Tensor(
            name=name,
            shape=tuple(parameter.shape),
            decay=decays(name, parameter.dim()),
            kind=_kind(name, parameter.dim(), embeddings),
            tied=first_name.get(id(parameter), ""),
        )
        first_name.setdefault(id(parameter), name)


def blocks_of(tensors: Iterable[Tensor]) -> tuple[ParameterBlock, ...]:
    """The same list with repeated layers written once."""
    blocks: list[ParameterBlock] = []
    for index, group in groupby(tensors, key=lambda tensor: _layer(tensor.name)):
        if index is None:
            blocks.append(ParameterBlock(tensors=tuple(group)))
            continue
        pattern = tuple(Tensor(_LAYER.sub(r"\1{i}", t.name, count=1), t.shape, t.decay, t.kind, t.tied) for t in group)
        last = blocks[-1] if blocks else None
        if last is not None and last.tensors == pattern and last.first + last.repeat == index:
            blocks[-1] = ParameterBlock(repeat=last.repeat + 1, first=last.first, tensors=pattern)
        else:
            blocks.append(ParameterBlock(first=index, tensors=pattern))
    return tuple(blocks)


def parameter_table(model: ModelSpec) -> tuple[ParameterBlock, ...]:
    """The table of a spec's model, built anew."""
    return blocks_of(ordered_tensors(meta_model(model_config(model))))


def rewritten(path: Path) -> tuple[str, int]:
    """The text of a preset file with its table made anew, and the number of parameters. Raises InputError as ``find_preset`` does."""
    model = find_preset(str(path.resolve())).spec.model
    if not model.config and model.weights == "random":
        raise InputError(
            [Problem(field="model.config", value="", message="is empty", remedy="Write the shape of the model.", file=str(path))]
        )
    blocks = parameter_table(model)
    own = path.read_text(encoding="utf-8").partition(MARKER)[0].rstrip("\n")
    return f"{own}\n\n{table_text(blocks)}", sum(block.repeat * sum(prod(t.shape) for t in block.tensors if not t.tied) for block in blocks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m so_tui_trainer.tools.presets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a table is not current")
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    current = True
    for path in arguments.files:
        try:
            text, parameters = rewritten(path)
        except InputError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        same = text == path.read_text(encoding="utf-8")
        current &= same
        if not same and not arguments.check:
            path.write_text(text, encoding="utf-8")
        print(json.dumps({"file": str(path), "parameters": parameters, "changed": not same}))
    return 0 if current or not arguments.check else 1


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found.group(2)) if found else None


def _kind(name: str, dimensions: int, embeddings: set[str]) -> TensorKind:
    if name.rpartition(".")[0] in embeddings:
        return "embedding"
    if not decays(name, dimensions):
        return "other"
    stacked = dimensions == 3 and "conv" not in name
    return "expert" if ".experts." in name or stacked else "linear"


if __name__ == "__main__":
    sys.exit(main())
