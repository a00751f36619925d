"""Let a run's newest checkpoint or an exported model write, and its base model beside it: requests
and events of ``so_tui.spec.generation``, one in each line.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import msgspec

from so_tui.spec import InputError, ModelSpec
from so_tui.spec.errors import reject
from so_tui.spec.generation import (
    Answer,
    Ask,
    Cancel,
    Event,
    Loaded,
    LoadModel,
    ModelFacts,
    Piece,
    Progress,
    Prompt,
    Rejected,
    Request,
    Side,
)
from so_tui.trust.decoding import readable_json
from so_tui.trust.files import distrust_of_folder
from so_tui_trainer.hub import stay_offline_when_cut_off
from so_tui_trainer.step_limits import limited
from so_tui_trainer.tools import channel
from so_tui_trainer.tools.channel import changed, with_newest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from so_tui_trainer.generation import Writer


Item = TypeVar("Item")
Writers = dict[Side, "Writer"]
_Tuned = Generator[Event, None, "tuple[PreTrainedModel, ModelSpec, str, int | None]"]
"""Loads the trained model, and returns it, what it was trained from, its name and its step."""


def _serve(lines: Iterator[str]) -> Iterator[channel.Answer]:
    """Load what the first line names, then answer until the input ends.

    Yields:
        Events.

    Raises:
        InputError: The model cannot be loaded.
    """
    stay_offline_when_cut_off()
    # What our own process sends, here and in ``_Requests``.
    load = msgspec.json.decode(next(lines), type=LoadModel)  # noqa: TID251
    writers = yield from changed(_loading(load), msgspec.to_builtins)
    requests = _Requests(lines)
    for ask in requests:
        answers = (_answer(writers[prompt.side], prompt, ask, requests) for prompt in ask.prompts)
        yield from map(msgspec.to_builtins, _in_turn(answers))


class _Requests:
    """The requests, read in a thread, so that one to cancel is seen while an answer is written."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._asks: SimpleQueue[Ask | msgspec.DecodeError | None] = SimpleQueue()
        self._cancelled = 0
        self._over = False
        threading.Thread(target=self._read, args=(lines,), name="requests", daemon=True).start()

    def __iter__(self) -> Iterator[Ask]:
        while (ask := self._asks.get()) is not None:
            if isinstance(ask, msgspec.DecodeError):
                raise ask
            yield ask

    def cancelled(self, number: int) -> bool:
        """Return whether nobody waits for an answer any more."""
        return self._over or number <= self._cancelled

    def _read(self, lines: Iterator[str]) -> None:
        try:
            for line in lines:
                request: Request = msgspec.json.decode(line, type=Request)  # noqa: TID251
                if isinstance(request, Cancel):
                    self._cancelled = request.number
                elif isinstance(request, Ask):
                    self._asks.put(request)
        except msgspec.DecodeError as error:
            self._asks.put(error)
        finally:
            self._over = True
            self._asks.put(None)


def _answer(writer: Writer, prompt: Prompt, ask: Ask, requests: _Requests) -> Iterator[Event]:
    try:
        for part in writer.write(prompt, ask.sampling, lambda: requests.cancelled(ask.number)):
            if isinstance(part, str):
                yield Piece(number=ask.number, side=prompt.side, text=part)
            else:
                yield Answer(number=ask.number, side=prompt.side, **part._asdict())
    except InputError as error:
        yield Rejected(number=ask.number, side=prompt.side, problem=error.problems[0])


def _in_turn(iterators: Iterator[Iterator[Item]]) -> Iterator[Item]:
    """Yield an item of each iterator in turn until all are exhausted."""
    waiting = deque(iterators)
    while waiting:
        iterator = waiting.popleft()
        for item in iterator:
            yield item
            waiting.append(iterator)
            break


