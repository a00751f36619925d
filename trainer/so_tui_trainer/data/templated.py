"""Texts that already have the model's special tokens: the first token of a text, the template
around a question, or the token that ends an answer. They are not given them again.
"""

from __future__ import annotations

from so_tui_trainer.data.chat import Chat
from so_tui_trainer.data.turns import TEXT, Conversation

Piece = tuple[str, bool]
"""A text, and whether it is trained."""


def pieces_of(chat: Chat, conversation: Conversation) -> list[Piece] | None:
    """Return plain text, or a question in which the template is written already with its answer, as
    pieces of text; nothing for any other conversation.
    """
    if conversation[0].role == TEXT:
        text = conversation[0].content
        if first := _first_token(chat):  # plain text is given it
            text = text.removeprefix(first)
        return [(text + _missing_end(chat, text, chat.end), True)]
    if not is_templated(chat, conversation):
        return None
    question, answer = (message.content for message in conversation)
    said = answer.rstrip()
    said = said if _missing_end(chat, said, chat.stop) == "" else answer + chat.stop
    return [(_with_first_token(chat, question), False), (said, True)]


def is_templated(chat: Chat, conversation: Conversation) -> bool:
    """Return whether a row is a question in which the template is written already, and its
    answer.
    """
    match conversation:
        case [question, answer] if (question.role, answer.role) == ("user", "assistant"):
            pass
        case _:
            return False
    marked = any(chat.specials.fullmatch(mark) for mark in chat.turn_marks)
    find = chat.specials.search if marked else chat.specials.match
    if not find(question.content):
        return False
    text = question.content + answer.content
    return bool(chat.turn_marks) and all(mark in text for mark in chat.turn_marks)


def _missing_end(chat: Chat, text: str, end: str) -> str:
    said = text.rstrip()
    return "" if any(token and said.endswith(token) for token in (chat.stop, chat.end)) else end


def _first_token(chat: Chat) -> str:
    """Return the token that the tokenizer itself puts before a text."""
    first = chat.tokenizer.bos_token
    ids = chat.tokenizer("a")["input_ids"][:1] if first else []
    return str(first) if ids and ids[0] == chat.tokenizer.bos_token_id else ""


def _with_first_token(chat: Chat, text: str) -> str:
    first = _first_token(chat)
    return text if text.startswith(first) else first + text
