"""Batch scripts that the user changes in an editor, as ``git commit`` does with messages. A changed one is kept until it is submitted."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from so_tui.folders import state_home
from so_tui.spec import SoTuiError
from so_tui.spec.files import write_atomic
from so_tui.trust.ownership import private_folder

_DEFAULT_EDITOR = "vi"


def edited(text: str) -> str:
    """Return a text as the user saves it in ``$VISUAL``, ``$EDITOR``, or vi. Only the main thread may call this.

    Raises:
        SoTuiError: The editor cannot be started, fails, or leaves nothing.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or _DEFAULT_EDITOR
    with tempfile.TemporaryDirectory(prefix="so-tui-") as folder:
        path = Path(folder) / "job.sh"
        path.write_text(text, encoding="utf-8")
        try:
            with _interrupts_left_to_the_editor():
                code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode
        except (OSError, ValueError) as error:
            raise SoTuiError(
                f"the editor `{editor}` cannot be started ({error}). Set EDITOR to another one"
            ) from error
        try:
            saved = path.read_text(encoding="utf-8") if path.exists() else ""
        except UnicodeDecodeError as error:
            raise SoTuiError(
                f"the editor `{editor}` saved what is not UTF-8 ({error}). Set its encoding to UTF-8"
            ) from error
    if code != 0 or not saved.strip():
        why = f"ended with code {code}" if code else "left an empty file"
        raise SoTuiError(f"the editor `{editor}` {why}, so the script was not changed")
    return saved


class Draft(Struct, frozen=True):
    """A batch script that the user has changed, kept in a file until it is submitted."""

    script: str
    path: Path

    def discard(self) -> None:
        """Remove the file: the script has been submitted."""
        self.path.unlink(missing_ok=True)


def kept(script: str, name: str, before: Draft | None = None) -> Draft:
    """Keep a changed script in the user's own folder.

    Args:
        script: What the user saved.
        name: Name of the spec; the file is named after it.
        before: What the user has changed again, whose file is replaced.

    Raises:
        OSError, SoTuiError: It cannot be written.
    """
    folder = private_folder(state_home() / "scripts")
    path = (
        before.path
        if before
        else folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sh"
    )
    write_atomic(path, script.encode())
    return Draft(script, path)


@contextlib.contextmanager
def _interrupts_left_to_the_editor() -> Iterator[None]:
    """Let Ctrl-C reach the editor alone, which is in the same process group. A handler, unlike SIG_IGN, is not inherited by it."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
