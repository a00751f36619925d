"""Train every architecture of the presets through the trainer's own entry, with random weights and
without a network.

    PYTHONPATH=.:trainer python benchmarks/architectures.py --out architectures.json --jobs 4
        # scaled down: the table
    PYTHONPATH=.:trainer python benchmarks/architectures.py --out full.json --full qwen3-14b --gpus
        4 --set offload.ratio=0.5
    PYTHONPATH=.:trainer python benchmarks/architectures.py --out architectures.json --table
        # results so far, as Markdown

Scaled down, on the GPU if there is one, else (or with ``--device cpu``) on the CPU: a run of eight
steps, a second one that resumes from a copy of the first one's checkpoint of step 4, and the
export. The columns: does the loss fall; are the losses from step 5 on and the final states on disk
bit-identical to the uninterrupted run; does the export load without warnings, with the logits of
the checkpoint's weights.

``--full`` trains real shapes for ten steps and compares peak memory with the plan. Rows are
appended to the file; existing ones are measured again only with ``--again``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.architecture_models import NAMES, SAVED_STEP, STEPS, small_spec
from benchmarks.architecture_tables import Row, full_table, table
from benchmarks.device_memory import DeviceMemory
from so_tui.launch import command
from so_tui.launch.launch import prepare_again, write_launch
from so_tui.launch.supervisor.host import init_method, make_rendezvous
from so_tui.launch.supervisor.host_check import lock_folder
from so_tui.machine import Machine, inspect_machine
from so_tui.plan.plan import Plan
from so_tui.runs import RunDirectory, create_run, new_attempt
from so_tui.runs.directory import known_id, run_id
from so_tui.runs.records import EndRecord, MetricRecord, PhaseRecord, StepRecord
from so_tui.spec import RunSpec, find_preset, with_values

_ONE_MODEL = threading.Lock()
"""Building a model sets torch's default type for the whole process."""


def main() -> int:
    """Measure what the command line asks for and print the tables; return the exit code."""
    arguments = _arguments()
    rows: list[Row] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    if not arguments.table:
        machine = inspect_machine()
        if arguments.device == "cpu":
            machine = msgspec.structs.replace(machine, gpus=())
            os.environ["DS_ACCELERATOR"] = "cpu"  # Read when DeepSpeed is imported.
        rows = _measure(arguments, machine, rows)
    print(
        table([row for row in rows if row["kind"] == "scaled down"]),
        full_table([row for row in rows if row["kind"] == "full"]),
        sep="\n\n",
    )
    return int(any("error" in row for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("architectures.json"),
        help="file to which rows are appended",
    )
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, help="which presets, scaled down"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many in parallel, scaled down")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument(
        "--fork",
        action="store_true",
        help="scaled down, on the CPU: fork ranks from a process with all imports",
    )
    parser.add_argument(
        "--full", nargs="+", metavar="NAME", help="presets to train at full size instead"
    )
    parser.add_argument("--gpus", default="1", help="at full size: how many GPUs")
    parser.add_argument(
        "--set",
        metavar="A.B=VALUE",
        action="append",
        default=[],
        help="change the spec, as `so-tui run --set` does",
    )
    parser.add_argument("--limit-s", type=float, default=400, help="longest time for one run")
    parser.add_argument(
        "--again", action="store_true", help="measure again what is already in the file"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the results in the file and exit"
    )
    return parser.parse_args()


def _measure(arguments: argparse.Namespace, machine: Machine, rows: list[Row]) -> list[Row]:
    """Measure what is missing, and return all rows. The file is written after each."""
    device = machine.gpus[0].name if machine.gpus else f"CPU ({machine.cpu_name})"
    kind = "full" if arguments.full else "scaled down"
    gpus = int(arguments.gpus) if arguments.full else 1
    key = {"kind": kind, "device": device, "gpus": gpus}
    wanted = [
        name
        for name in arguments.full or arguments.only
        if arguments.again or not _done(rows, {"name": name} | key)
    ]
    work: Callable[[str], Row] = (
        (lambda name: _full(name, machine, arguments))
        if arguments.full
        else (lambda name: _scaled_down(name, machine, arguments))
    )
    with ThreadPoolExecutor(1 if arguments.full else arguments.jobs) as pool:
        running = {pool.submit(work, name): name for name in wanted}
        for future in as_completed(running):
            identity = {"name": running[future]} | key
            try:
                row = identity | future.result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                row = identity | {"error": str(error)[-3000:]}
            print(json.dumps(row), flush=True)
            rows = [other for other in rows if not _same(other, identity)] + [row]
            partial = arguments.out.with_suffix(".partial")
            partial.write_text(json.dumps(rows, indent=1) + "\n")
            partial.replace(arguments.out)
    return rows


