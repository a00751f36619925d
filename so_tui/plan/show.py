"""Plans as rich renderables: the models x GPU counts table, and the arithmetic behind one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from so_tui.machine.host import cpu_ranges
from so_tui.machine.types import Machine, facts_of
from so_tui.plan.binding import deepspeed_text
from so_tui.plan.gist import compact_moments, faster_than, limit_of, other_cautions, spare_bytes
from so_tui.plan.notes import MemoryNeeded, MemoryPool, Reason, Shortage
from so_tui.plan.plan import Plan, PlanRow, Verdict
from so_tui.plan.rates import SpeedSource, assumed_network, network_rate_text
from so_tui.plan.saving import may_lose_much, saving_text
from so_tui.plan.search import SEARCHED
from so_tui.plan.terms import Confidence, Location, MemoryTerm
from so_tui.plan.workload import Workload
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.text import printable_line
from so_tui.units import disk_size, memory_size, memory_unit, plural, thousands

# What a prediction of time rests on, in words.


def _speed_source_text(source: SpeedSource, mode: str) -> str:
    """Return what a prediction of time for a mode rests on: rates, data, and a probe where one
    corrected it.
    """
    text = f"{_rates_text(source)}; {_workload_text(source.workload)}"
    if not source.probed:
        return text
    probe, weights = "a probe of this model here", source.probed_weights
    same_mode = mode in source.probed_modes or not source.probed_modes
    if same_mode and not weights:
        return f"{text}; corrected by {probe}"
    if not same_mode:
        probe += f" with {' and '.join(source.probed_modes)}"
    if not source.probed_passes:
        return (
            f"{text}; the optimizer corrected by {probe} that waited for weights from host memory, "
            "the rest as predicted"
        )
    fetched, other = {
        "": ("", []),
        "gpu": (" whose GPU had the weights", ["fetching"]),
        "host": (" that fetched weights from host memory", ["memory"]),
    }[weights]
    own = [*(() if same_mode else ("the optimizer",)), *other]
    passes = "forward and backward" if weights == "host" else "forward, backward and memory"
    return f"{text}; {passes} corrected by {probe}{fetched}, {' and '.join(own)} as predicted"


def _rates_text(source: SpeedSource) -> str:
    """Return where the rates of the hardware come from."""
    if source.calibrated is None:
        return source.published
    measured = source.calibrated
    where = f"on {measured.host}, a machine like this one" if measured.host else "here"
    text = f"rates calibrated {where} on {measured.date[:10]}"
    return f"{text}, the rest {source.published}" if source.published else text


def _workload_text(workload: Workload | None) -> str:
    """Return the data that a prediction is for."""
    if workload is None:
        return "for whole sequences with every token trained, the most that data can cost"
    documents = (
        f"for documents of {thousands(round(workload.attended_tokens))} tokens, "
        f"{workload.trained_share:.0%} of all trained"
    )
    return f"{documents}, as measured on this data"


# What commands give of a plan: plain values for JSON.


def plans_json(plans: Iterable[Plan]) -> dict[str, Any]:
    """Return what ``plan --json`` prints: plain values; of the spec only what a plan chooses."""
    rows = [plan_tree(plan) | {"settings": _settings_of(plan.spec)} for plan in plans]
    for row in rows:
        del row["spec"]
    return {"plans": rows}


def plan_tree(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values.

    ``reasons``, ``remedies``, ``warnings`` and ``speed_source`` are texts. ``facts`` and ``speed``
    have the same as values: each fact with its ``role``, ``code``, values and ``message``.
    """
    row: dict[str, Any] = msgspec.to_builtins(plan, str_keys=True)
    facts = [
        *(("remedy" if reason in plan.remedies else "reason", reason) for reason in plan.reasons),
        *(("warning", warning) for warning in plan.warnings),
    ]
    source = plan.speed_source
    row |= {
        "facts": [
            {"role": role, **msgspec.to_builtins(fact), "message": fact.message}
            for role, fact in facts
        ],
        "reasons": plan.reason_texts,
        "remedies": plan.remedy_texts,
        "warnings": plan.warning_texts,
        "speed_source": _speed_source_text(source, plan.mode) if source else "",
        "speed": row["speed_source"],
    }
    if plan.shortage is not None:
        row["shortage"]["place"] = plan.shortage.place
    return row


