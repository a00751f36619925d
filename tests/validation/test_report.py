"""Reports are read as text and a figure, and the shared form names nobody."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from markdown_it import MarkdownIt
from msgspec import Struct
from msgspec.structs import fields, replace

from so_tui.doctor import Finding
from so_tui.machine import inspect_machine
from so_tui.machine.types import Software
from so_tui.plan.measured import Figures
from so_tui.validation import report as reports
from so_tui.validation import show
from so_tui.validation.report import Report
from so_tui.validation.show import markdown
from so_tui.validation.validate import validate
from tests.support.schemas import valid
from tests.validation.test_runner import EMPTY

MARKUP = "a | `b` [c](d) ![e](f) <b> *g* _i_ &amp; \x1b[2J\n# h"
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


RATE_NAMES = ("pinned_d2h", "pinned_h2d", "pageable_d2h", "pageable_h2d")
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


def test_the_text_has_every_part_and_the_figure_is_xml(tmp_path: Path) -> None:
    text = show.write(tmp_path, REPORT).read_text()
    assert "![losses](losses.svg)" in text
    drawn = " ".join(ElementTree.parse(tmp_path / "losses.svg").getroot().itertext())
    assert "<gpu> & more" in drawn
    assert "8,000" in text
    assert "2.00 / 1.90" in text
    assert "another: left-out: takes about 99 s" in text
    assert "losses" not in show.write(tmp_path, EMPTY).read_text()


def test_nothing_that_others_wrote_is_markup() -> None:
    found = reports.machine_found(inspect_machine(), (Finding("a", "note", MARKUP, "", "", ""),))
    outcomes = [measured("m", replace(found, cpu=MARKUP))]
    outcomes += [replace(trained(key, (8.0,)), title=MARKUP) for key in ("gpu", "ours")]
    outcomes.append(replace(REPORT.outcomes[-1], title=MARKUP, reason=MARKUP))
    report = replace(EMPTY, host=MARKUP, outcomes=tuple(outcomes))
    text = markdown(replace(report, agreement=reports._agreement_of(outcomes)))
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    assert {token.type for token in inline} == {"text", "softbreak"}
    shown = [child.content for child in inline if "`b`" in child.content]
    assert len(shown) == 11
    assert all("[c](d) ![e](f) <b> *g* _i_ &amp; \\x1b[2J # h" in text for text in shown)


TEXTS = {
    "Report": {"so_tui", "begun", "host", "shape"},
    "Outcome": {"key", "title", "reason"},
    "LossAgreement": {"key", "reference"},
    "MachineFound": {"cpu", "architecture"},
    "ReportedGpu": {"name"},
    "Software": {field.name for field in fields(Software) if "str" in str(field.type)},
    "Found": {"code", "severity", "title"},
    "Rates": {"measured"},
    "TrainingFound": {"settings"},
}
"""Fields of reports that hold texts. Before you add one: so-tui's own words and names of products
may be shared, anything else must be left out by ``shared``.
"""


def types_in(kind: Any) -> Iterator[Any]:
    yield kind
    if get_origin(kind) is not Literal:
        for argument in get_args(kind):
            yield from types_in(argument)


def texts_in(kind: type[Struct]) -> Iterator[tuple[str, str]]:
    for field in fields(kind):
        for found in types_in(field.type):
            if found is str:
                yield kind.__name__, field.name
            elif isinstance(found, type) and issubclass(found, Struct):
                yield from texts_in(found)


def test_a_shared_report_has_no_text_of_others() -> None:
    assert set(texts_in(Report)) == {(kind, name) for kind in TEXTS for name in TEXTS[kind]}
    found = reports.machine_found(inspect_machine(), (Finding("a", "note", "alps", "", "", ""),))
    versions = dict.fromkeys(TEXTS["Software"], "2.1.0+alps") | {"compiler": "alps"}
    software = replace(Software(numactl_works=True), **versions)
    failed = reports.Outcome(key="b", title="b", estimate_s=1, state="failed", reason="alps")
    outcomes = (measured("m", replace(found, software=software)), failed)
    nameless = reports.shared(replace(EMPTY, outcomes=outcomes))
    assert "alps" not in msgspec.json.encode(nameless).decode() + markdown(nameless)
    assert "- note: (a)" in markdown(nameless)
    left = nameless.outcomes[0].result
    assert isinstance(left, reports.MachineFound)
    assert (left.software.torch, left.software.compiler) == ("2.1.0", None)
    assert left.software.numactl_works


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
