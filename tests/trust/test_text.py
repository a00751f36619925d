"""Text from elsewhere that is shown, copied or recorded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from so_tui.trust.text import (
    HIDDEN,
    brief_line,
    printable,
    printable_line,
    printable_source,
    quoted,
    recordable,
    same_cells,
    so_tui_command,
    without_credentials,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain Ω 漢字 \U0001f600\n\t", "plain Ω 漢字 \U0001f600\n\t"),
        ("\x1b]52;c;cm0=\x07", "\\x1b]52;c;cm0=\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("a\rb", "a\\rb"),
        ("\udcff", "\\udcff"),
        ("\U000e0041", "\\U000e0041"),
        ("a\xad\u180e\U0001bca0\U0001d173", "a\\xad\\u180e\\U0001bca0\\U0001d173"),
    ],
)
def test_control_sequences_are_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable_line(text) == shown.replace("\n", "\\n").replace("\t", "\\t")


@pytest.mark.parametrize(
    "argument", ["a", "a b", "$(id)", "it's", "a\nb", "\x1b]0;x\x07", "\udcff", "-rf; id", "\\x41'"]
)
def test_a_quoted_argument_arrives_in_a_shell_as_it_was(argument: str) -> None:
    command = quoted("printf", "%s", argument)
    assert command.isprintable()
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout == argument.encode(errors="surrogateescape")


def test_an_argument_that_looks_like_an_option_stays_an_argument() -> None:
    assert so_tui_command("logs", "a-run") == "so-tui logs a-run"
    command = so_tui_command("resume", "--to", "--set", "a.b=c d")
    assert command == "so-tui resume --set 'a.b=c d' -- --to"


def test_quick_test_of_text_passes_nothing_unsafe() -> None:
    every = map(chr, range(sys.maxunicode + 1))
    # The carriage return takes each past the quick test.
    unsafe = [one for one in every if printable_line(f"{one}\r") != f"{one}\\r"]
    assert len(unsafe) > 2000
    assert [character for character in unsafe if character.isprintable()] == []
    shown = {same_cells(character, lambda _: 1) for character in unsafe}
    assert shown == {"\ufffd"}


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


SECRETS = """
    SLURM_JWT HF_PAT HF_CREDS HF_HUB_PWD HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY SSH_AUTH_SOCK
    DS_TOKEN CUDA_SECRET SLURM_SPANK_TOKEN TORCH_HUB_TOKEN UCX_PASSWORD MKL_LICENCE_KEY
"""


def test_only_listed_variables_are_recorded() -> None:
    harmless = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "71", "SLURM_JOB_ID": "7", "HF_HOME": "/h"}
    assert recordable(harmless | dict.fromkeys(SECRETS.split(), "x")) == harmless
    url = "https://user:pw@mirror.example/hf?token=x#y"
    assert recordable({"HF_ENDPOINT": url, "LD_LIBRARY_PATH": "x" * 9999}) == {
        "HF_ENDPOINT": f"https://{HIDDEN}@mirror.example/hf?{HIDDEN}",
        "LD_LIBRARY_PATH": "x" * 4096,
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no URL: a@b.example?", "no URL: a@b.example?"),
        ("via http://u:p@proxy:8080 failed", "via http://HIDDEN@proxy:8080 failed"),
        (
            "git+https://token@host/x and s3://key:secret@bucket/y",
            "git+https://HIDDEN@host/x and s3://HIDDEN@bucket/y",
        ),
        ("'https://host/a?sig=1' 404", "'https://host/a?HIDDEN' 404"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("https://user:pa#ss?x@proxy:8080", "https://HIDDEN@proxy:8080"),
        ("https://user:p@ss@proxy:8080", "https://HIDDEN@proxy:8080"),
        ("s3://key:ab/cd+ef@bucket/y", "s3://HIDDEN@bucket/y"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "HIDDEN"),
        ("hf_model", "hf_model"),
    ],
)
def test_credentials_are_hidden_and_the_rest_stays(text: str, shown: str) -> None:
    assert without_credentials(text) == shown.replace("HIDDEN", HIDDEN)
