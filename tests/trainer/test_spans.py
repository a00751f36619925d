"""Which tokens are trained in what context, for templates that leave out, move or open things."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from so_tui.spec.run_spec import LossOn
from so_tui_trainer.data.chat import Chat, TemplateError, chat_of
from so_tui_trainer.data.encoder import Encoder
from so_tui_trainer.data.spans import Written, calls_of, documents_of, reasoning_of, text_of
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.data.turns import Conversation, Message
from tests.support.launching import tiny

SPECIALS = ("<|a|>", "<|b|>", "<|end|>", "<|user|>", "<|bot|>", "<|tool|>", "<|call|>", "</call>")
ASK = "{% if add_generation_prompt %}<|bot|>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}"
)
TOOLS = "{% if tools %}<|a|>{{ tools | tojson }}{% endif %}"


def turns(bot: str, others: str = "<|{{ m.role }}|>{{ m.content }}<|end|>") -> str:
    """Return a template that writes the assistant's turns so."""
    return (
        f"{TOOLS}{{% for m in messages %}}{{% if m.role == 'assistant' %}}<|bot|>{bot}"
        f"{{% else %}}{others}{{% endif %}}{{% endfor %}}{ASK}"
    )


THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CHANNEL = turns("{% if m.thinking %}<|a|>{{ m.thinking }}<|b|>{% endif %}{{ m.content }}<|end|>")
LAST_THOUGHT = THOUGHT.replace("{% if m", "{% if loop.last and m")
PLAIN = turns(f"{THOUGHT}{{{{ m.content }}}}{CALLS}<|end|>")
LAST = turns(f"{LAST_THOUGHT}{{{{ m.content }}}}{CALLS}<|end|>")
SWITCH = LAST.replace(
    "<|bot|>{% endif %}",
    "<|bot|>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
)
OPENED = turns("{{ m.content }}<|end|>").replace(ASK, ASK.replace("<|bot|>", "<|bot|><think>\n"))
EMPTY = turns("<think></think>{{ m.content }}<|end|>")
ROLE_ENDS = turns(f"{{{{ m.content }}}}{CALLS}", "<|{{ m.role }}|>{{ m.content }}")
OPEN = turns("{{ m.content }}{% if not loop.last %}<|end|>{% endif %}")
TWO_ENDS = turns(
    f"{{% if m.tool_calls %}}{CALLS}<|b|><|end|>{{% else %}}{{{{ m.content }}}}<|a|><|end|>"
    "{% endif %}"
)
MOVED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|end|>"
    "{% elif m.role == 'user' %}<|user|>{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }}<|bot|>{% endif %}{% endfor %}"
)
EMPTY_LAST = (
    "{% set at = namespace(last=0) %}{% for m in messages if m.role == 'assistant' and not "
    "m.tool_calls %}{% set at.last = m.content %}{% endfor %}"
) + turns(
    "<think>{% if m.tool_calls or m.content != at.last %}{{ m.reasoning_content }}{% endif %}"
    f"</think>{{{{ m.content }}}}{CALLS}<|end|>"
)
ROLE_ENDS_APART = turns(
    "{{ '<think>' if add_generation_prompt is undefined }}</think>{{ m.content }}" + CALLS,
    "<|{{ m.role }}|>{% if m.role == 'tool' %}<|b|>{% endif %}{{ m.content }}",
).replace("<|bot|>{% endif %}", "<|bot|>{{ '</think>' if enable_thinking is false }}{% endif %}")
LINED = turns(
    "{% if m.tool_calls %}<|a|><|b|><|call|>[\n{% for c in m.tool_calls %}    "
    '{"id": "{{ loop.index0 }}", "name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}\n{% endfor %}]</call><|end|>{% else %}"
    "{{ m.content }}<|end|>{% endif %}"
)
NO_TOOLS = turns("{{ m.content }}<|end|>").replace(TOOLS, "")


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(tiny().model)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    tokenizer.chat_template = template
    return tokenizer


def ask(text: str) -> Message:
    return Message("user", text)


def say(text: str, **extra: object) -> Message:
    return Message("assistant", text, tuple(extra.items()))


