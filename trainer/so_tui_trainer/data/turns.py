"""Read one turn of a conversation: its role, its text, what it thinks and calls, and the flags with
which other trainers leave a turn out of the loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from so_tui_trainer.data.calls import CALL_KEYS, RowError, UnreadCallError, calls_of, short_repr

Row = Mapping[str, Any]
TEXT = "text"
"""Role of plain text."""
TOOLS = "tools"
"""Role of the message whose ``extra`` holds descriptions of tools, for chat templates that write
them.
"""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys of a turn that hold what an answer thinks, as data sets and templates name them."""
UNTRAINED = ("weight", 0)
"""Key of an answer that is context."""
UNREAD = "unread"
"""Key of an answer with a call that cannot be read; its value is the reason."""
REPLACED = "replaced"
"""Key of the message of tools if a system turn that listed them was left out."""
FLAGGED = "flagged"
"""Key of a question or a result that the data flag as trained."""
_FLAGS = ("train", "training", "loss", "weight", "loss_weight")
"""Keys with which trainers leave a turn out of the loss."""
_KNOWN_KEYS = frozenset(
    (*REASONING_KEYS, "tool_call_id", "name", "weight", TOOLS, UNREAD, REPLACED, FLAGGED)
)
_LONGEST_KEY = 40
"""Characters of a key that are shown."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str
    extra: tuple[tuple[str, Any], ...] = ()
    """Further keys that a chat template may use: ``tool_calls``, ``reasoning_content``, ``name``
    ...
    """

    @property
    def answers(self) -> bool:
        """Whether the message has something for the model to learn."""
        said = bool(self.content.strip()) or any(
            name in ("tool_calls", UNREAD) and value for name, value in self.extra
        )
        return self.role in ("assistant", TEXT) and said and UNTRAINED not in self.extra


Conversation = tuple[Message, ...]


class WeightError(RowError):
    """A turn that is to count in part."""


def unknown_kinds(conversation: Conversation, template: str) -> frozenset[str]:
    """Return what a row has that is unknown or was replaced, as kinds:
    ``unknown-key:NAME`` for keys of turns and calls that the chat template does not name either,
    ``system-replaced`` for a system text that listed the tools, ``flag-ignored`` for a question or
    a result that is flagged as trained.
    """
    found = set()
    for message in conversation:
        for name, value in message.extra:
            if name == REPLACED:
                found.add("system-replaced")
            elif name == FLAGGED:
                found.add("flag-ignored")
            elif name == "tool_calls":
                found |= {f"unknown-key:{key}" for call in value for key in {*call} - CALL_KEYS}
            elif name not in _KNOWN_KEYS and not _is_named(name, template):
                found.add(f"unknown-key:{name[:_LONGEST_KEY]}")
    return frozenset(found)


@lru_cache(maxsize=1000)
def _is_named(key: str, template: str) -> bool:
    return bool(re.search(rf"[.\"']{re.escape(key)}\b", template))


_NAMES = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human"),
    "assistant": (
        "assistant",
        "gpt",
        "model",
        "chatgpt",
        "bot",
        "chatbot",
        "ai",
        "bing",
        "bard",
        "function_call",
        "tool_call",
    ),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "ipython"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}
_CALLING = ("function_call", "tool_call")
"""Roles of turns whose text is a call, or a list of calls, as JSON."""
_TURN_KEYS = (("role", "content"), ("from", "value"))


def turns(row: Row, column: str) -> Conversation:
    """Read a list of turns with OpenAI's keys (role, content) or ShareGPT's (from, value).

    Raises:
        RowError: A turn cannot be read.
    """
    given = row[column] if row[column] is not None else ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RowError(column, f"is {short_repr(given)}, not a list of turns")
    return tuple(_turn(turn, f"{column}[{index}]") for index, turn in enumerate(given))


def _turn(turn: object, column: str) -> Message:
    if not isinstance(turn, Mapping):
        raise RowError(column, f"is {short_repr(turn)}, not a turn with `role` and `content`")
    for role_key, content_key in _TURN_KEYS:
        if turn.get(role_key) is None:
            continue
        named = str(turn[role_key]).strip().lower().replace("-", "_")
        role = _ROLES.get(named)
        if role is None:
            raise RowError(
                f"{column}.{role_key}",
                f"is {short_repr(turn[role_key])}, not one of {', '.join(_ROLES)}",
            )
        content = turn.get(content_key)
        if content_key not in turn and role != "assistant":
            raise RowError(column, f"is a turn of the {role} without `{content_key}`")
        if len(turn) == 2 and isinstance(content, str) and named not in _CALLING:
            return Message(role, content)  # as nearly all are
        parts = _Parts(column)
        parts.add_content(content, content_key)
        if named in _CALLING:
            parts.add_spoken_call()
        for name, value in turn.items():
            if name not in (role_key, content_key) and value is not None:
                parts.add(name, value)
        return parts.message(role)
    raise RowError(
        column,
        f"has the keys {', '.join(turn) or '(none)'}, but needs role and content, or from and "
        "value",
    )


class _Parts:
    """What a turn consists of, while it is read."""

    def __init__(self, column: str) -> None:
        self.column = column
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        self.flags: dict[str, bool] = {}
        self.unread = ""

    def message(self, role: str) -> Message:
        """Return the turn."""
        if self.calls:
            self.extra["tool_calls"] = self.calls
        if self.unread:
            self.extra[UNREAD] = self.unread
        if role != "assistant" and any(self.flags.values()):
            self.extra[FLAGGED] = True
        extra = (*self.extra.items(), *([] if all(self.flags.values()) else [UNTRAINED]))
        return Message(role, self.content, extra)

    def add(self, name: str, value: Any) -> None:
        """Add what a key of the turn holds."""
        column = f"{self.column}.{name}"
        if name in _FLAGS:
            self.flags[column] = _flag(value, column)
        elif name in ("tool_calls", "function_call"):
            before = len(self.calls)
            self.add_calls(value, column)
            if 0 < before < len(self.calls):
                self.unread = "the turn has calls in two places"
        elif name in REASONING_KEYS and not isinstance(value, str):
            if value:
                raise RowError(column, f"is {short_repr(value)}, not text")
        else:
            self.extra[name] = value
            self.flags |= _inner_flags(value, column)

    def add_calls(self, value: Any, column: str) -> None:
        """Add calls, or say why they are not understood."""
        try:
            self.calls += calls_of(value, column)
        except UnreadCallError as error:
            self.unread = str(error)

    def add_spoken_call(self) -> None:
        """Take the text, but for a thought at its start, as calls in JSON."""
        thought, closing, spoken = self.content.rpartition("</think>")
        try:
            self.add_calls(spoken, f"{self.column}.content")
        except RowError as error:
            self.unread = str(error)
        if self.calls:
            self.content = thought + closing

    def add_content(self, value: object, key: str) -> None:
        """Add the text of a turn; lists of parts are joined."""
        column = f"{self.column}.{key}"
        if not isinstance(value, Sequence) or isinstance(value, str):
            self.content = text_of({column: value}, column)
            return
        said: list[str] = []
        flags: dict[str, bool] = {}
        for index, part in enumerate(value):
            here = f"{column}[{index}]"
            if isinstance(part, str):
                said.append(part)
                continue
            text = (
                next((part[name] for name in ("text", "value") if part.get(name) is not None), None)
                if isinstance(part, Mapping)
                else None
            )
            if not isinstance(text, str):
                raise RowError(column, "has parts that are not text")
            flags |= _inner_flags(part, here)
            match part.get("type", "text"):
                case "text" | "input_text" | "output_text":
                    said.append(text)
                case "reasoning" | "thinking":
                    self.extra["reasoning_content"] = self.extra.get("reasoning_content", "") + text
                case "tool_call" | "function_call":
                    self.add_calls(text, here)
                case kind:
                    raise RowError(here, f"is a part of the type {short_repr(kind)}, not text")
        if len({*flags.values()}) > 1:
            raise WeightError(f"{column}", "has trained parts and parts that are context")
        self.flags |= flags
        self.content = "".join(said)


def _inner_flags(value: object, column: str) -> Iterator[tuple[str, bool]]:
    """Yield the flags in an object, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in _FLAGS and inner is not None:
                yield f"{column}.{name}", _flag(inner, f"{column}.{name}")
            else:
                yield from _inner_flags(inner, f"{column}.{name}")


def _flag(value: object, column: str) -> bool:
    """Return whether a flag says that a turn is trained."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise WeightError(column, f"is {short_repr(value)}, neither 0 (context) nor 1 (trained)")


def text_of(row: Row, column: str) -> str:
    """Return the text in a column, empty without one.

    Raises:
        RowError: It is not text.
    """
    value = row.get(column)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)  # JSON's true, not Python's True
    raise RowError(column, f"is {short_repr(value)}, not text")
