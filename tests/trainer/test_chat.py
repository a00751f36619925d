"""Where training starts and stops in what templates like those of the presets write, and worse."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from so_tui.spec.run_spec import LossOn
from so_tui_trainer.data.chat import TemplateError, chat_of
from so_tui_trainer.data.encoder import Encoder, _encodes_segments_apart
from so_tui_trainer.data.spans import documents_of
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.data.turns import Conversation, Message
from tests.support.launching import tiny
from tests.support.problems import refusal

TEMPLATES = {
    path.stem: path.read_text()
    for path in (Path(__file__).parents[1] / "data" / "chat_templates").iterdir()
}
CHATML, HEADERS, BRACKETS = (TEMPLATES[name] for name in ("chatml", "headers", "brackets"))
CHANNELS, THINKING = TEMPLATES["channels"], TEMPLATES["thinking"]
SPECIALS = ["im_start", "im_end", "header", "/header", "start", "end", "return", "channel"]


def ask(text: str) -> Message:
    return Message("user", text)


def say(text: str, **extra: object) -> Message:
    return Message("assistant", text, tuple(extra.items()))


QUESTION, FIVE, _, SIX = TALK = (
    ask("Add 2 and 3."),
    say("It is 5."),
    ask("And 1?"),
    say("Then 6."),
)
TWO = ["It is 5.<|im_end|>", "Then 6.<|im_end|>"]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = (QUESTION, say("", thinking="hm", tool_calls=[CALL]), Message("tool", "5"), FIVE)
NAMING = (QUESTION, say("", tool_calls=["add"]), Message("tool", "5"), FIVE)
BARE = {"type": "function", "function": {"name": "add", "arguments": {}}}
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


def tokenizer_with(template: str, **tokens: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(tiny().model)
    specials = [f"<|{name}|>" for name in (*SPECIALS, "message", "call")]
    tokenizer.add_special_tokens({"additional_special_tokens": specials, **tokens})
    tokenizer.chat_template = template
    return tokenizer


def trained(
    tokenizer: PreTrainedTokenizerBase, talk: Conversation = TALK, loss: LossOn = "assistant"
) -> list[str]:
    """Return the trained pieces, decoded from the tokens that a model gets."""
    encoder = Encoder(chat_of(tokenizer), loss, 512)
    found = []
    for ids, flags in encoder.encode(documents_of(encoder.chat, talk, loss).documents):
        runs = groupby(zip(ids.tolist(), flags.tolist(), strict=True), key=lambda pair: pair[1])
        found += [str(tokenizer.decode([token for token, _ in run])) for flag, run in runs if flag]
    return found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", ["It is 5.<|eos|>", "Then 6.<|eos|>"]),
        (CHATML, ["It is 5.<|im_end|>", "Then 6.<|im_end|>"]),
        # Leaves out earlier thoughts: each answer is last in a document of its own.
        (THINKING, [f"<think>\n\n</think>\n\n{said}" for said in TWO]),
        # Asks with an opened thought that the turns themselves do not show.
        (
            CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"),
            [f"\n</think>\n\n{said}" for said in TWO],
        ),
        (HEADERS, ["It is 5.<|im_end|>", "Then 6.<|im_end|>"]),
        (BRACKETS, [" It is 5.<|eos|>", " Then 6.<|eos|>"]),
        (CHANNELS, [f"{FINAL}It is 5.", f"{FINAL}Then 6.<|return|>"]),
    ],
    ids=["none", "chatml", "thinking", "opened", "headers", "brackets", "channels"],
)
def test_answers_are_trained_up_to_their_stop_token(template: str, expected: list[str]) -> None:
    tokenizer = tokenizer_with(template)
    assert trained(tokenizer) == expected
    assert trained(tokenizer, loss="last-turn") == expected[-1:]
    if template:
        assert trained(tokenizer, loss="all") == [
            tokenizer.apply_chat_template([m._asdict() for m in TALK], tokenize=False)
        ]


THOUGHTS = tuple(
    message._replace(content=f"<think>\nhm\n</think>\n\n{message.content}")
    if message.role == "assistant"
    else message
    for message in TALK
)
ECHOES = (ask("Then 6."), say("  Then 6.\n"), ask("assistant\n"), SIX)
WITH_CALLS = CHATML.replace(
    "m.content +", "m.content + (m.tool_calls | string if m.tool_calls else '') +"
)
ONLY_CALLS = HEADERS.replace(
    "m.content | trim", "(m.tool_calls[0] | string if m.tool_calls else m.content | trim)"
)
ENDS_TEXT = (
    CHATML.replace("<|im_end|>\\n", "<|im_end|>")
    + "{% if not add_generation_prompt %}<|eos|>{% endif %}"
)
CONVERSATIONS: dict[str, tuple[str, Conversation, list[str]]] = {
    "dropped thoughts": (
        THINKING,
        THOUGHTS,
        [f"<think>\nhm\n</think>\n\n{said}" for said in TWO],
    ),
    "echoes, trimmed": (HEADERS, ECHOES, ["Then 6.<|im_end|>", "Then 6.<|im_end|>"]),
    "echoes": (CHATML, ECHOES, ["  Then 6.\n<|im_end|>", "Then 6.<|im_end|>"]),
    "last a question": (CHATML, (*TALK, ask("Thanks.")), TWO),
    "last an empty answer": (CHATML, (*TALK[:3], say(" \n")), TWO[:1]),
    "a weight of 0": (CHATML, (QUESTION, say("It is 5.", weight=0), *TALK[2:]), TWO[1:]),
    "no answer": (CHATML, TALK[:1], []),
    "first an answer": (CHATML, (say("Hello."), *TALK), ["Hello.<|im_end|>", *TWO]),
    "a call": (WITH_CALLS, NAMING, ["['add']<|im_end|>", "It is 5.<|im_end|>"]),
    "a call in a message of its own": (
        CHANNELS,
        CALLING,
        [f"{ANALYSIS} to=add<|message|>{{('a', 2)}}<|call|>", f"{FINAL}It is 5.<|return|>"],
    ),
    "a call without its content": (
        ONLY_CALLS,
        CALLING,
        [f"{CALL}<|im_end|>", "It is 5.<|im_end|>"],
    ),
    "a call that nothing ends": (
        TEMPLATES["open_ended"],
        (QUESTION, say("", tool_calls=[BARE]), *NAMING[2:]),
        ["\n[add]<|eos|>", "It is 5.<|eos|>"],
    ),
    "a thought of its own": (
        CHANNELS,
        (*TALK[:3], say("Then 6.", thinking="hm")),
        [f"{FINAL}It is 5.", f"{ANALYSIS}{FINAL}Then 6.<|return|>"],
    ),
    "a call that is not written": (CHATML, NAMING, TWO[:1]),
    "a call without a template": ("", NAMING, ["It is 5.<|eos|>"]),
    "a stop token in the data": (CHATML, (QUESTION, say("It is 5.<|im_end|>\n")), TWO[:1]),
    "an end of text in the data": ("", (QUESTION, say("It is 5.<|eos|>")), ["It is 5.<|eos|>"]),
    "an end of text at the end": (
        ENDS_TEXT,
        TALK,
        ["It is 5.<|im_end|>", "Then 6.<|im_end|><|eos|>"],
    ),
    "an end of text behind nothing": (ENDS_TEXT, NAMING[:2], []),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_only_what_the_assistant_says_is_trained(case: str) -> None:
    template, talk, expected = CONVERSATIONS[case]
    assert trained(tokenizer_with(template), talk) == expected


def test_a_call_that_is_not_written_leaves_nothing_to_train() -> None:
    assert trained(tokenizer_with(CHATML), NAMING[:2], loss="all") == []


def test_a_template_gets_the_tools_and_the_mask_does_not_mind() -> None:
    template = "{% if tools %}<|header|>{{ tools[0].name }}<|/header|>{% endif %}"
    talk = (Message("tools", "", (("tools", [{"name": "add"}]),)), *TALK)
    for rest in (CHATML, BRACKETS):
        tokenizer = tokenizer_with(template + rest)
        (parts,) = documents_of(chat_of(tokenizer), talk).documents
        assert "".join(part.text for part in parts).startswith("<|header|>add<|/header|>")
        assert trained(tokenizer, talk) == trained(tokenizer)
    assert trained(tokenizer_with(""), talk) == trained(tokenizer_with(""))


def test_an_end_of_text_behind_the_stop_token_is_trained() -> None:
    both = CHATML.replace("<|im_end|>\\n", "<|end|><|im_end|>")
    tokenizer = tokenizer_with(both, eos_token="<|im_end|>")
    assert trained(tokenizer) == ["It is 5.<|end|><|im_end|>", "Then 6.<|end|><|im_end|>"]
    assert not chat_of(tokenizer).warnings


def test_odd_stop_tokens_are_warned_of() -> None:
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>", "<|over|>"))
    assert trained(tokenizer) == ["It is 5.<|eos|>", "Then 6.<|eos|>"]
    (not_special,) = chat_of(tokenizer).warnings
    assert "<|over|>" in not_special
    (not_the_end,) = chat_of(tokenizer_with(CHATML)).warnings
    assert "<|im_end|>" in not_the_end
    assert "<|eos|>" in not_the_end
    assert not chat_of(tokenizer_with(CHATML, eos_token="<|im_end|>")).warnings


@pytest.mark.parametrize("template", ["", CHATML.replace("<|im_end|>", "")])
def test_without_an_end_token_there_is_no_training(template: str) -> None:
    tokenizer = tokenizer_with(template)
    tokenizer.eos_token = None
    problem = refusal(lambda: chat_of(tokenizer))
    assert (problem.code, problem.field) == ("tokenizer-no-end-token", "model.tokenizer")


def test_a_conversation_that_the_template_refuses_says_why() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        documents_of(chat_of(tokenizer_with(BRACKETS)), (Message("system", "Be kind."), *TALK))


def whole_texts(backend: Any, **tokens: str) -> Any:
    """Return a tokenizer for BRACKETS that puts a space before every text."""
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, eos_token="</s>", chat_template=BRACKETS, **tokens)
    assert not _encodes_segments_apart(tokenizer)
    return tokenizer


def encoded(tokenizer: Any, *talk: Message) -> Any:
    encoder = Encoder(chat_of(tokenizer), "assistant", 256)
    (tokens,) = encoder.encode(documents_of(encoder.chat, talk).documents)
    return tokens


def test_tokenizers_with_leading_spaces_get_texts_whole() -> None:
    words = ["<unk>", "</s>", "▁It", "▁is", "▁5.", "▁[INST]", "▁Add", "▁[/INST]", "▁And"]
    backend: Any = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = whole_texts(backend, unk_token="<unk>")
    assert _encodes_segments_apart(load_tokenizer(tiny().model))
    ids, flags = encoded(tokenizer, ask("Add"), say("It is 5."), ask("And"), say("5. is"))
    text = "[INST] Add [/INST] It is 5.</s>[INST] And [/INST] 5. is</s>"
    assert ids.tolist() == tokenizer(text)["input_ids"]
    answers = ["▁It", "▁is", "▁5.", "</s>", "▁5.", "▁is", "</s>"]
    assert tokenizer.convert_ids_to_tokens(ids[flags].tolist()) == answers


def test_spaces_outside_of_token_spans_are_trained() -> None:
    words = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    backend: Any = Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [("Ġ", "Ġ")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    tokenizer = whole_texts(backend)
    answer = "if x:\n    ünd  😀 = 1 "
    ids, flags = encoded(tokenizer, ask("Code ,  please "), say(answer), ask("And"), say("  ?"))
    assert tokenizer.decode(ids[flags]) == f" {answer}</s>   ?</s>"
    assert tokenizer.decode(ids[~flags]) == " [INST] Code ,  please  [/INST] [INST] And [/INST]"
