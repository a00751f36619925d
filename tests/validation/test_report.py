"""Reports are read as text and figures, and the shared form names nobody."""

from __future__ import annotations

import getpass
import socket
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from so_tui.doctor import Finding
from so_tui.launch.helper import stream_tool
from so_tui.launch.helper_jobs import _request_of
from so_tui.machine import inspect_machine
from so_tui.plan.measured import Figures
from so_tui.runs.records import MetricRecord, PhaseRecord
from so_tui.validation import report as reports
from so_tui.validation import show
from so_tui.validation.show import _markdown
from so_tui.validation.validate import _phase_seconds, validate
from tests.support.records import step_record
from tests.support.schemas import valid
from tests.validation.test_runner import EMPTY

FIGURES = Figures(
    step_s=2.0,
    forward_s=0.5,
    backward_s=1.0,
    exposed_optimizer_s=0.4,
    gpu_reserved_bytes=10**10,
    gpu_device_bytes=0,
    host_bytes=10**11,
)


def trained(
    key: str, losses: tuple[float | None, ...], clipping: float = 0.0, **others: Any
) -> reports.Outcome:
    result = reports.TrainingFound(
        settings={},
        ranks=1,
        placed="bound",
        clipping=clipping,
        steps=4,
        measured=FIGURES,
        predicted=replace(FIGURES, step_s=1.9),
        useful_tokens_per_s=8000.0,
        model_tflops_per_gpu=200.0,
        example_tflops=300.0,
        losses=losses,
    )
    return measured(key, replace(result, **others), f"<{key}> & more")


RATE_NAMES = ("pinned_d2h", "pinned_h2d", "pageable_d2h", "pageable_h2d", "both_ways")
COPIES = reports.CopyRates(node=0, gpu=0, all_at_once=False, **dict.fromkeys(RATE_NAMES, 3e11))


def measured(key: str, result: Any, title: str = "") -> reports.Outcome:
    return reports.Outcome(
        key=key, title=title or key, estimate_s=1, state="measured", result=result
    )


REPORT = replace(
    EMPTY,
    outcomes=(
        measured("copies", reports.CopiesFound(copies=(COPIES,))),
        trained("gpu", (8.0, 7.0, 6.0)),
        trained("ours", (8.0, 7.07, 6.0)),
        trained("clipped", (8.0, 7.5, 7.0), clipping=1.0),
        reports.Outcome(
            key="left", title="another", estimate_s=99, state="left-out", reason="takes about 99 s"
        ),
    ),
)


def test_losses_are_compared_within_a_clipping(tmp_path: Path) -> None:
    report = EMPTY
    for outcome in REPORT.outcomes:
        report = replace(report, outcomes=(*report.outcomes, outcome)).with_outcome(outcome)
    (found,) = report.agreement
    assert (found.key, found.reference) == ("ours", "gpu")
    assert found.by_step == pytest.approx((0.0, 0.01, 0.0))
    assert found.largest == max(one for one in found.by_step if one is not None)
    reports.write(tmp_path, report)
    assert reports.read(tmp_path) == report
    valid("validate", (tmp_path / reports.FILE).read_text())


def test_a_loss_that_is_not_finite_agrees_with_nothing() -> None:
    (found,) = reports._agreement_of([trained("gpu", (8.0, 7.0)), trained("ours", (8.0, None))])
    assert (found.by_step, found.largest) == ((0.0, None), None)


def test_the_figures_are_xml_and_show_every_part(tmp_path: Path) -> None:
    text = show.write(tmp_path, REPORT).read_text()
    for name in ("tokens.svg", "steps.svg", "losses.svg", "copies.svg"):
        assert f"({name})" in text
        drawn = " ".join(ElementTree.parse(tmp_path / name).getroot().itertext())
        assert "<gpu> & more" in drawn or name == "copies.svg"
    assert "2.00 / 1.90" in text
    assert "another: left-out: takes about 99 s" in text
    assert show._figures(EMPTY) == {}


def test_a_shared_report_names_neither_host_nor_user_nor_folder() -> None:
    home, host, user = str(Path.home()), socket.gethostname(), getpass.getuser()
    title = f"{host.upper()}: {home}/.cache is full, says {user}@{host}"
    found = reports.machine_found(inspect_machine(), (Finding("a", "note", title, "", "", ""),))
    software = replace(found.software, compiler=f"c++ (built in {home}/gcc) 12")
    reason = f"`so-tui logs {home}/.local/state/x` shows; alps says no"
    failed = reports.Outcome(key="b", title="b", estimate_s=1, state="failed", reason=reason)
    outcomes = (measured("m", replace(found, software=software)), failed)
    nameless = reports.shared(replace(EMPTY, outcomes=outcomes))
    text = reports._encoded(nameless).decode() + show._markdown(nameless)
    names = [home, "alps", *([user] if user != "root" else [])]
    assert not [name for name in names if name in text]
    assert "- note: (`a`)" in text
    assert f"{reports.HIDDEN} shows; {reports.HIDDEN} says no" in text
    assert f"c++ (built in {reports.HIDDEN} 12" in text


