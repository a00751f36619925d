"""Read rows of a data set as conversations: layouts of rows, and what their columns hold.

A conversation is a tuple of messages. Plain text is one message of the role ``text``, trained from
its first token on. Descriptions of tools are a message of the role ``tools`` at the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from so_tui.spec import DataSource, InputError
from so_tui.spec.errors import reject
from so_tui.units import thousands
from so_tui_trainer.data.calls import (
    RowError,
    UnreadCallError,
    as_list,
    calls_of,
    glaive_call,
    hermes_calls,
    listed_tools,
    responses,
    short_repr,
    tools_of,
)
from so_tui_trainer.data.turns import (
    REPLACED,
    TEXT,
    TOOLS,
    UNREAD,
    UNTRAINED,
    Conversation,
    Message,
    Row,
    WeightError,
    text_of,
    turns,
)

_TOOL_COLUMNS = (TOOLS, "functions")
_CONTEXT = ("system", *_TOOL_COLUMNS)


class Layout(NamedTuple):
    """A layout of rows."""

    name: str
    """Its name in ``data.format``."""
    columns: tuple[str, ...]
    """Columns that a row must have."""
    read: Callable[[Row], Conversation]
    """Turns a row into a conversation."""
    further: tuple[str, ...] = _CONTEXT
    """Columns that it reads where a row has them."""

    @property
    def reads(self) -> tuple[str, ...]:
        """All columns that it reads."""
        return self.columns + self.further


def _alpaca(row: Row) -> Conversation:
    instruction, context = text_of(row, "instruction"), text_of(row, "input")
    prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
    return *_history(row), Message("user", prompt), Message("assistant", text_of(row, "output"))


def _alpaca_deepspeed(row: Row) -> Conversation:
    """Read an Alpaca row as DeepSpeed's SuperOffload example does: one text, which nothing ends."""
    context = text_of(row, "input")
    given = f"### Input:\n{context}\n\n" if context.strip() else ""
    text = (
        f"### Instruction:\n{text_of(row, 'instruction')}\n\n{given}"
        f"### Response:\n{text_of(row, 'output')}"
    )
    return (Message(TEXT, text),)


def _history(row: Row) -> Iterator[Message]:
    """Yield the earlier rounds of an Alpaca row, as LLaMA-Factory's data sets have them: pairs of a
    prompt and its answer.
    """
    given = row.get("history")
    for index, pair in enumerate(as_list(given, "history") if _has_items(given) else ()):
        match pair:
            case [str(prompt), str(answer)]:
                yield Message("user", prompt)
                yield Message("assistant", answer)
            case _:
                raise RowError(f"history[{index}]", f"is {short_repr(pair)}, not a pair of texts")


def _has_items(value: object) -> bool:
    """Return whether a value is a list or an object, or looks like one as JSON. In Alpaca rows,
    columns with other texts or numbers mean something else.
    """
    return isinstance(value, list | dict) or (
        isinstance(value, str) and value.lstrip().startswith(("[", "{"))
    )


def _prompt_completion(row: Row) -> Conversation:
    """Read both columns. Answers in the prompt are context, as in TRL."""
    prompt = (
        message._replace(extra=(*message.extra, UNTRAINED))
        for message in _side(row, "prompt", "user")
    )
    return *prompt, *_side(row, "completion", "assistant")


def _side(row: Row, column: str, role: str) -> Conversation:
    return (
        (Message(role, text_of(row, column)),)
        if isinstance(row[column], str | int | float | None)
        else turns(row, column)
    )


def _plain(row: Row) -> Conversation:
    return (Message(TEXT, text_of(row, "text")),)


def _xlam(row: Row) -> Conversation:
    """Read a question and the calls that answer it, each as JSON."""
    try:
        extra: dict[str, Any] = {"tool_calls": calls_of(row["answers"], "answers")}
    except UnreadCallError as error:
        extra = {UNREAD: str(error)}
    return Message("user", text_of(row, "query")), Message("assistant", "", (*extra.items(),))


_GLAIVE_TURN = re.compile(r"(?:^|\n\n)(USER|ASSISTANT|FUNCTION RESPONSE): ?")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


def _glaive(row: Row) -> Conversation:
    """Read a conversation that is one text, with a heading before each turn."""
    before, *parts = _GLAIVE_TURN.split(text_of(row, "chat").strip())
    if before.strip():
        raise RowError("chat", f"begins with {short_repr(before)}, not with USER:")
    return tuple(
        Message(_GLAIVE_ROLES[heading], said.strip().removesuffix("<|endoftext|>").strip())
        for heading, said in zip(parts[::2], parts[1::2], strict=True)
    )


_MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns with what a model of text would not see."""
_RESPONSE = "FUNCTION RESPONSE:"
"""What results begin with where Glaive's rows became turns."""


def _with_context(row: Row, layout: Layout) -> Conversation:
    """Read a row and put what its columns of tools and ``system`` hold in front of the
    conversation.
    """
    for column in _MEDIA_COLUMNS:
        if row.get(column):
            raise RowError(column, "is not empty, and only text is trained on")
    said = layout.read(row)
    if not said or said[0].role == TEXT:
        return said
    system = row.get("system")
    system = "" if isinstance(system, int | float) else text_of(row, "system")
    if system.strip():
        if layout.name == "glaive":
            system = system.strip().removeprefix("SYSTEM:").strip()
        if said[0].role != "system":
            said = (Message("system", system), *said)
        elif said[0].content.strip() != system.strip():
            raise RowError("system", "differs from the system turn of the conversation")
    described = {
        name: row.get(name)
        for name in _TOOL_COLUMNS
        if name in layout.reads and (layout.name != "alpaca" or _has_items(row.get(name)))
    }
    if said[0].role in ("system", "developer"):
        described |= {name: value for name, value in said[0].extra if name in _TOOL_COLUMNS}
        extra = tuple(pair for pair in said[0].extra if pair[0] not in _TOOL_COLUMNS)
        said = (said[0]._replace(extra=extra), *said[1:])
    for message in said:
        if any(name in _TOOL_COLUMNS and value for name, value in message.extra):
            raise RowError(
                TOOLS,
                "belong to a whole row, and here to a later turn or the "
                f"{message.role}'s: put them into the row, or its first system turn",
            )
    tools: list[dict[str, Any]] = []
    for name, value in described.items():
        tools += [tool for tool in tools_of(value, name) if tool not in tools]
    return _in_one_form(said, tools)


