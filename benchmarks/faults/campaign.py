"""A campaign: which fault comes next, and its results, one line of JSON each."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.faults import experiment, shim, verdict
from benchmarks.faults.kind import Kind
from benchmarks.faults.scene import NeverCameError, Scene

_LEAST_CORES = 2
"""Of a run with two ranks."""


class Result(Struct, frozen=True, kw_only=True):
    """What became of one fault."""

    v: int = 1
    seed: int
    index: int
    kind: str
    group: str
    what: str
    problems: tuple[str, ...]
    """Codes of what did not hold; empty if everything did."""
    seconds: float
    moment: str = ""
    delay_s: float = 0.0
    step: int = 0
    """The last recorded step when it came."""
    state: str = ""
    """Reported after the fault."""
    code: str = ""
    refused: tuple[str, ...] = ()
    """Why the first resume was refused."""
    end: str = ""
    compared: int = 0
    """Steps whose losses equal those of the undisturbed run."""
    note: str = ""
    """Details of what did not hold."""
    host: dict[str, str | int] = {}

    @property
    def key(self) -> tuple[int, int, str]:
        """What identifies the fault in a campaign."""
        return self.seed, self.index, self.kind


def chosen(kinds: Sequence[Kind], seed: int) -> Iterator[tuple[int, Kind]]:
    """Yield the faults of a campaign without end: every kind once, in an order that follows from
    the seed, then again in another.
    """
    index = 0
    for turn in range(sys.maxsize):
        for kind in random.Random(f"{seed}-{turn}").sample(kinds, len(kinds)):
            yield index, kind
            index += 1


def read(path: Path) -> list[Result]:
    """Return the results of a file; empty if there is none. A torn last line, of a campaign that
    was killed, is left out.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=Result))
    return found


def append(path: Path, result: Result) -> None:
    """Add a result, on a line of its own even after a torn one."""
    with path.open("ab+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(msgspec.json.encode(result) + b"\n")


def pending(
    kinds: Sequence[Kind], seed: int, rounds: int, done: Sequence[Result]
) -> list[tuple[int, Kind]]:
    """Return the faults of the first ``rounds`` that have no result yet."""
    known = {result.key for result in done}
    first = (pair for pair, _ in zip(chosen(kinds, seed), range(rounds), strict=False))
    return [(index, kind) for index, kind in first if (seed, index, kind.name) not in known]


def host_facts() -> dict[str, str | int]:
    """Return what the results depend on, without names."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
        "root": int(os.geteuid() == 0),
    }


@dataclass(frozen=True)
class Ground:
    """What all faults of a campaign share."""

    folder: Path
    seed: int
    losses: verdict.Losses
    stopped: Path
    """Runs folder of the run that was stopped."""
    library: Path | None


def prepare(folder: Path, seed: int, say: Callable[[str], None]) -> Ground:
    """Train the undisturbed run and the one that is stopped. Raises NeverCameError if one does not
    end as it should.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("reference", "stopped"):
        shutil.rmtree(folder / name, ignore_errors=True)
    say("training the run that nothing disturbs")
    losses = experiment.reference(folder / "reference")
    say("training the run that is stopped")
    experiment.stopped_run(folder / "stopped")
    return Ground(folder, seed, losses, folder / "stopped" / "runs", shim.build(folder))


def inflict(ground: Ground, index: int, kind: Kind) -> Result:
    """Inflict one fault, and return the result. The folder of one after which something did not
    hold stays.
    """
    folder = ground.folder / f"{index:04d}-{kind.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    began, chance = time.monotonic(), random.Random(f"{ground.seed}-{index}-{kind.name}")
    shim_ = (
        shim.Shim(ground.library, folder / "control")
        if kind.needs_shim and ground.library
        else None
    )
    scene = Scene(folder, shim_)
    result = Result(
        seed=ground.seed,
        index=index,
        kind=kind.name,
        group=kind.group,
        what=kind.what,
        problems=(),
        seconds=0.0,
        host=host_facts(),
    )
    try:
        met = experiment.meet(kind, scene, chance, ground.stopped)
        result = msgspec.structs.replace(result, **met)
        expected, seen = experiment.observe(kind, scene, ground.losses)
        problems = (*verdict.problems(expected, seen), *scene.noted)
        result = msgspec.structs.replace(
            result,
            problems=problems,
            state=seen.reported,
            code=seen.recorded[1],
            refused=seen.refused,
            end=seen.end,
            compared=sum(found == ground.losses.get(step) for step, found in seen.losses.items()),
            note=_details(seen, scene) if problems else "",
        )
    except NeverCameError as error:
        result = msgspec.structs.replace(result, problems=("never-came",), note=str(error))
    except Exception as error:  # noqa: BLE001 -- of one fault; the campaign goes on, and the result says it
        result = msgspec.structs.replace(
            result, problems=("campaign-error",), note=f"{type(error).__name__}: {error}"[:500]
        )
    finally:
        scene.close()
    if not result.problems:
        shutil.rmtree(folder)
    return msgspec.structs.replace(result, seconds=round(time.monotonic() - began, 1))


def run(
    ground: Ground,
    faults: Sequence[tuple[int, Kind]],
    jobs: int,
    out: Path,
    say: Callable[[str], None],
) -> list[Result]:
    """Inflict faults, so many at once, each on cores of its own where there are enough, and append
    the results.
    """
    results: list[Result] = []
    writing = threading.Lock()
    shares: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for share in core_shares(sorted(os.sched_getaffinity(0)), jobs):
        shares.put(share)

    def one(fault: tuple[int, Kind]) -> None:
        index, kind = fault
        share = shares.get()
        try:
            os.sched_setaffinity(0, share)  # of this thread, and of the processes that it starts
            result = inflict(ground, index, kind)
        finally:
            shares.put(share)
        with writing:
            append(out, result)
            results.append(result)
            verdict_ = (
                "held"
                if not result.problems
                else f"BROKEN: {', '.join(result.problems)} {result.note}"
            )
            say(
                f"{len(results)}/{len(faults)}  {index} {kind.name} ({result.moment})  "
                f"{result.seconds:.0f} s  {verdict_}"
            )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, faults))
    return results


def core_shares(cores: Sequence[int], jobs: int) -> list[set[int]]:
    """Divide the cores equally, so that every run computes as the undisturbed one does; where there
    are too few, all share them.
    """
    each = len(cores) // jobs
    if each < _LEAST_CORES:
        return [set(cores)] * jobs
    return [set(cores[job * each : (job + 1) * each]) for job in range(jobs)]


def _details(seen: verdict.Seen, scene: Scene) -> str:
    """Return what a person wants to know of a fault after which something did not hold."""
    parts = [
        f"recorded {'/'.join(seen.recorded)}",
        *seen.orphans,
        *seen.shared_memory,
        *seen.locks,
        *seen.partial,
        *seen.tracebacks,
    ]
    failed = [
        done.err.strip().splitlines()[-1:]
        for done in scene.transcript
        if done.exit_code not in (0, 4)
    ]
    return "; ".join([*parts, *(line for lines in failed for line in lines)])[:1000]
