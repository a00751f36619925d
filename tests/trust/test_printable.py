from __future__ import annotations

import json
import subprocess
import sys

import pytest

from so_tui.trust.text import (
    brief_line,
    printable,
    printable_line,
    printable_source,
    quoted,
    same_cells,
    so_tui_command,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain Ω 漢字 \U0001f600", "plain Ω 漢字 \U0001f600"),
        ("\x1b]52;c;cm0=\x07", "\\x1b]52;c;cm0=\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("a\rb", "a\\rb"),
        ("\udcff", "\\udcff"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_control_sequences_are_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_line_has_no_breaks_and_a_text_keeps_them() -> None:
    assert printable("a\n\tb") == "a\n\tb"
    assert printable_line("a\n\tb") == "a\\n\\tb"


@pytest.mark.parametrize(
    "argument", ["a", "a b", "$(id)", "it's", "a\nb", "\x1b]0;x\x07", "\udcff", "-rf; id", "\\x41'"]
)
def test_a_quoted_argument_arrives_in_a_shell_as_it_was(argument: str) -> None:
    command = quoted("printf", "%s", argument)
    assert command.isprintable()
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout == argument.encode(errors="surrogateescape")


def test_quick_test_of_text_passes_nothing_unsafe() -> None:
    unsafe = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if printable_line(f"{chr(code)}\r") != f"{chr(code)}\\r"
    ]
    assert len(unsafe) > 2000
    assert [character for character in unsafe if character.isprintable()] == []
    assert [
        character for character in unsafe if same_cells(character, lambda _: 1) != "\ufffd"
    ] == []


def test_programs_read_back_the_value_of_a_text_in_json() -> None:
    text = "a\x7fb\x9bc\u202e\u2066"
    source = printable_source(json.dumps(text, ensure_ascii=False))
    assert source.isprintable()
    assert json.loads(source) == text


def test_a_brief_line_of_a_text_of_any_length_is_short() -> None:
    assert brief_line("short", 10) == "short"
    assert brief_line("x" * 1_000_000, 10) == "xxxxxxxxx…"
    assert brief_line("\x1b" * 1_000_000, 10) == "\\x1b\\x1b\\…"


def test_a_laid_out_line_has_as_many_cells_as_before() -> None:
    assert same_cells("a\x1bb\tc\u200b", lambda character: int(character == "\t")) == "ab\ufffdc"


def test_an_argument_that_looks_like_an_option_stays_an_argument() -> None:
    assert so_tui_command("logs", "a-run") == "so-tui logs a-run"
    assert (
        so_tui_command("resume", "--to", "--set", "a.b=c d")
        == "so-tui resume --set 'a.b=c d' -- --to"
    )
