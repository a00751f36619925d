"""A report as Markdown, with a figure of its losses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from so_tui.plan.measured import Rates
from so_tui.plan.rates import Speed, published_speed
from so_tui.spec.check import write_atomic
from so_tui.svg import curves
from so_tui.trust.text import brief_message
from so_tui.units import memory_size, plural, significant, thousands
from so_tui.validation import report as reports
from so_tui.validation.report import (
    CopiesFound,
    CopyRates,
    MachineFound,
    Outcome,
    RatesFound,
    Report,
    TrainingFound,
    trained,
)

_TERMS = {
    "step_s": "step",
    "forward_s": "forward",
    "backward_s": "backward",
    "exposed_optimizer_s": "optimizer exposed",
    "gpu_reserved_bytes": "GPU memory reserved",
    "host_bytes": "host memory",
}
Lines = Iterator[str]
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
_MARKUP = re.compile(r"([\\`*_\[\]<>&|~#])")
"""Characters that begin markup, other than at the start of a line."""


def write(folder: Path, report: Report) -> Path:
    """Write the report, and ``report.md`` with its figure, whose path is returned. Raises
    OSError.
    """
    reports.write(folder, report)
    text, training = markdown(report), trained(report.outcomes)
    # The losses of runs of many steps, or what else there is.
    if lines := [
        (
            outcome.title,
            tuple(
                (step, math.nan if loss is None else loss)
                for step, loss in enumerate(result.losses, start=1)
            ),
        )
        for outcome, result in [one for one in training if one[1].losses_only] or training
    ]:
        write_atomic(folder / "losses.svg", curves("loss by step", lines).encode())
        text += "\n## Loss by step\n\n![losses](losses.svg)\n"
    path = folder / "report.md"
    write_atomic(path, text.encode())
    return path


def _timed(report: Report) -> list[tuple[Outcome, TrainingFound]]:
    """Return the training parts whose speed counts."""
    return [one for one in trained(report.outcomes) if not one[1].losses_only]


def markdown(report: Report) -> str:
    """Return the report's text, in which nothing that others wrote is markup."""
    published = _published(report)
    parts = [_part(outcome, published) for outcome in report.outcomes]
    sections = [
        _head(report),
        *parts,
        _speeds(report),
        _agreement(report),
        _plans(report),
        _outcomes(report),
    ]
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def _head(report: Report) -> Lines:
    most = f"at most {plural(report.gpus, 'GPU')} a run"
    yield f"# Validation{f' of {_text(report.host)}' if report.host else ''}"
    yield ""
    yield (
        f"so-tui {_text(report.so_tui)}, begun {_text(report.begun)}, {most}. Trained: "
        f"{_text(report.shape)}, random weights."
    )
    yield ""


def _part(outcome: Outcome, published: Speed | None) -> Lines:
    match outcome.result:
        case MachineFound() as found:
            yield from [
                "## Machine",
                "",
                f"{_text(found.cpu)}, {found.cores} usable hardware threads, "
                f"{_text(found.architecture)}.",
                "",
            ]
            for node in found.nodes:
                yield f"- node {node.id}: {node.cores} threads, {memory_size(node.memory_bytes)}"
            for gpu in found.gpus:
                yield f"- GPU {gpu.index}: {_text(gpu.name)}, node {gpu.numa_node}"
            for one in found.findings:
                title = f"{_text(one.title)} " if one.title else ""
                yield f"- {_text(one.severity)}: {title}({_text(one.code)})"
            yield ""
        case RatesFound() as found:
            yield from [
                "## Rates",
                "",
                "Plans of this machine use what was measured from now on, in place of what is "
                "published for its GPU.",
                "",
            ]
            yield from _table(("", "measured", "published"), list(_rates(found.rates, published)))
        case CopiesFound() as found:
            yield from ["## Copies, GB/s", ""]
            ways = CopyRates.__struct_fields__[3:]
            names = [name.replace("_", " ") for name in ways]
            rows = [
                (
                    f"{one.gpu}{', all at once' * one.all_at_once}",
                    str(one.node),
                    *(f"{getattr(one, way) / 1e9:.1f}" for way in ways),
                )
                for one in found.copies
            ]
            yield from _table(("GPU", "node", *names), rows)


def _published(report: Report) -> Speed | None:
    """Return what plans of the reported machine assume before it is calibrated."""
    for outcome in report.outcomes:
        if isinstance(outcome.result, MachineFound) and outcome.result.gpus:
            return published_speed(outcome.result.gpus[0].name)
    return None


_GIGABYTES = ("GB/s", 1e9)