def _settings_of(spec: RunSpec) -> dict[str, str | int | float]:
    """Return what a plan chooses, by the keys that set it."""
    settings: dict[str, str | int | float] = {key: attrgetter(key)(spec) for key in SEARCHED}
    return settings | {"train.gradient_accumulation": spec.gradient_accumulation_steps}


_SIGNS: dict[Verdict, tuple[str, str]] = {
    "fits": ("✓", "green"),
    "tight": ("~", "yellow"),
    "does not fit": ("✗", "red"),
}
_MARKS: dict[Confidence, str] = {"exact": "=", "calibrated": "≈ measured", "estimate": "≈"}
_POOLS: dict[MemoryPool, str] = {
    "gpu": "GPU",
    "node": "host",
    "limit": "limit",
    "shm": "shm",
    "unknown": "host",
}
_PLAIN: dict[str, Any] = {
    "box": SIMPLE_HEAD,
    "pad_edge": False,
    "header_style": "bold",
    "show_edge": False,
}
"""Options of a table with a line below its headings."""
_BAR_WIDTH = 28
_NONE = "—"
_NAME, _WITH_FACTS, _CELL, _WIDE_CELL = 18, 44, 19, 22
"""Columns of a model's name, of its name and facts, of a cell, and of a cell that says where memory
is short.
"""


def render_table(rows: Sequence[PlanRow], machine: Machine, width: int) -> RenderableType:
    """Render what this machine can train: a line per model, a column per GPU count, and a legend.
    Narrow terminals get less detail.
    """
    plans = [plan for row in rows for plan in row.cells.values()]
    facts = printable_line(f"   {' · '.join(facts_of(machine))}")
    parts: list[RenderableType] = [
        Text.assemble((machine.label, "bold"), facts),
        Text(),
        _grid(rows, "GPU" if machine.gpus else "rank", width),
        Text(),
        _legend(rows, machine),
    ]
    if any(plan.never_run for plan in plans):
        parts.append(
            Text("Planned, never run: so-tui has not run on such GPUs yet.", style="yellow")
        )
    if not any(plan.recommended for plan in plans):
        parts.append(
            Text(
                "No preset is sure to fit this machine. `so-tui plan PRESET` says why, and what "
                "would."
            )
        )
    return Group(*parts)


def _grid(rows: Sequence[PlanRow], unit: str, width: int) -> Table:
    """Return the table at the width of the terminal. Model names and verdicts are never cut; other
    columns are left out.
    """
    counts = sorted({count for row in rows for count in row.cells})
    narrow = width < _WITH_FACTS + _WIDE_CELL * len(counts)
    compact = width < _NAME + _CELL * len(counts)
    hosts = "".join({f"{row.nodes} x " for row in rows if row.nodes > 1})
    shown = [] if narrow else ["parameters", "tokens"]
    table = Table(
        Column("model", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in shown),
        *(Column(f"{hosts}{plural(count, unit)}", no_wrap=True) for count in counts),
        **_PLAIN,
    )
    for row in rows:
        facts = [] if narrow else [_parameters(row), thousands(row.sequence_length)]
        fastest = row.fastest_plan
        cells = [
            _cell(plan, narrow=narrow, compact=compact, fastest=plan is fastest)
            for plan in row.cells.values()
        ]
        table.add_row(printable_line(row.preset), *facts, *cells)
    return table


