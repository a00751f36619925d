"""Read rows of a data set as conversations.

A conversation is a tuple of messages. Plain text is one message of the role ``text``, trained from
its first token on. Descriptions of tools are a message of the role ``tools`` at the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from so_tui.spec import DataSource, InputError
from so_tui.spec.errors import reject
from so_tui.units import thousands

Row = Mapping[str, Any]
TEXT = "text"
"""Role of plain text."""
TEXT_COLUMNS = frozenset(
    ("instruction", "input", "output", "prompt", "completion", "text", "content", "value")
)
"""Columns of rows, and keys of their turns, that hold text."""
TOOLS = "tools"
"""Role of the message whose ``extra`` holds descriptions of tools, for chat templates that write
them.
"""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys of a turn that hold what an answer thinks, as data sets and templates name them."""
UNTRAINED = ("weight", 0)
"""Key of an answer that is context."""


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
            name == "tool_calls" and calls for name, calls in self.extra
        )
        return self.role in ("assistant", TEXT) and said and UNTRAINED not in self.extra


Conversation = tuple[Message, ...]


class Layout(NamedTuple):
    """A layout of rows."""

    name: str
    """Its name in ``data.format``."""
    columns: tuple[str, ...]
    """Columns that a row must have."""
    read: Callable[[Row], Conversation]
    """Turns a row into a conversation."""


class _RowError(Exception):
    """A row that cannot be read."""

    def __init__(self, column: str, message: str) -> None:
        """Name the column, with the path of a nested value (``messages[0].role``), and what is
        wrong with it.
        """
        super().__init__(f"column {column}: {message}")


def _alpaca(row: Row) -> Conversation:
    instruction, context = _text(row, "instruction"), _text(row, "input")
    prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
    return *_history(row), Message("user", prompt), Message("assistant", _text(row, "output"))


def _alpaca_deepspeed(row: Row) -> Conversation:
    """Read an Alpaca row as DeepSpeed's SuperOffload example does: one text, which nothing ends."""
    context = _text(row, "input")
    given = f"### Input:\n{context}\n\n" if context.strip() else ""
    text = (
        f"### Instruction:\n{_text(row, 'instruction')}\n\n{given}"
        f"### Response:\n{_text(row, 'output')}"
    )
    return (Message(TEXT, text),)


def _history(row: Row) -> Iterator[Message]:
    """Yield the earlier rounds of an Alpaca row, as LLaMA-Factory's data sets have them: pairs of a
    prompt and its answer.
    """
    pairs = row.get("history")
    for index, pair in enumerate(pairs if isinstance(pairs, list) else ()):
        match pair:
            case [str(prompt), str(answer)]:
                yield Message("user", prompt)
                yield Message("assistant", answer)
            case _:
                raise _RowError(f"history[{index}]", f"is {_short_repr(pair)}, not a pair of texts")


def _prompt_completion(row: Row) -> Conversation:
    """Read both columns. Answers in the prompt are context, as in TRL."""
    prompt = (
        message._replace(extra=(*message.extra, UNTRAINED))
        for message in _side(row, "prompt", "user")
    )
    return *prompt, *_side(row, "completion", "assistant")


def _side(row: Row, column: str, role: str) -> Conversation:
    return (
        (Message(role, _text(row, column)),)
        if isinstance(row[column], str | int | float | None)
        else _turns(row, column)
    )


def _plain(row: Row) -> Conversation:
    return (Message(TEXT, _text(row, "text")),)


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
    ),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "ipython"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}
_TURN_KEYS = (("role", "content"), ("from", "value"))


def _turns(row: Row, column: str) -> Conversation:
    """Read a list of turns with OpenAI's keys (role, content) or ShareGPT's (from, value)."""
    turns = row[column] if row[column] is not None else ()
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise _RowError(column, f"is {_short_repr(turns)}, not a list of turns")
    return tuple(_turn(turn, f"{column}[{index}]") for index, turn in enumerate(turns))


def _turn(turn: object, column: str) -> Message:
    if not isinstance(turn, Mapping):
        raise _RowError(column, f"is {_short_repr(turn)}, not a turn with `role` and `content`")
    for role_key, content_key in _TURN_KEYS:
        if turn.get(role_key) is None:
            continue
        role = _ROLES.get(str(turn[role_key]).strip().lower().replace("-", "_"))
        if role is None:
            raise _RowError(
                f"{column}.{role_key}",
                f"is {_short_repr(turn[role_key])}, not one of {', '.join(_ROLES)}",
            )
        extra = tuple(
            (
                name,
                [_with_arguments(call) for call in _as_list(value, f"{column}.{name}")]
                if name == "tool_calls"
                else _without_nulls(value),
            )
            for name, value in turn.items()
            if name not in (role_key, content_key) and value is not None
        )
        return Message(role, _content(turn.get(content_key), f"{column}.{content_key}"), extra)
    raise _RowError(
        column,
        f"has the keys {', '.join(turn) or '(none)'}, but needs role and content, or from and "
        "value",
    )


