"""``plan``: what fits on a machine and how fast, as a table or for one preset."""

from __future__ import annotations

from argparse import Namespace
from datetime import date

from so_tui.commands.common import (
    chosen_machine,
    chosen_options,
    chosen_spec,
    given_value,
    machine_for,
    note_problems,
    print_json,
    print_note,
    print_rich,
)
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan
from so_tui.spec import load_catalog
from so_tui.spec.errors import reject
from so_tui.spec.run_spec import SlurmSpec
from so_tui.trust.streams import console
from so_tui.trust.text import so_tui_command
from so_tui.units import thousands


def plan(arguments: Namespace) -> int:
    """Print the table of models and GPU counts of a machine, or one plan with all its figures."""
    if arguments.probe and (arguments.machine or not arguments.preset):
        raise reject(
            "not-this-machine" if arguments.machine else "preset-needed",
            "--probe",
            arguments.probe,
            "a probe trains on this machine" if arguments.machine else "a probe needs a preset",
            "Leave --machine out."
            if arguments.machine
            else "Name one: so-tui plan PRESET --probe.",
        )
    return _plan_one(arguments) if arguments.preset else _plan_table(arguments)


def _plan_one(arguments: Namespace) -> int:
    """Print the plan of a preset, or probe it."""
    from so_tui.plan.planner import recommend
    from so_tui.plan.show import plans_json, render_plan

    spec = chosen_spec(arguments)
    machine = machine_for(spec, arguments)
    chosen = recommend(spec, machine)
    if arguments.probe:
        return _probe(arguments, chosen, machine)
    if arguments.json:
        print_json(plans_json([chosen]))
    else:
        _note_place(arguments, machine, spec.slurm)
        print_rich(render_plan(chosen, machine))
        if chosen.fits:
            # On one line, so that it can be copied.
            command = so_tui_command("run", arguments.preset, *chosen_options(arguments))
            print_note("")
            print_note(f"to run it: {command}")
    return 0 if chosen.fits else 3


def _plan_table(arguments: Namespace) -> int:
    """Print the table of models and GPU counts."""
    from so_tui.launch.places import machine_of
    from so_tui.plan.planner import plan_table, unplannable
    from so_tui.plan.show import plans_json, render_table

    slurm = SlurmSpec(partition=arguments.partition or "")
    machine = chosen_machine(arguments) if arguments.machine else machine_of(slurm)
    counts = _counts(arguments)
    nodes = 1 if arguments.nodes is None else given_value("nodes", arguments.nodes)
    catalog = load_catalog()
    rows = plan_table(list(catalog.presets.values()), machine, counts, nodes)
    if arguments.json:
        print_json(plans_json([cell for row in rows for cell in row.cells.values()]))
    else:
        unplanned = {name: unplannable(preset.spec) for name, preset in catalog.presets.items()}
        left_out = [f"{name} is left out: {why}" for name, why in unplanned.items() if why]
        _note_place(arguments, machine, slurm)
        print_rich(render_table(rows, machine, console().width))
        for text in left_out:
            print_note(text)
        note_problems(catalog.problems)
    return 0


def _note_place(arguments: Namespace, machine: Machine, slurm: SlurmSpec) -> None:
    """Say from what the machine of a partition is known, unless the user has named it, and
    which site profiles could not be used.
    """
    from so_tui.launch.places import left_out_profiles, source_of

    for problem in left_out_profiles(slurm):
        print_note(f"Left out: {problem}")
    partition = slurm.partition
    if not partition or arguments.machine:
        return
    seen, profile = source_of(slurm)
    nodes = f"The nodes of partition {partition}"
    if seen is not None:
        print_note(
            f"{nodes}: as a job found {machine.label} on {date.fromtimestamp(seen)}.",
        )
    elif profile:
        print_note(
            f"{nodes}: {machine.label}, as the site profile says ({profile}). The first "
            "job records what they are.",
        )
    else:
        measure = so_tui_command("run", "tiny", "--partition", partition)
        print_note(
            f"{nodes} are not known: this is for the machine you are on. `{measure}` records them "
            "in a minute.",
        )


def _counts(arguments: Namespace) -> tuple[int, ...]:
    """Return the GPU counts of the table; empty for those of the machine.

    Raises:
        InputError: An option needs a preset (code ``preset-needed``), or ``--gpus`` is a list (code
            ``not-a-count``).
    """
    if arguments.set:
        raise reject(
            "preset-needed",
            "--set",
            "",
            "needs a preset",
            "Name one: so-tui plan PRESET --set ...",
        )
    if arguments.gpus is None:
        return ()
    count = given_value("gpus", arguments.gpus)
    if not isinstance(count, int):
        raise reject(
            "not-a-count",
            "--gpus",
            arguments.gpus,
            "is a list of GPUs",
            "Give a number for the table, or name a preset: so-tui plan PRESET --gpus 0,2.",
        )
    return (count,)


def _probe(arguments: Namespace, chosen: Plan, machine: Machine) -> int:
    """Train a few steps of the plan, store the difference from the prediction, and print it with
    the corrected plan.
    """
    import msgspec

    from so_tui.folders import probes_dir
    from so_tui.launch.launch import plan_refused, prepare_again
    from so_tui.launch.probe import (
        compared,
        measured_of,
        probe_of,
        probe_spec,
        run_to_end,
        write_rows,
    )
    from so_tui.plan import workload
    from so_tui.plan.measured import store
    from so_tui.plan.planner import make_plan
    from so_tui.plan.show import plans_json, render_comparison, render_plan
    from so_tui.runs import delete_run
    from so_tui.runs.records import PhaseRecord, StepRecord

    if not chosen.fits:
        raise plan_refused(chosen)

    def report(record: object) -> None:
        if isinstance(record, StepRecord):
            print_note(f"step {thousands(record.step)}: {record.step_s:.3f} s", stderr=True)
        elif isinstance(record, PhaseRecord):
            print_note(record.detail or record.phase, stderr=True)

    rows = None
    if arguments.probe == "random":
        known = workload.seen(chosen.spec)
        rows = write_rows(
            chosen.spec, known.workload if known else workload.Workload(), probes_dir()
        )
    try:
        launch = prepare_again(probe_spec(chosen.spec, arguments.probe, rows=rows), machine)
        ran = run_to_end(launch, probes_dir(), report)
    finally:
        if rows:
            rows.unlink()
    probe = probe_of(measured_of(ran, launch.plan), launch.plan, machine)
    path = store(machine, probe=probe)
    delete_run(ran.run)
    corrected = make_plan(chosen.spec, machine)
    if arguments.json:
        print_json(
            plans_json([corrected]) | {"probe": msgspec.to_builtins(probe), "path": str(path)}
        )
    else:
        print_rich(
            render_comparison(probe.settings, list(compared(probe))),
            "",
            render_plan(corrected, machine),
        )
    return 0 if corrected.fits else 3
