"""Measure steps of one GPU beside their bounds: without offload, with each format of the states,
and at the ratio that the planner takes.

    PYTHONPATH=.:trainer python benchmarks/bounds.py --out bounds.json --layers 18
        # an H100: no offload, nothing recomputed
    PYTHONPATH=.:trainer python benchmarks/bounds.py --out bounds.json
        # the whole Qwen3-4B shape, for an H200
    PYTHONPATH=.:trainer python benchmarks/bounds.py --out bounds.json --table  # what the file has

Qwen3-4B shape, random weights, 4 x 4096 tokens a step, packed rows. With half the layers a step has
half the parameters and takes half as long: what Adam has to do, and the time that hides it, keep
their proportion. Each setting runs in a process that is forked with everything imported, with the
trainer's own model, batches, engine and plan; only supervisor and records are missing. The norm
never exceeds the limit. A row is written as soon as it is measured, so what the time does not
suffice for is only missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.planner_settings import SHAPES
from benchmarks.planner_sweep import measured_by_forks
from benchmarks.speed import with_layers
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.plan.fit import Candidates, in_mode, target_of
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.search import at_fastest_ratio, policies, with_policy
from so_tui.spec import find_preset, with_values
from so_tui.spec.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer")]


FLOOR = "no offload"


@dataclass(frozen=True)
class Setting:
    name: str
    mode: str = "superoffload"
    states: str = "fp32"
    ratio: float | None = 0.9
    """None: the one that the planner takes."""
    speed: float | None = None
    """The least share of no offload's speed."""


SETTINGS = (
    Setting(FLOOR, mode="gpu"),
    Setting("fp32"),
    Setting("recommended ratio", ratio=None, speed=0.9),
    Setting("int8-moments", states="int8-moments", speed=0.95),
    Setting("bf16-moments", states="bf16-moments", speed=0.95),
)
LONGEST = 1.10
"""Times the bound: what an fp32 step at ratio 0.9 may take."""


def main() -> int:
    """Measure what is missing and print the table; return the exit code."""
    arguments = _arguments()
    rows: list[dict[str, Any]] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    )
    if not arguments.table:
        for row in _measured(
            arguments,
            {
                row["setting"]
                for row in rows
                if row["layers"] == arguments.layers and "error" not in row
            },
        ):
            rows.append(row)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(
                json.dumps(
                    {
                        key: row[key]
                        for key in ("setting", "error", "figures", "planned_step_s")
                        if key in row
                    }
                ),
                flush=True,
            )
    here = {row["setting"]: row for row in rows if row["layers"] == arguments.layers}
    print(table(here))
    return int(any("error" in row for row in here.values()) or len(here) < len(SETTINGS))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bounds.json"), help="file to which rows are appended"
    )
    parser.add_argument("--layers", type=int, default=36, help="layers of the 36 that are used")
    parser.add_argument("--data", default="builtin:tiny/rows.jsonl", help="rows to train on")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[setting.name for setting in SETTINGS],
        help="what to measure, in this order",
    )
    parser.add_argument(
        "--budget-s", type=float, default=150.0, help="nothing is started that would end later"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="A.B=VALUE", help="more keys of the spec"
    )
    parser.add_argument("--tiny", action="store_true", help="scaled down, on the CPU")
    parser.add_argument("--table", action="store_true", help="print what is in the file and exit")
    return parser.parse_args()


def _measured(arguments: argparse.Namespace, done: set[str]) -> Iterator[dict[str, Any]]:
    """Measure the settings that are not done, as far as the time suffices."""
    machine, end = inspect_machine(), time.monotonic() + arguments.budget_s
    wanted = [
        setting
        for setting in SETTINGS
        if setting.name in (arguments.only or [each.name for each in SETTINGS])
    ]
    wanted = [setting for setting in wanted if setting.name not in done]
    if not wanted:
        return
    plans = [_plan(setting, arguments, machine) for setting in wanted]
    found = measured_by_forks(in_time(plans, end), machine, limit_s=arguments.budget_s)
    for setting, plan in zip(wanted, plans, strict=True):
        offload = plan.spec.offload
        row = {
            "setting": setting.name,
            "layers": arguments.layers,
            "ratio": offload.ratio if offload.mode == "superoffload" else 0.0,
            "states": offload.states,
            "activation_checkpointing": plan.spec.model.activation_checkpointing,
            "second_states_bytes": sum(
                term.bytes for term in plan.breakdown if term.kind == "second-states"
            ),
            "planned_step_s": plan.step_s,
            "planned": msgspec.to_builtins(plan.step),
            "gpus": [{"name": gpu.name, "uuid": gpu.uuid} for gpu in machine.gpus[:1]],
            "cores": len(machine.allowed_cpus),
            "begun": time.time(),
        }
        begun = time.monotonic()
        if not plan.fits:
            yield row | {"error": "; ".join(plan.reason_texts)}
        elif (answer := next(found, None)) is None:
            print(
                f"no time left for {setting.name} and what follows: run it again with the same "
                "--out",
                file=sys.stderr,
            )
            return
        else:
            told = answer.get("measured", {})
            yield (
                row
                | (_figures(told) if told else answer)
                | {"wall_s": round(time.monotonic() - begun, 1)}
            )


