"""What counts as a change in Configure: what differs from what was opened or recommended."""

from __future__ import annotations

from so_tui.spec import find_preset, with_values
from so_tui.ui.configure import screen
from so_tui.ui.configure.screen import Drafts
from so_tui.ui.form import LENGTH

TINY = find_preset("tiny").spec


def opened_with(**recommended: str) -> Drafts:
    drafts = Drafts()
    drafts.open(
        TINY,
        with_values(TINY, {path.replace("__", "."): text for path, text in recommended.items()}),
        "this machine",
    )
    return drafts


def test_what_was_recommended_is_no_change() -> None:
    drafts = opened_with(offload__ratio="0.25", offload__states="bf16-moments")
    assert drafts.spec is not None
    assert (drafts.spec.offload.ratio, drafts.spec.offload.states) == (0.25, "bf16-moments")
    assert (drafts.changes, drafts.unsaved()) == ({}, {})
    assert set(drafts.recommended) == {"offload.ratio", "offload.states"}
    assert drafts.was("offload.ratio") is None


def test_changes_are_counted_from_what_was_opened() -> None:
    drafts = opened_with(offload__ratio="0.25")
    drafts.enter("offload.ratio", drafts.base_values["offload.ratio"])
    assert drafts.changes == {"offload.ratio": drafts.base_values["offload.ratio"]}, (
        "also back to the preset's own value"
    )
    assert drafts.was("offload.ratio") == "0.25"
    drafts.enter("train.learning_rate", "0.123")
    assert drafts.unsaved() == {"tiny": 2}
    drafts.enter("offload.ratio", "0.25")
    assert set(drafts.changes) == {"train.learning_rate"}


def test_changes_are_undone_before_the_recommendation_is() -> None:
    drafts = opened_with(offload__ratio="0.25")
    drafts.enter("train.tokens", "5000")
    assert drafts.was(LENGTH) is not None
    drafts.undo()
    assert (drafts.changes, drafts.values["offload.ratio"]) == ({}, "0.25")
    drafts.forget("tiny")
    assert (drafts.recommended, drafts.values) == ({}, drafts.base_values)


def test_a_new_recommendation_keeps_what_was_typed() -> None:
    drafts = opened_with(offload__ratio="0.25", offload__states="bf16-moments")
    drafts.enter("train.learning_rate", "0.123")
    drafts.open(TINY, with_values(TINY, {"offload.ratio": "0.5"}))
    assert drafts.recommended == {"offload.ratio": "0.5"}
    assert drafts.changes == {"train.learning_rate": "0.123"}
    assert drafts.values["offload.states"] == "fp32"


def test_another_way_to_write_a_number_is_no_change() -> None:
    drafts = opened_with(offload__ratio="0.25")
    for path, text in (("data.sequence_length", "128"), ("offload.ratio", "0.250")):
        drafts.enter(path, text)
    before = drafts.changes
    drafts.enter("data.sequence_length", f"{int(drafts.base_values['data.sequence_length']):,}")
    assert set(drafts.changes) == set(before) - {"data.sequence_length"}
    assert "offload.ratio" not in drafts.changes


def test_the_title_cuts_no_word() -> None:
    drafts = opened_with(offload__ratio="0.25", offload__states="bf16-moments")
    titles = {width: screen._changes_title(drafts, width).plain for width in range(50, 121)}
    assert all(len(text) <= width for width, text in titles.items())
    assert list(dict.fromkeys(text.partition(", no changes")[2] for text in titles.values())) == [
        "",
        "   ★ 2 recommended",
        "   ★ recommended for this machine: offload ratio and 1 more",
        "   ★ recommended for this machine: offload ratio, Adam moments",
    ]


def test_the_title_names_the_machine_of_a_recommendation() -> None:
    drafts = opened_with(offload__ratio="0.25")
    assert "recommended for this machine: offload ratio" in screen._changes_title(drafts, 120).plain
    drafts.open(TINY, with_values(TINY, {"offload.ratio": "0.5"}), "gh200-480")
    assert "recommended for gh200-480: offload ratio" in screen._changes_title(drafts, 120).plain
    drafts.open(TINY)
    assert "recommended for gh200-480: offload ratio" in screen._changes_title(drafts, 120).plain, (
        "nothing else was recommended since"
    )
