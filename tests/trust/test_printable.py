from __future__ import annotations

import subprocess

import pytest

from so_tui.trust.printable import printable, printable_line, quoted


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


@pytest.mark.parametrize("argument", ["a", "a b", "$(id)", "it's", "a\nb", "\x1b]0;x\x07", "\udcff", "-rf; id", "\\x41'"])
def test_a_quoted_argument_arrives_in_a_shell_as_it_was(argument: str) -> None:
    command = quoted("printf", "%s", argument)
    assert command.isprintable()
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout == argument.encode(errors="surrogateescape")
