"""Everything a first run would do before its first step and that needs no GPU: ``{"spec": tree}`` in, a line of progress for each part out.

{"message": text} ... {"message": text, "done": true}

Model, tokenizer and data are downloaded, MXFP4 weights (gpt-oss) become a bf16 folder, the data are tokenised, the CPU's Adam kernels
compiled. What was done before is not done again. A machine that sees the same caches then needs no network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from so_tui_trainer.tools import build_ops
from so_tui_trainer.tools.channel import Answer, requested_spec, serve
from so_tui_trainer.tools.fetch import fetch
from so_tui_trainer.tools.hub import stay_offline_when_cut_off


def prepare(request: Answer) -> Iterator[Answer]:
    """Raises InputError: something cannot be had, too many rows would be held out, or the disk has no room for the weights in bf16."""
    stay_offline_when_cut_off()
    from so_tui_trainer.data import cache, tokens
    from so_tui_trainer.evaluation import divide, evaluation_spec
    from so_tui_trainer.model import pretrained

    spec = requested_spec(request)
    yield from (answer | {"done": False} for answer in fetch(request))
    if spec.model.weights == "pretrained":
        yield from ({"message": line} for line in pretrained.prepare_weights(spec.model))
        yield {"message": f"weights: ready in {pretrained.weights_folder(spec.model)}"}
    for part in (spec, evaluation_spec(spec)):
        if part is not None:
            documents = cache.read(tokens.prepare(part), part.data)
            divide(documents, part)
            yield {"message": f"data: {documents.counts.rows:,} rows tokenised"}
    yield {"message": "compiling the CPU kernels (a minute, the first time)"}
    built = build_ops.build()
    yield {"message": f"CPU kernels: {built['cpu_adam']} ({built['seconds']} s)"}
    if built["deepspeed"]:
        yield {"message": f"DeepSpeed's own CPU Adam, which only some settings need, cannot be compiled: {built['deepspeed']}"}
    yield {"message": f"{spec.name} is ready to start", "done": True}


if __name__ == "__main__":
    sys.exit(serve(prepare))
