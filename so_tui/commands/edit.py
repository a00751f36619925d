"""Let the user change a text in an editor, as ``git commit`` does."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from so_tui.spec import SoTuiError

_DEFAULT_EDITOR = "vi"


def edited(text: str) -> str:
    """Return a text as the user saves it in ``$VISUAL``, ``$EDITOR``, or vi.

    Raises:
        SoTuiError: The editor cannot be started, fails, or leaves nothing.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or _DEFAULT_EDITOR
    with tempfile.TemporaryDirectory(prefix="so-tui-") as folder:
        path = Path(folder) / "job.sh"
        path.write_text(text, encoding="utf-8")
        try:
            code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode
        except (OSError, ValueError) as error:
            raise SoTuiError(f"the editor `{editor}` cannot be started ({error}). Set EDITOR to another one") from error
        saved = path.read_text(encoding="utf-8") if path.exists() else ""
    if code != 0 or not saved.strip():
        why = f"ended with code {code}" if code else "left an empty file"
        raise SoTuiError(f"the editor `{editor}` {why}, so nothing was submitted")
    return saved
