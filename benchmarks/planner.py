"""The planner against the trainer: the same settings predicted and measured, through the whole program, on packed real rows.

    export PYTHONPATH=.:trainer
    python benchmarks/planner.py --set fit --gpus 1 --rows alpaca.json --out planner.json     # measure, on one GPU; then with 2 and 4
    python benchmarks/planner.py --fit --out planner.json                                     # write so_tui/plan/constants.json
    python benchmarks/planner.py --set check --gpus 1 --rows alpaca.json --out planner.json   # then the other set
    python benchmarks/planner.py --table --out planner.json                                   # both as Markdown
    python benchmarks/planner.py --sweep --rows alpaca.json --out sweep.json                  # is the recommendation the best?

Rows are appended as they come, and what is there is not measured again; ``--minutes`` ends early, between two settings. A row keeps what
was predicted when it was measured, with the constants of that moment. ``--shape tiny`` runs the same code without a GPU, to try it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from so_tui.launch.probe import measured_of, predicted_of, probe_spec, run_to_end, settings_of
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.plan import make_plan, recommend
from so_tui.plan.calibration import calibration_of, speed_of
from so_tui.plan.constants import PATH as CONSTANTS
from so_tui.runs.records import StepRecord
from so_tui.spec import RunSpec, SoTuiError, find_preset, spec_tree, with_values

SHAPES: dict[str, dict[str, int | bool]] = {
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "tie_word_embeddings": False},
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""What of the Qwen3 4B shape each size changes."""
SWEEP_RATIOS = (0.3, 0.5, 0.7, 0.9, 1.0)
SWEEP_CORES = (0.7, 0.8, 0.9)
SWEEP_MICRO_BATCHES = (2, 4, 8)


@dataclass(frozen=True)
class Setting:
    size: str
    mode: str
    gpus: int
    micro_batch: int = 4
    ratio: float = 0.9
    accumulation: int = 1
    kept: str = "full"
    clipping: float = 1.0
    cores: float = 0.9

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


OFFLOAD, ZERO, GPU = "superoffload", "zerooffload", "gpu"
SETS: dict[str, tuple[Setting, ...]] = {
    "fit": (
        Setting("4b", OFFLOAD, 1),
        Setting("4b", ZERO, 1),
        Setting("1.7b", GPU, 1),
        Setting("4b", GPU, 1, micro_batch=2, kept="none"),
        Setting("8b", OFFLOAD, 1, micro_batch=2, ratio=0.9),
        Setting("1.7b", OFFLOAD, 1, micro_batch=8, ratio=0.5, kept="selective", clipping=0.0),
        Setting("8b", OFFLOAD, 1, micro_batch=2, ratio=0.7, kept="selective", accumulation=2),
        Setting("1.7b", ZERO, 1, micro_batch=2, ratio=0.5),
        Setting("4b", GPU, 2),
        Setting("8b", OFFLOAD, 2, ratio=0.5),
        Setting("4b", OFFLOAD, 4, clipping=0.0),
        Setting("8b", GPU, 4, micro_batch=2, kept="selective"),
    ),
    "check": (
        Setting("1.7b", OFFLOAD, 1),
        Setting("1.7b", GPU, 1, micro_batch=2, kept="none"),
        Setting("1.7b", ZERO, 1, ratio=1.0),
        Setting("4b", OFFLOAD, 1, ratio=0.3),
        Setting("4b", OFFLOAD, 1, micro_batch=2, ratio=0.7, kept="selective", clipping=0.0),
        Setting("4b", GPU, 1, kept="selective"),
        Setting("4b", ZERO, 1, micro_batch=2, ratio=0.5),
        Setting("8b", OFFLOAD, 1, ratio=1.0),
        Setting("8b", OFFLOAD, 1, micro_batch=2, ratio=0.3, clipping=0.0),
        Setting("4b", OFFLOAD, 2, ratio=0.5, accumulation=2),
        Setting("8b", OFFLOAD, 2, micro_batch=2),
        Setting("8b", ZERO, 2, ratio=0.7),
        Setting("8b", OFFLOAD, 4, ratio=0.7),
        Setting("4b", GPU, 4),
    ),
}