def _cell(
    plan: Plan, *, narrow: bool = False, compact: bool = False, fastest: bool = False
) -> Text:
    """Return one cell: ``★ ✓ 0.15  16.0k/s``, ``~ gpu  9.9k/s``, ``✗ host 226 > 105``; compact
    ``✓★0.15  16.0k``.
    """
    sign, style = _SIGNS[plan.verdict]
    star = "★" if plan.recommended else " "
    quick = "⇡" if fastest else " "
    text = Text.assemble((sign, style), star if plan.recommended else quick)
    if not compact:
        text = Text.assemble(star, quick, (f"{sign} ", style))
    if not plan.fits:
        return text.append(shortfall(plan, narrow), "dim")
    text.append("gpu " if plan.mode == "gpu" else f"{plan.ratio:.2f}")
    mark = "*" if compact_moments(plan) else " "
    if (tokens := plan.useful_tokens_per_s_total) is None:
        return text
    rate = _rate(tokens)
    return text.append(f"{mark}{rate.removesuffix('/s'):>5}" if compact else f"{mark}{rate:>8}")


def render_plan(plan: Plan, machine: Machine) -> RenderableType:
    """Render the verdict with its reasons, memory term by term, the step, the binding, and the
    warnings.
    """
    parts = verdict_lines(plan)
    # Several ranks may share a node: only where each has its own is a rank's memory compared with
    # the node's.
    own_nodes = len(plan.host_bytes_per_node) == plan.spec.ranks_per_host
    node = min(plan.host_capacity_bytes_per_node.values(), default=None) if own_nodes else None
    shown: dict[Location, tuple[str, int | None]] = {
        "gpu": ("each GPU", plan.gpu_capacity_bytes),
        "node": ("each APU" if plan.one_memory else "host, each rank", node),
        "shm": ("/dev/shm, whole host", machine.shm_total_bytes),
        "disk": ("disk, one checkpoint", None),
    }
    for location, (title, capacity) in shown.items():
        if terms := plan.largest_terms(location):
            size = disk_size if location == "disk" else memory_size
            total = sum(term.bytes for term in terms)
            parts += [Text(), _heading(title, total, capacity, size), _terms(terms, size)]
    if plan.fits:
        parts += [Text(), render_saving(plan)]
    marks = "= exact   ≈ measured: calibrated by measurements   ≈ derived, not measured"
    parts += [Text(), Text(marks, style="dim"), Text(), _step(plan)]
    if plan.binding:
        parts += [Text(), _binding(plan)]
    return Group(*parts)


def render_saving(plan: Plan) -> Text:
    """Render how often checkpoints are saved."""
    return Text(saving_text(plan), style="yellow" if may_lose_much(plan) else "")


def render_comparison(
    settings: str, rows: Sequence[tuple[str, float, float, float | None]]
) -> RenderableType:
    """Render what a probe measured beside what was predicted without it; ``rows``: (name with unit,
    predicted, measured, error).
    """
    table = Table(
        Column(no_wrap=True),
        *(Column(heading, justify="right") for heading in ("predicted", "measured", "error")),
        title=f"probe: {settings}",
        title_justify="left",
        **_PLAIN,
    )
    for name, predicted, measured, error in rows:
        table.add_row(
            name,
            f"{predicted:.3g}" if predicted else _NONE,
            f"{measured:.3g}",
            _NONE if error is None else f"{error:+.1%}",
        )
    return table


def verdict_lines(plan: Plan) -> list[RenderableType]:
    """Render the verdict, what fits, limits and would be faster, and the other reasons."""
    parts: list[RenderableType] = [_headline(plan), Text(), _gist(plan), Text()]
    told = [*plan.remedies, _need(plan)]  # some are not hashable
    parts += [_bullet("·", "cyan", why.message) for why in plan.reasons if why not in told]
    parts += [_bullet("!", "yellow", fact.message) for fact in other_cautions(plan)]
    return parts