NAMING = (
    "Alps.cscs.example refused",
    "on ALPS01, alps-2 and alps_3.cscs.example",
    "/scratch/alice",
    "~alice/runs and ~/alps/x and ../alps",
    "open('/data/my alps folder/x') failed",
    "`so-tui logs /a b/alps c/d`",
    "file:///home/alice/x?y=alps and https://alps:1234/x",
    "PATH=/opt/alps:/usr/bin",
    "/a=b,alps/größe",
    "alice@mail.example wrote",
    "user_alice and alice's and ALICE",
    "Alice Example did",
    "10.0.17.3:29500 and fe80::1:2 and ::1",
    "GPU-01b9bd69-6109-7d25-5094-d38997c81eb0 is busy",
)


@pytest.mark.parametrize("text", NAMING)
def test_nothing_that_names_somebody_is_left_of_a_reason(text: str) -> None:
    left = reports._hidden(text, {"alps.cscs.example", "alice", "Alice Example"}).casefold()
    names = ("alps", "cscs", "alice", "größe", "scratch", "opt", "10.0.17", "fe80", "01b9")
    assert not [name for name in names if name in left]


def test_what_names_nobody_is_left() -> None:
    text = "takes about 57 s, and 9 s were left: 45.2 GB/s, 0.3 s/step (exit code 1) of alpsee"
    assert reports._hidden(text, {"alps", "al", "", "root", "localhost"}) == text


@pytest.mark.slow
def test_copies_are_measured_between_every_gpu_and_node() -> None:
    """The GPU's part runs the same code on small sizes, on the CPU."""
    nodes = _request_of(inspect_machine())["nodes"][:1]
    gpus = [{"index": 0, "node": nodes[0]["id"]}, {"index": 1, "node": None}]
    asked = {"nodes": nodes, "gpus": gpus, "scale": 0.01, "device": "cpu"}
    *told, last = stream_tool("copies", asked)
    found = [(one["gpu"], one["all_at_once"]) for one in last["copies"]]
    assert found == [(0, False), (1, False), (0, True), (1, True)]
    assert all(one[rate] > 1e6 for one in last["copies"] for rate in RATE_NAMES)
    assert len(told) == 3


@pytest.mark.slow
def test_a_machine_without_gpus_is_validated_with_tiny(tmp_path: Path) -> None:
    machine = replace(inspect_machine(), gpus=())
    report = validate(machine, tmp_path, seconds=170.0, gpus=0, share=True, tell=lambda *_: None)
    states = {outcome.key: (outcome.state, outcome.reason) for outcome in report.outcomes}
    assert states.keys() == {"machine", "rates", "ours", "zerooffload", "ours-clipped"}
    assert states["ours"][0] == "measured", states
    assert not [key for key, (state, _) in states.items() if state in reports.FAILURES], states
    found = {outcome.key: result for outcome, result in reports.trained(report.outcomes)}
    first, *_, last = found["ours"].losses
    assert first is not None
    assert last is not None
    assert last < first
    assert valid("validate", (tmp_path / reports.FILE).read_text())["host"] == machine.hostname
    assert "TFLOPS by DeepSpeed's example" in (tmp_path / "report.md").read_text()
    assert machine.hostname not in (tmp_path / "shared" / "report.md").read_text()
    # On a busy host it may have been left out.
    assert bool(report.agreement) == ("zerooffload" in found)
    for one in report.agreement:
        assert one.largest is not None
        assert one.largest < 0.02


def phase(time: float, phase: str, stage: str = "") -> PhaseRecord:
    return PhaseRecord(attempt=1, time=time, phase=phase, stage=stage)  # type: ignore[arg-type]


LOADED = {"imports": 5.0, "ranks": 8.0, "data": 9.0, "weights": 9.5, "optimizer": 12.0}
RECORDS: tuple[MetricRecord, ...] = (
    *(phase(time, "loading", stage) for stage, time in LOADED.items()),
    phase(12.5, "loading", "weights"),  # once more
    phase(13.0, "training"),
    *(step_record(step, time=14.0 + step) for step in (1, 2)),
    phase(17.0, "training"),
    step_record(3, time=18.0),
    phase(18.1, "saving"),
)
SECONDS = (1.0, 4.0, 3.0, 1.0, 0.5, 2.5, 1.0, 2.0, 3.0, 2.0, 0.5)
PHASES = reports.PhaseSeconds(
    **dict(zip(reports.PhaseSeconds.__struct_fields__, SECONDS, strict=True))
)


def test_every_second_belongs_to_a_phase() -> None:
    found = _phase_seconds(RECORDS, begun=0.0, started=1.0, ended=20.0, over=20.5)
    assert asdict(found) == pytest.approx(asdict(PHASES))
    # What an older trainer did not record took no time.
    older = _phase_seconds(RECORDS[1:], begun=0.0, started=1.0, ended=20.0, over=20.0)
    assert (older.launcher_s, older.imports_s, older.ranks_s) == (7.0, 0.0, 1.0)
    no_steps = asdict(_phase_seconds((), begun=0.0, started=1.0, ended=4.0, over=5.0))
    spent = {name: seconds for name, seconds in no_steps.items() if seconds}
    assert spent == {"preparation_s": 1.0, "launcher_s": 3.0, "cleaning_s": 1.0}


def test_a_report_shows_them_in_one_row_a_part() -> None:
    report = REPORT.with_outcome(trained("gpu", (8.0,), phases=PHASES))
    table = _markdown(report).partition("## Where the time went")[2].splitlines()
    rows = [line for line in table if line.startswith("| <")]
    assert rows == [f"| <gpu> & more | {' | '.join(map(str, SECONDS))} | 20.5 |"]
    assert "Where the time went" not in _markdown(REPORT)
