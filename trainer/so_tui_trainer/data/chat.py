"""Write conversations as text, cut where training starts and stops: by the tokenizer's chat
template, or in the Alpaca layout without one.

To find the answers in the rendered text, the conversation is rendered a second time with
placeholders in their place, so any chat template works unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from so_tui.spec import InputError, first_line
from so_tui.spec.errors import reject
from so_tui.spec.run_spec import LossOn
from so_tui.units import thousands
from so_tui_trainer.data.documents import Counts
from so_tui_trainer.data.rows import TEXT, TOOLS, Conversation, Message, bad_row
from so_tui_trainer.data.sources import Opened
from so_tui_trainer.step_limits import limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Span = tuple[int, int]
"""Start and end (exclusive) in the rendered text, in characters."""
_CALLED = "so_tui_called_this"
"""Placeholder for the name of a tool. Letters only, since templates may write names as JSON or as
plain text.
"""
_ANSWER_HEADING = "### Response:\n"
"""Of the Alpaca layout."""


class _Segment(NamedTuple):
    """A piece of text, and whether its tokens carry loss."""

    text: str
    trained: bool


class TemplateError(Exception):
    """A chat template cannot render a conversation."""


@dataclass(frozen=True)
class Chat:
    """How a tokenizer writes conversations; made by ``chat_of``."""

    tokenizer: PreTrainedTokenizerBase
    templated: bool
    """Whether the tokenizer has a chat template."""
    stop: str
    """The special token that ends an answer. Empty if the template ends it without one; the
    end-of-text token is then added.
    """
    end: str
    """The tokenizer's end-of-text token."""
    asking: str
    """The generation prompt: what the template adds to ask for an answer."""
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How conversations are written, for people."""
        return (
            "the tokenizer's chat template"
            if self.templated
            else "the Alpaca layout (the tokenizer has no chat template)"
        )

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """Render messages with the chat template.

        Args:
            messages: The conversation.
            ask: Whether to add the generation prompt.

        Raises:
            TemplateError: The template rejects them.
        """
        turns = [
            {**dict(message.extra), "role": message.role, "content": message.content}
            for message in messages
            if message.role != TOOLS
        ]
        tools = [
            tool
            for message in messages
            if message.role == TOOLS
            for tool in dict(message.extra)[TOOLS]
        ] or None
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    turns, tools=tools, tokenize=False, add_generation_prompt=ask
                )
            )
        except Exception as error:  # a template raises whatever it leads to, MemoryError too
            raise TemplateError(first_line(error)) from error


def chat_of(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Return how a tokenizer writes conversations.

    Raises:
        InputError: The model would have no stop token.
    """
    end = str(tokenizer.eos_token or "")
    plain = Chat(tokenizer, bool(tokenizer.chat_template), end, end, "")
    if not plain.templated:
        if not end:
            raise _no_stop_token("tokenizer-no-end-token", "has no end-of-text token", tokenizer)
        return plain
    question = Message("user", _placeholder(0))
    answer = Message("assistant", _placeholder(1))
    try:
        with limited(f"the chat template of {tokenizer.name_or_path}"):
            closing = plain.render([question, answer]).partition(answer.content)[2]
            asked = plain.render([question])
            asking = plain.render([question], ask=True)
    except TemplateError as error:
        raise _no_stop_token(
            "chat-template-unusable",
            f"has a chat template that cannot render a conversation ({error})",
            tokenizer,
        ) from error
    asking = asking.removeprefix(asked) if asking.startswith(asked) else ""
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    stops = (token for token in specials if closing.lstrip().startswith(token))
    stop = max(stops, key=len, default="")
    if not stop and not end:
        raise _no_stop_token(
            "tokenizer-no-end-token",
            "has no end-of-text token, and its chat template ends answers without a special token",
            tokenizer,
        )
    return Chat(
        tokenizer, True, stop, end, asking, tuple(_stop_warnings(tokenizer, stop, end, closing))
    )


