"""Write ``docs/versions.md``: the sets of training packages that are tested together, and how far
each package may go.

python docs/make_versions.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from so_tui.machine.software import PACKAGES, known_versions

PAGE = Path(__file__).with_name("versions.md")

_INTRODUCTION = """\
# Versions

<!-- Written by `python docs/make_versions.py`; a test keeps it current. -->

You see which versions of torch, DeepSpeed, transformers and datasets so-tui works with, and which of them are tested together.
`so-tui doctor` says which tested set you have; versions between the oldest and the newest that are no such set get a note.
"""  # noqa: E501
_SETS = """\

## Tested sets

All tests run with the newest set. `make test-system` makes an environment of each other one, with everything else as in its lock file.
There it trains a small model, whose losses must be those of the newest set, and runs the tests of the engine, whose steps must equal
AdamW's, and of building and loading models. All of this was done with Python 3.11. On GPUs, only
torch 2.11 with Python 3.12 was tested. Only the workflow for GitHub has Python 3.13 and 3.14.
For 3.14 the packages of the light install have wheels on x86_64 and aarch64, torch and pyarrow too, but no test was seen to pass with it,
so that the package does not claim it yet.

"""  # noqa: E501
_INSTALL = """\

`make install STACK=oldest` installs a set. In a container or on a cluster that has its own torch, `make install SYSTEM_TORCH=1` keeps it.
"""  # noqa: E501
_LATER = """
## After the newest set

A version that was tested is allowed, and installed where no lock file asks for another one. The others are refused until they are tested.

"""  # noqa: E501
_BOUNDS = """\

## Oldest and newest

"""


def page() -> str:
    """Return the page."""
    sets = (
        (each.name, *each.versions.values(), f"[{each.name}.txt](../locks/{each.name}.txt)")
        for each in reversed(known_versions().sets)
    )
    later = (
        (each.package, each.version, each.tested or "nothing") for each in known_versions().later
    )
    limits = (
        (each.package, each.oldest, each.newest, each.limits, each.older, each.newer)
        for each in known_versions().bounds
    )
    return "".join(
        [
            *(_INTRODUCTION, _SETS, _table(("set", *PACKAGES, "everything else"), sets), _INSTALL),
            *(
                _LATER,
                _table(("package", "version", "tested, with the rest as in the newest set"), later),
            ),
            *(
                _BOUNDS,
                _table(
                    (
                        "package",
                        "oldest",
                        "newest",
                        "what the older ones lack",
                        "why not older",
                        "why not newer",
                    ),
                    limits,
                ),
            ),
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in _rows(head, rows))


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    yield head
    yield ("---",) * len(head)
    yield from rows


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
