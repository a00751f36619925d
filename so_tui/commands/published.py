"""``published``: every published figure about SuperOffload beside what is planned for the same settings."""

from __future__ import annotations

import argparse

from msgspec import Struct

from so_tui.commands.common import print_json, print_rich
from so_tui.plan.published import Compared


class PublishedFigures(Struct, frozen=True):
    """What ``published --json`` prints."""

    figures: tuple[Compared, ...]


def published(arguments: argparse.Namespace) -> int:
    """Print the figures with the reasons for differences."""
    from so_tui.plan.published import compared
    from so_tui.plan.render_published import render

    found = compared()
    if arguments.json:
        print_json(PublishedFigures(found))
    else:
        print_rich(render(found))
    return 0
