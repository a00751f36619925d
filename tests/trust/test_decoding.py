"""What is decoded takes a time that grows with its size alone, whoever wrote it."""

from __future__ import annotations

import time

import msgspec
import pytest

from so_tui.trust.decoding import DEEPEST, TooDeepError, decode_json

BRACKETS = b"[" + b"{}," * DEEPEST
"""So many that their nesting is looked at."""


def seconds(content: bytes) -> float:
    began = time.process_time()
    with pytest.raises(msgspec.DecodeError):
        decode_json(content, object)
    return time.process_time() - began


@pytest.mark.parametrize("part", [b'\\"', b"\\\\", b'"\\"'])
def test_a_string_without_an_end_takes_no_longer_than_its_length(part: bytes) -> None:
    """Read again from each of its quotes, it would take half a minute for 50 kB."""
    assert seconds(BRACKETS + b'"' + part * 50_000) < 5


def test_brackets_in_strings_are_not_nesting() -> None:
    text = "[{" * DEEPEST + '"\\'
    assert decode_json(msgspec.json.encode([text, {}]), object) == [text, {}]
    with pytest.raises(TooDeepError):
        decode_json(msgspec.json.encode(text) + b"[" * (DEEPEST + 1), object)
