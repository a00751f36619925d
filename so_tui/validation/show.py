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
from so_tui.validation import report as reports
from so_tui.validation.report import (
    CopiesFound,
    CopyRates,
    MachineFound,
    Outcome,
    PhaseSeconds,
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


def write(folder: Path, report: Report) -> Path:
    """Write the report, and ``report.md`` with its figures, whose path is returned. Raises
    OSError.
    """
    reports.write(folder, report)
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
    training = trained(report.outcomes)
    # The losses of runs of many steps, or what else there is.
    if lines := [
        Curve(
            outcome.title,
            tuple(
                (step, math.nan if loss is None else loss)
                for step, loss in enumerate(result.losses, start=1)
            ),
        )
        for outcome, result in [one for one in training if one[1].losses_only] or training
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
    return [one for one in trained(report.outcomes) if not one[1].losses_only]


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


def _head(report: Report) -> Lines:
    most = f"at most {plural(report.gpus, 'GPU')} a run"
    yield f"# Validation{f' of {report.host}' if report.host else ''}"
    yield ""
    yield (
        f"so-tui {report.so_tui}, begun {report.begun}, {most}. Trained: {report.shape}, random "
        "weights."
    )
    yield ""


def _part(outcome: Outcome, published: Speed | None) -> Lines:
    match outcome.result:
        case MachineFound() as found:
            yield from [
                "## Machine",
                "",
                f"{found.cpu}, {found.cores} usable hardware threads, {found.architecture}.",
                "",
            ]
            for node in found.nodes:
                yield f"- node {node.id}: {node.cores} threads, {memory_size(node.memory_bytes)}"
            for gpu in found.gpus:
                yield f"- GPU {gpu.index}: {gpu.name}, node {gpu.numa_node}"
            for one in found.findings:
                yield f"- {one.severity}: {f'{one.title} ' if one.title else ''}(`{one.code}`)"
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
            yield from ["## Copies, GB/s", "", "![copies](copies.svg)", ""]
            ways = CopyRates.__struct_fields__[3:]
            names = [name.replace("_", " ") for name in ways[:-1]]
            rows = [
                (
                    f"{one.gpu}{', all at once' * one.all_at_once}",
                    str(one.node),
                    *(f"{getattr(one, way) / 1e9:.1f}" for way in ways),
                )
                for one in found.copies
            ]
            yield from _table(("GPU", "node", *names, "both ways, each"), rows)


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
    for node, rate in rates.adam_remote:
        yield f"CPU Adam with its states on node {node}", rate, None, *_GIGABYTES
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


def speed_cells(result: TrainingFound) -> dict[str, str]:
    """Return the speeds of a part in words, by the headings of their columns."""
    measured, planned_s = result.measured, result.predicted.step_s
    return {
        "GPUs": str(result.ranks),
        "s/step": significant(measured.step_s),
        "planned": significant(planned_s) if planned_s else "·",
        "tokens/s": thousands(round(result.useful_tokens_per_s)),
        "TFLOPS a GPU": significant(result.model_tflops_per_gpu),
        "TFLOPS by DeepSpeed's example": significant(result.example_tflops),
    }


def _speeds(report: Report) -> Lines:
    found = timed(report)
    if not found:
        return
    known = {outcome.key: (outcome.title, result.useful_tokens_per_s) for outcome, result in found}
    bases = [known[key] for key in _BASELINE if key in known]
    yield from ["## Training", "", "![tokens per second](tokens.svg)", ""]
    rows = []
    for outcome, result in found:
        cells = {"": outcome.title} | speed_cells(result)
        del cells["planned"]  # it has a table of its own
        multiples = {
            f"× {title}": f"{result.useful_tokens_per_s / rate:.2f}" for title, rate in bases
        }
        rows.append(cells | multiples)
    yield from _table([*rows[0]], [[*row.values()] for row in rows])
    waited = [
        f"- {outcome.title}: {result.held_back_steps} of {result.steps} steps waited for the norm "
        "of all gradients"
        for outcome, result in found
        if result.clipping
        and result.held_back_steps
        and result.settings.get("offload.engine") == "so-tui"
    ]
    if waited:
        yield from [*waited, ""]


def _agreement(report: Report) -> Lines:
    if not trained(report.outcomes):
        return
    yield from ["## Losses", "", "![losses](losses.svg)", ""]
    rows = [
        (title, reference, steps, differ or "a loss is not finite")
        for title, reference, steps, differ in agreement_rows(report)
    ]
    if rows:
        yield from _table(("", "compared with", "steps", "largest difference at a step"), rows)


def agreement_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Return for each part that can be compared its title, that of the other one, the steps, and
    the largest difference; empty if a loss is not finite.
    """
    titles = {outcome.key: outcome.title for outcome in report.outcomes}
    return [
        (
            titles.get(one.key, one.key),
            titles.get(one.reference, one.reference),
            str(len(one.by_step)),
            "" if one.largest is None else f"{100 * one.largest:.3f} %",
        )
        for one in report.agreement
    ]


def _plans(report: Report) -> Lines:
    found = timed(report)
    if not found:
        return
    yield from [
        "## Plan beside measurement",
        "",
        "![seconds per step](steps.svg)",
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


def _phases(report: Report) -> Lines:
    names, rows = PhaseSeconds.__struct_fields__, []
    for outcome, result in trained(report.outcomes):
        if result.phases is not None:
            seconds = [getattr(result.phases, name) for name in names]
            rows.append((outcome.title, *(f"{each:.1f}" for each in (*seconds, sum(seconds)))))
    if not rows:
        return
    yield from [
        "## Where the time went",
        "",
        "Seconds of each part, from its planning until nothing of its run was left.",
        "",
    ]
    yield from _table(
        ("", *(name.removesuffix("_s").replace("_", " ") for name in names), "all"), rows
    )


def _outcomes(report: Report) -> Lines:
    rest = [outcome for outcome in report.outcomes if outcome.state != "measured"]
    if rest:
        yield from ["## Not measured", ""]
    for outcome in rest:
        reason = f": {outcome.reason}" if outcome.reason else ""
        yield f"- {outcome.title}: {outcome.state}{reason}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""
