"""Reports are read as text and figures, and the shared form names nobody."""

from __future__ import annotations

import getpass
import socket
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.helper import stream_tool
from so_tui.launch.helper_jobs import _request_of
from so_tui.machine import inspect_machine
from so_tui.machine.doctor import Finding
from so_tui.plan.measured import Figures
from so_tui.runs.records import PhaseRecord
from so_tui.validation import report as reports
from so_tui.validation import show
from so_tui.validation import validate as machine_parts
from so_tui.validation.report import (
    HIDDEN,
    CopiesFound,
    CopyRates,
    LossAgreement,
    Outcome,
    TrainingFound,
    _hidden,
    machine_found,
    shared,
)
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
    key: str, losses: tuple[float | None, ...], clipping: float = 0.0, *, losses_only: bool = False
) -> Outcome:
    result = TrainingFound(
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
        losses_only=losses_only,
    )
    return Outcome(key=key, title=f"<{key}> & more", estimate_s=1, state="measured", result=result)


COPIES = CopyRates(
    node=0,
    gpu=0,
    all_at_once=False,
    pinned_d2h=3e11,
    pinned_h2d=3e11,
    pageable_d2h=1e11,
    pageable_h2d=1e11,
    both_ways=2e11,
)


def measured(key: str, result: Any) -> Outcome:
    return Outcome(key=key, title=key, estimate_s=1, state="measured", result=result)


