"""Download a run's model and data ahead of it: ``{"spec": tree}`` in, a line of progress for every
file out.

{"message": text, "done_bytes": n, "total_bytes": n} ... {"message": text, "bytes": n, "done": true}

While a file is downloaded, ``"partial": true`` marks a line that the next one replaces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from so_tui.spec import RunSpec, check_tree, resolve_source
from so_tui.units import disk_size, thousands
from so_tui_trainer.hub import download, missing_files
from so_tui_trainer.tools.channel import Answer, serve


def fetch(request: Answer) -> Iterator[Answer]:
    """Download what is not there yet.

    Yields:
        Progress, then the total.

    Raises:
        InputError: Something cannot be downloaded.
    """
    from so_tui_trainer.data.sources import open_sources
    from so_tui_trainer.data.tokens import load_tokenizer
    from so_tui_trainer.evaluation import evaluation_spec

    spec = check_tree(request["spec"])
    total = 0
    if (
        spec.model.weights == "pretrained"
        and not Path(resolve_source(spec.model.id)).expanduser().is_dir()
    ):
        for answer in _model(spec):
            total = answer["done_bytes"]
            yield answer
    load_tokenizer(spec.model)
    yield {"message": f"tokenizer of {spec.model.tokenizer or spec.model.id}: ready"}
    other = evaluation_spec(spec)
    for opened in (*open_sources(spec.data), *(open_sources(other.data) if other else ())):
        yield {
            "message": f"data: {thousands(len(opened.rows))} rows of {opened.source.source} ready"
        }
    yield {"message": f"everything for {spec.name} is downloaded", "bytes": total, "done": True}


def _model(spec: RunSpec) -> Iterator[Answer]:
    missing = missing_files(spec.model)
    total, done = sum(missing.values()), 0
    yield {
        "message": f"{spec.model.id}: {disk_size(total)} in {len(missing)} files to download",
        "done_bytes": 0,
        "total_bytes": total,
    }
    for name, size in sorted(missing.items(), key=lambda item: item[1]):
        for part in download(spec.model, name):
            yield _progress(name, part, done + part, total) | {"partial": True}
        done += size
        yield _progress(name, size, done, total)


def _progress(name: str, size: int, done: int, total: int) -> Answer:
    return {
        "message": f"{name}: {disk_size(size)} ({done / max(1, total):.0%})",
        "done_bytes": done,
        "total_bytes": total,
    }


if __name__ == "__main__":
    sys.exit(serve(fetch))
