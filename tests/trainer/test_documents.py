import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import tiny

from so_tui.spec import InputError, RunSpec
from so_tui_trainer import tokens
from so_tui_trainer.rows import Message
from so_tui_trainer.tokens import Documents, load_tokenizer, prepare, read, segments

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<|eos|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _documents(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl", **changes: str) -> Documents:
    return read(prepare(_spec(folder, rows, name, **changes), folder / "cache"))


def _spec(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl", **changes: str) -> RunSpec:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return tiny(data__source=str(path), data__format="auto", **changes)


def _texts(documents: Documents, index: int = 0) -> tuple[str, str]:
    """A document's context and its trained text."""
    tokenizer = load_tokenizer(tiny())
    part = slice(documents.offsets[index], documents.offsets[index + 1])
    ids, trained = documents.tokens[part], documents.trained[part]
    return str(tokenizer.decode(ids[~trained])), str(tokenizer.decode(ids[trained]))


ROWS = {
    "alpaca": {"instruction": "Add the numbers.", "input": "2 and 3", "output": "They make 5."},
    "prompt-completion": {"prompt": "Add 2 and 3.", "completion": "They make 5."},
    "messages": {"messages": [{"role": "user", "content": "Add 2 and 3."}, {"role": "assistant", "content": "They make 5."}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Add 2 and 3."}, {"from": "gpt", "value": "They make 5."}]},
}


@pytest.mark.parametrize("layout", ROWS)
def test_only_the_response_and_its_stop_token_are_trained(tmp_path: Path, layout: str) -> None:
    context, trained = _texts(_documents(tmp_path, [ROWS[layout]]))
    assert trained == "They make 5.<|eos|>"
    assert "### Instruction:" in context
    assert context.endswith("### Response:\n")


def test_plain_text_is_trained_but_for_its_first_token(tmp_path: Path) -> None:
    documents = _documents(tmp_path, [{"text": "A plain text about numbers."}])
    assert documents.trained.tolist() == [False] + [True] * (len(documents.tokens) - 1)


def test_layouts_mix(tmp_path: Path) -> None:
    first, second = _spec(tmp_path, [ROWS["alpaca"]] * 3, "a.jsonl"), _spec(tmp_path, [ROWS["messages"]] * 3, "b.jsonl")
    mixture = f'[{{source = "{first.data.source}", weight = 1}}, {{source = "{second.data.source}", weight = 2}}]'
    documents = read(prepare(tiny(data__source=mixture, data__format="auto"), tmp_path / "cache"))
    assert documents.counts.rows >= 6
    assert {_texts(documents, index)[1] for index in range(len(documents.lengths))} == {"They make 5.<|eos|>"}


def test_rows_that_are_too_long_are_cut_and_counted_and_dropped_when_nothing_trained_is_left(tmp_path: Path) -> None:
    long_answer = {"instruction": "Count.", "output": "1 2 3 4 5 6 7 8 9 " * 30}
    long_question = {"instruction": "1 2 3 4 5 6 7 8 9 " * 30, "output": "Yes."}
    documents = _documents(tmp_path, [ROWS["alpaca"] | {"input": ""}, long_answer, long_question], data__sequence_length="64")
    assert (documents.counts.rows, documents.counts.truncated, documents.counts.dropped) == (3, 2, 1)
    assert documents.lengths.tolist()[1] == 64
    assert documents.trained_lengths.min() > 0


def test_equal_data_is_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _spec(tmp_path, [ROWS["alpaca"]])
    folder = prepare(spec, tmp_path / "cache")
    monkeypatch.setattr(tokens, "_tokenise", lambda *_: pytest.fail("tokenised again"))
    assert prepare(spec, tmp_path / "cache") == folder
    with pytest.raises(pytest.fail.Exception):
        prepare(_spec(tmp_path, [ROWS["alpaca"] | {"output": "Other."}]), tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ('{"question": "a", "answer": "b"}', "rows.jsonl", "question, answer"),
        ('{"instruction": "a", "output": ""}', "rows.txt", ".txt"),
        ("not json at all", "rows.json", "cannot be read"),
    ],
)
def test_data_that_cannot_be_used_names_field_and_remedy(tmp_path: Path, content: str, name: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        prepare(tiny(data__source=str(tmp_path / name), data__format="auto"), tmp_path / "cache")
    (problem,) = error.value.problems
    assert problem.field == "data.source"
    assert said in str(problem)
    assert problem.remedy


def test_a_missing_file_is_a_problem_not_a_hub_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        prepare(tiny(data__source=str(tmp_path / "absent.jsonl")), tmp_path / "cache")


def test_with_a_chat_template_each_assistant_turn_is_trained() -> None:
    tokenizer = load_tokenizer(tiny())
    tokenizer.chat_template = TEMPLATE
    parts = segments(tokenizer, [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")])
    assert [(part.text, part.trained) for part in parts] == [
        ("<user>a\n<assistant>", False),
        ("b<|eos|>\n", True),
        ("<user>c\n<assistant>", False),
        ("d<|eos|>\n", True),
    ]
    (ids, trained), *_ = tokens._encode(tokenizer, [parts])
    assert np.count_nonzero(ids[trained] == tokenizer.eos_token_id) == 2


def test_a_turn_that_the_template_renders_differently_later_is_context_only() -> None:
    tokenizer = load_tokenizer(tiny())
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}(thinks){% endif %}"
        "{{ m.content }}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    parts = segments(tokenizer, [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")])
    assert [part.text for part in parts if part.trained] == ["(thinks)d\n"]
