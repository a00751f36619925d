"""What counts as a change in Configure: what differs from what was opened or recommended."""

from __future__ import annotations

from dataclasses import replace

from so_tui.spec import find_preset, with_values
from so_tui.ui.configure import screen
from so_tui.ui.form import LENGTH, Draft

TINY = find_preset("tiny").spec


def opened_with(**recommended: str) -> Draft:
    draft = Draft(TINY)
    wanted = {path.replace("__", "."): text for path, text in recommended.items()}
    draft.recommend(with_values(TINY, wanted), "this machine")
    return draft


def test_changes_are_counted_from_what_was_recommended() -> None:
    draft = opened_with(offload__ratio="0.25", offload__states="bf16-moments")
    offload = with_values(draft.base, draft.edits).offload
    assert (offload.ratio, offload.states) == (0.25, "bf16-moments")
    assert (draft.changes, draft.was("offload.ratio")) == ([], None)
    draft.enter("offload.ratio", draft.base_values["offload.ratio"])
    assert draft.changes == ["offload.ratio"], "also back to the preset's own value"
    assert draft.was("offload.ratio") == "0.25"
    draft.enter("train.learning_rate", "0.123")
    for text in ("0.25", "0.250"):
        draft.enter("offload.ratio", text)
        assert draft.changes == ["train.learning_rate"]


def test_changes_are_undone_before_the_recommendation_is() -> None:
    draft = opened_with(offload__ratio="0.25")
    draft.enter("train.tokens", "5000")
    assert draft.was(LENGTH) is not None
    draft.undo()
    assert (draft.changes, draft.values["offload.ratio"]) == ([], "0.25")
    draft.undo()
    assert (draft.recommended, draft.values) == ({}, draft.base_values)


def test_a_new_recommendation_keeps_what_was_typed() -> None:
    draft = opened_with(offload__ratio="0.25", offload__states="bf16-moments")
    draft.enter("train.learning_rate", "0.123")
    draft.recommend(with_values(TINY, {"offload.ratio": "0.5"}), "this machine")
    assert (draft.recommended, draft.changes) == ({"offload.ratio": "0.5"}, ["train.learning_rate"])
    kept = [draft.values[path] for path in ("train.learning_rate", "offload.states")]
    assert kept == ["0.123", "fp32"]


def test_another_way_to_write_a_number_is_no_change() -> None:
    draft = opened_with()
    before = draft.base_values["data.sequence_length"]
    for text, changes in (("128", ["data.sequence_length"]), (f"{int(before):,}", [])):
        draft.enter("data.sequence_length", text)
        assert draft.changes == changes


def test_the_title_cuts_no_word() -> None:
    draft = opened_with(offload__ratio="0.25", offload__states="bf16-moments")
    titles = {width: screen._changes_title(draft, width).plain for width in range(50, 121)}
    assert all(len(text) <= width for width, text in titles.items())
    assert list(dict.fromkeys(text.partition(", no changes")[2] for text in titles.values())) == [
        "",
        "   ★ 2 recommended",
        "   ★ recommended for this machine: offload ratio and 1 more",
        "   ★ recommended for this machine: offload ratio, Adam moments",
    ]


def test_the_title_names_the_machine_of_a_recommendation() -> None:
    draft = opened_with(offload__ratio="0.25")
    draft.recommend(with_values(TINY, {"offload.ratio": "0.5"}), "gh200-480")
    for shown in (draft, replace(draft, base=TINY)):  # nothing else was recommended since
        title = screen._changes_title(shown, 120).plain
        assert "recommended for gh200-480: offload ratio" in title
