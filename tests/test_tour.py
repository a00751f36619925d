"""The recordings: they play, end where they should, and show nothing of the machine that made
them.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from tests.support.python_path import ROOT

pytestmark = pytest.mark.repository

TOUR, PRETRAINED = "tour", "pretrained"
BOTH = pytest.mark.parametrize("name", [TOUR, PRETRAINED])
STYLE = re.compile(r"\x1b\[[0-9;:?]*[a-zA-Z]")
NEUTRAL = ("/tmp/tour", "/dev/shm", "/sys", "/proc")


def events(name: str) -> list[tuple[float, str, str]]:
    """Return the events of a recording, after its header."""
    header, *rest = map(
        json.loads, (ROOT / "screenshots" / f"{name}.cast").read_text().splitlines()
    )
    assert (header["version"], header["width"], header["height"]) == (2, 120, 36)
    return [(at, kind, text) for at, kind, text in rest]


@BOTH
def test_it_plays_in_less_than_two_minutes(name: str) -> None:
    times = [at for at, _, _ in events(name)]
    assert times == sorted(times)
    assert 20 < times[-1] < 120


def test_the_tour_goes_from_the_plan_to_the_exported_model() -> None:
    recorded = events(TOUR)
    shown = STYLE.sub("", "".join(text for _, _, text in recorded))
    moments = (
        "so-tui plan",
        "does not fit",
        "● training",
        "asked to stop",
        "■ stopped",
        "✓ finished",
        "wrote",
        "model.safetensors",
    )
    places = [shown.find(moment) for moment in moments]
    assert -1 not in places
    assert shown.find("■ stopped") < shown.rfind("● training") < shown.find("✓ finished")


def test_a_pretrained_model_is_fetched_tuned_and_compared_with_what_it_was() -> None:
    shown = STYLE.sub("", "".join(text for _, _, text in events(PRETRAINED)))
    moments = (
        "presets add",
        "model.safetensors",
        "● training",
        "✓ finished",
        "so-tui generate --compare",
        "[tuned:",
        "[base:",
    )
    places = [shown.find(moment) for moment in moments]
    assert -1 not in places
    assert places == sorted(places)
    before, *_, after = (float(loss) for loss in re.findall(r"evaluation (\d\.\d\d)", shown))
    assert after < before - 0.5


@BOTH
def test_it_shows_no_path_but_those_of_its_own_home(name: str) -> None:
    shown = STYLE.sub(" ", "".join(text for _, _, text in events(name)))
    paths = set(re.findall(r"(?<![\w/.…-])/\w[\w.-]*/[\w./-]+", shown))
    assert {path for path in paths if not path.startswith(NEUTRAL)} == set()


@BOTH
def test_the_picture_is_svg_of_a_size_that_a_page_can_show(name: str) -> None:
    picture = ROOT / "screenshots" / f"{name}.svg"
    assert ET.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert picture.stat().st_size < 1_500_000
