"""Where training starts and stops in what templates like those of the presets write, and worse."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from so_tui.spec import with_values
from so_tui.spec.run_spec import LossOn
from so_tui_trainer.data.chat import (
    Encoder,
    TemplateError,
    _encodes_segments_apart,
    _segments,
    chat_of,
)
from so_tui_trainer.data.rows import Message
from so_tui_trainer.data.tokens import load_tokenizer
from tests.support.launching import tiny
from tests.support.problems import refusal

ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' "
    "}}{% endfor %}" + ASK
)
# Keeps the thought of the newest answer only, and puts an empty one before an answer that has none;
# as Qwen3 does.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' "
    "%}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if "
    "'</think>' in m.content else '' %}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' + said }}{% else %}{{ "
    "said }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + ASK
)
# Asks with an opened thought that the turns themselves do not show.
OPENED = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
# A BOS token, headers of their own, trimmed contents; as Llama 3 does.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|header|>' + m.role + '<|/header|>\n\n' + "
    "m.content | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
# Nothing asks for an answer, roles must alternate, and no system message; as Mistral's and Gemma's
# do.
BRACKETS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content "
    "+ eos_token }}{% endif %}{% endfor %}"
)
# Another end for the newest answer than for earlier ones, and a channel before each; as gpt-oss
# does.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ "
    "'<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}{{ '<|start|>' + m.role + "
    "'<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# The same with what was thought and called, each in a message of its own, the content of a call
# left out; as gpt-oss does.
CALLS = (
    "{% for m in messages %}{% if m.thinking %}{{ "
    "'<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{{ '<|start|>assistant to=' + m.tool_calls[0].function.name + "
    "'<|message|>{' }}"
    "{{ m.tool_calls[0].function.arguments | items | join + '}<|call|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + "
    "m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}{{ '<|start|>' + m.role + "
    "'<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# Nothing ends an answer but the next turn; as GLM does.
OPEN_ENDED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for call in m.tool_calls or "
    "() %}"
    "{{ '\n[' + call.function.name + ']' }}{% endfor %}{% endfor %}{% if add_generation_prompt "
    "%}{{ '<|assistant|>' }}{% endif %}"
)
SPECIALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|header|>",
    "<|/header|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
]
TALK = (
    Message("user", "Add 2 and 3."),
    Message("assistant", "It is 5."),
    Message("user", "And 1?"),
    Message("assistant", "Then 6."),
)


def tokenizer_with(template: str, **tokens: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(tiny().model)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS, **tokens})
    tokenizer.chat_template = template
    return tokenizer


def trained(
    tokenizer: PreTrainedTokenizerBase, talk: tuple[Message, ...] = TALK, loss: LossOn = "assistant"
) -> list[str]:
    """Return the trained pieces, decoded from the tokens that a model gets."""
    encoder = Encoder(chat_of(tokenizer), loss, 512)
    ((ids, flags),) = encoder.encode([_segments(encoder.chat, talk, loss)])
    runs = groupby(zip(ids.tolist(), flags.tolist(), strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([token for token, _ in run])) for flag, run in runs if flag]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", ["It is 5.<|eos|>", "Then 6.<|eos|>"]),
        (CHATML, ["It is 5.<|im_end|>", "Then 6.<|im_end|>"]),
        (THINKING, ["It is 5.<|im_end|>", "<think>\n\n</think>\n\nThen 6.<|im_end|>"]),
        (OPENED, ["It is 5.<|im_end|>", "Then 6.<|im_end|>"]),
        (HEADERS, ["It is 5.<|im_end|>", "Then 6.<|im_end|>"]),
        (BRACKETS, [" It is 5.<|eos|>", " Then 6.<|eos|>"]),
        (
            CHANNELS,
            ["<|channel|>final<|message|>It is 5.", "<|channel|>final<|message|>Then 6.<|return|>"],
        ),
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


def test_dropped_thoughts_do_not_move_the_mask() -> None:
    thinks = tuple(
        m._replace(content=f"<think>\nhm\n</think>\n\n{m.content}") if m.role == "assistant" else m
        for m in TALK
    )
    assert trained(tokenizer_with(THINKING), thinks) == [
        "It is 5.<|im_end|>",
        "<think>\nhm\n</think>\n\nThen 6.<|im_end|>",
    ]


def test_contents_like_the_template_do_not_move_the_mask() -> None:
    talk = (
        Message("user", "Then 6."),
        Message("assistant", "  Then 6.\n"),
        Message("user", "assistant\n"),
        Message("assistant", "Then 6."),
    )
    assert trained(tokenizer_with(HEADERS), talk) == ["Then 6.<|im_end|>", "Then 6.<|im_end|>"]
    assert trained(tokenizer_with(CHATML), talk) == ["  Then 6.\n<|im_end|>", "Then 6.<|im_end|>"]


def test_what_is_not_an_answer_is_not_trained() -> None:
    tokenizer = tokenizer_with(CHATML)
    assert trained(tokenizer, (*TALK, Message("user", "Thanks."))) == [
        "It is 5.<|im_end|>",
        "Then 6.<|im_end|>",
    ]
    assert trained(tokenizer, (*TALK[:3], Message("assistant", " \n"))) == ["It is 5.<|im_end|>"]
    assert trained(tokenizer, (TALK[0], TALK[1]._replace(extra=(("weight", 0),)), *TALK[2:])) == [
        "Then 6.<|im_end|>"
    ]
    assert trained(tokenizer, TALK[:1]) == []
    assert trained(tokenizer, (Message("assistant", "Hello."), *TALK)) == [
        "Hello.<|im_end|>",
        "It is 5.<|im_end|>",
        "Then 6.<|im_end|>",
    ]


def test_tool_calls_are_answers_too() -> None:
    template = CHATML.replace(
        "m.content +", "m.content + (m.tool_calls | string if m.tool_calls else '') +"
    )
    talk = (
        *TALK[:1],
        Message("assistant", "", (("tool_calls", ["add"]),)),
        Message("tool", "5"),
        TALK[1],
    )
    assert trained(tokenizer_with(template), talk) == ["['add']<|im_end|>", "It is 5.<|im_end|>"]


def test_calls_are_trained_whole_without_their_content() -> None:
    call = (
        ("thinking", "hm"),
        ("tool_calls", [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]),
    )
    talk = (
        TALK[0],
        Message("assistant", "", call),
        Message("tool", "5"),
        Message("assistant", "It is 5."),
    )
    assert trained(tokenizer_with(CALLS), talk) == [
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=add<|message|>{('a', "
            "2)}<|call|>"
        ),
        "<|channel|>final<|message|>It is 5.<|return|>",
    ]
    headers = HEADERS.replace(
        "m.content | trim", "(m.tool_calls[0] | string if m.tool_calls else m.content | trim)"
    )
    assert trained(tokenizer_with(headers), talk) == [
        f"{call[1][1][0]}<|im_end|>",
        "It is 5.<|im_end|>",
    ]
    assert trained(tokenizer_with(OPEN_ENDED), talk) == ["\n[add]<|eos|>", "It is 5.<|eos|>"]


def test_a_thought_of_its_own_is_trained_with_its_answer() -> None:
    talk = (*TALK[:3], Message("assistant", "Then 6.", (("thinking", "hm"),)))
    assert trained(tokenizer_with(CALLS), talk) == [
        "<|channel|>final<|message|>It is 5.",
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|"
            ">Then 6.<|return|>"
        ),
    ]


def test_calls_that_the_layout_does_not_write_are_no_answers() -> None:
    talk = (
        *TALK[:1],
        Message("assistant", "", (("tool_calls", ["add"]),)),
        Message("tool", "5"),
        TALK[1],
    )
    assert trained(tokenizer_with(CHATML), talk) == ["It is 5.<|im_end|>"]
    assert trained(tokenizer_with(""), talk) == ["It is 5.<|eos|>"]
    assert trained(tokenizer_with(CHATML), talk[:2], loss="all") == []


def test_a_template_gets_the_tools_and_the_mask_does_not_mind() -> None:
    template = (
        "{% if tools %}{{ '<|header|>' + tools | map(attribute='name') | join + '<|/header|>' }}{% "
        "endif %}"
    )
    talk = (Message("tools", "", (("tools", [{"name": "add"}]),)), *TALK)
    for rest in (CHATML, BRACKETS):
        tokenizer = tokenizer_with(template + rest)
        parts = _segments(chat_of(tokenizer), talk)
        assert "".join(part.text for part in parts).startswith("<|header|>add<|/header|>")
        assert trained(tokenizer, talk) == trained(tokenizer)
    assert trained(tokenizer_with(""), talk) == trained(tokenizer_with(""))


def test_a_stop_token_that_the_data_has_already_is_trained_once() -> None:
    said = (TALK[0], Message("assistant", "It is 5.<|im_end|>\n"))
    assert trained(tokenizer_with(CHATML), said) == ["It is 5.<|im_end|>"]
    assert trained(tokenizer_with(""), (TALK[0], Message("assistant", "It is 5.<|eos|>"))) == [
        "It is 5.<|eos|>"
    ]


def test_an_end_of_text_behind_the_stop_token_is_trained() -> None:
    tokenizer = tokenizer_with(
        CHATML.replace("<|im_end|>\n", "<|end|><|im_end|>"), eos_token="<|im_end|>"
    )
    assert trained(tokenizer) == ["It is 5.<|end|><|im_end|>", "Then 6.<|end|><|im_end|>"]
    assert not chat_of(tokenizer).warnings
    at_the_end = tokenizer_with(
        CHATML.replace("<|im_end|>\n' }}", "<|im_end|>' }}")
        + "{% if not add_generation_prompt %}<|eos|>{% endif %}"
    )
    assert trained(at_the_end) == ["It is 5.<|im_end|>", "Then 6.<|im_end|><|eos|>"]
    assert (
        trained(at_the_end, (TALK[0], Message("assistant", "", (("tool_calls", ["add"]),)))) == []
    )


def test_a_stop_token_that_is_not_special_is_warned_of() -> None:
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>", "<|over|>"))
    assert trained(tokenizer) == ["It is 5.<|eos|>", "Then 6.<|eos|>"]
    (warning,) = chat_of(tokenizer).warnings
    assert "<|over|>" in warning
    assert "not a special token" in warning


def test_another_stop_token_than_the_end_of_text_is_told() -> None:
    (warning,) = chat_of(tokenizer_with(CHATML)).warnings
    assert "<|im_end|>" in warning
    assert "<|eos|>" in warning
    assert not chat_of(tokenizer_with(CHATML, eos_token="<|im_end|>")).warnings


def test_without_an_end_token_there_is_no_training() -> None:
    for template in ("", CHATML.replace("<|im_end|>", "")):
        tokenizer = tokenizer_with(template)
        tokenizer.eos_token = None
        problem = refusal(lambda tokenizer=tokenizer: chat_of(tokenizer))  # type: ignore[misc]
        assert (problem.code, problem.field) == ("tokenizer-no-end-token", "model.tokenizer")


def test_a_conversation_that_the_template_refuses_says_why() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        _segments(chat_of(tokenizer_with(BRACKETS)), (Message("system", "Be kind."), *TALK))


def test_tokenizers_with_leading_spaces_get_texts_whole() -> None:
    words = {
        word: index
        for index, word in enumerate(
            ["<unk>", "</s>", "▁It", "▁is", "▁5.", "▁[INST]", "▁Add", "▁[/INST]", "▁And"]
        )
    }
    backend: Any = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", chat_template=BRACKETS
    )
    assert not _encodes_segments_apart(tokenizer)
    assert _encodes_segments_apart(load_tokenizer(tiny().model))
    talk = (
        Message("user", "Add"),
        Message("assistant", "It is 5."),
        Message("user", "And"),
        Message("assistant", "5. is"),
    )
    encoder = Encoder(chat_of(tokenizer), "assistant", 64)
    ((ids, flags),) = encoder.encode([_segments(encoder.chat, talk)])
    assert (
        ids.tolist()
        == tokenizer("[INST] Add [/INST] It is 5.</s>[INST] And [/INST] 5. is</s>")["input_ids"]
    )
    trained = tokenizer.convert_ids_to_tokens(ids[flags].tolist())
    assert trained == ["▁It", "▁is", "▁5.", "</s>", "▁5.", "▁is", "</s>"]


def test_spaces_outside_of_token_spans_are_trained() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["</s>", *alphabet, "ĠĠ"])}
    backend: Any = Tokenizer(models.BPE(words, [("Ġ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, eos_token="</s>", chat_template=BRACKETS)
    assert not _encodes_segments_apart(tokenizer)
    answer = "if x:\n    ünd  😀 = 1 "
    talk = (
        Message("user", "Code ,  please "),
        Message("assistant", answer),
        Message("user", "And"),
        Message("assistant", "  ?"),
    )
    encoder = Encoder(chat_of(tokenizer), "assistant", 256)
    ((ids, flags),) = encoder.encode([_segments(encoder.chat, talk)])
    assert tokenizer.decode(ids[flags]) == f" {answer}</s>   ?</s>"
    assert tokenizer.decode(ids[~flags]) == " [INST] Code ,  please  [/INST] [INST] And [/INST]"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    spec = with_values(tiny(), {"model.tokenizer": str(tmp_path)})
    problem = refusal(lambda: load_tokenizer(spec.model))
    assert (problem.code, problem.field, problem.value) == (
        "tokenizer-files-missing",
        "model.tokenizer",
        str(tmp_path),
    )