def _headline(plan: Plan) -> Text:
    (sign, style), spec = _SIGNS[plan.verdict], plan.spec
    mode = "everything on the GPU" if plan.mode == "gpu" else f"{plan.mode}, ratio {plan.ratio:.2f}"
    if smaller := compact_moments(plan):
        mode += f", {smaller}"
    nodes = f" of {spec.nodes} nodes" if spec.nodes > 1 else ""
    ranks = f"{plural(plan.gpus, 'GPU' if plan.on_gpus else 'rank')}{nodes}"
    seconds = plan.step_s if plan.fits else None
    step = f"   predicted {seconds:.2f} s{plan.step_error_text} a step" if seconds else ""
    return Text.assemble(
        (spec.label, "bold"),
        f" on {ranks}: ",
        (f"{sign} {plan.verdict}", style),
        f"{step}   {mode}, micro-batch {spec.train.micro_batch}, activation checkpointing "
        f"{spec.model.activation_checkpointing}",
        (f"   recommended for {ranks}" if plan.recommended else "", "bold"),
        ("   planned, never run" if plan.never_run else "", "yellow"),
    )


def _need(plan: Plan) -> Reason | None:
    """Return the reason that says what is needed and there, or why it cannot run at all."""
    kinds = MemoryNeeded | Shortage
    found = next((reason for reason in plan.reasons if isinstance(reason, kinds)), None)
    return found or (None if plan.possible else plan.reasons[0])


def _gist(plan: Plan) -> Table:
    """Return what fits, what limits the speed, and what would make it faster, or make it fit."""
    need = _need(plan)
    fits = [need.message if need else plan.verdict]
    if spare := max((spare_bytes(plan, node) for node in plan.host_bytes_per_node), default=0):
        fits.append(f"{memory_size(spare)} of a host node is a spare copy for speed")
    limit = limit_of(plan)
    lines = {"fits": fits, "limit": [limit.message if limit else "not predicted"]}
    if plan.fits:
        lines["faster"] = [fact.message for fact in faster_than(plan)]
    else:
        lines = {"fits": [f"no: {fits[0]}"], "to fit": list(plan.remedy_texts)}
    table = Table.grid(Column(width=8), Column())
    for label, texts in lines.items():
        table.add_row(Text(label, "bold"), Text("; ".join(texts) or "nothing known"))
    return table


def _heading(title: str, total: int, capacity: int | None, size: Callable[[int], str]) -> Text:
    text = Text.assemble((f"{title:<22}", "bold"))
    if not capacity:
        return text.append(size(total))
    filled = min(_BAR_WIDTH, round(_BAR_WIDTH * total / capacity))
    return text.append_tokens(
        [
            ("▇" * filled, "red" if total > capacity else "cyan"),
            ("░" * (_BAR_WIDTH - filled), "dim"),
            (f"  {size(total)} of {size(capacity)}", None),
        ]
    )


