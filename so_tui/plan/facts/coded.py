"""The base of facts: in JSON each carries a ``code``."""

from __future__ import annotations

import re

from msgspec import Struct


def _code(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


class CodedFact(Struct, frozen=True, tag_field="code", tag=_code):
    """A fact of a plan; its ``code`` is the class's name in kebab case."""
