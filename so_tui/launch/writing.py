"""Ask a model for text: what is named by a user, and the helper process that has the model.

Problem codes:
    not-a-model: The folder is neither a run nor a model.
    invalid-path: The text cannot be a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from so_tui.launch.helpers import Cancel as EndProcess
from so_tui.launch.helpers import ToolProcess
from so_tui.runs import find_run
from so_tui.spec import InputError, Problem
from so_tui.spec.files import exists, is_folder, path_fault
from so_tui.spec.generation import Ask, Cancel, Device, Event, LoadModel, Prompt, Sampling

_REMEDY = (
    "Name a run (`so-tui runs` lists them), its folder, or a folder that `so-tui export` wrote."
)


def named_model(
    text: str,
    runs_dir: Path | None = None,
    *,
    compare: bool = False,
    base: str = "",
    device: Device = "auto",
) -> LoadModel:
    """Return what to load for the text that a user typed: a run's name or folder, or a model's folder.

    Args:
        text: What the user typed.
        runs_dir: Folder of the runs.
        compare: Whether to load the base model too.
        base: The base model, as a folder or a hub id, if it is named.
        device: Where to load it.

    Raises:
        InputError: There is no such run or folder.
    """
    for argument, given in (("model", text), ("--base", base)):
        if fault := path_fault(given):
            raise InputError(
                [
                    Problem(
                        code="invalid-path",
                        field=argument,
                        value=given,
                        message=fault,
                        remedy=_REMEDY,
                    )
                ]
            )
    folder = Path(text).expanduser()
    model = exists(folder / "config.json")
    if (
        is_folder(folder)
        and not exists(folder / "spec.json")
        and os.access(folder, os.X_OK)
        and ("/" in text or model)
    ):
        if not model:
            message = "is neither the folder of a run nor that of a model"
            raise InputError(
                [
                    Problem(
                        code="not-a-model",
                        field="model",
                        value=text,
                        message=message,
                        remedy=_REMEDY,
                    )
                ]
            )
        return LoadModel(
            folder=str(folder.absolute()), compare=compare or bool(base), base=base, device=device
        )
    run = find_run(text, runs_dir)
    return LoadModel(
        run=str(run.path.absolute()), compare=compare or bool(base), base=base, device=device
    )


class ModelProcess:
    """A helper process that has a model, and its base model if that is asked for. Close it in the end."""

    def __init__(self, load: LoadModel, end: EndProcess | None = None) -> None:
        """Start loading.

        Args:
            load: Which model.
            end: Ends the process from another thread.
        """
        self._process = ToolProcess("generate", end)
        self._asked = 0
        self._send(load)

    def ask(self, prompts: Sequence[Prompt], sampling: Sampling) -> int:
        """Ask for answers, one of each model at most, and return the number by which events name them."""
        self._asked += 1
        self._send(Ask(number=self._asked, prompts=tuple(prompts), sampling=sampling))
        return self._asked

    def cancel(self) -> None:
        """End the answers to everything that was asked."""
        self._send(Cancel(number=self._asked))

    def events(self) -> Iterator[Event]:
        """Yield what happens, until the process ends. Raises the errors of ``call_tool``."""
        for answer in self._process.answers():
            if "problems" not in answer:  # which `answers` raises
                yield msgspec.convert(answer, type=Event)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _send(self, request: LoadModel | Ask | Cancel) -> None:
        self._process.send(msgspec.to_builtins(request))
