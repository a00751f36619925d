"""The words of a plan: the one place where facts become text, for command line, screen and JSON. Each kind of facts has a module of its
own, named like that of the facts.
"""

from __future__ import annotations

from collections.abc import Iterable

from so_tui.plan.facts import Fact
from so_tui.plan.facts.blockers import Blocker
from so_tui.plan.facts.choices import Choice
from so_tui.plan.facts.memory import Need
from so_tui.plan.facts.remedies import MemoryAdvice, Remedy
from so_tui.plan.messages.blockers import blocker_text
from so_tui.plan.messages.cautions import caution_text
from so_tui.plan.messages.choices import choice_text
from so_tui.plan.messages.memory import need_text
from so_tui.plan.messages.remedies import advice_text, remedy_text


def message(fact: Fact | str) -> str:
    """Return a fact in words. A text from an older plan is returned as it is."""
    if isinstance(fact, str):
        return fact
    if isinstance(fact, Need):
        return need_text(fact)
    if isinstance(fact, MemoryAdvice):
        return advice_text(fact)
    if isinstance(fact, Blocker):
        return blocker_text(fact)
    if isinstance(fact, Remedy):
        return remedy_text(fact)
    if isinstance(fact, Choice):
        return choice_text(fact)
    return caution_text(fact)


def messages(found: Iterable[Fact | str]) -> tuple[str, ...]:
    """Return facts in words, in order."""
    return tuple(map(message, found))
