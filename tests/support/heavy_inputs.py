"""Small models and data files that take a careless reader gigabytes or hours."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from so_tui.folders import builtin_folder

_CHUNK = 1 << 20
_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def _tokenizer(folder: Path, template: str = "", **changes: Any) -> list[str]:
    """Write the tokenizer of ``tiny`` with a chat template and other parts, and return the command
    that uses it.
    """
    made = folder / "tokenizer"
    shutil.copytree(builtin_folder() / "tiny", made)
    known = json.loads((made / "tokenizer.json").read_text())
    (made / "tokenizer.json").write_text(json.dumps(known | changes))
    settings = json.loads((made / "tokenizer_config.json").read_text())
    if template:
        settings["chat_template"] = template
        (made / "chat_template.jinja").unlink(missing_ok=True)
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return ["data", "tiny", "--set", f"model.tokenizer={made}"]


def _data(path: Path) -> list[str]:
    return ["data", "tiny", "--set", f"data.source={path}"]


def _gzipped(path: Path, *parts: tuple[bytes, int]) -> list[str]:
    """Write parts, each as often as it says, and return the command that reads the file."""
    with path.open("wb") as file:
        for part, times in parts:
            compressed = gzip.compress(part)  # a member of the file, which may have many
            for _ in range(times):
                file.write(compressed)
    return _data(path)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
"""A chat template that never ends, in Python."""
_GROWS = (
    "{% set n = namespace(s='x') %}{% for i in range(36) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
)


def _grows(text: str, times: int) -> dict[str, Any]:
    """Return a normaliser that multiplies a letter, in Rust."""
    replace = {"type": "Replace", "pattern": {"String": text}, "content": text * 10}
    return {"type": "Sequence", "normalizers": [replace] * times}


def _regex(folder: Path) -> list[str]:
    """Backtrack for ever within the tokenizer, which keeps Python's lock meanwhile."""
    text = folder / "rows.jsonl"
    text.write_text(json.dumps({"text": "x" * 60}) + "\n")
    split = {
        "type": "Split",
        "pattern": {"Regex": "^(?:(x+x+)+)+y"},
        "behavior": "Isolated",
        "invert": False,
    }
    return [*_tokenizer(folder, pre_tokenizer=split), "--set", f"data.source={text}"]


def _parquet(folder: Path) -> list[str]:
    import pyarrow as arrow
    from pyarrow import parquet

    text = arrow.array(["a" * _CHUNK])
    rows = arrow.DictionaryArray.from_arrays(arrow.array([0] * 4300, arrow.int32()), text)
    parquet.write_table(arrow.table({"text": rows}), folder / "rows.parquet", compression="zstd")
    return _data(folder / "rows.parquet")


def _wide_csv(folder: Path) -> list[str]:
    columns = ["text", *(f"c{index}" for index in range(300_000))]
    row = ",".join("x" for _ in columns)
    (folder / "rows.csv").write_text(f"{','.join(columns)}\n{row}\n")
    return _data(folder / "rows.csv")


def _wide_json(folder: Path) -> list[str]:
    row = {"text": "x"} | {f"k{index}": index for index in range(60_000)}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return _data(folder / "rows.jsonl")


def _other_keys(folder: Path) -> list[str]:
    with (folder / "rows.jsonl").open("w") as file:
        for index in range(60_000):
            file.write(json.dumps({"text": "x", f"k{index}": index}) + "\n")
    return _data(folder / "rows.jsonl")


def _files(folder: Path) -> list[str]:
    rows = folder / "rows"
    rows.mkdir()
    for index in range(20_000):
        (rows / f"{index}.jsonl").write_text('{"text": "x"}\n')
    return _data(rows)


def _layers(folder: Path, **config: Any) -> Path:
    """Write a model's folder without weights."""
    model = folder / "model"
    shutil.copytree(builtin_folder() / "tiny", model)
    (model / "config.json").write_text(json.dumps(_CONFIG | {"num_hidden_layers": 6} | config))
    return model


def _deep_model(folder: Path) -> list[str]:
    model = _layers(folder, num_hidden_layers=10**6)
    return ["presets", "add", str(model), "--name", "deep"]


def _deep_preset(folder: Path) -> list[str]:
    preset = (builtin_folder() / "tiny.toml").read_text()
    (folder / "deep.toml").write_text(
        preset.replace("num_hidden_layers = 6", f"num_hidden_layers = {10**6}")
    )
    return ["plan", str(folder / "deep.toml")]


def _deep_weights(folder: Path) -> list[str]:
    import torch
    from safetensors.torch import save_file

    model = _layers(folder, num_hidden_layers=10**6)
    save_file({"model.norm.weight": torch.zeros(16)}, model / "model.safetensors")
    return ["generate", str(model), "--prompt", "x"]


INPUTS: dict[str, Callable[[Path], list[str]]] = {
    "template that loops": lambda at: _tokenizer(at, LOOP),
    "template that grows": lambda at: _tokenizer(at, _GROWS),
    "template that recurses": lambda at: _tokenizer(
        at, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    ),
    "template that overflows": lambda at: _tokenizer(at, "{{ 'a' * (10 ** 100) }}"),
    "template of a terabyte": lambda at: _tokenizer(at, "{{ 'a' * (10 ** 13) }}"),
    "normaliser that grows": lambda at: _tokenizer(at, normalizer=_grows("e", 10)),
    "regex that backtracks": _regex,
    "tokenizer that panics": lambda at: _tokenizer(
        at,
        truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 9},
    ),
    "parquet of 4.5 GB": _parquet,
    "csv.gz with a row of 8 GB": lambda at: _gzipped(
        at / "rows.csv.gz", (b"text\n", 1), (b"a" * _CHUNK, 8192)
    ),
    "csv.gz with a header of 8 GB": lambda at: _gzipped(at / "rows.csv.gz", (b"a" * _CHUNK, 8192)),
    "jsonl.gz of 5.6 GB": lambda at: _gzipped(
        at / "rows.jsonl.gz", (b'{"text": "%s"}\n' % (b"a" * (16 << 20)), 350)
    ),
    "gz with 4 GB of line ends": lambda at: _gzipped(at / "rows.jsonl.gz", (b"\n" * _CHUNK, 4096)),
    "csv of 300,000 columns": _wide_csv,
    "row of 60,000 keys": _wide_json,
    "60,000 rows of other keys": _other_keys,
    "folder of 20,000 files": _files,
    "config of 1,000,000 layers": _deep_model,
    "preset of 1,000,000 layers": _deep_preset,
    "weights of 1,000,000 layers": _deep_weights,
}
"""Writes an input into an empty folder and returns the command that reads it, by what it is."""
