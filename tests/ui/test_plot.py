"""Charts as pure functions: what is drawn of which numbers."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip

from so_tui.ui.charts import drawing
from so_tui.ui.charts.chart import _arranged, _Figure
from so_tui.ui.charts.series import Axis, Line, Series, _TrailingMean
from so_tui.ui.run_rows import _spark
from so_tui.ui.text import GlyphName
from so_tui.ui.textual_fixes import _changed_parts
from so_tui.units import significant


def line_of(values: Iterable[float]) -> tuple[Line, Axis]:
    series, steps = Series(), array("d")
    for step, value in enumerate(values, 1):
        series.append(value)
        steps.append(float(step))
    axis = Axis("step", 1.0, float(max(2, len(steps))))
    return Line(series, len(series), steps, steps, "main"), axis


def axis_text(axis: Axis, width: int, *marks: drawing.Mark) -> str:
    styles = dict.fromkeys(("axis", "label", "mark"), Style())
    return "".join(segment.text for segment in drawing.axis_row(axis, width, [*marks], styles))


def drawn(
    values: list[float], width: int, height: int, glyphs: GlyphName = "braille", log: bool = False
) -> list[str]:
    line, axis = line_of(values)
    canvas = drawing._Canvas(width, height, drawing._GLYPHS[glyphs])
    found, gaps = drawing.spans(line, axis, canvas.columns)
    canvas.draw(found, gaps, drawing.fit_scale([found], log=log), 0)
    return ["".join(text for text, _ in canvas.row(row)) for row in range(height)]


@pytest.mark.parametrize("glyphs", drawing._GLYPHS)
def test_every_glyph_set_fills_every_column(glyphs: GlyphName) -> None:
    rows = drawn([math.sin(step / 9) for step in range(400)], 13, 3, glyphs)
    assert all(any(row[column] != " " for row in rows) for column in range(13))


def test_a_range_of_a_million_values_is_read_through_its_pyramid() -> None:
    series = Series()
    for value in range(200_000):
        series.append(float(value))
    started = time.process_time()
    for start in range(0, 100_000, 100):
        assert series.extremes(start, start + 100_000) == (float(start), float(start + 99_999))
    assert time.process_time() - started < 0.5


def test_not_a_number_is_a_gap_and_not_a_bridge() -> None:
    (row,) = drawn([1.0] * 10 + [math.nan] * 10 + [1.0] * 10, 15, 1)
    assert "\u2800" not in row
    assert [bool(row[column].strip()) for column in (0, 6, 7, 8, -1)] == [True, *[False] * 3, True]
    assert " " in drawn([1.0, 1.0, math.inf, 1.0, 1.0], 10, 1)[0]


def test_log_scale_gives_equal_ratios_equal_heights() -> None:
    scale = drawing.fit_scale([[(0.001, 1000.0)]], log=True)
    values = 0.0, 0.001, 0.01, 1.0, 100.0, 1000.0
    heights = scale.heights([(value, value) for value in values], 61)
    assert heights == [None, (0, 0), (10, 10), (30, 30), (50, 50), (60, 60)]
    assert drawn([1.0, -1.0, 1.0], 6, 2, log=True)
    assert not drawing.fit_scale([[(-2.0, -1.0)]], log=True).log, "nothing to take the logarithm of"


def test_scales_without_spread_or_data_still_have_a_height() -> None:
    assert drawing.fit_scale([[(3.0, 3.0)]]).heights([(3.0, 3.0)], 9) == [(4, 4)]
    assert drawing.fit_scale([[]]) == drawing.Scale(-0.05, 1.05)
    assert drawing.fit_scale([[(2.0, 4.0)]], zero=True).low == 0
    for value in (1e-5, 3e-4, 1e5, 1e16):  # such as means of a constant learning rate
        scale = drawing.fit_scale([[(value, math.nextafter(value, math.inf))]], log=True)
        ((row, _),) = filter(None, scale.heights([(value, value)], 100))
        assert 0 < row < 99


def test_a_mean_after_a_spike_is_exact() -> None:
    values = [2.0 + at % 7 / 10 for at in range(400)]
    values[100] = 1e30
    means = _TrailingMean(50).extend(range(400), values)
    assert means[-1] == pytest.approx(math.fsum(values[350:]) / 50, rel=1e-12)
    assert means[150] == pytest.approx(math.fsum(values[101:151]) / 50, rel=1e-12)
    # Values too large to sum have no mean, and do no harm.
    means = _TrailingMean(2).extend(range(6), [1.7e308] * 4 + [1.0, 3.0])
    assert (math.isfinite(means[3]), means[5]) == (False, 2.0)


def test_round_values() -> None:
    assert drawing._round_values(0, 100, 5) == [0, 25, 50, 75, 100]
    assert drawing._round_values(0.98, 2.6, 4) == [1.0, 1.5, 2.0, 2.5]
    assert drawing._time_values(0, 3600, 4) == [0, 1800, 3600]


def test_samples_without_steps_stand_at_the_step_of_their_time() -> None:
    axis = Axis("step", 10.0, 20.0, 0.0, array("d", [10.0, 20.0]), array("d", [100.0, 200.0]), 2)
    assert axis.time_of(15.0) == 150.0
    line, _ = line_of(range(50, 251, 10))
    line = replace(line, steps=None, times=array("d", range(50, 251, 10)))
    # Samples before and after the steps are not squeezed in.
    assert drawing.spans(line, axis, 2)[0] == [(100.0, 140.0), (150.0, 200.0)]
    steps, times = array("d", [1, 2, 3]), array("d", [100, 110, 130])
    by_time = Axis("time", 105.0, 125.0, 100.0, steps, times, 3)
    assert by_time.in_steps() == (1.0, 3.0)
    assert [by_time.position(at)[0] for at in (50.0, 110.0, 115.0)] == [0.0, 2.0, 2.0]
    assert Axis("time", 0, 1).position(0.5) == (0.0, 0.5)


def test_the_axis_names_places_and_keeps_labels_off_marks() -> None:
    axis = Axis("step", 0.0, 1000.0)
    plain, marked = axis_text(axis, 60), axis_text(axis, 60, drawing.Mark(500.0, 0.0, "◆", "mark"))
    assert (len(plain), " 500 " in plain, "◆" in marked, "500" in marked) == (60, True, True, False)
    assert Axis("time", 0, 10_000, 100.0).text(100.0 + 5400) == "1 h 30 m"
    assert axis.text(1240.4) == "1,240"


@pytest.mark.parametrize("step", range(61))
def test_labels_touch_no_marks(step: int) -> None:
    axis = Axis("step", 0.0, 60.0)
    styles = dict.fromkeys(("axis", "label", "mark"), Style())
    mark = drawing.Mark(float(step), 0.0, "◆", "mark")
    cells = drawing.axis_row(axis, 50, [mark], styles)
    row = "".join(segment.text for segment in cells)
    assert not re.search(r"\d◆|◆\d", row), row
    assert "0" in row


@pytest.mark.parametrize("lasted_s", [8, 610, 5400, 3_000_000])
@pytest.mark.parametrize("width", [29, 110])
def test_a_time_axis_tells_how_long_anything_took(lasted_s: float, width: int) -> None:
    for deep_s in (0.0, 12 * 86_400.0 + 7000):
        axis = Axis("time", 1e9 + deep_s, 1e9 + deep_s + lasted_s, 1e9)
        for share in (0.5, 0.667, 0.9):
            row = axis_text(
                axis, width, drawing.Mark(0.0, axis.low + share * lasted_s, "◆", "mark")
            )
            assert len(row) == width
            words = [word.strip() for word in re.split("[─◆]+", row)]
            named = [word for word in words if re.search(r"\d [dhms]", word)]
            assert len(set(named)) == len(named), row
            assert len(named) >= 2 or deep_s, row


@pytest.mark.parametrize("seed", range(20))
def test_what_is_repainted_of_a_row_is_all_that_changed(seed: int) -> None:
    chance = random.Random(seed)

    def row() -> list[str]:
        return chance.choices("abAB█", k=9)  # capitals are bold

    before = [row() for _ in range(8)]
    after = [chance.choice((old, row(), old[:4] + row()[:2] + old[6:])) for old in before]
    parts = {part.y: part for part in _changed_parts(strips(before), strips(after), 9)}
    assert list(parts) == [y for y in range(8) if before[y] != after[y]]
    for y, part in parts.items():
        assert part.height == 1
        assert before[y][: part.x] == after[y][: part.x]
        assert before[y][part.right :] == after[y][part.right :]
    assert _changed_parts(strips(before), strips(before[1:]), 9) == [Region(0, 0, 9, 8)]
    (middle,) = _changed_parts(strips(["ab██ab"]), strips(["aba█ab"]), 6)
    assert middle == Region(2, 0, 1, 1)


def strips(rows: Iterable[Iterable[str]]) -> list[Strip]:
    return [
        Strip([Segment(text, Style(bold=text.isupper())) for text in row]).simplify()
        for row in rows
    ]


@settings(deadline=None)
@given(
    kinds=st.lists(st.tuples(st.integers(3, 24), st.sampled_from(["value", "raw", "note"]))),
    room=st.integers(8, 80),
    height=st.integers(3, 20),
)
def test_no_figure_of_a_heading_is_cut(
    kinds: list[tuple[int, Any]], room: int, height: int
) -> None:
    figures = [
        _Figure([(f"{index}".rjust(cells), "note")], kind)
        for index, (cells, kind) in enumerate(kinds)
    ]
    beside, below = _arranged([("loss", "title")], figures, room, height)
    assert drawing.cells_in([("loss", "title"), *beside]) <= room
    assert drawing.cells_in(below) <= room
    assert {*beside, *below} <= {figure.pieces[0] for figure in figures}


@pytest.mark.parametrize("ceiling", [None, 1.0])
@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_extreme_floats_are_drawn(log: bool, robust: bool, ceiling: float | None) -> None:
    """A record may hold any value: it is another user's, or training has diverged."""
    positive = (5e-324, 1e-310, 1e-45, 1.0, 1.0 + 2**-52, 1e16, 1e16 + 2, 1.7e308, 1.79e308)
    extremes = (-1.79e308, -1.0, -5e-324, 0.0, *positive)
    for low, high in itertools.combinations_with_replacement(extremes, 2):
        found = [(low, low), (low, high), (high, high)]
        scale = drawing.fit_scale([found], log=log, robust=robust, ceiling=ceiling)
        scale = drawing.with_even_ticks(scale, 8, "braille")
        assert scale.low < scale.high
        canvas = drawing._Canvas(10, 8, drawing._GLYPHS["braille"])
        canvas.draw(found, [], scale, 0)
        heights = [pair for pair in scale.heights(found, canvas.dots) if pair is not None]
        assert log or all(0 <= row < canvas.dots for pair in heights for row in pair)
        assert all(
            len(text) == drawing.GUTTER
            for text in drawing.gutter_text(scale, 8, "braille", significant)
        )


