"""Decode JSON and TOML that anybody may have written. Every fault, deep nesting included, raises
the error of a malformed file.
"""

from __future__ import annotations

import re
import tomllib
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from so_tui.trust.files import read_bounded, read_own

# Prepare structs for decoding in several threads.


def prepare(*kinds: type[msgspec.Struct]) -> None:
    """Make msgspec collect the type information of structs and of the structs they contain.

    Otherwise it does so when the first one is decoded, and two threads that do so at the same time
    crash the process (seen with 0.22.0). Call this where the struct is defined: a module is
    imported by one thread, and others wait for it.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)


T = TypeVar("T")
Tree = dict[str, Any]
"""A table of TOML, or an object of JSON."""

DEEPEST = 32
"""Levels of nesting that are read. The files of a run and the configs of models have fewer than
ten.
"""
LARGEST_FILE_BYTES = 16 << 20
"""Limit of a JSON file. A plan for 72 GPUs has about 1 MiB."""
_LARGEST_INTEGER = 2**63 - 1

# A string without an end is one, too: otherwise it would be read again from each quote in it, which
# takes days for a large file.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_LEVELS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))
_NO_BRACKETS = bytes(set(range(256)) - _LEVELS.keys())
# The parser needs time that is quadratic in the number of names in a key: 20,000 take ten seconds.
_LONG_KEY = re.compile(
    r"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){32}""", re.ASCII
)


class TooDeepError(msgspec.DecodeError):
    """A document nested deeper than ``DEEPEST``."""

    def __init__(self) -> None:
        super().__init__(f"it is nested more than {DEEPEST} levels deep")


def decode_json(content: bytes, kind: type[T]) -> T:
    """Return a value of a type from JSON. Raises msgspec.DecodeError, whatever is wrong with the
    content.
    """
    _check_depth(content)
    return decoded(msgspec.json.Decoder(kind), content)


def read_json(path: Path, kind: type[T]) -> T:
    """Return the content of a JSON file. Raises OSError, or msgspec.DecodeError, whatever is wrong
    with the content.
    """
    return decode_json(read_bounded(path, LARGEST_FILE_BYTES), kind)


def readable_json(
    path: Path, kind: type[T], *, own: bool = False, limit_bytes: int = LARGEST_FILE_BYTES
) -> T | None:
    """Return the content of a JSON file; None if it is missing, damaged or cannot be read.

    Args:
        path: The file.
        kind: The type of its content.
        own: Read only a file of this user that others cannot write.
        limit_bytes: The most that is read of another one.
    """
    try:
        content = read_own(path) if own else read_bounded(path, limit_bytes)
        return decode_json(content, kind)
    except (OSError, msgspec.DecodeError):
        return None


def decoded(decoder: msgspec.json.Decoder[T], content: bytes) -> T:
    """Return the value of a line. Raises msgspec.DecodeError, whatever is wrong with the line."""
    try:
        return decoder.decode(content)
    except RecursionError:
        raise TooDeepError from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8 text (byte {error.start})") from None


def decode_toml(content: bytes) -> Tree:
    """Return the tree of a TOML document.

    Raises:
        UnicodeDecodeError: It is not UTF-8 text.
        TooDeepError: It is nested too deeply.
        tomllib.TOMLDecodeError: Anything else is wrong with it.
    """
    text = content.decode("utf-8")
    if _LONG_KEY.search(text):
        raise TooDeepError
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise TooDeepError from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        words = str(error).partition(";")[0].partition(":")[0]
        raise tomllib.TOMLDecodeError(words) from None
    _check_values(tree)
    return tree


def _check_depth(content: bytes) -> None:
    if content.count(b"[") + content.count(b"{") <= DEEPEST:
        return
    # Without a loop in Python, which would take half the time of listing thousands of runs.
    brackets = _STRING.sub(b"", content).translate(None, _NO_BRACKETS)
    if any(map(DEEPEST.__lt__, accumulate(map(_LEVELS.__getitem__, brackets)))):
        raise TooDeepError


def _check_values(tree: Tree) -> None:
    """Raise for values that are nested too deeply, and for integers beyond the 64 bits of TOML."""
    level: list[Any] = [tree]
    for _ in range(DEEPEST):
        tables = (value.values() for value in level if isinstance(value, dict))
        lists = (value for value in level if isinstance(value, list))
        level = [*chain.from_iterable(tables), *chain.from_iterable(lists)]
        if any(isinstance(value, int) and abs(value) > _LARGEST_INTEGER for value in level):
            raise tomllib.TOMLDecodeError("an integer has more than 64 bits")
    if any(isinstance(value, dict | list) for value in level):
        raise TooDeepError
