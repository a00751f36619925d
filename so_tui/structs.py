"""What msgspec has to know of our structs before threads decode them."""

from __future__ import annotations

import msgspec


def prepare(*kinds: type[msgspec.Struct]) -> None:
    """Have msgspec work out now how these are decoded, with all that they hold.

    Else it does so when the first of a kind is decoded, and two threads that are at it at once crash the process (seen with 0.22.0). To be
    called where a kind is defined: a module is imported by one thread, and the others wait for it.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