def _segments(chat: Chat, conversation: Conversation, loss: LossOn = "assistant") -> list[_Segment]:
    """Cut a conversation where training starts and stops. Each answer ends with one stop token.

    A conversation without answers gives an empty segment. Tool calls that the layout does not write
    are context.

    Args:
        chat: The tokenizer's way of writing conversations.
        conversation: The messages.
        loss: The value of ``data.loss``.

    Raises:
        TemplateError: The template rejects the conversation.
    """
    conversation = tuple(
        _without_stop_token(chat, message) if message.role in ("assistant", TEXT) else message
        for message in conversation
    )
    answers = [index for index, message in enumerate(conversation) if message.answers]
    if loss == "last-turn":
        answers = answers[-1:]
    if not answers:
        return [_Segment("", False)]
    if conversation[0].role == TEXT:
        return [_Segment(conversation[0].content + chat.end, True)]
    parts = (
        _templated(chat, conversation, answers)
        if chat.templated
        else _alpaca(chat, conversation, frozenset(answers))
    )
    return (
        [_Segment("".join(part.text for part in parts), any(part.trained for part in parts))]
        if loss == "all"
        else parts
    )


def question(chat: Chat, conversation: Conversation) -> str:
    """Return a conversation as the text that a model is to continue with its next answer, as
    ``_segments`` writes it for training.

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


def _alpaca(chat: Chat, conversation: Conversation, answers: frozenset[int]) -> list[_Segment]:
    parts = []
    for index, message in enumerate(conversation):
        if message.role == "assistant":
            said = index in answers and bool(message.content.strip())
            parts += [_Segment(_ANSWER_HEADING, False), _Segment(message.content + chat.end, said)]
            if index + 1 < len(conversation):
                parts.append(_Segment("\n\n", False))
        elif message.role in ("system", "developer"):
            parts.append(_Segment(f"{message.content}\n\n", False))
        elif message.role != TOOLS:
            parts.append(_Segment(f"### Instruction:\n{message.content}\n\n", False))
    return parts


def _templated(chat: Chat, conversation: Conversation, answers: Sequence[int]) -> list[_Segment]:
    """Cut a rendered conversation: each answer reaches from the end of its generation prompt to the
    end of its stop token.
    """
    whole = chat.render(conversation)
    contents = _content_spans(chat, conversation, whole)
    parts, position = [], 0
    for index in answers:
        start, stop = contents[index]
        following = (contents[later][0] for later in sorted(contents) if later > index)
        end = _answer_end(chat, conversation[: index + 1], whole, stop, next(following, len(whole)))
        start = _answer_start(chat, conversation[:index], whole, position, start)
        said = whole[start:end].removesuffix(chat.end).removesuffix(chat.stop).strip()
        parts += [
            _Segment(whole[position:start], False),
            _Segment(whole[start:end] + ("" if chat.stop else chat.end), bool(said)),
        ]
        position = end
    return [*parts, _Segment(whole[position:], False)]


def _content_spans(chat: Chat, conversation: Conversation, whole: str) -> dict[int, Span]:
    """Return the span of each assistant message's content in the rendered text.

    Raises:
        TemplateError: A content cannot be found.
    """
    said = [index for index, message in enumerate(conversation) if message.role == "assistant"]
    marked = chat.render(
        [
            _with_placeholder(message, index) if index in said else message
            for index, message in enumerate(conversation)
        ]
    )
    first, *after = re.split("|".join(re.escape(_placeholder(index)) for index in said), marked)
    for cleaned in (str, str.strip, str.lstrip, str.rstrip):
        contents = [cleaned(conversation[index].content) for index in said]
        pieces = [first, *chain.from_iterable(zip(contents, after, strict=False))]
        if len(after) == len(said) and "".join(pieces) == whole:
            ends = list(accumulate(map(len, pieces)))
            return dict(zip(said, zip(ends[::2], ends[1::2], strict=False), strict=True))
    return {index: _changed_span(chat, conversation, whole, index) for index in said}


def _changed_span(chat: Chat, conversation: Conversation, whole: str, index: int) -> Span:
    """Return the span that changes when one message changes, for templates that rewrite contents
    (those that split off reasoning, say).
    """
    before, after = conversation[:index], conversation[index + 1 :]
    other = chat.render([*before, _with_placeholder(conversation[index], index), *after])
    if _placeholder(index) in other:
        start = _common_prefix_length(whole, other)
        return start, len(whole) - min(
            _common_prefix_length(whole[::-1], other[::-1]), len(whole) - start
        )
    other = chat.render([*before, _with_placeholder_calls(conversation[index]), *after])
    # Later text may contain the name as well, so only the start is known; the stop token gives the
    # end.
    if _CALLED in other:
        start = _common_prefix_length(whole, other)
        return start, start
    raise TemplateError(f"leaves out what the assistant says in message {index + 1}")


def _common_prefix_length(one: str, other: str) -> int:
    """Return the number of characters that two texts share at their start."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _answer_start(
    chat: Chat, before: Sequence[Message], whole: str, position: int, content: int
) -> int:
    """Return where the model takes over: after the generation prompt.

    The template may write more before the content; that is trained too.
    """
    # More than one generation prompt: a thought or a tool call has a message of its own.
    again = not chat.asking or whole.count(chat.asking, position, content) > 1
    if again and any(message.role != TOOLS for message in before):
        prompt = chat.render(before, ask=True)
        if whole.startswith(prompt) and position <= len(prompt) <= content:
            return len(prompt)
    # The generation prompt may contain more than the rendered turn has (an opened thought, say).
    for length in range(len(chat.asking), 0, -1):
        at = whole.rfind(chat.asking[:length], position, content)
        if at >= 0:
            start = at + length
            whole_prompt = length == len(chat.asking)
            return start if whole_prompt or not whole[start:content].strip() else content
    return content