def _in_one_form(said: Conversation, tools: list[dict[str, Any]]) -> Conversation:
    """Return a conversation in which calls, results and tools that are written in texts, as in
    Glaive's and Hermes' rows, are calls, results and tools.

    Texts in Hermes' form stay as they are in rows without tools of their own.
    """
    first = said[0]
    listed: list[dict[str, Any]] = []
    if first.role == "system":
        listed = listed_tools(first.content)
        if listed or (tools and "</tools>" in first.content.partition("<tools>")[2]):
            said = said[1:]
    messages = [part for message in said for part in _parts(message, hermes=bool(tools))]
    if tools := tools or listed:
        replaced = ((REPLACED, first.content),) if said[:1] != (first,) else ()
        messages.insert(0, Message(TOOLS, "", ((TOOLS, tools), *replaced)))
    return tuple(messages)


def _parts(message: Message, *, hermes: bool) -> Iterator[Message]:
    """Yield the message, or the results that it consists of, with the calls in its text.

    Args:
        message: The message.
        hermes: Whether calls and results in Hermes' form are read.
    """
    text = message.content
    if message.role == "assistant":
        try:
            found = glaive_call(text) or (hermes_calls(text) if hermes else None)
        except UnreadCallError as error:
            yield message._replace(extra=(*message.extra, (UNREAD, str(error))))
            return
        if found:
            content, calls = found
            if any(name == "tool_calls" for name, _ in message.extra):
                reason = "the turn has calls in two places"
                yield message._replace(extra=(*message.extra, (UNREAD, reason)))
                return
            message = Message("assistant", content, (*message.extra, ("tool_calls", calls)))
    elif message.role in ("user", "tool") and text.startswith(_RESPONSE):
        message = message._replace(role="tool", content=text.removeprefix(_RESPONSE).strip())
    elif message.role == "tool" and hermes:
        yield from (message._replace(content=result) for result in responses(text))
        return
    yield message


LAYOUTS = (
    Layout("messages", ("messages",), partial(turns, column="messages")),
    Layout("sharegpt", ("conversations",), partial(turns, column="conversations")),
    Layout("alpaca", ("instruction", "output"), _alpaca, ("input", "history", *_CONTEXT)),
    Layout("alpaca-deepspeed", ("instruction", "output"), _alpaca_deepspeed, ("input",)),
    Layout("prompt-completion", ("prompt", "completion"), _prompt_completion),
    Layout("xlam", ("query", "tools", "answers"), _xlam),
    Layout("glaive", ("system", "chat"), _glaive),
    Layout("text", ("text",), _plain, ()),
)
_PREFERENCE_COLUMNS = ("chosen", "rejected", "chosen_messages", "rejected_messages")
_LABEL_COLUMNS = ("label", "kto_tag")


def unused_columns(columns: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """Return the columns of a source that its layout does not read."""
    return tuple(name for name in columns if name not in layout.reads)


def layout_of(columns: Sequence[str], source: DataSource) -> Layout:
    """Return the layout of a source.

    Args:
        columns: The columns of its rows.
        source: The source; its ``format`` is ``auto`` or names the layout.

    Raises:
        InputError: The columns do not fit, or hold preferences.
    """
    found = [name for name in _PREFERENCE_COLUMNS if name in columns]
    if found and source.format == "auto":
        raise reject(
            "data-preferences",
            "data.source",
            source.source,
            f"has preferences between answers (the columns {', '.join(found)}), and "
            "so-tui trains on answers",
            "Write rows of `messages` that end with the chosen answer. If another column has "
            "whole conversations already, name its layout in `data.format`.",
        )
    # A layout that is never detected follows one with the same columns.
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
    if layout.name != "text" and (label := _verdict(row)):
        raise reject(
            "data-preferences",
            "data.source",
            _named(source.source, number),
            f"has a verdict on its answer (column {label}), and so-tui trains on every answer",
            "Keep the rows with good answers, and remove the column.",
        )
    try:
        return _with_context(row, layout)
    except WeightError as error:
        raise reject(
            "data-loss-weight",
            "data.source",
            _named(source.source, number),
            f"{error}: a turn is trained or is context",
            "Set it to 0 or 1, or remove the key.",
        ) from error
    except RowError as error:
        raise reject(
            "data-row-unreadable",
            "data.source",
            _named(source.source, number),
            f"{error} (read as {layout.name})",
            "Correct or remove the row, or name its layout in `data.format`.",
        ) from error


def _verdict(row: Row) -> str:
    """Return the column with which a row says whether its answer is good; empty without one."""
    for name in _LABEL_COLUMNS:
        if (value := row.get(name)) is not None and str(value).lower() in ("true", "false"):
            return name
    return ""


def _named(source: str, number: int) -> str:
    return f"{source}, row {thousands(number)}"


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
        _named(source, number),
        message,
        "Correct or remove the row.",
    )
