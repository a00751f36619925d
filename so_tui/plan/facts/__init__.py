"""What a plan says, as values, a module for each kind: why it fits or not, what would change that, why settings were chosen, what is worth
knowing.

``plan.blockers``, ``verdict``, ``remedies``, ``choices`` and ``cautions`` find them. ``messages`` turns them into words, in modules of the
same names as here.

Plans of runs that were saved before facts were values hold texts in their place, so consumers accept ``Fact | str``.
"""

from __future__ import annotations

from so_tui.plan.facts.blockers import Blocker
from so_tui.plan.facts.cautions import Caution
from so_tui.plan.facts.choices import Choice
from so_tui.plan.facts.memory import Need
from so_tui.plan.facts.remedies import MemoryAdvice, Remedy

Reason = Blocker | Need | Remedy | Choice
Fact = Reason | Caution | MemoryAdvice
