"""``[benchmark]``: which steps a measurement counts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from so_tui.spec.sections.section import Section


class BenchmarkSpec(Section, frozen=True):
    warmup_steps: Annotated[
        int,
        Meta(
            ge=0, description="Steps excluded from the summary.", extra={"unit": "optimizer steps"}
        ),
    ] = 0
    measured_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Steps in the summary, after which the run ends; 0 for a normal run.",
            extra={"unit": "optimizer steps"},
        ),
    ] = 0
