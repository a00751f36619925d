"""What people are shown of their data before anything starts, and the command that prints it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from so_tui.cli import main
from so_tui.commands.common import rich_output
from so_tui.commands.data import _print_verdict
from so_tui.launch.helper_jobs import DataCheck, DataPreview, Progress, Sample, preview_data
from so_tui.plan.notes import DataFound
from so_tui.plan.planner import make_plan
from so_tui.spec import RunSpec, spec_tree
from so_tui.spec.data_notes import NAMED_ROWS, Dropped
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.tools.check_inputs import _check
from so_tui_trainer.tools.data import _histogram, _preview
from so_tui_trainer.tools.prepare import _prepare
from tests.support.launching import tiny
from tests.support.plans import cpu_machine
from tests.support.problems import refusal
from tests.support.rows import alpaca, lines, spec_of, turns
from tests.support.schemas import valid


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_mixture_is_told_source_by_source_with_rows_of_each(tmp_path: Path) -> None:
    answers = ("An answer. " * (n + 1) for n in range(30))
    one = lines(tmp_path, alpaca(*answers), "many.jsonl")
    other = lines(
        tmp_path,
        [{"messages": turns("Hi.", said), "id": 1} for said in ("Hello.", "")],
        "few.jsonl",
    )
    mixture = f'[{{source = "{one}", weight = 3}}, {{source = "{other}"}}]'
    *progress, preview = preview_data(spec_of(mixture, data__sequence_length="64"), 4)
    assert isinstance(preview, DataPreview)
    assert isinstance(progress[-1], Progress)
    assert progress[-1].done_rows == progress[-1].total_rows == 32
    assert (preview.rows, preview.documents, preview.dropped) == (32, 31, 1)
    many, few = preview.sources
    assert (many.format, few.format) == ("alpaca", "messages")
    assert (many.unused, few.unused) == ("", "unused columns: id")
    assert (few.rows, few.dropped, few.documents, few.times_an_epoch) == (2, 1, 1, 10)
    assert many.truncated == preview.truncated > 0
    assert few.share == pytest.approx(0.25, abs=0.02)
    shown = [(Path(sample.source).stem, sample.row) for sample in preview.samples]
    assert shown == [("many", 1), ("few", 1), ("many", 2), ("many", 3)]
    assert [piece for piece in preview.samples[1].pieces if piece[1]] == [("Hello.<|eos|>", True)]
    assert sum(preview.sequence_cells(80)) == 80
    assert sum(entry.tokens for entry in preview.histogram) == preview.tokens


@pytest.mark.slow
@pytest.mark.parametrize("work", [_check, _prepare])
def test_holding_out_everything_is_refused(work: Callable[[Any], Any], tmp_path: Path) -> None:
    request = {"spec": spec_tree(spec_of(lines(tmp_path, alpaca("Yes.")), data__held_out="1"))}
    problem = refusal(lambda: list(work(request)))
    assert (problem.code, problem.value) == ("held-out-out-of-range", "1")


@pytest.mark.slow
def test_what_several_checks_find_wrong_is_said_once(tmp_path: Path) -> None:
    rows, nowhere = "builtin:tiny/rows.jsonl", str(tmp_path / "nowhere")
    request = {"spec": spec_tree(tiny(model__tokenizer=nowhere, data__evaluation=rows))}
    assert refusal(lambda: list(_check(request))).field == "model.tokenizer"


@pytest.mark.parametrize("lengths", [[5], [7, 7, 7], list(range(1, 500)), [*[50] * 500, 4000]])
def test_the_histogram_counts_every_document_once(lengths: list[int]) -> None:
    bins = _histogram(np.array(lengths))
    assert sum(entry["documents"] for entry in bins) == len(lengths)
    assert sum(entry["tokens"] for entry in bins) == sum(lengths)
    for entry in bins:
        inside = sum(entry["from"] <= length <= entry["to"] for length in lengths)
        assert inside == entry["documents"]
    assert len(bins) <= 12


def test_what_a_terminal_would_obey_is_shown_as_a_picture() -> None:
    sample = Sample("rows.jsonl", 1, 3, 1, (("a\x1b[2J\tb\n", False), ("c\x9b\x7f\x00", True)))
    assert list(sample.visible) == [("a\u241b[2J\tb\n", False), ("c\ufffd\u2421\u2400", True)]


@pytest.mark.slow
def test_the_command_answers_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tiny", "--rows", "2", "--json"]) == 0
    answer = valid("data", capsys.readouterr().out)
    assert (answer["rows"], len(answer["samples"])) == (355, 2)


# A template that leaves out earlier reasoning, and some of what users say.
_LAST_THOUGHT = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if 'secret' not in m.content %}{{ m.content }}{% endif %}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def templated(tmp_path: Path) -> str:
    """A tokenizer with that template."""
    folder = tmp_path / "tokenizer"
    load_tokenizer(tiny().model).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(_LAST_THOUGHT)
    return str(folder)


def thinking(*asked: str) -> dict[str, Any]:
    """Return a row in which each question is thought about."""
    return {
        "messages": [
            turn
            for question in asked
            for turn in (
                {"role": "user", "content": question},
                {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."},
            )
        ]
    }


def told(spec: RunSpec, **request: Any) -> Any:
    """Return the helper's last answer."""
    return list(_preview({"spec": spec_tree(spec)} | request))[-1]


