"""Describe the Python code that comes with a model or tokenizer, and run none of it:
``{"name": hub id, id@revision, or folder}`` in, ``so_tui.spec.consents.Code`` out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from so_tui.spec import first_line, resolve_source
from so_tui.spec.errors import reject
from so_tui_trainer.hub import stay_offline_when_cut_off
from so_tui_trainer.tools.channel import Answer, serve


def _describe(request: Answer) -> Iterator[Answer]:
    """Copy and hash the code.

    Raises:
        InputError: There is no such model or folder, or its files cannot be copied.
    """
    stay_offline_when_cut_off()
    from so_tui_trainer.remote_code import copied_code

    name = resolve_source(str(request["name"]))
    source, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("@")
    try:
        code = copied_code(source, revision or "main", "SOURCE")
    except (OSError, ValueError) as error:
        # The hub's client took the name of a missing folder for a model's, and says that such names
        # are not valid, or that it is offline.
        missing = isinstance(error, FileNotFoundError) or not isinstance(error, OSError)
        raise reject(
            "model-unavailable",
            "SOURCE",
            name,
            "is no folder that you can open, and no model on the hub that can be reached"
            if missing
            else f"cannot be read ({first_line(error)})",
            "Name a folder, or a model on the hub (owner/name, or owner/name@REVISION).",
        ) from error
    yield {**msgspec.to_builtins(code), "done": True}


if __name__ == "__main__":
    sys.exit(serve(_describe))
