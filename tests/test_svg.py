"""Figures as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from so_tui.svg import curves


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_not_finite_leaves_a_gap(bad: float) -> None:
    text = curves("loss", [("one", ((1, 3.0), (2, 2.0), (3, bad), (4, 2.5), (5, 1.0)))])
    drawn = [
        element
        for element in ElementTree.fromstring(text).iter()
        if element.tag.endswith("polyline")
    ]
    points = [
        tuple(map(float, point.split(",")))
        for line in drawn
        for point in line.attrib["points"].split()
    ]
    assert [len(line.attrib["points"].split()) for line in drawn] == [2, 2]
    assert all(0 <= x <= 900 and 0 <= y <= 450 for x, y in points)
    assert points[0][1] < points[-1][1], "a higher value stands higher"
