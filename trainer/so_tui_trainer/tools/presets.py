"""Generate the parameter table of presets from the model, built on meta tensors: shapes, order,
ties; no memory, no download.

    python -m so_tui_trainer.tools.presets [--check] FILE...

Rewrites ``[[model.parameters]]`` at the end of each preset file, and writes out keys of
``[model.config]`` that the planner reads and the preset leaves to the model's defaults. ``--check``
writes nothing, and exits with 1 if a file is not current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from transformers import PretrainedConfig

from so_tui.spec import InputError, ModelSpec, ParameterBlock, find_preset
from so_tui.spec.errors import reject
from so_tui.spec.model_table import MARKER, table_text
from so_tui_trainer.model.config import config_of, language_part, stored_config
from so_tui_trainer.model.weights import meta_model
from so_tui_trainer.tools.describe_model import blocks_of, planned_shape, shape_of

_EXPERTS = {"num_experts", "num_local_experts"}
"""Two names of the same key; a config has either."""
_SHAPE_HEADER = re.compile(r"^\s*\[\s*model\s*\.\s*config\s*\].*$", re.MULTILINE)


def _model_config(model: ModelSpec) -> PretrainedConfig:
    """Return the transformers config of a model section: from its ``[model.config]``, or from the
    hub or folder if that is empty.
    """
    if not model.config:
        return language_part(stored_config(model))
    return config_of(model.config)


def parameter_table(model: ModelSpec) -> tuple[ParameterBlock, ...]:
    """Return the parameter table of a model section, generated anew."""
    return blocks_of(meta_model(_model_config(model)))


def _rewritten(path: Path) -> tuple[str, int]:
    """Return the new text of a preset file, and the number of parameters.

    Raises:
        InputError: As ``find_preset``, except for the table that is replaced.
    """
    model = find_preset(str(path.resolve()), table=False).spec.model
    own = path.read_text(encoding="utf-8").partition(MARKER)[0].rstrip("\n")
    if re.search(r"^\s*\[\[\s*model\s*\.\s*parameters", own, re.MULTILINE):
        raise reject(
            "table-not-generated",
            "model.parameters",
            "",
            "is above the generated table",
            "Delete it; the generated one replaces it.",
            file=str(path),
        )
    config = _model_config(model)
    causal = meta_model(config)
    known = model.config.keys() | (_EXPERTS if _EXPERTS & model.config.keys() else set())
    shape = planned_shape(config, causal) if model.config else shape_of(config, causal)
    missing = {key: value for key, value in shape.items() if key not in known}
    text = f"{_with_keys(own, missing, path)}\n\n{table_text(blocks_of(causal))}"
    return text, sum(parameter.numel() for parameter in causal.parameters())


def _with_keys(own: str, missing: dict[str, Any], path: Path) -> str:
    """Add keys to the ``[model.config]`` of a preset's text; all else, including comments,
    stays.
    """
    if not missing:
        return own
    header = _SHAPE_HEADER.search(own)
    given = tomllib.loads(own).get("model", {}).get("config")
    if header and given:
        keys = tomli_w.dumps(missing).rstrip("\n")
        return f"{own[: header.end()]}\n{keys}{own[header.end() :]}"
    if header:  # An empty section: the whole shape, which has sections itself, goes to the end.
        own = own[: header.start()] + own[header.end() :]
    elif given is not None:
        raise reject(
            "model-config-not-section",
            "model.config",
            "",
            f"lacks {', '.join(missing)}",
            "Write it as a section: [model.config] and its keys below.",
            file=str(path),
        )
    return f"{own}\n\n" + tomli_w.dumps({"model": {"config": missing}}).rstrip("\n")


def main() -> int:
    """Rewrite or check the files of the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m so_tui_trainer.tools.presets",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file is not current"
    )
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    current = True
    for path in arguments.files:
        try:
            text, parameters = _rewritten(path)
        except InputError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        same = text == path.read_text(encoding="utf-8")
        current &= same
        if not same and not arguments.check:
            path.write_text(text, encoding="utf-8")
        print(json.dumps({"file": str(path), "parameters": parameters, "changed": not same}))
    return 0 if current or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
