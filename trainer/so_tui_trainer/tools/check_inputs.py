"""Check that a run's model, tokenizer and data are available, without loading weights:
``{"spec": tree}`` in, warnings or problems out.

{"warnings": [text], "done": true}
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from so_tui.spec import InputError, Problem, RunSpec, check_tree, resolve_source
from so_tui.spec.errors import reject
from so_tui.units import disk_size
from so_tui_trainer.hub import missing_files, stay_offline_when_cut_off
from so_tui_trainer.tools.channel import Answer, serve

_CHECKED_ROWS = 100
"""Rows of each source that are tokenised as a test."""


def _check(request: Answer) -> Iterator[Answer]:
    """Make every check, whatever the others find.

    Yields:
        The warnings.

    Raises:
        InputError: With the problems of all checks.
    """
    stay_offline_when_cut_off()
    spec = check_tree(request["spec"])
    problems: dict[Problem, None] = {}  # Several checks need the tokenizer.
    warnings: list[str] = []
    for check_one in (_tokenizer, _weights, _data, _evaluation):
        try:
            warnings += check_one(spec)
        except InputError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise InputError([*problems])
    yield {"warnings": warnings, "done": True}


def _tokenizer(spec: RunSpec) -> list[str]:
    from so_tui_trainer.data.tokens import load_tokenizer
    from so_tui_trainer.model.config import load_config

    size = len(load_tokenizer(spec.model))
    vocabulary = load_config(spec.model).vocab_size
    if size > vocabulary:
        raise reject(
            "tokenizer-too-large",
            "model.tokenizer",
            spec.model.tokenizer or spec.model.id,
            f"has {size} tokens, but the model's vocabulary has {vocabulary}",
            "Use the model's own tokenizer.",
        )
    return []


def _weights(spec: RunSpec) -> list[str]:
    """Check that local weights match the model, or that remote ones exist and are open to this
    user.
    """
    from so_tui_trainer.model.weights import downloaded

    if spec.model.weights == "random":
        return []
    if not Path(resolve_source(spec.model.id)).expanduser().is_dir():
        missing = missing_files(spec.model)
        if missing:
            size = disk_size(sum(missing.values()))
            return [
                (
                    f"{size} of {spec.model.id} are not downloaded yet; `so-tui fetch {spec.name}` "
                    "downloads them beforehand"
                )
            ]
    try:
        source = downloaded(spec.model, local_files_only=True)
    except InputError:
        return []
    return _stored(spec, source)


def _stored(spec: RunSpec, source: Path) -> list[str]:
    """Compare the stored tensors with the model. For MXFP4 weights, check for their bf16 folder or
    the space for it.
    """
    from so_tui_trainer.model import stored, weights
    from so_tui_trainer.model.config import load_config

    folder = weights.trainable_folder(source)
    if not folder.is_dir():
        needed = stored.missing_bytes(source, folder)
        stored.check_room(next(parent for parent in folder.parents if parent.is_dir()), needed)
        size = disk_size(needed)
        return [
            (
                f"the MXFP4 weights must be converted to bf16 once ({size}); `so-tui prepare "
                f"{spec.name}` does that beforehand"
            )
        ]
    meta = weights.meta_model(load_config(spec.model))
    index = stored.read_index(folder)
    found = weights.match_weights(meta, index)
    weights.refuse_mismatch(found, spec.model)
    weights.refuse_untied(meta, found, index, spec.model)
    return []


def _data(spec: RunSpec) -> list[str]:
    """Open every source and tokenise its first rows; check that holding out rows leaves some.

    Rows without a trained token are dropped later, so fewer rows may be left than are counted here.
    """
    from so_tui_trainer.data.chat import chat_of
    from so_tui_trainer.data.documents import Counts
    from so_tui_trainer.data.encoder import encoder_for
    from so_tui_trainer.data.sources import open_sources
    from so_tui_trainer.data.tokens import load_tokenizer, refuse_unproven
    from so_tui_trainer.evaluation import held_out_rows

    encoder = encoder_for(chat_of(load_tokenizer(spec.model)), spec.data)
    sources = open_sources(spec.data)
    held_out_rows(spec, sum(len(opened.rows) for opened in sources))
    for opened in sources:
        rows = encoder.documents(opened, 0, _CHECKED_ROWS)
        counts = sum((row.counts for row in rows), Counts(0, 0, 0))
        if spec.data.unproven == "refuse":
            refuse_unproven(opened.source.source, counts)
    return [*(warning for opened in sources for warning in opened.warnings), *encoder.chat.warnings]


def _evaluation(spec: RunSpec) -> list[str]:
    from so_tui_trainer.evaluation import evaluation_spec

    other = evaluation_spec(spec)
    return [] if other is None else _data(other)


if __name__ == "__main__":
    sys.exit(serve(_check))
