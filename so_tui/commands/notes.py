"""``note``: a user's own words about a run."""

from __future__ import annotations

import argparse

from msgspec.structs import replace

from so_tui.commands.common import note as tell
from so_tui.commands.common import print_json
from so_tui.runs import find_run
from so_tui.runs.notes import changed_tags, read_notes, write_notes
from so_tui.trust.printable import printable_line


def note(arguments: argparse.Namespace) -> int:
    """Change what is asked for, then print note and tags.

    Raises:
        Refused: It is another user's run, which is only read.
        InputError: There is no such run, or the note or a tag cannot be kept.
    """
    run = find_run(arguments.run, arguments.runs_dir)
    notes = read_notes(run)
    if arguments.text is not None or arguments.tag or arguments.untag:
        changed = changed_tags(notes, arguments.tag, arguments.untag)
        notes = changed if arguments.text is None else replace(changed, note=arguments.text)
        write_notes(run, notes)
    if arguments.json:
        print_json(notes)
    elif not notes.note and not notes.tags:
        tell(arguments, "no note and no tags")
    else:
        for part in (notes.note, " ".join(f"#{tag}" for tag in notes.tags)):
            if part:
                print(printable_line(part))
    return 0