def call(name: str = "weather", /, **arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def shown(written: Written) -> list[str]:
    """Return documents with their trained parts in marks."""
    return [
        "".join(f"«{part.text}»" if part.trained else part.text for part in parts if part.text)
        for parts in written.documents
    ]


def write(template: str, talk: Conversation, loss: LossOn = "assistant", **more: Any) -> Written:
    return documents_of(chat_of(tokenizer_of(template)), talk, loss, **more)


SYSTEM = Message("system", "Be brief.")
HELLO = (ask("Hi"), say("Hello."))
AGAIN = (*HELLO, ask("More"), say("Bye."))
THINKING = (ask("2+2"), say("4.", reasoning_content="two twos"))
TOOL = Message("tools", "", (("tools", [{"type": "function", "function": {"name": "weather"}}]),))
ROME = (TOOL, ask("Rome?"), say("", tool_calls=[call(city="Rome")]), Message("tool", "sun"))
RAIN = (*ROME, say("It is sunny."))
BESIDE = (*ROME[:2], say("Let me see.", tool_calls=[call(city="Rome")]), *RAIN[3:])
CALLING = {"tool_calls": [call(city="Rome")]}
THOUGHT_OF = THINKING[1]
CALL = '<|call|>weather {"city": "Rome"}</call>'
HEAD = '<|a|>[{"type": "function", "function": {"name": "weather"}}]'
CASES: dict[str, tuple[str, Conversation, list[str], set[str]]] = {
    "reasoning of each answer": (
        PLAIN,
        (*THINKING, *HELLO),
        [
            "<|user|>2+2<|end|><|bot|>«<think>two twos</think>4.<|end|>»"
            "<|user|>Hi<|end|><|bot|>«Hello.<|end|>»"
        ],
        set(),
    ),
    "reasoning of the last answer alone": (
        LAST,
        (*THINKING, ask("And 1?"), say("5.", reasoning_content="one more")),
        [
            "<|user|>2+2<|end|><|bot|>«<think>two twos</think>4.<|end|>»",
            "<|user|>2+2<|end|><|bot|>4.<|end|><|user|>And 1?<|end|><|bot|>"
            "«<think>one more</think>5.<|end|>»",
        ],
        {"turns-split"},
    ),
    "asked not to think": (
        SWITCH,
        HELLO,
        ["<|user|>Hi<|end|><|bot|><think></think>«Hello.<|end|>»"],
        set(),
    ),
    "a thought in the content, which the prompt opens": (
        OPENED.replace("{{ m.content }}<|end|>", "{{ m.content.split('</think>')[-1] }}<|end|>"),
        (ask("2+2"), say("<think>\ntwo twos\n</think>\n\n4.")),
        ["<|user|>2+2<|end|><|bot|><think>\n«two twos\n</think>\n\n4.<|end|>»"],
        {"reasoning-composed"},
    ),
    "a thought in the content, which the template would take for text": (
        CHANNEL,
        (ask("2+2"), say("<think>\ntwo twos\n</think>\n\n4."), *HELLO),
        [
            "<|user|>2+2<|end|><|bot|>«<|a|>two twos<|b|>4.<|end|>»"
            "<|user|>Hi<|end|><|bot|>«Hello.<|end|>»"
        ],
        set(),
    ),
    "a thought in the content whose opening mark is missing": (
        PLAIN,
        (ask("2+2"), say("two twos</think>4.")),
        ["<|user|>2+2<|end|><|bot|>«<think>two twos</think>4.<|end|>»"],
        set(),
    ),
    "a thought in the content without the line that the prompt has": (
        OPENED,
        (ask("2+2"), say("<think>two twos</think>4.")),
        ["<|user|>2+2<|end|><|bot|><think>\n«two twos</think>4.<|end|>»"],
        set(),
    ),
    "an empty thought where the prompt asks for none": (
        SWITCH,
        (ask("2+2"), say("<think>\n\n</think>\n\n4.")),
        ["<|user|>2+2<|end|><|bot|><think></think>«4.<|end|>»"],
        set(),
    ),
    "reasoning under two keys that say the same": (
        PLAIN,
        (ask("2+2"), say("4.", reasoning="two twos", reasoning_content="two twos")),
        ["<|user|>2+2<|end|><|bot|>«<think>two twos</think>4.<|end|>»"],
        set(),
    ),
    "the assistant speaks first": (
        SWITCH,
        (say("Hello."), *HELLO),
        [
            "<|bot|><think></think>«Hello.<|end|>»",
            "<|bot|>Hello.<|end|><|user|>Hi<|end|><|bot|><think></think>«Hello.<|end|>»",
        ],
        {"turns-split"},
    ),
    "a thought that the prompt opens and nobody thinks": (
        OPENED,
        HELLO,
        ["<|user|>Hi<|end|><|bot|><think>\n«\n</think>\n\nHello.<|end|>»"],
        set(),
    ),
    "a thought that the template empties": (
        EMPTY,
        THINKING,
        ["<|user|>2+2<|end|><|bot|>«<think>two twos</think>4.<|end|>»"],
        {"reasoning-composed"},
    ),
    "reasoning that no template knows": (
        NO_TOOLS,
        THINKING,
        ["<|user|>2+2<|end|><|bot|>«4.<|end|>»"],
        {"reasoning-dropped"},
    ),
    "the next role ends an answer": (
        ROLE_ENDS,
        (*AGAIN[:2], *RAIN[1:]),
        [
            "<|user|>Hi<|bot|>«Hello.<|user|>»Rome?<|bot|>"
            f"«{CALL}<|tool|>»sun<|bot|>«It is sunny.<|user|>»"
        ],
        set(),
    ),
    "all turns but the last are closed": (
        OPEN,
        AGAIN,
        ["<|user|>Hi<|end|><|bot|>«Hello.<|end|>»<|user|>More<|end|><|bot|>«Bye.<|end|>»"],
        set(),
    ),
    "calls and answers end differently": (
        TWO_ENDS,
        RAIN,
        [
            f"{HEAD}<|user|>Rome?<|end|><|bot|>«{CALL}<|b|><|end|>»"
            "<|tool|>sun<|end|><|bot|>«It is sunny.<|a|><|end|>»"
        ],
        set(),
    ),
    "text beside a call that is left out": (
        TWO_ENDS,
        BESIDE,
        [
            f"{HEAD}<|user|>Rome?<|end|><|bot|>«{CALL}<|b|><|end|>»"
            "<|tool|>sun<|end|><|bot|>«It is sunny.<|a|><|end|>»"
        ],
        {"text-dropped"},
    ),
    "a thought that the template empties behind calls alone": (
        EMPTY_LAST,
        (*ROME[:2], say("", reasoning_content="ask", **CALLING), ROME[3], THOUGHT_OF),
        [
            f"{HEAD}<|user|>Rome?<|end|><|bot|>«<think>ask</think>{CALL}<|end|>»"
            "<|tool|>sun<|end|><|bot|>«<think>two twos</think>4.<|end|>»"
        ],
        {"reasoning-composed"},
    ),
    "calls of an earlier round, and two tokens at the next role": (
        ROLE_ENDS_APART,
        (*RAIN, *AGAIN[2:], *RAIN[1:]),
        [
            f"{HEAD}<|user|>Rome?<|bot|></think>«{CALL}<|tool|>»<|b|>sun<|bot|></think>"
            "«It is sunny.<|user|>»More<|bot|></think>«Bye.<|user|>»Rome?<|bot|></think>"
            f"«{CALL}<|tool|>»<|b|>sun<|bot|></think>«It is sunny.<|user|>»"
        ],
        set(),
    ),
    "a call over several lines": (
        LINED,
        RAIN,
        [
            f"{HEAD}<|user|>Rome?<|end|><|bot|>«<|a|><|b|><|call|>[\n    "
            '{"id": "0", "name": "weather", "parameters": {"city": "Rome"}}\n]</call><|end|>»'
            "<|tool|>sun<|end|><|bot|>«It is sunny.<|end|>»"
        ],
        set(),
    ),
    "the system's text stands in the last question": (
        MOVED,
        (SYSTEM, *AGAIN),
        [
            "<|user|>Be brief. Hi<|bot|>«Hello.<|end|>»",
            "<|user|>Hi<|bot|>Hello.<|end|><|user|>Be brief. More<|bot|>«Bye.<|end|>»",
        ],
        {"turns-split"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_context_and_answers_are_those_of_inference(case: str) -> None:
    template, talk, expected, kinds = CASES[case]
    written = write(template, talk)
    assert (shown(written), written.unproven) == (expected, "")
    assert written.kinds == kinds


def test_answers_that_change_later_may_be_context() -> None:
    template, talk, expected, _ = CASES["reasoning of the last answer alone"]
    written = write(template, talk, split=False)
    assert shown(written) == expected[1:]
    assert written.kinds == {"turns-context"}
    assert shown(write(template, talk, "last-turn")) == expected[1:]


BROKEN = {
    "reasoning in two places": (
        PLAIN,
        (ask("2+2"), say("<think>two twos</think>4.", reasoning_content="one and three")),
    ),
    "a thought that does not end": (PLAIN, (ask("2+2"), say("<think>two twos"))),
    "one of two equal questions": (
        PLAIN.replace("in messages", "in messages[:1] + messages[2:]"),
        (ask("Hi"), ask("Hi"), say("Hello.")),
    ),
    "no calls": (NO_TOOLS, RAIN),
    "the first of several calls": (
        PLAIN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        (*ROME[:2], say("", tool_calls=[call(city="Rome"), call(city="Oslo")])),
    ),
    "one of two equal calls": (
        PLAIN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        (*ROME[:2], say("", tool_calls=[call(city="Rome"), call(city="Rome")])),
    ),
    "no arguments": (PLAIN.replace("{{ c.function.arguments | tojson }}", ""), RAIN),
    "a doubled end": (PLAIN.replace("<|end|>", "<|end|><|end|>"), HELLO),
    "no answer": (turns(CALLS + "<|end|>"), RAIN),
    "no question": (turns("{{ m.content }}<|end|>", "<|{{ m.role }}|><|end|>"), HELLO),
    "turns in another order": (
        PLAIN.replace("in messages", "in (messages[2:4] + messages[:2] + messages[4:])"),
        (*AGAIN, ask("Last"), say("End.")),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_proven_is_said(case: str) -> None:
    template, talk = BROKEN[case]
    assert write(template, talk).unproven


def test_what_can_be_proven_beside_it_is_trained() -> None:
    written = write(NO_TOOLS, RAIN)
    assert shown(written) == [
        "<|user|>Rome?<|end|><|bot|><|end|><|tool|>sun<|end|><|bot|>«It is sunny.<|end|>»"
    ]
    assert written.kinds == {"calls-dropped", "tools-dropped"}
    assert "message 2" in written.unproven  # descriptions of tools are no message


ELSEWHERE: dict[str, tuple[str, Conversation, str]] = {
    "the system's text in a question": (
        turns(
            "{{ m.content }}<|end|>",
            "{% if m.role != 'system' %}<|user|>{{ m.content }}{% endif %}",
        ),
        (SYSTEM, ask("Be brief. Why?"), say("So.")),
        "system-dropped",
    ),
    "the system's text in the template": (
        turns(
            "{{ m.content }}<|end|>",
            "{% if m.role != 'system' %}<|user|>{{ m.content }}{% endif %}",
        ),
        (Message("system", "user"), *HELLO),
        "system-dropped",
    ),
    "a tool's name in a question": (
        NO_TOOLS,
        (TOOL, ask("How is the weather?"), say("Where?")),
        "tools-dropped",
    ),
    "a call in the description of its tool and a question": (
        PLAIN.replace("m.tool_calls or []", "(m.tool_calls or [] if loop.last else [])"),
        (TOOL, ask("Rome, which city?"), *RAIN[2:]),
        "calls-dropped",
    ),
    "a result in the answer before it": (
        turns(f"{{{{ m.content }}}}{CALLS}<|end|>", "<|user|>{{ m.content if m.role != 'tool' }}"),
        (*BESIDE[:3], Message("tool", "see"), say("It is sunny.")),
        "results-dropped",
    ),
    "a question in the answer before it": (
        turns("{{ m.content }}<|end|>", "<|user|>{{ m.content if loop.first }}"),
        (ask("Hi"), say("More or less."), ask("More"), say("Bye.")),
        "",
    ),
    "an argument in the text of its turn": (
        PLAIN.replace("{{ c.function.arguments | tojson }}", ""),
        (TOOL, ask("Where?"), say("The city is Rome.", tool_calls=[call(city="Rome")])),
        "",
    ),
    "a text in the template's marks": (
        turns(f"{CALLS}<|end|>"),
        (TOOL, ask("Where?"), say("call", tool_calls=[call(city="Rome")])),
        "text-dropped",
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_part_is_missed_where_its_words_stand_elsewhere(case: str) -> None:
    template, talk, kind = ELSEWHERE[case]
    written = write(template, talk)
    assert kind in written.kinds if kind else written.unproven
    assert "zqx" not in written.unproven + "".join(shown(written))


def test_a_template_that_looks_at_words_is_proven_too() -> None:
    template = PLAIN.replace("{{ m.content }}<|end|>", "{{ m.content }}<|end|>", 1).replace(
        "<|{{ m.role }}|>", "<|{{ m.role }}|>{{ '<|a|>' if m.content == 'Hello' }}"
    )
    written = write(template, (ask("Hello"), say("Hello")))
    assert shown(written) == ["<|user|><|a|>Hello<|end|><|bot|>«Hello<|end|>»"]


def test_text_that_a_call_has_too_is_still_missed() -> None:
    talk = (ask("Where?"), say("Rome", tool_calls=[call(city="Rome")]), *RAIN[3:])
    assert write(TWO_ENDS, talk).kinds == {"text-dropped"}
    assert write(PLAIN, talk).kinds == set()


def test_reasoning_that_the_answer_has_too_is_still_missed() -> None:
    talk = (ask("2+2"), say("4.", reasoning_content="4"))
    assert write(OPEN, talk).kinds == {"reasoning-dropped"}
    assert write(PLAIN, talk).kinds == set()


@pytest.mark.parametrize(
    "ending", ["<|end|>", "<|end|><|end|>", "{{ '' if loop.last else '<|end|>' }}"]
)
@pytest.mark.parametrize("lead", ["", "<|a|>", "<think></think>", "{{ '<|a|>' if loop.last }}"])
def test_one_rendering_serves_answers_of_text(
    lead: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(tokenizer_of(turns(f"{lead}{{{{ m.content }}}}{ending}")))
    talk = tuple(turn for n in range(9) for turn in (ask(f"{n}?"), say(f"It is {n}.")))
    slowly = documents_of(replace(chat, lead=None), talk)
    render = Mock(side_effect=chat.render)
    monkeypatch.setattr(Chat, "render", render)
    assert documents_of(chat, talk) == slowly
    if ending == "<|end|>" and "if" not in lead:
        assert render.call_count == len(talk) // 2 + 1


WORDS = st.sampled_from(
    ["Oslo", "hm <b>", 'say "so"', "back\\slash", "ümlaut 好", "two\nlines", "7"]
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "day"]),
    st.one_of(WORDS, st.integers(-9, 9), st.booleans(), st.lists(WORDS, max_size=2)),
    max_size=2,
)


@st.composite
def talks(draw: st.DrawFn) -> Conversation:
    """Draw a conversation: any turn may have any part."""
    found: list[Message] = [TOOL] if draw(st.booleans()) else []
    if draw(st.booleans()):
        found.append(Message("system", draw(WORDS)))
    for _ in range(draw(st.integers(1, 3))):
        found.append(ask(draw(WORDS)))
        thought = {"reasoning_content": draw(WORDS)} if draw(st.booleans()) else {}
        if draw(st.booleans()):
            calls = [
                call("weather", **given)
                for given in draw(st.lists(ARGUMENTS, min_size=1, max_size=2))
            ]
            beside = draw(WORDS) if draw(st.booleans()) else ""
            found.append(say(beside, tool_calls=calls, **thought))
            found += [Message("tool", draw(WORDS)) for _ in calls]
            thought = {}
        found.append(say(draw(WORDS), **thought))
    return tuple(found)


CHATS: dict[str, Chat] = {}
TEMPLATES = {
    "plain": PLAIN,
    "last": LAST,
    "switch": SWITCH,
    "opened": OPENED,
    "role": ROLE_ENDS,
    "two": TWO_ENDS,
    "moved": MOVED,
    "none": NO_TOOLS,
}


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(talk=talks())
def test_each_answer_has_its_context_and_all_of_its_parts(name: str, talk: Conversation) -> None:
    chat = CHATS.setdefault(name, chat_of(tokenizer_of(TEMPLATES[name])))
    try:
        written = documents_of(chat, talk)
    except TemplateError:
        return
    answers = [(at, turn) for at, turn in enumerate(talk) if turn.answers]
    spans = [
        ("".join(part.text for part in parts[:at]), parts[at].text)
        for parts in written.documents
        for at in range(len(parts))
        if parts[at].trained
    ]
    if not written.unproven:
        assert len(spans) == len(answers)
    prompts = {
        chat.render(talk[:at], ask=True, thinks=bool(reasoning_of(turn))): turn
        for at, turn in answers
    }
    for context, said in spans:
        turn = prompts[context]
        assert text_of(turn).strip() in said or "text-dropped" in written.kinds
        thought = reasoning_of(turn).strip()
        assert not thought or thought in said or "reasoning-dropped" in written.kinds
        assert said.count("<|call|>") == len(calls_of(turn))
        for one in calls_of(turn):
            for value in itertools.chain(*one["function"]["arguments"].items()):
                if isinstance(value, str):
                    assert value in said or json.dumps(value)[1:-1] in said or "\\u" in said


LINES = (
    "{% for m in messages %}<|{{ 'bot' if m.role == 'assistant' else m.role }}|>\n{{ m.content }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|bot|>\n{% endif %}"
)
STARTS = ("Hello.", "\n\nHello.", "  Hello.", "\n")


NINE = PLAIN.replace(
    "<|call|>{{ c", "<|call|>{{ raise_exception('nine') if c.id|length != 9 }}{{ c.id }} {{ c"
).replace(
    "<|{{ m.role }}|>",
    "<|{{ m.role }}|>{% if m.role == 'tool' %}"
    "{{ raise_exception('nine') if m.tool_call_id|length != 9 }}{{ m.tool_call_id }} {% endif %}",
)


def test_calls_are_given_the_ids_that_a_template_takes() -> None:
    calls = [call(city="Rome") | {"id": "call_7f"}, call(city="Oslo") | {"id": "call_80"}]
    results = [
        Message("tool", "snow", (("tool_call_id", "call_80"),)),
        Message("tool", "sun", (("tool_call_id", "call_7f"),)),
    ]
    for several, named in itertools.product((calls[:1], calls), (True, False)):
        own = several if named else [{**one, "id": None} for one in several]
        said = results[-len(own) :] if named else [Message("tool", "sun") for _ in own]
        written = write(NINE, (*ROME[:2], say("", tool_calls=own), *said, say("So.")))
        (document,) = shown(written)
        ids = re.findall(r"<\|call\|>([a-f0-9]{9}) ", document)
        answered = re.findall(r"<\|tool\|>([a-f0-9]{9}) ", document)
        assert answered == (ids[::-1] if named else ids)
        assert len(set(ids)) == len(own)
    kept = [call(city="Rome") | {"id": "Ab3456789"}]
    assert "<|call|>Ab3456789 " in shown(write(NINE, (*ROME[:2], say("", tool_calls=kept))))[0]


ADDED = {
    "none": (),
    "two line ends": (AddedToken("\n\n", normalized=False),),
    "an end that takes spaces": (AddedToken("<|end|>", special=True, rstrip=True),),
    "a role that takes spaces": (AddedToken("<|bot|>", special=True, rstrip=True),),
}


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("split", [True, False])
def test_ids_are_those_that_inference_has(split: bool, added: str) -> None:
    tokenizer = tokenizer_of(LINES)
    tokenizer.add_tokens([*ADDED[added]])
    talks = [
        (ask("Hi"), say(first), ask("\nMore"), say(second), ask("Last"), say(third))
        for first, second, third in itertools.product(STARTS, repeat=3)
    ]
    opened = Mock(conversations=lambda first, last: talks[first:last])
    for row in Encoder(chat_of(tokenizer), "assistant", 999, split).documents(opened, 0, 64):
        talk = talks[row.row - 1]
        answers = [at for at, turn in enumerate(talk) if turn.answers]
        texts = [(render_ids(tokenizer, talk[:at]), f"{talk[at].content}<|end|>") for at in answers]
        expected = [(prompt, tokenizer(text)["input_ids"]) for prompt, text in texts]
        found = [
            (ids[:start].tolist(), ids[start:end].tolist())
            for ids, trained in row.documents
            for start, end in runs(trained)
        ]
        assert all(pair in expected for pair in found)
        assert len(found) == len(answers) or (not split and row.counts.kinds)


def render_ids(tokenizer: PreTrainedTokenizerBase, talk: Conversation) -> list[int]:
    text = chat_of(tokenizer).render(talk, ask=True)
    return list(tokenizer(text)["input_ids"])


def runs(trained: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the first and the end of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
