"""The recorded tour: it plays, ends with an exported model, and shows nothing of the machine that made it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

from tests.support.python_path import ROOT

CAST, PICTURE = ROOT / "screenshots" / "tour.cast", ROOT / "screenshots" / "tour.svg"
STYLE = re.compile(r"\x1b\[[0-9;:?]*[a-zA-Z]")
NEUTRAL = ("/tmp/tour", "/dev/shm", "/sys", "/proc")


def events() -> list[tuple[float, str, str]]:
    """Return the events of the recording, after its header."""
    header, *rest = map(json.loads, CAST.read_text().splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, 120, 36)
    return [(at, kind, text) for at, kind, text in rest]


def test_it_plays_from_the_plan_to_the_exported_model_in_less_than_two_minutes() -> None:
    recorded = events()
    times = [at for at, _, _ in recorded]
    assert times == sorted(times)
    assert 30 < times[-1] < 120
    shown = STYLE.sub("", "".join(text for _, _, text in recorded))
    moments = ("so-tui plan", "does not fit", "● training", "asked to stop", "■ stopped", "✓ finished", "wrote", "model.safetensors")
    places = [shown.find(moment) for moment in moments]
    assert -1 not in places
    assert shown.find("■ stopped") < shown.rfind("● training") < shown.find("✓ finished")


def test_it_shows_no_path_but_those_of_its_own_home() -> None:
    shown = STYLE.sub(" ", "".join(text for _, _, text in events()))
    paths = set(re.findall(r"(?<![\w/.…-])/\w[\w.-]*/[\w./-]+", shown))
    assert {path for path in paths if not path.startswith(NEUTRAL)} == set()


def test_the_picture_is_svg_of_a_size_that_a_page_can_show() -> None:
    assert ET.parse(PICTURE).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert PICTURE.stat().st_size < 1_500_000
