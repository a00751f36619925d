"""The planner against the trainer: the same settings predicted and measured, through the whole
program, on packed real rows.

    export PYTHONPATH=.:trainer
    python benchmarks/planner.py --set fit --gpus 1 --rows alpaca.json --out planner.json
        # measure, on one GPU; then with 2 and 4
    python benchmarks/planner.py --fit --out planner.json  # write so_tui/plan/constants.json
    python benchmarks/planner.py --set check --gpus 1 --rows alpaca.json --out planner.json
        # then the other set
    python benchmarks/planner.py --table --out planner.json  # both as Markdown
    python benchmarks/planner.py --sweep --rows alpaca.json --out sweep.json
        # is the recommendation the best?

Rows are appended as they come, and what is there is not measured again; ``--minutes`` ends early,
between two settings. A row keeps what was predicted when it was measured, with the constants of
that moment, and in ``host_rates`` how fast CPU Adam was on the ranks' cores right before and after,
as a share of what was calibrated. A sweep on one GPU forks its settings off a process that has
imported everything (``planner_sweep.py``), since a start takes longer than the steps.
``--shape tiny`` runs the same code without a GPU, to try it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.planner_fit import load_bytes, load_peak_bytes
from benchmarks.planner_settings import (
    GPU,
    OFFLOAD,
    SETS,
    SHAPES,
    START_S,
    WITH_LESS,
    Setting,
    h200_host,
    seconds_of,
)
from benchmarks.planner_sweep import measured_by_forks
from so_tui.launch.launch import prepare_again
from so_tui.launch.probe import (
    WARMUP_STEPS,
    measured_of,
    predicted_of,
    probe_spec,
    run_to_end,
    settings_text,
)
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.rates import DIGEST
from so_tui.plan.resources import Resources, resources_of
from so_tui.plan.workload import Workload
from so_tui.runs.records import StepRecord
from so_tui.spec import RunSpec, SoTuiError, find_preset, spec_tree, with_values

SWEEP_RATIOS = (0.3, 0.5, 0.7, 0.9, 1.0)
SWEEP_CORES = (0.7, 0.8, 0.9)
SWEEP_MICRO_BATCHES = (2, 4, 8)
Rows = Generator[dict[str, Any], None, None]


def main() -> int:
    arguments = _arguments()
    root = Path(__file__).resolve().parents[1]
    paths = (str(root), str(root / "trainer"), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, paths)
    )  # the run's processes stand in another folder
    rows: list[dict[str, Any]] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    )
    if arguments.table or arguments.fit:
        from benchmarks.planner_fit import fit, sweep_table, tables

        if arguments.fit:
            print(fit(rows, arguments.out.name))
        else:
            print(sweep_table(rows) if any(row["set"] == "sweep" for row in rows) else tables(rows))
        return 0
    name = "sweep" if arguments.sweep else arguments.set
    machine = inspect_machine()
    settings = (
        _sweep(arguments, machine) if arguments.sweep else [(setting, "") for setting in SETS[name]]
    )
    done = {row["key"] for row in rows if row["set"] == name and "error" not in row}
    todo = [
        (setting, label)
        for setting, label in _wanted(settings, arguments)
        if setting.key not in done
    ]
    if arguments.list:
        print(_listed([setting for setting, _ in todo], machine, arguments))
        return 0
    begun, failed = time.monotonic(), 0
    measured = (_rows_of_forks if _forked(arguments) else _rows_of_runs)(
        [setting for setting, _ in todo], machine, arguments
    )
    for setting, label in todo:
        needed_s = planned(setting, machine, arguments)[1]
        if time.monotonic() - begun + needed_s > 60 * arguments.minutes:
            print(
                f"{arguments.minutes:g} minutes are too few for the next setting: run the same "
                "command again for the rest",
                flush=True,
            )
            break
        row = {"set": name, "label": label} | next(measured)
        failed += "error" in row
        rows = [old for old in rows if (old["key"], old["set"]) != (row["key"], name)] + [row]
        _write(arguments.out, rows)
        print(_line(row), flush=True)
    measured.close()
    return min(failed, 1)


def _wanted(
    settings: list[tuple[Setting, str]], arguments: argparse.Namespace
) -> list[tuple[Setting, str]]:
    chosen = [
        (setting, label)
        for setting, label in settings
        if not arguments.gpus or setting.gpus == arguments.gpus
    ]
    if arguments.shape == "tiny":
        modes = {GPU: OFFLOAD}  # what a machine without GPU has not
        return [
            (
                replace(
                    setting,
                    size="tiny",
                    mode=modes.get(setting.mode, setting.mode),
                    gpus=min(setting.gpus, 2),
                ),
                label,
            )
            for setting, label in chosen
        ]
    return chosen


def _listed(settings: list[Setting], machine: Machine, arguments: argparse.Namespace) -> str:
    """Each setting with its verdict and about how long it takes: on this machine where it has GPUs,
    else on a host with H200s.
    """
    lines, whole_s = [], 0.0
    for setting in settings:
        plan, seconds = planned(setting, machine, arguments)
        whole_s += seconds
        lines.append(
            f"{setting.size} x {setting.gpus} {settings_text(plan)}: {plan.verdict}, each GPU "
            f"{plan.gpu_bytes / 2**30:.0f} GiB, host "
            f"{sum(plan.host_bytes_per_node.values()) / 2**30:.0f} GiB, about {seconds:.0f} s"
        )
    return "\n".join([*lines, f"{len(settings)} settings, about {whole_s / 60:.0f} minutes"])


def planned(
    setting: Setting, machine: Machine, arguments: argparse.Namespace
) -> tuple[Plan, float]:
    """The plan of a setting, and about how many seconds it takes."""
    plan = make_plan(
        spec_of(setting, arguments),
        machine if machine.gpus else h200_host(setting.gpus),
        probed=False,
    )
    return plan, seconds_of(plan, WARMUP_STEPS + arguments.steps) - (
        START_S if _forked(arguments) else 0.0
    )


def _forked(arguments: argparse.Namespace) -> bool:
    return bool(arguments.sweep and not arguments.whole and (arguments.gpus or 1) == 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--set", choices=list(SETS), help="measure this set of settings")
    what.add_argument(
        "--sweep",
        action="store_true",
        help="ratio x core fraction x micro-batch, and the recommendation, of one model",
    )
    what.add_argument(
        "--fit",
        action="store_true",
        help="fit the planner's constants to the rows of the set `fit`, and write them",
    )
    what.add_argument(
        "--table", action="store_true", help="print what was measured so far as Markdown"
    )
    parser.add_argument("--out", type=Path, default=Path("planner.json"), help="file of the rows")
    parser.add_argument(
        "--rows", type=Path, help="JSON file of Alpaca rows (default: the embedded ones)"
    )
    parser.add_argument("--gpus", type=int, help="only settings with so many GPUs")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no setting that would end later"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="measure nothing: say what is left, whether it fits, and how long it takes",
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps, after two that do not count"
    )
    parser.add_argument("--model", choices=list(SHAPES), default="4b", help="of the sweep")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="of the sweep: every setting through the whole program, as in the sets",
    )
    policies = ["full", "selective", "none"]
    parser.add_argument(
        "--kept",
        choices=policies,
        nargs="+",
        help=(
            "of the sweep's grid; default: what is recommended; others than the first with the "
            "largest core fraction alone"
        ),
    )
    parser.add_argument(
        "--limits-gib",
        type=float,
        nargs="+",
        default=[],
        help="of the sweep: also what is recommended for GPUs this small",
    )
    parser.add_argument(
        "--core-fractions", type=float, nargs="+", default=SWEEP_CORES, help="of the sweep"
    )
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument(
        "--shape", choices=["tiny"], help="everything at a tiny shape, on a machine without GPU"
    )
    parser.add_argument("--limit-s", type=float, default=240, help="longest time for one setting")
    return parser.parse_args()


def spec_of(setting: Setting, arguments: argparse.Namespace) -> RunSpec:
    """The run spec of a setting; the parameter table is made from the shape on meta tensors."""
    from so_tui_trainer.tools.presets import parameter_table

    values = {
        "gpus": str(setting.gpus),
        "data.sequence_length": str(
            min(arguments.sequence_length, 256) if arguments.shape else arguments.sequence_length
        ),
        "train.micro_batch": str(setting.micro_batch),
        "train.gradient_accumulation": str(setting.accumulation),
        # Plans are made for norms within the limit; those of random weights would exceed 1.
        "train.gradient_clipping": str(1000 * setting.clipping),
        "offload.mode": setting.mode,
        "offload.ratio": str(setting.ratio),
        "offload.states": setting.states,
        "offload.cpu_adam_cores_fraction": str(setting.cores),
        "model.activation_checkpointing": setting.kept,
    }
    if arguments.rows:
        values |= {"data.source": str(arguments.rows.resolve()), "data.format": "alpaca"}
    if arguments.shape:
        values["offload.sub_group_size"] = "100000"
    spec = with_values(find_preset("qwen3-4b-random").spec, values)
    model = msgspec.structs.replace(
        spec.model, config=spec.model.config | SHAPES[setting.size], parameters=()
    )
    model = msgspec.structs.replace(model, parameters=parameter_table(model))
    short = probe_spec(
        msgspec.structs.replace(spec, model=model), "spec", measured_steps=arguments.steps
    )
    return msgspec.structs.replace(short, name=f"bench-{setting.size}-{setting.mode}")


def _rows_of_runs(
    settings: Sequence[Setting], machine: Machine, arguments: argparse.Namespace
) -> Rows:
    """Each setting through the whole program, and predicted; or what went wrong."""
    for setting in settings:
        spec = spec_of(setting, arguments)
        plan = make_plan(spec, machine, probed=False)
        row = _identity(setting, spec, plan, machine)
        if not plan.fits:
            yield row | {"error": "; ".join(plan.reason_texts)}
            continue
        before = host_rate(plan, machine)
        row |= _run(spec, plan, machine, arguments)
        yield row if "error" in row else row | {"host_rates": [before, host_rate(plan, machine)]}


def _rows_of_forks(
    settings: Sequence[Setting], machine: Machine, arguments: argparse.Namespace
) -> Rows:
    """The same without what only a whole run shows, memory of the host: a start takes longer than
    the steps.
    """
    specs = [spec_of(setting, arguments) for setting in settings]
    plans = [make_plan(spec, machine, probed=False) for spec in specs]
    found = measured_by_forks(
        [spec for spec, plan in zip(specs, plans, strict=True) if plan.fits],
        machine,
        limit_s=arguments.limit_s,
    )
    for setting, spec, plan in zip(settings, specs, plans, strict=True):
        row = _identity(setting, spec, plan, machine)
        answer: dict[str, Any] = (
            next(found) if plan.fits else {"error": "; ".join(plan.reason_texts)}
        )
        if "measured" in answer:
            workload = msgspec.convert(answer["measured"]["workload"], Workload)
            answer["predicted"] = msgspec.to_builtins(predicted_of(spec, machine, workload)[1])
        yield row | answer


def _identity(setting: Setting, spec: RunSpec, plan: Plan, machine: Machine) -> dict[str, Any]:
    return {
        "key": setting.key,
        "setting": asdict(setting),
        "spec": _spec_tree(spec),
        "constants": DIGEST,
        "speed": msgspec.to_builtins(_resources(spec, machine).speed),
        "machine": _machine_tree(machine),
        "name": settings_text(plan),
    }


def _resources(spec: RunSpec, machine: Machine) -> Resources:
    return resources_of(machine, spec.gpus, spec.offload.cpu_adam_cores_fraction)


def host_rate(plan: Plan, machine: Machine) -> float | None:
    """What CPU Adam moves at this moment on the cores of each rank, all at once, as a share of what
    ``so-tui calibrate`` found here.

    A host whose memory and cores others use too may have halved since, and a step with it. None
    where nothing is known of the machine, or measuring failed.
    """
    from so_tui_trainer.tools.calibrate import slowest_together

    resources = _resources(plan.spec, machine)
    if resources.speed is None:
        return None
    known = resources.speed.adam_bytes_per_s(resources.cores, resources.ranks_per_node)
    try:
        return round(slowest_together([rank.cpus for rank in plan.binding]) / known, 2)
    except SoTuiError as error:
        print(f"the host's rate was not measured: {error}", file=sys.stderr, flush=True)
        return None


def _run(
    spec: RunSpec, plan: Plan, machine: Machine, arguments: argparse.Namespace
) -> dict[str, Any]:
    begun = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="so-tui-planner-"))
    try:
        run = run_to_end(prepare_again(spec, machine), scratch, _tell, limit_s=arguments.limit_s)
        measured = measured_of(run, plan)
    except SoTuiError as error:
        logs = "\n".join(
            path.read_text(errors="replace")[-1500:]
            for path in scratch.glob("*/attempts/*/output.*.log")
        )
        print(logs, flush=True)
        return {"error": str(error), "wall_s": round(time.monotonic() - begun, 1)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    planned, predicted = predicted_of(spec, machine, measured.workload)
    told = load_bytes(planned.spec, planned.breakdown, planned.gpus)
    found = msgspec.to_builtins(measured)
    found["figures"]["host_load_bytes"] = load_peak_bytes(run.records, run.samples)
    return {
        "measured": found,
        "predicted": msgspec.to_builtins(predicted) | {"host_load_bytes": told},
        "wall_s": round(time.monotonic() - begun, 1),
    }


def _sweep(arguments: argparse.Namespace, machine: Machine) -> list[tuple[Setting, str]]:
    """The recommended setting, the original preset's, what is recommended for smaller GPUs, and the
    grid, all with as many tokens in an optimizer step; the best guess first, so that an early end
    still says something.
    """
    size = "tiny" if arguments.shape else arguments.model
    tokens = max(SWEEP_MICRO_BATCHES)
    original = Setting(size, OFFLOAD, arguments.gpus or 1, micro_batch=4, accumulation=tokens // 4)
    recommended = _recommended(original, machine, arguments)
    labels: dict[Setting, list[str]] = {recommended: ["recommended"]}
    labels.setdefault(original, []).append("original")
    for limit_gib in arguments.limits_gib:
        gpus = tuple(
            msgspec.structs.replace(gpu, memory_total_bytes=int(limit_gib * 2**30))
            for gpu in machine.gpus
        )
        smaller = _recommended(original, msgspec.structs.replace(machine, gpus=gpus), arguments)
        labels.setdefault(smaller, []).append(WITH_LESS.format(limit_gib))
    kept, *others = arguments.kept or [recommended.kept]
    first, *fewer = sorted(arguments.core_fractions, reverse=True)
    for policy, cores in (
        (kept, first),
        *((other, first) for other in others),
        *((kept, cores) for cores in fewer),
    ):
        for ratio in SWEEP_RATIOS:
            for micro_batch in SWEEP_MICRO_BATCHES:
                labels.setdefault(
                    Setting(
                        size,
                        OFFLOAD,
                        original.gpus,
                        micro_batch,
                        ratio,
                        tokens // micro_batch,
                        policy,
                        1.0,
                        cores,
                    ),
                    [],
                )
    return [(setting, ", ".join(names)) for setting, names in labels.items()]


def _recommended(original: Setting, machine: Machine, arguments: argparse.Namespace) -> Setting:
    given = spec_of(original, arguments)
    model = msgspec.structs.replace(given.model, activation_checkpointing="auto")
    begun = msgspec.structs.replace(given, model=model, fixed=("gpus", "train.sequence_parallel"))
    best = recommend(begun, machine).spec
    return Setting(
        original.size,
        best.offload.mode,
        original.gpus,
        micro_batch=best.train.micro_batch,
        ratio=best.offload.ratio,
        accumulation=best.gradient_accumulation_steps,
        kept=best.model.activation_checkpointing,
        cores=best.offload.cpu_adam_cores_fraction,
    )


def _spec_tree(spec: RunSpec) -> dict[str, Any]:
    """Without where this machine keeps the data."""
    tree = spec_tree(spec)
    tree["data"]["source"] = Path(tree["data"]["source"]).name
    return tree


def _machine_tree(machine: Machine) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(machine, hostname="host", notes=())
    )
    for gpu in tree["gpus"]:
        gpu.update(uuid=None, pci_bus_id=f"{gpu['index']:04x}:00:00.0")
    return tree


def _tell(record: Any) -> None:
    if isinstance(record, StepRecord):
        print(f"  step {record.step}: {record.step_s:.3f} s", file=sys.stderr, flush=True)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['setting']['size']} x {row['setting']['gpus']} {row['name']}: {row['error']}"
    found, told = row["measured"]["figures"], row["predicted"]
    parts = [f"step {told['step_s']:.2f} / {found['step_s']:.2f} s"]
    parts += [
        f"{name} {told[key] / 1e9:.1f} / {found[key] / 1e9:.1f} GB"
        for name, key in (("GPU", "gpu_reserved_bytes"), ("host", "host_bytes"))
    ]
    return (
        f"{row['setting']['size']} x {row['setting']['gpus']} {row['name']}: predicted / measured "
        + ", ".join(parts)
    )


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
