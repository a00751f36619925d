"""Which attention backend a planned run uses."""

from __future__ import annotations

from so_tui.model.activations import SINKS
from so_tui.model.profile import ModelProfile
from so_tui.plan.resources import Resources
from so_tui.spec.attention import (
    FORMER_NAMES,
    Chosen,
    Needs,
    Present,
    choose_backend,
    generation_of,
)
from so_tui.spec.layers import layer_kinds, mixing_kinds
from so_tui.spec.types import RunSpec


def attention_of(spec: RunSpec, profile: ModelProfile, resources: Resources) -> Chosen:
    """Return the backend of a run: the one that was asked for, else the fastest that its GPUs and installed packages allow."""
    asked = FORMER_NAMES.get(spec.model.attention) or spec.model.attention
    if asked != "auto":
        return Chosen(asked)  # type: ignore[arg-type]
    return choose_backend(needs_of(spec, profile), present_in(resources))


def needs_of(spec: RunSpec, profile: ModelProfile) -> Needs:
    """Return what a spec asks of attention."""
    shape = profile.architecture
    softcap = bool(spec.model.config.get("attn_logit_softcapping"))
    sinks = shape.model_type in SINKS
    rows = bool(mixing_kinds(layer_kinds(spec.model.config)))
    return Needs(
        head_size=shape.head_dim,
        sinks=sinks,
        softcap=softcap,
        rows=rows,
        deterministic=spec.train.deterministic,
    )


def present_in(resources: Resources) -> Present:
    """Return what a machine has for attention."""
    generation = generation_of(resources.gpu_name) if resources.has_gpu else None
    return Present(generation=generation, packages=resources.machine.software.attention_packages)