def main() -> int:
    arguments = _arguments()
    root = Path(__file__).resolve().parents[1]
    os.environ["PYTHONPATH"] = f"{root}:{root / 'trainer'}"  # the run's processes stand in another folder
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    if arguments.table or arguments.fit:
        from planner_fit import fit, sweep_table, tables

        if arguments.fit:
            print(fit(rows, arguments.out.name))
        else:
            print(sweep_table(rows) if any(row["set"] == "sweep" for row in rows) else tables(rows))
        return 0
    name = "sweep" if arguments.sweep else arguments.set
    machine = inspect_machine()
    settings = _sweep(arguments, machine) if arguments.sweep else [(setting, "") for setting in SETS[name]]
    begun, failed = time.monotonic(), 0
    for setting, label in settings:
        if arguments.gpus and setting.gpus != arguments.gpus:
            continue
        if arguments.shape == "tiny":
            setting = Setting(**asdict(setting) | {"size": "tiny", "mode": OFFLOAD if setting.mode == GPU else setting.mode})
        if any(row["key"] == setting.key and row["set"] == name and "error" not in row for row in rows):
            continue
        if time.monotonic() - begun > 60 * arguments.minutes:
            print(f"{arguments.minutes:g} minutes are over; run the same command again for the rest", flush=True)
            break
        row = {"set": name, "label": label} | _row(setting, machine, arguments)
        failed += "error" in row
        rows = [old for old in rows if (old["key"], old["set"]) != (row["key"], name)] + [row]
        _write(arguments.out, rows)
        print(_line(row), flush=True)
    return min(failed, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--set", choices=list(SETS), help="measure this set of settings")
    what.add_argument("--sweep", action="store_true", help="ratio x core fraction x micro-batch, and the recommendation, of one model")
    what.add_argument("--fit", action="store_true", help="fit the planner's constants to the rows of the set `fit`, and write them")
    what.add_argument("--table", action="store_true", help="print what was measured so far as Markdown")
    parser.add_argument("--out", type=Path, default=Path("planner.json"), help="file of the rows")
    parser.add_argument("--rows", type=Path, help="JSON file of Alpaca rows (default: the embedded ones)")
    parser.add_argument("--gpus", type=int, help="only settings with so many GPUs")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no setting after so long")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after two that do not count")
    parser.add_argument("--model", choices=list(SHAPES), default="4b", help="of the sweep")
    parser.add_argument("--kept", choices=["full", "selective", "none"], help="of the sweep; default: what is recommended")
    parser.add_argument("--core-fractions", type=float, nargs="+", default=SWEEP_CORES, help="of the sweep")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--shape", choices=["tiny"], help="everything at a tiny shape, on a machine without GPU")
    parser.add_argument("--limit-s", type=float, default=240, help="longest time for one setting")
    return parser.parse_args()


def spec_of(setting: Setting, arguments: argparse.Namespace) -> RunSpec:
    """The run spec of a setting; the parameter table is made from the shape on meta tensors."""
    from so_tui_trainer.tools.presets import parameter_table

    values = {
        "gpus": str(setting.gpus),
        "data.sequence_length": str(min(arguments.sequence_length, 256) if arguments.shape else arguments.sequence_length),
        "train.micro_batch": str(setting.micro_batch),
        "train.gradient_accumulation": str(setting.accumulation),
        "train.gradient_clipping": str(setting.clipping),
        "offload.mode": setting.mode,
        "offload.ratio": str(setting.ratio),
        "offload.cpu_adam_cores_fraction": str(setting.cores),
        "model.activation_checkpointing": setting.kept,
    }
    if arguments.rows:
        values |= {"data.source": str(arguments.rows.resolve()), "data.format": "alpaca"}
    if arguments.shape:
        values["offload.sub_group_size"] = "100000"
    spec = with_values(find_preset("qwen3-4b-random").spec, values)
    model = msgspec.structs.replace(spec.model, config=spec.model.config | SHAPES[setting.size], parameters=())
    model = msgspec.structs.replace(model, parameters=parameter_table(model))
    short = probe_spec(msgspec.structs.replace(spec, model=model), "spec", measured_steps=arguments.steps)
    return msgspec.structs.replace(short, name=f"bench-{setting.size}-{setting.mode}")