def _changes(arguments: argparse.Namespace) -> dict[str, str]:
    return dict(text.split("=", 1) for text in arguments.set)


def _same(row: Row, identity: Row) -> bool:
    return all(row.get(name) == value for name, value in identity.items())


def _done(rows: list[Row], identity: Row) -> bool:
    return any(_same(row, identity) and "error" not in row for row in rows)


# -- scaled down -----------------------------------------------------------------------------------


def _scaled_down(name: str, machine: Machine, arguments: argparse.Namespace) -> Row:
    """Train a scaled-down preset, resume it, and compare.

    Raises:
        RuntimeError: A run failed.
    """
    with _ONE_MODEL:
        spec = with_values(
            small_spec(name, "superoffload" if machine.gpus else "auto"), _changes(arguments)
        )
    limit_s = arguments.limit_s
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        straight, plan = _run(
            spec, machine, Path(folder) / "straight", limit_s, fork=arguments.fork
        )
        again = create_run(spec, Path(folder) / "again")
        saved = f"step-{SAVED_STEP:06d}"
        shutil.copytree(straight.checkpoints_dir / saved, again.checkpoints_dir / saved)
        shutil.copyfile(
            straight.manifest_path, again.manifest_path
        )  # the checkpoints of another run would be refused
        _attempt(again, spec, machine, limit_s, fork=arguments.fork)
        losses, resumed = _losses(straight), _losses(again)
        with _ONE_MODEL:
            equal = _export_is_equal(straight)
        return {
            "model_type": spec.model.config["model_type"],
            "mode": plan.mode,
            "losses": list(losses.values()),
            "trains": losses[STEPS] < losses[1] - 0.5,
            "resume_exact": list(resumed) == list(range(SAVED_STEP + 1, STEPS + 1))
            and resumed == {step: loss for step, loss in losses.items() if step > SAVED_STEP}
            and _states(straight) == _states(again),
            "resume_loss_difference": max(
                abs(loss - losses[step]) for step, loss in resumed.items()
            ),
            "export_equal": equal,
            "seconds": round(time.monotonic() - began, 1),
        }


def _states(run: RunDirectory) -> list[bytes]:
    """Return the fp32 master weights and moments of the last step, as they are on disk."""
    return [
        path.read_bytes()
        for path in sorted((run.checkpoints_dir / f"step-{STEPS:06d}").rglob("*.states"))
    ]