def _content(value: object, column: str) -> str:
    """Return the text of a turn; OpenAI's lists of text parts are joined."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        if not all(isinstance(part, str) for part in parts):
            raise _RowError(column, "has parts that are not text")
        return "".join(str(part) for part in parts)
    return _text({column: value}, column)


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)  # JSON's true, not Python's True
    raise _RowError(column, f"is {_short_repr(value)}, not text")


def _without_nulls(value: Any) -> Any:
    """Remove nulls from a value. Where rows differ in their keys, ``datasets`` fills in nulls."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _with_context(row: Row, layout: Layout) -> Conversation:
    """Read a row and put what its ``tools`` and ``system`` columns hold in front of the
    conversation.
    """
    said = layout.read(row)
    if not said or said[0].role == TEXT:
        return said
    system = row.get("system")
    if isinstance(system, str) and system.strip() and said[0].role != "system":
        said = (Message("system", system), *said)
    tools = [] if layout.name == "alpaca" else _as_list(row.get(TOOLS), TOOLS)
    return (Message(TOOLS, "", ((TOOLS, tools),)), *said) if tools else said


def _as_list(value: object, column: str) -> list[Any]:
    """Return a list, which may be written as JSON. A single object becomes a list of one, an empty
    value an empty list.
    """
    if isinstance(value, str):
        try:
            known = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise _RowError(column, f"is not JSON ({error.msg})") from error
        except RecursionError as error:
            raise _RowError(column, "is nested too deeply") from error
        except ValueError as error:  # Python converts integers of up to 4,300 digits
            raise _RowError(column, "has a number of thousands of digits") from error
    else:
        known = _without_nulls(value)
    if not known:
        return []
    if isinstance(known, Mapping):
        return [known]
    if not isinstance(known, list):
        raise _RowError(column, f"is {_short_repr(value)}, not a list")
    return known


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    try:
        given = json.loads(call["arguments"]) if isinstance(call.get("arguments"), str) else None
    except (ValueError, RecursionError):
        return call  # Not JSON that can be read: the model learns to write it as it is.
    return {**call, "arguments": given} if isinstance(given, dict) else call


def _short_repr(value: object) -> str:
    text = "empty" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


LAYOUTS = (
    Layout("messages", ("messages",), partial(_turns, column="messages")),
    Layout("sharegpt", ("conversations",), partial(_turns, column="conversations")),
    Layout("alpaca", ("instruction", "output"), _alpaca),
    Layout("alpaca-deepspeed", ("instruction", "output"), _alpaca_deepspeed),
    Layout("prompt-completion", ("prompt", "completion"), _prompt_completion),
    Layout("text", ("text",), _plain),
)


def layout_of(columns: Sequence[str], source: DataSource) -> Layout:
    """Return the layout of a source.

    Args:
        columns: The columns of its rows.
        source: The source; its ``format`` is ``auto`` or names the layout.

    Raises:
        InputError: The columns do not fit.
    """
    # What only a name chooses comes after what has the same columns.
    candidates = [layout for layout in LAYOUTS if source.format in ("auto", layout.name)]
    for layout in candidates:
        if set(layout.columns) <= set(columns):
            return layout
    has = f"its rows have the columns {', '.join(columns) or '(none)'}"
    if source.format == "auto":
        known = "; ".join(f"{layout.name}: {', '.join(layout.columns)}" for layout in candidates)
        raise reject(
            "data-columns-unknown",
            "data.source",
            source.source,
            f"{has}, which fit no known layout",
            f"Rename the columns to those of a layout ({known}).",
        )
    raise reject(
        "data-columns-mismatch",
        "data.format",
        f"{source.format} for {source.source}",
        f"{has}, but this layout needs {', '.join(candidates[0].columns)}",
        "Rename the columns, or set `data.format=auto`, which tries every layout.",
    )


def _layout_of_row(row: Row, usual: Layout) -> Layout:
    """Return the layout of one row.

    Files of a folder may have different layouts. A row then has nulls in the columns of the other
    layouts.
    """
    if any(row.get(column) is not None for column in usual.columns):
        return usual
    return next(
        (
            layout
            for layout in LAYOUTS
            if all(row.get(column) is not None for column in layout.columns)
        ),
        usual,
    )


def read_row(row: Row, usual: Layout, source: DataSource, number: int) -> Conversation:
    """Read row ``number`` (from 1) of a source, most of whose rows have the ``usual`` layout.

    Raises:
        InputError: Names the row and the column.
    """
    layout = _layout_of_row(row, usual) if source.format == "auto" else usual
    try:
        return _with_context(row, layout)
    except _RowError as error:
        raise bad_row(
            "data-row-unreadable", source.source, number, f"{error} (read as {layout.name})"
        ) from error


def bad_row(code: str, source: str, number: int, message: str) -> InputError:
    """Return the error for a row that cannot be used.

    Args:
        code: The problem's code.
        source: Name of the source or file.
        number: The row, from 1.
        message: What is wrong with it.
    """
    return reject(
        code,
        "data.source",
        f"{source}, row {thousands(number)}",
        message,
        "Correct or remove the row, or set another `data.format`.",
    )
