"""Run one so-tui command, and write the codes of what it refuses, which only its messages would
tell otherwise.

``python -m benchmarks.faults.command FILE ARGUMENT...``: FILE gets a JSON list of codes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from so_tui import cli
from so_tui.spec import InputError, Refused


def main(codes_file: Path, argv: list[str]) -> int:
    """Run the command as ``so-tui`` does, and return its exit code."""
    codes: list[str] = []
    call = cli._call

    def noting(arguments: object) -> int:
        try:
            return call(arguments)  # type: ignore[arg-type]
        except InputError as error:
            codes.extend(problem.code for problem in error.problems)
            raise
        except Refused as error:
            codes.extend(error.codes)
            raise

    cli._call = noting
    try:
        return cli.main(argv)
    finally:
        codes_file.write_text(json.dumps(codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
