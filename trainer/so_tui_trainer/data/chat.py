"""How a tokenizer writes conversations: its chat template, the tokens that end an answer, and the
forms in which the template takes reasoning and calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from so_tui.spec import InputError, first_line
from so_tui.spec.errors import reject
from so_tui_trainer.data.turns import REASONING_KEYS, TOOLS, Message
from so_tui_trainer.step_limits import limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_THINKING = ("enable_thinking", "thinking")
"""Switches of templates with which the model is asked to think, or not to."""
_THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>", re.DOTALL)


def thought_of(content: str) -> re.Match[str] | None:
    """Find what an answer thinks, at the start of its text. The mark that opens it may be missing:
    prompts of some models have it, and what they write has not.
    """
    return _THOUGHT.match(content) if "</think>" in content else None


class TemplateError(Exception):
    """A chat template cannot render a conversation."""


@dataclass(frozen=True)
class Chat:
    """How a tokenizer writes conversations; made by ``chat_of``."""

    tokenizer: PreTrainedTokenizerBase
    templated: bool
    """Whether the tokenizer has a chat template."""
    stop: str
    """What ends an answer of text: one special token or several. Without one in the template, the
    first of what follows the answer, or the end-of-text token.
    """
    end: str
    """The tokenizer's end-of-text token."""
    specials: re.Pattern[str]
    """Finds special tokens."""
    lead: str | None = None
    """What an answer of text begins with behind the generation prompt; None if that prompt does not
    stand before it, or if the template doubles the token that ends it.
    """
    open: bool = False
    """Whether the template leaves the last answer without the token that ends it."""
    after: str = ""
    """What the template writes behind the end of the last answer."""
    called: str = ""
    """What ends a call where the template leaves the last turn open."""
    reasoning_key: str = ""
    """The key from which the template takes reasoning."""
    moves_thoughts: bool = False
    """Whether the template gets a thought in ``<think>`` at the start of a text in that key: it
    would take it for text.
    """
    text_arguments: bool = False
    """Whether the template takes the arguments of a call as JSON, and not as an object."""
    short_ids: bool = False
    """Whether the template takes only ids of calls with nine letters and digits."""
    turn_marks: tuple[str, ...] = ()
    """What the template writes between a question and its answer: special tokens, or text."""
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How conversations are written, for people."""
        return (
            "the tokenizer's chat template"
            if self.templated
            else "the Alpaca layout (the tokenizer has no chat template)"
        )

    def render(
        self, messages: Sequence[Message], *, ask: bool = False, thinks: bool | None = None
    ) -> str:
        """Render messages with the chat template.

        Args:
            messages: The conversation.
            ask: Whether to add the generation prompt.
            thinks: Whether the model is asked to think, where the template has a switch for it;
                by default as the template does by itself.

        Raises:
            TemplateError: The template rejects them.
        """
        turns = [self._turn(message) for message in messages if message.role != TOOLS]
        tools = [
            tool
            for message in messages
            if message.role == TOOLS
            for tool in dict(message.extra)[TOOLS]
        ] or None
        switches: dict[str, Any] = {} if thinks is None else dict.fromkeys(_THINKING, thinks)
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    turns,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=ask,
                    **switches,
                )
            )
        except Exception as error:  # a template raises whatever it leads to, MemoryError too
            raise TemplateError(first_line(error)) from error

    def _turn(self, message: Message) -> dict[str, Any]:
        """Return a turn as the template takes it."""
        found, content = dict(message.extra), message.content
        if self.reasoning_key:
            for name in REASONING_KEYS:
                if name in found and name != self.reasoning_key:
                    found.setdefault(self.reasoning_key, found.pop(name))
            thought = thought_of(content) if message.role == "assistant" else None
            if thought and (self.moves_thoughts or "<think>" not in thought[0]):
                content = content[thought.end() :].lstrip("\n")
                if said := thought[1].strip("\n"):
                    found.setdefault(self.reasoning_key, said)
        if self.text_arguments and found.get("tool_calls"):
            found["tool_calls"] = [_with_text_arguments(call) for call in found["tool_calls"]]
        return {**found, "role": message.role, "content": content}

    @property
    def stop_id(self) -> int:
        """Id of the token at which generation stops."""
        last: str = self.specials.findall(self.stop)[-1]
        found: Any = self.tokenizer.convert_tokens_to_ids(last)
        return int(found)

    def stops_at_end(self, text: str) -> str:
        """Return the special tokens that end a text, without anything between them."""
        found = ""
        for match in reversed([*self.specials.finditer(text)]):
            if match.end() + len(found) != len(text):
                break
            found = match[0] + found
        return found

    def stops_at(self, text: str, at: int) -> str:
        """Return the special tokens that begin at a place of a text."""
        first = at
        while match := self.specials.match(text, at):
            at = match.end()
        return text[first:at]


def chat_of(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Return how a tokenizer writes conversations.

    Raises:
        InputError: The model would have no stop token.
    """
    end = str(tokenizer.eos_token or "")
    known = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted(known | ({end} if end else set()), key=len, reverse=True)
    specials = re.compile("|".join(map(re.escape, names)) or r"(?!)")
    plain = Chat(tokenizer, bool(tokenizer.chat_template), end, end, specials)
    if not plain.templated:
        if not end:
            raise _no_stop_token("tokenizer-no-end-token", "has no end-of-text token", tokenizer)
        return plain
    template = str(tokenizer.chat_template)
    keys = (key for key in REASONING_KEYS if re.search(rf"[.\"']{key}\b", template))
    plain = replace(plain, reasoning_key=next(keys, ""))
    asked, answer = Message("user", "\ue000"), Message("assistant", "\ue001")
    try:
        with limited(f"the chat template of {tokenizer.name_or_path}"):
            whole = plain.render([asked, answer], thinks=False)
            closing = whole.partition(answer.content)[2]
            prompt = plain.render([asked], ask=True, thinks=False)
            if whole.startswith(prompt):
                lead = whole.removeprefix(prompt).partition(answer.content)[0]
                plain = replace(plain, lead=lead)
            before = plain.render([asked, answer, asked], thinks=False).partition(answer.content)[2]
            plain = replace(
                plain,
                turn_marks=_turn_marks(plain, asked),
                moves_thoughts=_takes_thoughts_for_text(plain, asked),
            )
    except TemplateError as error:
        raise _no_stop_token(
            "chat-template-unusable",
            f"has a chat template that cannot render a conversation ({error})",
            tokenizer,
        ) from error
    first = specials.search(closing)
    following = before.partition(asked.content)[0]
    if first is not None:
        stop = plain.stops_at(closing, first.start())
        through = closing[: first.start() + len(stop)]
        after = closing[len(through) :] if before.startswith(through) else ""
        found = replace(plain, stop=stop, after=after)
    else:
        # A role's token directly behind the answer is what stops the model.
        next_token = specials.match(following)
        found = replace(plain, stop=next_token[0] if next_token else end, open=True, after=closing)
    tokens = specials.findall(found.stop)
    if len(set(tokens)) < len(tokens):
        found = replace(found, lead=None)
    if not found.stop:
        raise _no_stop_token(
            "tokenizer-no-end-token",
            "has no end-of-text token, and its chat template ends answers without a special token",
            tokenizer,
        )
    found = _with_calls(found, asked)
    return replace(found, warnings=tuple(_stop_warnings(tokenizer, found, closing)))


