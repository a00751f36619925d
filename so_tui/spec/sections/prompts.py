"""``[prompts]``: what the model is asked during training."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from so_tui.spec.sections.section import Section


class PromptsSpec(Section, frozen=True):
    texts: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=8000)], ...],
        Meta(
            max_length=8,
            description="Questions that the model answers before the first step, during training and at the end.",
        ),
    ] = ()
    every_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Steps between answers to `texts`; 0 asks only at both ends.",
            extra={"unit": "optimizer steps"},
        ),
    ] = 0
    max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=512,
            description="Longest answer. Each token takes a forward pass of all ranks.",
            extra={"unit": "tokens"},
        ),
    ] = 48
    temperature: Annotated[
        float,
        Meta(
            ge=0, le=5, description="What logits are divided by; 0 takes the most probable token."
        ),
    ] = 0.0
