"""Write ``docs/published.md``: every published figure about SuperOffload (``published.toml``)
beside what is planned for the same settings.

python -m benchmarks.published
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine
from so_tui.model.flops import hw_flops, seed_tflops_total
from so_tui.model.profile import in_tiles, profile_of
from so_tui.model.shape import architecture
from so_tui.plan import step_time
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import published_speed
from so_tui.plan.step_time import ADAM_BYTES
from so_tui.spec import RunSpec, load_catalog, with_values
from so_tui.validation.validate import with_layers

PATH = Path(__file__).with_name("published.toml")
PAGE = Path(__file__).resolve().parents[1] / "docs/published.md"
_INTRODUCTION = """\
# Published figures beside ours

<!-- Written by `python -m benchmarks.published`; a test keeps it current. -->

You see every published figure about SuperOffload that we know of, what so-tui plans for the same settings, and why the two differ where
they do by more than 15 %. The figures are data: `benchmarks/published.toml`.

Ours are predictions. so-tui has not run on a Grace machine; what pageable copies cost there is assumed, and measured by
`so-tui calibrate`. TFLOPS are by the formula of DeepSpeed's example script (`seed_tflops_total` in [metrics](metrics.md)), and "plain
kernels" are those of the model as transformers has it. What is said of DeepSpeed's versions was read in their sources.

"""  # noqa: E501
_HEADINGS = ("published", "figure", "ours", "difference")
NOTABLE = 0.15
"""A difference above which a figure needs a reason."""
_MOST_LAYERS = 400

Quantity = Literal["tflops", "speedup", "busy", "largest", "fits", "adam", "none"]
Setting = Literal["deepspeed", "zerooffload", "ours", "gpu", ""]


class Published(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published figure, and the settings for which it is predicted."""

    key: str
    claim: str
    source: str
    quantity: Quantity
    value: float
    unit: str = ""
    preset: str = ""
    machine: str = ""
    gpus: int = 1
    use: Setting = ""
    """Which of the file's common settings it has."""
    settings: dict[str, str] = {}
    """In addition."""
    against: Setting = ""
    """Which settings a speed-up is over."""
    reason: str = ""
    """Why ours differs, with places for figures."""


class Compared(Struct, frozen=True, kw_only=True):
    """A published figure beside ours."""

    published: Published
    settings: dict[str, str]
    """All keys that differ from the preset."""
    predicted: float | None
    difference: float | None
    """Ours over the published one, less 1."""
    reason: str
    """Filled in; empty where the difference is small."""


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    common: dict[Setting, dict[str, str]]
    figures: tuple[Published, ...]


def published() -> tuple[Published, ...]:
    """Return all published figures."""
    return _file().figures


def compared() -> tuple[Compared, ...]:
    """Return all published figures beside ours. Each plans a few runs: in all, some seconds."""
    return tuple(map(compare, published()))


def compare(figure: Published) -> Compared:
    """Return a published figure beside ours."""
    predicted = _predicted(figure)
    difference = predicted / figure.value - 1 if predicted is not None and figure.value else None
    notable = difference is None or abs(difference) > NOTABLE or figure.quantity == "adam"
    reason = _filled_in(figure) if notable else ""
    return Compared(
        published=figure,
        settings=_settings(figure),
        predicted=predicted,
        difference=difference,
        reason=reason,
    )


@cache
def _file() -> _File:
    return msgspec.toml.decode(PATH.read_bytes(), type=_File)


def _settings(figure: Published, use: Setting = "", **changes: str) -> dict[str, str]:
    if figure.quantity == "none" or not figure.preset:
        return {}
    common = _file().common[use or figure.use]
    more = {
        key: value
        for key, value in figure.settings.items()
        if key in common or not key.startswith("offload.")
    }
    return (
        {"gpus": str(figure.gpus)}
        | common
        | more
        | {key.replace("__", "."): value for key, value in changes.items()}
    )


def _plan(figure: Published, use: Setting = "", **changes: str) -> Plan:
    spec = with_values(_preset(figure.preset), _settings(figure, use, **changes))
    return _planned(spec, figure.machine)