def _answer_end(chat: Chat, said: Sequence[Message], whole: str, content: int, limit: int) -> int:
    """Return where the last answer of ``said`` ends: behind its stop token, which tool calls may
    precede.

    Templates may close earlier turns with another token than the last one. Such a token is not
    trained, as it does not stop the model, except at the end of a tool call. An end-of-text token
    directly after the stop token is trained.
    """
    calls = bool(said[-1].extra)
    if chat.stop:
        at = whole.find(chat.stop, content, limit)
        if at >= 0 and (calls or not whole[content:at].strip()):
            behind = at + len(chat.stop)
            return behind + (len(chat.end) if whole.startswith(chat.end, behind) else 0)
    if any(name == "tool_calls" for name, _ in said[-1].extra):
        through = chat.render(said).rstrip()
        if whole.startswith(through) and content <= len(through) <= limit:
            return len(through)
    return content


def _placeholder(index: int) -> str:
    return f"\ue000{index}\ue001"


def _with_placeholder(message: Message, index: int) -> Message:
    return message._replace(content=_placeholder(index))


def _with_placeholder_calls(message: Message) -> Message:
    """Return the message with the names of the tools it calls replaced."""
    extra = (
        (name, [_renamed(call) for call in value] if name == "tool_calls" else value)
        for name, value in message.extra
    )
    return message._replace(extra=tuple(extra))


def _renamed(call: Any) -> Any:
    if isinstance(call, Mapping):
        return {
            key: _CALLED if key == "name" else _renamed(value) if key == "function" else value
            for key, value in call.items()
        }
    return call


def _stop_warnings(
    tokenizer: PreTrainedTokenizerBase, stop: str, end: str, closing: str
) -> Iterator[str]:
    closing = closing.strip()
    if stop and end and stop != end and not closing.startswith(stop + end):
        number = tokenizer.convert_tokens_to_ids(stop)
        yield (
            f"an answer ends with {stop}, but the tokenizer's end-of-text token is {end}: "
            f"generate with eos_token_id = {number}"
        )
    elif not stop and closing:
        pieces = len(tokenizer(closing, add_special_tokens=False)["input_ids"])
        shown = closing.split("\n")[0][:40]
        yield (
            f"the chat template ends an answer with {shown!r}, which is {pieces} tokens here, "
            f"not a special token; {end} is put before it"
        )


def _no_stop_token(code: str, message: str, tokenizer: PreTrainedTokenizerBase) -> InputError:
    return reject(
        code,
        "model.tokenizer",
        str(tokenizer.name_or_path),
        message,
        "Use the tokenizer of an instruction-tuned model, or set eos_token in its "
        "tokenizer_config.json.",
    )


# Encode conversations: token ids, and for each token whether it carries loss.
#
# The first token of a document is never a target, and there is no padding yet. A row longer than a
# sequence is truncated; plain text is cut into several documents instead.