ENDS = [(0.0, 0.0011), (1.33, 2.6), (0.77, 1.25), (-3.0, 50.0), (0.0, 450.0), (0.0, 1.2e6)]
ENDS += [(0.0, 3e9), (2e4, 2e5)]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("glyphs", drawing._GLYPHS)
@pytest.mark.parametrize("height", [3, 4, 6, 9, 12, 13, 30])
@pytest.mark.parametrize(("low", "high"), ENDS)
def test_labels_stand_at_their_values_and_equally_far_apart(
    low: float, high: float, height: int, glyphs: GlyphName, log: bool
) -> None:
    scale = drawing.Scale(low, high)
    if log:
        scale = drawing.Scale(max(low, high / 1e6), high, log=True)
    scale = drawing.with_even_ticks(scale, height, glyphs)
    texts = drawing.gutter_text(scale, height, glyphs, significant)
    named = {height - 1 - row: text.strip() for row, text in enumerate(texts) if text.strip()}
    assert len(named) >= (2 if height > 3 and not log else 1)
    gaps = {first - second for first, second in itertools.pairwise(named)}
    assert len(gaps) <= 1, named
    assert height == 3 or gaps <= {2, 3, 4, 5}, named
    if not log:
        assert scale.low <= low < high <= scale.high
        assert high - low >= 0.4 * (scale.high - scale.low), "the plot is used"
        assert scale.low == 0 or low
    in_row = drawing.dots_in_row(glyphs)
    for row, text in named.items():
        value = float(text.replace(",", "").replace("k", "e3").replace("M", "e6"))
        ((dot, _),) = filter(None, scale.heights([(value, value)], height * in_row))
        # Rounding to three digits moves a value by a dot at most.
        assert dot // in_row == row or abs(dot - (row + 0.5) * in_row) <= in_row / 2 + 1, text


def test_the_small_curve_of_a_run_takes_any_values() -> None:
    for values in ([-1.79e308, 0.0, 1.79e308], [math.nan, 2.0], [3.0, 3.0]):
        line, _ = line_of(values)
        assert len(_spark(line.series, line.length, 12)) == len(values)
