"""Answer the prompts of the spec during training, with the weights as they are sharded.

All ranks compute the same forward passes, which all-gather each layer's weights as training does.
Rank 0 chooses the tokens. There is no cache of keys and values: a pass costs its all-gathers,
whatever the number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from so_tui.runs.results import LONGEST_ANSWER, AnsweredPrompt, Asked
from so_tui.spec import RunSpec
from so_tui.spec.errors import reject
from so_tui.spec.generation import Prompt, Sampling, Turn
from so_tui_trainer.data.batches import Batch, lay_out, needs_rows_apart
from so_tui_trainer.data.chat import Chat, chat_of
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.generation import next_token, prompt_ids
from so_tui_trainer.ranks import Ranks

_MULTIPLE = 64
"""Widths are multiples of this, so that the allocator sees few different ones."""


@dataclass
class _Answer:
    """An answer that is being written."""

    ids: list[int]
    """Tokens of the prompt, then of the answer."""
    prompt_length: int
    done: bool = False
    source: torch.Generator = field(default_factory=torch.Generator)


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
        self._spec, self._ranks, self._end_to_end, self._apart = (
            spec,
            ranks,
            end_to_end,
            needs_rows_apart(spec.model),
        )
        self._sampling = Sampling(
            temperature=spec.prompts.temperature,
            top_p=1.0,
            max_tokens=spec.prompts.max_tokens,
            seed=spec.train.seed,
        )
        # Every rank loads the tokenizer: a problem with a prompt must end all of them.
        self._chat: Chat = chat_of(load_tokenizer(spec))
        self._ids = [
            prompt_ids(self._chat, Prompt(turns=(Turn("user", text),)))
            for text in spec.prompts.texts
        ]
        self._stop = {
            int(token)
            for token in (
                self._chat.tokenizer.eos_token_id,
                self._chat.tokenizer.convert_tokens_to_ids(self._chat.stop or self._chat.end),
            )
            if isinstance(token, int)
        }
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
            _Answer(list(ids), len(ids), source=torch.Generator().manual_seed(self._sampling.seed))
            for ids in self._ids
        ]
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for group in self._groups(answers):
                    self._write(model, group)
        finally:
            model.train(training)
        pairs = zip(self._spec.prompts.texts, answers, strict=True)
        return Asked(
            attempt=attempt,
            time=time.time(),
            step=step,
            seconds=time.monotonic() - began,
            answers=tuple(self._answered(text, answer) for text, answer in pairs),
        )

    def _groups(self, answers: Sequence[_Answer]) -> Iterator[list[_Answer]]:
        """Yield answers that are written together: no more tokens than a micro-batch of training
        has on this rank.
        """
        limit = self._spec.micro_batch_tokens
        group: list[_Answer] = []
        for answer in answers:
            widest = (
                max(each.prompt_length for each in (*group, answer)) + self._sampling.max_tokens
            )
            if group and widest * (len(group) + 1) > limit:
                yield group
                group = []
            group.append(answer)
        if group:
            yield group

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
                    next_token(row, self._sampling, answer.source)
                    for row, answer in zip(logits.cpu(), writing, strict=True)
                ]
            for answer, token in zip(
                writing, self._ranks.broadcast(chosen, list[int]), strict=True
            ):
                answer.ids.append(token)
                answer.done = token in self._stop

    def _answered(self, text: str, answer: _Answer) -> AnsweredPrompt:
        ids = answer.ids[answer.prompt_length :]
        said = str(
            self._chat.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
        return AnsweredPrompt(
            prompt=text, text=said[:LONGEST_ANSWER], tokens=len(ids), stopped=answer.done
        )


def _batch_of(
    documents: Sequence[Sequence[int]], *, end_to_end: bool, apart: bool = False
) -> Batch:
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
