"""What the rows of published data sets and of other trainers are read as: turns, calls, tools."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from so_tui.spec.data_notes import sentences
from so_tui_trainer.data.chat import chat_of
from so_tui_trainer.data.encoder import encoder_for
from so_tui_trainer.data.rows import unused_columns
from so_tui_trainer.data.sources import open_sources
from so_tui_trainer.data.spans import Written, documents_of
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.data.turns import UNREAD, UNTRAINED, Conversation, Message
from tests.support.hub import loopback_hub
from tests.support.launching import tiny
from tests.support.problems import refusal
from tests.support.python_path import printed
from tests.support.rows import ROWS, lines, spec_of, turns

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "A town"}},
    "required": ["place"],
}
TIDE = {"name": "tide", "description": "When it is high", "parameters": PLACE}
TIDES = [{"type": "function", "function": TIDE}]
CALL = {"name": "tide", "arguments": {"place": "Brest"}}
CALLS = [{"type": "function", "function": CALL}]
CALLED = Message("assistant", "", (("tool_calls", CALLS),))
ASKED, RESULT, SAID = Message("user", "Brest?"), Message("tool", "at six"), "High water is at six."
TALK = (ASKED, CALLED, RESULT, Message("assistant", SAID))
WITH_TOOLS = (Message("tools", "", (("tools", TIDES),)), *TALK)


def conversations(folder: Path, *rows: dict[str, Any], **changes: str) -> list[Conversation]:
    """Return the rows of a JSONL file."""
    (opened,) = open_sources(spec_of(lines(folder, rows), **changes).data)
    return list(opened.conversations(0, len(rows)))


def written(folder: Path, row: dict[str, Any], template: str = "tools", **special: str) -> Written:
    """Write a row with one of the templates of the tests."""
    chat = chat_of(tokenizer_of(template, **special))
    (conversation,) = conversations(folder, row)
    return documents_of(chat, conversation)


def tokenizer_of(template: str, **special: str) -> Any:
    tokenizer = load_tokenizer(tiny().model)
    specials = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials, **special})
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def trained(found: Written) -> list[str]:
    return [part.text for parts in found.documents for part in parts if part.trained]


def sharegpt(*said: tuple[str, str], **columns: object) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": what} for who, what in said], **columns}


SPOKEN = json.dumps(CALL)
OPENAI = {"role": "assistant", "content": None}
RESULTS = [{"role": "tool", "content": "at six"}, {"role": "assistant", "content": SAID}]
QUOTED = '{"name": "tide", "arguments": \'{"place": "Brest"}\'}'
CALLING: dict[str, dict[str, Any]] = {
    "ShareGPT": sharegpt(
        ("human", "Brest?"),
        ("function_call", SPOKEN),
        ("observation", "at six"),
        ("gpt", SAID),
        tools=json.dumps(TIDES),
    ),
    "a list of calls, bare tools": sharegpt(
        ("human", "Brest?"),
        ("function_call", f"[{SPOKEN}]"),
        ("observation", "at six"),
        ("gpt", SAID),
        tools=json.dumps([TIDE]),
    ),
    "OpenAI": {
        "messages": [*turns("Brest?"), OPENAI | {"tool_calls": CALLS}, *RESULTS],
        "tools": TIDES,
    },
    "OpenAI, arguments as text": {
        "messages": [
            *turns("Brest?"),
            OPENAI | {"tool_calls": [{"function": CALL | {"arguments": '{"place": "Brest"}'}}]},
            *RESULTS,
        ],
        "tools": [TIDE],
    },
    "OpenAI's older keys": {
        "messages": [
            *turns("Brest?"),
            OPENAI | {"function_call": {"name": "tide", "arguments": '{"place": "Brest"}'}},
            {"role": "function", "content": "at six"},
            RESULTS[1],
        ],
        "functions": [TIDE],
    },
    "roles of calls and results": {
        "messages": [
            *turns("Brest?"),
            {"role": "tool_call", "content": SPOKEN},
            {"role": "tool_response", "content": "at six"},
            RESULTS[1],
        ],
        "tools": json.dumps(TIDES),
    },
    "Glaive": {
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. "
        f"Use them if required -\n{json.dumps(TIDE, indent=4)}\n",
        "chat": f"USER: Brest?\n\n\nASSISTANT: <functioncall> {QUOTED} <|endoftext|>\n\n\n"
        f"FUNCTION RESPONSE: at six\n\n\nASSISTANT: {SAID} <|endoftext|>\n\n\n",
    },
    "Glaive's texts in turns": {
        "messages": turns("Brest?", f"<functioncall> {SPOKEN}", "FUNCTION RESPONSE: at six", SAID),
        "tools": [TIDE],
    },
    "Hermes": sharegpt(
        ("system", f"You call functions.\n<tools>\n{json.dumps(TIDES)}\n</tools>"),
        ("human", "Brest?"),
        ("gpt", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("tool", "<tool_response>\nat six\n</tool_response>"),
        ("gpt", SAID),
        tools=json.dumps(TIDES),
        category="Tides",
    ),
    "parts with a kind": {
        "messages": [
            *turns([{"type": "text", "value": "Brest?"}]),
            {"role": "assistant", "content": [{"type": "tool_call", "value": SPOKEN}]},
            *RESULTS,
        ],
        "tools": json.dumps(TIDES),
    },
}


@pytest.mark.parametrize("form", CALLING)
def test_calls_and_tools_have_one_form(tmp_path: Path, form: str) -> None:
    ((tools, *said),) = conversations(tmp_path, CALLING[form])
    assert dict(tools.extra)["tools"] == TIDES
    assert ("replaced" in dict(tools.extra)) == (form in ("Glaive", "Hermes"))
    assert tuple(said) == TALK
    assert trained(written(tmp_path, CALLING[form])) == [
        f"<call>{SPOKEN}</call><|im_end|>",
        f"{SAID}<|im_end|>",
    ]


def test_an_answer_of_xlam_is_its_calls(tmp_path: Path) -> None:
    table = {
        "place": {"description": "A town", "type": "str"},
        "days": {"type": "int, optional", "default": 1},
        "marks": {"type": "List[str]"},
    }
    row = {
        "id": 1,
        "query": "Brest and Jersey?",
        "tools": json.dumps([TIDE | {"parameters": table}]),
        "answers": json.dumps([CALL, CALL | {"arguments": {"place": "Jersey"}}]),
    }
    ((tools, asked, said),) = conversations(tmp_path, row)
    assert asked == Message("user", "Brest and Jersey?")
    assert [call["function"]["arguments"]["place"] for call in dict(said.extra)["tool_calls"]] == [
        "Brest",
        "Jersey",
    ]
    assert dict(tools.extra)["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "place": {"description": "A town", "type": "string"},
            "days": {"type": "integer", "default": 1},
            "marks": {"type": "array"},
        },
        "required": ["place", "marks"],
    }


def test_texts_in_hermes_form_stay_without_tools(tmp_path: Path) -> None:
    said = CALLING["Hermes"]["conversations"]
    (found,) = conversations(tmp_path, {"conversations": said})
    assert [message.content for message in found] == [turn["value"] for turn in said]
    assert not any(message.extra for message in found)


def test_what_is_said_beside_calls_stays(tmp_path: Path) -> None:
    two = f"I look.\n<tool_call>{SPOKEN}</tool_call>\n<tool_call>{SPOKEN}</tool_call>"
    results = "<tool_response>1</tool_response>\n<tool_response>2</tool_response>"
    row = sharegpt(("human", "Brest?"), ("gpt", two), ("tool", results), tools=json.dumps(TIDES))
    ((_, _, said, *found),) = conversations(tmp_path, row)
    assert (said.content, dict(said.extra)["tool_calls"]) == ("I look.", CALLS * 2)
    assert found == [Message("tool", "1"), Message("tool", "2")]
    thought = sharegpt(("human", "Brest?"), ("function_call", f"<think>hm</think>\n{SPOKEN}"))
    ((_, said),) = conversations(tmp_path, thought)
    assert (said.content, dict(said.extra)["tool_calls"]) == ("<think>hm</think>", CALLS)


UNREADABLE = {
    "no JSON": sharegpt(("human", "Brest?"), ("function_call", "tide(Brest)")),
    "arguments that are plain text": {
        "messages": [
            *turns("Brest?"),
            OPENAI | {"tool_calls": [{"function": CALL | {"arguments": "Brest"}}]},
        ]
    },
    "a broken call": {"messages": turns("Brest?", '<functioncall> {"name": "tide", ')},
    "arguments twice": {
        "messages": [
            *turns("Brest?"),
            OPENAI | {"tool_calls": [{"function": CALL | {"parameters": {"place": "Dover"}}}]},
        ]
    },
    "arguments under another key": {
        "messages": [
            *turns("Brest?"),
            OPENAI | {"tool_calls": [{"name": "tide", "args": {"a": 1}}]},
        ]
    },
    "calls under two keys": {
        "messages": [*turns("Brest?"), OPENAI | {"tool_calls": CALLS, "function_call": CALL}]
    },
}
BEHIND = f"<tool_call>{SPOKEN}</tool_call>\nAs you see."
IN_TEXT: dict[str, dict[str, Any]] = {
    "text behind a call": {"role": "assistant", "content": BEHIND},
    "calls in the text, too": {
        "role": "assistant",
        "content": BEHIND.removesuffix("\nAs you see."),
        "tool_calls": CALLS,
    },
}


@pytest.mark.parametrize("case", IN_TEXT)
def test_a_call_in_the_text_that_would_move_is_not_trained(tmp_path: Path, case: str) -> None:
    row = {"messages": [*turns("Brest?"), IN_TEXT[case]], "tools": TIDES}
    ((_, __, said),) = conversations(tmp_path, row)
    assert UNREAD in dict(said.extra)
    assert not trained(written(tmp_path, row))


def test_arguments_beside_the_name_of_a_function_are_read(tmp_path: Path) -> None:
    call = {"function": {"name": "tide"}, "arguments": CALL["arguments"]}
    ((_, said),) = conversations(
        tmp_path, {"messages": [*turns("Brest?"), OPENAI | {"tool_calls": [call]}]}
    )
    assert dict(said.extra)["tool_calls"] == CALLS


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_call_that_is_not_understood_is_not_trained(tmp_path: Path, case: str) -> None:
    ((_, said),) = conversations(tmp_path, UNREADABLE[case])
    assert UNREAD in dict(said.extra)
    found = written(tmp_path, UNREADABLE[case])
    assert found.unproven
    assert not trained(found)


NULLS = {
    "unit": None,
    "x": 1,
    "when": "2021-01-01",
    "small": 1e-12,
    "exact": 48.390394123456,
    "large": 123456789012345678901234,
    "text": "007",
}
DEFAULTS = {"type": "object", "properties": {"unit": {"type": "string", "default": None}}}


def test_nulls_and_defaults_are_as_in_the_file(tmp_path: Path) -> None:
    def row(arguments: object, **tool: object) -> dict[str, Any]:
        call = {"id": "c1", "type": "function", "function": CALL | {"arguments": arguments}}
        said = [*turns("Brest?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": said, "tools": [{"type": "function", "function": tool}]}

    rows = [
        row(NULLS, name="tide", parameters=DEFAULTS),
        row({"y": [None]}, name="ebb", strict=True),
    ]
    for given in (rows, rows[:1], rows[::-1]):
        for conversation, wanted in zip(conversations(tmp_path, *given), given, strict=True):
            (tools, _, said) = conversation
            assert dict(tools.extra)["tools"] == wanted["tools"]
            assert dict(said.extra)["tool_calls"] == wanted["messages"][1]["tool_calls"]
    spaced = tmp_path / "spaced.jsonl"
    spaced.write_text(
        "\n\n".join(map(json.dumps, (rows[0], {"messages": [], "more": "x"}))) + "\n\n"
    )
    (opened,) = open_sources(spec_of(spaced).data)
    (_, _, said), empty = opened.conversations(0, 2)
    assert dict(said.extra)["tool_calls"] == rows[0]["messages"][1]["tool_calls"]
    assert not empty
    (tmp_path / "folder").mkdir()
    rows[0] = row({"x": None}, name="tide")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "folder" / "rows.parquet")
    (opened,) = open_sources(spec_of(tmp_path / "folder").data)
    _, (tools, _, said) = opened.conversations(0, 2)
    assert dict(tools.extra)["tools"] == rows[1]["tools"]
    assert dict(said.extra)["tool_calls"][0]["function"]["arguments"] == {"y": [None]}


_READ = """
from so_tui_trainer.data.sources import open_sources
from tests.support.rows import spec_of
(opened,) = open_sources(spec_of("own/tides").data)
(talk,) = opened.conversations(0, 1)
print(dict(talk[1].extra)["tool_calls"][0]["function"]["arguments"])
"""


@pytest.mark.slow
def test_nulls_of_a_source_on_the_hub_stay_offline_too(tmp_path: Path) -> None:
    call = {"function": CALL | {"arguments": NULLS}}
    row = {"messages": [*turns("Brest?"), OPENAI | {"tool_calls": [call]}]}
    with loopback_hub(tmp_path) as hub:
        hub.add("datasets", "own/tides", {"train.jsonl": json.dumps(row).encode()})
        for offline in ("0", "1"):
            environment = {"HF_HUB_OFFLINE": offline, "HF_DATASETS_OFFLINE": offline}
            found = printed("-c", _READ, env=os.environ | environment)
            assert found.splitlines()[-1] == str(NULLS)


FLAGS: list[dict[str, Any]] = [
    {"train": False},
    {"training": False},
    {"loss": False},
    {"loss_weight": 0.0},
    {"weight": 0},
    {"weight": "false"},
    {"meta": {"of": {"train": 0}}},
]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_other_trainers_make_a_turn_context(tmp_path: Path, flag: dict[str, Any]) -> None:
    (_, bad), (__, good) = conversations(
        tmp_path,
        *(
            {"messages": [*turns("a"), {"role": "assistant", "content": "b", **each}]}
            for each in (
                flag,
                json.loads(
                    json.dumps(flag)
                    .replace("false", "true")
                    .replace("0.0", "1.0")
                    .replace(": 0", ": 1")
                ),
            )
        ),
    )
    assert UNTRAINED in bad.extra
    assert not bad.answers
    assert good.answers


@pytest.mark.parametrize("flag", [{"weight": 0.5}, {"loss_weight": -1}, {"m": {"train": "half"}}])
def test_a_turn_that_counts_in_part_is_refused(tmp_path: Path, flag: dict[str, Any]) -> None:
    row = {"messages": [*turns("a"), {"role": "assistant", "content": "b", **flag}]}
    problem = refusal(lambda: conversations(tmp_path, ROWS["messages"], row))
    assert problem.code == "data-loss-weight"
    assert problem.value.endswith("row 2")
    assert "messages[1]." in problem.message


PARTS = [{"type": "text", "text": "a", "weight": weight} for weight in (0, 1)]


def test_flags_of_parts_are_those_of_the_turn(tmp_path: Path) -> None:
    said = conversations(tmp_path, *({"messages": turns("?", [part])} for part in PARTS))
    assert [talk[1].answers for talk in said] == [False, True]
    mixed = {"messages": turns("?", PARTS)}
    assert refusal(lambda: conversations(tmp_path, mixed)).code == "data-loss-weight"


BETTER = {"from": "gpt", "value": "4."}
PREFERENCES: dict[str, dict[str, Any]] = {
    "ShareGPT": sharegpt(("human", "2+2?"), chosen=BETTER, rejected=BETTER | {"value": "5."}),
    "Alpaca": {"instruction": "2+2?", "input": "", "chosen": "4.", "rejected": "5."},
    "prompts": {"prompt": "2+2?", "chosen": "4.", "rejected": "5."},
    "messages": {"chosen_messages": turns("2+2?", "4."), "rejected_messages": turns("2+2?", "5.")},
    "verdict": {"messages": turns("2+2?", "5."), "label": False},
    "verdict on a completion": {"prompt": "2+2?", "completion": "4.", "label": True},
}


@pytest.mark.parametrize("case", PREFERENCES)
def test_preferences_are_refused(tmp_path: Path, case: str) -> None:
    problem = refusal(lambda: conversations(tmp_path, PREFERENCES[case]))
    assert problem.code == "data-preferences"


def test_columns_beside_a_named_layout_are_not_used(tmp_path: Path) -> None:
    row = ROWS["messages"] | {"chosen": "a", "rejected": "b", "prompt": "c", "label": 1}
    path = lines(tmp_path, [row])
    (opened,) = open_sources(spec_of(path, data__format="messages").data)
    assert len([*opened.conversations(0, 1)]) == 1
    assert unused_columns(opened.columns, opened.layout) == (
        "chosen",
        "rejected",
        "prompt",
        "label",
    )
    assert conversations(tmp_path, {"text": "Fine.", "label": True})


PUBLISHED: dict[str, tuple[dict[str, Any], list[tuple[str, str]], tuple[str, ...]]] = {
    "OpenHermes": (
        sharegpt(("system", "Be brief."), ("human", "2+2?"), ("gpt", "4."))
        | {"source": "sums", "category": None, "id": "a", "system_prompt": None, "idx": 1},
        [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4.")],
        ("source", "category", "id", "system_prompt", "idx"),
    ),
    "UltraChat": (
        {"prompt": "2+2?", "prompt_id": "x", "messages": turns("2+2?", "4.", "Sure?", "Yes.")},
        [("user", "2+2?"), ("assistant", "4."), ("user", "Sure?"), ("assistant", "Yes.")],
        ("prompt", "prompt_id"),
    ),
    "Tulu": (
        {"id": "x", "messages": turns("2+2?", "4."), "source": "sums"},
        [("user", "2+2?"), ("assistant", "4.")],
        ("id", "source"),
    ),
    "smoltalk": (
        {"messages": turns("2+2?", "4."), "source": "sums"},
        [("user", "2+2?"), ("assistant", "4.")],
        ("source",),
    ),
    "identity of LLaMA-Factory": (
        {"instruction": "Who are you?", "input": "", "output": "{{name}}."},
        [("user", "Who are you?"), ("assistant", "{{name}}.")],
        (),
    ),
    "text of LLaMA-Factory": ({"text": "A text."}, [("text", "A text.")], ()),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_layouts_of_published_data_are_read(tmp_path: Path, name: str) -> None:
    row, said, unused = PUBLISHED[name]
    (opened,) = open_sources(spec_of(lines(tmp_path, [row])).data)
    (found,) = opened.conversations(0, 1)
    assert [(message.role, message.content) for message in found] == said
    assert unused_columns(opened.columns, opened.layout) == unused


LOST: dict[str, tuple[dict[str, Any], str]] = {
    "a system text that is none": (ROWS["alpaca"] | {"system": ["Be brief."]}, "system"),
    "a history that is none": (ROWS["alpaca"] | {"history": {"a": "b"}}, "history"),
    "reasoning that is no text": (
        {"messages": [*turns("2+2?"), {"role": "assistant", "content": "4.", "thinking": ["hm"]}]},
        "thinking",
    ),
    "tools of a question": (
        {"messages": [turns("2+2?")[0] | {"tools": TIDES}, *turns("?", "4.")[1:]]},
        "tools",
    ),
    "a question without its text": (
        {"messages": [{"role": "user", "text": "2+2?"}, *turns("?", "4.")[1:]]},
        "messages[0]",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_nothing_of_a_row_is_lost_without_a_word(tmp_path: Path, case: str) -> None:
    row, column = LOST[case]
    problem = refusal(lambda: conversations(tmp_path, row))
    assert problem.code == "data-row-unreadable"
    assert problem.message.startswith(f"column {column}") or f".{column}:" in problem.message


def test_reasoning_that_is_empty_is_none(tmp_path: Path) -> None:
    said = turns("2+2?", "4.")
    said[1] |= {"reasoning": [], "thinking": False}
    assert conversations(tmp_path, {"messages": said}) == [
        (Message("user", "2+2?"), Message("assistant", "4."))
    ]


def test_a_history_may_be_written_as_json(tmp_path: Path) -> None:
    (found,) = conversations(tmp_path, ROWS["alpaca"] | {"history": '[["Hi", "Yo."]]'})
    assert [message.content for message in found[:2]] == ["Hi", "Yo."]


def test_tools_of_alpaca_rows_are_read(tmp_path: Path) -> None:
    ((tools, *_),) = conversations(tmp_path, ROWS["alpaca"] | {"tools": json.dumps(TIDES)})
    assert dict(tools.extra)["tools"] == TIDES


def test_flags_of_questions_are_named(tmp_path: Path) -> None:
    def talk(**flags: object) -> dict[str, Any]:
        asked, said = turns("2+2?", "4.")
        return {"messages": [asked | flags, said]}

    (sentence,) = kinds(tmp_path, talk(train=False), talk(train=True))
    assert "in 1 row (first: row 2)" in sentence
    assert kinds(tmp_path, talk(loss_weight=0)) == []


def test_an_answer_of_a_split_row_that_does_not_fit_is_counted(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("tools")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% if loop.last and m.thinking %}"
        "<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    said = turns("2+2?", "4.", "1" * 200, "5.")
    said[1]["thinking"] = said[3]["thinking"] = "hm"
    spec = spec_of(lines(tmp_path, [{"messages": said}]))
    encoder = replace(encoder_for(chat_of(tokenizer), spec.data), sequence_length=64)
    (row,) = encoder.documents(open_sources(spec.data)[0], 0, 1)
    assert len(row.documents) == 1
    assert (row.counts.truncated, row.counts.dropped) == (1, 0)


def test_turns_of_another_trainer_have_parts_and_weights(tmp_path: Path) -> None:
    said = [
        {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": weight}
        for role, text, weight in (("user", "2+2?", 0.0), ("assistant", "4.", 1.0))
    ]
    (found,) = conversations(tmp_path, {"messages": said})
    assert [message.content for message in found] == ["2+2?", "4."]
    assert found[1].answers


def test_pictures_are_refused(tmp_path: Path) -> None:
    row = {"messages": turns("<image>Who?", "They."), "images": ["a.jpg"]}
    problem = refusal(lambda: conversations(tmp_path, row))
    assert (problem.code, "images" in problem.message) == ("data-row-unreadable", True)
    assert conversations(tmp_path, row | {"images": []})


def test_a_second_system_text_is_refused(tmp_path: Path) -> None:
    said = turns("Be kind.", "Hi.", roles="system user")
    problem = refusal(lambda: conversations(tmp_path, {"messages": said, "system": "Be brief."}))
    assert (problem.code, "system" in problem.message) == ("data-row-unreadable", True)
    assert conversations(tmp_path, {"messages": said, "system": "Be kind."})


def kinds(folder: Path, *rows: dict[str, Any], template: str = "tools") -> list[str]:
    """Return the sentences about what was found in rows."""
    spec = spec_of(lines(folder, rows))
    encoder = encoder_for(chat_of(tokenizer_of(template)), spec.data)
    (opened,) = open_sources(spec.data)
    found = [row.counts for row in encoder.documents(opened, 0, len(rows))]
    return sentences(sum(found[1:], found[0]).kinds)


def test_tools_without_a_template_are_counted_not_trained(tmp_path: Path) -> None:
    chat = chat_of(load_tokenizer(tiny().model))
    (called,) = conversations(tmp_path, CALLING["OpenAI"])
    found = documents_of(chat, called)
    assert {"tools-dropped", "calls-dropped"} >= found.kinds >= {"tools-dropped"}
    assert found.unproven
    assert trained(found) == [f"{SAID}<|eos|>"]
    (unread,) = conversations(tmp_path, UNREADABLE["no JSON"])
    found = documents_of(chat, unread)
    assert (found.documents, bool(found.unproven)) == ([], True)
    thought = ROWS["messages"]["messages"][1] | {"thinking": "hm"}
    (thinking,) = conversations(tmp_path, {"messages": [*turns("Add 2 and 3."), thought]})
    assert documents_of(chat, thinking).kinds == {"reasoning-dropped"}


def test_unknown_keys_are_named_once_with_their_rows(tmp_path: Path) -> None:
    said = [*turns("2+2?"), {"role": "assistant", "content": "4.", "mo{d\ne": "x"}]
    (sentence,) = kinds(tmp_path, ROWS["messages"], {"messages": said}, {"messages": said})
    assert "2 rows (first: row 2)" in sentence
    assert "mo{d" in sentence
    assert "\n" not in sentence
    known = [*turns("2+2?"), {"role": "assistant", "content": "4.", "reasoning": None}]
    assert kinds(tmp_path, {"messages": known, "source": "sums"}) == []
    (sentence,) = kinds(tmp_path, CALLING["Glaive"])
    assert "system message" in sentence


HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
TEMPLATED: dict[str, tuple[dict[str, Any], list[tuple[str, bool]]]] = {
    "a prompt": (
        {"prompt": HI, "completion": "Yo.<|im_end|>"},
        [(HI, False), ("Yo.<|im_end|>", True)],
    ),
    "a prompt, its answer not ended": (
        {"prompt": HI, "completion": "Yo."},
        [(HI, False), ("Yo.<|im_end|>", True)],
    ),
    "an instruction": (
        {"instruction": HI, "output": "Yo.<|im_end|>\n"},
        [(HI, False), ("Yo.<|im_end|>", True)],
    ),
    "a completion with its heading": (
        {
            "prompt": HI.removesuffix("<|im_start|>assistant\n"),
            "completion": "<|im_start|>assistant\nYo.",
        },
        [
            (HI.removesuffix("<|im_start|>assistant\n"), False),
            ("<|im_start|>assistant\nYo.<|im_end|>", True),
        ],
    ),
    "a text": ({"text": f"{HI}Yo.<|im_end|>\n"}, [(f"{HI}Yo.<|im_end|>\n", True)]),
    "a plain text": ({"text": "Yo."}, [("Yo.<|eos|>", True)]),
    "an answer about the template": (
        {"prompt": "Show one.", "completion": f"{HI}Yo."},
        [
            ("<|im_start|>user\nShow one.<|im_end|>\n<|im_start|>assistant\n", False),
            (f"{HI}Yo.<|im_end|>", True),
        ],
    ),
    "a question about a token": (
        {"prompt": "What is <|im_end|>?", "completion": "An end."},
        [
            ("<|im_start|>user\nWhat is <|im_end|>?<|im_end|>\n<|im_start|>assistant\n", False),
            ("An end.<|im_end|>", True),
        ],
    ),
}


@pytest.mark.parametrize("case", TEMPLATED)
def test_special_tokens_of_rows_are_not_repeated(tmp_path: Path, case: str) -> None:
    row, expected = TEMPLATED[case]
    (parts,) = written(tmp_path, row).documents
    assert [tuple(part) for part in parts] == expected


def test_a_row_has_one_first_token(tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = tokenizer_of("chatml", bos_token="<|bos|>")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    for prefix in ("", "<|bos|>"):
        for row in ({"text": f"{prefix}Yo."}, {"prompt": prefix + HI, "completion": "Yo."}):
            spec = spec_of(lines(tmp_path, [row]))
            (opened,) = open_sources(spec.data)
            (found,) = encoder_for(chat_of(tokenizer), spec.data).documents(opened, 0, 1)
            ((ids, _),) = found.documents
            assert (ids[0], ids.tolist().count(bos)) == (bos, 1)
