"""Whether a run's model, tokenizer and data can be had, without loading weights: ``{"spec": tree}`` in, problems and warnings out.

{"problems": [{"field", "value", "message", "remedy"}], "warnings": [text], "done": true}
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from so_tui.spec import InputError, Problem, RunSpec, resolve_source
from so_tui.units import disk_size
from so_tui_trainer.tools.channel import Answer, problems_json, requested_spec, serve
from so_tui_trainer.tools.hub import missing_files, remote_files, stay_offline_when_cut_off

_CHECKED_ROWS = 100


def check(request: Answer) -> Iterator[Answer]:
    """Every check is made, whatever the ones before it found."""
    stay_offline_when_cut_off()
    spec = requested_spec(request)
    problems: list[Answer] = []
    warnings: list[str] = []
    for check_one in (_tokenizer, _weights, _data, _evaluation):
        try:
            warnings += check_one(spec)
        except InputError as error:
            problems += [problem for problem in problems_json(error) if problem not in problems]  # several need the tokenizer
    yield {"problems": problems, "warnings": warnings, "done": True}


def _tokenizer(spec: RunSpec) -> list[str]:
    from so_tui_trainer.data.tokens import load_tokenizer
    from so_tui_trainer.model.build import load_config

    size, vocabulary = len(load_tokenizer(spec)), load_config(spec.model).vocab_size
    if size > vocabulary:
        message, remedy = f"has {size} tokens, and the model's vocabulary {vocabulary}", "Use the model's own tokenizer."
        raise InputError([Problem(field="model.tokenizer", value=spec.model.tokenizer or spec.model.id, message=message, remedy=remedy)])
    return []


def _weights(spec: RunSpec) -> list[str]:
    """Weights that are here must be the model's; others must be reachable, and open to this user."""
    from so_tui_trainer.model.pretrained import downloaded

    if spec.model.weights == "random":
        return []
    if not Path(resolve_source(spec.model.id)).expanduser().is_dir():
        missing = missing_files(spec.model, remote_files(spec.model))
        if missing:
            size = disk_size(sum(missing.values()))
            return [f"{size} of {spec.model.id} are not downloaded yet; `so-tui fetch {spec.name}` does that beforehand"]
    source = downloaded(spec.model)
    return [] if source is None else _stored(spec, source)


def _stored(spec: RunSpec, source: Path) -> list[str]:
    """Names and shapes of the stored tensors against the model's; for MXFP4 weights also whether their bf16 folder is there, or fits."""
    from so_tui_trainer.model import matching, mxfp4
    from so_tui_trainer.model.build import load_config
    from so_tui_trainer.model.pretrained import trainable_folder
    from so_tui_trainer.model.stored import read_index

    folder = trainable_folder(source)
    if not folder.is_dir():
        needed = mxfp4.missing_bytes(source, folder)
        mxfp4.check_room(next(parent for parent in folder.parents if parent.is_dir()), needed)
        return [f"the MXFP4 weights become bf16 first, once ({disk_size(needed)}); `so-tui prepare {spec.name}` does that beforehand"]
    meta = matching.meta_model(load_config(spec.model), trust_remote_code=spec.model.trust_remote_code)
    matching.refuse(matching.match(meta, read_index(folder)), spec.model)
    return []


def _data(spec: RunSpec) -> list[str]:
    """Opens every source, reads its first rows and lets the chat template write them; what is to be held out must leave some.

    Rows without a trained token are dropped later, so fewer may be left to divide than are counted here.
    """
    from so_tui_trainer.data.chat import chat_of
    from so_tui_trainer.data.sources import open_sources
    from so_tui_trainer.data.tokens import Encoder, load_tokenizer
    from so_tui_trainer.evaluation import held_out_rows

    encoder = Encoder(chat_of(load_tokenizer(spec)), spec.data.loss, spec.data.sequence_length)
    sources = open_sources(spec.data)
    held_out_rows(spec, sum(len(opened.rows) for opened in sources))
    for opened in sources:
        for _ in encoder.documents(opened, 0, _CHECKED_ROWS):
            pass
    return [*(warning for opened in sources for warning in opened.warnings), *encoder.chat.warnings]


def _evaluation(spec: RunSpec) -> list[str]:
    from so_tui_trainer.evaluation import evaluation_spec

    other = evaluation_spec(spec)
    return [] if other is None else _data(other)


if __name__ == "__main__":
    sys.exit(serve(check))