def in_time(plans: Sequence[Plan], end: float) -> Iterator[RunSpec]:
    """Yield what is to be measured, of the plans that fit, up to the first that would end too
    late.
    """
    for plan in plans:
        if plan.fits and time.monotonic() + seconds_of(plan) > end:
            return
        if plan.fits:
            yield plan.spec


def _figures(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "figures": told["figures"] | {"adam_busy_s": told["adam_busy_s"]},
        "each_step_s": told["each_step_s"],
    }


def seconds_of(plan: Plan) -> float:
    """Return about how long a fork takes: model and engine, pages of the states, which are what
    takes the longest, and the steps.
    """
    host = sum(
        term.bytes
        for term in plan.breakdown
        if term.location == "node" and term.confidence == "exact"
    )
    steps = plan.spec.benchmark.warmup_steps + plan.spec.benchmark.measured_steps
    return 8.0 + host / 2.6e9 + steps * (plan.step_s or 0.0)


def _plan(setting: Setting, arguments: argparse.Namespace, machine: Machine) -> Plan:
    spec = _spec(setting, arguments)
    if setting.ratio is None:
        spec = in_mode(spec, "superoffload", recommended_ratio(spec, machine))
    return make_plan(spec, machine, probed=False)


def recommended_ratio(spec: RunSpec, machine: Machine) -> float:
    """Return the offload ratio that the planner takes for a spec that is to offload, whether or not
    it would fit without.
    """
    target = target_of(spec, machine, probed=False)
    candidates = (
        Candidates(with_policy(spec, policy), target) for policy in policies(spec, target)
    )
    tried = [found for each in candidates if (found := each.offloaded)]
    fitting = [found for found in tried if found.verdict == "fits"]
    return at_fastest_ratio(spec, max(fitting or tried, key=attrgetter("rate"))).spec.offload.ratio


def _spec(setting: Setting, arguments: argparse.Namespace) -> RunSpec:
    spec = find_preset("qwen3-4b-random").spec
    model = with_layers(spec.model, arguments.layers)
    if arguments.tiny:
        model = with_layers(msgspec.structs.replace(model, config=model.config | SHAPES["tiny"]), 4)
    spec = msgspec.structs.replace(spec, model=model)
    values = {
        "gpus": "1",
        "data.source": arguments.data,
        "data.sequence_length": "128" if arguments.tiny else "4096",
        "train.micro_batch": "4",
        "train.gradient_clipping": "1000",
        "offload.mode": setting.mode,
        "offload.states": setting.states,
        "offload.ratio": str(setting.ratio or 0.9),
        "offload.sub_group_size": "20000" if arguments.tiny else "100000000",
        "benchmark.warmup_steps": "2",
        "benchmark.measured_steps": "5",
    }
    return with_values(spec, values | dict(change.split("=", 1) for change in arguments.set))


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Format the last row of each setting as a Markdown table, with its bound and whether it keeps
    it.
    """
    lines = [
        (
            "| setting | ratio | recomputed | s/step | planned | forward | backward | exposed | "
            "Adam busy |"
            " x no offload's speed | limit | kept |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    floor = rows.get(FLOOR, {}).get("figures")
    for setting in SETTINGS:
        row = rows.get(setting.name, {})
        if "figures" not in row:
            lines.append(f"| {setting.name} | not measured {row.get('error', '')} |")
            continue
        found = row["figures"]
        limit, kept = _limit(setting, found, floor) if floor else ("", "")
        speed = f"{floor['step_s'] / found['step_s']:.2f}" if floor else ""
        lines.append(
            f"| {setting.name} | {row['ratio']:.2f} | {row['activation_checkpointing']} | "
            f"{found['step_s']:.3f} |"
            f" {row['planned_step_s']:.3f} | {found['forward_s']:.3f} | {found['backward_s']:.3f} "
            f"| {found['exposed_optimizer_s']:.3f} |"
            f" {found['adam_busy_s']:.3f} | {speed} | {limit} | {kept} |"
        )
    return "\n".join(lines)


def _limit(setting: Setting, found: dict[str, float], floor: dict[str, float]) -> tuple[str, str]:
    """Return what a setting must keep, in words, and whether it does."""
    if setting.name == FLOOR:
        return "", ""
    if setting.speed is not None:
        return f">= {setting.speed:.2f} x", "yes" if floor["step_s"] / found[
            "step_s"
        ] >= setting.speed else "no"
    bound = max(floor["step_s"], found["forward_s"] + found["adam_busy_s"])
    limit_s = LONGEST * bound
    return f"<= {limit_s:.3f} s = {LONGEST:.2f} x max(no offload, forward + Adam)", "yes" if found[
        "step_s"
    ] <= limit_s else "no"


if __name__ == "__main__":
    sys.exit(main())