def _rates(rates: Rates, published: Speed | None) -> Iterator[tuple[str, str, str]]:
    """Yield each rate in words, as measured, and as published."""
    for name, measured, assumed, unit, of in _figures_of(rates, published):
        if measured:
            planned = significant(assumed / of) if assumed else "—"
            yield f"{name}, {unit}", significant(measured / of), planned


def _figures_of(
    rates: Rates, published: Speed | None
) -> Iterator[tuple[str, float | None, float | None, str, float]]:
    """Yield name, measured and published figure, unit, and how many make one of it."""
    for cores, rate in rates.adam:
        assumed = published.adam_bytes_per_s(cores, 1) if published else None
        yield f"CPU Adam on {plural(cores, 'thread')}", rate, assumed, *_GIGABYTES
    for ranks, rate in rates.adam_together:
        yield f"CPU Adam of each of {ranks} ranks together", rate, None, *_GIGABYTES
    for node, rate in rates.node_bytes_per_s:
        yield (
            f"memory of node {node}",
            rate,
            getattr(published, "node_bytes_per_s", None),
            *_GIGABYTES,
        )
    for field, name, unit, of in _RATES:
        yield name, getattr(rates, field), getattr(published, field, None), unit, of
    for backend, measured_at in rates.attention:
        for at in measured_at:
            assumed_at = published.attention_at(backend, at.document) if published else None
            for way in ("forward", "backward"):
                name = f"{backend}, {way}, documents of {thousands(at.document)} tokens"
                yield name, getattr(at, way), getattr(assumed_at, way, None), "TFLOPS", 1e12


def _speeds(report: Report) -> Lines:
    found = _timed(report)
    if not found:
        return
    known = {outcome.key: (outcome.title, result.useful_tokens_per_s) for outcome, result in found}
    bases = [known[key] for key in _BASELINE if key in known and known[key][1]]
    yield from ["## Training", ""]
    headings = ("", "GPUs", "s/step", "tokens/s", "TFLOPS a GPU", "TFLOPS by DeepSpeed's example")
    rows = [
        (
            outcome.title,
            str(result.ranks),
            significant(result.measured.step_s),
            thousands(round(result.useful_tokens_per_s)),
            significant(result.model_tflops_per_gpu),
            significant(result.example_tflops) if result.example_tflops else "none",
            *(f"{result.useful_tokens_per_s / rate:.2f}" for _, rate in bases),
        )
        for outcome, result in found
    ]
    yield from _table((*headings, *(f"× {title}" for title, _ in bases)), rows)
    waited = [
        f"- {_text(outcome.title)}: {result.held_back_steps} of {result.steps} steps waited for "
        "the norm of all gradients"
        for outcome, result in found
        if result.clipping
        and result.held_back_steps
        and result.settings.get("offload.engine") == "so-tui"
    ]
    if waited:
        yield from [*waited, ""]


def _agreement(report: Report) -> Lines:
    titles = {outcome.key: outcome.title for outcome in report.outcomes}
    rows = [
        (
            titles.get(one.key, one.key),
            titles.get(one.reference, one.reference),
            str(len(one.by_step)),
            "a loss is not finite" if one.largest is None else f"{100 * one.largest:.3f} %",
        )
        for one in report.agreement
    ]
    if rows:
        yield from ["## Losses", ""]
        yield from _table(("", "compared with", "steps", "largest difference at a step"), rows)


def _plans(report: Report) -> Lines:
    found = _timed(report)
    if not found:
        return
    yield from [
        "## Plan beside measurement",
        "",
        "Measured / planned, term by term; seconds, or GB. Planned from the rates above. Later "
        "plans of this model also use what the bound",
        "runs measured without offload, with our engine and with ZeRO-Offload.",
        "",
    ]
    rows = []
    for outcome, result in found:
        cells = [outcome.title]
        for term in _TERMS:
            unit = 1e9 if term.endswith("_bytes") else 1.0
            measured, planned = (
                getattr(figures, term) / unit for figures in (result.measured, result.predicted)
            )
            cells.append(f"{significant(measured)} / {significant(planned) if planned else '—'}")
        rows.append(cells)
    yield from _table(("", *_TERMS.values()), rows)


def _outcomes(report: Report) -> Lines:
    rest = [outcome for outcome in report.outcomes if outcome.state != "measured"]
    if rest:
        yield from ["## Not measured", ""]
    for outcome in rest:
        reason = f": {outcome.reason}" if outcome.reason else ""
        yield f"- {_text(f'{outcome.title}: {outcome.state}{reason}')}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    for index, row in enumerate((headings, *rows)):
        yield "| " + " | ".join(map(_text, row)) + " |"
        if index == 0:
            yield "|" + "---|" * len(headings)
    yield ""


def _text(text: str) -> str:
    """Return a text as a line of Markdown in which nothing is markup."""
    return _MARKUP.sub(r"\\\1", brief_message(text))
