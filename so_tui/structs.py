"""Prepare structs for decoding in several threads."""

from __future__ import annotations

import msgspec


def prepare(*kinds: type[msgspec.Struct]) -> None:
    """Make msgspec collect the type information of structs and of the structs they contain.

    Otherwise it does so when the first one is decoded, and two threads that do so at the same time crash the process (seen with 0.22.0).
    Call this where the struct is defined: a module is imported by one thread, and others wait for it.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
