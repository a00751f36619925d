"""What is shown is what runs: all presets on all machines that have a name."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from so_tui.launch.launch import prepare, preview
from so_tui.machine.known import MACHINES, named_machine
from so_tui.machine.types import Machine
from so_tui.plan.gist import faster_than
from so_tui.plan.notes import (
    CompactStatesOption,
    FasterOffload,
    FasterWithout,
    FitsHere,
    GpusChosen,
    LargerSteps,
    NextBest,
    SettingsReplaced,
)
from so_tui.plan.plan import Plan, PlanRow
from so_tui.plan.planner import plan_table, recommend, replan
from so_tui.plan.rates import about_as_fast
from so_tui.plan.resources import rank_counts
from so_tui.spec import RunSpec, with_values
from so_tui.spec.run_spec import MACHINE_DECIDES
from so_tui.ui.form import Draft, values_of
from tests.support.planning import CATALOG

MODES = ("auto", "superoffload", "zerooffload", "gpu")
PRESETS = [preset for preset in CATALOG.presets.values() if preset.origin == "built-in"]


@cache
def rows(machine: str, mode: str) -> dict[str, PlanRow]:
    """Return the table with a mode that a person set."""
    specs = [with_values(preset.spec, {"offload.mode": mode}) for preset in PRESETS]
    chosen = [
        type(preset)(spec=spec, origin="file", path="")
        for preset, spec in zip(PRESETS, specs, strict=True)
    ]
    return {row.preset: row for row in plan_table(chosen, named_machine(machine))}


@cache
def previewed(preset: str, edits: tuple[tuple[str, str], ...], machine: str) -> RunSpec:
    spec = with_values(CATALOG.presets[preset].spec, dict(edits))
    return preview(spec, named_machine(machine))[0].spec


def shown_in_form(preset: str, edits: dict[str, str], machine: str) -> dict[str, str]:
    """Return what Configure shows of the settings: opened, edited, and planned after each edit."""
    draft = Draft(CATALOG.presets[preset].spec)
    draft.resolve(previewed(preset, (), machine), machine)
    for path, text in edits.items():
        if draft.enter(path, text) or draft.fix(path):
            draft.resolve(previewed(preset, tuple(draft.edits.items()), machine), machine)
    assert draft.chosen.keys() | draft.edits.keys() == set(MACHINE_DECIDES)
    return {path: draft.values[path] for path in MACHINE_DECIDES}


def assert_nothing_faster_is_named(plan: Plan, fixed: set[str]) -> None:
    """Unless a person's own value forbids it, and then it is named."""
    for fact in (*plan.reasons, *plan.warnings):
        assert not isinstance(fact, FasterOffload)
        if isinstance(fact, NextBest):
            assert fact.slower >= 0 or fact.alike
        if isinstance(fact, FasterWithout):
            assert {change.key for change in fact.changes} <= fixed
            assert not about_as_fast(fact.step_s, fact.given_step_s)
        if isinstance(fact, CompactStatesOption):
            assert "option" in fact.message


@pytest.mark.parametrize("machine", ["gh200-480", "gb200-4"])
def test_the_table_names_what_would_be_faster_as_the_plan_does(machine: str) -> None:
    table, here = rows(machine, "auto"), named_machine(machine)
    told = []
    for preset in PRESETS:
        for plan in table[preset.spec.name].cells.values():
            if plan.recommended:
                told += faster_than(plan)
                assert plan.warnings == recommend(preset.spec, here).warnings
    assert any(isinstance(fact, LargerSteps) for fact in told)


def test_settings_that_fit_elsewhere_are_kept() -> None:
    there, here = (named_machine(name) for name in ("gh200-480", "gh200-2"))
    chosen = recommend(CATALOG.presets["qwen3-14b"].spec, there).spec
    again = replan(chosen, here)
    assert (again.spec, again.replaced_texts) == (chosen, ())


