"""A plan for the eye: verdict, memory as bars, the step's anatomy, the reasons. Pure functions from
a plan to content.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from so_tui.ui.lines import fill_pieces, legend, stacked, step_parts
from so_tui.ui.text import Content, faint, hanging, in_rows, shorten, wrapped
from so_tui.units import duration, memory_of, plural, rate, significant, thousands
from so_tui.units import memory_size as memory

if TYPE_CHECKING:
    from so_tui.plan.notes import Remedy
    from so_tui.plan.plan import Plan
    from so_tui.plan.terms import Location
    from so_tui.spec import RunSpec


SIGNS = {"fits": "✓", "tight": "~", "does not fit": "✗"}
STYLES = {"fits": "$success", "tight": "$warning", "does not fit": "$error"}
GAP = 3
"""Cells between sections beside each other, and between facts."""
DIALOG = 70
"""Cells of a line of a question in a terminal of 80 columns."""
ROLE, NAME = 8, 5
"""Cells of what a line is about, and of what its bar is of."""
LABEL = ROLE + NAME
FIGURES = 20
"""Cells of the figures right of the bars: ``  157.0 of 113.5 GiB``."""
LEAST_BAR, MOST_BAR = 3, 28
_FASTER = 1.05
"""From how many times the speed on other GPUs is worth a line."""
TOO_MUCH = ("  ✗ too much", "  ✗")
"""What marks a bar that is too full, the longest first."""


def headline(plan: Plan, width: int, before: Content | None = None) -> Content:
    """Return the verdict, how it offloads and, where it fits, how fast it is predicted to be; lines
    of ``width`` cells part no figure from its unit.

    Args:
        plan: The plan.
        width: Cells of a line.
        before: Begins the first line.
    """
    from so_tui.plan.gist import compact_moments

    sign, style = SIGNS[plan.verdict], STYLES[plan.verdict]
    facts = [before] if before else []
    verdict = plan.verdict if plan.possible else "cannot run here"
    facts.append(Content.styled(f"{sign} {verdict}", f"bold {style}"))
    if plan.never_run:
        facts.append(Content.styled("planned, never run", "$warning"))
    mode = "no offload" if plan.mode == "gpu" else f"{plan.mode}, ratio {plan.ratio:.2f}"
    facts.append(Content(", ".join(filter(None, (mode, compact_moments(plan))))))
    speed, flops = plan.useful_tokens_per_s_total, plan.model_tflops_per_gpu
    if plan.fits:
        figures = [
            (f"{duration(plan.step_s)}/step", plan.step_error_text) if plan.step_s else None,
            (rate(speed), " tokens/s") if speed else None,
            (significant(flops), " TFLOPS/GPU") if flops else None,
        ]
        said = [Content.assemble((value, "bold"), rest) for value, rest in filter(None, figures)]
        if said:
            said[0] = faint("predicted ") + said[0]
        facts += said
    return in_rows(wrapped(facts, width, GAP))


def gist(plan: Plan, width: int, *, fastest: Plan | None = None, plain: bool = False) -> Content:
    """Return what a reader wants to know first, in labelled lines: what fits, what limits the
    speed, and what would make it faster, or make it fit.

    Args:
        plan: The plan.
        width: Cells of a line.
        fastest: The plan of the same model on the number of GPUs that trains most tokens per
            second.
        plain: Whether the terminal shows ASCII only.
    """
    from so_tui.plan.gist import faster_than, limit_of, other_cautions
    from so_tui.plan.notes import Note, RemoteCode

    lines = _remote_code_lines(plan)
    if plan.possible:
        lines += _memory_lines(plan, width)
    if plan.fits:
        lines += _step_lines(plan, width, plain=plain)
        if (limit := limit_of(plan)) is not None:
            lines += _told("", [Content(limit.message)], width)
        faster = [Content(fact.message) for fact in faster_than(plan)]
        lines += _told("faster", [*_on_more_gpus(plan, fastest), *faster], width)
    else:
        if not plan.possible:
            lines += _told("why not", list(map(Content, plan.cause_texts)), width)
        remedies = [Content(_remedy_text(fact)) for fact in plan.remedies]
        if remedies or plan.possible:
            lines += _told("to fit", remedies or [faint("nothing known")], width)
    others = [fact for fact in other_cautions(plan) if not isinstance(fact, RemoteCode)]
    # Where figures come from is a note, too.
    notes = [
        faint(fact.message) if isinstance(fact, Note) else Content(fact.message) for fact in others
    ]
    return in_rows([*lines, *_told("note", notes, width)])


def _on_more_gpus(plan: Plan, fastest: Plan | None) -> list[Content]:
    """Return ``4 GPUs: 15.7k tokens/s, 1.8x`` where another number of GPUs is faster."""
    speed = plan.useful_tokens_per_s_total
    best = fastest.useful_tokens_per_s_total if fastest is not None else None
    if fastest is None or not speed or not best or best < _FASTER * speed:
        return []
    gpus = plural(fastest.gpus, "GPU" if fastest.on_gpus else "rank")
    return [Content(f"{gpus}: {rate(best)} tokens/s, {best / speed:.1f}x")]


def _remedy_text(remedy: Remedy) -> str:
    """Return a remedy in words; how a command would plan for several hosts helps nobody here."""
    from so_tui.plan.notes import MoreMachinesFit

    if not isinstance(remedy, MoreMachinesFit):
        return remedy.message
    smaller = f" with train.micro_batch = {remedy.micro_batch}" if remedy.micro_batch else ""
    return f"{remedy.machines} hosts like this one ({remedy.gpus} GPUs) would fit it{smaller}"


def _told(label: str, texts: Sequence[Content], width: int) -> list[Content]:
    """Return texts behind their label, which stands once."""
    lines: list[Content] = []
    for number, text in enumerate(texts):
        lines += hanging(faint(f"{'' if number else label:<{ROLE}}"), text, width)
    return lines


def whole(plan: Plan, width: int, *, command: str = "", plain: bool = False) -> Content:
    """Return the whole plan: its gist, all reasons, terms, binding, and the command that would be
    started, if it is given.

    ``plain`` where the terminal shows ASCII only.
    """
    reasons = map(Content, plan.reason_texts)
    why = [line for text in reasons for line in hanging(faint("· "), text, width)]
    parts = [gist(plan, width, plain=plain), *_section("all reasons", why)]
    for section in _details(plan, width):
        parts += section
    return in_rows([*parts, *_section("the command", [Content(command)] if command else [])])


def as_roomy(
    plan: Plan, width: int, rows: int, *, fastest: Plan | None = None, plain: bool = False
) -> Content:
    """Return the gist of a plan, and as many of its details as ``rows`` hold."""
    lines = gist(plan, width, fastest=fastest, plain=plain).split("\n")
    for section in _details(plan, width):
        if len(lines) + len(section) > rows:
            break
        lines += section
    return in_rows(lines)


def _details(plan: Plan, width: int) -> list[list[Content]]:
    """Return the sections of a plan with its terms and its binding."""
    node = "APU" if plan.one_memory else "host"
    gpu_terms = _section("where the GPU memory goes", _terms_table(plan, "gpu", width))
    node_terms = _section(f"where the {node} memory goes", _terms_table(plan, "node", width))
    terms = _beside_each_other(gpu_terms, node_terms, width)
    beside = len(terms) < len(gpu_terms) + len(node_terms)
    return [
        *([terms] if beside else [gpu_terms, node_terms]),
        _section("binding", _binding_lines(plan)),
    ]


def _section(title: str, body: Sequence[Content]) -> list[Content]:
    """Return a section below an empty line; nothing without a body."""
    return [Content(""), Content.styled(title, "bold $faint"), *body] if body else []


def _beside_each_other(
    left: Sequence[Content], right: Sequence[Content], width: int
) -> list[Content]:
    """Return two sections side by side if both fit whole, else one below the other."""
    column, rest = (max((line.cell_length for line in lines), default=0) for lines in (left, right))
    if not left or not right or column + GAP + rest > width:
        return [*left, *right]
    pairs = zip_longest(left, right, fillvalue=Content(""))
    return [one + " " * (column + GAP - one.cell_length) + other for one, other in pairs]


def launch_facts(plan: Plan, place: str = "") -> list[Content]:
    """Return the lines of the question before a launch; ``place`` is a warning about where."""
    partition = plan.spec.slurm.partition
    tokens = f"{thousands(plan.tokens_per_step)} tokens a step"
    return [
        *_remote_code_lines(plan),
        headline(plan, DIALOG),
        *_memory_lines(plan, DIALOG),
        Content(f"{_run_length(plan.spec)} on {data_name(plan.spec)}"),
        Content(", ".join(filter(None, (tokens, run_duration(plan))))),
        *(
            [Content.assemble("In a job on Slurm partition ", (partition, "bold"))]
            if partition
            else []
        ),
        *([Content.styled(f"! {place}.", "$warning")] if place else []),
        faint("Closing this screen does not stop it."),
    ]


def _remote_code_lines(plan: Plan) -> list[Content]:
    """Return a warning if the run executes Python code that comes with the model."""
    from so_tui.plan.notes import RemoteCode

    return [
        Content.styled(f"! {fact.message}.", "bold $warning")
        for fact in plan.warnings
        if isinstance(fact, RemoteCode)
    ]


def _run_length(spec: RunSpec) -> str:
    """Return the length as it is set: ``1,000 steps``, ``3 epochs`` or ``5,000,000 tokens``."""
    train = spec.train
    if spec.benchmark.measured_steps:
        return plural(spec.benchmark.measured_steps, "measured step")
    if train.epochs:
        return f"{train.epochs:g} epoch{'' if train.epochs == 1 else 's'}"
    return plural(train.tokens, "token") if train.tokens else plural(train.steps, "step")


def data_name(spec: RunSpec) -> str:
    """Return the source of the data, or the number of sources of a mixture."""
    sources = spec.data.sources
    return sources[0].source if len(sources) == 1 else f"a mixture of {len(sources)} sources"


def _memory_lines(plan: Plan, width: int) -> list[Content]:
    """Return bars of what is full: each GPU, the fullest node, /dev/shm and one checkpoint. What is
    a spare copy is said beside the host's figure.
    """
    from so_tui.plan.gist import spare_bytes
    from so_tui.plan.plan import GPU_MARGIN, HOST_MARGIN, TIGHT_MARGIN

    full: list[tuple[str, int, int | None, float, str]] = []
    if plan.gpu_bytes:
        each = " each" if plan.gpus > 1 else ""
        full.append(("GPU", plan.gpu_bytes, plan.gpu_capacity_bytes, GPU_MARGIN, each))
    if plan.host_bytes_per_node:
        total_of = plan.host_capacity_bytes_per_node.get
        node, used = max(
            plan.host_bytes_per_node.items(), key=lambda item: item[1] / (total_of(item[0]) or 1)
        )
        name, margin = ("APU", GPU_MARGIN) if plan.one_memory else ("host", HOST_MARGIN)
        several = " on the fullest node" if len(plan.host_bytes_per_node) > 1 else ""
        full.append((name, used, total_of(node), margin, several))
    room = width - LABEL - FIGURES
    note = ""
    if any(total and used > (1 - TIGHT_MARGIN) * total for _, used, total, _, _ in full):
        note = next((text for text in TOO_MUCH if room >= LEAST_BAR + len(text)), "")
    bar = min(MOST_BAR, max(LEAST_BAR, room - len(note)))
    lines = []
    for name, used, total, margin, more in full:
        line = _bar_line(name, used, total, bar, margin, note)
        lines.append(line + faint(more) if line.cell_length + len(more) <= width else line)
    if plan.host_bytes_per_node and (spare := spare_bytes(plan, node)):
        text = f"{memory(spare)} of it a spare copy for speed"
        if lines[-1].cell_length + len(text) + 3 <= width:
            lines[-1] = lines[-1] + faint(", " + text)
        else:
            lines += hanging(_labelled("", ""), faint(text), width)
    if plan.shm_bytes:
        lines.append(_labelled("shm", memory(plan.shm_bytes)))
    if plan.fits:
        lines += _saving_lines(plan, width)
    first, *others = lines
    return [_role("fits", first), *others]


def _saving_lines(plan: Plan, width: int) -> list[Content]:
    """Return how often checkpoints are saved, and what they cost."""
    from so_tui.plan.saving import may_lose_much, saving_text

    words = Content.styled(saving_text(plan), "$warning" if may_lose_much(plan) else "")
    return hanging(_labelled("disk", ""), words, width)


def _role(role: str, line: Content) -> Content:
    """Return a labelled line as the first of those that say what ``role`` says."""
    return faint(f"{role:<{ROLE}}") + line[ROLE:]


def _labelled(name: str, text: Content | str) -> Content:
    """Return a line behind its label."""
    return Content.assemble(" " * ROLE, (f"{name:<{NAME}}", "$faint"), text)


def _bar_line(
    name: str, used: int, total: int | None, width: int, margin: float, too_much: str
) -> Content:
    """Return a labelled bar, coloured as the plan judges a memory in which it leaves ``margin``
    free, marked if it is too full.
    """
    from so_tui.plan.plan import TIGHT_MARGIN

    if not total:
        return _labelled(name, memory(used))
    share = used / total
    too_small = share > 1 - TIGHT_MARGIN
    style = "$error" if too_small else "$warning" if share > 1 - margin else "$memory"
    over = (too_much if too_small else "", "$error")
    figure, _, rest = memory_of(used, total).partition(" ")
    figures = Content.assemble((f"{figure:>{FIGURES - 1 - len(rest)}}", "bold"), f" {rest}")
    return _labelled(name, Content.assemble(*fill_pieces(share, width, style), figures, over))


def _step_lines(plan: Plan, width: int, *, plain: bool = False) -> list[Content]:
    """Return the step's length and anatomy, predicted; ``plain`` where the terminal shows ASCII
    only.
    """
    step = plan.step
    if not plan.fits or step is None or not plan.step_s:
        if not plan.fits:
            return []
        unknown = faint("not predicted: this machine's speed is not known")
        return [_role("limit", _labelled("step", unknown))]
    parts = step_parts(
        (step.data_s, step.forward_s, step.backward_s, step.exposed_optimizer_s), plain=plain
    )
    bar = stacked(parts, min(40, max(8, width - LABEL - 10)))
    named = wrapped(legend(part for part in parts if part.amount > 0), width - LABEL)
    seconds = Content.styled(f"  {duration(plan.step_s)}", "bold")
    bar_line = _role("limit", _labelled("step", bar + seconds))
    return [bar_line, *(_labelled("", line) for line in named)]


def _terms_table(plan: Plan, location: Location, width: int) -> list[Content]:
    """Return every term, largest first, with its confidence where there is room for it."""
    shown = plan.largest_terms(location)
    longest = max((len(term.name) for term in shown), default=0)
    name = min(longest, max(12, width - len(" 117.0 GiB")))
    certain = name + len(" 117.0 GiB  measured") <= width
    sure = {"calibrated": "measured"}
    return [
        Content.assemble(
            f"{shorten(term.name, name):<{name}} {memory(term.bytes):>9}",
            *([(f"  {sure.get(term.confidence, term.confidence)}", "$faint")] if certain else []),
        )
        for term in shown
    ]


def _binding_lines(plan: Plan) -> list[Content]:
    """Return one line a rank: ``rank 0  GPU 0  node 0  cores 0-71``."""
    from so_tui.machine.host import cpu_ranges

    lines = []
    for rank in plan.binding:
        gpu = "no GPU" if rank.gpu is None else f"GPU {rank.gpu}"
        node = "any node" if rank.numa_node is None else f"node {rank.numa_node}"
        adam = (
            f"   Adam {len(rank.adam_cpus)}, main {len(rank.main_cpus)}" if rank.adam_cpus else ""
        )
        lines.append(
            Content(f"rank {rank.rank}   {gpu}   {node}   cores {cpu_ranges(rank.cpus)}{adam}")
        )
    return lines


def run_duration(plan: Plan) -> str:
    """Return ``1,000 steps in about 52 min``; empty where the number of steps or the speed is not
    known, or it does not fit.
    """
    steps = plan.spec.train.steps
    return (
        f"{thousands(steps)} steps in about {duration(steps * plan.step_s)}"
        if steps and plan.step_s and plan.fits
        else ""
    )