def _terms(terms: Sequence[MemoryTerm], size: Callable[[int], str]) -> RenderableType:
    table = Table(
        Column(justify="right", no_wrap=True),
        Column(no_wrap=True),
        Column(ratio=1),
        Column(style="dim", ratio=2),
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for term in terms:
        name = term.name if term.rank is None else f"{term.name} (rank {term.rank})"
        table.add_row(size(term.bytes), _MARKS[term.confidence], name, str(term.formula))
    return Padding(table, (0, 0, 0, 2))


def _step(plan: Plan) -> RenderableType:
    text, step = Text.assemble(("step".ljust(22), "bold")), plan.step
    if plan.possible and not plan.fits:
        return text.append("none: it does not fit")
    if step is None:
        why = "this machine's speed is not known" if plan.possible else "it cannot run here"
        return text.append(f"no prediction: {why}")
    said = Text(
        f"{plan.step_s:.2f} s{plan.step_error_text}:   data {step.data_s:.2f}   "
        f"forward {step.forward_s:.2f}   backward {step.backward_s:.2f}   "
        f"optimizer exposed {step.exposed_optimizer_s:.2f}"
        f"\n{thousands(round(plan.useful_tokens_per_s_total or 0))} tokens/s, "
        f"{thousands(plan.tokens_per_step)} tokens a step"
    )
    if plan.model_tflops_per_gpu:
        said.append(f", {thousands(round(plan.model_tflops_per_gpu))} model TFLOPS per GPU")
    if plan.speed_source:
        said.append(f"\n≈ {_speed_source_text(plan.speed_source, plan.mode)}", "dim")
    if error := plan.step_error:
        where = ", on H100 and H200 GPUs of one host; others, and several hosts, were not checked"
        said.append(
            f"\n± four of five measured steps were within {error.share:.0%} of their plan"
            f"{'' if error.checked else where}",
            "dim",
        )
    table = Table.grid(Column(width=22))
    table.add_row(text, said)
    return table


def _binding(plan: Plan) -> RenderableType:
    table = Table(
        "rank",
        "GPU",
        "node",
        "training cores",
        "CPU-Adam cores",
        "memory",
        "DeepSpeed by itself",
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for rank in plan.binding:
        policy = rank.memory_policy
        table.add_row(
            str(rank.rank),
            _NONE if rank.gpu is None else str(rank.gpu),
            _NONE if rank.numa_node is None else str(rank.numa_node),
            cpu_ranges(rank.main_cpus),
            cpu_ranges(rank.adam_cpus) or _NONE,
            f"{policy.mode} {', '.join(map(str, policy.nodes))}".strip(),
            deepspeed_text(rank.deepspeed_unlisted or rank.deepspeed),
        )
    return table


def _legend(rows: Sequence[PlanRow], machine: Machine) -> Text:
    _, unit = memory_unit()
    network = machine.network or assumed_network(len(machine.gpus))
    text = Text()
    for verdict, sign in _SIGNS.items():
        text.append(*sign).append(f" {verdict}   ")
    text.append(
        f"★ what so-tui run starts{'   ⇡ fastest' if any(row.fastest_plan for row in rows) else ''}"
        "\ngpu: no offload   0.40: offload ratio   16.0k/s: thousand tokens a second"
        f"\n243 > 106: {unit} needed > {unit} there (GPU, host node, memory limit or /dev/shm)",
    )
    if any(plan.fits and compact_moments(plan) for row in rows for plan in row.cells.values()):
        text.append("\n0.40*: with compact moments, because it does not fit with fp32 moments")
    for nodes in {row.nodes for row in rows if row.nodes > 1}:
        text.append(
            f"\n{nodes} x 4 GPUs: four GPUs of each of {nodes} hosts like this one; "
            f"network of {network_rate_text(network)} each"
        )
    plans = (plan for row in rows for plan in row.cells.values())
    sources = {plan.speed_source for plan in plans if plan.speed_source}
    for words in sorted({f"{_rates_text(of)}; {_workload_text(of.workload)}" for of in sources}):
        text.append(f"\nspeeds are predictions: {words}", "dim")
    return text


def _parameters(row: PlanRow) -> str:
    if row.active_parameters < row.parameters:
        return f"{row.parameters / 1e9:.1f} B, {row.active_parameters / 1e9:.1f} active"
    small = row.parameters < 1e8
    return f"{row.parameters / 1e6:.1f} M" if small else f"{row.parameters / 1e9:.1f} B"


def shortfall(plan: Plan, narrow: bool = False) -> str:
    """Return the worst shortage in few words: ``host 922 > 464``; without the memory's name where
    there is little room.
    """
    if not plan.possible:
        return "not here" if narrow else "cannot run here"
    if (short := plan.shortage) is None:
        return ""
    giga, _ = memory_unit()
    needs, has = round(short.needs / giga), round(short.has / giga)
    figures = f"{needs} {'>' if needs > has else 'of'} {has}"
    return figures if narrow else f"{_POOLS[short.pool]} {figures}"


def _rate(tokens_per_s: float) -> str:
    if tokens_per_s >= 99_950:
        return f"{thousands(round(tokens_per_s / 1000))}k/s"
    return f"{tokens_per_s / 1000:.1f}k/s" if tokens_per_s >= 1000 else f"{tokens_per_s:.0f}/s"


def _bullet(sign: str, style: str, text: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text(sign, style=style), Text(text))
    return table