def test_settings_that_do_not_fit_elsewhere_are_replaced_and_named() -> None:
    """For as many GPUs, and without a person's own."""
    small = named_machine("gh200-quad-120")
    given = with_values(
        CATALOG.presets["llama-3.1-8b"].spec, {"model.activation_checkpointing": "none"}
    )
    chosen = recommend(with_values(given, {"gpus": "1"}), named_machine("gh200-480")).spec
    stored = with_values(chosen, {"gpus": "auto", "offload.ratio": "0.1"})
    begun = with_values(stored, {"offload.ratio": "auto"})
    begun = begun.changed("offload", ratio=0.1)
    plan = replan(begun, small)
    (fact,) = (warning for warning in plan.warnings if isinstance(warning, SettingsReplaced))
    assert plan.fits
    assert "offload.ratio" in {change.key for change in fact.changes}
    assert (plan.spec.gpus, plan.spec.fixed) == (1, ("model.activation_checkpointing",))
    assert plan.spec.model.activation_checkpointing == "none"
    assert fact.message in plan.replaced_texts
    kept = replan(stored, small)
    assert (kept.fits, kept.ratio, kept.replaced_texts) == (False, 0.1, ())


@pytest.mark.parametrize(
    ("name", "machine", "given", "chosen"),
    [("qwen3-14b", "gh200-quad-120", 1, 2), ("tiny", "gh200-480", 2, 1)],
)
def test_another_number_of_gpus_is_explained(
    name: str, machine: str, given: int, chosen: int
) -> None:
    host = named_machine(machine)
    plan = recommend(CATALOG.presets[name].spec, host)
    (fact,) = (fact for fact in plan.reasons if isinstance(fact, GpusChosen))
    assert (fact.gpus, fact.given, fact.available) == (chosen, given, len(host.gpus))
    assert str(given) in fact.message
    assert ("has 1" in fact.message) == (given > len(host.gpus))


def test_a_value_that_does_not_fit_is_refused_with_one_that_does() -> None:
    """And what is left open follows it."""
    machine = named_machine("gh200-quad-120")
    own = {"gpus": "1", "offload.ratio": "0.95"}
    spec = with_values(CATALOG.presets["qwen3-14b"].spec, own)
    refused = recommend(spec, machine)
    (advice,) = (fact for fact in refused.remedies if isinstance(fact, FitsHere))
    assert (refused.fits, [change.key for change in advice.changes]) == (False, ["offload.ratio"])
    followed = {change.key: str(change.after) for change in advice.changes}
    assert recommend(with_values(spec, followed), machine).fits


@pytest.fixture
def _planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plan of equal specs once, whoever asks for it."""
    plans: dict[bytes, Plan] = {}

    def once(spec: RunSpec, machine: Machine) -> Plan:
        key = msgspec.json.encode((spec, machine.label))
        return plans.get(key) or plans.setdefault(key, recommend(spec, machine))

    monkeypatch.setattr("so_tui.plan.planner.recommend", once)


@pytest.mark.slow
@pytest.mark.usefixtures("_planned_once")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_view_of_a_preset_has_the_same_settings(machine: str, mode: str) -> None:
    host = named_machine(machine)
    for preset in PRESETS:
        row = rows(machine, mode)[preset.spec.name]
        own = {} if mode == "auto" else {"offload.mode": mode}
        for count in (None, *rank_counts(host)):
            edits = own if count is None else own | {"gpus": str(count)}
            wanted = with_values(preset.spec, edits)
            plan, where = preview(wanted, host)[0], (preset.spec.name, count)
            cell = row.cells[plan.gpus]
            expected = (plan.spec, plan.verdict, plan.step_s, plan.gpu_bytes)
            told = with_values(
                cell.spec, {"gpus": "auto"} if count is None else {"gpus": str(count)}
            )
            assert (told, cell.verdict, cell.step_s, cell.gpu_bytes) == expected, where
            if count is None:
                assert cell.recommended == (plan.verdict == "fits"), where
            if plan.possible:
                assert prepare(wanted, host, force=True).plan == plan, where
            settings = values_of(plan.spec)
            form = shown_in_form(preset.spec.name, edits, machine)
            assert form == {path: settings[path] for path in MACHINE_DECIDES}, where
            assert set(plan.spec.fixed) == edits.keys()
            assert_nothing_faster_is_named(plan, set(edits))


def test_what_was_chosen_for_gpus_is_not_run_without_any() -> None:
    begun = recommend(CATALOG.presets["tiny"].spec, named_machine("h200-8"))
    assert begun.mode == "gpu"
    without = msgspec.structs.replace(named_machine("h200-8"), gpus=())
    again = replan(begun.spec, without)
    assert not again.possible
    assert again.mode == "gpu"
