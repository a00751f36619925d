"""A few real steps beside what was predicted for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.launch import probe as probing
from so_tui.machine.types import Machine
from so_tui.model.flops import flops_of, model_flops
from so_tui.plan.measured import Figures, Probe, calibration_of, store
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.workload import Workload
from so_tui.runs import RunDirectory
from so_tui.runs.records import RunState
from so_tui.spec import find_preset, with_values
from so_tui_trainer.data import documents as cache
from so_tui_trainer.data import tokens
from so_tui_trainer.data.documents import fill
from tests.support.machines import x86
from tests.support.plans import cpu_machine
from tests.support.records import step_record
from tests.support.schemas import valid

ON_GPU = {"offload.mode": "gpu", "model.activation_checkpointing": "full"}
SPEC = with_values(find_preset("qwen3-4b-random").spec, ON_GPU)
ON_HOST = {"offload.mode": "superoffload", "offload.ratio": "0.9"}
HOST, GPU = cpu_machine(), x86("NVIDIA H200").gpus[0]
H200: Machine = replace(HOST, gpus=(replace(GPU, numa_node=0, cpus=HOST.allowed_cpus),))


def probe_with(workload: Workload, predicted: Figures, actual: Figures, plan: Plan) -> Probe:
    return Probe(
        measured="",
        model="m",
        mode=plan.mode,
        ranks=1,
        settings=probing.settings_text(plan),
        workload=workload,
        predicted=predicted,
        actual=actual,
    )


def six_steps(kept: Sequence[int] = (0,) * 6) -> probing._Ran:
    """Return six steps, with how many the engine had kept so far."""
    steps = [step_record(number, kept_steps=so_far) for number, so_far in enumerate(kept, 1)]
    finished = RunState(name="run", state="finished")
    return probing._Ran(RunDirectory(Path("run")), finished, [*steps], [])


@pytest.mark.parametrize(
    ("known", "length", "trained"),
    [
        (Workload(), 2048, 1.0),
        (Workload(attended_tokens=300, trained_share=0.5, useful_share=1.0), 300, 0.5),
    ],
    ids=["nothing is known of the data", "documents of 300 tokens, half of them trained"],
)
def test_rows_are_as_planned(known: Workload, length: int, trained: float, tmp_path: Path) -> None:
    """By a probe without data of its own."""
    sizes = {"data.sequence_length": "2048", "train.micro_batch": "3"}
    spec = with_values(find_preset("tiny").spec, sizes)
    rows = probing.write_rows(spec, known, tmp_path / "probes")
    assert probing.write_rows(spec, known, tmp_path / "probes") == rows
    short = probing.probe_spec(spec, "random", rows=rows)
    documents = cache.read(tokens.prepare(short), short.data)
    lengths = documents.lengths
    assert lengths.mean() == pytest.approx(length, rel=0.1)
    assert documents.trained.mean() == pytest.approx(trained, abs=0.08)
    sequences = fill(lengths, documents.epoch(0), short.data)
    assert len(sequences) >= 3
    assert sequences.efficiency(lengths, 2048) > 0.7


def test_the_data_is_read_back_from_what_its_steps_did() -> None:
    plan, useful = make_plan(SPEC, H200), 16_000
    tflops = model_flops(flops_of(SPEC.model), useful, [160] * 100) / 2.0 / 1e12  # of 2 s
    counts = {"useful_tokens": useful, "trained_tokens": 8_192}
    found = probing._workload_of([step_record(3, model_tflops_per_gpu=tflops, **counts)], plan)
    assert found.attended_tokens == pytest.approx(160, abs=1)
    assert (found.trained_share, found.useful_share) == (0.5, useful / plan.tokens_per_step)


def test_a_probe_trains_the_plans_settings_and_keeps_nothing() -> None:
    wishes = {"checkpoint.every_steps": "5", "checkpoint.every_minutes": "0.01"}
    wishes |= dict.fromkeys(("checkpoint.export", "tracking.wandb", "tracking.tensorboard"), "true")
    wishes |= {"data.evaluation_split": "test", "data.subset": "main"}
    spec = make_plan(with_values(SPEC, wishes), H200).spec
    short = probing.probe_spec(spec, "random")
    tracking, data, saved = short.tracking, short.data, short.checkpoint
    assert (tracking.wandb, tracking.tensorboard) == (False, False)
    assert (data.subset, data.evaluation_split, data.held_out) == ("", "", 0)
    assert (short.offload, short.train.micro_batch, data.sequence_length) == (spec.offload, 4, 4096)
    assert (saved.every_steps, saved.every_minutes, saved.at_end, saved.export) == (0, 0, 0, 0)
    assert (short.model.weights, data.source) == ("random", "builtin:tiny/rows.jsonl")
    assert data.packing
    unpacked = with_values(spec, {"data.packing": "false"})
    assert not probing.probe_spec(unpacked, "random").data.packing
    own = probing.probe_spec(with_values(spec, {"model.weights": "pretrained"}), "spec")
    assert (own.model.weights, own.data.source) == ("pretrained", spec.data.source)


def test_prediction_is_compared_figure_by_figure() -> None:
    workload = Workload(attended_tokens=160, trained_share=0.5, useful_share=0.97)
    plan, predicted = probing.predicted_of(SPEC, H200, workload)
    actual = replace(
        predicted,
        step_s=2 * predicted.step_s,
        exposed_optimizer_s=0.0,
        gpu_reserved_bytes=predicted.gpu_reserved_bytes // 2,
        gpu_device_bytes=0,
    )
    probe = probe_with(workload, predicted, actual, plan)
    errors = {name: error for name, _, _, error in probing.compared(probe)}
    assert errors["step_s"] == pytest.approx(-0.5)
    assert errors["gpu_reserved_gib"] == pytest.approx(1.0, abs=1e-6)
    assert "gpu_device_gib" not in errors


@pytest.mark.parametrize(
    "changes",
    [
        {"train.gradient_clipping": "1"},
        {"model.activation_offload": "on"},
        {"model.tiled_mlp": "on"},
        {"offload.mode": "superoffload", "offload.states": "bf16-moments"},
        {"offload.mode": "superoffload", "offload.parameters": "cpu"},
        {"model.kernels": "plain"},
    ],
    ids=str,
)
def test_probes_whose_steps_differ_are_kept_side_by_side(changes: dict[str, str]) -> None:
    """A second probe of the same settings replaces the first."""
    plain = with_values(SPEC, {"train.gradient_clipping": "0"})
    same = {key: value for key, value in changes.items() if key == "offload.mode"}
    made = []
    for other in (same, changes, changes):
        plan, predicted = probing.predicted_of(with_values(plain, other), H200, Workload())
        made.append(probe_with(Workload(), predicted, predicted, plan))
        store(H200, probe=made[-1])
    known = calibration_of(H200)
    assert known is not None
    assert [probe.settings for probe in known.probes] == [made[0].settings, made[1].settings]
    assert made[0].settings != made[1].settings == made[2].settings


def test_probe_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--probe", "--machine", str(tmp_path / "node.json")]) == 2
    assert "--machine" in capsys.readouterr().err


@pytest.mark.slow
def test_a_probe_runs_the_whole_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "data.held_out=400"  # than the embedded rows
    assert main(["plan", "tiny", "--probe", "--gpus", "1", "--json", "--set", more]) == 0
    answer = valid("plan", capsys.readouterr().out)
    actual = answer["probe"]["actual"]
    parts = actual["forward_s"] + actual["backward_s"] + actual["exposed_optimizer_s"]
    assert 0 < parts < 1.05 * actual["step_s"]
    assert actual["host_bytes"] > 100e6
    assert 1 < answer["probe"]["workload"]["attended_tokens"] <= 256
    assert Path(answer["path"]).is_file()
    assert not list((tmp_path / "so-tui" / "probes").glob("probe*"))


@pytest.mark.parametrize(
    ("kept", "held_back"),
    [((1, 2, 3, 4, 5, 6), 0), ((0,) * 6, 4), ((1, 2, 3, 3, 3, 3), 3)],
    ids=["within", "above", "mixed"],
)
def test_steps_above_the_limit_are_predicted_apart(kept: tuple[int, ...], held_back: int) -> None:
    """The engine counts the steps that it kept; after four that it could not, it stops trying."""
    clipped = {"train.gradient_clipping": "1", "offload.speculation": "on"}
    counted = {"benchmark.warmup_steps": "2", "benchmark.measured_steps": "4"}
    plan = make_plan(with_values(SPEC, ON_HOST | clipped | counted), H200)
    assert plan.host_optional_bytes
    measured = probing.measured_of(six_steps(kept), plan)
    assert measured.held_back_steps == held_back
    probe = probing.probe_of(measured, plan, H200)
    _, early = probing.predicted_of(plan.spec, H200, probe.workload)
    waits = with_values(plan.spec, {"offload.speculation": "off"})
    _, waiting = probing.predicted_of(waits, H200, probe.workload)
    assert waiting.exposed_optimizer_s != early.exposed_optimizer_s
    expected = waiting if held_back else early
    assert probe.predicted.step_s == expected.step_s
    assert probe.predicted.exposed_optimizer_s == expected.exposed_optimizer_s
    assert probe.predicted.host_bytes == early.host_bytes


def test_fetching_probe_records_prediction_without() -> None:
    changes = ON_HOST | {"data.sequence_length": "1024", "train.micro_batch": "1"}
    plain, fetching = (
        make_plan(with_values(SPEC, changes | {"offload.parameters": where}), H200)
        for where in ("none", "cpu")
    )
    run = six_steps()
    assert probing.probe_of(probing.measured_of(run, plain), plain, H200).computing is None
    probe = probing.probe_of(probing.measured_of(run, fetching), fetching, H200)
    _, expected = probing.predicted_of(plain.spec, H200, probe.workload)
    assert probe.computing is not None
    assert probe.host_weights
    assert probe.computing.forward_s == expected.forward_s < probe.predicted.forward_s
    assert probe.computing.backward_s == expected.backward_s
