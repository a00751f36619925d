"""A report as Markdown with figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from so_tui.plan.measured import Rates
from so_tui.plan.rates import Speed, published_speed
from so_tui.spec.check import write_atomic
from so_tui.svg import Bar, Curve, bars, curves
from so_tui.units import memory_size, plural, significant, thousands
from so_tui.validation.report import (
    CopiesFound,
    MachineFound,
    Outcome,
    PhaseSeconds,
    RatesFound,
    Report,
    TrainingFound,
    trained,
)

_TERMS = (
    "step_s",
    "forward_s",
    "backward_s",
    "exposed_optimizer_s",
    "gpu_reserved_bytes",
    "host_bytes",
)
_NAMES = dict(
    zip(
        _TERMS,
        ("step", "forward", "backward", "optimizer exposed", "GPU memory reserved", "host memory"),
        strict=True,
    )
)
_Row = tuple[str, str, str]
_RATES = (
    ("matrix_flops", "matrix products", "TFLOPS", 1e12),
    ("hbm_bytes_per_s", "copies within GPU memory", "GB/s", 1e9),
    ("d2h_bytes_per_s", "copies from GPU to host", "GB/s", 1e9),
    ("h2d_bytes_per_s", "copies from host to GPU", "GB/s", 1e9),
    ("pageable_d2h_bytes_per_s", "copies to host memory that is not pinned", "GB/s", 1e9),
    ("cast_h2d_bytes_per_s", "weights cast on the host and copied", "GB/s", 1e9),
    ("peer_bytes_per_s", "all-gather between GPUs", "GB/s", 1e9),
    ("layer_launch_overhead_s", "host time of a small layer", "µs", 1e-6),
)
"""Fields of rates, measured and published: name, unit, and how many make one of it."""
_BASELINE = ("gpu", "zerooffload")
"""Speeds are given as multiples of these, if they were measured."""


def write(folder: Path, report: Report) -> Path:
    """Write ``report.md`` with its figures, and return its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _figures(report).items():
        write_atomic(folder / name, content.encode())
    path = folder / "report.md"
    write_atomic(path, _markdown(report).encode())
    return path


def _figures(report: Report) -> dict[str, str]:
    """Return the figures by the names of their files; none for what was not measured."""
    found, drawn = timed(report), {}
    if found:
        rows = [Bar(outcome.title, (result.useful_tokens_per_s,)) for outcome, result in found]
        drawn["tokens.svg"] = bars("useful tokens per second", ("measured",), rows, "tokens/s")
        both = [
            Bar(outcome.title, (result.measured.step_s, result.predicted.step_s or None))
            for outcome, result in found
        ]
        drawn["steps.svg"] = bars("seconds per step", ("measured", "planned"), both, "s")
    if lines := [
        Curve(outcome.title, _points(result.losses)) for outcome, result in _compared(report)
    ]:
        drawn["losses.svg"] = curves("loss by step", lines)
    for outcome in report.outcomes:
        if isinstance(outcome.result, CopiesFound):
            copies = [
                Bar(
                    f"GPU {one.gpu}, node {one.node}{', all at once' * one.all_at_once}",
                    (one.pinned_d2h / 1e9, one.pageable_d2h / 1e9),
                )
                for one in outcome.result.copies
            ]
            drawn["copies.svg"] = bars(
                "copies from GPU to host", ("pinned", "pageable"), copies, "GB/s"
            )
    return drawn


def timed(report: Report) -> list[tuple[Outcome, TrainingFound]]:
    """Return the training parts whose speed counts."""
    return [
        (outcome, result) for outcome, result in trained(report.outcomes) if not result.losses_only
    ]


def _compared(report: Report) -> list[tuple[Outcome, TrainingFound]]:
    """Return the training parts whose losses are drawn: those of many steps, or what else there
    is.
    """
    found = trained(report.outcomes)
    return [(outcome, result) for outcome, result in found if result.losses_only] or found


def _points(losses: Sequence[float | None]) -> tuple[tuple[float, float], ...]:
    return tuple(
        (step, math.nan if loss is None else loss) for step, loss in enumerate(losses, start=1)
    )


