"""``python -m benchmarks.faults``: inflict faults on real runs of ``tiny``, and report after which
something did not hold.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from benchmarks.faults import campaign, processes, report
from benchmarks.faults.kind import Kind
from benchmarks.faults.kinds import KINDS, matching
from benchmarks.faults.scene import NeverCameError


def main() -> int:
    """Run a campaign, list the kinds of faults, or print the table of results. Return 1 if
    something did not hold.
    """
    arguments = _parser().parse_args()
    if arguments.list:
        for kind in KINDS:
            print(f"{kind.group:12} {kind.name:28} {kind.what} ({', '.join(kind.moments)})")
        return 0
    if arguments.report:
        print(report.table(campaign.read(arguments.report)), end="")
        return 0
    if arguments.repeat:
        faults = [arguments.repeat]
    else:
        kinds = [kind for part in arguments.only or [""] for kind in matching(part)]
        if not kinds:
            print(f"no kind of fault is called {arguments.only}; --list shows all", file=sys.stderr)
            return 2
        faults = campaign.pending(
            kinds, arguments.seed, arguments.rounds or len(kinds), campaign.read(arguments.out)
        )
    if not faults:
        print(f"{arguments.out} has all of these faults already", flush=True)
        return 0
    return _run(arguments, faults)


def _run(arguments: argparse.Namespace, faults: list[tuple[int, Kind]]) -> int:
    def say(text: str) -> None:
        print(text, flush=True)

    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="so-tui-faults-"))).resolve()

    def give_up(signum: int, _frame: FrameType | None) -> None:
        processes.end(f"{folder}/")
        os._exit(128 + signum)  # threads that wait for a fault would keep the process

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, give_up)
    every_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, campaign.core_shares(sorted(every_core), arguments.jobs)[0])
    try:
        ground = campaign.prepare(folder, arguments.seed, say)
    except NeverCameError as error:
        print(f"the campaign cannot start: {error}; see {folder}", file=sys.stderr)
        return 2
    finally:
        os.sched_setaffinity(0, every_core)
    results = campaign.run(ground, faults, arguments.jobs, arguments.out, say)
    broken = [result for result in results if result.problems]
    say(
        f"{len(results) - len(broken)} of {len(results)} held"
        + (f"; the other folders are in {folder}" if broken else "")
    )
    return int(bool(broken))


def _fault(text: str) -> tuple[int, Kind]:
    """Return a fault by the name of its folder, ``0047-kill-rank0``."""
    number, _, name = text.partition("-")
    kinds = [kind for kind in KINDS if kind.name == name]
    if not number.isdigit() or not kinds:
        raise argparse.ArgumentTypeError(
            f"{text} is no number and kind of a fault, such as 47-kill-rank0"
        )
    return int(number), kinds[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__.partition(": ")[2]
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="number of faults, finished ones included (default: each kind once)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="decides the order of the faults and their moments (default %(default)s)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="KIND",
        help="a kind, a part of its name, or a group; may be repeated",
    )
    parser.add_argument(
        "--repeat",
        type=_fault,
        metavar="I-KIND",
        help="only this fault, by its number and kind, also if it has a result",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="J",
        help="faults at once (default %(default)s); each needs two cores",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("faults.jsonl"),
        metavar="FILE",
        help="results, appended (default %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where the runs are (default: a temporary folder)",
    )
    parser.add_argument("--list", action="store_true", help="print all kinds of faults")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="print the results of FILE as a table in Markdown",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
