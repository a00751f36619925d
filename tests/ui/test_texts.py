"""Numbers, bars, cores and forms as text."""

from __future__ import annotations

import os
import re

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from so_tui.machine.doctor import Finding
from so_tui.machine.known import named_machine
from so_tui.plan.planner import make_plan
from so_tui.spec import field_index, find_preset, with_values
from so_tui.ui import plan_view
from so_tui.ui.form import (
    GROUPS,
    HINTS,
    LENGTH,
    _length_of,
    _with_edit,
    advanced_paths,
    hint,
    values_of,
)
from so_tui.ui.lines import cells_of, fill, stacked, step_parts
from so_tui.ui.numa_nodes import _group_cores, _heat_cells
from so_tui.ui.runs.preview import _Comparison
from so_tui.ui.text import Content, chosen_glyphs, distinct, finding_content, shorten_path
from so_tui.units import count, duration, mark_duration, memory_of, rate, significant, thousands
from so_tui.units import disk_size as disk
from so_tui.units import memory_size as memory
from tests.support.make_run import plan_for, quad_machine
from tests.support.python_path import printed


def test_numbers_have_units_and_no_noise() -> None:
    assert thousands(131072) == "131,072"
    assert [significant(value) for value in (0.0, 1.4821, 431.2, 15999.6, 1e-5, 0.04271)] == [
        "0",
        "1.48",
        "431",
        "16,000",
        "1.0e-5",
        "0.0427",
    ]
    assert significant(3.4e38) == "3.4e38"
    assert significant(float("nan")) == "NaN"
    assert (rate(31234), rate(4730), rate(940)) == ("31.2k", "4.73k", "940")
    assert (count(14_768_307_200, 1), count(3_100_000, 1)) == ("14.8 B", "3.1 M")
    assert (memory(512 << 20), memory(117 << 30), memory(3 << 29)) == (
        "512 MiB",
        "117 GiB",
        "1.5 GiB",
    )
    assert memory_of(30 << 30, 95 << 30) == "30.0 of 95.0 GiB"
    assert disk(207_000_000_000) == "207 GB"
    assert [duration(seconds) for seconds in (0.045, 3.1, 42.5, 364, 11_520, 200_000)] == [
        "45 ms",
        "3.10 s",
        "42.5 s",
        "6 m 04 s",
        "3 h 12 m",
        "2 d 7 h",
    ]
    assert [mark_duration(seconds, 2) for seconds in (0, 45, 900, 5400)] == [
        "0",
        "45 s",
        "15 m",
        "1 h 30 m",
    ]


def test_bars_fill_their_width_and_hide_no_part() -> None:
    assert fill(0.5, 10).plain == "━" * 5 + "─" * 5
    assert fill(7.0, 4).plain == "━" * 4
    assert fill(0.0, 4).plain == "─" * 4
    assert sum(cells_of([0.02, 0.84, 2.11, 0.09, 0.04], 40)) == 40
    assert min(cells_of([0.001, 100.0], 10)) == 1
    assert cells_of([0.0, 0.0], 10) == [0, 0]
    bar = stacked(step_parts([1, 1], plain=False), 10).plain
    assert len(set(bar)) == 2, "parts differ without colour"


def test_cores_are_grouped_and_folded() -> None:
    cpus = tuple(range(72))
    groups = _group_cores(cpus, frozenset(cpus[:65]), frozenset(cpus[65:]))
    assert [(group.name, len(group.cpus)) for group in groups] == [("Adam", 65), ("main", 7)]
    busy = [(group, group.cpus) for group in groups]
    for width in (120, 60, 20):
        cells = _heat_cells(busy, width, "braille")
        assert sum(len(text) for text, _ in cells) <= width
        assert [text for text, role in cells if role == "sign"] == ["A", "m"]
    assert sum(len(text) for text, _ in _heat_cells(busy, 120, "braille")) == 72 + 3
    assert all(text.isascii() for text, _ in _heat_cells(busy, 120, "ascii"))
    (idle,) = _group_cores((0, 1, 2), frozenset(), frozenset())
    cells = _heat_cells([(idle, [0, 50, 100])], 20, "braille")
    assert [text for text, role in cells if role == "other"] == ["▁▅█"]


