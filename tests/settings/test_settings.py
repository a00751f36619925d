"""The user's settings file: what is wrong in it is named and the default holds; changes keep the
rest of it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.folders import settings_file
from so_tui.settings import Settings
from so_tui.settings_file import LARGEST_BYTES, change_settings, load_settings
from so_tui.spec.errors import InputError
from tests.support.schemas import valid

COMMENTED = """\
# of mine
[screen]  # how it looks
theme = "so-tui-light"  # by day
"""


def written(text: str | bytes, mode: int = 0o600) -> Path:
    path = settings_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def codes() -> list[tuple[str, str]]:
    return [(problem.code, problem.field) for problem in load_settings().problems]


def is_not_used() -> bool:
    """Return whether the file counts for nothing, since it is not the user's own."""
    unused = load_settings().settings == Settings()
    return unused and codes() == [("settings-not-own", "settings")]


def test_without_a_file_the_defaults_hold() -> None:
    assert (load_settings().settings, codes()) == (Settings(), [])


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("screen = 3", "not-a-section", "screen"),
        ("[screens]", "unknown-key", "screens"),
        ("[screen]\nglyphs = 'bra'", "invalid-choice", "screen.glyphs"),
        ("[screen]\nglyph = 'ascii'", "unknown-key", "screen.glyph"),
        ("[alerts]\nstall_s = 1", "out-of-range", "alerts.stall_s"),
        ("[alerts]\nloss_above = nan", "not-finite", "alerts.loss_above"),
        ("[alerts]\ncommand = 'rm -rf /'", "wrong-type", "alerts.command"),
        ("[alerts]\ncommand = ['']", "invalid-content", "alerts.command"),
        ('[alerts]\ncommand = ["a\\u0000b"]', "invalid-content", "alerts.command"),
        ("[prometheus]\nfolder = 'relative'", "invalid-text", "prometheus.folder"),
    ],
)
def test_a_wrong_key_is_named_and_spoils_no_other(text: str, code: str, field: str) -> None:
    written(f"{text}\n[keys]\nstyle = 'vim'\n")
    found = load_settings().settings
    assert codes() == [(code, field)]
    assert found.keys.style == "vim"
    assert (found.alerts, found.prometheus) == (Settings().alerts, Settings().prometheus)


@pytest.mark.parametrize(
    "text",
    [
        b"[screen",
        b"\xff\xfe",
        b"a = 1\na = 2",
        b"a = " + b"[" * 2000,
        b"a." * 200 + b"b = 1",
        b"x" * (LARGEST_BYTES + 1),
    ],
    ids=["torn", "no text", "twice", "deep", "long key", "large"],
)
def test_a_broken_file_is_one_message_and_is_never_overwritten(text: bytes) -> None:
    path = written(text)
    (problem,) = load_settings().problems
    assert problem.code in ("settings-invalid-toml", "settings-unreadable")
    assert load_settings().settings == Settings()
    with pytest.raises(InputError):
        change_settings({"screen.theme": "so-tui-light"})
    assert path.read_bytes() == text


def test_what_others_can_write_or_lead_to_is_not_used() -> None:
    path = written("[keys]\nstyle = 'vim'\n[alerts]\ncommand = ['planted']\n", mode=0o622)
    assert is_not_used()
    path.chmod(0o600)
    path.parent.chmod(0o777)  # somebody else could exchange the file
    assert is_not_used()
    with pytest.raises(InputError):
        change_settings({"keys.style": "standard"})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give the file to another user")
def test_another_users_file_is_not_used(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[alerts]\ncommand = ['planted']\n")
    os.chown(other, 65534, 65534)
    settings_file().parent.mkdir(parents=True)
    settings_file().symlink_to(other)
    assert is_not_used()


def test_a_command_that_others_can_read_is_not_used() -> None:
    written("[keys]\nstyle = 'vim'\n[alerts]\ncommand = ['x']\n", mode=0o644)
    found = load_settings().settings
    assert (found.keys.style, found.alerts.command) == ("vim", ())
    assert codes() == [("settings-readable", "settings")]


def test_changes_keep_comments_and_close_the_file(tmp_path: Path) -> None:
    kept_elsewhere = tmp_path / "dotfiles.toml"
    kept_elsewhere.write_text(COMMENTED)
    kept_elsewhere.chmod(0o644)
    settings_file().parent.mkdir(parents=True)
    settings_file().symlink_to(kept_elsewhere)
    change_settings({"screen.theme": "so-tui-contrast", "alerts.command": ["notify", "a b"]})
    text = kept_elsewhere.read_text()
    assert settings_file().is_symlink()
    assert text.startswith(COMMENTED.replace("so-tui-light", "so-tui-contrast"))
    assert stat.S_IMODE(kept_elsewhere.stat().st_mode) == 0o600
    assert load_settings().settings.alerts.command == ("notify", "a b")
    change_settings({"screen.theme": None, "runs.sort": "loss"})
    assert load_settings().settings.screen.theme == Settings().screen.theme
    with pytest.raises(InputError):
        change_settings({"screen.glyphs": "bra"})
    assert load_settings().settings.runs.sort == "loss"


def test_command_shows_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["alerts.stall_s=120"], [], ["--json"]):
        assert main(["settings", *words]) == 0
    out = capsys.readouterr().out
    assert "120.0" in out
    assert valid("settings", out[out.index("{\n") :])["settings"]["alerts"]["stall_s"] == 120
    assert main(["settings", "screen.glyph"]) == 2
    assert "screen.glyphs" in capsys.readouterr().err
    written("[screen]\nglyphs = 7\n")
    assert main(["settings", "screen.glyphs"]) == 2
    assert capsys.readouterr().out == "auto\n"


def test_command_takes_a_list_as_set_does() -> None:
    """But commas of an alert command divide nothing."""
    assert main(["settings", "alerts.on=ended,failed"]) == 0
    assert main(["settings", "alerts.command=notify-send -u low so-tui, done"]) == 2
    assert main(["settings", 'alerts.command=["notify", "a, b"]']) == 0
    alerts = load_settings().settings.alerts
    assert (alerts.on, alerts.command) == (("ended", "failed"), ("notify", "a, b"))


def test_every_command_says_that_the_file_is_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written("[screen\n")
    assert main(["presets"]) == 0
    output, errors = capsys.readouterr()
    assert "tiny" in output
    assert errors.count(str(path)) == 1
    assert main(["presets", "--json"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["settings"]) == 2
    assert capsys.readouterr().err.count(str(path)) == 1
