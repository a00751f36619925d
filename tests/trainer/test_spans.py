"""Which tokens are trained in what context, for templates that leave out, move or open things."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from so_tui.spec.run_spec import LossOn
from so_tui_trainer.data.chat import Chat, TemplateError, chat_of
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
    assert "message 3" in written.unproven


def test_a_system_text_that_the_question_has_too_is_still_missed() -> None:
    talk = (SYSTEM, ask("Be brief. Be kind."), say("Hello."))
    silent = PLAIN.replace("in messages", "in messages[1:]")
    assert write(silent, talk).kinds == {"system-dropped"}
    assert write(PLAIN, talk).kinds == set()


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
