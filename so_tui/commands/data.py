"""``data``, ``fetch`` and ``prepare``: show, download and prepare the inputs of a run before it
starts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.commands.common import (
    ProgressLine,
    chosen_spec,
    plain_table,
    print_json,
    print_note,
    rich_output,
)
from so_tui.runs import find_run
from so_tui.spec import spec_tree
from so_tui.spec.data_notes import why_dropped
from so_tui.trust.text import printable_line, so_tui_command
from so_tui.units import plural, thousands

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from so_tui.launch.helper_jobs import DataCheck, DataPreview, Sample


# ``convert``: checkpoints from and to DeepSpeed.


def convert(arguments: Namespace) -> int:
    """Write a run's last checkpoint for DeepSpeed, or make a run that continues from DeepSpeed's,
    and say how to go on.

    Raises:
        InputError: There is no such run or checkpoint, or the target holds something else.
    """
    from so_tui.launch.checks import writable
    from so_tui.launch.helper import call_tool
    from so_tui.launch.helper_jobs import from_deepspeed

    if arguments.to:
        run = find_run(arguments.source, arguments.runs_dir)
        writable(Path(arguments.to), "--to")
        call_tool("convert", {"run": str(run.path), "to": str(Path(arguments.to))}, print_note)
        print(printable_line(f"wrote {arguments.to}"))
        return 0
    made = from_deepspeed(
        Path(arguments.source), chosen_spec(arguments), arguments.runs_dir, print_note
    )
    print(
        printable_line(f"made {made.name}; continue with `{so_tui_command('resume', made.name)}`")
    )
    return 0


_BAR = 40
_LONGEST_LINE = 100
"""Between rows: files and pipes have no width."""
_ROWS = 3
"""Rows that are shown unless others are asked for."""
_SHADES = "█▒"
"""Neighbouring documents of a sequence, which must differ without colour too."""


def data(arguments: Namespace) -> int:
    """Print the counts of the data set and a few rows as the model sees them, with trained tokens
    marked; or, with ``--check``, what happens to the rows of each kind.

    Returns:
        1 if rows were checked and are refused.
    """
    from so_tui.launch.helper_jobs import DataCheck, Progress, check_data, preview_data

    spec = chosen_spec(arguments)
    progress = ProgressLine(shown=not arguments.json)
    numbers = arguments.row
    rows = arguments.rows if arguments.rows is not None else 0 if numbers else _ROWS
    events = check_data(spec) if arguments.check else preview_data(spec, rows, numbers=numbers)
    refused = False
    for event in events:
        if isinstance(event, Progress):
            progress.show(f"{event.message} …")
            continue
        progress.clear()
        if arguments.json:
            print_json(event)
        else:
            with rich_output() as out:
                if isinstance(event, DataCheck):
                    _print_verdict(out, event)
                else:
                    _print(out, event)
        refused = isinstance(event, DataCheck) and event.refused
    return int(refused)


def _print_verdict(out: Console, check: DataCheck) -> None:
    from rich.text import Text

    from so_tui.machine.host import cpu_ranges

    for source in check.sources:
        out.print(Text(f"{source.source}: {source.format}, {plural(source.rows, 'row')}", "bold"))
        table = plain_table("rows", "first", "what happens", "what", right=("rows", "first"))
        table.add_row(thousands(source.proven), "", "trained", "every answer is proven")
        for kind in source.kinds:
            table.add_row(thousands(kind.rows), thousands(kind.first), kind.outcome, kind.sentence)
        for reason, one in sorted(source.dropped_rows.items()):
            first, why = thousands(one.first[0]), f"{why_dropped(reason)}: {one.named}"
            table.add_row(thousands(one.rows), first, "dropped", why)
        out.print(table, "")
        if any(one.rows > len(one.first) for one in source.dropped_rows.values()):
            numbers = cpu_ranges(source.dropped_numbers).replace(",", ", ")
            out.print(Text(f"dropped rows: {numbers}"), "")
    if any(source.kinds for source in check.sources):
        out.print(Text("a row may be counted in several lines", "dim"))
    for warning in check.warnings:
        out.print(Text(f"! {warning}", style="yellow"))
    if check.refused:
        out.print(Text("refused: some answers are not proven (`data.unproven`)", "bold red"))
    elif empty := [source.source for source in check.sources if not source.documents]:
        out.print(Text(f"nothing is trained of {', '.join(empty)}", "bold red"))
    else:
        out.print(Text("these data can be trained on", "bold green"))


def _print(out: Console, preview: DataPreview) -> None:
    from rich.rule import Rule
    from rich.text import Text

    for part in (
        Text(preview.how, style="bold"),
        "",
        _facts(preview),
        *(("", _sources(preview)) if len(preview.sources) > 1 else ()),
        *_unused(preview),
        "",
        Text("documents by length in tokens", style="bold"),
        _histogram(preview),
        *(("", *_sequence(preview, out.width)) if preview.packing else ()),
        *(Text(f"! {warning}", style="yellow") for warning in preview.notes),
    ):
        out.print(part)
    plain = out.no_color or not out.is_terminal
    if preview.samples:
        trained = Text("«trained tokens»" if plain else "trained tokens", style="bold green")
        out.print(
            "",
            Text.assemble(
                ("rows as the model sees them: ", "bold"), trained, " and ", ("context", "dim")
            ),
            sep="\n",
        )
    for sample in preview.samples:
        heading = f"row {thousands(sample.row)}   {sample.counted}"
        line = Rule(Text(heading, style="dim"), align="left", style="dim")
        out.print(line, width=min(out.width, _LONGEST_LINE))
        if len(preview.sources) > 1:
            out.print(Text(printable_line(sample.source), style="dim"))
        out.print(_coloured(sample, plain))


def _facts(preview: DataPreview) -> RenderableType:
    from rich.table import Column, Table
    from rich.text import Text

    table = Table.grid("", Column(justify="right"), Column(style="dim"), padding=(0, 2))
    for name, figure, meaning in preview.facts():
        bad = name in ("truncated", "dropped") and figure != "0"
        table.add_row(name, Text(figure, style="bold yellow" if bad else "bold"), meaning)
    return table


def _sources(preview: DataPreview) -> RenderableType:
    counted = ("rows", "tokens", "trained", "truncated", "dropped", "share", "an epoch meets each")
    table = plain_table("source", "layout", *counted, right=counted)
    for source in preview.sources:
        table.add_row(
            source.source,
            source.format,
            thousands(source.rows),
            thousands(source.tokens),
            thousands(source.trained_tokens),
            thousands(source.truncated),
            thousands(source.dropped),
            f"{100 * source.share:.0f} %",
            f"{source.times_an_epoch:.1f} x",
        )
    return table


def _unused(preview: DataPreview) -> Iterator[Text]:
    """Yield a line for each source with unused columns."""
    from rich.text import Text

    for source in preview.sources:
        if source.unused:
            name = f"{source.source}: " if len(preview.sources) > 1 else ""
            yield Text(printable_line(name + source.unused), style="dim")


def _histogram(preview: DataPreview) -> RenderableType:
    from rich.table import Column, Table

    table = Table.grid(Column(justify="right"), Column(style="cyan"), padding=(0, 1))
    for entry, cells in zip(preview.histogram, preview.histogram_cells(_BAR), strict=True):
        table.add_row(
            entry.label, f"{'▇' * cells} {thousands(entry.documents) if entry.documents else ''}"
        )
    return table


def _sequence(preview: DataPreview, width: int) -> tuple[RenderableType, ...]:
    """Draw one packed sequence as a bar that shows where its documents, which do not see each
    other, begin and end.
    """
    from rich.text import Text

    *documents, padding = preview.sequence_cells(min(width, 2 * _BAR))
    bar = Text()
    for index, cells in enumerate(documents):
        bar.append(_SHADES[index % 2] * cells, style="cyan" if index % 2 == 0 else "blue")
    bar.append("·" * padding, style="dim")
    return (
        Text(preview.sequence_words(), style="bold"),
        bar,
        Text(preview.sequence_sum(), style="dim"),
    )


def _coloured(sample: Sample, plain: bool) -> RenderableType:
    """Render one row. Without colours (``plain``), trained text is in « »."""
    from rich.text import Text

    text = Text()
    for piece, trained in sample.visible:
        text.append(
            f"«{piece}»" if trained and plain else piece, style="bold green" if trained else "dim"
        )
    return text


def fetch(arguments: Namespace) -> int:
    """Download what a preset needs, and print a line for each file."""
    return _follow("fetch", arguments)


def prepare(arguments: Namespace) -> int:
    """Do the work of a first run that needs no GPU, and print a line for each part."""
    return _follow("prepare", arguments)


def _follow(tool: str, arguments: Namespace) -> int:
    from so_tui.launch.helper import stream_tool

    progress = ProgressLine()
    for event in stream_tool(tool, {"spec": spec_tree(chosen_spec(arguments))}):
        if event.get("partial"):
            progress.show(str(event["message"]))
        elif message := event.get("message"):
            progress.clear()
            print_note(str(message))
    return 0