@cache
def _preset(name: str) -> RunSpec:
    return load_catalog().presets[name].spec


def _planned(spec: RunSpec, machine: str) -> Plan:
    return make_plan(spec, _machine(machine), probed=False)


@cache
def _machine(name: str) -> Machine:
    return named_machine(name)


def _predicted(figure: Published) -> float | None:
    match figure.quantity:
        case "tflops":
            return example_tflops(_plan(figure))
        case "speedup":
            return _step_s(_plan(figure, figure.against)) / _step_s(_plan(figure))
        case "busy":
            return _busy(figure, figure.use)
        case "largest":
            return _largest(figure, figure.use)
        case "fits":
            return float(_plan(figure).fits)
        case "adam":
            return _adam_s(figure.machine)
        case "none":
            return None


def _step_s(plan: Plan) -> float:
    assert plan.step_s is not None, (
        f"{plan.preset}: the machines of published figures have known speeds"
    )
    return plan.step_s


def _gpu_s(figure: Published) -> float:
    """Return the seconds of a step in which the GPU computes a forward and a backward pass: those
    without any offload.
    """
    step = _plan(figure, "gpu").step
    assert step is not None
    return step.forward_s + step.backward_s


def _busy(figure: Published, use: Setting) -> float:
    return _gpu_s(figure) / _step_s(_plan(figure, use))


def _adam_s(machine: str) -> float:
    found = _machine(machine)
    speed = published_speed(found.gpus[0].name)
    assert speed is not None
    return ADAM_BYTES * 1e9 / speed.adam_bytes_per_s(len(found.cpu_nodes[0].cpus), 1)


def _largest(figure: Published, use: Setting) -> float:
    """Return the billions of parameters of the largest model of this shape that fits, with one
    sequence in a micro-batch.
    """
    spec = with_values(_preset(figure.preset), _settings(figure, use, train__micro_batch="1"))
    fits, too_many = 1, _MOST_LAYERS
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (
            (middle, too_many)
            if _planned(with_layers(spec, middle), figure.machine).fits
            else (fits, middle)
        )
    return with_layers(spec, fits).model.parameter_count / 1e9


def _copies_s(figure: Published) -> float:
    """Return what copies of gradients add to backward."""
    step = _plan(figure).step
    assert step is not None
    return step.forward_s + step.backward_s - _gpu_s(figure)


def _exposed_s(figure: Published, use: Setting = "", **changes: str) -> float:
    step = _plan(figure, use, **changes).step
    assert step is not None
    return step.exposed_optimizer_s


def _early_step_s(figure: Published) -> float:
    """Return the seconds of a step of DeepSpeed's SuperOffload as the source of 0.18.0 reads.

    It has neither copies of gradients by the training process nor one of the offloaded sub-groups'
    weights to the GPU.
    """
    plan = _plan(figure, "deepspeed")
    without = _plan(figure, "gpu").step
    speed = published_speed(_machine(figure.machine).gpus[0].name)
    assert without is not None
    assert speed is not None
    layout = profile_of(plan.spec.model).layout(plan.gpus, plan.spec.offload)
    rate = speed.adam_bytes_per_s(len(plan.binding[0].adam_cpus), 1)
    return _gpu_s(figure) + step_time.exposed_adam_s(layout, rate, without.backward_s)


def example_tflops(plan: Plan) -> float | None:
    """Return TFLOPS of a plan by the formula of DeepSpeed's example script, summed over GPUs; None
    without a prediction of time.
    """
    spec = plan.spec
    if plan.step_s is None:
        return None
    return seed_tflops_total(
        spec.model.parameter_count,
        architecture(spec.model.config),
        spec.data.sequence_length,
        plan.tokens_per_step // spec.data.sequence_length,
        plan.step_s,
        checkpointing=spec.model.repeats_products,
    )


def _tflops(plan: Plan, step_s: float | None = None) -> float:
    found = example_tflops(replace(plan, step_s=step_s) if step_s else plan)
    assert found is not None, f"{plan.preset}: the machines of published figures have known speeds"
    return found


