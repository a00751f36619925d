"""``python -m benchmarks.attacks``: attack real commands as another user of this machine, and with
hostile models, data and faults, and tell which attacks succeed.

The numbers are those of our own list of findings, and with an n of what was tried later; races are
tried several times.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence

from benchmarks.attacks import stage
from benchmarks.attacks.attack import ATTACKS, Attack, Outcome, Verdict

_PARTS = (
    "others",
    "code",
    "foreign",
    "limits",
    "faults",
    "accidents",
    "storms",
    "names",
    "content",
    "places",
)
_TIMES = 5
_SHOWN = 300
"""Characters of the evidence."""
_WEIGHT: tuple[Outcome, ...] = ("SKIPPED", "HELD", "BROKEN", "SUCCEEDED")
"""What a success, or a broken try, shows says more than what held."""


def main() -> int:
    """Try attacks and print a table in Markdown. Return 1 if one succeeded, 2 if nothing can be
    said of one.
    """
    arguments = _parser().parse_args()
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # with nohup; victims would inherit that
        signal.signal(signal.SIGHUP, lambda *_: None)
    for part in _PARTS:
        importlib.import_module(f"benchmarks.attacks.{part}")
    ATTACKS.sort(key=_place)
    chosen = [
        each
        for each in ATTACKS
        if not arguments.only or {each.id, _finding(each)} & {*arguments.only}
    ]
    if arguments.list or not chosen:
        for each in ATTACKS:
            print(f"{each.id:4} {'race  ' if each.race else '      '}{each.title}")
        return 0 if arguments.list else 2
    print("| id | attack | outcome | seconds | evidence |\n|---|---|---|---:|---|", flush=True)
    outcomes: Counter[str] = Counter()
    try:
        with stage.ground() as common:
            for each in chosen:
                times = arguments.times if each.race else 1
                outcomes.update(_tried(each, common, times, verbose=arguments.verbose))
    except stage.SkippedError as error:
        print(f"all are skipped: {error}", file=sys.stderr)
        return 0
    print("\n" + ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())))
    return 2 if outcomes["BROKEN"] else int(outcomes["SUCCEEDED"] > 0)


def _place(each: Attack) -> tuple[bool, int, str]:
    """Return where an attack stands in the table: later findings, n1 and on, after the first."""
    number = _finding(each)
    return number.startswith("n"), int(number.lstrip("n")), each.id


def _finding(each: Attack) -> str:
    """Return the number of an attack's finding."""
    return each.id.rstrip("abcdefghijklmnopqrstuvwxyz")


def _tried(each: Attack, common: stage.Ground, times: int, *, verbose: bool) -> Sequence[str]:
    """Try an attack, print its row, and return the outcome of each try."""
    began, verdicts = time.monotonic(), []
    for _ in range(times):
        try:
            with stage.stage(common) as made:
                verdicts.append(each.play(made))
        except stage.SkippedError as error:
            verdicts.append(Verdict("SKIPPED", str(error)))
        except Exception as error:  # noqa: BLE001 - the other attacks are still to be tried
            if verbose:
                traceback.print_exc()
            verdicts.append(Verdict("BROKEN", f"{type(error).__name__}: {error}"))
    counts = Counter(verdict.outcome for verdict in verdicts)
    told = ", ".join(f"{name} {counts[name]}/{times}" for name in sorted(counts))
    shown = max(verdicts, key=lambda verdict: _WEIGHT.index(verdict.outcome))
    evidence = " ".join(shown.evidence.split()).replace("|", "\\|")
    if len(evidence) > _SHOWN:
        evidence = f"{evidence[:100]} … {evidence[100 - _SHOWN :]}"
    seconds = (time.monotonic() - began) / times
    print(f"| {each.id} | {each.title} | {told} | {seconds:.0f} | {evidence} |", flush=True)
    return [verdict.outcome for verdict in verdicts]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attacks",
        description="Attack real commands as another user of this machine, and with hostile "
        "models, data and faults. Root only: it starts processes of two users without accounts.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="ID",
        help="an attack (1a), or all of a finding (1); may be repeated",
    )
    parser.add_argument(
        "--times",
        type=int,
        default=_TIMES,
        metavar="N",
        help="how often each race is tried (default %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="print all attacks")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print where a broken attack failed"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
