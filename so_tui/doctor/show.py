"""Render doctor's findings with rich, to read well at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from so_tui.doctor.checks import Finding, Severity
from so_tui.machine.software import PACKAGES, known_versions
from so_tui.machine.types import Software
from so_tui.trust.text import printable_line

_SIGNS: dict[Severity, tuple[str, str, str]] = {
    "blocks": ("✗", "blocks a launch", "bold red"),
    "warning": ("~", "warning", "yellow"),
    "note": ("·", "note", "cyan"),
}
"""Sign, label and style: colour must not be the only difference."""


def render_findings(findings: Sequence[Finding], software: Software | None) -> RenderableType:
    """Render findings with their evidence, cost and remedy; a single line if there are none. Of
    installed training packages (``software``), render whether they are a tested set.
    """
    parts = [_finding(finding) for finding in findings]
    parts = parts or [Text.assemble(("✓ ", "green"), "No problems found.")]
    if software is not None:
        found = known_versions().set_of(software)
        versions = ", ".join(f"{package} {getattr(software, package)}" for package in PACKAGES)
        which = f"the tested set {found.name}" if found else "not a tested set"
        sign = ("✓ ", "green") if found else ("· ", "cyan")
        parts.append(
            Text.assemble(sign, printable_line(f"Training packages: {which} ({versions})."))
        )
    return Group(*parts)


def _finding(finding: Finding) -> RenderableType:
    sign, word, style = _SIGNS[finding.severity]
    rows = Table.grid(Column(style="dim", width=5), Column(overflow="fold"), padding=(0, 1))
    for name, text in (("found", finding.evidence), ("cost", finding.cost), ("do", finding.remedy)):
        rows.add_row(name, printable_line(text))
    return Group(
        Text.assemble((f"{sign} {word}  ", style), (finding.title, "bold")),
        Padding(rows, (0, 0, 1, 2)),
    )
