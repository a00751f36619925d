"""Train the byte-level BPE tokenizer of the embedded `tiny` preset on its own rows.

    python -m tools.tiny_tokenizer [--rows FILE] [--folder FOLDER] [--vocabulary 2048]

Writes ``tokenizer.json`` and ``tokenizer_config.json``, for
``AutoTokenizer.from_pretrained(FOLDER)``. Deterministic: the same rows give the same files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from so_tui.spec import resolve_source

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
LONGEST = 1024
"""Positions of the tiny model."""


def row_texts(path: Path) -> Iterator[str]:
    """Yield each row as one text in the Alpaca layout, so that its headings become few tokens."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        middle = f"\n\n### Input:\n{row['input']}" if row["input"] else ""
        yield f"### Instruction:\n{row['instruction']}{middle}\n\n### Response:\n{row['output']}"


def trained(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of exactly ``vocabulary`` tokens: pad, bos, eos, the 256 bytes,
    merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, longest: int = LONGEST) -> None:
    """Write both files that ``AutoTokenizer`` reads.

    Args:
        tokenizer: The tokenizer.
        folder: Where to write.
        longest: Tokens above which the tokenizer warns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


def main() -> None:
    """Train and write the tokenizer."""
    home = Path(resolve_source("builtin:tiny"))
    parser = argparse.ArgumentParser(
        prog="python -m tools.tiny_tokenizer",
        description=__doc__.partition("\n\n")[0] if __doc__ else None,
    )
    parser.add_argument("--rows", type=Path, default=home / "rows.jsonl")
    parser.add_argument("--folder", type=Path, default=home)
    parser.add_argument("--vocabulary", type=int, default=2048)
    arguments = parser.parse_args()
    tokenizer = trained(row_texts(arguments.rows), arguments.vocabulary)
    write(tokenizer, arguments.folder)
    print(json.dumps({"folder": str(arguments.folder), "vocabulary": tokenizer.get_vocab_size()}))


if __name__ == "__main__":
    main()