def _turn_marks(chat: Chat, asked: Message) -> tuple[str, ...]:
    between = chat.render([asked], ask=True).partition(asked.content)[2]
    return tuple(chat.specials.findall(between)) or tuple(filter(None, [between.strip()]))


def _takes_thoughts_for_text(chat: Chat, asked: Message) -> bool:
    """Return whether the template writes ``<think>`` itself in fewer places if it gets reasoning in
    a key of its own.
    """
    if not chat.reasoning_key:
        return False
    thought, said = "\ue003", "\ue001"
    apart, inside = (
        chat.render([asked, answer], thinks=True).count("<think>")
        for answer in (
            Message("assistant", said, ((chat.reasoning_key, thought),)),
            Message("assistant", f"<think>{thought}</think>{said}"),
        )
    )
    return inside > apart


_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def _with_calls(chat: Chat, asked: Message) -> Chat:
    """Return how calls of tools are written: from objects or text, with which ids, and what ends
    them.
    """

    def called(number: str) -> tuple[Message, Message]:
        function = {"name": "so_tui", "arguments": {"so": "tui"}}
        calls = [{"type": "function", "id": number, "function": function}]
        named = (("tool_call_id", number), ("name", "so_tui"))
        return Message("assistant", "", (("tool_calls", calls),)), Message("tool", "\ue002", named)

    calling, result = called("a00000000")
    for text_arguments in (False, True):
        tried = replace(chat, text_arguments=text_arguments)
        try:
            whole = tried.render([asked, calling])
        except TemplateError:
            continue
        if "so_tui" not in whole:
            continue
        try:
            follows = tried.render([asked, calling, result]).removeprefix(whole).lstrip()
        except TemplateError:
            return replace(tried, called=chat.stop)
        stop = tried.stops_at(follows, 0)
        if chat.open and (first := chat.specials.match(stop)):
            stop = first[0]  # the next role's token alone
        try:
            tried.render([asked, *called("call_0")])
        except TemplateError:
            tried = replace(tried, short_ids=True)
        return replace(tried, called=stop or chat.stop)
    return replace(chat, called=chat.stop)


def with_short_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation in which each call has an id of nine letters and digits, and its result
    names it.
    """
    waiting: list[tuple[Any, str]] = []
    found: list[Message] = []
    for message in messages:
        extra = dict(message.extra)
        calls = []
        for number, call in enumerate(extra.get("tool_calls") or ()):
            given = str(call.get("id"))
            text = f"{len(found)} {number} {call!r}"
            short = given if _SHORT_ID.fullmatch(given) else sha256(text.encode()).hexdigest()[:9]
            waiting.append((call.get("id"), short))
            calls.append({**call, "id": short})
        if calls:
            extra["tool_calls"] = calls
        if message.role == "tool" and waiting:
            named = [number for number, _ in waiting]
            answered = extra.get("tool_call_id")
            at = named.index(answered) if answered in named else 0
            extra["tool_call_id"] = waiting.pop(at)[1]
        found.append(message._replace(extra=tuple(extra.items())))
    return tuple(found)


def _with_text_arguments(call: Any) -> Any:
    """Return a call with its arguments as JSON."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_text_arguments(call["function"])}
    given = call.get("arguments")
    if isinstance(given, str):
        return call
    return {**call, "arguments": json.dumps(given, ensure_ascii=False)}


def _stop_warnings(tokenizer: PreTrainedTokenizerBase, chat: Chat, closing: str) -> Iterator[str]:
    closing, stop, end = closing.strip(), chat.stop, chat.end
    if end and not stop.endswith(end):
        yield (
            f"an answer ends with {stop}, but the tokenizer's end-of-text token is {end}: "
            f"generate with eos_token_id = {chat.stop_id}"
        )
    elif chat.open and closing:
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
