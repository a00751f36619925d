"""Which tokens of a conversation are trained, and in what context, proven for each answer.

The context P of an answer is the prompt that a server would send: the turns before it and the
generation prompt. The answer A is what the model should write next: reasoning, text, calls, and the
token that stops generation. Where the template writes the whole conversation as one text in which
each answer follows its context, that text is one document. Otherwise each answer becomes a document
of its own, or is context. Parts of the data that the template leaves out are counted.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from so_tui.spec.data_notes import UNPROVEN, Found
from so_tui.spec.run_spec import LossOn
from so_tui_trainer.data.chat import Chat, TemplateError, thought_of, with_short_ids
from so_tui_trainer.data.templated import Piece, pieces_of
from so_tui_trainer.data.turns import REASONING_KEYS, TEXT, TOOLS, UNREAD, Conversation, Message

Kind = Literal[
    "system-dropped",
    "tools-dropped",
    "results-dropped",
    "calls-dropped",
    "text-dropped",
    "reasoning-dropped",
    "reasoning-composed",
    "turns-split",
    "turns-context",
    "templated",
]
"""What a template leaves out, or what was done where it writes a turn in another form."""


class Segment(NamedTuple):
    """A piece of text, and whether its tokens carry loss."""

    text: str
    trained: bool


class Written(NamedTuple):
    """A conversation as documents."""

    documents: list[list[Segment]]
    kinds: frozenset[str] = frozenset()
    unproven: str = ""
    """Why an answer could not be proven; it is context then."""

    def found(self, row: int) -> dict[str, Found]:
        """Return the kinds of a row."""
        found = {str(kind): Found(1, row) for kind in self.kinds}
        return found | ({UNPROVEN: Found(1, row, self.unproven)} if self.unproven else {})


class _Answer(NamedTuple):
    prompt: str
    text: str
    """What the model writes."""
    stop: int
    """Length of ``text`` without the token that stops generation."""
    kinds: frozenset[Kind]

    @property
    def said(self) -> str:
        """What the model writes, without that token."""
        return self.text[: self.stop]


class _UnprovenError(Exception):
    """An answer whose tokens cannot be proven."""


# What a turn consists of.

_ASKED_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")
"""At the end of a prompt: a thought that it opens, or an empty one with which it asks for none."""
_THOUGHT_FIRST = re.compile(r"\A\s*<think>\n?")
_EMPTY_THOUGHT_FIRST = re.compile(r"\A\s*<think>\s*</think>\s*")
_EMPTY_THOUGHT = re.compile(r"<think>(\s*)</think>")


def reasoning_of(message: Message) -> str:
    """Return what an answer thinks, from a key of its own or from the start of its content."""
    return next(iter(_thoughts(message).values()), "")


def _thoughts(message: Message) -> dict[str, str]:
    """Return different thoughts of an answer, each as it is written, by what it says."""
    thought = thought_of(message.content)
    given = [value for name, value in message.extra if name in REASONING_KEYS]
    given += [thought[1]] if thought else []
    return {value.strip(): value for value in given if value.strip()}


def text_of(message: Message) -> str:
    """Return what a turn says, without a thought at the start of its content."""
    thought = thought_of(message.content) if message.role == "assistant" else None
    return message.content[thought.end() :] if thought else message.content


def calls_of(message: Message) -> list[Any]:
    """Return the tools that a turn calls."""
    return next((value for name, value in message.extra if name == "tool_calls"), None) or []


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and plain values of a call's arguments."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _call_parts(call: Any) -> Iterator[Any]:
    """Yield the name of a called tool, and what its arguments consist of."""
    if isinstance(call, str):
        yield call
    if isinstance(call, Mapping):
        function = call.get("function", call)
        if isinstance(function, Mapping):
            yield function.get("name", "")
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                with suppress(ValueError, RecursionError):  # a text that is no JSON is one part
                    arguments = json.loads(arguments)
            yield from _leaves(arguments if arguments is not None else {})


def _forms(value: Any) -> Iterator[str]:
    """Yield the ways in which templates write a value."""
    if isinstance(value, str):
        yield value.strip()
        yield json.dumps(value, ensure_ascii=False)[1:-1]
        escaped = json.dumps(value)[1:-1]
        yield escaped
        for sign in "<>&'":  # as Jinja's own filter writes JSON
            escaped = escaped.replace(sign, f"\\u{ord(sign):04x}")
        yield escaped
        yield repr(value)[1:-1]
    else:
        yield json.dumps(value)
        yield str(value)


def _has(text: str, value: Any) -> bool:
    return any(form in text for form in _forms(value))


def _has_calls(text: str, message: Message) -> bool:
    return all(_has(text, part) for call in calls_of(message) for part in _call_parts(call))


def _is_ambiguous(chat: Chat, conversation: Conversation) -> bool:
    """Return whether the words of a part of a conversation may stand elsewhere too."""
    if any(message.role == TOOLS or calls_of(message) for message in conversation):
        return True
    both = [(text_of(message).strip(), reasoning_of(message).strip()) for message in conversation]
    parts = [part for pair in both for part in pair if part]
    everything = "\n".join((str(chat.tokenizer.chat_template), *parts))
    return any(everything.count(part) > 1 for part in parts)


_MARK = re.compile(r"zqx\d+xqz")


def _unmarked(text: str) -> str:
    return _MARK.sub("", text)


def _marked(conversation: Conversation) -> Conversation:
    """Return a conversation in which each part ends with a mark of its own, so that no other text
    can be taken for it.
    """
    numbers = itertools.count()

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            said = value.rstrip()
            return f"{said}zqx{next(numbers)}xqz{value[len(said) :]}" if said else value
        if isinstance(value, Mapping):
            return {mark(key): mark(inner) for key, inner in value.items()}
        return [mark(inner) for inner in value] if isinstance(value, list) else value

    def mark_function(one: Any) -> Any:
        if not isinstance(one, Mapping):
            return mark(one)
        marks = {"function": mark_function, "name": mark, "arguments": mark}
        return {key: marks[key](value) if key in marks else value for key, value in one.items()}

    def mark_key(role: str, name: str, value: Any) -> Any:
        if name == "tool_calls" or role == name == TOOLS:
            return [mark_function(one) for one in value]
        return mark(value) if name in REASONING_KEYS else value

    def mark_turn(turn: Message) -> Message:
        content = turn.content
        if turn.role == "assistant" and (thought := thought_of(content)):
            start, end, text = content[: thought.start(1)], thought.end(1), thought.end()
            content = start + mark(thought[1]) + content[end:text] + mark(content[text:])
        else:
            content = mark(content)
        extra = tuple((name, mark_key(turn.role, name, value)) for name, value in turn.extra)
        return Message(turn.role, content, extra)

    return tuple(map(mark_turn, conversation))


def _left_out(before: Sequence[Message], prompt: str) -> set[Kind]:
    """Return what the turns before an answer have and its context does not."""
    found: set[Kind] = set()
    at = 0
    for message in before:
        said = text_of(message).strip()
        if message.role == TOOLS:
            tools = dict(message.extra)[TOOLS]
            if not all(_has(prompt, next(iter(_call_parts(tool)), "")) for tool in tools):
                found.add("tools-dropped")
            continue
        if message.role in ("system", "developer"):
            if said and not _has(prompt, said):
                found.add("system-dropped")
            continue
        end = next(
            (place + len(form) for form in _forms(said) if (place := prompt.find(form, at)) >= 0),
            -1,
        )
        if said and end < 0:
            if message.role == "tool":
                found.add("results-dropped")
            elif message.role == "assistant" and calls_of(message):
                found.add("text-dropped")
            else:
                shown = repr(_unmarked(said)[:40])
                raise _UnprovenError(
                    f"the template leaves out or moves a {message.role} message: {shown}"
                )
        if not calls_of(message):
            at = max(at, end)  # text beside a call may come after its result
        elif not _has_calls(prompt, message):
            found.add("calls-dropped")
    return found


def _message(conversation: Conversation, index: int) -> str:
    """Name a turn by its number; descriptions of tools are none."""
    before = (turn for turn in conversation[:index] if turn.role != TOOLS)
    return f"message {1 + sum(1 for _ in before)}"


# Proof.


class _ReactsError(Exception):
    """Marks change more of what a template writes than the parts that they are in."""


class _Row:
    """A conversation that is being written."""

    def __init__(self, chat: Chat, conversation: Conversation, plain: _Row | None = None) -> None:
        self.chat, self.turns = chat, conversation
        self.plain = plain
        """The row without the marks that this one has."""
        self._of_text = all(
            turn.role in ("system", "user", "assistant")
            and not turn.extra
            and "think>" not in turn.content
            for turn in conversation
        )
        self._rendered: dict[tuple[int, bool, bool], str] = {}
        self._with_marks: _Row | None = None
        if plain is None and _is_ambiguous(chat, conversation):
            self._with_marks = _Row(chat, _marked(conversation), self)

    def render(self, turns: int, *, ask: bool, thinks: bool) -> str:
        """Render the first turns."""
        key = turns, ask, thinks
        if key not in self._rendered:
            text = self.chat.render(self.turns[:turns], ask=ask, thinks=thinks)
            if self.plain and _unmarked(text) != self.plain.render(turns, ask=ask, thinks=thinks):
                raise _ReactsError
            self._rendered[key] = text
        return self._rendered[key]

    def _alone(self, index: int, *, thinks: bool) -> str | None:
        """Return what the template writes of a turn with nothing before it but a question."""
        short = [turn for turn in self.turns[:index] if turn.role == TOOLS]
        short.append(Message("user", "?"))
        asked = self.chat.render(short, ask=True, thinks=thinks)
        found = _behind(asked, self.chat.render([*short, self.turns[index]], thinks=thinks))
        if self.plain and _unmarked(found or "") != (self.plain._alone(index, thinks=thinks) or ""):
            raise _ReactsError
        return found

    def answer(self, index: int) -> _Answer:
        """Return the context of an answer, and what the model writes there.

        Raises:
            TemplateError: The template rejects the turns.
            _UnprovenError: What the model would write cannot be proven.
        """
        if self._with_marks is not None:
            with suppress(_ReactsError, TemplateError):  # found without marks then
                prompt, text, stop, kinds = self._with_marks._answer(index)
                said = _unmarked(text[:stop])
                return _Answer(_unmarked(prompt), said + text[stop:], len(said), kinds)
        return self._answer(index)

    def _answer(self, index: int) -> _Answer:
        turn = self.turns[index]
        if reason := dict(turn.extra).get(UNREAD):
            raise _UnprovenError(str(reason))
        if len(_thoughts(turn)) > 1:
            raise _UnprovenError("it has reasoning in two places")
        reasoning = reasoning_of(turn).strip()
        thinks = bool(reasoning)
        prompt = self._prompt(index, thinks=thinks)
        kinds = _left_out(self.turns[:index], prompt)
        tail, stop = self._tail(index, prompt, thinks=thinks)
        said = tail[:stop]
        text = text_of(turn).strip()
        if text.startswith("<think>") and (
            self.chat.reasoning_key or _ASKED_THOUGHT.search(prompt)
        ):
            raise _UnprovenError("its thought does not end, or a second one follows")
        if reasoning and not _has(said, reasoning):
            composed = _with_reasoning(prompt, said, reasoning)
            kinds.add("reasoning-composed" if composed else "reasoning-dropped")
            said = composed or said
        if text and not _has(said, text):
            if not calls_of(turn):
                raise _UnprovenError("the template leaves out the answer's text")
            kinds.add("text-dropped")
        if not _has_calls(said, turn):
            raise _UnprovenError("the template leaves out a tool call or its arguments")
        return _Answer(prompt, said + tail[stop:], len(said), frozenset(kinds))

    def _prompt(self, index: int, *, thinks: bool) -> str:
        """Return the prompt that a server would send."""
        if any(turn.role != TOOLS for turn in self.turns[:index]):
            return self.render(index, ask=True, thinks=thinks)
        # Templates render no empty conversation: only the generation prompt stands before it.
        short = [Message("user", "?")]
        asked, said = (self.chat.render(short, ask=ask, thinks=thinks) for ask in (True, False))
        asking = asked[len(commonprefix([asked, said])) :]  # noqa: RUF071 - no paths
        whole = self.render(index + 1, ask=False, thinks=thinks)
        if opened := _ASKED_THOUGHT.search(asking):
            asking = asking[: opened.start()]
        before, found, _ = whole.partition(asking or whole)
        if before + found == whole:
            raise _UnprovenError("nothing asks the model for it")
        return before + found + (opened[0] if opened else "")

    def _tail(self, index: int, prompt: str, *, thinks: bool) -> tuple[str, int]:
        """Return what the template writes behind the context of a turn that is the last, up to and
        with its stop token, and the length without it.
        """
        if plain := self._plain_tail(index, prompt):
            return plain
        whole = self.render(index + 1, ask=False, thinks=thinks)
        found = _behind(prompt, whole)
        if found is None:
            # The context differs from the server's prompt: the system text moves along, or earlier
            # analysis is dropped.
            found = self._alone(index, thinks=thinks)
        if found is None:
            raise _UnprovenError("the answer does not follow the prompt that a server would send")
        opened = _ASKED_THOUGHT.search(prompt)
        if opened and not whole.startswith(prompt):  # the prompt has it already
            found = (_EMPTY_THOUGHT_FIRST if opened[1] else _THOUGHT_FIRST).sub("", found)
        tail, stop = self._closed(index, found)
        if opened and not opened[1] and "</think>" not in tail[:stop]:
            closing = "\n</think>\n\n" if opened[0].endswith("\n") else "</think>"
            text = tail.lstrip("\n")
            return closing + text, stop + len(closing) + len(text) - len(tail)
        return tail, stop

    def _plain_tail(self, index: int, prompt: str) -> tuple[str, int] | None:
        """Return the same for an earlier turn of text alone where the whole conversation has its
        context, and then the turn as the template writes a last one: one rendering serves all such
        turns.
        """
        chat, content = self.chat, self.turns[index].content
        if (
            chat.lead is None
            or index + 1 == len(self.turns)
            or not self._of_text
            or _ASKED_THOUGHT.search(prompt[-20:])
            or chat.specials.search(content)
        ):
            return None
        said = chat.lead + content
        whole = self.render(len(self.turns), ask=False, thinks=False)
        if whole.startswith(prompt) and whole.startswith(said + chat.stop, len(prompt)):
            return said + chat.stop, len(said)
        return None

    def _closed(self, index: int, tail: str) -> tuple[str, int]:
        """Return a turn with its stop token, and the length without it."""
        chat = self.chat
        tail = tail.removesuffix(chat.after)
        body = tail.rstrip()
        stops = chat.stops_at_end(body)
        if not chat.open and stops:
            tokens = chat.specials.findall(stops)
            if len(set(tokens)) < len(tokens):
                raise _UnprovenError(f"the template ends an answer with {stops}")
            return body, len(body) - len(stops)
        stop = chat.called if calls_of(self.turns[index]) else chat.stop
        return tail + stop, len(tail)


def _behind(prompt: str, whole: str) -> str | None:
    """Return what a text has behind a prompt, or behind it but for the thought at its end."""
    opened = _ASKED_THOUGHT.search(prompt)
    for beginning in (prompt, prompt[: opened.start()] if opened else prompt):
        if whole.startswith(beginning):
            return whole.removeprefix(beginning)
    return None


def _with_reasoning(prompt: str, said: str, reasoning: str) -> str:
    """Return an answer with the reasoning that the template leaves out, in the form in which
    inference produces it; empty if the template has no such form.
    """
    if prompt.rstrip().endswith("<think>"):
        before, closing, text = said.partition("</think>")
        if closing and not before.strip():
            return f"{reasoning}{before or chr(10)}{closing}{text}"
        return ""
    if empty := _EMPTY_THOUGHT.search(said):
        space = "\n" if "\n" in empty[1] else ""
        return (
            f"{said[: empty.start()]}<think>{space}{reasoning}{space}</think>{said[empty.end() :]}"
        )
    return ""


def written(
    chat: Chat, conversation: Conversation, answers: Sequence[int], *, split: bool, apart: bool
) -> Written:
    """Write a conversation as documents.

    Args:
        chat: The tokenizer's way of writing conversations; it has a template.
        conversation: The turns.
        answers: Indices of the turns to train.
        split: Whether an answer that the template writes in another form once it is earlier
            becomes a document of its own; otherwise it is context.
        apart: Whether every earlier answer counts as written in another form.

    Raises:
        TemplateError: The template rejects the conversation.
    """
    row = _Row(chat, conversation)
    kinds: set[Kind] = set()
    unproven = ""
    proven: dict[int, _Answer] = {}
    for index in answers:
        try:
            proven[index] = row.answer(index)
            kinds |= proven[index].kinds
        except _UnprovenError as error:
            unproven = unproven or f"in {_message(conversation, index)}, {error}"
    if not proven:
        return Written([], frozenset(kinds), unproven)
    last = max(proven)
    final = proven[last]
    whole = final.prompt + final.text
    documents = []
    marks: list[tuple[int, int]] = []
    for index, answer in proven.items():
        start, end = len(answer.prompt), len(answer.prompt) + len(answer.text)
        stop = start + answer.stop
        same = (
            not apart and whole.startswith(answer.prompt) and whole.startswith(answer.said, start)
        )
        if index == last or (same and whole.startswith(answer.text, start)):
            marks.append((start, end))
        elif same and (following := chat.stops_at(whole, stop)):
            # Another token may end an earlier turn than the last one: it does not stop the model.
            shared = commonprefix([following, answer.text[answer.stop :]])  # noqa: RUF071 - no paths
            marks.append((start, stop + len(chat.stops_at(shared, 0))))
        elif split:
            documents.append([Segment(answer.prompt, False), Segment(answer.text, True)])
            kinds.add("turns-split")
        else:
            kinds.add("turns-context")
    segments, position = [], 0
    for start, end in marks:
        segments += [Segment(whole[position:start], False), Segment(whole[start:end], True)]
        position = end
    return Written([*documents, segments], frozenset(kinds), unproven)


# The whole of a row, also without a template.

_ANSWER_HEADING = "### Response:\n"
"""What precedes an answer in the Alpaca layout."""


def documents_of(
    chat: Chat,
    conversation: Conversation,
    loss: LossOn = "assistant",
    *,
    split: bool = True,
    apart: bool = False,
) -> Written:
    """Write a row as documents, cut where training starts and stops; none without an answer.

    Args:
        chat: The tokenizer's way of writing conversations.
        conversation: The messages.
        loss: The value of ``data.loss``.
        split: The value of ``data.split_turns``.
        apart: Whether no document has several answers.

    Raises:
        TemplateError: The template rejects the conversation.
    """
    if loss == "padded" and conversation and conversation[0].role == TEXT:
        return Written([[Segment(conversation[0].content, True)]])  # padding ends it
    if conversation and conversation[-1].answers and (pieces := pieces_of(chat, conversation)):
        return _of_pieces(pieces, loss)
    conversation = tuple(
        _without_stop_token(chat, message) if message.role == "assistant" else message
        for message in conversation
    )
    if chat.short_ids:
        conversation = with_short_ids(conversation)
    answers = [index for index, message in enumerate(conversation) if message.answers]
    if loss == "last-turn":
        answers = answers[-1:]
    if not answers:
        return Written([])
    everything = loss in ("all", "padded")
    if not chat.templated:
        found = _plainly(chat, conversation, answers)
    else:
        found = written(chat, conversation, answers, split=split and not everything, apart=apart)
    if not everything or not found.documents:
        return found
    whole = "".join(part.text for part in found.documents[-1])
    if chat.templated:
        thinks = any(reasoning_of(message) for message in conversation)
        whole = chat.render(conversation, thinks=thinks) + (chat.stop if chat.open else "")
    return found._replace(documents=[[Segment(whole, True)]])


def _of_pieces(pieces: Sequence[Piece], loss: LossOn) -> Written:
    """Return texts that need no template as a document."""
    kinds: frozenset[Kind] = frozenset(("templated",) if len(pieces) > 1 else ())
    if loss in ("all", "padded"):
        pieces = [("".join(text for text, _ in pieces), True)]
    return Written([[Segment(*piece) for piece in pieces]], kinds)


def question(chat: Chat, conversation: Conversation) -> str:
    """Return a conversation as the text that a model is to continue with its next answer.

    Raises:
        TemplateError: The template rejects the conversation.
    """
    if chat.templated:
        return chat.render(conversation, ask=True)
    return "".join(part.text for part in _alpaca(chat, conversation, frozenset())) + _ANSWER_HEADING


def _without_stop_token(chat: Chat, message: Message) -> Message:
    """Remove a stop token that the data already have, so that it is not trained twice."""
    said = message.content.rstrip()
    ending = next((token for token in (chat.stop, chat.end) if token and said.endswith(token)), "")
    return message._replace(content=said.removesuffix(ending)) if ending else message


def _plainly(chat: Chat, conversation: Conversation, answers: Sequence[int]) -> Written:
    """Write a conversation without a template, in the Alpaca layout, which has no calls."""
    calling = [
        index
        for index in answers
        if calls_of(conversation[index]) or UNREAD in dict(conversation[index].extra)
    ]
    parts = _alpaca(chat, conversation, frozenset(answers) - frozenset(calling))
    kinds: set[Kind] = set()
    for message in conversation:
        if message.role == TOOLS:
            kinds.add("tools-dropped")
        if calls_of(message):
            kinds.add("calls-dropped")
        if any(name in REASONING_KEYS and value for name, value in message.extra):
            kinds.add("reasoning-dropped")
    return Written(
        [parts] if any(part.trained for part in parts) else [],
        frozenset(kinds),
        f"{_message(conversation, calling[0])} has a tool call and no chat template writes it"
        if calling
        else "",
    )


def _alpaca(chat: Chat, conversation: Conversation, answers: frozenset[int]) -> list[Segment]:
    parts = []
    for index, message in enumerate(conversation):
        if message.role == "assistant":
            said = index in answers and bool(message.content.strip())
            parts += [Segment(_ANSWER_HEADING, False), Segment(message.content + chat.end, said)]
            if index + 1 < len(conversation):
                parts.append(Segment("\n\n", False))
        elif message.role in ("system", "developer"):
            parts.append(Segment(f"{message.content}\n\n", False))
        elif message.role != TOOLS:
            parts.append(Segment(f"### Instruction:\n{message.content}\n\n", False))
    return parts