def test_every_setting_is_in_the_form_once() -> None:
    grouped = [path for _, paths in GROUPS for path in paths]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) - {LENGTH} <= field_index().keys()
    assert not set(grouped) & set(advanced_paths())
    assert "model.attention" in advanced_paths()


def test_edits_are_what_differs() -> None:
    spec = find_preset("tiny").spec
    base = values_of(spec)
    edits = _with_edit({}, base, "train.learning_rate", "1e-4")
    assert edits == {"train.learning_rate": "1e-4"}
    assert _with_edit(edits, base, "train.learning_rate", base["train.learning_rate"]) == {}
    edits = _with_edit(_with_edit({}, base, "train.epochs", "2"), base, "train.tokens", "5000")
    assert edits == {"train.tokens": "5000"}
    assert with_values(spec, edits).train.steps == 0
    assert _length_of(base)[0] == "train.steps"


def test_another_data_source_shows_what_it_clears() -> None:
    spec = find_preset("qwen3-14b").spec
    base = values_of(spec)
    edits = _with_edit({}, base, "data.source", "rows.jsonl")
    assert edits == {"data.source": "rows.jsonl", "data.split": "train"}
    assert with_values(spec, edits) == with_values(spec, {"data.source": "rows.jsonl"})
    assert _with_edit(edits, base, "data.source", base["data.source"]) == {}
    whole = _with_edit({}, base, "data.split", "train")
    assert _with_edit(whole, base, "data.source", base["data.source"]) == whole
    part = _with_edit(edits, base, "data.split", "train[:5%]")
    assert _with_edit(part, base, "data.source", "other.jsonl")["data.split"] == "train[:5%]"


@pytest.mark.parametrize(
    ("path", "width", "shown"),
    [
        ("/home/me/runs/tiny-1126-2dde36", 30, "/home/me/runs/tiny-1126-2dde36"),
        ("/home/me/runs/tiny-1126-2dde36", 25, "…/runs/tiny-1126-2dde36"),
        ("/home/me/runs/tiny-1126-2dde36", 20, "…/tiny-1126-2dde36"),
        ("/home/me/runs/tiny-1126-2dde36", 12, "…1126-2dde36"),
        ("/home/me/a-long-folder/", 12, "…ong-folder/"),
    ],
)
def test_a_shortened_path_keeps_whole_names(path: str, width: int, shown: str) -> None:
    assert shorten_path(path, width) == shown


def test_a_plan_says_its_verdict_in_a_word_and_fits_its_width() -> None:
    plan = plan_for(quad_machine(), "qwen3-14b", 4, 100)
    assert plan.verdict in plan_view.headline(plan, 120).plain
    for width in (40, 78, 120):
        lines = [
            *plan_view._memory_lines(plan, width),
            *plan_view._step_lines(plan, width),
            *plan_view._reason_lines(plan, width),
        ]
        assert max(line.cell_length for line in lines) <= width
    reasons = [plan_view._reason_lines(plan, width) for width in range(40, 120)]
    assert len({" ".join(" ".join(line.plain for line in lines).split()) for lines in reasons}) == 1
    assert not any(re.match(r" +(GiB|s)\b", line.plain) for lines in reasons for line in lines), (
        "a unit stands beside its figure"
    )


def test_a_plan_shows_what_takes_host_memory() -> None:
    spec = with_values(
        find_preset("llama-3.1-8b").spec,
        {
            "gpus": "4",
            "checkpoint.every_minutes": "30",
            "offload.mode": "superoffload",
            "offload.speculation": "on",
        },
    )
    plan = make_plan(spec, quad_machine())
    parts = plan_view._host_parts(plan)
    assert list(parts) == ["states", "second states", "copies", "other"]
    assert (parts["second states"] + parts["copies"]) * 4 == pytest.approx(
        plan.host_optional_bytes, rel=1e-6
    )
    assert sum(parts.values()) == sum(
        term.bytes for term in plan.breakdown if term.location == "node" and term.rank is None
    )
    for width in (60, 78, 120):
        (shown,) = (
            line
            for line in plan_view.summary(plan, width)
            if line.plain.lstrip().startswith("each rank: ")
        )
        assert shown.cell_length <= width
        assert f"states {memory(parts['states'])}" in shown.plain
    assert f"copies {memory(parts['copies'])}" in shown.plain