def _export_is_equal(run: RunDirectory) -> bool:
    """Return whether the export loads completely, with the logits of the checkpoint's weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from so_tui_trainer.checkpoint_folder import newest
    from so_tui_trainer.export import weights
    from so_tui_trainer.model.weights import trained_shapes

    factory: Any = AutoModelForCausalLM
    model, info = factory.from_pretrained(
        run.path / "export", dtype=torch.bfloat16, output_loading_info=True
    )
    if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return False
    found = newest(run.checkpoints_dir, run_id(run))
    if found is None:
        raise RuntimeError(f"{run.path} has no checkpoint")
    other = factory.from_config(model.config, dtype=torch.bfloat16).eval()
    saved = weights(found.path, trained_shapes(other))
    other.load_state_dict(saved, strict=set(saved) == set(other.state_dict()))
    ids = torch.arange(5, 105)[None]
    with torch.no_grad():
        return torch.equal(model.eval()(input_ids=ids).logits, other(input_ids=ids).logits)


# -- full size -------------------------------------------------------------------------------------


def _full(name: str, machine: Machine, arguments: argparse.Namespace) -> Row:
    """Train a preset at full size.

    Raises:
        RuntimeError: The run failed.
    """
    changes = {
        "gpus": arguments.gpus,
        "model.weights": "random",
        "model.tokenizer": "builtin:tiny",
        "data.source": "builtin:tiny/rows.jsonl",
        "data.split": "train",
        "checkpoint.at_end": "false",
        "benchmark.warmup_steps": "3",
        "benchmark.measured_steps": "7",
    }
    spec = with_values(find_preset(name).spec, changes | _changes(arguments))
    began = time.time()
    with tempfile.TemporaryDirectory() as folder, DeviceMemory() as device:
        run, plan = _run(spec, machine, Path(folder) / "run", arguments.limit_s)
        records = _records(run)
    steps = [record for record in records if isinstance(record, StepRecord)]
    phases = [record for record in records if isinstance(record, PhaseRecord)]
    measured = steps[3:]
    return {
        "mode": plan.mode,
        "ratio": plan.ratio,
        "sequence_length": spec.data.sequence_length,
        "micro_batch": spec.train.micro_batch,
        "parameters": spec.model.parameter_count,
        "losses": [step.loss for step in steps],
        "start_s": {phase.detail or phase.phase: round(phase.time - began, 1) for phase in phases},
        "step_s": round(sum(step.step_s for step in measured) / len(measured), 3),
        "useful_tokens_per_s_total": round(
            sum(step.useful_tokens for step in measured) / sum(step.step_s for step in measured)
        ),
        "model_tflops_per_gpu": round(
            sum(step.model_tflops_per_gpu for step in measured) / len(measured), 1
        ),
        "gpu_reserved_bytes": {
            "planned": plan.gpu_reserved_bytes,
            "measured": max(step.gpu_memory_peak_bytes or 0 for step in steps),
        },
        "gpu_device_bytes": {"planned": plan.gpu_bytes, "measured": device.peak_bytes},
        "host_bytes": {
            "planned": sum(plan.host_bytes_per_node.values()),
            "measured": max(step.host_memory_bytes or 0 for step in steps),
        },
        "breakdown": msgspec.to_builtins(plan.breakdown),
    }


# -- runs ------------------------------------------------------------------------------------------


def _run(
    spec: RunSpec, machine: Machine, folder: Path, limit_s: float, *, fork: bool = False
) -> tuple[RunDirectory, Plan]:
    run = create_run(spec, folder)
    return run, _attempt(run, spec, machine, limit_s, fork=fork)


def _attempt(
    run: RunDirectory, spec: RunSpec, machine: Machine, limit_s: float, *, fork: bool = False
) -> Plan:
    """Start DeepSpeed's launcher as a supervisor would, or fork the one rank, and wait.

    Raises:
        RuntimeError: The run failed; the message is the end of the log.
    """
    launch = prepare_again(spec, machine, force=True)
    attempt = new_attempt(run)
    digest = write_launch(run, attempt, launch)
    here = launch.resolved(
        {
            "{RUN}": str(run.path),
            "{RUN_ID}": known_id(run),
            "{LAUNCH}": digest,
            "{ATTEMPT}": str(attempt),
            "{RENDEZVOUS}": init_method(make_rendezvous(lock_folder(), run.path, attempt)),
        }
    )
    env = command.apply(here.environment, os.environ)
    log = run.log_path(attempt, "here")
    if fork:
        _fork(run, attempt, env, log, limit_s)
    else:
        _launch(here.argv, env, run, log, limit_s)
    last = _records(run)[-1:]
    if not last or not isinstance(last[0], EndRecord) or last[0].state != "finished":
        raise RuntimeError(log.read_text(errors="replace")[-3000:])
    return launch.plan


def _launch(
    argv: Sequence[str], env: Mapping[str, str], run: RunDirectory, log: Path, limit_s: float
) -> None:
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env=env,
            cwd=run.path,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(timeout=limit_s)
        finally:
            # A rank that receives SIGTERM may save first, or ignore it while it prepares its
            # optimizer. Nothing may hold the GPUs.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _fork(run: RunDirectory, attempt: int, env: dict[str, str], log: Path, limit_s: float) -> None:
    """Run the one rank as a child of a server that has imported torch, DeepSpeed and transformers:
    a third of the time of a short run.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(
        ["so_tui_trainer.session", "transformers.models.auto.modeling_auto"]
    )
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    process = forks.Process(target=_rank, args=(run.path, attempt, env | single, log))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()


def _rank(run: Path, attempt: int, env: dict[str, str], log: Path) -> None:
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(run)
    from so_tui_trainer.entry import main as train

    sys.exit(train(["--run", str(run), "--attempt", str(attempt)]))


def _records(run: RunDirectory) -> list[MetricRecord]:
    paths = sorted(run.metrics_dir.glob("*.jsonl"))
    return [
        msgspec.json.decode(line, type=MetricRecord)
        for path in paths
        for line in path.read_bytes().splitlines()
    ]


def _losses(run: RunDirectory) -> dict[int, float]:
    return {record.step: record.loss for record in _records(run) if isinstance(record, StepRecord)}


if __name__ == "__main__":
    sys.exit(main())