def test_every_kind_gets_a_verdict_and_nothing_is_refused(tmp_path: Path, templated: str) -> None:
    rows = [
        thinking("Is it?"),
        thinking("Is it?", "And then?"),
        thinking("a secret"),
        {"messages": turns("Well?", "")},
    ]
    spec = spec_of(lines(tmp_path, rows), model__tokenizer=templated)
    answer = msgspec.convert(told(spec, check=True), DataCheck)
    (source,) = answer.sources
    verdicts = {kind.kind: (kind.rows, kind.first, kind.outcome) for kind in source.kinds}
    assert verdicts == {"turns-split": (1, 2, "trained"), "unproven": (1, 3, "refused")}
    assert (answer.refused, source.rows, source.proven, source.documents) == (True, 4, 2, 3)
    assert source.dropped_rows == {"no-answer": Dropped(1, (4,)), "unproven": Dropped(1, (3,))}
    assert refusal(lambda: told(spec)).code == "data-unproven"
    accepted = told(spec.changed("data", unproven="context"), check=True)
    assert not accepted["refused"]
    assert accepted["sources"][0]["kinds"][-1]["outcome"] == "context"


def test_a_verdict_is_given_where_nothing_is_proven(tmp_path: Path, templated: str) -> None:
    spec = spec_of(lines(tmp_path, [thinking("a secret")]), model__tokenizer=templated)
    answer = told(spec, check=True)
    assert (answer["refused"], answer["sources"][0]["documents"]) == (True, 0)
    assert refusal(lambda: told(spec)).code == "data-unproven"
    problem = refusal(lambda: told(spec.changed("data", unproven="context")))
    assert problem.code == "data-nothing-trained"
    assert "row 1" in problem.remedy


def test_any_row_is_shown_with_all_its_documents(tmp_path: Path, templated: str) -> None:
    rows = [thinking("Is it?"), thinking("Is it?", "And then?"), {"messages": turns("Well?", "")}]
    rows.append({"messages": turns("One?", "One.", "Two?", "Two and more.")})
    spec = spec_of(lines(tmp_path, rows), model__tokenizer=templated)
    shown = msgspec.convert(told(spec, rows=0, numbers=[2, 3, 4]), DataPreview).samples
    assert [sample.row for sample in shown] == [2, 2, 3, 4]
    assert ["".join(text for text, trained in one.pieces if trained) for one in shown[:2]] == 2 * [
        "<think>Let me see.</think>Yes.<|eos|>"
    ]
    assert (shown[2].dropped, shown[2].tokens) == ("no-answer", 0)
    first, second = shown[3].answers
    assert 0 < first < second
    assert shown[3].trained_tokens == first + second
    assert f"({first} + {second})" in shown[3].counted
    problem = refusal(lambda: told(spec, numbers=[5]))
    assert (problem.code, problem.field, problem.value) == ("data-row-missing", "row", "5")