@pytest.mark.parametrize("width", range(40, 125, 3))
def test_no_line_ends_between_a_figure_and_its_unit(width: int) -> None:
    lines = plan_view.headline(
        plan_for(quad_machine(), "qwen3-14b", 4, 100), width, Content("Qwen3 14B on 4 GPUs")
    ).plain.splitlines()
    assert max(map(len, lines)) <= width
    assert not any(
        re.search(r"[0-9.]k?$", line)
        for line in lines
        if "ratio" not in re.split(" {2,}", line)[-1]
    )
    assert lines[-1].endswith("predicted")
    assert len(lines[-1].split()) > 1


def test_the_question_before_a_launch_says_how_long_and_on_what() -> None:
    spec = find_preset("tiny").spec
    for length, told in (
        ({"train.steps": "1200"}, "1,200 steps"),
        ({"train.epochs": "1"}, "1 epoch"),
        ({"train.tokens": "5000000"}, "5,000,000 tokens"),
    ):
        assert plan_view._run_length(with_values(spec, length)) == told
    here = plan_for(quad_machine(), "tiny", 2, 100)
    facts = [line.plain for line in plan_view.launch_facts(here)]
    assert "100 steps on builtin:tiny/rows.jsonl" in facts
    assert not any("partition" in fact for fact in facts)
    job = with_values(here.spec, {"slurm.partition": "gh"})
    elsewhere = plan_view.launch_facts(replace(here, spec=job))
    assert any("partition gh" in line.plain for line in elsewhere)


def test_a_plan_that_does_not_fit_shows_no_speed() -> None:
    plan = plan_for(quad_machine(), "qwen3-14b", 4, 100)
    assert plan.fits
    assert "tokens/s" in plan_view.headline(plan, 120).plain
    too_large = replace(plan, fits=False, verdict="does not fit")
    text = "\n".join(
        line.plain
        for line in (
            plan_view.headline(too_large, 120),
            *plan_view.launch_facts(too_large),
            *plan_view._step_lines(too_large, 120),
        )
    )
    for figure in ("tokens/s", "TFLOPS", "in about", "forward"):
        assert figure not in text, figure


def test_memory_bars_have_the_colours_of_the_verdict() -> None:
    plan = plan_for(quad_machine(), "qwen3-14b", 4, 100)
    assert plan.gpu_capacity_bytes
    found = []
    for share in (0.5, 0.95, 0.99, 1.2):
        filled = replace(plan, gpu_bytes=int(share * plan.gpu_capacity_bytes))
        for width in (44, 60, 73, 120):
            lines = plan_view._memory_lines(filled, width)
            assert max(line.cell_length for line in lines) <= width
            assert ("✗" in lines[0].plain) == (share > 0.98)
        bar = plan_view._memory_lines(filled, 80)[0]
        found.append((str(bar.spans[1].style), "too much" in bar.plain))
    assert found == [("$memory", False), ("$warning", False), ("$error", True), ("$error", True)]


