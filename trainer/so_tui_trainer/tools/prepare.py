"""Do everything that a first run does before its first step and that needs no GPU:
``{"spec": tree}`` in, a line of progress for each part out.

{"message": text} ... {"message": text, "done": true}

Downloads model, tokenizer and data, converts MXFP4 weights (gpt-oss) to bf16, tokenises the data,
and compiles the CPU Adam kernels. Nothing is done twice. A machine with the same cache folders then
needs no network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from so_tui.spec import check_tree
from so_tui.units import thousands
from so_tui_trainer.hub import stay_offline_when_cut_off
from so_tui_trainer.tools import build_ops
from so_tui_trainer.tools.channel import Answer, serve
from so_tui_trainer.tools.fetch import fetch


def _prepare(request: Answer) -> Iterator[Answer]:
    """Do all parts.

    Yields:
        Progress.

    Raises:
        InputError: Something cannot be downloaded, too many rows would be held out, or the disk has
            no space for the converted weights.
    """
    stay_offline_when_cut_off()
    from so_tui_trainer.data import documents as cache
    from so_tui_trainer.data import tokens
    from so_tui_trainer.evaluation import divide, evaluation_spec
    from so_tui_trainer.model import weights

    spec = check_tree(request["spec"])
    yield from (answer | {"done": False} for answer in fetch(request))
    if spec.model.weights == "pretrained":
        yield from ({"message": line} for line in weights.prepare_weights(spec.model))
        yield {"message": f"weights: ready in {weights.weights_folder(spec.model)}"}
    for part in (spec, evaluation_spec(spec)):
        if part is not None:
            documents = cache.read(tokens.prepare(part), part.data)
            divide(documents, part)
            yield {"message": f"data: {thousands(documents.counts.rows)} rows tokenised"}
    yield {"message": "compiling the CPU kernels (a minute, the first time)"}
    built = build_ops.build()
    yield {"message": f"CPU kernels: {built['cpu_adam']} ({built['seconds']} s)"}
    if built["deepspeed"]:
        yield {
            "message": (
                "DeepSpeed's CPU Adam, which only some settings need, cannot be compiled: "
                f"{built['deepspeed']}"
            )
        }
    yield {"message": f"{spec.name} is ready to start", "done": True}


if __name__ == "__main__":
    sys.exit(serve(_prepare))
