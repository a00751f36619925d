"""Which versions of the training packages were tested, and how far each may go. Both are data: ``versions.toml``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.machine.types import Software, version_numbers

PATH = Path(__file__).with_name("versions.toml")
PACKAGES = ("torch", "deepspeed", "transformers", "datasets")
"""What a set consists of. The lock file of its name has everything else."""


class VersionSet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions that ``make test-system`` tests together."""

    name: str
    """That of its lock file."""
    torch: str
    deepspeed: str
    transformers: str
    datasets: str

    @property
    def versions(self) -> dict[str, str]:
        """The version of each of PACKAGES."""
        return {package: getattr(self, package) for package in PACKAGES}


class Bound(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The oldest and the newest version of a package that so-tui supports."""

    package: str
    oldest: str
    newest: str
    older: str
    """What an older version lacks."""
    limits: str = ""
    """What the older supported versions cannot do."""
    newer: str = ""
    """Why a newer version is refused; empty if it only was not tested."""

    def admits(self, version: str) -> bool:
        """Return whether a version lies within; of the newest, only as many numbers count as the bound has."""
        found, newest = version_numbers(version), version_numbers(self.newest)
        return version_numbers(self.oldest) <= found and found[: len(newest)] <= newest


class Later(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of a package after that of the newest set."""

    package: str
    version: str
    tested: str = ""
    """What was tested with it, and everything else as in the newest set; empty if nothing was."""


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    sets: tuple[VersionSet, ...]
    later: tuple[Later, ...]
    bounds: tuple[Bound, ...]


@cache
def _file() -> _File:
    return msgspec.toml.decode(PATH.read_bytes(), type=_File)


def version_sets() -> tuple[VersionSet, ...]:
    """Return the tested sets, the oldest first."""
    return _file().sets


def later_versions() -> tuple[Later, ...]:
    """Return the versions after those of the newest set."""
    return _file().later


def bounds() -> tuple[Bound, ...]:
    """Return the bounds of Python and of each of PACKAGES."""
    return _file().bounds


def bound_of(package: str) -> Bound:
    """Return the bound of Python or of one of PACKAGES."""
    return next(bound for bound in bounds() if bound.package == package)


def installed_set(software: Software) -> VersionSet | None:
    """Return the tested set that is installed; None if it is none. Builds of a version (``+cpu``, ``+cu130``) count as that version."""
    found = {package: version_numbers(getattr(software, package)) for package in PACKAGES}
    matching = (
        each
        for each in version_sets()
        if {name: version_numbers(version) for name, version in each.versions.items()} == found
    )
    return next(matching, None)


def outside_bounds(software: Software) -> tuple[Bound, ...]:
    """Return the bounds that installed packages, and Python, exceed."""
    installed = ((bound, getattr(software, bound.package)) for bound in bounds())
    return tuple(
        bound for bound, version in installed if version is not None and not bound.admits(version)
    )
