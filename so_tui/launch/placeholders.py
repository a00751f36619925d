"""Values of a launch that are not known until a supervisor starts it on its host.

A launch that is shown or confirmed contains them as ``{NAME}``. The supervisor replaces them and records the result in ``command.json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Placeholder(StrEnum):
    """The text that stands for each value. It is always a whole argument or a whole variable, never part of one."""

    RUN = "{RUN}"
    RUN_ID = "{RUN_ID}"
    ATTEMPT = "{ATTEMPT}"
    RENDEZVOUS = "{RENDEZVOUS}"
    NODE = "{NODE}"
    ADDRESS = "{ADDRESS}"
    PORT = "{PORT}"
    HOSTFILE = "{HOSTFILE}"
    DEVICES = "{DEVICES}"


MEANINGS: dict[Placeholder, str] = {
    Placeholder.RUN: "the run directory",
    Placeholder.RUN_ID: "the run's id",
    Placeholder.ATTEMPT: "the number of the attempt",
    Placeholder.RENDEZVOUS: "where the ranks meet: a file that only you can open, or an address on the first of several nodes",
    Placeholder.NODE: "the number of the node",
    Placeholder.ADDRESS: "the address of the first node",
    Placeholder.PORT: "a port of the first node",
    Placeholder.HOSTFILE: "a file that lists the nodes",
    Placeholder.DEVICES: "the GPUs of each node",
}

_BY_TEXT = {placeholder.value: placeholder for placeholder in Placeholder}


def used(texts: Iterable[str | None]) -> tuple[Placeholder, ...]:
    """Return the placeholders among ``texts``, each once, in the order of ``Placeholder``."""
    present = set(texts)
    return tuple(placeholder for placeholder in Placeholder if placeholder.value in present)


def resolve(text: str, values: Mapping[Placeholder, str]) -> str:
    """Return the value of a placeholder, and any other text unchanged.

    Raises:
        KeyError: ``text`` is a placeholder without a value.
    """
    placeholder = _BY_TEXT.get(text)
    return text if placeholder is None else values[placeholder]