def _loading(load: LoadModel) -> Generator[Event, None, Writers]:
    """Load the models of a request."""
    import torch

    from so_tui_trainer import export
    from so_tui_trainer.data.chat import chat_of
    from so_tui_trainer.data.tokens import load_tokenizer
    from so_tui_trainer.generation import Writer, stop_tokens
    from so_tui_trainer.model import weights

    tuned, model, name, step = yield from (_of_run(load) if load.run else _of_folder(load))
    models: dict[Side, PreTrainedModel] = {"tuned": tuned}
    random = bool(load.run) and model.weights == "random"
    known = [_facts("tuned", tuned, name, step, random=random)]
    if load.compare:
        base = _base_of(load, model)
        yield Progress(message=f"loading the base model, {base.id}")
        for line in weights.prepare_weights(base):
            yield Progress(message=line)
        models["base"] = export.of_folder(weights.weights_folder(base), base)
        known.append(_facts("base", models["base"], base.id, None))
    chat = chat_of(load_tokenizer(model if load.run else ModelSpec(id=load.folder)))
    parameters = sum(each.parameters for each in known)
    device = export.chosen_device(load.device, parameters)
    stop = stop_tokens(chat, tuned.generation_config)
    # Both are asked in the layout of the tuned model, and end their answers by its tokens: the base
    # model may know neither.
    with limited(f"the weights of {' and '.join(each.name for each in known)}", 4 * parameters):
        writers: Writers = {
            side: Writer(export.placed(each, device), chat, stop) for side, each in models.items()
        }
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    yield Loaded(models=tuple(known), device=device_name, layout=chat.name)
    return writers


def _base_of(load: LoadModel, model: ModelSpec) -> ModelSpec:
    """Return the base model: the one that is named, or else the one that the training began with.

    Args:
        load: The request.
        model: The trained model, as a run or an export says.

    Raises:
        InputError: There is none: the training began with random weights, or nothing that only this
            user can have written says with which (``base-model-unknown``).
    """
    if load.base:
        return ModelSpec(id=load.base)
    message = (
        "the training began with random weights"
        if load.run
        else "nothing in the folder says what the training began with"
    )
    if model.weights == "pretrained" and model.id:
        if not load.run or distrust_of_folder(Path(load.run)) is None:
            return model
        message = f"the run may be another user's work, so {model.id} is not downloaded on its word"
    raise reject(
        "base-model-unknown",
        "--compare",
        "",
        message,
        "Name a model to compare with: --base FOLDER, or a hub id.",
    )


def _of_run(load: LoadModel) -> _Tuned:
    from so_tui.runs import RunDirectory, read_spec
    from so_tui_trainer import export

    run = RunDirectory(Path(load.run))
    spec = read_spec(run)
    yield Progress(message=f"loading the newest checkpoint of {run.name}")
    steps = with_newest(
        run,
        spec,
        "loading",
        lambda found: (export.of_checkpoint(found.path, spec), found.manifest.step),
    )
    causal, step = yield from changed(
        steps, lambda answer: Progress(message=str(answer["message"]))
    )
    return causal, spec.model, run.name, step


def _of_folder(load: LoadModel) -> _Tuned:
    """Load a model's folder.

    Yields:
        Progress.

    Returns:
        The model, the one that its training began with (with random weights if that is not known),
        its name and its step.
    """
    from so_tui_trainer import export

    folder = Path(load.folder)
    yield Progress(message=f"loading {folder}")
    weights = sum(file.stat().st_blocks * 512 for file in folder.glob("*.safetensors"))
    with limited(f"the model in {folder}", weights):
        causal = export.of_folder(folder, ModelSpec(id=load.folder))
    marker = readable_json(folder / export.MARKER_NAME, export.ExportMarker)
    base = ModelSpec(id=load.folder, weights="random")
    if (
        marker is not None and marker.base and distrust_of_folder(folder) is None
    ):  # another user's export does not say what is downloaded
        base = ModelSpec(id=marker.base, revision=marker.revision or "main")
    return causal, base, folder.name, marker.step if marker is not None else None


def _facts(
    side: Side, causal: PreTrainedModel, name: str, step: int | None, *, random: bool = False
) -> ModelFacts:
    parameters = sum(parameter.numel() for parameter in causal.parameters())
    return ModelFacts(side=side, name=name, step=step, parameters=parameters, random=random)


if __name__ == "__main__":
    sys.exit(channel.serve_lines(_serve))
