"""Plans, names and forms as text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from so_tui.machine.known import named_machine
from so_tui.plan.planner import make_plan
from so_tui.spec import field_index, find_preset, with_values
from so_tui.ui import form, plan_view
from so_tui.ui.shared_app import SettingsApp
from so_tui.ui.text import Content, chosen_glyphs, distinct, shorten_path, whole_words
from so_tui.ui.widgets import Rule
from so_tui.units import duration
from tests.support.make_run import plan_for, quad_machine
from tests.support.python_path import printed


def test_every_setting_is_in_the_form_once() -> None:
    grouped = [path for _, paths in form.GROUPS for path in paths]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) - {form.LENGTH} <= field_index().keys()
    assert not set(grouped) & set(form.advanced_paths())
    assert "model.attention" in form.advanced_paths()
    assert set(form.HINTS) <= {*field_index(), form.LENGTH}
    assert max(map(len, form.HINTS.values())) <= 20
    assert form.hint(field_index()["train.micro_batch"]) == "1 to 4,096"


def edited(preset: str, *changes: tuple[str, str | None]) -> dict[str, str]:
    """Return the edits after changes of fields; None is the preset's own value."""
    edits: dict[str, str] = {}
    base = form.values_of(find_preset(preset).spec)
    for path, value in changes:
        edits = form._with_edit(edits, base, path, base[path] if value is None else value)
    return edits


def test_edits_are_what_differs() -> None:
    faster = ("train.learning_rate", "1e-4")
    assert edited("tiny", faster) == {"train.learning_rate": "1e-4"}
    assert edited("tiny", faster, ("train.learning_rate", None)) == {}
    edits = edited("tiny", ("train.epochs", "2"), ("train.tokens", "5000"))
    assert edits == {"train.tokens": "5000"}
    spec = find_preset("tiny").spec
    assert with_values(spec, edits).train.steps == 0
    assert form._length_of(form.values_of(spec))[0] == "train.steps"


def test_another_data_source_shows_what_it_clears() -> None:
    other, same = ("data.source", "rows.jsonl"), ("data.source", None)
    edits = edited("qwen3-14b", other)
    assert edits == {"data.source": "rows.jsonl", "data.split": "train"}
    spec = find_preset("qwen3-14b").spec
    assert with_values(spec, edits) == with_values(spec, dict([other]))
    assert edited("qwen3-14b", other, same) == {}
    part = edited("qwen3-14b", other, ("data.split", "train[:5%]"), ("data.source", "more.jsonl"))
    assert part["data.split"] == "train[:5%]"


def test_a_shortened_path_keeps_whole_names() -> None:
    path = "/home/me/runs/tiny-1126-2dde36"
    shown = {30: path, 25: "…/runs/tiny-1126-2dde36", 12: "…1126-2dde36"}
    assert {width: shorten_path(path, width) for width in shown} == shown


def test_no_number_loses_its_end() -> None:
    shown = {12: "★ 1 to 4,096", 11: "★ 1 to …", 8: "★ 1 to …", 7: "★ 1 …", 2: "…"}
    assert {width: whole_words("★ 1 to 4,096", width) for width in shown} == shown


def plain(lines: Iterable[Content]) -> list[str]:
    return [line.plain for line in lines]


def test_a_plan_fits_its_width_and_keeps_units_by_their_figures() -> None:
    plan = plan_for(quad_machine(), "qwen3-14b", 4, 100)
    for width in range(40, 125):
        title = Content("Qwen3 14B on 4 GPUs")
        headline = plan_view.headline(plan, width, title).plain.splitlines()
        measured = (*plan_view._memory_lines(plan, width), *plan_view._step_lines(plan, width))
        terms = plan_view._terms_table(plan, "gpu", width)
        assert max(map(cell_len, (*headline, *plain([*measured, *terms])))) <= width
        for line in headline:
            figure = re.search(r"[0-9.]k?$", line)
            assert not figure or "ratio" in re.split(" {2,}", line)[-1], "a unit follows"
        assert f"predicted {duration(plan.step_s or 0)}/step" in "\n".join(headline)
    assert plan.verdict in " ".join(headline)


def test_bars_leave_units_their_room_in_the_narrowest_pane() -> None:
    plan = plan_for(quad_machine(), "qwen3-14b", 4, 100)
    for width in range(36, 45):
        gpu, host, *_ = plan_view._memory_lines(plan, width)
        assert max(gpu.cell_length, host.cell_length) <= width


def test_a_plan_that_does_not_fit_shows_no_speed() -> None:
    plan = plan_for(quad_machine(), "qwen3-14b", 4, 100)
    for fits in (True, False):
        shown = replace(plan, fits=fits, verdict="does not fit")
        steps = plan_view._step_lines(shown, 120)
        lines = plan_view.headline(shown, 120), *plan_view.launch_facts(shown), *steps
        for figure in ("tokens/s", "TFLOPS", "in about", "forward"):
            assert any(figure in line for line in plain(lines)) == fits, figure


@pytest.mark.parametrize(("share", "style"), [(0.5, "$memory"), (0.95, "$warning"), (1, "$error")])
def test_memory_bars_have_the_colours_of_the_verdict(share: float, style: str) -> None:
    plan = plan_for(quad_machine(), "qwen3-14b", 4, 100)
    filled = replace(plan, gpu_bytes=int(share * (plan.gpu_capacity_bytes or 0)))
    bar, *_ = plan_view._memory_lines(filled, 80)
    styles = {str(span.style) for span in bar.spans if span.end > span.start}
    shown = styles & {"$memory", "$warning", "$error"}
    assert (shown, "too much" in bar.plain) == ({style}, style == "$error")


@pytest.mark.parametrize(
    ("environ", "encoding", "glyphs"),
    [
        ({}, "UTF-8", "braille"),
        ({}, "ANSI_X3.4-1968", "ascii"),
        ({"TERM": "linux"}, "utf-8", "block"),
        ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, "utf-8", "ascii"),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, "utf-8", "braille"),
        ({"SO_TUI_GLYPHS": "block"}, "ascii", "block"),
        ({"SO_TUI_GLYPHS": "nonsense"}, "utf-8", "braille"),
    ],
)
def test_glyphs_follow_setting_locale_and_terminal(
    environ: dict[str, str], encoding: str, glyphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: encoding)
    assert chosen_glyphs(environ) == glyphs


@pytest.mark.parametrize("width", [8, 12, 20, 34])
def test_names_that_are_shortened_together_stay_different(width: int) -> None:
    alike = ["alpaca-lr3e5-1125-a3f09c", "alpaca-lr3e5-1125-a3f0ff", "alpaca-lr1e5-1125-a3f09c"]
    for names in (
        [*alike, "b"],
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


@pytest.mark.parametrize(("variables", "expected"), [({"LANG": "C"}, "ascii"), ({}, "braille")])
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
    shown = plan_view.whole(plan, 120).plain
    assert "where the APU memory goes" in shown
    assert "where the GPU memory goes" not in shown


class _Titles(SettingsApp):
    def compose(self) -> ComposeResult:
        yield Rule("alone")
        yield Static("what it is about")
        yield Rule("above a frame")
        yield Vertical(Static("what it surrounds"), classes="frame")


async def test_a_title_line_has_corners_above_a_frame_only() -> None:
    async with _Titles().run_test(size=(120, 20)) as pilot:
        await pilot.pause()
        alone, above = (str(rule.render()) for rule in pilot.app.screen.query(Rule))
        assert (alone[0], alone[-1], above[0], above[-1]) == ("─", "─", "╭", "╮")
