"""Whether a run's model, tokenizer and data can be had, without loading weights: ``{"spec": tree}`` in, problems and warnings out.

{"problems": [{"field", "value", "message", "remedy"}], "warnings": [text], "done": true}
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from so_tui.spec import InputError, Problem, RunSpec, disk_size, resolve_source
from so_tui_trainer.tools.channel import Answer, problems_json, requested_spec, serve
from so_tui_trainer.tools.hub import missing_files, remote_files, stay_offline_when_cut_off

_ROWS_LOOKED_AT = 100


def check(request: Answer) -> Iterator[Answer]:
    """Every check is made, whatever the ones before it found."""
    stay_offline_when_cut_off()
    spec = requested_spec(request)
    problems: list[Answer] = []
    warnings: list[str] = []
    for look in (_tokenizer, _weights, _data, _evaluation):
        try:
            warnings += look(spec)
        except InputError as error:
            problems += problems_json(error)
    yield {"problems": problems, "warnings": warnings, "done": True}


def _tokenizer(spec: RunSpec) -> list[str]:
    from so_tui_trainer.model import load_config
    from so_tui_trainer.tokens import load_tokenizer

    size, vocabulary = len(load_tokenizer(spec)), load_config(spec.model).vocab_size
    if size > vocabulary:
        message, remedy = f"has {size} tokens, and the model's vocabulary {vocabulary}", "Use the model's own tokenizer."
        raise InputError([Problem(field="model.tokenizer", value=spec.model.tokenizer or spec.model.id, message=message, remedy=remedy)])
    return []


def _weights(spec: RunSpec) -> list[str]:
    """Weights that are here already need no hub; others must be reachable, and open to this user."""
    if spec.model.weights == "random":
        return []
    name = resolve_source(spec.model.id)
    if Path(name).expanduser().is_dir():
        if not any(Path(name).expanduser().glob("*.safetensors")):
            message, remedy = "has no *.safetensors files", "Name a folder with the model's weights."
            raise InputError([Problem(field="model.id", value=name, message=message, remedy=remedy)])
        return []
    files = remote_files(spec.model)
    missing = missing_files(spec.model, files)
    if not missing:
        return []
    return [f"{disk_size(sum(missing.values()))} of {name} are not downloaded yet; `so-tui fetch {spec.name}` does that beforehand"]


def _data(spec: RunSpec) -> list[str]:
    """Opens every source, reads its first rows and lets the chat template write them."""
    from so_tui_trainer.chat import chat_of
    from so_tui_trainer.sources import open_sources
    from so_tui_trainer.tokens import Encoder, load_tokenizer

    encoder = Encoder(chat_of(load_tokenizer(spec)), spec.data.loss, spec.data.sequence_length)
    for opened in open_sources(spec.data):
        for _ in encoder.documents(opened, 0, _ROWS_LOOKED_AT):
            pass
    return list(encoder.chat.warnings)


def _evaluation(spec: RunSpec) -> list[str]:
    from so_tui_trainer.evaluation import evaluation_spec

    other = evaluation_spec(spec)
    return [] if other is None else _data(other)


if __name__ == "__main__":
    sys.exit(serve(check))
