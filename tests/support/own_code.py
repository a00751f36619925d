"""A small model that comes with Python code of its own, which leaves a trace when it is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from so_tui.folders import builtin_folder
from so_tui.spec import ModelSpec, find_preset
from so_tui.spec.consents import Code, allow
from so_tui_trainer.model.config import config_of
from so_tui_trainer.remote_code import copied_code
from tests.support.models import causal_model

_FILES = {
    "configuration_own.py": "from transformers import Qwen3Config\n\n\n"
    "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n",
    "modeling_own.py": "from transformers import Qwen3ForCausalLM\n\n"
    "from .configuration_own import OwnConfig\n\n\n"
    "class OwnModel(Qwen3ForCausalLM):\n    config_class = OwnConfig\n",
    "tokenization_own.py": "from transformers import PreTrainedTokenizerFast\n\n\n"
    "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n",
}
MODEL = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnModel",
}
TOKENIZER = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}


def own_code(folder: Path, trace: Path) -> ModelSpec:
    """Make the folder of a model, and return its spec. Each file of its code adds its name to
    ``trace`` when it is run.
    """
    causal_model(config_of(find_preset("tiny").spec.model.config)).save_pretrained(folder)
    for file in (builtin_folder() / "tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    for name, text in _FILES.items():
        (folder / name).write_text(f"open({str(trace)!r}, 'a').write('{name} ')\n{text}")
    change(folder / "config.json", model_type="own", architectures=["OwnModel"], auto_map=MODEL)
    change(folder / "tokenizer_config.json", auto_map=TOKENIZER, tokenizer_class="OwnTokenizer")
    return ModelSpec(id=str(folder), trust_remote_code=True)


def change(path: Path, **values: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def trusted(model: ModelSpec) -> Code:
    """Let the present code of a model run."""
    code = copied_code(model.id, model.revision, "model.id")
    allow(code)
    return code