def test_glyphs_follow_setting_locale_and_terminal() -> None:
    assert chosen_glyphs({}, "UTF-8") == "braille"
    assert chosen_glyphs({}, "ANSI_X3.4-1968") == "ascii"
    assert chosen_glyphs({"TERM": "linux"}, "utf-8") == "block"
    assert (
        chosen_glyphs({"LANG": "C"}, "utf-8")
        == chosen_glyphs({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, "utf-8")
        == "ascii"
    )
    assert chosen_glyphs({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, "utf-8") == "braille"
    assert chosen_glyphs({"SO_TUI_GLYPHS": "block"}, "ascii") == "block"
    assert chosen_glyphs({"SO_TUI_GLYPHS": "nonsense"}, "utf-8") == "braille"


@pytest.mark.parametrize("width", [40, 74, 120])
def test_findings_fold_under_their_own_words(width: int) -> None:
    finding = Finding(
        code="shm-tight",
        severity="warning",
        title="Memory is short",
        evidence=(
            "/dev/shm: 1.0 GiB free of 64.0 GiB; the run needs 20.0 GiB of it and gets no more "
            "from anywhere else"
        ),
        cost="It ends.",
        remedy="`mount -o remount,size=90% /dev/shm`",
    )
    first, *lines = str(finding_content(finding, width)).splitlines()
    assert first == "~ warning Memory is short"
    assert all(len(line) <= width for line in lines)
    assert all(
        line[12] != " " and (line[:12].strip() in ("evidence", "cost", "remedy", ""))
        for line in lines
    )
    assert (
        " ".join(line[12:] for line in lines)
        == f"{finding.evidence} {finding.cost} {finding.remedy}"
    )


def test_hints_say_what_a_number_means_and_fit_beside_the_field() -> None:
    fields = field_index()
    assert hint(fields["train.micro_batch"]) == "1 to 4,096"
    assert "share" in hint(fields["data.held_out"])
    assert set(HINTS) <= {*fields, LENGTH}
    assert max(map(len, HINTS.values())) <= 20


@pytest.mark.parametrize("width", [8, 12, 20, 34])
def test_names_that_are_shortened_together_stay_different(width: int) -> None:
    alike = [
        "alpaca-wsd-lr3e5-1125-a3f09c",
        "alpaca-wsd-lr3e5-1125-a3f0ff",
        "alpaca-wsd-lr1e5-1125-a3f09c",
        "b",
    ]
    for names in (
        alike,
        alike[:2],
        [f"{'x' * 30}{number}{'y' * 30}" for number in range(12)],
        ["模型" * 20 + "一", "模型" * 20 + "二"],
    ):
        shown = distinct(names, width)
        assert len(set(shown)) == len(names)
        assert max(map(cell_len, shown)) <= width
    assert distinct(["one", "two"], width) == ["one", "two"]
    assert len(set(distinct(["same", "same"], width))) == 1


def test_a_megabyte_of_a_name_is_shortened_at_once() -> None:
    """A report or a run may have been written by anybody."""
    shown = distinct(["x" * 1_000_000, "y" * 1_000_000], 30)
    assert shown == [f"{'x' * 14}…{'x' * 15}", f"{'y' * 14}…{'y' * 15}"]
    names = ["x" * 500_000 + middle + "x" * 500_000 for middle in "ab"]
    assert len(set(distinct(names, 30))) == 2


@pytest.mark.parametrize("width", [50, 71, 140])
def test_compared_settings_fit_and_show_what_differs(width: int) -> None:
    folder = "/data/rows/of/many/kinds/"
    compared = _Comparison(
        ("a", "b"),
        (
            {"data.source": f"{folder}one", "gpus": "2"},
            {"data.source": f"{folder}two", "gpus": "2"},
        ),
    )
    lines = compared.table(width).splitlines()
    assert max(map(len, lines)) <= width
    assert ["one" in line or "two" in line for line in lines].count(True) == 1
    assert compared.title == "2 runs: 1 setting that differs"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({"LANG": "C"}, "ascii"), ({"LANG": "C.UTF-8"}, "braille"), ({}, "braille")],
)
def test_glyphs_ignore_pythons_own_locale(variables: dict[str, str], expected: str) -> None:
    code = (
        "from so_tui.ui.text import chosen_glyphs, environment_at_start; "
        "print(chosen_glyphs(environment_at_start()))"
    )
    others = ("LC_", "LANG", "SO_TUI_GLYPHS", "TERM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    assert printed("-c", code, env=kept | variables).strip() == expected


def test_a_plan_for_apus_has_one_memory_and_was_never_run() -> None:
    plan = make_plan(find_preset("tiny").spec, named_machine("mi300a-4"))
    assert "planned, never run" in plan_view.headline(plan, 120).plain
    shown = plan_view.whole(plan, "", 120).plain
    assert "where the APU memory goes" in shown
    assert "where the GPU memory goes" not in shown