def _markdown(report: Report) -> str:
    """Return the report's text."""
    published = _published(report)
    parts = [_part(outcome, published) for outcome in report.outcomes]
    sections = [
        _head(report),
        *parts,
        _speeds(report),
        _agreement(report),
        _plans(report),
        _phases(report),
        _outcomes(report),
    ]
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def _head(report: Report) -> Iterator[str]:
    where = f" of {report.host}" if report.host else ""
    yield f"# Validation{where}"
    yield ""
    most = f"at most {plural(report.gpus, 'GPU')} a run"
    yield (
        f"so-tui {report.so_tui}, begun {report.begun}, {most}. Trained: {report.shape}, random "
        "weights."
    )
    yield ""


def _part(outcome: Outcome, published: Speed | None) -> Iterator[str]:
    match outcome.result:
        case MachineFound() as found:
            yield from [
                "## Machine",
                "",
                f"{found.cpu}, {found.cores} usable hardware threads, {found.architecture}.",
                "",
            ]
            yield from (
                f"- node {node.id}: {node.cores} threads, {memory_size(node.memory_bytes)}"
                for node in found.nodes
            )
            yield from (
                f"- GPU {gpu.index}: {gpu.name}, node {gpu.numa_node}" for gpu in found.gpus
            )
            yield from (
                f"- {one.severity}: {f'{one.title} ' if one.title else ''}(`{one.code}`)"
                for one in found.findings
            )
            yield ""
        case RatesFound() as found:
            yield from [
                "## Rates",
                "",
                (
                    "Plans of this machine use what was measured from now on, in place of what is "
                    "published for its GPU."
                ),
                "",
            ]
            yield from _table(("", "measured", "published"), list(_rates(found.rates, published)))
        case CopiesFound() as found:
            headings = (
                "GPU",
                "node",
                "pinned d2h",
                "pinned h2d",
                "pageable d2h",
                "pageable h2d",
                "both ways, each",
            )
            yield from ["## Copies, GB/s", "", "![copies](copies.svg)", ""]
            rows = [
                (
                    f"{one.gpu}{', all at once' * one.all_at_once}",
                    str(one.node),
                    *(
                        f"{rate / 1e9:.1f}"
                        for rate in (
                            one.pinned_d2h,
                            one.pinned_h2d,
                            one.pageable_d2h,
                            one.pageable_h2d,
                            one.both_ways,
                        )
                    ),
                )
                for one in found.copies
            ]
            yield from _table(headings, rows)


def _published(report: Report) -> Speed | None:
    """Return what plans of the reported machine assume before it is calibrated."""
    names = [
        gpu.name
        for outcome in report.outcomes
        if isinstance(outcome.result, MachineFound)
        for gpu in outcome.result.gpus
    ]
    return published_speed(names[0]) if names else None


def _rates(rates: Rates, published: Speed | None) -> Iterator[_Row]:
    """Yield each rate in words, as measured, and as published."""

    gigabytes, teraflops = ("GB/s", 1e9), ("TFLOPS", 1e12)
    found: list[tuple[str, float | None, float | None, tuple[str, float]]] = []
    for cores, rate in rates.adam:
        assumed = published.adam_bytes_per_s(cores, 1) if published else None
        found.append((f"CPU Adam on {plural(cores, 'thread')}", rate, assumed, gigabytes))
    for node, rate in rates.adam_remote:
        found.append((f"CPU Adam with its states on node {node}", rate, None, gigabytes))
    for ranks, rate in rates.adam_together:
        found.append((f"CPU Adam of each of {ranks} ranks together", rate, None, gigabytes))
    for node, rate in rates.node_bytes_per_s:
        assumed = published.node_bytes_per_s if published else None
        found.append((f"memory of node {node}", rate, assumed, gigabytes))
    for field, name, unit, of in _RATES:
        assumed = getattr(published, field, None)
        found.append((name, getattr(rates, field), assumed, (unit, of)))
    for backend, measured_at in rates.attention:
        for at in measured_at:
            assumed_at = published.attention_at(backend, at.document) if published else None
            for way in ("forward", "backward"):
                name = f"{backend}, {way}, documents of {thousands(at.document)} tokens"
                assumed = getattr(assumed_at, way, None)
                found.append((name, getattr(at, way), assumed, teraflops))
    for name, measured, assumed, (unit, of) in found:
        if measured:
            planned = significant(assumed / of) if assumed else "—"
            yield f"{name}, {unit}", significant(measured / of), planned


