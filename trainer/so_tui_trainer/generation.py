"""Let a model write: choose tokens one after the other, and turn them into text as they come.

A model on one device writes with a cache of keys and values (``Writer``); one that is being trained
answers the prompts of its spec without, on all ranks (``Prompts``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from so_tui.runs.results import LONGEST_ANSWER, AnsweredPrompt, Asked
from so_tui.spec import RunSpec
from so_tui.spec.errors import reject
from so_tui.spec.generation import Ended, Prompt, Sampling, Turn
from so_tui_trainer.data.batches import Batch, lay_out, needs_rows_apart
from so_tui_trainer.data.chat import Chat, TemplateError, chat_of
from so_tui_trainer.data.encoder import leading_ids
from so_tui_trainer.data.spans import question
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.data.turns import Message
from so_tui_trainer.older_versions import cache_argument
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.step_limits import limited

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


def _next_token(logits: Tensor, sampling: Sampling, source: torch.Generator) -> int:
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
        text = self.rest()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._context, self._given = self._given, len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text that was held back."""
        before = _decoded(self._tokenizer, self._ids[self._context : self._given])
        return _decoded(self._tokenizer, self._ids[self._context :])[len(before) :]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class Writer:
    """A model that writes on one device."""

    causal: PreTrainedModel
    chat: Chat
    stop: frozenset[int]
    """Tokens that end an answer."""

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
        config = self.causal.config.get_text_config()
        longest = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        ids = _prompt_ids(self.chat, prompt)
        if len(ids) >= longest:
            raise reject(
                "prompt-too-long",
                "prompt",
                "",
                f"has {len(ids)} tokens, and the model takes {longest - 1}",
                "Give a shorter one.",
            )
        text, count = "", 0
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
            if piece := detokenizer.add(token):
                text += piece
                yield piece
            if len(ids) + count >= longest:
                ended = "context"
                break
        if rest := detokenizer.rest():
            yield rest
        yield Written(text + rest, count, time.monotonic() - began, ended)

    @torch.inference_mode()
    def _tokens(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        source = torch.Generator().manual_seed(sampling.seed)
        causal: Any = self.causal
        name, past = cache_argument(causal.forward), None
        for _ in range(sampling.max_tokens):
            inputs = torch.tensor([list(ids)], device=causal.device)
            out = causal(input_ids=inputs, use_cache=True, **{name: past})
            logits, past = out.logits[0, -1].cpu(), getattr(out, name)
            if not torch.isfinite(logits).all():
                raise reject(
                    "logits-not-finite",
                    "model",
                    "",
                    "gives logits that are not finite",
                    "Its training has diverged: take an earlier checkpoint.",
                )
            token = _next_token(logits, sampling, source)
            yield token
            ids = [token]


def _prompt_ids(chat: Chat, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt, as training would encode them.

    Raises:
        InputError: The chat template rejects the conversation, or there is nothing to continue.
    """
    text = prompt.text
    if prompt.turns:
        turns = tuple(Message(turn.role, turn.content) for turn in prompt.turns)
        try:
            with limited("the chat template, with the prompt"):
                text = question(chat, turns)
        except TemplateError as error:
            raise reject(
                "prompt-template",
                "prompt",
                "",
                f"is rejected by the chat template: {error}",
                "Leave out the system message, or alternate user and assistant.",
            ) from error
    with limited("the prompt", len(text)):
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


def stop_tokens(chat: Chat, settings: Any = None) -> frozenset[int]:
    """Return the tokens that end an answer: that of the data's layout, and those of a model's own
    generation settings.
    """
    named = getattr(settings, "eos_token_id", None)
    ids = [*(named if isinstance(named, list) else [named]), chat.tokenizer.eos_token_id]
    ids.append(chat.stop_id)
    return frozenset(int(number) for number in ids if isinstance(number, int))


# Answering the prompts of the spec during training, with the weights as they are sharded.
#
# All ranks compute the same forward passes, which all-gather each layer's weights as training does.
# Rank 0 chooses the tokens. There is no cache of keys and values: a pass costs its all-gathers,
# whatever the number of tokens.


_MULTIPLE = 64
"""Widths are multiples of this, so that the allocator sees few different ones."""


@dataclass
class _Answer:
    """An answer that is being written."""

    ids: list[int]
    """Tokens of the prompt, then of the answer."""
    prompt_length: int
    source: torch.Generator
    done: bool = False


class Prompts:
    """The prompts of a spec."""

    def __init__(self, spec: RunSpec, ranks: Ranks, *, end_to_end: bool) -> None:
        """Encode the prompts.

        Args:
            spec: The run's spec.
            ranks: The process group.
            end_to_end: Whether attention takes boundaries, so that all prompts are one row.

        Raises:
            InputError: A prompt has no room for its answer in a sequence, or the chat template
                rejects it. Raised on all ranks.
        """
        self._spec, self._ranks, self._end_to_end = spec, ranks, end_to_end
        self._apart = needs_rows_apart(spec.model)
        self._sampling = Sampling(
            temperature=spec.prompts.temperature,
            top_p=1.0,
            max_tokens=spec.prompts.max_tokens,
            seed=spec.train.seed,
        )
        # Every rank loads the tokenizer: a problem with a prompt must end all of them.
        self._chat: Chat = chat_of(load_tokenizer(spec.model))
        self._ids = [
            _prompt_ids(self._chat, Prompt(turns=(Turn("user", text),)))
            for text in spec.prompts.texts
        ]
        self._stop = stop_tokens(self._chat)
        for text, ids in zip(spec.prompts.texts, self._ids, strict=True):
            if (room := spec.data.sequence_length - spec.prompts.max_tokens) < len(ids):
                raise reject(
                    "prompt-too-long",
                    "prompts.texts",
                    text[:60],
                    f"has {len(ids)} tokens, and {room} leave room for its answer",
                    "Shorten it, or `prompts.max_tokens`.",
                )

    def __len__(self) -> int:
        return len(self._ids)

    def ask(self, model: torch.nn.Module, *, attempt: int, step: int) -> Asked:
        """Answer all prompts. All ranks must call it, between two steps. Training is not affected.

        Args:
            model: The model.
            attempt: The attempt, for the record.
            step: The last completed step, for the record.
        """
        began = time.monotonic()
        answers = [
            _Answer(list(ids), len(ids), torch.Generator().manual_seed(self._sampling.seed))
            for ids in self._ids
        ]
        # No more tokens than a micro-batch of training has on this rank.
        widest = max(map(len, self._ids)) + self._sampling.max_tokens
        together = max(1, self._spec.micro_batch_tokens // widest)
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for first in range(0, len(answers), together):
                    self._write(model, answers[first : first + together])
        finally:
            model.train(training)
        answered = []
        for prompt, answer in zip(self._spec.prompts.texts, answers, strict=True):
            ids = answer.ids[answer.prompt_length :]
            said = _decoded(self._chat.tokenizer, ids)[:LONGEST_ANSWER]
            answered.append(
                AnsweredPrompt(prompt=prompt, text=said, tokens=len(ids), stopped=answer.done)
            )
        return Asked(
            attempt=attempt,
            time=time.time(),
            step=step,
            seconds=time.monotonic() - began,
            answers=tuple(answered),
        )

    def _write(self, model: torch.nn.Module, answers: list[_Answer]) -> None:
        """Add tokens to the answers until all have ended."""
        for _ in range(self._sampling.max_tokens):
            writing = [answer for answer in answers if not answer.done]
            if not writing:
                return
            documents = [answer.ids for answer in writing]
            batch = _batch_of(documents, end_to_end=self._end_to_end, apart=self._apart).to(
                self._ranks.device
            )
            logits = model(batch, 1.0, logits=True)
            chosen = None
            if self._ranks.first:
                chosen = [
                    _next_token(row, self._sampling, answer.source)
                    for row, answer in zip(logits.cpu(), writing, strict=True)
                ]
            for answer, token in zip(
                writing, self._ranks.broadcast(chosen, list[int]), strict=True
            ):
                answer.ids.append(token)
                answer.done = token in self._stop


def _batch_of(documents: Sequence[Sequence[int]], *, end_to_end: bool, apart: bool) -> Batch:
    """Return documents as a micro-batch that predicts the token after each of them.

    Args:
        documents: Token ids of each document.
        end_to_end: Whether they are one row, instead of a row each.
        apart: Whether the model needs them as rows of their own, too.
    """
    rows = [list(documents)] if end_to_end else [[document] for document in documents]
    width = -(-max(sum(map(len, row)) for row in rows) // _MULTIPLE) * _MULTIPLE
    batch = lay_out(rows, width, apart=apart)
    ends = batch.boundaries[1:].long() - 1
    return replace(batch, predictors=ends[batch.real.flatten()[ends]])
