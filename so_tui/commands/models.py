"""``generate`` and ``chat``: let a run's newest checkpoint or a model's folder answer, and its base
model beside it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from argparse import Namespace
from collections.abc import Iterator

from msgspec import Struct

from so_tui.commands.common import print_json, print_note, usable_terminal
from so_tui.spec import InputError
from so_tui.spec.errors import reject
from so_tui.spec.generation import (
    Answer,
    Ended,
    Event,
    Loaded,
    LoadModel,
    ModelFacts,
    Piece,
    Progress,
    Prompt,
    Rejected,
    Sampling,
    Side,
    Turn,
)
from so_tui.trust.text import printable_line
from so_tui.units import duration, plural, thousands

_LONGEST_INPUT = 1 << 20
"""Characters of standard input that are read as a prompt."""


class PromptAnswers(Struct, frozen=True, kw_only=True):
    """A prompt and its answers, one of each model."""

    prompt: str
    answers: tuple[Answer, ...]


class Generated(Struct, frozen=True, kw_only=True):
    """What ``generate --json`` prints."""

    models: tuple[ModelFacts, ...]
    device: str
    """Name of the GPU, or ``CPU``."""
    sampling: Sampling
    prompts: tuple[PromptAnswers, ...]


def generate(arguments: Namespace) -> int:
    """Print the answers to each prompt as they are written, or all of them as JSON."""
    from so_tui.launch.helper_jobs import ModelProcess

    if not arguments.prompt and sys.stdin.isatty():
        raise reject(
            "missing",
            "--prompt",
            "",
            "is missing",
            'Give one with --prompt "TEXT", or on standard input; `so-tui chat` asks on a screen.',
        )
    prompts = arguments.prompt or [sys.stdin.read(_LONGEST_INPUT).strip()]
    load = _named(arguments)
    sampling = _given_sampling(arguments)
    headings = not arguments.json and (load.compare or len(prompts) > 1)
    found = []
    with contextlib.closing(ModelProcess(load)) as process:
        events = process.events()
        loaded = _loaded(events)
        for text in prompts:
            if headings:
                print(f"> {printable_line(text)}", flush=True)
            answers = []
            for model in loaded.models:
                if headings:
                    step = "" if model.step is None else f", step {thousands(model.step)}"
                    print(printable_line(f"[{model.side}: {model.name}{step}]"), flush=True)
                process.ask([_prompt(model.side, text, arguments)], sampling)
                answers.append(_answer(events, shown=not arguments.json))
            found.append(PromptAnswers(prompt=text, answers=tuple(answers)))
    if arguments.json:
        print_json(
            Generated(
                models=loaded.models, device=loaded.device, sampling=sampling, prompts=tuple(found)
            )
        )
    return 0


def chat(arguments: Namespace) -> int:
    """Open the screen of a conversation."""
    from so_tui.settings_file import load_settings
    from so_tui.ui.chat.screen import ChatApp, ChatScreen

    if not usable_terminal():
        print(
            "so-tui: a conversation needs a terminal; `so-tui generate` needs none", file=sys.stderr
        )
        return 2
    load = _named(arguments)
    logging.disable(logging.INFO)  # --verbose would write over the screen
    ChatApp(ChatScreen(load, _given_sampling(arguments), arguments.system), load_settings()).run()
    return 0


def _named(arguments: Namespace) -> LoadModel:
    from so_tui.launch.helper_jobs import named_model

    return named_model(
        arguments.model,
        arguments.runs_dir,
        compare=arguments.compare,
        base=arguments.base,
        device=arguments.device,
    )


def _given_sampling(arguments: Namespace) -> Sampling:
    """Return the sampling that the options ask for."""
    return Sampling(**{name: getattr(arguments, name) for name in Sampling.__struct_fields__})


def _prompt(side: Side, text: str, arguments: Namespace) -> Prompt:
    if arguments.raw:
        return Prompt(side=side, text=text)
    system = (Turn("system", arguments.system),) if arguments.system else ()
    return Prompt(side=side, turns=(*system, Turn("user", text)))


def _loaded(events: Iterator[Event]) -> Loaded:
    for event in events:
        if isinstance(event, Progress):
            print_note(event.message, stderr=True)
        if isinstance(event, Loaded):
            print_note(f"on {event.device}, in {event.layout}", stderr=True)
            return event
    raise AssertionError("the helper ended without an error before the model was loaded")


def _answer(events: Iterator[Event], *, shown: bool) -> Answer:
    """Return the next answer, and print it as it is written if it is to be ``shown``."""
    for event in events:
        if isinstance(event, Piece) and shown:
            print(event.text, end="", flush=True)
        if isinstance(event, Rejected):
            raise InputError([event.problem])
        if isinstance(event, Answer):
            if shown:
                print(flush=True)
            print_note(
                f"({plural(event.tokens, 'token')} in {duration(event.seconds)}, "
                f"{_ENDS[event.ended]})",
                stderr=True,
            )
            return event
    raise AssertionError("the helper ended without an error before the answer")


_ENDS: dict[Ended, str] = {
    "stop": "ended by itself",
    "length": "cut off at --max-tokens",
    "context": "cut off at the model's longest sequence",
    "cancelled": "cancelled",
}