def _row(setting: Setting, machine: Machine, arguments: argparse.Namespace) -> dict[str, Any]:
    """One setting, run and predicted; or what went wrong."""
    spec = spec_of(setting, arguments)
    plan = make_plan(spec, machine, probed=False)
    row: dict[str, Any] = {
        "key": setting.key,
        "setting": asdict(setting),
        "spec": spec_tree(spec),
        "constants": hashlib.sha256(CONSTANTS.read_bytes()).hexdigest()[:12],
        "speed": msgspec.to_builtins(speed_of(machine, machine.gpus[0].name, calibration_of(machine))) if machine.gpus else None,
        "machine": _machine_tree(machine),
        "name": settings_of(plan),
    }
    if not plan.fits:
        return row | {"error": "; ".join(plan.reasons)}
    begun = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="so-tui-planner-"))
    try:
        run = run_to_end(spec, machine, scratch, _tell, limit_s=arguments.limit_s)
        measured = measured_of(run, plan)
    except SoTuiError as error:
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in scratch.glob("*/attempts/*/output.*.log"))
        print(logs, flush=True)
        return row | {"error": str(error), "wall_s": round(time.monotonic() - begun, 1)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _, predicted = predicted_of(spec, machine, measured.workload)
    return row | {
        "measured": msgspec.to_builtins(measured),
        "predicted": msgspec.to_builtins(predicted),
        "wall_s": round(time.monotonic() - begun, 1),
    }


def _sweep(arguments: argparse.Namespace, machine: Machine) -> list[tuple[Setting, str]]:
    """The original preset's setting, the recommended one, and the grid, all with as many tokens in an optimizer step; the best guess first,
    so that an early end still says something.
    """
    size = "tiny" if arguments.shape else arguments.model
    tokens = max(SWEEP_MICRO_BATCHES)
    original = Setting(size, OFFLOAD, arguments.gpus or 1, micro_batch=4, accumulation=tokens // 4)
    given = spec_of(original, arguments)
    model = msgspec.structs.replace(given.model, activation_checkpointing=arguments.kept or "auto")
    best = recommend(msgspec.structs.replace(given, model=model), machine).spec
    recommended = Setting(
        size,
        best.offload.mode,
        original.gpus,
        micro_batch=best.train.micro_batch,
        ratio=best.offload.ratio,
        accumulation=best.micro_steps,
        kept=best.model.activation_checkpointing,
        cores=best.offload.cpu_adam_cores_fraction,
    )
    grid = [
        Setting(size, OFFLOAD, original.gpus, micro_batch, ratio, tokens // micro_batch, recommended.kept, 1.0, cores)
        for cores in sorted(arguments.core_fractions, reverse=True)
        for ratio in SWEEP_RATIOS
        for micro_batch in SWEEP_MICRO_BATCHES
    ]
    print(f"{len(grid)} settings of the grid, about {len(grid) * 0.6:.0f} minutes", flush=True)
    return [(recommended, "recommended"), (original, "original"), *((setting, "grid") for setting in grid)]


def _machine_tree(machine: Machine) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(machine, hostname="host", notes=()))
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
        f"{name} {told[key] / 1e9:.1f} / {found[key] / 1e9:.1f} GB" for name, key in (("GPU", "gpu_reserved_bytes"), ("host", "host_bytes"))
    ]
    return f"{row['setting']['size']} x {row['setting']['gpus']} {row['name']}: predicted / measured " + ", ".join(parts)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