def _counted(figure: Published) -> float:
    """Return the example's count of FLOPs over what the GPU executes."""
    plan = _plan(figure)
    length, profile = plan.spec.data.sequence_length, profile_of(plan.spec.model)
    sequences = plan.tokens_per_step // length
    executed = hw_flops(
        profile.flops,
        plan.tokens_per_step,
        [length] * sequences,
        policy=plan.spec.model.policy,
        tiled=in_tiles(plan.spec, profile.architecture),
    )
    return _tflops(plan, 1.0) * 1e12 / executed


def _host_bytes_per_parameter(figure: Published) -> float:
    plan = _plan(figure, train__micro_batch="1")
    return sum(plan.host_bytes_per_node.values()) / plan.spec.model.parameter_count


def _shortage(figure: Published) -> str:
    plan = _plan(figure)
    return str(plan.cause_texts[0]) if plan.cause_texts else plan.verdict


_EVIDENCE: dict[str, Callable[[Published], float | str]] = {
    "adam_s": lambda figure: _adam_s(figure.machine),
    "against_busy": lambda figure: _busy(figure, figure.against),
    "bound": lambda figure: 1 / _busy(figure, figure.against),
    "clipped_tflops": lambda figure: _tflops(_plan(figure, train__gradient_clipping="1")),
    "copies_s": _copies_s,
    "counted": _counted,
    "early_speedup": lambda figure: _step_s(_plan(figure, figure.against)) / _early_step_s(figure),
    "early_tflops": lambda figure: _tflops(_plan(figure), _early_step_s(figure)),
    "exposed_s": _exposed_s,
    "fused_tflops": lambda figure: _tflops(_plan(figure, "ours", model__kernels="auto")),
    "gpu_tflops": lambda figure: _tflops(_plan(figure), _gpu_s(figure)),
    "host_bytes_per_parameter": _host_bytes_per_parameter,
    "one_sequence": lambda figure: _plan(figure, train__micro_batch="1").verdict,
    "ours_exposed_s": lambda figure: _exposed_s(figure, "ours"),
    "ours_largest": lambda figure: _largest(figure, "ours"),
    "ours_speedup": lambda figure: (
        _step_s(_plan(figure, figure.against)) / _step_s(_plan(figure, "ours"))
    ),
    "shortage": _shortage,
}
"""What reasons may name in braces. Computed where a reason does."""


def _filled_in(figure: Published) -> str:
    names = {name for _, name, _, _ in Formatter().parse(figure.reason) if name}
    return figure.reason.format(**{name: _EVIDENCE[name](figure) for name in names})


def page(found: Sequence[Compared]) -> str:
    """Return the page: the table, the reasons and the settings."""
    lines = [
        _INTRODUCTION + "| " + " | ".join((*_HEADINGS, "source")) + " |",
        "|---|---|---|---|---|",
    ]
    lines += [
        " | ".join(("| " + one.published.claim, *_figures(one), one.published.source + " |"))
        for one in found
    ]
    lines += [
        "",
        "## Why they differ",
        "",
        *(line for one in found if one.reason for line in _reason(one)),
    ]
    lines += [
        "## Settings",
        "",
        *(line for one in found if one.settings for line in _command(one)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _figures(one: Compared) -> tuple[str, str, str]:
    unit = one.published.unit
    if one.published.quantity == "fits":
        return "fits", "fits" if one.predicted else "does not fit", ""
    predicted = "—" if one.predicted is None else _number(one.predicted, unit)
    value = _number(one.published.value, unit) if one.published.value else ""
    return value, predicted, "" if one.difference is None else f"{100 * one.difference:+.0f} %"


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".strip()


def _reason(one: Compared) -> Iterator[str]:
    yield f"- **{one.published.claim}**: {one.reason}"
    yield ""


def _command(one: Compared) -> Iterator[str]:
    figure = one.published
    against = f", over those of `{figure.against}`" if figure.against else ""
    changes = " ".join(
        f"--set {key}={value}" for key, value in one.settings.items() if key != "gpus"
    )
    yield (
        f"- {figure.claim}{against}: `so-tui plan {figure.preset} --machine {figure.machine} "
        f"--gpus {figure.gpus} {changes}`"
    )


if __name__ == "__main__":
    PAGE.write_text(page(compared()), encoding="utf-8")