_BATCH_ROWS = 1000
Tokens = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids, and for each whether it is trained; both [tokens]."""


@dataclass(frozen=True)
class Encoder:
    """Turns conversations into documents. Can be pickled for other processes."""

    chat: Chat
    loss: LossOn
    sequence_length: int

    def encode(self, batch: Sequence[Sequence[_Segment]]) -> list[Tokens]:
        """Encode conversations.

        Segments are encoded separately, as the prompt is at inference, so that no token spans the
        border of what is trained. Tokenizers that put a space before every text get the whole text
        instead; a token that spans the border then counts as the segment that it ends in.

        Args:
            batch: The segments of each conversation.

        Returns:
            For each conversation its token ids and flags.
        """
        return (
            self._encode_segments(batch)
            if _encodes_segments_apart(self.chat.tokenizer)
            else self._encode_joined(batch)
        )

    def _encode_segments(self, batch: Sequence[Sequence[_Segment]]) -> list[Tokens]:
        texts = [segment.text for parts in batch for segment in parts]
        encoded = iter(
            self.chat.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            if texts
            else []
        )
        found = []
        for parts in batch:
            pieces = list(islice(encoded, len(parts)))
            flags = np.repeat([part.trained for part in parts], [len(piece) for piece in pieces])
            found.append(
                (
                    np.array([token for piece in pieces for token in piece], dtype=np.int32),
                    flags.astype(np.bool_),
                )
            )
        return found

    def _encode_joined(self, batch: Sequence[Sequence[_Segment]]) -> list[Tokens]:
        texts = ["".join(segment.text for segment in parts) for parts in batch]
        encoded = self.chat.tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        found = []
        for parts, ids, spans in zip(
            batch, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            ends = np.cumsum([len(part.text) for part in parts])
            trained = np.array([part.trained for part in parts])
            # Only ends: byte-level tokenizers leave spaces out of spans, so that a token of spaces
            # has an empty one, which ends behind it.
            last = np.array([end - 1 for _, end in spans])
            segment = np.minimum(np.searchsorted(ends, last, side="right"), len(parts) - 1)
            found.append((np.array(ids, dtype=np.int32), trained[segment]))
        return found

    def documents(self, opened: Opened, first: int, last: int) -> Iterator[_Encoded]:
        """Yield rows ``first`` to ``last`` (exclusive) of a source, each with the documents it
        became; none if it was dropped.

        Raises:
            InputError: A row cannot be read.
        """
        leading = leading_ids(self.chat.tokenizer)
        for start in range(first, last, _BATCH_ROWS):
            end, source = min(start + _BATCH_ROWS, last), opened.source.source
            rows = f"rows {thousands(start + 1)} to {thousands(end)} of {source}"
            with limited(rows):
                batch = list(opened.conversations(start, end))
            parts = []
            for number, conversation in enumerate(batch, start + 1):
                try:
                    with limited(f"row {thousands(number)} of {source}"):
                        parts.append(_segments(self.chat, conversation, self.loss))
                except TemplateError as error:
                    raise bad_row(
                        "data-row-template",
                        source,
                        number,
                        f"the chat template rejects it: {error}",
                    ) from error
            with limited(rows, sum(len(part.text) for pieces in parts for part in pieces)):
                encoded = self.encode(parts)
            for number, (conversation, tokens) in enumerate(
                zip(batch, encoded, strict=True), start + 1
            ):
                bare = bool(conversation) and conversation[0].role == TEXT
                yield self._fit(
                    number, leading if bare or not self.chat.templated else [], tokens, bare=bare
                )

    def _fit(self, row: int, leading: Sequence[int], tokens: Tokens, *, bare: bool) -> _Encoded:
        """Cut a row to sequences, and drop what follows the last trained token, since no token
        learns from it.
        """
        limit = self.sequence_length
        ids = np.concatenate((np.array(leading, dtype=np.int32), tokens[0]))
        trained = np.concatenate((np.zeros(len(leading), dtype=np.bool_), tokens[1]))
        ids, trained = ids[: _end(trained)], trained[: _end(trained)]
        pieces = [
            (ids[at : at + limit], trained[at : at + limit].copy())
            for at in range(0, len(ids), limit)
        ]
        documents = []
        for piece, flags in pieces if bare else pieces[:1]:
            if len(flags):
                flags[0] = False
            if end := _end(flags):
                documents.append((piece[:end], flags[:end]))
        longer = len(ids) > limit
        dropped = not documents
        counts = Counts(
            1,
            truncated=int(longer and not bare and not dropped),
            dropped=int(dropped),
            dropped_too_long=int(longer and dropped),
            cut=int(len(documents) > 1),
        )
        return _Encoded(row, documents, counts)


class _Encoded(NamedTuple):
    """A row and the documents it became."""

    row: int
    """From 1."""
    documents: list[Tokens]
    counts: Counts


def _end(flags: npt.NDArray[np.bool_]) -> int:
    """Return the index after the last true flag; 0 without one."""
    found = np.flatnonzero(flags)
    return int(found[-1]) + 1 if len(found) else 0


def _encodes_segments_apart(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether segments that are encoded separately give the same ids as the whole text."""
    one, other, both = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a\n", "b", "a\nb")
    )
    return bool([*one, *other] == both) or not tokenizer.is_fast


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer itself puts before a text: a BOS token, or none."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first and first[0] == tokenizer.bos_token_id else []
