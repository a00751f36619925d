"""Read and change ``settings.toml``, which only its owner may write.

Where it is wrong, that is reported and the default holds. The alerts' command decides what runs
in the user's name: it counts only if nobody else can even read the file.

Problem codes: settings-not-own: The file or its folder is another user's, or others can write
it. Nothing of it is used. settings-readable: Others can read the file, so the command in it is
not used. settings-unreadable, settings-invalid-toml: It cannot be read, is too large, or is not
TOML. Nothing of it is used. settings-not-writable: It cannot be written. A wrong key has the code
of one of a preset (``so_tui.spec.check``), and its default is used.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import settings_file
from so_tui.settings import Settings
from so_tui.spec.check import section_problems, write_atomic
from so_tui.spec.errors import InputError, Problem, shown
from so_tui.spec.keys import FieldInfo, fields_of
from so_tui.trust.decoding import Tree, decode_toml
from so_tui.trust.files import NotOwnError, distrust_of_folder, read_own
from so_tui.trust.text import quoted

LARGEST_BYTES = 1 << 16


class Loaded(Struct, frozen=True):
    """The settings in force, and what was wrong in the file."""

    settings: Settings = Settings()
    problems: tuple[Problem, ...] = ()


@cache
def setting_index() -> dict[str, FieldInfo]:
    """Return every setting by its dotted key, in the order of the schema."""
    return {info.path: info for info in fields_of(Settings)}


def load_settings() -> Loaded:
    """Return the settings of this user. A file that is missing, broken or somebody else's leaves
    the defaults; nothing is raised.
    """
    path = settings_file()
    try:
        content = _read(path)
        if content is None:
            return Loaded()
        found = _checked(decode_toml(content))
        others_can_read = stat.S_IMODE(path.stat().st_mode) & 0o077
    except InputError as error:
        return Loaded(problems=error.problems)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.DecodeError) as error:
        return Loaded(problems=(_not_toml(error),))
    except OSError:
        others_can_read = True
    return _without_secrets(found) if others_can_read else found


def _checked(tree: Tree) -> Loaded:
    """Return the settings of a parsed file: each key by itself, so that a wrong one spoils no
    other.
    """
    problems = [*section_problems(tree, Settings, setting_index())]
    wrong = {problem.field for problem in problems}
    good = {
        table: {key: given for key, given in keys.items() if f"{table}.{key}" not in wrong}
        for table, keys in tree.items()
        if table not in wrong
    }
    command = good.get("alerts", {}).get("command")
    if command and not command[0]:
        message, remedy = "names no program", "Give its name as the first argument."
        problems.append(
            Problem("invalid-content", "alerts.command", shown(command), message, remedy)
        )
        del good["alerts"]["command"]
    file = str(settings_file())
    named = tuple(replace(problem, file=file) for problem in problems)
    return Loaded(msgspec.convert(good, Settings), named)


def change_settings(changes: Mapping[str, Any]) -> Settings:
    """Set keys in the file, keep its comments and everything else in it, and return the settings in
    force.

    Args:
        changes: Values by dotted key (``screen.theme``), as TOML would hold them; None returns to
            the default.

    Raises:
        InputError: A key or value is wrong, or the file is broken, somebody else's, or cannot be
            written.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    path = settings_file()
    content = _read(path) or b""
    try:
        decode_toml(content)
        document = tomlkit.parse(content.decode())
    except (
        tomllib.TOMLDecodeError,
        UnicodeDecodeError,
        msgspec.DecodeError,
        TOMLKitError,
    ) as error:
        raise InputError([_not_toml(error)]) from None
    for key, value in changes.items():
        table, _, name = key.partition(".")
        given = {} if value is None and key in setting_index() else {name: value}
        if wrong := _checked({table: given}).problems:
            raise InputError(wrong)
        present = document.get(table, {})
        if not isinstance(present, dict):
            raise InputError(_checked({table: present}).problems)
        if value is None:
            present.pop(name, None)
        else:
            document.setdefault(table, tomlkit.table())[name] = value
    _write(path, tomlkit.dumps(document))
    return load_settings().settings


def _read(path: Path) -> bytes | None:
    """Return the content of the file; None if there is none. A link to a file of one's own
    elsewhere is followed. Raises InputError.
    """
    try:
        if (
            path.parent.exists()
            and (distrust := distrust_of_folder(path.parent.resolve())) is not None
        ):
            raise NotOwnError(path.parent, distrust)
        if path.is_symlink() or path.exists():
            content = read_own(path.resolve(strict=True))
        else:
            return None
    except NotOwnError as error:
        remedy = (
            f"See what is in it, then take it back: `{quoted('chmod', 'go-w', str(error.path))}`, "
            "or remove it."
        )
        message = f"is not yours alone ({error.distrust}), so nothing of it is used"
        raise InputError([_problem("settings-not-own", message, remedy)]) from None
    except OSError as error:
        message, remedy = f"cannot be read: {error.strerror}", "Check its rights."
        raise InputError([_problem("settings-unreadable", message, remedy)]) from None
    if len(content) > LARGEST_BYTES:
        problem = _problem(
            "settings-unreadable",
            f"has more than {LARGEST_BYTES} bytes",
            "Remove what does not belong there; `so-tui settings` lists the keys.",
        )
        raise InputError([problem])
    return content


def _write(path: Path, text: str) -> None:
    target = Path(os.path.realpath(path))  # does not raise where a link leads to itself
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(target, text.encode(), mode=0o600)
    except OSError as error:
        remedy = "Free some space, or set XDG_CONFIG_HOME to a folder that you can write."
        message = f"cannot be written: {error.strerror}"
        raise InputError([_problem("settings-not-writable", message, remedy)]) from None


def _without_secrets(found: Loaded) -> Loaded:
    """Return the settings without what only the user's own eyes may have seen, and say so if there
    was any.
    """
    if not found.settings.alerts.command:
        return found
    alerts = replace(found.settings.alerts, command=())
    settings = replace(found.settings, alerts=alerts)
    problem = _problem(
        "settings-readable",
        "can be read by other users, so alerts.command in it is not used",
        f"Close it to others: `{quoted('chmod', '600', str(settings_file()))}`.",
    )
    return Loaded(settings, (*found.problems, problem))


def _problem(code: str, message: str, remedy: str) -> Problem:
    return Problem(code, "settings", "", message, remedy, file=str(settings_file()))


def _not_toml(error: Exception) -> Problem:
    remedy = (
        "Correct that line: text needs quotes, and each key may appear once. Until then the "
        "defaults hold."
    )
    return _problem("settings-invalid-toml", f"is not TOML: {shown(str(error))}", remedy)
