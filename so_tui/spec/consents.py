"""Whose Python code the user lets run: each source with the hash of its files, in
``trusted-code.json`` of so-tui's config folder.

The trainer asks here before it lets transformers load a model's own code; ``so-tui trust`` lists,
records and revokes.

Problem codes:
    code-not-trusted: A model or tokenizer comes with Python code that the user has not allowed, or
        that has changed since.
    consents-not-own: Others can change the record, or the folder that it is in.
    consents-unreadable: The record is damaged.
    not-writable: The record cannot be written.
"""

from __future__ import annotations

from datetime import date

import msgspec
from msgspec import Struct

from so_tui.folders import consents_file
from so_tui.spec.check import write_atomic
from so_tui.spec.errors import InputError, reject, shown, some
from so_tui.trust.decoding import decode_json, prepare
from so_tui.trust.files import NotOwnError, read_own
from so_tui.trust.folders import open_folder, private_folder
from so_tui.trust.text import quoted, so_tui_command

NOT_TRUSTED = "code-not-trusted"


def source_name(source: str, revision: str) -> str:
    """Return what `so-tui trust` takes: the source, with ``@REVISION`` if it is not ``main``."""
    return source if revision in ("", "main") else f"{source}@{revision}"


class Code(Struct, frozen=True, kw_only=True):
    """The Python code that comes with a model or tokenizer."""

    source: str
    """Hub id, or the absolute path of a folder."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty for a folder."""
    hash: str
    """SHA-256 of the Python files, with their names. It is the same for all revisions with the
    same code.
    """
    files: tuple[str, ...]
    folder: str
    """Where the hashed copies can be read."""

    @property
    def name(self) -> str:
        """What `so-tui trust` takes."""
        return source_name(self.source, self.revision)

    def lines(self) -> tuple[str, ...]:
        """Return what to know before allowing it."""
        return (
            f"{self.name} comes with Python code, which would run with your rights.",
            f"files: {some(self.files)}",
            f"Read this copy of it: {self.folder}",
            f"SHA-256 {self.hash}",
        )

    def refusal(self, field: str, *options: str) -> InputError:
        """Return the error of code that the user has not allowed. Its remedy is ``so-tui trust``
        with these options.
        """
        return reject(
            NOT_TRUSTED,
            field,
            self.name,
            f"comes with Python code that you have not allowed to run, or that has changed since "
            f"(SHA-256 {self.hash}: {some(self.files)})",
            f"Read it in {self.folder}. If you trust it: "
            f"{so_tui_command('trust', self.name, *options)}",
        )


class Consent(Struct, frozen=True, kw_only=True):
    """Code that the user lets run."""

    source: str
    hash: str
    date: str
    """Day on which the user allowed it, as YYYY-MM-DD."""


class _Record(Struct, frozen=True, kw_only=True):
    """Content of the file."""

    v: int = 1
    consents: tuple[Consent, ...] = ()


prepare(_Record)


def consents() -> tuple[Consent, ...]:
    """Return what the user allowed. Raises InputError with the codes of this module."""
    path = consents_file()
    try:
        with open_folder(path.parent) as folder:
            if (distrust := folder.distrust) is not None:
                raise NotOwnError(path.parent, distrust)
        return decode_json(read_own(path), _Record).consents
    except FileNotFoundError:
        return ()
    except NotOwnError as error:
        raise _not_own(error) from error
    except (OSError, msgspec.DecodeError) as error:
        raise reject(
            "consents-unreadable",
            path.name,
            "",
            f"cannot be read: {error}",
            "Correct or delete it. `so-tui trust SOURCE` allows code again.",
            file=str(path),
        ) from error


def allow(code: Code) -> None:
    """Record that the user lets code run. Raises InputError with the codes of this module."""
    new = Consent(source=code.source, hash=code.hash, date=date.today().isoformat())
    others = (known for known in consents() if (known.source, known.hash) != (new.source, new.hash))
    _write((*others, new))


def revoke(source: str) -> bool:
    """Take back what was allowed of a source. Return whether anything was.

    Raises:
        InputError: With the codes of this module.
    """
    before = consents()
    left = tuple(known for known in before if known.source != source)
    if left != before:
        _write(left)
    return left != before


def is_allowed(code: Code) -> bool:
    """Return whether the user lets exactly this code run. Raises InputError as ``consents``."""
    return any((known.source, known.hash) == (code.source, code.hash) for known in consents())


def _write(allowed: tuple[Consent, ...]) -> None:
    path = consents_file()
    content = msgspec.json.format(msgspec.json.encode(_Record(consents=allowed)), indent=1)
    try:
        private_folder(path.parent)
        write_atomic(path, content)
    except NotOwnError as error:
        raise _not_own(error) from error
    except OSError as error:
        raise reject(
            "not-writable",
            path.name,
            shown(str(path)),
            f"cannot be written: {error.strerror}",
            "Free some space, or set XDG_CONFIG_HOME to a writable folder.",
        ) from error


def _not_own(error: NotOwnError) -> InputError:
    close = quoted("chmod", "go-w", str(error.path))
    return reject(
        "consents-not-own",
        consents_file().name,
        str(error.path),
        f"others can change whose code counts as trusted, so none does ({error.distrust})",
        f"Look at what is in it, then make it yours alone: `{close}`, or remove it.",
    )