REPORT = replace(
    EMPTY,
    outcomes=(
        measured("copies", CopiesFound(copies=(COPIES,))),
        trained("gpu", (8.0, 7.0, 6.0)),
        trained("ours", (8.0, 7.07, 6.0)),
        trained("clipped", (8.0, 7.5, 7.0), clipping=1.0),
        Outcome(
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


@pytest.mark.parametrize(
    ("clipping", "engine", "shown"),
    [(1.0, "so-tui", True), (0.0, "so-tui", False), (1.0, "deepspeed", False)],
)
def test_waits_for_the_norm_are_told(clipping: float, engine: str, shown: bool) -> None:
    outcome = trained("clipped", (8.0, 7.0), clipping)
    assert isinstance(outcome.result, TrainingFound)
    found = replace(outcome.result, settings={"offload.engine": engine}, held_back_steps=3)
    text = show._markdown(replace(EMPTY, outcomes=(replace(outcome, result=found),)))
    assert ("3 of 4" in text) == shown


def test_a_loss_that_is_not_finite_agrees_with_nothing() -> None:
    (found,) = reports._agreement_of([trained("gpu", (8.0, 7.0)), trained("ours", (8.0, None))])
    assert (found.by_step, found.largest) == ((0.0, None), None)


def test_compared_losses_of_a_part_that_is_not_there_are_shown_by_its_key() -> None:
    """As in a report that was edited."""
    agreement = (LossAgreement(key="gone", reference="gpu", by_step=(0.0,), largest=0.0),)
    report = replace(EMPTY, outcomes=(trained("gpu", (8.0,)),), agreement=agreement)
    ((title, reference, *_),) = show.agreement_rows(report)
    assert (title, reference) == ("gone", report.outcomes[0].title)


def test_losses_of_many_steps_have_a_figure_of_their_own() -> None:
    """And no speed."""
    outcomes = (
        trained("gpu", (8.0, 7.0)),
        trained("losses-gpu", (8.0, 6.0, 5.0), 1.0, losses_only=True),
        trained("losses-1", (8.0, 6.0, 5.0), 1.0, losses_only=True),
        trained("losses-2", (8.0, None, 5.0), 1.0, losses_only=True),
    )
    report = replace(EMPTY, outcomes=outcomes, agreement=reports._agreement_of(outcomes))
    compared = [(one.key, one.reference) for one in report.agreement]
    assert compared == [("losses-1", "losses-gpu"), ("losses-2", "losses-gpu")]
    drawn = show._figures(report)
    assert "losses-2" in drawn["losses.svg"]
    assert ";gpu" not in drawn["losses.svg"]
    assert "losses" not in drawn["tokens.svg"]


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
    found = machine_found(inspect_machine(), (Finding("a", "note", title, "", "", ""),))
    software = replace(found.software, compiler=f"c++ (built in {home}/gcc) 12")
    reason = f"`so-tui logs {home}/.local/state/x` shows; alps says no"
    failed = Outcome(key="b", title="b", estimate_s=1, state="failed", reason=reason)
    outcomes = (measured("m", replace(found, software=software)), failed)
    nameless = shared(replace(EMPTY, outcomes=outcomes))
    text = reports._encoded(nameless).decode() + show._markdown(nameless)
    names = [home, "alps", *([user] if user != "root" else [])]
    assert not [name for name in names if name in text]
    assert "- note: (`a`)" in text
    assert f"{HIDDEN} shows; {HIDDEN} says no" in text
    assert f"c++ (built in {HIDDEN} 12" in text


@pytest.mark.parametrize(
    "text",
    [
        "Alps.cscs.example refused",
        "on ALPS01, alps-2 and alps_3.cscs.example",
        "cscs.example has no route",
        "/scratch/alice",
        "~alice/runs",
        "~/alps/x",
        "runs/alice/x and ./alps/y and ../alps",
        "open('/data/my alps folder/x') failed",
        "`so-tui logs /a b/alps c/d`",
        '"/data/alps: x/y"',
        "file:///home/alice/x?y=alps",
        "https://alps:1234/x",
        "//alps/share",
        "PATH=/opt/alps:/usr/bin",
        "/a=b,alps/c",
        "/größe/alps",
        "alice@mail.example wrote",
        "user_alice and alice's and ALICE",
        "Alice Example did",
        "10.0.17.3:29500 and fe80::1:2 and ::1",
        "GPU-01b9bd69-6109-7d25-5094-d38997c81eb0 is busy",
    ],
)
def test_nothing_that_names_somebody_is_left_of_a_reason(text: str) -> None:
    left = _hidden(text, {"alps.cscs.example", "alice", "Alice Example"}).casefold()
    assert not [
        name
        for name in ("alps", "cscs", "alice", "größe", "scratch", "opt", "10.0.17", "fe80", "01b9")
        if name in left
    ]


def test_what_names_nobody_is_left() -> None:
    text = "takes about 57 s, and 9 s were left: 45.2 GB/s, 0.3 s/step (exit code 1) of alpsee"
    assert _hidden(text, {"alps", "al", "", "root", "localhost"}) == text


@pytest.mark.slow
def test_copies_are_measured_between_every_gpu_and_node() -> None:
    """The GPU's part runs the same code on small sizes, on the CPU."""
    nodes = _request_of(inspect_machine())["nodes"][:1]
    gpus = [{"index": 0, "node": nodes[0]["id"]}, {"index": 1, "node": None}]
    *told, last = stream_tool(
        "copies", {"nodes": nodes, "gpus": gpus, "scale": 0.01, "device": "cpu"}
    )
    assert [(found["gpu"], found["all_at_once"]) for found in last["copies"]] == [
        (0, False),
        (1, False),
        (0, True),
        (1, True),
    ]
    assert all(
        found[rate] > 1e6
        for found in last["copies"]
        for rate in ("pinned_d2h", "pageable_h2d", "both_ways")
    )
    assert len(told) == 3


@pytest.mark.slow
def test_a_machine_without_gpus_is_validated_with_tiny(tmp_path: Path) -> None:
    machine = replace(inspect_machine(), gpus=())
    told: list[str] = []
    report = validate(
        machine,
        tmp_path,
        seconds=170.0,
        gpus=0,
        share=True,
        tell=lambda text, share: told.append(text),
    )
    states = {outcome.key: (outcome.state, outcome.reason) for outcome in report.outcomes}
    assert states.keys() == {"machine", "rates", "ours", "zerooffload", "ours-clipped"}
    assert {key: state for key, (state, _) in states.items()}["ours"] == "measured", states
    assert not [key for key, (state, _) in states.items() if state in reports.FAILURES], states
    found = {outcome.key: result for outcome, result in reports.trained(report.outcomes)}
    first, *_, last = found["ours"].losses
    assert first is not None
    assert last is not None
    assert last < first
    assert valid("validate", (tmp_path / reports.FILE).read_text())["host"] == machine.hostname
    assert "TFLOPS by DeepSpeed's example" in (tmp_path / "report.md").read_text()
    assert machine.hostname not in (tmp_path / "shared" / "report.md").read_text()
    assert bool(report.agreement) == (
        "zerooffload" in found
    )  # on a busy host it may have been left out
    for one in report.agreement:
        assert one.largest is not None
        assert one.largest < 0.02


def test_the_machines_parts_are_those_that_it_has(tmp_path: Path) -> None:
    assert [
        one.pending.key
        for one in machine_parts._machine_measurements(
            replace(inspect_machine(), gpus=()), tmp_path
        )
    ] == ["machine", "rates"]


def loading(time: float, stage: str) -> PhaseRecord:
    return PhaseRecord(attempt=1, time=time, phase="loading", stage=stage)


RECORDS = (
    loading(5.0, "imports"),
    loading(8.0, "ranks"),
    loading(9.0, "data"),
    loading(9.5, "weights"),
    loading(10.0, "weights"),
    loading(12.0, "optimizer"),
    PhaseRecord(attempt=1, time=13.0, phase="training"),
    step_record(1, time=15.0),
    step_record(2, time=16.0),
    PhaseRecord(attempt=1, time=17.0, phase="training"),
    step_record(3, time=18.0),
    PhaseRecord(attempt=1, time=18.1, phase="saving"),
)
LENGTHS = {
    "preparation": 1,
    "launcher": 4,
    "imports": 3,
    "ranks": 1,
    "data": 0.5,
    "weights": 2.5,
    "optimizer": 1,
    "first_step": 2,
}


def test_every_second_belongs_to_a_phase() -> None:
    found: dict[str, Any] = msgspec.structs.asdict(
        _phase_seconds(RECORDS, begun=0.0, started=1.0, ended=20.0, over=20.5)
    )
    assert found == pytest.approx(
        {f"{name}_s": seconds for name, seconds in LENGTHS.items()}
        | {"steps_s": 3, "end_s": 2, "cleaning_s": 0.5}
    )
    assert sum(found.values()) == pytest.approx(20.5)


def test_what_an_older_trainer_did_not_record_took_no_time() -> None:
    found = _phase_seconds(RECORDS[1:], begun=0.0, started=1.0, ended=20.0, over=20.0)
    assert (found.launcher_s, found.imports_s, found.ranks_s) == (7.0, 0.0, 1.0)


def test_a_run_without_a_step_has_only_a_start_and_an_end() -> None:
    found = _phase_seconds((), begun=0.0, started=1.0, ended=4.0, over=5.0)
    assert (found.launcher_s, found.cleaning_s) == (3.0, 1.0)
    assert found.first_step_s == found.steps_s == found.end_s == 0.0


def test_a_report_shows_them_in_one_row_a_part() -> None:
    phases = _phase_seconds(RECORDS, begun=0.0, started=1.0, ended=20.0, over=20.5)
    outcome = next(one for one in REPORT.outcomes if one.key == "gpu")
    assert outcome.result is not None
    report = REPORT.with_outcome(replace(outcome, result=replace(outcome.result, phases=phases)))
    table = _markdown(report).partition("## Where the time went")[2].splitlines()
    cells = ["1.0", "4.0", "3.0", "1.0", "0.5", "2.5", "1.0", "2.0", "3.0", "2.0", "0.5", "20.5"]
    assert [line for line in table if line.startswith("| <")] == [
        f"| {outcome.title} | {' | '.join(cells)} |"
    ]
    assert "Where the time went" not in _markdown(REPORT)