def _speeds(report: Report) -> Iterator[str]:
    found = timed(report)
    if not found:
        return
    rates = {outcome.key: result.useful_tokens_per_s for outcome, result in found}
    bases = [key for key in _BASELINE if key in rates]
    titles = {outcome.key: outcome.title for outcome, _ in found}
    yield from ["## Training", "", "![tokens per second](tokens.svg)", ""]
    headings = (
        "",
        "GPUs",
        "s/step",
        "tokens/s",
        "TFLOPS a GPU",
        "TFLOPS by DeepSpeed's example",
        *(f"× {titles[key]}" for key in bases),
    )
    rows = [
        (
            outcome.title,
            str(result.ranks),
            significant(result.measured.step_s),
            thousands(round(result.useful_tokens_per_s)),
            significant(result.model_tflops_per_gpu),
            significant(result.example_tflops),
            *(f"{rates[outcome.key] / rates[key]:.2f}" for key in bases),
        )
        for outcome, result in found
    ]
    yield from _table(headings, rows)
    waited = [
        (
            f"- {outcome.title}: {result.held_back_steps} of {result.steps} steps waited for the "
            "norm of all gradients"
        )
        for outcome, result in found
        if result.clipping
        and result.held_back_steps
        and result.settings.get("offload.engine") == "so-tui"
    ]
    if waited:
        yield from [*waited, ""]


def _agreement(report: Report) -> Iterator[str]:
    if not trained(report.outcomes):
        return
    yield from ["## Losses", "", "![losses](losses.svg)", ""]
    titles = {outcome.key: outcome.title for outcome in report.outcomes}
    rows = [
        (titles[one.key], titles[one.reference], str(len(one.by_step)), _share(one.largest))
        for one in report.agreement
    ]
    if rows:
        yield from _table(("", "compared with", "steps", "largest difference at a step"), rows)


def _share(distance: float | None) -> str:
    return "a loss is not finite" if distance is None else f"{100 * distance:.3f} %"


def _plans(report: Report) -> Iterator[str]:
    found = timed(report)
    if not found:
        return
    yield from [
        "## Plan beside measurement",
        "",
        "![seconds per step](steps.svg)",
        "",
        (
            "Measured / planned, term by term; seconds, or GB. Planned from the rates above. Later "
            "plans of this model also use what the bound"
        ),
        "runs measured without offload, with our engine and with ZeRO-Offload.",
        "",
    ]
    rows = []
    for outcome, result in found:
        cells = []
        for term in _TERMS:
            unit = 1e9 if term.endswith("_bytes") else 1.0
            measured, planned = (
                getattr(figures, term) / unit for figures in (result.measured, result.predicted)
            )
            cells.append(
                f"{significant(measured)} / {significant(planned)}"
                if planned
                else f"{significant(measured)} / —"
            )
        rows.append((outcome.title, *cells))
    yield from _table(("", *_NAMES.values()), rows)


def _phases(report: Report) -> Iterator[str]:
    found = [
        (outcome, result.phases)
        for outcome, result in trained(report.outcomes)
        if result.phases is not None
    ]
    if not found:
        return
    names = PhaseSeconds.__struct_fields__
    rows = [
        (
            outcome.title,
            *(f"{getattr(phases, name):.1f}" for name in names),
            f"{sum(getattr(phases, name) for name in names):.1f}",
        )
        for outcome, phases in found
    ]
    yield from [
        "## Where the time went",
        "",
        "Seconds of each part, from its planning until nothing of its run was left.",
        "",
    ]
    yield from _table(
        ("", *(name.removesuffix("_s").replace("_", " ") for name in names), "all"), rows
    )


def _outcomes(report: Report) -> Iterator[str]:
    rest = [outcome for outcome in report.outcomes if outcome.state != "measured"]
    if not rest:
        return
    yield from ["## Not measured", ""]
    yield from (
        f"- {outcome.title}: {outcome.state}{': ' if outcome.reason else ''}{outcome.reason}"
        for outcome in rest
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""
