"""Doctor's findings as text. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from so_tui.ui.text import Content, plural

if TYPE_CHECKING:
    from so_tui.machine.doctor import Finding

SIGNS = {"blocks": "✗", "warning": "~", "note": "·"}
_INDENT = 12
STYLES = {"blocks": "$error", "warning": "$warning", "note": "$faint"}


def doctor_summary(findings: Sequence[Finding]) -> str:
    """Return ``doctor: 1 blocks, 2 warnings``; empty when all is well."""
    blocks = sum(finding.severity == "blocks" for finding in findings)
    warnings = sum(finding.severity == "warning" for finding in findings)
    parts = (
        [
            f"{plural(blocks, 'problem')} that blocks"
            if blocks == 1
            else f"{blocks} problems that block"
        ]
        if blocks
        else []
    ) + ([plural(warnings, "warning")] if warnings else [])
    return f"doctor: {', '.join(parts)}" if parts else ""


def finding_content(finding: Finding, width: int) -> Content:
    """Return a finding with its evidence, cost and remedy, wrapped to ``width``."""
    lines = [
        Content.assemble(
            (
                f"{SIGNS[finding.severity]} {finding.severity:<8}",
                f"bold {STYLES[finding.severity]}",
            ),
            (finding.title, "bold"),
        )
    ]
    for name, text in (
        ("evidence", finding.evidence),
        ("cost", finding.cost),
        ("remedy", finding.remedy),
    ):
        folded = wrap(text, max(20, width - _INDENT), break_on_hyphens=False)
        lines += [
            Content.assemble((f"  {name if first else '':<{_INDENT - 2}}", "$faint"), line)
            for first, line in zip((True, *(False,) * len(folded)), folded, strict=False)
        ]
    return Content("\n").join(lines)
