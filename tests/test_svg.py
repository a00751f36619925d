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
    assert all(0 <= x <= 900 and 0 <= y <= 470 for x, y in points)
    assert points[0][1] < points[-1][1], "a higher value stands higher"


SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_axes_have_round_values_and_titles() -> None:
    steps = [(step, 6.3 - 0.011 * step) for step in range(1, 131)]
    found = texts(curves("loss", [("one", steps)], axes=("step", "loss")))
    assert found.count("loss") == 2
    assert {"step", "one", "20", "120", "5.00", "6.00"} <= set(found)


def test_a_logarithmic_axis_is_drawn_as_one() -> None:
    points = [(1, 100.0), (2, 10.0), (3, 0.0), (4, 1.0)]
    picture = curves("loss", [("one", points), ("two", [(1, 1.0), (4, 100.0)])], log=True)
    assert {"1.00", "10.0", "100"} <= set(texts(picture))
    lines = [
        line.attrib["points"] for line in ElementTree.fromstring(picture).iter(f"{SVG}polyline")
    ]
    ((_, top), (_, middle)) = ([float(at) for at in point.split(",")] for point in lines[0].split())
    bottom = float(lines[2].split()[0].split(",")[1])
    assert middle == pytest.approx((top + bottom) / 2, abs=0.2)
    assert len(lines) == 3, "0 leaves a gap"


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values", [(1.0, 1.0), (5e-324, 1e-323), (-1e308, 1e308), (1e-300, 1.7e308)]
)
def test_axes_of_any_values_can_be_drawn(values: tuple[float, float], log: bool) -> None:
    assert "</svg>" in curves("loss", [("one", [*enumerate(values)])], log=log)
