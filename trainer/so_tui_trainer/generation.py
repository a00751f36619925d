"""Let a model write: choose tokens one after the other, and turn them into text as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from so_tui.spec.errors import reject
from so_tui.spec.generation import Ended, Prompt, Sampling
from so_tui_trainer.data.chat import Chat, TemplateError, leading_ids, question
from so_tui_trainer.data.rows import Message
from so_tui_trainer.older_versions import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_UNFINISHED = "\ufffd"
"""What tokenizers decode the first bytes of a character to."""


class Written(NamedTuple):
    """A complete answer."""

    text: str
    tokens: int
    seconds: float
    ended: Ended


def next_token(logits: Tensor, sampling: Sampling, source: torch.Generator) -> int:
    """Choose a token.

    Args:
        logits: [vocabulary], on the CPU.
        sampling: How to choose.
        source: Random numbers.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = torch.softmax(logits.float() / sampling.temperature, dim=0).sort(
        descending=True
    )
    probabilities[probabilities.cumsum(0) - probabilities >= sampling.top_p] = 0.0
    return int(tokens[torch.multinomial(probabilities, 1, generator=source)])


class _Detokenizer:
    """Turns tokens into text as they come. Text that the next token may still change is held
    back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context, self._given = 0, 0
        """Where decoding begins, as tokens decode differently at the start of a text; and how many
        tokens were given out.
        """

    def add(self, token: int) -> str:
        """Return the text that a token completes; empty if there is none yet."""
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._context, self._given = self._given, len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text that was held back."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decoded(self._ids[self._context : self._given])
        return self._decoded(self._ids[self._context :])[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


@dataclass(frozen=True)
class Writer:
    """A model that writes on one device."""

    causal: PreTrainedModel
    chat: Chat
    stop: frozenset[int]
    """Tokens that end an answer."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model was made for."""
        return int(
            getattr(self.causal.config.get_text_config(), "max_position_embeddings", None)
            or 1 << 20
        )

    def write(
        self, prompt: Prompt, sampling: Sampling, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[str | Written]:
        """Answer a prompt.

        Args:
            prompt: What is asked.
            sampling: How to choose tokens.
            cancelled: Returns whether to end the answer; called before every token.

        Yields:
            Text as it is written, and last the whole answer.

        Raises:
            InputError: The prompt is longer than the model's longest sequence, or the chat template
                rejects it.
        """
        began = time.monotonic()
        ids = prompt_ids(self.chat, prompt)
        if len(ids) >= self.longest:
            raise reject(
                "prompt-too-long",
                "prompt",
                "",
                f"has {len(ids)} tokens, and the model takes {self.longest - 1}",
                "Give a shorter one.",
            )
        pieces: list[str] = []
        count = 0
        ended: Ended = "length"
        detokenizer = _Detokenizer(self.chat.tokenizer)
        for token in self._tokens(ids, sampling):
            if cancelled():
                ended = "cancelled"
                break
            count += 1
            if token in self.stop:
                ended = "stop"
                break
            if text := detokenizer.add(token):
                pieces.append(text)
                yield text
            if len(ids) + count >= self.longest:
                ended = "context"
                break
        if rest := detokenizer.rest():
            pieces.append(rest)
            yield rest
        yield Written("".join(pieces), count, time.monotonic() - began, ended)

    @torch.inference_mode()
    def _next_logits(self, ids: Sequence[int], past: Any) -> tuple[Tensor, Any]:
        device = self.causal.device
        causal: Any = self.causal
        name = cache_argument(causal.forward)
        out = causal(
            input_ids=torch.tensor([list(ids)], device=device), use_cache=True, **{name: past}
        )
        return out.logits[0, -1].cpu(), getattr(out, name)

    def _tokens(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        source = torch.Generator().manual_seed(sampling.seed)
        past = None
        for _ in range(sampling.max_tokens):
            logits, past = self._next_logits(ids, past)
            if not torch.isfinite(logits).all():
                raise reject(
                    "logits-not-finite",
                    "model",
                    "",
                    "gives logits that are not finite",
                    "Its training has diverged: take an earlier checkpoint.",
                )
            token = next_token(logits, sampling, source)
            yield token
            ids = [token]


def prompt_ids(chat: Chat, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt, as training would encode them.

    Raises:
        InputError: The chat template rejects the conversation, or there is nothing to continue.
    """
    text = prompt.text
    if prompt.turns:
        try:
            text = question(chat, tuple(Message(turn.role, turn.content) for turn in prompt.turns))
        except TemplateError as error:
            raise reject(
                "prompt-template",
                "prompt",
                "",
                f"is rejected by the chat template: {error}",
                "Leave out the system message, or alternate user and assistant.",
            ) from error
    ids: list[int] = chat.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    leading = leading_ids(chat.tokenizer) if not (prompt.turns and chat.templated) else []
    if not (leading or ids):
        raise reject(
            "prompt-empty",
            "prompt",
            "",
            "has no tokens",
            "Give a text.",
        )
    return [*leading, *ids]


def stop_tokens(chat: Chat, causal: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end an answer: that of the data's layout, and those of the model's own
    generation settings.
    """
    settings = causal.generation_config
    named = getattr(settings, "eos_token_id", None) if settings is not None else None
    ids = [*(named if isinstance(named, list) else [named]), chat.tokenizer.eos_token_id]
    ids.append(chat.tokenizer.convert_tokens_to_ids(chat.stop or chat.end))
    return frozenset(int(number) for number in ids if isinstance(number, int))