def test_only_the_first_dropped_rows_are_named(tmp_path: Path) -> None:
    rows = alpaca("Yes.", *[""] * (NAMED_ROWS + 3))
    preview = msgspec.convert(told(spec_of(lines(tmp_path, rows))), DataPreview)
    assert preview.dropped_rows == {
        "no-answer": Dropped(NAMED_ROWS + 3, tuple(range(2, 2 + NAMED_ROWS)))
    }
    assert ": rows 2, 3, 4, 5, 6 ... (`so-tui data PRESET --check`" in preview.notes[-1]
    one = Dropped(1, (2,), "one") + Dropped(3, (4, 5, 6), "one")
    assert (one + Dropped(2, (1, 2), "other")).named == "rows 2, 4, 5, 6 of one ..."


def test_a_check_lists_all_dropped_rows_of_each_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = lines(tmp_path, alpaca("", "Yes.", *[""] * 7, "Yes."), name="one.jsonl")
    other = lines(tmp_path, alpaca("Yes.", ""), name="other.jsonl")
    mixture = f'[{{source = "{one}"}}, {{source = "{other}"}}]'
    answer = msgspec.convert(told(spec_of(mixture), check=True), DataCheck)
    numbers = [source.dropped_numbers for source in answer.sources]
    assert numbers == [(1, *range(3, 10)), (2,)]
    with rich_output() as out:
        _print_verdict(out, answer)
    lists = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dropped")]
    assert lists == ["dropped rows: 1, 3-9"], "few are named already"


def test_a_plan_names_what_was_found_in_the_same_data(tmp_path: Path, templated: str) -> None:
    path = lines(tmp_path, [thinking("Is it?", "And then?")])
    spec = spec_of(path, model__tokenizer=templated)

    def found(spec: RunSpec) -> list[tuple[str, int]]:
        notes = make_plan(spec, cpu_machine()).warnings
        return [(note.kind, note.rows) for note in notes if isinstance(note, DataFound)]

    assert found(spec) == []
    told(spec)
    assert found(spec) == [("turns-split", 1)]
    context = spec.changed("data", split_turns=False)
    assert found(context) == []
    told(context)
    assert found(context) == [("turns-context", 1)]


def test_the_first_row_of_a_kind_is_named_with_its_source(tmp_path: Path, templated: str) -> None:
    one = lines(tmp_path, [thinking("Is it?"), thinking("Is it?", "And then?")], "one.jsonl")
    other = lines(tmp_path, [thinking("Is it?", "And then?")], "other.jsonl")
    spec = spec_of(f'[{{source = "{one}"}}, {{source = "{other}"}}]', model__tokenizer=templated)
    told(spec)
    (note,) = [n for n in make_plan(spec, cpu_machine()).warnings if isinstance(n, DataFound)]
    assert (note.rows, note.first, note.source) == (2, 2, str(one))
    assert f"2 rows (first: row 2 of {one})" in note.sentence


def test_a_refusal_counts_the_rows_that_were_read(tmp_path: Path, templated: str) -> None:
    path = lines(tmp_path, [thinking("Is it?"), thinking("a secret"), thinking("a secret")])
    spec = spec_of(path, model__tokenizer=templated)
    for problem in (
        refusal(lambda: told(spec)),
        refusal(lambda: list(_check({"spec": spec_tree(spec)}))),
    ):
        assert (problem.code, problem.field) == ("data-unproven", "data.source")
        assert problem.value.endswith("row 2")
        assert "in 2 of the 3 rows" in problem.message


@pytest.mark.slow
def test_a_check_exits_with_what_it_found(
    tmp_path: Path, templated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path, [thinking("Is it?"), thinking("a secret")])
    command = ["data", "tiny", "--check", "--set", f"data.source={path}", "--set"]
    command += ["data.format=auto", "--set", f"model.tokenizer={templated}"]
    assert main([*command, "--json"]) == 1
    assert valid("data-check", capsys.readouterr().out)["refused"]
    assert main([*command, "--set", "data.unproven=context"]) == 0
    assert "context" in capsys.readouterr().out
