"""Turn conversations into token ids, and say for each token whether it carries loss.

The first token of a document is never a target, and there is no padding yet. A row longer than a
sequence is truncated; plain text is cut into several documents instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from so_tui.spec import DataSpec
from so_tui.spec.data_notes import Dropped, DropReason
from so_tui.spec.run_spec import LossOn
from so_tui.units import thousands
from so_tui_trainer.data.chat import Chat, TemplateError
from so_tui_trainer.data.documents import Counts
from so_tui_trainer.data.rows import bad_row
from so_tui_trainer.data.sources import Opened
from so_tui_trainer.data.spans import Segment, Written, documents_of
from so_tui_trainer.data.turns import TEXT, unknown_kinds
from so_tui_trainer.step_limits import limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_ROWS = 1000
_WINDOW = 40
"""Characters on either side of a border between segments that may merge into one token."""
_FIRST_WORD = re.compile(r"\s*\S*")
Tokens = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids, and for each whether it is trained; both [tokens]."""


@dataclass(frozen=True)
class Encoder:
    """Turns conversations into documents. Can be pickled for other processes."""

    chat: Chat
    loss: LossOn
    sequence_length: int
    split: bool = True
    """Whether answers that the template changes later are documents of their own."""

    def encode(self, batch: Sequence[Sequence[Segment]]) -> list[Tokens]:
        """Encode conversations.

        Segments are encoded separately, as the prompt is at inference, so that no token spans the
        border of what is trained. Tokenizers that put a space before every text get the whole text
        instead; a token that spans the border then counts as the segment that it ends in.

        Args:
            batch: The segments of each conversation.

        Returns:
            For each conversation its token ids and flags.
        """
        if not batch:
            return []
        return (
            self._encode_segments(batch)
            if _encodes_segments_apart(self.chat.tokenizer)
            else self._encode_joined(batch)
        )

    def _encode_segments(self, batch: Sequence[Sequence[Segment]]) -> list[Tokens]:
        """Encode the texts between special tokens, each once: the documents of a split row have
        most of theirs in common.
        """
        border = _border(self.chat.tokenizer)
        split = [
            [border.split(segment.text) if border else [segment.text] for segment in parts]
            for parts in batch
        ]
        texts = list(dict.fromkeys(text for parts in split for part in parts for text in part))
        encoded = self.chat.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        ids = {
            text: np.array(found, dtype=np.int32)
            for text, found in zip(texts, encoded, strict=True)
        }
        found = []
        for parts, divided in zip(batch, split, strict=True):
            pieces = [np.concatenate([ids[text] for text in part]) for part in divided]
            flags = np.repeat([part.trained for part in parts], [len(piece) for piece in pieces])
            found.append((np.concatenate(pieces), flags.astype(np.bool_)))
        return found

    def _encode_joined(self, batch: Sequence[Sequence[Segment]]) -> list[Tokens]:
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
        template = str(self.chat.tokenizer.chat_template)
        for start in range(first, last, _BATCH_ROWS):
            end, source = min(start + _BATCH_ROWS, last), opened.source.source
            rows = f"rows {thousands(start + 1)} to {thousands(end)} of {source}"
            with limited(rows):
                batch = list(opened.conversations(start, end))
            rows_written = []
            for number, conversation in enumerate(batch, start + 1):
                try:
                    with limited(f"row {thousands(number)} of {source}"):
                        rows_written.append(
                            documents_of(self.chat, conversation, self.loss, split=self.split)
                        )
                except TemplateError as error:
                    raise bad_row(
                        "data-row-template",
                        source,
                        number,
                        f"the chat template rejects it: {error}",
                    ) from error
            if self.chat.templated and _encodes_segments_apart(self.chat.tokenizer):
                for index in self._merged(rows_written):
                    rows_written[index] = documents_of(
                        self.chat, batch[index], self.loss, split=self.split, apart=True
                    )
            parts = [pieces for written in rows_written for pieces in written.documents]
            with limited(rows, sum(len(part.text) for pieces in parts for part in pieces)):
                encoded = iter(self.encode(parts))
            for number, (conversation, written) in enumerate(
                zip(batch, rows_written, strict=True), start + 1
            ):
                bare = bool(conversation) and conversation[0].role == TEXT
                own_leading = leading if bare or not self.chat.templated else []
                own = list(islice(encoded, len(written.documents)))
                fitted = [self._fit(number, own_leading, tokens, bare=bare) for tokens in own]
                unknown = unknown_kinds(conversation, template)
                written = written._replace(kinds=written.kinds | unknown)
                yield _joined(number, fitted, written)

    def _merged(self, rows: Sequence[Written]) -> list[int]:
        """Return which rows have an earlier answer that is other tokens in the context of a later
        one than where it is trained: its first characters become one token with the end of its
        prompt, or a token takes the spaces beside it.
        """
        tokens = self.chat.tokenizer.added_tokens_decoder.values()
        strips = any(token.lstrip or token.rstrip for token in tokens)
        places: dict[tuple[str, str], set[int]] = {}
        for index, written in enumerate(rows):
            for parts in written.documents:
                last = max((at for at, part in enumerate(parts) if part.trained), default=0)
                for before, after in pairwise(parts[:last]):
                    if window := self._window(before.text, after.text, strips=strips):
                        places.setdefault(window, set()).add(index)
        if not places:
            return []
        texts = sorted({text for one in places for text in (*one, "".join(one))})
        encoded = self.chat.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        ids = dict(zip(texts, encoded, strict=True))
        merged = (
            rows
            for (before, after), rows in places.items()
            if ids[before] + ids[after] != ids[before + after]
        )
        return sorted(set().union(*merged))

    def _window(self, before: str, after: str, *, strips: bool) -> tuple[str, str] | None:
        """Return what stands beside a border, between the special tokens around it; nothing if one
        of them is the border.
        """
        if not before or not after:
            return None
        before, word = before[-_WINDOW:], _FIRST_WORD.findall(after[:_WINDOW])[0]
        specials = [match.span() for match in self.chat.specials.finditer(before)]
        start, end = specials[-1] if specials else (0, 0)
        following = self.chat.specials.search(word)
        if not strips and (end == len(before) or (following and not following.start())):
            return None
        return before[start:], word[: following.end()] if following else word

    def _fit(self, row: int, leading: Sequence[int], tokens: Tokens, *, bare: bool) -> _Encoded:
        """Cut a document to sequences, and drop what follows the last trained token, since no
        token learns from it.
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
        cut = bare and self.loss != "padded"
        for piece, flags in pieces if cut else pieces[:1]:
            if len(flags):
                flags[0] = False
            if end := _end(flags):
                documents.append((piece[:end], flags[:end]))
        longer = len(ids) > limit
        dropped = not documents
        counts = Counts(
            1,
            truncated=int(longer and not cut and not dropped),
            dropped=int(dropped),
            dropped_too_long=int(longer and dropped),
            cut=int(len(documents) > 1),
        )
        return _Encoded(row, documents, counts)


def encoder_for(chat: Chat, data: DataSpec) -> Encoder:
    """Return what encodes the rows of a spec."""
    return Encoder(chat, data.loss, data.sequence_length, data.split_turns)


class _Encoded(NamedTuple):
    """A row and the documents it became."""

    row: int
    """From 1."""
    documents: list[Tokens]
    counts: Counts


def _joined(row: int, fitted: Sequence[_Encoded], written: Written) -> _Encoded:
    """Return a row with all of its documents."""
    documents = [document for one in fitted for document in one.documents]
    counts = [one.counts for one in fitted]
    dropped = not documents
    too_long = dropped and any(count.dropped_too_long for count in counts)
    reason: DropReason = "nothing-trained"
    if too_long:
        reason = "prompt-too-long"
    elif not written.documents:
        reason = "unproven" if written.unproven else "no-answer"
    return _Encoded(
        row,
        documents,
        Counts(
            1,
            truncated=int(
                not dropped and any(count.truncated or count.dropped_too_long for count in counts)
            ),
            dropped=int(dropped),
            dropped_too_long=int(too_long),
            cut=int(any(count.cut for count in counts)),
            kinds=written.found(row),
            dropped_rows={reason: Dropped(1, (row,))} if dropped else {},
        ),
    )


def _end(flags: npt.NDArray[np.bool_]) -> int:
    """Return the index after the last true flag; 0 without one."""
    found = np.flatnonzero(flags)
    return int(found[-1]) + 1 if len(found) else 0


def _border(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return what finds the tokens at which a tokenizer divides every text before it encodes what
    lies between them; None if it has none, or one that looks at its neighbours.
    """
    tokens = tokenizer.added_tokens_decoder.values()
    looks = any(
        token.lstrip or token.rstrip or token.single_word or token.normalized for token in tokens
    )
    if looks or not tokens or not tokenizer.is_fast:
        return None
    contents = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})")


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
