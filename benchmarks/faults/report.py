"""The results of a campaign as a table in Markdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from benchmarks.faults.campaign import Result


def table(results: Sequence[Result]) -> str:
    """Return one row for each kind of fault, then every fault after which something did not
    hold.
    """
    of_kind: defaultdict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        of_kind[result.group, result.what].append(result)
    lines = [
        _summary(results),
        "",
        "| fault | times | moments | told | held |",
        "|---|---:|---|---|---:|",
    ]
    for (_, what), found in sorted(of_kind.items()):
        moments = ", ".join(
            f"{moment} {count}"
            for moment, count in sorted(Counter(one.moment for one in found if one.moment).items())
        )
        said = ", ".join(sorted({_said(one) for one in found if one.state}))
        held = sum(not one.problems for one in found)
        lines.append(
            f"| {what} | {len(found)} | {moments} | {said} | "
            f"{held}{'' if held == len(found) else ' **!**'} |"
        )
    broken = [one for one in results if one.problems]
    if broken:
        lines += ["", "What did not hold:", "", *(_complaint(one) for one in broken)]
    return "\n".join(lines) + "\n"


def _complaint(result: Result) -> str:
    """Return what did not hold, and how to see it again."""
    again = f"--seed {result.seed} --repeat {result.index}-{result.kind}"
    return f"- `{again}` ({result.moment}): {', '.join(result.problems)}. {result.note}".rstrip()


def _said(result: Result) -> str:
    """Return the state, its code where that says more, and why a resume was refused."""
    code = "" if result.code in ("", result.state) else f" ({result.code})"
    return f"{result.state}{code}" + (
        f", resume refused: {', '.join(result.refused)}" if result.refused else ""
    )


def _summary(results: Sequence[Result]) -> str:
    held, compared = sum(not one.problems for one in results), sum(one.compared for one in results)
    hosts = sorted(
        {f"{one.host.get('cores')} cores, torch {one.host.get('torch')}" for one in results}
    )
    hours = sum(one.seconds for one in results) / 3600
    return (
        f"{len(results)} faults, {held} held; {compared} losses equal those of the undisturbed "
        f"run, bit for bit. {hours:.1f} hours of runs on a host with {'; '.join(hosts)}."
    )
