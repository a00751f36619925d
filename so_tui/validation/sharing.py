"""The form of a report that names neither the host, nor its user, nor any path."""

from __future__ import annotations

import os
import platform
import pwd
import re
from pathlib import Path

from msgspec.structs import asdict, replace

from so_tui.validation.report import MachineFound, Outcome, Report, Result

HIDDEN = "[hidden]"
_NAMES = (
    "USER",
    "LOGNAME",
    "SUDO_USER",
    "HOSTNAME",
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ACCOUNT",
    "SLURM_JOB_USER",
    "SLURMD_NODENAME",
)
"""Environment variables whose values name a user, a host or a site."""
_COMMON = {"", "root", "localhost", "home", "tmp", "vm"}
"""Names that tell nothing."""
_QUOTED = re.compile(r"`[^`\n]*/[^`\n]*`|\"[^\"\n]*/[^\"\n]*\"|'[^'\n]*/[^'\n]*'")
"""Quoted texts with a slash: a path may have spaces."""
_WITH_SLASH = re.compile(r"\S*/\S*")
_UNIT = re.compile(r"[A-Za-z]{1,8}/(?:s|step)\W*")
"""What else has a slash: ``GB/s``."""
_ADDRESS = re.compile(
    r"\S+@\S+|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w)|(?<!\w)(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?!\w)"
)
"""Of mail and of hosts."""
_UUID = re.compile(r"(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def shared(report: Report) -> Report:
    """Return a report that can be given to anybody.

    Texts that others have a part in are left out (titles of findings, whose codes say what they are), or lose everything that may name
    somebody (reasons of failures, versions).
    """
    names = _names_here() | {report.host}
    return replace(
        report, host="", outcomes=tuple(_shared(outcome, names) for outcome in report.outcomes)
    )


def _shared(outcome: Outcome, names: set[str]) -> Outcome:
    return replace(
        outcome, reason=hidden(outcome.reason, names), result=_shared_result(outcome.result, names)
    )


def _shared_result(result: Result | None, names: set[str]) -> Result | None:
    if not isinstance(result, MachineFound):
        return result
    versions = {
        name: hidden(value, names)
        for name, value in asdict(result.software).items()
        if isinstance(value, str)
    }
    findings = tuple(replace(found, title="") for found in result.findings)
    return replace(
        result,
        cpu=hidden(result.cpu, names),
        software=replace(result.software, **versions),
        findings=findings,
    )


def hidden(text: str, names: set[str]) -> str:
    """Return a text without anything that looks like a path or an address, and without any of the names, in capitals or not.

    Args:
        text: One that is read by people only.
        names: Of a host, its parts too, and of users.
    """
    for pattern in (_QUOTED, _UUID, _ADDRESS):
        text = pattern.sub(HIDDEN, text)
    text = _WITH_SLASH.sub(lambda found: found[0] if _UNIT.fullmatch(found[0]) else HIDDEN, text)
    parts = {
        part for name in names for part in (name, name.partition(".")[0], name.partition(".")[2])
    } - _COMMON
    for name in sorted(parts, key=len, reverse=True):
        text = re.sub(
            rf"(?<![^\W\d_]){re.escape(name)}(?![^\W\d_])\d*(?:\.[\w-]+)*",
            HIDDEN,
            text,
            flags=re.IGNORECASE,
        )
    return text


def _names_here() -> set[str]:
    found = {os.environ.get(name, "") for name in _NAMES} | {platform.node(), Path.home().name}
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:  # a container's users may have no account
        return found
    return found | {account.pw_name, account.pw_gecos.partition(",")[0]}
